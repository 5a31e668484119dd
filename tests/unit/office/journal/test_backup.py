"""A backup is whole or not there; a restored one never gives out an epoch twice."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from sublet.errors import JournalError
from sublet.office.journal import files as journal_files
from tests.unit.office.journal.making import OPENED, Place, at, granted, queued, renewed


def test_a_backup_has_everything_of_its_moment(place: Place) -> None:
    """What is still in the log comes along, and the office writes on."""
    with place.open() as journal:
        journal.commit([OPENED, queued("a")], at(1))
        journal.compact(b"state", at(2))
        journal.commit([renewed("a")], at(3))
        size = journal.backup(place.root / "b")
        journal.commit([renewed("a", 8)], at(4))
    assert size == (place.root / "b").stat().st_size
    other = Place(place.root / "other")
    other.restore(place.root / "b")
    with other.open() as journal:
        found = journal.recover()
        assert found.snapshot == b"state"
        assert [entry.event for entry in found.entries] == [renewed("a")]


def test_a_backup_never_takes_the_place_of_a_file(place: Place) -> None:
    (place.root / "b").write_text("mine")
    with place.open() as journal, pytest.raises(JournalError, match="exists"):
        journal.backup(place.root / "b")
    assert (place.root / "b").read_text() == "mine"
    assert sorted(path.name for path in place.root.iterdir()) == ["anchors", "b", "home"]


def test_a_backup_that_cannot_be_written_harms_nothing(place: Place) -> None:
    with place.open() as journal:
        with pytest.raises(JournalError, match=r"could not be written \(No such file or directory\); the journal"):
            journal.backup(place.root / "no" / "such" / "folder")
        journal.commit([OPENED], at(1))


def test_a_backup_that_could_not_be_restored_is_not_made(place: Place) -> None:
    """It is noticed while there is still a journal to look into, not on the day it is needed."""
    with place.open() as journal:
        journal.commit([OPENED, queued("a"), queued("b"), queued("c")], at(1))
        journal.compact(b"", at(2))
        journal._db.execute("UPDATE audit SET wall_ns = 0 WHERE seq = 3")
        with pytest.raises(JournalError, match="record 3 does not fit"):
            journal.backup(place.root / "b")
    assert sorted(path.name for path in place.root.iterdir()) == ["anchors", "home"]


def test_a_restore_begins_a_new_incarnation_and_says_so(place: Place) -> None:
    """Until an office is opened on it, the journal says that it was restored; then no more."""
    with place.open() as journal:
        journal.commit([OPENED, queued("a"), granted("a", 1)], at(1))
        journal.backup(place.root / "b")
        journal.commit([granted("a", 2)], at(2))
        lost = journal.id, journal.head()
    assert place.restore(place.root / "b") == 2
    for _ in range(2):
        with place.open() as journal:
            found = journal.recover()
            assert (found.restored, found.incarnation, found.clock_domain, found.last_ns) == (True, 2, "boot-1", 1)
    with place.open() as journal:
        journal.commit([OPENED], at(3))
    with place.open() as journal:
        assert (journal.recover().restored, journal.incarnation) == (False, 2)
        assert journal.id != lost[0]
        assert lost[1] not in [record.hash.hex() for record in journal.records()]
        report = journal.verify()
        assert report.ok, report.problem


def test_the_incarnation_is_above_all_that_were_ever_used_here(place: Place) -> None:
    """An old backup restored twice does not repeat the incarnation of the first restore."""
    with place.open() as journal:
        journal.backup(place.root / "b")
    assert [place.restore(place.root / "b") for _ in range(3)] == [2, 3, 4]
    place.db.unlink()
    assert place.restore(place.root / "b") == 5, "the file beside the journal remembers"


def test_a_damaged_incarnation_is_refused_and_then_jumped_over(place: Place) -> None:
    with place.open() as journal:
        journal.backup(place.root / "b")
    (place.home / "incarnation").write_text("9 deadbeef\n")
    with pytest.raises(JournalError, match="which epochs were used"):
        place.open()
    assert place.restore(place.root / "b") > 1_000_000
    with place.open() as journal:
        assert journal.incarnation > 1_000_000


def test_an_incarnation_that_was_written_before_a_kill_is_kept(place: Place) -> None:
    """A restore that died half-way has used up its number: the old journal goes on under it."""
    place.open().close()
    journal_files.write_incarnation(place.home, 7)
    with place.open() as journal:
        assert journal.recover().incarnation == 7


def test_a_restore_moves_the_journal_aside_and_deletes_nothing(place: Place) -> None:
    """Log and all, into a folder of its own each time."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
        journal.backup(place.root / "b")
        head = journal.head()
    place.restore(place.root / "b")
    place.restore(place.root / "b")
    assert (place.home / "replaced-2").is_dir()
    kept = Place(place.root / "again")
    kept.restore(place.home / "replaced-1" / "journal.db")
    with kept.open() as journal:
        assert head in [record.hash.hex() for record in journal.records()]


