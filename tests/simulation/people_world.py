"""The pretended world with sessions on top: honest people, adversaries, a studio that is killed, disks without room.

Everything of ``world`` is there with its faults and its rules; what is added is checked by ``PeopleRules``. An office
out of a backup is left out: the studio has one of its own, and both are restored together (``studio.backup``).

::

    python -m tests.simulation.people_world --seeds 1000
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from statistics import mean
from typing import TYPE_CHECKING, Final

import msgspec

from sublet.errors import SubletError, Unauthorized
from sublet.lease.fence import is_exclusive
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.office.access import AccessList, Origin, token_hash
from sublet.office.journal import audit
from sublet.office.journal.history import AuditHistory
from sublet.office.ledger import bills
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Outcome
from sublet.office.ledger.records import LeaseRecord, Now, TenantRecord
from sublet.studio.records import Entry, ProcessIdentity, Session, Started, event_of, fold_all
from sublet.studio.states import SessionEvent, SessionState
from sublet.testing.machine import FaultName
from sublet.values import Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.http_views import BILL_GROUPINGS, SESSION_LABEL
from tests.simulation.holder import HolderProcess
from tests.simulation.office import OfficeProcess
from tests.simulation.once import swept_afterwards
from tests.simulation.people import (
    Churner,
    Flooder,
    Liar,
    Notebook,
    Person,
    Pretender,
    Prober,
    Program,
    Steady,
    StudioPart,
)
from tests.simulation.people_audit import AuditedState
from tests.simulation.people_bytes import Forger
from tests.simulation.people_hub import RECHECK_S, PretendedHub, Visitor
from tests.simulation.process import Process
from tests.simulation.replies import Reply
from tests.simulation.scenario import Mode, Scenario, draw
from tests.simulation.watch import Violation, Watch
from tests.simulation.world import World

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from tests.simulation.node import NodeProcess

_S: Final = 1_000_000_000
SECONDS: Final = 150
CALM_SECONDS: Final = 600
"""Some ten turns of everybody, so that it is the rules that are compared, and not single turns."""
REST_S: Final = 240
"""Within so long after all is well again, everything is at rest, and an honest person is served."""
ADVERSARIES: Final[tuple[type[Notebook], ...]] = (Flooder, Churner, Pretender, Liar, Prober, Forger)
PROGRAMS: Final[dict[type[Notebook], int]] = {Flooder: 3}
RATES_PER_MINUTE: Final = {"studio killed": 1.5, "records: disk full": 1.0, "tenant disabled": 0.5, "hub away": 1.0}
REVOKED_WITHIN_NS: Final = 20 * _S
"""The notice, the longest end of guests on healthy hardware, and a look once a second."""
RULES: Final = {
    "N1": "a session has one live lease at most",
    "N2": "what a process has of the sessions is the fold of their records (S10)",
    "N3": "a session whose start was answered is there, once, and no two that live have one name",
    "N4": "in the end records and office agree: no lease that no session knows, no session with a lease that is not",
    "N5": "bills by session, tenant and device come to the same, to the unit",
    "N6": "a foreign id is answered like one that nobody has, and changes nothing (A1)",
    "N7": "without rights a tenant gets nothing, and what it holds ends within a bound (A3); no former token opens",
    "N8": "no message names another person, or what is another's (A8)",
    "N9": "what is not work lengthens no lease",
    "N10": "when all is well, an honest person is served within a bound",
    "N11": "each change of a lease or a tenant has one audit record, and a chain that was touched is found out (A7)",
    "N12": "a message that is none is refused in words of a bounded length, and leaves nothing behind (A6)",
    "N13": "nothing of a message is executed, unpickled or given to a shell (A4)",
    "N14": "a page is shown while the hub has said of this browser lately who it is, and not else",
    "N15": "no program finds on its device what another tenant's left there (A5)",
    "N16": "of tenants, nodes and devices the audit records say what the office has, and each change once (A7)",
    "N17": "a program works under leases of its own tenant, and on their devices alone, also once resumed (A5)",
}


STATUS_OF: Final[dict[type, LeaseStatus]] = {
    ev.Queued: LeaseStatus.QUEUED,
    ev.Granted: LeaseStatus.GRANTED,
    ev.Ungranted: LeaseStatus.QUEUED,
    ev.Claimed: LeaseStatus.ACTIVE,
    ev.Noticed: LeaseStatus.NOTICED,
    ev.Spared: LeaseStatus.ACTIVE,
    ev.Ending: LeaseStatus.ENDING,
    ev.Ended: LeaseStatus.ENDED,
}
"""What a lease is after each event that changes that."""


class DoorOffice(OfficeProcess):
    """An office that asks for access tokens, by the real list."""

    def begin(self) -> None:
        self.doors = AccessList(local_rule=False)
        super().begin()

    def _open(self, reply: Reply) -> None:
        assert self.ledger is not None
        for tenant in self.ledger.state.tenants.values():
            self.doors.put(tenant)
        super()._open(reply)

    def _tell(self, events: list[ev.Event], now: Now) -> None:
        for event in events:
            if isinstance(event, ev.TenantSet):
                self.doors.put(event.tenant)
        super()._tell(events, now)

    def refusal(self, token: str) -> SubletError | None:
        """Why this token opens nothing."""
        try:
            self.doors.caller(f"Bearer {token}".encode(), Origin(shared=True, uid=1000))
        except Unauthorized as error:
            return error
        return None

    def request(self, holder: HolderProcess, boot: int, token: int, command: cmd.Command) -> None:
        if isinstance(holder, Program) and self.opened:
            refused = holder.world.refused_at_the_door(holder)
            if refused is not None:
                reply = Reply(kind="error", error=refused)
                self.world.net.send(self, holder, holder.answered, token, reply)
                return
        super().request(holder, boot, token, command)


class PeopleWatch(Watch):
    """The onlooker of all worlds, and beside it the rules of sessions."""

    _world: PeopleWorld

    def decided(self, office: OfficeProcess, command: cmd.Command, outcome: Outcome, now: Now) -> None:
        super().decided(office, command, outcome, now)
        self._world.people_rules.decided(office, command, outcome)

    def effect_taken(self, node: NodeProcess, lease: LeaseId, epoch: Epoch) -> None:
        super().effect_taken(node, lease, epoch)
        self._world.people_rules.used(node, lease, epoch)

    def look(self) -> None:
        super().look()
        self._world.people_rules.each_second()


class PeopleWorld(World):
    """One seed. ``calm``: no faults at all. ``cast``: who is there beside the honest; drawn where it is not said."""

    office_class = DoorOffice

    def __init__(
        self, seed: int, *, calm: bool = False, cast: tuple[type[Notebook], ...] | None = None, programs: int = 0
    ) -> None:
        """``programs``: of each of the cast; 0: as many as its kind has."""
        self.calm, self._cast, self._programs = calm, cast, programs
        self.dies = 0.0 if calm else 0.01
        """The chance that a program dies at a step of its own, beside the faults."""
        self.people: list[Person] = []
        self.hub = PretendedHub(self)
        self._numbers = itertools.count(1)
        self.people_rules = PeopleRules(self)
        super().__init__(seed, "safety")

    def drawn(self, seed: int, mode: Mode) -> tuple[Scenario, random.Random]:
        scenario, source = draw(seed, mode)
        scenario.seconds = CALM_SECONDS if self.calm else SECONDS
        scenario.holders, scenario.deposed = 1, False
        scenario.volumes = scenario.many = False
        scenario.think_ns = int((1 + source.random() * 5) * _S)
        if source.random() < 0.5 and not self.calm:  # else there is hardly ever less to offer
            scenario.policy = msgspec.structs.replace(scenario.policy, share_across_tenants=True)
        scenario.rates.pop("restore", None)
        scenario.rates.update(
            {fault: rate for fault, rate in RATES_PER_MINUTE.items() if source.random() < 0.7} if not self.calm else {}
        )
        self.own_rates = {fault: scenario.rates.pop(fault, 0.0) for fault in RATES_PER_MINUTE}
        if self.calm:
            scenario.rates.clear()
            scenario.loss = scenario.duplicates = scenario.late = scenario.sync_failure = 0.0
            scenario.delay_ns = 10_000_000
            scenario.true_clocks = True
            # On one machine: what is parked goes on where it is, and would leave other machines idle by chance.
            scenario.embedded, scenario.inventories = True, scenario.inventories[:1]
        return scenario, source

    def onlooker(self) -> Watch:
        return PeopleWatch(self)

    def _build(self) -> None:
        super()._build()
        self.holders[0].retired = self.calm
        chance, number = self.random, itertools.count(100)
        cast = self._cast
        if cast is None:
            cast = tuple(one for one in ADVERSARIES if chance.random() < 0.6)
        honest = Steady if self.calm else Notebook
        kinds: tuple[type[Notebook], ...] = (honest, honest, *cast)
        for kind in kinds:
            index = len(self.people)
            token = self._token(index)
            person = Person(TenantId(f"person-{index}-{kind.__name__.lower()}"), token, token)
            self.people.append(person)
            self.tenants.append(person.tenant)
            count = 1 if kind is honest else self._programs or PROGRAMS.get(kind, 1)
            for _ in range(count):
                self._add(kind, person, next(number))
            if kind is Notebook and not self.calm:
                self._add(StudioPart, person, next(number))
                if index == 0:
                    self._add(Visitor, person, next(number))

    def _add(self, kind: type[Program], person: Person, number: int) -> None:
        name = f"p{number}"
        program = kind(self, name, self._clock(name, node=False), person)
        program.is_bound = self.scenario.bound and kind is not StudioPart
        program.tier = self.holders[0].tier.__class__.INTERACTIVE
        self.holders.append(program)

    def _token(self, index: int) -> str:
        return f"sublet_{self.random.getrandbits(128):032x}{index:02x}"

    def make_tenants(self) -> bool:
        office = self.office
        known = office.ledger.state.tenants if office.ledger is not None and office.opened else {}
        by_name = {person.tenant: token_hash(person.token) for person in self.people}
        for tenant in self.tenants:
            if tenant not in known:
                secret = by_name.get(tenant, f"hash of {tenant}")
                office.submit(cmd.AddTenant(tenant=tenant, token_hash=secret), None)
        return all(tenant in known for tenant in self.tenants)

    # ---- what programs use

    def is_alive(self, process: ProcessIdentity) -> bool:
        return any(one.alive and one.identity == process for person in self.people for one in person.programs)

    def new_session_id(self) -> str:
        return f"s-{next(self._numbers):012x}"

    def new_number(self) -> int:
        return next(self._numbers)

    def refused_at_the_door(self, program: Program) -> SubletError | None:
        assert isinstance(self.office, DoorOffice)
        return self.office.refusal(program.person.token)

    def someone_elses(self, person: Person) -> tuple[LeaseId, Epoch, str] | None:
        """A lease of another person, with an epoch and the session."""
        if self.office.ledger is None:
            return None
        found = [
            (one.id, one.epoch or Epoch(1, 1), one.labels[SESSION_LABEL])
            for one in self.office.ledger.state.leases.values()
            if one.tenant != person.tenant and SESSION_LABEL in one.labels
        ]
        return self.random.choice(found) if found else None

    def restart(self, program: Program) -> None:
        """It dies now, and is started again."""
        program.crash()
        self.coverage.seen["program died between two steps"] += 1
        self.push(self.now + int((0.5 + self.random.random() * 10) * _S), None, self._begin, (program,))

    def _begin(self, process: Process) -> None:
        if not process.alive:
            process.begin()

    # ---- faults of its own

    def run(self) -> None:
        for fault, rate in self.own_rates.items():
            self._plan(fault, rate)
        super().run()

    def _plan(self, fault: str, rate: float) -> None:
        if rate:
            at = self.now + int(self.random.expovariate(rate) * 60 * _S)
            if at < self.scenario.seconds * _S:
                self.push(at, None, self._happen, (fault, rate))

    def _happen(self, fault: str, rate: float) -> None:
        self.coverage.seen[fault] += 1
        person = self.random.choice(self.people)
        match fault:
            case "studio killed":
                for program in [one for each in self.people for one in each.programs if isinstance(one, StudioPart)]:
                    if program.alive:
                        self.restart(program)
            case "hub away":
                self.hub.away_until = self.now + int((2 + self.random.random() * 25) * _S)
            case "records: disk full":
                person.store.full_until = self.now + int((1 + self.random.random() * 15) * _S)
            case _:
                self._disable(person)
        self._plan(fault, rate)

    def _disable(self, person: Person) -> None:
        """An operator takes a person's rights away, and gives them back later under another token."""
        if person.token == person.next_token:
            person.next_token = self._token(self.people.index(person))
        self.office.submit(cmd.DisableTenant(tenant=person.tenant), None)
        self.push(self.now + int((5 + self.random.random() * 40) * _S), None, self._enable, (person,))

    def _enable(self, person: Person) -> None:
        office = self.office
        known = office.ledger.state.tenants.get(person.tenant) if office.ledger is not None and office.opened else None
        if known is None or office.is_syncing:
            self.push(self.now + 2 * _S, None, self._enable, (person,))
        elif known.disabled:
            if person.token != person.next_token:
                self.people_rules.former.append(person.token)
                person.token = person.next_token
            office.submit(cmd.EnableTenant(tenant=person.tenant, token_hash=token_hash(person.token)), None)
            self.push(self.now + 2 * _S, None, self._enable, (person,))  # an office that dies now has not taken it

    # ---- the end

    def settle(self) -> None:
        """All is well from now on: the adversaries go home, and what is left must come to rest and agree."""
        self.dies = 0.0
        self.own_rates = {}
        self.scenario.rates = {}
        self.net.heal()
        self.scenario.slow_disk_until, self.scenario.sync_failure = 0, 0.0
        for node in self.nodes:
            for fault in FaultName:
                for resource in (None, *(device.id for device in node.agent.inventory().devices)):
                    node.turn(fault, on=False, resource=resource)
        self.hub.away_until = 0
        for person in self.people:
            person.store.full_until = 0
        for holder in self.holders:
            holder.crash()
            holder.retired = True
        end = self.now + REST_S * _S
        while self.now < end:
            self._look_after()
            self.run_until(self.now + 5 * _S)
            if self._is_at_rest():
                break
        checkers = [self._checker(person, number) for number, person in enumerate(self.people, 900)]
        self.run_until(self.now + 60 * _S)
        for checker in checkers:
            if not checker.agrees:
                self.watch.fail("N4", f"the sessions of {checker.person.tenant} could not be compared with the office")
        probe = next(one for one in self.people[0].programs if isinstance(one, Notebook))
        probe.retired = False
        probe.parked = None
        probe.begin()
        before = len(probe.person.waits_s)
        self.run_until(self.now + 120 * _S)
        if len(probe.person.waits_s) == before:
            self.watch.fail("N10", f"{probe.person.tenant} is alone, and was not served within 120 s")

    def _look_after(self) -> None:
        self.faults.office_up(self.office)
        for process in (self.office, *self.nodes):
            process.paused_until = min(process.paused_until, self.now)
            process.resume()
            if not process.alive and process is not self.supervisor:
                process.begin()
        if self.office.opened:
            for node in self.nodes:
                self.office.submit(cmd.Drain(node=node.agent.node, draining=False), None)
            self.faults.clear_fences(vouch=True)
            for person in self.people:
                self._enable(person)

    def _is_at_rest(self) -> bool:
        ledger = self.office.ledger
        return (
            ledger is not None
            and self.office.opened
            and all(one.status is LeaseStatus.ENDED or one.parks for one in ledger.state.leases.values())
            and not any(tenant.disabled for tenant in ledger.state.tenants.values())
        )

    def _checker(self, person: Person, number: int) -> _Checker:
        name = f"p{number}"
        checker = _Checker(self, name, self._clock(name, node=False), person)
        checker.begin()
        return checker


