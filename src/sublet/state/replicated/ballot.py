"""Ballots and stamps, ordered so that a newer lease wins without a vote.

A *ballot* is compared field by field: the reign first (which office's epochs count, and since which adoption), then the
epoch of the lease, then how often this epoch has begun anew, then a nonce, so that no two writers ever share a ballot.
A *stamp* is one write of a ballot. A writer counts its writes up from zero, and each of them builds on the one before,
so stamps order all writes that ever were.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from sublet.values import Epoch

NONCE_BYTES: Final = 8
OFFICE_MAX: Final = 63
_HEAD: Final = struct.Struct(">IB")
_TAIL: Final = struct.Struct(f">QQI{NONCE_BYTES}s")
_SEQ: Final = struct.Struct(">Q")


class Garbled(ValueError):
    """Bytes that are not what they should be. The reader decides whether that is damage or a foreign record."""


class Ballot(NamedTuple):
    """The right to write that a writer claims; replicas obey the highest that they have seen."""

    reign: int
    """Rises when another office adopts the register, so that epochs of two offices never have to be compared."""
    office: str
    """Whose epochs these are."""
    epoch: Epoch
    attempt: int
    """How often a writer with this epoch has begun anew."""
    nonce: bytes

    def __str__(self) -> str:
        return f"{self.office}/{self.reign} epoch {self.epoch} attempt {self.attempt} ({self.nonce.hex()})"

    def pack(self) -> bytes:
        """As docs/replicated.md draws it."""
        office = self.office.encode()
        return (
            _HEAD.pack(self.reign, len(office))
            + office
            + _TAIL.pack(self.epoch.incarnation, self.epoch.n, self.attempt, self.nonce)
        )

    @classmethod
    def unpack(cls, data: bytes, at: int) -> tuple[Ballot, int]:
        """The ballot at this place, and the place after it."""
        (reign, length), at = _HEAD.unpack(take(data, at, _HEAD.size)), at + _HEAD.size
        try:
            office, at = take(data, at, length).decode(), at + length
        except UnicodeDecodeError as error:
            raise Garbled("the name of an office is not text") from error
        incarnation, n, attempt, nonce = _TAIL.unpack(take(data, at, _TAIL.size))
        return cls(reign, office, Epoch(incarnation, n), attempt, nonce), at + _TAIL.size


class WriteStamp(NamedTuple):
    """One write."""

    ballot: Ballot
    seq: int

    def pack(self) -> bytes:
        """The ballot, then the number."""
        return self.ballot.pack() + _SEQ.pack(self.seq)

    @classmethod
    def unpack(cls, data: bytes, at: int) -> tuple[WriteStamp, int]:
        """The stamp at this place, and the place after it."""
        ballot, at = Ballot.unpack(data, at)
        (seq,) = _SEQ.unpack(take(data, at, _SEQ.size))
        return cls(ballot, seq), at + _SEQ.size


def take(data: bytes, at: int, size: int) -> bytes:
    """Exactly so many bytes from there."""
    piece = data[at : at + size]
    if len(piece) != size:
        raise Garbled(f"it ends after {len(data)} bytes, in the middle of something")
    return piece
