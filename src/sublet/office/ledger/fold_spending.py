"""Folds what budgets pay for, from the same facts as bills (``history``).

While there are no budgets nothing is noted here; the first of them finds what is held in the books.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sublet.office.ledger import events as ev
from sublet.office.ledger.records import (
    HOLDING_STATES,
    KEPT_STATES,
    BudgetRecord,
    HeldRecord,
    LeaseRecord,
    Now,
    SpentRecord,
    VolumeRecord,
)
from sublet.office.ledger.spending import account_of, accounts_of, add_past, rates_of, units_of
from sublet.values import GroupId, Kind, LeaseId, TenantId
from sublet.wire.orders import Part

if TYPE_CHECKING:
    from sublet.office.ledger.state import State

CREDITS_REMEMBERED: Final = 1000
"""Of each budget: a credit that is sent again after so many others counts again."""


def account(state: State, event: ev.Event, now: Now) -> None:
    """Take one fact into what is spent; it is in the books already."""
    note = _NOTES.get(type(event))
    if note is not None:
        note(state, event, now)


# ---- prices and budgets ----


def prices_set(state: State, event: ev.PricesSet, now: Now) -> None:
    state.books.prices, state.rates = event.prices, rates_of(event.prices)
    state.budgets_changed.update(state.books.budgets)


def budget_set(state: State, event: ev.BudgetSet, now: Now) -> None:
    books, budget = state.books, event.budget
    if not books.budgets:
        books.held = dict(_held_now(state))
    books.budgets[budget.id] = budget
    books.spent.setdefault(budget.id, SpentRecord(since_ns=now.ns))
    state.budgets_changed.add(budget.id)
    state.index_budgets()


def budget_credited(state: State, event: ev.BudgetCredited, now: Now) -> None:
    known = state.books.budgets[event.budget]
    added = {**known.credits, event.window: known.credits.get(event.window, 0) + event.amount}
    credited = {**known.credited, event.request_id: event.amount} if event.request_id else known.credited
    while len(credited) > CREDITS_REMEMBERED:
        del credited[next(iter(credited))]
    state.books.budgets[event.budget] = msgspec.structs.replace(known, credits=added, credited=credited)
    state.budgets_changed.add(event.budget)
    state.index_budgets()


def budget_reached(state: State, event: ev.BudgetReached, now: Now) -> None:
    spent = state.books.spent[event.budget]
    spent.window, spent.level = event.window, event.level


def budget_removed(state: State, event: ev.BudgetRemoved, now: Now) -> None:
    _forget(state, lambda budget: budget.id == event.budget)


def tenant_gone(state: State, tenant: TenantId) -> None:
    """Its budgets go with it."""
    _forget(state, lambda budget: budget.tenant == tenant)


def group_gone(state: State, group: GroupId) -> None:
    """Its budgets go with it."""
    _forget(state, lambda budget: budget.group == group)


def _forget(state: State, which: Callable[[BudgetRecord], bool]) -> None:
    books = state.books
    for budget in [budget for budget in books.budgets.values() if which(budget)]:
        del books.budgets[budget.id], books.spent[budget.id]
        state.budgets_changed.add(budget.id)
    if not books.budgets:
        books.held = {}
    state.index_budgets()


def shift_held(state: State, shift_ns: int) -> None:
    """The clock is another one."""
    for name, held in state.books.held.items():
        state.books.held[name] = msgspec.structs.replace(held, start_ns=held.start_ns + shift_ns)
    for spent in state.books.spent.values():
        if spent.since_ns is not None:
            spent.since_ns += shift_ns
    state.budgets_changed.update(state.books.budgets)
    state.index_budgets()


# ---- what is held ----


def _granted(state: State, event: ev.Granted, now: Now) -> None:
    _start(state, event.lease, _of_lease(state, state.leases[event.lease], now))


def _ungranted(state: State, event: ev.Ungranted, now: Now) -> None:
    _stop(state, event.lease, now.ns)


def _ending(state: State, event: ev.Ending, now: Now) -> None:
    _stop(state, event.lease, min(event.end.at_ns, now.ns))


def _claimed(state: State, event: ev.Claimed, now: Now) -> None:
    if state.books.held[event.lease].units:
        _again(state, event, now)
    else:  # it was an offer
        _stop(state, event.lease, now.ns)
        _start(state, event.lease, _of_lease(state, state.leases[event.lease], now))


def _again(state: State, event: ev.Claimed | ev.Spared | ev.Queued, now: Now) -> None:
    """What it costs is the same; but it may be one that a used-up budget does not allow."""
    lease = event.lease if isinstance(event, ev.Queued) else state.leases[event.lease]
    _changed(state, account_of(lease.tenant, None), account_of(None, lease.group or state.group_of(lease.tenant)))


def _kept(state: State, event: ev.VolumeKept | ev.VolumeFound, now: Now) -> None:
    name = volume_name(event.tenant, event.name)
    if isinstance(event, ev.VolumeFound):
        _stop(state, name, now.ns)
    if name not in state.books.held:
        part = Part(resource=event.resource, kind=Kind.BLOCK, amount=event.size)
        held = HeldRecord(
            tenant=event.tenant,
            group=state.group_of(event.tenant),
            start_ns=now.ns,
            wall_ns=now.wall_ns,
            units=units_of((part,), {}),
        )
        _start(state, name, held)


def _not_kept(state: State, event: ev.VolumeTaken | ev.VolumeLost | ev.VolumeRemoved, now: Now) -> None:
    _stop(state, volume_name(event.tenant, event.name), now.ns)


def _start(state: State, name: LeaseId, held: HeldRecord) -> None:
    state.books.held[name] = held
    for whose in accounts_of(held):
        state.held_on.setdefault(whose, {})[name] = held
    _changed(state, *accounts_of(held))


def _stop(state: State, name: LeaseId, at_ns: int) -> None:
    held = state.books.held.pop(name, None)
    if held is None:
        return
    for whose in accounts_of(held):
        del state.held_on[whose][name]
        for budget in state.budgets_of.get(whose, ()):
            add_past(budget, state.books.spent[budget.id], held, at_ns)
    _changed(state, *accounts_of(held))


def _changed(state: State, *accounts: str) -> None:
    for whose in accounts:
        state.budgets_changed.update(budget.id for budget in state.budgets_of.get(whose, ()))


def volume_name(tenant: TenantId, name: str) -> LeaseId:
    """Under what a volume that no lease has stands among what is held: no lease is called so."""
    return LeaseId(f"volume/{tenant}/{name}")


def _held_now(state: State) -> list[tuple[LeaseId, HeldRecord]]:
    leases = [lease for lease in state.leases.values() if lease.status in HOLDING_STATES]
    volumes = [volume for volume in state.volumes.values() if volume.state in KEPT_STATES]
    found = [(lease.id, _of_lease(state, lease, None)) for lease in leases]
    return found + [(volume_name(one.tenant, one.name), _of_volume(state, one)) for one in volumes]


def _of_lease(state: State, lease: LeaseRecord, now: Now | None) -> HeldRecord:
    """As the grant had it, or the claim of an offer, which is ``now``, or was. An offer costs nothing until then. Of a
    lease that is older than the note of its place on the wall clock, that is taken from the request."""
    start_ns = lease.granted_at_ns if now is None else now.ns
    wall_ns = lease.granted_wall_ns if now is None else now.wall_ns
    assert start_ns is not None, f"{lease.id} is {lease.status} and was never granted"
    return HeldRecord(
        tenant=lease.tenant,
        group=lease.group or state.group_of(lease.tenant),
        start_ns=start_ns,
        wall_ns=lease.asked_wall_ns + start_ns - lease.asked_at_ns if wall_ns is None else wall_ns,
        units={}
        if lease.offered
        else units_of(
            lease.parts,
            {part.resource: state.resources[part.resource].device.model for part in lease.parts},
            pays_priority=lease.pays_priority,
        ),
    )


def _of_volume(state: State, volume: VolumeRecord) -> HeldRecord:
    assert volume.kept_ns is not None, f"{volume.key} is kept since no moment"
    return HeldRecord(
        tenant=volume.tenant,
        group=volume.group or state.group_of(volume.tenant),
        start_ns=volume.kept_ns,
        wall_ns=volume.made_wall_ns if volume.kept_wall_ns is None else volume.kept_wall_ns,
        units={str(Kind.BLOCK): volume.size},
    )


_NOTES: Final[dict[type, Callable[[State, Any, Now], None]]] = {
    ev.Queued: _again,
    ev.Claimed: _claimed,
    ev.Spared: _again,
    ev.Granted: _granted,
    ev.Ungranted: _ungranted,
    ev.Ending: _ending,
    ev.VolumeKept: _kept,
    ev.VolumeFound: _kept,
    ev.VolumeTaken: _not_kept,
    ev.VolumeLost: _not_kept,
    ev.VolumeRemoved: _not_kept,
}
