"""The bytes of a folder replica's log. Pure; docs/replicated.md has them.

The log is as long as it will ever be from the first moment on, full of zeros, and batches are written into it one
after the other, in sectors of 512 bytes; a batch is what shares one sync. Each sector carries its own checksum, the
number of its batch and its place in it. So three things can be told apart at the end of the log: nothing (zeros), a
batch of which some sectors are still zeros (a write that a power cut tore, and which was never confirmed), and anything
else, which is damage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from blake3 import blake3

from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.ballot import Garbled, take
from sublet.state.replicated.cell import ReplicaCell
from sublet.state.replicated.quorum import ReplicaSet

SECTOR: Final = 512
MAGIC: Final = b"SUBLETR1"
VERSION: Final = 1
_HEADER: Final = struct.Struct(">8sHHQQQ16s4sQ")
_CHECK: Final = 32
_SECTOR: Final = struct.Struct(">IQHHH")
ROOM: Final = SECTOR - _SECTOR.size
"""Bytes of a batch in each sector."""
_LENGTH: Final = struct.Struct(">I")
_ENTRY: Final = struct.Struct(">BBQ")
_CELL, _SET = 1, 2
_BLANK: Final = bytes(SECTOR)


@dataclass(frozen=True, slots=True)
class Header:
    """The first sector: whose log this is, and which file it was written into."""

    size: int
    """Of the whole file, in bytes."""
    inode: int
    inode_generation: int
    """A copy of the file is another file, with another number, and does not vote."""
    identity: str
    """Sixteen bytes as hexadecimal digits."""
    salt: bytes
    """Four bytes that tell the sectors of this log from those of any other."""
    made_ns: int
    """Wall time, for people."""

    def pack(self) -> bytes:
        """One sector."""
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            SECTOR,
            self.size,
            self.inode,
            self.inode_generation,
            bytes.fromhex(self.identity),
            self.salt,
            self.made_ns,
        )
        return (head + blake3(head).digest()).ljust(SECTOR, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """From the first sector; anything else is Garbled."""
        magic, version, sector, size, inode, generation, identity, salt, made = _HEADER.unpack(
            take(data, 0, _HEADER.size)
        )
        if magic != MAGIC:
            raise Garbled("this is not the log of a replica")
        if (version, sector) != (VERSION, SECTOR):
            raise Garbled(f"a log of version {version}, and this program reads version {VERSION}")
        header = cls(size, inode, generation, identity.hex(), salt, made)
        if header.pack() != data:
            raise Garbled("the head of the log is damaged")
        return header


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One record: what a key is from here on, or the set of replicas."""

    generation: int
    """Of the set under which it was written."""
    key: str
    content: ReplicaCell | ReplicaSet

    def pack(self) -> bytes:
        """Kind, generation, key, content."""
        key = self.key.encode()
        kind = _CELL if isinstance(self.content, ReplicaCell) else _SET
        return _ENTRY.pack(kind, len(key), self.generation) + key + self.content.pack()

    @classmethod
    def unpack(cls, data: bytes) -> LogEntry:
        """From all bytes of an entry; anything else is Garbled."""
        kind, length, generation = _ENTRY.unpack(take(data, 0, _ENTRY.size))
        at = _ENTRY.size
        try:
            key = take(data, at, length).decode()
        except UnicodeDecodeError as error:
            raise Garbled("a key that is not text") from error
        at += length
        if kind == _CELL:
            return cls(generation, key, ReplicaCell.unpack(data, at))
        if kind == _SET:
            return cls(generation, key, ReplicaSet.unpack(data[at:]))
        raise Garbled(f"an entry of the kind {kind}")


def batch(found: Iterable[LogEntry]) -> bytes:
    """Entries that are written together: each with its length before it."""
    return b"".join(_LENGTH.pack(len(packed)) + packed for packed in (entry.pack() for entry in found))


def entries_of(data: bytes) -> list[LogEntry]:
    """The entries of a batch; anything else is Garbled."""
    found, at = [], 0
    while at < len(data):
        (length,), at = _LENGTH.unpack(take(data, at, _LENGTH.size)), at + _LENGTH.size
        found.append(LogEntry.unpack(take(data, at, length)))
        at += length
    return found


def frame(entry: bytes, number: int, salt: bytes) -> bytes:
    """A batch, cut into sectors."""
    count = max(1, -(-len(entry) // ROOM))
    seed = zlib.crc32(salt)
    out = []
    for index in range(count):
        piece = entry[index * ROOM : (index + 1) * ROOM]
        rest = _SECTOR.pack(0, number, index, count, len(piece))[4:] + piece.ljust(ROOM, b"\0")
        out.append(zlib.crc32(rest, seed).to_bytes(4, "big") + rest)
    return b"".join(out)


def is_blank(data: bytes) -> bool:
    """Whether nothing was ever written there."""
    return data.count(0) == len(data)


@dataclass(frozen=True, slots=True)
class Torn:
    """The log ends here; behind this place some sectors of a batch that was never finished were written."""

    at: int
    end: int


def scan(data: bytes, at: int, number: int, salt: bytes) -> Iterator[tuple[int, bytes] | Torn]:
    """The batches from a place on, each with the place after it; then, perhaps, what was torn. Damage is Garbled.

    ``data`` begins at ``at`` in the file and goes to its end.
    """
    place, end = 0, len(data)
    while place < end:
        sector = data[place : place + SECTOR]
        if sector == _BLANK:
            yield from _tail(data, place, at, number, salt)
            return
        count = _sector(sector, number, 0, salt)[1]
        if place + count * SECTOR > end:
            raise Garbled("a batch reaches beyond the end of the log")
        pieces = []
        for index in range(count):
            piece = data[place + index * SECTOR : place + (index + 1) * SECTOR]
            if piece == _BLANK:
                yield from _tail(data, place, at, number, salt)
                return
            body, again = _sector(piece, number, index, salt)
            if again != count:
                raise Garbled(f"batch {number} is damaged")
            pieces.append(body)
        place += count * SECTOR
        yield at + place, b"".join(pieces)
        number += 1


def _tail(data: bytes, place: int, at: int, number: int, salt: bytes) -> Iterator[Torn]:
    """Behind the last whole batch: zeros, or a part of one more, or damage."""
    if is_blank(data[place:]):
        return
    counts, last = set(), place
    for where in range(place, len(data), SECTOR):
        sector = data[where : where + SECTOR]
        if sector != _BLANK:
            counts.add(_sector(sector, number, (where - place) // SECTOR, salt)[1])
            last = where + SECTOR
    if len(counts) != 1 or last - place > counts.pop() * SECTOR:
        raise Garbled(f"what follows batch {number - 1} is damaged")
    yield Torn(at + place, at + last)


def _sector(sector: bytes, number: int, index: int, salt: bytes) -> tuple[bytes, int]:
    check, found, place, count, used = _SECTOR.unpack(sector[: _SECTOR.size])
    if zlib.crc32(sector[4:], zlib.crc32(salt)) != check:
        raise Garbled(f"a sector of batch {number} is damaged")
    if found != number or place != index or count <= index or used > ROOM:
        raise Garbled(f"a sector of batch {found} is where one of batch {number} belongs")
    return sector[_SECTOR.size : _SECTOR.size + used], count


def entries(data: bytes, header: Header) -> list[LogEntry]:
    """All entries of a log file; for readers outside of a replica."""
    pieces = scan(data[SECTOR:], SECTOR, 1, header.salt)
    return [entry for piece in pieces if not isinstance(piece, Torn) for entry in entries_of(piece[1])]
