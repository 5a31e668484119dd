"""Bugs of volumes, put into the real parts while a seed runs (see ``mutants``)."""

from __future__ import annotations

from typing import Any, Final

from sublet.lease.node_volumes import NodeVolumes
from sublet.office.ledger import promised_parts, volumes
from sublet.office.ledger.records import LeaseRecord, ResourceRecord, SliceRecord
from sublet.office.ledger.state import State
from sublet.office.ledger.step import Step
from sublet.testing.memory import MemoryAgent
from sublet.values import Epoch
from sublet.wire.orders import RemoveVolume, VolumeRef, VolumeRemoved
from tests.simulation.mutant import Mutant


def _free_with_its_lease(original: Any) -> Any:
    def verified(step: Step, resource: ResourceRecord, piece: SliceRecord, *, kept: bool) -> None:
        original(step, resource, piece, kept=False)

    return verified


def _forgets_at_a_crash(original: Any) -> Any:
    def restart(self: MemoryAgent) -> None:
        original(self)
        held = dict(self.machine.disk.stored)

        def volume_epoch(volume: VolumeRef) -> Epoch | None:
            stored = self.machine.disk.stored.get(volume)
            return None if stored is None or stored == held.get(volume) else stored.epoch

        self._hardware.volume_epoch = volume_epoch  # type: ignore[method-assign]

    return restart


def _removed_when_ordered(_original: Any) -> Any:
    def remove(self: NodeVolumes, order: RemoveVolume, now_ns: int) -> None:
        removed = VolumeRemoved(node=self._node, lease=order.lease, epoch=order.epoch, volume=order.volume)
        self._report(removed)

    return remove


def _wherever_there_is_room(_original: Any) -> Any:
    def only_where_its_volume_is(state: State, lease: LeaseRecord, rooms: Any, *, ever: bool = False) -> Any:
        return rooms

    return only_where_its_volume_is


VOLUMES: Final[dict[str, Mutant]] = {
    "K1": Mutant(
        "what a named lease leaves is not kept in the books",
        "volumes that leak when a pod is deleted",
        ((volumes, "verified", _free_with_its_lease),),
    ),
    "K2": Mutant(
        "an agent that crashed between keeping and reporting says that there is nothing",
        "lost state that is taken for none",
        ((MemoryAgent, "restart", _forgets_at_a_crash),),
    ),
    "K3": Mutant(
        "a volume is removed when it was ordered, not when it was seen to be gone",
        "kubernetes #141471",
        ((NodeVolumes, "remove", _removed_when_ordered),),
    ),
    "K4": Mutant(
        "two leases have one volume",
        "ReadWriteOnce volumes that are mounted twice",
        ((promised_parts, "only_where_its_volume_is", _wherever_there_is_room),),
    ),
}
