"""Buffers that a guest already has, so that unchanged ones are not sent again.

Each large buffer that goes to the guest lies in shared memory that is sealed: it cannot be changed any more, neither
here nor there. So what the guest has is known exactly, and whether a buffer still holds the same is a comparison with
that memory, byte by byte, which stops at the first difference. Nothing here trusts a version counter, an address or an
object's identity, so an array that was changed in place always arrives changed. Before the bytes a cheaper look is
tried where there is one: whether the kernel saw any write to those pages since.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from sublet.background import start_timer
from sublet.state.transfer.memory import address_of, copy_bytes
from sublet.state.transfer.pages import Pages, process_pages
from sublet.values import MIB
from sublet.wire.persistent_memory import LENT_SEALS, POPULATE
from sublet.wire.sealed_memory import write_all

KEPT_MAX: Final = 96
"""Buffers that a guest keeps; each holds a descriptor open there."""
KEPT_SHARE: Final = 4
"""They take at most one part in so many of the machine's memory."""
KEPT_FOR_S: Final = 60.0
"""What was not used for so long is let go of."""
COMPARED_MAX: Final = 4
"""Kept buffers of the same size that one is compared with; most differ in the first page."""
TRACKED_MIN: Final = 1 * MIB
"""Smaller buffers are compared: to have the kernel watch them costs a fault at each page's next write."""
BUSY_CALLS: Final = 8
_STEP: Final = 64 * MIB


class _One:
    __slots__ = ("address", "look", "mapped", "size", "used_s")

    def __init__(self, mapped: mmap.mmap, address: int, look: int, used_s: float) -> None:
        self.mapped = mapped
        self.size = len(mapped)
        self.address = address
        """Where the holder's own copy lies."""
        self.look = look
        """The kernel's answers up to this look are known to agree with it; 0: it was not asked."""
        self.used_s = used_s


