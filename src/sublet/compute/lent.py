"""Shared memory in which a job passes large arrays to its workers, kept for a while and reused by the next job.

To take fresh memory costs the kernel several times what it costs to copy into memory that is there. So what a job's
workers had is not given back at once: the next job that lends an array of about the size has it filled with that one.

A file of such memory can neither shrink nor grow, and only the holder, which mapped it before it was sealed, can
write to it. Its workers map it privately. It is filled again only after the office has said that no lease of the job is
left, so that no worker has it any more; what may still be looked at is never filled again.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterable
from typing import Final

from sublet.background import start_timer
from sublet.state.transfer.memory import copy_bytes
from sublet.values import MIB
from sublet.wire.lasting import LENT_SEALS, POPULATE
from sublet.wire.shared import write_all

LENT_MIN: Final = 16 * MIB
"""Smaller arrays go in sealed memory of their own."""
KEPT_FOR_S: Final = 60.0
"""What no job has filled again for so long is given back."""
KEPT_SHARE: Final = 4
"""All that is kept takes at most one part in so many of the machine's memory."""


class Lent:
    """One file of such memory."""

    __slots__ = ("_is_populated", "_mapped", "fd", "free_since_s", "pid", "size")

    def __init__(self, content: memoryview) -> None:
        """A new one, holding these bytes (format ``B``). They are written, not copied: see ``shared.write_shared``."""
        self.size = content.nbytes
        self.pid = os.getpid()
        self.free_since_s = 0.0
        self._is_populated = False
        self.fd = os.memfd_create("sublet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            write_all(self.fd, content, 0)
            self._mapped = mmap.mmap(self.fd, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, LENT_SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(self.fd)
            raise

    def fits(self, size: int) -> bool:
        """Whether it is large enough, and not far too large."""
        return size <= self.size <= 2 * size

    def fill(self, content: memoryview) -> None:
        """Let it hold these bytes from its beginning on. No process may be reading it."""
        if not self._is_populated:  # else each page of it costs a fault
            self._is_populated = True
            with contextlib.suppress(OSError):
                self._mapped.madvise(POPULATE)
        with memoryview(self._mapped) as target, target[: content.nbytes] as part:
            copy_bytes(part, content)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # one that could not be made
            os.close(self.fd)


class LentMemory:
    """What one process keeps. Safe to use from several threads."""

    def __init__(self, bytes_max: int | None = None) -> None:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._bytes_max = physical // KEPT_SHARE if bytes_max is None else bytes_max
        self.forget()

    def forget(self) -> None:
        """Keep nothing. A fork has the same memory as its parent, and must not fill it."""
        self._lock = threading.Lock()
        self._free: list[Lent] = []
        """Those that came first are the first to go."""
        self._is_timed = False

    def holding(self, content: memoryview) -> Lent:
        """A file that holds these bytes, for this caller alone."""
        with self._lock:
            fitting = min((one for one in self._free if one.fits(content.nbytes)), key=_size, default=None)
            if fitting is not None:
                self._free.remove(fitting)
        if fitting is None:
            return Lent(content)
        fitting.fill(content)
        return fitting

    def give_back(self, files: Iterable[Lent]) -> None:
        """No worker reads these any more."""
        mine = [one for one in files if one.pid == os.getpid()]
        dropped = list[Lent]()
        with self._lock:
            for one in mine:
                one.free_since_s = time.monotonic()
                self._free.append(one)
            while sum(map(_size, self._free)) > self._bytes_max:
                dropped.append(self._free.pop(0))
        self._look_later()

    def let_go(self, free_for_s: float = 0.0) -> None:
        """Give back what no job has had for so long."""
        before_s = time.monotonic() - free_for_s
        with self._lock:
            dropped = [one for one in self._free if one.free_since_s <= before_s]
            self._free = [one for one in self._free if one.free_since_s > before_s]
        dropped.clear()  # which takes a while, so without the lock

    @property
    def kept_bytes(self) -> int:
        with self._lock:
            return sum(map(_size, self._free))

    def _look_later(self) -> None:
        with self._lock:
            if self._is_timed or not self._free:
                return
            self._is_timed = True
        try:
            start_timer("lent_memory", KEPT_FOR_S / 2, self._look)
        except RuntimeError:  # no room for a thread: then nothing is kept
            self._is_timed = False
            self.let_go()

    def _look(self) -> None:
        self._is_timed = False
        self.let_go(KEPT_FOR_S)
        self._look_later()


def _size(one: Lent) -> int:
    return one.size


lent_memory: Final = LentMemory()
os.register_at_fork(after_in_child=lent_memory.forget)
