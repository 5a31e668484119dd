"""What is committed is found again, whole and in order, by exactly one office."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import JournalError, JournalFailed
from sublet.office.journal import audit
from sublet.office.journal import journal as journal_module
from sublet.office.journal import journal as journal_opening
from sublet.office.journal import schema as journal_schema
from sublet.office.journal.audit import Anchor
from sublet.office.journal.journal import BEAT_EVERY_NS, Journal
from sublet.office.ledger import events as ev
from sublet.office.ledger.events import AUDITED, EVENT_TYPES
from tests.unit.office.journal.making import OPENED, WALL_NS, Place, at, ended, ending, granted, queued, renewed


def found_in(journal: Journal) -> list[ev.Event]:
    return [entry.event for entry in journal.recover().entries]


def test_a_new_journal_has_no_past(place: Place) -> None:
    """Nothing to start from, incarnation 1, and nothing was restored."""
    with place.open() as journal:
        found = journal.recover()
        assert (found.snapshot, found.snapshot_seq, list(found.entries)) == (None, 0, [])
        assert (found.incarnation, found.last_ns, found.clock_domain, found.restored) == (1, None, None, False)


def test_what_was_committed_is_found_again_in_order(place: Place) -> None:
    """Audited and other events come back as one sequence, with the instant of their batch."""
    batches = [(OPENED,), (queued("a"), granted("a", 1)), (renewed("a"),), (renewed("a", 9), ending("a", 4))]
    with place.open() as journal:
        for n, batch in enumerate(batches):
            journal.commit(batch, at(100 + n))
    with place.open() as journal:
        entries = list(journal.recover().entries)
    assert [entry.event for entry in entries] == [event for batch in batches for event in batch]
    assert [(e.ns, e.wall_ns) for e in entries] == [tuple(at(100 + n)) for n, b in enumerate(batches) for _ in b]
    seqs = [entry.seq for entry in entries]
    assert seqs == list(range(seqs[0], seqs[0] + len(entries)))


def test_a_normal_restart_keeps_the_incarnation(place: Place) -> None:
    """Only a restored backup begins a new one."""
    for _ in range(3):
        with place.open() as journal:
            assert journal.recover().incarnation == 1


def test_the_last_instant_is_that_of_the_last_commit_beat_or_snapshot(place: Place) -> None:
    """A reboot takes remaining time from it. A beat right after a commit writes nothing."""
    with place.open() as journal:
        journal.beat(at(5))  # no office was opened: no clock to write down
        journal.commit([OPENED], at(10))
        assert journal.recover().clock_domain is None, "what recover says is what was there at the opening"
    with place.open() as journal:
        found = journal.recover()
        assert (found.last_ns, found.clock_domain) == (10, "boot-1")
        journal.beat(at(10 + BEAT_EVERY_NS))
        journal.beat(at(11 + BEAT_EVERY_NS))
    with place.open() as journal:
        assert journal.recover().last_ns == 10 + BEAT_EVERY_NS
        journal.commit([renewed("a")], at(20 + BEAT_EVERY_NS))
        journal.compact(b"state", at(30 + BEAT_EVERY_NS))
    with place.open() as journal:
        assert journal.recover().last_ns == 30 + BEAT_EVERY_NS


def test_an_instant_of_an_earlier_clock_is_not_the_last(place: Place) -> None:
    """After a reboot the clock starts lower; the last instant is one of the clock that is named with it."""
    with place.open() as journal:
        journal.commit([OPENED], at(10**12))
        journal.commit([ev.OfficeOpened(incarnation=1, clock_domain="boot-2")], at(50))
    with place.open() as journal:
        found = journal.recover()
        assert (found.last_ns, found.clock_domain) == (50, "boot-2")


def test_a_snapshot_takes_the_place_of_the_events_before_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is longer than one row, and more than once. The audit stays."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_PART_BYTES", 10)
    with place.open() as journal:
        journal.commit([OPENED, queued("a"), granted("a", 1), renewed("a")], at(1))
        journal.compact(b"the first state, in several parts", at(2))
        journal.compact(b"the second state, the same length", at(3))
        assert journal._db.execute("SELECT count(*) FROM events").fetchone() == (0,), "it takes up room for ever"
        journal.commit([renewed("a", 8)], at(4))
        audited = [record.kind for record in journal.records()]
        assert journal.verify().ok
    assert audited == ["journal.began", "office_opened", "queued", "granted"]
    with place.open() as journal:
        found = journal.recover()
        assert found.snapshot == b"the second state, the same length"
        assert [(e.seq - found.snapshot_seq, e.event) for e in found.entries] == [(1, renewed("a", 8))]
        journal.compact(b"", at(5))
        assert journal.recover().snapshot == b""


def test_audited_events_are_in_the_chain_once_and_others_are_not(place: Place) -> None:
    """Each change of state has exactly one audit record."""
    batch: list[ev.Event] = [OPENED, queued("a"), granted("a", 1), renewed("a"), ending("a", 5), ended("a", 6)]
    with place.open() as journal:
        journal.commit(batch, at(1))
        kinds = [record.kind for record in journal.records()]
    assert kinds[1:] == [kind for e in batch for kind, t in EVENT_TYPES.items() if t is type(e) and t in AUDITED]


def test_a_journal_is_in_write_ahead_mode_before_it_has_its_name(place: Place) -> None:
    """Going over to it later writes a rollback log, and a kill there leaves what a reader cannot mend."""
    place.home.mkdir(mode=0o700)
    journal_opening.begin(place.home, None, WALL_NS)
    assert place.db.read_bytes()[18:20] == b"\2\2"
    with place.open() as journal:
        journal.backup(place.root / "b")
    place.restore(place.root / "b")
    assert place.db.read_bytes()[18:20] == b"\2\2"


def test_an_empty_batch_writes_nothing(place: Place) -> None:
    with place.open() as journal:
        before = journal.seq, journal.head()
        journal.commit([], at(1))
        assert (journal.seq, journal.head()) == before


def test_an_event_that_cannot_be_written_leaves_the_journal_usable(place: Place) -> None:
    """It is a bug above, noticed before the transaction begins."""
    with place.open() as journal:
        with pytest.raises(UnicodeEncodeError):
            journal.commit([OPENED, ev.NodeLost(node="n", detail="\ud800")], at(1))  # type: ignore[arg-type]
        journal.commit([OPENED], at(2))
        assert found_in(journal) == [OPENED]


# ---- one process, one owner ----


def test_a_second_opening_says_who_has_it(place: Place) -> None:
    """The lock names the process, and goes with the first owner's close."""
    with place.open(), pytest.raises(JournalError, match=rf"another office \(pid {os.getpid()}\)"):
        place.open()
    place.open().close()


