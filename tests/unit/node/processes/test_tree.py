"""Whose a process is, on a pretended process table; and what a line of it means."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.node.processes.cgroups import Groups
from sublet.node.processes.cgroups_places import CgroupPlace
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.guest_records import GuestNote
from sublet.node.processes.procs import NS_PER_TICK, ProcessInstance, ProcessStat, Procs
from sublet.node.processes.stuck import is_frozen, why_alive
from sublet.node.processes.tree import ProcessSnapshot, Tree, Trees, marks_of
from sublet.node.supervisor.recovery import Sweep
from sublet.values import Epoch, GuestId, LeaseId, TenantId
from sublet.wire.guests import Profile

ME = 10
LEASE = LeaseId("l1")


class Pretended(Procs):
    """A folder that looks like /proc, in which signals do at once what they do, except to the deaf."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.sent: list[tuple[int, int]] = []
        self.deaf: set[int] = set()
        self.on_listed: Callable[[], object] = lambda: None
        """What happens when children were listed."""
        self.put(ME, 1, session=ME)

    def put(
        self, pid: int, ppid: int, *, session: int = 0, state: str = "S", threads: int = 1, start: int = 0, cpu: int = 0
    ) -> None:
        folder = Path(self.root, str(pid))
        folder.mkdir(exist_ok=True)
        fields = [state, ppid, pid, session or pid, *[0] * 7, cpu, 0, 0, 0, 0, 0, threads, 0, start or pid, 0, 3]
        folder.joinpath("stat").write_text(f"{pid} (a ) b\n(c) {' '.join(map(str, fields))} 0 0\n")

    def children(self, pid: int) -> list[int] | None:
        listed = [stat.pid for stat in self.table().children(pid)]
        self.on_listed()
        return listed

    def env(self, pid: int, **names: str) -> None:
        text = "\0".join(f"{name}={value}" for name, value in {"PATH": "/bin", **names}.items())
        Path(self.root, str(pid), "environ").write_text(text + "\0")

    def end(self, pid: int) -> None:
        folder = Path(self.root, str(pid))
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

    def send(self, identity: ProcessInstance, number: int) -> bool:
        stat = self.stat(identity.pid)
        if stat is None or stat.identity != identity:
            return False
        self.sent.append((identity.pid, number))
        if identity.pid not in self.deaf:
            state = {signal.SIGSTOP: "T", signal.SIGKILL: "Z"}.get(signal.Signals(number), chr(stat.state))
            self.put(stat.pid, stat.ppid, session=stat.session, state=state, start=stat.start_ticks)
        return True


@pytest.fixture
def procs(tmp_path: Path) -> Pretended:
    return Pretended(tmp_path)


def planted(procs: Pretended, *pids: int) -> tuple[Trees, list[Tree]]:
    trees = Trees(procs, ME)
    made = []
    for pid in pids:
        if procs.stat(pid) is None:
            procs.put(pid, ME)
        made.append(Tree(GuestId(f"g{pid}"), LEASE, ProcessInstance(pid, pid)))
        trees.add(made[-1])
    return trees, made


def pids(look: ProcessSnapshot, tree: Tree) -> list[int]:
    return sorted(stat.pid for stat in look.of(tree))


def test_a_name_with_brackets_and_line_ends_hides_nothing(procs: Pretended) -> None:
    procs.put(20, 7, session=8, state="R", threads=3, start=99, cpu=5)
    assert procs.stat(20) == ProcessStat(20, 7, 20, 8, ord("R"), 3, 99, 5, 3)


@pytest.mark.parametrize("text", ["", "20", "20 (x)", "20 (x) S 1 2", "20 (x) S " + "a " * 40])
def test_a_line_that_is_none_is_no_process(procs: Pretended, text: str) -> None:
    procs.put(20, 1)
    Path(procs.root, "20", "stat").write_text(text)
    assert procs.stat(20) is None
    assert 20 not in procs.table().stats


@pytest.mark.parametrize(
    ("state", "threads", "is_gone"), [("S", 1, False), ("Z", 1, True), ("X", 1, True), ("Z", 2, False), ("T", 1, False)]
)
def test_gone_is_who_has_no_thread_left(procs: Pretended, state: str, threads: int, is_gone: bool) -> None:
    procs.put(20, 1, state=state, threads=threads)
    assert procs.is_there(ProcessInstance(20, 20)) is not is_gone


def test_a_table_of_parents_in_a_circle_ends(procs: Pretended) -> None:
    procs.put(20, 21)
    procs.put(21, 20)
    assert sorted(stat.pid for stat in procs.table().below([20])) == [20, 21]


