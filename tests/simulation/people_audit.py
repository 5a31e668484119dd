"""What somebody knows of tenants, nodes and devices who reads the audit records and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from sublet.lease.states import SliceState
from sublet.office.ledger import events as ev
from sublet.office.ledger.records import TenantRecord
from sublet.values import Epoch, NodeId, ResourceId, TenantId

if TYPE_CHECKING:
    from sublet.office.ledger.state import State

_T = TypeVar("_T")
_BROKEN: Final = (SliceState.QUARANTINED, SliceState.LOST)


@dataclass(slots=True)
class AuditedState:
    """As the records have it, or as the office has it: the two are compared."""

    tenants: dict[TenantId, TenantRecord] = field(default_factory=dict)
    draining: set[NodeId] = field(default_factory=set)
    lost: set[NodeId] = field(default_factory=set)
    broken: dict[ResourceId, SliceState] = field(default_factory=dict)
    """Devices that are quarantined as a whole, or gone."""
    fenced: set[tuple[ResourceId, Epoch]] = field(default_factory=set)
    """Slices that are quarantined."""

    @classmethod
    def of(cls, state: State) -> AuditedState:
        """What the office has. Of a node that is lost nothing is known but that."""
        made = cls(
            tenants=dict(state.tenants),
            draining={one.id for one in state.nodes.values() if one.draining},
            lost={one.id for one in state.nodes.values() if one.lost},
        )
        for resource in state.resources.values():
            if resource.node not in made.lost:
                made._look_at(state, resource.id)
        return made

    def take(self, event: ev.Event, state: State) -> bool:
        """Read one record; ``state`` is what the office has come to with it. Whether it told of a change."""
        match event:
            case ev.TenantSet(tenant=tenant):
                before, self.tenants[tenant.id] = self.tenants.get(tenant.id), tenant
                return before != tenant
            case ev.TenantRemoved(tenant=gone):
                return self.tenants.pop(gone, None) is not None
            case ev.NodeDrained(node=node, draining=draining):
                return _put(self.draining, node, draining)
            case ev.NodeLost(node=node):
                self._forget(state, node)
                return _put(self.lost, node, True)
            case ev.NodeReturned(node=node):  # what is found on it follows from what was there
                for resource in state.nodes[node].resources:
                    self._look_at(state, resource)
                return _put(self.lost, node, False)
            case ev.ResourceFaulted(resource=resource):
                return self._break(resource, SliceState.QUARANTINED)
            case ev.ResourceLost(resource=resource):
                return self._break(resource, SliceState.LOST)
            case ev.ResourceReturned(resource=resource):
                was_lost = self.broken.pop(resource, None) is SliceState.LOST
                self._look_at(state, resource)
                return was_lost
            case ev.Quarantined(resource=resource, epoch=epoch, hard=hard):
                return _put(self.fenced, (resource, epoch), True) or hard  # it was late, and now it has failed
            case ev.Cleared(resource=resource, epoch=None):
                return self.broken.pop(resource, None) is SliceState.QUARANTINED
            case ev.Cleared(resource=resource, epoch=epoch):
                return epoch is not None and _put(self.fenced, (resource, epoch), False)
            case ev.TornDown(resource=resource, epoch=epoch):
                self.fenced.discard((resource, epoch))
                return True
            case _:
                return True

    def _break(self, resource: ResourceId, state: SliceState) -> bool:
        before, self.broken[resource] = self.broken.get(resource), state
        return before is not state

    def _look_at(self, state: State, resource: ResourceId) -> None:
        known = state.resources[resource]
        if known.state in _BROKEN:
            self.broken[resource] = known.state
        for piece in known.slices.values():
            if piece.state is SliceState.QUARANTINED:
                self.fenced.add((resource, piece.epoch))

    def _forget(self, state: State, node: NodeId) -> None:
        for resource in state.nodes[node].resources:
            self.broken.pop(resource, None)
        self.fenced -= {one for one in self.fenced if one[0] in state.nodes[node].resources}


def _put(found: set[_T], one: _T, is_in: bool) -> bool:
    """Whether that changed something."""
    changed = (one in found) is not is_in
    (found.add if is_in else found.discard)(one)
    return changed
