"""How much of the machine this process may use: cores, memory and disk, as the kernel grants them.

A container or a service has less than the machine: a set of cores, a quota of processor time, a bound on memory. Each
bound holds for everything below it, so they are read from this process's own control group up to the root, and the
least of them counts. Both kinds of control groups (v1 and v2) are looked at, since a machine may have both.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sublet.values import GIB, MIB
from sublet.wire.disk import RESERVE_FILE, disk_reserve, space_of

_GROUPS: Final = "sys/fs/cgroup"
_MEMORY_FILES: Final = ("memory.max", "memory.limit_in_bytes")


def usable_cores(root: str = "/") -> int:
    """Whole cores, at least one: those this process may run on, and no more than its quota of time is worth."""
    cores = len(os.sched_getaffinity(0))
    for folder in _own_groups(Path(root), "cpu"):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, math.floor(quota))
    return max(1, cores)


def memory_bytes(root: str = "/") -> int:
    """The memory this process may count on: that of the machine, or of its control groups if that is less."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _own_groups(Path(root), "memory"):
        for name in _MEMORY_FILES:
            text = _text(folder / name)
            if text.isdigit():  # "max" is no bound
                least = min(least, int(text))
    return least


def block_bytes(folder: Path, keep_back: int = 0) -> int:
    """What may be lent of the disk behind an office's folder: what is free now, and what is lent or kept already, since
    the books take that off once more, without what is kept back (``wire.disk``; ``keep_back``: at least so much).
    Whole GiB; of less than one whole MiB."""
    space = space_of(folder)
    kept_back = max(disk_reserve(space.size).withheld, keep_back) - _size_on_disk(folder / RESERVE_FILE)
    available = max(0, space.free + _in_images(folder / "blocks") - max(0, kept_back))
    unit = GIB if available >= GIB else MIB
    return available // unit * unit


def disk_bytes(folder: Path) -> int:
    """How large the disk behind an office's folder is: ``block_bytes`` is never more."""
    return space_of(folder).size


def offer_again(before: int, available: int) -> bool:
    """Whether what is offered of a disk changes, now that ``available`` may be lent. Less always; more only if it is
    worth an entry in the journal, since other programs write and remove files all day."""
    return available < before or available - before >= max(before // 16, 1)


def _in_images(blocks: Path) -> int:
    """What the disk images of leases and volumes have taken; of a plain folder only what is in it is missing."""
    return sum(map(_size_on_disk, (*blocks.glob("leases/*/*.img"), *blocks.glob("named/*/*/*.img"))))


def _size_on_disk(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def _own_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's groups that may bound ``controller``, from the innermost to the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        named = controllers.split(",")
        if controllers and controller not in named:
            continue
        tops = (root / _GROUPS, root / _GROUPS / "unified") if not controllers else _tops(root, controllers, controller)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])


def _tops(root: Path, controllers: str, controller: str) -> tuple[Path, ...]:
    """Where a v1 hierarchy is mounted: under the name of its controllers, or of one of them."""
    return tuple(root / _GROUPS / name for name in dict.fromkeys((controllers, controller)))


def _quota(folder: Path) -> float | None:
    """Cores' worth of time, or None without a bound."""
    limit, _, period = _text(folder / "cpu.max").partition(" ")
    if not limit:
        limit, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not limit.isdigit() or not period.isdigit() or int(period) == 0:  # "max" in v2, "-1" in v1
        return None
    return int(limit) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
