"""What must hold of volumes: the disks say what is there, and the books of the office what ought to be.

A part of the onlooker (``watch``). That two leases are never in one volume, that it keeps its size and its place, and
that what is kept takes room, is seen by the machine itself (``testing.machine``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet.lease.states import VolumeState
from sublet.office.ledger.records import volume_key

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from sublet.wire.orders import StoredVolume
    from tests.simulation.node import NodeProcess
    from tests.simulation.world import World

_IN_THE_BOOKS = frozenset({VolumeState.LIVE, VolumeState.RETAINED})


class KeptRules:
    """One world's."""

    def __init__(self, fail: Callable[[str, str], None], world: World) -> None:
        self._fail = fail
        self._world = world
        self._seen: dict[str, int] = {}

    def look(self, node: NodeProcess) -> None:
        """V1: nothing is taken off a disk that the office keeps in its books."""
        removed = node.machine.disk.removed
        seen = self._seen.get(node.name, 0)
        self._seen[node.name] = len(removed)
        state = self._state()
        for stored in removed[seen:]:
            self._world.coverage.seen["volume removed"] += 1
            volume = None if state is None else state.volumes.get(_key(stored))
            obeys = node.agent.incarnation == self._world.office.disk.incarnation
            if volume is not None and volume.state in _IN_THE_BOOKS and volume.node == node.agent.node and obeys:
                self._fail("V1", f"{stored.volume} ({stored.epoch}) was removed, and is {volume.state} in the books")

    def finish(self) -> None:
        """V2: what lies on a disk at the end is in the books, unless these came out of a backup a moment ago. V3: what
        the books keep is on its disk."""
        state, world = self._state(), self._world
        if state is None or world.scenario.mode != "liveness" or "restore" in world.scenario.rates:
            return
        for node in world.nodes:
            if not node.alive or state.nodes[node.agent.node].lost:
                continue
            stored = node.machine.disk.stored
            for ref, one in stored.items():
                volume = state.volumes.get(volume_key(ref.tenant, ref.name))
                world.coverage.seen["volume kept"] += 1
                if volume is None or volume.state is VolumeState.LOST:
                    self._fail("V2", f"{ref} ({one.epoch}) is on the disk of {node.name}, and nobody knows of it")
            for volume in state.volumes.values():
                is_here = volume.node == node.agent.node and volume.state is VolumeState.RETAINED
                if is_here and volume.ref not in stored and not world.scenario.late and not world.scenario.duplicates:
                    self._fail("V3", f"volume {volume.key} is kept in the books, and {node.name} has nothing of it")

    def _state(self) -> State | None:
        office = self._world.office
        return office.ledger.state if office.ledger is not None and office.opened and not office.deposed else None


def _key(stored: StoredVolume) -> str:
    return volume_key(stored.volume.tenant, stored.volume.name)
