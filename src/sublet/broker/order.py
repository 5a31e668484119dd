"""Who goes first among those who wait: tier, then the tenant with the least use in the window, then arrival.

``tenant_key`` is the place where a finer fairness goes: it maps a tenant to something that sorts, and nothing else in
the broker knows what. What a tenant holds at this moment counts as a little use in advance, so that one step which
frees four devices does not give all four to the same tenant.

Backfill: whoever fits may go past whoever does not, so no device stays idle while somebody could use it. The price is
that a large request could wait for ever behind a stream of small ones; so once the head of the line has waited
``gang_patience_ns`` for lack of room, nobody of its own or a lower tier is let past to the kinds it wants, on those
nodes that could have it. The others are not kept idle for somebody whom they cannot help.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from sublet.broker.policy import Policy
from sublet.broker.records import LeaseRecord
from sublet.broker.state import State
from sublet.values import Kind, TenantId, Tier

__all__ = ["TIERS", "InOrder", "kinds_of", "others_wait_for", "position", "tenant_key"]

WAITING_LOOKED_AT = 64
"""Waiting requests of each tenant and tier that are looked at to see whether one of them wants what a lease has."""
TIERS = sorted(Tier, key=lambda tier: tier.rank, reverse=True)

TenantKey = tuple[int, str]


def tenant_key(state: State, tenant: TenantId, now_ns: int, policy: Policy) -> TenantKey:
    """Smaller goes first."""
    used = state.used_milli_ns(tenant, now_ns)
    return used + state.held_millis(tenant) * policy.held_counts_as_ns, tenant


class InOrder:
    """Walks the line once. A tenant whose request was granted on the way is sorted in anew."""

    def __init__(self, state: State, now_ns: int, policy: Policy) -> None:
        self._state, self._now_ns, self._policy = state, now_ns, policy

    def __iter__(self) -> Iterator[LeaseRecord]:
        for tier in TIERS:
            if self._state.queue[tier]:
                yield from self._tier(tier)

    def _tier(self, tier: Tier) -> Iterator[LeaseRecord]:
        lines = {tenant: line.copy() for tenant, line in self._state.queue[tier].items()}
        heads = [(*self._key(tenant), 0) for tenant in lines]
        heapq.heapify(heads)
        while heads:
            _, tenant, index = heapq.heappop(heads)
            line = lines[TenantId(tenant)]
            yield self._state.leases[line[index][1]]
            if index + 1 < len(line):
                heapq.heappush(heads, (*self._key(TenantId(tenant)), index + 1))

    def _key(self, tenant: TenantId) -> TenantKey:
        return tenant_key(self._state, tenant, self._now_ns, self._policy)


def others_wait_for(state: State, lease: LeaseRecord) -> bool:
    """Whether a request of another tenant waits for something of the kinds that this lease has."""
    kinds = {part.kind for part in lease.parts} - {Kind.BLOCK}
    return any(
        kinds & kinds_of(state.leases[waiting])
        for lines in state.queue.values()
        for tenant, line in lines.items()
        if tenant != lease.tenant
        for _, waiting in islice(line, WAITING_LOOKED_AT)
    )


def position(state: State, lease: LeaseRecord, now_ns: int, policy: Policy) -> int:
    """How manieth the lease is in the line: 1 is next."""
    ahead = sum(len(line) for tier in TIERS if tier.rank > lease.tier.rank for line in state.queue[tier].values())
    own_key = tenant_key(state, lease.tenant, now_ns, policy)
    for tenant, line in state.queue[lease.tier].items():
        if tenant == lease.tenant:
            ahead += sum(1 for entry in line if entry < (lease.arrival, lease.id))
        elif tenant_key(state, tenant, now_ns, policy) < own_key:
            ahead += len(line)
    return ahead + 1


def kinds_of(lease: LeaseRecord) -> frozenset[Kind]:
    """What the lease asks for."""
    return frozenset(want.kind for want in lease.wants)
