"""One process per device of a lease: what the exit of one means for the others.

They begin together and end together. Which status means what stands in ``TABLE``; ``Ranks`` keeps the states and says
what is to be done, and ``sublet.guest.ranks`` does it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

ENTRY: Final = "sublet.guest.ranks:main"
"""The program of a guest that starts them."""
GRACE_S: Final = 5.0
"""Between the SIGTERM and the SIGKILL of those whose fellow failed, where no other was given."""
LEASE_ENDED: Final = 76
"""The status of a program that left because its lease ends."""


class RankState(enum.StrEnum):
    """How one of them stands."""

    RUNNING = "running"
    DONE = "done"
    """It ended with status 0; the others go on."""
    LEFT = "left"
    """It left, as all do: the lease ends, or they were told to stop."""
    FAILED = "failed"
    """It died first, and the others are ended with it."""
    ENDED = "ended"
    """It was ended because another one failed."""


class RanksPhase(enum.StrEnum):
    """How all of them stand."""

    GOING = "going"
    LEAVING = "leaving"
    """The lease ends, or they were told to stop: each leaves by itself."""
    ENDING = "ending"
    """One failed; the others are being ended."""


class RankExit(enum.StrEnum):
    """What the status of one of them says."""

    OK = "ok"
    LEASE_ENDED = "lease ended"
    OTHER = "other"


class Do(enum.StrEnum):
    """What is to be done with those that still run."""

    NOTHING = "nothing"
    AWAIT = "await"
    """Give them time to leave by themselves, then end them."""
    END = "end"
    """SIGTERM, their grace, then SIGKILL."""


class Change(NamedTuple):
    """What comes of an exit."""

    state: RankState
    phase: RanksPhase
    do: Do = Do.NOTHING


TABLE: Final[Mapping[tuple[RanksPhase, RankExit], Change]] = {
    (RanksPhase.GOING, RankExit.OK): Change(RankState.DONE, RanksPhase.GOING),
    (RanksPhase.GOING, RankExit.LEASE_ENDED): Change(RankState.LEFT, RanksPhase.LEAVING, Do.AWAIT),
    (RanksPhase.GOING, RankExit.OTHER): Change(RankState.FAILED, RanksPhase.ENDING, Do.END),
    (RanksPhase.LEAVING, RankExit.OK): Change(RankState.DONE, RanksPhase.LEAVING),
    (RanksPhase.LEAVING, RankExit.LEASE_ENDED): Change(RankState.LEFT, RanksPhase.LEAVING, Do.AWAIT),
    (RanksPhase.LEAVING, RankExit.OTHER): Change(RankState.LEFT, RanksPhase.LEAVING, Do.AWAIT),
    (RanksPhase.ENDING, RankExit.OK): Change(RankState.ENDED, RanksPhase.ENDING),
    (RanksPhase.ENDING, RankExit.LEASE_ENDED): Change(RankState.ENDED, RanksPhase.ENDING),
    (RanksPhase.ENDING, RankExit.OTHER): Change(RankState.ENDED, RanksPhase.ENDING),
}


class Ranks:
    """The states of this many of them."""

    def __init__(self, count: int) -> None:
        self.states = [RankState.RUNNING] * count
        self.phase = RanksPhase.GOING
        self.status = 0
        """The first that was not 0, of all who have ended; a signal n is 128 + n."""

    @property
    def running(self) -> list[int]:
        """Those that have not ended, by rank."""
        return [rank for rank, state in enumerate(self.states) if state is RankState.RUNNING]

    def mark_stopping(self) -> None:
        """The lease ends, or they were told to stop: from now on it is no failure that one ends."""
        if self.phase is RanksPhase.GOING:
            self.phase = RanksPhase.LEAVING

    def exited(self, rank: int, status: int) -> Do:
        """One has ended; what is to be done with the others. Raises ``KeyError`` for one that had ended before."""
        if self.states[rank] is not RankState.RUNNING:
            raise KeyError(f"rank {rank} has ended before ({self.states[rank]})")
        change = TABLE[self.phase, _exit_of(status)]
        self.states[rank], self.phase = change.state, change.phase
        self.status = self.status or status
        return change.do if self.running else Do.NOTHING

    def sentence(self, how: str) -> str:
        """Which one failed and what that meant; empty if none did. ``how``: what its status says."""
        if RankState.FAILED not in self.states:
            return ""
        others = [rank for rank, state in enumerate(self.states) if state in (RankState.RUNNING, RankState.ENDED)]
        with_it = f", and {_ranks(others)} ended with it" if others else ""
        return f"rank {self.states.index(RankState.FAILED)} of {len(self.states)} ended {how}{with_it}"

    def check(self) -> None:
        """What always holds."""
        failed = self.states.count(RankState.FAILED)
        assert failed == (self.phase is RanksPhase.ENDING)
        assert failed or RankState.ENDED not in self.states
        assert (self.status == 0) == (not {RankState.FAILED, RankState.LEFT} & set(self.states))


def _exit_of(status: int) -> RankExit:
    return {0: RankExit.OK, LEASE_ENDED: RankExit.LEASE_ENDED}.get(status, RankExit.OTHER)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} was"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} were"
