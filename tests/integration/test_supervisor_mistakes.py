"""Mistakes of the supervisor's own, put into a real one: each ends the guest or the connection it concerns, with a
reason, and nobody else; and where it cannot be said any more whether something is gone, nothing becomes free."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from sublet.errors import InvalidRequest, NotFound, SubletError
from sublet.lease_end import EndReason
from sublet.node.processes.cgroups_places import CgroupFiles
from sublet.node.supervisor.service import SOCKET_NAME
from sublet.values import Epoch, Exclusivity, GuestId, Kind, LeaseId, ResourceId
from sublet.wire.codec import dumps
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Attach, EndGuest, Guests, GuestSpec, GuestView, ListGuests, Start
from sublet.wire.orders import End, Grant, Part, TornDown
from tests.integration.supervisor_stage import PATH, TENANT, SupervisorStage, supervisor_at
from tests.traces import PATIENCE_S, now_ns, until

A, B = LeaseId("lease-a"), LeaseId("lease-b")
E5, E6 = Epoch(1, 5), Epoch(1, 6)
S = 1_000_000_000
GRACE_NS = S // 5
IGNORES = "trap '' TERM; echo ready; while :; do sleep 0.05; done"

# Each is a line or two of Python that makes one function fail for the guest that has BREAK in its command line.
FOR_IT = """
def broken(kind, name, of=lambda self: self):
    before = getattr(kind, name)
    def failing(self, *given, **named):
        guest = of(self)
        if guest is not None and any("BREAK" in word for word in guest.spec.argv):
            raise RuntimeError("a mistake in " + name)
        return before(self, *given, **named)
    setattr(kind, name, failing)
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.guests import GuestTable
from sublet.node.processes.stdio import Stdio
from sublet.node.processes.tree import Trees
from sublet.node.processes.lease_runtime import LeaseRuntime
"""
HEARS = """
hear = Stdio._on_output
def failing(self, stream, data):
    if b"BREAK" in data:
        raise RuntimeError("a mistake in _on_output")
    hear(self, stream, data)
Stdio._on_output = failing
"""
SIGNALS = """
seen = Trees.signal_boxed
def failing(self, tree, number):
    if tree.lease == "lease-b":
        raise RuntimeError("a mistake in signal_boxed")
    return seen(self, tree, number)
Trees.signal_boxed = failing
"""
KILLS = """
kill = Trees.kill
def failing(self, trees):
    trees = list(trees)
    if any(tree.lease == "lease-b" for tree in trees):
        raise RuntimeError("a mistake in kill")
    kill(self, trees)
Trees.kill = failing
"""
SHOWS = """
show, shown = LeaseRuntime.show, set()
def failing(self, now_ns):
    if self.lease == "lease-b" and self._page is not None and self.lease in shown:
        raise RuntimeError("a mistake in show")
    shown.add(self.lease)
    show(self, now_ns)
LeaseRuntime.show = failing
"""
TAKES = """
from sublet.wire.link import Link
send = Link.send_data
def failing(self, channel, data):
    if b"BREAK" in bytes(data):
        raise RuntimeError("a mistake in send_data")
    return send(self, channel, data)
