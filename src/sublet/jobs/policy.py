"""How often and when a chunk is retried, and what kind of failure an exception is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    InvalidRequest,
    LeaseEnded,
    OutOfMemory,
    Quarantined,
    QuotaExceeded,
    StaleEpoch,
    Unauthorized,
    Unsupported,
    WorkerLost,
)
from sublet.jobs.states import Cause
from sublet.values import parse_duration_ns, parse_memory, shown

RETRIES_MAX: Final = 1000
MEMORY_FIRST: Final = 1 << 30
"""A chunk for which no memory was said is retried on a lease with so much."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How failed chunks are retried. Durations are seconds or texts such as ``"1s"``.

    A retry waits ``initial_backoff``, and twice as long after each further failure, up to ``max_backoff``; ``jitter``
    is the share of that time by which it is varied, so that chunks that failed together do not return together.
    """

    max_retries: int = 3
    initial_backoff: float | str = "1s"
    max_backoff: float | str = "16s"
    jitter: float = 0.1
    _: KW_ONLY
    memory_max: int | str | None = None
    """What a chunk's memory may grow to when it runs out of it; None: sixteen times what it asked for at first."""
    transient: Sequence[type[BaseException]] = ()
    """Exceptions of the chunk's own function that are worth a retry."""
    initial_backoff_ns: int = field(init=False, repr=False)
    max_backoff_ns: int = field(init=False, repr=False)
    memory_max_bytes: int | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        retries: object = self.max_retries
        jitter: object = self.jitter
        if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= RETRIES_MAX:
            raise InvalidRequest(
                f"max_retries cannot be {shown(retries)}", do=f"Give a number from 0 to {RETRIES_MAX}."
            )
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter < 1:
            raise InvalidRequest(f"jitter cannot be {shown(jitter)}", do="Give a share from 0 up to, not with, 1.")
        initial_ns = parse_duration_ns(self.initial_backoff, "initial_backoff", zero_ok=True)
        max_ns = parse_duration_ns(self.max_backoff, "max_backoff", zero_ok=True)
        if max_ns < initial_ns:
            raise InvalidRequest("max_backoff is shorter than initial_backoff", do="Give at least as much.")
        kinds: Sequence[object] = self.transient
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise InvalidRequest(
                    f"transient= holds {shown(kind)}, which is no exception", do="List exception types."
                )
        memory = None if self.memory_max is None else parse_memory(self.memory_max, "memory_max")
        object.__setattr__(self, "initial_backoff_ns", initial_ns)
        object.__setattr__(self, "max_backoff_ns", max_ns)
        object.__setattr__(self, "memory_max_bytes", memory)

    def backoff_ns(self, charges: int, chance: float) -> int:
        """How long the retry after the ``charges``-th failure waits; ``chance`` is in [0, 1)."""
        doubled = self.initial_backoff_ns << min(max(charges - 1, 0), 40)
        spread = 1.0 + self.jitter * (2.0 * chance - 1.0)
        return round(min(doubled, self.max_backoff_ns) * spread)

    def larger(self, memory: int, first: int) -> int | None:
        """The memory of the retry after a chunk ran out of ``memory``; None where the bound is reached."""
        bound = self.memory_max_bytes or 16 * (first or MEMORY_FIRST)
        wanted = 2 * memory if memory else MEMORY_FIRST
        if memory >= bound:
            return None
        return min(wanted, bound)


_LOST: Final = (LeaseEnded, Disconnected, StaleEpoch)
_CAPACITY: Final = (CapacityExceeded, QuotaExceeded)
_REFUSED: Final = (Quarantined, Unsupported, InvalidRequest, Unauthorized)


def cause_of(error: BaseException, transient: Sequence[type[BaseException]] = (), *, in_chunk: bool = False) -> Cause:
    """What kind of failure this is. ``in_chunk``: the chunk's own function raised it.

    What the function raises is the chunk's own even where its class is ours: a function that acquires a lease of its
    own and is refused says nothing about the lease it runs under.
    """
    if in_chunk:
        return Cause.RAISED_TRANSIENT if isinstance(error, tuple(transient)) else Cause.RAISED
    match error:
        case OutOfMemory():
            return Cause.OUT_OF_MEMORY
        case WorkerLost():
            return Cause.WORKER_LOST
        case _ if isinstance(error, _LOST):
            return Cause.LEASE_LOST
        case _ if isinstance(error, _CAPACITY):
            return Cause.CAPACITY
        case _ if isinstance(error, _REFUSED):
            return Cause.REFUSED
        case _:
            return Cause.REFUSED
