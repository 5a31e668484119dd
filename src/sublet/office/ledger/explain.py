"""Explains why a request waits and what may end a lease, from the state and functions that decide.

Which requests are ahead is read from the walk that grants (``order.InOrder``), and when a lease may be taken from the
rule by which it is taken (``preemption.victim``), asked for later moments. There is no second set of rules that could
say something else than what happens.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator

import msgspec

from sublet.lazy_dataclass import dataclass
from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState
from sublet.office.ledger import admission, budgets, preemption, promised_parts
from sublet.office.ledger.budgets import money
from sublet.office.ledger.estimate import estimate_ns, leaves_at
from sublet.office.ledger.groups import Floors, is_within_floor
from sublet.office.ledger.placement import RoomsByNode, fit
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import (
    TURNS_WAITED,
    InOrder,
    Shares,
    kinds_of,
    position,
    yields_after_maximum,
)
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.office.ledger.replacement import held_since_ns
from sublet.office.ledger.state import State
from sublet.office.ledger.volume_placement import why_not_yet
from sublet.values import Kind, TenantId, Tier, format_duration

SHARES_LOOKED_AT = 24
"""Moments, each the shortest turn after the other, at which shares are looked at beforehand."""


class Because(enum.StrEnum):
    """Why a request goes before another: the first difference that decides."""

    TIER = "tier"
    PRIORITY = "priority"
    """It pays for priority, or has waited for so long that it has it without."""
    GROUP = "group"
    """Its group has had a smaller share per weight."""
    TENANT = "tenant"
    """Its tenant, in the same group, has had a smaller share per weight."""
    HELD = "held"
    """Its holder has held for less time without a break."""
    ARRIVAL = "arrival"


class ReasonKind(enum.StrEnum):
    """What stands between a request and a grant, or between a lease and its end."""

    LIMIT = "limit"
    VOLUME = "volume"
    NOTICE = "notice"
    ROOM = "room"
    CLEARING = "clearing"
    FLOOR = "floor"
    RESERVATION = "reservation"
    GANG = "gang"
    SERVICE = "service"
    """Out of service, quarantined, or used by what has no lease."""
    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    IDLE = "idle"
    TIER = "tier"
    DEADLINE = "deadline"
    END = "end"


@dataclass(frozen=True, slots=True)
class Ahead:
    """The requests that go first for one reason, in their order."""

    because: Because
    requests: tuple[LeaseRecord, ...]


@dataclass(frozen=True, slots=True)
class Reason:
    kind: ReasonKind
    text: str
    at_ns: int | None = None
    """When it is over, if time alone ends it; for a lease that is held, when it begins."""
    leases: tuple[LeaseRecord, ...] = ()
    """The leases it is about. Only an operator, and their own tenant, may know which they are."""


@dataclass(frozen=True, slots=True)
class Explanation:
    lease: LeaseRecord
    summary: str
    position: int | None = None
    estimate_ns: int | None = None
    ahead: tuple[Ahead, ...] = ()
    reasons: tuple[Reason, ...] = ()
    advice: tuple[str, ...] = ()


def explain(lease: LeaseRecord, rooms: RoomsByNode, state: State, now: Now, policy: Policy) -> Explanation:
    """``rooms``: those that a waiting request may see now (``Schedule.rooms_for``)."""
    if lease.status is LeaseStatus.QUEUED:
        return _waiting(lease, rooms, state, now, policy)
    if lease.end is not None:
        detail = f": {lease.end.detail}" if lease.end.detail else ""
        text = f"it ended ({lease.end.reason}{detail})"
        return Explanation(lease, text, reasons=(Reason(ReasonKind.END, text),))
    return _held(lease, state, now, policy)


# ---- a request in the line ----


def _waiting(lease: LeaseRecord, rooms: RoomsByNode, state: State, now: Now, policy: Policy) -> Explanation:
    place = position(state, lease, now.ns, policy)
    why = admission.why_waiting(lease, state, now, policy, place)
    return Explanation(
        lease,
        why,
        position=place,
        estimate_ns=estimate_ns(lease, state, now, policy, place),
        ahead=tuple(_ahead(lease, state, now, policy)),
        reasons=tuple(_blockers(lease, why, rooms, state, now, policy)),
        advice=tuple(_advice(lease, rooms, state, now, policy)),
    )


def _ahead(lease: LeaseRecord, state: State, now: Now, policy: Policy) -> Iterator[Ahead]:
    found: dict[Because, list[LeaseRecord]] = {because: [] for because in Because}
    share_of = functools.cache(Shares(state, now.ns, policy).of_tenant)
    for other in InOrder(state, now.ns, policy):
        if other.id == lease.id:
            break
        found[_because(other, lease, state, share_of)].append(other)
    return (Ahead(because, tuple(requests)) for because, requests in found.items() if requests)


def _because(other: LeaseRecord, lease: LeaseRecord, state: State, share_of: Callable[[TenantId], int]) -> Because:
    if other.tier is not lease.tier:
        return Because.TIER
    if other.has_priority is not lease.has_priority:
        return Because.PRIORITY
    if state.group_of(other.tenant) != state.group_of(lease.tenant):
        return Because.GROUP
    if share_of(other.tenant) != share_of(lease.tenant):
        return Because.TENANT
    return Because.ARRIVAL if other.arrival < lease.arrival else Because.HELD


def _blockers(
    lease: LeaseRecord, why: str, rooms: RoomsByNode, state: State, now: Now, policy: Policy
) -> Iterator[Reason]:
    limit = admission.limit_sentence(state, lease, now)
    if limit is not None:
        beyond_time = admission.over_seconds(state, lease, now) is not None
        yield Reason(ReasonKind.LIMIT, limit, admission.seconds_free_at(state, lease, now) if beyond_time else None)
    elif above := admission.above_ceiling(lease, state).strip(" ()"):
        yield Reason(ReasonKind.LIMIT, above)
    volume = why_not_yet(state, lease)
    if volume is not None:
        yield Reason(ReasonKind.VOLUME, volume)
    if lease.promise:
        victims = tuple(state.leases[victim] for victim in lease.victims if victim in state.leases)
        gone_ns = max((leaves_at(victim, now, policy) for victim in victims), default=None)
        yield Reason(ReasonKind.NOTICE, why, gone_ns, victims)
        return
    unguarded = promised_parts.rooms_for(state, lease)
    yield from _reserved(lease, unguarded, state, now)
    yield from _no_room(lease, unguarded, state, now, policy)
    if len(rooms) < len(unguarded):
        patience = format_duration(policy.gang_patience_ns)
        text = f"a request ahead has waited for more than {patience}, and room is kept for it until it is granted"
        yield Reason(ReasonKind.GANG, text)
    kept = admission.out_of_service(lease, state).strip(" ()") or admission.in_the_way(lease, state).strip("; ")
    if kept:
        yield Reason(ReasonKind.SERVICE, kept)


def _reserved(lease: LeaseRecord, rooms: RoomsByNode, state: State, now: Now) -> Iterator[Reason]:
    """Devices that it does not see, since reservations keep them for other groups."""
    seen = {room.resource for node_rooms in rooms.values() for room in node_rooms}
    own = state.group_of(lease.tenant)
    hidden = [
        name
        for resource, name in state.reserved_by.items()
        if resource not in seen and state.reserved_group(resource) != own
    ]
    if hidden and Kind.GPU in kinds_of(lease):
        ends_ns = min(state.books.reserved[name].span.end_ns for name in hidden) - now.wall_ns + now.ns
        count = "1 GPU is" if len(hidden) == 1 else f"{len(hidden)} GPUs are"
        text = f"{count} reserved for another group for {_in(ends_ns, now)} more"
        yield Reason(ReasonKind.RESERVATION, text, ends_ns)


def _no_room(lease: LeaseRecord, rooms: RoomsByNode, state: State, now: Now, policy: Policy) -> Iterator[Reason]:
    """Leases that hold what it asks for, when the first of them ends, and when the first may be preempted for it."""
    if fit(lease.wants, lease.tenant, rooms, mix=policy.share_across_tenants) is not None:
        return
    kinds, floors = kinds_of(lease), Floors(state)
    inside = floors.has_room_for(lease)
    resources = [room.resource for node_rooms in rooms.values() for room in node_rooms if room.kind in kinds]
    pieces = [piece for resource in resources for piece in state.resources[resource].slices.values()]
    if any(piece.state is SliceState.TEARDOWN for piece in pieces):
        yield Reason(ReasonKind.CLEARING, "some of what it asks for is being cleared after its last lease")
    holders = tuple(
        state.leases[lease_id]
        for lease_id in dict.fromkeys(piece.lease for piece in pieces if piece.state is SliceState.LEASED)
        if lease_id in state.leases and lease_id != lease.id
    )
    if not holders:
        if state.promises:
            yield Reason(ReasonKind.ROOM, "what it asks for is reserved for a request with priority")
        return
    text = f"{_leases(len(holders))} what it asks for"
    leaving_ns = min(leaves_at(holder, now, policy) for holder in holders)
    text += f"; the first ends in {_in(leaving_ns, now)} unless it is renewed"
    takable = [at for h in holders if (at := _takable_at(h, lease, state, now, policy, inside=inside)) is not None]
    taken_ns = min(takable, default=None)
    if taken_ns is None:
        text += "; none of them may be taken for it, by their tiers"
    elif taken_ns > now.ns:
        text += f"; the first may be taken for it in {_in(taken_ns, now)}"
    yield Reason(ReasonKind.ROOM, text, taken_ns, holders)
    if taken_ns is not None and taken_ns <= now.ns and floors.any:
        yield Reason(ReasonKind.FLOOR, "what could be taken for it is kept for other groups by their floors")


def _takable_at(
    holder: LeaseRecord, request: LeaseRecord, state: State, now: Now, policy: Policy, *, inside: bool
) -> int | None:
    """The first moment at which the rule would let it be taken, if nothing but time changes; None: never."""
    moments = {now.ns, state.books.cool_until_ns.get(request.tenant, {}).get(holder.tenant, 0)}
    moments.add(preemption.preempts_from_ns(request, policy))
    if holder.claimed_at_ns is not None:
        since_ns = held_since_ns(holder)
        least_ns = preemption.least_turn_ns(holder, policy)
        moments |= {since_ns + at_ns for at_ns in (policy.min_run_batch_ns, policy.max_hold_ns, least_ns)}
        if state.weights_differ:  # then it may be their shares that let the request have it
            from_ns = max(now.ns, since_ns + policy.max_hold_ns)
            moments |= {from_ns + number * policy.turn_least_ns for number in range(1, SHARES_LOOKED_AT)}
            moments.add(max(from_ns, request.asked_at_ns + TURNS_WAITED * policy.max_hold_ns))
    if holder.idle_since_ns is not None:
        rest_ns = policy.idle_before_yielding_ns(holder.moving_ns, state.saves.get(holder.id, 0))
        moments |= {holder.idle_since_ns + at_ns for at_ns in (rest_ns, policy.pause_ns)}
        moments.add(request.asked_at_ns + policy.max_hold_ns)
    return next(
        (
            at_ns
            for at_ns in sorted(moments)
            if at_ns >= now.ns
            and preemption.victim(holder, request, state, at_ns, policy, inside_floor=inside) is not None
        ),
        None,
    )


def _advice(lease: LeaseRecord, rooms: RoomsByNode, state: State, now: Now, policy: Policy) -> Iterator[str]:
    """What its holder can do instead of waiting; each was tried on the state as it is."""
    if admission.own_limit(state, lease, now) is not None:
        yield from _advice_on_limit(lease, state, now, policy)
        return
    want, mix = lease.wants[0], policy.share_across_tenants
    if len(lease.wants) == 1 and want.count == 1:
        fits = admission.what_would_fit(lease, rooms, policy)
        if fits is not None and fits < want.amount:
            yield f"ask for {admission.amount_text(want.kind, fits)}, which is free now"
    fewer = admission.fewer_gpus(lease, rooms, policy)
    if fewer is not None:
        yield f"ask for {fewer}"
    if any(each.model is not None for each in lease.wants):
        any_model = tuple(msgspec.structs.replace(each, model=None) for each in lease.wants)
        if fit(any_model, lease.tenant, rooms, mix=mix) is not None:
            yield "leave the model out: another one is free now"
    best = max((tier for tier in Tier if tier.rank <= _tier_max(lease, state).rank), key=lambda tier: tier.rank)
    if best.rank > lease.tier.rank:
        now_ahead = position(state, lease, now.ns, policy) - 1
        then_ahead = position(state, msgspec.structs.replace(lease, tier=best), now.ns, policy) - 1
        if then_ahead < now_ahead:
            left = f"only {then_ahead} of the {now_ahead} requests" if then_ahead else "no request"
            yield f"ask in tier {best}: {left} would go first"
    price = state.rates.priority
    if price is not None and not lease.has_priority and Kind.GPU in kinds_of(lease):
        now_ahead = position(state, lease, now.ns, policy) - 1
        then_ahead = position(state, msgspec.structs.replace(lease, has_priority=True), now.ns, policy) - 1
        if then_ahead < now_ahead:
            left = f"only {then_ahead} of the {now_ahead} requests" if then_ahead else "no request"
            cost = f"{money(price, state.rates.currency)} an hour for a GPU, beside its price"
            yield f"pay for priority ({cost}): {left} would go first"


def _advice_on_limit(lease: LeaseRecord, state: State, now: Now, policy: Policy) -> Iterator[str]:
    if budgets.used_up(state, lease, now) is not None:
        yield "ask the operator for credit"
    elif admission.over_seconds(state, lease, now) is not None:
        at_ns = admission.seconds_free_at(state, lease, now)
        if at_ns is not None:
            yield f"wait {_in(at_ns, now)}, when enough of what was used no longer counts"
    elif not admission.is_groups_limit(state, lease):
        yield "release a lease of your own, or ask the operator for a higher limit"
    elif admission.would_fit_without_own(state, lease):
        yield "release a lease of your own, or ask the operator for a higher limit of your group"
    else:
        found = members_leave_at(lease, state, now, policy)
        when = "" if found is None else f"; the first of their leases ends within {_in(found, now)}"
        yield f"wait until other members of your group hold less: they have what its limit allows{when}"
        yield "ask the operator for a higher limit of your group"


def members_leave_at(request: LeaseRecord, state: State, now: Now, policy: Policy) -> int | None:
    """When the first lease that other members of its group hold of these kinds ends at the latest: they are not renewed
    once they were held for the maximum, since the request waits. None: none is held, or they are disk, which stays."""
    group, kinds = state.group_of(request.tenant), kinds_of(request)
    return min(
        (
            _leaves_for(lease, request, state, now, policy)
            for lease in state.leases.values()
            if lease.status in LIVE_STATES
            and lease.tenant != request.tenant
            and state.group_of(lease.tenant) == group
            and kinds & {part.kind for part in lease.parts} - {Kind.BLOCK}
        ),
        default=None,
    )


def _leaves_for(lease: LeaseRecord, request: LeaseRecord, state: State, now: Now, policy: Policy) -> int:
    """At the latest: its last renewal may come just before its holder has to yield to the request."""
    if lease.notice is not None:
        return leaves_at(lease, now, policy)
    since_ns = now.ns if lease.claimed_at_ns is None else held_since_ns(lease)
    yields_ns = max(now.ns, since_ns + policy.max_hold_ns)
    if not yields_after_maximum(state, lease, request, yields_ns, policy):
        yields_ns = max(yields_ns, request.asked_at_ns + TURNS_WAITED * policy.max_hold_ns)
    return yields_ns + lease.ttl_ns + policy.grace_ns(lease.ttl_ns)


def _tier_max(lease: LeaseRecord, state: State) -> Tier:
    known = state.tenants.get(lease.tenant)
    return lease.tier if known is None else known.tier_max


# ---- a lease that is held ----


def _held(lease: LeaseRecord, state: State, now: Now, policy: Policy) -> Explanation:
    reasons = tuple(_what_may_end_it(lease, state, now, policy))
    return Explanation(lease, reasons[0].text, reasons=reasons)


def _what_may_end_it(lease: LeaseRecord, state: State, now: Now, policy: Policy) -> Iterator[Reason]:
    if lease.notice is not None:
        because = f": {lease.notice.detail}" if lease.notice.detail else ""
        served = state.leases.get(lease.notice.beneficiary) if lease.notice.beneficiary else None
        yield Reason(
            ReasonKind.NOTICE,
            f"it has notice ({lease.notice.reason}{because}) and ends in {_in(lease.notice.take_at_ns, now)}",
            lease.notice.take_at_ns,
            () if served is None else (served,),
        )
    if lease.status is LeaseStatus.GRANTED and lease.claim_by_ns is not None:
        text = f"it was granted and must be claimed within {_in(lease.claim_by_ns, now)}"
        yield Reason(ReasonKind.DEADLINE, text, lease.claim_by_ns)
        return
    is_disk = any(part.kind is Kind.BLOCK for part in lease.parts)
    if lease.status is LeaseStatus.ACTIVE and lease.claimed_at_ns is not None and not is_disk:
        yield from _who_may_take_it(lease, state, now, policy)
    if lease.deadline_ns is not None:
        text = f"it ends in {_in(lease.deadline_ns, now)} unless it is renewed"
        yield Reason(ReasonKind.DEADLINE, text, lease.deadline_ns)
    else:
        yield Reason(ReasonKind.DEADLINE, f"it is {lease.status}")


def _who_may_take_it(lease: LeaseRecord, state: State, now: Now, policy: Policy) -> Iterator[Reason]:
    if preemption.is_at_rest(lease, state, now.ns, policy):
        text = "it is idle: any request that waits may have it, once its state is safe"
        kept_until_ns = (lease.idle_since_ns or 0) + policy.pause_ns
        if now.ns < kept_until_ns and not preemption.is_further_turn(lease, policy):
            text += f"; requests for further turns in {_in(kept_until_ns, now)}"
        yield Reason(ReasonKind.IDLE, text, now.ns)
        return
    group, reserved = state.group_of(lease.tenant), state.has_reserved(lease)
    if reserved == group:
        yield Reason(
            ReasonKind.RESERVATION, f"no other group may take it while it is used: its device is reserved for {group}"
        )
        return
    if reserved is not None:
        text = "its device is reserved for another group, which may take it at once, with notice"
        yield Reason(ReasonKind.RESERVATION, text, now.ns)
    if is_within_floor(state, lease):
        yield Reason(
            ReasonKind.FLOOR, f"no other group may take it while it is used: {group} has no more than its floor"
        )
        return
    since_ns = held_since_ns(lease)
    minimum_ns, maximum_ns = since_ns + policy.min_run_batch_ns, since_ns + policy.max_hold_ns
    if preemption.is_further_turn(lease, policy):
        turn_ns = since_ns + preemption.least_turn_ns(lease, policy)
        when = f"in {_in(turn_ns, now)} " if turn_ns > now.ns else ""
        text = f"its holder has had the maximum before: {when}requests that have not have priority"
        yield Reason(ReasonKind.MAXIMUM, text, turn_ns)
    if maximum_ns <= now.ns:
        text = "it was held for the maximum: others who wait go first"
    else:
        text = f"in {_in(maximum_ns, now)} it will have been held for the maximum; then others who wait go first"
    if state.weights_differ:
        text += ", those of less weight once they would have the smaller share"
    yield Reason(ReasonKind.MAXIMUM, text, maximum_ns)
    match lease.tier:
        case Tier.SPOT:
            yield Reason(ReasonKind.TIER, "it is spot: any request of another tier may take it, with notice", now.ns)
        case Tier.BATCH if minimum_ns > now.ns:
            text = f"it has {_in(minimum_ns, now)} left of its minimum run; then an interactive request may take it"
            yield Reason(ReasonKind.MINIMUM, text, minimum_ns)
        case Tier.BATCH:
            yield Reason(
                ReasonKind.TIER, "its minimum run is over: an interactive request may take it, with notice", now.ns
            )
        case Tier.INTERACTIVE:
            yield Reason(ReasonKind.TIER, "it is interactive: no other tier may take it while it is used")


def _leases(count: int) -> str:
    return "1 lease holds" if count == 1 else f"{count} leases hold"


def _in(at_ns: int, now: Now) -> str:
    """A duration that people read: whole seconds, or none."""
    left_s = max(0, -(-(at_ns - now.ns) // 1_000_000_000))
    return format_duration(left_s * 1_000_000_000)
