"""Where a request that resumes parked guests can be granted: on their node, and on devices they can return to;
nowhere until they are parked, or once their parking lease is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sublet.lease.states import LIVE_STATES
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.placement import RoomsByNode
from sublet.office.ledger.records import LeaseRecord, Parks
from sublet.office.ledger.state import State
from sublet.values import Kind, NodeId, Suspend


def only_where_it_goes_on(
    state: State, lease: LeaseRecord, rooms: RoomsByNode, *, ever: bool = False
) -> Mapping[NodeId, Sequence[Room]]:
    """These rooms without those that are no use to this request. ``ever``: as if its guests were parked already."""
    if lease.resume is None:
        return rooms
    under = state.leases.get(lease.resume.lease)
    if under is None or under.parks is None or under.node is None or under.status not in LIVE_STATES:
        return {}
    node_rooms, parks = rooms.get(under.node), under.parks
    if node_rooms is None or not (parks.holds or ever):
        return {}
    return {under.node: [room for room in node_rooms if _may_come_to(state, parks, room)]}


def _may_come_to(state: State, parks: Parks, room: Room) -> bool:
    if room.kind is not Kind.GPU:
        return True
    had = [part.resource for part in parks.parts if part.kind is Kind.GPU]
    if parks.ability is Suspend.SAME_DEVICE:
        return room.resource in had
    return any(state.resources[resource].device.model == room.model for resource in had if resource in state.resources)
