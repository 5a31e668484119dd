"""Large values in shared memory: written once, sealed, then read only.

A buffer is an anonymous file in memory (memfd). Its writer fills it and publishes it: from then on the kernel lets
no process, the writer included, change it, shrink it or grow it. A descriptor of it goes to the peer as ``Buffer``.

The other side trusts none of that and looks: ``map`` takes only descriptors whose seals are all there (a file that
could still shrink would end the reader with SIGBUS; one that could still change could be swapped after it was
checked), whose memory is all there (what is not would be taken from the reader's own allowance at the first touch),
and whose pages are ordinary ones (huge pages may be missing, which is SIGBUS again). Then it maps them read-only.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from sublet.errors import InvalidRequest
from sublet.values import GIB
from sublet.wire.frames import close_all

SHARED_MAX: Final = 64 * GIB
"""Bytes of one buffer. Its memory is counted where it was written."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
ALIGNMENT: Final = 4096
"""At multiples of this pieces begin that are written one behind the other."""
WRITE_MAX: Final = 64 << 20
"""Bytes handed to the kernel at a time: between two of them a signal can be heard."""
BLOCK: Final = 512
"""What ``st_blocks`` counts in."""


class SealedMapping(mmap.mmap):
    """A published buffer as it is mapped here. What this process writes to it is in pages of its own; all others are
    the buffer's and hold what they held, since those cannot be written to."""

    number: int
    """Of all that this process has mapped, so that one is not taken for another that lay there before."""

    def renew(self) -> None:
        """It holds something else from now on."""
        self.number = next(_numbers)


class SharedBuffer:
    """A buffer that is being written. Fill ``view``, then ``publish``; or ``close``, and it was never there."""

    def __init__(self, fd: int, size: int) -> None:
        """Rather use ``create``."""
        self.size = size
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, size: int, *, name: str = "sublet") -> SharedBuffer:
        """A buffer of so many bytes, all zero. Its memory is taken here and now, so that filling it cannot fail."""
        if not 0 < size <= SHARED_MAX:
            raise InvalidRequest(f"a shared buffer cannot have {size} bytes", do=f"Use 1 to {SHARED_MAX} bytes.")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def view(self) -> memoryview:
        """The bytes, to be written. Let go of everything made from it before ``publish``."""
        return self._view

    def publish(self) -> int:
        """Seal it. Hands over the descriptor: the caller sends and closes it."""
        if self._fd < 0:
            raise ValueError("this buffer was published or closed before")
        self._unmap()
        fd, self._fd = self._fd, -1
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        """Give it up. Harmless twice, and after ``publish``."""
        if self._fd >= 0:
            self._unmap()
            os.close(self._fd)
            self._fd = -1

    def _unmap(self) -> None:
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            self._view = memoryview(self._map)
            raise ValueError("something still holds a part of the buffer's view; release it first") from None

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def write_shared(pieces: Sequence[memoryview], *, name: str = "sublet") -> tuple[int, list[int]]:
    """A published buffer that holds these pieces of bytes (format ``B``), and where each begins. Hands over the
    descriptor.

    They are written, not copied into a mapping: the kernel then need not clear the memory first, nor take a page fault
    for each page, which is half of the time. That memory is short is an ``OSError`` here and no signal.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            write_all(fd, piece, end)
            end += piece.nbytes
            if (beyond := end % ALIGNMENT) and len(pieces) > 1:
                os.pwrite(fd, bytes(ALIGNMENT - beyond), end)
                end += ALIGNMENT - beyond
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd, starts


def write_all(fd: int, piece: memoryview, at: int) -> None:
    """All of these bytes (format ``B``), from this place of the file on."""
    done, size = 0, piece.nbytes
    while done < size:
        done += os.pwrite(fd, piece[done : done + WRITE_MAX], at + done)


def map_shared(fd: int, offset: int, length: int, *, writable: bool = False) -> memoryview:
    """The bytes of a published buffer, without copying. ``fd`` stays the caller's and may be closed after.

    Read-only; or ``writable``, and what is written is the reader's own, page by page. The memory
    stays as long as the view, or anything made from it. Raises ``InvalidRequest`` for a descriptor through which a peer
    could still do harm.
    """
    _check(fd, offset, length)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    # Private, though the file is never written: kernels before 6.7 refuse a shared mapping of what is sealed
    # against writing. The pages are the same ones either way.
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = SealedMapping(fd, offset - start + length, mmap.MAP_PRIVATE, access, offset=start)
    if writable:
        mapped.renew()
        _sealed[mapped.number] = mapped
    return memoryview(mapped)[offset - start :]


def take_over(fds: Sequence[int]) -> tuple[int, ...]:
    """The same descriptors; instead of each published buffer one with the same bytes in memory of this process.

    Memory is charged to the control group that wrote it first, for as long as anything has it open or mapped. A guest's
    group ends with its lease, so what a program keeps for longer it copies here, once. The descriptors that were given
    are closed, also where this raises.
    """
    made: list[int] = []
    try:
        made.extend(_copied(fd) if _is_published(fd) else os.dup(fd) for fd in fds)
    except BaseException:
        close_all(made)
        raise
    finally:
        close_all(fds)
    return tuple(made)


def _is_published(fd: int) -> bool:
    """Whether it is of ordinary pages, all there, that will not change: ``map_shared`` refuses all others."""
    try:
        _check(fd, 0, os.fstat(fd).st_size)
    except InvalidRequest:
        return False
    return True


def _copied(fd: int) -> int:
    size, made = os.fstat(fd).st_size, os.memfd_create("sublet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        at = 0
        while at < size:
            sent = os.sendfile(made, fd, at, min(WRITE_MAX, size - at))
            if not sent:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            at += sent
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(made)
        raise
    return made


def sealed_maps() -> list[SealedMapping]:
    """Those that can be written to, and that are still referenced here."""
    return [found for one in _sealed.valuerefs() if (found := one()) is not None]


_numbers: Final = itertools.count(1)
_sealed: Final[weakref.WeakValueDictionary[int, SealedMapping]] = weakref.WeakValueDictionary()


def _check(fd: int, offset: int, length: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise _refused("it is no memory file") from None
    if seals & SEALS != SEALS:
        raise _refused("it is not sealed against shrinking, growing and writing")
    found = os.fstat(fd)
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise _refused("it is made of huge pages")
    if found.st_blocks * BLOCK < found.st_size:
        raise _refused("part of its memory was never taken")
    if not 0 < length <= SHARED_MAX or offset < 0 or offset + length > found.st_size:
        raise _refused(f"{length} bytes from {offset} on are not within its {found.st_size}")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"a shared buffer is refused: {why}", do="Make it with sublet.wire.sealed_memory.SharedBuffer."
    )
