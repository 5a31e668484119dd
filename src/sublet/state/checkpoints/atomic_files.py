"""Writes files atomically: complete, or not at all.

Written under a temporary name in the folder where they belong, or in a staging folder of the same file system; synced;
given their name; and the folder synced, for a name is durable only when its folder is. Every file that a checkpoint
needs goes this way. After a failed sync nothing is retried and the file is not used: what the kernel has dropped by
then it reports only once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PIECE: Final = 1 << 20
"""Read at once at most: most files have less, and memory is taken for all of it."""


def sync_folder(folder: Path) -> None:
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def sync_file(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)


def write_synced(path: Path, data: bytes) -> None:
    """A new file, on disk when this returns; its name is not yet."""
    with written_then_synced(path, data):
        pass


@contextmanager
def written_then_synced(path: Path, data: bytes) -> Iterator[None]:
    """The same: written before the block, on disk after it. Another file that is synced in the block takes this one
    along into the file system's journal, so that both together wait for it once."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        yield
        os.fsync(fd)


def move_into_place(temporary: Path, path: Path) -> None:
    """Give a synced file its name, in place of whatever has it. The caller syncs the folder, perhaps once for many."""
    os.rename(temporary, path)


def name_once(temporary: Path, path: Path) -> None:
    """Give a synced file a name that is not taken (else ``FileExistsError``), durably. The temporary name
    stays: it is the caller's to remove, and costs nothing."""
    os.link(temporary, path)
    try:
        sync_folder(path.parent)
    except OSError:  # perhaps it is on disk, perhaps not; it was not confirmed, so it must not be found
        os.unlink(path)
        raise


def read_whole(path: Path, limit: int) -> bytes:
    """A small file. One that is larger than it could rightly be is not read into memory first, and what is no file (a
    pipe without a writer) is not waited for."""
    with _opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        parts, room = [], limit + 1
        while room > 0 and (part := os.read(fd, min(room, PIECE))):
            parts.append(part)
            room -= len(part)
        return b"".join(parts)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
