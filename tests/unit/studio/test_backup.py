"""A backup of office and studio is whole or refused, and is put back wholly or not at all."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from sublet.cli import main
from sublet.errors import JournalError
from sublet.office.journal.files import HomeLock
from sublet.office.journal.reader import JournalReader
from sublet.studio import backup
from sublet.studio.people import TOKEN_PREFIX, People
from sublet.studio.plan import CoursePlan, Queue, last_plan, save_plan
from sublet.studio.records import Entry, Started, Terms
from sublet.studio.store import SqliteStore, studio_lock
from sublet.values import GIB
from tests.unit.office.journal.making import OPENED, Place, at, queued
from tests.unit.studio.test_people import OLD_TOKEN, Stage, write_version_1

PLAN: Final = CoursePlan(
    made_at="2030-01-01T00:00:00Z", now=Queue(gpus=2, at_once=1, median_s=0, p95_s=1, longest=1), less=None
)


@dataclass
class World:
    """A state folder with an office's journal and a studio, and a backup of both."""

    root: Path
    place: Place
    ana: str
    file: Path

    @property
    def studio(self) -> Path:
        return self.place.home / "studio"


def people_in(folder: Path) -> People:
    numbers = itertools.count(1)
    return People(folder, wall_ns=lambda: 0, random=lambda size: next(numbers).to_bytes(size, "big"))


def start_session(folder: Path, name: str) -> None:
    store = SqliteStore(folder)
    record = Started(name=name, terms=Terms(vram=GIB))
    assert store.append(Entry(seq=len(store.read(0)) + 1, session=f"s-{name}", at_ns=1, record=record))


def sessions_in(folder: Path) -> list[str]:
    return [entry.session for entry in SqliteStore(folder).read(0)]


def leases_in(journal: Path) -> int:
    reader = JournalReader(journal)
    try:
        return reader.tip().seq
    finally:
        reader.close()


