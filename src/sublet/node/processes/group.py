"""One control group, which contains a guest's processes whatever they do to hide.

Nothing here waits: what is not done at once is asked again by the caller.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from sublet.node.processes.cgroups_places import CgroupFiles, CgroupPlace
from sublet.node.processes.limits import BASIC_DEVICES, GroupLimits, GroupUsage
from sublet.node.processes.procs import pidfd_open, pidfd_send_signal

_CPU_PERIOD_US: Final = 100_000
_KILL_ROUNDS: Final = 16
"""While frozen nothing can fork, so the second round already finds nothing new; the rest is for what thaws late."""
_UNFROZEN_ROUNDS: Final = 4
"""Rounds of the first attempt, before anything is frozen: a process that was sent SIGKILL forks no more."""
_REMOVE_ROUNDS: Final = 3
_KEEPS: Final = ("memory", "cpuacct", "freezer")
"""The v1 controllers a group is made in without limits: to count, and to end. To join one costs 0.25 ms."""


class Hierarchies(NamedTuple):
    """Where groups are made."""

    v2: CgroupPlace | None
    v1: Mapping[str, str]
    """Controller → the folder below which its groups are."""
    files: CgroupFiles


class ControlGroup:
    """The box of one guest (or of one lease, around those of its guests)."""

    __slots__ = ("_bases", "_files", "_v2", "_where", "is_guests", "name", "was_struck")

    def __init__(self, where: Hierarchies, name: str, *, is_guests: bool) -> None:
        self.name = name
        """Its folder below the base of each hierarchy: what the note of its guest says."""
        self.is_guests = is_guests
        self._where = where
        self._files = where.files
        self._v2 = f"{where.v2.base}/{name}" if where.v2 is not None else None
        self.was_struck = False
        """Whether all that is in it was sent SIGKILL before."""
        self._bases: tuple[str, ...] | None = None
        """Below which its folders are, if we have made it: they need not be looked for."""

    def create(self, limits: GroupLimits | None = None) -> None:
        """Make it, with these limits; harmless where it is there already. ``OSError`` where the kernel refuses."""
        if self._bases is None:  # else an earlier attempt may have come further than this one does
            self._bases = ()
        if self._v2 is not None:
            self._make_v2()
        for controller in self._wanted_v1():
            self._make_v1(controller)
        if limits is not None:
            self.set_limits(limits)

    def join_paths(self) -> list[str]:
        """The files into which a process with *one thread* writes ``0`` to be in it; what it starts is born in it.

        In v1 that is ``tasks``: to move one thread, and the caller's own, the kernel need not wait until no process
        of the machine is about to fork, which takes it 5 to 20 ms.
        """
        return [f"{folder}/{'cgroup.procs' if folder == self._v2 else 'tasks'}" for folder in self._joined()]

    def add(self, pid: int) -> None:
        """Put a process into it (with all its threads, not with its children)."""
        for folder in self._joined():
            self._files.write(f"{folder}/cgroup.procs", str(pid))

    def pids(self, *, everywhere: bool = True) -> list[int]:
        """The processes in it and in the groups below it. Those that only wait to be asked for their exit are not.

        To be in one of its hierarchies is enough: a process that moved itself out of one, as root may, is still found.
        Not so without ``everywhere``, which asks one of them: enough for what is only to be told something.
        """
        found = dict[int, None]()
        for top in self._made()[: None if everywhere else 1]:
            for folder in self._below(top):
                found.update((int(pid), None) for pid in (self._files.read(f"{folder}/cgroup.procs") or "").split())
        return list(found)

    def is_empty(self) -> bool:
        """Whether no process is in it."""
        return not self.pids()

    def inhabited(self) -> str:
        """A folder of it, or one below, that holds a process; empty if none does. Asked of *one* hierarchy, the last it
        was made in: of a lease that is one in which all its guests are together, because it limits them. A process that
        moves itself out of it, as root may, is still below the supervisor, and is found there. What cannot be looked
        into counts as inhabited."""
        made = self._made()
        folder = top = self._v2 if self._v2 is not None else made[-1] if made else ""
        try:
            for folder in self._below(top, sure=True):
                if not self._files.is_blank(f"{folder}/cgroup.procs"):
                    return folder
        except OSError:
            return folder
        return ""

    def set_limits(self, limits: GroupLimits) -> list[str]:
        """Cap it; returns what cannot be capped here, by name. To be called before anything joins."""
        wanted = {
            "memory": bool(limits.memory_bytes),
            "pids": bool(limits.pids_max),
            "cpu": bool(limits.cores or limits.cpu_weight),
            "cpuset": bool(limits.cpus),
            "devices": limits.devices is not None,
        }
        return [name for name, is_wanted in wanted.items() if is_wanted and not self._cap(name, limits)]

    def kill(self, known: Iterable[int] = ()) -> None:
        """SIGKILL for everything in it. It returns at once; whether they are gone, ``is_empty`` says. ``known``: who is
        thought to be in it, which saves a list.

        ``cgroup.kill`` aims at the first thread of each process, and misses a process whose first thread has ended
        while others go on; so a process that is still listed at the next attempt is sent a signal of its own as well.
        (At the first attempt nearly all are only about to exit, and finding them all is most of what ending many
        costs.) For the same reason the first attempt asks one hierarchy and not all: a process that has moved itself
        out of that one, as root may, is found by the next. And it freezes none of them, unless they fork so fast that
        it does not reach them all: to freeze and to thaw costs twice what all the rest does.
        """
        if self._v2 is not None and self._tried(f"{self._v2}/cgroup.kill", "1"):
            if self.was_struck:
                self._kill_each(everywhere=True)
            self.was_struck = True
            return
        if not self.was_struck and self._signal_each(signal.SIGKILL, _UNFROZEN_ROUNDS, known, everywhere=False):
            self.was_struck = True
            return
        self.freeze()
        try:
            self._kill_each(everywhere=self.was_struck)
        finally:
            self.thaw()
        self.was_struck = True

    def signal(self, number: int, known: Iterable[int] = ()) -> set[int]:
        """Send this signal to everything in it now; what is forked meanwhile may miss it. Returns the pids it reached.
        ``known``: who is thought to be in it, which saves a list."""
        reached = set[int]()
        self._signal_each(number, 1, known, reached, everywhere=False)
        return reached

    @property
    def can_freeze(self) -> bool:
        """Whether what is frozen here can still be killed; in the first version it has to be thawed for that."""
        return self._v2 is not None

    def is_frozen(self) -> bool:
        """Whether everything in it stands still by now."""
        return _value(self._files.read(f"{self._v2}/cgroup.events") or "", "frozen") == 1

    def freeze(self) -> bool:
        """Let everything in it stand still, soon; False where that cannot be had."""
        if self._v2 is not None:
            return self._tried(f"{self._v2}/cgroup.freeze", "1")
        return "freezer" in self._where.v1 and self._tried(f"{self._v1('freezer')}/freezer.state", "FROZEN")

    def thaw(self) -> bool:
        """Go on."""
        if self._v2 is not None:
            return self._tried(f"{self._v2}/cgroup.freeze", "0")
        return "freezer" in self._where.v1 and self._tried(f"{self._v1('freezer')}/freezer.state", "THAWED")

    def usage(self) -> GroupUsage:
        """What its processes used, those that have ended included. Zero where it is not counted."""
        used, now = self.used(), self._memory("memory.usage_in_bytes", "memory.current")
        peak = max(used.memory_peak_bytes, now)
        return GroupUsage(cpu_ns=used.cpu_ns, memory_bytes=now, memory_peak_bytes=peak, oom_kills=self.oom_kills())

    def used(self) -> GroupUsage:
        """The same, once nothing is in it: what counts in the end, with half as many files to read."""
        if self._v2 is not None:
            cpu_ns = _value(self._files.read(f"{self._v2}/cpu.stat") or "", "usage_usec") * 1000
        else:
            cpu_ns = self._files.number(f"{self._v1('cpuacct')}/cpuacct.usage") if "cpuacct" in self._where.v1 else 0
        return GroupUsage(cpu_ns=cpu_ns, memory_peak_bytes=self._memory("memory.max_usage_in_bytes", "memory.peak"))

    def _memory(self, v1: str, v2: str) -> int:
        if "memory" in self._where.v1:
            return self._files.number(f"{self._v1('memory')}/{v1}")
        return self._files.number(f"{self._v2}/{v2}") if self._v2 is not None else 0

    def shared_bytes(self) -> int:
        """Memory of files in memory (memfd, tmpfs) that its processes wrote first, and that is not freed yet. What
        the last two seconds changed may be missing."""
        if "memory" in self._where.v1:
            return _value(self._files.read(f"{self._v1('memory')}/memory.stat") or "", "total_shmem")
        return _value(self._files.read(f"{self._v2}/memory.stat") or "", "shmem") if self._v2 is not None else 0

    def oom_kills(self) -> int:
        """How many of its processes the kernel ended for want of memory."""
        if "memory" in self._where.v1:
            return _value(self._files.read(f"{self._v1('memory')}/memory.oom_control") or "", "oom_kill")
        return _value(self._files.read(f"{self._v2}/memory.events") or "", "oom_kill") if self._v2 is not None else 0

    def remove(self) -> list[str]:
        """Take it away, with what was made below it; returns the folders that would not go (processes are in them)."""
        left = list[str]()
        for _ in range(_REMOVE_ROUNDS):
            left = [
                folder
                for top in self._folders()
                if not self._is_removed(top)
                for folder in self._remaining_folders(top)
            ]
            if not left:
                self._bases = None if self._bases is None else ()
                break
        return left

    # ---- folders ----

    def _v1(self, controller: str) -> str:
        return f"{self._where.v1[controller]}/{self.name}"

    def _made(self) -> list[str]:
        """Its folders, one for each hierarchy it was made in; controllers mounted together share theirs."""
        folders = self._folders()
        return folders if self._bases is not None else [folder for folder in folders if self._files.has(folder)]

    def _folders(self) -> list[str]:
        """The same; if we have not made it, all that there may be."""
        if self._bases is not None:
            return [f"{base}/{self.name}" for base in self._bases]
        folders = [self._v2] if self._v2 is not None else []
        return list(dict.fromkeys((*folders, *(self._v1(controller) for controller in self._where.v1))))

    def _know(self, base: str) -> None:
        if self._bases is not None and base not in self._bases:
            self._bases += (base,)

    def _joined(self) -> list[str]:
        """Where its processes are. Where only the lease is limited they are in the lease's own group: a group for each
        guest would be made and taken away there for nothing, and that is most of what a start and an end cost."""
        made = self._made()
        if not self.is_guests:
            return made
        lease = os.path.dirname(self.name)
        bases = [base for base in self._where.v1.values() if f"{base}/{self.name}" not in made]
        return made + [f"{base}/{lease}" for base in dict.fromkeys(bases) if self._files.has(f"{base}/{lease}")]

    def _below(self, top: str, *, sure: bool = False) -> Iterator[str]:
        """The folder and all below it, each before what it holds. ``sure``: ``OSError`` where that cannot be seen."""
        yield top
        for folder in self._files.folders(top, sure=sure):
            yield from self._below(folder, sure=sure)

    def _remaining_folders(self, top: str) -> list[str]:
        """Folders that were not removed: something is in them, perhaps only groups that were made below."""
        return [folder for folder in reversed(list(self._below(top))) if not self._is_removed(folder)]

    def _wanted_v1(self) -> list[str]:
        """Where something is counted or ended."""
        wanted = [name for name in self._where.v1 if name in _KEEPS]
        return wanted if wanted or self._v2 is not None else list(self._where.v1)[:1]

    def _make_v2(self) -> None:
        assert self._where.v2 is not None
        folder, controllers = self._where.v2.base, self._where.v2.controllers
        self._know(folder)
        parts = self.name.split("/")
        for depth, part in enumerate(parts):
            folder = f"{folder}/{part}"
            self._files.make(folder)
            if controllers and depth < 2:  # office and lease hold groups, not processes, and hand everything on
                self._files.write(
                    f"{folder}/cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(controllers))
                )

    def _make_v1(self, controller: str) -> None:
        folder = self._where.v1[controller]
        self._know(folder)
        for part in self.name.split("/"):
            above, folder = folder, f"{folder}/{part}"
            self._files.make(folder)
            if controller == "cpuset":  # nothing can join before it says which cores and which memory it means
                for name in ("cpuset.cpus", "cpuset.mems"):
                    if not (self._files.read(f"{folder}/{name}") or "").strip():
                        self._files.write(f"{folder}/{name}", (self._files.read(f"{above}/{name}") or "").strip())

    def _is_removed(self, folder: str) -> bool:
        try:
            self._files.remove(folder)
        except OSError:
            return False
        return True

    # ---- limits ----

    def _cap(self, controller: str, limits: GroupLimits) -> bool:
        v2 = self._where.v2
        if controller in self._where.v1:
            self._make_v1(controller)
            folder, caps, swap = self._v1(controller), _caps_v1(controller, limits), _SWAP_V1
        elif v2 is not None and controller in v2.controllers:
            folder, caps, swap = str(self._v2), _caps_v2(controller, limits), _SWAP_V2
        else:
            return False
        is_capped = all(self._tried(f"{folder}/{name}", text) for name, text in caps)
        if controller == "memory" and not limits.swap:  # a kernel that does not count swap has no such file
            self._tried(f"{folder}/{swap.name}", swap.text(limits))
        return is_capped

    # ---- signals ----

    def _kill_each(self, *, everywhere: bool) -> None:
        """SIGKILL for each process, those that are forked meanwhile included, until a list shows no new one."""
        self._signal_each(signal.SIGKILL, _KILL_ROUNDS, everywhere=everywhere)

    def _signal_each(
        self,
        number: int,
        rounds: int,
        known: Iterable[int] = (),
        reached: set[int] | None = None,
        *,
        everywhere: bool = True,
    ) -> bool:
        """Through pidfds, and only to processes still listed after theirs was opened, so never to another one
        that reuses a pid. Each list confirms those before it and shows new ones, until one shows none or ``rounds`` are
        over. Returns whether the last list showed no new process; ``reached`` gets the pids that were signalled."""
        reached = set() if reached is None else reached
        held = dict[int, int]()
        try:
            held.update((pid, fd) for pid in known if (fd := pidfd_open(pid)) is not None)
            for round_ in range(rounds + 1):
                listed = self.pids(everywhere=everywhere)
                for pid in listed:
                    if pid in held:
                        pidfd_send_signal(held[pid], number)
                        reached.add(pid)
                while held:
                    os.close(held.popitem()[1])
                fresh = [pid for pid in listed if pid not in reached]
                if not fresh or round_ == rounds:
                    return not fresh
                held = {pid: fd for pid in fresh if (fd := pidfd_open(pid)) is not None}
            return False
        finally:
            for fd in held.values():
                os.close(fd)

    # ---- files ----

    def _tried(self, path: str, text: str) -> bool:
        try:
            self._files.write(path, text)
        except OSError:
            return False
        return True


class _Swap(NamedTuple):
    """The file that caps swap. The first version counts it together with memory."""

    name: str
    with_memory: bool

    def text(self, limits: GroupLimits) -> str:
        return str(limits.memory_bytes if self.with_memory else 0)


_SWAP_V1: Final = _Swap("memory.memsw.limit_in_bytes", True)
_SWAP_V2: Final = _Swap("memory.swap.max", False)


def _caps_v1(controller: str, limits: GroupLimits) -> list[tuple[str, str]]:
    match controller:
        case "memory":
            return [("memory.limit_in_bytes", str(limits.memory_bytes))]
        case "pids":
            return [("pids.max", str(limits.pids_max))]
        case "cpu":
            quota, shares = str(limits.cores * _CPU_PERIOD_US or -1), str(max(2, limits.cpu_weight * 1024 // 100))
            weighed = [("cpu.shares", shares)] if limits.cpu_weight else []
            return [*weighed, ("cpu.cfs_period_us", str(_CPU_PERIOD_US)), ("cpu.cfs_quota_us", quota)]
        case "cpuset":
            return [("cpuset.cpus", _listed(limits.cpus))]
        case _:
            allowed = (*BASIC_DEVICES, *(limits.devices or ()))
            return [("devices.deny", "a"), *(("devices.allow", device.text) for device in allowed)]


def _caps_v2(controller: str, limits: GroupLimits) -> list[tuple[str, str]]:
    match controller:
        case "memory":
            return [("memory.max", str(limits.memory_bytes))]
        case "pids":
            return [("pids.max", str(limits.pids_max))]
        case "cpu":
            weighed = [("cpu.weight", str(min(limits.cpu_weight, 10_000)))] if limits.cpu_weight else []
            return [*weighed, ("cpu.max", f"{limits.cores * _CPU_PERIOD_US or 'max'} {_CPU_PERIOD_US}")]
        case _:
            return [("cpuset.cpus", _listed(limits.cpus))]


def _listed(cpus: Iterable[int]) -> str:
    return ",".join(str(cpu) for cpu in sorted(cpus))


def _value(text: str, name: str) -> int:
    """One number of a file of ``name value`` lines; 0 where it is not told."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0