def test_an_older_copy_put_back_by_hand_is_refused_but_can_be_restored(place: Place) -> None:
    """Its epochs would be given out twice. The way out is the journal itself as the backup."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
    shutil.copy(place.db, place.root / "copy")
    with place.open() as journal:
        journal.commit([queued("a"), granted("a", 1)], at(2))
    shutil.copy(place.root / "copy", place.db)
    with pytest.raises(JournalError, match="older copy was put in its place") as caught:
        place.open()
    assert f"sublet restore {place.db}" in caught.value.do
    assert place.restore(place.db) == 2
    with place.open() as journal:
        assert journal.recover().restored
        assert journal.verify().ok


def test_a_journal_that_is_gone_is_not_begun_anew(place: Place) -> None:
    """An empty journal in the place of a lost one would give out old epochs."""
    place.open().close()
    place.db.unlink()
    with pytest.raises(JournalError, match="is gone, though this folder had one"):
        place.open()


@pytest.mark.parametrize("content", [b"", b"not a database", b"SQLite format 3\0" + bytes(200)])
def test_what_is_no_backup_is_refused(place: Place, content: bytes) -> None:
    """And what is there stays, incarnation and all."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
    (place.root / "b").write_bytes(content)
    with pytest.raises(JournalError, match="damaged"):
        place.restore(place.root / "b")
    with pytest.raises(JournalError, match="there is no backup"):
        place.restore(place.root / "missing")
    with place.open() as journal:
        assert journal.incarnation == 1
        assert [entry.event for entry in journal.recover().entries] == [OPENED]


def test_an_edited_backup_is_refused(place: Place) -> None:
    """The whole chain is walked before anything is moved."""
    with place.open() as journal:
        journal.commit([OPENED, queued("a"), queued("b"), queued("c")], at(1))
        journal.compact(b"", at(2))
        journal.backup(place.root / "b")
    db = sqlite3.connect(place.root / "b")
    db.execute("UPDATE audit SET wall_ns = wall_ns + 1 WHERE seq = 3")
    db.commit()
    db.close()
    with pytest.raises(JournalError, match="record 3 does not fit"):
        place.restore(place.root / "b")
    assert not (place.home / "replaced-1").exists()


def test_a_running_office_is_not_replaced(place: Place) -> None:
    with place.open() as journal:
        journal.backup(place.root / "b")
        with pytest.raises(JournalError, match="another office"):
            place.restore(place.root / "b")


def test_publishing_new_refuses_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("new")
    (tmp_path / "taken").write_text("old")
    with pytest.raises(FileExistsError):
        journal_files.publish_new(tmp_path / "t", tmp_path / "taken")
    journal_files.publish_new(tmp_path / "t", tmp_path / "free")
    assert ((tmp_path / "taken").read_text(), (tmp_path / "free").read_text()) == ("old", "new")
    assert not (tmp_path / "t").exists()
