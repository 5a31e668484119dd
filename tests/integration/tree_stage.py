"""The stage on which ``test_trees`` plays: a process of its own that takes in orphans, as a supervisor does.

``python -m tests.integration.tree_stage SCENE HOW`` plays one scene: ``HOW`` is ``groups`` (root, control groups),
``unified`` (root, those of v2 alone), ``none`` (root without them) or ``user`` (an ordinary user of its own). A scene
that fails says why and exits with 1.
Whatever happens, nothing of it is left: all it starts is below it, and it ends what is below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from sublet.node.prctl import set_child_subreaper
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.cgroups_places import find_places
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.guest_records import GuestNote
from sublet.node.processes.limits import GroupLimits
from sublet.node.processes.procs import ProcessInstance, ProcessStat, Procs
from sublet.node.processes.stuck import is_frozen
from sublet.node.processes.tree import Tree, Trees, marks_of
from sublet.node.supervisor.recovery import Sweep
from sublet.values import Epoch, GuestId, LeaseId, TenantId
from sublet.wire.guests import Profile
from tests.traces import until as until_it_is

PATIENCE_S: Final = 30.0
LEASE: Final = LeaseId("l1")
SCENES: Final[dict[str, Callable[[Stage], None]]] = {}
LONG: Final = "sleep 1000"
EXIT: Final = {"x86_64": 60, "aarch64": 93}
PR_GET_CHILD_SUBREAPER: Final = 37


def scene(play: Callable[[Stage], None]) -> Callable[[Stage], None]:
    SCENES[play.__name__] = play
    return play


def until(what: str, is_so: Callable[[], object]) -> None:
    """Wait for a condition, not for a time."""
    until_it_is(what, is_so, PATIENCE_S)


def is_child_subreaper() -> bool:
    """Whether orphans from below come to this process."""
    answer = ctypes.c_int(0)
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0
    return answer.value == 1


class Stage:
    """What a supervisor has: trees, groups, and the duty to ask its children for their exits."""

    def __init__(self, how: str) -> None:
        set_child_subreaper()
        assert is_child_subreaper()
        self.how = how
        self.office = f"stage{os.getpid()}"
        self.uid = os.getuid()
        if how == "user" and self.uid == 0:
            self.uid = 60_000 + os.getpid() % 5_000  # nobody else's, so that a limit on its processes counts only ours
            os.setgroups([])
            os.setgid(self.uid)
            os.setuid(self.uid)
        if how == "groups":
            self.groups = Groups.probe(self.office)
        else:
            places = [place for place in find_places() if place.is_v2 and how == "unified"]
            self.groups = Groups(self.office, places)
        assert self.groups.is_active == (how in ("groups", "unified"))
        self.procs = Procs()
        self.trees = Trees(self.procs, os.getpid())

    def guest(self, command: str | Callable[[], None], name: str = "g1", limits: GroupLimits | None = None) -> Tree:
        """Start one, as the supervisor does: a session of its own, in its group, marked."""
        guest = GuestId(name)
        group = self.groups.group(LEASE, guest)
        if group is not None:
            group.create(limits)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                for path in group.join_paths() if group else []:
                    with open(path, "wb", buffering=0) as file:
                        file.write(b"0")
                if callable(command):
                    command()
                else:
                    env = {"PATH": os.environ["PATH"], **marks_of(self.office, LEASE, guest)}
                    os.execvpe("sh", ["sh", "-c", command], env)
            os._exit(99)
        identity = self.procs.identity(pid)
        assert identity is not None
        tree = Tree(guest, LEASE, identity, group=group, uid=self.uid)
        self.trees.add(tree)
        return tree

    def note(self, name: str) -> GuestNote:
        """What a supervisor noted of a guest, but for its first process."""
        group = self.groups.group(LEASE, GuestId(name))
        return GuestNote(
            guest=GuestId(name),
            lease=LEASE,
            epoch=Epoch(1, 1),
            tenant=TenantId("local"),
            profile=Profile.LOCAL,
            parts=(),
            pid=0,
            start_ticks=0,
            group=group.name if group is not None else "",
        )

    def reap(self) -> list[int]:
        reaped = []
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                reaped.append(pid)
        return reaped

    def members(self, tree: Tree) -> list[int]:
        self.reap()
        return self.trees.pids(tree)

    def has(self, tree: Tree, count: int) -> None:
        """It has come to exactly so many processes."""
        until(f"{count} processes", lambda: len(self.members(tree)) == count)

    def asleep(self, tree: Tree, count: int) -> None:
        """So many of its processes have become the ``sleep`` they were to become."""
        until(
            f"{count} asleep",
            lambda: [self.procs.text(pid, "comm") for pid in self.members(tree)].count("sleep\n") == count,
        )

    def end(self, tree: Tree) -> None:
        """Kill until nothing is left, and see that the group goes, too."""

        def is_gone() -> bool:
            self.trees.kill([tree])
            return not self.members(tree)

        until(f"the end of {tree.guest}", is_gone)
        if tree.group is not None:
            until("an empty group", tree.group.is_empty)
            until("a removed group", lambda: not tree.group or not tree.group.remove())
        self.trees.drop(tree.guest)

    def close(self) -> None:
        """All that is below this process ends, known or not."""

        def is_empty() -> bool:
            below = list[ProcessStat]()
            for _ in range(3):
                below = [stat for stat in self.procs.table().below([os.getpid()]) if stat.pid != os.getpid()]
                for stat in below:
                    self.procs.send(stat.identity, signal.SIGKILL)
                self.reap()
            return not below

        until("an empty stage", is_empty)
        for group in (*self.groups.found(), *self.groups.leases()):
            until("a removed group", partial(_is_removed, group))
        assert self.groups.remove() == []


# ------------------------------------------------------------------------------------------------------------ scenes


@scene
def forks(stage: Stage) -> None:
    """Children and grandchildren are counted, and another guest is not touched."""
    tree = stage.guest(f"{LONG} & sh -c '{LONG} & {LONG} & wait' & wait")
    other = stage.guest(f"{LONG}; true", "g2")
    stage.asleep(tree, 3)
    stage.asleep(other, 1)
    assert len(stage.members(tree)) == 5
    stage.end(tree)
    assert len(stage.members(other)) == 2
    assert stage.trees.scan().strangers == []


@scene
def double_forks(stage: Stage) -> None:
    """What lost its parent is still the guest's, when its first process is gone as well."""
    tree = stage.guest(f"( ( {LONG} & ) & ) ; ( ( {LONG} & ) & ) ; exec {LONG}")
    stage.asleep(tree, 3)
    stage.procs.send(tree.root, signal.SIGKILL)
    stage.has(tree, 2)
    stage.end(tree)


