"""A journal that was damaged is refused, or gives exactly what was written; never something else.

Bits are flipped and bytes cut off in every part of the file and of the log beside it. What SQLite itself forgives (a
log whose end does not fit its checksums is taken to end before) shows against the anchor.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from sublet.errors import JournalError
from sublet.office.journal.history import AuditHistory
from sublet.office.journal.journal import Journal
from tests.unit.office.journal.making import OPENED, Place, at, ended, ending, granted, joined, queued, renewed

SEED: Final = int(os.environ.get("SUBLET_DAMAGE_SEED", "7"))
FLIPS: Final = int(os.environ.get("SUBLET_DAMAGE_FLIPS", "120"))
Past = tuple[bytes | None, list[object], list[object], str]


def past(journal: Journal) -> Past:
    """Everything that is read of a journal: books, events, bills, the head of the chain."""
    found = journal.recover()
    usages = AuditHistory().read(journal.records()).usages(10**6)
    return found.snapshot, list(found.entries), list(usages), journal.head()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Path, Past]:
    """A journal as a killed office leaves it: some in the file, some only in the log. And a copy to damage."""
    kept = Place(tmp_path_factory.mktemp("kept"))
    with kept.open() as journal:
        journal.commit([OPENED, joined(), queued("a"), granted("a", 1)], at(1))
        journal.compact(b"the state" * 300, at(2))
        journal.commit([renewed("a"), ending("a", 50, 3), ended("a", 60)], at(70))
    journal = kept.open()
    for n in range(6):
        journal.commit([queued(f"b{n}"), granted(f"b{n}", n + 2), renewed(f"b{n}")], at(100 + n))
    expected = past(journal)
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(kept.home, copy / "home")
    _cut_off_what_no_frame_has_reached(copy / "home" / "journal.db-wal")
    journal.close()
    return kept, copy / "home", expected


def _cut_off_what_no_frame_has_reached(log: Path) -> None:
    """Leave the zeros behind the last frame, which are slow to copy. A frame may end with zeros of its own."""
    data = log.read_bytes()
    header, frame = 32, 24 + int.from_bytes(data[8:12], "big")
    frames = -(-(len(data.rstrip(b"\0")) - header) // frame)
    log.write_bytes(data[: header + frames * frame])


def damaged(killed: tuple[Place, Path, Past], name: str, harm: Callable[[bytearray], None]) -> str:
    """Put the killed journal back, harm one of its files, and open it: ``refused`` or ``same``."""
    place, source, expected = killed
    shutil.rmtree(place.home)
    shutil.copytree(source, place.home, ignore=shutil.ignore_patterns("*-shm"))
    anchors = {path: path.read_bytes() for path in place.anchors.iterdir()}
    data = bytearray((place.home / name).read_bytes())
    harm(data)
    (place.home / name).write_bytes(data)
    before = (place.home / "journal.db").read_bytes()
    try:
        with place.open() as journal:
            try:
                found = past(journal)
            except JournalError:
                return "refused"
            assert found == expected, "something else than what was written"
            verdict = journal.verify()
            assert verdict.ok, verdict.problem
            return "same"
    except JournalError as error:
        helps = any(hint in error.do for hint in ("sublet restore", "SUBLET_HOME", "newer Sublet"))
        if not helps or (place.home / "journal.db").read_bytes() != before:
            raise AssertionError("a refused journal was changed, or nothing is said that helps") from error
        return "refused"
    finally:
        for path, content in anchors.items():
            path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
def test_a_flipped_bit_never_changes_what_is_read(killed: tuple[Place, Path, Past], name: str) -> None:
    """Every region of the file has its share of flips. Some must be refused, or nothing was tested."""
    size = (killed[1] / name).stat().st_size
    chance = random.Random(SEED)
    results: dict[str, int] = {"refused": 0, "same": 0}
    for n in range(FLIPS):
        place = size * n // FLIPS + chance.randrange(max(1, size // FLIPS))
        bit = 1 << chance.randrange(8)

        def harm(data: bytearray, place: int = place, bit: int = bit) -> None:
            data[min(place, len(data) - 1)] ^= bit

        try:
            results[damaged(killed, name, harm)] += 1
        except AssertionError as error:
            raise AssertionError(f"bit {bit:#x} of byte {place} of {name} (SUBLET_DAMAGE_SEED={SEED})") from error
    assert results["refused"] > FLIPS // 20, results


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
def test_a_file_that_was_cut_off_is_refused(killed: tuple[Place, Path, Past], name: str) -> None:
    """At every sixteenth of its length, and just before its end."""
    size = (killed[1] / name).stat().st_size
    for length in [*(size * n // 16 for n in range(16)), size - 1]:

        def harm(data: bytearray, keep: int = length) -> None:
            del data[keep:]

        assert damaged(killed, name, harm) == "refused", length


def test_no_flipped_bit_of_the_header_changes_what_is_read(killed: tuple[Place, Path, Past]) -> None:
    """The hundred bytes that say what the file is."""
    for bit in range(0, 100 * 8, 11):

        def harm(data: bytearray, bit: int = bit) -> None:
            data[bit // 8] ^= 1 << bit % 8

        damaged(killed, "journal.db", harm)


def test_an_undamaged_journal_is_read_as_it_was_written(killed: tuple[Place, Path, Past]) -> None:
    """The measure of the other tests."""
    assert damaged(killed, "journal.db", lambda data: None) == "same"


@pytest.mark.parametrize(
    "harm",
    [
        "DELETE FROM events WHERE seq = (SELECT max(seq) - 3 FROM events)",
        "UPDATE events SET body = replace(body, 'deadline_ns\":7', 'deadline_ns\":9')",
        "UPDATE events SET ns = ns + 1",
        "DELETE FROM audit WHERE seq = (SELECT max(seq) - 4 FROM audit)",
        "UPDATE audit SET kind = 'ended' WHERE seq = (SELECT max(seq) FROM audit)",
        "UPDATE audit SET ns = 'x' WHERE seq = (SELECT max(seq) FROM audit)",
        "UPDATE snapshot SET body = x'00'",
        "DELETE FROM snapshot",
        "UPDATE meta SET value = '9' WHERE key = 'incarnation'",
        "DELETE FROM meta WHERE key = 'journal'",
        "UPDATE meta SET key = 'snapshoT' WHERE key = 'snapshot'",
        "CREATE TABLE more (x)",
        "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM audit; END",
        "DELETE FROM audit",
    ],
)
def test_rows_that_were_changed_are_refused(killed: tuple[Place, Path, Past], harm: str) -> None:
    """Through SQLite itself, so that every page is in order."""
    place, source, _ = killed
    shutil.rmtree(place.home)
    shutil.copytree(source, place.home, ignore=shutil.ignore_patterns("*-shm"))
    db = sqlite3.connect(place.db)
    db.execute(harm)
    assert db.total_changes or harm.startswith("CREATE")
    db.commit()
    db.close()
    with pytest.raises(JournalError, match="damaged"):
        place.open()
