"""What a supervisor lets through: connections to guests, and hardware on which something may still run.

The guest is asked nothing: once a connection was handed to it, nothing but the supervisor knows whose it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.errors import (
    Disconnected,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    QuotaExceeded,
    StaleEpoch,
    Unauthorized,
)
from sublet.lease_end import EndReason
from sublet.node.supervisor.core import REPORTS_MAX
from sublet.node.supervisor.holder_link import OPERATIONS
from sublet.node.supervisor.service import SOCKET_NAME
from sublet.values import (
    Epoch,
    Exclusivity,
    GuestId,
    Kind,
    LeaseId,
    ResourceId,
    TenantId,
)
from sublet.wire.codec import dumps
from sublet.wire.conversation import Conversation
from sublet.wire.guests import (
    Attach,
    Attached,
    Configure,
    Connect,
    Connected,
    Detach,
    Guests,
    GuestSpec,
    ListGuests,
    Revoke,
    Service,
    Start,
    Started,
    StdioKind,
)
from sublet.wire.link_events import CallRefused, Replied
from sublet.wire.orders import End, EndedHere, Extend, Grant, Held, Part, TornDown
from tests.integration.supervisor_stage import (
    PATH,
    TENANT,
    Freezer,
    HolderLine,
    SupervisorStage,
    needs_freezer,
    supervisor_at,
)
from tests.traces import PATIENCE_S, now_ns, until

ROOT: Final = Path(__file__).parents[2]
ALL: Final = ("device", "kernel", "logs", "run", "write")
BEN: Final = TenantId("ben")
S: Final = 1_000_000_000
SETRESUID: Final = {"x86_64": 117}.get(platform.machine(), 147)
"""By its number: the C library would change all threads."""
EPOCH: Final = Epoch(1, 5)
SERVED: Final = (Service.WORK, Service.JUPYTER)
"""What the guest of these tests serves."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisorStage]:
    with supervisor_at(tmp_path_factory.mktemp("stage"), gpus=4) as found:
        yield found


_numbers: Final = itertools.count(1)


@pytest.fixture
def lease() -> LeaseId:
    """One for each test."""
    return LeaseId(f"lease-{next(_numbers)}")


def part(n: int) -> Part:
    return Part(
        resource=ResourceId(f"bench/gpu{n}"),
        kind=Kind.GPU,
        amount=1 << 30,
        millis=1000,
        exclusivity=Exclusivity.SESSION,
    )


CORE: Final = Part(resource=ResourceId("bench/cpu"), kind=Kind.CPU, amount=1)


def grant(
    stage: SupervisorStage,
    lease: LeaseId,
    epoch: Epoch,
    *,
    tenant: TenantId = TENANT,
    on: Part = CORE,
    ttl_s: float = 300,
) -> None:
    ttl_ns = round(ttl_s * S)
    deadline_ns = now_ns() + ttl_ns
    order = Grant(
        lease=lease, epoch=epoch, number=epoch.n, tenant=tenant, parts=(on,), deadline_ns=deadline_ns, ttl_ns=ttl_ns
    )
    stage.office_line.order(order)


def end(stage: SupervisorStage, lease: LeaseId, epoch: Epoch, *, grace_s: float = 0, on: Part = CORE) -> None:
    reason, grace_ns = EndReason.RELEASED, round(grace_s * S)
    order = End(lease=lease, epoch=epoch, number=99, parts=(on,), reason=reason, grace_ns=grace_ns)
    stage.office_line.order(order)


def serving(stage: SupervisorStage, lease: LeaseId, epoch: Epoch, tenant: TenantId = TENANT) -> GuestId:
    """A guest that does not leave when it is told to."""
    spec = GuestSpec(
        entry="tests.integration.line_guest:deaf",
        cwd=str(ROOT),
        env={"PATH": PATH, "PYTHONPATH": str(ROOT)},
        stdio=StdioKind.NULL,
        serves=True,
    )
    with contextlib.closing(stage.office_line.admit(lease, epoch, tenant=tenant)) as holder:
        started = holder.ask(Start(spec=spec))
    assert isinstance(started, Started), started
    return started.guest


