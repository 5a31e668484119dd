"""Output stores: the protocol, and the store in memory.

A store outlives workers and leases, so that a finished chunk is never run again. The first result of a chunk is the one
that stays. A result counts once it is *published*: until then nothing has promised that it is kept, and the coordinator
does not call its chunk stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from sublet.errors import InvalidRequest, NotFound
from sublet.jobs.identity import ChunkId


@runtime_checkable
class JobOutputStore(Protocol):
    """Results by chunk id. The coordinator calls it from one thread at a time."""

    publish_after: float
    """Seconds that a result may wait for others before it is published; 0: each call of ``put`` is followed by one of
    ``publish``."""

    def begin(self, job: str) -> bytes:
        """Called once, before anything else: this job uses the store. Returns the state that was saved with the last
        publication, empty if there is none. Raises ``InvalidRequest`` if the store belongs to another job."""

    def __contains__(self, chunk: object) -> bool:
        """Whether the result of this chunk is published."""

    def __len__(self) -> int:
        """How many are published."""

    def get(self, chunk: ChunkId) -> bytes:
        """A published result. ``NotFound`` where there is none, ``CheckpointDamaged`` where it is not what was put."""

    def put(self, results: Sequence[tuple[ChunkId, bytes]]) -> None:
        """Take results in. One whose chunk has a result already, published or not, is dropped."""

    def publish(self, state: bytes) -> None:
        """When this returns, everything that was put is durable, together with the coordinator's ``state``. Raises
        what keeps it from being so; then nothing that was published before is harmed."""

    def chunks(self) -> Iterator[ChunkId]:
        """The ids of all published results."""


class MemoryOutputStore:
    """Results in this process. They outlive workers and leases, and end with the program."""

    publish_after = 0.0

    def __init__(self) -> None:
        self._results: dict[ChunkId, bytes] = {}
        self._job: str | None = None
        self._state = b""

    def begin(self, job: str) -> bytes:
        if self._job not in (None, "", job) and job:
            raise another_job(self._job or "", job)
        self._job = job or self._job
        return self._state

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._results

    def __len__(self) -> int:
        return len(self._results)

    def get(self, chunk: ChunkId) -> bytes:
        found = self._results.get(chunk)
        if found is None:
            raise not_stored(chunk)
        return found

    def put(self, results: Sequence[tuple[ChunkId, bytes]]) -> None:
        """In memory there is nothing between taking a result and having it."""
        fresh = dict(results)
        if len(fresh) == len(results) and self._results.keys().isdisjoint(fresh):
            self._results |= fresh
            return
        for chunk, data in results:  # the first result of a chunk is the one that stays
            self._results.setdefault(chunk, data)

    def publish(self, state: bytes) -> None:
        self._state = state

    def chunks(self) -> Iterator[ChunkId]:
        return iter(list(self._results))


def not_stored(chunk: ChunkId) -> NotFound:
    """There is no result of this chunk."""
    return NotFound(f"there is no result of chunk {chunk.hex()}", do="Run the job again: it runs what is missing.")


def another_job(has: str, wanted: str) -> InvalidRequest:
    """The store is in use for another job."""
    return InvalidRequest(
        f"this store has the results of job {has!r}, not of {wanted!r}",
        do="Use a store of its own for each job, or give the job the name it had.",
    )
