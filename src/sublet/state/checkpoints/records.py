"""Leaf records: a checkpoint's roots, and the chunks of which each consists.

A *root* is a named value. Roots that share objects stand in one *record*: they were encoded together and are loaded
together. A record has *blobs*, the head first and then each buffer; a small blob stands in the record itself, a large
one is a list of the hashes of its chunks. A *leaf* is a run of records, is itself a chunk, and so is written only when
one of its records changed. Where one leaf ends and the next begins depends on names alone, so that a new name moves
nothing but its neighbours.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.state.checkpoints.format import HASH_BYTES, damaged

MAGIC: Final = b"SBLF"
VERSION: Final = 1
INLINE_MAX: Final = 4096
"""A blob up to this size stands in its record."""
PER_LEAF: Final = 128
"""Names between two that begin a leaf, on average."""
_LEAF: Final = struct.Struct("<4sHHI")
_RECORD: Final = struct.Struct("<III")
_BLOB: Final = struct.Struct("<QIIBBBx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes of a record: in it, or in chunks."""

    length: int
    chunk_bytes: int = 0
    """Length of every chunk but the last; 0 where the bytes are inline."""
    inline: bytes = b""
    hashes: bytes = b""
    """Of the chunks, one after the other."""
    kind: int = 0
    writable: bool = False

    def chunks(self) -> Iterator[tuple[bytes, int, int]]:
        """Hash, offset and length of each chunk."""
        for n in range(len(self.hashes) // HASH_BYTES):
            offset = n * self.chunk_bytes
            yield (
                self.hashes[n * HASH_BYTES : (n + 1) * HASH_BYTES],
                offset,
                min(self.chunk_bytes, self.length - offset),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    """Roots that were encoded together."""

    names: Sequence[str]
    blobs: Sequence[Blob]


def leaf_starts(names: Sequence[str]) -> list[int]:
    """The places of the names with which a leaf begins."""
    return [n for n, crc in enumerate(map(zlib.crc32, as_bytes(names))) if not crc % PER_LEAF]


def as_bytes(names: Sequence[str]) -> list[bytes]:
    try:
        return list(map(str.encode, names))
    except UnicodeEncodeError:  # half of a pair of surrogates, which Python allows in names
        return [name.encode("utf-8", "surrogatepass") for name in names]


def dump_leaf(records: Iterable[EncodedGroup]) -> bytes:
    found = [_dump_record(record) for record in records]
    return b"".join([_LEAF.pack(MAGIC, VERSION, 0, len(found)), *found])


def _dump_record(record: EncodedGroup) -> bytes:
    joined = "".join(record.names)
    lengths = map(len, record.names if joined.isascii() else as_bytes(record.names))
    parts = [struct.pack(f"<{len(record.names)}I", *lengths), joined.encode("utf-8", "surrogatepass")]
    for blob in record.blobs:
        body = blob.hashes if blob.chunk_bytes else blob.inline
        parts += [
            _BLOB.pack(blob.length, blob.chunk_bytes, len(body), blob.kind, blob.writable, blob.chunk_bytes > 0),
            body,
        ]
    body = b"".join(parts)
    return _RECORD.pack(len(body), len(record.names), len(record.blobs)) + body


def parse_leaf(data: bytes) -> list[EncodedGroup]:
    """Every record. The leaf's hash was compared already, so only a leaf that another program made fails here."""
    try:
        magic, version, zero, count = _LEAF.unpack_from(data)
        if magic != MAGIC or version != VERSION or zero:
            raise damaged("a leaf begins with something else")
        at, records = _LEAF.size, []
        for _ in range(count):
            length, names_n, blobs_n = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            records.append(_parse_record(memoryview(data)[at : at + length], names_n, blobs_n))
            at += length
    except (struct.error, UnicodeDecodeError):
        raise damaged("a leaf is cut off") from None
    if at != len(data):
        raise damaged("a leaf is longer than it says")
    return records


def _parse_record(data: memoryview, names_n: int, blobs_n: int) -> EncodedGroup:
    at, names, blobs = 0, [], []
    lengths = struct.unpack_from(f"<{names_n}I", data)
    at += 4 * names_n
    for length in lengths:
        names.append(bytes(data[at : at + length]).decode("utf-8", "surrogatepass"))
        at += length
    for _ in range(blobs_n):
        length, chunk_bytes, size, kind, writable, chunked = _BLOB.unpack_from(data, at)
        at += _BLOB.size
        body = bytes(data[at : at + size])
        at += size
        expected = -(-length // chunk_bytes) * HASH_BYTES if chunked and chunk_bytes else length
        if bool(chunked) != (chunk_bytes > 0) or size != expected or len(body) != size:
            raise damaged("a blob of a leaf contradicts itself")
        blobs.append(
            Blob(
                length=length,
                chunk_bytes=chunk_bytes,
                inline=b"" if chunked else body,
                hashes=body if chunked else b"",
                kind=kind,
                writable=bool(writable),
            )
        )
    if at != data.nbytes or not blobs:
        raise damaged("a record of a leaf contradicts itself")
    return EncodedGroup(names=names, blobs=blobs)
