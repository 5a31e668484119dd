"""The buffers a guest has already, so that what is unchanged is not sent again.

Each large buffer that goes to the guest lies in shared memory that is sealed: nobody can change it any more, neither
here nor there. So what the guest has is known exactly, and whether a buffer still holds the same is a comparison with
that memory, byte by byte, which stops at the first difference. Nothing here trusts a version counter, an address or an
object's identity, so an array that was changed in place always arrives changed. Before the bytes a cheaper look is
tried where there is one: whether the kernel saw any write to those pages since.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections import OrderedDict
from typing import Final

from sublet.values import MIB

__all__ = ["KEPT_MAX", "Kept", "same_bytes"]

KEPT_MAX: Final = 96
"""Buffers that a guest keeps; each holds a descriptor open there."""
KEPT_SHARE: Final = 4
"""They take at most one part in so many of the machine's memory."""
KEPT_FOR_S: Final = 60.0
"""What was not used for so long is let go of."""
COMPARED_MAX: Final = 4
"""Kept buffers of the same size that one is compared with; most differ in the first page."""
_STEP: Final = 64 * MIB


class _One:
    __slots__ = ("address", "mapped", "size", "used_s")

    def __init__(self, mapped: mmap.mmap, address: int, used_s: float) -> None:
        self.mapped = mapped
        self.size = len(mapped)
        self.address = address
        self.used_s = used_s


class Kept:
    """What one guest keeps. Used by one thread at a time."""

    def __init__(self, bytes_max: int | None = None) -> None:
        self._bytes_max = _memory_bytes() // KEPT_SHARE if bytes_max is None else bytes_max
        self._found: OrderedDict[int, _One] = OrderedDict()
        self._bytes = 0
        self._last = 0
        self._forget: list[int] = []

    def find(self, view: memoryview) -> int:
        """The number under which the guest has exactly these bytes; 0 if it does not."""
        address = address_of(view)
        same_size = [item for item in self._found.items() if item[1].size == view.nbytes]
        same_size.sort(key=lambda item: item[1].address != address)  # most likely it is the one that lay here before
        for number, one in same_size[:COMPARED_MAX]:
            if same_bytes(view, one.mapped, one.size):
                one.used_s, one.address = time.monotonic(), address
                self._found.move_to_end(number)
                return number
        return 0

    def took(self, view: memoryview, fd: int) -> int:
        """They go to the guest in this shared memory: the number it keeps them under; 0: it does not."""
        if view.nbytes > self._bytes_max:
            return 0
        mapped = mmap.mmap(fd, view.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
        address = address_of(view)
        for number in [number for number, one in self._found.items() if one.address == address]:
            self._drop(number)  # of each buffer the last version
        self._last += 1
        self._found[self._last] = _One(mapped, address, time.monotonic())
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

    def clear(self) -> None:
        """The guest is gone, and what it kept with it."""
        for number in list(self._found):
            self._drop(number)
        self._forget = []

    @property
    def kept_bytes(self) -> int:
        return self._bytes

    def _drop(self, number: int) -> None:
        one = self._found.pop(number)
        self._bytes -= one.size
        with contextlib.suppress(BufferError):
            one.mapped.close()
        self._forget.append(number)


def same_bytes(view: memoryview, mapped: mmap.mmap, size: int) -> bool:
    """Whether the two hold the same. Stops at the first difference, and lets other threads run meanwhile."""
    with memoryview(mapped) as other:
        ours, theirs = address_of(view), address_of(other)
        for start in range(0, size, _STEP):
            if _memcmp(ours + start, theirs + start, min(_STEP, size - start)) != 0:
                return False
    return True


class _PyBuffer(ctypes.Structure):
    """As the interpreter fills it in."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Where its bytes lie. ctypes itself tells that for writable ones only."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
