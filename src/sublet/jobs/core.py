"""The coordinator's core: which chunk runs next, and what happens to one whose run failed. Pure.

It reads no clock, file or socket and starts no thread. A driver tells it what happened (chunks were read, a lease has
room, results came, a worker or lease was lost, the store has published) with the time, and carries out what it answers.
The simulation runs this very class.

Chunks are handed out in *batches*, in the order in which they came. A worker executes its batch from the first to the
last, so when it dies there is one chunk that was executing: that one is charged, those before it have results, and
those behind it go back to the front of the queue as they are. A batch is closed by its last result or by its loss, and
what comes for a closed batch is late: it changes nothing. A chunk counts as finished only when the store has published
its result.

Nothing is kept for a chunk by itself until a run of it fails. Chunks in one state lie side by side in lists (`Works`),
and the table is asked once for all of them; one that fails is cut out and goes on as `Works` of one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, NamedTuple

from sublet.errors import InvalidRequest
from sublet.jobs.chunks import Needs
from sublet.jobs.identity import ChunkId
from sublet.jobs.policy import RetryPolicy
from sublet.jobs.states import (
    Cause,
    ChunkEvent,
    ChunkState,
    FailReason,
    RetryVerdict,
    When,
    next_chunk,
    verdict_of,
)
from sublet.values import NS_PER_S, format_duration, format_size

SAME_END: Final = 3
"""Leases that end in a row under one chunk after about the same run time: it needs longer than any lease it gets."""
SAME_SHARE: Final = 0.1
"""Run times count as the same if they differ by at most this share of the longest."""
SHORT_RUN_NS: Final = NS_PER_S
"""Runs that were shorter say nothing about how long the chunk needs."""
EVENTS_MAX: Final = 100_000
"""Events that are kept until the caller takes them; the oldest are dropped first, and are counted."""


class RunFailed(NamedTuple):
    """The outcome of one run that brought no result."""

    cause: Cause
    error: BaseException | None = None


@dataclass(slots=True)
class _Past:
    """What is known of a chunk of which a run failed."""

    first_memory: int
    """What it asked for at first."""
    memory: int
    """What it asks for now."""
    charges: int = 0
    """Retries it was charged."""
    runs_ns: tuple[int, ...] = ()
    """How long it ran under the leases that ended under it, the last ones in a row."""
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Works:
    """Chunks of the coordinator that are in one state, in order: a list for each thing that is known of them."""

    keys: list[ChunkId]
    indexes: list[int]
    """Their positions in the input."""
    items: list[Any]
    """What each is about: the argument of ``call``."""
    call: Any
    """What executes them."""
    needs: Needs
    state: ChunkState = ChunkState.WAITING

    def __len__(self) -> int:
        return len(self.keys)

    def subset(self, start: int, end: int | None = None) -> Works:
        """Those at these places."""
        return Works(
            self.keys[start:end], self.indexes[start:end], self.items[start:end], self.call, self.needs, self.state
        )

    def where(self, flags: Sequence[bool]) -> Works:
        """Those whose flag is set."""
        return Works(
            list(compress(self.keys, flags)),
            list(compress(self.indexes, flags)),
            list(compress(self.items, flags)),
            self.call,
            self.needs,
            self.state,
        )

    def singles(self) -> Iterator[Works]:
        """Each by itself."""
        return (self.subset(place, place + 1) for place in range(len(self)))

    def move(self, event: ChunkEvent) -> None:
        """The same transition for all of them."""
        self.state = next_chunk(self.state, event, f"chunk {self.indexes[0]}" if self.indexes else "no chunk")


@dataclass(slots=True, eq=False)
class ChunkBatch:
    """Chunks that one worker executes, in order."""

    number: int
    lease: str
    works: Works
    taken_ns: int
    done: int = 0
    """Of so many there is a result or a failure."""
    since_ns: int = 0
    """When its worker began it, at the earliest."""
    is_open: bool = True

    @property
    def rest(self) -> Works:
        return self.works.subset(self.done)


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

    def __repr__(self) -> str:
        return f"<ChunkFailed {self}>"


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One fact of the job's life, for a live view, the picture and metrics."""

    at_ns: int
    what: str
    """``done``, ``skipped``, ``retry``, ``returned``, ``failed``, ``cancelled``, ``leases``, ``phase``, ``capacity``,
    ``saved``."""
    count: int = 1
    """Chunks; for ``leases`` how many are held now."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCounts:
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


class _Queue:
    """Chunks of the same needs: those share leases."""

    def __init__(self) -> None:
        self.waiting: deque[Works] = deque()
        self.ready = 0
        """Chunks in ``waiting``."""
        self.delayed = 0
        self.executing = 0
        self.unpublished = 0
        """Of those so many have a result, which the store has not published yet: they need no lease any more."""
        self._taken = 0
        """So many of the first ``Works`` went out already: cutting them off each time would copy the rest."""

    @property
    def wanted(self) -> int:
        return self.ready + self.delayed + self.executing - self.unpublished

    def put(self, works: Works) -> None:
        self.waiting.append(works)
        self.ready += len(works)

    def put_back(self, works: Works) -> None:
        """They are the next to go out."""
        self._cut()
        self.waiting.appendleft(works)
        self.ready += len(works)

    def take(self, most: int) -> Works:
        """The next ones that one call executes, at most so many."""
        found = self._next(most)
        while len(found) < most and self.waiting and self.waiting[0].call is found.call:
            more = self._next(most - len(found))
            found.keys += more.keys
            found.indexes += more.indexes
            found.items += more.items
        self.ready -= len(found)
        return found

    def clear(self) -> list[Works]:
        """All that wait, and none waits any more."""
        found = self.waiting_works()
        self.waiting.clear()
        self.ready = 0
        return found

    def waiting_works(self) -> list[Works]:
        """All that wait."""
        self._cut()
        return list(self.waiting)

    def _next(self, most: int) -> Works:
        first, start = self.waiting[0], self._taken
        self._taken += most
        if self._taken >= len(first):
            self.waiting.popleft()
            self._taken = 0
        return first.subset(start, start + most)

    def _cut(self) -> None:
        if self._taken:
            self.waiting[0] = self.waiting[0].subset(self._taken)
            self._taken = 0


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
        self._delayed: list[tuple[int, int, Works]] = []
        self._open: dict[int, ChunkBatch] = {}
        self._unpublished: set[Works] = set()
        self._past: dict[ChunkId, _Past] = {}
        """Of unfinished chunks of which a run failed: few, so what is saved of them costs nothing."""
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

    def add(self, works: Works, contents: Sequence[bytes] | None = None, stored: object = ()) -> Works:
        """Take chunks in. Returns those whose result ``stored`` (a container of ids) has already.

        A chunk that is here already is dropped; one whose id is here with another of ``contents`` is refused, with
        nothing of this call taken in.
        """
        if self._ids is not None:
            works = self._without_copies(works, works.keys if contents is None else contents)
        self._added += len(works)
        has: Any = stored
        found = works.subset(0, 0)
        if len(has) > 0 and True in (is_stored := [key in has for key in works.keys]):
            found, works = works.where(is_stored), works.where([not one for one in is_stored])
            found.move(ChunkEvent.FOUND)
            self._skipped += len(found)
        if self._saved and not self._saved.keys().isdisjoint(works.keys):
            is_known = [key in self._saved for key in works.keys]
            for work in works.where(is_known).singles():
                self._resume(work, self._saved[work.keys[0]])
            works = works.where([not one for one in is_known])
        if works:
            self._queue(works.needs).put(works)
        if self.stopped is not None:
            self._fail_waiting(self.stopped)
        return found

    def _resume(self, work: Works, known: SavedChunk) -> None:
        """A chunk that an earlier run has charged goes on from there."""
        memory = known.memory or work.needs.memory
        self._past[work.keys[0]] = _Past(work.needs.memory, memory, known.charges, known.runs_ns)
        work.needs = work.needs._replace(memory=memory)
        self._queue(work.needs).put(work)

    def drop(self, batch: ChunkBatch, is_wanted: Sequence[bool], now_ns: int) -> None:
        """Of a batch that was just taken only these are still wanted."""
        gone = batch.works.where([not one for one in is_wanted])
        batch.works = batch.works.where(is_wanted)
        if not batch.works:
            self._close(batch)
        for work in gone.singles():
            self._fail_work(work, FailReason.CANCELLED, now_ns)

    def _without_copies(self, works: Works, contents: Sequence[bytes]) -> Works:
        assert self._ids is not None
        fresh: dict[ChunkId, bytes] = {}
        is_new: list[bool] = []
        for index, key, content in zip(works.indexes, works.keys, contents, strict=True):
            known = self._ids.get(key) or fresh.get(key)
            if known is not None and known != content:
                raise InvalidRequest(
                    f"chunk {index} has the id {key.hex()} of another chunk, with another content",
                    do="Derive chunk_id() from everything that changes the result. Nothing of these chunks was begun.",
                )
            is_new.append(known is None)
            fresh.setdefault(key, content)
        self._ids.update(fresh)
        copies = is_new.count(False)
        self._duplicates += copies
        return works.where(is_new) if copies else works

    @property
    def keeps_ids(self) -> bool:
        """Whether an id may come twice."""
        return self._ids is not None

    def complete(self) -> None:
        """No more chunks will come."""
        self.is_complete = True

    # ---- chunks go out

    def take(self, lease: str, needs: Needs, most: int, now_ns: int) -> ChunkBatch | None:
        """At most so many chunks for a lease of this size; None if there is nothing for it now."""
        self.tick(now_ns)
        queue = self._queues.get(needs)
        if queue is None or self.stopped is not None or not queue.ready:
            return None
        works = queue.take(most)
        works.move(ChunkEvent.TAKE)
        queue.executing += len(works)
        self._batches += 1
        batch = self._open[self._batches] = ChunkBatch(self._batches, lease, works, now_ns, since_ns=now_ns)
        return batch

    # ---- what came of it

    def results(self, batch: ChunkBatch, outcomes: Sequence[Any], now_ns: int) -> list[tuple[Works, Sequence[Any]]]:
        """The next chunks of a batch have these outcomes, in order: a result, or a `RunFailed`. Returns what is to be
        stored, chunks with their results; of a batch that is closed nothing."""
        if not batch.is_open:
            return []
        works = batch.works.subset(batch.done, batch.done + len(outcomes))
        ran_ns = now_ns - batch.since_ns
        batch.done += len(works)
        fresh: list[tuple[Works, Sequence[Any]]] = []
        start = 0
        failed: list[int] = []
        if RunFailed in map(type, outcomes):
            failed = [place for place, one in enumerate(outcomes[: len(works)]) if type(one) is RunFailed]
        for place in (*failed, len(works)):
            if place > start:
                made = works.subset(start, place)
                self._unpublished.add(made)
                self._queues[made.needs].unpublished += len(made)
                fresh.append((made, outcomes[start:place]))
            start = place + 1
        if batch.done == len(batch.works):
            self._close(batch)
        for place in failed:
            self._run_failed(works.subset(place, place + 1), outcomes[place], When.EXECUTING, now_ns, ran_ns)
        return fresh

    def lost(self, batch: ChunkBatch, failed: RunFailed, *, begun: bool, now_ns: int) -> None:
        """The rest of a batch brings no results: its worker or lease is gone. ``begun``: the first of the rest was
        executing; the others were not, and so it is not theirs."""
        if not batch.is_open:
            return
        rest = batch.rest
        self._close(batch)
        if begun and rest:
            self._run_failed(rest.subset(0, 1), failed, When.EXECUTING, now_ns, now_ns - batch.since_ns)
            rest = rest.subset(1)
        if verdict_of(failed.cause, When.NOT_BEGUN) is RetryVerdict.RETURN:
            self._return(rest, now_ns)
        else:
            for work in rest.singles():
                self._run_failed(work, failed, When.NOT_BEGUN, now_ns, 0)

    def take_back(self, batch: ChunkBatch, begun: int, now_ns: int) -> None:
        """Only so many chunks of a batch will have been begun by its worker: the others go back into the queue."""
        begun = max(begun, batch.done)
        if not batch.is_open or begun >= len(batch.works):
            return
        rest, batch.works = batch.works.subset(begun), batch.works.subset(0, begun)
        if batch.done == begun:
            self._close(batch)
        self._return(rest, now_ns)

    def published(self, made: Iterable[Works], now_ns: int) -> None:
        """The store has the results of these, durably."""
        for works in made:
            if works not in self._unpublished:
                continue
            self._unpublished.remove(works)
            works.move(ChunkEvent.STORE)
            queue = self._queues[works.needs]
            queue.executing -= len(works)
            queue.unpublished -= len(works)
            self._succeeded += len(works)
            if self._past:
                for key in works.keys:
                    self._past.pop(key, None)
            self._emit(now_ns, "done", len(works))

    def _close(self, batch: ChunkBatch) -> None:
        batch.is_open = False
        self._open.pop(batch.number, None)

    def _return(self, works: Works, now_ns: int) -> None:
        if works:
            works.move(ChunkEvent.RETURN)
            queue = self._queues[works.needs]
            queue.executing -= len(works)
            queue.put_back(works)
            self._emit(now_ns, "returned", len(works))
        if self.stopped is not None:
            self._fail_waiting(self.stopped)

    def _run_failed(self, work: Works, failed: RunFailed, when: When, now_ns: int, ran_ns: int) -> None:
        """One run of one chunk failed: retry it, or give it up."""
        verdict = verdict_of(failed.cause, when)
        memory = work.needs.memory
        past = self._past.setdefault(work.keys[0], _Past(memory, memory))
        past.error = failed.error
        if verdict is RetryVerdict.FAIL:
            raised = failed.cause in (Cause.RAISED, Cause.RAISED_TRANSIENT)
            self._fail_work(work, FailReason.RAISED if raised else FailReason.REFUSED, now_ns)
            return
        past.charges += 1
        if failed.cause is Cause.LEASE_LOST:
            past.runs_ns = (*past.runs_ns[1 - SAME_END :], ran_ns)
            if _needs_longer(past.runs_ns):
                self._fail_work(work, FailReason.TOO_LONG, now_ns)
                return
        else:
            past.runs_ns = ()
        if verdict is RetryVerdict.RETRY_LARGER:
            larger = self.policy.larger(memory, past.first_memory)
            if larger is None:
                self._fail_work(work, FailReason.OUT_OF_MEMORY, now_ns)
                return
            past.memory = larger
        if past.charges > self.policy.max_retries:
            out_of_memory = verdict is RetryVerdict.RETRY_LARGER
            self._fail_work(work, FailReason.OUT_OF_MEMORY if out_of_memory else FailReason.RETRIES, now_ns)
            return
        self._queues[work.needs].executing -= 1
        work.needs = work.needs._replace(memory=past.memory)
        work.move(ChunkEvent.RETRY)
        self._retries += 1
        self._emit(now_ns, "retry", 1, f"chunk {work.indexes[0]}: {_cause_text(failed)}")
        at_ns = now_ns + self.policy.backoff_ns(past.charges, self._chance())
        self._queue(work.needs).delayed += 1
        heapq.heappush(self._delayed, (at_ns, work.indexes[0], work))
        if self.stopped is not None:
            self._fail_waiting(self.stopped)

    def _fail_work(self, work: Works, reason: FailReason, now_ns: int) -> None:
        if work.state is ChunkState.EXECUTING:
            self._queues[work.needs].executing -= 1
        work.move(ChunkEvent.FAIL)
        failure = self._note_failure(work.keys[0], work.indexes[0], work.needs, reason)
        self._emit(now_ns, _ended_as(reason), 1, str(failure))
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
            queue.put(work)
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
            for work in batch.rest.singles():
                self._fail_work(work, self.stopped or FailReason.CANCELLED, now_ns)

    def _fail_waiting(self, reason: FailReason) -> None:
        left = [works for queue in self._queues.values() for works in queue.clear()]
        left += [work for _, _, work in self._delayed]
        self._delayed.clear()
        for queue in self._queues.values():
            queue.delayed = 0
        if count := sum(map(len, left)):
            self._emit(self._now_ns, _ended_as(reason), count, f"{count} chunks were not begun: {reason}")
        for works in left:
            works.move(ChunkEvent.FAIL)
            for key, index in zip(works.keys, works.indexes, strict=True):
                self._note_failure(key, index, works.needs, reason)

    def _note_failure(self, key: ChunkId, index: int, needs: Needs, reason: FailReason) -> ChunkFailed:
        past = self._past.pop(key, None) or _Past(0, 0)
        self._failed += 1
        failure = ChunkFailed(
            chunk=key,
            index=index,
            reason=reason,
            error=past.error,
            retries=min(past.charges, self.policy.max_retries),
            detail=_explained(past, needs, reason, self.policy),
        )
        self.failures.append(failure)
        return failure

    @property
    def is_over(self) -> bool:
        """Nothing is left to run, to publish or to come."""
        return (self.is_complete or self.stopped is not None) and not (
            self._open or self._unpublished or self._delayed or any(queue.ready for queue in self._queues.values())
        )

    # ---- looking

    def wanted(self) -> dict[Needs, int]:
        """Chunks of each size that are to be run or run: more leases than that have nothing to do."""
        return {needs: queue.wanted for needs, queue in self._queues.items() if queue.wanted}

    @property
    def wanted_more(self) -> bool:
        """Whether more results may come soon: something waits or executes beside what is to be published."""
        return bool(self._open) or any(queue.ready for queue in self._queues.values())

    @property
    def has_ready(self) -> bool:
        """Whether any chunk could begin now."""
        return self.stopped is None and any(queue.ready for queue in self._queues.values())

    def ready(self, needs: Needs) -> int:
        """Chunks of this size that could begin now."""
        queue = self._queues.get(needs)
        return 0 if queue is None or self.stopped is not None else queue.ready

    @property
    def outstanding(self) -> int:
        """Chunks that were added and are not finished."""
        return self._added - self._succeeded - self._skipped - self._failed

    @property
    def counts(self) -> ChunkCounts:
        waiting = sum(queue.ready + queue.delayed for queue in self._queues.values())
        return ChunkCounts(
            total=self._added,
            waiting=waiting,
            executing=self.outstanding - waiting,
            succeeded=self._succeeded,
            skipped=self._skipped,
            failed=self._failed,
            retries=self._retries,
        )

    def charges(self, key: ChunkId) -> int:
        """Retries that a chunk was charged, which is not finished."""
        past = self._past.get(key)
        return 0 if past is None else past.charges

    def snapshot(self) -> dict[ChunkId, SavedChunk]:
        """What the next run must know of unfinished chunks: those that were charged."""
        return {
            key: SavedChunk(charges=past.charges, memory=past.memory, runs_ns=past.runs_ns)
            for key, past in self._past.items()
        }

    def check(self) -> None:
        """Raise AssertionError if the books contradict themselves."""
        seen: dict[ChunkId, str] = {}

        def note(works: Works, where: str, state: ChunkState) -> int:
            assert works.state is state, f"chunks {works.indexes} are {works.state} in {where}"
            assert len(works.keys) == len(works.indexes) == len(works.items)
            for key, index in zip(works.keys, works.indexes, strict=True):
                assert key not in seen, f"chunk {index} is in {seen[key]} and {where}"
                seen[key] = where
            return len(works)

        executing: dict[Needs, int] = {}
        unpublished = dict.fromkeys(self._queues, 0)
        for works in self._unpublished:
            unpublished[works.needs] += len(works)
        for needs, queue in self._queues.items():
            assert queue.unpublished == unpublished[needs], f"{needs}: {queue.unpublished} are said to be unpublished"
            waiting = queue.waiting_works()
            assert queue.ready == sum(note(works, "the queue", ChunkState.WAITING) for works in waiting)
            assert all(works.needs == needs for works in waiting)
        for _, _, work in self._delayed:
            note(work, "the delayed", ChunkState.WAITING)
        for works in (*(batch.rest for batch in self._open.values()), *self._unpublished):
            note(works, "a batch or the unpublished", ChunkState.EXECUTING)
            executing[works.needs] = executing.get(works.needs, 0) + len(works)
        assert all(batch.is_open for batch in self._open.values())
        for needs, queue in self._queues.items():
            assert queue.executing == executing.get(needs, 0), f"{needs}: {queue.executing} are said to execute"
            assert queue.delayed == sum(work.needs == needs for _, _, work in self._delayed)
        assert len(seen) == self.outstanding, f"{self.outstanding} outstanding, {len(seen)} found"
        assert self._past.keys() <= seen.keys(), "something is kept of a chunk that is finished"
        assert self._failed == len(self.failures)
        if self.stopped is not None:
            assert not self._delayed
            assert not any(queue.ready for queue in self._queues.values())

    # ---- inside

    def _queue(self, needs: Needs) -> _Queue:
        queue = self._queues.get(needs)
        if queue is None:
            queue = self._queues[needs] = _Queue()
        return queue

    def _emit(self, at_ns: int, what: str, count: int, detail: str = "") -> None:
        self.events.append(JobEvent(at_ns, what, count, detail))


def _ended_as(reason: FailReason) -> str:
    """The event: a chunk that was not wanted any more is no failure to show."""
    return "cancelled" if reason is FailReason.CANCELLED else "failed"


def _needs_longer(runs_ns: Sequence[int]) -> bool:
    """Whether the last leases all ended after about the same time."""
    longest = max(runs_ns)
    return len(runs_ns) >= SAME_END and longest - min(runs_ns) <= SAME_SHARE * longest and min(runs_ns) >= SHORT_RUN_NS


def _cause_text(failed: RunFailed) -> str:
    return failed.cause if failed.error is None else f"{failed.cause} ({type(failed.error).__name__}: {failed.error})"


def _explained(past: _Past, needs: Needs, reason: FailReason, policy: RetryPolicy) -> str:
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
                f"it ran out of memory with {format_size(needs.memory)}, and may have no more. "
                f"Raise memory_max of the RetryPolicy, or make the chunk smaller{last}"
            )
        case FailReason.DEADLINE:
            return "the job's deadline passed before it was finished"
        case FailReason.CANCELLED:
            return "the job was stopped before it was finished"
        case FailReason.RAISED:
            return f"its function raised{last}"
        case FailReason.REFUSED:
            return f"it can have no result{last}"
