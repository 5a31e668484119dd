"""Results of chunks in a volume: written in segments, published by the supervisor, found again by any program.

A publication is one checkpoint of the volume: a segment with the results since the last one, its index, and the
coordinator's own state. What earlier publications wrote stays where it is and is carried into the new manifest, so a
publication costs what is new. The landed publication of volumes does the rest: the manifest gets its name when all of
it is on the disk, a writer whose lease has ended is refused, and every byte is compared with its hash when it is read.

The index is a file, not a table in leased memory: it must be there when no lease is.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Collection, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from blake3 import blake3

from sublet.clock import Clock, SystemClock
from sublet.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest, LeaseEnded
from sublet.jobs.identity import ID_BYTES, LONGEST_ID, ChunkId
from sublet.jobs.stores import another_job, not_stored
from sublet.state.checkpoints.durable import store_of
from sublet.state.checkpoints.object_groups import encode_roots
from sublet.state.checkpoints.writer import Saver
from sublet.values import format_size, parse_duration_ns

if TYPE_CHECKING:
    from sublet.state.checkpoints.durable import Place
    from sublet.state.checkpoints.reader import CheckpointReader
    from sublet.state.checkpoints.records import EncodedGroup

SCHEMA: Final = "sublet job outputs"
KEEP: Final = 2
"""Checkpoints that stay: the newest, and the one before it for a reader that is just reading it."""
SEGMENTS_READ: Final = 4
"""Segments of data that are kept in memory after a read."""
_NEEDED_MARGIN: Final = 1 << 20
"""Bytes for manifest, leaves and the pack's own index, beside the results themselves."""


