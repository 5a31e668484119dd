"""Reservations: devices kept for a group at stated times.

1. *Chosen.* Before the start, by the notice and by the time that it takes to clear a device, devices are chosen for it:
   those that its group has already, then those with the least to lose. Other groups' leases on them get notice, within
   their minimum run and their floor as well, so that the devices are verified free at the start, and from here on no
   other group is let in.
2. *Begun.* At the start it is recorded how many devices are free of other groups.
3. *Lent.* Some minutes later, devices that the group does not use are open to requests of tier spot. Such a lease can
   be taken for any request of the group, of whatever tier, at once and with the notice of its tier.
4. *Over.* The devices are open to every group. Leases of the group stay, as leases like any other.

If a device is lost or quarantined meanwhile, another one is chosen. The times are instants of the wall clock, which the
edge worked out from the rule (``reservation_times``) and which are in the journal. Each of the four steps is an event,
so a fold of the journal never asks a clock or a time-zone database.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from sublet.errors import InvalidRequest, NotFound
from sublet.lease.states import LeaseStatus, SliceState
from sublet.lease_end import EndReason
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Done
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.groups import is_within_floor
from sublet.office.ledger.placement import RoomsByNode, is_model, models_of
from sublet.office.ledger.records import GroupRecord, LeaseRecord, ReservationRecord, ReservedRecord, Span
from sublet.office.ledger.replacement import held_since_ns
from sublet.values import (
    NS_PER_S,
    GroupId,
    Kind,
    ReservationId,
    ResourceId,
    Tier,
    format_duration,
    shown,
    valid_name,
)

if TYPE_CHECKING:
    from sublet.office.ledger import commands as cmd
    from sublet.office.ledger.policy import Policy
    from sublet.office.ledger.state import State
    from sublet.office.ledger.transaction import Transaction

RESERVATIONS_MAX: Final = 100
SPANS_MAX: Final = 1000
"""Times of one reservation that are worked out ahead."""


# ---- what requests see ----


def rooms_seen(state: State, lease: LeaseRecord, rooms: RoomsByNode) -> RoomsByNode:
    """The rooms without those that are kept for other groups; those that are kept for its own come first."""
    if not state.reserved_by:
        return rooms
    group, spot = state.group_of(lease.tenant), lease.tier is Tier.SPOT
    nodes = {state.resources[resource].node for resource in state.reserved_by}
    return {
        node: [seen for room in node_rooms if (seen := _seen(state, room, group, spot)) is not None]
        if node in nodes
        else node_rooms
        for node, node_rooms in rooms.items()
    }


def _seen(state: State, room: Room, group: GroupId, spot: bool) -> Room | None:
    reservation = state.reserved_by.get(room.resource)
    if reservation is None:
        return room
    if state.books.reservations[reservation].group == group:
        room = room.copy()
        room.reserved = True
        return room
    return room if spot and state.books.reserved[reservation].lends else None


# ---- what time makes of them ----


def next_wall_ns(state: State, wall_ns: int, policy: Policy) -> int | None:
    """The next instant of the wall clock at which one of them takes a step."""
    moments = (_next_step(state, reservation, wall_ns, policy) for reservation in state.books.reservations.values())
    return min((moment for moment in moments if moment is not None), default=None)


def _next_step(state: State, reservation: ReservationRecord, wall_ns: int, policy: Policy) -> int | None:
    reserved = state.books.reserved.get(reservation.id)
    if reserved is None:
        span = _span_after(reservation.spans, wall_ns)
        return None if span is None else span.start_ns - policy.notice_ns - policy.reserved_clear_ns
    if not reserved.began:
        return reserved.span.start_ns
    return reserved.span.end_ns if reserved.lends else _lends_from(reserved.span, policy)


def update_reservations(step: Transaction) -> None:
    """Take the steps whose time has come, and see that the chosen devices become, and stay, free of other groups."""
    wall_ns, policy = step.now.wall_ns, step.policy
    books = step.state.books
    for name, known in list(books.reserved.items()):  # all of them first: the next reservation has their devices
        if wall_ns >= known.span.end_ns:
            _spare(step, books.reservations[name], ())
            step.emit(ev.ReservationOver(reservation=name))
    for reservation in list(books.reservations.values()):
        reserved = books.reserved.get(reservation.id) or _next(reservation, wall_ns, policy)
        if reserved is None:
            continue
        _place(step, reservation, reserved)
        reserved = books.reserved[reservation.id]
        if not reserved.began and wall_ns >= reserved.span.start_ns:
            step.emit(ev.ReservationBegan(reservation=reservation.id, ready=ready(step.state, reservation, reserved)))
        if not reserved.lends and wall_ns >= _lends_from(reserved.span, policy):
            step.emit(ev.ReservationLent(reservation=reservation.id))
        _drop_promises(step, reservation, reserved)
    for name, reserved in books.reserved.items():  # only now, since a promise that is dropped spares others
        _clear(step, books.reservations[name], reserved)


def _next(reservation: ReservationRecord, wall_ns: int, policy: Policy) -> ReservedRecord | None:
    """Its time that goes on, or for which devices are to be chosen by now."""
    span = _span_after(reservation.spans, wall_ns)
    if span is None or wall_ns < span.start_ns - policy.notice_ns - policy.reserved_clear_ns:
        return None
    return ReservedRecord(span=span)


def ready(state: State, reservation: ReservationRecord, reserved: ReservedRecord) -> int:
    """On how many of its devices there is nothing of another group."""
    return sum(
        all(state.group_of(piece.tenant) == reservation.group for piece in state.resources[resource].slices.values())
        for resource in reserved.resources
    )


def _lends_from(span: Span, policy: Policy) -> int:
    return min(span.start_ns + policy.reserved_keep_ns, span.end_ns)


def _span_after(spans: Sequence[Span], wall_ns: int) -> Span | None:
    """The one that goes on at this instant, or the next one."""
    at = bisect_right(spans, wall_ns, key=lambda span: span.end_ns)
    return spans[at] if at < len(spans) else None


# ---- which devices, and which leases leave them ----


def _place(step: Transaction, reservation: ReservationRecord, reserved: ReservedRecord) -> None:
    state = step.state
    chosen = tuple(sorted(_choose(step, reservation, reserved)))
    if chosen == reserved.resources and reservation.id in state.books.reserved:
        return
    step.emit(ev.ReservationPlaced(reservation=reservation.id, span=reserved.span, resources=chosen))
    _spare(step, reservation, chosen)


def _choose(step: Transaction, reservation: ReservationRecord, reserved: ReservedRecord) -> Iterator[ResourceId]:
    """As many devices as are reserved, or as there are. Those that are kept already stay; of the others, the cheapest
    in turn, those last that other reservations need: once a lease has to go, its other devices cost nothing more."""
    state, present = step.state, reserved.resources
    group = reservation.group
    usable = [
        room
        for room in _in_service(state)
        if _is_open(state, room, reservation) and _can_use(group, walled=room.walled)
    ]
    free = [room for room in usable if room.resource not in present]
    fitting = [room for room in usable if reservation.model is None or is_model(reservation.model, room)]
    kept = [room.resource for room in fitting if room.resource in present][: reservation.gpus]
    yield from kept
    others, needs = [room for room in fitting if room in free], _models_needed(state, reservation, reserved.span)
    leaving: set[str] = set()
    for _ in range(min(reservation.gpus - len(kept), len(others))):
        scarce = [model for model, count in needs.items() if sum(is_model(model, room) for room in free) <= count]
        best = min(
            others,
            key=lambda room: (
                any(is_model(model, room) for model in scarce),
                *_cost(step, reservation, room, leaving),
                room.node,
                room.resource,
            ),
        )
        others.remove(best)
        free.remove(best)
        leaving.update(lease.id for lease in _strangers(state, reservation, best.resource))
        yield best.resource


def _models_needed(state: State, reservation: ReservationRecord, span: Span) -> dict[str, int]:
    """How many devices of which model other reservations will still need during this time."""
    needs: dict[str, int] = {}
    for other in state.books.reservations.values():
        if other.model is None or other.id == reservation.id or other.model == reservation.model:
            continue
        next_one, reserved = _span_after(other.spans, span.start_ns), state.books.reserved.get(other.id)
        if next_one is not None and next_one.start_ns < span.end_ns:
            has = len(reserved.resources) if reserved is not None else 0
            needs[other.model] = needs.get(other.model, 0) + other.gpus - has
    return needs


def _in_service(state: State) -> Iterator[Room]:
    for node_rooms in state.rooms_by_node.values():
        yield from (
            room for room in node_rooms if room.kind is Kind.GPU and not room.partition and not room.quarantined
        )


def _is_open(state: State, room: Room, reservation: ReservationRecord) -> bool:
    return state.reserved_by.get(room.resource, reservation.id) == reservation.id


def _can_use(group: GroupId, *, walled: bool) -> bool:
    """``walled``: whether only guests of tenant local can use the device. That tenant is in the default group."""
    return not walled or group == DEFAULT_GROUP


def _cost(step: Transaction, reservation: ReservationRecord, room: Room, leaving: set[str]) -> tuple[int, int, int]:
    """What other groups would lose on a device; least is one on which the group is already."""
    state, now_ns = step.state, step.now.ns
    worst = 20 if room.blocked else 0
    ran_ns, mine = 0, 0
    for piece in state.resources[room.resource].slices.values():
        lease = state.leases.get(piece.lease)
        if lease is None or piece.state is not SliceState.LEASED or lease.id in leaving:
            continue
        if state.group_of(lease.tenant) == reservation.group:
            mine = -1
            continue
        ran = now_ns - held_since_ns(lease) if lease.claimed_at_ns is not None else 0
        ran_ns += ran
        within_minimum = lease.tier is not Tier.SPOT and ran < step.policy.min_run_batch_ns
        standing = 1 if lease.idle_since_ns is not None else 2 + 2 * lease.tier.rank + within_minimum
        worst = max(worst, standing + 10 * is_within_floor(state, lease))
    return worst, mine, ran_ns


def _strangers(state: State, reservation: ReservationRecord, resource: ResourceId) -> Iterator[LeaseRecord]:
    """Leases of other groups on the device."""
    for piece in list(state.resources[resource].slices.values()):
        lease = state.leases.get(piece.lease)
        is_leased = lease is not None and piece.state is SliceState.LEASED
        if lease is not None and is_leased and state.group_of(lease.tenant) != reservation.group:
            yield lease


def _drop_promises(step: Transaction, reservation: ReservationRecord, reserved: ReservedRecord) -> None:
    """Requests of other groups to which parts of its devices were promised wait again, but for what is lent."""
    for promised in [step.state.leases[lease] for lease in step.state.promises]:
        is_inside = any(part.resource in reserved.resources for part in promised.promise)
        is_lent = reserved.lends and promised.tier is Tier.SPOT
        if is_inside and not is_lent and step.state.group_of(promised.tenant) != reservation.group:
            step.drop_promise(promised)


def _clear(step: Transaction, reservation: ReservationRecord, reserved: ReservedRecord) -> None:
    """Give notice to leases that are on its devices and may not be. A grant that is not claimed yet gets it once it
    is."""
    state, policy = step.state, step.policy
    until_start_ns = reserved.span.start_ns - step.now.wall_ns
    for resource in reserved.resources:
        for lease in _strangers(state, reservation, resource):
            is_lent = reserved.lends and lease.tier is Tier.SPOT
            if lease.status is LeaseStatus.ACTIVE and not is_lent:
                in_time_ns = until_start_ns - policy.reserved_clear_ns
                begins = f"in {_whole_seconds(until_start_ns)}" if until_start_ns > 0 else "now"
                step.notice(
                    lease,
                    EndReason.PREEMPTED,
                    max(policy.notice_for_ns(lease.tier), in_time_ns),
                    f"its device is reserved for another group, {begins}",
                    reservation=reservation.id,
                )


def _spare(step: Transaction, reservation: ReservationRecord, resources: Iterable[ResourceId]) -> None:
    """Take back the notice of leases on devices that the reservation no longer needs."""
    kept = set(resources)
    for lease in list(step.state.leases.values()):
        notice = lease.notice
        if lease.status is not LeaseStatus.NOTICED or notice is None or notice.reservation != reservation.id:
            continue
        if not any(part.resource in kept for part in lease.parts):
            step.cancel_notice(lease)


def _whole_seconds(ns: int) -> str:
    return format_duration(-(-ns // NS_PER_S) * NS_PER_S)


def _utc(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M UTC")


# ---- what operators ask ----


def set_reservation(step: Transaction, command: cmd.SetReservation) -> Answer:
    """Make one, or give one its instants of the time to come."""
    state, new = step.state, command.reservation
    known = state.books.reservations.get(new.id)
    if not command.is_new:
        if known is not None and known != new and msgspec.structs.replace(known, spans=new.spans) == new:
            _check_spans(new)
            step.emit(ev.ReservationSet(reservation=new))
        return Done()
    valid_name(new.id, "reservation name")
    if known is not None:
        raise InvalidRequest(
            f"there is a reservation {new.id} already", do=f"Take another name, or `sublet reservation rm {new.id}`."
        )
    check(state, {**state.books.reservations, new.id: new}, state.books.groups, step.now.wall_ns)
    step.emit(ev.ReservationSet(reservation=new))
    return Done()


def remove(step: Transaction, command: cmd.RemoveReservation) -> Answer:
    """Forget it; leases that had notice because of it stay."""
    known = step.state.books.reservations.get(command.reservation)
    if known is None:
        raise NotFound(f"there is no reservation {shown(command.reservation)}", do="`sublet reservation ls` shows all.")
    forget(step, known)
    return Done()


def forget(step: Transaction, known: ReservationRecord) -> None:
    _spare(step, known, ())
    step.emit(ev.ReservationRemoved(reservation=known.id))


def check(
    state: State,
    target: Mapping[ReservationId, ReservationRecord],
    groups: Mapping[GroupId, GroupRecord],
    wall_ns: int,
) -> None:
    """See that these reservations go together with these groups. What is as it was is not looked at again, so that a
    change can be made while a device is away."""
    new = [each for each in target.values() if state.books.reservations.get(each.id) != each]
    if new and len(target) > RESERVATIONS_MAX:
        raise InvalidRequest(
            f"there would be more than {RESERVATIONS_MAX} reservations",
            do="Remove those that are over: `reservation rm`.",
        )
    for each in new:
        if each.group not in groups and each.group != DEFAULT_GROUP:
            error = NotFound(f"there is no group {shown(each.group)}", do="`sublet group ls` shows all.")
            raise error.about(f"reservation/{each.id}/group")
        _check_spans(each)
        _check_amount(state, each, groups, wall_ns)
        for other in target.values():
            is_other = other.id != each.id and other.group == each.group
            if is_other and (both := _first_overlap(each, other)) is not None:
                raise InvalidRequest(
                    f"reservation {each.id} would overlap with {other.id} of the same group on {_utc(both.start_ns)}",
                    do=f"Remove {other.id} first, or choose another time.",
                ).about(f"reservation/{each.id}/when", f"reservation/{other.id}/when")
    for mine in target.values():
        most = most_gpus(groups.get(mine.group))
        if most is not None and mine.gpus > most and groups[mine.group] != state.books.groups.get(mine.group):
            raise InvalidRequest(
                f"group {mine.group} would have at most {_gpus(most)}, and reservation {mine.id} is for {mine.gpus}",
                do=f"Raise the limit, or remove reservation {mine.id}.",
            ).about(*keys_of_most(groups[mine.group]), f"reservation/{mine.id}/gpus")
    if any(group.floor > state.group(name).floor for name, group in groups.items()):
        _check_sum(target.values(), groups, state, wall_ns)
    else:
        for each in new:
            _check_sum(target.values(), groups, state, wall_ns, each)


def most_gpus(group: GroupRecord | None) -> int | None:
    """What its ceiling and its quota allow of GPUs."""
    if group is None:
        return None
    return min((most for most in (group.ceiling, group.quota.gpus) if most is not None), default=None)


def keys_of_most(group: GroupRecord) -> Iterator[str]:
    """Which keys of a policy file say so."""
    for key, value in (("ceiling", group.ceiling), ("gpus", group.quota.gpus)):
        if value is not None and value == most_gpus(group):
            yield f"group/{group.id}/{key}"


def _check_spans(reservation: ReservationRecord) -> None:
    spans = reservation.spans
    if len(spans) > SPANS_MAX or any(
        end <= start or (index and start < spans[index - 1].end_ns) for index, (start, end) in enumerate(spans)
    ):
        raise InvalidRequest("the times of a reservation are in order and apart from one another", do="Correct them.")


def _check_amount(state: State, new: ReservationRecord, groups: Mapping[GroupId, GroupRecord], wall_ns: int) -> None:
    if _span_after(new.spans, wall_ns) is None:
        error = InvalidRequest(f"all times of reservation {new.id} are past", do="Give one that is to come.")
        raise error.about(f"reservation/{new.id}/when")
    if new.gpus < 1:
        raise InvalidRequest(f"{new.gpus} GPUs cannot be reserved", do="Give one or more.")
    devices = _count(state, new.model, new.group)
    if new.gpus > devices:
        called = f" called {shown(new.model)}" if new.model else ""
        are = "is" if new.gpus == 1 else "are"
        text = f"{_gpus(new.gpus)}{called} {are} more than there are ({devices})"
        if devices < _count(state, new.model):
            text += " for guests of tenants; `sublet doctor --gpu` says why they cannot use the others"
        do = "Reserve fewer."
        if new.model is not None and not _count(state, new.model):
            do = "`sublet status` shows what GPUs are called; a part of the name will do."
        raise InvalidRequest(text, do=do).about(f"reservation/{new.id}/gpus", f"reservation/{new.id}/model")
    most = most_gpus(groups.get(new.group))
    if most is not None and new.gpus > most:
        raise InvalidRequest(
            f"group {new.group} may have {_gpus(most)}, fewer than the {new.gpus} to be reserved",
            do="Reserve fewer, or raise its ceiling.",
        ).about(*keys_of_most(groups[new.group]), f"reservation/{new.id}/gpus")


def _check_sum(
    reservations: Iterable[ReservationRecord],
    groups: Mapping[GroupId, GroupRecord],
    state: State,
    wall_ns: int,
    new: ReservationRecord | None = None,
) -> None:
    """At every instant to come (``new``: at which this one goes on) there are as many devices as are reserved, and kept
    by the floors of others."""
    edges = sorted(
        (at_ns, begins, each.id, each)
        for each in reservations
        for span in each.spans
        if span.end_ns > wall_ns
        for at_ns, begins in ((span.start_ns, True), (span.end_ns, False))
    )
    floors = {name: group.floor for name, group in groups.items() if group.floor}
    devices = {model: _count(state, model) for model in {None, *(each.model for *_, each in edges)}}
    now: dict[str, ReservationRecord] = {}
    for at_ns, begins, name, each in edges:
        if not begins:
            del now[name]
            continue
        now[name] = each
        if new is not None and new.id not in now:
            continue
        wanted, models = dict(floors), dict.fromkeys(devices, 0)
        for one in now.values():
            wanted[one.group] = max(wanted.get(one.group, 0), one.gpus)
            models[one.model] += one.gpus
        models[None] = sum(wanted.values())
        for model, many in models.items():
            if many > devices[model]:
                called = f" called {model}" if model else ""
                raise InvalidRequest(
                    f"on {_utc(at_ns)} reservations ({', '.join(sorted(now))}) and floors would add up to {many} GPUs"
                    f"{called}, and there are {devices[model]}",
                    do="Reserve fewer or at another time, or lower a floor.",
                ).about(*(f"reservation/{name}/gpus" for name in now), *(f"group/{name}/floor" for name in floors))


def _first_overlap(one: ReservationRecord, other: ReservationRecord) -> Span | None:
    for span in one.spans:
        found = _span_after(other.spans, span.start_ns)
        if found is not None and found.start_ns < span.end_ns:
            return Span(max(span.start_ns, found.start_ns), min(span.end_ns, found.end_ns))
    return None


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _count(state: State, model: str | None, group: GroupId = DEFAULT_GROUP) -> int:
    """Devices of the nodes that answer, in service or not, which this group can use."""
    wanted = None if model is None else [name.casefold() for name in models_of(model)]
    return sum(
        resource.device.kind is Kind.GPU
        and not resource.device.partition
        and not state.nodes[resource.node].lost
        and _can_use(group, walled=bool(resource.device.walled_trouble))
        and (wanted is None or any(name in resource.device.model.casefold() for name in wanted))
        for resource in state.resources.values()
    )
