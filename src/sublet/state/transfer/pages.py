"""Asks the kernel which pages of this process's memory were written to.

Kernels from 6.7 on can write-protect pages so that the first write to one takes the protection off again by itself
(userfaultfd with WP_ASYNC), and tell in one call which pages have lost it, protecting them anew in the same step
(PAGEMAP_SCAN). Nothing can be written between the telling and the protecting, so a write is found either now or at
the next look.

What is said is about *addresses*: since the last look, these pages and no others were written to. That is safe
whatever owns the memory. New memory mapped at an old address has no registration, which the kernel checks in the same
call; a page that is not there (never touched, dropped with MADV_DONTNEED, swapped out) counts as written. A caller that
does not get a clear answer gets None, which means: look at the bytes.

Never asked about: shared, file-backed and device memory, which others write to without this process's page tables;
and any memory at all once something in the process pins pages (a GPU driver, RDMA, io_uring), since a device writes
past the protection. One read with O_DIRECT by another thread in the very moment of a look is what remains: nothing in
user space can see it.

There is one set of protections per process, and looking takes them off; so all looks go through one ``Pages``, which
remembers who has seen what.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections import deque
from typing import Final

from sublet.state.transfer.memory import PAGE

Range = tuple[int, int]

_SYS_USERFAULTFD: Final = {"x86_64": 323, "aarch64": 282}
_UFFD_USER_MODE_ONLY: Final = 1
_UFFD_API: Final = 0xAA
_FEATURES: Final = (1 << 13) | (1 << 15)
"""WP_UNPOPULATED, WP_ASYNC."""
_UFFDIO_API: Final = 0xC018AA3F
_UFFDIO_REGISTER: Final = 0xC020AA00
_UFFDIO_UNREGISTER: Final = 0x8010AA01
_REGISTER_WP: Final = 2
_PAGEMAP_SCAN: Final = 0xC0606610
_SCAN_ARG: Final = struct.Struct("12Q")
_WP_MATCHING_CHECKED: Final = 1 | 2
_WRITTEN: Final = 1 << 1
_PRESENT: Final = 1 << 3
_PROCMAP_QUERY: Final = 0xC0686611
_PROCMAP: Final = struct.Struct("9Q4I2Q")
_VMA_WRITABLE: Final = 2
_VMA_SHARED: Final = 8

RANGES_MAX: Final = 4096
"""Answers of the kernel in one call; with more to say it is called again."""
HISTORY_MAX: Final = 32
"""Looks of others that a region remembers. After more of them a reader looks at everything."""
REGIONS_MAX: Final = 4096
"""The one looked at longest ago is forgotten."""
STATUS_BYTES: Final = 64 * 1024
"""More than what the kernel says of a process, its groups included."""
PINNING: Final = ("libcuda.so.1", "libamdhip64.so", "libibverbs.so.1", "libze_loader.so.1")
"""A process that has loaded one of these may let a device write to ordinary memory."""


class Region:
    """A range of pages under protection, and what the last looks found in it."""

    __slots__ = ("end", "floor", "history", "start")

    def __init__(self, start: int, end: int, floor: int) -> None:
        self.start = start
        self.end = end
        self.floor = floor
        """Nothing is known of what came before this look."""
        self.history: deque[tuple[int, list[Range]]] = deque()

    def add(self, look: int, ranges: list[Range]) -> None:
        if not ranges:
            return
        if len(self.history) == HISTORY_MAX:
            self.floor = self.history.popleft()[0]
        self.history.append((look, ranges))

    def since(self, look: int) -> list[Range] | None:
        if look < self.floor:
            return None
        return [one for number, ranges in self.history if number > look for one in ranges]


class Pages:
    """The protections of one process. Use ``process_pages``: two of these would take each other's answers away."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._uffd = -1
        self._pagemap = -1
        self._maps = -1
        self._look = 0
        self._regions: dict[Range, Region] = {}
        self._off = False
        self._vector = (ctypes.c_uint64 * (3 * RANGES_MAX))()

    def usable(self) -> bool:
        """Whether the kernel offers it and nothing in the process speaks against it now."""
        with self._lock:
            return self._ready()

    def written_since(self, address: int, length: int, since: int) -> tuple[int, list[Range] | None]:
        """The number of this look, and the address ranges written to since look number ``since``; None: not known.

        From here on every write to these bytes is seen by a later look. So look first, then read.
        """
        return self._scan_range(address, length, since, shared=False)

    def shared_written_since(self, address: int, length: int, since: int) -> tuple[int, list[Range] | None]:
        """The same of memory that could be another's as well; the caller knows that no other process writes to it."""
        return self._scan_range(address, length, since, shared=True)

    def _scan_range(self, address: int, length: int, since: int, *, shared: bool) -> tuple[int, list[Range] | None]:
        start, end = address - address % PAGE, address + length + -(address + length) % PAGE
        with self._lock:
            if not self._ready():
                return 0, None
            self._look += 1
            region = self._regions.pop((start, end), None)
            if region is not None:
                found = self._scan(start, end, quick=shared)
                if found is not None:
                    self._regions[start, end] = region  # last again: the first is forgotten first
                    self._publish(found, start, end)
                    return self._look, region.since(since)
                # else something else is mapped there by now
            if not self._register(start, end, shared=shared):
                return 0, None
            return self._look, None

    def unprotect(self, address: int, length: int) -> None:
        """These bytes are about to be written, all of them: a page that is protected would cost a fault."""
        start, end = address - address % PAGE, address + length + -(address + length) % PAGE
        with self._lock:
            if self._pid == os.getpid():
                for one in [one for one in self._regions if one[0] < end and start < one[1]]:
                    self._unregister(*one)

    def forget(self) -> None:
        """Give up, for good: the answers turned out not to be true. Every caller looks at the bytes from now on."""
        with self._lock:
            self._off = True
            self._close()

    def after_fork(self) -> None:
        """In a child: another thread of the parent may have held the lock, and it would never be released here."""
        self._lock = threading.Lock()

    # ---- with the lock held ----

    def _ready(self) -> bool:
        if self._off:
            return False
        if self._pid != os.getpid():  # after a fork the descriptors speak of the parent's memory
            self._close()
            self._pid = os.getpid()
            self._off = not self._open()
        return not self._off and not something_pins()

    def _open(self) -> bool:
        number = _SYS_USERFAULTFD.get(os.uname().machine)
        if number is None or PAGE != 4096:
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        self._uffd = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _UFFD_USER_MODE_ONLY)
        if self._uffd < 0:
            return False
        try:
            fcntl.ioctl(self._uffd, _UFFDIO_API, bytearray(struct.pack("3Q", _UFFD_API, _FEATURES, 0)))
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._maps = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._close()
            return False
        return True

    def _close(self) -> None:
        for fd in (self._uffd, self._pagemap, self._maps):
            if fd >= 0:
                os.close(fd)
        self._uffd = self._pagemap = self._maps = -1
        self._regions.clear()

    def _register(self, start: int, end: int, *, shared: bool) -> bool:
        """Protect a new range. What is in it is not known yet, so the caller looks at all of it, after this."""
        if not shared and not self._private_anonymous(start, end):
            return False
        if len(self._regions) >= REGIONS_MAX:
            self._unregister(*next(iter(self._regions)))
        try:
            fcntl.ioctl(self._uffd, _UFFDIO_REGISTER, bytearray(struct.pack("4Q", start, end - start, _REGISTER_WP, 0)))
        except OSError:
            return False
        found = self._scan(start, end)
        if found is None:
            return False
        self._publish(found, start, end)
        self._regions[start, end] = Region(start, end, self._look)
        return True

    def _unregister(self, start: int, end: int) -> None:
        """Writes there cost nothing any more. A region that overlaps loses its protection too, and will find out."""
        del self._regions[start, end]
        with contextlib.suppress(OSError):  # it was unmapped
            fcntl.ioctl(self._uffd, _UFFDIO_UNREGISTER, bytearray(struct.pack("2Q", start, end - start)))

    def _publish(self, found: list[Range], start: int, end: int) -> None:
        """A look takes the marks off for every region it touched."""
        if not found:
            return
        for region in self._regions.values():
            if region.start < end and start < region.end:
                region.add(self._look, found)

    def _scan(self, start: int, end: int, *, quick: bool = False) -> list[Range] | None:
        """Ranges that are not known to be untouched, protected again in the same step. None: not under protection.
        ``quick``: a page that is not there is no answer: dropped, it is its file's again, and that is what it was."""
        wanted = (0, _WRITTEN, 0, _WRITTEN) if quick else (_PRESENT, 0, _WRITTEN | _PRESENT, _WRITTEN | _PRESENT)
        found: list[Range] = []
        at = start
        while at < end:
            arg = bytearray(
                _SCAN_ARG.pack(
                    *(_SCAN_ARG.size, _WP_MATCHING_CHECKED, at, end, 0, ctypes.addressof(self._vector), RANGES_MAX, 0),
                    *wanted,
                )
            )
            try:
                count = fcntl.ioctl(self._pagemap, _PAGEMAP_SCAN, arg)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                return None
            found += [(self._vector[3 * n], self._vector[3 * n + 1]) for n in range(count)]
            reached = _SCAN_ARG.unpack(arg)[4]
            if reached <= at:
                return None
            at = reached
        return found

    def _private_anonymous(self, start: int, end: int) -> bool:
        """Every mapping in the range is this process's own memory: not shared, no file, no device."""
        at = start
        while at < end:
            query = bytearray(_PROCMAP.pack(_PROCMAP.size, 0, at, *([0] * 12)))
            try:
                fcntl.ioctl(self._maps, _PROCMAP_QUERY, query)
            except OSError as error:
                return error.errno == errno.ENOTTY and _private_anonymous_by_text(start, end)
            _, _, _, _, vma_end, flags, _, _, inode, major, minor, *_ = _PROCMAP.unpack(query)
            if flags & _VMA_SHARED or not flags & _VMA_WRITABLE or inode or major or minor:
                return False
            at = vma_end
        return True