def test_marks_are_those_of_the_initial_environment(procs: Pretended) -> None:
    procs.put(20, 1)
    assert procs.marks(20, "SUBLET_") == {}
    procs.env(20, SUBLET_LEASE="l=1", SUBLET_OFFICE="", OTHER="x")
    assert procs.marks(20, "SUBLET_") == {"SUBLET_LEASE": "l=1", "SUBLET_OFFICE": ""}


def test_whose_it_is_by_descent_memory_session_and_mark(procs: Pretended) -> None:
    trees, [one, two] = planted(procs, 20, 30)
    procs.put(21, 20, session=20)
    procs.put(22, 21)
    assert pids(trees.scan(), one) == [20, 21, 22]
    procs.put(22, ME)  # known, and orphaned
    procs.put(23, ME, session=20)  # an orphan in a session of the first
    procs.put(24, ME)
    procs.env(24, **marks_of("k3", LEASE, two.guest))
    procs.put(25, 24)
    procs.put(99, 1)  # none of our business
    look = trees.scan()
    assert pids(look, one) == [20, 21, 22, 23]
    assert pids(look, two) == [24, 25, 30]
    assert look.strangers == []


def test_who_is_nobodys_is_a_stranger_with_all_below_it(procs: Pretended) -> None:
    trees, [one] = planted(procs, 20)
    procs.put(40, ME)
    procs.put(41, 40)
    procs.put(42, ME, state="Z")  # waits to be asked, and is no more
    look = trees.scan()
    assert sorted(stat.pid for stat in look.strangers) == [40, 41]
    assert pids(look, one) == [20]
    trees.kill_strangers()
    assert (40, signal.SIGKILL) in procs.sent
    assert (41, signal.SIGKILL) in procs.sent
    assert not [pid for pid, _ in procs.sent if pid in (20, 42, ME)]


def test_helpers_and_what_is_theirs_are_no_strangers(procs: Pretended) -> None:
    trees, [guest] = planted(procs, 20)
    procs.put(50, ME)
    trees.help(ProcessInstance(50, 50))
    procs.put(51, 50, session=50)
    procs.put(52, ME, session=50)  # forked twice from it, and not yet named as a guest
    assert trees.scan().strangers == []
    trees.add(Tree(GuestId("g52"), LEASE, ProcessInstance(52, 52)))
    assert pids(trees.scan(), trees.trees[GuestId("g52")]) == [52]
    assert pids(trees.scan(), guest) == [20]
    trees.disown(50)
    assert sorted(stat.pid for stat in trees.scan().strangers) == [50, 51]


def test_a_mark_is_not_believed_of_another_user(procs: Pretended) -> None:
    trees, [guest] = planted(procs, 20)
    procs.put(40, ME)
    procs.env(40, **marks_of("k3", LEASE, guest.guest))
    uid = procs.uid(40)
    assert uid is not None
    guest.uid = uid + 1
    assert [stat.pid for stat in trees.scan().strangers] == [40]
    guest.uid = uid
    assert trees.scan().strangers == []


def test_the_session_of_the_supervisor_is_nobodys_claim(procs: Pretended) -> None:
    """A guest that has not yet made its own session must not make the supervisor's a guest's."""
    trees, [guest] = planted(procs, 20)
    procs.put(20, ME, session=ME)
    trees.scan()
    procs.put(40, ME, session=ME)
    assert [stat.pid for stat in trees.scan().strangers] == [40]
    assert not guest.sessions


def test_a_pid_given_anew_is_not_the_guest(procs: Pretended) -> None:
    trees, [guest] = planted(procs, 20)
    trees.scan()
    procs.put(20, ME, start=777)
    look = trees.scan()
    assert pids(look, guest) == []
    trees.kill([guest])
    assert procs.sent == []
    procs.put(21, ME, session=20)  # of the newcomer's session, which has the number of the guest's
    assert sorted(stat.pid for stat in trees.scan().strangers) == [20, 21]


def test_it_is_stopped_before_it_is_killed_and_what_is_forked_meanwhile_as_well(procs: Pretended) -> None:
    trees, [guest] = planted(procs, 20)
    original = procs.send

    def send(identity: ProcessInstance, number: int) -> bool:
        if (identity.pid, number) == (20, signal.SIGSTOP):
            procs.put(21, 20)
        return original(identity, number)

    procs.send = send  # type: ignore[method-assign]
    trees.kill([guest])
    stops = [pid for pid, number in procs.sent if number == signal.SIGSTOP]
    kills = [pid for pid, number in procs.sent if number == signal.SIGKILL]
    assert stops == kills == [20, 21]
    assert procs.sent[-1][1] == signal.SIGKILL
    assert trees.pids(guest) == []


