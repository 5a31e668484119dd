"""Limits one folder with a *project* quota, of ext4 and XFS mounted with them.

A folder is given a project of its own, which all that is made in it inherits, and the project a limit. So the size of a
folder is enforced without a file system of its own in an image, for all users that quotas bind: not for root.

Where any of it cannot be had the reason is returned in words, and the folder is counted instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from typing import Final, Protocol

_PROJECTS: Final = 2
_SET: Final = 0x800008 << 8 | _PROJECTS
_GET: Final = 0x800007 << 8 | _PROJECTS
_QUOTACTL_FD: Final = 443
_GET_ATTRIBUTES: Final = 0x801C581F
_SET_ATTRIBUTES: Final = 0x401C5820
_INHERIT: Final = 0x200
_ATTRIBUTES: Final = struct.Struct("=IIIII8s")
"""Flags, extent size, extents, project, and more: what the ioctl calls ``fsxattr``."""
_LIMITS: Final = struct.Struct("=QQQQQQQQI4x")
"""Hard and soft limit in KiB, bytes used, the same three for inodes, two times, and which of them are meant."""
_BLOCK_LIMITS: Final = 1
_OURS: Final = 0x53000000
"""Projects of ours begin here; those that people number are small."""
_OURS_MAX: Final = 0x00FFFFFF
_TRIES: Final = 16


class QuotaKernel:
    """What is asked of it: a seam, for kernels that have no quotas."""

    def attributes(self, fd: int) -> bytes:
        buffer = bytearray(_ATTRIBUTES.size)
        fcntl.ioctl(fd, _GET_ATTRIBUTES, buffer)
        return bytes(buffer)

    def set_attributes(self, fd: int, attributes: bytes) -> None:
        fcntl.ioctl(fd, _SET_ATTRIBUTES, attributes)

    def quota(self, fd: int, command: int, project: int, limits: bytes) -> bytes:
        buffer = ctypes.create_string_buffer(limits, len(limits))
        if ctypes.CDLL(None, use_errno=True).syscall(_QUOTACTL_FD, fd, command, project, buffer):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return buffer.raw


class _QuotaKernel(Protocol):
    def attributes(self, fd: int) -> bytes: ...
    def set_attributes(self, fd: int, attributes: bytes) -> None: ...
    def quota(self, fd: int, command: int, project: int, limits: bytes) -> bytes: ...


def limit(folder: str, size: int, kernel: _QuotaKernel | None = None) -> str:
    """Let what is in the folder, which must be empty or limited already, take so many bytes; returns why not, in words,
    or nothing. A folder that belongs to a project of another program is left as it is."""
    kernel = kernel or QuotaKernel()
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return _limit(kernel, fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        return _error_text(error)


def why_not(folder: str, kernel: _QuotaKernel | None = None) -> str:
    """Why folders like this cannot be limited, as far as that is known without trying; empty if it is not."""
    kernel = kernel or QuotaKernel()
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            kernel.attributes(fd)
            _used(kernel, fd, _OURS)
        finally:
            os.close(fd)
    except OSError as error:
        return _error_text(error)
    return ""


def _limit(kernel: _QuotaKernel, fd: int, size: int) -> str:
    flags, step, extents, project, more, *rest = (*_ATTRIBUTES.unpack(kernel.attributes(fd)),)
    if project and not _is_ours(project):
        return f"the folder belongs to project {project} already"
    if not project:
        found = _free(kernel, fd)
        if found is None:
            return "no number of a project is free"
        project = found
    limits = _LIMITS.pack(-(-size // 1024), 0, 0, 0, 0, 0, 0, 0, _BLOCK_LIMITS)
    kernel.quota(fd, _SET, project, limits)  # first: until the folder is in the project, nothing is
    kernel.set_attributes(fd, _ATTRIBUTES.pack(flags | _INHERIT, step, extents, project, more, *rest))
    return ""


def _free(kernel: _QuotaKernel, fd: int) -> int | None:
    """By the folder's own number, so that one folder finds the same again; the next, where another has that."""
    inode = os.fstat(fd).st_ino
    numbers = (_OURS | ((inode + index) & _OURS_MAX) for index in range(_TRIES))
    return next((number for number in numbers if not _used(kernel, fd, number)), None)


def _used(kernel: _QuotaKernel, fd: int, project: int) -> int:
    """Bytes that are accounted to it. A project that was never used does not exist, which is no error."""
    with contextlib.suppress(FileNotFoundError):
        return int(_LIMITS.unpack(kernel.quota(fd, _GET, project, bytes(_LIMITS.size)))[2])
    return 0


def _is_ours(project: int) -> bool:
    return project & ~_OURS_MAX == _OURS


def _error_text(error: OSError) -> str:
    if error.errno == errno.EPERM:
        return "only root may set a quota"
    if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ESRCH, errno.ENOSYS):
        return "the file system has no quotas of projects (mount option prjquota)"
    return f"a quota of a project could not be set ({error.strerror})"
