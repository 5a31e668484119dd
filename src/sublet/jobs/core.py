"""The coordinator's core: which chunk runs next, and what becomes of one whose run failed.

It reads no clock, file or socket and starts no thread. A driver tells it what happened (chunks were read, a lease has
room, results came, a worker or lease was lost, the store has published) with the time, and carries out what it answers.
The simulation runs this very class.

Chunks are handed out in *batches*, in the order in which they came. A worker executes its batch from the first to the
last, so when it dies there is one chunk that was executing: that one is charged, those before it have results, and
those behind it go back to the front of the queue as they are. A batch is closed by its last result or by its loss, and
what comes for a closed batch is late: it changes nothing. A chunk counts as finished only when the store has published
its result.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sublet.errors import InvalidRequest
from sublet.jobs.chunks import Needs
from sublet.jobs.identity import ChunkId
from sublet.jobs.policy import RetryPolicy
from sublet.jobs.states import (
    CHUNK_TABLE,
    Cause,
    ChunkEvent,
    ChunkState,
    FailReason,
    TransitionError,
    Verdict,
    When,
    next_chunk,
    verdict_of,
)
from sublet.values import NS_PER_S, format_duration

__all__ = [
    "Batch",
    "ChunkFailed",
    "Coordinator",
    "Counts",
    "Failed",
    "JobEvent",
    "SavedChunk",
    "Work",
]

SAME_END: Final = 3
"""Leases that end in a row under one chunk after about the same run time: it needs longer than any lease it gets."""
SAME_SHARE: Final = 0.1
"""Run times count as the same if they differ by at most this share of the longest."""
SHORT_RUN_NS: Final = NS_PER_S
"""Runs that were shorter say nothing about how long the chunk needs."""
EVENTS_MAX: Final = 100_000
"""Events that are kept until somebody takes them; the oldest go first, and are counted."""


class Failed(NamedTuple):
    """The outcome of one run that brought no result."""

    cause: Cause
    error: BaseException | None = None


@dataclass(slots=True)
class _Past:
    """What is known of the failed runs of a chunk."""

    first_memory: int
    """What it asked for at first."""
    runs_ns: tuple[int, ...] = ()
    """How long it ran under the leases that ended under it, the last ones in a row."""
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Work:
    """One chunk in the coordinator."""

    key: ChunkId
    index: int
    """Its position in the input."""
    call: Any
    """What executes it; chunks of one batch share it."""
    args: tuple[Any, ...]
    needs: Needs
    state: ChunkState = ChunkState.WAITING
    charges: int = 0
    """Retries it was charged."""
    past: _Past | None = None
    """What its failed runs left; None for nearly every chunk."""


@dataclass(slots=True, eq=False)
class Batch:
    """Chunks that one worker executes, in order."""

    number: int
    lease: str
    works: list[Work]
    taken_ns: int
    done: int = 0
    """Of so many there is a result or a failure."""
    since_ns: int = 0
    """When the first of the others began, at the earliest."""
    is_open: bool = True

    @property
    def rest(self) -> list[Work]:
        return self.works[self.done :]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFailed:
    """A chunk that has no result, for people and programs."""

    chunk: ChunkId
    index: int
    reason: FailReason
    error: BaseException | None
    retries: int
    detail: str

    def __str__(self) -> str:
        return f"chunk {self.index} ({self.chunk.hex()[:12]}): {self.detail}"


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One fact of the job's life, for a live view, the picture and metrics."""

    at_ns: int
    what: str
    """``done``, ``skipped``, ``retry``, ``returned``, ``failed``, ``leases``, ``phase``, ``capacity``, ``saved``."""
    count: int = 1
    """Chunks; for ``leases`` how many are held now."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Where the chunks are."""

    total: int
    waiting: int
    executing: int
    succeeded: int
    skipped: int
    failed: int
    retries: int

    @property
    def done(self) -> int:
        """Finished, now or by an earlier run, or failed."""
        return self.succeeded + self.skipped + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedChunk:
    """What a resumed job must know of a chunk that is not finished."""

    charges: int
    memory: int
    runs_ns: tuple[int, ...] = ()


@dataclass(slots=True)
class _Queue:
    """Chunks of the same needs: those share leases."""

    waiting: deque[Work] = field(default_factory=deque)
    delayed: int = 0
    executing: int = 0

    @property
    def wanted(self) -> int:
        return len(self.waiting) + self.delayed + self.executing


