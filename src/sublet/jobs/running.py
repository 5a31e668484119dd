"""Runs a coordinator over CPU leases: the thread between the pure core and its leases.

One thread owns the core. Everything that happens (a lease was granted, a worker is ready, a batch has results, a lease
ended, chunks were read, results were published) comes to it as an event in a queue; after each it hands out chunks,
asks for leases or gives them back, and delivers what is finished. Workers hold two batches each, so none waits for this
thread between two chunks.
"""

from __future__ import annotations

import functools
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sublet.background import start_thread
from sublet.clock import Clock, SystemClock
from sublet.compute.outcomes import CallResults
from sublet.compute.posting import prepare_worker, submit_many
from sublet.compute.worker_guest import Options
from sublet.errors import InvalidRequest, SubletError
from sublet.jobs.chunks import Needs
from sublet.jobs.core import ChunkBatch, ChunkFailed, Coordinator, JobEvent, RunFailed, SavedChunk, Works
from sublet.jobs.identity import ChunkId
from sublet.jobs.inside import Raised, error_of
from sublet.jobs.metrics import Metrics
from sublet.jobs.policy import cause_of
from sublet.jobs.states import Cause, FailReason
from sublet.jobs.stores import JobOutputStore
from sublet.lazy_dataclass import dataclass
from sublet.values import NS_PER_S

if TYPE_CHECKING:
    from sublet.client.lease import Lease
    from sublet.compute.futures import CallFuture

AHEAD: Final = 2
"""Batches that a worker has at once: the next is there when one is done."""
LONG_NS: Final = 50_000_000
"""Chunks that take as long are given out one by one, and so is the first: what waited behind one on its worker
would wait while other leases have nothing to do. And when a lease has nothing to do, what waits behind a chunk
that takes as long is taken back for it."""
SEEN_NS: Final = 5_000_000
"""After that a worker that was told to begin no further chunk has seen it."""
BATCH_FOR_NS: Final = 200_000_000
"""A batch has as many chunks as take about so long. To send one and to take its results costs this process, the worker
and the kernel about 2 ms where all cores are busy, which is then a hundredth."""
BATCH_LEAST_NS: Final = 2_000_000
"""A batch is not made smaller than what takes about so long, since it costs as much: the last chunks go out in a few
batches, and one lease works at most so much longer than the others."""
BATCH_MAX: Final = 4096
GROWTH: Final = 4
"""So many times as large is the next batch at most. While batches are small each of them waits for this process."""
LINGER_S: Final = 5.0
"""How long a lease without a chunk is kept while more chunks may come."""
PUBLISH_BYTES: Final = 64 << 20
"""So many bytes of results are published without waiting for more."""
WINDOW_MAX: Final = 1 << 16
HISTORY_MAX: Final = 4096
"""Points of the picture; when there are more, every second one goes."""
_FOR_EVER_S: Final = 3600.0
_STATE_VERSION: Final = 1


class Delivered(NamedTuple):
    """Finished chunks, for the caller."""

    indexes: Sequence[int]
    """Their positions in the input."""
    keys: Sequence[ChunkId]
    results: Sequence[bytes] | None
    """None where the store had them already, or where one failed."""
    failure: ChunkFailed | None = None
    """Of one chunk, which has no result."""


class Pool(Protocol):
    """Where leases come from. `sublet.jobs.leases.LeasePool` is the real one."""

    def want(self, needs: Needs, count: int) -> None:
        """So many leases of this size are of use now, held ones included."""

    def remove(self, needs: Needs, lease: Lease) -> None:
        """One has ended by itself."""

    def give_back(self, leases: Sequence[tuple[Needs, Lease]]) -> None:
        """These have nothing to do any more."""

    def close(self) -> None:
        """Give all back. Harmless twice."""


PoolMaker = Callable[[Callable[[Needs, "Lease"], object], Callable[[Needs, SubletError, bool], object]], Pool]
"""Makes a pool, given the receivers of leases and of refusals."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One lease and what its worker has."""

    needs: Needs
    lease: Lease
    key: str
    is_ready: bool = False
    is_leaving: bool = False
    """No new chunk begins on it."""
    under_way: dict[int, tuple[ChunkBatch, CallFuture]] = field(default_factory=dict)
    idle_ns: int = 0
    """Since when it has nothing to do, or when it brought something last."""
    withheld_ns: int | None = None
    """Since when its worker begins no further chunk of what it has."""


