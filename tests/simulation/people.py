"""Programs of people in the pretended world: notebooks and the studio, with the product's own ``Sessions``.

``Sessions`` waits for the office in the middle of a function, so each operation runs in a greenlet: where a real
program's thread would block, the world goes on, and it comes back with the answer, or not at all if the program died
meanwhile. All requests cross the same network as those of other holders, and what is acquired is held by the same
``HolderProcess``, with the real renewal.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import greenlet

from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    InvalidRequest,
    JournalError,
    LeaseEnded,
    NotFound,
    SubletError,
    Unauthorized,
)
from sublet.office.api.to_wire import lease_view
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.records import Now, Want
from sublet.studio.office import is_of_session, seen_as
from sublet.studio.records import CellRecord, Entry, Offered, ProcessIdentity, Session, Terms
from sublet.studio.sessions import Asking, Seen, Sessions
from sublet.studio.states import SessionState
from sublet.values import GIB, Epoch, Exclusivity, Kind, LeaseId, RenewMode, RequestId, TenantId
from sublet.wire.http import LeaseView
from sublet.wire.http_views import SESSION_LABEL
from tests.simulation.asking import PATIENCE, RESEND_NS
from tests.simulation.holder import HolderProcess
from tests.simulation.job import Job
from tests.simulation.process import MachineClock

if TYPE_CHECKING:
    from tests.simulation.office import OfficeProcess
    from tests.simulation.people_world import PeopleWorld
    from tests.simulation.replies import Reply

_S: Final = 1_000_000_000
HOST: Final = "machine"
TERMS: Final = Terms(vram=4 * GIB)
BIG: Final = (Want(kind=Kind.GPU, amount=4 * GIB),)
SMALLER: Final = (Want(kind=Kind.GPU, amount=14 * GIB, least=GIB, exclusivity=Exclusivity.SHARED),)
OFFER_OPEN_NS: Final = 8 * _S
Serve = Callable[["OfficeProcess", Callable[[object], None]], None]


class Died(BaseException):
    """The program is no more; nothing of it may go on."""


@dataclass(slots=True)
class MemoryStore:
    """The records of one person; what was appended outlives every process."""

    entries: list[Entry] = field(default_factory=list)
    full_until: int = 0
    """A true time up to which its disk has no room."""

    def append(self, entry: Entry) -> bool:
        if entry.seq != len(self.entries) + 1:
            return False
        self.entries.append(entry)
        return True


@dataclass(slots=True)
class Person:
    """Somebody with sessions: a tenant, and a store of records."""

    tenant: TenantId
    token: str
    next_token: str
    """That it is given where its rights are taken away and given back."""
    store: MemoryStore = field(default_factory=MemoryStore)
    programs: list[Program] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    """Sessions whose start was answered."""
    waits_s: list[float] = field(default_factory=list)
    """From asking to holding, of requests that came to a lease."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a program holds a lease by."""

    lease: LeaseId


