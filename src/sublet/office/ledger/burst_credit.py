"""Burst credit: device time that a tenant may use beyond the quota of its rolling window.

The credit is so many GPU-seconds at most. It fills at a steady rate, and runs down while leases are held that draw on
it: those that were granted, or renewed, when the quota was used up. Each has to be covered for one time to live, with
all others that draw, so the credit does not end before the lease does. Between two events the credit is a straight line
between zero and its bound, in whole numbers, so it does not matter when or how often it is asked for. The numbers of
the quota are in the events: a fold of the journal needs no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sublet.office.ledger import events as ev
from sublet.office.ledger.records import BurstRecord, LeaseRecord, Quota
from sublet.values import MILLIS_PER_DEVICE, NS_PER_S, TenantId

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from sublet.office.ledger.transaction import Transaction

HOUR: Final = 3600
"""The credit is counted in thousandths of a device times nanoseconds, times this, so that each rate is whole."""


def bound_of(quota: Quota) -> int:
    return (quota.burst_seconds or 0) * MILLIS_PER_DEVICE * NS_PER_S * HOUR


def remaining(record: BurstRecord, now_ns: int) -> int:
    """Of the credit, at this moment or, if nothing happens, at a later one."""
    rate = record.refill * MILLIS_PER_DEVICE - record.drawn * HOUR
    return max(0, min(record.bound, record.credit + rate * (now_ns - record.at_ns)))


def go_by_quota(step: Transaction, tenant: TenantId) -> None:
    """If the tenant has another bound or rate now, they hold from this moment on, whether or not anything draws."""
    known, quota = step.state.books.bursts.get(tenant), step.state.quota_of(tenant)
    if known is not None and (known.bound, known.refill) != (bound_of(quota), quota.burst_refill_seconds or 0):
        step.emit(ev.BurstChanged(tenant=tenant, burst=account(step.state, tenant, step.now.ns)))


def account(state: State, tenant: TenantId, now_ns: int) -> BurstRecord:
    """How its credit stands. Where nothing was drawn yet it is full."""
    quota, known = state.quota_of(tenant), state.books.bursts.get(tenant)
    bound, refill = bound_of(quota), quota.burst_refill_seconds or 0
    if known is None:
        return BurstRecord(at_ns=now_ns, credit=bound, bound=bound, refill=refill)
    return BurstRecord(
        at_ns=now_ns, credit=min(bound, remaining(known, now_ns)), bound=bound, refill=refill, drawn=known.drawn
    )


def covers(state: State, lease: LeaseRecord, millis: int, now_ns: int) -> bool:
    """Whether its tenant has the credit for one more time to live of it."""
    at_ns = covered_from(state, lease, millis, now_ns)
    return at_ns is not None and at_ns <= now_ns


def covered_from(state: State, lease: LeaseRecord, millis: int, now_ns: int) -> int | None:
    """When its tenant has the credit for it, if nothing else happens; None: never. ``millis``: what it is to draw
    beside what is drawn already."""
    found = account(state, lease.tenant, now_ns)
    if not found.bound or not millis + found.drawn:
        return None
    needed = (found.drawn + millis) * lease.ttl_ns * HOUR
    if needed <= found.credit:
        return now_ns
    rate = found.refill * MILLIS_PER_DEVICE - found.drawn * HOUR
    if needed > found.bound or rate <= 0:
        return None
    return now_ns + -(-(needed - found.credit) // rate)


def remaining_seconds(state: State, tenant: TenantId, now_ns: int) -> int:
    """For people."""
    return remaining(account(state, tenant, now_ns), now_ns) // (MILLIS_PER_DEVICE * NS_PER_S * HOUR)