Link.send_data = failing
"""


def core(lease: LeaseId, epoch: Epoch) -> Grant:
    part = Part(resource=ResourceId("bench/cpu"), kind=Kind.CPU, amount=0, millis=0, exclusivity=Exclusivity.SHARED)
    at_ns = now_ns() + 300 * S
    return Grant(lease=lease, epoch=epoch, number=1, tenant=TENANT, parts=(part,), deadline_ns=at_ns, ttl_ns=300 * S)


def end(lease: LeaseId, epoch: Epoch) -> End:
    parts = core(lease, epoch).parts
    return End(lease=lease, epoch=epoch, number=2, parts=parts, reason=EndReason.RELEASED, grace_ns=GRACE_NS)


def is_torn_down(stage: SupervisorStage, lease: LeaseId) -> bool:
    stage.office_line.wait(0.02)
    return any(isinstance(one, TornDown) and one.lease == lease for one in stage.office_line.reports)


def view(stage: SupervisorStage, guest: str) -> GuestView:
    listed = stage.office_line.ask(ListGuests(guest=guest, ended=True))
    assert isinstance(listed, Guests)
    return listed.guests[0]


def has_spoken(stage: SupervisorStage, guest: str) -> bool:
    return view(stage, guest).log_bytes > 0


@pytest.mark.parametrize(
    ("faults", "command"),
    [
        (HEARS, "echo BREAK; exec sleep 1000"),
        (FOR_IT + 'broken(GuestProcess, "exited")', "exit 3; BREAK"),
        (FOR_IT + 'broken(GuestProcess, "release_live_state")', "exit 3; BREAK"),
        (FOR_IT + 'broken(GuestProcess, "last_news")', "exit 3; BREAK"),
        (FOR_IT + 'broken(GuestTable, "_note", of=lambda self: None)', "exit 3; BREAK"),
    ],
    ids=["hear", "exited", "settle", "news", "control"],
)
def test_a_mistake_with_one_guest_is_that_guests_end(tmp_path: Path, faults: str, command: str) -> None:
    with supervisor_at(tmp_path, faults=FOR_IT + faults) as stage:
        stage.office_line.order(core(A, E5), core(B, E6))
        other = stage.holder(A, E5).start("sleep", "1000")
        stage.holder(B, E6).start("sh", "-c", command)
        until("the end of the broken one", lambda: not stage.marked(B))
        stage.office_line.order(end(B, E6))
        if '"exited"' not in faults:  # there nobody knows how it ended, and nothing is concluded
            until("torn down", lambda: is_torn_down(stage, B))
        assert [one.pid for one in stage.marked(A)] == [other.pid]
        stage.office_line.order(end(A, E5))
        until("the other, too", lambda: is_torn_down(stage, A))
        assert '"exited"' not in faults or not is_torn_down(stage, B)
        assert "a mistake in" in stage.log or "_note" in faults


def test_a_holder_hears_of_a_start_that_went_wrong_here(tmp_path: Path) -> None:
    faults = FOR_IT + 'setattr(GuestProcess, "now", lambda self, event: 1 // 0)'
    with supervisor_at(tmp_path, faults=faults) as stage:
        stage.office_line.order(core(B, E6))
        with pytest.raises(SubletError, match="internal error in the supervisor"):
            stage.holder(B, E6).start("sleep", "1000")
        until("its end", lambda: not stage.marked(B))


def test_the_end_says_why(tmp_path: Path) -> None:
    with supervisor_at(tmp_path, faults=FOR_IT + HEARS) as stage:
        stage.office_line.order(core(B, E6))
        guest = stage.holder(B, E6).start("sh", "-c", "echo BREAK; exec sleep 1000").guest
        until("its end", lambda: view(stage, guest).state == "gone")
        assert view(stage, guest).reason == EndReason.GUEST_FAILED
        assert "a mistake in _on_output" in stage.log


@pytest.mark.parametrize("faults", [SIGNALS, KILLS], ids=["signal", "kill"])
def test_who_cannot_be_reached_keeps_nobody_else_alive(tmp_path: Path, faults: str) -> None:
    with supervisor_at(tmp_path, faults=FOR_IT + faults) as stage:
        stage.office_line.order(core(A, E5), core(B, E6))
        for lease, epoch in ((A, E5), (B, E6)):
            guest = stage.holder(lease, epoch).start("sh", "-c", IGNORES).guest
            until("it ignores SIGTERM", partial(has_spoken, stage, guest))
        stage.office_line.order(end(A, E5), end(B, E6))
        until("both torn down", lambda: is_torn_down(stage, A) and is_torn_down(stage, B))
        assert "a mistake in" in stage.log


def test_who_cannot_be_told_of_an_end_does_not_run_on_and_others_do(tmp_path: Path) -> None:
    with supervisor_at(tmp_path, faults=FOR_IT + SHOWS) as stage:
        stage.office_line.order(core(A, E5), core(B, E6))
        other = stage.holder(A, E5).start("sleep", "1000")
        stage.holder(B, E6).start("sleep", "1000")
        until("a mistake", lambda: "a mistake in show" in stage.log)
        assert [one.pid for one in stage.marked(A)] == [other.pid]
        stage.office_line.order(end(B, E6))
        until("torn down", lambda: is_torn_down(stage, B))
        assert [one.pid for one in stage.marked(A)] == [other.pid]


def test_reports_that_cannot_be_said_are_not_the_end_of_the_law(tmp_path: Path) -> None:
    faults = """
import sublet.node.supervisor.office_link as link
from sublet.wire.guests import Reports
dumps = link.dumps
def failing(what):
    if isinstance(what, Reports) and any(one.lease == "lease-b" for one in what.reports if hasattr(one, "epoch")):
        raise RuntimeError("a mistake in what is reported")
    return dumps(what)
link.dumps = failing
"""
    with supervisor_at(tmp_path, faults=faults) as stage:
        stage.office_line.order(core(A, E5))
        guest = stage.holder(A, E5).start("sleep", "1000")
        with contextlib.suppress(SubletError):  # hung up on
            stage.office_line.order(core(B, E6))
        until("it is cut", lambda: "a mistake in what is reported" in stage.log)
        stage.hang_up()
        stage.connect()
        assert [one.pid for one in stage.marked(A)] == [guest.pid]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_mistake_with_a_connection_is_not_the_guests_end(tmp_path: Path, when: str) -> None:
    """Whether it is made in the connection's turn, which asks for what was said before, or in the guest's."""
    with supervisor_at(tmp_path, faults=FOR_IT + TAKES) as stage:
        stage.office_line.order(core(A, E5))
        guest = stage.holder(A, E5).start("sh", "-c", f"sleep {int(when == 'after')}; echo BREAK; exec sleep 1000")
        if when == "before":
            until("it has said so", lambda: view(stage, guest.guest).log_bytes)
        reader = stage.office_line.admit(A, E5)
        attached = reader.ask(Attach(guest=guest.guest))
        reader.talk.link.grant(attached.output, 1 << 20)  # type: ignore[union-attr]
        until("it is cut", lambda: (reader.talk.pump(), reader.is_over)[1])
        reader.close()
        assert [one.pid for one in stage.marked(A)] == [guest.pid]
        assert view(stage, guest.guest).state == "running"


NO = """
def no(*given, **named):
    raise OSError(24, "no descriptor left, says the test")
