"""What an incremental save refers to: the packs of the previous checkpoint, and where its chunks are.

There are 4,096 chunks for each GiB, and most saves change few of them. So what is asked of all is asked without a loop,
and what is counted is counted once and then kept up with what changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import field
from pathlib import Path

from sublet.lazy_dataclass import dataclass
from sublet.state.checkpoints.format import CheckpointManifest, PackEntry, PackRef
from sublet.state.checkpoints.packs import Packs, open_packs

Place = tuple[PackRef, PackEntry]
Counts = dict[PackRef, tuple[int, int]]


@dataclass(slots=True, kw_only=True)
class Base:
    """The checkpoint that a save builds on."""

    manifest: CheckpointManifest | None = None
    packs_folder: Packs = Path()
    where: dict[bytes, Place] = field(default_factory=dict)
    _counted: tuple[dict[bytes, Place], int, Counts] | None = field(default=None, repr=False)
    """What was counted, how many there were, and the counts."""

    @property
    def number(self) -> int:
        return 0 if self.manifest is None else self.manifest.number

    @classmethod
    def read(cls, manifest: CheckpointManifest, packs_folder: Packs) -> Base:
        """Look into every pack that the checkpoint needs. Raises ``CheckpointDamaged``."""
        base = cls(manifest=manifest, packs_folder=packs_folder)
        for pack in open_packs(packs_folder, manifest.packs):
            base.add(pack.ref, pack.entries)
            pack.close()
        return base

    def add(self, ref: PackRef, entries: Sequence[PackEntry]) -> None:
        for entry in entries:
            self.where.setdefault(entry.hash, (ref, entry))

    def after(self, manifest: CheckpointManifest, made: PackRef | None, hashes: Mapping[bytes, PackEntry]) -> Base:
        """What the next save builds on, when this one is published."""
        kept, counts = set(manifest.packs), self.counts()
        moved = self.where.keys() & hashes.keys()
        counts = _less(counts, [self.where[digest] for digest in moved])
        if kept.issuperset(counts):  # mostly none is left behind
            where = self.where.copy()
        else:
            where = {digest: place for digest, place in self.where.items() if place[0] in kept}
            counts = {ref: one for ref, one in counts.items() if ref in kept}
        if made is not None:
            where.update((digest, (made, entry)) for digest, entry in hashes.items())
            count, stored = counts.get(made, (0, 0))
            counts[made] = count + len(hashes), stored + sum(entry.stored for entry in hashes.values())
        counted = where, len(where), counts
        return Base(manifest=manifest, packs_folder=self.packs_folder, where=where, _counted=counted)

    def counts(self) -> Counts:
        """Of each pack: its chunks, and the bytes that they have there."""
        known = self._counted
        if known is None or known[0] is not self.where or known[1] != len(self.where):
            counts: Counts = {}
            for ref, entry in self.where.values():
                count, stored = counts.get(ref, (0, 0))
                counts[ref] = count + 1, stored + entry.stored
            known = self._counted = self.where, len(self.where), counts
        return known[2]

    def live(self, used: Set[bytes], written: Mapping[bytes, PackEntry]) -> dict[PackRef, int]:
        """The packs that have chunks which are ``used`` still, and not ``written`` anew; and the bytes of those."""
        dead = set(self.where).difference(used)
        dead |= self.where.keys() & written.keys()
        left = _less(self.counts(), [self.where[digest] for digest in dead])
        return {ref: stored for ref, (count, stored) in left.items() if count}


def _less(counts: Counts, places: Sequence[Place]) -> Counts:
    left = counts.copy()
    for ref, entry in places:
        count, stored = left[ref]
        left[ref] = count - 1, stored - entry.stored
    return left