@scene
def new_sessions(stage: Stage) -> None:
    """Out of its session and twice forked before anybody looked: found all the same."""
    tree = stage.guest(f"setsid setsid {LONG} & setsid sh -c '{LONG} & setsid {LONG} & exit' & exit 0")
    until("the first process gone", lambda: tree.root.pid in stage.reap())
    stage.asleep(tree, 3)
    assert stage.trees.scan().strangers == []
    stage.end(tree)


@scene
def deaf(stage: Stage) -> None:
    """Who ignores the signal stays, and is killed."""
    tree = stage.guest(f"trap '' TERM; sh -c '{LONG}; true' & exec {LONG}")
    stage.asleep(tree, 2)
    assert stage.trees.signal(tree, signal.SIGTERM) == 3
    assert len(stage.members(tree)) == 3
    stage.end(tree)


@scene
def listening(stage: Stage) -> None:
    """One signal reaches everybody in the tree."""
    tree = stage.guest(f"( setsid {LONG} & ) ; {LONG} & exec {LONG}")
    stage.asleep(tree, 3)
    stage.trees.signal(tree, signal.SIGTERM)
    stage.has(tree, 0)


@scene
def stopped(stage: Stage) -> None:
    """What stands still can be killed, and is still there until then."""
    tree = stage.guest(f"{LONG} & {LONG} & wait")
    stage.asleep(tree, 2)
    stage.trees.signal(tree, signal.SIGSTOP)
    until("all stopped", lambda: all(stat.is_stopped for stat in stage.trees.scan().of(tree)))
    assert len(stage.members(tree)) == 3
    stage.end(tree)


@scene
def nobodys(stage: Stage) -> None:
    """Unmarked, in a session of its own and orphaned between two looks: a stranger, unless it is in a group."""
    tree = stage.guest(f"env -i setsid sh -c '{LONG} & exit' & exit")
    until("an orphan", lambda: "sleep\n" in [stage.procs.text(s.pid, "comm") for s in _children(stage)])
    stage.reap()  # and nobody has looked until now
    bystander = stage.guest(f"{LONG}; true", "g2")
    stage.asleep(bystander, 1)

    def is_known() -> bool:
        look = stage.trees.scan()
        stage.reap()
        return len(look.of(tree)) == 1 if tree.group else len(look.strangers) == 1 and not look.of(tree)

    until("the stranger to be seen", is_known)

    def is_gone() -> bool:
        stage.trees.kill_strangers()
        stage.reap()
        return not stage.trees.scan().strangers

    until("the stranger gone", is_gone)
    stage.end(tree)
    assert len(stage.members(bystander)) == 2


