"""Disks that keep some of what was not synced, and not the rest; whatever the order was.

A whole story of saves and collections is recorded, call by call. Then the disk is rebuilt as a crash after each call
may leave it: what was synced is there; of a file's other bytes all, none or half; of the names in a folder that were
given or taken away since its last sync, any selection. Every such disk must hold what was answered by then.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.errors import SubletError
from sublet.state.checkpoints.store import FolderStore, verify
from tests.crash import pack_program as program

pytestmark = [pytest.mark.crash, pytest.mark.slow]

ALL: Final = os.environ.get("SUBLET_CRASH_ALL") == "1"
SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20263"))
PER_POINT: Final = 40 if ALL else 6
SAVES: Final = 5


@dataclass(slots=True, eq=False)
class File:
    """What is in it, and what of that is on disk."""

    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    @property
    def is_synced(self) -> bool:
        return bytes(self.content) == self.synced


@dataclass(slots=True, eq=False)
class Disk:
    """The names in the two folders that count. A rename between folders is a change of each."""

    synced: dict[str, File] = field(default_factory=dict)
    """Path below the folder → file, for certain."""
    pending: list[tuple[str, File | None]] = field(default_factory=list)
    """Names given (or taken away: None) since their folder was synced, in order."""

    def copy(self) -> Disk:
        files = {id(one): File(bytearray(one.content), one.synced) for one in self.files()}
        return Disk(
            {path: files[id(one)] for path, one in self.synced.items()},
            [(path, None if one is None else files[id(one)]) for path, one in self.pending],
        )

    def files(self) -> list[File]:
        found = {id(one): one for one in [*self.synced.values(), *(one for _, one in self.pending if one is not None)]}
        return list(found.values())


class Recorder:
    """Stands in for the calls of ``os`` that change a disk, does them, and keeps every state in between."""

    def __init__(self, home: Path, forgets: str = "") -> None:
        self.home = home
        self.forgets = forgets
        """Syncs of files or of folders, as if the code had left them out."""
        self.answered = 0
        self.disk = Disk()
        self.files: dict[int, File] = {}
        self.states: list[tuple[Disk, int]] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("write", "fsync", "rename", "link", "unlink"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, self._recording(name, real))

    def _recording(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs) if name != "unlink" else None
            if "dir_fd" not in kwargs:
                getattr(self, name)(*args, found)
                self.states.append((self.disk.copy(), self.answered))
            return real(*args, **kwargs) if name == "unlink" else found

        return call

    def file(self, inode: int) -> File:
        return self.files.setdefault(inode, File())

    def below(self, path: Any) -> str | None:
        where = Path(path)
        return f"{where.parent.name}/{where.name}" if where.parent.name in ("packs", "checkpoints") else None

    def write(self, fd: int, data: Any, count: int) -> None:
        self.file(os.fstat(fd).st_ino).content.extend(bytes(data)[:count])

    def fsync(self, fd: int, _: None) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.forgets == ("folders" if target.is_dir() else "files"):
            return
        if not target.is_dir():
            synced = self.file(os.fstat(fd).st_ino)
            synced.synced = bytes(synced.content)
            return
        mine = [entry for entry in self.disk.pending if entry[0].startswith(target.name + "/")]
        self.disk.pending = [entry for entry in self.disk.pending if entry not in mine]
        for path, one in mine:
            if one is None:
                self.disk.synced.pop(path, None)
            else:
                self.disk.synced[path] = one

    def rename(self, source: Any, target: Any, _: None) -> None:
        self.named(target, os.stat(target).st_ino)

    def link(self, source: Any, target: Any, _: None) -> None:
        self.named(target, os.stat(target).st_ino)

    def unlink(self, path: Any, _: None) -> None:
        self.named(path, None)

    def named(self, path: Any, inode: int | None) -> None:
        where = self.below(path)
        if where is not None:
            self.disk.pending.append((where, None if inode is None else self.file(inode)))


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    place = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def states(memory: Path) -> list[tuple[Disk, int]]:
    return recorded(memory / "home")


def recorded(home: Path, forgets: str = "") -> list[tuple[Disk, int]]:
    recorder = Recorder(home, forgets)

    def answered(note: dict[str, object]) -> None:
        recorder.answered = int(str(note["saved"]))

    with pytest.MonkeyPatch.context() as patch:
        recorder.patch(patch)
        program.save(recorder.home, answered, SAVES)
    return recorder.states


def after_crash(disk: Disk, chance: random.Random) -> dict[str, bytes]:
    """One of the disks that may be left."""
    names = dict(disk.synced)
    mood = chance.choice(("all", "none", "some", "some"))
    for path, one in disk.pending:
        if mood == "all" or (mood == "some" and chance.random() < 0.5):
            if one is None:
                names.pop(path, None)
            else:
                names[path] = one
    found = {}
    for path, one in names.items():
        lost = 0 if one.is_synced else chance.choice((0, 1, 2))
        whole = bytes(one.content)
        found[path] = (whole, one.synced, whole[: len(whole) // 2])[lost]
    return found


def lay_out(folder: Path, files: dict[str, bytes]) -> FolderStore:
    shutil.rmtree(folder, ignore_errors=True)
    store = FolderStore(folder)
    for path, content in files.items():
        (folder / path).write_bytes(content)
    return store


def test_no_reordered_disk_loses_what_was_answered_or_shows_what_was_not_saved(
    states: list[tuple[Disk, int]], memory: Path
) -> None:
    chance = random.Random(SEED)
    seen: set[int] = set()
    count = 0
    assert len(states) > 10 * SAVES
    for at, (disk, answered) in enumerate(states):
        for _ in range(PER_POINT):
            files = after_crash(disk, chance)
            key = hash((answered, tuple(sorted(files.items()))))
            if key in seen:
                continue
            seen.add(key)
            count += 1
            try:
                judge(lay_out(memory / "after", files), answered)
            except AssertionError as error:
                raise AssertionError(f"after call {at} (SUBLET_CRASH_SEED={SEED}), {sorted(files)}: {error}") from error
    print(f"{count} disks after {len(states)} calls")
    assert count > 3 * SAVES


def judge_all(states: list[tuple[Disk, int]], chance: random.Random, place: Path) -> None:
    for disk, answered in states:
        for _ in range(PER_POINT):
            judge(lay_out(place, after_crash(disk, chance)), answered)


@pytest.mark.parametrize("forgets", ["files", "folders"])
def test_a_forgotten_sync_is_found(forgets: str, memory: Path) -> None:
    """The same disks, of code that leaves a sync out: the judge must object to one of them."""
    states = recorded(memory / f"without-{forgets}", forgets)
    chance = random.Random(SEED)
    with pytest.raises((AssertionError, SubletError)):
        judge_all(states, chance, memory / "after")


def judge(store: FolderStore, answered: int) -> None:
    newest = store.newest()
    assert answered <= newest <= answered + 1, f"checkpoint {answered} was answered, the newest is {newest}"
    if not newest:
        return
    with store.open() as checkpoint:
        assert checkpoint.load("value") == program.state_at(newest)
    verdict = verify(store.folder)
    assert verdict.ok, verdict.problems
