"""The disk of a pretended machine as a ledger's agents find it: what guests left there, whatever any book says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sublet.lease_end import EndReason
from sublet.values import Epoch, Kind, LeaseId, NodeId
from sublet.wire.orders import (
    End,
    Grant,
    NotHeld,
    Order,
    RemoveVolume,
    Report,
    StoredVolume,
    TornDown,
    VolumeRef,
    Volumes,
)

__all__ = ["Disk"]


class Disk:
    """The volumes of all nodes."""

    def __init__(self) -> None:
        self.stored: dict[tuple[NodeId, VolumeRef], StoredVolume] = {}
        self.used: dict[LeaseId, tuple[NodeId, VolumeRef, Epoch]] = {}
        """What the agents believe to be in use, by lease."""
        self.written = 0
        self.removed: list[VolumeRef] = []

    def obey(self, order: Order, node: NodeId, *, writes: bool) -> Report | None:
        """Carry out what concerns the disk; an answer if that is another than usual."""
        match order:
            case Grant() if order.name:
                return self._granted(order, node, writes=writes)
            case End():
                self.used.pop(order.lease, None)
            case RemoveVolume():
                stored = self.stored.get((node, order.volume))
                if stored is not None and stored.epoch <= order.epoch:
                    assert not self._holder(node, order.volume), f"{order.volume} is removed while it is in use"
                    del self.stored[node, order.volume]
                    self.removed.append(order.volume)
            case _:
                pass
        return None

    def _granted(self, order: Grant, node: NodeId, *, writes: bool) -> Report | None:
        ref = VolumeRef(tenant=order.tenant, name=order.name)
        part = next((part for part in order.parts if part.kind is Kind.BLOCK), None)
        if part is None:
            return None
        old = self.stored.get((node, ref))
        if order.kept and old is None and order.lease not in self.used:
            return NotHeld(
                node=node, lease=order.lease, epoch=order.epoch, number=order.number, reason=EndReason.DEVICE_LOST
            )
        other = self._holder(node, ref)
        assert other in (None, order.lease), f"{ref} is given to {order.lease}, and {other} has it"
        if old is not None:
            assert (old.resource, old.size) == (part.resource, part.amount), f"{ref} is {old}, and is given as {part}"
            assert old.epoch <= order.epoch, f"{ref} was held by {old.epoch} already, and is given to {order.epoch}"
        self.used[order.lease] = (node, ref, order.epoch)
        if writes or old is not None:
            self.written += 1
            self.stored[node, ref] = StoredVolume(
                volume=ref, resource=part.resource, size=part.amount, lease=order.lease, epoch=order.epoch
            )
        return None

    def told(self, report: Report, order: Order, node: NodeId) -> Report:
        """What an agent says of a lease that is over: whether anything is kept."""
        if isinstance(report, TornDown) and isinstance(order, End) and order.volume is not None:
            return replace(report, kept=(node, order.volume) in self.stored)
        return report

    def listing(self, node: NodeId, is_known: Callable[[StoredVolume], bool]) -> Volumes:
        """What it names: all that nobody has."""
        kept = [
            one
            for (at, ref), one in self.stored.items()
            if at == node and not self._holder(node, ref) and is_known(one)
        ]
        return Volumes(node=node, volumes=tuple(kept))

    def _holder(self, node: NodeId, ref: VolumeRef) -> LeaseId | None:
        return next((lease for lease, (at, held, _) in self.used.items() if (at, held) == (node, ref)), None)
