"""Memory from a sealed file (``wire.sealed_memory``), and which of its pages this process has written to.

Such a file is mapped privately. It can no longer be written to, so a page that is still the file's holds what it held
when it came; the first write to one, also by a device that pins it, makes it a page of the process's own.
The kernel tells the two apart without protecting anything beforehand, so tracking costs nothing between two looks.

Nor need such memory be copied to where another such lies: the kernel moves the pages there (``move``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from typing import Final

from sublet.state.transfer.memory import PAGE, address_of
from sublet.state.transfer.pages import something_pins
from sublet.wire.sealed_memory import sealed_maps

Range = tuple[int, int]

_PAGEMAP_SCAN: Final = 0xC0606610
_SCAN_ARG: Final = struct.Struct("12Q")
_FILE: Final = 1 << 2
_PRESENT: Final = 1 << 3
_SWAPPED: Final = 1 << 4
_MAY_MOVE: Final = 1
_FIXED: Final = 2
_DONT_UNMAP: Final = 4
RANGES_MAX: Final = 4096
"""Answers of the kernel in one call; with more to say it is called again."""


def own_pages(address: int, length: int) -> tuple[int, list[Range]] | None:
    """The number of the map in which these bytes lie, and the ranges of it that are not the file's any more. None: they
    lie in none, or the kernel does not tell (it does from 6.7 on)."""
    for one in sealed_maps():
        start = address_of(memoryview(one))
        if start <= address and address + length <= start + len(one):
            found = written_privately(address - address % PAGE, address + length + -(address + length) % PAGE)
            return None if found is None else (one.number, found)
    return None


def is_sealed(address: int) -> bool:
    """Whether this byte lies in such a map."""
    return any(0 <= address - address_of(memoryview(one)) < len(one) for one in sealed_maps())


def move(target: int, source: int, length: int) -> bool:
    """Let the memory at ``target`` hold what that at ``source`` holds, where each is all of a map: its pages are moved,
    not copied, and what the target had in pages of its own is given back. False: it must be copied. The source is
    there still, and holds what it held when it came."""
    maps = {address_of(memoryview(one)): one for one in sealed_maps()}
    old, new = maps.get(target), maps.get(source)
    if old is None or new is None or old is new or len(old) != length or len(new) != length or something_pins():
        return False
    size = length + -length % PAGE
    if written_privately(source, source + size) != []:
        return False  # what was written to it would leave it
    if _mremap(source, size, size, _MAY_MOVE | _FIXED | _DONT_UNMAP, target) != target:
        return False  # kernels before 5.13
    old.renew()
    return True


def written_privately(start: int, end: int) -> list[Range] | None:
    """Ranges of private memory that are there or swapped out, and not of a file. None: the kernel does not tell."""
    vector = (ctypes.c_uint64 * (3 * RANGES_MAX))()
    found: list[Range] = []
    at = start
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        while at < end:
            arg = bytearray(
                _SCAN_ARG.pack(
                    *(_SCAN_ARG.size, 0, at, end, 0, ctypes.addressof(vector), RANGES_MAX, 0),
                    *(_FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT | _SWAPPED),
                )
            )
            try:
                count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, arg)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                return None
            found += [(vector[3 * n], vector[3 * n + 1]) for n in range(count)]
            reached = _SCAN_ARG.unpack(arg)[4]
            if reached <= at:
                return None
            at = reached
    finally:
        os.close(pagemap)
    return found


_mremap = ctypes.CDLL(None).mremap
_mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_mremap.restype = ctypes.c_void_p
