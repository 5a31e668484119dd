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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from sublet.errors import CheckpointFailed, InvalidRequest, NotFound, StaleEpoch, SubletError, VersionConflict
from sublet.lazy_dataclass import dataclass
from sublet.state.checkpoints.atomic_files import move_into_place, name_once, read_whole, sync_folder, write_synced
from sublet.state.checkpoints.format import MANIFEST_MAX, CheckpointManifest, PackRef, damaged
from sublet.state.checkpoints.packs import PackFile, Packs, PackSource, file_name
from sublet.state.checkpoints.reader import CheckpointReader, Stored
from sublet.state.checkpoints.writer import UNLEASED, Author, Base, SaveReport, Staged
from sublet.state.transfer.encoded import Head
from sublet.values import format_size, shown
from sublet.wire.volumes import COPIED, CopiedIn

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
    def author(self) -> Author:
        """In whose name it is saved."""

    def numbers(self) -> list[int]:
        """Of all checkpoints there are, in order."""

    def newest(self) -> int:
        """The number of the newest checkpoint, 0 for none."""

    def open(self, number: int | None = None) -> CheckpointReader:
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

    def collect_once(self, keep: int) -> None:
        """``collect``, for this once: what the next publication keeps is not changed by it."""

    def inspect(self, source: str, *, passing: str = "") -> CopiedIn:
        """What ``copied`` would bring; number 0: there is nothing. ``source``: of another place, as this one knows it.
        ``passing``: checkpoints whose note begins so are passed over, if there is another."""

    def copied(self, source: str, *, passing: str = "") -> AbstractContextManager[Copied | None]:
        """A checkpoint of another place, in a staging folder here for as long as this goes on. Raises what there is no
        room for, before it is written."""

    def manifest(self, number: int | None = None) -> CheckpointManifest:
        """Of one of them, the newest by default."""

    def discard(self, folder: Path) -> None:
        """A staging folder is needed no more. Harmless twice."""


class FolderStore:
    """A plain folder. Several processes may use it; a lock orders what they publish."""

    by_descriptor = False
    """Whether this process may not enter the folder, and is handed its files."""

    def __init__(self, folder: str | os.PathLike[str], *, author: Author | None = None, create: bool = True) -> None:
        self.folder = Path(folder)
        self._author = UNLEASED if author is None else author
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
    def author(self) -> Author:
        return self._author

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

    def manifest(self, number: int | None = None) -> CheckpointManifest:
        if isinstance(number, bool) or not isinstance(number, int | None):
            raise InvalidRequest(f"{shown(number)} is no number of a checkpoint", do="Give one such as 3, or none.")
        which = self.newest() if number is None else number
        path = self.manifest_path(which)
        try:
            manifest = CheckpointManifest.parse(self.manifest_bytes(which))
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

    def open(self, number: int | None = None) -> CheckpointReader:
        return CheckpointReader(self.stored(number))

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
            collect(self, keep=keep)

    def freed_by(self, keep: int) -> int:
        needed = {f"{ref.name.hex()}.pack" for number in self.numbers()[-keep:] for ref in self.manifest(number).packs}
        with os.scandir(self.packs) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.name not in needed)

    def collect_once(self, keep: int) -> None:

        collect(self, keep=keep)

    def inspect(self, source: str, *, passing: str = "") -> CopiedIn:

        return inspect_folder(FolderStore(source, create=False), passing)

    def copied(self, source: str, *, passing: str = "") -> AbstractContextManager[Copied | None]:
        """``source`` is a folder's path."""

        return copied_from_folder(self, FolderStore(source, create=False), passing)

    def _admit(self, manifest: CheckpointManifest) -> None:
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


# ------------------------------------------------------------------------------------------------------------------- gc
#
# Verifies a folder of checkpoints, and finds what is no longer needed.
#
# Neither loads an object. Collection goes in two steps, each durable before the next: first manifests lose their names,
# then packs that no remaining manifest names. A crash between leaves packs that the next collection takes; never a
# manifest that misses a pack. Where one manifest cannot be read, what it needs is unknown, so no pack is removed.