class VolumeOutputStore:
    """A `JobOutputStore` in the volume of a block lease (``fabric.block("2GiB", name="results")``), or in a folder.

    One store has the results of one job. Opening it reads the indexes; results are read when they are asked for.
    """

    def __init__(self, place: Place, *, publish_after: float | str = 0.5, clock: Clock | None = None) -> None:
        """``publish_after``: how long a result may wait for others, so that many are published at once."""
        self.publish_after = parse_duration_ns(publish_after, "publish_after", zero_ok=True) / 1e9
        self._store = store_of(place)
        self._clock: Clock = SystemClock() if clock is None else clock
        self._saver = Saver()
        self._lock = threading.Lock()
        self._job = ""
        self._state = b""
        self._segment = 0
        self._where: dict[ChunkId, Locator] = {}
        self._pending: dict[ChunkId, bytes] = {}
        self._records: list[EncodedGroup] = []
        self._open: CheckpointReader | None = None
        self._read: OrderedDict[int, bytes] = OrderedDict()
        self._base = self._store.base()
        self._load()

    def __repr__(self) -> str:
        return f"<VolumeOutputStore of job {self._job!r}: {len(self._where)} results>"

    def begin(self, job: str) -> bytes:
        if job and self._segment and self._job != job:
            raise another_job(self._job, job)
        self._job = job or self._job
        return self._state

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._where

    def __len__(self) -> int:
        return len(self._where)

    def chunks(self) -> Iterator[ChunkId]:
        return iter(list(self._where))

    def get(self, chunk: ChunkId) -> bytes:
        with self._lock:
            locator = self._where.get(chunk)
            if locator is None:
                raise not_stored(chunk)
            return check_result(chunk, locator, self._data(locator.segment))

    def put(self, results: Sequence[tuple[ChunkId, bytes]]) -> None:
        with self._lock:
            for chunk, data in results:
                if is_first(chunk, self._where):
                    self._pending.setdefault(chunk, data)

    def publish(self, state: bytes) -> None:
        with self._lock:
            if self._pending or state != self._state:
                self._publish(state)

    def close(self) -> None:
        """Let go of the files. Harmless twice."""
        with self._lock:
            self._close()

    # ---- inside

    def _load(self) -> None:
        number = self._store.newest()
        if not number:
            return
        checkpoint = self._store.open(number)
        try:
            schema, version = checkpoint.manifest.schema.rpartition(" ")[::2]
            if schema != SCHEMA:
                raise InvalidRequest(
                    "this place holds other checkpoints, and no results of a job",
                    do="Give the job a volume of its own.",
                )
            if version != str(VERSION):
                raise InvalidRequest(
                    f"these results are of version {version}, and this Sublet reads version {VERSION}",
                    do="Finish the job with the Sublet that began it, or use a new store.",
                )
            self._job = checkpoint.manifest.note
            segments = whole_segments(checkpoint.names)
            for segment in segments:
                self._where |= parse_index(self._job, segment, checkpoint.load(index_name(segment)))
            self._state = checkpoint.load("state")
            self._segment = max(segments, default=0)
            self._records = list({id(record): record for record in checkpoint.records.values()}.values())
            self._open = checkpoint
        except BaseException:
            checkpoint.close()
            raise

    def _publish(self, state: bytes) -> None:
        results = list(self._pending.items())
        segment = self._segment + bool(results)
        roots: dict[str, bytes] = {"state": state}
        if results:
            roots[index_name(segment)], roots[data_name(segment)] = dump_index(self._job, results)
        # each by itself: a record can only be carried on as a whole, and the state changes every time
        groups = [group for name in sorted(roots) for group in encode_roots({name: roots[name]})]
        carried = [record for record in self._records if "state" not in record.names]
        needed = sum(map(len, roots.values())) + _NEEDED_MARGIN
        try:
            self._check_room(needed, len(results))
            with self._store.staging_folder(needed) as staging:
                staged = self._saver.write(
                    self._saver.capture(groups, self._base),
                    staging=staging,
                    base=self._base,
                    author=self._store.author,
                    wall_ns=self._clock.wall_ns(),
                    schema=f"{SCHEMA} {VERSION}",
                    note=self._job,
                    carry=carried,
                )
                self._store.publish(staged)
        except LeaseEnded as error:
            error.message = f"the lease of the store has ended, so results are not stored any more: {error.message}"
            error.do = "Acquire its volume again and run the same job: it runs what is missing."
            raise
        except OSError as error:
            raise CheckpointFailed(
                f"the results could not be stored: {error.strerror or error}",
                do="What was published before is whole. Make room, then run the job again: it runs what is missing.",
            ) from error
        self._base, self._records = staged.base, list(staged.records)
        self._state, self._segment = state, segment
        if results:
            self._where |= parse_index(self._job, segment, roots[index_name(segment)])
            self._remember(segment, roots[data_name(segment)])
        self._pending.clear()
        self._close()
        self._store.collect(KEEP)

    def _check_room(self, needed: int, results: int) -> None:
        room = self._store.room
        if needed > room:
            raise CheckpointFailed(
                f"the store of job {self._job!r} is full: {results} more results need up to {format_size(needed)}, and "
                f"there is room for {format_size(room)}",
                do="Copy its volume into a larger one (`sublet volume cp`) and run the same job with that: what was "
                "stored before is whole and is not run again.",
            )

    def _data(self, segment: int) -> bytes:
        found = self._read.get(segment)
        if found is None:
            if self._open is None:
                self._open = self._store.open()
            found = self._open.load(data_name(segment))
            if not isinstance(found, bytes):
                raise CheckpointDamaged(f"segment {segment} holds a {type(found).__name__}")
        self._remember(segment, found)
        return found

    def _remember(self, segment: int, data: bytes) -> None:
        self._read[segment] = data
        self._read.move_to_end(segment)
        while len(self._read) > SEGMENTS_READ:
            self._read.popitem(last=False)

    def _close(self) -> None:
        checkpoint, self._open = self._open, None
        if checkpoint is not None:
            checkpoint.close()


# ---------------------------------------------------------------------------------------------------------------- index
#
# The index of an output store on disk: which chunk's result lies where in a segment of data.
#
# An index file is a head, entries and a digest of all of it. It is read whole or refused; nothing of a damaged one is
# believed. Each entry has the digest of its result, so that data are compared before they are handed out::
#
#     head     magic "SBJX", version, number of entries, length of the segment of data, digest of the job's name
#     entry    length of the id, offset, length, digest of the result, the id itself
#     tail     blake3 of everything before it


