"""Reads processes from /proc in one pass, and signals them without ever hitting a reused pid.

A pid alone identifies no process: it can be reused as soon as its process is gone. A process is its pid *and* the
moment it started (``ProcessInstance``), and a signal goes through a pidfd that was compared with both.

A pass is not a photograph. What is forked behind its back is missing from it, what ends meanwhile may or may not be in
it; but a process that lives through the whole pass is in it, because the kernel hands out pids in ascending order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

NS_PER_TICK: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_STAT_MAX: Final = 1024
_FIELDS: Final = 22
"""Number of fields that are wanted, counted from the state on."""
_ENVIRON_PIECE: Final = 1 << 16
_GONE: Final = frozenset(b"ZXx")
_STOPPED: Final = frozenset(b"Tt")


class ProcessInstance(NamedTuple):
    """One process, for good."""

    pid: int
    start_ticks: int
    """When it started, in the kernel's ticks since boot."""


class ProcessStat(NamedTuple):
    """What is known of a process at one moment."""

    pid: int
    ppid: int
    pgrp: int
    session: int
    state: int
    """The kernel's letter, as a byte: ``R``, ``S``, ``D``, ``T``, ``Z``, …"""
    threads: int
    start_ticks: int
    cpu_ticks: int
    """Its own time and that of the children it has waited for."""
    rss_pages: int

    @property
    def identity(self) -> ProcessInstance:
        return ProcessInstance(self.pid, self.start_ticks)

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it runs any more, and only its parent has yet to ask for its exit status.

        The first thread may end and leave the others at work; such a process looks like a zombie and is none.
        """
        return self.state in _GONE and self.threads <= 1

    @property
    def is_stopped(self) -> bool:
        """Whether it stands still by a signal (or in the hands of a debugger), and so cannot fork."""
        return self.state in _STOPPED


class Table:
    """The processes of one pass."""

    __slots__ = ("_children", "stats")

    def __init__(self, stats: Mapping[int, ProcessStat]) -> None:
        self.stats: Final = stats
        self._children: dict[int, list[ProcessStat]] | None = None

    def children(self, pid: int) -> list[ProcessStat]:
        """Those whose parent is ``pid``, the ended ones too."""
        if self._children is None:
            self._children = {}
            for stat in self.stats.values():
                self._children.setdefault(stat.ppid, []).append(stat)
        return self._children.get(pid, [])

    def below(self, pids: Iterable[int]) -> Iterator[ProcessStat]:
        """These (as far as they are there) and all that descends from them; each once."""
        waiting, seen = list(pids), set[int]()
        while waiting:
            pid = waiting.pop()
            stat = self.stats.get(pid)
            if pid in seen or stat is None:
                continue
            seen.add(pid)
            yield stat
            waiting.extend(child.pid for child in self.children(pid))

    def find(self, identity: ProcessInstance) -> ProcessStat | None:
        """This very process, if it is still listed."""
        stat = self.stats.get(identity.pid)
        return stat if stat is not None and stat.start_ticks == identity.start_ticks else None


class Procs:
    """The process table of the machine (or of a folder that looks like one)."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root

    def table(self) -> Table:
        """One pass over everything."""
        stats = {}
        for name in os.listdir(self.root):
            if name.isdigit():
                stat = self._read(name)
                if stat is not None:
                    stats[stat.pid] = stat
        return Table(stats)

    def stat(self, pid: int) -> ProcessStat | None:
        """One process; None if there is none."""
        return self._read(str(pid))

    def identity(self, pid: int) -> ProcessInstance | None:
        """Which process the pid means now."""
        stat = self.stat(pid)
        return stat.identity if stat is not None else None

    def children(self, pid: int) -> list[int] | None:
        """Those whose parent is this process (of one thread), as the kernel lists them, the ended ones too; None where
        it does not say. No child that was there all the time is left out, as long as the process reaps none of them
        meanwhile, which is certain of our own."""
        try:
            fd = os.open(f"{self.root}/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            raw = b"".join(iter(lambda: os.read(fd, _ENVIRON_PIECE), b""))
        finally:
            os.close(fd)
        return [int(word) for word in raw.split()]

    def is_there(self, identity: ProcessInstance) -> bool:
        """Whether this very process still runs."""
        stat = self.stat(identity.pid)
        return stat is not None and stat.start_ticks == identity.start_ticks and not stat.is_gone

    def uid(self, pid: int) -> int | None:
        """Whose process it is. One that must not be looked into counts as root's."""
        try:
            return os.stat(f"{self.root}/{pid}").st_uid
        except OSError:
            return None

    def marks(self, pid: int, prefix: str) -> dict[str, str]:
        """The variables of its *initial* environment that begin so; empty where it may not be read.

        A program that clears its environment with an exec is no longer marked, nor is one that writes over it.
        """
        raw = _read_all(f"{self.root}/{pid}/environ")
        wanted = os.fsencode(prefix)
        pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry.startswith(wanted))
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}

    def text(self, pid: int, name: str) -> str:
        """One of the files of a process; empty where it may not be read."""
        return os.fsdecode(_read_all(f"{self.root}/{pid}/{name}"))

    def send(self, identity: ProcessInstance, number: int) -> bool:
        """Signal this very process; False if it has ended or is not ours to signal."""
        pidfd = pidfd_open(identity.pid)
        if pidfd is None:
            return False
        try:
            stat = self.stat(identity.pid)  # read after the pidfd was made: if it matches, the pidfd is of this one
            if stat is None or stat.start_ticks != identity.start_ticks:
                return False
            return pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)

    def _read(self, name: str) -> ProcessStat | None:
        try:
            fd = os.open(f"{self.root}/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # what could not be seen is not gone for that
            return None
        try:
            return _parse(os.read(fd, _STAT_MAX))
        except ProcessLookupError:  # it ended between the two
            return None
        finally:
            os.close(fd)


def pidfd_open(pid: int) -> int | None:
    """A descriptor of the process that has this pid now, readable when it has ended; None if there is none."""
    try:
        return os.pidfd_open(pid)
    except (ProcessLookupError, PermissionError, OverflowError, ValueError):
        return None
    except OSError as error:
        if error.errno in _NO_SUCH:
            return None
        raise


_NO_SUCH: Final = frozenset((22, 2))
"""EINVAL and ENOENT: a thread's number, or one that no process can have."""


def pidfd_send_signal(pidfd: int, number: int) -> bool:
    """Signal through a pidfd; False if the process has ended or is not ours to signal."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _read_all(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return b"".join(iter(lambda: file.read(_ENVIRON_PIECE), b""))
    except OSError:
        return b""


def _parse(raw: bytes) -> ProcessStat | None:
    """One line of /proc/<pid>/stat. The name in it may hold anything, brackets and line ends too, so it is cut out."""
    head, bracket, tail = raw.rpartition(b")")
    f = tail.split(None, _FIELDS)
    if not bracket or len(f) < _FIELDS:
        return None
    try:
        return ProcessStat(
            int(head[: head.index(b" ")]),
            int(f[1]),
            int(f[2]),
            int(f[3]),
            f[0][0],
            int(f[17]),
            int(f[19]),
            int(f[11]) + int(f[12]) + int(f[13]) + int(f[14]),
            int(f[21]),
        )
    except ValueError:
        return None
