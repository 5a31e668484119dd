"""One save: writes what changed to a new pack, and a manifest of the whole state.

A ``Saver`` belongs to one state in one store. It remembers what its last saves found in memory (``changes``) and where
each chunk lies, so a save writes only chunks that no pack of the parent has, and reads only memory that was written to.
It writes into a staging folder that it is given, and publishes nothing: the store does (``store``).

A checkpoint must not come to need ever more packs. When they are many, or mostly dead, the live chunks of the poorest
are copied into the new pack and those packs are needed no more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sublet.errors import CheckpointFailed
from sublet.lazy_dataclass import dataclass
from sublet.state.checkpoints.atomic_files import written_then_synced
from sublet.state.checkpoints.format import CheckpointManifest, LeafRef, PackRef
from sublet.state.checkpoints.object_groups import ObjectGroup, Order, encode_roots
from sublet.state.checkpoints.packs import PackWriter, open_packs
from sublet.state.checkpoints.parent import Base
from sublet.state.checkpoints.records import INLINE_MAX, Blob, EncodedGroup, dump_leaf, leaf_starts
from sublet.state.transfer.changes import (
    CHUNK_BYTES,
    ChangeFinder,
    Look,
    chunk_count,
    chunk_hash,
    each_hash,
    each_same,
    hashes_in,
)
from sublet.state.transfer.encoded import BufferKind, EncodedBuffer
from sublet.state.transfer.memory import Copies, copy_beside
from sublet.state.transfer.reducers import GpuRule
from sublet.values import Epoch, LeaseId

__all__ = [
    "HEAD_CHUNK_BYTES",
    "PACKS_MAX",
    "UNLEASED",
    "Author",
    "Base",
    "Capture",
    "SaveReport",
    "SavedBuffer",
    "Saver",
    "Staged",
]

HEAD_CHUNK_BYTES: Final = 16 * 1024
"""Of heads: what changes in them is small and stands close together."""
PACKS_MAX: Final = 16
"""A checkpoint that would need more has half as many afterwards: so each chunk is moved a few times, not often."""
LIVE_SHARE: Final = 0.5
"""So has one of whose packs less than this share is live."""
PAUSE_S: Final = 50e-6
SMALL_SAVE: Final = 64 << 20
"""So much of what a save adds to another goes past the page cache. Of each such pack a restore reads as much from the
disk, once; the rest, and a first save, it finds in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """The lease that a checkpoint is made under. The store compares it with the live ones."""

    lease: LeaseId
    epoch: Epoch


UNLEASED: Final = Author(lease=LeaseId(""), epoch=Epoch(0, 0))
"""For folders that no lease stands behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did."""

    number: int
    roots: int
    state_bytes: int
    """What a full copy would have."""
    written_bytes: int
    """What went to the disk."""
    read_bytes: int
    """Memory that had to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A checkpoint that is whole on disk and not published yet."""

    folder: Path
    manifest: CheckpointManifest
    manifest_path: Path
    packs: Sequence[Path]
    """New ones, in the staging folder, under their names."""
    report: SaveReport
    base: Base
    """What the next save builds on, once this one is published."""
    records: Sequence[EncodedGroup]
    """What it is made of, by whose names: to be compared with those of the base."""
    capture_ns: int = 0
    """How long it took before anything was written."""


@dataclass(slots=True, eq=False, kw_only=True)
class SavedBuffer:
    """One buffer of a state that is being saved."""

    length: int
    kind: int
    writable: bool
    inline: bytes | None = None
    look: Look | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Capture:
    """A state as it was at one moment: heads as bytes, and of each buffer what may have changed."""

    records: Sequence[tuple[Sequence[str], bytes, Sequence[SavedBuffer]]]
    state_bytes: int
    is_copy: bool = False
    """The program goes on meanwhile."""
    took_ns: int = 0
    """How long it took to look at the state."""

    @property
    def roots(self) -> int:
        return sum(len(names) for names, _, _ in self.records)


