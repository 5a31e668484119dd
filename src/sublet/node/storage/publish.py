"""Publishes a checkpoint, in a forked child: staged files are checked, sealed against writers, and named.

Staged files lie in folders to which the process that staged them may still write, and it may be hostile. So no name in
them is believed: each file is opened once, by a path that follows no link and waits for no pipe, and from then on it is
the descriptor that is checked, sealed and given its name. A file is *sealed* when no process can write to it any more:
it is taken over where it was another user's, and a read lease (``F_SETLEASE``) on it is refused by the kernel as long
as a writer has it open. Where that fails, what is published is a copy.

The order is that of docs/format.md, and a crash between any two steps leaves either no checkpoint or a whole one: packs
have their names, and their folder is synced, before the manifest has its own. What is not named by a manifest is
garbage, and goes with the next collection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable
from typing import Final

from sublet.errors import (
    CapacityExceeded,
    CheckpointFailed,
    InvalidRequest,
    StaleEpoch,
    SubletError,
    VersionConflict,
)
from sublet.node.storage.volume_folder import (
    FILE,
    FOLDER,
    VolumeAccess,
    bytes_in,
    collect_in,
    locked,
    manifest_at,
    needed_by,
    numbers_in,
    ours,
    staging_of,
)
from sublet.values import format_size
from sublet.wire.codec import dumps
from sublet.wire.manifest import (
    HEADER_BYTES,
    MANIFEST_MAX,
    TRAILER,
    Contents,
    damaged,
    entries_of_pack,
    manifest_name,
    read_manifest,
)
from sublet.wire.refusals import refusal_of
from sublet.wire.volumes import CHECKPOINTS, PACKS, STAGING, Publish, Published

COPY_BYTES: Final = 4 << 20
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SEALED: Final = 0o444
_NO_LEASES: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK, errno.EACCES, errno.EPERM)
"""What a file system says that has no leases, or a kernel that gives us none."""


def run_and_encode(work: Callable[[], object]) -> str:
    """Run it; returns the outcome, encoded for the asker."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # a read lease sends it when another process opens to write
    try:
        return dumps(work()).decode("utf-8", "surrogateescape")
    except SubletError as error:
        return dumps(refusal_of(error)).decode("utf-8", "surrogateescape")
    except OSError as error:
        failed = CheckpointFailed(
            f"the volume could not be written to: {error.strerror or error}",
            do="Make room there, or ask for a larger volume, then save again; earlier checkpoints are whole.",
        )
        return dumps(refusal_of(failed)).decode("utf-8", "surrogateescape")


# --------------------------------------------------------------------------------------------------------- publishing


def publish(place: VolumeAccess, request: Publish) -> Published:
    """Check, seal, name, sync. Raises for what is not to be published; then nothing can be found that could not be
    before."""
    top = os.open(place.folder, FOLDER)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, top)
        undo.enter_context(locked(place.lock))
        run = _Publication(place, request, undo, top)
        return run.done()