class _Checker(Program):
    """A new process, when no other acts any more: it compares the records with the office."""

    agrees = False

    def turn(self) -> None:
        problem = None
        for _ in range(3):  # what changes while it is read is read once more
            self.sessions.reconcile()
            self.sessions.reconcile()
            problem = self.world.people_rules.disagreement(self.person, self.sessions.all())
            if problem is None:
                break
        if problem is not None:
            self.world.people_rules.fail(*problem)
        self.agrees = self.retired = True


@dataclass
class PeopleRules:
    """What must hold of sessions, beside the rules of all leases."""

    world: PeopleWorld
    met: Counter[SessionEvent] = field(default_factory=Counter)
    former: list[str] = field(default_factory=list)
    """Tokens that were valid once."""
    _folded: dict[TenantId, tuple[int, dict[str, Session]]] = field(default_factory=dict)
    _deadlines: dict[LeaseId, int] = field(default_factory=dict)
    _pretended: dict[LeaseId, int] = field(default_factory=dict)
    _disabled_since: dict[TenantId, int] = field(default_factory=dict)
    _statuses: dict[LeaseId, LeaseStatus] = field(default_factory=dict)
    _used: dict[ResourceId, tuple[LeaseId, TenantId]] = field(default_factory=dict)
    """Under which lease, and of whom, the last call was that a device took."""
    _audited: AuditedState = field(default_factory=AuditedState)
    _accounts: int = 0

    def fail(self, rule: str, text: str) -> None:
        self.world.watch.fail(rule, text)

    def _sessions(self, person: Person) -> dict[str, Session]:
        """The fold of a person's records, which only grow."""
        seen, found = self._folded.setdefault(person.tenant, (0, {}))
        fold_all(found, person.store.entries[seen:])
        self._folded[person.tenant] = (len(person.store.entries), found)
        return found

    # ---- what is told

    def recorded(self, person: Person, entry: Entry) -> None:
        """A record is durable."""
        event = event_of(entry.record)
        if event is not None:
            self.met[event] += 1
        if isinstance(entry.record, Started):
            name = entry.record.name
            if sum(one.name == name and not one.is_over for one in self._sessions(person).values()) > 1:
                self.fail("N3", f"{person.tenant} has two sessions {name}")

    def told(self, program: Program, error: SubletError, asked: str = "") -> None:
        """A message reached a person, in answer to what was ``asked``: what stood in that is not learnt from it."""
        text = f"{error.message} {error.do}"
        for person in self.world.people:
            if person is program.person:
                continue
            named = [person.tenant, person.token, *self._sessions(person)]
            for secret in named:
                if secret in text and secret not in asked:
                    self.fail("N8", f"{program.person.tenant} was told {text!r}, which names {secret}")

    def probed(self, program: Program, what: str, foreign: str, made_up: str) -> None:
        """The answers to the same request with a foreign id and with one that nobody has."""
        self.world.coverage.seen["foreign id"] += 1
        if foreign != made_up:
            self.fail("N6", f"{what} of {program.person.tenant}: {foreign!r} of another's, {made_up!r} of no one's")

    def pretends(self, program: Program, lease: LeaseId) -> None:
        """From here on nothing runs under this lease, whatever is said."""
        ledger = self.world.office.ledger
        record = None if ledger is None else ledger.state.leases.get(lease)
        if record is not None and record.deadline_ns is not None and record.status in LIVE_STATES:
            self._pretended[lease] = record.deadline_ns
            self.world.coverage.seen["pretended"] += 1

    def shown(self, visitor: Visitor) -> None:
        """A browser is shown the page of its person."""
        now, yes_at = self.world.now, visitor.yes_at
        self.world.coverage.seen["page shown"] += 1
        if yes_at is None or now - yes_at > RECHECK_S * _S:
            self.fail("N14", f"{visitor.name} is shown a page, and the hub has not said lately who it is")
        if self.world.now < self.world.hub.away_until:
            self.world.coverage.seen["page shown, the hub is away"] += 1

    def used(self, node: NodeProcess, lease: LeaseId, epoch: Epoch) -> None:
        """A call on the devices of a lease was taken."""
        for guest in node.machine.of(lease, epoch):
            resource = guest.part.resource
            before = self._used.get(resource)
            if guest.part.kind is not Kind.GPU or before == (lease, guest.tenant):
                continue
            self._used[resource] = (lease, guest.tenant)
            self.world.coverage.seen["device of another tenant before"] += (
                before is not None and before[1] != guest.tenant
            )
            for left in node.machine.leftovers():
                there = left.part.resource == resource and left.tenant != guest.tenant
                if there and (is_exclusive(guest.part) or is_exclusive(left.part)):
                    self.fail("N15", f"{resource}: {lease} of {guest.tenant} can read what {left.tenant} has there")

    # ---- the office

    def decided(self, office: OfficeProcess, command: cmd.Command, outcome: Outcome) -> None:
        assert office.ledger is not None
        state = office.ledger.state
        tenant = getattr(command, "tenant", None)
        named = getattr(command, "lease", None)
        lease = None if named is None else state.leases.get(named)
        is_own = isinstance(command, cmd.Acquire | cmd.AcquireMany | cmd.Revoke)
        foreign = None if lease is None or is_own or tenant in (None, lease.tenant) else lease
        if foreign is not None and any(is_doing_of(event, foreign.id, str(tenant)) for event in outcome.events):
            self.fail("N6", f"{type(command).__name__} of {tenant} changed {foreign.id} of {foreign.tenant}")
        if isinstance(command, cmd.Attach | cmd.NoteActivity | cmd.Unbind | cmd.Decline) and lease is not None:
            before, after = self._deadlines.get(lease.id), lease.deadline_ns
            if lease.parks is not None:  # while its program waits for a device the office itself renews it, in any step
                before = None
            if before is not None and after is not None and after > before:
                self.fail("N9", f"{type(command).__name__} gave {lease.id} {(after - before) / _S:.1f} s more")
        self._are_on_record(state, command, outcome.events)
        self._is_as_audited(state, command, outcome.events)
        for event in outcome.events:
            match event:
                case ev.TenantSet():
                    self._tenant_set(event.tenant)
                case ev.Queued() if event.lease.tenant in self._disabled_since:
                    self.fail("N7", f"{event.lease.tenant} has no rights, and asked for {event.lease.id}")
                case ev.Rebased():
                    self._deadlines.clear()
                    self._pretended.clear()
                case _:
                    pass
            touched = getattr(event, "lease", None)
            record = state.leases.get(LeaseId(touched)) if isinstance(touched, str) else None
            if record is not None and record.deadline_ns is not None:
                self._deadlines[record.id] = record.deadline_ns
        if isinstance(command, cmd.OpenOffice):
            self._deadlines.clear()
            self._pretended.clear()
            self._disabled_since = {
                one.id: self._disabled_since.get(one.id, self.world.now)
                for one in state.tenants.values()
                if one.disabled
            }

    def _are_on_record(self, state: State, command: cmd.Command, events: Sequence[ev.Event]) -> None:
        """What the audited events of one decision say of each lease leads to what it is now, each step once."""
        if isinstance(command, cmd.OpenOffice):  # what was not durable is gone
            self._statuses = {one.id: one.status for one in state.leases.values()}
            return
        steps: dict[LeaseId, list[LeaseStatus]] = {}
        for event in events:
            touched = getattr(event, "lease", None)
            if touched is not None:
                told = steps.setdefault(touched.id if isinstance(touched, LeaseRecord) else touched, [])
                if type(event) in ev.AUDITED and (status := STATUS_OF.get(type(event))) is not None:
                    told.append(status)
            elif isinstance(event, ev.Forgotten):
                for lease in event.leases:
                    self._statuses.pop(lease, None)
        for lease, told in steps.items():
            record = state.leases.get(lease)
            if record is None:
                continue
            before = self._statuses.get(lease)
            if (told[-1] if told else before) is not record.status:
                self.fail("N11", f"{lease} was {before}, is {record.status}, and the audit records say {told}")
            if any(one is other for one, other in itertools.pairwise([before, *told])):
                self.fail("N11", f"one change of {lease} has two audit records: {before}, {told}")
            self._statuses[lease] = record.status

    def _is_as_audited(self, state: State, command: cmd.Command, events: Sequence[ev.Event]) -> None:
        """Who reads the audited events alone knows of tenants, nodes and devices what the office has."""
        if isinstance(command, cmd.OpenOffice):  # what was not durable is gone
            self._audited = AuditedState.of(state)
            return
        for event in events:
            if type(event) in ev.AUDITED and not self._audited.take(event, state):
                self.fail("N16", f"{event} has been told before")
        if events and self._audited != (now := AuditedState.of(state)):
            self.fail("N16", f"the audit records say {self._audited}, and the office has {now}")

    def _tenant_set(self, tenant: TenantRecord) -> None:
        if tenant.disabled:
            self._disabled_since.setdefault(tenant.id, self.world.now)
        else:
            self._disabled_since.pop(tenant.id, None)

    # ---- looking

    def look(self, program: Program) -> None:
        """An operation of a program is over."""
        sessions = program.sessions
        entries = program.person.store.entries
        is_newest = sessions._seq == len(entries)
        if sessions._found != (self._sessions(program.person) if is_newest else folded(entries[: sessions._seq])):
            self.fail("N2", f"{program.name} has other sessions than the records of {program.person.tenant} come to")
        self._one_lease_each()

    def _one_lease_each(self) -> None:
        ledger = self.world.office.ledger
        if ledger is None:
            return
        live: Counter[str] = Counter(
            lease.labels[SESSION_LABEL]
            for lease in ledger.state.leases.values()
            if SESSION_LABEL in lease.labels and lease.status in LIVE_STATES and lease.parks is None
        )
        for session, count in live.items():
            if count > 1:
                self.fail("N1", f"session {session} has {count} live leases")

    def each_second(self) -> None:
        world, office = self.world, self.world.office
        self._one_lease_each()
        if office.ledger is None or not office.opened or office.is_syncing:
            return
        assert isinstance(office, DoorOffice)
        for token in self.former:
            if office.refusal(token) is None:
                self.fail("N7", "a former token opens the office")
        state = office.ledger.state
        awake = max(office.awake_since_true, office.paused_until)
        for tenant, since in self._disabled_since.items():
            if world.now - max(since, awake) > REVOKED_WITHIN_NS:
                held = [one for one in state.leases.values() if one.tenant == tenant and self._holds(one)]
                if held:
                    self.fail("N7", f"{tenant} has had no rights for {REVOKED_WITHIN_NS // _S} s, and has {held[0].id}")
        for live in state.leases.values():
            if live.status in LIVE_STATES:
                self._are_its_tenants(live)
        for lease_id, until_ns in self._pretended.items():
            lease = state.leases.get(lease_id)
            if lease is not None and lease.status in LIVE_STATES and (lease.deadline_ns or 0) > until_ns:
                self.fail("N9", f"nothing runs under {lease_id}, and it was given more time")

    def _are_its_tenants(self, lease: LeaseRecord) -> None:
        """Whose programs run under a lease, and on what."""
        lent = {part.resource for part in lease.parts}
        for node in self.world.nodes:
            for guest in node.machine.of(lease.id, lease.epoch) if lease.epoch is not None else ():
                if guest.epoch == lease.epoch and (guest.tenant != lease.tenant or guest.part.resource not in lent):
                    where = f"on {guest.part.resource} under {lease.id} of {lease.tenant}"
                    self.fail("N17", f"a program of {guest.tenant} runs {where}, which has {sorted(lent)}")

    def _holds(self, lease: LeaseRecord) -> bool:
        return lease.status in LIVE_STATES and lease.parks is None

    # ---- the end

    def disagreement(self, person: Person, found: list[Session]) -> tuple[str, str] | None:
        """What records and office do not say alike of one person's sessions, or which of them was lost."""
        ledger = self.world.office.ledger
        if ledger is None:
            return "N4", "the office is down"
        missing = person.started - {session.id for session in found}
        if missing:
            return "N3", f"sessions of {person.tenant} that were started are gone: {sorted(missing)}"
        live = [one for one in ledger.state.leases.values() if one.tenant == person.tenant and self._holds(one)]
        for session in found:
            leases = [one.id for one in live if one.labels.get(SESSION_LABEL) == session.id]
            known = [session.lease.id] if session.state is SessionState.ACTIVE and session.lease is not None else []
            if leases != known:
                return "N4", f"{session.id} is {session.state} and its live leases are {leases}"
            if session.state in (SessionState.WAITING, SessionState.OFFERED):
                return "N4", f"{session.id} is {session.state}, and no process asks"
        if {session.id: session for session in found} != folded(person.store.entries):
            return "N2", f"the sessions of {person.tenant} are not what their records come to"
        return None

    def bill(self, by: str) -> bills.Bill:
        """What is owed up to now."""
        office = self.world.office
        return bills.fold(AuditHistory().read(_chain(office)).usages(office.clock.now_ns()), by=by)

    def account(self) -> None:
        """The chain, and the bills that the product makes of it."""
        office = self.world.office
        if office.ledger is None or office.is_syncing or not office.opened:
            return
        records = _chain(office)
        verdict = audit.verify(records)
        if not verdict.ok:
            self.fail("N5", f"the audit chain does not hold: {verdict.problem}")
        self._touch(records)
        history, now_ns = AuditHistory().read(records), office.clock.now_ns()
        usages = history.usages(now_ns)
        if not bills.reconcile(usages, history.devices(now_ns)).ok:
            self.fail("N5", "the sum over tenants is not the sum over devices")
        totals = {}
        amounts = {one.name for one in fields(bills.Line) if one.type == "int"} - {"leases", "uncounted"}
        for by in BILL_GROUPINGS:
            lines = bills.fold(usages, by=by).lines
            totals[by] = {name: sum(getattr(line, name) for line in lines) for name in sorted(amounts)}
        if len({repr(total) for total in totals.values()}) > 1:
            self.fail("N5", f"the sums differ: {totals}")
        known = {ident for person in self.world.people for ident in folded(person.store.entries)}
        billed = {line.key for line in bills.fold(usages, by="session").lines} - {""}
        if not billed <= known:
            self.fail("N5", f"on the bill are sessions that no record knows: {sorted(billed - known)}")

    def _touch(self, records: list[audit.AuditRecord]) -> None:
        """Somebody changes the journal afterwards, each time in another way: the chain or its anchor tells."""
        self._accounts += 1
        last = records[-1]
        anchor = audit.Anchor(journal="pretended", seq=last.seq, audit_seq=last.seq, head=last.hash)
        chance = random.Random(f"{self.world.scenario.seed}/{self._accounts}")
        at = chance.randrange(1, len(records))
        ways: dict[str, Callable[[], list[audit.AuditRecord]]] = {
            "edited": lambda: [*records[:at], records[at]._replace(body=records[at].body + b" "), *records[at + 1 :]],
            "deleted": lambda: [*records[:at], *records[at + 1 :]],
            "moved": lambda: [*records[: at - 1], records[at], records[at - 1], *records[at + 1 :]],
            "cut off": lambda: records[:at],
            "made anew": lambda: _linked([*records[:at], records[at]._replace(wall_ns=1), *records[at + 1 :]]),
        }
        way = sorted(ways)[(self.world.scenario.seed + self._accounts) % len(ways)]
        self.world.coverage.seen[f"chain {way}"] += 1
        if audit.verify(ways[way](), [anchor]).ok:
            self.fail("N11", f"record {at} of {len(records)} was {way}, and the chain holds")