def _private_anonymous_by_text(start: int, end: int) -> bool:
    """The same from /proc/self/maps, on kernels before 6.11."""
    at = start
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            bounds, rights, _, device, inode, *_ = line.split()
            low, high = (int(part, 16) for part in bounds.split("-"))
            if high <= at:
                continue
            if low > at or rights[1] != "w" or rights[3] != "p" or device != "00:00" or inode != "0":
                return False
            at = high
            if at >= end:
                return True
    return False


def something_pins() -> bool:
    """Whether a device may know ordinary memory by the pages it has now."""
    return _something_is_loaded() or _pinned_bytes() > 0


def _something_is_loaded() -> bool:
    """One of those libraries. Asked anew only when something was loaded since: a library that is not there is looked
    for in many folders."""
    global _answer
    _each_library(_noting, None)
    if not _loads[0] or _answer[0] != _loads[0]:
        _answer = _loads[0], any(map(_is_loaded, PINNING))
    return _answer[1]


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _pinned_bytes() -> int:
    fd = _libc.open(b"/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    if fd < 0:
        return 1  # unknown, so there may be some
    text = ctypes.create_string_buffer(STATUS_BYTES)
    try:
        _libc.read(fd, text, STATUS_BYTES - 1)
    finally:
        _libc.close(fd)
    status = text.value
    at = status.find(b"VmPin:")
    return 0 if at < 0 else int(status[at + 6 : status.index(b"kB", at)])


def _note_loads(info: int, size: int, _: object) -> int:
    """How many libraries were loaded so far, as the first entry says."""
    _loads[0] = ctypes.c_uint64.from_address(info + _LOADS_AT).value if size >= _LOADS_AT + 8 else 0
    return 1


_LOADS_AT: Final = 32
"""``dlpi_adds`` of ``dl_phdr_info``."""
_loads: Final = [0]
_answer: tuple[int, bool] = (0, False)
_noting: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(_note_loads)
_libc: Final = ctypes.PyDLL(None)
"""Calls that keep Python's lock: they take less time than to get it back, and a callback wants it."""
_each_library = _libc.dl_iterate_phdr
_PAGES: Final = Pages()
os.register_at_fork(after_in_child=_PAGES.after_fork)


def process_pages() -> Pages:
    """The one of this process."""
    return _PAGES
