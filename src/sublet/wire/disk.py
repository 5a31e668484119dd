"""How much of the disk below an office's folder is held back, and for what.

The journal must be written as long as anything lives, even on a full disk. So a part of the disk is never lent as
blocks (``withheld``), guests' logs stop growing before it is used up (``for_journal``), new leases are refused when
little is left (``short``), and a file of fixed size (``file``) lies there to be removed when the journal could not be
written otherwise. The office, its agent and the supervisor all reckon with the same numbers.
"""

from __future__ import annotations

import os
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.values import GIB, MIB

RESERVE_FILE: Final = "journal.reserve"
"""In the state folder: room on the disk that is given up for the journal."""
WITHHELD_MIN: Final = 1 * GIB
WITHHELD_SHARE: Final = 20
"""A twentieth of the disk, if that is more."""
WITHHELD_SHARE_MAX: Final = 8
"""An eighth of the disk at most, however small it is."""
FILE_MAX: Final = 64 * MIB
"""Enough for some ten thousand leases to be renewed, released and billed."""
FOR_JOURNAL_MAX: Final = 512 * MIB
SHORT_MAX: Final = 128 * MIB


@dataclass(frozen=True, slots=True)
class DiskReserve:
    """What is kept back of one disk, in bytes."""

    withheld: int
    """Never lent as blocks; the three below are parts of it."""
    file: int
    """Of the file that is given up."""
    for_journal: int
    """Nothing but the journal is written by us when less than this is free."""
    short: int
    """No new lease is granted when less than this is free."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """What a disk has, in bytes."""

    size: int
    free: int
    """For a user who is not root."""


def disk_reserve(disk_bytes: int) -> DiskReserve:
    """For a disk of this size."""
    withheld = min(max(WITHHELD_MIN, disk_bytes // WITHHELD_SHARE), disk_bytes // WITHHELD_SHARE_MAX)
    return DiskReserve(
        withheld=withheld,
        file=min(withheld // 4, FILE_MAX),
        for_journal=min(withheld // 2, FOR_JOURNAL_MAX),
        short=min(withheld // 8, SHORT_MAX),
    )


def space_of(folder: str | os.PathLike[str]) -> DiskSpace:
    """The disk behind a folder, now."""
    found = os.statvfs(folder)
    return DiskSpace(size=found.f_blocks * found.f_frsize, free=found.f_bavail * found.f_frsize)