MAGIC: Final = b"SBJX"
VERSION: Final = 1
CHECK_BYTES: Final = 16
_HEAD: Final = struct.Struct("<4sHHIQ16s")
_ENTRY: Final = struct.Struct("<BQQ16s")
_TAIL_BYTES: Final = 32


class Locator(NamedTuple):
    """Where one result lies."""

    segment: int
    offset: int
    length: int
    check: bytes


def index_name(segment: int) -> str:
    """The name of a segment's index in the store."""
    return f"index/{segment:08d}"


def data_name(segment: int) -> str:
    """The name of a segment's data in the store."""
    return f"data/{segment:08d}"


def whole_segments(names: Collection[str]) -> list[int]:
    """The segments of a store with these names. Raises if one has an index and no data: then results are missing that
    the index has, and nothing may be skipped for its sake."""
    found = sorted(int(name.removeprefix("index/")) for name in names if name.startswith("index/"))
    for segment in found:
        if data_name(segment) not in names:
            raise CheckpointDamaged(
                f"segment {segment} of the results has an index and no data",
                do="Keep the volume for inspection and run the job in a new store.",
            )
    return found


def is_first(chunk: ChunkId, known: Container[ChunkId]) -> bool:
    """Whether a result of this chunk is the first, and so the one that stays."""
    return chunk not in known


def dump_index(job: str, results: Sequence[tuple[ChunkId, bytes]]) -> tuple[bytes, bytes]:
    """The index and the segment of data of these results."""
    entries: list[bytes] = []
    at = 0
    for chunk, data in results:
        check = blake3(data).digest(CHECK_BYTES)
        entries.append(_ENTRY.pack(len(chunk), at, len(data), check))
        entries.append(chunk)
        at += len(data)
    head = _HEAD.pack(MAGIC, VERSION, 0, len(results), at, blake3(job.encode()).digest(16))
    body = head + b"".join(entries)
    return body + blake3(body).digest(), b"".join([data for _, data in results])


def parse_index(job: str, segment: int, index: bytes) -> dict[ChunkId, Locator]:
    """Chunk → where its result lies. Raises ``CheckpointDamaged`` for anything but what ``dump_index`` wrote."""
    if len(index) < _HEAD.size + _TAIL_BYTES:
        raise _damaged(segment, "is cut off")
    body, tail = index[:-_TAIL_BYTES], index[-_TAIL_BYTES:]
    if blake3(body).digest() != tail:
        raise _damaged(segment, "has another checksum than it says")
    magic, version, zero, count, data_bytes, whose = _HEAD.unpack_from(body)
    if magic != MAGIC or version != VERSION or zero:
        raise _damaged(segment, f"is of version {version}, and this Sublet reads version {VERSION}")
    if whose != blake3(job.encode()).digest(16):
        raise _damaged(segment, "is of another job")
    found: dict[ChunkId, Locator] = {}
    place, end = _HEAD.size, 0
    for _ in range(count):
        if place + _ENTRY.size > len(body):
            raise _damaged(segment, "has fewer entries than it says")
        id_bytes, offset, length, check = _ENTRY.unpack_from(body, place)
        place += _ENTRY.size
        chunk = ChunkId(body[place : place + id_bytes])
        place += id_bytes
        if not ID_BYTES <= id_bytes <= LONGEST_ID or place > len(body) or offset != end or chunk in found:
            raise _damaged(segment, "contradicts itself")
        end = offset + length
        found[chunk] = Locator(segment, offset, length, check)
    if place != len(body) or end != data_bytes:
        raise _damaged(segment, "contradicts itself")
    return found


def check_result(chunk: ChunkId, locator: Locator, segment: bytes | memoryview) -> bytes:
    """The result at this place, compared with its digest."""
    data = bytes(segment[locator.offset : locator.offset + locator.length])
    if len(data) != locator.length or blake3(data).digest(CHECK_BYTES) != locator.check:
        raise CheckpointDamaged(
            f"the result of chunk {chunk.hex()} is not what was stored",
            do="Nothing of it was handed out. Run the chunk again in another store, or restore the volume.",
        )
    return data


def _damaged(segment: int, how: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"the index of segment {segment} {how}",
        do="Nothing was read from it. Keep the volume for inspection and run the job in a new store.",
    )
