"""Arrays in long-lived shared memory (``wire.persistent_memory``), exchanged between two processes without a copy.

On the side that works with it such memory is the array's own, written to at full speed. What comes anew for it comes in
another file, and the two change places: their pages are moved, so nothing is copied, and nothing is touched for the
first time again (``exchange``). The other side reads the array where it lies.

Shared memory stays shared in a process that is forked, where the child's array must be the child's. So before a fork
what arrays live in becomes private to this process (``part_all``): a lent file has no other writer, so it
holds what it held, and for the child's sake it is never used for anything else. A program that forks without Python's
knowing becomes another at once.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sublet.state.transfer.memory import COPIERS, PAGE, PARALLEL_MIN, address_of, copy_bytes
from sublet.state.transfer.pages import something_pins
from sublet.state.transfer.sealed import written_privately
from sublet.wire.persistent_memory import Lasting

_MAY_MOVE: Final = 1
_FIXED: Final = 2
_DONT_UNMAP: Final = 4
_MAP_FIXED: Final = 0x10
_FREE: Final = 3
"""References to an area without readers: of its keeper, and two of the loop that asks."""
_STEP: Final = 8 << 20
"""Bytes compared at a time: between two of them a difference that another thread found is heard of."""

_homes: Final[weakref.WeakValueDictionary[int, Lasting]] = weakref.WeakValueDictionary()
_numbers: Final = itertools.count(1)


def adopt(area: Lasting) -> None:
    """Arrays of this process may live in it from now on."""
    _homes[next(_numbers)] = area


def abandon(area: Lasting) -> None:
    """To its readers it is memory like any other."""
    for number in [number for number, one in _homes.items() if one is area]:
        del _homes[number]


def area_at(address: int, length: int) -> Lasting | None:
    """The area that is exactly these bytes, if arrays may live in it."""
    for one in list(_homes.values()):
        if len(one) == length and _start(one) == address:
            return one
    return None


class Exchanged:
    """Two areas on their way to each other's place."""

    def __init__(self, target: Lasting, source: Lasting, parked: mmap.mmap) -> None:
        self.target = target
        self.source = source
        self.file = target.file
        """What the target was in."""
        self._parted = target.parted
        self._parked = parked

    def finish(self) -> None:
        """Now the source is what the target was. It must have no reader any more."""
        self.source.file, self.source.parted = self.file, self._parted
        if not _move(_start(self._parked), _start(self.source), len(self.source)):
            map_shared(self.source)
        self._parked.close()


def exchange(target: Lasting, source: Lasting) -> Exchanged | None:
    """Let the target hold what the source holds, and be in its file. Until ``finish`` the source holds it as well, for
    every reader there. None: it must be copied (a device may know the pages that are there now)."""
    if len(target) != len(source) or target is source or something_pins():
        return None
    parked = mmap.mmap(-1, len(target))
    exchanged = Exchanged(target, source, parked)
    if not _move(_start(target), _start(parked), len(target)) or not _move(_start(source), _start(target), len(target)):
        return None  # kernels before 5.13. What was moved left its file behind: the target holds what it held
    target.file, target.parted = source.file, source.parted
    return exchanged


def separate(area: Lasting) -> None:
    """Its readers keep what is there now, in memory of their own; it is no area any more."""
    own = mmap.mmap(-1, len(area), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    copy_bytes(memoryview(own), memoryview(area))
    if not _move(_start(own), _start(area), len(area)):
        raise OSError("memory could not be moved")
    own.close()
    abandon(area)
    del area.file


def part_all() -> None:
    """From here on what is written to areas with readers is this process's own."""
    for key in list(_homes):
        area = _homes.get(key)
        if area is not None and not area.parted and sys.getrefcount(area) > _FREE:
            area.file.is_spoilt = True
            area.parted = _map(area, mmap.MAP_PRIVATE)


def map_shared(area: Lasting) -> None:
    """It is its file's memory again, shared, whatever it was."""
    if not _map(area, mmap.MAP_SHARED):
        raise OSError("memory could not be mapped")
    area.parted = False


def is_untouched(area: Lasting) -> bool:
    """Of one that was parted: whether it still is what its file holds."""
    return written_privately(_start(area), _start(area) + _whole(len(area))) == []


def is_same(one: int, other: int, length: int) -> bool:
    """Whether the bytes at two addresses are the same. Stops soon after the first difference."""
    if _memcmp(one, other, min(length, PAGE)) != 0:
        return False
    workers = min(COPIERS, os.cpu_count() or 1)
    if length < PARALLEL_MIN or workers == 1:
        return bool(_memcmp(one, other, length) == 0)
    differ: list[int] = []

    def compare(at: int) -> None:
        if not differ and _memcmp(one + at, other + at, min(_STEP, length - at)) != 0:
            differ.append(at)

    with ThreadPoolExecutor(workers, "sublet-compare") as pool:
        for _ in pool.map(compare, range(0, length, _STEP)):
            pass
    return not differ


def _start(area: mmap.mmap) -> int:
    return address_of(memoryview(area))


def _whole(length: int) -> int:
    return length + -length % PAGE


def _move(source: int, target: int, length: int) -> bool:
    size = _whole(length)
    return bool(_mremap(source, size, size, _MAY_MOVE | _FIXED | _DONT_UNMAP, target) == target)


def _map(area: Lasting, how: int) -> bool:
    found = _mmap(_start(area), len(area), mmap.PROT_READ | mmap.PROT_WRITE, how | _MAP_FIXED, area.file.fd, 0)
    return bool(found == _start(area))


_libc: Final = ctypes.CDLL(None)
_mremap = _libc.mremap
_mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_mremap.restype = ctypes.c_void_p
_mmap = _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

os.register_at_fork(before=part_all)
