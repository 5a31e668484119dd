"""What a program records of a session while the office, other programs or a Ctrl-C come between two of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    SubletError,
    Unsupported,
)
from sublet.studio.records import (
    Accepted,
    Asked,
    CheckpointLocator,
    Entry,
    Granted,
    LeaseRecord,
    Lost,
    Moved,
    Offered,
    ProcessIdentity,
    Record,
    Started,
    Terms,
)
from sublet.studio.sessions import Asking, NameTaken, Seen, Sessions, WouldBeLost
from sublet.studio.states import SessionState
from sublet.values import GIB

ME = ProcessIdentity(host="here", pid=7, started=100, name="a notebook")
OTHER = ProcessIdentity(host="here", pid=8, started=200, name="another notebook")
IDENT = "s-000000000001"


class Store:
    """One list of records for all programs."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.before: Callable[[Record], None] = lambda record: None
        """Called before each record of the program under test."""

    def read(self, after: int) -> list[Entry]:
        return self.entries[after:]

    def append(self, entry: Entry) -> bool:
        self.before(entry.record)
        if entry.seq != len(self.entries) + 1:
            return False
        self.entries.append(entry)
        return True

    def of_another(self, record: Record) -> None:
        """Another program was quicker."""
        self.entries.append(Entry(seq=len(self.entries) + 1, session=IDENT, at_ns=1, record=record))


class Office:
    """Answers as a test says; a lease is held by its id."""

    def __init__(self) -> None:
        self.leases: dict[str, Seen] = {}
        self.listed: Callable[[], list[Seen]] = lambda: list(self.leases.values())
        self.answer: Callable[[Asking], str] = lambda asking: self.held("l-1")
        self.attached: list[str] = []
        self.dropped: list[str] = []
        self.released: list[str] = []
        self.left: list[str] = []

    def held(self, lease: str, **facts: Any) -> str:
        self.leases[lease] = Seen(id=lease, session=IDENT, tenant="local", epoch=(1, 1), is_held=True, **facts)
        return lease

    def ended(self, lease: str, reason: str, at_ns: int) -> Seen:
        self.leases[lease] = Seen(id=lease, session=IDENT, tenant="local", reason=reason, ended_ns=at_ns)
        return self.leases[lease]

    def live(self) -> list[Seen]:
        return [one for one in self.listed() if not one.reason]

    def find(self, lease: str) -> Seen | None:
        return self.leases.get(lease)

    def acquire(self, asking: Asking) -> str:
        return self.answer(asking)

    def remembers(self, asking: Asking) -> bool:
        return False

    def attach(self, lease: str) -> str:
        self.attached.append(lease)
        return lease

    def release(self, lease: str) -> None:
        self.released.append(lease)

    def tenant(self) -> str:
        return "local"

    def is_ours(self, lease: str) -> bool:
        return True

    def leave(self, held: str) -> None:
        self.left.append(held)

    def set_down(self, held: str) -> None:
        self.left.append(held)

    def drop(self, held: str) -> None:
        self.dropped.append(held)

    def seen(self, held: str) -> Seen:
        return self.leases[held]


class World:
    def __init__(self) -> None:
        self.store, self.office = Store(), Office()
        self.sessions: Sessions[str] = Sessions(
            self.store,
            self.office,
            me=ME,
            is_alive=lambda who: True,
            wall_ns=lambda: 5,
            new_id=lambda: IDENT,
        )
        self.sessions.start("thesis", Terms(vram=GIB, ttl_s=300.0))

    def state(self) -> SessionState:
        return self.sessions.find(IDENT).state

    def history(self) -> list[tuple[str, str, int | None]]:
        """Its leases, with why and when each of them ended."""
        return [(one.id, one.reason, one.ended_ns) for one in self.sessions.find(IDENT).leases]

    def granted_to_another(self, lease: str) -> Moved:
        return Moved(lease=LeaseRecord(id=lease, epoch=(1, 2), at_ns=1, devices=(), holder=OTHER), tenant="local")

    def granted(self, lease: str, holder: ProcessIdentity) -> Granted:
        return Granted(lease=LeaseRecord(id=lease, epoch=(1, 1), at_ns=1, devices=(), holder=holder), tenant="local")


@pytest.fixture
def world() -> World:
    return World()