@scene
def fork_bomb(stage: Stage) -> None:
    """It forks as fast as it can, from every process it has, and loses."""
    most = 40

    def bomb() -> None:
        if stage.how == "user":
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        while True:
            with contextlib.suppress(OSError):
                os.fork()

    tree = stage.guest(bomb, limits=GroupLimits(pids_max=most))
    until("a full bomb", lambda: len(stage.members(tree)) >= most // 2)
    stage.end(tree)
    assert stage.trees.scan().strangers == []


@scene
def zombies(stage: Stage) -> None:
    """An ended child nobody asked for is not alive; a process whose first thread has ended is."""
    seen, told = os.pipe()

    def tell_and_stay() -> None:
        os.write(told, b"x")
        time.sleep(1000)

    def headless() -> None:
        if os.fork() == 0:
            os._exit(0)
        threading.Thread(target=tell_and_stay).start()
        ctypes.CDLL(None).syscall(EXIT[platform.machine()], 0)

    tree = stage.guest(headless)
    os.read(seen, 1)
    until("a process without its first thread", lambda: _state(stage, tree.root) == "Z")
    until("the zombie", lambda: [s.state for s in _below(stage, tree.root)] == [ord("Z")])
    assert stage.members(tree) == [tree.root.pid]
    assert stage.procs.is_there(tree.root)
    stage.end(tree)


@scene
def another_with_its_number(stage: Stage) -> None:
    """A process that has the pid of one that ended is left alone."""
    tree = stage.guest(f"{LONG}; true")
    stage.asleep(tree, 1)
    earlier = ProcessInstance(tree.root.pid, tree.root.start_ticks - 1)
    assert not stage.procs.send(earlier, signal.SIGKILL)
    assert not stage.procs.is_there(earlier)
    wrong = Tree(GuestId("g9"), LEASE, earlier, uid=stage.uid)
    stage.trees.add(wrong)
    assert stage.members(wrong) == []
    stage.trees.kill([wrong])
    assert len(stage.members(tree)) == 2


@scene
def frozen(stage: Stage) -> None:
    """In a freezer of somebody else not even SIGKILL ends it: said, not hidden, and over when it is thawed."""
    foreign = f"/sys/fs/cgroup/freezer/foreign{os.getpid()}"
    os.mkdir(foreign)
    tree = stage.guest(f"{LONG} & wait")
    stage.asleep(tree, 1)
    look = stage.trees.scan()
    try:
        for pid in stage.members(tree):
            _write(f"{foreign}/cgroup.procs", str(pid))
        _write(f"{foreign}/freezer.state", "FROZEN")
        until("it stands still", lambda: all(is_frozen(stage.procs, pid) for pid in stage.members(tree)))
        for _ in range(3):
            began = time.monotonic()
            stage.trees.kill([tree])
            assert time.monotonic() - began < PATIENCE_S
            look = stage.trees.scan()
            assert len(look.of(tree)) == 2
        assert f"frozen in the control group /foreign{os.getpid()}" in stage.trees.why_alive(look.of(tree))
    finally:
        _write(f"{foreign}/freezer.state", "THAWED")
    stage.has(tree, 0)
    until("the foreign group gone", lambda: _removed(foreign))
    assert stage.trees.why_alive(look.of(tree)) == ""


@scene
def leaves_its_group(stage: Stage) -> None:
    """A guest with root's rights may leave its group; by descent it is found."""
    out = "for f in $(find /sys/fs/cgroup -maxdepth 2 -name cgroup.procs); do echo $$ > $f; done 2> /dev/null; "
    tree = stage.guest(f"sh -c '{out} exec {LONG}' & exec {LONG}")

    def has_left() -> bool:
        stage.trees.scan([tree])
        return len(tree.outside) == 1

    assert tree.group is not None
    until("one that has left", has_left)
    stage.asleep(tree, 2)
    assert tree.group.pids() == [tree.root.pid]
    stage.end(tree)


@scene
def accounted(stage: Stage) -> None:
    """What is used is counted, by groups or by looks; what the supervisor waited for is added."""

    def work() -> None:
        kept = bytearray(b"x" * (8 << 20))
        while time.process_time() < 0.1:
            pass
        time.sleep(1000)
        del kept

    tree = stage.guest(work)
    until("0.1 s of work", lambda: tree.usage(stage.trees.scan().of(tree)).cpu_ns >= 80_000_000)
    until("8 MiB", lambda: tree.usage(stage.trees.scan().of(tree)).memory_bytes >= 8 << 20)  # to take them is work too
    usage = tree.usage(stage.trees.scan().of(tree))
    assert 8 << 20 <= usage.memory_bytes <= usage.memory_peak_bytes
    if tree.group is None:
        tree.exited(1_000_000_000, 1 << 30)
        more = tree.usage()
        assert more.cpu_ns >= 1_000_000_000
        assert more.memory_peak_bytes == 1 << 30


@scene
def limited(stage: Stage) -> None:
    """Memory, processes, cores and devices are what the lease says, for all its guests; what cannot be had is named."""
    lease = stage.groups.group(LEASE)
    assert lease is not None
    lease.create()
    cpu = min(os.sched_getaffinity(0))
    uncapped = lease.set_limits(GroupLimits(memory_bytes=64 << 20, pids_max=20, cores=1, cpus=(cpu,), devices=()))
    assert uncapped == [name for name in ("cpuset", "devices") if not stage.groups.has(name)]  # the rest is everywhere

    def greedy() -> None:
        assert "cpuset" in uncapped or os.sched_getaffinity(0) == {cpu}
        with open("/dev/null", "wb"), contextlib.suppress(PermissionError), open("/dev/kmsg", "rb"):
            if "devices" not in uncapped:
                os._exit(3)
        bytearray(b"x" * (256 << 20))

    tree = stage.guest(greedy)
    _, status = os.waitpid(tree.root.pid, 0)
    assert os.WIFSIGNALED(status), f"it ended with {os.waitstatus_to_exitcode(status)}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert tree.group is not None
    assert tree.group.usage().oom_kills >= 1
    assert lease.usage().memory_peak_bytes <= 64 << 20
    many = stage.guest(f"for i in $(seq 60); do {LONG} & done; wait", "g2")
    until("the limit", lambda: 10 <= len(stage.members(many)) <= 20)
    stage.end(many)


@scene
def swept(stage: Stage) -> None:
    """What a supervisor that was killed has left is found by the next one, ended, and named by lease."""
    predecessor = os.fork()
    if predecessor == 0:
        stage.guest(f"setsid {LONG} & ( ( {LONG} & ) & ) ; env -i {LONG} & exec {LONG}")
        stage.guest(f"env -i setsid {LONG} & exec {LONG}", "g2")
        signal.pause()
    # The shells in between may be on their way out when all that they have started is there.
    until("all of it, and nothing else", lambda: (_sleepers(stage), len(_living(stage))) == (6, 7))
    spared = os.fork()
    if spared == 0:
        os.execve("/bin/sleep", ["sleep", "1000"], marks_of(stage.office, LEASE, GuestId("g1")))
    until("the spared one", lambda: stage.procs.marks(spared, "SUBLET_"))
    os.kill(predecessor, signal.SIGKILL)
    os.waitpid(predecessor, 0)
    notes = [stage.note("g1"), stage.note("g2")]
    sweep = Sweep(stage.procs, stage.groups, notes=notes, spare=[spared], me=0)

    def is_done() -> bool:
        is_clean = sweep.again()
        for stat in stage.procs.table().children(os.getpid()):
            if stat.is_gone:
                os.waitpid(stat.pid, 0)
        return is_clean

    until("a clean floor", is_done)
    assert list(sweep.found) == [LEASE]
    assert len(sweep.found[LEASE]) == 6
    assert sweep.left == {}
    assert sweep.why_left(LEASE) == ""
    assert stage.procs.stat(spared) is not None
    assert stage.groups.found() == []


# ------------------------------------------------------------------------------------------------------------ helpers


def _is_removed(group: ControlGroup) -> bool:
    return not group.remove()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _removed(folder: str) -> bool:
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.exists(folder)


def _state(stage: Stage, identity: ProcessInstance) -> str:
    stat = stage.procs.stat(identity.pid)
    return chr(stat.state) if stat is not None else ""


def _below(stage: Stage, root: ProcessInstance) -> Iterator[ProcessStat]:
    return (stat for stat in stage.procs.table().below([root.pid]) if stat.pid != root.pid)


def _children(stage: Stage) -> list[ProcessStat]:
    return stage.procs.table().children(os.getpid())


def _living(stage: Stage) -> list[ProcessStat]:
    below = stage.procs.table().below([os.getpid()])
    return [stat for stat in below if stat.pid != os.getpid() and not stat.is_gone]


def _sleepers(stage: Stage) -> int:
    return [stage.procs.text(stat.pid, "comm") for stat in _living(stage)].count("sleep\n")


def main(name: str, how: str) -> None:
    stage = Stage(how)
    try:
        SCENES[name](stage)
    finally:
        stage.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
