"""Opens files of a volume for a holder that runs as another user, and passes the descriptors.

Such a holder finds no way into the office's folders and needs none. What it reads are sealed packs and manifests; what
it writes are files of its own staging, which it fills, lets go of and then asks to publish, as every holder does. Here,
in a forked job, they are opened by descriptors from the volume's folder on, following nothing; the descriptors go
through a socket to the supervisor, which passes them on beside its answer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import struct
from typing import Final

from sublet.errors import CapacityExceeded, InvalidRequest, NotFound, SubletError
from sublet.node.sandbox.cleaning import remove_tree
from sublet.node.storage.publish import plain_name, publish
from sublet.node.storage.volume_folder import FILE, FOLDER, VolumeAccess, needed_by, numbers_in, ours, staging_of
from sublet.values import Epoch
from sublet.wire.volumes import (
    CHECKPOINTS,
    FILES_MAX,
    PACKS,
    STAGING,
    FilesOpened,
    ListVolume,
    OpenFiles,
    Publish,
    Published,
    VolumeListed,
    bytes_below,
)

STAGED_FOLDERS_MAX: Final = 32
"""Saves of one lease that were begun and not ended. If there are more, the oldest was given up."""
STAGED_FILES_MAX: Final = 1024
"""Files of one such folder."""
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MANIFEST: Final = re.compile(r"\d{16}\.manifest")
_PACK: Final = re.compile(r"[0-9a-f]{2,128}\.pack")
_BYTE: Final = b"f"
_FD_BYTES: Final = struct.calcsize("i")


def list_volume(place: VolumeAccess, request: ListVolume) -> VolumeListed:
    """What is published there, and how much room is left."""
    with contextlib.ExitStack() as undo:
        top = _opened(undo, os.open(place.folder, FOLDER))
        checkpoints = _opened(undo, ours(top, CHECKPOINTS))
        numbers = numbers_in(os.listdir(checkpoints))
        if place.counted:
            room = max(0, place.size - bytes_below(place.folder))
        else:
            found = os.fstatvfs(top)
            room = found.f_bavail * found.f_frsize
        freed = 0
        if request.keep:
            packs = _opened(undo, ours(top, PACKS))
            needed = needed_by(checkpoints, numbers[-request.keep :])
            for name in set(os.listdir(packs)) - needed:
                with contextlib.suppress(FileNotFoundError):
                    freed += os.stat(name, dir_fd=packs, follow_symlinks=False).st_size
        return VolumeListed(numbers=tuple(numbers), room=room, freed=freed)


def open_files(place: VolumeAccess, request: OpenFiles, epoch: Epoch, handed: int) -> FilesOpened:
    """Open them and send them through the socket ``handed``, in the order of their names."""
    if not 1 <= len(request.names) <= FILES_MAX:
        raise InvalidRequest(f"{len(request.names)} files were asked for", do=f"Name 1 to {FILES_MAX} at a time.")
    with contextlib.ExitStack() as undo:
        top = _opened(undo, os.open(place.folder, FOLDER))
        if request.staging:
            fds = _staged(undo, top, place, request, epoch)
        elif request.write:
            raise InvalidRequest("what is published is not written to", do="Name a folder of the staging.")
        else:
            fds = [_published(undo, top, name) for name in request.names]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
        with socket.socket(fileno=os.dup(handed)) as sock:
            sock.sendmsg([_BYTE], [rights])
    return FilesOpened(names=request.names)


def take_handed(sock: socket.socket) -> tuple[int, ...]:
    """What a forked job has sent there, once it has ended. They are the caller's to close."""
    room = socket.CMSG_SPACE(FILES_MAX * _FD_BYTES)
    try:
        _, rights, _, _ = sock.recvmsg(len(_BYTE), room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return ()
    return tuple(
        fd for _, _, data in rights for (fd,) in struct.iter_unpack("i", data[: len(data) // _FD_BYTES * _FD_BYTES])
    )


def _published(undo: contextlib.ExitStack, top: int, name: str) -> int:
    if _MANIFEST.fullmatch(name):
        folder = CHECKPOINTS
    elif _PACK.fullmatch(name):
        folder = PACKS
    else:
        raise InvalidRequest(f"{name[:80]!r} is the name of no pack and no manifest", do="Ask what is published there.")
    where = ours(top, folder)
    try:
        return _plain(undo, os.open(name, FILE, dir_fd=where), name)
    except FileNotFoundError:
        raise NotFound(f"{name} is not there", do="A newer checkpoint may have been saved since; open that.") from None
    finally:
        os.close(where)


def _staged(undo: contextlib.ExitStack, top: int, place: VolumeAccess, request: OpenFiles, epoch: Epoch) -> list[int]:
    staging = _opened(undo, ours(top, STAGING))
    own = _opened(undo, os.open(staging_of(epoch, apart=place.apart), FOLDER, dir_fd=staging))
    name = plain_name(request.staging)
    if request.write:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=own)
            _forget_oldest(place, epoch, own)
    try:
        folder = _opened(undo, os.open(name, FOLDER, dir_fd=own))
        if request.write and len(os.listdir(folder)) + len(request.names) > STAGED_FILES_MAX:
            raise CapacityExceeded(f"a save has more than {STAGED_FILES_MAX} files", do="Save less at a time.")
        flags = _NEW if request.write else FILE
        return [_plain(undo, os.open(plain_name(one), flags, 0o600, dir_fd=folder), one) for one in request.names]
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise NotFound(f"{request.staging[:80]} has not what was asked for", do="Save again.") from None
        if error.errno in (errno.EEXIST, errno.ELOOP, errno.ENOTDIR):
            raise InvalidRequest(f"a file in {request.staging[:80]} is there already", do="Save again.") from None
        raise


def publish_and_forget(place: VolumeAccess, request: Publish) -> Published:
    """``publish``, for a holder that cannot remove what it staged."""
    try:
        return publish(place, request)
    finally:
        own = os.path.join(place.folder, STAGING, staging_of(request.epoch, apart=place.apart))
        with contextlib.suppress(OSError, SubletError):
            remove_tree(os.path.join(own, plain_name(request.staging)))


def _forget_oldest(place: VolumeAccess, epoch: Epoch, own: int) -> None:
    names = os.listdir(own)
    if len(names) > STAGED_FOLDERS_MAX:
        oldest = min(names, key=lambda name: os.stat(name, dir_fd=own, follow_symlinks=False).st_mtime_ns)
        path = os.path.join(place.folder, STAGING, staging_of(epoch, apart=place.apart), oldest)
        with contextlib.suppress(OSError):
            remove_tree(path)


def _opened(undo: contextlib.ExitStack, fd: int) -> int:
    undo.callback(os.close, fd)
    return fd


def _plain(undo: contextlib.ExitStack, fd: int, name: str) -> int:
    """A file of ours, and nothing that only looks like one."""
    _opened(undo, fd)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise InvalidRequest(f"{name[:80]} is no file of Sublet's", do="Ask what is published there.")
    return fd