def test_a_lease_that_an_earlier_request_may_have_brought_to_another_is_taken_over_anew(world: World) -> None:
    """The first answer was lost, and who asked may hold the lease after all: a new epoch fences that."""

    def lost(asking: Asking) -> str:
        raise Disconnected("no answer", sent=True)

    answer, world.office.answer = world.office.answer, lost
    with pytest.raises(Disconnected):
        world.sessions.acquire(IDENT)
    world.office.answer = answer
    assert world.sessions.acquire(IDENT) == "l-1"
    assert (world.office.left, world.office.attached) == (["l-1"], ["l-1"])


def test_a_request_that_was_answered_at_once_is_not_taken_over(world: World) -> None:
    assert world.sessions.acquire(IDENT) == "l-1"
    assert world.office.attached == []
    assert world.state() is SessionState.ACTIVE


def test_after_a_ctrl_c_nobody_waits_for_a_lease_of_the_session(world: World) -> None:
    """Its process lives on, so the record would keep all others from asking."""

    def interrupted(asking: Asking) -> str:
        raise KeyboardInterrupt

    world.office.answer = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.sessions.acquire(IDENT)
    assert world.state() is SessionState.RESTING


def test_a_lease_that_could_not_be_recorded_is_given_back(world: World) -> None:
    """Also where a Ctrl-C is the reason: no record names it, and nothing would be billed to the session."""

    def interrupt(record: Record) -> None:
        if isinstance(record, Granted):
            raise KeyboardInterrupt

    world.store.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.sessions.acquire(IDENT)
    assert world.office.dropped == ["l-1"]


def test_what_was_recorded_since_the_look_is_not_overruled_by_it(world: World) -> None:
    """The office listed a lease while another program was recording that it holds it."""

    def listed() -> list[Seen]:
        world.office.listed = list
        world.office.held("l-2")
        world.store.of_another(Asked(by=OTHER))
        world.store.of_another(world.granted("l-2", OTHER))
        return list(world.office.leases.values())

    world.office.listed = listed
    world.sessions.reconcile()
    lease = world.sessions.find(IDENT).lease
    assert lease is not None
    assert lease.holder == OTHER


def test_a_lease_that_the_list_missed_is_looked_at_by_itself_before_it_is_given_up(world: World) -> None:
    world.sessions.acquire(IDENT)
    world.office.listed = list
    world.sessions.reconcile()
    assert world.state() is SessionState.ACTIVE
    del world.office.leases["l-1"]
    world.sessions.reconcile()
    assert world.state() is SessionState.RESTING


def test_a_suspended_program_stays_when_its_session_goes_on_under_another_lease(world: World) -> None:
    """What is parked is its memory; only another lease with a device is given back."""
    world.sessions.acquire(IDENT)
    world.office.held("l-2")
    world.office.held("l-parked", is_parked=True)
    world.sessions.moved(IDENT, "l-2")
    assert world.office.released == ["l-1"]


def test_a_refusal_is_not_recorded_once_another_program_asks(world: World) -> None:
    """Its request is under way, and would look as if it had been refused."""

    def refused(asking: Asking) -> str:
        world.store.of_another(Asked(by=OTHER))
        raise CapacityExceeded("no GPU is free")

    world.office.answer = refused
    with pytest.raises(CapacityExceeded):
        world.sessions.acquire(IDENT)
    session = world.sessions.find(IDENT)
    assert (session.state, session.by) == (SessionState.WAITING, OTHER)


# ---- records of programs elsewhere


def test_a_program_elsewhere_records_nothing_that_this_one_would_not(world: World) -> None:
    """Neither a second session of a name, nor one record in the place of another."""
    started = Started(name="thesis", terms=Terms(vram=GIB, ttl_s=300.0))
    with pytest.raises(NameTaken, match="session thesis already") as taken:
        world.sessions.add(Entry(seq=2, session="s-000000000002", at_ns=5, record=started))
    assert "`sublet session end thesis`" in taken.value.do
    assert not world.sessions.add(Entry(seq=1, session=IDENT, at_ns=5, record=Asked(by=OTHER)))
    assert world.sessions.add(Entry(seq=2, session=IDENT, at_ns=5, record=Asked(by=OTHER)))
    assert world.state() is SessionState.WAITING


