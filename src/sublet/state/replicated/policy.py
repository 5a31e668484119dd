"""Placement of replicas, their number, and the quorums for reading and writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from sublet.errors import InvalidRequest
from sublet.state.replicated.quorum import Seats, check_quorums
from sublet.state.replicated.replica import LEVELS, FailureDomain, Replica
from sublet.values import shown


@dataclass(frozen=True, slots=True)
class Placement:
    """Which domains may carry replicas, and which two replicas may not share."""

    allow: tuple[FailureDomain, ...] = ()
    """Empty: anywhere."""
    spread: str | None = None
    """A level (``"disk"``, ``"host"``, ``"cell"``, ``"region"``): no two replicas share one. None: they may."""

    def __post_init__(self) -> None:
        if self.spread is not None and self.spread not in LEVELS:
            raise InvalidRequest(
                f"{self.spread!r} is not a level of failure domains", do=f"Say one of {', '.join(LEVELS)}."
            )

    def check(self, domains: Sequence[FailureDomain]) -> None:
        """Refuse replicas that stand where they may not."""
        for domain in domains:
            if self.allow and not any(allowed.covers(domain) for allowed in self.allow):
                raise InvalidRequest(
                    f"a replica is in {domain}, which the policy does not allow",
                    do="Allow that domain, or place the replica in one that is allowed.",
                )
        for index, domain in enumerate(domains):
            for other in domains[:index]:
                if self.spread is not None and domain.shares(other, self.spread):
                    raise InvalidRequest(
                        f"two replicas share the {self.spread} {domain}, and would be lost together",
                        do=f"Place them on different {self.spread}s, or allow it with spread=None.",
                    )


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """What a set of replicas must be like. The defaults survive the loss of any one replica of three."""

    min_replicas: int = 1
    """A set is never made with fewer, nor changed to fewer."""
    read_quorum: int | None = None
    """None: a majority."""
    write_quorum: int | None = None
    """None: a majority."""
    placement: Placement = Placement()

    def __post_init__(self) -> None:
        for name in ("min_replicas", "read_quorum", "write_quorum"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise InvalidRequest(f"{name} is {shown(value)}", do="Give a whole number above zero.")
        if self.min_replicas < 1:
            raise InvalidRequest("a policy of no replicas keeps nothing", do="Set min_replicas to 1 or more.")
        # With more replicas fixed quorums only become worse, so what fails with the fewest fits no set at all.
        fewest = max(self.min_replicas, self.read_quorum or 1, self.write_quorum or 1)
        check_quorums(fewest, *self._quorums(fewest))

    def seats(self, members: Sequence[str]) -> Seats:
        """These as voters, with the quorums of this policy."""
        count = len(members)
        if count < self.min_replicas:
            raise InvalidRequest(
                f"the policy asks for at least {self.min_replicas} replicas, and there are {count}",
                do="Give more replicas, or lower min_replicas.",
            )
        read, write = self._quorums(count)
        check_quorums(count, read, write)
        return Seats(tuple(sorted(members)), read, write)

    def _quorums(self, count: int) -> tuple[int, int]:
        """How many of so many it takes to read, and to write."""
        majority = count // 2 + 1
        read = majority if self.read_quorum is None else self.read_quorum
        return read, majority if self.write_quorum is None else self.write_quorum

    def check_placement(self, replicas: Sequence[Replica]) -> None:
        """Refuse replicas that stand where they may not."""
        self.placement.check([replica.domain for replica in replicas])

    @property
    def digest(self) -> bytes:
        """Thirty-two bytes that tell this policy from others."""
        allow = ",".join(str(domain) for domain in sorted(self.placement.allow))
        text = f"{self.min_replicas}|{self.read_quorum}|{self.write_quorum}|{allow}|{self.placement.spread}"
        return blake3(text.encode()).digest()