def test_what_cannot_be_ended_is_still_shown_and_nothing_hangs(procs: Pretended) -> None:
    trees, [guest] = planted(procs, 20)
    procs.deaf.add(20)
    trees.kill([guest])
    trees.kill([guest])
    assert trees.pids(guest) == [20]
    assert "process 20" in trees.why_alive(trees.scan().of(guest))


def test_usage_by_looks_never_falls(procs: Pretended) -> None:
    trees, [guest] = planted(procs, 20)
    procs.put(20, ME, cpu=7)
    procs.put(21, 20, cpu=3)
    look = trees.scan()
    first = guest.usage(look.of(guest))
    assert first.cpu_ns == 10 * NS_PER_TICK
    assert first.memory_bytes == first.memory_peak_bytes > 0
    procs.end(21)
    look = trees.scan()
    assert guest.usage(look.of(guest)).cpu_ns == first.cpu_ns
    assert guest.usage(look.of(guest)).memory_peak_bytes == first.memory_peak_bytes
    guest.exited(20 * NS_PER_TICK, 1 << 40)
    assert guest.usage().cpu_ns == 20 * NS_PER_TICK
    assert guest.usage().memory_peak_bytes == 1 << 40


def noted(first: ProcessInstance, lease: str = "l4", group: str = "") -> GuestNote:
    """What was noted of a guest of which this was the first process."""
    return GuestNote(
        guest=GuestId("g4"),
        lease=LeaseId(lease),
        epoch=Epoch(1, 1),
        tenant=TenantId("local"),
        profile=Profile.LOCAL,
        parts=(),
        pid=first.pid,
        start_ticks=first.start_ticks,
        group=group,
    )


def test_a_sweep_finds_by_mark_descent_session_and_note_and_spares_who_asks(procs: Pretended) -> None:
    marks = marks_of("k3", LEASE, GuestId("g1"))
    procs.put(20, 1)
    procs.env(20, **marks)
    procs.put(21, 20)  # descends
    procs.put(22, 1, session=20)  # the same session
    procs.put(23, 1, session=5)
    procs.env(23, **marks)
    procs.put(24, 1, session=5)  # a session whose leader has ended
    procs.put(30, 1)
    procs.env(30, **marks_of("other", LEASE, GuestId("g1")))
    procs.put(40, 1)  # noted, unmarked
    procs.put(41, 1)  # has the pid of one that was noted
    procs.put(50, 1, session=6)
    procs.env(50, **marks)
    procs.put(51, 50)
    procs.put(52, 1, session=6)  # a session whose leader has ended as well, of who asks
    procs.put(60, 1)
    procs.put(61, 60, session=60)
    procs.env(61, **marks)
    procs.put(62, 60, session=60)  # a person's terminal
    notes = [noted(ProcessInstance(40, 40)), noted(ProcessInstance(41, 1))]
    sweep = Sweep(procs, Groups.none("k3"), notes=notes, spare=[50], me=ME)
    assert sweep.again()
    ended = {pid for pid, number in procs.sent if number == signal.SIGKILL}
    assert ended == {20, 21, 22, 23, 24, 40, 61}
    assert {lease: sorted(i.pid for i in found) for lease, found in sweep.found.items()} == {
        LEASE: [20, 21, 22, 23, 24, 61],
        "l4": [40],
    }
    assert sweep.left == {}