def test_a_program_that_may_change_one_session_changes_no_other(world: World) -> None:
    """Its token is of that session. It numbers its records as if there were no others."""
    other = "s-000000000002"
    world.sessions._new_id = lambda: other
    world.sessions.start("other", Terms(vram=GIB, ttl_s=300.0))
    with pytest.raises(NotFound):
        world.sessions.add(Entry(seq=2, session=other, at_ns=5, record=Asked(by=OTHER)), only=IDENT)
    with pytest.raises(NotFound):
        world.sessions.add(Entry(seq=1, session="s-00000000000f", at_ns=5, record=Asked(by=OTHER)), only=other)
    assert not world.sessions.add(Entry(seq=3, session=IDENT, at_ns=5, record=Asked(by=OTHER)), only=IDENT)
    assert world.sessions.add(Entry(seq=2, session=IDENT, at_ns=5, record=Asked(by=OTHER)), only=IDENT)
    assert [entry.seq for entry in world.store.entries] == [1, 2, 3]
    assert world.sessions.find(other).state is SessionState.RESTING


# ---- how leases have ended


def test_a_lease_ends_in_the_records_when_the_office_says_and_not_when_it_was_looked_at(world: World) -> None:
    """It ended at 3, and is looked at at 5."""
    world.sessions.acquire(IDENT)
    world.office.ended("l-1", "expired", 3)
    world.sessions.reconcile()
    assert world.history() == [("l-1", "expired", 3)]


def test_an_end_that_the_office_tells_is_recorded_once_and_of_the_present_lease_alone(world: World) -> None:
    world.sessions.acquire(IDENT)
    assert world.sessions.lost(world.office.ended("l-0", "preempted", 2)), "the session had it once"
    assert world.state() is SessionState.ACTIVE
    ended = world.office.ended("l-1", "idle", 3)
    assert world.sessions.lost(ended)
    assert world.sessions.lost(ended)
    assert [type(one.record) for one in world.store.entries].count(Lost) == 1
    assert world.history() == [("l-1", "idle", 3)]
    assert not world.sessions.lost(Seen(id="l-9", session="s-00000000000f"))


def test_what_was_saved_is_recorded_when_it_is_known_though_the_end_was_before(world: World) -> None:
    """A lease that is given back ends at once; its last checkpoint is known when nothing is left of it."""
    world.sessions.acquire(IDENT)
    ended = world.office.ended("l-1", "released", 3)
    world.sessions.reconcile()
    later = replace(ended, saved_at="10:00", checkpoint=CheckpointLocator(volume=IDENT, number=4))
    for _ in range(2):
        assert world.sessions.lost(later)
        assert world.sessions.lost(ended)
    session = world.sessions.find(IDENT)
    assert (session.state, session.saved_at, session.checkpoint) == (SessionState.RESTING, "10:00", later.checkpoint)
    assert world.history() == [("l-1", "released", 3)]
    assert [type(one.record) for one in world.store.entries].count(Lost) == 2


@pytest.mark.parametrize("way", ["rest", "end"])
def test_what_was_saved_under_a_lease_that_was_given_back_is_found_where_no_studio_follows(
    world: World, way: str
) -> None:
    """The office says it once nothing is left of the lease. A session that was ended never had it on its record, nor
    one that rested without a studio."""
    world.sessions.acquire(IDENT)
    world.office.release = lambda lease: world.office.ended(lease, "released", 3)  # type: ignore[assignment]
    getattr(world.sessions, way)(IDENT)
    world.sessions.reconcile()
    assert world.sessions.find(IDENT).checkpoint is None, "it is being torn down"
    before = len(world.store.entries)
    where = CheckpointLocator(volume=IDENT, number=4)
    world.office.leases["l-1"] = replace(world.office.leases["l-1"], is_over=True, saved_at="10:00", checkpoint=where)
    for _ in range(2):
        world.sessions.reconcile()
        assert world.sessions.lost(world.office.leases["l-1"])
    session = world.sessions.find(IDENT)
    assert (session.saved_at, session.checkpoint, session.is_over) == ("10:00", where, way == "end")
    assert world.history() == [("l-1", "released", 3)]
    assert len(world.store.entries) == before + 1, "it is asked for until it is known, and recorded once"


