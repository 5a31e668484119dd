"""The index of an output store on disk: which chunk's result lies where in a segment of data.

An index file is a head, entries and a digest of all of it. It is read whole or refused; nothing of a damaged one is
believed. Each entry has the digest of its result, so that data are compared before they are handed out::

    head     magic "SBJX", version, number of entries, length of the segment of data, digest of the job's name
    entry    length of the id, offset, length, digest of the result, the id itself
    tail     blake3 of everything before it
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Container, Sequence
from typing import Final, NamedTuple

from blake3 import blake3

from sublet.errors import CheckpointDamaged
from sublet.jobs.identity import ID_BYTES, LONGEST_ID, ChunkId

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
