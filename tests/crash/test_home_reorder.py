"""Disks that keep some of the names in an office's folder, and not the others, whatever the order was.

The journal's own writes are SQLite's, which syncs them. What is tested here is what stands around them: the journal,
the incarnation, a backup and a journal that was moved aside get their names by calls of ours. A whole life is recorded,
call by call: an office begins, works, makes backups, is restored from one, goes on. Then the folder is rebuilt as a
loss of power after each call may leave it: of the names that were given or taken away since their folder was synced,
any selection; of a file that was given a name without a sync, nothing or half. The next office must find what was
answered, and must not give an epoch out twice.
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

from sublet.errors import JournalError
from sublet.office.journal import journal as journal_opening
from sublet.office.journal.backup import restore
from sublet.office.journal.journal import Journal
from sublet.office.ledger.events import Queued
from tests.crash import journal_program as program
from tests.crash.journal_program import WALL_NS, SmallOffice, epochs_in
from tests.crash.test_journal_crash import look
from tests.crash.test_pack_reorder import ALL, SEED

pytestmark = [pytest.mark.crash, pytest.mark.slow]

PER_NAME: Final = 20 if ALL else 3
"""Folders that are drawn after a call, for each name that is not durable then."""
FOLDER: Final = -1
"""Stands for the file behind the name of a folder."""
Note = dict[str, object]


@dataclass(slots=True)
class Disk:
    """Paths below the place, and numbers of files."""

    synced: dict[str, int] = field(default_factory=dict)
    """Names that are there for certain."""
    pending: list[tuple[str, int | None]] = field(default_factory=list)
    """Given, or taken away (None), since their folder was synced."""
    contents: dict[int, bytes] = field(default_factory=dict)
    unsynced: frozenset[int] = frozenset()
    """Files of which nothing is certain to be there."""

    @property
    def names(self) -> dict[str, int]:
        return applied(self.synced, self.pending)


def applied(synced: dict[str, int], changes: list[tuple[str, int | None]]) -> dict[str, int]:
    names = dict(synced)
    for path, number in changes:
        if number is None:
            names.pop(path, None)
        else:
            names[path] = number
    return names


class Recorder:
    """Stands before the calls of ``os`` that change names or make them durable, and keeps every state in between."""

    def __init__(self, place: Path, forgets: str = "") -> None:
        self.place = place
        self.forgets = forgets
        """Syncs of files or of folders, as if the code had left them out."""
        self.notes: list[Note] = []
        self.states: list[tuple[Disk, int]] = []
        self._disk = Disk()
        self._open: dict[int, int] = {}
        """A descriptor of each file that was ever seen: its number is not another's, and its content can be read."""
        self._unsynced: set[int] = set()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("fsync", "rename", "link", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._see()
            found = real(*args, **kwargs)
            getattr(self, f"_{name}")(*args)
            self.keep()
            return found

        return call

    def note(self, what: Note) -> None:
        self.notes.append(what)
        self.keep()

    def keep(self) -> None:
        """The state as it is now."""
        self._see()
        contents = {number: os.pread(fd, 1 << 24, 0) for number, fd in self._open.items()}
        disk = Disk(dict(self._disk.synced), list(self._disk.pending), contents, frozenset(self._unsynced))
        self.states.append((disk, len(self.notes)))

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)

    def _see(self) -> None:
        """What SQLite made and removed: it syncs the folder of what it needs. A database that is not published yet is
        not synced by it."""
        there = {str(path.relative_to(self.place)): path for path in self.place.rglob("*") if path.is_file()}
        names = self._disk.names
        for path, where in there.items():
            if path not in names:
                self._disk.synced[path] = self._number(where)
                if where.name not in ("journal.lock", "journal.db", "journal.db-wal", "journal.db-shm"):
                    self._unsynced.add(self._disk.synced[path])
        for path in names.keys() - there.keys():
            if names[path] != FOLDER:
                self._disk.synced.pop(path, None)
                self._disk.pending = [one for one in self._disk.pending if one[0] != path]

    def _number(self, where: Path) -> int:
        number = where.stat().st_ino
        if number not in self._open:
            self._open[number] = os.open(where, os.O_RDONLY)
        return number

    def _named(self, path: Any, number: int | None) -> None:
        where = Path(path)
        if where.is_relative_to(self.place):
            self._disk.pending.append((str(where.relative_to(self.place)), number))

    def _fsync(self, fd: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.forgets == ("folders" if target.is_dir() else "files"):
            return
        if not target.is_dir():
            self._unsynced.discard(os.fstat(fd).st_ino)
            return
        mine = [one for one in self._disk.pending if (self.place / one[0]).parent == target]
        self._disk.pending = [one for one in self._disk.pending if one not in mine]
        self._disk.synced = applied(self._disk.synced, mine)

    def _rename(self, source: Any, target: Any) -> None:
        self._named(source, None)
        self._named(target, self._number(Path(target)))

    def _link(self, source: Any, target: Any) -> None:
        self._named(target, self._number(Path(target)))

    def _unlink(self, path: Any) -> None:
        self._named(path, None)

    def _mkdir(self, path: Any, *_: Any) -> None:
        self._named(path, FOLDER)


def live(place: Path, note: Callable[[Note], None]) -> None:
    """Everything an office does to its folder."""
    home, anchors = place / "home", place / "anchors"
    program.begin(home, anchors, note)
    with Journal.open(home, wall_ns=WALL_NS, anchors=anchors) as journal:
        journal.backup(place / "old.backup")
    note({"backup": "old.backup"})
    program.life(home, anchors, note)
    is_killed(home, anchors, note)
    note({"restores": True})
    program.put_back(home, anchors, note)
    program.go_on(home, anchors, note)


def is_killed(home: Path, anchors: Path, note: Callable[[Note], None]) -> None:
    """An office that ends without closing its journal, and leaves a log beside it."""
    office = SmallOffice(home, anchors, note)
    office.open()
    office.acquire("killed")
    left = {path: path.read_bytes() for path in home.glob("journal.db*") if not path.name.endswith("-shm")}
    office.journal.close()
    for path, content in left.items():
        path.write_bytes(content)
    assert (home / "journal.db-wal").stat().st_size


@pytest.fixture(scope="module", autouse=True)
def _short_log() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_opening, "LOG_BYTES", program.SHORT_LOG)
        yield