def connected(
    stage: SupervisorStage,
    guest: GuestId,
    lease: LeaseId,
    epoch: Epoch,
    service: Service = Service.WORK,
    tenant: TenantId = TENANT,
) -> HolderLine:
    line = stage.office_line.admit(lease, epoch, tenant=tenant, operations=ALL)
    try:
        assert isinstance(line.ask(Connect(guest=guest, service=service)), Connected)
    except BaseException:
        line.close()
        raise
    line.talk.begin_anew()
    return line


def answers(line: HolderLine) -> bool:
    return line.talk.call(b"hello").body.endswith(b"hello")


def is_cut(line: HolderLine) -> bool:
    return line.is_over or (line.talk.wait(0.05) is not None and line.is_over)


@pytest.mark.parametrize("service", OPERATIONS)
def test_only_the_live_epoch_is_connected_to_a_guest(stage: SupervisorStage, lease: LeaseId, service: Service) -> None:
    """A token of an older epoch is still valid when it is shown: it was signed a moment before the attach. And nobody
    is connected to what is on its way out. For no service is that left to the guest."""
    old, new = Epoch(1, 5), Epoch(1, 6)
    grant(stage, lease, old)
    guest = serving(stage, lease, old)
    connected(stage, guest, lease, old, service).close()
    grant(stage, lease, new)
    with pytest.raises(StaleEpoch):
        connected(stage, guest, lease, old, service)
    with contextlib.closing(connected(stage, guest, lease, new, service)) as line:
        assert service not in SERVED or answers(line)
    end(stage, lease, new, grace_s=20)
    with pytest.raises(LeaseNotActive, match="given back"):
        connected(stage, guest, lease, new, service)
    assert stage.marked(lease), "it has its grace, and still runs"
    end(stage, lease, new)


def test_an_attach_cuts_the_connections_that_were_handed_to_guests_of_the_lease(
    stage: SupervisorStage, lease: LeaseId
) -> None:
    """The holder before is stopped, or on another machine: its connections are cut here, not there. Those of another
    lease stay, and so do the guests; a renewal or a repeated grant cuts nothing."""
    old, new, other = Epoch(1, 5), Epoch(1, 6), LeaseId(f"{lease}-other")
    for name in (lease, other):
        grant(stage, name, old)
    guests = {name: serving(stage, name, old) for name in (lease, other)}
    lines = [connected(stage, guests[lease], lease, old, service) for service in SERVED]
    beside = connected(stage, guests[other], other, old)
    grant(stage, lease, old)
    stage.office_line.order(Extend(lease=lease, epoch=old, number=7, deadline_ns=now_ns() + 300 * S, ttl_ns=300 * S))
    assert all(answers(line) for line in (*lines, beside))
    grant(stage, lease, new)
    for line in lines:
        until("a cut", lambda line=line: is_cut(line))  # type: ignore[misc]
    assert answers(beside)
    with contextlib.closing(connected(stage, guests[lease], lease, new)) as line:
        assert answers(line)
    for line in (*lines, beside):
        line.close()
    for name in (lease, other):
        end(stage, name, new)


def test_connections_of_a_tenant_whose_rights_changed_are_cut(stage: SupervisorStage, lease: LeaseId) -> None:
    """Those to guests as well as those to the supervisor; nobody else's."""
    epoch, theirs = Epoch(1, 5), LeaseId(f"{lease}-ben")
    grant(stage, lease, epoch)
    grant(stage, theirs, epoch, tenant=BEN)
    mine = connected(stage, serving(stage, lease, epoch), lease, epoch)
    his = connected(stage, serving(stage, theirs, epoch, BEN), theirs, epoch, tenant=BEN)
    asking = stage.office_line.admit(theirs, epoch, tenant=BEN)
    stage.office_line.ask(Revoke(tenant=BEN))
    for line in (his, asking):
        until("a cut", lambda line=line: is_cut(line))  # type: ignore[misc]
    assert answers(mine)
    for line in (mine, his, asking):
        line.close()
    for name in (lease, theirs):
        end(stage, name, epoch)


