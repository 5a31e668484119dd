"""A clock that stands still until a test moves it, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sublet.lease.value import Attempt, Outcome, RenewalGranted
from sublet.values import NS_PER_S, LeaseId


@dataclass
class HeldClock:
    """Instants begin at zero, wall time at the start of 2027."""

    ns: int = 0
    domain: str = "test"

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return 1_798_761_600 * NS_PER_S + self.ns


@dataclass
class Office:
    """Answers renewals as it is told to, and remembers what it was asked."""

    answer: Callable[[Attempt], Outcome] = lambda attempt: RenewalGranted(granted_ns=60 * NS_PER_S)
    batches: list[tuple[Attempt, ...]] = field(default_factory=list)

    def renew(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        self.batches.append(tuple(attempts))
        return [self.answer(attempt) for attempt in attempts]

    @property
    def asked(self) -> list[LeaseId]:
        return [attempt.lease for batch in self.batches for attempt in batch]
