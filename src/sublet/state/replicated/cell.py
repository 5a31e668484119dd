"""What a replica keeps for one key, and the one rule by which it changes.

A replica is a memory that compares before it puts. It need not know why: ``answer`` is the whole of its mind, a pure
function from what it keeps and what it is asked to what it keeps then and what it says. A store that can do that in one
step (under a lock, or by comparing an ETag) can be a replica.

The rule is that of Paxos. A replica that promised a ballot takes nothing older, and tells every reader what it took
last. A write that it has taken already it takes again with the same words, so messages may come twice, late, and from
a writer that only passes them on.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.ballot import Ballot, Garbled, WriteStamp, take
from sublet.state.replicated.quorum import ReplicaSet

KEY_MAX: Final = 200
"""Bytes of a key."""
VALUE_MAX: Final = 64 << 10
"""Bytes of a value: a record is small, and what is large lies in packs beside it."""
PACKS_MAX: Final = 4096
_LENGTH: Final = struct.Struct(">I")
_COUNT: Final = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class AcceptedWrite:
    """The last write that a replica took."""

    stamp: WriteStamp
    value: bytes
    packs: tuple[str, ...] = ()
    """What else must be durable here for the value to be whole."""


@dataclass(frozen=True, slots=True)
class ReplicaCell:
    """What a replica keeps for one key."""

    promised: Ballot | None = None
    accepted: AcceptedWrite | None = None

    def pack(self) -> bytes:
        """As docs/replicated.md draws it."""
        out = [bytes(((self.promised is not None) | (self.accepted is not None) << 1,))]
        if self.promised is not None:
            out.append(self.promised.pack())
        if self.accepted is not None:
            packs = [name.encode() for name in self.accepted.packs]
            out += [self.accepted.stamp.pack(), _COUNT.pack(len(packs))]
            out += [bytes((len(name),)) + name for name in packs]
            out += [_LENGTH.pack(len(self.accepted.value)), self.accepted.value]
        return b"".join(out)

    @classmethod
    def unpack(cls, data: bytes, at: int = 0) -> ReplicaCell:
        """The cell from there to the end; anything else is Garbled."""
        (flags,), at = take(data, at, 1), at + 1
        if flags > 3:
            raise Garbled(f"a cell with the flags {flags:#x}")
        promised = accepted = None
        if flags & 1:
            promised, at = Ballot.unpack(data, at)
        if flags & 2:
            accepted, at = _accepted(data, at)
        if at != len(data):
            raise Garbled(f"{len(data) - at} bytes after the end of a cell")
        return cls(promised, accepted)


EMPTY: Final = ReplicaCell()


def _accepted(data: bytes, at: int) -> tuple[AcceptedWrite, int]:
    stamp, at = WriteStamp.unpack(data, at)
    (count,), at = _COUNT.unpack(take(data, at, 2)), at + 2
    packs = []
    for _ in range(count):
        (length,), at = take(data, at, 1), at + 1
        try:
            packs.append(take(data, at, length).decode("ascii"))
        except UnicodeDecodeError as error:
            raise Garbled("the name of a pack is not text") from error
        at += length
    (length,), at = _LENGTH.unpack(take(data, at, 4)), at + 4
    return AcceptedWrite(stamp, take(data, at, length), tuple(packs)), at + length


# ---- what a replica is asked ----


@dataclass(frozen=True, slots=True)
class Prepare:
    """Promise me this ballot, and say what you took last."""

    generation: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Accept:
    """Take this write. A writer that knows it was taken somewhere may pass it on, unchanged."""

    generation: int
    accepted: AcceptedWrite


@dataclass(frozen=True, slots=True)
class Query:
    """Say what you took last, and promise nothing."""

    generation: int


@dataclass(frozen=True, slots=True)
class Install:
    """Know this set of replicas, unless you know a later one; then do the other thing."""

    replicas: ReplicaSet
    then: Prepare | Accept | Query | None = None


Request: TypeAlias = Prepare | Accept | Query | Install


# ---- what it says ----


@dataclass(frozen=True, slots=True)
class BallotPromised:
    """The ballot is promised; this is what was taken before."""

    accepted: AcceptedWrite | None


@dataclass(frozen=True, slots=True)
class Took:
    """The write is taken, durably."""


@dataclass(frozen=True, slots=True)
class BallotRefused:
    """A higher ballot was promised, or a later write taken."""

    promised: Ballot
    taken: WriteStamp | None = None
    """What was taken last. If that is below the write that is refused, the write was never taken here."""


@dataclass(frozen=True, slots=True)
class ForeignRegister:
    """The register is another office's."""

    promised: Ballot
    taken: WriteStamp | None = None


@dataclass(frozen=True, slots=True)
class Here:
    """What was taken last and what is promised."""

    accepted: AcceptedWrite | None
    promised: Ballot | None = None


@dataclass(frozen=True, slots=True)
class Outdated:
    """The set of replicas has changed since the asker last looked."""

    replicas: ReplicaSet


@dataclass(frozen=True, slots=True)
class Behind:
    """The asker's set is newer than mine; install it first."""

    generation: int


@dataclass(frozen=True, slots=True)
class MissingPacks:
    """The write needs packs that are not durable here."""

    packs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Installed:
    """The set is known."""


Answer: TypeAlias = (
    BallotPromised | Took | BallotRefused | ForeignRegister | Here | Outdated | Behind | MissingPacks | Installed
)


def answer(
    cell: ReplicaCell, known: ReplicaSet | None, request: Prepare | Accept | Query, missing: tuple[str, ...] = ()
) -> tuple[ReplicaCell, Answer]:
    """What the cell is afterwards, and what is said. ``missing``: packs of the write that are not durable here."""
    generation = known.generation if known is not None else 0
    if request.generation > generation:
        return cell, Behind(generation)
    if known is not None and request.generation < generation:
        return cell, Outdated(known)
    match request:
        case Query():
            return cell, Here(cell.accepted, cell.promised)
        case Prepare(ballot=ballot):
            refusal = _refusal(cell, ballot)
            if refusal is not None:
                return cell, refusal
            return ReplicaCell(ballot, cell.accepted), BallotPromised(cell.accepted)
        case Accept(accepted=write):
            return _take(cell, write, missing)


def _take(cell: ReplicaCell, write: AcceptedWrite, missing: tuple[str, ...]) -> tuple[ReplicaCell, Answer]:
    if cell.accepted is not None and cell.accepted.stamp == write.stamp:
        return cell, Took()
    refusal = _refusal(cell, write.stamp.ballot)
    if refusal is not None:
        return cell, refusal
    if cell.accepted is not None and write.stamp < cell.accepted.stamp:
        return cell, BallotRefused(cell.accepted.stamp.ballot, cell.accepted.stamp)
    if missing:
        return cell, MissingPacks(missing)
    return ReplicaCell(write.stamp.ballot, write), Took()


def _refusal(cell: ReplicaCell, ballot: Ballot) -> BallotRefused | ForeignRegister | None:
    promised = cell.promised
    if promised is None:
        return None
    taken = cell.accepted.stamp if cell.accepted is not None else None
    if ballot.reign == promised.reign and ballot.office != promised.office:
        return ForeignRegister(promised, taken)
    return BallotRefused(promised, taken) if ballot < promised else None
