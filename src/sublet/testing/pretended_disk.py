"""The pretended disk: what leases of blocks with a name left there. It survives its agent, and the machine's reboot."""

from __future__ import annotations

from sublet.values import Kind
from sublet.wire.orders import Part, StoredVolume, VolumeRef


class Disk:
    """The volumes of one node."""

    def __init__(self) -> None:
        self.stored: dict[VolumeRef, StoredVolume] = {}
        self.counts = True
        """Whether kept volumes that no lease has count against the capacity. A restored office may lend that room
        again before it has heard which volumes are there; a real disk is full then."""
        self.removed: list[StoredVolume] = []
        """What was removed, in order."""

    def write(self, volume: VolumeRef, stored: StoredVolume) -> None:
        """A guest has put something into it."""
        self.stored[volume] = stored

    def remove(self, volume: VolumeRef) -> None:
        """It is gone for good."""
        self.removed.append(self.stored.pop(volume))

    def beside(self, part: Part, own: VolumeRef | None) -> int:
        """Bytes that other volumes have of the resource of this part."""
        if part.kind is not Kind.BLOCK or not self.counts:
            return 0
        return sum(one.size for ref, one in self.stored.items() if one.resource == part.resource and ref != own)