class _Publication:
    """One of them under way."""

    def __init__(self, place: VolumeAccess, request: Publish, undo: contextlib.ExitStack, top: int) -> None:
        self._place, self._request, self._undo = place, request, undo
        self._checkpoints, self._packs, staging = (self._folder(top, name) for name in (CHECKPOINTS, PACKS, STAGING))
        try:
            own = os.open(staging_of(request.epoch, apart=place.apart), FOLDER, dir_fd=staging)
            undo.callback(os.close, own)
            self._staged = os.open(plain_name(request.staging), FOLDER, dir_fd=own)
            undo.callback(os.close, self._staged)
        except OSError as error:
            raise _odd(request.staging, error) from None

    def _folder(self, top: int, name: str) -> int:
        fd = ours(top, name)
        self._undo.callback(os.close, fd)
        return fd

    def done(self) -> Published:
        data = self._manifest()
        contents = read_manifest(data)
        self._admit(contents)
        new = self._new_packs(contents)
        size = len(data) + sum(os.fstat(fd).st_size for fd in new.values())
        self._fits(size)
        for name, fd in new.items():
            self._take(name, fd, contents.packs[name])
        if new:
            os.fsync(self._packs)
        self._check_packs(contents)
        self._name(contents.number, data)
        if self._request.keep > 0 and contents.number > self._request.keep:
            with contextlib.suppress(SubletError, OSError):  # it is published all the same; a later collection is told
                collect_in(self._checkpoints, self._packs, self._request.keep)
        return Published(number=contents.number, wall_ns=time.time_ns(), size=size)

    def _manifest(self) -> bytes:
        fd, found = self._open(self._request.manifest)
        if found.st_size > MANIFEST_MAX:
            raise damaged("a manifest is larger than any can be")
        parts = []
        while part := os.read(fd, COPY_BYTES):
            parts.append(part)
            if sum(map(len, parts)) > MANIFEST_MAX:
                raise damaged("a manifest is larger than any can be")
        return b"".join(parts)

    def _open(self, name: str) -> tuple[int, os.stat_result]:
        """A file that was staged: a plain one, the asker's own, under no other name."""
        try:
            fd = os.open(plain_name(name), FILE, dir_fd=self._staged)
        except OSError as error:
            raise _odd(name, error) from None
        self._undo.callback(os.close, fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest(f"{name} is no plain file", do="Stage what `Durable` writes.")
        if found.st_uid not in (self._place.owner, os.geteuid()):
            raise InvalidRequest(f"{name} belongs to another user", do="Write it yourself.")
        if found.st_nlink != 1 and not self._is_taken(name, found):
            raise InvalidRequest(f"{name} has another name elsewhere", do="Write a file that has one name.")
        return fd, found

    def _is_taken(self, name: str, found: os.stat_result) -> bool:
        """Whether an earlier attempt to publish just this has named it already."""
        try:
            named = os.stat(name, dir_fd=self._packs, follow_symlinks=False)
        except OSError:
            return False
        return found.st_nlink == 2 and (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino)

    def _admit(self, contents: Contents) -> None:
        """In the name of the asker, and the next one after what the asker knows."""
        if (contents.lease, contents.epoch) != (self._request.lease, self._request.epoch):
            raise StaleEpoch(
                f"what was staged is of ({contents.lease}, {contents.epoch}), and "
                f"({self._request.lease}, {self._request.epoch}) asks to publish it"
            )
        newest = max(numbers_in(os.listdir(self._checkpoints)), default=0)
        if newest != self._request.parent or contents.parent != newest or contents.number != newest + 1:
            raise VersionConflict(
                f"checkpoint {contents.number} is not the next one: the newest is {newest}",
                do="Open the newest checkpoint, make the change again, and save.",
            )
        if newest:
            before = manifest_at(self._checkpoints, manifest_name(newest))
            if before.epoch > contents.epoch:
                raise StaleEpoch(f"epoch {contents.epoch} cannot save any more: epoch {before.epoch} has saved since")

    def _new_packs(self, contents: Contents) -> dict[str, int]:
        """Each pack that is new: its name, and the descriptor of what was staged."""
        found = {}
        for name in self._request.packs:
            if name not in contents.packs:
                raise InvalidRequest(f"the manifest does not name {name}", do="Stage what `Durable` writes.")
            fd, staged = self._open(name)
            if staged.st_size != contents.packs[name][0]:
                raise damaged(f"{name} has {staged.st_size} bytes, and the manifest says {contents.packs[name][0]}")
            found[name] = fd
        return found

    def _fits(self, new: int) -> None:
        """Where no file system keeps it to its size, this does."""
        if not self._place.counted:
            return
        used = bytes_in(self._checkpoints) + bytes_in(self._packs)
        if used + new > self._place.size:
            raise CapacityExceeded(
                f"the checkpoint needs {format_size(used + new)} with those that are kept, and the volume has "
                f"{format_size(self._place.size)}",
                do="Keep fewer checkpoints, or ask for a larger volume.",
            )

    def _take(self, name: str, fd: int, expected: tuple[int, int]) -> None:
        """Give the pack its name; from then on no process writes to it. One that a checkpoint needs already stays as it
        is: the file of that name has its content, or is damaged, and damage must not spread."""
        if self._is_needed(name):
            return
        if _seal(fd, take_over=self._place.changes_owner):
            check_pack(fd, name, expected)
            os.fsync(fd)
            self._link(f"/proc/self/fd/{fd}", name)
            return
        temporary = f"~{name}"
        self._unlink(self._packs, temporary)
        copy = os.open(temporary, _NEW, _SEALED, dir_fd=self._packs)
        try:
            copy_bytes(fd, copy, expected[0])
            os.fchmod(copy, _SEALED)
            os.fsync(copy)
            check_pack(copy, name, expected)
        except BaseException:
            self._unlink(self._packs, temporary)
            raise
        finally:
            os.close(copy)
        os.rename(temporary, name, src_dir_fd=self._packs, dst_dir_fd=self._packs)

    def _is_needed(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._packs, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return name in needed_by(self._checkpoints, numbers_in(os.listdir(self._checkpoints)))

    def _link(self, source: str, name: str) -> None:
        """In place of whatever an earlier attempt has left there."""
        temporary = f"~{name}"
        self._unlink(self._packs, temporary)
        os.link(source, temporary, dst_dir_fd=self._packs, follow_symlinks=True)
        os.rename(temporary, name, src_dir_fd=self._packs, dst_dir_fd=self._packs)
        self._unlink(self._packs, temporary)  # two names of one file are not renamed into each other

    def _check_packs(self, contents: Contents) -> None:
        for name, (size, _) in contents.packs.items():
            try:
                found = os.stat(name, dir_fd=self._packs, follow_symlinks=False)
            except FileNotFoundError:
                raise CheckpointFailed(f"{name}, which the checkpoint needs, is not there", do="Save anew.") from None
            if not stat.S_ISREG(found.st_mode) or found.st_size != size or found.st_uid != os.geteuid():
                raise damaged(f"{name}, which the checkpoint needs, is not what it was")

    def _name(self, number: int, data: bytes) -> None:
        """The one step by which it becomes a checkpoint."""
        name, temporary = manifest_name(number), f"~{number}"
        self._unlink(self._checkpoints, temporary)
        fd = os.open(temporary, _NEW, _SEALED, dir_fd=self._checkpoints)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, _SEALED)
            os.fsync(fd)
        except BaseException:
            self._unlink(self._checkpoints, temporary)
            raise
        finally:
            os.close(fd)
        where = self._checkpoints
        try:
            os.link(temporary, name, src_dir_fd=where, dst_dir_fd=where, follow_symlinks=False)
        except FileExistsError:
            raise VersionConflict(f"checkpoint {number} is there already", do="Open the newest, and save.") from None
        finally:
            self._unlink(where, temporary)
        try:
            os.fsync(where)
        except OSError:  # perhaps it is on disk; the save fails, so no reader may find it
            os.unlink(name, dir_fd=where)
            raise

    @staticmethod
    def _unlink(folder: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def plain_name(name: str) -> str:
    """A name, and not a way to elsewhere."""
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name) > 255:
        raise InvalidRequest(f"{name[:80]!r} is not the name of a file", do="Give the name alone, without a folder.")
    return name


def _odd(name: str, error: OSError) -> SubletError:
    """What was named is not there, or is something that is not opened: a link, a device, a pipe."""
    if error.errno == errno.ENOENT:
        return CheckpointFailed(f"{name} was not staged", do="Stage it again, and save.")
    return InvalidRequest(f"{name} is no plain file or folder ({error.strerror})", do="Stage what `Durable` writes.")


def _seal(fd: int, *, take_over: bool) -> bool:
    """Seal the file; returns whether no process can write to it any more."""
    if take_over:
        os.fchown(fd, os.geteuid(), os.getegid())
    os.fchmod(fd, _SEALED)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, *_NO_LEASES):
            raise
        return False
    return True


def check_pack(fd: int, name: str, expected: tuple[int, int]) -> None:
    """Whether it begins and ends as a pack does, and is the size that the manifest says."""
    size, entries = os.fstat(fd).st_size, expected[1]
    header = os.pread(fd, HEADER_BYTES, 0)
    trailer = os.pread(fd, TRAILER.size, max(0, size - TRAILER.size))
    if size != expected[0] or entries_of_pack(header, trailer, size) != entries:
        raise damaged(f"{name} is not the pack that the manifest names")


def copy_bytes(source: int, to: int, size: int) -> None:
    at = 0
    while at < size:
        data = os.pread(source, min(COPY_BYTES, size - at), at)
        if not data:
            raise damaged("a pack became shorter while it was copied")
        view = memoryview(data)
        while view:
            view = view[os.write(to, view) :]
        at += len(data)
