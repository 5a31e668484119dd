"""Stop a process for longer than a lease lives, then let it go on: as a laptop's lid does, or a swapping machine.

Whoever slept must find that time went on without it: no lease comes back, no late word is taken, and the holder had
stopped before the office could have given its hardware to somebody else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.node.processes.procs import Procs
from sublet.office.journal.files import JOURNAL_NAME
from sublet.values import NS_PER_S, LeaseId
from tests.crash.office_judge import folded
from tests.crash.office_process import Call, Json, OfficeProcess, office_at
from tests.traces import until

pytestmark = [pytest.mark.crash, pytest.mark.slow]  # a lease of eight seconds has to run out, twice

GIB = 1 << 30
TTL_S = 8.0
"""Of its renewals two seconds are left to go wrong in, which is as long as a busy machine may keep a thread waiting."""
PATIENCE_S = 120.0


@pytest.fixture
def office(tmp_path: Path) -> Iterator[OfficeProcess]:
    with office_at(tmp_path) as running:
        assert running.start()
        yield running


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_stopped(pid: int) -> bool:
    stat = Procs().stat(pid)
    return stat is not None and stat.is_stopped


def status_of(office: OfficeProcess, lease: str) -> str:
    return str(office.ask("GET", f"/v1/leases/{lease}").doc["lease"]["status"])


def acquire(office: OfficeProcess, name: str, *, ttl: float = TTL_S, wait: float = 0) -> Json:
    body = {"request_id": name, "wants": [{"kind": "gpu", "amount": 4 * GIB}], "ttl": ttl, "wait": wait}
    answer = office.ask("POST", "/v1/leases", body | {"renew": "always"})
    assert answer.status in (201, 202), answer
    lease: Json = answer.doc["lease"]
    return lease


def test_an_office_that_slept_past_a_deadline_brings_nothing_back(office: OfficeProcess) -> None:
    """The holder sees JEOPARDY and then its own end, before the office's deadline. A renewal that arrived while the
    office slept is refused like one that comes after; both leases have expired; what comes next has a higher epoch."""
    with sublet.connect(home=office.home, start=False) as fabric:
        lease = fabric.gpu(min_vram="1GiB", ttl=TTL_S, renew="always")
        assert lease.status == "active"
        silent = acquire(office, "silent")
        renewal = {"epoch": silent["epoch"]}
        waiting = office.line()  # which was used: of a new one the office waits for a request for five seconds only
        os.kill(office.pid, signal.SIGSTOP)
        try:
            until("a stopped office", lambda: is_stopped(office.pid))
            assert now_s() < silent["deadline"]
            waiting.send(Call(method="POST", path=f"/v1/leases/{silent['id']}/renew", body=renewal))
            seen: list[str] = []
            last_held_s, end_s = 0.0, now_s() + PATIENCE_S
            while lease.end is None or now_s() < silent["deadline"] + 0.1:
                looked_s, status = now_s(), str(lease.status)
                if not seen or seen[-1] != status:
                    seen.append(status)
                if status not in ("ending", "ended"):
                    last_held_s = looked_s
                assert now_s() < end_s, seen
                time.sleep(0.005)
        finally:
            os.kill(office.pid, signal.SIGCONT)

        assert seen[:2] == ["active", "jeopardy"], seen
        assert lease.end is not None
        assert lease.end.reason == "expired"
        late = waiting.answer()
        assert late is not None
        again = office.ask("POST", f"/v1/leases/{silent['id']}/renew", renewal)
        for answer in (late, again):
            assert answer.status == 410, answer
            assert answer.doc["error"]["kind"] == "LeaseExpired"
            assert answer.doc["error"]["end"]["reason"] == "expired"
        with pytest.raises(sublet.LeaseEnded):
            lease.renew()

        state, _ = folded(office.home / JOURNAL_NAME)
        for lease_id in (lease.id, LeaseId(silent["id"])):
            record = state.leases[lease_id]
            assert record.end is not None, record
            assert record.end.reason == "expired"
        promised_ns = state.leases[lease.id].deadline_ns
        assert promised_ns is not None
        assert last_held_s < promised_ns / NS_PER_S, "the holder went on after the office's deadline"
        until("what it had is looked at", lambda: status_of(office, silent["id"]) == "ended", PATIENCE_S)
        fresh = acquire(office, "fresh")
        assert all(tuple(fresh["epoch"]) > tuple(epoch) for epoch in (lease.epoch, silent["epoch"]))


HOLDER = """
    import sys, time, sublet
    with sublet.connect(start=False) as fabric:
        lease = fabric.gpu(min_vram="4GiB", count=2, ttl=8.0, renew="always")
        with lease.activity():  # an idle holder would yield before its deadline
            print(lease.id, *lease.epoch, flush=True)
            sys.stdin.readline()
            print(lease.status, flush=True)
        try:
            lease.renew()
        except sublet.LeaseEnded as error:
            print(type(error).__name__, lease.end.reason, flush=True)
"""


def test_a_holder_that_slept_past_its_deadline_is_told_so_and_the_next_has_a_higher_epoch(
    office: OfficeProcess,
) -> None:
    """Its late renewal is refused, under the old epoch nothing can be done, and the next in line is not disturbed."""
    env = office.env(PYTHONPATH=os.pathsep.join(sys.path))
    holder = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(HOLDER)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        lease_id, *numbers = holder.stdout.readline().split()
        epoch = [int(number) for number in numbers]
        waits = acquire(office, "next", ttl=600, wait=600)
        assert waits["status"] == "queued"
        assert office.ask("GET", f"/v1/leases/{waits['id']}").doc["answer"] == "place"
        holder.send_signal(signal.SIGSTOP)
        answer = office.ask("GET", f"/v1/leases/{waits['id']}?wait=60&after=queued")
        assert answer.doc["lease"]["status"] == "granted", answer
        mine = office.ask("POST", f"/v1/leases/{waits['id']}/claim", {"epoch": answer.doc["lease"]["epoch"]})
        assert mine.doc["lease"]["status"] == "active", mine
        assert mine.doc["lease"]["epoch"] > epoch

        for word, body in (("renew", {"epoch": epoch}), ("claim", {"epoch": epoch}), ("claim", {})):
            refused = office.ask("POST", f"/v1/leases/{lease_id}/{word}", body)
            assert refused.status == 410, (word, refused)
            assert refused.doc["error"]["end"]["reason"] == "expired"
        holder.send_signal(signal.SIGCONT)
        said, _ = holder.communicate("go on\n", timeout=PATIENCE_S)
        status, *told = said.split()
        assert status in ("ending", "ended"), "by its own clock, or by the office's word, whichever it meets first"
        assert told == ["LeaseExpired", "expired"], said
        view = office.ask("GET", f"/v1/leases/{waits['id']}").doc["lease"]
        assert (view["status"], view["epoch"]) == ("active", mine.doc["lease"]["epoch"])
    finally:
        holder.kill()
        holder.communicate()
