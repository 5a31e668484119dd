"""Encodes packs and manifests as docs/format.md specifies.

A pack is many chunks one after the other, then an index, then a trailer. A manifest is one checkpoint: what it is, the
packs it needs, and the leaves that list its roots. Everything is little-endian and immutable, and every byte stands
under a checksum that is compared after reading as it was made before writing; what differs is ``CheckpointDamaged``.
Nothing here opens a file, and nothing here loads an object.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from blake3 import blake3

from sublet.lazy_dataclass import dataclass
from sublet.values import Epoch, LeaseId
from sublet.wire.manifest import (
    LEAF_REF,
    MANIFEST,
    MANIFEST_MAGIC,
    MANIFEST_MAX,
    PACK_HEADER,
    PACK_REF,
    TAIL,
    TRAILER,
    TRAILER_MAGIC,
    VERSION,
    damaged,
    entries_of_pack,
)

__all__ = [
    "HASH_BYTES",
    "MANIFEST_MAX",
    "PACK_HEADER",
    "TRAILER_BYTES",
    "CheckpointManifest",
    "ChunkEncoding",
    "LeafRef",
    "PackEntry",
    "PackRef",
    "damaged",
    "dump_index",
    "dump_trailer",
    "pack_name",
    "parse_index",
    "parse_trailer",
]

HASH_BYTES: Final = 32
NAME_BYTES: Final = 20
TEXT_MAX: Final = 0xFFFF
_ENTRY: Final = struct.Struct("<32sQIIIB3x")
TRAILER_BYTES: Final = TRAILER.size


class ChunkEncoding:
    """How the bytes of a chunk are stored."""

    RAW: Final = 0
    ZSTD: Final = 1


class PackEntry(NamedTuple):
    """One chunk of a pack."""

    hash: bytes
    """blake3 of the content."""
    offset: int
    stored: int
    """Bytes in the pack."""
    length: int
    """Bytes of the content."""
    check: int
    """crc32 of the stored bytes where they are not the content itself, else 0."""
    encoding: int


class PackRef(NamedTuple):
    """A pack that a checkpoint needs."""

    name: bytes
    size: int
    entries: int


class LeafRef(NamedTuple):
    """A chunk that lists roots."""

    hash: bytes
    length: int
    roots: int


# ---- packs ----


def pack_name(index: bytes) -> bytes:
    """A pack is named for its content, so the same pack twice is one."""
    return blake3(index).digest()[:NAME_BYTES]


def dump_index(entries: Sequence[PackEntry]) -> bytes:
    return b"".join([_ENTRY.pack(*entry) for entry in entries])


def dump_trailer(index: bytes, offset: int) -> bytes:
    front = TRAILER.pack(TRAILER_MAGIC, VERSION, 0, len(index) // _ENTRY.size, offset, blake3(index).digest(), 0)[:-4]
    return front + struct.pack("<I", zlib.crc32(front))


def parse_trailer(header: bytes, trailer: bytes, size: int) -> tuple[int, int, bytes]:
    """Offset, length and hash of the index, of a file of this size that begins and ends so."""
    count = entries_of_pack(header, trailer, size)
    offset, index_hash = TRAILER.unpack(trailer)[4:6]
    return offset, count * _ENTRY.size, index_hash


def parse_index(index: bytes, index_hash: bytes, end: int) -> list[PackEntry]:
    """The chunks of a pack, which lie one after the other from the header to ``end``."""
    if blake3(index).digest() != index_hash:
        raise damaged("a pack's index has another hash than its trailer says")
    entries = [PackEntry(*one) for one in _ENTRY.iter_unpack(index)]
    at = len(PACK_HEADER)
    for entry in entries:
        raw = entry.encoding == ChunkEncoding.RAW
        if entry.offset != at or (raw and (entry.stored != entry.length or entry.check)) or entry.encoding > 1:
            raise damaged("a pack's index contradicts itself")
        at += entry.stored
    if at != end:
        raise damaged("a pack has bytes that its index does not know")
    return entries


# ---- manifests ----


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """One checkpoint."""

    number: int
    """Rises by one with every checkpoint of a store."""
    parent: int
    """The one it was made from; 0 for the first."""
    lease: LeaseId
    epoch: Epoch
    schema: str
    """What the state is, in the program's words: a checkpoint of another schema is not restored."""
    wall_ns: int
    """When, for people."""
    packs: Sequence[PackRef]
    leaves: Sequence[LeafRef]
    roots: int
    state_bytes: int
    """What a full copy would have."""
    note: str = ""
    """The program's own words."""

    def dump(self) -> bytes:
        texts = [text.encode() for text in (self.lease, self.schema, self.note)]
        if any(len(text) > TEXT_MAX for text in texts):
            raise ValueError(f"lease, schema and note have at most {TEXT_MAX} bytes each")
        tables = b"".join(
            [PACK_REF.pack(*ref) for ref in self.packs] + [LEAF_REF.pack(*ref) for ref in self.leaves] + texts
        )
        fixed = MANIFEST.pack(
            *(MANIFEST_MAGIC, VERSION, 0, MANIFEST.size, MANIFEST.size + len(tables) + TAIL.size),
            *(self.number, self.parent, self.epoch.incarnation, self.epoch.n, self.wall_ns),
            *(len(self.packs), len(self.leaves), self.roots, self.state_bytes, *(len(text) for text in texts)),
        )
        body = fixed + tables
        return body + TAIL.pack(zlib.crc32(body), blake3(body).digest())

    @classmethod
    def parse(cls, data: bytes) -> CheckpointManifest:
        if len(data) < MANIFEST.size + TAIL.size or data[:8] != MANIFEST_MAGIC:
            raise damaged("a manifest is truncated or malformed")
        body, tail = data[: -TAIL.size], data[-TAIL.size :]
        if (zlib.crc32(body), blake3(body).digest()) != TAIL.unpack(tail):
            raise damaged("a manifest has another checksum than it says")
        _, version, zero, fixed, total, number, parent, incarnation, n, wall_ns, packs_n, leaves_n, *rest = (
            MANIFEST.unpack_from(body)
        )
        roots, state_bytes, *lengths = rest
        if version != VERSION or zero or fixed != MANIFEST.size:
            raise damaged(f"a manifest is of version {version}, and this Sublet reads version {VERSION}")
        at_leaves = fixed + packs_n * PACK_REF.size
        at_texts = at_leaves + leaves_n * LEAF_REF.size
        if total != len(data) or at_texts + sum(lengths) != len(body):
            raise damaged("a manifest's size is not what it says")
        texts = []
        at = at_texts
        for length in lengths:
            texts.append(body[at : at + length])
            at += length
        try:
            lease, schema, note = (text.decode() for text in texts)
        except UnicodeDecodeError:
            raise damaged("a manifest has a text that is not UTF-8") from None
        return cls(
            number=number,
            parent=parent,
            lease=LeaseId(lease),
            epoch=Epoch(incarnation, n),
            schema=schema,
            wall_ns=wall_ns,
            packs=[PackRef(*one) for one in PACK_REF.iter_unpack(body[fixed:at_leaves])],
            leaves=[LeafRef(*one) for one in LEAF_REF.iter_unpack(body[at_leaves:at_texts])],
            roots=roots,
            state_bytes=state_bytes,
            note=note,
        )