class Program(HolderProcess):
    """One program of one person. What it does is in ``turn``; between turns it works under what it holds."""

    world: PeopleWorld

    def __init__(self, world: PeopleWorld, name: str, clock: MachineClock, person: Person) -> None:
        super().__init__(world, name, clock, person.tenant)
        self.person = person
        person.programs.append(self)
        self.identity = ProcessIdentity(host=HOST, pid=int(name[1:]), started=0)
        self._doing: greenlet.greenlet | None = None
        self._calls = 0
        self._last: Reply | None = None
        self._offered_epoch: Epoch | None = None
        self.asked_at: int | None = None
        """Since when it asks for a lease (true time)."""
        self._asking_for_lease = False

    @property
    def session_name(self) -> str:
        return f"work-{self.name}"

    def begin(self) -> None:
        super().begin()
        self.identity = ProcessIdentity(host=HOST, pid=int(self.name[1:]), started=self.boot)
        self.sessions: Sessions[Held] = self.new_sessions()
        self._asking_for_lease = False

    def new_sessions(self) -> Sessions[Held]:
        """Read anew from the records."""
        return Sessions(
            _Store(self),
            _Office(self),
            me=self.identity,
            is_alive=self.world.is_alive,
            wall_ns=self.clock.wall_ns,
            new_id=self.world.new_session_id,
        )

    def crash(self) -> None:
        super().crash()
        self.holder = self.job = self.lease = None
        doing, self._doing = self._doing, None
        if doing and doing is not greenlet.getcurrent():
            doing.throw(Died())

    # ---- one turn

    def turn(self) -> None:
        """What it does next. Raises what ``Sessions`` raises."""
        raise NotImplementedError

    def _want(self, *, wants: tuple[Want, ...] | None = None) -> None:
        if self._doing is None and self.job is None and not self.retired:
            self.do(self.turn)

    def do(self, act: Callable[[], None]) -> None:
        """Begin an operation, unless one is being done."""
        if self._doing is not None or not self.alive:
            return
        boot = self.boot

        def run() -> None:
            try:
                act()
            except Died:
                return
            except SubletError as error:
                self.world.people_rules.told(self, error)
            if boot != self.boot:
                return
            self._doing = None
            self.world.people_rules.look(self)
            if self.job is None:
                self.after(self.pause_ns(), self._want)

        self._doing = greenlet.greenlet(run)
        self._doing.switch()

    def pause_ns(self) -> int:
        """Between two turns."""
        return int((0.2 + self.world.random.random()) * self.world.scenario.think_ns)

    def point(self) -> None:
        """Between two steps of an operation: it may die here."""
        self.live()
        if self.world.random.random() < self.world.dies:
            self.world.restart(self)
            raise Died

    def live(self) -> None:
        if self._doing is not greenlet.getcurrent() or not self.alive:
            raise Died

    def wait(self) -> Any:
        """Until it is woken; the world goes on meanwhile."""
        hub = greenlet.getcurrent().parent
        assert hub is not None
        answer = hub.switch()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wake(self, answer: object) -> None:
        if self._doing is not None:
            self._doing.switch(answer)

    # ---- asking the office

    def call(self, serve: Serve) -> Any:
        """Ask, and again until it is answered. Raises ``Disconnected`` where it is not, or what was answered."""
        self.point()
        self._calls += 1
        token = self._calls
        for _ in range(PATIENCE):
            office = self.world.office
            self.world.net.send(self, office, self._serve, office, self.boot, token, serve)
            self.after(RESEND_NS, self._came, token, _LATE)
            answer = self.wait()
            if answer is not _LATE:
                self._calls += 1  # a second answer finds nothing that waits for it
                if isinstance(answer, SubletError):
                    raise answer
                return answer
        raise Disconnected("the office does not answer", do="Try again.")

    def _serve(self, office: OfficeProcess, boot: int, token: int, serve: Serve) -> None:
        """In the office: a request arrives."""
        if not office.opened or office.is_syncing or office.ledger is None:
            return

        def answer(value: object) -> None:
            if self.boot == boot:
                self.world.net.send(office, self, self._came, token, value)

        refused = self.world.refused_at_the_door(self)
        if refused is not None:
            answer(refused)
        else:
            serve(office, answer)

    def _came(self, token: int, answer: object) -> None:
        if token == self._calls and not self._asking_for_lease:
            self.wake(answer)

    def leases(self) -> list[LeaseView]:
        """What the office shows this tenant of its leases."""

        def serve(office: OfficeProcess, answer: Callable[[object], None]) -> None:
            assert office.ledger is not None
            state, now = office.ledger.state, Now(office.clock.now_ns(), office.clock.wall_ns())
            own = (one for one in state.leases.values() if one.tenant == self.tenant)
            answer([lease_view(one, now, state.resources) for one in own])

        found: list[LeaseView] = self.call(serve)
        return found

    def command(self, command: cmd.Command) -> Reply:
        """Carry out a command, once; the office's answer to it."""

        def serve(office: OfficeProcess, answer: Callable[[object], None]) -> None:
            office.submit(command, lambda reply: None if reply.kind == "unknown" else answer(reply))

        reply: Reply = self.call(serve)
        if reply.kind == "error":
            assert reply.error is not None
            raise reply.error
        return reply

    # ---- a lease

    def acquire(self, asking: Asking) -> Held:
        """As ``Fabric.gpu``: ask, wait, claim."""
        self.point()
        job = self._job(asking.request_id)
        job.wants = asking.more.get("wants", (Want(kind=Kind.GPU, amount=asking.terms.vram),))
        self._requests += 1
        self._last, self.asked_at = None, self.world.now
        more: dict[str, Any] = {"ttl_ns": 10 * _S, "wait_ns": asking.more.get("wait_ns"), "tier": self.tier}
        command = cmd.Acquire(
            tenant=self.tenant,
            lease=LeaseId(f"{self.name}.{self.boot}.{self._requests}"),
            request_id=job.request,
            wants=job.wants,
            renew=job.mode,
            labels=asking.labels,
            process=self.process,
            **more,
        )
        self.world.scenario.ttl_asked_ns = 10 * _S
        self._dies_while_asking(command)
        self._asking_for_lease = True
        try:
            self.ask(command, self._acquired)
            while isinstance(told := self.wait(), Offered):
                self._asking_for_lease = False
                takes = asking.offered(told)
                self._asking_for_lease = True
                if self.lease is None:
                    break
                if takes:
                    self._claim(self._offered_epoch)
                else:
                    self.ask(cmd.Decline(tenant=self.tenant, lease=self.lease), self._placed)
        finally:
            self._asking_for_lease, asked_at, self.asked_at = False, self.asked_at, None
        if self.holder is None:
            raise LeaseEnded("it has ended")
        self.person.waits_s.append((self.world.now - (asked_at or 0)) / _S)
        return Held(self.holder.lease)

    def _dies_while_asking(self, command: cmd.Acquire) -> None:
        """Sometimes: and what it has sent comes to the office long after."""
        world = self.world
        if world.random.random() < 8 * world.dies:
            late_ns = int((1 + world.random.random() * 25) * _S)
            world.push(world.now + late_ns, world.office, world.office.request, (self, self.boot, 0, command))
            world.coverage.seen["died while it asked"] += 1
            world.restart(self)
            raise Died

    def take_over(self, lease: str) -> Held:
        """As ``Fabric.attach``."""
        self.point()
        self._requests += 1
        request = f"{self.name}-{self.boot}-{self._requests}-over"
        self._job(request)
        self.lease, self._last = LeaseId(lease), None
        self._asking_for_lease = True
        try:
            self.ask(
                cmd.Attach(tenant=self.tenant, lease=self.lease, request_id=RequestId(request), process=self.process),
                self._placed,
            )
            self.wait()
        finally:
            self._asking_for_lease = False
        if self.holder is None:
            raise LeaseEnded("it has ended")
        return Held(self.holder.lease)

    def go_on(self, session: Session) -> Held:
        """Go on with what was suspended of the session, under a new lease."""
        assert self.parked is not None
        parked, self.parked = self.parked, None
        self._requests += 1
        job = self._job(f"{self.name}-{self.boot}-{self._requests}-on")
        job.wants, job.resume, job.resume_epoch = (), parked.lease, parked.epoch
        self._last = None
        command = cmd.Acquire(
            tenant=self.tenant,
            lease=LeaseId(f"{self.name}.{self.boot}.{self._requests}"),
            request_id=job.request,
            wants=(),
            ttl_ns=10 * _S,
            renew=job.mode,
            labels={SESSION_LABEL: session.id},
            resume=parked.lease,
            resume_epoch=parked.epoch,
            process=self.process,
        )
        self._asking_for_lease = True
        try:
            self.ask(command, self._acquired)
            self.wait()
        finally:
            self._asking_for_lease = False
        if self.holder is None:
            raise LeaseEnded("it has ended")
        return Held(self.holder.lease)

    def _job(self, request: str) -> Job:
        job = self.job = Job(self.world, RequestId(request))
        job.name, job.attach = None, False
        job.claimed_late &= not self.world.calm
        self.shape(job)
        return job

    def shape(self, job: Job) -> None:
        """How it will work under the lease."""

    def _placed(self, reply: Reply) -> None:
        self._last = reply
        if reply.kind == "offer" and self._asking_for_lease:
            self.lease = reply.lease if reply.lease is not None else self.lease
            self._offered_epoch = reply.epoch
            self.wake(Offered(offered=GIB, asked=4 * GIB, valid_s=reply.left_ns / _S))
            return
        super()._placed(reply)

    def _hold(self, reply: Reply) -> None:
        super()._hold(reply)
        if self.holder is not None and self._asking_for_lease:
            self.wake(None)

    def done(self) -> None:
        reply, waits = self._last, self._asking_for_lease
        super().done()
        self.after(self.pause_ns(), self._want)
        if not waits:
            return
        match None if reply is None else reply.kind:
            case "refusal":
                self.wake(CapacityExceeded("nothing is free"))
            case "error":
                assert reply is not None and reply.error is not None
                self.wake(reply.error)
            case "done" | "granted":
                self.wake(LeaseEnded("it has ended"))
            case _:
                self.wake(Disconnected("the office does not answer", do="Try again."))

    def _work(self, lease: LeaseId) -> None:
        if not self._working:  # else it is what was planned before the lease was set down and taken over again
            super()._work(lease)

    def _rest(self, lease: LeaseId) -> None:
        if self._working:
            super()._rest(lease)

    def put_down(self) -> None:
        """Hold it no more, without giving it back."""
        holder, self.holder = self.holder, None
        if holder is not None and holder.lease in self.manager:
            self.manager.unregister(holder.lease)
        self.job = self.lease = None
        self._working = self._said_idle = False


