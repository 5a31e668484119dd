"""The volumes of one node as its rules see them: which to remove, and what to report of retained ones.

A volume is removed only if no lease has it, and none had it under a newer epoch than the order says: an order that was
under way for long may name what has become another volume of the same name since. What takes time is begun by the
hardware and seen to be over by looking, like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from sublet.lease.fence import FenceEntry, FenceTable
from sublet.lease.hardware import Hardware
from sublet.lease.teardown import Teardown
from sublet.lease_end import EndReason
from sublet.values import NS_PER_S, Epoch, Kind, LeaseId, NodeId, TenantId
from sublet.wire.orders import Grant, Part, RemoveVolume, Report, VolumeRef, VolumeRemoved, Volumes

VOLUMES_PER_REPORT: Final = 1000
"""Volumes in one report: so many fit into one message."""
AGAIN_NS: Final = NS_PER_S // 4
"""Between one look at what is being removed and the next."""


SAY_AGAIN_NS: Final = 600 * NS_PER_S
"""Between one naming of all that is kept and the next."""
SAY_LATER_NS: Final = 1 * NS_PER_S
"""After an attempt that failed."""


class NodeVolumes:
    """What is kept on this node beyond the leases that made it."""

    def __init__(
        self,
        node: NodeId,
        hardware: Hardware,
        report: Callable[[Report], None],
        fence: FenceTable,
        tenants: Mapping[LeaseId, TenantId],
        names: Mapping[LeaseId, str],
    ) -> None:
        self._node = node
        self._hardware = hardware
        self._report = report
        self._fence = fence
        self._tenants = tenants
        self._names = names
        self._removing: dict[VolumeRef, RemoveVolume] = {}
        self._had: dict[VolumeRef, Epoch] = {}
        """The newest lease seen to have a volume that was to be removed. Its epoch stands on the disk only once a
        guest has used it, and an order that is older than it must not remove the volume later either."""
        self._look_ns: int | None = None
        self._say_ns: int | None = None

    def remove(self, order: RemoveVolume, now_ns: int) -> None:
        """Begin, or go on. What was removed already is said again."""
        other = self._removing.get(order.volume)
        if other is None or other.epoch <= order.epoch:
            self._removing[order.volume] = order
        self.advance(now_ns, at_once=True)

    def forget_removals(self) -> None:
        """A restored office: it may keep what its predecessor ordered to be removed. If not, it orders it again."""
        self._removing.clear()
        self._look_ns = None

    def advance(self, now_ns: int, *, at_once: bool = False) -> None:
        """Look how far it is with those that are to go, and name those that are kept, if it is time to."""
        if self._say_ns is not None and now_ns >= self._say_ns:
            self.report_all(now_ns)
        if not self._removing or (not at_once and self._look_ns is not None and now_ns < self._look_ns):
            return
        for order in tuple(self._removing.values()):
            if self._is_over(order, now_ns):
                del self._removing[order.volume]
                removed = VolumeRemoved(node=self._node, lease=order.lease, epoch=order.epoch, volume=order.volume)
                self._report(removed)
        self._look_ns = now_ns + AGAIN_NS if self._removing else None

    def next_ns(self) -> int | None:
        """When to look again, or to speak."""
        return min((at_ns for at_ns in (self._look_ns, self._say_ns) if at_ns is not None), default=None)

    def of(self, live: FenceEntry) -> VolumeRef | None:
        """The volume that a live lease has, or is to make."""
        name = self._names.get(live.lease)
        tenant = self._tenants.get(live.lease)
        if name is None or tenant is None or not _has_blocks(live.parts):
            return None
        return VolumeRef(tenant=tenant, name=name)

    def older(self, order: Grant) -> list[FenceEntry]:
        """The live leases that have the volume of this grant by an older epoch: the office has forgotten them, as after
        a restore. A volume is one lease's at a time, like a device that tolerates no other."""
        if not order.name or not _has_blocks(order.parts):
            return []
        ref = VolumeRef(tenant=order.tenant, name=order.name)
        others = (live for live in self._fence if live.lease != order.lease and live.epoch < order.epoch)
        return [live for live in others if self.of(live) == ref]

    def in_the_way(self, order: Grant, teardowns: Iterable[Teardown]) -> bool:
        """Whether another lease has the volume of this grant, or one is not yet verified to be off it."""
        if not order.name or not _has_blocks(order.parts):
            return False
        ref = VolumeRef(tenant=order.tenant, name=order.name)
        if any(down.volume == ref and down.holds(down.part.resource) for down in teardowns):
            return True
        return any(live.lease != order.lease and self.of(live) == ref for live in self._fence)

    def why_not_admitted(self, order: Grant) -> tuple[EndReason, str] | None:
        """What speaks against a grant that goes on with a volume: that it is not here. An empty one of the same name
        would not make up for what was in it."""
        ref = VolumeRef(tenant=order.tenant, name=order.name)
        if not order.kept or self._hardware.volume_epoch(ref) is not None:
            return None
        return EndReason.DEVICE_LOST, f"volume {order.name} is not on the disk of this node any more"

    def report_all(self, now_ns: int) -> None:
        """Everything that is here, in as many reports as it takes: to an office that has come, and from then on now and
        then, since what ran here before it came may leave volumes of which it does not know."""
        kept = self._hardware.volumes()
        if kept is None:  # an office that heard of none would take all of them for lost
            self._say_ns = now_ns + SAY_LATER_NS
            return
        self._say_ns = now_ns + SAY_AGAIN_NS
        found = tuple(kept)
        for start in range(0, max(1, len(found)), VOLUMES_PER_REPORT):
            batch = found[start : start + VOLUMES_PER_REPORT]
            self._report(Volumes(node=self._node, volumes=batch, is_all=len(batch) == len(found)))

    def _is_over(self, order: RemoveVolume, now_ns: int) -> bool:
        """Whether nothing of the volume that is meant is left."""
        holder = self._held_by(order.volume)
        if holder is not None:
            self._had[order.volume] = holder
            return holder > order.epoch
        if self._is_gone(order):
            return True
        self._hardware.remove_volume(order.volume, order.epoch, now_ns)
        return self._is_gone(order)

    def _is_gone(self, order: RemoveVolume) -> bool:
        epoch = self._hardware.volume_epoch(order.volume)
        if epoch is None:
            self._had.pop(order.volume, None)
            return True
        return max(epoch, self._had.get(order.volume, epoch)) > order.epoch

    def _held_by(self, volume: VolumeRef) -> Epoch | None:
        """The epoch of the live lease that has it, whether a guest has used it yet or not."""
        return next((live.epoch for live in self._fence if self.of(live) == volume), None)


def _has_blocks(parts: Sequence[Part]) -> bool:
    return any(part.kind is Kind.BLOCK for part in parts)