def test_a_sweep_finds_by_group_whose_lease_is_in_a_note_or_in_the_environment_or_unknown(
    procs: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of groups tell nothing, except those that the version before made. A note holds more than what a guest
    wrote into the environment of a child."""
    monkeypatch.setattr(
        ControlGroup, "kill", lambda *_: None
    )  # it would signal processes of this machine with these numbers
    base = tmp_path / "groups"
    members = {"4a/01": [20, 21], "4a/02": [22], "4b/03": [23], "4c/04": [24], "l-of-before/g-1": [25]}
    for name, pids in members.items():
        folder = base / "sublet-k3" / name
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        for pid in pids:
            procs.put(pid, 1)
            procs.deaf.add(pid)
    procs.env(21, **marks_of("k3", LeaseId("forged"), GuestId("g1")))
    procs.env(23, **marks_of("k3", LEASE, GuestId("g2")))
    groups = Groups("k3", (CgroupPlace(True, str(base), frozenset(), str(base)),))
    sweep = Sweep(procs, groups, notes=[noted(ProcessInstance(9, 9), group="sublet-k3/4a/01")], me=ME)
    assert not sweep.again()
    assert {lease: sorted(one.pid for one in left) for lease, left in sweep.left.items()} == {
        "l4": [20, 21, 22],
        LEASE: [23],
        "4c": [24],
        "l-of-before": [25],
    }


def test_a_sweep_says_what_it_could_not_end(procs: Pretended) -> None:
    procs.put(20, 1)
    procs.env(20, **marks_of("k3", LEASE, GuestId("g1")))
    procs.deaf.add(20)
    sweep = Sweep(procs, Groups.none("k3"), me=ME)
    assert not sweep.again()
    assert sweep.left == {LEASE: [ProcessInstance(20, 20)]}
    assert "process 20" in sweep.why_left(LEASE)
    procs.end(20)
    assert sweep.again()
    assert sweep.why_left(LEASE) == ""


@pytest.mark.parametrize(
    ("state", "pending", "said"),
    [
        ("R", "0000000000000000", "is running"),
        ("D", "0000000000000100", "waits inside the kernel"),
        ("S", "0000000000000100", "has not ended yet"),
    ],
)
def test_what_keeps_a_process(procs: Pretended, state: str, pending: str, said: str) -> None:
    procs.put(20, 1, state=state)
    Path(procs.root, "20", "comm").write_text("train\n")
    Path(procs.root, "20", "status").write_text(f"SigPnd:\t{pending}\nShdPnd:\t0000000000000000\n")
    told = why_alive(procs, ProcessInstance(20, 20))
    assert told.startswith("process 20 (train) ")
    assert said in told
    assert why_alive(procs, ProcessInstance(20, 21)) == ""


@pytest.mark.parametrize(
    ("group", "state", "held"), [("/f", "FROZEN", True), ("/f", "THAWED", False), ("/", "", False)]
)
def test_frozen_is_who_is_in_a_frozen_group_of_v1(
    procs: Pretended, tmp_path: Path, group: str, state: str, held: bool
) -> None:
    procs.put(20, 1)
    Path(procs.root, "20", "cgroup").write_text(f"6:freezer:{group}\n0::/\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(f"30 20 0:1 / {tmp_path}/cg rw - cgroup cgroup rw,freezer\n")
    (tmp_path / "cg/f").mkdir(parents=True)
    (tmp_path / "cg/f/freezer.state").write_text(f"{state}\n")
    assert is_frozen(procs, 20) is held


# ---- by our own children alone


def test_our_own_children_tell_of_which_guests_something_is_there(procs: Pretended) -> None:
    trees, [first, second, third] = planted(procs, 20, 30, 40)
    procs.put(21, 20)
    trees.scan()
    procs.put(20, ME, state="Z")
    procs.put(21, ME)  # what it left comes to us
    procs.end(30)
    procs.put(50, ME)
    trees.help(ProcessInstance(50, 50))
    assert trees.present({40}) == {first.guest}
    assert trees.present(set()) == {first.guest, third.guest}
    assert second.guest not in (trees.present(set()) or ())


def test_somebody_new_among_our_children_takes_a_look_at_all(procs: Pretended) -> None:
    trees, _ = planted(procs, 20)
    procs.put(60, ME)
    assert trees.present(set()) is None
    procs.put(60, ME, state="Z")
    assert trees.present(set()) == {"g20"}
    procs.put(20, ME, start=99)  # the number was given anew
    assert trees.present(set()) is None


def test_an_orphan_that_comes_while_our_children_are_read_is_met(procs: Pretended) -> None:
    """Its parent was among those that were listed, and had ended when it was asked."""
    trees, [guest] = planted(procs, 20)
    procs.put(21, 20)

    def ends() -> None:
        procs.put(20, ME, state="Z")
        procs.put(21, ME)

    procs.on_listed = ends
    assert trees.present(set()) is None, "nobody had seen it before"
    procs.put(20, ME)
    procs.put(21, 20)
    trees.scan()
    assert trees.present(set()) == {guest.guest}


def test_where_the_kernel_lists_no_children_everybody_is_looked_at(tmp_path: Path) -> None:
    procs = Procs(str(tmp_path))
    assert procs.children(ME) is None
    assert Trees(procs, ME).present(set()) is None


def test_the_kernel_lists_our_children() -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        assert child.pid in (Procs().children(os.getpid()) or [child.pid])
        child.kill()
