"""Room that is reserved for the journal: laid out while there is some, given up when needed, and laid out again."""

from __future__ import annotations

import errno
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from sublet.errors import JournalFailed
from sublet.office.journal import disk_room
from sublet.office.journal.disk_room import DiskRoom
from sublet.office.journal.journal import Journal
from sublet.values import GIB, MIB
from sublet.wire.disk import RESERVE_FILE, DiskReserve, DiskSpace, disk_reserve
from tests.unit.office.journal.making import Place, at, queued


@pytest.mark.parametrize(
    ("disk", "withheld", "file"),
    [
        (1000 * GIB, 50 * GIB, 64 * MIB),
        (100 * GIB, 5 * GIB, 64 * MIB),
        (16 * GIB, 1 * GIB, 64 * MIB),
        (4 * GIB, 512 * MIB, 64 * MIB),
        (160 * MIB, 20 * MIB, 5 * MIB),
        (0, 0, 0),
    ],
)
def test_what_is_kept_back_of_a_disk(disk: int, withheld: int, file: int) -> None:
    found = disk_reserve(disk)
    assert (found.withheld, found.file) == (withheld, file)
    assert found.file + found.for_journal <= found.withheld
    assert found.file + 2 * found.short <= found.for_journal + found.file, "logs leave room for it to be laid out again"


@dataclass
class Disk:
    """One that is as full as the test says; the file takes its place."""

    home: Path
    size: int = 160 * MIB
    others: int = 0
    now_ns: int = 0

    def space(self, folder: Path) -> DiskSpace:
        taken = sum(path.stat().st_size for path in self.home.glob(RESERVE_FILE))
        return DiskSpace(size=self.size, free=max(0, self.size - self.others - taken))

    def room(self) -> DiskRoom:
        return DiskRoom(self.home, now_ns=self.tick, space=self.space)

    def tick(self) -> int:
        self.now_ns += disk_room.LOOK_NS
        return self.now_ns


RESERVE: DiskReserve = disk_reserve(160 * MIB)


def test_the_file_lies_there_while_there_is_room_and_is_laid_out_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    room = disk.room()
    room.lay_out()
    assert room.path.stat().st_blocks * 512 >= RESERVE.file
    assert not room.is_short()
    disk.others = disk.size - RESERVE.file - RESERVE.short + 1
    assert room.is_short()
    assert room.why_short() == "the disk of the office is full: 2.5MiB of 160MiB left"
    assert room.remove_file()
    assert not room.remove_file(), "it is given up once"
    assert room.is_short()
    disk.others = disk.size - RESERVE.file - RESERVE.short
    assert room.is_short(), "what is free is where the file was"
    disk.others = 0
    assert not room.is_short()
    assert room.path.exists()
    assert room.why_short() == ""


def test_an_office_that_finds_its_file_given_up_is_short(tmp_path: Path) -> None:
    disk = Disk(tmp_path, others=160 * MIB - RESERVE.file - RESERVE.short)
    assert disk.room().is_short()
    disk.others = 0
    assert not disk.room().is_short()


def test_it_is_given_up_before_a_journal_is_opened_that_would_have_no_room(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    room = disk.room()
    room.lay_out()
    room.before_opening()
    assert room.path.exists()
    disk.others = disk.size - RESERVE.file - disk_room.TO_OPEN + 1
    room.before_opening()
    assert not room.path.exists()


def test_where_no_file_can_be_laid_out_leases_are_granted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    disk = Disk(tmp_path)
    room = disk.room()
    room.lay_out()
    assert not room.path.exists()
    assert not room.is_short()
    disk.others = disk.size
    assert room.is_short()


class Full(sqlite3.OperationalError):
    """As SQLite says it."""

    sqlite_errorcode = sqlite3.SQLITE_FULL


class BadSync(sqlite3.OperationalError):
    """What it says of a sync that failed."""

    sqlite_errorcode = sqlite3.SQLITE_IOERR


class Connection:
    """The writer's, with faults."""

    def __init__(self, real: sqlite3.Connection, faults: list[sqlite3.Error]) -> None:
        self._real, self._faults = real, faults

    def execute(self, statement: str) -> object:
        if statement == "COMMIT" and self._faults:
            raise self._faults.pop(0)
        return self._real.execute(statement)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


@pytest.mark.parametrize(
    ("faults", "kept", "file"),
    [
        ([Full("full")], True, False),
        ([Full("full"), Full("full")], False, False),
        ([BadSync("sync")], False, True),
    ],
    ids=["full once", "full twice", "a failed sync"],
)
def test_a_transaction_that_the_disk_has_no_room_for_is_written_again_where_the_file_was(
    place: Place, faults: list[sqlite3.Error], kept: bool, file: bool
) -> None:
    """After a sync that failed it is not: what is on the disk then is not known."""
    place.home.mkdir(mode=0o700)
    room = Disk(place.home).room()
    journal = Journal.open(place.home, wall_ns=0, anchors=place.anchors, room=room)
    assert room.path.exists()
    journal._db = Connection(journal._db, faults)  # type: ignore[assignment]
    if kept:
        journal.commit([queued("a")], at(1))
    else:
        with pytest.raises(JournalFailed):
            journal.commit([queued("a")], at(1))
    assert room.path.exists() == file
    journal.close()
    with place.open() as again:
        assert len(list(again.recover().entries)) == kept
