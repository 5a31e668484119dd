"""What changed in buffers since the last look, chunk by chunk.

A finder remembers, for memory at an address, the blake3 hash of each chunk. Where the kernel tracks writes (``pages``)
it need only read chunks that were written to; elsewhere it reads everything, once. Either way it is the *content* that
decides: a chunk that was written with what it held is unchanged, and no version counter of a framework is believed.

A look has two steps, because whoever copies a chunk must hash the very copy, not the memory that others may write to
meanwhile::

    look = finder.begin(buffer)      # from here on every write is found by the next look
    for n in look.candidates: ...    # hash chunk n, or a copy of it
    finder.settle(look, hashes)      # only now is it remembered; without this the next look finds the same again

``changed`` does all of it for those who only want to know.

Memory that came in a sealed file (``sealed``) needs no protection: what was never written to since is known at any
time, so it is not even hashed when it comes, if the other side says what it has (``believe``).
"""

from __future__ import annotations

import logging
import os
import random
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import ne
from typing import Final, Protocol

from blake3 import blake3

from sublet.durable.memory import bring_near, copy_bytes, fresh_memory
from sublet.durable.pages import Pages, process_pages
from sublet.durable.sealed import own_pages

__all__ = [
    "CHUNK_BYTES",
    "HASH_BYTES",
    "ChangeFinder",
    "Copies",
    "Look",
    "chunk_count",
    "chunk_hash",
    "each_hash",
    "hash_chunks",
    "hashes_in",
]

CHUNK_BYTES: Final = 256 * 1024
HASH_BYTES: Final = 32
TRACKED_MIN: Final = 1 << 20
"""Smaller buffers are hashed: protecting pages costs each of them a fault at its next write."""
REMEMBERED_MAX: Final = 4096
"""Buffers; the one looked at longest ago is forgotten."""
BUSY_SHARE: Final = 0.25
VOLATILE_SHARE: Final = 0.5
BUSY_LOOKS: Final = 8
"""Memory of which more than that share was written between two looks is hashed for the next so many: the faults of a
page would cost more than its hash."""
PARALLEL_MIN: Final = 16 << 20
THREADS: Final = 4
PART_CHUNKS: Final = 128
"""So many are hashed by one thread before somebody looks at what came of it."""
SAMPLE: Final = 2
"""Chunks per look that are hashed although the kernel says that they were not written to."""

log = logging.getLogger(__name__)


class Piece(Protocol):
    """What the finder must know of a buffer."""

    @property
    def view(self) -> memoryview: ...

    @property
    def address(self) -> int: ...


