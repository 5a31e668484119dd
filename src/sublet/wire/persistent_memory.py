"""Long-lived shared memory that both sides of a notebook fill and reuse.

Unlike a sealed buffer (``shared``) every holder of it can write to it, so it is for two processes that are one
program, and the rule between them is simple: it is either *lent*, then the one who borrowed it alone writes to it, or
it is *free*, and then the one who made it does. That it can neither shrink nor grow the kernel sees to, and that its
memory is there is looked at before it is mapped: so reading it cannot kill the reader.

Memory that a job lends its workers (``compute.buffer_cache``) is of the same kind, but that only its maker writes to
it, and only while no worker has it. It is mapped privately (``map_lent``).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final

from sublet.errors import InvalidRequest
from sublet.wire.sealed_memory import BLOCK, SHARED_MAX, write_all

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
LENT_SEALS: Final = SEALS | 16
"""And F_SEAL_FUTURE_WRITE: only a process that has mapped it before can write to it."""
POPULATE: Final = 22
"""MADV_POPULATE_READ, of kernels from 5.14 on."""


class LastingFile:
    """The memory itself; it is there as long as a process on either side has it open or mapped."""

    __slots__ = ("__weakref__", "fd", "is_spoilt", "length", "number")

    def __init__(self, fd: int, length: int) -> None:
        """The descriptor is closed with the last reference to this."""
        self.fd = fd
        self.length = length
        self.number = 0
        """What both sides call it."""
        self.is_spoilt = False
        """Unknown readers may have it: it must not be reused for something else."""

    def __del__(self) -> None:
        os.close(self.fd)


class Lasting(mmap.mmap):
    """Such memory, mapped."""

    file: LastingFile
    """What is mapped here; it can become another (``state.transfer.shared_arrays``)."""
    parted: bool
    """It is mapped privately: what is written here stays in this process."""
    is_populated: bool

    @classmethod
    def filled(cls, content: memoryview) -> Lasting:
        """New, holding these bytes (format ``B``). They are written, not copied: see ``shared.write_shared``."""
        if not 0 < content.nbytes <= SHARED_MAX:
            raise InvalidRequest(f"shared memory cannot have {content.nbytes} bytes", do=f"Use 1 to {SHARED_MAX}.")
        file = LastingFile(os.memfd_create("sublet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), content.nbytes)
        write_all(file.fd, content, 0)
        fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        return cls.on(file)

    @classmethod
    def of(cls, fd: int, length: int) -> Lasting:
        """A file of another process. ``fd`` stays the caller's. Raises ``InvalidRequest`` for what could do harm."""
        _check(fd, length)
        return cls.on(LastingFile(os.dup(fd), length))

    @classmethod
    def on(cls, file: LastingFile) -> Lasting:
        """A map of this."""
        made = cls(file.fd, file.length)
        made.file, made.parted, made.is_populated = file, False, False
        return made

    def populate(self) -> None:
        """All of it is going to be touched: map its pages at once, which costs a fraction of a fault for each."""
        if not self.is_populated:
            self.is_populated = True
            with contextlib.suppress(OSError):
                self.madvise(POPULATE)


def map_lent(fd: int, length: int, *, writable: bool) -> memoryview:
    """The first bytes of memory that a job lends, mapped privately: what is written to it is the reader's own. ``fd``
    stays the caller's. Raises ``InvalidRequest`` for what could do harm."""
    found = os.fstat(fd)
    if not 0 < length <= found.st_size:
        raise _refused(f"it has {found.st_size} bytes, not {length}")
    _check(fd, found.st_size)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return memoryview(mmap.mmap(fd, length, mmap.MAP_PRIVATE, access))


def _check(fd: int, length: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise _refused("it is no memory file") from None
    found = os.fstat(fd)
    if seals & SEALS != SEALS or seals & fcntl.F_SEAL_WRITE:
        raise _refused("it is sealed otherwise than such memory is")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise _refused("it is made of huge pages")
    if not 0 < length <= SHARED_MAX or found.st_size != length or found.st_blocks * BLOCK < length:
        raise _refused(f"it has {found.st_size} bytes, and {found.st_blocks * BLOCK} of memory, not {length}")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"lasting memory is refused: {why}", do="Make it with sublet.wire.persistent_memory.Lasting.")