def files(folder: Path) -> dict[str, bytes]:
    """All of a state folder, but the locks that were tried."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if not name.endswith((".lock", "-shm", "-wal"))}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    place = Place(tmp_path)
    monkeypatch.setenv("SUBLET_HOME", str(place.home))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    place.anchors = tmp_path / "state" / "sublet-anchors"
    for name in ("SUBLET_URL", "SUBLET_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with place.open() as journal:
        journal.commit([OPENED, queued("a")], at(1))
        people = people_in(place.home / "studio")
        ana = people.add("ana", "physics")
        token = people.new_token("ana")
        people.add("olga", "local")
        start_session(place.home / "studio", "mine")
        start_session(place.home / "studio" / "people" / ana.id, "thesis")
        save_plan(place.home / "studio", "ml1", PLAN)
        made = World(tmp_path, place, ana.id, tmp_path / "both.tar")
        size = backup.write_backup(place.home, made.file, journal.backup, made_at="2030-01-01T00:00:00Z")
        assert size == made.file.stat().st_size
        people.revoke("ana")
        people.remove("olga")
        start_session(place.home / "studio", "later")
        journal.commit([queued("b"), queued("c")], at(2))
    assert token.startswith(TOKEN_PREFIX)
    (tmp_path / "token").write_text(token)
    return made


def test_both_are_put_back_as_they_were_and_what_was_there_is_kept(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """People, tokens, sessions of each, plans and journal; the journal begins a new incarnation."""
    assert world.file.stat().st_mode & 0o777 == 0o600
    assert main(["restore", str(world.file)]) == 0
    assert "Restored office and studio" in capsys.readouterr().out
    people = people_in(world.studio)
    assert [one.name for one in people.all()] == ["ana", "olga"]
    assert people.of_token((world.root / "token").read_text()).person.id == world.ana
    assert sessions_in(world.studio) == ["s-mine"]
    assert sessions_in(world.studio / "people" / world.ana) == ["s-thesis"]
    assert last_plan(world.studio, "ml1") == PLAN
    with world.place.open() as journal:
        assert journal.recover().incarnation == 2
    old = world.place.home / "replaced-1"
    assert sessions_in(old / "studio") == ["s-mine", "s-later"]
    assert leases_in(old / "journal.db") > leases_in(world.place.db) - 1
    assert not (world.place.home / backup.RESTORING).exists()
    assert main(["restore", str(world.file)]) == 0, "and once more"
    assert sessions_in(world.place.home / "replaced-2" / "studio") == ["s-mine"]


def test_they_are_put_back_on_a_machine_that_had_neither(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    home = world.root / "fresh"
    monkeypatch.setenv("SUBLET_HOME", str(home))
    assert main(["restore", str(world.file)]) == 0
    assert [one.name for one in people_in(home / "studio").all()] == ["ana", "olga"]
    assert not list(home.glob("replaced-*"))


def test_what_names_is_copied_before_what_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """People, then records of sessions, then the journal; so what happens in between is in the later copy alone."""
    copied: list[str] = []
    copy = backup._copy_database

    def noted(source: Path, target: Path) -> None:
        copied.append(str(source.relative_to(world.studio)))
        copy(source, target)

    monkeypatch.setattr(backup, "_copy_database", noted)
    with world.place.open() as journal:

        def copy_journal(path: Path) -> None:
            copied.append("journal")
            start_session(world.studio, "in-between")
            journal.backup(path)

        backup.write_backup(world.place.home, world.root / "more.tar", copy_journal, made_at="now")
    assert copied == ["people.db", f"people/{world.ana}/sessions.db", "sessions.db", "journal"]
    assert main(["restore", str(world.root / "more.tar")]) == 0
    assert sessions_in(world.studio) == ["s-mine", "s-later"]


def test_a_backup_never_takes_the_place_of_a_file(world: World) -> None:
    (world.root / "mine").write_text("mine")
    before = sorted(os.listdir(world.root))
    with world.place.open() as journal, pytest.raises(JournalError, match="exists"):
        backup.write_backup(world.place.home, world.root / "mine", journal.backup, made_at="now")
    assert (world.root / "mine").read_text() == "mine"

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(JournalError, match=r"could not be written \(No space left on device\)"):
        backup.write_backup(world.place.home, world.root / "full.tar", full, made_at="now")
    assert sorted(os.listdir(world.root)) == before
    with contextlib.closing(sqlite3.connect(world.studio / "sessions.db")) as db:
        db.executescript("UPDATE record SET session = 's-x'")
    with world.place.open() as journal, pytest.raises(JournalError, match="is not what was written"):
        backup.write_backup(world.place.home, world.root / "useless.tar", journal.backup, made_at="now")
    assert sorted(os.listdir(world.root)) == before, "one that could not be restored is none"


def test_a_file_that_is_cut_off_or_changed_is_refused_and_nothing_is_moved(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every block of the archive, and with a bit changed in each of many places."""
    whole, before = world.file.read_bytes(), files(world.place.home)
    chance = random.Random(11)
    content = sum(512 + -(-len(part) // 512) * 512 for part in _contents(whole).values())
    lengths = [*range(0, content, 4096), *(chance.randrange(content) for _ in range(20))]
    broken = [whole[:length] for length in lengths]
    for _ in range(60):
        place = chance.randrange(content)
        broken.append(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
    said = []
    for raw in broken:
        world.file.write_bytes(raw)
        if main(["restore", str(world.file)]) == 0:  # a bit of the padding, or of the time when it was made
            assert {**_contents(raw), "manifest.json": b""} == {**_contents(whole), "manifest.json": b""}
            capsys.readouterr()
            _again(world, before)
            continue
        said.append(capsys.readouterr().err)
        assert files(world.place.home) == before
        assert not (world.place.home / backup.RESTORING).exists()
    assert len(said) > 0.8 * len(broken)
    assert all("Traceback" not in one and len(one.splitlines()) <= 3 for one in said), said


def _contents(raw: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]


def _again(world: World, before: dict[str, bytes]) -> None:
    """The state folder as it was."""
    shutil.rmtree(world.place.home)
    for name, content in before.items():
        path = world.place.home / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)


def rewritten(world: World, change: Callable[[dict[str, bytes]], object]) -> None:
    """A backup with other files in it, whose list fits them where it is not changed."""
    parts = _contents(world.file.read_bytes())
    listed = json.loads(parts.pop("manifest.json"))
    kept = {one["name"]: parts[one["name"]] for one in listed["parts"]}
    kept["manifest.json"] = json.dumps({name: value for name, value in listed.items() if name != "parts"}).encode()
    change(kept)
    stage = world.root / "stage"
    listed = json.loads(kept.pop("manifest.json"))
    if "parts" not in listed:
        from blake3 import blake3

        listed["parts"] = [
            {"name": name, "bytes": len(raw), "blake3": blake3(raw).hexdigest()} for name, raw in kept.items()
        ]
    shutil.rmtree(stage, ignore_errors=True)
    with tarfile.open(world.file, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, raw in {"manifest.json": json.dumps(listed).encode(), **kept}.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))


def _sql(raw: bytes, root: Path, script: str) -> bytes:
    path = root / "changed.db"
    path.write_bytes(raw)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(script)
        db.execute("PRAGMA journal_mode = DELETE")
    return path.read_bytes()


def _change_database(world: World, name: str, script: str) -> None:
    rewritten(world, lambda kept: kept.update({name: _sql(kept[name], world.root, script)}))


def _add_file(world: World) -> None:
    with tarfile.open(world.file, "a", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("studio/more"))


def _damage_index(world: World) -> None:
    """What it leads to is not found by it any more, and reading all people does not use it."""

    def change(kept: dict[str, bytes]) -> None:
        raw = bytearray(kept["studio/people.db"])
        path = world.root / "looked.db"
        path.write_bytes(raw)
        with contextlib.closing(sqlite3.connect(path)) as db:
            (page,) = db.execute("SELECT min(rootpage) FROM sqlite_master WHERE type = 'index'").fetchone()
        size = int.from_bytes(raw[16:18], "big")
        raw[(page - 1) * size + 3 : (page - 1) * size + 5] = bytes(2)  # it has no entries
        kept["studio/people.db"] = bytes(raw)

    rewritten(world, change)


def _set_manifest(world: World, **fields: object) -> None:
    def change(kept: dict[str, bytes]) -> None:
        kept["manifest.json"] = json.dumps(json.loads(kept["manifest.json"]) | fields).encode()

    rewritten(world, change)


BAD: Final[dict[str, tuple[Callable[[World], object], str]]] = {
    "another version": (lambda one: _set_manifest(one, version=2), "another Sublet (version 2 of backups, not 1)"),
    "no version": (lambda one: _set_manifest(one, version="<b>"), "another Sublet"),
    "no list": (lambda one: _set_manifest(one, parts=7), "its list of files cannot be read"),
    "a file elsewhere": (
        lambda one: rewritten(one, lambda kept: kept.update({"studio/../../x": b""})),
        "which is no file of a backup",
    ),
    "a file of the office": (
        lambda one: rewritten(one, lambda kept: kept.update({"keys/office": b""})),
        "which is no file of a backup",
    ),
    "a file that is not listed": (_add_file, "more files than it lists"),
    "no journal": (lambda one: rewritten(one, lambda kept: kept.pop("journal.db")), "journal of the office is missing"),
    "another journal": (
        lambda one: rewritten(one, lambda kept: kept.update({"journal.db": b"no database"})),
        "journal",
    ),
    "people of a newer Sublet": (
        lambda one: _change_database(one, "studio/people.db", "PRAGMA user_version = 99"),
        "were written by another Sublet (version 99)",
    ),
    "an index that is damaged": (_damage_index, "are damaged"),
    "no database": (
        lambda one: rewritten(one, lambda kept: kept.update({"studio/people.db": b"people"})),
        "people.db is no database",
    ),
    "a record that was changed": (
        lambda one: _change_database(one, "studio/sessions.db", "UPDATE record SET session = 's-x'"),
        "record 1 is not what was written",
    ),
    "a record that is missing": (
        lambda one: _change_database(one, "studio/sessions.db", "UPDATE record SET seq = 5"),
        "are damaged",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_backup_of_this_version_is_refused_with_its_reason(
    what: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = BAD[what]
    change(world)
    before = files(world.place.home)
    assert main(["restore", str(world.file)]) == 1
    assert said in capsys.readouterr().err
    assert files(world.place.home) == before
    assert not (world.root / "x").exists()


def test_while_studio_or_office_runs_nothing_is_restored(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(world.place.home)
    with studio_lock(world.studio):
        assert main(["restore", str(world.file)]) == 2
    assert "a studio runs already" in capsys.readouterr().err
    lock = HomeLock.take(world.place.home)
    try:
        assert main(["restore", str(world.file)]) == 1
    finally:
        lock.release()
    assert "has the journal" in capsys.readouterr().err
    assert files(world.place.home) == before


def test_people_of_the_version_before_are_brought_to_the_present_one(world: World) -> None:
    stage = Stage(world.root / "old")
    old = write_version_1(stage)
    with contextlib.closing(sqlite3.connect(old)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    rewritten(world, lambda kept: kept.update({"studio/people.db": old.read_bytes()}))
    assert main(["restore", str(world.file)]) == 0
    assert people_in(world.studio).of_token(OLD_TOKEN).person.is_operator


class Stopped(BaseException):
    """The process is killed here."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every rename and every exchange; it is killed before the one whose number stands first in the list."""
    left = [1 << 30]

    def counted(act: Callable[..., object]) -> Callable[..., object]:
        def stepped(*given: object, **more: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Stopped
            return act(*given, **more)

        return stepped

    monkeypatch.setattr(os, "rename", counted(os.rename))
    monkeypatch.setattr(backup, "_exchange", counted(backup._exchange))
    yield left
    left[0] = 1 << 30


def test_killed_at_any_step_the_records_are_never_newer_than_the_journal(world: World, steps: list[int]) -> None:
    """And a second call puts back the rest."""
    before, states = files(world.place.home), set()
    for number in itertools.count():
        steps[0] = number
        try:
            assert main(["restore", str(world.file)]) == 0
            break
        except Stopped:
            steps[0] = 1 << 30
        studio_is_old = sessions_in(world.studio) == ["s-mine", "s-later"]
        journal_is_old = world.place.db.exists() and leases_in(world.place.db) >= 4
        states.add((studio_is_old, journal_is_old))
        assert main(["restore", str(world.file)]) == 0
        assert sessions_in(world.studio) == ["s-mine"]
        _again(world, before)
    assert number >= 4
    assert (True, False) not in states
    assert {(True, True), (False, True), (False, False)} <= states