class Coordinator:
    """The chunks of one phase of a job. Not for two threads at once."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        collect: bool = False,
        deadline_ns: int | None = None,
        chance: Callable[[], float] = lambda: 0.5,
        saved: Mapping[ChunkId, SavedChunk] | None = None,
        keeps_ids: bool = True,
    ) -> None:
        """``collect``: go on after a chunk failed; else the first failure stops the job. ``chance`` varies the time of
        retries. ``saved`` is what an earlier run knew of unfinished chunks. ``keeps_ids``: refuse one id with two
        contents; without, ids must be unique by construction (``map``, whose ids hold the position)."""
        self.policy = policy
        self.failures: list[ChunkFailed] = []
        self.stopped: FailReason | None = None
        """Nothing new is begun any more, for this reason."""
        self.events: deque[JobEvent] = deque(maxlen=EVENTS_MAX)
        self.is_complete = False
        """No more chunks will be added."""
        self._collect = collect
        self._deadline_ns = deadline_ns
        self._chance = chance
        self._saved = dict(saved or {})
        self._ids: dict[ChunkId, bytes] | None = {} if keeps_ids else None
        self._queues: dict[Needs, _Queue] = {}
        self._delayed: list[tuple[int, int, Work]] = []
        self._open: dict[int, Batch] = {}
        self._unpublished: dict[ChunkId, Work] = {}
        self._charged: dict[ChunkId, Work] = {}
        """Unfinished chunks that were charged: few, so what is saved of them costs nothing."""
        self._batches = 0
        self._now_ns = 0
        """When something was told last."""
        self._added = 0
        self._succeeded = 0
        self._skipped = 0
        self._failed = 0
        self._retries = 0
        self._duplicates = 0

    # ---- chunks come in

    def add(self, works: Iterable[Work], contents: Iterable[bytes] | None = None, stored: object = ()) -> list[Work]:
        """Take chunks in. Returns those whose result ``stored`` (a container of ids) has already.

        A chunk that is here already is dropped; one whose id is here with another of ``contents`` is refused, with
        nothing of this call taken in.
        """
        new = list(works)
        if self._ids is not None:
            new = self._without_copies(new, list(contents) if contents is not None else [w.key for w in new])
        found: list[Work] = []
        has: Any = stored
        has_any = len(has) > 0
        queue: _Queue | None = None
        needs: Needs | None = None
        for work in new:
            if has_any and work.key in has:
                work.state = next_chunk(work.state, ChunkEvent.FOUND)
                found.append(work)
                continue
            if self._saved and (known := self._saved.get(work.key)) is not None:
                work.charges, work.past = known.charges, _Past(work.needs.memory, known.runs_ns)
                self._charged[work.key] = work
                if known.memory:
                    work.needs = work.needs._replace(memory=known.memory)
            if queue is None or work.needs is not needs:
                needs = work.needs
                queue = self._queue(needs)
            queue.waiting.append(work)
        self._added += len(new)
        self._skipped += len(found)
        if self.stopped is not None:
            self._fail_waiting(self.stopped)
        return found

    def drop(self, batch: Batch, works: Sequence[Work], now_ns: int) -> None:
        """These of a batch that was just taken are not wanted any more."""
        gone = set(map(id, works))
        batch.works = [work for work in batch.works if id(work) not in gone]
        if not batch.works:
            self._close(batch)
        for work in works:
            self._give_up(work, FailReason.CANCELLED, now_ns)

    def _without_copies(self, works: list[Work], contents: list[bytes]) -> list[Work]:
        assert self._ids is not None
        kept: list[Work] = []
        fresh: dict[ChunkId, bytes] = {}
        for work, content in zip(works, contents, strict=True):
            known = self._ids.get(work.key) or fresh.get(work.key)
            if known is None:
                fresh[work.key] = content
                kept.append(work)
            elif known != content:
                raise InvalidRequest(
                    f"chunk {work.index} has the id {work.key.hex()} of another chunk, with another content",
                    do="Derive chunk_id() from everything that changes the result. Nothing of these chunks was begun.",
                )
        self._ids.update(fresh)
        self._duplicates += len(works) - len(kept)
        return kept

    def complete(self) -> None:
        """No more chunks will come."""
        self.is_complete = True

    # ---- chunks go out

    def take(self, lease: str, needs: Needs, most: int, now_ns: int) -> Batch | None:
        """At most so many chunks for a lease of this size; None if there is nothing for it now."""
        self.tick(now_ns)
        queue = self._queues.get(needs)
        if queue is None or self.stopped is not None or not queue.waiting:
            return None
        waiting = queue.waiting
        call = waiting[0].call
        works: list[Work] = []
        while waiting and len(works) < most and waiting[0].call is call:
            works.append(waiting.popleft())
        _move(works, ChunkEvent.TAKE)
        queue.executing += len(works)
        self._batches += 1
        batch = self._open[self._batches] = Batch(self._batches, lease, works, now_ns, since_ns=now_ns)
        return batch

    # ---- what came of it

    def results(self, batch: Batch, outcomes: Sequence[Any], now_ns: int) -> list[tuple[Work, Any]]:
        """The next chunks of a batch have these outcomes, in order: a result, or a `Failed`. Returns what is to be
        stored; of a batch that is closed nothing."""
        if not batch.is_open:
            return []
        works = batch.works[batch.done : batch.done + len(outcomes)]
        fresh: list[tuple[Work, Any]] = []
        unpublished = self._unpublished
        ran_ns = now_ns - batch.since_ns
        for work, outcome in zip(works, outcomes, strict=False):
            if type(outcome) is Failed:
                self._run_failed(work, outcome, When.EXECUTING, now_ns, ran_ns)
            else:
                unpublished[work.key] = work
                fresh.append((work, outcome))
        batch.done += len(works)
        batch.since_ns = now_ns
        if batch.done == len(batch.works):
            self._close(batch)
        return fresh

    def lost(self, batch: Batch, failed: Failed, *, begun: bool, now_ns: int) -> None:
        """The rest of a batch brings no results: its worker or lease is gone. ``begun``: the first of the rest was
        executing; the others were not, and so it is not theirs."""
        if not batch.is_open:
            return
        rest = batch.rest
        self._close(batch)
        if begun and rest:
            self._run_failed(rest[0], failed, When.EXECUTING, now_ns, now_ns - batch.since_ns)
            rest = rest[1:]
        if verdict_of(failed.cause, When.NOT_BEGUN) is Verdict.RETURN:
            self._return(rest, now_ns)
        else:
            for work in rest:
                self._run_failed(work, failed, When.NOT_BEGUN, now_ns, 0)

    def published(self, works: Sequence[Work], now_ns: int) -> None:
        """The store has the results of these, durably."""
        unpublished = self._unpublished
        fresh = [work for work in works if unpublished.pop(work.key, None) is work]
        _move(fresh, ChunkEvent.STORE)
        needs: Needs | None = None
        queue = _Queue()
        for work in fresh:
            if work.needs is not needs:  # mostly they are one object
                needs = work.needs
                queue = self._queues[needs]
            queue.executing -= 1
        if self._charged:
            for work in fresh:
                self._charged.pop(work.key, None)
        self._succeeded += len(fresh)
        if fresh:
            self._say(now_ns, "done", len(fresh))

    def _close(self, batch: Batch) -> None:
        batch.is_open = False
        self._open.pop(batch.number, None)

    def _return(self, works: list[Work], now_ns: int) -> None:
        _move(works, ChunkEvent.RETURN)
        for work in reversed(works):
            queue = self._queues[work.needs]
            queue.executing -= 1
            queue.waiting.appendleft(work)
        if works:
            self._say(now_ns, "returned", len(works))
        if self.stopped is not None:
            self._fail_waiting(self.stopped)

    def _run_failed(self, work: Work, failed: Failed, when: When, now_ns: int, ran_ns: int) -> None:
        """One run of one chunk failed: retry it, or give it up."""
        verdict = verdict_of(failed.cause, when)
        past = work.past
        if past is None:
            past = work.past = _Past(work.needs.memory)
        past.error = failed.error
        if verdict is Verdict.FAIL:
            raised = failed.cause in (Cause.RAISED, Cause.RAISED_TRANSIENT)
            self._give_up(work, FailReason.RAISED if raised else FailReason.REFUSED, now_ns)
            return
        work.charges += 1
        self._charged[work.key] = work
        if failed.cause is Cause.LEASE_LOST:
            past.runs_ns = (*past.runs_ns[1 - SAME_END :], ran_ns)
            if _needs_longer(past.runs_ns):
                self._give_up(work, FailReason.TOO_LONG, now_ns)
                return
        else:
            past.runs_ns = ()
        memory = work.needs.memory
        if verdict is Verdict.RETRY_LARGER:
            larger = self.policy.larger(memory, past.first_memory)
            if larger is None:
                self._give_up(work, FailReason.OUT_OF_MEMORY, now_ns)
                return
            memory = larger
        if work.charges > self.policy.max_retries:
            out_of_memory = verdict is Verdict.RETRY_LARGER
            self._give_up(work, FailReason.OUT_OF_MEMORY if out_of_memory else FailReason.RETRIES, now_ns)
            return
        self._queues[work.needs].executing -= 1
        work.needs = work.needs._replace(memory=memory)
        work.state = next_chunk(work.state, ChunkEvent.RETRY)
        self._retries += 1
        self._say(now_ns, "retry", 1, f"chunk {work.index}: {_told(failed)}")
        at_ns = now_ns + self.policy.backoff_ns(work.charges, self._chance())
        self._queue(work.needs).delayed += 1
        heapq.heappush(self._delayed, (at_ns, work.index, work))
        if self.stopped is not None:
            self._fail_waiting(self.stopped)

    def _give_up(self, work: Work, reason: FailReason, now_ns: int) -> None:
        queue = self._queues[work.needs]
        if work.state is ChunkState.EXECUTING:
            queue.executing -= 1
        work.state = next_chunk(work.state, ChunkEvent.FAIL, f"chunk {work.index}")
        failure = self._note_failure(work, reason)
        self._say(now_ns, "failed", 1, str(failure))
        if not self._collect and reason not in (FailReason.CANCELLED, FailReason.DEADLINE):
            self.stop(FailReason.CANCELLED)

    # ---- time, and the end

    def tick(self, now_ns: int) -> None:
        """Retries whose time has come go into the queue; past the deadline nothing new begins."""
        self._now_ns = now_ns
        delayed = self._delayed
        while delayed and delayed[0][0] <= now_ns:
            work = heapq.heappop(delayed)[2]
            queue = self._queues[work.needs]
            queue.delayed -= 1
            queue.waiting.append(work)
        if self._deadline_ns is not None and now_ns >= self._deadline_ns and self.stopped is None:
            self.stop(FailReason.DEADLINE)

    def next_due_ns(self) -> int | None:
        """When ``tick`` has something to do."""
        moments = [self._delayed[0][0]] if self._delayed else []
        if self._deadline_ns is not None and self.stopped is None:
            moments.append(self._deadline_ns)
        return min(moments, default=None)

    def stop(self, reason: FailReason) -> None:
        """Begin nothing new: what waits fails for this reason. What executes may still finish; the driver decides."""
        if self.stopped is None:
            self.stopped = reason
        self._fail_waiting(self.stopped)

    def abandon(self, now_ns: int) -> None:
        """After ``stop``: what executes is not waited for."""
        for batch in list(self._open.values()):
            self._close(batch)
            for work in batch.rest:
                self._give_up(work, self.stopped or FailReason.CANCELLED, now_ns)

    def _fail_waiting(self, reason: FailReason) -> None:
        left = [work for queue in self._queues.values() for work in queue.waiting]
        left += [work for _, _, work in self._delayed]
        for queue in self._queues.values():
            queue.waiting.clear()
            queue.delayed = 0
        self._delayed.clear()
        if left:
            self._say(self._now_ns, "failed", len(left), f"{len(left)} chunks were not begun: {reason}")
        for work in left:
            work.state = next_chunk(work.state, ChunkEvent.FAIL, f"chunk {work.index}")
            self._note_failure(work, reason)

    def _note_failure(self, work: Work, reason: FailReason) -> ChunkFailed:
        self._charged.pop(work.key, None)
        self._failed += 1
        failure = ChunkFailed(
            chunk=work.key,
            index=work.index,
            reason=reason,
            error=None if work.past is None else work.past.error,
            retries=min(work.charges, self.policy.max_retries),
            detail=_explained(work, reason, self.policy),
        )
        self.failures.append(failure)
        return failure

    @property
    def is_over(self) -> bool:
        """Nothing is left to run, to publish or to come."""
        return (self.is_complete or self.stopped is not None) and not (
            self._open or self._unpublished or self._delayed or any(queue.waiting for queue in self._queues.values())
        )

    # ---- looking

    def wanted(self) -> dict[Needs, int]:
        """Chunks of each size that are not finished: more leases than that have nothing to do."""
        return {needs: queue.wanted for needs, queue in self._queues.items() if queue.wanted}

    @property
    def wanted_more(self) -> bool:
        """Whether more results may come soon: something waits or executes beside what is to be published."""
        return bool(self._open) or any(queue.waiting for queue in self._queues.values())

    def ready(self, needs: Needs) -> int:
        """Chunks of this size that could begin now."""
        queue = self._queues.get(needs)
        return 0 if queue is None or self.stopped is not None else len(queue.waiting)

    @property
    def outstanding(self) -> int:
        """Chunks that were added and are not finished."""
        return self._added - self._succeeded - self._skipped - self._failed

    @property
    def counts(self) -> Counts:
        waiting = sum(len(queue.waiting) + queue.delayed for queue in self._queues.values())
        return Counts(
            total=self._added,
            waiting=waiting,
            executing=self.outstanding - waiting,
            succeeded=self._succeeded,
            skipped=self._skipped,
            failed=self._failed,
            retries=self._retries,
        )

    def snapshot(self) -> dict[ChunkId, SavedChunk]:
        """What the next run must know of unfinished chunks: those that were charged."""
        return {
            key: SavedChunk(
                charges=work.charges,
                memory=work.needs.memory,
                runs_ns=() if work.past is None else work.past.runs_ns,
            )
            for key, work in self._charged.items()
        }

    def check(self) -> None:
        """Raise AssertionError if the books contradict themselves."""
        seen: dict[int, str] = {}

        def note(work: Work, where: str, state: ChunkState) -> None:
            assert id(work) not in seen, f"chunk {work.index} is in {seen[id(work)]} and {where}"
            assert work.state is state, f"chunk {work.index} is {work.state} in {where}"
            seen[id(work)] = where

        executing: dict[Needs, int] = {}
        for needs, queue in self._queues.items():
            for work in queue.waiting:
                note(work, "the queue", ChunkState.WAITING)
                assert work.needs == needs
        for _, _, work in self._delayed:
            note(work, "the delayed", ChunkState.WAITING)
        for batch in self._open.values():
            assert batch.is_open
            for work in batch.rest:
                note(work, f"batch {batch.number}", ChunkState.EXECUTING)
                executing[work.needs] = executing.get(work.needs, 0) + 1
        for work in self._unpublished.values():
            note(work, "the unpublished", ChunkState.EXECUTING)
            executing[work.needs] = executing.get(work.needs, 0) + 1
        for needs, queue in self._queues.items():
            assert queue.executing == executing.get(needs, 0), f"{needs}: {queue.executing} are said to execute"
            assert queue.delayed == sum(work.needs == needs for _, _, work in self._delayed)
        assert len(seen) == self.outstanding, f"{self.outstanding} outstanding, {len(seen)} found"
        assert self._failed == len(self.failures)
        if self.stopped is not None:
            assert not self._delayed
            assert not any(queue.waiting for queue in self._queues.values())

    # ---- inside

    def _queue(self, needs: Needs) -> _Queue:
        queue = self._queues.get(needs)
        if queue is None:
            queue = self._queues[needs] = _Queue()
        return queue

    def _say(self, at_ns: int, what: str, count: int, detail: str = "") -> None:
        self.events.append(JobEvent(at_ns, what, count, detail))


def _move(works: Sequence[Work], event: ChunkEvent) -> None:
    """The same transition for many; the table is asked once for each state."""
    state, then = None, None
    for work in works:
        if work.state is not state:
            state = work.state
            then = CHUNK_TABLE.get((state, event))
            if then is None:
                raise TransitionError(f"chunk {work.index} is {state}: {event} is not possible")
        work.state = then  # type: ignore[assignment]  # looked up above


def _needs_longer(runs_ns: Sequence[int]) -> bool:
    """Whether the last leases all ended after about the same time."""
    longest = max(runs_ns)
    return len(runs_ns) >= SAME_END and longest - min(runs_ns) <= SAME_SHARE * longest and min(runs_ns) >= SHORT_RUN_NS


def _told(failed: Failed) -> str:
    return failed.cause if failed.error is None else f"{failed.cause} ({type(failed.error).__name__}: {failed.error})"


def _explained(work: Work, reason: FailReason, policy: RetryPolicy) -> str:
    past = work.past or _Past(0)
    last = "" if past.error is None else f" ({type(past.error).__name__}: {past.error})"
    match reason:
        case FailReason.TOO_LONG:
            return (
                f"{SAME_END} leases in a row ended when it had run for about {format_duration(past.runs_ns[-1])}: it "
                f'needs longer than any lease it gets. Make the chunk smaller, or ask for tier="interactive"{last}'
            )
        case FailReason.RETRIES:
            return f"it failed {policy.max_retries + 1} times, the last time{last or ' without an error'}"
        case FailReason.OUT_OF_MEMORY:
            return (
                f"it ran out of memory with {work.needs.memory} bytes, and may have no more. "
                f"Raise memory_max of the RetryPolicy, or make the chunk smaller{last}"
            )
        case FailReason.DEADLINE:
            return "the job's deadline passed before it was finished"
        case FailReason.CANCELLED:
            return "the job was stopped before it was finished"
        case FailReason.RAISED:
            return f"its function raised{last}"
        case FailReason.REFUSED:
            return f"it cannot run{last}"
