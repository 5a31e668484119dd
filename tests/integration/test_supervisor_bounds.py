"""What one client, one moment or one large thing must not be able to do to everybody else under the same supervisor."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from sublet.clock import SystemClock
from sublet.errors import NotFound, SubletError, Unauthorized
from sublet.lease_end import EndReason
from sublet.node.agent.starting import package_folder
from sublet.node.output_budget import UNREAD_BYTES
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.guest_records import GuestRecords
from sublet.node.processes.procs import Procs
from sublet.node.supervisor.recovery import Predecessor
from sublet.node.supervisor.service import SOCKET_NAME
from sublet.values import Epoch, Exclusivity, Kind, LeaseId, ResourceId
from sublet.wire.guests import (
    GUESTS_PAGE,
    OUTPUT_HEAD,
    Admit,
    Attach,
    Attached,
    EndGuest,
    Front,
    Guests,
    GuestSpec,
    ListGuests,
    NotStarted,
    Profile,
    SignalGuest,
    Start,
)
from sublet.wire.link_events import Data
from sublet.wire.orders import End, EndedHere, Grant, Part, TornDown
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION
from tests.integration.supervisor_stage import PATH, TENANT, HolderLine, SupervisorStage, supervisor_at
from tests.traces import PATIENCE_S, now_ns, until

A, B = LeaseId("lease-a"), LeaseId("lease-b")
E5, E6 = Epoch(1, 5), Epoch(1, 6)
S = 1_000_000_000
MANY = 8_000
"""Leases whose ends do not fit into one message."""
FILES = 20_000
"""More than are removed at once."""
GUESTS_FIRST, GUESTS_ALL = 10, 60
COUNTS = "trap 'echo got INT' INT; trap 'echo got TERM' TERM; echo ready; while :; do sleep 0.02; done"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with supervisor_at(tmp_path) as found:
        yield found


def shared(lease: LeaseId, epoch: Epoch, *, deadline_ns: int = 0) -> Grant:
    """Something that very many can have at once."""
    at_ns = deadline_ns or now_ns() + 300 * S
    part = Part(resource=ResourceId("bench/cpu"), kind=Kind.CPU, amount=0, millis=0, exclusivity=Exclusivity.SHARED)
    return Grant(lease=lease, epoch=epoch, number=1, tenant=TENANT, parts=(part,), deadline_ns=at_ns, ttl_ns=300 * S)


HOUR_LATER = """
import os
from sublet.clock import SystemClock
now_ns = SystemClock.now_ns
SystemClock.now_ns = lambda clock: now_ns(clock) + os.path.exists({mark!r}) * 3600 * 10**9
"""
"""Its clock goes on by an hour once there is a file: how long it takes to give thousands of leases cannot be known."""


def test_thousands_of_leases_may_end_at_the_same_moment(tmp_path: Path) -> None:
    mark = tmp_path / "an hour later"
    with supervisor_at(tmp_path, faults=HOUR_LATER.format(mark=str(mark))) as stage:
        began_ns = now_ns()
        stage.office_line.order(shared(A, E5, deadline_ns=began_ns + 7200 * S))
        guest = stage.holder(A, E5).start("sleep", "1000")
        for start in range(0, MANY + MANY // 10, 250):  # the last of them go on
            orders = [
                shared(
                    LeaseId(f"l-{n:016x}"), Epoch(1, 10 + n), deadline_ns=began_ns + (3600 if n < MANY else 7200) * S
                )
                for n in range(start, min(start + 250, MANY + MANY // 10))
            ]
            stage.office_line.order(*orders)
        assert not any(isinstance(one, EndedHere) for one in stage.office_line.reports)
        mark.touch()

        def all_told() -> bool:
            stage.office_line.wait(0.05)
            return len({one.lease for one in stage.office_line.reports if isinstance(one, EndedHere)}) == MANY

        until("all ends were told", all_told, patience_s=180)
        assert stage.office_line.error is None, stage.log
        assert [one.pid for one in stage.marked(A)] == [guest.pid]


def test_a_token_reaches_its_own_lease_and_one_for_logs_changes_nothing(stage: SupervisorStage) -> None:
    stage.office_line.order(shared(A, E5), shared(B, E6))
    mine = stage.holder(A, E5).start("sh", "-c", "echo hello; exec sleep 1000").guest
    other = stage.holder(B, E6).start("sleep", "1000").guest
    reader = stage.office_line.admit(A, E5, operations=("logs",))
    assert isinstance(reader.ask(Attach(guest=mine)), Attached)
    for asked in (
        Attach(guest=mine, stdin=True),
        Attach(guest=mine, lossless=True),  # it would make the guest wait
        SignalGuest(guest=mine, number=15),
        EndGuest(guest=mine),
    ):
        with pytest.raises(Unauthorized):
            reader.ask(asked)
    listed = reader.ask(ListGuests())
    assert isinstance(listed, Guests)
    assert [one.id for one in listed.guests] == [mine]
    for line in (reader, stage.holder(A, E5)):
        with pytest.raises(NotFound):
            line.ask(Attach(guest=other))
    with pytest.raises(NotFound):
        stage.holder(A, E5).ask(EndGuest(guest=other))
    reader.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="the walls are built as root here")
def test_a_command_behind_walls_gets_a_signal_once(stage: SupervisorStage) -> None:
    """Two stand between it and the supervisor, and hand on what they get."""
    stage.office_line.order(shared(A, E5))
    mine, theirs = socket.socketpair()
    front = Front(tenant=TENANT, operator=False, profile=Profile.TENANT, lease=A, epoch=E5, operations=("run", "logs"))
    stage.office_line.ask(Admit(front=front, oldest=WIRE_OLDEST, newest=WIRE_VERSION), (theirs.detach(),))
    with contextlib.closing(HolderLine(mine)) as holder:
        guest = holder.start("sh", "-c", COUNTS).guest

        def said() -> bytes:
            folder = stage.state / "guests" / guest
            return b"".join(file.read_bytes() for file in folder.iterdir()) if folder.exists() else b""

        def came(count: int, name: bytes = b"INT") -> bool:
            return said().count(b"got " + name) >= count

        until("it has begun", lambda: b"ready" in said())
        for count in range(1, 11):
            holder.ask(SignalGuest(guest=guest, number=signal.SIGINT, tree=True))
            until("it got one", partial(came, count))
        holder.ask(EndGuest(guest=guest, grace_ns=300 * S))
        until("it got the other", partial(came, 1, b"TERM"))
        holder.ask(EndGuest(guest=guest, grace_ns=0))
        until("it is gone", lambda: not stage.marked(A))
        assert said().count(b"got INT") == 10
        assert said().count(b"got TERM") == 1


def test_a_folder_full_of_files_keeps_nobody_waiting(stage: SupervisorStage) -> None:
    """Its lease ends at once, and somebody else sees to it."""
    stage.office_line.order(shared(A, E5), shared(B, E6))
    other = stage.holder(B, E6)
    fill = f"import os; [os.close(os.open(os.environ['IN'] + str(n), os.O_CREAT)) for n in range({FILES})]"
    folder = stage.runtime / "leases" / f"{A}.{E5}"
    stage.holder(A, E5).start(sys.executable, "-I", "-S", "-c", fill, env={"IN": f"{folder}/tmp/"})
    until(
        "it is full",
        lambda: folder.exists() and len(os.listdir(folder / "tmp")) == FILES and not stage.marked(A),
        patience_s=180,
    )
    part = shared(A, E5).parts[0]
    stage.office_line.order(End(lease=A, epoch=E5, number=9, parts=(part,), reason=EndReason.RELEASED, grace_ns=0))
    until("it is off the hardware", lambda: _told(stage, TornDown))
    assert not folder.exists()
    until("nothing is left", lambda: not any(folder.parent.iterdir()), patience_s=180)
    assert isinstance(other.ask(ListGuests()), Guests)


def test_what_a_predecessor_had_put_aside_goes_beside_the_work(tmp_path: Path) -> None:
    leases = tmp_path / "run/leases"
    for name in ("~lease-x.1.4", "lease-y.1.5"):
        (leases / name / "tmp").mkdir(parents=True)
        for n in range(3000):
            (leases / name / f"tmp/{n}").touch()
    put: list[str] = []
    Predecessor(
        procs=Procs(),
        groups=Groups("none", ()),
        notes=GuestRecords(str(tmp_path / "run/notes")),
        leases=str(leases),
        clock=SystemClock(),
        put_away=put.append,
    )
    assert sorted(map(os.path.basename, put)) == ["lease-y.1.5", "~lease-x.1.4"]
    assert len(list(leases.iterdir())) == 2, "nobody has waited for it"
    with supervisor_at(tmp_path) as stage:
        stage.office_line.order(shared(A, E5))
        stage.holder(A, E5).start("true")
        today = {f"{A}.{E5}"}
        until("only what is of today", lambda: {one.name for one in leases.iterdir()} == today, patience_s=180)


def test_long_command_lines_can_be_listed(stage: SupervisorStage) -> None:
    stage.office_line.order(shared(A, E5))
    long = ["x" * 120_000] * 5
    for _ in range(3):
        stage.holder(A, E5).start("sh", "-c", "exec sleep 1000", *long)
    listed = stage.office_line.ask(ListGuests())
    assert isinstance(listed, Guests)
    assert [one.argv[:3] for one in listed.guests] == [("sh", "-c", "exec sleep 1000")] * 3
    assert listed.guests[0].argv[-1].endswith("…")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process a real-time priority")
def test_a_supervisor_with_a_real_time_priority_hands_none_on(stage: SupervisorStage) -> None:
    """The kernel would take no such process into a group of cores; and it could take the machine from everybody."""
    part = Part(resource=ResourceId("bench/cpu"), kind=Kind.CPU, amount=1, millis=0, exclusivity=Exclusivity.SHARED)
    stage.office_line.order(replace(shared(A, E5), parts=(part,)))
    os.sched_setscheduler(stage.pid, os.SCHED_FIFO, os.sched_param(1))
    guest = stage.holder(A, E5).start("sleep", "1000")
    assert os.sched_getscheduler(guest.pid) == os.SCHED_OTHER


def test_what_never_ran_is_not_kept(stage: SupervisorStage) -> None:
    stage.office_line.order(shared(A, E5))
    holder = stage.holder(A, E5)
    ran = holder.start("true").guest
    reply = holder.ask(Start(spec=GuestSpec(argv=("/no/such/command",), cwd="/", env={"PATH": PATH})))
    assert isinstance(reply, NotStarted)

    def kept() -> list[str]:
        listed = stage.office_line.ask(ListGuests(ended=True))
        assert isinstance(listed, Guests)
        return [one.id for one in listed.guests]

    until("only what ran", lambda: kept() == [ran])


def test_who_reads_nothing_takes_neither_memory_nor_anybodys_turn(stage: SupervisorStage) -> None:
    """Many connections with much granted and nothing read; one that reads gets all of it."""
    stage.office_line.order(shared(A, E5))
    size = 3 << 20
    code = f"import sys; sys.stdout.write('x' * {size}); sys.stdout.flush(); sys.stdin.read()"
    guest = stage.holder(A, E5).start(sys.executable, "-I", "-S", "-c", code).guest
    with contextlib.ExitStack() as stack:
        for _ in range(120):
            line = stack.enter_context(contextlib.closing(stage.office_line.admit(A, E5)))
            attached = line.ask(Attach(guest=guest))
            assert isinstance(attached, Attached)
            line.talk.link.grant(attached.output, 2 << 20)
            line.talk.flush()
        reader = stack.enter_context(contextlib.closing(stage.office_line.admit(A, E5)))
        attached = reader.ask(Attach(guest=guest))
        assert isinstance(attached, Attached)
        reader.talk.link.grant(attached.output, 1 << 20)
        got = 0

        def all_read() -> bool:
            nonlocal got
            for happening in reader.talk.wait(0.05):
                if isinstance(happening, Data):
                    got += len(happening.data) - OUTPUT_HEAD.size
                    reader.talk.link.consumed(happening.channel, happening.cost)
            return got == size

        until("all of it", all_read)
        assert resident(stage.pid) < UNREAD_BYTES + 60_000_000, "without a bound it is 200 MB and more"


def test_two_hundred_guests_fit_into_28_megabytes(tmp_path: Path) -> None:
    """Each under a lease of its own, and with its holder's connection; what some of them take is known from fewer."""
    modules = "sublet.node.supervisor.__main__, sublet.node.supervisor.service"
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {modules}"
    compiled = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        code,
        package_folder(),
    ]  # compiling takes room for good
    subprocess.run(compiled, check=True, timeout=PATIENCE_S)

    def start(stage: SupervisorStage, numbers: range) -> int:
        for n in numbers:
            lease, epoch = LeaseId(f"l-{n:016x}"), Epoch(1, 10 + n)
            stage.office_line.order(shared(lease, epoch))
            stage.holder(lease, epoch).start("sleep", "1000")
        return resident(stage.pid)

    with supervisor_at(tmp_path) as stage:
        first = start(stage, range(GUESTS_FIRST))
        each = (start(stage, range(GUESTS_FIRST, GUESTS_ALL)) - first) / (GUESTS_ALL - GUESTS_FIRST)
    assert first + each * (200 - GUESTS_FIRST) < 28_000_000


