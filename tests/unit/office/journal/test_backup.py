"""A backup is whole or not there; a restored one never gives out an epoch twice."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from sublet.errors import JournalError
from sublet.office.journal import audit, backup
from sublet.office.journal import files as journal_files
from sublet.office.journal.files import Anchors
from sublet.office.journal.reader import JournalReader, Tip
from tests.unit.office.journal.making import OPENED, WALL_NS, Place, at, granted, queued, renewed


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


def test_a_file_that_comes_while_a_backup_is_made_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = backup._examine

    def meanwhile(path: Path) -> Tip:
        (place.root / "b").write_text("mine")
        return real(path)

    monkeypatch.setattr(backup, "_examine", meanwhile)
    with place.open() as journal, pytest.raises(JournalError, match="exists"):
        journal.backup(place.root / "b")
    assert (place.root / "b").read_text() == "mine"


def test_a_backup_is_one_file_that_can_be_read_where_nothing_can_be_written(place: Place) -> None:
    """In write-ahead mode SQLite would want to put a file beside it."""
    with place.open() as journal:
        journal.backup(place.root / "b")
    read_and_write_versions = (place.root / "b").read_bytes()[18:20]
    assert read_and_write_versions == b"\x01\x01", "of a rollback journal"


def test_all_of_a_backup_is_looked_at_however_large_it_is(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An office looks at all pages of its journal only where that is quick."""
    with place.open() as journal:
        journal.backup(place.root / "b")
    monkeypatch.setattr("sublet.office.journal.reader.CHECK_WHOLE_MAX_BYTES", 0)
    with open(place.root / "b", "r+b") as file:
        file.seek(36)
        file.write((5).to_bytes(4))  # free pages that are not there
    with pytest.raises(JournalError, match="damaged"):
        place.restore(place.root / "b")


def test_a_journal_that_outlived_its_incarnation_file_is_asked_for_the_number(place: Place) -> None:
    """And says it itself, restored."""
    with place.open() as journal:
        journal.backup(place.root / "b")
    for number in (2, 3):
        assert place.restore(place.root / "b") == number
        (place.home / "incarnation").unlink()
    with place.open() as journal:
        assert journal.incarnation == 3


def test_the_log_of_an_office_that_was_killed_goes_aside_with_its_journal(place: Place) -> None:
    """It would be taken for that of the restored one."""
    killed = Place(place.root / "killed")
    with place.open() as journal:
        journal.backup(place.root / "b")
        journal.commit([OPENED, queued("a")], at(1))
        shutil.copytree(place.home, killed.home)
    killed.restore(place.root / "b")
    aside = {path.name for path in (killed.home / "replaced-1").iterdir()}
    assert aside >= {"journal.db", "journal.db-wal"}
    assert not (killed.home / "journal.db-wal").exists()
    with killed.open() as journal:
        assert not list(journal.recover().entries)


def test_where_nothing_was_there_nothing_is_kept_aside(place: Place) -> None:
    with place.open() as journal:
        journal.backup(place.root / "b")
    asked: list[Path] = []
    backup.restore(place.root / "b", place.root / "new", wall_ns=WALL_NS, anchors=place.anchors, beside=asked.append)
    assert asked == [place.root / "new" / "replaced-1"], "what belongs to the journal may need it"
    assert not asked[0].exists()


def test_what_a_restore_that_was_killed_has_left_is_in_nobodys_way(place: Place) -> None:
    with place.open() as journal:
        journal.backup(place.root / "b")
    for end in ("", "-journal", "-wal"):
        (place.home / f"journal.db.restoring{end}").write_text("half of one")
    assert place.restore(place.root / "b") == 2
    assert not list(place.home.glob("journal.db.restoring*"))


def test_a_restored_journal_is_anchored_before_an_office_opens_it(place: Place) -> None:
    """So that an older copy in its place is refused from the first moment on. Its record has the last instant."""
    with place.open() as journal:
        journal.commit([OPENED], at(7))
        journal.backup(place.root / "b")
    place.restore(place.root / "b")
    anchors = Anchors(place.anchors, place.home.resolve())
    reader = JournalReader(place.db)
    try:
        *_, last = reader.records()
        assert (last.kind, last.ns) == (audit.RESTORED, 7)
        assert (last.seq, last.hash) in [(anchor.audit_seq, anchor.head) for anchor in anchors.read_all()]
    finally:
        reader.close()


def test_publishing_new_refuses_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("new")
    (tmp_path / "taken").write_text("old")
    with pytest.raises(FileExistsError):
        journal_files.publish_new(tmp_path / "t", tmp_path / "taken")
    journal_files.publish_new(tmp_path / "t", tmp_path / "free")
    assert ((tmp_path / "taken").read_text(), (tmp_path / "free").read_text()) == ("old", "new")
    assert not (tmp_path / "t").exists()
