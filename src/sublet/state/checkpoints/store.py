"""A store of checkpoints: a folder of packs and manifests, and the rules for adding one.

    FOLDER/checkpoints/0000000000000012.manifest     one file for each checkpoint
    FOLDER/packs/HEX.pack                            what they share
    FOLDER/staging/…/                                what is being written, and what a crash left
    FOLDER/lock                                      held while something is published or collected

A checkpoint exists from the moment its manifest has its name. Before that its packs are on disk under theirs, and
their folder is synced; so a reader finds a checkpoint whole or not at all, and an older one is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from sublet.errors import CheckpointFailed, InvalidRequest, NotFound, StaleEpoch, VersionConflict
from sublet.state.checkpoints.atomic_files import move_into_place, name_once, read_whole, sync_folder
from sublet.state.checkpoints.format import MANIFEST_MAX, Manifest, damaged
from sublet.state.checkpoints.packs import Packs
from sublet.state.checkpoints.reader import Checkpoint, Stored
from sublet.state.checkpoints.writer import NOBODY, Base, Staged, Who
from sublet.values import format_size, shown
from sublet.wire.volumes import CopiedIn

if TYPE_CHECKING:
    from sublet.state.checkpoints.copying import Copied

NAME: Final = re.compile(r"(\d{16})\.manifest")


class Publisher(Protocol):
    """Publishes staged checkpoints. Called after each save, once."""

    def publish(self, staged: Staged) -> None:
        """When this returns the checkpoint is durable and is the newest. Raises ``VersionConflict`` when another one
        was published since its base, ``StaleEpoch`` when a newer holder has the store, ``CheckpointFailed`` when it
        could not be written; nothing was changed then."""


class CheckpointStore(Publisher, Protocol):
    """What ``Durable`` saves into."""

    @property
    def who(self) -> Who:
        """In whose name it is saved."""

    def numbers(self) -> list[int]:
        """Of all checkpoints there are, in order."""

    def newest(self) -> int:
        """The number of the newest checkpoint, 0 for none."""

    def open(self, number: int | None = None) -> Checkpoint:
        """One of them, the newest by default. ``NotFound`` or ``CheckpointDamaged``."""

    def base(self) -> Base:
        """The newest, to build the next save on."""

    @property
    def room(self) -> int:
        """Bytes that may still be written."""

    @property
    def size(self) -> int:
        """Bytes of the place as a whole; 0 where that is not known."""

    def stage(self, needed: int = 0) -> Path:
        """A new, empty folder on the same file system as the packs. Raises ``CheckpointFailed`` if there is not room
        for so many bytes; nothing is written then."""

    def staging_folder(self, needed: int = 0) -> AbstractContextManager[Path]:
        """``stage``, for as long as something is written and published there; then ``discard``. What goes wrong within
        because the place itself is gone is raised as that."""

    def collect(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints and what only the others needed."""

    def freed_by(self, keep: int) -> int:
        """Bytes that packs have which the newest ``keep`` checkpoints do not need."""

    def let_go(self, keep: int) -> None:
        """``collect``, for this once: what the next publication keeps is not changed by it."""

    def look(self, source: str, *, passing: str = "") -> CopiedIn:
        """What ``copied`` would bring; number 0: there is nothing. ``source``: of another place, as this one knows it.
        ``passing``: checkpoints whose note begins so are passed over, if there is another."""

    def copied(self, source: str, *, passing: str = "") -> AbstractContextManager[Copied | None]:
        """A checkpoint of another place, in a staging folder here for as long as this goes on. Raises what there is no
        room for, before it is written."""

    def manifest(self, number: int | None = None) -> Manifest:
        """Of one of them, the newest by default."""

    def discard(self, folder: Path) -> None:
        """A staging folder is needed no more. Harmless twice."""