def is_doing_of(event: ev.Event, lease: LeaseId, tenant: str) -> bool:
    """Whether it touches this lease, or says that this tenant did it. A command's decision also has what was due."""
    touched = getattr(event, "lease", None)
    by = str(getattr(event, "by", "")).partition(" ")[0]
    return lease in (touched, getattr(touched, "id", None)) or by == f"tenant:{tenant}"


def _linked(records: list[audit.AuditRecord]) -> list[audit.AuditRecord]:
    """With the hashes that fit."""
    head, found = audit.GENESIS, []
    for one in records:
        head = audit.link(head, one.seq, one.ns, one.wall_ns, one.kind, one.body)
        found.append(one._replace(hash=head))
    return found


def folded(entries: list[Entry]) -> dict[str, Session]:
    found: dict[str, Session] = {}
    fold_all(found, entries)
    return found


def _chain(office: OfficeProcess) -> list[audit.AuditRecord]:
    """The audited events of the whole journal, linked as ``Journal.commit`` links them."""
    body = msgspec.json.encode(audit.Began(journal="pretended", incarnation=1))
    head = audit.link(audit.GENESIS, 1, 0, 0, audit.BEGAN, body)
    records = [audit.AuditRecord(1, 0, 0, audit.BEGAN, body, head)]
    for now, events in office.disk.told():
        for event in events:
            if type(event) in ev.AUDITED:
                kind, body = str(type(event).__struct_config__.tag), msgspec.json.encode(event)
                seq = records[-1].seq + 1
                head = audit.link(head, seq, now.ns, now.wall_ns, kind, body)
                records.append(audit.AuditRecord(seq, now.ns, now.wall_ns, kind, body, head))
    return records


