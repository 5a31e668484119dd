"""A group's limits: quota and ceiling, which bound it, and the floor, which others leave free for it.

GPUs of a group are counted in thousandths of a device, so that parts of one card add up to it.

A request is *inside the floor* of its group if with it the group holds no more than its floor. What was promised counts
as held by its beneficiary, and no longer by the leases that have notice for it: otherwise two requests in one moment
would both be inside a floor that has room for one.
"""

from __future__ import annotations

from collections.abc import Sequence

from sublet.lease.states import LIVE_STATES
from sublet.office.ledger.fairness import amounts_of
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.placement import RoomsByNode
from sublet.office.ledger.records import LeaseRecord, Want
from sublet.office.ledger.state import State
from sublet.values import MILLIS_PER_DEVICE, Exclusivity, GroupId, Kind
from sublet.wire.orders import Part


def gpu_millis(parts: Sequence[Part]) -> int:
    """How much of devices these parts are."""
    return amounts_of(parts)[0]


def wanted_millis(state: State, wants: Sequence[Want]) -> int:
    """How much of devices these wants will be; for a part of a device, of the largest there is."""
    found = 0
    for want in wants:
        if want.kind is Kind.GPU and want.exclusivity is Exclusivity.SHARED:
            sizes = (r.device.capacity for r in state.resources.values() if r.device.kind is Kind.GPU)
            largest = max(sizes, default=0)
            found += want.count * max(1, want.amount * MILLIS_PER_DEVICE // largest) if largest else 0
        elif want.kind is Kind.GPU:
            found += want.count * MILLIS_PER_DEVICE
    return found


def over_ceiling(state: State, lease: LeaseRecord, held_millis: int) -> str | None:
    """What the ceiling of its group says against it, if the group held so much already."""
    group = state.group(state.group_of(lease.tenant))
    if group.ceiling is None:
        return None
    wanted = gpu_millis(lease.promise) or wanted_millis(state, lease.wants)
    if not wanted or held_millis + wanted <= group.ceiling * MILLIS_PER_DEVICE:
        return None
    return (
        f"the ceiling of group {group.id} is {_gpus(group.ceiling * MILLIS_PER_DEVICE)}, "
        f"{held_millis / MILLIS_PER_DEVICE:g} held and {wanted / MILLIS_PER_DEVICE:g} asked"
    )


def millis_left(state: State, lease: LeaseRecord, held: int | None = None) -> int | None:
    """How much more the ceiling of its group leaves, beside what that holds or ``held``; None: there is no ceiling."""
    group = state.group_of(lease.tenant)
    ceiling = state.group(group).ceiling
    if ceiling is None:
        return None
    return ceiling * MILLIS_PER_DEVICE - (held_millis(state, group) if held is None else held)


def only_within_ceiling(state: State, lease: LeaseRecord, rooms: RoomsByNode, held: int) -> RoomsByNode:
    """These rooms without the devices of which what it asks for is a larger part than the ceiling leaves: the smaller
    the device, the larger a part of it is the same amount."""
    want = next((want for want in lease.wants if want.exclusivity is Exclusivity.SHARED), None)
    left = None if want is None else millis_left(state, lease, held)
    if want is None or left is None:
        return rooms
    most = left // want.count
    return {
        node: [room for room in node_rooms if room.kind is not Kind.GPU or room.millis_of(want.amount) <= most]
        for node, node_rooms in rooms.items()
    }


def is_within_floor(state: State, lease: LeaseRecord) -> bool:
    """Whether its group holds no more than its floor, so that no other group has a claim to this lease."""
    floor = state.group(state.group_of(lease.tenant)).floor
    return floor > 0 and held_millis(state, state.group_of(lease.tenant)) <= floor * MILLIS_PER_DEVICE


def held_millis(state: State, group: GroupId) -> int:
    """How much of devices a group holds now."""
    account = state.books.group_accounts.get(group)
    return 0 if account is None else account.level[0]


class Floors:
    """What groups hold once all promises are kept, against their floors, at one moment."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._levels: dict[GroupId, int] = {}
        self.any = state.has_floors
        for promised in map(state.leases.__getitem__, state.promises) if self.any else ():
            self._add(promised, gpu_millis(promised.promise))
            for victim in map(state.leases.get, promised.victims):
                if victim is not None and victim.status in LIVE_STATES:
                    self._add(victim, -gpu_millis(victim.parts))

    def has_room_for(self, request: LeaseRecord) -> bool:
        """Whether the request is inside the floor of its group, if a part of a device is of the largest there is."""
        if not self.any:
            return False
        group, wanted = self._state.group_of(request.tenant), wanted_millis(self._state, request.wants)
        return wanted > 0 and self._level(group) + wanted <= self._state.group(group).floor * MILLIS_PER_DEVICE

    def rooms_inside(self, request: LeaseRecord, rooms: Sequence[Room]) -> Sequence[Room]:
        """Those on which the request is inside the floor: the smaller the device, the more of it is the same amount."""
        want = next((want for want in request.wants if want.exclusivity is Exclusivity.SHARED), None)
        if want is None:
            return rooms
        group = self._state.group_of(request.tenant)
        most = -self.above(group) // want.count
        return [room for room in rooms if room.kind is not Kind.GPU or room.millis_of(want.amount) <= most]

    def above(self, group: GroupId) -> int:
        """How much the group holds that is not kept for it by its floor."""
        return self._level(group) - self._state.group(group).floor * MILLIS_PER_DEVICE

    def _level(self, group: GroupId) -> int:
        return self._levels.get(group, held_millis(self._state, group))

    def _add(self, lease: LeaseRecord, millis: int) -> None:
        group = self._state.group_of(lease.tenant)
        self._levels[group] = self._level(group) + millis


def _gpus(millis: int) -> str:
    count = millis / MILLIS_PER_DEVICE
    return f"{count:g} GPU{'' if count == 1 else 's'}"
