"""Promised parts: what placement sees while a request's victims are ending.

A promise is made in the same step as the notices to its victims. Until it is kept or dropped, all other requests see
the promised parts as taken. Physical room counts as well: a victim that still holds twice what was promised leaves
nothing for others before it has left.
"""

from __future__ import annotations

from sublet.lease.states import LeaseStatus, SliceState
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.groups import only_within_ceiling
from sublet.office.ledger.parked_placement import only_where_it_goes_on
from sublet.office.ledger.placement import RoomsByNode
from sublet.office.ledger.records import LeaseRecord
from sublet.office.ledger.replacement import millis_beside
from sublet.office.ledger.reservations import rooms_seen
from sublet.office.ledger.state import State
from sublet.office.ledger.volume_placement import only_where_its_volume_is
from sublet.values import Exclusivity, Kind, LeaseId, NodeId, ResourceId


def rooms_for(state: State, lease: LeaseRecord) -> RoomsByNode:
    """Rooms in service on the nodes with the labels it asks for, as this lease, waiting or just come, may see them."""
    others = [state.leases[other] for other in state.promises if other != lease.id]
    selector = lease.selector
    if not others and not selector:
        return _only_where_it_can_be(state, lease, state.rooms_by_node)
    adjusted = _with_promises(state, others)
    seen = {
        node: [adjusted.get(room.resource, room) for room in rooms]
        for node, rooms in state.rooms_by_node.items()
        if matches(state, node, selector)
    }
    return _only_where_it_can_be(state, lease, seen)


def _only_where_it_can_be(state: State, lease: LeaseRecord, rooms: RoomsByNode) -> RoomsByNode:
    rooms = rooms_seen(state, lease, rooms)
    if state.books.groups:
        rooms = only_within_ceiling(state, lease, rooms, millis_beside(state, lease))
    if lease.name is not None:
        rooms = only_where_its_volume_is(state, lease, rooms)
    return only_where_it_goes_on(state, lease, rooms)


def can_be_kept(state: State, lease: LeaseRecord, *, without: LeaseRecord | None = None) -> bool:
    """Whether the promised parts are free now, or would be ``without`` this lease. What goes on with a
    volume is placed anew."""
    if state.volume_of(lease) is not None:
        return False
    for part in lease.promise:
        room, resource = state.rooms[part.resource], state.resources[part.resource]
        for had in () if without is None else without.parts:
            if had.resource == part.resource:
                room = room.copy()
                room.give_back(had, lease.tenant)
        if resource.state is not SliceState.FREE or state.nodes[resource.node].lost:
            return False
        alone = part.kind is Kind.GPU and part.exclusivity is not Exclusivity.SHARED
        quarantined = part.kind is Kind.GPU and room.quarantined
        if room.free < part.amount or room.exclusive or quarantined or (alone and (room.slices or room.blocked)):
            return False
    return True


def victims_left(state: State, lease: LeaseRecord) -> bool:
    """Whether every victim of the promise is gone, so that nothing more will come free by itself."""
    return not any(
        victim in state.leases and state.leases[victim].status is not LeaseStatus.ENDED for victim in lease.victims
    )


def _with_promises(state: State, others: list[LeaseRecord]) -> dict[ResourceId, Room]:
    adjusted: dict[ResourceId, Room] = {}
    for other in others:
        for part in other.promise:
            room = adjusted.setdefault(part.resource, state.rooms[part.resource].copy())
            before = room.free
            leaving = sum(_held_on(state, victim, part.resource) for victim in other.victims)
            room.take(part, other.tenant)
            room.free = min(before, before + leaving - part.amount)
    return adjusted


def _held_on(state: State, victim: LeaseId, resource: ResourceId) -> int:
    lease = state.leases.get(victim)
    piece = None if lease is None else state.resources[resource].slices.get(str(lease.epoch))
    return 0 if piece is None else piece.part.amount


def matches(state: State, node: NodeId, selector: dict[str, str]) -> bool:
    """Whether the node has all these labels."""
    labels = state.nodes[node].labels
    return all(labels.get(key) == value for key, value in selector.items())