MANIFEST_NAME: Final = re.compile(r"\d{16}\.manifest", re.ASCII)
PACK_NAME: Final = re.compile(r"[0-9a-f]{40}\.pack")
KEEP: Final = 3
"""Checkpoints that a collection leaves, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreVerdict:
    """What was found in a folder."""

    problems: Sequence[str]
    """One sentence for each thing that is not whole; empty if everything is."""
    checkpoints: Sequence[int]
    packs: int
    read_bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(folder: str | os.PathLike[str]) -> StoreVerdict:
    """Read everything and compare it with its checksums and with everything else. Loads nothing, changes nothing. What
    lies there and belongs to no checkpoint (a file with another name, a link, a pipe) is named as well."""
    store = FolderStore(folder, create=False)
    problems = [*_foreign(store.checkpoints, MANIFEST_NAME), *_foreign(store.packs, PACK_NAME)]
    seen: dict[PackRef, int] = {}
    numbers = store.numbers()
    for number in numbers:
        problems += [f"checkpoint {number}: {problem}" for problem in _problems(store, number, seen)]
    return StoreVerdict(problems=problems, checkpoints=numbers, packs=len(seen), read_bytes=sum(seen.values()))


def _foreign(folder: Path, name: re.Pattern[str]) -> Iterator[str]:
    """What is there and should not be. Names with a ``~`` are what is being written, or what a crash left."""
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield f"{folder.name} cannot be read: {error.strerror}"
        return
    for entry in found:
        if not entry.name.startswith("~") and not name.fullmatch(entry.name):
            yield f"{folder.name}/{entry.name} is nothing that belongs there"
        elif not entry.is_file(follow_symlinks=False):
            yield f"{folder.name}/{entry.name} is no plain file"


def _problems(store: FolderStore, number: int, seen: dict[PackRef, int]) -> Iterator[str]:
    try:
        manifest = store.manifest(number)
    except SubletError as error:
        yield error.message
        return
    for ref in manifest.packs:
        if ref in seen:
            continue
        seen[ref] = ref.size
        yield from _problems_of_pack(store.packs / file_name(ref.name), ref)
    try:
        stored = Stored(manifest, store.packs)
    except SubletError as error:
        yield error.message
        return
    try:
        for record in {id(one): one for one in stored.records.values()}.values():
            head = Head.parse(stored.blob(record.blobs[0]))
            if [shape.length for shape in head.buffers] != [blob.length for blob in record.blobs[1:]]:
                yield f"{', '.join(record.names)}: the head speaks of other buffers than there are"
            for blob in record.blobs:
                for digest, _, length in blob.chunks():
                    stored.place(digest, length)
    except SubletError as error:
        yield error.message
    finally:
        stored.close()


def _problems_of_pack(path: Path, ref: PackRef) -> Iterator[str]:
    try:
        pack = PackFile(path, ref)
    except SubletError as error:
        yield f"{path.name}: {error.message}"
        return
    try:
        for n, entry in enumerate(pack.entries):
            try:
                pack.content(entry)
            except SubletError as error:
                yield f"{path.name}, chunk {n}: {error.message}"
    finally:
        pack.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedPacks:
    """What a collection removed."""

    checkpoints: Sequence[int]
    packs: int
    freed_bytes: int


def collect(store: FolderStore, *, keep: int = KEEP) -> CollectedPacks:
    """Remove all but the newest checkpoints, and what only they needed, and what crashes left behind.

    Raises ``CheckpointDamaged`` before anything is removed when a checkpoint that is to stay cannot be read.
    """
    if keep < 1:
        raise InvalidRequest("a collection leaves at least the newest checkpoint", do="Give keep=1 or more.")
    try:
        with store.locked():
            return _collect(store, keep)
    except OSError as error:
        raise CheckpointFailed(
            f"old checkpoints in {store.folder} could not be removed: {error.strerror or error}",
            do="Fix the disk; the newest checkpoint is whole, and the next collection removes what is left.",
        ) from error


def _collect(store: FolderStore, keep: int) -> CollectedPacks:
    numbers = store.numbers()
    old, staying = numbers[:-keep], numbers[-keep:]
    manifests = [store.manifest(number) for number in staying]
    needed = {file_name(ref.name) for manifest in manifests for ref in manifest.packs}
    for number in old:
        store.manifest_path(number).unlink(missing_ok=True)
    if old:
        sync_folder(store.checkpoints)
    packs, freed = 0, 0
    for name in sorted(os.listdir(store.packs)):
        if name in needed:
            continue
        path = store.packs / name
        freed += path.stat().st_size
        path.unlink()
        packs += 1
    if packs:
        sync_folder(store.packs)
    _sweep(store.staging)
    return CollectedPacks(checkpoints=old, packs=packs, freed_bytes=freed)


def _sweep(staging: Path) -> None:
    """Remove what was being written by processes that are gone: the living hold a lock on theirs."""
    for name in os.listdir(staging):
        folder = staging / name
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


# -------------------------------------------------------------------------------------------------------------- copying
#
# Copies a checkpoint from another store, also while its holder saves there.
#
# It comes into a staging folder, which is never taken for a checkpoint. What is made of it (all of it, or what a
# notebook takes of it) is then published here as anything that is saved here is: under this place's own lease, with the
# next number. The other place is only read.


LOOKS_MAX: Final = 20
"""Each try fails only if a save and a collection came between two lines here."""
AROUND: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Copied:
    """All of one checkpoint, in a staging folder."""

    manifest: CheckpointManifest
    folder: Path
    handed: PackSource | None = None
    """What opens its packs, where this process may not enter the folder they are in."""

    @property
    def source(self) -> Packs:
        """Where its packs are read."""
        return self.folder if self.handed is None else self.handed

    def open(self) -> CheckpointReader:
        """For reading: each byte is compared with its checksum, as everywhere."""
        return CheckpointReader(Stored(self.manifest, self.source))

    def check(self) -> None:
        """Compare everything that it needs with its checksums. Raises ``CheckpointDamaged``."""
        stored = Stored(self.manifest, self.source)
        try:
            chunks = {chunk[0]: chunk for one in stored.each_record() for blob in one.blobs for chunk in blob.chunks()}
            for digest, _, length in chunks.values():
                pack, entry = stored.place(digest, length)
                pack.content(entry)
        finally:
            stored.close()

    def packs(self) -> dict[bytes, Path]:
        return {ref.name: self.folder / file_name(ref.name) for ref in self.manifest.packs}


def copy_checkpoint(store: CheckpointStore, source: str) -> CopiedIn:
    """Make the newest checkpoint of ``source`` the newest of this store; its number is the one it has here, 0 where
    there is none. ``source``: what the store understands, a folder or a ticket for a volume. Raises
    ``CapacityExceeded`` or ``CheckpointFailed`` for what has no room, before anything is written, and
    ``CheckpointDamaged`` rather than spread damage."""
    with store.copied(source) as copied:
        if copied is None:
            return CopiedIn(number=0)
        copied.check()
        author, newest = store.author, store.newest()
        manifest = replace(copied.manifest, number=newest + 1, parent=newest, lease=author.lease, epoch=author.epoch)
        path = copied.folder / "manifest"
        write_synced(path, manifest.dump())
        present = store.manifest(newest).packs if newest else ()
        packs = [path for name, path in copied.packs().items() if name not in {ref.name for ref in present}]
        size = sum(ref.size for ref in manifest.packs)
        report = SaveReport(
            number=manifest.number,
            roots=manifest.roots,
            state_bytes=manifest.state_bytes,
            written_bytes=size,
            read_bytes=0,
        )
        base = store.base()
        store.publish(
            Staged(
                folder=copied.folder,
                manifest=manifest,
                manifest_path=path,
                packs=packs,
                report=report,
                base=base,
                records=(),
            )
        )
        return CopiedIn(number=manifest.number, wall_ns=manifest.wall_ns, size=size, note=manifest.note)


# ---- a folder without a lease


def inspect_folder(source: FolderStore, passing: str = "") -> CopiedIn:
    """What would be copied; number 0: nothing."""
    for _ in range(LOOKS_MAX):
        try:
            manifest = _picked(source, passing)
        except NotFound:  # collected just now: so there is a newer one
            continue
        if manifest is None:
            return CopiedIn(number=0)
        size = sum(ref.size for ref in manifest.packs)
        return CopiedIn(number=manifest.number, wall_ns=manifest.wall_ns, size=size, note=manifest.note)
    raise damaged("a folder has no checkpoint that stays for long enough to be read")


@contextmanager
def copied_from_folder(store: FolderStore, source: FolderStore, passing: str = "") -> Iterator[Copied | None]:
    """Its packs are opened together, as every reader does, and copied then: what is open cannot be collected."""
    found = _opened(source, passing)
    if found is None:
        yield None
        return
    manifest, files = found
    try:
        needed = sum(ref.size for ref in manifest.packs) + AROUND
        with store.staging_folder(needed) as folder:
            try:
                for name, fd in files.items():
                    with open(fd, "rb", closefd=False) as old, open(folder / name, "xb") as new:
                        shutil.copyfileobj(old, new, 4 << 20)
                        os.fchmod(new.fileno(), 0o444)
            except OSError as error:
                raise CheckpointFailed(
                    f"{format_size(needed)} could not be copied to {store.folder}: {error.strerror or error}",
                    do="Make room there; what is saved there is whole.",
                ) from error
            yield Copied(manifest, folder)
    finally:
        for fd in files.values():
            os.close(fd)


def _picked(source: FolderStore, passing: str) -> CheckpointManifest | None:
    """The newest that is not to be passed over, or the newest."""
    newest = None
    for number in reversed(source.numbers()):
        manifest = source.manifest(number)
        newest = newest or manifest
        if not passing or not manifest.note.startswith(passing):
            return manifest
    return newest


def _opened(source: FolderStore, passing: str) -> tuple[CheckpointManifest, dict[str, int]] | None:
    for _ in range(LOOKS_MAX):
        files: dict[str, int] = {}
        try:
            manifest = _picked(source, passing)
            if manifest is None:
                return None
            for ref in manifest.packs:
                name = file_name(ref.name)
                files[name] = os.open(source.packs / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (NotFound, FileNotFoundError):  # collected just now: so there is a newer one
            for fd in files.values():
                os.close(fd)
            continue
        return manifest, files
    raise damaged("a checkpoint names packs that are not there")


def manifest_in(folder: Path) -> CheckpointManifest:
    """Of what the supervisor has put there."""
    return CheckpointManifest.parse(read_whole(folder / COPIED, MANIFEST_MAX))
