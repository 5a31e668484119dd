"""Copies a checkpoint of one volume into the staging of another; runs in a forked child.

The holder of the first volume goes on saving and collecting meanwhile. So the packs are opened together with the
manifest that names them, as every reader does: an open pack keeps its bytes until it is closed, even if its name is
removed. If a pack is gone already, there is a newer checkpoint, and the search starts again.

The copy lies in a folder of the asker's staging, which no reader takes for a checkpoint and which is removed with the
asker's epoch: a process that is killed halfway leaves nothing. Like everything staged, the copy becomes a checkpoint
by being published under the asker's own lease; the volume that it came from is only read.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from sublet.errors import CapacityExceeded, CheckpointDamaged, InvalidRequest, NotFound
from sublet.lazy_dataclass import dataclass
from sublet.node.storage.publish import check_pack, copy_bytes, plain_name
from sublet.node.storage.volume_folder import FILE, FOLDER, VolumeAccess, numbers_in, ours, staging_of
from sublet.values import format_size
from sublet.wire.manifest import MANIFEST_MAX, Contents, damaged, manifest_name, read_manifest
from sublet.wire.volumes import CHECKPOINTS, COPIED, PACKS, STAGING, CopiedIn, CopyIn, bytes_below

LOOKS_MAX: Final = 20
"""Each failed look means that the source was saved and collected between two lines here."""
AROUND: Final = 64 << 10
"""Bytes of room that are left: a manifest of one's own, and folders."""
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READABLE: Final = 0o444


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint, all of it open."""

    data: bytes
    contents: Contents
    packs: dict[str, int]

    @property
    def size(self) -> int:
        return len(self.data) + sum(size for size, _ in self.contents.packs.values())

    @property
    def summary(self) -> CopiedIn:
        one = self.contents
        return CopiedIn(number=one.number, wall_ns=one.wall_ns, size=self.size, note=one.note)


def copy_in(place: VolumeAccess, source: str, request: CopyIn) -> CopiedIn:
    """See what there is in ``source``, and unless only that was asked, put it where the asker wants it. Raises for what
    has no room, before anything of it is written."""
    with contextlib.ExitStack() as undo:
        found = _newest(source, request.passing, undo)
        if found is None:
            return CopiedIn(number=0)
        if request.staging:
            _put(place, request, found, undo)
        return found.summary


# ------------------------------------------------------------------------------------------------------------- reading


def _newest(source: str, passing: str, undo: contextlib.ExitStack) -> _Found | None:
    """The newest checkpoint, or the newest that is not to be passed over; None where there is none at all."""
    try:
        folders = _folders(source)
    except InvalidRequest:  # nothing was ever staged there
        return None
    for fd in folders:
        undo.callback(os.close, fd)
    checkpoints, packs = folders
    for _ in range(LOOKS_MAX):
        try:
            picked = _picked(_read(checkpoints), passing)
            if picked is None:
                return None
            return _Found(*picked, _opened(packs, picked[1], undo))
        except FileNotFoundError:  # collected just now: so there is a newer one
            continue
    raise CheckpointDamaged(
        "a checkpoint names packs that are not there", do="`sublet volume verify` tells more; saved anew it is whole."
    )


def _picked(read: Iterator[tuple[bytes, Contents]], passing: str) -> tuple[bytes, Contents] | None:
    newest = None
    for one in read:
        newest = newest or one
        if not passing or not one[1].note.startswith(passing):
            return one
    return newest


def _folders(source: str) -> tuple[int, int]:
    top = os.open(source, FOLDER)
    try:
        checkpoints = ours(top, CHECKPOINTS)
        try:
            return checkpoints, ours(top, PACKS)
        except BaseException:
            os.close(checkpoints)
            raise
    finally:
        os.close(top)


def _read(checkpoints: int) -> Iterator[tuple[bytes, Contents]]:
    """All of them, newest first."""
    for number in reversed(numbers_in(os.listdir(checkpoints))):
        fd = os.open(manifest_name(number), FILE, dir_fd=checkpoints)
        with open(fd, "rb") as file:
            data = file.read(MANIFEST_MAX + 1)
        contents = read_manifest(data)
        if len(data) > MANIFEST_MAX or contents.number != number:
            raise damaged(f"{manifest_name(number)} is the manifest of another checkpoint")
        yield data, contents


def _opened(packs: int, contents: Contents, undo: contextlib.ExitStack) -> dict[str, int]:
    found = {}
    for name, expected in contents.packs.items():
        found[name] = os.open(name, FILE, dir_fd=packs)
        undo.callback(os.close, found[name])
        check_pack(found[name], name, expected)
    return found


# ------------------------------------------------------------------------------------------------------------- writing


def _put(place: VolumeAccess, request: CopyIn, found: _Found, undo: contextlib.ExitStack) -> None:
    top = os.open(place.folder, FOLDER)
    undo.callback(os.close, top)
    _fits(place, top, found.size)
    folder = _staged(place, request, top, undo)
    for name, source in found.packs.items():
        with _made(folder, name) as fd:
            copy_bytes(source, fd, found.contents.packs[name][0])
            check_pack(fd, name, found.contents.packs[name])
    with _made(folder, COPIED) as fd:
        view = memoryview(found.data)
        while view:
            view = view[os.write(fd, view) :]


def _fits(place: VolumeAccess, top: int, size: int) -> None:
    if place.counted:
        room = place.size - bytes_below(place.folder)
    else:
        disk = os.fstatvfs(top)
        room = disk.f_bavail * disk.f_frsize
    if size + AROUND > room:
        raise CapacityExceeded(
            f"the copy needs {format_size(size + AROUND)}, and the volume has room for {format_size(max(0, room))}",
            do=f"Ask for one with at least {format_size(place.size - room + size + AROUND)}.",
        )


def _staged(place: VolumeAccess, request: CopyIn, top: int, undo: contextlib.ExitStack) -> int:
    """The asker's folder."""
    staging = ours(top, STAGING)
    undo.callback(os.close, staging)
    try:
        own = os.open(staging_of(request.epoch, apart=place.apart), FOLDER, dir_fd=staging)
        undo.callback(os.close, own)
        folder = os.open(plain_name(request.staging), FOLDER, dir_fd=own)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise NotFound(
                f"{request.staging} is no folder in the staging of this epoch", do="Make it first."
            ) from None
        raise
    undo.callback(os.close, folder)
    return folder


@contextlib.contextmanager
def _made(folder: int, name: str) -> Iterator[int]:
    """A new file, which its reader may read and which the forked job that publishes it finds to be one of ours."""
    fd = os.open(name, _NEW, 0o600, dir_fd=folder)
    try:
        yield fd
        os.fchmod(fd, _READABLE)
    finally:
        os.close(fd)