class BufferCache:
    """What one guest keeps. Used by one thread at a time."""

    def __init__(self, bytes_max: int | None = None, pages: Pages | None = None) -> None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._bytes_max = memory_bytes // KEPT_SHARE if bytes_max is None else bytes_max
        self._pages = process_pages() if pages is None else pages
        self._found: OrderedDict[int, _One] = OrderedDict()
        self._bytes = 0
        self._last = 0
        self._forget: list[int] = []
        self._looked: tuple[int, int, int] = (0, 0, 0)
        """Address, size and number of the last look: what is copied after it is compared with what it finds."""
        self._busy: dict[tuple[int, int], int] = {}
        """Memory that changes from call to call, and for how many more calls the kernel is not asked about it."""

    def find(self, view: memoryview) -> int:
        """The number under which the guest has exactly these bytes; 0 if it does not."""
        address, size = address_of(view), view.nbytes
        same_size = [item for item in self._found.items() if item[1].size == size]
        same_size.sort(key=lambda item: item[1].address != address)  # most likely it is the one that lay here before
        tracked = same_size[0][1] if same_size and same_size[0][1].address == address else None
        look, written = self._pages_written(address, size, tracked)
        self._looked = (address, size, look)
        for number, one in same_size[:COMPARED_MAX]:
            if same_bytes(view, one.mapped, size, written if one is tracked else None):
                one.used_s, one.address, one.look = time.monotonic(), address, look
                self._found.move_to_end(number)
                return number
        if tracked is not None and look:  # tracked, and written to: each page of it cost a fault
            self._busy[address, size] = BUSY_CALLS
        return 0

    def took(self, view: memoryview, fd: int) -> int:
        """They go to the guest in this shared memory: the number it keeps them under; 0: it does not."""
        if view.nbytes > self._bytes_max:
            return 0
        mapped = mmap.mmap(fd, view.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
        address = address_of(view)
        look = self._looked[2] if self._looked[:2] == (address, view.nbytes) else 0
        for number in [number for number, one in self._found.items() if one.address == address]:
            self._drop(number)  # of each buffer the last version
        self._last += 1
        self._found[self._last] = _One(mapped, address, look, time.monotonic())
        self._bytes += view.nbytes
        while self._bytes > self._bytes_max or len(self._found) > KEPT_MAX:
            self._drop(next(iter(self._found)))
        return self._last

    def to_forget(self) -> list[int]:
        """What the guest need not keep any more, once each. Say it before the next number is used."""
        before_s = time.monotonic() - KEPT_FOR_S
        for number in [number for number, one in self._found.items() if one.used_s < before_s]:
            self._drop(number)
        forget, self._forget = self._forget, []
        return forget

    def forget_all(self) -> None:
        """Whether the guest has what we believe is not known: everything goes to it anew."""
        for number in list(self._found):
            self._drop(number)

    def clear(self) -> None:
        """The guest is gone, and what it kept with it."""
        for number in list(self._found):
            self._drop(number)
        self._forget = []

    @property
    def kept_bytes(self) -> int:
        return self._bytes

    def _pages_written(self, address: int, size: int, tracked: _One | None) -> tuple[int, list[tuple[int, int]] | None]:
        """Ask the kernel: the number of this look (0: it does not know), and the parts of the buffer, as offsets, that
        were written to since it was last known to be what the guest has (None: any may be)."""
        if size < TRACKED_MIN:
            return 0, None
        left = self._busy.pop((address, size), 0)
        if left:
            if left > 1:
                self._busy[address, size] = left - 1
            return 0, None
        look, ranges = self._pages.written_since(address, size, 0 if tracked is None else tracked.look)
        if ranges is None or tracked is None or not tracked.look:
            return look, None
        return look, [(max(start, address) - address, min(end, address + size) - address) for start, end in ranges]

    def _drop(self, number: int) -> None:
        one = self._found.pop(number)
        self._bytes -= one.size
        with contextlib.suppress(BufferError):
            one.mapped.close()
        self._forget.append(number)


def same_bytes(view: memoryview, mapped: mmap.mmap, size: int, parts: Sequence[tuple[int, int]] | None = None) -> bool:
    """Whether the two hold the same, or do so in these parts. Stops at the first difference, and lets other threads run
    meanwhile."""
    with memoryview(mapped) as other:
        ours, theirs = address_of(view), address_of(other)
        for begin, end in [(0, size)] if parts is None else parts:
            for start in range(begin, end, _STEP):
                if _memcmp(ours + start, theirs + start, min(_STEP, end - start)) != 0:
                    return False
    return True


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


# ----------------------------------------------------------------------------------------------------------------- lent
#
# Shared memory in which a job passes large arrays to its workers, kept for a while and reused by the next job.
#
# To take fresh memory costs the kernel several times what it costs to copy into memory that is there. So what a job's
# workers had is not given back at once: the next job that lends an array of about the size has it filled with that one.
#
# A file of such memory can neither shrink nor grow, and only the holder, which mapped it before it was sealed, can
# write to it. Its workers map it privately. It is filled again only after the office has said that no lease of the job
# is left, so that no worker has it any more; what may still be looked at is never filled again.


LENT_MIN: Final = 16 * MIB
"""Smaller arrays go in sealed memory of their own."""


class LentFile:
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
        self._free: list[LentFile] = []
        """Those that came first are the first to go."""
        self._is_timed = False

    def holding(self, content: memoryview) -> LentFile:
        """A file that holds these bytes, for this caller alone."""
        with self._lock:
            fitting = min((one for one in self._free if one.fits(content.nbytes)), key=_size, default=None)
            if fitting is not None:
                self._free.remove(fitting)
        if fitting is None:
            return LentFile(content)
        fitting.fill(content)
        return fitting

    def give_back(self, files: Iterable[LentFile]) -> None:
        """No worker reads these any more."""
        mine = [one for one in files if one.pid == os.getpid()]
        dropped = list[LentFile]()
        with self._lock:
            for one in mine:
                one.free_since_s = time.monotonic()
                self._free.append(one)
            while sum(map(_size, self._free)) > self._bytes_max:
                dropped.append(self._free.pop(0))
        self._start_timer()

    def trim(self, free_for_s: float = 0.0) -> None:
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

    def _start_timer(self) -> None:
        with self._lock:
            if self._is_timed or not self._free:
                return
            self._is_timed = True
        try:
            start_timer("lent_memory", KEPT_FOR_S / 2, self._on_timer)
        except RuntimeError:  # no room for a thread: then nothing is kept
            self._is_timed = False
            self.trim()

    def _on_timer(self) -> None:
        self._is_timed = False
        self.trim(KEPT_FOR_S)
        self._start_timer()


def _size(one: LentFile) -> int:
    return one.size


lent_memory: Final = LentMemory()
os.register_at_fork(after_in_child=lent_memory.forget)