@pytest.fixture
def place() -> Iterator[Path]:
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        (Path(folder).resolve() / "place").mkdir()
        yield Path(folder).resolve() / "place"


def recorded(place: Path, forgets: str = "") -> Recorder:
    recorder = Recorder(place, forgets)
    (place / "home").mkdir(mode=0o700)  # to make it last is the business of whoever made it
    (place / "anchors").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        recorder.patch(patch)
        live(place, recorder.note)
    recorder.close()
    return recorder


def after_crash(disk: Disk, chance: random.Random) -> dict[str, bytes]:
    """One of the folders that may be left. The anchors are never synced, and nothing rests on them: all or none."""
    mood = chance.choice(("all", "none", "some", "some"))
    kept = [one for one in disk.pending if mood == "all" or (mood == "some" and chance.random() < 0.5)]
    names, found = applied(disk.synced, kept), dict[str, bytes]()
    anchors = chance.random() < 0.5
    for path, number in names.items():
        parent = os.path.dirname(path)
        if number == FOLDER or (parent.startswith("home/") and names.get(parent) != FOLDER):
            continue
        if path.endswith("-shm") or (path.startswith("anchors/") and not anchors):
            continue
        whole = disk.contents[number]
        lost = chance.choice((0, 1, 2)) if number in disk.unsynced and not path.startswith("anchors/") else 0
        found[path] = (whole, b"", whole[: len(whole) // 2])[lost]
    return found


def lay_out(place: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(place)
    for folder in ("home", "anchors"):
        (place / folder).mkdir(parents=True, mode=0o700)
    for path, content in files.items():
        (place / path).parent.mkdir(exist_ok=True)
        (place / path).write_bytes(content)


def judge(place: Path, notes: list[Note], answered: int) -> None:
    home, anchors = place / "home", place / "anchors"
    told = notes[:answered]
    for backup in (str(note["backup"]) for note in told if "backup" in note):
        assert (place / backup).exists(), f"{backup} was answered, and is gone"
        restore(place / backup, place / "elsewhere", wall_ns=WALL_NS, anchors=anchors)
        shutil.rmtree(place / "elsewhere")
    begun, done = (any(word in note for note in told) for word in ("restores", "restored"))
    try:
        Journal.open(home, wall_ns=WALL_NS, anchors=anchors).close()
    except JournalError as error:
        # In the middle of a restore, and only there, the journal may have no name: a second restore gives it one.
        if done or not begun or "gone" not in error.message:
            raise
        restore(place / "old.backup", home, wall_ns=WALL_NS, anchors=anchors)
    if done:  # nothing ever deletes a journal: the one that was given up is whole, with its log
        with Journal.open(aside(place), wall_ns=WALL_NS, anchors=place / "no-anchors") as journal:
            entries = [entry.event for entry in journal.recover().entries]
        assert any(isinstance(event, Queued) and event.lease.id == "killed" for event in entries)
    if not begun:
        office = SmallOffice(home, anchors, lambda _: None)
        books = office.books()
        office.journal.close()
        known = [str(note["books"]) for note in notes if "books" in note]
        count = sum("books" in note for note in told)
        assert count == 0 or books in known[count - 1 : count + 1], f"what was answered ({count} batches) is gone"
    look(epochs_in(told), place)


def aside(place: Path) -> Path:
    copy = place / "aside"
    shutil.copytree(place / "home" / "replaced-1", copy)
    return copy


def judge_all(recorder: Recorder) -> int:
    chance, seen = random.Random(SEED), set[int]()
    for at, (disk, answered) in enumerate(recorder.states):
        for _ in range(1 + PER_NAME * len(disk.pending)):
            files = after_crash(disk, chance)
            key = hash((answered, tuple(sorted(files.items()))))
            if key in seen:
                continue
            seen.add(key)
            lay_out(recorder.place, files)
            try:
                judge(recorder.place, recorder.notes, answered)
            except (AssertionError, JournalError) as error:
                raise AssertionError(f"after call {at} (SUBLET_CRASH_SEED={SEED}), {sorted(files)}: {error}") from error
    return len(seen)


def test_no_reordered_disk_loses_the_journal_its_incarnation_or_a_backup(place: Path) -> None:
    recorder = recorded(place)
    count = judge_all(recorder)
    print(f"{count} folders after {len(recorder.states)} calls")
    assert count > 30


@pytest.mark.parametrize("forgets", ["files", "folders"])
def test_a_forgotten_sync_is_found(forgets: str, place: Path) -> None:
    """The same, of code that leaves a sync out: one of the folders must be objected to."""
    recorder = recorded(place, forgets)
    with pytest.raises(AssertionError, match="after call"):
        judge_all(recorder)
