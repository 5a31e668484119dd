"""What operations on a register end with, and what a writer holds between them. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from sublet.replicated.ballot import Ballot
from sublet.replicated.cell import Accepted
from sublet.replicated.phases import Preparing
from sublet.replicated.quorum import ReplicaSet
from sublet.replicated.state import NOTHING, State
from sublet.values import Epoch


class Why(enum.StrEnum):
    """Why an operation was not done, or is not known to be done."""

    VERSION = "version"
    """The register holds another version than was expected."""
    FENCED = "fenced"
    """A newer epoch has opened the register."""
    FOREIGN = "foreign"
    """The register is another office's, and was not adopted."""
    NO_QUORUM = "no_quorum"
    """Too few replicas answered in time."""
    FORGOTTEN = "forgotten"
    """So many writes came after it that nobody remembers whose it was."""


@dataclass(frozen=True, slots=True)
class Done:
    """It happened."""

    state: State
    packs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """It did not happen, and will not."""

    why: Why
    state: State | None = None
    """What the register holds, where that is what stood against it."""
    against: Ballot | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """It may have happened."""

    why: Why


Result: TypeAlias = Done | Refused | Unknown


class View:
    """The set of replicas as this program knows it; it only ever gets newer."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self.replicas = replicas

    def learn(self, newer: ReplicaSet) -> None:
        """A replica knows this set."""
        if newer.generation > self.replicas.generation:
            self.replicas = newer


class Tenure:
    """One writer's hold on one key, from one opening to the next."""

    def __init__(self, *, office: str, epoch: Epoch, nonce: Callable[[], bytes], reign: int = 1) -> None:
        self.office, self.epoch, self.nonce = office, epoch, nonce
        self.reign = reign
        self.attempt = 0
        self.ballot: Ballot | None = None
        """Ours, while a quorum holds to it; None before the opening and after anything went wrong."""
        self.generation = 0
        self.seq = 0
        self.accepted: Accepted | None = None
        self.settled = True
        """Whether ``accepted`` is known to be on a quorum."""

    @property
    def state(self) -> State:
        """What the register holds, as far as this tenure knows."""
        return State.unpack(self.accepted.value) if self.accepted is not None else NOTHING

    def next_ballot(self) -> Ballot:
        """A ballot that nobody ever had."""
        self.ballot = None
        return Ballot(self.reign, self.office, self.epoch, self.attempt, self.nonce())

    def begin(self, phase: Preparing) -> None:
        """A quorum promised."""
        self.ballot, self.seq, self.generation = phase.ballot, 0, phase.replicas.generation
        self.accepted, self.settled = phase.found, phase.settled

    def close(self) -> None:
        """From here on nothing is certain; open again before the next write."""
        self.ballot = None
        self.attempt += 1

    def after(self, ballot: Ballot) -> None:
        """The next attempt goes above this one, of the same office and epoch."""
        self.ballot = None
        self.reign, self.attempt = ballot.reign, max(self.attempt, ballot.attempt) + 1
