"""Finds which chunks of buffers changed since the last save.

A finder remembers, for memory at an address, the blake3 hash of each chunk. Where the kernel tracks writes (``pages``)
it need only read chunks that were written to; elsewhere it reads everything, once, and compares fingerprints
(``fingerprint``), which are had as fast as memory is read. Either way it is the *content* that decides: a chunk that
was written with what it held is unchanged, and no version counter of a framework is believed.

A look has two steps, because a chunk must be hashed in the very copy, not the memory that others may write to
meanwhile::

    look = finder.begin(buffer)      # from here on every write is found by the next look
    for n in look.candidates: ...    # hash chunk n, or a copy of it
    finder.record_hashes(look, hashes)  # only now is it remembered; without this the next look finds the same again

``changed`` does all of it for those who only want to know.

Memory that came in a sealed file (``sealed``) needs no protection: what was never written to since is known at any
time, so it is not even hashed when it comes, if the other side says what it has (``believe``).
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from operator import ne
from typing import Any, Final, Protocol, TypeVar

from blake3 import blake3

from sublet.lazy_dataclass import dataclass
from sublet.state.transfer.memory import bring_near, copy_beside, copy_bytes
from sublet.state.transfer.pages import Pages, process_pages
from sublet.state.transfer.sealed import own_pages

CHUNK_BYTES: Final = 256 * 1024
HASH_BYTES: Final = 32
TRACKED_MIN: Final = 1 << 20
"""Smaller buffers are hashed: protecting pages costs each of them a fault at its next write."""
REMEMBERED_MAX: Final = 4096
"""Buffers; the one looked at longest ago is forgotten."""
BUSY_SHARE: Final = 0.25
VOLATILE_SHARE: Final = 0.5
BUSY_LOOKS: Final = 8
"""Memory of which more than that share was written between two looks is hashed until at so many less had changed: the
faults of a page would cost more than its hash, and a large page that takes one is small from then on."""
PARALLEL_MIN: Final = 16 << 20
THREADS: Final = 4
PART_CHUNKS: Final = 128
"""Chunks hashed by one thread before the result is looked at."""
SAMPLE: Final = 2
"""Chunks per look that are hashed although the kernel says that they were not written to."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class TrackedBuffer(Protocol):
    """What the finder must know of a buffer."""

    @property
    def view(self) -> memoryview: ...

    @property
    def address(self) -> int: ...


