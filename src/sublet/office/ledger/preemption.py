"""Chooses victims of preemption, and argues why there are no cycles.

**Standing.** Every lease that could be taken has a standing, every waiting request has one too, and a request may only
take from leases of *lower* standing:

=====================================  =======================================
a request                              its tier: spot 1, batch 2, interactive 3
an idle holder (see below)             0, whatever its tier
held beyond the maximum, others wait   one below its tier
a further turn (see below), newcomers  one below its tier
spot                                   1
batch, after its minimum run           2
interactive, batch within minimum run  cannot be taken
=====================================  =======================================

**Potential.** Let every waiting request that would fit weigh ``2**(20 × standing)``. Suppose the worst: every victim
asks again at once, with the standing it was taken at. Then a preemption removes one weight and adds at most a million
smaller ones, so the sum falls strictly, and no sequence of preemptions in one instant returns to where it began.
Time can raise a standing again (a new lease of the same tenant is neither idle nor over-held), but only after it ran
for its minimum or maximum: then it is taking turns, which is what is wanted. The cool-down keeps a victim's tenant from
taking its device straight back from the tenant that got it.

**Floors.** A request inside the floor of its group may also take from other groups, whatever the tiers, what they hold
above their own floor, after the minimum run. And from a group that would have less than its floor without it nothing is
taken but what is idle. So the potential has a first component that counts before the sum above: how much the groups
lack of their floors, of what they ask for. A preemption by floor lowers it by what is asked and leaves the victims'
groups at or above their floors; every other leaves it as it is, or lowers it.

**Reservations.** What a reservation keeps for a group is not seen by requests of others, so it is not taken by them;
once it lends, requests of tier spot see it, and take from the group only what is idle there. A lease of another group
on such a device has standing 0 for the group's own requests, whatever its tier. So the potential has a component before
all others: how many leases of others are on the devices of groups that ask for them. A preemption for the group lowers
it, and none raises it.

**Weights.** Beyond the maximum a holder of more weight keeps its lease until its share per weight is the larger one
(``queue_order.yields_after_maximum``). That is a reason less to take a lease, so the potential falls as before.

**Further turns.** A holder that is taken after the maximum and goes on has had its turn: what it holds from then on is
taken, after a least run, for a request whose holder has not had the maximum yet. Otherwise holders that take turns
would be within their maximum all the time, and a newcomer would wait for one of them to end. A holder that was
preempted so cannot preempt back by this rule, since it is on a further turn and the newcomer is not.

**Pauses.** A further turn would take the device of a newcomer in each pause between two cells, and the next cell would
wait until that turn has had its least run. So for a while a request for a further turn takes no idle lease of a holder
that has not had its maximum and has used less, unless it is inside a floor, or has waited for the maximum hold itself.
That is a reason less to take a lease, so the potential falls as before.

**A wait before further turns.** A newcomer preempts a holder that has had the maximum. If that one asked again and
preempted the next such holder at once, one newcomer would interrupt many long cells, one after the other, and the next
newcomer would find further turns in their least run. So a request for a further turn preempts no lease of its own or a
higher tier in its first minutes if the holder has used less, unless it is inside a floor or its group has the device
reserved. That is a reason less to take a lease, so the potential falls as before.

**Idle.** A holder counts as idle only after a rest that is as long as its guests' last move took (``Policy``). A new
lease is not idle, so a device that two holders share is busy, or at rest, for at least as long as it changes hands. For
that reason the cool-down does not protect an idle holder.

Eviction and admission are one step: the same command notices the victims and *promises* their parts to the request.
No other request is let into a promised part, so the device cannot go to a third party (or back to the victim).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

from sublet.lazy_dataclass import dataclass
from sublet.lease.states import LeaseStatus, SliceState
from sublet.lease_end import EndReason
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.groups import Floors, gpu_millis
from sublet.office.ledger.placement import RoomsByNode, fit, fit_on_node
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import has_smaller_share, kinds_of, share_crosses_ns, yields_after_maximum
from sublet.office.ledger.records import LeaseRecord, Want
from sublet.office.ledger.replacement import held_since_ns
from sublet.office.ledger.state import State
from sublet.values import Kind, LeaseId, NodeId, ResourceId, Tier
from sublet.wire.orders import Part

VICTIMS_MAX = 64
"""Leases that one request may take on one node."""
SLICES_MAX = 1024
"""Slices of one resource that are looked at in search of them."""


@dataclass(frozen=True, slots=True)
class Victim:
    lease: LeaseRecord
    standing: int
    reason: EndReason
    ran_ns: int
    is_idle: bool = False
    is_lent: bool = False
    """Its device is reserved for the group of the request."""
    by_floor: bool = False
    """It may be taken because the request is inside the floor of its group, whatever the tiers."""


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    node: NodeId
    parts: tuple[Part, ...]
    victims: tuple[Victim, ...]

    @property
    def potential_lost(self) -> int:
        """What the victims weigh if all of them ask again."""
        return sum(weight(v.standing) for v in self.victims if not v.by_floor)


def weight(standing: int) -> int:
    """The share of one request or lease in the potential."""
    return 1 << 20 * standing


def standing_of_request(tier: Tier) -> int:
    return tier.rank + 1


def victim(
    lease: LeaseRecord, request: LeaseRecord, state: State, now_ns: int, policy: Policy, *, inside_floor: bool = False
) -> Victim | None:
    """The lease as a victim of the request, or None if it may not be taken for it. Whether its group may lose it at all
    is seen where several victims are chosen together."""
    if lease.status is not LeaseStatus.ACTIVE or lease.claimed_at_ns is None:
        return None
    if lease.id == request.replaces:  # its parts count as free already
        return None
    if any(part.kind is Kind.BLOCK for part in lease.parts):  # a volume keeps its bytes, so nothing would come free
        return None
    is_idle = is_at_rest(lease, state, now_ns, policy)
    ran_ns = now_ns - held_since_ns(lease)
    reserved, own, other = state.has_reserved(lease), state.group_of(request.tenant), state.group_of(lease.tenant)
    if reserved == own != other:
        return Victim(lease, 0, EndReason.PREEMPTED, ran_ns, is_idle, is_lent=True)
    if not inside_floor and asks_too_soon(lease, request, state, now_ns, policy):
        return None
    if is_idle and not inside_floor and is_between_cells(lease, request, state, now_ns, policy):
        is_idle = False
    if reserved == other != own and not is_idle:
        return None
    if not is_idle and state.is_cooling(request.tenant, lease.tenant, now_ns):
        return None
    standing, reason = standing_of_request(lease.tier), EndReason.PREEMPTED
    if is_idle:
        standing = 0
    elif lease.tenant != request.tenant and must_yield_turn(lease, request, state, now_ns, policy):
        standing, reason = standing - 1, EndReason.FAIR_SHARE
    elif lease.tier is not Tier.SPOT and ran_ns < policy.min_run_batch_ns:
        return None
    elif lease.tier is Tier.INTERACTIVE:
        standing = standing_of_request(request.tier)
    if standing < standing_of_request(request.tier):
        return Victim(lease, standing, reason, ran_ns, is_idle)
    if inside_floor and own != other:
        return Victim(lease, standing, EndReason.PREEMPTED, ran_ns, by_floor=True)
    return None


def is_between_cells(lease: LeaseRecord, request: LeaseRecord, state: State, now_ns: int, policy: Policy) -> bool:
    """Whether the holder of an idle lease keeps it from this request for its next cell. Only one that has used less
    does: otherwise a tenant would have more if it released its lease often, and so was always a newcomer."""
    return (
        lease.idle_since_ns is not None
        and now_ns < lease.idle_since_ns + policy.pause_ns
        and not is_further_turn(lease, policy)
        and lets_pauses_pass(request, now_ns, policy)
        and has_smaller_share(state, lease.tenant, request.tenant, now_ns, policy)
    )


def lets_pauses_pass(request: LeaseRecord, now_ns: int, policy: Policy) -> bool:
    """Whether it is for a further turn, which takes no lease in a pause between two cells. What is granted to spot is
    taken back at short notice, so spot need not wait."""
    is_long = now_ns - request.asked_at_ns >= policy.max_hold_ns
    return is_further_turn(request, policy) and request.tier is not Tier.SPOT and not is_long


def asks_too_soon(lease: LeaseRecord, request: LeaseRecord, state: State, now_ns: int, policy: Policy) -> bool:
    """Whether the request, for a further turn, has yet to wait before it preempts this lease. Only one whose tenant had
    used less is kept: as the request came, or as of what either tenant was granted or gave back since."""
    return (
        lease.tier.rank >= request.tier.rank
        and now_ns < preempts_from_ns(request, policy)
        and has_smaller_share(state, lease.tenant, request.tenant, request.asked_at_ns, policy)
    )


def preempts_from_ns(request: LeaseRecord, policy: Policy) -> int:
    """From when on it may preempt leases of its own or a higher tier. What is granted to spot is taken back at short
    notice, so spot need not wait."""
    waits = is_further_turn(request, policy) and request.tier is not Tier.SPOT
    return request.asked_at_ns + policy.pause_ns if waits else request.asked_at_ns


def kept_in_pause_until_ns(
    lease: LeaseRecord, request: LeaseRecord, state: State, now_ns: int, policy: Policy
) -> int | None:
    """When the request may take this lease in a pause between two cells because its holder has no longer used less.
    None: not before the pause is over, or it is not kept in this way."""
    if lease.idle_since_ns is None or not is_between_cells(lease, request, state, now_ns, policy):
        return None
    until_ns = min(lease.idle_since_ns + policy.pause_ns, request.asked_at_ns + policy.max_hold_ns)
    return share_crosses_ns(state, lease.tenant, request.tenant, now_ns, until_ns, policy)


class Takeable(NamedTuple):
    """The leases that could be victims of any request at one moment: of newcomers, or of those for further turns."""

    leases: frozenset[LeaseId] | None
    """None: all may be. Floors and reservations let requests take what no other request may."""
    are_at_rest: bool
    """All of them are idle, so that whose request it is makes no difference, but for further turns."""
    devices: Mapping[NodeId, Mapping[Kind, int]] = MappingProxyType({})
    """Of each node they are on, how many devices of each kind have anything that is theirs, or free, or leaving."""

    @property
    def are_some(self) -> bool:
        return self.leases is None or bool(self.leases)

    def are_on(self, node: NodeId) -> bool:
        """Whether any of them is on this node."""
        return self.leases is None or node in self.devices

    def may_suffice(self, wants: Sequence[Want]) -> bool:
        """Whether any node has enough devices for the wants once all of them are gone."""
        return self.leases is None or any(
            all(count.get(want.kind, 0) >= want.count for want in wants) for count in self.devices.values()
        )


ALL: Final = Takeable(None, are_at_rest=False)
"""Any lease could be a victim."""


class TakeableBy(NamedTuple):
    """The same by who requests. A newcomer may take all that a request for a further turn may, and more."""

    newcomers: Takeable = ALL
    further_turns: Takeable = ALL

    def request(self, request: LeaseRecord, policy: Policy) -> Takeable:
        """Of this request."""
        return self.further_turns if is_further_turn(request, policy) else self.newcomers


def takeable(state: State, now_ns: int, policy: Policy) -> TakeableBy:
    """Found once for all requests that look for victims at this moment: most leases cannot be taken for any of them."""
    if state.reserved_by or state.has_floors:
        return TakeableBy()
    leases = [state.leases[lease] for on_node in state.on_node.values() for lease in on_node]
    found = [lease for lease in leases if _may_be_taken(lease, state, now_ns, policy)]
    by_further_turns = [lease for lease in found if not _is_for_newcomers(lease, state, now_ns, policy)]
    return TakeableBy(
        _takeable_among(found, state, now_ns, policy), _takeable_among(by_further_turns, state, now_ns, policy)
    )


def _takeable_among(leases: Sequence[LeaseRecord], state: State, now_ns: int, policy: Policy) -> Takeable:
    theirs = {part.resource for lease in leases for part in lease.parts}
    devices: dict[NodeId, dict[Kind, int]] = {lease.node: {} for lease in leases if lease.node is not None}
    for node, count in devices.items():
        for room in state.rooms_by_node.get(node, ()):
            if room.free > 0 or room.leaving or room.resource in theirs:
                count[room.kind] = count.get(room.kind, 0) + 1
    are_at_rest = all(is_at_rest(lease, state, now_ns, policy) for lease in leases)
    return Takeable(frozenset(lease.id for lease in leases), are_at_rest, devices)


def takeable_at_once(lease: LeaseRecord, state: State, now_ns: int, policy: Policy) -> bool:
    """Whether a lease that has just been claimed could be the victim of any request."""
    return bool(state.reserved_by) or _may_be_taken(lease, state, now_ns, policy)


def _may_be_taken(lease: LeaseRecord, state: State, now_ns: int, policy: Policy) -> bool:
    if lease.status is not LeaseStatus.ACTIVE or lease.claimed_at_ns is None:
        return False
    if is_further_turn(lease, policy) and now_ns - held_since_ns(lease) >= least_turn_ns(lease, policy):
        return True
    return not _is_for_newcomers(lease, state, now_ns, policy)


def _is_for_newcomers(lease: LeaseRecord, state: State, now_ns: int, policy: Policy) -> bool:
    """Whether nothing but a further turn makes it one that may be taken."""
    ran_ns = now_ns - held_since_ns(lease)
    if lease.tier is Tier.SPOT or ran_ns >= policy.max_hold_ns or is_at_rest(lease, state, now_ns, policy):
        return False
    return lease.tier is not Tier.BATCH or ran_ns < policy.min_run_batch_ns


def must_yield_turn(lease: LeaseRecord, request: LeaseRecord, state: State, now_ns: int, policy: Policy) -> bool:
    """Whether its holder has held for the maximum, with this lease, and yields to this request; or with what it goes on
    with, in which case it yields only to requests that have not, and after a least run."""
    ran_ns = now_ns - held_since_ns(lease)
    if ran_ns >= policy.max_hold_ns and yields_after_maximum(state, lease, request, now_ns, policy):
        return True
    is_after_its_turn = is_further_turn(lease, policy) and ran_ns >= least_turn_ns(lease, policy)
    return is_after_its_turn and not is_further_turn(request, policy)


def is_further_turn(lease: LeaseRecord, policy: Policy) -> bool:
    """Whether its holder goes on with what it has held for the maximum already."""
    return lease.attained_ns >= policy.max_hold_ns


def least_turn_ns(lease: LeaseRecord, policy: Policy) -> int:
    """For how long a further turn lasts at least."""
    return policy.min_run_batch_ns if lease.tier is Tier.BATCH else policy.turn_least_ns


def is_at_rest(lease: LeaseRecord, state: State, now_ns: int, policy: Policy) -> bool:
    """Whether its holder has been idle for long enough to yield to any request."""
    since_ns = lease.idle_since_ns
    if since_ns is None:
        return False
    return now_ns >= since_ns + policy.idle_before_yielding_ns(lease.moving_ns, state.saves.get(lease.id, 0))


def plan(
    request: LeaseRecord,
    rooms: RoomsByNode,
    state: State,
    now_ns: int,
    policy: Policy,
    takeable: Takeable = ALL,
) -> PreemptionPlan | None:
    """The cheapest set of victims that makes room on one node, or None.

    ``rooms`` are the rooms in service as this request may see them (what is promised to others is taken).
    """
    soon = _soon(rooms, state)
    if fit(request.wants, request.tenant, soon, mix=policy.share_across_tenants) is not None:
        return None  # what is already on its way out is enough: wait for it
    floors, among = Floors(state), takeable.leases
    is_inside = floors.has_room_for(request)

    def plan_on(node: NodeId, node_rooms: Sequence[Room]) -> PreemptionPlan | None:
        found = None
        if is_inside:
            inside = floors.rooms_inside(request, node_rooms)
            found = _plan_on_node(request, node, inside, floors, state, now_ns, policy, among, inside_floor=True)
        return found or _plan_on_node(
            request, node, node_rooms, floors, state, now_ns, policy, among, inside_floor=False
        )

    nodes = (entry for entry in soon.items() if takeable.are_on(entry[0]))
    plans = (found for node, node_rooms in nodes if (found := plan_on(node, node_rooms)) is not None)
    best = min(plans, key=lambda p: (p.potential_lost, len(p.victims), sum(v.ran_ns for v in p.victims)), default=None)
    if best is not None:
        lowers = best.potential_lost < weight(standing_of_request(request.tier))
        assert lowers or any(victim.by_floor for victim in best.victims), "a preemption must lower the potential"
    return best


def _plan_on_node(
    request: LeaseRecord,
    node: NodeId,
    node_rooms: Sequence[Room],
    floors: Floors,
    state: State,
    now_ns: int,
    policy: Policy,
    among: frozenset[LeaseId] | None,
    *,
    inside_floor: bool,
) -> PreemptionPlan | None:
    candidates = _candidates(request, node_rooms, state, now_ns, policy, among, inside_floor=inside_floor)
    if not candidates:
        return None
    mix = policy.share_across_tenants
    rooms = {room.resource: room.copy() for room in node_rooms}
    chosen: list[Victim] = []
    for candidate in candidates:
        if floors.any and not _group_may_lose(candidate, chosen, request, floors, state):
            continue
        _release_from(candidate.lease, rooms)
        chosen.append(candidate)
        if fit_on_node(request.wants, request.tenant, list(rooms.values()), mix=mix) is not None:
            break
    else:
        return None
    # Spare those that are not needed after all, first those that weigh most.
    for candidate in sorted(chosen, key=lambda v: (v.by_floor, v.standing), reverse=True):
        _place_on(candidate.lease, rooms)
        if fit_on_node(request.wants, request.tenant, list(rooms.values()), mix=mix) is None:
            _release_from(candidate.lease, rooms)
        else:
            chosen.remove(candidate)
    parts = fit_on_node(request.wants, request.tenant, list(rooms.values()), mix=mix)
    assert parts is not None and chosen
    return PreemptionPlan(node, tuple(parts), tuple(chosen))


def _group_may_lose(
    candidate: Victim, chosen: Sequence[Victim], request: LeaseRecord, floors: Floors, state: State
) -> bool:
    """Whether its group has its floor without it, too, and without what it loses already. What is idle is not kept for
    it: the group can have it back when it is needed."""
    group = state.group_of(candidate.lease.tenant)
    if candidate.is_idle or candidate.is_lent or group == state.group_of(request.tenant):
        return True
    lost = [*(v.lease for v in chosen if state.group_of(v.lease.tenant) == group), candidate.lease]
    return floors.above(group) >= sum(gpu_millis(lease.parts) for lease in lost)


def _soon(rooms: RoomsByNode, state: State) -> dict[NodeId, list[Room]]:
    """The rooms as they will be once everything is torn down that is not promised. Those that change are copies."""
    promised_away = {lease for promised in state.promises for lease in state.leases[promised].victims}
    return {
        node: [_without_leaving(room, state, promised_away) if room.leaving else room for room in node_rooms]
        for node, node_rooms in rooms.items()
    }


def _without_leaving(room: Room, state: State, promised_away: set[LeaseId]) -> Room:
    copied = False
    for piece in islice(state.resources[room.resource].slices.values(), SLICES_MAX):
        if piece.state is SliceState.TEARDOWN and piece.lease not in promised_away:
            if not copied:
                room, copied = room.copy(), True
            room.give_back(piece.part, piece.tenant)
    return room


def _candidates(
    request: LeaseRecord,
    node_rooms: Sequence[Room],
    state: State,
    now_ns: int,
    policy: Policy,
    among: frozenset[LeaseId] | None,
    *,
    inside_floor: bool,
) -> list[Victim]:
    """Leases that could be preempted, the lowest priority and the least work to lose first."""
    kinds = kinds_of(request)
    leases: dict[LeaseId, None] = {}
    for room in node_rooms:
        if room.kind in kinds:
            for piece in islice(state.resources[room.resource].slices.values(), SLICES_MAX):
                if among is None or piece.lease in among:
                    leases[piece.lease] = None
    found = (
        victim(state.leases[lease], request, state, now_ns, policy, inside_floor=inside_floor)
        for lease in leases
        if lease in state.leases
    )
    ordered = sorted((v for v in found if v is not None), key=lambda v: (v.by_floor, v.standing, v.ran_ns, v.lease.id))
    return ordered[:VICTIMS_MAX]


def _release_from(lease: LeaseRecord, rooms: Mapping[ResourceId, Room]) -> None:
    for part in lease.parts:
        if part.resource in rooms:
            rooms[part.resource].give_back(part, lease.tenant)


def _place_on(lease: LeaseRecord, rooms: Mapping[ResourceId, Room]) -> None:
    for part in lease.parts:
        if part.resource in rooms:
            rooms[part.resource].take(part, lease.tenant)