def test_the_lock_of_a_process_that_is_gone_holds_nobody_up(place: Place) -> None:
    """The system lets go of it; the file that stays says nothing."""
    program = "import os, sys; from tests.unit.office.journal.making import Place; from pathlib import Path\n"
    program += "journal = Place(Path(sys.argv[1])).open(); os._exit(0)"
    root = Path(__file__).parents[4]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    subprocess.run([sys.executable, "-c", program, str(place.root)], check=True, env=env)
    place.open().close()


def test_only_the_owner_can_read_what_is_written(place: Place) -> None:
    """The folder and every file in it, log and shared memory too."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
        journal.backup(place.root / "copy")
        assert stat.S_IMODE(place.home.stat().st_mode) == 0o700
        names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.home.iterdir()}
        assert {"journal.db", "journal.db-wal", "journal.lock", "incarnation"} <= names.keys()
        assert set(names.values()) == {0o600}
        assert stat.S_IMODE((place.root / "copy").stat().st_mode) == 0o600
        assert stat.S_IMODE(place.anchor_path(journal).stat().st_mode) == 0o600


def test_a_folder_that_others_may_write_is_refused(place: Place) -> None:
    place.home.mkdir()
    place.home.chmod(0o770)
    with pytest.raises(JournalError, match="chmod go-w"):
        place.open()


def test_a_folder_of_somebody_else_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.home.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: place.home.stat().st_uid + 1)
    with pytest.raises(JournalError, match="belongs to another user"):
        place.open()


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    """Tried by a user without privileges, since a privileged one may write anywhere."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from sublet.errors import JournalError\n"
        "from tests.unit.office.journal.making import Place\n"
        "place = Place(Path(sys.argv[1]))\n"
        "place.open().close()\n"
        "if os.geteuid() == 0:\n"
        "    for path in (place.root, place.home, *place.home.iterdir()): os.chown(path, 65534, 65534)\n"
        "    os.setresuid(65534, 65534, 65534)\n"
        "place.home.chmod(0o500)\n"
        "try: place.open()\n"
        "except JournalError as error: print(error)\n"
        "place.home.chmod(0o700)\n"
    )
    root = Path(__file__).parents[4]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        said = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, env=env)
    assert "cannot be written" in said.stdout, said


