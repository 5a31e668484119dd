"""Where a request fits. Pure: a request and some rooms in, parts out.

All wants of a request go to one node, all or nothing, because what runs under a lease is one tree of processes. Within
a node the tightest place is taken: a shared slice goes where neighbours are already, an exclusive one to the smallest
empty device that is large enough, so that large things stay whole for those who need them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import Final

import msgspec

from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.records import LOCAL_TENANT, Want
from sublet.values import MILLIS_PER_DEVICE, Exclusivity, Kind, NodeId, TenantId
from sublet.wire.orders import Device, Part

MODEL_OR: Final = "|"
"""Between models of which any would do."""
ANY_MODEL: Final = "*"
RoomsByNode = Mapping[NodeId, Sequence[Room]]
"""Rooms in service, by node. Neither the mapping nor the rooms in it are changed by anything in here."""


def fit(wants: Sequence[Want], tenant: TenantId, rooms: RoomsByNode, *, mix: bool) -> tuple[NodeId, list[Part]] | None:
    """The node and the parts for all wants, or None. ``mix`` lets tenants share a device. Of several models the first
    that fits on any node is taken."""
    for alternative in _alternatives(wants):
        for node, node_rooms in rooms.items():
            parts = _on_node(alternative, tenant, node_rooms, mix=mix)
            if parts is not None:
                return node, parts
    return None


def fit_many(
    wants: Sequence[Want], tenant: TenantId, rooms: RoomsByNode, most: int, *, mix: bool
) -> list[tuple[NodeId, list[Part]]]:
    """Where ``fit`` would place the same wants one time after the other, ``most`` times or as often as they fit."""
    found: list[tuple[NodeId, list[Part]]] = []
    for node, node_rooms in rooms.items():
        if len(found) == most:
            break
        if fit_on_node(wants, tenant, node_rooms, mix=mix) is None:
            continue
        copies = [room.copy() for room in node_rooms]
        by_id = {room.resource: room for room in copies}
        while len(found) < most and (parts := fit_on_node(wants, tenant, copies, mix=mix)) is not None:
            for part in parts:
                by_id[part.resource].take(part, tenant)
            found.append((node, parts))
    return found


def fit_on_node(wants: Sequence[Want], tenant: TenantId, rooms: Sequence[Room], *, mix: bool) -> list[Part] | None:
    """The parts for all wants on these rooms, or None if one of them does not fit."""
    found = (_on_node(alternative, tenant, rooms, mix=mix) for alternative in _alternatives(wants))
    return next((parts for parts in found if parts is not None), None)


def fits_without_leases(wants: Sequence[Want], tenant: TenantId, rooms: Sequence[Room]) -> bool:
    """Whether the wants would fit on these rooms if every lease there had come to its end."""
    if len({want.kind for want in wants}) < len(wants):  # what one want takes, another does not find
        return fit_on_node(wants, tenant, [room.after_all_leases() for room in rooms], mix=True) is not None
    return any(
        all(
            sum(_suits(want, tenant, room, room.free_without_leases) for room in rooms) >= want.count
            for want in alternative
        )
        for alternative in _alternatives(wants)
    )


class FreeRooms:
    """The rooms in which anything is free at one moment, kept for others or not: a cheap first test for a long queue,
    most of which fits into none of them. As long as nothing becomes free, what did not fit does not fit later."""

    def __init__(self, rooms: RoomsByNode) -> None:
        self._rooms = {node: [room for room in node_rooms if room.free > 0] for node, node_rooms in rooms.items()}
        self._too_much: set[Sequence[Want]] = set()

    def have_room_for(self, wants: tuple[Want, ...]) -> bool:
        """Whether the wants would fit on any node if nothing were kept for others."""
        if wants not in self._too_much and not self.have_room_outside((), wants):
            self._too_much.add(wants)
        return wants not in self._too_much

    def have_room_outside(self, closed: Container[NodeId], wants: tuple[Want, ...]) -> bool:
        """The same on a node that is not closed."""
        rooms = {node: node_rooms for node, node_rooms in self._rooms.items() if node not in closed}
        return fit(wants, LOCAL_TENANT, rooms, mix=True) is not None  # to whom every room is open


def _alternatives(wants: Sequence[Want]) -> Iterator[Sequence[Want]]:
    """The wants with one model each: several devices are always of the same."""
    names = next((want.model for want in wants if want.model is not None), "")
    if MODEL_OR not in names:
        yield wants
        return
    for name in models_of(names):
        yield [want if want.model is None else msgspec.structs.replace(want, model=name) for want in wants]


def _on_node(wants: Sequence[Want], tenant: TenantId, rooms: Sequence[Room], *, mix: bool) -> list[Part] | None:
    parts: list[Part] = []
    for want in wants:
        taken = {part.resource for part in parts} if parts else ()  # `count` devices are different devices
        least = want.amount  # leaves out most rooms of a full node before the call
        fitting = [
            room
            for room in rooms
            if room.free >= least and room.resource not in taken and _admits(want, tenant, room, mix=mix)
        ]
        if len(fitting) < want.count:
            return None
        parts += [_part(want, room) for room in nsmallest(want.count, fitting, key=_tightness)]
    return parts


def largest(want: Want, tenant: TenantId, rooms: Iterable[Room], *, mix: bool) -> int:
    """The largest amount of this kind and class that fits into one of these rooms; 0 if none does."""
    return max(_amounts(want, tenant, rooms, mix=mix), default=0)


def largest_each(want: Want, tenant: TenantId, rooms: Iterable[Room], *, mix: bool) -> int:
    """The same for ``count`` of these rooms, in each of them."""
    found = nlargest(want.count, _amounts(want, tenant, rooms, mix=mix))
    return found[-1] if len(found) == want.count else 0


def replace_amount(want: Want, amount: int) -> Want:
    """The same want with another amount."""
    return Want(
        kind=want.kind,
        amount=amount,
        count=want.count,
        exclusivity=want.exclusivity,
        model=want.model,
        least=want.least,
    )


def is_class_honoured(want: Want, devices: Iterable[Device]) -> bool:
    """Partitions need hardware that splits itself, and sharing a driver that lets several processes in; where there is
    none they are refused, never downgraded."""
    match want.exclusivity:
        case Exclusivity.PARTITION:
            return any(device.partition for device in devices)
        case Exclusivity.SHARED:
            found = [device.one_process for device in devices if device.kind is Kind.GPU and not device.partition]
            return not found or not all(found)
        case _:
            return True


def models_of(names: str) -> tuple[str, ...]:
    """``H200 | A100``: the models that would do, the one that is liked best first."""
    return tuple(name.strip() for name in names.split(MODEL_OR))


def is_model(names: str, room: Room) -> bool:
    """Whether it is one of these models. A part of the name is enough, in any case."""
    return is_called(names, room.model)


def is_called(names: str, model: str) -> bool:
    """Whether the model of a device is one of these."""
    model = model.casefold()
    return any(name.casefold() in model for name in models_of(names))


def _amounts(want: Want, tenant: TenantId, rooms: Iterable[Room], *, mix: bool) -> Iterator[int]:
    smallest = replace_amount(want, 1)
    return (room.free for room in rooms if room.free > 0 and _admits(smallest, tenant, room, mix=mix))


def _admits(want: Want, tenant: TenantId, room: Room, *, mix: bool) -> bool:
    if room.kind is not want.kind or room.free < want.amount:
        return False
    if want.kind is not Kind.GPU:
        return True
    if want.exclusivity is not Exclusivity.SHARED:
        return room.slices == 0 and _suits(want, tenant, room, room.free)
    if not (mix or not room.tenants or (len(room.tenants) == 1 and tenant in room.tenants)):
        return False
    return room.exclusive == 0 and _suits(want, tenant, room, room.free)


def _suits(want: Want, tenant: TenantId, room: Room, free: int) -> bool:
    """Whether the room, with so much free, would do for the want if no other lease were there."""
    if room.kind is not want.kind or free < want.amount:
        return False
    if want.kind is not Kind.GPU:
        return True
    if room.quarantined or (want.model is not None and not is_model(want.model, room)):
        return False
    if room.partition is not (want.exclusivity is Exclusivity.PARTITION):
        return False
    if room.walled and tenant != LOCAL_TENANT:
        return False
    return not (room.one_process if want.exclusivity is Exclusivity.SHARED else room.blocked)


def _tightness(room: Room) -> tuple[bool, bool, int, str]:
    return (not room.reserved, room.slices == 0, room.free, room.resource)


def _part(want: Want, room: Room) -> Part:
    if want.kind is not Kind.GPU:
        return Part(resource=room.resource, kind=want.kind, amount=want.amount)
    shared = want.exclusivity is Exclusivity.SHARED
    return Part(
        resource=room.resource,
        kind=want.kind,
        amount=want.amount if shared else room.free,  # of an empty device: all but what strangers have
        millis=room.millis_of(want.amount) if shared else MILLIS_PER_DEVICE,
        exclusivity=want.exclusivity or Exclusivity.SESSION,
    )
