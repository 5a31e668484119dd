"""A guest's resource limits and usage, and the part that works without control groups.

Without groups a cap is the kernel's cap on *one* process: enough against a mistake, not against malice, and
``describe`` of the groups says so. Memory is not capped that way: a limit on addresses breaks what maps more than it
uses (every CUDA program), so it is measured (``memory_watch``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import NamedTuple

from sublet.lazy_dataclass import dataclass


class DeviceNode(NamedTuple):
    """A device node, as the device group knows it."""

    kind: str
    """``c`` or ``b``."""
    major: int
    minor: int | None = None
    """None: all of this major number."""

    @property
    def text(self) -> str:
        """As the kernel wants it."""
        return f"{self.kind} {self.major}:{'*' if self.minor is None else self.minor} rwm"


BASIC_DEVICES = (
    *(DeviceNode("c", 1, minor) for minor in (3, 5, 7, 8, 9)),  # null, zero, full, random, urandom
    *(DeviceNode("c", 5, minor) for minor in (0, 1, 2)),  # tty, console, ptmx
    DeviceNode("c", 136),  # pts
)
"""What every program may open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Caps of a group; 0, empty and None leave the matter open."""

    memory_bytes: int = 0
    pids_max: int = 0
    cores: int = 0
    """So many cores' worth of time, on any of them."""
    cpu_weight: int = 0
    """The share of processor time when all cores are busy; 100 is the kernel's default."""
    swap: bool = True
    """Whether it may use swap space beyond its memory."""
    home_bytes: int = 0
    """The size of the home folder of a tenant's guest, which is memory."""
    cpus: tuple[int, ...] = ()
    """These cores and no others."""
    devices: tuple[DeviceNode, ...] | None = None
    """These devices besides ``BASIC_DEVICES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUsage:
    """What was used so far."""

    cpu_ns: int = 0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    oom_kills: int = 0
    """How often the kernel ended a process for want of memory."""


def pin(cpus: tuple[int, ...], pid: int = 0) -> None:
    """Keep this process (0: the calling one), and what it starts, on these cores. A program may take it back; a cpuset
    it may not."""
    if cpus:
        with contextlib.suppress(OSError):  # cores that this process may not use
            os.sched_setaffinity(pid, cpus)


# ---------------------------------------------------------------------------------------------------------------- cores
#
# Chooses the cores of a lease where CPU time cannot be capped. Pure.


def choose(count: int, allowed: Iterable[int], taken: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """``count`` of the allowed cores: those that the fewest other leases are kept on, the lowest numbers first.

    ``taken`` are the cores of the other leases, one by one. With as many as there are, or more, it is all of them; with
    none asked for, or none allowed, nothing is to be kept anywhere.
    """
    found = sorted(set(allowed))
    if count <= 0:
        return ()
    use = dict.fromkeys(found, 0)
    for cores in taken:
        for core in cores:
            if core in use:
                use[core] += 1
    return tuple(sorted(sorted(found, key=lambda core: (use[core], core))[:count]))
