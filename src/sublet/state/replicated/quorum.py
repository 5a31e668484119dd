"""Which replicas make a quorum, and how the set of them changes.

With N voters, R of them are asked and W of them must have taken a write. Two rules make that safe::

    R + W > N      a reader meets a replica that took the last write
    2 * W > N      two writes meet in a replica, which refuses the older

A set is changed one seat at a time, in two steps: first to a *joint* set, in which every quorum is a quorum of the old
seats and one of the new, then, when every record has been carried over, to the new seats alone. Each step is a
generation, and every record and every request names one: a replica refuses requests of an older generation.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.ballot import Garbled


def check_quorums(voters: int, read: int, write: int) -> None:
    """Refuse numbers with which two quorums could miss each other."""
    if voters < 1:
        raise InvalidRequest("a set of replicas needs at least one replica", do="Give one replica or more.")
    if not (1 <= read <= voters and 1 <= write <= voters):
        raise InvalidRequest(
            f"quorums of {read} (read) and {write} (write) do not fit {voters} replicas",
            do=f"Choose both between 1 and {voters}.",
        )
    if read + write <= voters:
        raise InvalidRequest(
            f"reading from {read} and writing to {write} of {voters} replicas could miss each other, so a read might "
            "return what was overwritten",
            do=f"Choose them so that read_quorum + write_quorum is more than {voters}.",
        )
    if 2 * write <= voters:
        raise InvalidRequest(
            f"two writers could each have {write} of {voters} replicas, and neither would know",
            do=f"Choose a write_quorum of at least {voters // 2 + 1}.",
        )


@dataclass(frozen=True, slots=True)
class Seats:
    """The voting replicas, and how many of them it takes."""

    members: tuple[str, ...]
    """Identities, sorted."""
    read: int
    write: int

    def __post_init__(self) -> None:
        if len(set(self.members)) != len(self.members):
            raise InvalidRequest("a replica has two seats", do="Name every replica once.")
        check_quorums(len(self.members), self.read, self.write)

    def readable(self, replicas: Collection[str]) -> bool:
        """Whether these are enough to ask."""
        return self._seated(replicas) >= self.read

    def writable(self, took: Collection[str]) -> bool:
        """Whether these are enough to have taken a write."""
        return self._seated(took) >= self.write

    def _seated(self, whom: Collection[str]) -> int:
        """How many of them have a seat. Asked after every answer, so counted without ado."""
        count = 0
        for member in self.members:
            if member in whom:
                count += 1
        return count


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """One generation of the set."""

    generation: int
    now: Seats
    before: Seats | None = None
    """The seats that are being left, while records are carried over."""

    @property
    def voters(self) -> tuple[str, ...]:
        """Every replica that is asked."""
        old = self.before.members if self.before is not None else ()
        return tuple(sorted({*self.now.members, *old}))

    def readable(self, replicas: Collection[str]) -> bool:
        """A quorum to ask: of both, while there are both."""
        return self.now.readable(replicas) and (self.before is None or self.before.readable(replicas))

    def writable(self, took: Collection[str]) -> bool:
        """A quorum that has taken a write: of both, while there are both."""
        return self.now.writable(took) and (self.before is None or self.before.writable(took))

    def towards(self, seats: Seats) -> ReplicaSet:
        """The joint set on the way there. One seat may be filled, emptied, or given to another, no more."""
        if self.before is not None:
            raise InvalidRequest("the set is being changed already", do="Let that change come to its end first.")
        gone, come = set(self.now.members) - set(seats.members), set(seats.members) - set(self.now.members)
        if len(gone) > 1 or len(come) > 1:
            raise InvalidRequest(
                f"{max(len(gone), len(come))} replicas would change at once",
                do="Change one replica, wait until that is done, then the next.",
            )
        return ReplicaSet(self.generation + 1, seats, self.now)

    def after_carry_over(self) -> ReplicaSet:
        """The set after everything was carried over."""
        return ReplicaSet(self.generation + 1, self.now)

    def pack(self) -> bytes:
        """JSON with sorted keys."""

        def seats(of: Seats | None) -> object:
            return None if of is None else {"members": list(of.members), "read": of.read, "write": of.write}

        shape = {"before": seats(self.before), "generation": self.generation, "now": seats(self.now)}
        return json.dumps(shape, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> ReplicaSet:
        """From its JSON; anything else is Garbled."""
        try:
            shape = json.loads(data)
            now, before = _seats(shape["now"]), shape["before"]
            return cls(int(shape["generation"]), now, None if before is None else _seats(before))
        except (ValueError, TypeError, KeyError, InvalidRequest) as error:
            raise Garbled(f"this is not a set of replicas ({error})") from error


def _seats(shape: dict[str, object]) -> Seats:
    members = shape["members"]
    if not isinstance(members, list):
        raise TypeError("members")
    return Seats(tuple(str(member) for member in members), int(str(shape["read"])), int(str(shape["write"])))