def test_very_many_guests_are_listed_page_by_page(stage: SupervisorStage) -> None:
    stage.office_line.order(shared(A, E5))
    holder = stage.holder(A, E5)
    started = [holder.start("true").guest for _ in range(GUESTS_PAGE + 10)]
    for ask in (stage.office_line.ask, holder.ask):
        listed, after = [], 0
        while True:
            page = ask(ListGuests(ended=True, after=after))
            assert isinstance(page, Guests)
            assert len(page.guests) <= GUESTS_PAGE
            listed += [one.id for one in page.guests]
            if not page.more:
                break
            after = page.more
        assert listed == started


def test_no_descriptor_left_is_nobody_elses_end(stage: SupervisorStage) -> None:
    stage.office_line.order(shared(A, E5))
    holder = stage.holder(A, E5)
    guest = holder.start("sleep", "1000")
    resource.prlimit(stage.pid, resource.RLIMIT_NOFILE, (64, 64))
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(PATIENCE_S)
            sock.connect(str(stage.runtime / SOCKET_NAME))
        until("none is left", lambda: len(os.listdir(f"/proc/{stage.pid}/fd")) == 64)
        with pytest.raises(SubletError):
            holder.start("true")
        assert [one.pid for one in stage.marked(A)] == [guest.pid]
    until("there is room again", lambda: _starts(stage))
    assert guest.pid in [one.pid for one in stage.marked(A)]