class FolderStore:
    """A plain folder. Several processes may use it; a lock orders what they publish."""

    by_descriptor = False
    """Whether this process may not enter the folder, and is handed its files."""

    def __init__(self, folder: str | os.PathLike[str], *, who: Who | None = None, create: bool = True) -> None:
        self.folder = Path(folder)
        self._who = NOBODY if who is None else who
        self.checkpoints = self.folder / "checkpoints"
        self.packs = self.folder / "packs"
        self.staging = self.folder / "staging"
        self._staged: dict[Path, int] = {}
        if not create:
            if not self.by_descriptor and not self.checkpoints.is_dir():
                raise NotFound(f"there are no checkpoints in {self.folder}", do="Name the folder they were saved in.")
            return
        try:
            for one in (self.checkpoints, self.packs, self.staging):
                one.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(
                f"{self.folder} cannot hold checkpoints: {error.strerror}", do="Name a folder you may write to."
            ) from error

    @property
    def who(self) -> Who:
        return self._who

    # ---- reading ----

    @property
    def pack_source(self) -> Packs:
        """Where its packs are read."""
        return self.packs

    def numbers(self) -> list[int]:
        """Of all checkpoints there are, in order."""
        try:
            found = [NAME.fullmatch(name) for name in os.listdir(self.checkpoints)]
        except OSError as error:
            raise damaged(f"{self.checkpoints} cannot be read: {error.strerror}") from error
        return sorted(int(match[1]) for match in found if match is not None)

    def newest(self) -> int:
        return max(self.numbers(), default=0)

    def manifest(self, number: int | None = None) -> Manifest:
        if isinstance(number, bool) or not isinstance(number, int | None):
            raise InvalidRequest(f"{shown(number)} is no number of a checkpoint", do="Give one such as 3, or none.")
        which = self.newest() if number is None else number
        path = self.manifest_path(which)
        try:
            manifest = Manifest.parse(self.manifest_bytes(which))
        except FileNotFoundError:
            has = ", ".join(map(str, self.numbers()[-5:]))
            if number is None or not has:
                raise NotFound(f"there is no checkpoint in {self.folder}", do="Save one first.") from None
            raise NotFound(f"there is no checkpoint {which} in {self.folder}", do=f"There is: {has}.") from None
        except OSError as error:
            raise damaged(f"{path.name} cannot be read: {error.strerror}") from error
        if manifest.number != which:
            raise damaged(f"{path.name} is the manifest of checkpoint {manifest.number}")
        return manifest

    def manifest_bytes(self, number: int) -> bytes:
        """As it is stored. Raises ``OSError``."""
        return read_whole(self.manifest_path(number), MANIFEST_MAX)

    def manifest_path(self, number: int) -> Path:
        return self.checkpoints / f"{number:016d}.manifest"

    def stored(self, number: int | None = None) -> Stored:
        return Stored(self.manifest(number), self.pack_source)

    def open(self, number: int | None = None) -> Checkpoint:
        return Checkpoint(self.stored(number))

    def base(self) -> Base:
        if not self.newest():
            return Base(packs_folder=self.pack_source)
        return Base.read(self.manifest(), self.pack_source)

    # ---- writing ----

    @property
    def room(self) -> int:
        """Bytes that may still be written."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    @property
    def size(self) -> int:
        """How much of the disk is ours is not known."""
        return 0

    def stage(self, needed: int = 0) -> Path:
        self.check_room(needed)
        folder = self.staging / secrets.token_hex(8)
        try:
            with self.locked():  # or a collection might come between the next two lines
                folder.mkdir(mode=0o700)
                fd = self._staged[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_SH)  # while it is held, it is not taken for what a crash left
        except OSError as error:
            self.discard(folder)
            raise self._failed(error) from error
        return folder

    def check_room(self, needed: int) -> None:
        """Raises ``CheckpointFailed``, which says how much is needed, if there is not room for so many bytes."""
        if needed and needed > (room := self.room):
            raise CheckpointFailed(
                f"the checkpoint needs up to {format_size(needed)}, and {self.folder} has {format_size(room)} left",
                do="Make room, keep fewer checkpoints (keep=), or ask for a larger volume, then save again; earlier "
                "checkpoints are whole.",
            )

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        fd = self._staged.pop(folder, -1)
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def staging_folder(self, needed: int = 0) -> Iterator[Path]:
        folder = self.stage(needed)
        try:
            yield folder
        finally:
            self.discard(folder)

    def publish(self, staged: Staged) -> None:
        manifest = staged.manifest
        try:
            with self.locked():
                self._admit(manifest)
                for pack in staged.packs:
                    move_into_place(pack, self.packs / pack.name)
                if staged.packs:
                    sync_folder(self.packs)
                for ref in manifest.packs:
                    found = self.packs / f"{ref.name.hex()}.pack"
                    if not found.exists() or found.stat().st_size != ref.size:
                        raise CheckpointFailed(f"the pack {found.name} went away while the state was saved")
                name_once(staged.manifest_path, self.manifest_path(manifest.number))
        except FileExistsError:
            raise _conflict(manifest.number) from None
        except OSError as error:
            raise self._failed(error) from error
        self.discard(staged.folder)

    def collect(self, keep: int) -> None:
        if len(self.numbers()) > keep:
            from sublet.state.checkpoints.gc import collect

            collect(self, keep=keep)

    def freed_by(self, keep: int) -> int:
        needed = {f"{ref.name.hex()}.pack" for number in self.numbers()[-keep:] for ref in self.manifest(number).packs}
        with os.scandir(self.packs) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.name not in needed)

    def let_go(self, keep: int) -> None:
        from sublet.state.checkpoints.gc import collect

        collect(self, keep=keep)

    def look(self, source: str, *, passing: str = "") -> CopiedIn:
        from sublet.state.checkpoints.copying import look_in_folder

        return look_in_folder(FolderStore(source, create=False), passing)

    def copied(self, source: str, *, passing: str = "") -> AbstractContextManager[Copied | None]:
        """``source`` is a folder's path."""
        from sublet.state.checkpoints.copying import copied_from_folder

        return copied_from_folder(self, FolderStore(source, create=False), passing)

    def _admit(self, manifest: Manifest) -> None:
        """The next number, in the name of the newest holder there was."""
        newest = self.newest()
        if manifest.number != newest + 1:
            raise _conflict(manifest.number)
        if newest and (before := self.manifest()).epoch > manifest.epoch:
            raise StaleEpoch(f"epoch {manifest.epoch} cannot save any more: epoch {before.epoch} has saved since")

    def _failed(self, error: OSError) -> CheckpointFailed:
        return CheckpointFailed(
            f"the state could not be saved in {self.folder}: {error.strerror or error}",
            do="Make room there or choose another place, then save again; earlier checkpoints are whole.",
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock for publishing and collecting. Ends with the process that holds it."""
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)


def _conflict(number: int) -> VersionConflict:
    return VersionConflict(
        f"checkpoint {number} is not the next one: another one was saved meanwhile",
        do="Open the newest checkpoint, make the change again, and save.",
    )
