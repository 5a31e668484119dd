"""Sessions from a seed: the real `Sessions` of several processes on one store, an office in short, and crashes.

A process may die before and after every record and every request, and another one may act in between. After every step
a session has at most one live lease, and its state is the fold of its records (S10).
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NoReturn

import pytest

from sublet.errors import CapacityExceeded, IdempotencyConflict, InvalidRequest, LeaseEnded, SubletError
from sublet.lease_end import EndReason, LeaseEnd
from sublet.studio.records import (
    Asked,
    CellRecord,
    Ended,
    Entry,
    Offered,
    ProcessIdentity,
    Session,
    Terms,
    event_of,
    fold_all,
)
from sublet.studio.sessions import CLAIM_S, Asking, Seen, Sessions
from sublet.studio.states import SESSION_TABLE, SessionEnd, SessionEvent, SessionState
from sublet.values import GIB
from sublet.wire.http_views import SESSION_LABEL

DEVICES = 3
NAMES = ("ana", "ben")
STEPS = 30
DIES = 0.04
"""The chance that a process dies at a step of its own, beside the crash that a test asks for."""
ACTS = (
    "start",
    "start",
    *["acquire"] * 5,
    "rest",
    "end",
    "settle",
    "expire",
    "arrive",
    "move",
    "kill",
    *["park", "go on"] * 4,
)
BLIND = 0.3
"""The chance that a living process is taken for dead, as one of another container is."""
OPEN_S = CLAIM_S + 1e-6
"""How long an offer is valid: too short for a process to wait for the answer, and a thousand steps of the clock."""
SEEDS = range(200)
MET: Counter[SessionEvent] = Counter()
AGREED: Counter[bool] = Counter()
"""How often some session agreed with the office, and how often none did."""


class Crash(BaseException):
    """The process dies here."""


class MemoryStore:
    """The rules of the store, in memory."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, entry: Entry) -> bool:
        if entry.seq != len(self.entries) + 1:
            return False
        self.entries.append(entry)
        return True


@dataclass(kw_only=True)
class Lease:
    seen: Seen
    request: str
    content: str
    bound: int | None
    is_live: bool = True


