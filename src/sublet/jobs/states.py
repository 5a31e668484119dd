"""The state table of a chunk, and the table of retries.

``CHUNK_TABLE`` maps (state, event) to the next state; an event that the table does not know is an error and changes
nothing. ``VERDICTS`` maps (what went wrong, when) to what becomes of the chunk: whether something is an error of the
chunk, of the lease or no error at all depends on the phase it happens in, not on the class of the exception alone.
The page of the docs shows both tables (``python -m sublet.jobs.drawing``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class ChunkState(enum.StrEnum):
    """Where a chunk is."""

    WAITING = "waiting"
    """In the queue, or waiting for the time of its retry."""
    EXECUTING = "executing"
    """Handed to a worker under a lease. Which chunk of its batch has begun, the worker's board tells."""
    STORED = "stored"
    """Its result is in the output store. This is final: a later result changes nothing."""
    FAILED = "failed"
    """It has no result and is not tried again; a ``FailReason`` says why."""


class ChunkEvent(enum.StrEnum):
    """What can happen to a chunk."""

    TAKE = "take"
    """A lease has room for it."""
    FOUND = "found"
    """The store has its result from an earlier run."""
    RETURN = "return"
    """Its worker or lease ended before the chunk had begun: back into the queue, nothing is charged."""
    RETRY = "retry"
    """It was executing when something transient ended it; one retry is charged."""
    STORE = "store"
    """The store has published its result."""
    FAIL = "fail"
    """A permanent error, or no retry is left, or the job was stopped."""


CHUNK_TABLE: Final[Mapping[tuple[ChunkState, ChunkEvent], ChunkState]] = {
    (ChunkState.WAITING, ChunkEvent.TAKE): ChunkState.EXECUTING,
    (ChunkState.WAITING, ChunkEvent.FOUND): ChunkState.STORED,
    (ChunkState.WAITING, ChunkEvent.FAIL): ChunkState.FAILED,
    (ChunkState.EXECUTING, ChunkEvent.RETURN): ChunkState.WAITING,
    (ChunkState.EXECUTING, ChunkEvent.RETRY): ChunkState.WAITING,
    (ChunkState.EXECUTING, ChunkEvent.STORE): ChunkState.STORED,
    (ChunkState.EXECUTING, ChunkEvent.FAIL): ChunkState.FAILED,
}


class FailReason(enum.StrEnum):
    """Why a chunk failed."""

    RAISED = "raised"
    """Its function raised an exception that was not declared transient."""
    REFUSED = "refused"
    """It can never run or be stored: quarantined hardware, an unsupported or invalid request, a value that cannot be
    serialized."""
    RETRIES = "retries"
    """It was retried as often as the policy allows."""
    TOO_LONG = "too_long"
    """Lease after lease ended when it had run for about the same time: it needs longer than any lease it gets."""
    OUT_OF_MEMORY = "out_of_memory"
    """It needs more memory than the policy's bound."""
    DEADLINE = "deadline"
    """The job's deadline passed first."""
    CANCELLED = "cancelled"
    """The job was cancelled, or stopped at the first error (``errors="raise"``)."""


class Cause(enum.StrEnum):
    """What went wrong."""

    CAPACITY = "capacity"
    """``CapacityExceeded`` or ``QuotaExceeded``."""
    LEASE_LOST = "lease_lost"
    """``LeaseEnded`` (expired, revoked, preempted, node lost) or ``Disconnected``."""
    WORKER_LOST = "worker_lost"
    """``WorkerLost``: the process died and the lease lives."""
    OUT_OF_MEMORY = "out_of_memory"
    """``OutOfMemory``: the worker needed more than its lease has."""
    RAISED = "raised"
    """The chunk's function raised."""
    RAISED_TRANSIENT = "raised_transient"
    """It raised an exception whose type was declared transient."""
    REFUSED = "refused"
    """``Quarantined``, ``Unsupported``, ``InvalidRequest``, a result that cannot be serialized."""


class When(enum.StrEnum):
    """When it went wrong."""

    ACQUIRING = "acquiring"
    """While a lease was asked for."""
    NOT_BEGUN = "not begun"
    """The chunk stood in a worker's queue."""
    EXECUTING = "executing"
    """The worker was at it."""


class RetryVerdict(enum.StrEnum):
    """What becomes of it."""

    PRESSURE = "no error: run with the leases there are, ask again later"
    RETURN = "back into the queue; no retry is charged"
    RETRY = "this chunk alone is charged one retry"
    RETRY_LARGER = "charged one retry, on a lease with twice the memory"
    FAIL = "permanent: fail closed"


VERDICTS: Final[Mapping[tuple[Cause, When], RetryVerdict]] = {
    (Cause.CAPACITY, When.ACQUIRING): RetryVerdict.PRESSURE,
    (Cause.CAPACITY, When.NOT_BEGUN): RetryVerdict.FAIL,
    (Cause.CAPACITY, When.EXECUTING): RetryVerdict.FAIL,
    (Cause.LEASE_LOST, When.ACQUIRING): RetryVerdict.PRESSURE,
    (Cause.LEASE_LOST, When.NOT_BEGUN): RetryVerdict.RETURN,
    (Cause.LEASE_LOST, When.EXECUTING): RetryVerdict.RETRY,
    (Cause.WORKER_LOST, When.ACQUIRING): RetryVerdict.PRESSURE,
    (Cause.WORKER_LOST, When.NOT_BEGUN): RetryVerdict.RETURN,
    (Cause.WORKER_LOST, When.EXECUTING): RetryVerdict.RETRY,
    (Cause.OUT_OF_MEMORY, When.NOT_BEGUN): RetryVerdict.RETURN,
    (Cause.OUT_OF_MEMORY, When.EXECUTING): RetryVerdict.RETRY_LARGER,
    (Cause.RAISED, When.EXECUTING): RetryVerdict.FAIL,
    (Cause.RAISED_TRANSIENT, When.EXECUTING): RetryVerdict.RETRY,
    (Cause.REFUSED, When.ACQUIRING): RetryVerdict.FAIL,
    (Cause.REFUSED, When.NOT_BEGUN): RetryVerdict.FAIL,
    (Cause.REFUSED, When.EXECUTING): RetryVerdict.FAIL,
}
"""A pair that is missing cannot happen; it is treated as permanent."""


class ChunkTransitionError(ValueError):
    """The event is not possible in this state; nothing was changed."""


def next_chunk(state: ChunkState, event: ChunkEvent, subject: str = "the chunk") -> ChunkState:
    """The state after this event."""
    then = CHUNK_TABLE.get((state, event))
    if then is None:
        raise ChunkTransitionError(f"{subject} is {state}: {event} is not possible")
    return then


def verdict_of(cause: Cause, when: When) -> RetryVerdict:
    """What becomes of a chunk; fail closed where the table says nothing."""
    return VERDICTS.get((cause, when), RetryVerdict.FAIL)