class _Pace:
    """How long chunks of one size take, and so how many go together."""

    def __init__(self) -> None:
        self.size = 1
        self.least = 1
        self.ahead = 1
        self.singles = 0
        """So many chunks go one by one: among them is one that cannot be sent."""

    def restart(self) -> None:
        self.size = self.least = self.ahead = 1

    def adapt(self, each_ns: int) -> None:
        self.size = max(1, min(GROWTH * self.size, BATCH_MAX, BATCH_FOR_NS // max(1, each_ns)))
        self.least = max(1, BATCH_LEAST_NS // max(1, each_ns))
        self.ahead = AHEAD if each_ns < LONG_NS else 1

    def batch(self, ready: int, leases: int) -> int:
        """How many of the chunks that are ready go together, to one of so many leases."""
        return min(self.size, max(self.least, -(-ready // (AHEAD * max(1, leases)))))


class RunningJob:
    """A job that runs. Its methods may be called from any thread; ``deliver`` is called on the job's own."""

    def __init__(
        self,
        core: Coordinator,
        make_pool: PoolMaker,
        deliver: Callable[[list[Delivered]], object],
        *,
        store: JobOutputStore | None = None,
        want: int = 64,
        options: Options | None = None,
        linger_s: float = LINGER_S,
        clock: Clock | None = None,
        phase: str = "",
        admit: Callable[[int], bool] | None = None,
        on_events: Callable[[Sequence[JobEvent]], object] | None = None,
    ) -> None:
        """``admit`` is asked when the chunk at a position is about to go to a worker, and may say that it is not wanted
        any more."""
        self.core = core
        self.phase = phase
        self._admit = admit
        self.error: BaseException | None = None
        """What ended the job as a whole: the store failed, or this thread did."""
        self.metrics = Metrics()
        self.leases_most = 0
        self.history: list[tuple[int, int, int]] = []
        """(time, leases held, chunks done), for the picture."""
        self.began_ns = 0
        self._deliver = deliver
        self._store = store
        self._stored: object = store if store is not None and (core.keeps_ids or len(store)) else ()
        """Where a chunk may have a result already: if no id comes twice, not in a store that was empty."""
        self._want = want
        self._options = Options() if options is None else options
        self._linger_ns = round(linger_s * NS_PER_S)
        self._clock = SystemClock() if clock is None else clock
        self.began_ns = self._clock.now_ns()
        self._on_events = on_events
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._slots: dict[str, _Slot] = {}
        self._paces: dict[Needs, _Pace] = {}
        self._failures_delivered = 0
        """Failures that were delivered."""
        self._held_back: list[tuple[Works, Sequence[bytes]]] = []
        """Results that are put, and not published."""
        self._held_back_bytes = 0
        self._unpublished = 0
        """Chunks whose results are put, and not published."""
        self._publish_at_ns: int | None = None
        self._is_publishing = False
        self._is_store_lost = False
        """It failed to take results in, or to publish them, and is not tried again."""
        self._publisher: threading.Thread | None = None
        self._is_closed = False
        self._posted = 0
        """Times that chunks or a phase were given, and below, taken in: until these are equal nothing is over."""
        self._answered = 0
        self._fed = 0
        self._taken_in = 0
        """Chunks of those that were fed that the core knows."""
        self._over = threading.Event()
        self._ended = threading.Event()
        self._pool = make_pool(
            lambda needs, lease: self._post(lambda: self._add_lease(needs, lease)),
            lambda needs, error, final: self._post(lambda: self._refused(needs, error, final)),
        )
        start_thread("burst", self._run, failed=self._thread_failed)

    # ---- from any thread

    def feed(self, works: Works, contents: Sequence[bytes] | None = None) -> None:
        """More chunks. ``InvalidRequest`` of theirs ends the job, as it would if they were refused here."""
        self._posted += 1
        self._fed += len(works)
        self._over.clear()

        def add() -> None:
            self._answered += 1
            self._add(works, contents)

        self._post(add)

    def complete(self) -> None:
        """No more chunks will come."""

        def complete() -> None:
            self.core.complete()  # of the phase that runs when its turn comes

        self._post(complete)

    def next_phase(self, core: Coordinator, phase: str) -> None:
        """Go on with other chunks, on the same leases. Only when the last phase is over."""
        self._posted += 1
        self._over.clear()

        def begin() -> None:
            self._answered += 1
            self.core, self.phase, self._failures_delivered = core, phase, 0
            self._note("phase", detail=phase)

        self._post(begin)

    def stop(self, reason: FailReason = FailReason.CANCELLED) -> None:
        """Begin nothing new, and do not wait for what executes."""

        def end() -> None:
            self.core.stop(reason)
            self._abandon(self._now())

        self._post(end)

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Wait until every chunk is finished, or the job has ended as a whole."""
        return self._over.wait(timeout_s)

    def close(self) -> None:
        """Stop, publish what is put, and give all leases back. Harmless twice."""
        if not self._is_closed:
            self._is_closed = True
            self._post(_nothing)
        self._ended.wait()
        self._pool.close()
        if self._slots:
            self._slots.clear()
            self.metrics.cpu_leases_active = 0
            self.history.append((self._now(), 0, self.metrics.chunks_done))

    @property
    def leases(self) -> int:
        """How many are held now."""
        return len(self._slots)

    def window(self, at_least: int = 0, *, grows: bool = True) -> int:
        """How many chunks may be fed and not consumed: four times what the leases are given at once, so that none waits
        for the next, and the same for one more lease as long as fewer are held than wanted; beside them what only waits
        to be published. ``at_least``: of an input that costs nothing to read. Without ``grows`` as if each lease were
        given one chunk at once: while nothing is consumed, nothing is read for larger batches."""
        slots = list(self._slots.values())
        paces = [self._paces.get(slot.needs) if grows else None for slot in slots]
        at_once = sum(1 if pace is None else pace.size * pace.ahead for pace in paces) + (len(slots) < self._want)
        return max(at_least, min(WINDOW_MAX, 4 * at_once)) + self._unpublished

    @property
    def backlog(self) -> int:
        """Chunks that were fed and are not finished."""
        return self._fed - self._taken_in + self.core.outstanding

    @property
    def is_stopped(self) -> bool:
        """Whether nothing new is begun any more."""
        return self.error is not None or self.core.stopped is not None

    # ---- the job's own thread

    def _post(self, what: Callable[[], object]) -> None:
        self._events.put(what)

    def _now(self) -> int:
        return self._clock.now_ns()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._wait_for_events()
                if self.error is None:
                    self._step()
            self._last_step()
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            self._ended.set()
            self._over.set()
            self._deliver([])

    def _thread_failed(self, error: BaseException) -> None:
        self.error = self.error or error

    def _wait_for_events(self) -> None:
        try:
            what = self._events.get(timeout=self._patience_s())
        except queue.Empty:
            return
        self._carry_out(what)
        self._take_events()

    def _take_events(self) -> None:
        """All that have come."""
        while True:
            try:
                what = self._events.get_nowait()
            except queue.Empty:
                return
            self._carry_out(what)

    def _carry_out(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - it is raised to the caller that waits for the job
            self._failed(error)

    def _patience_s(self) -> float:
        moments = [self.core.next_due_ns(), self._publish_at_ns]
        moments += [slot.idle_ns + self._linger_ns for slot in self._slots.values() if not slot.under_way]
        moments += [self._stuck_ns(slot) for slot in self._with_idle_neighbours()]
        due_ns = min((moment for moment in moments if moment is not None), default=None)
        if due_ns is None:
            return _FOR_EVER_S
        return min(_FOR_EVER_S, max(0.001, (due_ns - self._now()) / NS_PER_S))

    def _step(self) -> None:
        now_ns = self._now()
        core = self.core
        core.tick(now_ns)
        if core.stopped is not None:
            self._abandon(now_ns)
        for slot in self._with_idle_neighbours():
            if now_ns >= self._stuck_ns(slot):
                self._take_back(slot, now_ns)
        for most in range(1, AHEAD + 1):  # idle leases come first
            if not core.has_ready:
                break
            for slot in list(self._slots.values()):
                self._hand_out(slot, most, now_ns)
        self._adjust_leases(now_ns)
        self._publish_if_due(now_ns)
        self._deliver_failures()
        self._record_events()
        if core.is_over and self._posted == self._answered:
            self._over.set()

    def _last_step(self) -> None:
        """What is put is published, whatever else ended; no thread publishes any more when this returns."""
        if self._publisher is not None:
            self._publisher.join()
        self._take_events()
        self._take_made(self._now())
        if self._held_back and self._store is not None and not self._is_store_lost:
            self._publish(self._held_back)
        self._deliver_failures()
        self._record_events()

    def _failed(self, error: BaseException) -> None:
        self.error = self.error or error
        self.core.stop(FailReason.CANCELLED)
        self._abandon(self._now())
        self._deliver_failures()
        self._over.set()
        self._deliver([])

    def _abandon(self, now_ns: int) -> None:
        """Begin nothing more, and wait for nothing that executes; what is finished of it has results all the same."""
        self._take_made(now_ns)
        self.core.abandon(now_ns)

    def _take_made(self, now_ns: int) -> None:
        """Results of batches under way: those chunks are finished, so no later run may execute them again."""
        if self._is_store_lost:
            return
        under_way = [one for slot in self._slots.values() for one in slot.under_way.values() if one[0].is_open]
        for _, future in under_way:
            future.withhold()
        for batch, future in under_way:
            if made := future.made():
                self._take_outcomes(batch, made[batch.done :], now_ns)

    def _add(self, works: Works, contents: Sequence[bytes] | None) -> None:
        found = self.core.add(works, contents, self._stored)
        self._taken_in += len(works)
        if found:
            self._note("skipped", len(found))
        self._deliver([Delivered(found.indexes, found.keys, None)] if found else [])  # copies are no backlog any more

    # ---- leases

    def _adjust_leases(self, now_ns: int) -> None:
        wanted = {} if self.core.stopped is not None else self.core.wanted()
        held: dict[Needs, int] = {}
        for slot in self._slots.values():
            held[slot.needs] = held.get(slot.needs, 0) + 1
        left, idle = self._want, list[_Slot]()
        for needs in {**held, **wanted}:
            count = min(wanted.get(needs, 0), max(1, left))
            left -= count
            linger = 0 if self.core.is_complete or self.core.stopped is not None else self._linger_ns
            for slot in [slot for slot in self._slots.values() if slot.needs == needs and not slot.under_way]:
                if held[needs] > count and (slot.is_ready or slot.is_leaving) and now_ns - slot.idle_ns >= linger:
                    held[needs] -= 1
                    idle.append(slot)
            self._pool.want(needs, max(count, held.get(needs, 0)) if count else 0)
        self._drop(*idle)

    def _add_lease(self, needs: Needs, lease: Lease) -> None:
        if self._is_closed or self.error is not None:
            self._pool.give_back([(needs, lease)])
            return
        slot = _Slot(needs, lease, str(lease.id), idle_ns=self._now())
        self._slots[slot.key] = slot
        self.leases_most = max(self.leases_most, len(self._slots))
        self._note("leases", len(self._slots))
        lease.on_end(lambda end: self._post(lambda: self._lease_ended(slot, end.reason)))
        lease.on_notice(lambda notice: self._post(lambda: self._stop_feeding(slot)))
        self._prepare(slot)
        self._deliver([])  # the window is larger now

    def _prepare(self, slot: _Slot) -> None:
        """Start its worker, beside everything else: it takes some milliseconds, and leases come by the dozen."""
        slot.is_ready = False

        def start() -> None:
            try:
                prepare_worker(slot.lease, self._options)
            except Exception as error:  # noqa: BLE001 - told to the job
                self._post(functools.partial(self._not_prepared, slot, error))
            else:
                self._post(functools.partial(self._ready, slot))

        try:
            start_thread("burst_worker", start)
        except RuntimeError:  # no room for a thread
            start()

    def _ready(self, slot: _Slot) -> None:
        slot.is_ready = True
        slot.idle_ns = self._now()

    def _not_prepared(self, slot: _Slot, error: BaseException) -> None:
        """A worker that cannot be started is the lease's fault, unless it says that it never can."""
        if cause_of(error) in (Cause.REFUSED, Cause.CAPACITY) and slot.lease.end is None:
            self._failed(error)
        self._drop(slot)

    def _stop_feeding(self, slot: _Slot) -> None:
        """It will be taken: what executes goes on, nothing new begins."""
        slot.is_leaving = True
        if not slot.under_way:
            self._drop(slot)

    def _drop(self, *slots: _Slot) -> None:
        held = [slot for slot in slots if self._slots.pop(slot.key, None) is not None]
        if held:
            self._pool.give_back([(slot.needs, slot.lease) for slot in held])
            self._note("leases", len(self._slots))

    def _lease_ended(self, slot: _Slot, reason: str) -> None:
        if self._slots.pop(slot.key, None) is not None:
            self._pool.remove(slot.needs, slot.lease)
            self._note("leases", len(self._slots), f"lease {slot.key} ended: {reason}")

    def _refused(self, needs: Needs, error: SubletError, final: bool) -> None:
        self._note("capacity", 0, str(error))
        if final:
            self._failed(error)

    # ---- chunks

    def _hand_out(self, slot: _Slot, most: int, now_ns: int) -> None:
        """Until it has so many batches, or there is nothing for it."""
        core = self.core
        most = min(most, self._pace(slot.needs).ahead)
        if slot.withheld_ns is not None:
            return
        while slot.is_ready and not slot.is_leaving and len(slot.under_way) < most:
            ready = core.ready(slot.needs)
            if not ready:
                return
            batch = core.take(slot.key, slot.needs, self._batch_size(slot.needs, ready), now_ns)
            if batch is None:
                return
            if self._admit is not None:
                is_wanted = [self._admit(index) for index in batch.works.indexes]
                if False in is_wanted:
                    core.drop(batch, is_wanted, now_ns)
                if not batch.is_open:
                    continue
            try:
                future = submit_many(slot.lease, self._options, batch.works.call, batch.works.items)
            except Exception as error:  # noqa: BLE001 - told to the core
                self._batch_lost(slot, batch, error, begun=False)
                if cause_of(error) is Cause.LEASE_LOST:
                    slot.is_leaving = True
                if slot.is_leaving and not slot.under_way:
                    self._drop(slot)
                return
            if not slot.under_way:
                slot.idle_ns = now_ns
            slot.under_way[batch.number] = (batch, future)
            future.add_done_callback(functools.partial(self._batch_done, slot, batch))

    def _with_idle_neighbours(self) -> list[_Slot]:
        """Leases on which chunks wait while another one of their size has nothing to do."""
        if self.core.stopped is not None:
            return []
        idle = {
            slot.needs
            for slot in self._slots.values()
            if slot.is_ready and not slot.is_leaving and not slot.under_way and not self.core.ready(slot.needs)
        }
        return [
            slot
            for slot in (self._slots.values() if idle else ())
            if slot.needs in idle and sum(len(batch.rest) for batch, _ in slot.under_way.values() if batch.is_open) > 1
        ]

    def _stuck_ns(self, slot: _Slot) -> int:
        """When something is to be done about it: it has brought nothing for so long."""
        return slot.idle_ns + LONG_NS if slot.withheld_ns is None else slot.withheld_ns + SEEN_NS

    def _take_back(self, slot: _Slot, now_ns: int) -> None:
        """Its worker is told to begin nothing more; once it has seen that, what it had not begun goes to others."""
        under_way = list(slot.under_way.values())
        if slot.withheld_ns is None:
            withheld = [future.withhold() for _, future in under_way]
            if all(withheld):
                slot.withheld_ns = now_ns
            else:  # one is just being sent
                slot.idle_ns = now_ns
            return
        slot.withheld_ns = now_ns  # of a batch that is begun just now it shows next time
        self._paces[slot.needs].restart()
        for batch, future in reversed(under_way):
            if (begun := future.begun()) is not None:
                self.core.take_back(batch, begun, now_ns)

    def _pace(self, needs: Needs) -> _Pace:
        pace = self._paces.get(needs)
        if pace is None:
            pace = self._paces[needs] = _Pace()
        return pace

    def _batch_size(self, needs: Needs, ready: int) -> int:
        pace = self._pace(needs)
        if pace.singles:
            pace.singles -= 1
            return 1
        if self._options.timeout_ns is not None:
            return 1
        slots = sum(slot.is_ready and slot.needs == needs for slot in self._slots.values())
        return pace.batch(ready, slots)

    def _batch_done(self, slot: _Slot, batch: ChunkBatch, future: CallFuture) -> None:
        """Called by the thread that listens to the worker."""
        self._post(lambda: self._take_results(slot, batch, future))

    def _take_results(self, slot: _Slot, batch: ChunkBatch, future: CallFuture) -> None:
        slot.under_way.pop(batch.number, None)
        now_ns = slot.idle_ns = self._now()
        if not slot.under_way:
            slot.withheld_ns = None
        for waiting, _ in slot.under_way.values():
            waiting.since_ns = now_ns  # it waited behind another until now
        if future.cancelled():
            self.core.lost(batch, RunFailed(Cause.WORKER_LOST), begun=False, now_ns=now_ns)
            return
        error = future.exception()
        if error is None:
            many: CallResults = future.result()
            count = len(many.results)
            self._take_outcomes(batch, many.results, now_ns)
            if count and many.took_ns:  # of a worker that died there is no time
                self._paces[slot.needs].adapt(many.took_ns // count)
                self.metrics.add_duration(many.took_ns, count)
            error = many.error
            if error is None:  # where there are fewer results than chunks the others were withheld
                self.core.take_back(batch, count, now_ns)
            else:
                self._batch_lost(slot, batch, error, begun=many.is_begun)
        else:
            self._batch_lost(slot, batch, error, begun=getattr(error, "begun", True))
        if slot.is_leaving and not slot.under_way:
            self._drop(slot)

    def _take_outcomes(self, batch: ChunkBatch, outcomes: list[Any], now_ns: int) -> None:
        if Raised in map(type, outcomes):
            outcomes = [self._judged(outcome) if type(outcome) is Raised else outcome for outcome in outcomes]
        fresh = self.core.results(batch, outcomes, now_ns)
        if not fresh:
            return
        if self._store is None:
            self._published(fresh)
            return
        try:
            for works, results in fresh:
                self._store.put(list(zip(works.keys, results, strict=True)))
            if is_published := self._store.publish_after <= 0:
                self._store.publish(self._state())
        except BaseException:
            self._is_store_lost = True
            raise
        if is_published:
            self._published(fresh)
            return
        self._held_back += fresh
        self._held_back_bytes += sum(sum(map(len, results)) for _, results in fresh)
        self._unpublished += sum(len(works) for works, _ in fresh)
        self._deliver([])  # nothing to deliver yet, but the window is larger
        if self._publish_at_ns is None:
            self._publish_at_ns = now_ns + round(self._store.publish_after * NS_PER_S)

    def _judged(self, raised: Raised) -> RunFailed:
        error = error_of(raised)
        if raised.refused:
            return RunFailed(Cause.REFUSED, error)
        return RunFailed(cause_of(error, self.core.policy.transient, in_chunk=True), error)

    def _batch_lost(self, slot: _Slot, batch: ChunkBatch, error: BaseException, *, begun: bool) -> None:
        now_ns = self._now()
        cause = cause_of(error)
        if not isinstance(error, SubletError):  # a KeyboardInterrupt that the chunk raised itself, most often
            self.core.results(batch, [RunFailed(Cause.RAISED, error)], now_ns)
            self.core.lost(batch, RunFailed(Cause.WORKER_LOST, error), begun=False, now_ns=now_ns)
        elif cause in (Cause.REFUSED, Cause.CAPACITY) and len(batch.rest) > 1:
            # one of them cannot be sent, or be put together there: which one shows when they go one by one
            self._paces[slot.needs].singles += len(batch.rest)
            self.core.lost(batch, RunFailed(Cause.WORKER_LOST, error), begun=False, now_ns=now_ns)
        else:
            self.core.lost(batch, RunFailed(cause, error), begun=begun, now_ns=now_ns)
        if cause in (Cause.WORKER_LOST, Cause.OUT_OF_MEMORY) and isinstance(error, SubletError):
            self._prepare(slot)

    # ---- results

    def _published(self, fresh: list[tuple[Works, Sequence[bytes]]]) -> None:
        self.core.published((works for works, _ in fresh), self._now())
        self._deliver([Delivered(works.indexes, works.keys, results) for works, results in fresh])

    def _publish_if_due(self, now_ns: int) -> None:
        if not self._held_back or self._is_publishing or self._publish_at_ns is None:
            return
        nothing_else = not self.core.wanted_more
        if nothing_else or self._held_back_bytes >= PUBLISH_BYTES or now_ns >= self._publish_at_ns:
            held, self._held_back = self._held_back, []
            self._held_back_bytes, self._publish_at_ns = 0, None
            self._is_publishing = True
            state = self._state()
            self._publisher = start_thread("burst_store", lambda: self._publish_beside(held, state))

    def _publish_beside(self, held: list[tuple[Works, Sequence[bytes]]], state: bytes) -> None:
        try:
            assert self._store is not None
            self._store.publish(state)
        except Exception as error:  # noqa: BLE001 - it ends the job
            self._post(functools.partial(self._not_published, error))
        else:
            self._post(functools.partial(self._publication_done, held))

    def _publication_done(self, held: list[tuple[Works, Sequence[bytes]]]) -> None:
        self._is_publishing = False
        count = sum(len(works) for works, _ in held)
        self._unpublished -= count
        self._note("saved", count)
        self._published(held)

    def _not_published(self, error: BaseException) -> None:
        self._is_publishing, self._is_store_lost = False, True
        self._failed(error)

    def _publish(self, held: list[tuple[Works, Sequence[bytes]]]) -> None:
        assert self._store is not None
        self._store.publish(self._state())
        self._published(held)
        self._held_back = []

    def _state(self) -> bytes:
        return save_state(self.phase, self.core.snapshot())

    # ---- telling

    def _deliver_failures(self) -> None:
        failures = self.core.failures
        if self._failures_delivered < len(failures):
            new = failures[self._failures_delivered :]
            self._failures_delivered = len(failures)
            self._deliver([Delivered((one.index,), (one.chunk,), None, one) for one in new])

    def _record_events(self) -> None:
        events = self.core.events
        if not events:
            return
        found = list(events)
        events.clear()
        for event in found:
            self.metrics.on_event(event)
        if any(event.what in ("leases", "done", "skipped", "failed") for event in found):
            self.history.append((found[-1].at_ns, len(self._slots), self.metrics.chunks_done))
            if len(self.history) > HISTORY_MAX:
                del self.history[1:-1:2]
        self.metrics.cpu_leases_active = len(self._slots)
        if self._on_events is not None:
            self._on_events(found)

    def _note(self, what: str, count: int = 1, detail: str = "") -> None:
        self.core.events.append(JobEvent(self._now(), what, count, detail))


def save_state(phase: str, chunks: Mapping[ChunkId, SavedChunk]) -> bytes:
    """The coordinator's own state, as it is saved with the results."""
    found = {key.hex(): [one.charges, one.memory, list(one.runs_ns)] for key, one in chunks.items()}
    return json.dumps({"version": _STATE_VERSION, "phase": phase, "chunks": found}, separators=(",", ":")).encode()


def load_state(data: bytes) -> tuple[str, dict[ChunkId, SavedChunk]]:
    """The phase that ran last, and what is known of its unfinished chunks."""
    if not data:
        return "", {}
    try:
        state = json.loads(data)
        version = state["version"]
        if version == _STATE_VERSION:
            chunks = {
                ChunkId(bytes.fromhex(key)): SavedChunk(charges=charges, memory=memory, runs_ns=tuple(runs_ns))
                for key, (charges, memory, runs_ns) in state["chunks"].items()
            }
            return str(state["phase"]), chunks
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest("the saved state of the job cannot be read", do="Run it in a new store.") from error
    raise InvalidRequest(
        f"the saved state of the job is of version {version}, and this Sublet reads version {_STATE_VERSION}",
        do="Finish the job with the Sublet that began it, or use a new store.",
    )


def _nothing() -> None:
    """Wakes the thread."""