def test_what_a_notebook_saves_by_hand_is_on_record_at_once_and_stays_the_last(world: World) -> None:
    """It is saved under the lease of the volume, of whose end no session knew: "nothing yet" was said of it."""
    where = [CheckpointLocator(volume=IDENT, number=number) for number in range(5)]
    world.sessions.saved(IDENT, "09:00", where[0])
    assert world.sessions.find(IDENT).checkpoint is None, "it never had a lease"
    world.sessions.acquire(IDENT)
    before = world.sessions.find(IDENT)
    for _ in range(2):
        world.sessions.saved(IDENT, "10:00", where[2])
    held = world.sessions.find(IDENT)
    assert (held.saved_at, held.checkpoint, held.lease, held.state) == ("10:00", where[2], before.lease, before.state)
    assert held.records == before.records + 1
    ended = replace(world.office.ended("l-1", "idle", 3), is_over=True, saved_at="09:30", checkpoint=where[1])
    world.office.leases["l-1"] = ended
    world.sessions.reconcile()
    assert world.sessions.find(IDENT).checkpoint == where[2], "that is newer than what its lease left"
    world.sessions.saved(IDENT, "11:00", where[3])
    rests = world.sessions.find(IDENT)
    assert (rests.saved_at, rests.checkpoint, rests.state) == ("11:00", where[3], SessionState.RESTING)
    assert world.history() == [("l-1", "idle", 3)]


def test_a_lease_that_the_office_forgot_is_not_asked_for_again(world: World) -> None:
    world.sessions.acquire(IDENT)
    world.office.ended("l-1", "idle", 3)
    world.sessions.reconcile()
    asked: list[str] = []
    world.office.find = asked.append  # type: ignore[assignment]
    for _ in range(3):
        world.sessions.reconcile()
    assert asked == ["l-1"]
    assert world.history() == [("l-1", "idle", 3)]


def test_a_session_that_goes_on_under_another_lease_knows_how_the_one_before_ended(world: World) -> None:
    """Also where nobody noticed that before: its program has moved, or the office has another of the session."""
    world.sessions.acquire(IDENT)
    world.office.ended("l-1", "preempted", 3)
    world.office.held("l-2")
    world.sessions.moved(IDENT, "l-2")
    assert world.history() == [("l-1", "preempted", 3), ("l-2", "", None)]
    world.office.ended("l-2", "idle", 4)
    world.office.held("l-3")
    world.sessions.reconcile()
    assert world.history() == [("l-1", "preempted", 3), ("l-2", "idle", 4), ("l-3", "", None)]


def test_a_session_that_is_ended_knows_when_its_lease_did(world: World) -> None:
    world.sessions.acquire(IDENT)

    def release(lease: str) -> None:
        world.office.ended(lease, "released", 4)

    world.office.release = release  # type: ignore[method-assign]
    world.sessions.end(IDENT)
    assert world.state() is SessionState.ENDED
    assert world.history() == [("l-1", "released", 4)]


# ---- leases that change hands, and offers


def test_a_lease_that_is_set_down_is_the_next_programs(world: World) -> None:
    held = world.sessions.acquire(IDENT)
    world.sessions.set_down(IDENT, held)
    assert world.office.left == [held]
    lease = world.sessions.find(IDENT).lease
    assert lease is not None
    assert lease.holder is None


def test_a_lease_that_another_program_has_taken_over_is_not_set_down_for_it(world: World) -> None:
    held = world.sessions.acquire(IDENT)
    moved = Moved(lease=world.granted(held, OTHER).lease, tenant="local")
    world.store.of_another(moved)
    world.sessions.set_down(IDENT, held)
    lease = world.sessions.find(IDENT).lease
    assert lease is not None
    assert lease.holder == OTHER


def test_an_offer_that_was_accepted_is_not_declined_though_its_time_is_over(world: World) -> None:
    """Who asked takes it; that it is late is for the office to say. One that nobody accepted has run out."""
    world.store.of_another(Asked(by=OTHER))
    world.store.of_another(Offered(offered=1, asked=2, valid_s=1.0, until_ns=4))
    for answer in (world.sessions.accept, world.sessions.decline):
        with pytest.raises(InvalidRequest, match="has run out"):
            answer(IDENT)
    world.store.of_another(Accepted())
    world.sessions.accept(IDENT)
    with pytest.raises(InvalidRequest, match="was accepted"):
        world.sessions.decline(IDENT)
    assert world.state() is SessionState.OFFERED


def test_a_session_with_a_suspended_program_is_not_ended_unasked(world: World) -> None:
    """What is in its memory would be lost, though it has no GPU and runs nothing."""
    world.office.held("l-9", is_parked=True)
    with pytest.raises(WouldBeLost):
        world.sessions.end(IDENT)
    assert world.state() is SessionState.RESTING


