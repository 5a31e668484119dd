"""The order of the queue: tier, then priority, then the group and in it the tenant with the smallest share, then the
least time held without a break, then arrival.

Priority is what holders pay for where an operator gives it a rate. A request that does not pay has it too after half an
hour in line (``priority_after_ns``), so those that pay go before it for that long and no longer: then shares decide.

A share is decayed use per weight (``fairness``). What is ahead of a request, for its holder's place and for the grant,
is computed here and nowhere else.

Backfill: a request that fits may go past one that does not, so no device stays idle that one could use. The price is
that a large request could wait for ever behind a stream of small ones; so once the head of the line has waited
``gang_patience_ns`` for lack of room, no request of its own or a lower tier is let past to the kinds it wants, on
those nodes that could have it. The others are not kept idle for a request that they cannot serve.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile

from sublet.lease.states import LeaseStatus
from sublet.office.ledger.fairness import Account, share
from sublet.office.ledger.groups import is_within_floor
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord
from sublet.office.ledger.state import Lane, State, Waiting, lane_of, waiting
from sublet.values import GroupId, Kind, LeaseId, TenantId

WAITING_LOOKED_AT = 64
"""Waiting requests of each tenant and tier that are looked at to see whether one of them wants what a lease has."""


class Shares:
    """The keys by which groups and tenants are sorted at one moment; smaller goes first."""

    def __init__(self, state: State, now_ns: int, policy: Policy) -> None:
        self._state, self._now_ns = state, now_ns
        self._capacity, self._decay = state.capacity, state.decay
        self._ahead = policy.held_counts_as_ns * self._decay.weight(now_ns)

    def of_group(self, group: GroupId) -> tuple[int, GroupId]:
        account = self._state.books.group_accounts.get(group)
        return 0 if account is None else self._share(account, self._state.group(group).weight), group

    def of_tenant(self, tenant: TenantId) -> tuple[int, TenantId]:
        account = self._state.books.accounts.get(tenant)
        if account is None:  # as of most who wait in a long line
            return 0, tenant
        known = self._state.tenants.get(tenant)
        return self._share(account, 1 if known is None else known.weight), tenant

    def _share(self, account: Account, weight: int) -> int:
        return share(account, self._capacity, weight, self._ahead, self._now_ns, self._decay)


class InOrder:
    """Walks the line once. A tenant whose request was granted on the way is sorted in anew, and its group as well."""

    def __init__(self, state: State, now_ns: int, policy: Policy) -> None:
        self._state = state
        self._shares = Shares(state, now_ns, policy)

    def __iter__(self) -> Iterator[LeaseRecord]:
        for lane, groups in self._state.queue.items():
            if groups:
                yield from self._lane(lane)

    def _lane(self, lane: Lane) -> Iterator[LeaseRecord]:
        shares = self._shares
        walks = {group: self._group(lines) for group, lines in self._state.queue[lane].items()}
        heads = [shares.of_group(group) for group in walks]
        heapq.heapify(heads)
        while heads:
            group = heads[0][1]
            lease = next(walks[group], None)
            if lease is None:
                heapq.heappop(heads)
                continue
            yield self._state.leases[lease]
            if not self._still_waits(lease):
                heapq.heapreplace(heads, shares.of_group(group))

    def _group(self, lines: Mapping[TenantId, Sequence[Waiting]]) -> Iterator[LeaseId]:
        """The requests of one group, as they were when the walk came to it."""
        shares = self._shares
        lines = {tenant: list(line) for tenant, line in lines.items()}
        heads = [(*shares.of_tenant(tenant), 0) for tenant in lines]
        heapq.heapify(heads)
        while heads:
            share, tenant, index = heads[0]
            lease = lines[tenant][index][-1]
            yield lease
            if index + 1 == len(lines[tenant]):
                heapq.heappop(heads)
            elif self._still_waits(lease):
                heads[0] = share, tenant, index + 1  # its place in the heap is that of its share, which is as it was
            else:
                heapq.heapreplace(heads, (*shares.of_tenant(tenant), index + 1))

    def _still_waits(self, lease: LeaseId) -> bool:
        return self._state.leases[lease].status is LeaseStatus.QUEUED


def others_wait_for(state: State, lease: LeaseRecord) -> bool:
    """Whether a request of another tenant waits for something of the kinds that this lease has, and has a claim to it:
    to what a group has by its floor or by a reservation, only those inside the group have one."""
    own: GroupId | None = state.group_of(lease.tenant)
    if not is_within_floor(state, lease) and state.has_reserved(lease) != own:
        own = None
    kinds = {part.kind for part in lease.parts} - {Kind.BLOCK}
    return any(
        kinds & kinds_of(state.leases[other])
        for groups in state.queue.values()
        for group, lines in groups.items()
        if own is None or group == own
        for tenant, line in lines.items()
        if tenant != lease.tenant
        for *_, other in islice(line, WAITING_LOOKED_AT)
    )


def position(state: State, lease: LeaseRecord, now_ns: int, policy: Policy) -> int:
    """1-based position of the lease in the queue."""
    shares = Shares(state, now_ns, policy)
    own_lane = lane_of(lease)
    before = takewhile(lambda lane: lane != own_lane, state.queue)
    ahead = sum(len(line) for lane in before for lines in state.queue[lane].values() for line in lines.values())
    own_group = state.group_of(lease.tenant)
    own_share, own_key = shares.of_group(own_group), shares.of_tenant(lease.tenant)
    for group, lines in state.queue[own_lane].items():
        if group == own_group:
            for tenant, line in lines.items():
                if tenant == lease.tenant:
                    ahead += sum(entry < waiting(lease) for entry in line)
                elif shares.of_tenant(tenant) < own_key:
                    ahead += len(line)
        elif shares.of_group(group) < own_share:
            ahead += sum(map(len, lines.values()))
    return ahead + 1


def kinds_of(lease: LeaseRecord) -> frozenset[Kind]:
    """What the lease asks for."""
    return frozenset(want.kind for want in lease.wants)
