"""Copies a checkpoint from another store, also while its holder saves there.

It comes into a staging folder, which is never taken for a checkpoint. What is made of it (all of it, or what a notebook
takes of it) is then published here as anything that is saved here is: under this place's own lease, with the next
number. The other place is only read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sublet.errors import CheckpointFailed, NotFound
from sublet.state.checkpoints.atomic_files import read_whole, write_synced
from sublet.state.checkpoints.format import MANIFEST_MAX, Manifest, damaged
from sublet.state.checkpoints.packs import Packs, PackSource, file_name
from sublet.state.checkpoints.reader import Checkpoint, Stored
from sublet.state.checkpoints.writer import SaveReport, Staged
from sublet.values import format_size
from sublet.wire.volumes import COPIED, CopiedIn

if TYPE_CHECKING:
    from sublet.state.checkpoints.store import CheckpointStore, FolderStore

LOOKS_MAX: Final = 20
"""Each try fails only if a save and a collection came between two lines here."""
AROUND: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Copied:
    """All of one checkpoint, in a staging folder."""

    manifest: Manifest
    folder: Path
    handed: PackSource | None = None
    """Who opens its packs, where this process may not enter the folder they are in."""

    @property
    def source(self) -> Packs:
        """Where its packs are read."""
        return self.folder if self.handed is None else self.handed

    def open(self) -> Checkpoint:
        """For reading: each byte is compared with its checksum, as everywhere."""
        return Checkpoint(Stored(self.manifest, self.source))

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
        who, newest = store.who, store.newest()
        manifest = replace(copied.manifest, number=newest + 1, parent=newest, lease=who.lease, epoch=who.epoch)
        path = copied.folder / "manifest"
        write_synced(path, manifest.dump())
        there = store.manifest(newest).packs if newest else ()
        packs = [path for name, path in copied.packs().items() if name not in {ref.name for ref in there}]
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


def look_in_folder(source: FolderStore, passing: str = "") -> CopiedIn:
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


def _picked(source: FolderStore, passing: str) -> Manifest | None:
    """The newest that is not to be passed over, or the newest."""
    newest = None
    for number in reversed(source.numbers()):
        manifest = source.manifest(number)
        newest = newest or manifest
        if not passing or not manifest.note.startswith(passing):
            return manifest
    return newest


def _opened(source: FolderStore, passing: str) -> tuple[Manifest, dict[str, int]] | None:
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


def manifest_in(folder: Path) -> Manifest:
    """Of what the supervisor has put there."""
    return Manifest.parse(read_whole(folder / COPIED, MANIFEST_MAX))