def resident(pid: int) -> int:
    """Bytes of memory that a process has. Other files of the kernel's have it only up to some hundred pages."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(text.split()[1]) for text in file if text.startswith("Rss:")) << 10


def _told(stage: SupervisorStage, kind: type) -> bool:
    stage.office_line.wait(0.01)
    return any(isinstance(one, kind) for one in stage.office_line.reports)


def _starts(stage: SupervisorStage) -> bool:
    try:
        stage.holder(A, E5).start("true")
    except SubletError:
        return False
    return True


def test_descriptors_that_are_few_are_said_to_be_few(tmp_path: Path) -> None:
    with supervisor_at(
        tmp_path, faults="import sublet.node.processes.files as f\nf.raise_limit = lambda: 130"
    ) as stage:
        stage.office_line.order(shared(A, E5))
        holder = stage.holder(A, E5)
        guests = [holder.start("sleep", "1000").pid for _ in range(4)]
        with pytest.raises(SubletError) as refused:
            holder.start("sleep", "1000")
        assert "ulimit" in refused.value.do
        assert sorted(one.pid for one in stage.marked(A)) == sorted(guests)


def test_guests_count_descriptors_as_they_did_before(stage: SupervisorStage) -> None:
    stage.office_line.order(shared(A, E5))
    guest = stage.holder(A, E5).start("sleep", "1000")
    assert resource.prlimit(guest.pid, resource.RLIMIT_NOFILE) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert resource.prlimit(stage.pid, resource.RLIMIT_NOFILE)[0] >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]