class Saver:
    """Saves of one state. Not for two threads at once, but for one that captures and one that writes."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES, finder: ChangeFinder | None = None) -> None:
        self.chunk_bytes = chunk_bytes
        self._finder = ChangeFinder(chunk_bytes=chunk_bytes) if finder is None else finder
        self._order = Order()

    def save(
        self,
        roots: Mapping[str, object],
        *,
        staging: Path,
        base: Base,
        author: Author,
        wall_ns: int,
        schema: str = "",
        note: str = "",
        gpu: GpuRule = "copy",
    ) -> Staged:
        """Write what ``base`` lacks into ``staging``, an empty folder beside its packs."""
        capture = self.capture(encode_roots(roots, gpu=gpu, order=self._order), base)
        return self.write(capture, staging=staging, base=base, author=author, wall_ns=wall_ns, schema=schema, note=note)

    def capture(self, groups: Sequence[ObjectGroup], base: Base, *, copy: Copies | None = None) -> Capture:
        """Look at every buffer. With ``copy`` nothing of the program's memory is needed any more afterwards, so it may
        go on while the state is written; without, it waits."""
        records = []
        for group in groups:
            pieces = [self._piece(buffer, base, copy) for buffer in group.encoded.buffers]
            records.append((group.names, group.encoded.head, pieces))
        state_bytes = sum(group.encoded.nbytes for group in groups)
        return Capture(records=records, state_bytes=state_bytes, is_copy=copy is not None)

    def _piece(self, buffer: EncodedBuffer, base: Base, copy: Copies | None) -> SavedBuffer:
        piece = SavedBuffer(length=buffer.length, kind=buffer.kind, writable=buffer.writable)
        if buffer.length <= INLINE_MAX:
            piece.inline = bytes(buffer.view)
            return piece
        look = piece.look = self._finder.begin(buffer, moving=copy is not None)
        if copy is not None:
            look.narrow()
        if look.before is not None and len(look.candidates) < look.count:
            # another base than at the last look may lack what is unchanged
            hashes = hashes_in(look.before)
            if not all(map(base.where.__contains__, hashes)):
                missing = [n for n, digest in enumerate(hashes) if digest not in base.where]
                look.candidates = sorted({*look.candidates, *missing})
        if copy is not None and buffer.kind not in (BufferKind.SMALL, BufferKind.BYTES):  # those cannot change
            look.detach(copy.memory)
        return piece

    def write(
        self,
        capture: Capture,
        *,
        staging: Path,
        base: Base,
        author: Author,
        wall_ns: int,
        schema: str = "",
        note: str = "",
        carry: Sequence[EncodedGroup] = (),
        spare: int | None = None,
    ) -> Staged:
        """Put into ``staging`` what ``base`` lacks, and the manifest. ``carry``: records of the base that stay as they
        are, under names that the capture has not: those of another program, or what was never loaded. ``spare``: bytes
        that may be spent on moving chunks of older packs together; None: any. What has no room stays where it is."""
        past_cache = sys.maxsize if capture.is_copy else SMALL_SAVE if base.number else 0
        with PackWriter(staging, past_cache=past_cache) as writer:
            run = _Run(writer, base, self._finder, self.chunk_bytes, beside=capture.is_copy)
            records = [*map(run.reused, carry), *(run.record(*record) for record in capture.records)]
            leaves = run.leaves(sorted(records, key=lambda record: record.names[0]) if carry else records)
            packs = run.packs(spare)
            run.pause()
            ref = writer.write_rest()
            manifest = CheckpointManifest(
                number=base.number + 1,
                parent=base.number,
                lease=author.lease,
                epoch=author.epoch,
                schema=schema,
                wall_ns=wall_ns,
                packs=packs if ref is None else [*packs, ref],
                leaves=leaves,
                roots=capture.roots + sum(len(record.names) for record in carry),
                state_bytes=capture.state_bytes + sum(blob.length for record in carry for blob in record.blobs),
                note=note,
            )
            path = staging / "manifest"
            data = manifest.dump()
            try:
                with written_then_synced(path, data):
                    made = writer.finish()
            except OSError as error:
                raise writer.failed(error) from error
        run.pause()
        report = SaveReport(
            number=manifest.number,
            roots=manifest.roots,
            state_bytes=manifest.state_bytes,
            written_bytes=len(data) + (made[0].size if made is not None else 0),
            read_bytes=run.read_bytes,
        )
        return Staged(
            folder=staging,
            manifest=manifest,
            manifest_path=path,
            packs=[made[1]] if made is not None else [],
            report=report,
            base=base.after(manifest, made[0] if made is not None else None, writer.hashes),
            records=records,
            capture_ns=capture.took_ns,
        )


class _Run:
    def __init__(
        self, writer: PackWriter, base: Base, finder: ChangeFinder, chunk_bytes: int, *, beside: bool = False
    ) -> None:
        """``beside``: a program goes on meanwhile."""
        self._beside = beside
        self._writer = writer
        self._base = base
        self._finder = finder
        self._chunk_bytes = chunk_bytes
        self._used: set[bytes] = set()
        self.read_bytes = 0

    def pause(self) -> None:
        """What is left to do besides hashing and writing is milliseconds of Python. A program that mostly computes
        without its lock would wait for that at the end of a step; a moment is enough to let it through."""
        if self._beside:
            time.sleep(PAUSE_S)

    def record(self, names: Sequence[str], head: bytes, pieces: Sequence[SavedBuffer]) -> EncodedGroup:
        return EncodedGroup(names=names, blobs=[self._constant(head), *(self._buffer(piece) for piece in pieces)])

    def reused(self, record: EncodedGroup) -> EncodedGroup:
        """One of the base: its chunks lie in packs that are there."""
        for blob in record.blobs:
            for digest, _, _ in blob.chunks():
                if digest not in self._base.where:
                    raise CheckpointFailed("the state was saved elsewhere meanwhile", do="Save again.")
                self._used.add(digest)
        return record

    def leaves(self, records: Sequence[EncodedGroup]) -> list[LeafRef]:
        """Records in the order of names, cut into leaves."""
        found: list[LeafRef] = []
        for run in _runs(records):
            data = dump_leaf(run)
            digest = chunk_hash(data)
            self._put(data, digest)
            found.append(LeafRef(digest, len(data), sum(len(record.names) for record in run)))
        return found

    def packs(self, spare: int | None = None) -> list[PackRef]:
        """The packs of the base that are still needed, once the poorest were emptied into the new one."""
        self.pause()
        share = self._base.live(self._used, self._writer.hashes)
        poorest = sorted(share, key=lambda ref: share[ref])
        gone = poorest[: len(poorest) - PACKS_MAX // 2] if len(poorest) > PACKS_MAX else []
        kept = sorted((ref for ref in poorest if ref not in gone), key=lambda ref: ref.size - share[ref])
        while kept and sum(share[ref] for ref in kept) < LIVE_SHARE * sum(ref.size for ref in kept):
            gone.append(kept.pop())
        for ref in sorted(gone, key=lambda ref: share[ref]):
            if spare is not None and share[ref] > spare:
                kept.append(ref)
                continue
            spare = spare if spare is None else spare - share[ref]
            self._move(ref)
        return sorted(kept)

    def _move(self, ref: PackRef) -> None:
        used = self._used.intersection(self._base.where).difference(self._writer.hashes)
        entries = [entry for one, entry in map(self._base.where.__getitem__, used) if one == ref]
        (pack,) = open_packs(self._base.packs_folder, [ref])
        try:
            for entry in sorted(entries, key=lambda entry: entry.offset):
                self._writer.copy(entry, pack.stored(entry))
        finally:
            pack.close()

    def _constant(self, data: bytes) -> Blob:
        if len(data) <= INLINE_MAX:
            return Blob(length=len(data), inline=data)
        view, hashes = memoryview(data), bytearray()
        for n in range(chunk_count(len(data), HEAD_CHUNK_BYTES)):
            whole = len(data) <= HEAD_CHUNK_BYTES
            part = data if whole else bytes(view[n * HEAD_CHUNK_BYTES : (n + 1) * HEAD_CHUNK_BYTES])
            digest = chunk_hash(part)
            self._put(part, digest)
            hashes += digest
        return Blob(length=len(data), chunk_bytes=HEAD_CHUNK_BYTES, hashes=bytes(hashes))

    def _put(self, data: bytes, digest: bytes) -> None:
        self._used.add(digest)
        if digest not in self._base.where and digest not in self._writer.hashes:
            self._writer.put(data, digest)

    def _buffer(self, piece: SavedBuffer) -> Blob:
        if piece.look is None:
            assert piece.inline is not None
            return Blob(length=piece.length, inline=piece.inline, kind=piece.kind, writable=piece.writable)
        look = piece.look
        shrink = bool(look.candidates) and self._writer.worth_shrinking(look.chunk(look.candidates[0]))
        if look.places is not None:
            hashes = self._detached(look, shrink)
        else:
            hashes = self._found(look, shrink)
        self.pause()
        table = self._finder.record_hashes(look, hashes)
        self.pause()
        needed = set(hashes_in(table))
        if needed.difference(self._base.where).difference(self._writer.hashes):
            raise CheckpointFailed("the state was saved elsewhere meanwhile", do="Save again.")
        self._used |= needed
        return Blob(
            length=piece.length, chunk_bytes=self._chunk_bytes, hashes=table, kind=piece.kind, writable=piece.writable
        )

    def _found(self, look: Look, shrink: bool) -> dict[int, bytes]:
        """Candidates that turn out to hold what they held are found without copying them, and those that do not are on
        their way to the disk meanwhile. Where the kernel says that they were written to, it is not worth the try."""
        if look.before is None or look.tracked or look.volatile:
            return {n: self._chunk(look, n, shrink) for n in look.candidates}
        self.read_bytes += len(look.candidates) * look.chunk_bytes
        before, where = hashes_in(look.before), self._base.where
        hashes = {}
        if look.prints_before:
            for n, same in each_same(look, look.candidates):
                hashes[n] = before[n] if same and before[n] in where else self._chunk(look, n, shrink)
            return hashes
        for n, digest in each_hash(look, look.candidates):
            is_same = digest == before[n] and digest in where
            hashes[n] = digest if is_same else self._chunk(look, n, shrink)
        return hashes

    def _detached(self, look: Look, shrink: bool) -> dict[int, bytes]:
        """Chunks that are a copy already. One after the other on one core: the program wants the rest."""
        hashes: dict[int, bytes] = {}
        for n in look.candidates:
            chunk = look.chunk(n)
            self.read_bytes += chunk.nbytes
            room = self._writer.room(chunk.nbytes)
            copy_beside(room, chunk)  # which brings it near, so that both together take as long as the hash alone
            digest = hashes[n] = chunk_hash(room)
            look.note(n, room)
            if digest not in self._base.where and digest not in self._writer.hashes:
                self._writer.keep(digest, chunk.nbytes, shrink=shrink)
        return hashes

    def _chunk(self, look: Look, n: int, shrink: bool) -> bytes:
        chunk = look.chunk(n)
        self.read_bytes += chunk.nbytes
        room = self._writer.room(chunk.nbytes)
        room[:] = chunk
        digest = chunk_hash(room)
        look.note(n, room)
        if digest not in self._base.where and digest not in self._writer.hashes:
            self._writer.keep(digest, chunk.nbytes, shrink=shrink)
        return digest


def _runs(records: Sequence[EncodedGroup]) -> list[list[EncodedGroup]]:
    runs: list[list[EncodedGroup]] = []
    for record in records:
        if not runs or leaf_starts(record.names[:1]):
            runs.append([])
        runs[-1].append(record)
    return runs