_LATE: Final = object()


class _Store:
    """The store as one process sees it; it dies before and after records, and its disk may be full."""

    def __init__(self, program: Program) -> None:
        self._program, self._boot = program, program.boot

    def _check(self) -> None:
        if self._program.boot != self._boot:
            raise Died

    def read(self, after: int) -> list[Entry]:
        self._check()
        return self._program.person.store.entries[after:]

    def append(self, entry: Entry) -> bool:
        self._check()
        program, store = self._program, self._program.person.store
        program.point()
        if program.world.now < store.full_until:
            program.world.coverage.seen["record on a full disk"] += 1
            raise JournalError("the sessions cannot be written: no space left on device", do="Make room.")
        is_done = store.append(entry)
        if is_done:
            program.world.people_rules.recorded(program.person, entry)
            program.point()  # durable, and its writer may never hear of it
        return is_done


class _Office:
    """The office as one program asks it: what ``FabricOffice`` does through the client."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def live(self) -> list[Seen]:
        return [seen_as(view) for view in self._program.leases() if is_of_session(view)]

    def find(self, lease: str) -> Seen | None:
        return next((seen_as(view) for view in self._program.leases() if view.id == lease), None)

    def acquire(self, asking: Asking) -> Held:
        return self._program.acquire(asking)

    def remembers(self, asking: Asking) -> bool:
        return any(view.labels.items() >= asking.labels.items() for view in self._program.leases())

    def attach(self, lease: str) -> Held:
        return self._program.take_over(lease)

    def release(self, lease: str) -> None:
        with contextlib.suppress(LeaseEnded, NotFound):
            self._program.command(cmd.Release(tenant=self._program.tenant, lease=LeaseId(lease)))

    def tenant(self) -> str:
        return self._program.tenant

    def is_ours(self, lease: str) -> bool:
        return True  # this office shows a tenant its own leases alone

    def set_down(self, held: Held) -> None:
        program = self._program
        holder = program.holder
        if holder is not None and holder.epoch is not None:
            idle = cmd.NoteActivity(tenant=program.tenant, lease=held.lease, epoch=holder.epoch, active=False)
            with contextlib.suppress(SubletError):  # over already, or another program's by now
                program.command(idle)
        self.leave(held)

    def leave(self, held: Held) -> None:
        program = self._program
        holder = program.holder
        if holder is not None and holder.epoch is not None and program.process is not None:
            unbind = cmd.Unbind(tenant=program.tenant, lease=held.lease, epoch=holder.epoch)
            program.post(program.open_request(lambda _: None, None), unbind)
        program.put_down()

    def drop(self, held: Held) -> None:
        program = self._program
        program.live()
        program.put_down()
        program.post(program.open_request(lambda _: None, None), cmd.Release(tenant=program.tenant, lease=held.lease))

    def seen(self, held: Held) -> Seen:
        seen = self.find(held.lease)
        if seen is None:
            raise NotFound(f"there is no lease {held.lease}")
        return seen


# ---- honest people


class Notebook(Program):
    """One session, cell after cell; what was suspended goes on, and now and then the person ends it and starts anew."""

    def turn(self) -> None:
        chance, sessions = self.world.random.random, self.sessions
        session = self.session()
        last = session.lease
        if last is not None and chance() < 0.3:
            cell = CellRecord(cell=1, lease=last.id, at_ns=self.clock.wall_ns(), held_s=1, busy_s=1, vram_byte_s=1)
            sessions.ran(session.id, cell)
        if chance() < 0.2:
            sessions.reconcile()
        if chance() < 0.08:
            sessions.end(session.id, even_if_busy=True)
            self.parked = None
            return
        if self.parked is not None:
            sessions.moved(session.id, self.go_on(session))
            return
        more: dict[str, Any] = {"wait_ns": None if chance() < 0.6 else int(chance() * 40 * _S)}
        if chance() < 0.3 and not self.world.calm:
            more["wants"] = SMALLER
        sessions.acquire(session.id, more, self._accepts)

    def session(self) -> Session:
        """The one of its name, started where there is none."""
        try:
            found = self.sessions.find(self.session_name)
        except NotFound:
            found = None
        if found is None or found.is_over:
            found = self.sessions.start(self.session_name, TERMS)
            self.person.started.add(found.id)
        return found

    def _accepts(self, offer: Offered) -> bool:
        """Ask the person, who answers in this program or in another one, or not in time."""
        if self.world.random.random() < 0.2:
            return self.world.random.random() < 0.6
        until = self.world.now + OFFER_OPEN_NS
        while self.world.now < until:
            self.after(_S, self.wake_up, self._calls)
            self.wait()
            self.live()
            found = self.sessions.find(self.session_name)
            if found.offer != offer:
                return False
            if found.is_accepted:
                return True
        return False

    def wake_up(self, calls: int) -> None:
        if calls == self._calls:
            self.wake(None)


class Steady(Notebook):
    """Cell after cell, each waited for, without a mistake. What it wants is drawn apart, so it is the same whoever else
    is there and whatever comes of it."""

    def __init__(self, world: PeopleWorld, name: str, clock: MachineClock, person: Person) -> None:
        super().__init__(world, name, clock, person)
        self._wishes = random.Random(f"steady/{world.scenario.seed}/{name}")

    def turn(self) -> None:
        session = self.session()
        if self.parked is not None:
            self.sessions.moved(session.id, self.go_on(session))
        else:
            self.sessions.acquire(session.id, {}, self._accepts)

    def shape(self, job: Job) -> None:
        draw = self._wishes.random
        job.mode, job.rounds, job.ending = RenewMode.WHILE_BUSY, 1 + int(draw() * 4), 0.0
        job.busy_ns, job.idle_ns = int((0.5 + draw() * 12) * _S), int(draw() * draw() * 20 * _S)

    def pause_ns(self) -> int:
        return int((1 + self._wishes.random() * 5) * _S)


class Greedy(Notebook):
    """Always wants a device, and works on it until it is taken: what is against no rule."""

    def shape(self, job: Job) -> None:
        job.mode, job.rounds, job.busy_ns = RenewMode.WHILE_BUSY, 1, 3600 * _S

    def pause_ns(self) -> int:
        return 1


class StudioPart(Program):
    """What the studio does for one person: from the page, or by itself."""

    def turn(self) -> None:
        chance, sessions = self.world.random.random, self.sessions
        live = [one for one in sessions.all() if not one.is_over]
        if chance() < 0.15:  # a name that a notebook of the person's may have taken in this moment
            with contextlib.suppress(InvalidRequest):
                notebook = self.person.programs[0].session_name
                self.person.started.add(sessions.start(notebook, TERMS).id)
        if not live or chance() < 0.2:
            sessions.reconcile()
            return
        offered = [one for one in live if one.state is SessionState.OFFERED]
        session = self.world.random.choice(offered or live)
        draw = chance()
        if session.state is SessionState.OFFERED:
            (sessions.accept if draw < 0.6 else sessions.decline)(session.id)
        elif draw < 0.25:
            sessions.rest(session.id, even_if_busy=chance() < 0.7)
        elif draw < 0.32:
            sessions.end(session.id, even_if_busy=chance() < 0.7)
        elif draw < 0.7 and session.state is SessionState.RESTING:  # started from the page, for the notebook
            held = sessions.acquire(session.id, {"wait_ns": 20 * _S}, lambda _offer: False, for_other=True)
            sessions.set_down(session.id, held)
        else:
            sessions.reconcile()


# ---- and the others


class Flooder(Notebook):
    """Sessions without end, of which each asks at once, and beside them requests that no session knows."""

    def turn(self) -> None:
        for _ in range(8):
            name = f"flood-{self.name}-{self.boot}-{self.world.new_number()}"
            self.person.started.add(self.sessions.start(name, TERMS).id)
        for _ in range(6):
            self._requests += 1
            request = f"{self.name}-{self.boot}-{self._requests}-flood"
            want = (Want(kind=Kind.GPU, amount=GIB),)
            command = cmd.Acquire(
                tenant=self.tenant, lease=LeaseId(request), request_id=RequestId(request), wants=want, ttl_ns=10 * _S
            )
            self.post(self.open_request(lambda _: None, None), command)
        sleeping = [one for one in self.sessions.all() if one.state is SessionState.RESTING]
        self.sessions.acquire(self.world.random.choice(sleeping).id, {"wait_ns": 30 * _S}, lambda _offer: True)

    def pause_ns(self) -> int:
        return _S // 2


class Churner(Notebook):
    """Rests before the maximum hold, and starts another session in the same moment."""

    def turn(self) -> None:
        for session in [one for one in self.sessions.all() if not one.is_over]:
            self.sessions.end(session.id, even_if_busy=True)
        self.parked = None
        name = f"churn-{self.name}-{self.world.new_number()}"
        session = self.sessions.start(name, TERMS)
        self.person.started.add(session.id)
        self.sessions.acquire(session.id, {}, lambda _offer: True)

    def shape(self, job: Job) -> None:
        job.mode, job.rounds, job.idle_ns, job.ending = RenewMode.WHILE_BUSY, 1, 0, 0.0
        job.busy_ns = self.world.scenario.policy.max_hold_ns * 9 // 10

    def pause_ns(self) -> int:
        return 1


class Pretender(Notebook):
    """Runs nothing, and does what might look like use: says that it is busy, takes its own lease over, writes down
    cells that never ran, looks at it. Its lease has to end by its time to live."""

    def turn(self) -> None:
        session = self.session()
        if session.state is SessionState.ACTIVE and session.lease is not None:
            self._pretend(session)
            return
        held = self.sessions.acquire(session.id, {}, lambda _offer: True)
        lease = held.lease
        self.sessions.set_down(session.id, held)  # nothing renews it from here on
        self.world.people_rules.pretends(self, lease)

    def shape(self, job: Job) -> None:
        job.mode = RenewMode.WHILE_BUSY

    def _work(self, lease: LeaseId) -> None:
        """Nothing runs."""

    def _pretend(self, session: Session) -> None:
        assert session.lease is not None
        lease = LeaseId(session.lease.id)
        view = next((one for one in self.leases() if one.id == lease), None)
        if view is None or view.epoch is None or view.deadline is None:
            self.sessions.reconcile()
            return
        self.command(cmd.NoteActivity(tenant=self.tenant, lease=lease, epoch=view.epoch, active=True, busy_ns=_S))
        self._requests += 1
        again = RequestId(f"{self.name}-{self.boot}-{self._requests}-pretend")
        self.command(cmd.Attach(tenant=self.tenant, lease=lease, request_id=again))
        cell = CellRecord(cell=1, lease=lease, at_ns=self.clock.wall_ns(), held_s=9, busy_s=9, vram_byte_s=9)
        self.sessions.ran(session.id, cell)

    def pause_ns(self) -> int:
        return 2 * _S


class Liar(Notebook):
    """Its renewals say that something runs, and nothing does: only the maximum hold ends that."""

    def shape(self, job: Job) -> None:
        job.mode, job.rounds, job.busy_ns = RenewMode.WHILE_BUSY, 1, 3600 * _S

    def _effect(self) -> None:
        """Nothing runs on the device."""


class Prober(Notebook):
    """Uses ids of others, and ids that nobody has, in every request that names one."""

    def turn(self) -> None:
        foreign = self.world.someone_elses(self.person)
        if foreign is None:
            self.sessions.reconcile()
            return
        lease, epoch, session = foreign
        made_up = LeaseId(f"x{self.world.new_number()}.1.1")
        process, again = self.process, f"{self.name}-{self.boot}-{self.world.new_number()}"
        makers: tuple[Callable[[LeaseId], cmd.Command], ...] = (
            lambda one: cmd.Release(tenant=self.tenant, lease=one),
            lambda one: cmd.Release(tenant=self.tenant, lease=one, epoch=epoch),
            lambda one: cmd.Renew(tenant=self.tenant, lease=one, epoch=epoch),
            lambda one: cmd.NoteActivity(tenant=self.tenant, lease=one, epoch=epoch, active=False),
            lambda one: cmd.Claim(tenant=self.tenant, lease=one, epoch=epoch, process=process),
            lambda one: cmd.Decline(tenant=self.tenant, lease=one),
            lambda one: cmd.Unbind(tenant=self.tenant, lease=one, epoch=epoch),
            lambda one: cmd.Attach(tenant=self.tenant, lease=one, request_id=RequestId(f"{again}-a"), process=process),
            lambda one: self._request(f"{again}-{one[:1]}-on", resume=one, resume_epoch=epoch),
            lambda one: self._request(f"{again}-{one[:1]}-in", wants=BIG, replaces=one, replaces_epoch=epoch),
        )
        make = self.world.random.choice(makers)
        said = [self._said(make(one)).replace(one, "ID") for one in (lease, made_up)]
        self.world.people_rules.probed(self, type(make(lease)).__name__, *said)
        for text in (session, f"s-{made_up}"):
            for act in (self.sessions.find, self.sessions.rest, self.sessions.end, self.sessions.accept):
                try:
                    act(text)
                except NotFound as error:
                    self.world.people_rules.told(self, error, text)
                else:
                    self.world.people_rules.probed(self, act.__name__, "answered", "not found")

    def _request(self, request: str, **more: Any) -> cmd.Acquire:
        asked = {"wants": (), "ttl_ns": 10 * _S, "wait_ns": 0, **more}
        return cmd.Acquire(tenant=self.tenant, lease=LeaseId(request), request_id=RequestId(request), **asked)

    def _said(self, command: cmd.Command) -> str:
        try:
            return f"done: {self.command(command).kind}"
        except (Disconnected, Unauthorized):
            raise  # its own rights are gone, or the office: that says nothing of the id
        except SubletError as error:
            self.world.people_rules.told(self, error, str(getattr(command, "lease", "")))
            return f"{type(error).__name__}: {error.message} {error.do} {error.reason}"

    def pause_ns(self) -> int:
        return _S
