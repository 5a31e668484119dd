"""The interface of a replica: one small record per key, compared before it is put.

A replica carries out ``cell.answer`` in one step and makes the result durable before it says anything. It has an
identity that was drawn by chance when it was made and is nowhere else; the set of replicas names identities. So an
empty disk, a copied folder and a restored backup are strangers: they do not vote until they are admitted anew.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from blake3 import blake3

from sublet.errors import CheckpointFailed
from sublet.state.replicated.ballot import Garbled, WriteStamp
from sublet.state.replicated.cell import Answer, Request
from sublet.state.replicated.quorum import ReplicaSet

PACK_MAGIC: Final = b"SUBLETP1"
PACK_HEAD: Final = len(PACK_MAGIC) + 8 + 32


class ReplicaHealth(enum.StrEnum):
    """How a replica is."""

    HEALTHY = "healthy"
    """It answered the last question."""
    SILENT = "silent"
    """It did not answer in time, or could not be reached."""
    FULL = "full"
    """It has no room."""
    FAULTY = "faulty"
    """It is damaged, or a write to it failed; it answers nothing until it is made anew and admitted again."""
    UNKNOWN = "unknown"
    """It was not asked yet."""


class ReplicaSilent(CheckpointFailed):
    """The replica did not answer. Whether it did what it was asked is not known."""

    transient = True
    health = ReplicaHealth.SILENT


class ReplicaFull(ReplicaSilent):
    """The replica has no room; it did nothing."""

    health = ReplicaHealth.FULL


class ReplicaFaulty(ReplicaSilent):
    """The replica is damaged, or a write to it failed, and what is on its disk cannot be trusted any more."""

    transient = False
    health = ReplicaHealth.FAULTY
    default_do = "Make a new replica elsewhere and give it this one's seat with `replace`."


LEVELS: Final = ("region", "cell", "host", "disk")
"""From the widest to the narrowest. Replicas that share a domain share a fate."""


@dataclass(frozen=True, slots=True, order=True)
class FailureDomain:
    """Where a replica is: a region, a cell of it, a host in that, a disk of that, as far as is known."""

    region: str = "local"
    cell: str = ""
    host: str = ""
    disk: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in self.path if part)

    @property
    def path(self) -> tuple[str, str, str, str]:
        """The parts, from the widest."""
        return self.region, self.cell, self.host, self.disk

    def covers(self, other: FailureDomain) -> bool:
        """Whether the other lies within this one; a part that is not said covers any."""
        return all(not mine or mine == theirs for mine, theirs in zip(self.path, other.path, strict=True))

    def shares(self, other: FailureDomain, level: str) -> bool:
        """Whether both are in the same domain of this level. What is not said is taken to be the same."""
        depth = LEVELS.index(level) + 1
        return self.path[:depth] == other.path[:depth]


class Replica(Protocol):
    """One thread of a group at a time calls it. Every method may raise ``ReplicaSilent``, and nothing else.

    What it has answered survives the process, the machine's power, and other processes that use the same replica.
    """

    @property
    def identity(self) -> str:
        """Drawn by chance when the replica was made."""

    @property
    def domain(self) -> FailureDomain:
        """What it shares its fate with."""

    def ask(self, requests: Sequence[tuple[str, Request]]) -> list[Answer]:
        """Carry these out, each on its key, in this order; all of it is durable when it returns."""

    def known(self) -> ReplicaSet | None:
        """The latest set that was installed."""

    def keys(self) -> list[str]:
        """Every key of which there is a record."""

    def put_pack(self, key: str, name: str, data: bytes) -> None:
        """Keep these bytes durably; the same name always comes with the same bytes."""

    def read_pack(self, key: str, name: str) -> bytes | None:
        """The bytes, checked; None if there is no such pack or it is damaged."""

    def packs(self, key: str) -> list[str]:
        """The names there are."""

    def sweep(self, key: str, stamp: WriteStamp, names: Sequence[str]) -> int:
        """Remove these packs if the last write that was taken is this one and does not name them."""

    def verify(self) -> list[str]:
        """Read everything and say what is damaged; empty if nothing is."""

    def close(self) -> None:
        """Let go of it. Harmless twice."""


def seal(data: bytes) -> bytes:
    """A pack as it is kept: a magic, the length, the hash, the bytes."""
    return PACK_MAGIC + len(data).to_bytes(8, "big") + blake3(data).digest() + data


def unseal(sealed: bytes) -> bytes:
    """The bytes of a pack; anything else is Garbled."""
    data = sealed[PACK_HEAD:]
    if (
        sealed[: len(PACK_MAGIC)] != PACK_MAGIC
        or int.from_bytes(sealed[8:16], "big") != len(data)
        or sealed[16:PACK_HEAD] != blake3(data).digest()
    ):
        raise Garbled("this is not a pack, or it is damaged")
    return data


@dataclass(frozen=True, slots=True, order=True)
class PackName:
    """The epoch that staged a pack, and the hash of its bytes: the name of a pack tells what an older epoch left."""

    reign: int
    incarnation: int
    n: int
    session: str
    digest: str

    def __str__(self) -> str:
        return f"{self.reign:x}.{self.incarnation:x}.{self.n:x}.{self.session}.{self.digest}"


def pack_of(text: str) -> PackName:
    """A pack's name, taken apart; anything else is Garbled."""
    try:
        reign, incarnation, n, session, digest = text.split(".")
        return PackName(int(reign, 16), int(incarnation, 16), int(n, 16), session, digest)
    except ValueError as error:
        raise Garbled(f"{text[:80]!r} is not the name of a pack") from error


def folder_of(key: str) -> str:
    """A name for a key that any store takes."""
    return blake3(key.encode()).hexdigest()[:32]
