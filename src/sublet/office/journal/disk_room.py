"""Room on the journal's disk: how much is left, and a reserve file that is freed for the journal.

The file is laid out while there is room. When the disk is full, whatever filled it, the file is removed, and the
journal is written where it was: live leases are renewed, released and billed as before, and only new ones are refused.
When there is room again the file is laid out anew.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sublet.values import MIB, format_size
from sublet.wire.disk import RESERVE_FILE, DiskReserve, DiskSpace, disk_reserve, space_of

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
LOOK_NS: Final = 20_000_000
"""The disk is looked at this often, at most."""
TO_OPEN: Final = 6 * MIB
"""What opening a journal writes: its log as it is laid out, SQLite's shared memory, and a little."""
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

_log: Final = logging.getLogger("sublet.office")


class DiskRoom:
    """The disk of one state folder."""

    def __init__(
        self,
        home: Path,
        *,
        now_ns: Callable[[], int],
        space: Callable[[Path], DiskSpace] = space_of,
    ) -> None:
        self.path: Final = home / RESERVE_FILE
        self._home = home
        self._now_ns = now_ns
        self._space_of = space
        self._looked_ns: int | None = None
        self._is_short = False
        self._does_without = False
        self.space = space(home)
        """As it was when it was looked at last."""

    @property
    def reserve(self) -> DiskReserve:
        """What is kept back of this disk."""
        return disk_reserve(self.space.size)

    # ---- the file ----

    def before_opening(self) -> None:
        """The journal is about to be opened, which needs some room."""
        if self._read_space().free < TO_OPEN:
            self.remove_file()

    def remove_file(self) -> bool:
        """Remove the file, so that the journal has its place. False if there is none."""
        try:
            os.unlink(self.path)
        except OSError:
            return False
        self._is_short = True
        _log.warning(
            "the disk of %s is full: the journal is written to the room that was reserved for it (%s). "
            "New leases are refused until there is room.",
            self._home,
            format_size(self.reserve.file),
        )
        return True

    def lay_out(self) -> None:
        """Have the file, if there is room for it and more. One that is there and has its size is left alone."""
        wanted = self.reserve.file
        if self._does_without or self._file_bytes() == wanted or self.space.free < wanted + 2 * self.reserve.short:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        try:
            fd = os.open(self.path, _NEW, 0o600)
            try:
                os.posix_fallocate(fd, 0, wanted)
            finally:
                os.close(fd)
        except OSError as error:
            self._does_without = error.errno not in FULL  # this file system has no such thing
            _log.warning("the reserve of the journal (%s) could not be laid out: %s", self.path, error.strerror)
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def _file_bytes(self) -> int | None:
        try:
            return os.stat(self.path, follow_symlinks=False).st_size
        except OSError:
            return None

    # ---- what is left ----

    def is_short(self) -> bool:
        """Whether so little is left that no new lease is granted. Looks at the disk, if that was not just done."""
        now_ns = self._now_ns()
        if self._looked_ns is None or now_ns - self._looked_ns >= LOOK_NS:
            self._looked_ns = now_ns
            with contextlib.suppress(OSError):
                self._judge(self._read_space().free)
        return self._is_short

    def _judge(self, free: int) -> None:
        """Short below the bound, and while the file is given up; not short any more when there is twice as much."""
        short = self.reserve.short
        if free < short * (2 if self._is_short else 1):
            self._is_short = True
        else:
            self.lay_out()
            self._is_short = self._file_bytes() is None and not self._does_without

    def why_short(self) -> str:
        """Why no new lease is granted; empty if it may be."""
        if not self.is_short():
            return ""
        return f"the disk of the office is full: {format_size(self.space.free)} of {format_size(self.space.size)} left"

    def _read_space(self) -> DiskSpace:
        self.space = self._space_of(self._home)
        return self.space