@dataclass
class World:
    """One store, one office, some processes; chance comes from one seed."""

    seed: int
    crash_at: int | None = None
    store: MemoryStore = field(default_factory=MemoryStore)
    leases: list[Lease] = field(default_factory=list)
    points: int = 0
    depth: int = 0
    now_ns: int = 0
    crashes: int = 0
    parkings: int = 0
    acting: set[int] = field(default_factory=set)
    dying: set[int] = field(default_factory=set)
    """Processes that do nothing more, whatever they still try."""
    in_flight: list[tuple[str, str, str]] = field(default_factory=list)
    """Requests of processes that died before the office read them."""
    holders: dict[tuple[str, tuple[int, int] | None], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.alive = {1, 2, 3}
        self.last = 3
        self.sessions = {pid: self.begin(pid) for pid in self.alive}

    def begin(self, pid: int) -> Sessions[Lease]:
        return Sessions(
            _Store(self, pid),
            _Office(self, pid),
            me=ProcessIdentity(host="here", pid=pid, started=pid),
            is_alive=lambda process: process.pid in self.alive and self.chance.random() >= BLIND,
            wall_ns=self.tick,
            new_id=lambda: f"s-{len(self.store.entries)}-{pid}",
        )

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    # ---- what happens

    def point(self, pid: int) -> None:
        """Between two steps of a process: it may die here, and another may act."""
        self.live(pid)
        self.points += 1
        if self.points == self.crash_at or (self.depth == 0 and self.chance.random() < DIES):
            self.die(pid)
        if self.depth == 0 and self.chance.random() < 0.25:
            self.depth += 1
            try:
                self.act()
            finally:
                self.depth -= 1

    def live(self, pid: int) -> None:
        if pid in self.dying:
            raise Crash

    def die(self, pid: int) -> NoReturn:
        self.dying.add(pid)
        raise Crash

    def act(self) -> None:
        """One thing that one process does, or that happens to a lease."""
        pid, name = self.chance.choice(sorted(self.alive - self.acting)), self.chance.choice(NAMES)
        sessions = self.sessions[pid]
        does = self.chance.choice(ACTS)
        self.acting.add(pid)
        try:
            with contextlib.suppress(SubletError):
                match does:
                    case "start":
                        sessions.start(name, Terms(vram=GIB))
                    case "acquire":
                        for parked in self.parked_of(pid):
                            self.over(parked, "released")  # its holder goes on with it, or gives it up
                        content = {"content": self.chance.choice("ab"), "smaller": self.chance.random() < 0.2}
                        program = self.chance.choice((None, lambda _offer: self.chance.random() < 0.5))
                        for_other = self.chance.random() < 0.1
                        held = sessions.acquire(name, content, program, for_other=for_other)
                        self.holds(pid, held)
                        if for_other or self.chance.random() < 0.1:
                            sessions.set_down(held.seen.session, held)
                        elif self.chance.random() < 0.3:
                            ran = CellRecord(cell=1, lease=held.seen.id, at_ns=1, held_s=1, busy_s=1, vram_byte_s=1)
                            sessions.ran(held.seen.session, ran)
                    case "rest":
                        sessions.rest(name, even_if_busy=True)
                    case "end":
                        sessions.end(name, even_if_busy=True)
                    case "settle":
                        sessions.reconcile()
                    case "expire":
                        self.expire()
                    case "arrive":
                        self.arrive()
                    case "move":
                        self.move(pid, sessions)
                    case "park":
                        self.park(pid)
                    case "go on":
                        self.go_on(pid, sessions)
                    case _:
                        self.die(pid)
        except Crash:
            self.crashes += 1
            self.kill(pid)
        finally:
            self.acting.discard(pid)
        self.check()

    def answer(self, session: str) -> None:
        """The person answers an offer, through another process than the one that asks."""
        others = sorted(self.alive - self.acting)
        if self.depth or not others or self.chance.random() < 0.3:
            return
        pid = self.chance.choice(others)
        does = self.chance.choice((self.sessions[pid].accept, self.sessions[pid].accept, self.sessions[pid].decline))
        self.depth += 1
        self.acting.add(pid)
        try:
            with contextlib.suppress(SubletError):
                does(session)
        except Crash:
            self.crashes += 1
            self.kill(pid)
        finally:
            self.acting.discard(pid)
            self.depth -= 1

    def kill(self, pid: int) -> None:
        self.alive.discard(pid)
        del self.sessions[pid]
        for lease in self.leases:
            if lease.bound == pid:
                self.over(lease, "holder_gone")
        self.last += 1
        self.alive.add(self.last)
        self.sessions[self.last] = self.begin(self.last)

    def expire(self) -> None:
        for lease in self.leases:
            if lease.is_live and self.chance.random() < 0.5:
                self.over(lease, "expired")

    def move(self, pid: int, sessions: Sessions[Lease]) -> None:
        """A holder puts another lease in the place of its own, which the office does in one step."""
        for old in self.held_by(pid):
            self.over(old, "released")
            new = self.grant("", "", pid, old.seen.session)
            self.point(pid)
            sessions.moved(new.seen.session, new)

    def park(self, pid: int) -> None:
        """The office takes the device of a holder: what runs is suspended, and kept under a lease of memory."""
        for old in self.held_by(pid):
            self.over(old, "preempted")
            kept = self.grant("", "", pid, old.seen.session)
            kept.seen = replace(kept.seen, is_parked=True)
            self.parkings += 1

    def go_on(self, pid: int, sessions: Sessions[Lease]) -> None:
        """The holder goes on with what is parked, under a new lease."""
        for parked in self.parked_of(pid):
            if not self.room():
                return
            self.over(parked, "released")
            new = self.grant("", "", pid, parked.seen.session)
            self.point(pid)
            sessions.moved(new.seen.session, new)

    def held_by(self, pid: int) -> list[Lease]:
        return [one for one in self.leases if one.is_live and one.bound == pid and not one.seen.is_parked]

    def parked_of(self, pid: int) -> list[Lease]:
        return [one for one in self.leases if one.is_live and one.bound == pid and one.seen.is_parked]

    def arrive(self) -> None:
        """What a process sent before it died comes to the office after all, which binds it to nothing."""
        while self.in_flight:
            request, content, session = self.in_flight.pop()
            if not any(one.request == request for one in self.leases) and self.room():
                lease = self.grant(request, content, 0, session)
                lease.bound, lease.seen = None, replace(lease.seen, bound_to=None)

    def holds(self, pid: int, held: Lease) -> None:
        other = self.holders.setdefault((held.seen.id, held.seen.epoch), pid)
        assert other == pid or other not in self.alive, f"seed {self.seed}: {held.seen.id} is held twice"

    # ---- the office

    def room(self) -> bool:
        return sum(lease.is_live and not lease.seen.is_parked for lease in self.leases) < DEVICES

    def grant(self, request: str, content: str, pid: int, session: str) -> Lease:
        number = len(self.leases) + 1
        seen = Seen(id=f"l-{number}", session=session, tenant="t", epoch=(1, number), is_held=True, bound_to=pid)
        lease = Lease(seen=seen, request=request, content=content, bound=pid)
        self.leases.append(lease)
        return lease

    def over(self, lease: Lease, reason: str) -> None:
        if lease.is_live:
            lease.is_live = False
            lease.seen = replace(lease.seen, is_held=False, bound_to=None, reason=reason)

    # ---- what must hold

    def check(self) -> None:
        live = Counter(one.seen.session for one in self.leases if one.is_live and not one.seen.is_parked)
        assert not live or max(live.values()) == 1, f"seed {self.seed}: a session has two leases: {live}"
        if self.depth:
            return
        for pid, sessions in self.sessions.items():
            assert sessions._found == folded(self.store.entries[: sessions._seq]), f"seed {self.seed}, process {pid}"

        if self.points % 8 == 0:
            self.check_agreement()

    def check_agreement(self) -> None:
        """Where records and office are said to agree, to compare them changes nothing. For each session alone."""
        live = [lease.seen for lease in self.leases if lease.is_live]
        store, office = _Copy(list(self.store.entries)), _OnlySeen(self)
        watcher: Sessions[Lease] = Sessions(
            store,
            office,
            me=ProcessIdentity(host="here", pid=0, started=0),
            is_alive=lambda process: process.pid in self.alive,
            wall_ns=lambda: self.now_ns,
            new_id=lambda: "",
        )
        agreeing = {one.id for one in watcher.all() if watcher.agree([one], live)}
        watcher.reconcile()
        changed = {entry.session for entry in store.entries[len(self.store.entries) :]} | office.released
        assert not changed & agreeing, f"seed {self.seed}: {changed & agreeing} agreed, and was changed"
        AGREED[bool(agreeing)] += 1

    def finish(self) -> dict[str, Session]:
        """The last of it: no process acts any more, and a new one compares the records with the office."""
        self.crash_at = None
        self.depth = 1
        self.arrive()
        self.check()
        for pid in sorted(self.alive):
            self.kill(pid)
        found = self.begin(99)
        found.reconcile()
        found.reconcile()
        for session in found.all():
            leases = [lease.seen.id for lease in self.leases if lease.is_live and lease.seen.session == session.id]
            if session.state is SessionState.ACTIVE:
                assert session.lease is not None
                assert leases == [session.lease.id], f"seed {self.seed}: {session}"
            else:
                assert not leases, f"seed {self.seed}: {session}"
                assert session.is_over or session.state is SessionState.RESTING, f"seed {self.seed}: {session}"
        for entry in self.store.entries:
            event = event_of(entry.record)
            if event is not None:
                MET[event] += 1
        return {session.id: session for session in found.all()}


class _Store:
    """The store as one process sees it, with a crash before and after each record."""

    def __init__(self, world: World, pid: int) -> None:
        self._world, self._pid = world, pid

    def read(self, after: int) -> list[Entry]:
        self._world.live(self._pid)
        return self._world.store.entries[after:]

    def append(self, entry: Entry) -> bool:
        self._world.point(self._pid)
        is_done = self._world.store.append(entry)
        if is_done:
            self._world.point(self._pid)  # durable, and its writer may never hear of it
            if isinstance(entry.record, Offered):
                self._world.answer(entry.session)
        return is_done


@dataclass
class _Copy(MemoryStore):
    """Records of one moment, which another may go on with."""

    entries: list[Entry]

    def read(self, after: int) -> list[Entry]:
        return self.entries[after:]


class _Office:
    """The office as one process sees it; odd processes leave their leases unbound."""

    def __init__(self, world: World, pid: int) -> None:
        self._world, self._pid = world, pid

    def live(self) -> list[Seen]:
        self._world.point(self._pid)
        return [lease.seen for lease in self._world.leases if lease.is_live]

    def find(self, lease: str) -> Seen | None:
        return next((one.seen for one in self._world.leases if one.seen.id == lease), None)

    def acquire(self, asking: Asking) -> Lease:
        world = self._world
        session, content = asking.labels[SESSION_LABEL], str(asking.more["content"])
        try:
            world.point(self._pid)
        except Crash:
            if world.chance.random() < 0.8:
                world.in_flight.append((asking.request_id, content, session))
            raise
        known = next((one for one in world.leases if one.request == asking.request_id), None)
        if known is not None and known.content != content:
            raise IdempotencyConflict("this request id was used for another request")
        if known is not None and not known.is_live:
            if known.seen.reason == "expired":  # as of a request that waited for as long as it could
                raise CapacityExceeded("not granted within the time it could wait")
            raise LeaseEnded("it has ended", end=LeaseEnd(reason=EndReason.RELEASED, at=""))
        if known is None:
            if asking.more["smaller"] and not asking.offered(Offered(offered=1, asked=2, valid_s=OPEN_S)):
                raise CapacityExceeded("declined")
            if not world.room():
                raise CapacityExceeded("nothing is free")
            known = next((one for one in world.leases if one.request == asking.request_id), None)
            known = known or world.grant(asking.request_id, content, self._pid, session)
        if self._pid % 2:
            known.bound = None
            known.seen = replace(known.seen, bound_to=None)
        world.point(self._pid)
        if not known.is_live:
            raise LeaseEnded("it has ended", end=LeaseEnd(reason=EndReason.EXPIRED, at=""))
        return replace(known)

    def remembers(self, asking: Asking) -> bool:
        self._world.point(self._pid)
        return any(one.request == asking.request_id for one in self._world.leases)

    def attach(self, lease: str) -> Lease:
        world = self._world
        world.point(self._pid)
        found = next(one for one in world.leases if one.seen.id == lease)
        if not found.is_live:
            raise LeaseEnded("it has ended")
        found.bound = self._pid
        found.seen = replace(found.seen, bound_to=self._pid, epoch=(1, 1000 + world.tick()))
        taken = replace(found)
        world.point(self._pid)
        return taken

    def release(self, lease: str) -> None:
        self._world.point(self._pid)
        for one in self._world.leases:
            if one.seen.id == lease:
                self._world.over(one, "released")
        self._world.point(self._pid)

    def tenant(self) -> str:
        return "t"

    def is_ours(self, lease: str) -> bool:
        return True

    def set_down(self, held: Lease) -> None:
        self.leave(held)

    def leave(self, held: Lease) -> None:
        lease = self._of(held)
        lease.bound, lease.seen = None, replace(lease.seen, bound_to=None)
        self._world.point(self._pid)

    def drop(self, held: Lease) -> None:
        self._world.live(self._pid)
        self._world.over(self._of(held), "released")

    def seen(self, held: Lease) -> Seen:
        return self._of(held).seen

    def _of(self, held: Lease) -> Lease:
        return next(one for one in self._world.leases if one.seen.id == held.seen.id)


class _OnlySeen(_Office):
    """The office for who looks at it: what is given back is only noted."""

    def __init__(self, world: World) -> None:
        super().__init__(world, 0)
        self.released: set[str] = set()

    def live(self) -> list[Seen]:
        return [lease.seen for lease in self._world.leases if lease.is_live]

    def release(self, lease: str) -> None:
        self.released |= {one.seen.session for one in self._world.leases if one.seen.id == lease}


def folded(entries: list[Entry]) -> dict[str, Session]:
    found: dict[str, Session] = {}
    fold_all(found, entries)
    return found


def run(seed: int, crash_at: int | None = None) -> World:
    world = World(seed, crash_at)
    for _ in range(STEPS):
        world.act()
    assert world.finish() == folded(world.store.entries), f"seed {seed}"
    return world


def test_a_session_never_has_two_leases_and_is_the_fold_of_its_records() -> None:
    """Several processes, acting between each other's steps, dying at random."""
    MET.clear()
    AGREED.clear()
    worlds = [run(seed) for seed in SEEDS]
    assert sum(world.crashes for world in worlds) > len(SEEDS)
    assert sum(world.parkings for world in worlds) > len(SEEDS) / 4
    assert set(MET) == set(SessionEvent), f"never met: {set(SessionEvent) - set(MET)}"
    assert set(AGREED) == {True, False}


@pytest.mark.parametrize("seed", [42, 309])
def test_a_crash_at_every_step_leaves_a_session_that_goes_on(seed: int) -> None:
    """The same day, with an offer that is accepted, again and again; its process dies one step later each time."""
    steps = run(seed).points
    assert steps > 50
    for step in range(1, steps + 1):
        run(seed, step)


def test_the_simulation_catches_a_second_request_under_a_new_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for: with an id of its own for each request, one that was still under way is granted as well."""
    monkeypatch.setattr("sublet.studio.sessions.request_id", lambda session: f"{session.id}-{session.changed_ns}")
    with pytest.raises(AssertionError, match="has two leases"):
        _ = [run(seed) for seed in SEEDS]


def test_a_session_that_is_ended_while_it_asks_gives_the_lease_back_at_once() -> None:
    world = World(1)
    world.depth = 1  # nothing else happens
    asks, ends = world.sessions[1], world.sessions[2]
    asks.start("ana", Terms(vram=GIB))
    acquire = _Office.acquire

    class Slow(_Office):
        def acquire(self, asking: Asking) -> Lease:
            held = acquire(self, asking)
            world.store.append(
                Entry(seq=3, session=asking.labels[SESSION_LABEL], at_ns=9, record=Ended(reason=SessionEnd.ENDED))
            )
            return held

    asks._office = Slow(world, 1)
    with pytest.raises(InvalidRequest, match="is ended: move is not possible"):
        asks.acquire("ana", {"content": "a", "smaller": False})
    assert not any(lease.is_live for lease in world.leases)
    assert ends.find("ana").is_over


def test_a_request_whose_end_found_no_room_on_the_disk_is_left_by_a_rest() -> None:
    """The process that made it lives, and asks no more: to all others it looks as if it did."""
    world = World(1)
    world.depth = 1
    ident = world.sessions[1].start("ana", Terms(vram=GIB)).id
    by = ProcessIdentity(host="here", pid=1, started=1)
    world.store.append(Entry(seq=2, session=ident, at_ns=9, record=Asked(by=by)))
    assert world.sessions[2].rest("ana").state is SessionState.RESTING


def test_a_new_session_asks_for_its_lease_and_the_office_for_nothing_else_before() -> None:
    """No lease can have its label yet. One that has asked before may have a lease that no record names."""
    world = World(1)
    world.depth = 1
    looks: list[str] = []

    class Counting(_Office):
        def live(self) -> list[Seen]:
            looks.append("live")
            return super().live()

        def acquire(self, asking: Asking) -> Lease:
            looks.append("acquire")
            return super().acquire(asking)

    sessions, asked = world.sessions[1], {"content": "a", "smaller": False}
    sessions._office = Counting(world, 1)
    ident = sessions.start("ana", Terms(vram=GIB)).id
    sessions.acquire("ana", asked)
    assert looks == ["acquire"]
    sessions.rest("ana", even_if_busy=True)
    lost = world.grant("by no record", "a", 1, ident)
    looks.clear()
    assert sessions.acquire("ana", asked).seen.id == lost.seen.id
    assert looks == ["live"]


def test_what_a_living_process_has_set_down_another_takes_over() -> None:
    """So a notebook may go on with what the studio has acquired for it."""
    world = World(1)
    world.depth = 1
    studio, notebook = world.sessions[1], world.sessions[2]
    studio._is_alive = notebook._is_alive = lambda process: True
    studio.start("ana", Terms(vram=GIB))
    asked = {"content": "a", "smaller": False}
    held = studio.acquire("ana", asked)
    with pytest.raises(InvalidRequest, match="is held by"):
        notebook.acquire("ana", asked)
    studio.set_down("ana", held)
    assert notebook.acquire("ana", asked).seen.id == held.seen.id
    studio.set_down("ana", held)
    with pytest.raises(InvalidRequest, match="is held by"):
        studio.acquire("ana", asked)
    notebook.rest("ana")
    held = studio.acquire("ana", asked, for_other=True)
    records = studio.find("ana").records
    studio.set_down("ana", held)
    assert studio.find("ana").records == records, "that was on record from the first"
    assert notebook.acquire("ana", asked).seen.id == held.seen.id
    world.check()


def test_another_program_takes_no_lease_beside_one_that_is_suspended() -> None:
    """Only its holder goes on. It is given up with the session, and not without being asked."""
    world = World(1)
    world.depth = 1
    holds, other = world.sessions[2], world.sessions[3]
    holds.start("ana", Terms(vram=GIB))
    asked = {"content": "a", "smaller": False}
    holds.acquire("ana", asked)
    world.park(2)
    with pytest.raises(InvalidRequest, match="is suspended, and process 2 goes on with it"):
        other.acquire("ana", asked)
    assert other.find("ana").state is SessionState.RESTING
    world.check()
    with pytest.raises(InvalidRequest, match="is suspended, and would be lost"):
        other.end("ana")
    assert other.rest("ana").state is SessionState.RESTING
    assert world.parked_of(2), "it is still there"
    world.go_on(2, holds)
    assert other.find("ana").state is SessionState.ACTIVE
    world.park(2)
    assert other.end("ana", even_if_busy=True).is_over
    assert not any(lease.is_live for lease in world.leases)


def test_a_lease_of_another_tenant_with_the_label_of_a_session_is_left_alone() -> None:
    """An operator is shown the leases of every tenant, and a tenant labels its leases as it likes."""
    world = World(1)
    world.depth = 1
    sessions = world.sessions[1]
    session = sessions.start("ana", Terms(vram=GIB))
    sessions.acquire("ana", {"content": "a", "smaller": False})
    foreign = world.grant("", "", 0, session.id)
    foreign.bound, foreign.seen = None, replace(foreign.seen, tenant="another", bound_to=None)
    sessions.rest("ana", even_if_busy=True)
    sessions.reconcile()
    assert sessions.find("ana").state is SessionState.RESTING
    assert sessions.lease_of(sessions.find("ana")) is None
    assert sessions.end("ana").is_over
    sessions.reconcile()
    assert foreign.is_live


@pytest.mark.parametrize("is_taken", [True, False])
def test_an_offer_is_answered_once_and_by_any_program_of_the_person(is_taken: bool) -> None:
    """The answer of one process is what the other, which asks, goes by. What ran out is not accepted any more."""
    world = World(1)
    world.depth = 1
    asks, other = world.sessions[1], world.sessions[2]
    session = asks.start("ana", Terms(vram=GIB))
    said: list[object] = []

    class Offering(_Office):
        def acquire(self, asking: Asking) -> Lease:
            with pytest.raises(InvalidRequest, match="nothing is offered"):
                other.accept("ana")
            if not asking.offered(Offered(offered=1, asked=2, valid_s=3600.0)):
                raise CapacityExceeded("declined")
            return world.grant(asking.request_id, "", 1, session.id)

    def answer(offer: Offered) -> bool:
        found = other.find("ana")
        assert (found.state, found.offer) == (SessionState.OFFERED, offer)
        said.append((other.accept if is_taken else other.decline)("ana").state)
        if is_taken:
            assert other.accept("ana").is_accepted, "accepting twice is accepting"
            with pytest.raises(InvalidRequest, match="was accepted"):
                other.decline("ana")
        else:
            with pytest.raises(InvalidRequest, match="nothing is offered"):
                other.decline("ana")
        return asks._is_accepted(session.id, offer, 3600.0)  # answers at once, as there is an answer

    asks._office = Offering(world, 1)
    if is_taken:
        assert asks.acquire("ana", {}, answer).seen.session == session.id
        assert asks.find("ana").state is SessionState.ACTIVE
    else:
        with pytest.raises(CapacityExceeded, match="declined"):
            asks.acquire("ana", {}, answer)
        assert asks.find("ana").state is SessionState.RESTING
    assert said == [SessionState.OFFERED if is_taken else SessionState.WAITING]


def test_an_offer_that_ran_out_is_not_accepted_any_more() -> None:
    world = World(1)
    world.depth = 1
    asks, other = world.sessions[1], world.sessions[2]
    asks.start("ana", Terms(vram=GIB))

    class Offering(_Office):
        def acquire(self, asking: Asking) -> Lease:
            if not asking.offered(Offered(offered=1, asked=2, valid_s=OPEN_S)):
                raise CapacityExceeded("it ran out")
            raise AssertionError("that was not accepted")

    def late(offer: Offered) -> bool:
        world.now_ns = offer.until_ns
        with pytest.raises(InvalidRequest, match="has run out"):
            other.accept("ana")
        return asks._is_accepted(offer=offer, ident=other.find("ana").id, open_s=0.0)

    asks._office = Offering(world, 1)
    with pytest.raises(CapacityExceeded, match="it ran out"):
        asks.acquire("ana", {}, late)
    assert asks.find("ana").state is SessionState.RESTING


def test_every_arrow_of_the_table_is_reached() -> None:
    """From the first state every state is reached, and none but the last has no way to another."""
    reached = {SessionState.RESTING, *SESSION_TABLE.values()}
    assert reached == set(SessionState)
    assert set(SessionState) - {state for (state, _), then in SESSION_TABLE.items() if then is not state} == {
        SessionState.ENDED
    }