def chunk_count(length: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    return -(-length // chunk_bytes)


def hash_chunks(look: Look, numbers: Sequence[int]) -> dict[int, bytes]:
    """Hash chunks where they are."""
    return dict(each_hash(look, numbers))


def each_hash(look: Look, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """One after the other, as they are found; many of them on several cores, since hashing holds no lock, and ahead of
    who asks."""
    workers = min(THREADS, os.cpu_count() or 1)
    if len(numbers) * look.chunk_bytes < PARALLEL_MIN or workers == 1:
        yield from zip(numbers, look.hashes(numbers), strict=True)
        return
    share = min(-(-len(numbers) // (4 * workers)), PART_CHUNKS)
    parts = [numbers[at : at + share] for at in range(0, len(numbers), share)]
    with ThreadPoolExecutor(workers, "sublet-hash") as pool:
        for part, found in zip(parts, pool.map(look.hashes, parts), strict=True):
            yield from zip(part, found, strict=True)


def hashes_in(table: bytes | bytearray) -> tuple[bytes, ...]:
    """The hashes of a table. There are 4,096 for each GiB, and mostly all are wanted at once."""
    return struct.Struct(f"{HASH_BYTES}s" * (len(table) // HASH_BYTES)).unpack(table)  # its like would be kept else


def chunk_hash(data: memoryview | bytes) -> bytes:
    return blake3(data).digest()


@dataclass(slots=True, eq=False)
class Memory:
    """What is remembered of the memory at one address."""

    hashes: bytearray
    """Of every chunk, one after the other; empty as long as nothing is known."""
    look: int = 0
    """The kernel's answers up to this look are in the hashes."""
    busy: int = 0
    """Looks for which it is not tracked."""
    volatile: bool = False
    """Most of it had changed at the last look."""
    sealed: int = 0
    """The number of the sealed map that it lies in."""
    own: frozenset[int] = frozenset()
    """Chunks of that which were written to at some time."""


@dataclass(slots=True, eq=False, kw_only=True)
class Look:
    """One look at one buffer."""

    address: int
    length: int
    view: memoryview
    """The memory; after ``detach``, a copy of the candidates one after the other."""
    candidates: Sequence[int]
    """Chunks that may have changed. All others have not."""
    before: bytes | None
    """The hashes of all chunks at the last look that was settled; None at the first."""
    volatile: bool = False
    """At the last look most of it had changed, so it is not worth asking whether it has now."""
    tracked: bool
    """The candidates were written to; otherwise they are simply all there are."""
    number: int
    chunk_bytes: int
    sealed: int = 0
    own: frozenset[int] = frozenset()
    """As in ``Memory``."""
    places: Mapping[int, int] | None = None
    """After ``detach``: where in the copy a chunk begins."""

    @property
    def count(self) -> int:
        return chunk_count(self.length, self.chunk_bytes)

    def chunk(self, n: int) -> memoryview:
        at = n * self.chunk_bytes
        length = min(self.chunk_bytes, self.length - at)
        at = at if self.places is None else self.places[n]
        return self.view[at : at + length]

    def hashes(self, numbers: Sequence[int]) -> list[bytes]:
        """Of these chunks, where they are. As short as it can be: other threads wait for Python meanwhile."""
        if self.places is not None:
            return [chunk_hash(self.chunk(n)) for n in numbers]
        view, address, size, found = self.view, self.address, self.chunk_bytes, []
        for at in [n * size for n in numbers]:
            chunk = view[at : at + size]
            bring_near(address + at, chunk.nbytes)
            found.append(blake3(chunk).digest())
        return found

    def detach(self, memory: Callable[[int], memoryview]) -> None:
        """Copy the candidates; from here on the program may do with its memory what it likes."""
        places: dict[int, int] = {}
        runs: list[tuple[int, int]] = []
        total = 0
        for n in self.candidates:
            start = n * self.chunk_bytes
            end = min(start + self.chunk_bytes, self.length)
            places[n] = total
            total += end - start
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
        copy, at = memory(total), 0
        for start, end in runs:
            copy_bytes(copy[at:], self.view[start:end])
            at += end - start
        self.view, self.places = copy, places

    def hash_before(self, n: int) -> bytes | None:
        return None if self.before is None else self.before[n * HASH_BYTES : (n + 1) * HASH_BYTES]


class Copies:
    """Memory for detached looks, kept from one save to the next: fresh memory costs more than the copy itself."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._taken: list[memoryview] = []

    def memory(self, length: int) -> memoryview:
        """So many bytes. They are the caller's until ``reset``."""
        fitting = [n for n, area in enumerate(self._free) if length <= area.nbytes <= 2 * length]
        area = self._free.pop(fitting[0]) if fitting else fresh_memory(length)
        self._taken.append(area)
        return area[:length]

    def reset(self) -> None:
        """All of it is free again. What the last round needed is kept, and no more."""
        self._free, self._taken = self._taken, []


class ChangeFinder:
    """Remembers hashes for one purpose: one store, one peer. Threads may use it at once on different buffers."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES, pages: Pages | None = None, seed: int = 0) -> None:
        self.chunk_bytes = chunk_bytes
        self._pages = process_pages() if pages is None else pages
        self._memories: OrderedDict[tuple[int, int], Memory] = OrderedDict()
        self._lock = threading.Lock()
        self._chance = random.Random(seed)

    def begin(self, buffer: Piece) -> Look:
        """Which chunks may differ from the last settled look. Reads no more than a sample of the memory."""
        view, address = buffer.view, buffer.address
        with self._lock:
            memory = self._memories.get((address, view.nbytes))
        known = memory is not None and bool(memory.hashes)
        number, candidates = 0, None
        sealed, own = self._sealed(address, view.nbytes)
        if sealed:
            if memory is not None and known and memory.sealed == sealed:
                own |= memory.own  # what was dropped (MADV_DONTNEED) is the file's again, and not what it was
                candidates = sorted(own)
        elif view.nbytes >= TRACKED_MIN and (memory is None or memory.busy == 0):
            since = memory.look if memory is not None else 0
            number, ranges = self._pages.look(address, view.nbytes, since)
            if ranges is not None and known:
                candidates = self._chunks(ranges, address, view.nbytes)
        look = Look(
            address=address,
            length=view.nbytes,
            view=view,
            candidates=range(chunk_count(view.nbytes, self.chunk_bytes)) if candidates is None else candidates,
            before=bytes(memory.hashes) if memory is not None and known else None,
            volatile=memory is not None and memory.volatile,
            tracked=candidates is not None,
            number=number,
            chunk_bytes=self.chunk_bytes,
            sealed=sealed,
            own=own,
        )
        return self._doubted(look) if look.tracked and not sealed else look

    def settle(self, look: Look, hashes: Mapping[int, bytes]) -> bytes:
        """Remember the hashes of the candidates. Answers with those of all chunks, one after the other."""
        found = [hashes[n] for n in look.candidates]
        changed = 0
        if len(found) == look.count:
            table = bytearray().join(found)
            changed = sum(map(ne, found, hashes_in(look.before or b"")))
        else:
            table = bytearray(look.count * HASH_BYTES if look.before is None else look.before)
            for n, digest in zip(look.candidates, found, strict=True):
                place = slice(n * HASH_BYTES, (n + 1) * HASH_BYTES)
                changed += table[place] != digest
                table[place] = digest
        with self._lock:
            key = (look.address, look.length)
            memory = self._memories.setdefault(key, Memory(bytearray()))
            self._memories.move_to_end(key)
            memory.hashes, memory.look = table, look.number
            memory.sealed, memory.own = look.sealed, look.own
            memory.volatile = changed > VOLATILE_SHARE * look.count
            if look.sealed:
                memory.busy = 0
            elif look.tracked and len(look.candidates) > BUSY_SHARE * look.count:
                memory.busy = BUSY_LOOKS
            elif memory.busy:
                memory.busy -= 1
            self._drop_oldest()
        return bytes(table)

    def changed(self, buffer: Piece) -> list[int]:
        """Chunks whose content differs from the last look, all of them at the first; remembered at once."""
        return self.compared(buffer)[0]

    def compared(self, buffer: Piece) -> tuple[list[int], bytes]:
        """The same, and the hashes of all chunks, one after the other."""
        look = self.begin(buffer)
        hashes = hash_chunks(look, look.candidates)
        table = self.settle(look, hashes)
        return [n for n in look.candidates if hashes[n] != look.hash_before(n)], table

    def believe(self, buffer: Piece, table: bytes) -> None:
        """The other side has what these hashes say and has just sent it, so this is the same. Only of memory of which
        is known what was written to since; other memory is hashed, or it would go back changed where the other side
        wrote to it between its look and its copy."""
        sealed, own = self._sealed(buffer.address, buffer.view.nbytes)
        if not sealed or len(table) != chunk_count(buffer.view.nbytes, self.chunk_bytes) * HASH_BYTES:
            self.changed(buffer)
            return
        with self._lock:
            self._memories[buffer.address, buffer.view.nbytes] = Memory(bytearray(table), sealed=sealed, own=own)
            self._memories.move_to_end((buffer.address, buffer.view.nbytes))
            self._drop_oldest()

    def knows(self, buffer: Piece) -> bool:
        """Whether there is a settled look at this memory."""
        with self._lock:
            memory = self._memories.get((buffer.address, buffer.view.nbytes))
            return memory is not None and bool(memory.hashes)

    def leave(self, buffer: Piece) -> None:
        """Somebody else knows better what this memory was: the next look finds all of it changed."""
        with self._lock:
            self._memories.pop((buffer.address, buffer.view.nbytes), None)

    def forget(self) -> None:
        """The other side has lost what it had: the next look finds everything changed."""
        with self._lock:
            self._memories.clear()

    def _drop_oldest(self) -> None:
        while len(self._memories) > REMEMBERED_MAX:
            self._memories.popitem(last=False)

    def _sealed(self, address: int, length: int) -> tuple[int, frozenset[int]]:
        """The number of the sealed map it lies in (0: in none), and the chunks of it that were written to."""
        found = own_pages(address, length) if length >= TRACKED_MIN else None
        if found is None:
            return 0, frozenset()
        return found[0], frozenset(self._chunks(found[1], address, length))

    def _chunks(self, ranges: Sequence[tuple[int, int]], address: int, length: int) -> list[int]:
        found: set[int] = set()
        for start, end in ranges:
            low, high = max(start - address, 0), min(end - address, length)
            if low < high:
                found.update(range(low // self.chunk_bytes, chunk_count(high, self.chunk_bytes)))
        return sorted(found)

    def _doubted(self, look: Look) -> Look:
        """Hash a few chunks that are said to be untouched. If one is not, the kernel's word is worth nothing here."""
        quiet = look.count - len(look.candidates)
        if not quiet:
            return look
        for _ in range(SAMPLE):
            n = self._chance.randrange(look.count)
            if n in look.candidates or chunk_hash(look.chunk(n)) == look.hash_before(n):
                continue
            number, ranges = self._pages.look(look.address, look.view.nbytes, look.number)
            written = None if ranges is None else self._chunks(ranges, look.address, look.view.nbytes)
            look.candidates, look.tracked = range(look.count), False
            if written is not None and n not in written:  # written in this very moment it would be, and is honest
                log.warning("page tracking missed a write; from now on every look reads all memory")
                self._pages.forget()
                look.number = 0
            else:
                look.number = number
            break
        return look
