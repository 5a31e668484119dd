"""What is free where, kept up to date as slices come and go, so that placing never walks the slices.

A ``Room`` is the placement's view of one resource. The same small arithmetic serves three questions: does it fit now,
would it fit if these leases were gone, would it fit if nobody were here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sublet.broker.records import ResourceRecord, SliceRecord
from sublet.lease.states import SliceState
from sublet.values import Exclusivity, Kind, NodeId, ResourceId, TenantId
from sublet.wire.orders import Part

__all__ = ["Room"]


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

    @classmethod
    def empty(cls, resource: ResourceRecord) -> Room:
        device = resource.device
        return cls(resource.id, resource.node, device.kind, device.model, device.capacity, device.capacity)

    @classmethod
    def of(cls, resource: ResourceRecord) -> Room:
        room = cls.empty(resource)
        for piece in resource.slices.values():
            room.put(piece)
        return room

    def put(self, piece: SliceRecord) -> None:
        self.take(piece.part, piece.tenant)
        if piece.state is SliceState.QUARANTINED:
            self.quarantined += 1

    def remove(self, piece: SliceRecord) -> None:
        self.give_back(piece.part, piece.tenant)
        if piece.state is SliceState.QUARANTINED:
            self.quarantined -= 1

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
        return replace(self, tenants=dict(self.tenants))


_ALONE = frozenset({Exclusivity.SESSION, Exclusivity.DEVICE})