"""
LEAKS = {
    "the plan": "import sublet.node.processes.launch as launch\nlaunch.SpawnPlan = no",
    "the group": "from sublet.node.processes.group import ControlGroup\nControlGroup.join_paths = no",
    "the fork": "import os\nos.fork = no",
    "the pidfd": "import os\nos.pidfd_open = no",
    "a refusal": """
import sublet.node.processes.launch as launch
from sublet.errors import Unsupported
def no(*given):
    raise Unsupported("not here, says the test")
launch.child_setup, launch._argv = no, no
""",
}


@pytest.mark.parametrize("fault", LEAKS)
def test_a_start_that_fails_half_way_leaves_nothing(tmp_path: Path, fault: str) -> None:
    with supervisor_at(tmp_path, faults=NO + LEAKS[fault]) as stage:
        stage.office_line.order(core(A, E5))
        refused(stage, GuestSpec(argv=("true",), cwd="/", env={"PATH": PATH}))
        before = settled(stage)
        for _ in range(10):
            refused(stage, GuestSpec(argv=("true",), cwd="/", env={"PATH": PATH}))
        until("no more than before", lambda: no_more(stage, before))
        stage.office_line.order(end(A, E5))
        until("torn down", lambda: is_torn_down(stage, A))


def test_nor_does_one_from_a_warm_interpreter(tmp_path: Path) -> None:
    faults = """
import sublet.node.processes.zygotes as zygotes
dup, made = zygotes._dup, []
def failing(fd):
    made.append(fd)
    if len(made) % 3 == 0:
        raise OSError(24, "no descriptor left, says the test")
    return dup(fd)
zygotes._dup = failing
"""
    spec = GuestSpec(argv=(sys.executable, "-c", "pass"), imports=("json",), cwd="/", env={"PATH": PATH})
    with supervisor_at(tmp_path, faults=faults) as stage:
        stage.office_line.order(core(A, E5))

        def is_warm() -> bool:
            try:
                stage.holder(A, E5).ask(Start(spec=spec))
            except SubletError:
                return True
            return False

        until("a warm interpreter", is_warm)
        until("what came before is gone", lambda: len(stage.marked(A)) == 0)
        before = settled(stage)
        for _ in range(10):
            refused(stage, spec)
        until("no more than before", lambda: no_more(stage, before))


def refused(stage: SupervisorStage, spec: GuestSpec) -> None:
    with pytest.raises(SubletError):
        stage.holder(A, E5).ask(Start(spec=spec))


def settled(stage: SupervisorStage) -> tuple[int, int, int, int]:
    """Once nothing comes or goes any more."""
    seen = [things(stage)]

    def is_still() -> bool:
        time.sleep(0.1)
        seen.append(things(stage))
        return len(set(seen[-5:])) == 1 and len(seen) > 4

    until("rest", is_still)
    return seen[-1]


def no_more(stage: SupervisorStage, before: tuple[int, int, int, int]) -> bool:
    """Than there were at rest, of each; on a busy machine something may have been on its way out then."""
    return all(now <= then for now, then in zip(things(stage), before, strict=True))


def things(stage: SupervisorStage) -> tuple[int, int, int, int]:
    """Descriptors, children, groups of guests, folders of logs."""
    stage.office_line.pump()
    groups = [guest for lease in stage.lease_groups() for guest in CgroupFiles().folders(lease)]
    logs = stage.state / "guests"
    with open(f"/proc/{stage.pid}/task/{stage.pid}/children") as file:
        children = len(file.read().split())
    return len(os.listdir(f"/proc/{stage.pid}/fd")), children, len(groups), len(list(logs.glob("*")))


def test_what_an_office_asks_wrongly_is_refused_at_once(tmp_path: Path) -> None:
    """Without an answer it would wait for half a minute, and take the supervisor for one that stands still."""
    with supervisor_at(tmp_path) as stage:
        talk = Conversation.connect(str(stage.runtime / SOCKET_NAME), timeout_s=PATIENCE_S)
        with contextlib.closing(talk), pytest.raises(InvalidRequest, match="has to say first who it is"):
            talk.call(dumps(ListGuests()), timeout_s=PATIENCE_S)
        with pytest.raises(NotFound, match="no guest g-none"):
            stage.office_line.ask(EndGuest(guest=GuestId("g-none"), grace_ns=0))
        assert stage.office_line.ask(ListGuests()) == Guests(guests=())
