"""A volume's folder as forked children see it: its contents, owner and removal.

    FOLDER/checkpoints/0000000000000012.manifest     ours to write; guests of another user read
    FOLDER/packs/HEX.pack                            the same
    FOLDER/staging/EPOCH/…                           each asker's own
    FOLDER/../lock                                   held while something is published or collected; not shown to guests

The holder of the volume and its guests may write beside these, and may have put anything in their place before they
were made. So no name is followed anywhere, and a folder that is not ours is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from typing import Final

from sublet.errors import CheckpointFailed, InvalidRequest, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.node.sandbox.cleaning import remove_tree
from sublet.values import Epoch
from sublet.wire.manifest import MANIFEST_MAX, Contents, damaged, manifest_name, number_of, read_manifest
from sublet.wire.volumes import CHECKPOINTS, LOCK, PACKS, STAGING, Collect, Collected, VolumeOpened

FOLDERS_MAX: Final = 10_000
LOCKED_S: Final = 3.0
"""How long to wait for another process that is at work in the folder."""
FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeAccess:
    """A volume's folder, and the identity of the asker."""

    folder: str
    lock: str
    """Beside the folder, where no guest comes: one that could open it could hold it, and block all that wait for it."""
    size: int
    counted: bool
    """Whether we alone keep it to its size."""
    owner: int
    """Whose files the asker's are."""
    group: int
    apart: bool = False
    """Whether the folder is made for guests of another user than the asker's."""

    @property
    def changes_owner(self) -> bool:
        return self.owner != os.geteuid()


def staging_of(epoch: Epoch, *, apart: bool) -> str:
    """The folder below ``staging`` for saves under this epoch: guests of another user have one, holders another."""
    return f"{epoch}.holder" if apart else str(epoch)


def lay_out(place: VolumeAccess, opening: VolumeOpened) -> VolumeOpened:
    """The folders are there, and the asker may write to its own; what epochs before this one staged is gone."""
    top = os.open(place.folder, FOLDER)
    try:
        for name in (CHECKPOINTS, PACKS, STAGING):
            os.close(ours(top, name, make=True))
        _sweep(place.folder, top, before=opening.epoch)
        own = staging_of(opening.epoch, apart=place.apart)
        staging = ours(top, STAGING)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(own, 0o700, dir_fd=staging)
            fd = os.open(own, FOLDER, dir_fd=staging)
            try:
                os.fchown(fd, place.owner, place.group) if place.changes_owner else None
            finally:
                os.close(fd)
        finally:
            os.close(staging)
    finally:
        os.close(top)
    return opening


def ours(top: int, name: str, *, make: bool = False) -> int:
    """A folder that only we (or, where all are one user, all of that user's processes) may write to."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=top)
    try:
        fd = os.open(name, FOLDER, dir_fd=top)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _foreign(name) from None
        if error.errno == errno.ENOENT:
            raise InvalidRequest("nothing was staged in this volume", do="Open it first.") from None
        raise
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise _foreign(name)
    return fd


def _foreign(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} in this volume is not the folder that Sublet makes",
        do="Remove or rename it: its place is needed for checkpoints.",
    )


def sweep_staging(folder: str) -> None:
    """No process saves there any more: what was staged goes."""
    with contextlib.suppress(OSError, SubletError):
        top = os.open(folder, FOLDER)
        try:
            _sweep(folder, top, before=None)
        finally:
            os.close(top)


def has_files(folder: str) -> bool:
    """Whether anything but folders lies there, and the lock that earlier versions put there. Of very many folders only
    the first are looked at, and what is beyond counts as a file."""
    waiting, looked = [folder], 0
    while waiting:
        looked += 1
        try:
            entries = os.scandir(waiting.pop())
        except OSError:  # too deep, or its owner hides it: what is in it is not known
            return True
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.name != LOCK:
                    return True
        if looked > FOLDERS_MAX:
            return True
    return False


def _sweep(folder: str, top: int, *, before: Epoch | None) -> None:
    """Folders of epochs below this one, or all. What is called otherwise is not ours, and stays."""
    staging = ours(top, STAGING)
    try:
        names = os.listdir(staging)
    finally:
        os.close(staging)
    for name in names:
        with contextlib.suppress(SubletError, OSError):
            if before is None or Epoch.parse(name.removesuffix(".holder")) < before:
                remove_tree(os.path.join(folder, STAGING, name))


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """No other process publishes or collects meanwhile. It waits briefly: a forked job of a supervisor before this one
    may hold the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOCKED_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointFailed("another program is at work in this volume", do="Save again.") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def manifest_at(folder: int, name: str) -> Contents:
    try:
        fd = os.open(name, FILE, dir_fd=folder)
    except OSError as error:
        raise damaged(f"{name} cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_size > MANIFEST_MAX:
            raise damaged(f"{name} is no manifest")
        with open(fd, "rb", closefd=False) as file:
            found = read_manifest(file.read(MANIFEST_MAX + 1))
    finally:
        os.close(fd)
    if found.number != number_of(name):
        raise damaged(f"{name} is the manifest of checkpoint {found.number}")
    return found


def numbers_in(names: Iterable[str]) -> list[int]:
    """Of the checkpoints among these files, in order."""
    return sorted(filter(None, map(number_of, names)))


def needed_by(checkpoints: int, numbers: Iterable[int]) -> set[str]:
    """The packs that these need. Raises ``CheckpointDamaged`` where one cannot be read."""
    return {pack for number in numbers for pack in manifest_at(checkpoints, manifest_name(number)).packs}


def bytes_in(folder: int) -> int:
    total = 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return total


def collect(place: VolumeAccess, request: Collect) -> Collected:
    """First manifests lose their names, then packs that no remaining manifest names; each step is durable before the
    next. Where a manifest that is to stay cannot be read, what it needs is not known, and nothing is removed."""
    if request.keep < 1:
        raise InvalidRequest("a collection leaves at least the newest checkpoint", do="Give keep=1 or more.")
    top = os.open(place.folder, FOLDER)
    try:
        with locked(place.lock):
            checkpoints, packs = ours(top, CHECKPOINTS), ours(top, PACKS)
            try:
                return collect_in(checkpoints, packs, request.keep)
            finally:
                os.close(checkpoints)
                os.close(packs)
    finally:
        os.close(top)


def collect_in(checkpoints: int, packs: int, keep: int) -> Collected:
    """The same, in folders that are open, under the lock."""
    names = os.listdir(checkpoints)
    numbers = numbers_in(names)
    old, staying = numbers[:-keep], numbers[-keep:]
    needed = needed_by(checkpoints, staying)
    gone = [manifest_name(number) for number in old] + [name for name in names if name.startswith("~")]
    for name in gone:
        os.unlink(name, dir_fd=checkpoints)
    if gone:
        os.fsync(checkpoints)
    removed, freed = 0, 0
    for name in sorted(os.listdir(packs)):
        if name in needed:
            continue
        freed += os.stat(name, dir_fd=packs, follow_symlinks=False).st_size
        os.unlink(name, dir_fd=packs)
        removed += 1
    if removed:
        os.fsync(packs)
    return Collected(checkpoints=tuple(old), packs=removed, freed_bytes=freed)
