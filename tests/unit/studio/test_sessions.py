"""The records of sessions, the table that they follow, and the database that they lie in."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from msgspec import json, structs

from sublet.errors import JournalError
from sublet.studio import is_of_session
from sublet.studio.drawing import PAGES, page_with_drawing
from sublet.studio.records import (
    CELLS_KEPT,
    Abandoned,
    Accepted,
    Asked,
    CellRecord,
    CheckpointLocator,
    Declined,
    Ended,
    Entry,
    Granted,
    LeaseOutcome,
    LeaseRecord,
    Lost,
    Moved,
    Offered,
    ProcessIdentity,
    Ran,
    Record,
    Refused,
    Session,
    Started,
    Terms,
    event_of,
    fold,
    fold_all,
    request_id,
)
from sublet.studio.states import SESSION_TABLE, SessionEnd, SessionState, SessionTransitionError
from sublet.studio.store import SqliteStore
from sublet.values import GIB
from sublet.wire.http import ParksView, WantView
from sublet.wire.http_views import SESSION_LABEL
from tests.unit.client.script import view

DOCS = Path(__file__).parents[3] / "docs"
TERMS = Terms(vram=2 * GIB, ttl_s=300.0)
ME = ProcessIdentity(host="here", pid=7, started=100, name="a notebook")


def lease(number: int) -> LeaseRecord:
    return LeaseRecord(id=f"l-{number}", epoch=(1, number), at_ns=number, devices=("node/gpu0",), holder=ME)


def cell(number: int) -> CellRecord:
    return CellRecord(cell=number, lease="l-1", at_ns=number, held_s=2.0, busy_s=1.0, vram_byte_s=float(GIB))


RECORDS = some.one_of(
    some.just(Asked(by=ME)),
    some.just(Offered(offered=GIB, asked=2 * GIB, valid_s=30.0)),
    some.just(Accepted()),
    some.just(Declined()),
    some.builds(Ran, cell=some.integers(1, 99).map(cell)),
    some.builds(Granted, lease=some.integers(1, 4).map(lease), tenant=some.just("local")),
    some.builds(Refused, reason=some.just("capacity"), detail=some.text(max_size=9), is_known=some.booleans()),
    some.just(Abandoned()),
    some.builds(Moved, lease=some.integers(1, 4).map(lease), tenant=some.just("local")),
    some.builds(Lost, lease=some.integers(1, 4).map(lambda n: f"l-{n}"), reason=some.just("expired")),
    some.just(Ended(reason=SessionEnd.ENDED)),
)


def entry(seq: int, record: Record, session: str = "s-1") -> Entry:
    return Entry(seq=seq, session=session, at_ns=seq * 10, record=record)


def started() -> Session:
    return fold(None, entry(1, Started(name="thesis", terms=TERMS)))


@given(some.lists(RECORDS, max_size=30))
@settings(max_examples=100, deadline=None)
def test_a_record_is_folded_as_the_table_says_or_changes_nothing(records: list[Record]) -> None:
    """What is folded is what is read back from bytes; what the table does not know raises."""
    session, stored = started(), [entry(1, Started(name="thesis", terms=TERMS))]
    for record in records:
        event = event_of(record)
        assert event is not None
        then = SESSION_TABLE.get((session.state, event))
        next_entry = entry(len(stored) + 1, record)
        try:
            folded = fold(session, next_entry)
        except SessionTransitionError:
            is_foreign = isinstance(record, Lost) and (session.lease is None or session.lease.id != record.lease)
            assert then is None or is_foreign
            continue
        assert folded.state is then
        assert folded.attempt >= session.attempt
        assert (folded.by is not None) == (folded.state in (SessionState.WAITING, SessionState.OFFERED))
        assert (folded.offer is not None) == (folded.state is SessionState.OFFERED)
        if not isinstance(record, Ran):
            assert folded.is_accepted == isinstance(record, Accepted)
        assert len(folded.cells) <= CELLS_KEPT
        assert len({one.id for one in folded.leases}) <= len(folded.leases)
        session, stored = folded, [*stored, next_entry]
    again: dict[str, Session] = {}
    fold_all(again, [json.decode(json.encode(one), type=Entry) for one in stored])
    assert again == {"s-1": session}


def test_an_unanswered_request_is_repeated_under_its_id_and_an_answered_one_is_not() -> None:
    session = fold(started(), entry(2, Asked(by=ME)))
    first = request_id(session)
    session = fold(fold(session, entry(3, Abandoned())), entry(4, Asked(by=ME)))
    assert request_id(session) == first, "nobody knows what became of it"
    refused = fold(session, entry(5, Refused(reason="capacity")))
    assert request_id(refused) == first, "the request before may still be under way"
    assert request_id(fold(session, entry(5, Refused(reason="expired", is_known=True)))) != first
    granted = fold(session, entry(5, Granted(lease=lease(1), tenant="local")))
    assert request_id(granted) != first
    asked_once = fold(fold(granted, entry(6, Lost(lease="l-1", reason="idle"))), entry(7, Asked(by=ME)))
    assert request_id(fold(asked_once, entry(8, Refused(reason="capacity")))) != request_id(asked_once)


def test_a_session_knows_its_leases_and_how_each_of_them_ended() -> None:
    session = fold(fold(started(), entry(2, Asked(by=ME))), entry(3, Granted(lease=lease(1), tenant="local")))
    session = fold(session, entry(4, Moved(lease=lease(2), tenant="local")))
    session = fold(session, entry(5, Lost(lease="l-2", reason="preempted", detail="batch", saved_at="10:00")))
    assert [(one.id, one.reason, one.ended_ns) for one in session.leases] == [
        ("l-1", "replaced", 40),
        ("l-2", "preempted", 50),
    ]
    assert (session.state, session.saved_at, session.tenant) == (SessionState.RESTING, "10:00", "local")
    with pytest.raises(SessionTransitionError, match="has no lease l-9"):
        fold(fold(session, entry(6, Moved(lease=lease(3), tenant="local"))), entry(7, Lost(lease="l-9", reason="idle")))


def test_records_of_before_that_do_not_say_when_a_lease_ended_are_read_as_then() -> None:
    """The time of the record stands for it, as it always did."""
    older = b'{"type":"lost","lease":"l-2","reason":"idle","detail":"","saved_at":null}'
    moved = b'{"type":"moved","lease":{"id":"l-2","epoch":[1,2],"at_ns":2},"tenant":"local","was":"replaced"}'
    session = fold(fold(started(), entry(2, Asked(by=ME))), entry(3, Granted(lease=lease(1), tenant="local")))
    for seq, raw in enumerate((moved, older), 4):
        session = fold(session, entry(seq, json.decode(raw, type=Record)))
    assert [(one.id, one.reason, one.ended_ns) for one in session.leases] == [
        ("l-1", "replaced", 40),
        ("l-2", "idle", 50),
    ]


def test_a_session_knows_from_its_start_whose_it_is() -> None:
    whose = fold(None, entry(1, Started(name="thesis", terms=TERMS, person="ana", tenant="physics")))
    assert (whose.person, whose.tenant) == ("ana", "physics")
    older = json.decode(b'{"type":"started","name":"thesis","terms":{"vram":1073741824}}', type=Record)
    assert (fold(None, entry(1, older)).person, fold(None, entry(1, older)).tenant) == ("", "")


def test_the_last_activity_is_what_a_person_or_a_program_did_and_not_what_the_office_did() -> None:
    found = [started()]
    happened: tuple[Record, ...] = (
        Asked(by=ME),
        Granted(lease=lease(1), tenant="local"),
        Moved(lease=structs.replace(lease(1), holder=None), tenant="local"),
        Moved(lease=lease(1), tenant="local"),
        Ran(cell=structs.replace(cell(1), at_ns=55)),
        Lost(lease="l-1", reason="idle"),
    )
    for seq, record in enumerate(happened, 2):
        found.append(fold(found[-1], entry(seq, record)))
    assert [one.active_ns for one in found] == [10, 20, 20, 20, 50, 55, 55]


def test_a_session_knows_where_its_last_checkpoint_lies() -> None:
    """That of the last lease that left one; a lease that saved nothing takes nothing away."""
    first, second = (CheckpointLocator(volume="s-1", number=number) for number in (3, 4))
    session = fold(fold(started(), entry(2, Asked(by=ME))), entry(3, Granted(lease=lease(1), tenant="local")))
    before = LeaseOutcome(reason="idle", saved_at="10:00", checkpoint=first)
    session = fold(session, entry(4, Moved(lease=lease(2), tenant="local", before=before)))
    assert (session.saved_at, session.checkpoint) == ("10:00", first)
    session = fold(session, entry(5, Lost(lease="l-2", reason="idle")))
    assert session.checkpoint == first
    session = fold(session, entry(6, Moved(lease=lease(3), tenant="local")))
    session = fold(session, entry(7, Lost(lease="l-3", reason="idle", saved_at="11:00", checkpoint=second)))
    assert (session.saved_at, session.checkpoint) == ("11:00", second)


@pytest.mark.parametrize("name", PAGES)
def test_the_drawing_in_the_docs_is_that_of_the_table(name: str) -> None:
    page, machine = (DOCS.parent / name).read_text(), PAGES[name]
    assert page_with_drawing(page, machine) == page, "run `python -m sublet.studio.drawing`"
    assert all(f"`{one}`" in page for one in (*machine.events, *machine.states))


def test_a_store_appends_only_behind_the_last_record(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "studio")
    assert store.read(0) == []
    first, second = entry(1, Started(name="thesis", terms=TERMS)), entry(2, Asked(by=ME))
    assert store.append(first)
    assert not store.append(entry(1, Started(name="other", terms=TERMS), "s-2")), "another was quicker"
    assert not store.append(entry(3, Asked(by=ME))), "there is no second one yet"
    assert store.append(second)
    assert store.read(0) == [first, second]
    assert store.read(1) == [second]


def test_two_programs_see_what_the_other_has_appended(tmp_path: Path) -> None:
    here, there = SqliteStore(tmp_path), SqliteStore(tmp_path)
    assert here.append(entry(1, Started(name="thesis", terms=TERMS)))
    assert there.read(0)[0].record == Started(name="thesis", terms=TERMS)
    assert there.append(entry(2, Asked(by=ME)))
    assert not here.append(entry(2, Ended(reason=SessionEnd.ENDED)))
    assert (tmp_path / "sessions.db").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("*~*")), "nothing is left of making it"


def test_while_a_store_is_kept_open_its_log_is_not_moved_with_each_record(tmp_path: Path) -> None:
    """Each record is on disk when its append returns, as otherwise; what is synced besides can wait for the end."""
    here, there = SqliteStore(tmp_path / "studio"), SqliteStore(tmp_path / "studio")
    log = tmp_path / "studio" / "sessions.db-wal"
    with here.kept(), there.kept():
        assert here.append(entry(1, Started(name="thesis", terms=TERMS)))
        sizes = [log.stat().st_size]
        assert there.append(entry(2, Asked(by=ME)))
        sizes.append(log.stat().st_size)
        assert 0 < sizes[0] < sizes[1]
        assert [one.seq for one in here.read(0)] == [1, 2]
        with here.kept():  # a second request of the person
            assert here.append(entry(3, Ended(reason=SessionEnd.ENDED)))
        assert here.read(2)
        assert log.exists()
    assert not log.exists()
    assert [one.seq for one in there.read(0)] == [1, 2, 3]
    with here.kept():
        with here.kept():
            here.read(0)
        assert log.exists(), "the first one still keeps it"
    assert not log.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE record SET at_ns = 5 WHERE seq = 1", "record 1 is not what was written"),
        ("UPDATE record SET session = 's-2' WHERE seq = 2", "record 2 is not what was written"),
        ("DELETE FROM record WHERE seq = 1", "records are missing"),
        ("PRAGMA user_version = 9", "written by another Sublet"),
        ("DROP TABLE record", "cannot be read or written"),
    ],
)
def test_a_damaged_database_is_refused_and_nothing_of_it_believed(change: str, says: str, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    for one in (entry(1, Started(name="thesis", terms=TERMS)), entry(2, Asked(by=ME))):
        assert store.append(one)
    db = sqlite3.connect(store.path)
    db.execute(change)
    db.commit()
    db.close()
    with pytest.raises(JournalError, match=says):
        store.read(0)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sessions.db").write_bytes(b"no database" * 100)
    with pytest.raises(JournalError, match="cannot be read or written"):
        SqliteStore(tmp_path).append(entry(1, Started(name="thesis", terms=TERMS)))


def test_a_session_has_a_lease_until_its_end_begins_and_what_is_parked_of_it() -> None:
    """While its devices are cleared it is no lease of the session any more. A lease of another kind never is."""
    labels = {SESSION_LABEL: "s-1"}
    assert is_of_session(view("queued", labels=labels))
    assert is_of_session(view("active", labels=labels))
    assert not is_of_session(view("ending", labels=labels))
    assert not is_of_session(view("ended", labels=labels))
    assert not is_of_session(view("active"))
    memory = [WantView(kind="memory", amount=GIB)]
    assert not is_of_session(view("active", labels=labels, wants=memory))
    parks = ParksView(of="l-1", holds=True, resumed_by=None)
    assert is_of_session(view("active", labels=labels, wants=memory, parks=parks))
