"""A shared memory segment: a file without a name, sealed at its size, freed with its last descriptor.

To make or to remove one takes no mount and no process. Whether another process still has it open or mapped, the kernel
tells: it grants a write lease on a file only while no other has it open.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

from sublet.values import MIB

IN_PASSING_MAX: Final = 64 * MIB
"""Bytes that are freed while the whole loop waits: some milliseconds."""
_SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_BLOCK: Final = 512


def make(size: int) -> int:
    """A descriptor of a new one."""
    made = os.memfd_create("sublet-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(made, size)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{made}", os.O_RDWR | os.O_CLOEXEC)  # one that the kernel counts as a user
    finally:
        os.close(made)


def path_of(fd: int) -> str:
    """Where others of our user open it."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def weight(fd: int) -> int:
    """Bytes of memory that it has taken."""
    return os.fstat(fd).st_blocks * _BLOCK


def is_used(fd: int) -> bool:
    """Whether another process has it open or mapped."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except OSError:  # no such leases here: then its users are known by their processes alone
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def empty(path: str) -> str:
    """Give back what it has taken. The work of an errand, which says nothing in the end."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(fd, os.fstat(fd).st_size) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)
    finally:
        os.close(fd)
    return ""