def run_seed(seed: int, cast: tuple[type[Notebook], ...] | None = None) -> tuple[PeopleWorld, Violation | None]:
    """One seed, to its end or to the first broken rule."""
    with swept_afterwards():
        world = PeopleWorld(seed, cast=cast)
        try:
            world.run()
            world.people_rules.account()
            world.settle()
            world.people_rules.account()
        except Violation as violation:
            return world, violation
        finally:
            for holder in world.holders:
                holder.crash()
    return world, None


@dataclass(frozen=True, slots=True)
class Calm:
    """What one seed without faults came to."""

    waits_s: tuple[float, ...]
    """Of requests of the two honest people that were served."""
    unserved_s: tuple[float, ...]
    """For how long their requests had waited that were not served in the end."""
    used_s: tuple[float, ...]
    """Device seconds of each person, by the bill; the honest ones first."""

    @property
    def wait_s(self) -> float:
        """On average; what waits in the end counts with what it has waited."""
        return mean((*self.waits_s, *self.unserved_s))

    @property
    def honest_s(self) -> float:
        return sum(self.used_s[:2])

    @property
    def other_s(self) -> float:
        return self.used_s[2]


def run_calm(seed: int, beside: type[Notebook], programs: int) -> Calm:
    """One seed without faults, with such a person beside the honest ones. Raises at the first broken rule."""
    with swept_afterwards():
        world = PeopleWorld(seed, calm=True, cast=(beside,), programs=programs)
        try:
            world.run()
            world.people_rules.account()
            honest = world.people[:2]
            lines = {line.key: line for line in world.people_rules.bill("tenant").lines}
            used = [lines[one.tenant].gpu_milli_ns / 1e12 if one.tenant in lines else 0.0 for one in world.people]
            asked = [program.asked_at for one in honest for program in one.programs if program.asked_at is not None]
            return Calm(
                waits_s=tuple(wait for one in honest for wait in one.waits_s),
                unserved_s=tuple((world.now - at) / _S for at in asked),
                used_s=tuple(used),
            )
        finally:
            for holder in world.holders:
                holder.crash()


def main(arguments: list[str] | None = None) -> int:
    """0 if every rule held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.people_world")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="start", metavar="N")
    asked = parser.parse_args(arguments)
    seen: Counter[str] = Counter()
    broken = 0
    for seed in range(asked.start, asked.start + asked.seeds):
        world, violation = run_seed(seed)
        seen += world.coverage.seen
        if violation is not None:
            broken += 1
            sys.stdout.write(f"seed {seed}: {violation}\n")
    for what, count in sorted(seen.items()):
        sys.stdout.write(f"{what}: {count}\n")
    sys.stdout.write(f"{asked.seeds} seeds, {broken} broke a rule\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
