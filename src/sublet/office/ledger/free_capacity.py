"""What is free where, maintained incrementally, so that placement never scans the slices.

A ``Room`` is the placement's view of one resource. The same small arithmetic serves three questions: does it fit now,
would it fit if these leases were gone, would it fit if nothing were here.
"""

from __future__ import annotations

from dataclasses import field

from sublet.lazy_dataclass import dataclass
from sublet.lease.states import SliceState
from sublet.office.ledger.records import ForeignRecord, ResourceRecord, SliceRecord
from sublet.values import MILLIS_PER_DEVICE, Exclusivity, Kind, NodeId, ResourceId, TenantId
from sublet.wire.orders import Part


@dataclass(slots=True)
class Room:
    """One resource as seen by placement."""

    resource: ResourceId
    node: NodeId
    kind: Kind
    model: str
    capacity: int
    free: int
    exclusive: int = 0
    """Slices that tolerate no neighbour."""
    slices: int = 0
    quarantined: int = 0
    tenants: dict[TenantId, int] = field(default_factory=dict)
    """How many slices each tenant has here."""
    partition: bool = False
    """A part of a card that the hardware keeps apart: for requests for one, and for no others."""
    one_process: bool = False
    """Its driver lets one process in at a time, so leases do not share it."""
    foreign: int = 0
    """What others than our guests have; it is not free."""
    blocked: bool = False
    """Others are here, so no lease can have it to itself."""
    stays: int = 0
    """What no end of a lease gives back: it is quarantined, or kept as a volume."""
    leaving: int = 0
    """Slices in teardown."""
    reserved: bool = False
    """Kept for the group of the request that looks at it: taken before any other."""
    walled: bool = False
    """Guests of tenants other than local cannot use it."""

    @classmethod
    def empty(cls, resource: ResourceRecord) -> Room:
        """As if nothing were here, nor any stranger's process: what can ever be had."""
        device = resource.device
        free = device.capacity
        return cls(
            resource.id,
            resource.node,
            device.kind,
            device.model,
            free,
            free,
            partition=device.partition,
            one_process=device.one_process,
            walled=bool(device.walled_trouble),
        )

    @classmethod
    def without_leases(cls, resource: ResourceRecord) -> Room:
        """As if every lease had ended. The office cannot make strangers leave."""
        room = cls.empty(resource)
        room.subtract_foreign(resource.foreign)
        return room

    @classmethod
    def of(cls, resource: ResourceRecord) -> Room:
        room = cls.without_leases(resource)
        for piece in resource.slices.values():
            room.put(piece)
        return room

    def millis_of(self, amount: int) -> int:
        """How many thousandths of the device a shared part of it is."""
        return max(1, min(amount, self.capacity) * MILLIS_PER_DEVICE // self.capacity)

    def subtract_foreign(self, foreign: ForeignRecord | None) -> None:
        """So much is no longer free, in place of what was not before."""
        amount = 0 if foreign is None else foreign.amount
        self.free += self.foreign - amount
        self.foreign, self.blocked = amount, foreign is not None and foreign.blocks

    def put(self, piece: SliceRecord) -> None:
        self.take(piece.part, piece.tenant)
        self._count(piece, +1)

    def remove(self, piece: SliceRecord) -> None:
        self.give_back(piece.part, piece.tenant)
        self._count(piece, -1)

    def _count(self, piece: SliceRecord, sign: int) -> None:
        if piece.state is SliceState.QUARANTINED:
            self.quarantined += sign
            self.stays += sign * piece.part.amount
        elif piece.state is SliceState.RETAINED:
            self.stays += sign * piece.part.amount
        elif piece.state is SliceState.TEARDOWN:
            self.leaving += sign

    def take(self, part: Part, tenant: TenantId) -> None:
        self.free -= part.amount
        self.slices += 1
        self.exclusive += part.exclusivity in _ALONE
        self.tenants[tenant] = self.tenants.get(tenant, 0) + 1

    def give_back(self, part: Part, tenant: TenantId) -> None:
        self.free += part.amount
        self.slices -= 1
        self.exclusive -= part.exclusivity in _ALONE
        if self.tenants[tenant] == 1:
            del self.tenants[tenant]
        else:
            self.tenants[tenant] -= 1

    def copy(self) -> Room:
        return Room(  # spelt out, since this is done often: it takes an eighth of the time
            self.resource,
            self.node,
            self.kind,
            self.model,
            self.capacity,
            self.free,
            self.exclusive,
            self.slices,
            self.quarantined,
            dict(self.tenants),
            self.partition,
            self.one_process,
            self.foreign,
            self.blocked,
            self.stays,
            self.leaving,
            self.reserved,
            self.walled,
        )

    @property
    def free_without_leases(self) -> int:
        """What is free once every lease has come to its end. What waits for a person, or for a volume's time, stays."""
        return max(self.free, self.capacity - self.foreign - self.stays)  # a volume it goes on with is free to it

    def after_all_leases(self) -> Room:
        """As if every lease had come to its end."""
        room = self.copy()
        room.free = self.free_without_leases
        room.slices, room.exclusive, room.tenants = 0, 0, {}
        return room


_ALONE = frozenset({Exclusivity.SESSION, Exclusivity.DEVICE})
