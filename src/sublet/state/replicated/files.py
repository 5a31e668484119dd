"""The system calls of a folder replica, behind one interface, so that tests can simulate a disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from sublet.errors import InvalidRequest

_FS_IOC_GETVERSION: Final = 0x80087601
_SHARED: Final = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x01021997: "9p",
    0x00C36400: "Ceph",
    0x65735546: "FUSE",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x73757245: "Coda",
}
"""File systems on which a lock, or a sync, may not mean what it means on a disk of this machine."""


class NotTried(OSError):
    """The sync of a folder was not begun."""


class RealFiles:
    """The real ones."""

    def make_folder(self, path: Path) -> None:
        """It is there afterwards, durably."""
        if not path.is_dir():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.sync_folder(path.parent)

    def open(self, path: Path, *, create: bool = False, fresh: bool = False) -> int:
        """For reading and writing. ``fresh``: whatever had that name is emptied."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT if create or fresh else 0
        return os.open(path, flags | (os.O_TRUNC if fresh else 0), 0o600)

    def close(self, fd: int) -> None:
        """Give it back."""
        os.close(fd)

    def read(self, fd: int, size: int, at: int) -> bytes:
        """So many bytes, fewer only at the end of the file."""
        data = os.pread(fd, size, at)
        while len(data) < size and (more := os.pread(fd, size - len(data), at + len(data))):
            data += more
        return data

    def write(self, fd: int, data: bytes, at: int) -> None:
        """All of it, or OSError."""
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, at)
            if done == 0:
                raise OSError(errno.EIO, "nothing was written")
            view, at = view[done:], at + done

    def datasync(self, fd: int) -> None:
        """What was written into the file is on the disk."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """The file is on the disk, with all that belongs to it."""
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Its names are on the disk. ``NotTried`` if no sync was begun, which is less than one that failed."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise NotTried(*error.args) from error
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """In one step."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Harmless if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def names(self, path: Path) -> list[str]:
        """What is in a folder; nothing if there is none."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def size(self, fd: int) -> int:
        """In bytes."""
        return os.fstat(fd).st_size

    def which(self, fd: int) -> tuple[int, int]:
        """The number of the file on its disk, and the generation of that number: a copy has another."""
        try:
            answer = fcntl.ioctl(fd, _FS_IOC_GETVERSION, b"\0" * 8)
        except OSError:  # file systems in memory have none
            return os.fstat(fd).st_ino, 0
        return os.fstat(fd).st_ino, int.from_bytes(answer[:4], "little")

    def state(self, path: Path, number: int) -> str:
        """Of the file with that number and name: ``"same"``, ``"marked"`` (see ``mark``), or ``"other"``.

        The number alone is enough: while we have the file open, no other file gets its number.
        """
        try:
            named = os.stat(path)
        except FileNotFoundError:
            return "other"
        if named.st_ino != number:
            return "other"
        return "same" if named.st_mode & 0o200 else "marked"

    def mark(self, fd: int) -> None:
        """Mark it. Every process sees that at once, it needs no room, and it need not outlive the page cache."""
        os.fchmod(fd, 0o400)

    def lock(self, fd: int) -> bool:
        """Take it, or say that it is taken. The system gives it back when the process ends."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Give it back."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def boot(self) -> bytes:
        """Eight bytes that tell this boot from any other."""
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return bytes.fromhex(file.read().decode().replace("-", "")[:16])


def refuse_network(path: Path) -> None:
    """A folder that other machines share is no place for a replica."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        number = ctypes.get_errno()
        raise InvalidRequest(
            f"the folder {path} cannot be looked at ({os.strerror(number)})", do="Give a folder on a local disk."
        )
    kind = int.from_bytes(buffer.raw[:8], "little") & 0xFFFFFFFF
    if kind in _SHARED:
        raise InvalidRequest(
            f"{path} is on a {_SHARED[kind]} file system, where locks and syncs may not hold",
            do="Give a folder on a disk of this machine, one machine for each replica.",
        )
