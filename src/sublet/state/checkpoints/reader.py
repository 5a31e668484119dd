"""An open checkpoint: its names at once, each value when it is requested.

Every chunk is compared with its hash before anything made of it is handed out. The packs are opened together with the
manifest and stay open, so that a checkpoint that is being read cannot be collected from under its reader.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, NamedTuple

from sublet.errors import NotFound, OutOfMemory
from sublet.state.checkpoints.format import CheckpointManifest, ChunkEncoding, PackEntry, PackRef, damaged
from sublet.state.checkpoints.packs import PackFile, Packs, check_content, open_packs
from sublet.state.checkpoints.records import Blob, EncodedGroup, parse_leaf
from sublet.state.transfer.loading import decode
from sublet.state.transfer.memory import fresh_memory
from sublet.values import format_size

SPAN_BYTES: Final = 4 << 20
"""Chunks that lie one after the other, in the pack as in the buffer, are read together up to this."""
PARALLEL_MIN: Final = 8 << 20
THREADS: Final = 4


class PackSpan(NamedTuple):
    """A stretch of a pack that goes to a stretch of a buffer, as it is."""

    pack: PackFile
    entries: Sequence[PackEntry]
    into: int


class Stored:
    """The bytes of one checkpoint. Knows nothing of objects; checks and copies use this."""

    def __init__(self, manifest: CheckpointManifest, packs_folder: Packs) -> None:
        self.manifest = manifest
        self._packs: dict[PackRef, PackFile] = {}
        self._where: dict[bytes, tuple[PackFile, PackEntry]] = {}
        self._records: dict[str, EncodedGroup] | None = None
        try:
            for pack in open_packs(packs_folder, manifest.packs):
                self._packs[pack.ref] = pack
                for entry in pack.entries:
                    self._where.setdefault(entry.hash, (pack, entry))
        except BaseException:
            self.close()
            raise

    @property
    def packs(self) -> Mapping[PackRef, PackFile]:
        return self._packs

    @property
    def records(self) -> Mapping[str, EncodedGroup]:
        """Name → record; read at the first question."""
        if self._records is None:
            found: dict[str, EncodedGroup] = {}
            for record in self.each_record():
                for name in record.names:
                    if name in found:
                        raise damaged(f"the checkpoint has {name!r} twice")
                    found[name] = record
            if len(found) != self.manifest.roots:
                raise damaged(f"the checkpoint has {len(found)} names instead of {self.manifest.roots}")
            self._records = found
        return self._records

    def each_record(self) -> Iterator[EncodedGroup]:
        for ref in self.manifest.leaves:
            pack, entry = self.place(ref.hash, ref.length)
            yield from parse_leaf(pack.content(entry))

    def place(self, digest: bytes, length: int) -> tuple[PackFile, PackEntry]:
        found = self._where.get(digest)
        if found is None or found[1].length != length:
            raise damaged("a chunk of the checkpoint is in none of its packs")
        return found

    def blob(self, blob: Blob) -> memoryview:
        """A blob in fresh memory, every chunk compared with its hash."""
        try:
            memory = fresh_memory(blob.length)
        except (OSError, MemoryError):
            raise OutOfMemory(
                f"there is no memory for {format_size(blob.length)} of this checkpoint",
                do="Restore it where there is more; nothing is lost.",
            ) from None
        if not blob.chunk_bytes:
            memory[:] = blob.inline
            return memory
        spans, packed = self._plan(blob)
        jobs = [functools.partial(self._read_span, span, memory) for span in spans]
        jobs += [functools.partial(self._read_packed, *one, memory) for one in packed]
        if blob.length < PARALLEL_MIN:
            for job in jobs:
                job()
        else:
            with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "sublet-restore") as pool:
                for done in [pool.submit(job) for job in jobs]:
                    done.result()
        return memory

    def _plan(self, blob: Blob) -> tuple[list[PackSpan], list[tuple[PackFile, PackEntry, int]]]:
        spans: list[PackSpan] = []
        packed: list[tuple[PackFile, PackEntry, int]] = []
        run: list[PackEntry] = []
        pack_of_run: PackFile | None = None
        start = 0
        for digest, offset, length in blob.chunks():
            pack, entry = self.place(digest, length)
            if entry.encoding != ChunkEncoding.RAW:
                packed.append((pack, entry, offset))
                continue
            goes_on = (
                bool(run)
                and pack is pack_of_run
                and run[-1].offset + run[-1].stored == entry.offset
                and start + sum(one.length for one in run) == offset
                and sum(one.length for one in run) + length <= SPAN_BYTES
            )
            if not goes_on:
                run, pack_of_run, start = [], pack, offset
                spans.append(PackSpan(pack, run, start))
            run.append(entry)
        return spans, packed

    @staticmethod
    def _read_span(span: PackSpan, memory: memoryview) -> None:
        length = sum(entry.length for entry in span.entries)
        span.pack.read_into(span.entries[0].offset, memory[span.into : span.into + length])
        at = span.into
        for entry in span.entries:
            check_content(entry.hash, memory[at : at + entry.length])
            at += entry.length

    @staticmethod
    def _read_packed(pack: PackFile, entry: PackEntry, offset: int, memory: memoryview) -> None:
        memory[offset : offset + entry.length] = pack.content(entry)

    def close(self) -> None:
        """Harmless twice. What was loaded stays."""
        for pack in self._packs.values():
            pack.close()


class CheckpointReader:
    """A checkpoint whose values can be loaded: in a guest, or in the holder's own process."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._loaded: dict[tuple[str, ...], dict[str, Any]] = {}

    @property
    def manifest(self) -> CheckpointManifest:
        return self._stored.manifest

    @property
    def number(self) -> int:
        return self._stored.manifest.number

    @property
    def names(self) -> list[str]:
        return sorted(self._stored.records)

    @property
    def records(self) -> Mapping[str, EncodedGroup]:
        """Of each name, what it is made of: for a save that keeps it without loading it."""
        return self._stored.records

    def together_with(self, name: str) -> tuple[str, ...]:
        """Names that are loaded when this one is, itself among them."""
        return tuple(self._record(name).names)

    def load(self, name: str) -> Any:
        """One value. What shares objects with it is the same objects when it is loaded from here as well."""
        record = self._record(name)
        names = tuple(record.names)
        if names not in self._loaded:
            self._loaded[names] = self._decoded(record)
        return self._loaded[names][name]

    def load_all(self) -> dict[str, Any]:
        return {name: self.load(name) for name in self.names}

    def _record(self, name: str) -> EncodedGroup:
        found = self._stored.records.get(name)
        if found is None:
            raise NotFound(f"the checkpoint has no {name!r}", do=f"It has {', '.join(self.names[:10]) or 'nothing'}.")
        return found

    def _decoded(self, record: EncodedGroup) -> dict[str, Any]:
        head, *buffers = (self._stored.blob(blob) for blob in record.blobs)
        value = decode(head, buffers)
        if not isinstance(value, dict) or set(value) != set(record.names):
            raise damaged("a record holds other names than it says")
        return value

    def close(self) -> None:
        """Harmless twice. What was loaded stays."""
        self._stored.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
