"""The head outside the home: what it tells, and that nothing else rests on it."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from sublet.errors import JournalError
from sublet.office.journal.audit import Anchor
from sublet.office.journal.files import AnchorFile, Anchors
from tests.unit.office.journal.making import OPENED, Place, at, granted, queued, renewed


def test_the_anchor_follows_each_commit(place: Place) -> None:
    """Also one that is not audited: then the head stays and the count goes on."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
        first = Anchor.parse(place.anchor_path(journal).read_bytes())
        journal.commit([renewed("a")], at(2))
        second = Anchor.parse(place.anchor_path(journal).read_bytes())
        assert first is not None
        assert second == first._replace(seq=first.seq + 1)
        assert second.head.hex() == journal.head()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_journal_that_lost_only_entries_that_are_not_audited_is_refused(lost: int, place: Place) -> None:
    """Renewals were answered, and their entries are gone. The audit chain is whole to its last record, so only the
    number of entries in the anchor tells; the office must not go on with older deadlines than it promised."""
    with place.open() as journal:
        journal.commit([OPENED, queued("a"), granted("a", 1)], at(1))
        journal.commit([renewed("a", 7)], at(2))
        journal.commit([renewed("a", 8)], at(3))
        last = journal.seq
    db = sqlite3.connect(place.db)
    with db:
        gone = db.execute("DELETE FROM events WHERE seq > ?", (last - lost,)).rowcount
    db.close()
    assert gone == lost
    before = place.db.read_bytes()
    with pytest.raises(JournalError, match=f"ends at entry {last - lost}, but entry {last} of it was written"):
        place.open()
    assert place.db.read_bytes() == before, "it is left as it is"
    (place.root / "copy.db").write_bytes(before)
    place.restore(place.root / "copy.db")
    place.open().close()


def test_an_older_anchor_never_replaces_a_newer_one(tmp_path: Path) -> None:
    anchors = Anchors(tmp_path / "anchors", tmp_path)
    name = "a" * 32
    file = AnchorFile(anchors, name)
    file.note(9, 9, bytes(32))
    file.note(8, 8, bytes(32))
    file.close()
    again = AnchorFile(anchors, name)
    again.note(7, 7, bytes(32))
    again.close()
    (anchor,) = anchors.read_all()
    assert anchor.seq == 9


def test_an_anchor_that_cannot_be_read_is_not_taken_for_none(place: Place) -> None:
    """Otherwise a fault of the disk would let an older journal pass."""
    with place.open() as journal:
        path = place.anchor_path(journal)
    path.unlink()
    path.mkdir()
    with pytest.raises(JournalError, match=r"anchors in .* cannot be read"):
        place.open()
    path.rmdir()
    place.open().close()


def test_a_chain_without_an_anchor_holds_as_far_as_can_be_told(place: Place) -> None:
    with place.open() as journal:
        place.anchor_path(journal).unlink()
        assert journal.verify().ok


def test_a_folder_for_anchors_that_cannot_be_made_is_said(place: Place) -> None:
    blocker = place.root / "file"
    blocker.write_text("")
    file = AnchorFile(Anchors(blocker / "anchors", place.root), "a" * 32)
    file.note(1, 1, bytes(32))
    file.close()
    assert file.problem is not None
    assert "cannot be written" in file.problem


def test_a_torn_anchor_is_taken_for_none(place: Place) -> None:
    """It was never synced, so after a loss of power it may be torn; the journal is the truth."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
        path = place.anchor_path(journal)
    path.write_bytes(path.read_bytes()[:40])
    with place.open() as journal:
        assert journal.verify().ok
        assert Anchor.parse(path.read_bytes()) is not None, "it is written anew"


def test_homes_do_not_meet_in_one_folder_of_anchors(place: Place) -> None:
    """They are told apart by their paths; a copy elsewhere has no anchor there and opens."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
    shutil.copytree(place.home, place.root / "copy")
    with place.open() as journal:
        journal.commit([queued("a")], at(2))
    copy = Place(place.root)
    copy.home = place.root / "copy"
    with copy.open() as journal:
        assert journal.verify().ok
    assert len(list(place.anchors.iterdir())) == 2


def test_a_journal_that_was_replaced_by_a_new_one_is_noticed(place: Place) -> None:
    """Somebody took the whole folder away: the office begins anew, and the walk says what was there."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
    shutil.rmtree(place.home)
    with place.open() as journal:
        report = journal.verify()
    assert not report.ok
    assert "replaced" in (report.problem or "")


def test_anchors_lie_under_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Anchors.default_folder() == tmp_path / "sublet-anchors"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Anchors.default_folder() == tmp_path / ".local/state/sublet-anchors"


def test_an_anchor_is_found_by_the_office_of_any_version() -> None:
    """Its name is a contract: the journal of a home that is upgraded meets the anchor that was written before."""
    path = Anchors(Path("/anchors"), Path("/srv/sublet")).path("j" * 32)
    assert path == Path("/anchors") / f"4f0bd921d0e25de8-{'j' * 32}"