def chunk_count(length: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    return -(-length // chunk_bytes)


def each_hash(look: Look, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """One after the other, as they are found."""
    return zip(numbers, _each(look, look.hashes, numbers), strict=True)


def each_same(look: Look, numbers: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Whether each is what it was, as far as its fingerprint tells."""
    return zip(numbers, _each(look, lambda some: [look.is_same(n) for n in some], numbers), strict=True)


def _each(look: Look, ask: Callable[[Sequence[int]], list[T]], numbers: Sequence[int]) -> Iterator[T]:
    """Many of them on several cores, since hashing holds no lock, and ahead of the caller."""
    workers = min(THREADS, os.cpu_count() or 1)
    if len(numbers) * look.chunk_bytes < PARALLEL_MIN or workers == 1:
        yield from ask(numbers)
        return
    share = min(-(-len(numbers) // (4 * workers)), PART_CHUNKS)
    parts = [numbers[at : at + share] for at in range(0, len(numbers), share)]
    with ThreadPoolExecutor(workers, "sublet-hash") as pool:
        for found in pool.map(ask, parts):
            yield from found


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
    prints: bytes = b""
    """The fingerprints of all chunks, one after the other; empty where none were taken."""


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
    moving: bool = False
    """The program is about to change it again."""
    fingerprint: Fingerprint | None = None
    prints_before: bytes = b""
    """Of all chunks at the last look that was settled; empty where they are not known."""
    noting: bool = False
    """The next look will want them."""
    prints: dict[int, bytes] = field(default_factory=dict)
    """Those that were taken at this one, each of the very bytes that were hashed."""
    places: Mapping[int, int] | Sequence[int] | None = None
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
        """Of these chunks. As short as it can be: other threads wait for Python meanwhile."""
        if self.places is not None:
            return [chunk_hash(self.chunk(n)) for n in numbers]
        if self.noting or self.prints_before:
            return self._hashes_or_same(numbers)
        view, address, size, found = self.view, self.address, self.chunk_bytes, []
        for at in [n * size for n in numbers]:
            chunk = view[at : at + size]
            bring_near(address + at, chunk.nbytes)
            found.append(blake3(chunk).digest())
        return found

    def _hashes_or_same(self, numbers: Sequence[int]) -> list[bytes]:
        """Hash and fingerprint are taken of one copy: of the memory itself, which others may write to between the two,
        they could be of different things, and a later look would take the one for the other."""
        room, found = memoryview(b""), []
        for n in numbers:
            if self.is_same(n):
                found.append(self.hash_before(n) or b"")
                continue
            chunk = self.chunk(n)
            room = room if room.nbytes else memoryview(bytearray(min(self.chunk_bytes, self.length)))
            copy = room[: chunk.nbytes]
            copy_beside(copy, chunk)
            self.note(n, copy)
            found.append(chunk_hash(copy))
        return found

    def is_same(self, n: int) -> bool:
        """Its fingerprint says that it holds what it held. False also where that cannot be told."""
        before = self.prints_before[n * FINGERPRINT_BYTES : (n + 1) * FINGERPRINT_BYTES]
        if self.fingerprint is None or not before or before == UNKNOWN:
            return False
        return self.fingerprint(self.chunk(n)) == before

    def note(self, n: int, hashed: memoryview) -> None:
        """These are the bytes of chunk ``n`` that were hashed."""
        if self.noting and self.fingerprint is not None:
            self.prints[n] = self.fingerprint(hashed)

    def narrow(self) -> None:
        """What is still the same is no candidate any more: to know that, it is only read."""
        if self.prints_before and not self.volatile and not self.tracked:
            self.candidates = [n for n, same in each_same(self, self.candidates) if not same]

    def detach(self, memory: Callable[[int], memoryview]) -> None:
        """Copy the candidates; from here on the program may do with its memory what it likes."""
        if len(self.candidates) == self.count:
            self.places, runs, total = range(0, self.length, self.chunk_bytes), [(0, self.length)], self.length
        else:
            self.places, runs, total = self._runs()
        copy, at = memory(total), 0
        for start, end in runs:
            copy_bytes(copy[at:], self.view[start:end])
            at += end - start
        self.view = copy

    def _runs(self) -> tuple[dict[int, int], list[tuple[int, int]], int]:
        """Where each candidate will stand in the copy, where the memory of all of them is, and how much that is."""
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
        return places, runs, total

    def hash_before(self, n: int) -> bytes | None:
        return None if self.before is None else self.before[n * HASH_BYTES : (n + 1) * HASH_BYTES]


class ChangeFinder:
    """Remembers hashes for one purpose: one store, one peer. Threads may use it at once on different buffers."""

    def __init__(
        self,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        pages: Pages | None = None,
        seed: int = 0,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._fingerprint = this_process() if fingerprint is None else fingerprint
        self._pages = process_pages() if pages is None else pages
        self._memories: OrderedDict[tuple[int, int], Memory] = OrderedDict()
        self._lock = threading.Lock()
        self._chance = random.Random(seed)

    def begin(self, buffer: TrackedBuffer, *, moving: bool = False) -> Look:
        """Which chunks may differ from the last settled look. Reads no more than a sample of the memory. ``moving``:
        the program goes on at once, and perhaps writes to all of it soon, so it is not protected before it was seen
        to stay."""
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
        elif view.nbytes >= TRACKED_MIN and (not moving if memory is None else memory.busy == 0):
            since = memory.look if memory is not None else 0
            number, ranges = self._pages.written_since(address, view.nbytes, since)
            if ranges is not None and known:
                candidates = self._chunks(ranges, address, view.nbytes)
        volatile = memory is not None and memory.volatile
        look = Look(
            address=address,
            length=view.nbytes,
            view=view,
            candidates=range(chunk_count(view.nbytes, self.chunk_bytes)) if candidates is None else candidates,
            before=bytes(memory.hashes) if memory is not None and known else None,
            volatile=volatile,
            tracked=candidates is not None,
            moving=moving,
            fingerprint=self._fingerprint,
            prints_before=memory.prints if memory is not None and candidates is None else b"",
            noting=self._fingerprint is not None and not (number or sealed or volatile),
            number=number,
            chunk_bytes=self.chunk_bytes,
            sealed=sealed,
            own=own,
        )
        return self._spot_checked(look) if look.tracked and not sealed else look

    def record_hashes(self, look: Look, hashes: Mapping[int, bytes]) -> bytes:
        """Remember the hashes of the candidates. Answers with those of all chunks, one after the other."""
        found = [hashes[n] for n in look.candidates]
        if len(found) == look.count:
            table = bytearray().join(found)
            before = hashes_in(look.before or b"")
            changed = [n for n, differs in enumerate(map(ne, found, before)) if differs]
        else:
            table, changed = bytearray(look.count * HASH_BYTES if look.before is None else look.before), []
            for n, digest in zip(look.candidates, found, strict=True):
                place = slice(n * HASH_BYTES, (n + 1) * HASH_BYTES)
                if table[place] != digest:
                    changed.append(n)
                    table[place] = digest
        with self._lock:
            key = (look.address, look.length)
            memory = self._memories.setdefault(key, Memory(bytearray()))
            self._memories.move_to_end(key)
            memory.hashes, memory.look = table, look.number
            memory.sealed, memory.own = look.sealed, look.own
            memory.prints = _prints(look, changed)
            memory.volatile = len(changed) > VOLATILE_SHARE * look.count
            memory.busy = _busy(look, memory.busy, len(changed))
            self._drop_oldest()
        return bytes(table)

    def changed(self, buffer: TrackedBuffer) -> list[int]:
        """Chunks whose content differs from the last look, all of them at the first; remembered at once."""
        return self.compared(buffer)[0]

    def compared(self, buffer: TrackedBuffer) -> tuple[list[int], bytes]:
        """The same, and the hashes of all chunks, one after the other."""
        look = self.begin(buffer)
        hashes = dict(each_hash(look, look.candidates))
        table = self.record_hashes(look, hashes)
        return [n for n in look.candidates if hashes[n] != look.hash_before(n)], table

    def believe(self, buffer: TrackedBuffer, table: bytes) -> None:
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

    def knows(self, buffer: TrackedBuffer) -> bool:
        """Whether there is a settled look at this memory."""
        with self._lock:
            memory = self._memories.get((buffer.address, buffer.view.nbytes))
            return memory is not None and bool(memory.hashes)

    def forget_buffer(self, buffer: TrackedBuffer) -> None:
        """Forget what this memory was: the next look finds all of it changed."""
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

    def _spot_checked(self, look: Look) -> Look:
        """Hash a few chunks that are said to be untouched. If one is not, the kernel's word is worth nothing here."""
        quiet = look.count - len(look.candidates)
        if not quiet:
            return look
        for _ in range(SAMPLE):
            n = self._chance.randrange(look.count)
            if n in look.candidates or chunk_hash(look.chunk(n)) == look.hash_before(n):
                continue
            number, ranges = self._pages.written_since(look.address, look.view.nbytes, look.number)
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


def _prints(look: Look, changed: Sequence[int]) -> bytes:
    """The fingerprints of all chunks, as far as they are known."""
    if not look.noting:
        return b""
    table = bytearray(look.prints_before or look.count * FINGERPRINT_BYTES)
    for n in changed:  # a hash may have been taken without one
        table[n * FINGERPRINT_BYTES : (n + 1) * FINGERPRINT_BYTES] = look.prints.get(n, UNKNOWN)
    for n, found in look.prints.items():
        table[n * FINGERPRINT_BYTES : (n + 1) * FINGERPRINT_BYTES] = found
    return bytes(table)


def _busy(look: Look, before: int, changed: int) -> int:
    """For how many more looks of which little comes this memory is not tracked."""
    if look.sealed:
        return 0
    if look.before is None:
        return 1 if look.moving else 0
    if look.tracked and len(look.candidates) > BUSY_SHARE * look.count:
        return BUSY_LOOKS
    return before - 1 if before and changed <= BUSY_SHARE * look.count else before


# ---------------------------------------------------------------------------------------------------------- fingerprint
#
# Fingerprints of chunks, within one process, five times as fast as a content hash.
#
# A fingerprint is never written down, never sent, and compared only with another one of the same process: what is saved
# or sent is named by its content hash, as ever. It is two xxh3 hashes of 64 bits with two seeds, which are random, new
# in each process, and kept secret. The second costs a third of the first, since the chunk is near by then, and it is
# there for a reason: within a KiB such a hash adds up products, so a change that leaves sums as they are (two words
# change places, one counts up while its neighbour counts down) is missed with one seed in some 2 to the 32. With two it
# is 2 to the 64, for the unluckiest change there is; for all others, 2 to the 128.


Fingerprint = Callable[[memoryview], bytes]

FINGERPRINT_BYTES: Final = 16
UNKNOWN: Final = bytes(FINGERPRINT_BYTES)
"""In a table, in place of one that was not taken. It equals no other."""


def seeded_fingerprint(one: int, other: int) -> Fingerprint | None:
    """With these seeds. None in an environment that is older than the need for it: hashes tell then, more slowly."""
    try:
        digest: Any = importlib.import_module("xxhash").xxh3_64_digest
    except ImportError:
        return None

    def fingerprint(data: memoryview) -> bytes:
        found: bytes = digest(data, one) + digest(data, other)
        return found

    return fingerprint


_made: list[Fingerprint | None] = []
os.register_at_fork(after_in_child=_made.clear)


def this_process() -> Fingerprint | None:
    """The one of this process. A child has its own, as a guest must whose siblings are another's; what it remembers of
    its parent's memory it goes on to compare as it was taken."""
    if not _made:
        seeds = os.urandom(16)
        _made.append(seeded_fingerprint(int.from_bytes(seeds[:8]), int.from_bytes(seeds[8:])))
    return _made[0]
