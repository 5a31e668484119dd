"""Where a request for an existing volume can be granted: on its node, with its slice; nowhere while a lease has it,
it is being retained or removed, or its node is away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

from sublet.lease.states import SliceState, VolumeState
from sublet.office.ledger import replacement
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.placement import RoomsByNode
from sublet.office.ledger.records import LeaseRecord, SliceRecord, VolumeRecord
from sublet.office.ledger.state import Held, State
from sublet.values import Kind, NodeId, format_size


def only_where_its_volume_is(
    state: State, lease: LeaseRecord, rooms: RoomsByNode, *, ever: bool = False
) -> Mapping[NodeId, Sequence[Room]]:
    """These rooms without those that are no use to this request. ``ever``: as if no lease had it."""
    volume = _volume(state, lease)
    if volume is None:
        return rooms
    node_rooms, piece = rooms.get(volume.node), _takeable(state, lease, volume)
    if node_rooms is None or (piece is None and not ever):
        return {}
    return {
        volume.node: [
            _with_its_own(room, piece, volume) if room.resource == volume.resource else room
            for room in node_rooms
            if room.kind is not Kind.BLOCK or room.resource == volume.resource
        ]
    }


def held_beside(state: State, lease: LeaseRecord, held: Held | None = None) -> Held:
    """What its tenant holds (or ``held``, what its group does), without the volume that this would go on with, and
    without the lease that it replaces: neither is counted twice."""
    held = state.held_by(lease.tenant) if held is None else held
    held, volume = replacement.without_it(state, lease, held), _volume(state, lease)
    if volume is None or volume.state is not VolumeState.RETAINED:
        return held
    held = copy(held)
    held.keep(-volume.size)
    return held


def why_not_yet(state: State, lease: LeaseRecord) -> str | None:
    """Why a request for a volume has to wait for that, in words."""
    volume = _volume(state, lease)
    if volume is None or _takeable(state, lease, volume) is not None:
        return None
    if state.nodes[volume.node].lost:
        return f"volume {volume.name} is on {volume.node}, which does not answer"
    if volume.state is VolumeState.REMOVING:
        return f"the old volume {volume.name} is being removed"
    piece = _piece(state, volume)
    if piece.state is SliceState.RETAINED:
        return f"volume {volume.name} has {format_size(volume.size)}, and that is not what was asked for"
    if volume.state is VolumeState.RETAINED:
        return f"volume {volume.name} is being looked for"
    if piece.state is SliceState.LEASED:
        return f"volume {volume.name} is in use by lease {volume.lease}"
    if piece.state is SliceState.QUARANTINED:
        return f"volume {volume.name} could not be put away: {piece.detail}"
    return f"volume {volume.name} is being put away"


def _volume(state: State, lease: LeaseRecord) -> VolumeRecord | None:
    volume = state.volume_of(lease)
    return None if volume is None or volume.state is VolumeState.LOST else volume


def _takeable(state: State, lease: LeaseRecord, volume: VolumeRecord) -> SliceRecord | None:
    """Its slice, if it can be taken now by a request for just so much."""
    piece = _piece(state, volume)
    wanted = sum(want.amount for want in lease.wants if want.kind is Kind.BLOCK)
    is_free = volume.state is VolumeState.RETAINED and piece.state is SliceState.RETAINED
    return piece if is_free and wanted == volume.size else None


def _piece(state: State, volume: VolumeRecord) -> SliceRecord:
    return state.resources[volume.resource].slices[str(volume.epoch)]


def _with_its_own(room: Room, piece: SliceRecord | None, volume: VolumeRecord) -> Room:
    room = room.copy()
    if piece is not None and piece.tenant in room.tenants:
        room.give_back(piece.part, piece.tenant)
    room.free = max(room.free, volume.size)  # it is there, whatever the capacity is now
    return room