def test_a_revocation_that_is_repeated_cuts_none_that_came_by_newer_rights(
    stage: SupervisorStage, lease: LeaseId
) -> None:
    """The agent repeats it until it is answered, and the next office once more: who has the new token by then stays.
    Whose rights count is the tenant's, or those of the operator who acts for it."""
    epoch = Epoch(1, 5)
    grant(stage, lease, epoch)
    guest = serving(stage, lease, epoch)
    older, newer, acted = (
        [stage.office_line.admit(lease, epoch, operations=ALL, **rights) for _ in range(2)]
        for rights in ({"generation": 1}, {"generation": 2}, {"generation": 2, "actor": BEN, "actor_generation": 4})
    )
    for line in (older[0], newer[0], acted[0]):
        assert isinstance(line.ask(Connect(guest=guest, service=Service.WORK)), Connected)
        line.talk.begin_anew()
    stage.office_line.ask(Revoke(tenant=TENANT, generation=2))
    for line in older:
        until("a cut", lambda line=line: is_cut(line))  # type: ignore[misc]
    assert answers(newer[0])
    assert answers(acted[0])
    assert isinstance(newer[1].ask(ListGuests()), Guests)
    stage.office_line.ask(Revoke(tenant=BEN, generation=5))
    for line in acted:
        until("a cut", lambda line=line: is_cut(line))  # type: ignore[misc]
    assert answers(newer[0])
    assert isinstance(newer[1].ask(ListGuests()), Guests)
    for line in (*older, *newer, *acted):
        line.close()
    end(stage, lease, epoch)


def test_who_may_only_read_the_output_neither_writes_nor_holds_up_the_guest(
    stage: SupervisorStage, lease: LeaseId
) -> None:
    """A lossless follower that does not read makes the guest wait."""
    epoch = Epoch(1, 5)
    grant(stage, lease, epoch)
    guest = stage.holder(lease, epoch).start("sleep", "1000").guest
    with contextlib.closing(stage.office_line.admit(lease, epoch, operations=("logs",))) as line:
        for asked in (Attach(guest=guest, lossless=True), Attach(guest=guest, stdin=True)):
            with pytest.raises(Unauthorized, match="may not run"):
                line.ask(asked)
        assert isinstance(line.ask(Attach(guest=guest)), Attached)
    end(stage, lease, epoch)


def test_a_guest_whose_starter_has_gone_waits_for_no_reader(stage: SupervisorStage, lease: LeaseId) -> None:
    """It was to be read from the first byte on, and the program that would have read it is dead."""
    epoch = Epoch(1, 5)
    grant(stage, lease, epoch)
    argv = ("head", "-c", "8388608", "/dev/zero")
    with contextlib.closing(stage.office_line.admit(lease, epoch)) as line:
        started = line.ask(Start(spec=GuestSpec(argv=argv, cwd="/", env={"PATH": PATH}), awaits=True))
        assert isinstance(started, Started)
        assert not _exited(stage, started.guest), "more than a pipe holds, and nobody reads"
    until("its end", lambda: _exited(stage, started.guest))
    end(stage, lease, epoch)


def _exited(stage: SupervisorStage, guest: GuestId) -> bool:
    listed = stage.office_line.ask(ListGuests(guest=guest, ended=True))
    assert isinstance(listed, Guests)
    return listed.guests[0].exit_code >= 0


def test_no_connection_is_made_after_the_deadline_however_late_that_is_noticed(tmp_path: Path, lease: LeaseId) -> None:
    """A supervisor that was stopped, or a machine that slept, finds the request and the deadline in the same turn."""
    epoch = Epoch(1, 5)
    with supervisor_at(tmp_path) as stage:
        grant(stage, lease, epoch)
        guest = serving(stage, lease, epoch)
        connected(stage, guest, lease, epoch).close()
        line = stage.office_line.admit(lease, epoch, operations=ALL)
        over_ns = now_ns() + S // 2
        order = Extend(lease=lease, epoch=epoch, number=7, deadline_ns=over_ns, ttl_ns=300 * S)
        stage.office_line.order(order)
        os.kill(stage.pid, signal.SIGSTOP)
        line.talk.link.call(dumps(Connect(guest=guest, service=Service.WORK)))
        line.talk.flush(PATIENCE_S)
        until("its deadline", lambda: now_ns() > over_ns)
        os.kill(stage.pid, signal.SIGCONT)
        answered: list[CallRefused | Replied] = []

        def is_answered() -> bool:
            answered.extend(one for one in line.talk.wait(0.05) if isinstance(one, CallRefused | Replied))
            return bool(answered)

        until("an answer", is_answered)
        assert isinstance(answered[0], CallRefused), answered
        assert isinstance(answered[0].error, LeaseEnded)
        line.close()


