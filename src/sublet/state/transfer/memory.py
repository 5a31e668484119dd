"""Maps objects to their memory by address, and back.

Two objects share memory exactly when their addresses overlap, whichever owns it and whichever library they come from;
so addresses, not owners, decide what is one buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

PAGE: Final = mmap.PAGESIZE
HUGE: Final = 2 << 20
PARALLEL_MIN: Final = 16 << 20
COPIERS: Final = 4
_SIMPLE: Final = 0
"""PyBUF_SIMPLE: contiguous bytes, read-only will do."""


class _PyBuffer(ctypes.Structure):
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


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)
_release.restype = None
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def address_of(view: memoryview) -> int:
    """Where the first byte of a contiguous view lies; 0 for a view without bytes."""
    if not view.nbytes:
        return 0
    raw = _PyBuffer()
    _get(view, raw, _SIMPLE)
    try:
        return int(raw.buf or 0)
    finally:
        _release(raw)


def memory_at(address: int, length: int) -> memoryview:
    """Bytes by their address. The caller keeps alive whatever they belong to, for as long as the view lives."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def lend(view: memoryview) -> pickle.PickleBuffer:
    """For a pickle, until it is written (``lending``).

    In Python up to 3.12 the garbage collector crashes on cycles in which a memoryview has lent its memory in this way.
    And an error that IPython has shown is such a cycle, with all frames of its traceback."""
    buffer = pickle.PickleBuffer(view)
    lent: list[pickle.PickleBuffer] | None = getattr(_lent, "buffers", None)
    if lent is not None:
        lent.append(buffer)
    return buffer


@contextlib.contextmanager
def lending() -> Iterator[None]:
    """A pickle is written within, by this thread. Afterwards nothing has borrowed memory for it any more, also where an
    error keeps what was made for it alive."""
    outer, _lent.buffers = getattr(_lent, "buffers", None), []
    try:
        yield
    finally:
        for buffer in _lent.buffers:
            buffer.release()
        _lent.buffers = outer


_lent: Final = threading.local()


class Lent:
    """Bytes in a value that is pickled later: they arrive as a memoryview."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __reduce__(self) -> tuple[type, tuple[pickle.PickleBuffer]]:
        return memoryview, (lend(self._view),)


def raw_view(buffer: pickle.PickleBuffer) -> memoryview:
    """Its bytes, as a view that lasts. Of a memoryview it shares the buffer, and does not take another (``lend``)."""
    view = buffer.raw()
    of = view.obj
    if type(of) is memoryview and of.c_contiguous:
        view.release()
        return of if of.format == "B" and of.ndim == 1 else of.cast("B")
    return view


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy all of ``source``; much of it on several cores, since one does not use all the bandwidth there is."""
    length = source.nbytes
    workers = min(COPIERS, os.cpu_count() or 1)
    if length < PARALLEL_MIN or workers == 1:
        target[:length] = source
        return
    to, origin = address_of(target), address_of(source)
    share = -(-length // (4 * workers) // PAGE) * PAGE

    def move(at: int) -> None:
        ctypes.memmove(to + at, origin + at, min(share, length - at))

    with ThreadPoolExecutor(workers, "sublet-copy") as pool:
        for _ in pool.map(move, range(0, length, share)):
            pass


def copy_beside(target: memoryview, source: memoryview) -> None:
    """Copy all of ``source`` while other threads of the program go on."""
    if source.nbytes:
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def bring_near(address: int, length: int) -> None:
    """Read it from end to end, which memory is quick at. A hash reads at many places at once, which it is not: after
    this it takes a fifth less, this included."""
    _memcmp(address, address, length)


def fresh_memory(length: int) -> memoryview:
    """Writable memory, aligned for every kind of number there is (to a page). Let go of it and it is given back."""
    if length < PAGE:
        spare = bytearray(length + 64)
        start = -address_of(memoryview(spare)) % 64
        return memoryview(spare)[start : start + length]
    area = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if length >= HUGE:
        with contextlib.suppress(OSError):  # a kernel that was built without huge pages does not know the word
            area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


class Copies:
    """Memory for detached looks, kept from one save to the next: fresh memory costs more than the copy itself."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._taken: list[memoryview] = []

    def memory(self, length: int) -> memoryview:
        """So many bytes. They are the caller's until ``reset``."""
        fitting = [n for n, area in enumerate(self._free) if length <= area.nbytes <= 2 * length]
        area = self._free.pop(fitting[0]) if fitting else fresh_memory(length)
        self._taken.append(area)
        return area[:length]

    def reset(self) -> None:
        """All of it is free again. What the last round needed is kept, and no more."""
        self._free, self._taken = self._taken, []
