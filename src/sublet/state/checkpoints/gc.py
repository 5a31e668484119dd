"""Verifies a folder of checkpoints, and finds what is no longer needed.

Neither loads an object. Collection goes in two steps, each durable before the next: first manifests lose their names,
then packs that no remaining manifest names. A crash between leaves packs that the next collection takes; never a
manifest that misses a pack. Where one manifest cannot be read, what it needs is unknown, so no pack is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sublet.errors import CheckpointFailed, InvalidRequest, SubletError
from sublet.state.checkpoints.atomic_files import sync_folder
from sublet.state.checkpoints.format import PackRef
from sublet.state.checkpoints.packs import PackFile, file_name
from sublet.state.checkpoints.reader import Stored
from sublet.state.checkpoints.store import FolderStore
from sublet.state.transfer.encoded import Head

MANIFEST_NAME: Final = re.compile(r"\d{16}\.manifest", re.ASCII)
PACK_NAME: Final = re.compile(r"[0-9a-f]{40}\.pack")
KEEP: Final = 3
"""Checkpoints that a collection leaves, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found in a folder."""

    problems: Sequence[str]
    """One sentence for each thing that is not whole; empty if everything is."""
    checkpoints: Sequence[int]
    packs: int
    read_bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(folder: str | os.PathLike[str]) -> Verdict:
    """Read everything and compare it with its checksums and with everything else. Loads nothing, changes nothing. What
    lies there and belongs to no checkpoint (a file with another name, a link, a pipe) is named as well."""
    store = FolderStore(folder, create=False)
    problems = [*_foreign(store.checkpoints, MANIFEST_NAME), *_foreign(store.packs, PACK_NAME)]
    seen: dict[PackRef, int] = {}
    numbers = store.numbers()
    for number in numbers:
        problems += [f"checkpoint {number}: {problem}" for problem in _problems(store, number, seen)]
    return Verdict(problems=problems, checkpoints=numbers, packs=len(seen), read_bytes=sum(seen.values()))


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
class Collected:
    """What a collection removed."""

    checkpoints: Sequence[int]
    packs: int
    freed_bytes: int


def collect(store: FolderStore, *, keep: int = KEEP) -> Collected:
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


def _collect(store: FolderStore, keep: int) -> Collected:
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
    return Collected(checkpoints=old, packs=packs, freed_bytes=freed)


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