def test_a_token_of_a_lease_shows_what_is_under_that_lease(stage: SupervisorStage, lease: LeaseId) -> None:
    """Not what else the tenant has: the token may have been given to a program that is to know no more."""
    epoch, other = Epoch(1, 5), LeaseId(f"{lease}-other")
    for name in (lease, other):
        grant(stage, name, epoch)
    guests = {name: serving(stage, name, epoch) for name in (lease, other)}
    for front, seen in (((lease, epoch), {guests[lease]}), ((None, None), set(guests.values()))):
        with contextlib.closing(stage.office_line.admit(*front)) as line:
            listed = line.ask(ListGuests())
        assert isinstance(listed, Guests)
        assert {one.id for one in listed.guests} & set(guests.values()) == seen
    for name in (lease, other):
        end(stage, name, epoch)


def test_a_connection_that_follows_a_guest_is_not_handed_to_one(stage: SupervisorStage, lease: LeaseId) -> None:
    """What the supervisor still sends on it would reach the guest's conversation in the middle."""
    epoch = Epoch(1, 5)
    grant(stage, lease, epoch)
    guest = serving(stage, lease, epoch)
    with contextlib.closing(stage.office_line.admit(lease, epoch, operations=ALL)) as line:
        assert isinstance(line.ask(Attach(guest=guest)), Attached)
        with pytest.raises(InvalidRequest, match="still follows a guest"):
            line.ask(Connect(guest=guest, service=Service.WORK))
        line.ask(Detach(guest=guest))
        assert isinstance(line.ask(Connect(guest=guest, service=Service.WORK)), Connected)
    end(stage, lease, epoch)


def test_who_comes_while_the_hardware_is_cleared_is_told_to_come_again(stage: SupervisorStage, lease: LeaseId) -> None:
    """The office has granted it, so it is not over: whoever had the hardware before has not left it yet."""
    before, epoch = LeaseId(f"{lease}-before"), Epoch(1, 6)
    grant(stage, before, Epoch(1, 5), on=part(3))
    guest = serving(stage, before, Epoch(1, 5))
    connected(stage, guest, before, Epoch(1, 5)).close()  # it serves, so by now it ignores what it is told
    end(stage, before, Epoch(1, 5), grace_s=20, on=part(3))
    grant(stage, lease, epoch, on=part(3))
    with contextlib.closing(stage.office_line.admit(lease, epoch)) as line:
        with pytest.raises(Disconnected, match="still being cleared away") as refused:
            line.start("true")
        assert refused.value.transient
        end(stage, before, Epoch(1, 5), on=part(3))
        until("a grant", lambda: _held(stage, lease))
        line.start("true")
    end(stage, lease, epoch, on=part(3))


def test_an_office_that_comes_back_hears_what_ended_while_nobody_listened(
    stage: SupervisorStage, lease: LeaseId
) -> None:
    grant(stage, lease, Epoch(1, 5), ttl_s=0.3)
    stage.hang_up()
    until("its deadline", lambda: not _lives(stage, lease))
    stage.connect()
    until("word of its end", lambda: _ended(stage, lease))


def test_more_reports_than_one_message_takes_are_all_heard(stage: SupervisorStage) -> None:
    """Thousands of leases may be granted, or end, in one turn."""
    count, ttl_ns = REPORTS_MAX + 44, 300 * S
    deadline_ns = now_ns() + ttl_ns
    leases = [LeaseId(f"lease-of-many-{n}") for n in range(count)]
    grants = [
        Grant(lease=lease, epoch=EPOCH, number=1, tenant=TENANT, parts=(CORE,), deadline_ns=deadline_ns, ttl_ns=ttl_ns)
        for lease in leases
    ]
    stage.office_line.send(*grants)
    until("every lease held", lambda: _spoken_of(stage, Held) >= set(leases))
    ends = [
        End(lease=lease, epoch=EPOCH, number=2, parts=(CORE,), reason=EndReason.RELEASED, grace_ns=0)
        for lease in leases
    ]
    stage.office_line.send(*ends)
    until("every end", lambda: _spoken_of(stage, TornDown) >= set(leases))


def _spoken_of(stage: SupervisorStage, kind: type[Held | TornDown]) -> set[LeaseId]:
    stage.office_line.pump()
    return {report.lease for report in stage.office_line.reports if isinstance(report, kind)}


