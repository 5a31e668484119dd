"""Groups, reservations, budgets, and tenants that try to get more than their share, in the pretended world.

An operator puts tenants into groups with weights, floors and ceilings, sets budgets, changes his mind, and reserves
devices for times that begin in the middle of everything else that goes wrong. Of the programs some ask for many whole
devices at once, some for many tiny parts, and some lie about sizes and times. All of it is drawn apart from the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.records import GroupRecord, LeaseRecord, PricesRecord, ReservationRecord, Span, Want
from sublet.values import GIB, BudgetWindow, Exclusivity, GroupId, Kind, LeaseId, ReservationId, Tier

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from tests.simulation.job import Job
    from tests.simulation.world import World

_S: Final = 1_000_000_000
LOOK_NS: Final = 4 * _S
PRICES: Final = PricesRecord(currency="credits", gpu=3600_000_000, models={}, cpu=0, memory=0, block=0)
"""A device costs one credit a second."""
KINDS: Final = ("honest", "hog", "tiny", "liar")
FALSE_AMOUNTS: Final = (-1, 0, 1, 1 << 60)
FALSE_TIMES_NS: Final = (-_S, 0, 1, 1 << 62)


def held_millis(state: State, group: GroupId) -> int:
    """What a group holds of GPUs, in thousandths of one, by the leases themselves."""
    theirs = (one for one in state.leases.values() if one.end is None and state.group_of(one.tenant) == group)
    return sum(part.millis for one in theirs for part in one.parts)


class Sharing:
    """The operator of one seed, and what the programs make of him."""

    def __init__(self, world: World) -> None:
        self._world, self._random = world, random.Random(f"sharing/{world.scenario.mode}/{world.scenario.seed}")
        gpus = sum(one.kind is Kind.GPU for found in world.scenario.inventories for one in found.devices)
        draw = self._random
        self._groups = {
            GroupId(name): GroupRecord(id=GroupId(name), weight=draw.randint(1, 4)) for name in ("lab", "course")
        }
        floored, bounded = draw.sample(sorted(self._groups), 2)
        if draw.random() < 0.6:
            self._groups[floored] = replace(self._groups[floored], floor=draw.randint(1, gpus))
        if draw.random() < 0.6:
            self._groups[bounded] = replace(self._groups[bounded], ceiling=draw.randint(1, gpus))
        self._group_of = {tenant: draw.choice(sorted(self._groups)) for tenant in world.tenants}
        self._poor = draw.choice(world.tenants) if draw.random() < 0.5 else None
        self._kinds = {holder.name: draw.choice(KINDS) for holder in world.holders}
        self._gpus = gpus
        self._made = 0
        self._is_over = False

    def begin(self) -> None:
        """From now on he looks every few seconds."""
        self._look()

    def end(self) -> None:
        """He lifts all that keeps people from what is free."""
        self._is_over = True

    def _look(self) -> None:
        office = self._world.office
        if office.ledger is not None and office.opened and not office.is_syncing:
            for command in self._commands(office.ledger.state):
                office.submit(command, None)
        self._world.push(self._world.now + LOOK_NS, None, self._look)

    def _commands(self, state: State) -> Iterable[cmd.Command]:
        books, draw = state.books, self._random
        if books.prices != PRICES:
            yield cmd.SetPrices(prices=PRICES)
        for group in self._groups.values():
            wanted = replace(group, ceiling=None) if self._is_over else group
            if books.groups.get(group.id) != wanted:
                yield cmd.SetGroup(group=wanted)
        for tenant, group_id in self._group_of.items():
            known = state.tenants.get(tenant)
            if known is not None and known.group != group_id and group_id in books.groups:
                yield cmd.SetTenant(tenant=tenant, group=group_id)
        if self._is_over:
            for budget in books.budgets.values():
                yield cmd.RemoveBudget(tenant=budget.tenant, group=budget.group, per=budget.per)
            for name in books.reservations:
                yield cmd.RemoveReservation(reservation=name)
            return
        if self._poor in state.tenants and not books.budgets:
            yield cmd.SetBudget(tenant=self._poor, per=BudgetWindow.TOTAL, amount=draw.randint(20, 120) * 1_000_000)
        chance = draw.random()
        if chance < 0.2:
            yield self._reserve()
        elif chance < 0.25 and books.reservations:
            yield cmd.RemoveReservation(reservation=draw.choice(sorted(books.reservations)))
        elif chance < 0.3:
            changed = draw.choice(sorted(self._groups))
            self._groups[changed] = replace(self._groups[changed], weight=draw.randint(1, 4))
        elif chance < 0.35 and books.budgets:
            yield cmd.CreditBudget(tenant=self._poor, per=BudgetWindow.TOTAL, amount=20_000_000)

    def _reserve(self) -> cmd.Command:
        draw, wall_ns = self._random, self._world.office_clock.wall_ns()
        self._made += 1
        start_ns = wall_ns + draw.randint(2, 40) * _S
        return cmd.SetReservation(
            reservation=ReservationRecord(
                id=ReservationId(f"r{self._made}"),
                group=draw.choice(sorted(self._groups)),
                gpus=draw.randint(1, self._gpus),
                spans=(Span(start_ns, start_ns + draw.randint(5, 60) * _S),),
            )
        )

    # ---- the programs

    def altered(self, name: str, one: cmd.Acquire, job: Job) -> cmd.Acquire:
        """What a program of this kind asks for in place of an honest request."""
        kind, draw = self._kinds[name], random.Random(f"sharing/{self._world.scenario.seed}/{one.request_id}")
        if kind == "honest" or one.name is not None or one.resume is not None or self._is_over:
            return one
        self._world.coverage.seen[kind] += 1
        if kind == "hog":
            count = draw.randint(2, self._gpus + 1)
            wants = (Want(kind=Kind.GPU, amount=GIB, count=count, exclusivity=Exclusivity.DEVICE),)
            return replace(one, wants=wants, wait_ns=None)
        if kind == "tiny":
            job.rounds, job.busy_ns, job.idle_ns = 1, _S // 2, 0
            return replace(one, wants=(Want(kind=Kind.GPU, amount=GIB // 64, exclusivity=Exclusivity.SHARED),))
        match draw.randint(0, 3):
            case 0:
                return replace(one, wants=(Want(kind=Kind.GPU, amount=draw.choice(FALSE_AMOUNTS)),))
            case 1:
                return replace(one, wants=(Want(kind=Kind.GPU, amount=GIB, count=draw.choice(FALSE_AMOUNTS)),))
            case 2:
                return replace(one, ttl_ns=draw.choice(FALSE_TIMES_NS))
            case _:
                return replace(one, wait_ns=draw.choice(FALSE_TIMES_NS))

    # ---- what is seen

    def decided(self, state: State, events: Iterable[ev.Event]) -> None:
        """The rules of groups and reservations that the books alone do not show."""
        seen = self._world.coverage.seen
        for event in events:
            match event:
                case ev.ReservationBegan() | ev.ReservationLent() | ev.ReservationOver():
                    seen[type(event).__name__] += 1
                case ev.BudgetReached(level=level):
                    seen[f"budget {level}"] += 1
                case ev.Ending(end=end):
                    seen[f"ended {end.reason}"] += 1
                case ev.Noticed(notice=notice) if notice.beneficiary is not None:
                    self._note_preempted(state, event.lease, notice.beneficiary)
                case ev.Granted(lease=lease):
                    self._within_ceiling(state, state.leases[lease])
                    self._on_reserved(state, state.leases[lease])
                case _:
                    pass

    def _note_preempted(self, state: State, victim: LeaseId, by: LeaseId) -> None:
        """So that it is known to have happened between groups, too."""
        one, other = state.leases.get(victim), state.leases.get(by)
        if one is not None and other is not None and state.group_of(one.tenant) != state.group_of(other.tenant):
            self._world.coverage.seen["preempted by another group"] += 1

    def _within_ceiling(self, state: State, lease: LeaseRecord) -> None:
        group = state.group_of(lease.tenant)
        ceiling = state.books.groups[group].ceiling if group in state.books.groups else None
        held = held_millis(state, group)
        if ceiling is not None and held > 1000 * ceiling and any(part.millis for part in lease.parts):
            self._world.watch.fail("G1", f"{lease.id} brings {group} to {held} of {1000 * ceiling} thousandths")

    def _on_reserved(self, state: State, lease: LeaseRecord) -> None:
        for part in lease.parts:
            name = state.reserved_by.get(part.resource)
            if name is None:
                continue
            reserved, group = state.books.reserved[name], state.books.reservations[name].group
            if group == state.group_of(lease.tenant):
                self._world.coverage.seen["granted what is reserved for it"] += 1
            elif reserved.began and not (reserved.lends and lease.tier is Tier.SPOT):
                self._world.watch.fail("G2", f"{lease.id} has {part.resource}, which is reserved for {group} now")
