"""Estimates when a request is granted, if holders leave when due and those ahead use their time once.

An estimate is for a person who decides whether to wait. It costs little however full the office is, and where it cannot
be told for little, it is not told.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice

from sublet.lease.states import SliceState
from sublet.office.ledger.admission import own_limit
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.groups import only_within_ceiling
from sublet.office.ledger.placement import is_model
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.promised_parts import matches
from sublet.office.ledger.queue_order import position
from sublet.office.ledger.records import LOCAL_TENANT, LeaseRecord, Now, Want
from sublet.office.ledger.replacement import millis_beside
from sublet.office.ledger.state import LANES, State, lane_of
from sublet.office.ledger.volume_placement import why_not_yet
from sublet.values import Exclusivity, Kind, TenantId

AHEAD_MAX = 1_000
"""Places in the line beyond which no estimate is made."""
SLICES_MAX = 256
"""Slices of one resource that are looked at."""


def estimate_ns(lease: LeaseRecord, state: State, now: Now, policy: Policy, place: int | None = None) -> int | None:
    """For a request in the line. ``place``: where it stands, if that is known."""
    if own_limit(state, lease, now) is not None:
        return None
    if why_not_yet(state, lease) is not None:
        return None
    if lease.promise:
        times = [leaves_at(state.leases[v], now, policy) for v in lease.victims if v in state.leases]
        return max((at - now.ns for at in times), default=0)
    place = position(state, lease, now.ns, policy) if place is None else place
    return _estimate(lease, place - 1, state, now, policy)


def estimate_if_queued(lease: LeaseRecord, state: State, now: Now, policy: Policy) -> int | None:
    """For a request that is not in the line: as if it were the last of its lane."""
    lanes = LANES[: LANES.index(lane_of(lease)) + 1]
    ahead = sum(len(line) for lane in lanes for lines in state.queue[lane].values() for line in lines.values())
    return _estimate(lease, ahead, state, now, policy)


def _estimate(lease: LeaseRecord, ahead: int, state: State, now: Now, policy: Policy) -> int | None:
    if ahead > AHEAD_MAX:
        return None
    rooms = only_within_ceiling(state, lease, state.rooms_by_node, millis_beside(state, lease))
    nodes = [node_rooms for node, node_rooms in rooms.items() if matches(state, node, lease.selector)]
    times = [_free_at(lease, node_rooms, state, now, policy) for node_rooms in nodes]  # of each node, by want
    alone = [_on_node(lease, free_at) for free_at in times]
    soonest = min((at for at in alone if at is not None), default=None)
    if soonest is None:
        return None
    in_turn = _after(lease, ahead, [at for first, *_ in times for at in first])
    return max(0, soonest - now.ns, in_turn - now.ns)


def _free_at(lease: LeaseRecord, node_rooms: Iterable[Room], state: State, now: Now, policy: Policy) -> list[list[int]]:
    """For each of its wants, when the rooms of a node are free for it; without those of which that cannot be told."""
    rooms = list(node_rooms)
    return [
        sorted(at for room in rooms if (at := _room_free_at(want, lease.tenant, room, state, now, policy)) is not None)
        for want in lease.wants
    ]


def _on_node(lease: LeaseRecord, free_at: list[list[int]]) -> int | None:
    """When all its wants are free on this node, if no request were ahead; None if that cannot be told."""
    if any(len(times) < want.count for want, times in zip(lease.wants, free_at, strict=True)):
        return None
    return max(times[want.count - 1] for want, times in zip(lease.wants, free_at, strict=True))


def _after(lease: LeaseRecord, ahead: int, free_at: list[int]) -> int:
    """List scheduling: each turn takes the rooms that come free first, and gives them back one time to live later.
    ``free_at``: when they are free for the first of its wants."""
    want = lease.wants[0]
    heapq.heapify(free_at)
    if want.count == 1:  # a long line is not walked turn by turn
        while ahead and max(free_at) - free_at[0] > lease.ttl_ns:
            heapq.heapreplace(free_at, free_at[0] + lease.ttl_ns)
            ahead -= 1
        rounds, ahead = divmod(ahead, len(free_at))  # from here on each room has its turn once in every round
        free_at = [at + rounds * lease.ttl_ns for at in free_at]
    for _ in range(ahead):
        at = max(heapq.heappop(free_at) for _ in range(want.count))
        for _ in range(want.count):
            heapq.heappush(free_at, at + lease.ttl_ns)
    return max(heapq.heappop(free_at) for _ in range(want.count))


def _room_free_at(want: Want, tenant: TenantId, room: Room, state: State, now: Now, policy: Policy) -> int | None:
    """When this much of the room is free; None if it never is, or that cannot be told from those looked at."""
    if room.kind is not want.kind or room.capacity < want.amount or (want.model and not is_model(want.model, room)):
        return None
    gpu, shared = want.kind is Kind.GPU, want.exclusivity is Exclusivity.SHARED
    if gpu and (room.quarantined or (room.walled and tenant != LOCAL_TENANT)):
        return None
    if gpu and not shared and room.blocked:
        return None  # when strangers leave is not known
    amount = room.capacity - room.foreign if gpu and not shared else want.amount
    kept_ns = _reserved_until(room, tenant, state, now) if state.reserved_by else now.ns
    if room.free >= amount and not (gpu and room.slices):
        return kept_ns
    slices = islice(state.resources[room.resource].slices.values(), SLICES_MAX)
    ours = [p for p in slices if p.lease in state.leases and not p.volume]  # how long a volume stays is not known
    in_use = [p for p in ours if p.state is not SliceState.QUARANTINED]
    leaving = sorted((leaves_at(state.leases[p.lease], now, policy), p.part.amount) for p in in_use)
    strangers = [] if policy.share_across_tenants or not gpu else [p.lease for p in in_use if p.tenant != tenant]
    soonest = max((leaves_at(state.leases[lease], now, policy) for lease in strangers), default=now.ns)
    soonest = max(soonest, kept_ns)
    free = room.free
    for at, left in [(now.ns, 0), *leaving]:
        free += left
        if free >= amount:
            return max(at, soonest)
    return None


def _reserved_until(room: Room, tenant: TenantId, state: State, now: Now) -> int:
    """When a device that is kept for another group is open to this tenant."""
    reservation = state.reserved_by.get(room.resource)
    if reservation is None or state.reserved_group(room.resource) == state.group_of(tenant):
        return now.ns
    return now.ns + max(0, state.books.reserved[reservation].span.end_ns - now.wall_ns)


def leaves_at(lease: LeaseRecord, now: Now, policy: Policy) -> int:
    """When what it has is free, at the latest, unless it is renewed."""
    due = lease.deadline_ns or lease.claim_by_ns or now.ns
    if lease.notice is not None:
        due = min(due, lease.notice.take_at_ns)
    if lease.end is not None:
        due = lease.end.at_ns
    return max(now.ns, due) + policy.grace_ns(lease.ttl_ns)