def _lives(stage: SupervisorStage, lease: LeaseId) -> bool:
    office = stage.connect()
    lives = lease in office.configured.live
    stage.hang_up()
    return lives


def _ended(stage: SupervisorStage, lease: LeaseId) -> bool:
    stage.office_line.pump()
    return any(isinstance(report, EndedHere) and report.lease == lease for report in stage.office_line.reports)


def test_an_office_of_another_home_is_turned_away(stage: SupervisorStage) -> None:
    """It would be given the leases of this one; the office that is there stays."""
    talk = Conversation.connect(str(stage.runtime / SOCKET_NAME), timeout_s=PATIENCE_S)
    with contextlib.closing(talk), pytest.raises(InvalidRequest, match="not of another-office"):
        talk.call(dumps(Configure(office="another-office", inventory=stage.inventory)), timeout_s=PATIENCE_S)
    stage.office_line.ask(ListGuests())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_is_not_taken_for_an_office(stage: SupervisorStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the folder lets everybody in. It is hung up on without a word."""
    said: list[bytes] = []
    monkeypatch.chdir(stage.runtime)  # the folders above it need not be open to anybody

    def connects() -> None:
        changed = ctypes.CDLL(None, use_errno=True).syscall(SETRESUID, -1, 65534, -1)  # of this thread alone
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(SOCKET_NAME)
            said.append(b"changed" if changed == 0 else b"not changed")
            said.append(sock.recv(1))

    modes = [(one, one.stat().st_mode) for one in (stage.runtime, stage.runtime / SOCKET_NAME)]
    try:
        for one, mode in modes:
            one.chmod(mode | 0o777)
        thread = threading.Thread(target=connects)
        thread.start()
        thread.join()
    finally:
        for one, mode in modes:
            one.chmod(mode)
    assert said == [b"changed", b""]


def test_connections_of_a_tenant_count_wherever_they_lead(tmp_path: Path) -> None:
    """Those that were handed to guests take descriptors of the supervisor as the others do."""
    few = "from sublet.node.supervisor import service; service.HOLDERS_PER_TENANT_MAX = 3"
    with supervisor_at(tmp_path, faults=few) as stage, contextlib.ExitStack() as lines:
        lease, epoch = LeaseId("lease-many"), Epoch(1, 5)
        grant(stage, lease, epoch)
        guest = serving(stage, lease, epoch)
        for _ in range(2):
            lines.callback(connected(stage, guest, lease, epoch).close)
        lines.callback(stage.office_line.admit(lease, epoch).close)
        with pytest.raises(QuotaExceeded, match="3 connections"):
            stage.office_line.admit(lease, epoch)
        stage.office_line.admit(lease, epoch, tenant=BEN).close()


UNNOTED: Final = (
    "from sublet.node.processes.guest_records import GuestRecords; GuestRecords.write = lambda self, note: None"
)
"""It is killed after the fork and before the note."""


@needs_freezer
def test_a_guest_without_a_note_stands_in_the_way_of_every_grant(tmp_path: Path) -> None:
    """Nobody knows which hardware it has: while it cannot be ended nothing is free, and once it is gone all is."""
    left, fresh = LeaseId("lease-left"), LeaseId("lease-fresh")
    with supervisor_at(tmp_path, gpus=2, faults=UNNOTED) as stage:
        grant(stage, left, Epoch(1, 5), on=part(0))
        stage.holder(left, Epoch(1, 5)).start("sleep", "1000")
        freezer = Freezer.make(f"elsewhere-{stage.office}")
        assert freezer is not None
        with contextlib.closing(freezer):
            freezer.freeze([one.pid for one in stage.marked()])
            stage.kill()
            stage.faults = ""
            stage.start()
            office = stage.connect()
            grant(stage, fresh, Epoch(1, 6), on=part(1))
            office.wait(0.3)
            assert not _held(stage, fresh), "on which device it is nobody knows"
            freezer.thaw()
            until("a grant", lambda: _held(stage, fresh))
        assert not stage.marked(left)


def _held(stage: SupervisorStage, lease: LeaseId) -> bool:
    stage.office_line.pump()
    return any(isinstance(report, Held) and report.lease == lease for report in stage.office_line.reports)
