"""The order of the queue: tier, then priority, then the group and in it the tenant with the smallest share, then the
least time held without a break, then arrival. Tenants of one share, such as those of a course that has just begun, have
one line together, so a request that comes moves none that waits.

Priority is what holders pay for where an operator gives it a rate. A request that does not pay has it too after half an
hour in line (``priority_after_ns``), so those that pay go before it for that long and no longer: then shares decide.

A share is decayed use per weight (``fairness``). What is ahead of a request, for its holder's place and for the grant,
is computed here and nowhere else.

Backfill: a request that fits may go past one that does not, so no device stays idle that one could use. The price is
that a large request could wait for ever behind a stream of small ones; so once the head of the line has waited
``gang_patience_ns`` for lack of room, no request of its own or a lower tier is let past to the kinds it wants, on
those nodes that could have it. The others are not kept idle for a request that they cannot serve. A request
before it in the queue does not pass it, and may take what is free.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile

from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.office.ledger.fairness import SHARED_KINDS, Account, amounts_of, share
from sublet.office.ledger.groups import is_within_floor, wanted_millis
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord
from sublet.office.ledger.state import Lane, State, Waiting, lane_of, waiting
from sublet.values import GroupId, Kind, LeaseId, TenantId

WAITING_LOOKED_AT = 64
"""Waiting requests of each tenant and tier that are looked at to see whether one of them wants what a lease has."""
TURNS_WAITED = 8
"""Once it has waited for so many maximum holds, no holder keeps its lease longer than another for its weight."""


class Shares:
    """The keys by which groups and tenants are sorted at one moment; smaller goes first."""

    def __init__(self, state: State, now_ns: int, policy: Policy) -> None:
        self._state, self._now_ns, self._policy = state, now_ns, policy
        self._capacity, self._decay = state.capacity, state.decay
        self._ahead = policy.held_counts_as_ns * self._decay.weight(now_ns)
        self._at_rest = state.shares_at_rest(self._decay.period(now_ns)[0])

    def of_group(self, group: GroupId) -> tuple[int, GroupId]:
        account = self._state.books.group_accounts.get(group)
        return 0 if account is None else self._share(account, self._state.group(group).weight), group

    def of_tenant(self, tenant: TenantId) -> int:
        found = self._at_rest.get(tenant)
        if found is None:
            account = self._state.books.accounts.get(tenant)
            found = 0 if account is None else self._share(account, self._state.weight_of(tenant))
            if account is None or not (any(account.level) or account.at_ns > self._now_ns):
                self._at_rest[tenant] = found
        return found

    def after_part_of_a_turn(self, account: Account, level: Sequence[int], weight: int) -> int:
        """The share per weight with two fifths of a maximum hold more, in which this much is held.

        Two fifths was found by trying. With a half, the index of one GPU and weights 1 and 3 is 0.87 instead of 0.97
        (docs/groups.md, "How even it is")."""
        ahead = self._policy.max_hold_ns * 2 // 5 * self._decay.weight(self._now_ns)
        used = account.used_at(self._now_ns, self._decay)
        then = Account(at_ns=self._now_ns, level=list(level), used=used)
        return share(then, self._capacity, weight, ahead, self._now_ns, self._decay)

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
        own: dict[TenantId, list[Waiting]] = {}
        heads = [(shares.of_tenant(tenant), line[0], tenant, 0) for tenant, line in lines.items()]
        heapq.heapify(heads)
        while heads:
            share, (*_, lease), tenant, index = heads[0]
            if not index:  # a line changes only as its own requests are granted on the way
                own[tenant] = list(lines[tenant])
            yield lease
            if index + 1 == len(own[tenant]):
                heapq.heappop(heads)
                continue
            if not self._still_waits(lease):
                share = shares.of_tenant(tenant)
            heapq.heapreplace(heads, (share, own[tenant][index + 1], tenant, index + 1))

    def _still_waits(self, lease: LeaseId) -> bool:
        return self._state.leases[lease].status is LeaseStatus.QUEUED


def others_wait_for(state: State, lease: LeaseRecord, now_ns: int, policy: Policy) -> bool:
    """Whether a request of another tenant waits for something of the kinds that this lease has, and has a claim to it,
    once it was held for the maximum: to what a group has by its floor or by a reservation, only those inside the group
    have one."""
    own: GroupId | None = state.group_of(lease.tenant)
    if not is_within_floor(state, lease) and state.has_reserved(lease) != own:
        own = None
    kinds = {part.kind for part in lease.parts} - {Kind.BLOCK}
    return any(
        kinds & kinds_of(state.leases[other])
        and yields_after_maximum(state, lease, state.leases[other], now_ns, policy)
        for groups in state.queue.values()
        for group, lines in groups.items()
        if own is None or group == own
        for tenant, line in lines.items()
        if tenant != lease.tenant
        for *_, other in islice(line, WAITING_LOOKED_AT)
    )


def yields_after_maximum(state: State, lease: LeaseRecord, request: LeaseRecord, now_ns: int, policy: Policy) -> bool:
    """Whether the holder of a lease that was held for the maximum yields to the request.

    If all took turns of one length, those that wait all the time would have the same, whatever their weights. So a
    holder yields to a request of less weight (of its group, or of its tenant within one) once the request would have
    the smaller share per weight if it were granted in the place of the lease and both went on for a part of a turn,
    with all promises kept; or once it has waited for eight turns. Leases of the holder's side that are not renewed any
    more, so that others have their turn, count for the request already.
    """
    if not state.weights_differ or now_ns - request.asked_at_ns >= TURNS_WAITED * policy.max_hold_ns:
        return True
    holder = lease.tenant
    own, others = state.group_of(holder), state.group_of(request.tenant)
    whose: Callable[[TenantId], str]
    if own != others:
        groups, whose = state.books.group_accounts, state.group_of
        accounts = {str(name): groups.get(name) or Account() for name in (own, others)}
        weights = {str(name): state.group(name).weight for name in (own, others)}
    else:
        tenants, whose = state.books.accounts, str
        accounts = {str(name): tenants.get(name) or Account() for name in (holder, request.tenant)}
        weights = {str(name): state.weight_of(name) for name in (holder, request.tenant)}
    mine, theirs = whose(holder), whose(request.tenant)
    if weights[mine] <= weights[theirs]:
        return True
    levels = {name: list(account.level) for name, account in accounts.items()}

    def count(tenant: TenantId, amounts: Sequence[int], sign: int) -> None:
        level = levels.get(whose(tenant))
        if level is not None:
            level[:] = [each + sign * more for each, more in zip(level, amounts, strict=True)]

    for promised in map(state.leases.__getitem__, state.promises):
        count(promised.tenant, amounts_of(promised.promise), +1)
        for victim in map(state.leases.get, promised.victims):
            if victim is not None and victim.status in LIVE_STATES:
                count(victim.tenant, amounts_of(victim.parts), -1)
    for other in map(state.leases.__getitem__, state.yielding):
        if other is not lease and whose(other.tenant) == mine and other.status is LeaseStatus.ACTIVE:
            count(holder, amounts_of(other.parts), -1)
            count(request.tenant, amounts_of(other.parts), +1)
    count(holder, amounts_of(lease.parts), -1)
    count(request.tenant, _wanted_amounts(state, request), +1)
    shares = Shares(state, now_ns, policy)
    after = {name: shares.after_part_of_a_turn(accounts[name], levels[name], weights[name]) for name in (mine, theirs)}
    return after[theirs] < after[mine]


def _wanted_amounts(state: State, request: LeaseRecord) -> list[int]:
    """What it would hold, as in an account."""
    found = [wanted_millis(state, request.wants), 0, 0]
    for want in request.wants:
        if want.kind in (Kind.CPU, Kind.MEMORY):
            found[SHARED_KINDS.index(want.kind)] += want.amount
    return found


def has_smaller_share(state: State, one: TenantId, other: TenantId, now_ns: int, policy: Policy) -> bool:
    """Whether the first tenant has used less per weight, by its group or, within one, by itself."""
    shares, own, others = Shares(state, now_ns, policy), state.group_of(one), state.group_of(other)
    if own != others:
        return shares.of_group(own)[0] < shares.of_group(others)[0]
    return shares.of_tenant(one) < shares.of_tenant(other)


def share_crosses_ns(
    state: State, one: TenantId, other: TenantId, now_ns: int, until_ns: int, policy: Policy
) -> int | None:
    """From when on the first tenant, which has used less, no longer has, if both hold what they hold; to the interval
    between two looks. None: not before ``until_ns``."""
    if has_smaller_share(state, one, other, until_ns, policy):
        return None
    low_ns, high_ns = now_ns, until_ns
    while high_ns - low_ns > policy.replan_every_ns:
        middle_ns = (low_ns + high_ns) // 2
        if has_smaller_share(state, one, other, middle_ns, policy):
            low_ns = middle_ns
        else:
            high_ns = middle_ns
    return high_ns


def goes_before(state: State, lease: LeaseRecord, other: LeaseRecord, now_ns: int, policy: Policy) -> bool:
    """Whether a request, waiting or just come, stands before another one in the queue."""
    shares = Shares(state, now_ns, policy)

    def key(one: LeaseRecord) -> tuple[object, ...]:
        tier, has_priority = lane_of(one)
        group = shares.of_group(state.group_of(one.tenant))
        return -tier.rank, not has_priority, *group, shares.of_tenant(one.tenant), *waiting(one)

    return key(lease) < key(other)


def position(state: State, lease: LeaseRecord, now_ns: int, policy: Policy) -> int:
    """1-based position of the lease in the queue."""
    shares = Shares(state, now_ns, policy)
    own_lane = lane_of(lease)
    before = takewhile(lambda lane: lane != own_lane, state.queue)
    ahead = sum(len(line) for lane in before for lines in state.queue[lane].values() for line in lines.values())
    own_group = state.group_of(lease.tenant)
    own_key, own_share, own = shares.of_group(own_group), shares.of_tenant(lease.tenant), waiting(lease)
    for group, lines in state.queue[own_lane].items():
        if group == own_group:
            for tenant, line in lines.items():
                share = shares.of_tenant(tenant)
                if share < own_share:
                    ahead += len(line)
                elif share == own_share:
                    ahead += bisect_left(line, own)
        elif shares.of_group(group) < own_key:
            ahead += sum(map(len, lines.values()))
    return ahead + 1


def kinds_of(lease: LeaseRecord) -> frozenset[Kind]:
    """What the lease asks for."""
    return frozenset(want.kind for want in lease.wants)
