"""Every interleaving of a small world, with the real ledger and the real agent.

Two holders, one device, an office and an agent that restart, orders and reports that arrive in either order or not at
all. The search goes breadth first over what can happen next and meets each state once. In each it asks the agent about
every (lease, epoch) pair that was ever given out: at most one may touch the device.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from enum import EnumType
from types import FunctionType
from typing import Any

import pytest
from msgspec import StructMeta

from sublet.errors import SubletError
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.events import Event
from sublet.office.ledger.fold import apply
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Now, Want
from sublet.office.ledger.state import State
from sublet.testing import HeldClock
from sublet.testing.machine import Machine
from sublet.testing.memory import MemoryAgent
from sublet.testing.pretended import Timings
from sublet.values import GIB, NS_PER_S, Epoch, Kind, LeaseId, NodeId, RequestId, ResourceId, TenantId
from sublet.wire.orders import Device, Inventory, Order, Report
from tests.simulation.mutants import switched_on

POLICY = Policy(
    ttl_min_ns=NS_PER_S,
    claim_window_ns=NS_PER_S,
    offer_valid_ns=NS_PER_S,
    resend_every_ns=NS_PER_S,
    grace_max_ns=1,
)
INVENTORY = Inventory(
    node=NodeId("n"), domain="n", devices=(Device(id=ResourceId("n/gpu"), kind=Kind.GPU, capacity=GIB),)
)
ALICE, BOB = TenantId("alice"), TenantId("bob")
WALL_NS = 1_750_000_000 * NS_PER_S


@dataclass
class SmallWorld:
    """Office, agent and what is on its way between them."""

    clock: HeldClock = field(default_factory=HeldClock)
    orders: list[Order] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    journal: list[tuple[Now, tuple[Event, ...]]] = field(default_factory=list)
    given: set[tuple[LeaseId, Epoch]] = field(default_factory=set)
    ticks: int = 0
    office_restarts: int = 0
    agent_restarts: int = 0
    lost: int = 0
    done: set[str] = field(default_factory=set)
    """What a holder does only once: it would be the same again."""

    def __post_init__(self) -> None:
        self.machine = Machine(INVENTORY)
        self.agent = MemoryAgent(
            INVENTORY,
            report=self.reports.append,
            clock=self.clock,
            timings=Timings(kill_ns=1, retry_ns=1),
            machine=self.machine,
        )
        self.ledger = Ledger(POLICY)
        self.open_office()
        for tenant in (ALICE, BOB):
            self.tell(cmd.AddTenant(tenant=tenant, token_hash=tenant))

    def now(self) -> Now:
        return Now(self.clock.now_ns(), WALL_NS)

    def tell(self, command: cmd.Command) -> None:
        now = self.now()
        outcome = self.ledger.handle(command, now)
        if outcome.events:
            self.journal.append((now, outcome.events))
        self.orders += outcome.orders
        for lease in self.ledger.state.leases.values():
            if lease.epoch is not None:
                self.given.add((lease.id, lease.epoch))

    def open_office(self) -> None:
        self.tell(cmd.OpenOffice(incarnation=1, clock_domain=self.clock.domain))
        self.tell(cmd.NodeUp(inventory=INVENTORY))

    # ---- what can happen ----

    def moves(self) -> Iterator[str]:
        leases = self.ledger.state.leases
        for name in ("a", "b"):
            lease = leases.get(LeaseId(name))
            if lease is None:
                if name == "a" or LeaseId("a") in leases:  # the other way round is the same with names exchanged
                    yield f"ask {name}"
                continue
            if lease.status is LeaseStatus.GRANTED:
                yield f"claim {name}"
            elif lease.status in LIVE_STATES:
                yield from (move for move in (f"renew {name}", f"attach {name}") if move not in self.done)
            if lease.status not in (LeaseStatus.ENDING, LeaseStatus.ENDED):
                yield f"release {name}"
        yield from (f"order {index}" for index in sorted({0, len(self.orders) - 1}) if self.orders)
        if self.reports:
            yield "report 0"
            if not self.lost:
                yield "lose"
        if self.ticks < 4:
            yield "tick"
        if self.office_restarts < 1:
            yield "office"
        if self.agent_restarts < 1:
            yield "agent"

    def do(self, move: str) -> None:
        verb, _, which = move.partition(" ")
        tenant = ALICE if which == "a" else BOB
        self.done.add(move)
        lease = LeaseId(which)
        match verb:
            case "ask":
                want = (Want(kind=Kind.GPU, amount=GIB),)
                request = RequestId(f"r{which}")
                self.tell(cmd.Acquire(tenant=tenant, lease=lease, request_id=request, wants=want, ttl_ns=2 * NS_PER_S))
            case "claim":
                self.tell(cmd.Claim(tenant=tenant, lease=lease))
            case "renew":
                epoch = self.ledger.state.leases[lease].epoch
                assert epoch is not None
                self.tell(cmd.Renew(tenant=tenant, lease=lease, epoch=epoch))
            case "attach":
                self.tell(cmd.Attach(tenant=tenant, lease=lease, request_id=RequestId(f"again {which}")))
            case "release":
                self.tell(cmd.Release(tenant=tenant, lease=lease))
            case "order":
                self.agent.send(self.orders.pop(int(which)))
            case "report":
                self.tell(cmd.AgentReport(report=self.reports.pop(0)))
            case "lose":
                self.lost += 1
                self.reports.pop(0)
            case "tick":
                self.ticks += 1
                self.clock.advance_ns(NS_PER_S)
                self.agent.tick(self.clock.now_ns())
                self.tell(cmd.Tick())
                self.orders += self.ledger.orders_due(self.now())
            case "office":
                self.office_restarts += 1
                self.orders.clear()
                self.reports.clear()
                self.ledger = Ledger(POLICY, self.folded())
                self.open_office()
            case "agent":
                self.agent_restarts += 1
                self.orders.clear()
                self.agent.restart()
                self.tell(cmd.NodeUp(inventory=INVENTORY))
            case _:
                raise ValueError(move)

    def folded(self) -> State:
        state = State.fresh(POLICY)
        for now, events in self.journal:
            for event in events:
                apply(state, event, now)
        return state

    # ---- what must hold ----

    def check(self) -> None:
        check_books(self.ledger.state)
        accepted = [pair for pair in self.given if self.touches(*pair)]
        assert len(accepted) <= 1, f"both {accepted} may touch the device"
        assert not self.machine.overlaps, self.machine.overlaps[0]
        for lease_id, _ in accepted:
            status = self.ledger.state.leases[lease_id].status
            assert status is not LeaseStatus.ENDED, f"{lease_id} has ended, was verified gone, and works on"
            assert status is not LeaseStatus.GRANTED, f"{lease_id} was granted, not claimed, and works"

    def touches(self, lease: LeaseId, epoch: Epoch) -> bool:
        try:
            self.agent.touch(lease, epoch)
        except SubletError:
            return False
        return True

    def key(self) -> object:
        return (
            self.ledger.state.snapshot(),
            tuple(self.agent.fence),
            tuple((d.lease, d.epoch, d.phase, d.due_ns) for d in self.agent.teardowns()),
            self.machine.leftovers(),
            tuple(self.orders),
            tuple(self.reports),
            self.ticks,
            self.office_restarts,
            self.agent_restarts,
        )


HOLDS = ("ask a", "order 0", "report 0", "ask b")
GIVES_BACK = (*HOLDS, "release a")
ROOTS = {
    "from nothing": ((), 5),
    "while one holds and one waits": (HOLDS, 5),
    "while the first is being taken off": (GIVES_BACK, 6),
    "when the second may claim": ((*GIVES_BACK, "order 0", "report 0"), 5),
    "when the first has run out": ((*HOLDS, "tick", "tick"), 7),
}
"""Where the search begins, and how many moves it goes on from there."""


@pytest.mark.slow
@pytest.mark.parametrize("root", ROOTS)
def test_two_holders_never_touch_one_device_whatever_happens(root: str) -> None:
    """All interleavings of the next moves: two holders, the wire, the clock, a restart of office and of agent."""
    path, depth = ROOTS[root]
    assert _search(path, depth) > 1_000, "the search was cut short"


@pytest.mark.parametrize("mutant", ["Z1", "Z16"])
def test_the_search_finds_known_bugs(mutant: str) -> None:
    """An agent that compares no epochs, and a ledger that frees before it was verified, do not get through."""
    with (
        switched_on(mutant),
        pytest.raises(AssertionError, match=r"may touch the device|was verified gone|still there"),
    ):
        _search(HOLDS, 4)


def _search(root: tuple[str, ...], depth: int) -> int:
    """Breadth first, each state once. Returns how many there were; raises with the moves that led to a broken rule."""
    start = SmallWorld()
    for move in root:
        start.do(move)
    copies = Copies()
    frontier = [(root, copies.take(start), tuple(start.moves()))]
    seen: set[int] = set()
    for left in reversed(range(depth)):
        longer: list[tuple[tuple[str, ...], bytes, tuple[str, ...]]] = []
        for path, before, moves in frontier:
            for move in moves:
                after = copies.open(before)
                after.do(move)
                mark = hash(after.key())
                if mark not in seen:
                    seen.add(mark)
                    if left:
                        longer.append(((*path, move), copies.take(after), tuple(after.moves())))
                try:
                    after.check()
                except AssertionError as error:
                    raise AssertionError(f"{error}, after: {', '.join((*path, move))}") from error
        frontier = longer
    return len(seen)


def test_a_copy_goes_on_as_its_world_would() -> None:
    """The search goes on from copies: what comes after each of them is what comes after the same moves from nothing."""
    copies, path = Copies(), (*GIVES_BACK, "order 0", "report 0", "claim b", "tick", "agent", "office", "tick")
    copied = copies.take(SmallWorld())
    for count, move in enumerate(path, 1):
        world = copies.open(copied)
        world.do(move)
        again = SmallWorld()
        for made in path[:count]:
            again.do(made)
        assert (world.key(), world.given, list(world.moves())) == (again.key(), again.given, list(again.moves()))
        copied = copies.take(world)


class Copies:
    """Copies of small worlds. What never changes is shared by all of them: a copy takes a fifth of the time then, and
    far less than all the moves that led there."""

    def __init__(self) -> None:
        self.shared: list[Any] = []
        self._places: dict[int, int] = {}
        self._is_shared: dict[type, bool] = {}

    def take(self, world: SmallWorld) -> bytes:
        """A copy, closed."""
        file = io.BytesIO()
        _Pickler(file, self).dump(world)
        return file.getvalue()

    def open(self, copy: bytes) -> SmallWorld:
        """A world of its own, as it was when the copy was taken."""
        world = _Unpickler(io.BytesIO(copy), self).load()
        assert isinstance(world, SmallWorld)
        return world

    def place(self, value: Any) -> int | None:
        """Where a value is among those that are shared; None of one that belongs to its world."""
        kind = type(value)
        if kind not in self._is_shared:
            self._is_shared[kind] = _never_changes(kind)
        if not self._is_shared[kind]:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.shared)
            self.shared.append(value)
        return self._places[id(value)]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, copies: Copies) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._copies = copies

    def persistent_id(self, value: Any) -> int | None:
        return self._copies.place(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, copies: Copies) -> None:
        super().__init__(file)
        self._copies = copies

    def persistent_load(self, place: int) -> Any:
        return self._copies.shared[place]


def _never_changes(kind: type) -> bool:
    """Of values of this class: classes, functions, members of enums, frozen records."""
    if issubclass(kind, type | FunctionType) or type(kind) is EnumType:
        return True
    if isinstance(kind, StructMeta):
        return kind.__struct_config__.frozen
    return is_dataclass(kind) and kind.__setattr__ is not object.__setattr__  # frozen: it refuses