# ---- versions ----


def test_a_journal_of_a_newer_version_is_refused_untouched(place: Place) -> None:
    """Both versions are named."""
    place.open().close()
    db = sqlite3.connect(place.db)
    db.execute(f"PRAGMA user_version = {journal_schema.VERSION + 1}")
    db.close()
    before = place.db.read_bytes()
    with pytest.raises(JournalError, match=rf"version {journal_schema.VERSION + 1}.*up to {journal_schema.VERSION}\."):
        place.open()
    assert place.db.read_bytes() == before


def test_a_journal_of_an_older_version_is_brought_up_to_date(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step per version, each in one transaction with its number; what was in it stays."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
    steps = []

    def step(db: sqlite3.Connection) -> None:
        steps.append(db.in_transaction)
        db.execute("CREATE TABLE later (x INTEGER)")

    monkeypatch.setattr(journal_schema, "VERSION", journal_schema.VERSION + 1)
    monkeypatch.setattr("sublet.office.journal.reader.VERSION", journal_schema.VERSION)
    monkeypatch.setitem(journal_schema.TABLES, "later", "CREATE TABLE later (x INTEGER)")
    monkeypatch.setitem(journal_schema.MIGRATIONS, journal_schema.VERSION - 1, step)
    for _ in range(2):
        with place.open() as journal:
            assert found_in(journal) == [OPENED]
    assert steps == [True]


# ---- failure ----


def test_after_a_failed_write_nothing_is_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal says that it failed, for good; the next opening has what was answered."""
    journal = place.open()
    journal.commit([OPENED], at(1))
    real = journal._db

    class Broken:
        def execute(self, sql: str, *args: Any) -> object:
            if sql == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return real.execute(sql, *args)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(journal, "_db", Broken())
    with pytest.raises(JournalFailed, match="disk I/O error") as caught:
        journal.commit([queued("a")], at(2))
    assert not caught.value.transient
    with pytest.raises(JournalFailed, match="disk I/O error"):
        journal.commit([renewed("a")], at(3))
    with pytest.raises(JournalFailed, match="disk I/O error"):
        journal.beat(at(3 + 2 * BEAT_EVERY_NS))
    with pytest.raises(JournalFailed, match="disk I/O error"):
        journal.compact(b"x", at(3))
    log = place.db.with_name("journal.db-wal")
    before = log.read_bytes(), place.db.read_bytes()
    journal.close()
    journal.close()
    assert (log.read_bytes(), place.db.read_bytes()) == before, "closing a failed journal must not checkpoint"
    with place.open() as journal:
        assert found_in(journal) == [OPENED]


def test_the_name_of_the_log_is_durable_before_anything_is_in_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that was closed has no log, so each opening makes one. SQLite passes over a failed sync of the folder;
    an office does not, since a log without a name goes with the power."""
    place.open().close()
    assert not place.db.with_name("journal.db-wal").exists()

    def failing(folder: Path) -> None:
        assert (folder / "journal.db-wal").exists()
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("sublet.office.journal.files.sync_folder", failing)
        with pytest.raises(JournalError, match="cannot be written"):
            place.open()
    with place.open() as journal:
        journal.commit([OPENED], at(1))


def test_the_log_stays_within_what_was_laid_out(place: Place) -> None:
    """Checkpoints come before it grows, so a sync changes no file size."""
    with place.open() as journal:
        log = place.db.with_name("journal.db-wal")
        laid_out = log.stat().st_size
        db = journal._db
        db.execute("PRAGMA synchronous = OFF")  # the test is about sizes, and thousands of syncs take their time
        for n in range(3000):
            journal.commit([renewed("a", n), queued(f"l{n}")], at(n))
        assert log.stat().st_size <= laid_out
        assert place.db.stat().st_size > 1_000_000, "nothing was moved out of the log"


def test_a_record_from_before_actors_were_written_is_read_and_its_hash_holds(place: Place) -> None:
    """The body of that time, letter by letter: every field was written, and `by` only where somebody vouched."""
    old = (
        b'{"type":"granted","lease":"a","node":"n","epoch":[1,1],"parts":[],"claim_by_ns":5,"offered":false}',
        b'{"type":"cleared","resource":"n/gpu0","lease":null,"epoch":null,"by":"verified"}',
    )
    with place.open() as journal:
        journal.commit([OPENED], at(1))
    db = sqlite3.connect(place.db)
    head = db.execute("SELECT hash FROM audit ORDER BY seq DESC").fetchone()[0]
    seq = db.execute("SELECT max(seq) FROM audit").fetchone()[0]
    for kind, body in zip(("granted", "cleared"), old, strict=True):
        seq += 1
        head = audit.link(head, seq, 2, 2, kind, body)
        db.execute("INSERT INTO audit VALUES (?, 2, 2, ?, ?, ?)", (seq, kind, body, head))
    db.commit()
    db.close()
    with place.open() as journal:
        *_, granted_then, cleared_then = [entry.event for entry in journal.recover().entries]
        assert isinstance(granted_then, ev.Granted)
        assert isinstance(cleared_then, ev.Cleared)
        assert (granted_then.by, granted_then.offered, cleared_then.by) == ("", False, "verified")
        assert journal.verify().ok


def test_the_newest_records_are_shown_and_those_that_name_something(place: Place) -> None:
    with place.open() as journal:
        journal.commit([OPENED, queued("a"), queued("ab")], at(1))
        journal.commit([granted("a", 1), renewed("a"), granted("ab", 2)], at(2))
        assert [record.kind for record in journal.latest(2)] == ["granted", "granted"]
        assert [record.kind for record in journal.latest(9, "a")] == ["queued", "granted"]
        assert journal.latest(9, "nobody") == []
        assert [record.seq for record in journal.latest(99)] == sorted(record.seq for record in journal.latest(99))


# ---- what stands against a journal


def test_a_log_without_its_journal_is_not_begun_anew(place: Place) -> None:
    """Also where the file with the incarnation is gone as well."""
    place.home.mkdir(parents=True, mode=0o700)
    (place.home / "journal.db-wal").write_bytes(b"a log")
    with pytest.raises(JournalError, match="is gone, though this folder had one"):
        place.open()


def test_a_journal_whose_anchored_record_is_another_is_refused(place: Place) -> None:
    """It has as many entries as were written, and they are not those."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
        path, identity, seq = place.anchor_path(journal), journal.id, journal.seq
    path.write_text(Anchor(identity, seq, seq, bytes(32)).text + "\n")
    with pytest.raises(JournalError, match="an older copy was put in its place"):
        place.open()


def test_an_entry_of_which_no_journal_knows_is_damage(place: Place) -> None:
    """One whose name was damaged would else pass for one that is not there."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
    db = sqlite3.connect(place.db)
    db.execute("UPDATE meta SET key = 'clocK' WHERE key = 'clock'")
    db.commit()
    db.close()
    with pytest.raises(JournalError, match="it has an entry 'clocK' that no journal has"):
        place.open()


def test_the_last_instant_is_that_of_the_last_entry(place: Place) -> None:
    """What was written after the clock was noted last; else leases would be given time a second time."""
    with place.open() as journal:
        journal.commit([OPENED], at(1))
        journal.commit([queued("a")], at(500))
    with place.open() as journal:
        assert journal.recover().last_ns == 500


def test_only_a_full_disk_is_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync another one may succeed without what was not written."""
    given_up: list[bool] = []

    def give_up() -> bool:
        given_up.append(True)
        return True

    room: Any = SimpleNamespace(before_opening=lambda: None, lay_out=lambda: None, remove_file=give_up)
    journal = Journal.open(place.home, wall_ns=WALL_NS, anchors=place.anchors, room=room)
    journal.commit([OPENED], at(1))

    def fails(write: object, checkpoint_at: int) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(journal, "_attempt", fails)
    with pytest.raises(JournalFailed, match="disk I/O error"):
        journal.commit([queued("a")], at(2))
    assert not given_up
    journal.close()
