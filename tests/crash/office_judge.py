"""After a life: whether the books on disk hold everything that was answered, and nothing twice."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any, Final

from sublet.office.journal.files import JOURNAL_NAME
from sublet.office.journal.history import AuditHistory
from sublet.office.journal.journal import entry_of, verify_file
from sublet.office.journal.reader import JournalReader
from sublet.office.ledger.bills import reconcile
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.fold import apply
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.office.ledger.state import State
from sublet.values import NS_PER_S
from tests.crash.office_load import LOCAL, OVER, Told, ToldLease
from tests.crash.office_process import PATIENCE_S, OfficeProcess

TICK_S: Final = 2e-6
"""Instants travel as seconds, rounded to the microsecond."""


def folded(path: Path) -> tuple[State, int]:
    """The state that a journal says, and the number of its last entry."""
    reader = JournalReader(path)
    try:
        tip = reader.check()
        _, snapshot = reader.snapshot()
        state = State.fresh(Policy()) if snapshot is None else State.restore(snapshot)
        for row in reader.tail():
            entry = entry_of(row)
            if entry is not None:
                apply(state, entry.event, Now(entry.ns, entry.wall_ns))
        return state, tip.seq
    finally:
        reader.close()


def judge_disk(office: OfficeProcess, told: Told) -> None:
    """The office is dead. What it left is looked at in a copy, so that the next one finds it as it was."""
    if not (office.home / JOURNAL_NAME).exists():
        assert not told.answers, "answers were given, and there is no journal"
        return
    copy = office.place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for end in ("", "-wal"):
        source = office.home / (JOURNAL_NAME + end)
        if source.exists():
            shutil.copyfile(source, copy / source.name)
    path = copy / JOURNAL_NAME
    state, _ = folded(path)
    check_books(state)
    verdict = verify_file(path, office.anchors)
    assert verdict.ok, verdict.problem
    reader = JournalReader(path)
    try:
        records = list(reader.records())
    finally:
        reader.close()
    history = AuditHistory().read(records)
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    account = reconcile(history.usages(now_ns), history.devices(now_ns))
    assert account.ok, f"the bill does not reconcile: {account}"
    judge_past([(record.kind, json.loads(record.body)) for record in records], told)
    for lease in told.leases.values():
        record = state.leases.get(lease.id)  # type: ignore[call-overload]
        assert record is not None, f"{lease} is not in the books"
        judge_lease(record, lease)
    for tenant in told.tokens.keys() - {LOCAL}:  # nobody was told of the office's own
        assert tenant in state.tenants, f"tenant {tenant} is not in the books"
    for request, (tenant, lease_id) in told.requests.items():
        assert state.requests[tenant, request] == lease_id, request  # type: ignore[index]


def judge_past(facts: list[tuple[str, Any]], told: Told) -> None:
    """Over all lives: no epoch twice, each later one higher, no request with two effects."""
    last = (0, 0)
    given: dict[tuple[int, int], str] = {}
    requests: set[tuple[str, str]] = set()
    ends: set[str] = set()
    for kind, fact in facts:
        if kind in ("granted", "attached"):
            epoch = (fact["epoch"][0], fact["epoch"][1])
            assert epoch > last, f"epoch {epoch} was given after {last}"
            given[epoch] = fact["lease"]
            last = epoch
        elif kind == "queued":
            request = (fact["lease"]["tenant"], fact["lease"]["request_id"])
            assert request not in requests, f"{request} was taken in twice"
            requests.add(request)
        elif kind == "ending":
            assert fact["lease"] not in ends, f"{fact['lease']} ended twice"
            ends.add(fact["lease"])
    for epoch, lease in told.epochs.items():
        assert given.get(epoch) == lease, f"{lease} was answered epoch {epoch}; on disk that is {given.get(epoch)}"


def judge_lease(record: LeaseRecord, told: ToldLease) -> None:
    """What was answered is there; what was asked and not answered may be."""
    status = record.status.value
    here = f"{told}; on disk {status} {record.epoch} {record.deadline_ns} {record.end}"
    assert record.tenant == told.tenant, here
    if told.status == OVER:
        assert status in ("ending", "ended"), here
        assert record.end is not None, here
        assert record.end.reason.value == told.end, here
        return
    if told.status != "active":  # its claim may be late, its line may have moved
        assert told.status in ("queued", "granted"), here
        assert status in ("queued", "granted") or record.end is not None or "claim" in told.perhaps, here
        return
    if status in ("ending", "ended"):
        assert told.perhaps & {"release", "revoke"}, here
        return
    assert status == "active", here
    assert record.epoch is not None, here
    assert record.deadline_ns is not None, here
    assert told.epoch is not None, here
    assert told.deadline is not None, here
    assert record.epoch >= told.epoch if "attach" in told.perhaps else record.epoch == told.epoch, here
    moved_s = record.deadline_ns / NS_PER_S - told.deadline
    assert moved_s > -TICK_S if "renew" in told.perhaps else abs(moved_s) < TICK_S, f"moved by {moved_s}: {here}"


def judge_office(office: OfficeProcess) -> None:
    """What an office shows that nobody asks anything is the fold of what is on its disk."""
    until = time.monotonic() + PATIENCE_S
    while True:
        before, seq = folded(office.home / JOURNAL_NAME)
        shown = {view["id"]: view for view in office.ask("GET", "/v1/leases?all=1").doc}
        tenants = {view["id"] for view in office.ask("GET", "/v1/tenants").doc}
        reader = JournalReader(office.home / JOURNAL_NAME)
        still = reader.tip().seq == seq
        reader.close()
        if still:
            break
        assert time.monotonic() < until, "the office does not come to rest"
        time.sleep(0.005)
    check_books(before)
    assert tenants == set(before.tenants)
    assert shown.keys() == set(before.leases)
    for lease in before.leases.values():
        view = shown[lease.id]
        assert view["status"] == lease.status.value, (view, lease)
        assert view["epoch"] == (None if lease.epoch is None else list(lease.epoch)), (view, lease)
        assert (view["end"] and view["end"]["reason"]) == (lease.end and lease.end.reason.value), (view, lease)
        if lease.deadline_ns is not None and view["deadline"] is not None:
            assert abs(view["deadline"] - lease.deadline_ns / NS_PER_S) < TICK_S, (view, lease)