def test_a_session_without_a_studio_has_its_tenant_before_its_first_lease(world: World) -> None:
    """It was known with the first lease alone, and its page of before then named none."""
    assert world.sessions.find(IDENT).tenant == "local"
    studio = Sessions(Store(), world.office, me=ME, is_alive=lambda who: True, wall_ns=lambda: 5, new_id=lambda: IDENT,
                      person="ana", tenant="physics")  # fmt: skip
    assert studio.start("thesis", Terms(vram=GIB)).tenant == "physics", "the studio says whose it is"


def test_work_under_its_lease_is_the_last_activity_of_a_session(world: World) -> None:
    """Of the process that holds it; the lease and its history stay as they are, and other records are not needed."""
    held = world.sessions.acquire(IDENT)
    clock = [70]
    world.sessions._wall_ns = lambda: clock[0]
    before = world.sessions.find(IDENT)
    world.sessions.used(IDENT)
    after = world.sessions.find(IDENT)
    assert (before.active_ns, after.active_ns) == (5, 70)
    assert (after.lease, after.earlier, after.state) == (before.lease, before.earlier, before.state)
    clock[0] = 80
    world.store.of_another(world.granted_to_another(held))
    world.sessions.used(IDENT)
    world.office.ended(held, "idle", 75)
    world.sessions.reconcile()
    world.sessions.used(IDENT)
    assert world.sessions.find(IDENT).active_ns < 80, "what it does not hold, it does not use"


def test_no_new_session_is_named_like_an_id(world: World) -> None:
    """An id stands for a session in every place where a name does."""
    for name in ("s-0123456789ab", IDENT):
        with pytest.raises(InvalidRequest, match="a session cannot be named like an id"):
            world.sessions.start(name, Terms(vram=GIB))


def _too_big() -> CapacityExceeded:
    """As the client makes it of such a refusal."""
    error = CapacityExceeded("80GiB is more than any node has", do="Ask for less.", reason="too_big")
    error.transient = False
    return error


def _refused(world: World, error: SubletError) -> SubletError:
    """What a person is told whose start came to this."""

    def refuse(asking: Asking) -> str:
        raise error

    world.office.answer = refuse
    with pytest.raises(SubletError):
        world.sessions.acquire(IDENT)
    world.sessions.note_first_refusal(world.sessions.find(IDENT), error)
    return error


@pytest.mark.parametrize(
    "error",
    [
        _too_big(),
        Unsupported("no device here is called A100", reason="unsupported"),
        InvalidRequest("the time to live is too long"),
        QuotaExceeded("that is above the ceiling of its group"),
    ],
)
def test_a_start_that_is_refused_for_ever_leaves_nothing_behind(world: World, error: SubletError) -> None:
    """It left a session that rested, of which its message said nothing. A program that reads the records anew sees
    none either, and the name is free."""
    do = error.do
    assert _refused(world, error).do == do
    for seen in (world.sessions, Sessions(world.store, world.office, me=OTHER, is_alive=lambda who: True,
                                          wall_ns=lambda: 6, new_id=lambda: "s-000000000002")):  # fmt: skip
        assert seen.all() == seen.reconcile() == seen.recent(9) == []
        with pytest.raises(NotFound):
            seen.find("thesis")
    assert seen.start("thesis", Terms(vram=GIB)).id == "s-000000000002"


def test_a_start_that_only_ran_out_of_time_says_that_the_session_is_there(world: World) -> None:
    error = _refused(world, CapacityExceeded("not granted within 4s", do="Ask again."))
    assert error.do == (
        "Ask again. Session thesis is there and rests: `sublet session resume thesis` asks again, "
        "`sublet session end thesis` ends it."
    )
    assert world.state() is SessionState.RESTING


def test_a_start_that_was_refused_stays_where_another_program_came_to_it(world: World) -> None:
    """A notebook of the same label waits for a lease of it: nothing is taken from it."""

    def answer(asking: Asking) -> str:
        raise _too_big()

    world.office.answer = answer
    with pytest.raises(CapacityExceeded) as caught:
        world.sessions.acquire(IDENT)
    world.store.of_another(Asked(by=OTHER))
    world.sessions.note_first_refusal(world.sessions.find(IDENT), caught.value)
    assert world.state() is SessionState.WAITING


def test_a_session_that_is_not_new_outlives_a_refusal_for_ever(world: World) -> None:
    """What it saved is worth more than the request."""
    world.office.answer = lambda asking: world.office.held("l-1")
    held = world.sessions.acquire(IDENT)
    world.office.ended(held, "released", 7)
    world.sessions.reconcile()
    _refused(world, _too_big())
    assert world.state() is SessionState.RESTING
