"""The audit chain: every record carries a hash over itself and the hash before it.

To edit, delete, insert or move a record, an attacker must compute every later hash anew. A chain alone cannot show
that its end was cut off, or that all of it was replaced; so the head is also noted outside, in an *anchor*, and the
chain is compared with that. This module is pure: records and anchors in, verdict out. ``docs/audit.md`` writes the
format down for those who want to check a chain with other tools.

What is not promised: a person who may write both the journal and the anchor can replace both. Noting the head that
``sublet audit verify`` prints on another machine closes that gap.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from sublet.lazy_dataclass import dataclass
from sublet.wire.decoders import decode_as

GENESIS: Final = bytes(32)
"""What stands before the first record."""
BEGAN: Final = "journal.began"
"""The kind of the first record of every chain."""
RESTORED: Final = "journal.restored"
"""The kind of the record that an operator's restore leaves."""

_DOMAIN: Final = b"sublet-audit-1\0"
_FIXED: Final = struct.Struct(">32sqqqHI")


class AuditRecord(NamedTuple):
    """One audited fact."""

    seq: int
    ns: int
    wall_ns: int
    kind: str
    body: bytes
    """JSON, as it was when it was written; it is hashed, never encoded anew."""
    hash: bytes


class Anchor(NamedTuple):
    """The head of a chain as it was noted outside the journal."""

    journal: str
    """Identity of the journal: a restored one gets a new identity."""
    seq: int
    """The last entry of the journal, audited or not."""
    audit_seq: int
    """The last record of the chain."""
    head: bytes
    """Its hash."""

    @property
    def text(self) -> str:
        """One line with a checksum of its own."""
        line = f"sublet-anchor 1 {self.journal} {self.seq} {self.audit_seq} {self.head.hex()}"
        return f"{line} {zlib.crc32(line.encode()):08x}"

    @classmethod
    def parse(cls, data: bytes) -> Anchor | None:
        """From the bytes of a file; None if they do not begin with a whole anchor."""
        match = re.match(
            rb"(sublet-anchor 1 ([0-9a-f]{32}) (\d{1,18}) (\d{1,18}) ([0-9a-f]{64})) ([0-9a-f]{8})\n", data
        )
        if match is None or zlib.crc32(match[1]) != int(match[6], 16):
            return None
        return cls(match[2].decode(), int(match[3]), int(match[4]), bytes.fromhex(match[5].decode()))


class Began(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the first record."""

    journal: str
    incarnation: int


class RestoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a restore: from here on the chain belongs to a journal of another identity, by an operator's will."""

    journal: str
    incarnation: int
    replaced: tuple[str, ...] = ()
    """The anchors that stood at this place when the backup was put there, as text: the heads that were given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainVerdict:
    """What a walk along the chain found."""

    records: int
    head: bytes
    problem: str | None = None
    notes: tuple[str, ...] = ()
    """What could not be checked, in words."""

    @property
    def ok(self) -> bool:
        return self.problem is None


def link(prev: bytes, seq: int, ns: int, wall_ns: int, kind: str, body: bytes) -> bytes:
    """The hash of a record: SHA-256 over the previous hash, the numbers, and the texts with their lengths.

    Lengths stand before the texts, so no two different records have the same bytes.
    """
    kind_bytes = kind.encode()
    fixed = _FIXED.pack(prev, seq, ns, wall_ns, len(kind_bytes), len(body))
    return hashlib.sha256(b"".join((_DOMAIN, fixed, kind_bytes, body))).digest()


def verify(
    records: Iterable[AuditRecord], anchors: Sequence[Anchor] = (), *, last_seq: int | None = None
) -> ChainVerdict:
    """Walk the whole chain and compare it with what is anchored outside.

    ``last_seq`` is the last entry of the journal, audited or not; without it only audited entries can be missed. The
    anchors must be read before the records: a chain that grows meanwhile is then ahead of its anchor, never behind.
    """
    walk = Walk({anchor.audit_seq for anchor in anchors})
    for record in records:
        problem = walk.step(record)
        if problem is not None:
            return ChainVerdict(records=walk.count, head=walk.head, problem=problem)
    if walk.journal is None:
        return ChainVerdict(records=0, head=GENESIS, problem="the chain is empty: every journal begins with a record")
    problem = walk.compare(anchors, last_seq)
    notes = () if any(a.journal == walk.journal for a in anchors) else (_NO_ANCHOR,)
    return ChainVerdict(records=walk.count, head=walk.head, problem=problem, notes=notes)


_NO_ANCHOR: Final = "No anchor of this journal was found outside it, so a chain cut off at its end could not be told."


class Walk:
    """Where a walk along a chain has come to. It begins at the first record; one that found a problem is over."""

    def __init__(self, watched: Collection[int] = ()) -> None:
        self.count = 0
        self.seq = 0
        self.head = GENESIS
        self.journal: str | None = None
        self._watched = watched
        self._seen: dict[int, bytes] = {}
        self._given_up: set[str] = set()

    def step(self, record: AuditRecord) -> str | None:
        """Take the next record; what is wrong with it, if anything is."""
        where = f"record {record.seq}"
        if record.seq <= self.seq:
            return f"{where} stands after record {self.seq}: records were moved"
        if (self.count == 0) is not (record.kind == BEGAN):
            return f"{where} is {record.kind!r}: the first record, and only the first, says that the journal began"
        hashed = link(self.head, record.seq, record.ns, record.wall_ns, record.kind, record.body)
        if hashed != record.hash:
            return f"{where} does not fit the one before it: it was edited, or records before it are gone or new"
        try:
            if record.kind == BEGAN:
                self.journal = decode_as(record.body, Began).journal
            elif record.kind == RESTORED:
                restored = decode_as(record.body, RestoreRecord)
                self.journal = restored.journal
                self._given_up.update(restored.replaced)
        except msgspec.MsgspecError as error:
            return f"{where} cannot be read: {error}"
        self.count, self.seq, self.head = self.count + 1, record.seq, record.hash
        if record.seq in self._watched:
            self._seen[record.seq] = record.hash
        return None

    def compare(self, anchors: Sequence[Anchor], last_seq: int | None) -> str | None:
        """At the end: what does not fit the anchors, whose records ``watched`` must have named."""
        for anchor in anchors:
            if anchor.journal != self.journal:
                if anchor.text not in self._given_up:
                    return (
                        f"another journal ({anchor.journal[:8]}, {anchor.seq} entries) was kept at this place and no "
                        "restore of it is on record: the journal was replaced"
                    )
            elif anchor.audit_seq > self.seq:
                return f"the chain ends at record {self.seq}, but record {anchor.audit_seq} was written: it was cut off"
            elif self._seen.get(anchor.audit_seq) != anchor.head:
                return f"record {anchor.audit_seq} is not the one that was anchored: the chain was rewritten"
            elif last_seq is not None and anchor.seq > last_seq:
                return f"the journal ends at entry {last_seq}, but entry {anchor.seq} was written: it was cut off"
        return None
