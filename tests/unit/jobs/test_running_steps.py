"""A running job step by step: its thread is the test, and workers, leases and the store do what the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from sublet.compute.outcomes import CallResults
from sublet.compute.worker_guest import Options
from sublet.errors import CapacityExceeded, CheckpointFailed, InvalidRequest, LeaseRevoked, Unauthorized, WorkerLost
from sublet.jobs import running
from sublet.jobs.chunks import Needs
from sublet.jobs.core import Coordinator, Works
from sublet.jobs.identity import ID_BYTES, ChunkId
from sublet.jobs.policy import RetryPolicy
from sublet.jobs.running import (
    HISTORY_MAX,
    LONG_NS,
    PUBLISH_BYTES,
    SEEN_NS,
    Delivered,
    Pool,
    RunningJob,
)
from sublet.jobs.states import FailReason
from sublet.jobs.stores import MemoryOutputStore
from sublet.testing import HeldClock
from sublet.values import NS_PER_S
from tests.unit.jobs.stage import FakeFuture

SMALL, LARGE = Needs(cores=1), Needs(cores=4)
LINGER_S = 5.0
MS: Final = 1_000_000


class Store(MemoryOutputStore):
    """One that publishes half a second later, and whose disk may fail."""

    publish_after = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0
        """To put something into it."""
        self.published = 0
        self.put_fails = False

    def put(self, results: Sequence[tuple[ChunkId, bytes]]) -> None:
        self.attempts += 1
        if self.put_fails:
            raise CheckpointFailed("an error of the disk")
        super().put(results)

    def publish(self, state: bytes) -> None:
        self.published += 1
        super().publish(state)


class Lease:
    """One lease of the job."""

    def __init__(self, name: str) -> None:
        self.id, self.end = name, None
        self.ends: Callable[[Any], object] = _nothing
        self.noticed: Callable[[Any], object] = _nothing

    def on_end(self, callback: Callable[[Any], object]) -> None:
        self.ends = callback

    def on_notice(self, callback: Callable[[Any], object]) -> None:
        self.noticed = callback


def _nothing(_: object) -> None:
    """No job listens."""


class Batch(FakeFuture):
    """What a worker was sent. The test says what came of it."""

    def __init__(self, lease: Lease, items: Sequence[Any]) -> None:
        super().__init__()
        self.lease, self.items = lease, list(items)
        self.can_withhold = True

    def withhold(self) -> bool:
        return super().withhold() and self.can_withhold

    def brings(self, count: int | None = None, *, each_ns: int = MS, error: BaseException | None = None) -> None:
        """Results of so many, or of all."""
        many = [b"r"] * (len(self.items) if count is None else count)
        self.set_result(CallResults(many, error, each_ns * len(many), is_begun=True))


class Bench:
    """The job, and all that is not it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, collect: bool = True, store: Store | None = None) -> None:
        self._patch, self._store = monkeypatch, store
        self.clock = HeldClock()
        self.batches: list[Batch] = []
        self.delivered: list[list[Delivered]] = []
        self.wanted: dict[Needs, int] = {}
        self.given_back: list[str] = []
        self.removed: list[str] = []
        self.prepared: list[str] = []
        self.preparing: Callable[[Lease], None] = _nothing
        self.submitting: Callable[[Lease], None] = _nothing
        self.publications: list[Callable[[], object]] = []
        self.has_threads = True
        self._granted = 0
        self.core = self.made()
        monkeypatch.setattr(running, "start_thread", self._start)
        monkeypatch.setattr(running, "submit_many", self._submit)
        monkeypatch.setattr(running, "prepare_worker", self._prepare)

    def made(self) -> Coordinator:
        policy = RetryPolicy(initial_backoff=0, max_backoff=0, jitter=0)
        return Coordinator(policy, collect=True, chance=lambda: 0.5, keeps_ids=False)

    def job(self, *, want: int = 2, admit: Callable[[int], bool] | None = None, **options: Any) -> RunningJob:
        self.running = RunningJob(
            self.core,
            self._make_pool,
            self.delivered.append,
            store=self._store,
            want=want,
            options=Options(**options),
            linger_s=LINGER_S,
            clock=self.clock,
            admit=admit,
        )
        return self.running

    # ---- threads and workers

    def _start(self, name: str, work: Callable[[], object], **_: object) -> object:
        if not self.has_threads:
            raise RuntimeError("can't start new thread")
        if name == "burst_worker":
            work()
        elif name == "burst_store":
            self.publications.append(work)
        return SimpleNamespace(join=lambda: None)

    def _prepare(self, lease: Lease, options: object) -> None:
        self.prepared.append(lease.id)
        self.preparing(lease)

    def _submit(self, lease: Lease, options: object, call: object, items: Sequence[Any]) -> Batch:
        self.submitting(lease)
        batch = Batch(lease, items)
        self.batches.append(batch)
        return batch

    # ---- leases

    def _make_pool(self, on_lease: Callable[[Needs, Any], object], on_refusal: object) -> Pool:
        self._on_lease = on_lease
        return cast("Pool", self)

    def want(self, needs: Needs, count: int) -> None:
        self.wanted[needs] = count

    def remove(self, needs: Needs, lease: Any) -> None:
        self.removed.append(lease.id)

    def give_back(self, leases: Sequence[tuple[Needs, Any]]) -> None:
        self.given_back += [lease.id for _, lease in leases]

    def close(self) -> None:
        """Of the pool."""

    def grant(self, needs: Needs = SMALL) -> Lease:
        self._granted += 1
        lease = Lease(f"l-{self._granted}")
        self._on_lease(needs, lease)
        self.turn()
        return lease

    # ---- the job

    def feed(self, count: int, needs: Needs = SMALL) -> None:
        first = self.running._fed
        keys = [ChunkId((first + number).to_bytes(ID_BYTES, "big")) for number in range(count)]
        indexes = list(range(first, first + count))
        self.running.feed(Works(keys, indexes, indexes, "call", needs))
        self.turn()

    def turn(self) -> None:
        """What has come is taken in, and a step is taken."""
        self.running._take_events()
        if self.running.error is None:
            self.running._step()

    def wait(self, ns: int) -> None:
        self.clock.advance_ns(ns)
        self.turn()

    def brings(self, *, each_ns: int = MS) -> None:
        """The oldest batch, all of it."""
        self.open.pop(0).brings(each_ns=each_ns)
        self.turn()

    @property
    def open(self) -> list[Batch]:
        return [batch for batch in self.batches if not batch.done()]

    @property
    def failures(self) -> list[tuple[int, FailReason]]:
        return [
            (one.failure.index, one.failure.reason)
            for some in self.delivered
            for one in some
            if one.failure is not None
        ]

    def is_over(self) -> bool:
        return self.running.wait_over(0)

    def ends(self) -> None:
        """As its thread ends when it is closed."""
        self.running._is_closed = True
        self.running._run()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


# ---- how many go out


def test_idle_leases_come_first(bench: Bench) -> None:
    """Before another one has two batches."""
    bench.job()
    leases = [bench.grant(), bench.grant()]
    bench.feed(2)
    for _ in leases:
        bench.brings(each_ns=10 * MS)
    bench.feed(2)
    assert [batch.lease for batch in bench.open] == leases
    bench.feed(2)
    assert [batch.lease for batch in bench.open] == leases * 2, "then two each"


def test_nothing_waits_behind_a_chunk_that_takes_long(bench: Bench) -> None:
    bench.job()
    bench.grant()
    bench.feed(5)
    bench.brings(each_ns=LONG_NS)
    assert len(bench.open) == 1
    bench.brings(each_ns=LONG_NS - 1)
    assert len(bench.open) == 2


def test_chunks_that_are_bounded_in_time_go_one_by_one(bench: Bench) -> None:
    """Else the time of one would be that of others."""
    bench.job(timeout_ns=NS_PER_S)
    bench.grant()
    bench.feed(100)
    for _ in range(3):
        bench.brings()
    assert [len(batch.items) for batch in bench.batches] == [1] * len(bench.batches)


def test_a_worker_that_says_no_time_says_nothing_of_the_size_of_batches(bench: Bench) -> None:
    bench.job()
    bench.grant()
    bench.feed(100)
    bench.brings(each_ns=0)
    assert {len(batch.items) for batch in bench.batches} == {1}


def test_of_a_batch_that_cannot_be_sent_each_chunk_is_tried_by_itself(bench: Bench) -> None:
    """And so shows which one it is; the others have their results."""
    bench.job()
    bench.grant()
    bench.feed(60)
    while len(bench.open[0].items) == 1:
        bench.brings()
    refused = bench.open[0]
    sent = len(bench.batches)
    refused.set_exception(Unauthorized("it cannot be put together there"))
    bench.turn()
    while bench.open:
        if bench.open[0].items == refused.items[1:2]:
            bench.open[0].set_exception(Unauthorized("it cannot be put together there"))
            bench.turn()
        else:
            bench.brings()
    singles = [batch.items for batch in bench.batches[sent:] if set(batch.items) & set(refused.items)]
    assert singles == [[item] for item in refused.items]
    assert bench.failures == [(refused.items[1], FailReason.REFUSED)]


# ---- what one lease has and another could do


def stuck(bench: Bench) -> tuple[Lease, Lease, Batch, Batch]:
    """The first lease has brought nothing since it was sent two batches, and the second has nothing to do."""
    bench.job()
    first = bench.grant()
    bench.feed(1)
    bench.brings()
    bench.wait(NS_PER_S)
    bench.feed(8)
    one, other = bench.open
    assert (one.lease, other.lease) == (first, first)
    assert one.items + other.items == [1, 2, 3, 4, 5, 6]
    second = bench.grant()
    assert bench.open[-1].items == [7, 8]
    bench.open[-1].brings()
    bench.turn()
    assert not bench.core.ready(SMALL)
    return first, second, one, other


def test_what_waits_behind_a_long_chunk_goes_to_a_lease_that_has_nothing_to_do(bench: Bench) -> None:
    """Its worker is told first to begin no more, and has seen that a little later. They keep their order, and go one
    by one, since it is not known any more how long they take."""
    first, second, one, other = stuck(bench)
    one.items_begun = 1
    sent = len(bench.batches)
    assert bench.running._patience_s() == pytest.approx(LONG_NS / NS_PER_S)
    bench.wait(LONG_NS - 1)
    assert [batch.is_withheld for batch in (one, other)] == [False, False]
    bench.wait(1)
    assert [batch.is_withheld for batch in (one, other)] == [True, True]
    assert len(bench.batches) == sent, "not before its worker has seen it"
    bench.wait(SEEN_NS)
    assert [(batch.lease, batch.items) for batch in bench.batches[sent:]] == [(second, [2])], "it may take as long"
    bench.open[-1].brings()
    bench.turn()
    assert bench.batches[sent + 1].items[0] == 3
    bench.feed(4)
    one.brings(1)
    bench.turn()
    assert {batch.lease for batch in bench.batches[sent:]} == {second}, "its worker would not begin them"
    other.brings(0)
    bench.turn()
    assert first in {batch.lease for batch in bench.open}, "it has chunks again"


def test_a_worker_that_has_begun_more_meanwhile_is_looked_at_again_a_little_later(bench: Bench) -> None:
    _, second, one, _ = stuck(bench)
    one.items_begun = 2
    bench.wait(LONG_NS)
    bench.wait(SEEN_NS)
    while any(batch.lease is second for batch in bench.open):
        next(batch for batch in bench.open if batch.lease is second).brings()
        bench.turn()
    assert bench.running._patience_s() == pytest.approx(SEEN_NS / NS_PER_S)


def test_a_worker_that_is_just_being_sent_a_batch_is_told_later(bench: Bench) -> None:
    _, second, one, other = stuck(bench)
    one.can_withhold = False
    sent = len(bench.batches)
    bench.wait(LONG_NS)
    one.can_withhold = True
    bench.wait(SEEN_NS)
    assert len(bench.batches) == sent, "it was not told yet"
    bench.wait(LONG_NS)
    bench.wait(SEEN_NS)
    assert {batch.lease for batch in bench.batches[sent:]} == {second}
    assert other.is_withheld


# ---- leases


def test_leases_are_wanted_of_each_size_and_in_all_as_many_as_may_be(bench: Bench) -> None:
    bench.job(want=2)
    bench.feed(5)
    bench.feed(5, LARGE)
    assert bench.wanted == {SMALL: 2, LARGE: 1}


def test_a_lease_without_a_chunk_is_kept_while_more_may_come_and_then_given_back(bench: Bench) -> None:
    bench.job(want=2)
    leases = [bench.grant(), bench.grant()]
    bench.feed(2)
    bench.brings()
    assert bench.running._patience_s() == pytest.approx(LINGER_S)
    assert bench.wanted == {SMALL: 2}, "what is held is wanted, or the pool would not count it"
    bench.wait(int(LINGER_S * NS_PER_S) - 1)
    assert not bench.given_back
    bench.wait(1)
    assert bench.given_back == [leases[0].id], "one has still a chunk"
    assert bench.wanted == {SMALL: 1}
    bench.running.complete()
    bench.brings()
    assert bench.given_back == [lease.id for lease in leases], "nothing more comes"
    assert bench.is_over()


def test_a_lease_whose_worker_begins_is_not_given_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of use in a moment, and another one would have to begin as well."""
    bench.job(want=2)
    monkeypatch.setattr(bench.running, "_ready", _nothing)
    bench.grant()
    bench.running.complete()
    bench.turn()
    assert not bench.given_back


def test_a_lease_that_comes_when_the_job_has_ended_is_given_back(bench: Bench) -> None:
    job = bench.job()
    job._post(lambda: (_ for _ in ()).throw(InvalidRequest("no such chunk")))
    bench.turn()
    bench.grant()
    assert bench.given_back == ["l-1"]
    assert not bench.prepared


def test_a_lease_with_notice_is_given_no_chunk_and_goes_when_it_has_none(bench: Bench) -> None:
    bench.job()
    busy, idle = bench.grant(), bench.grant()
    bench.feed(1)
    for lease in (busy, idle):
        lease.noticed(None)
    bench.turn()
    assert bench.given_back == [idle.id]
    bench.feed(5)
    assert len(bench.batches) == 1
    bench.brings()
    assert bench.given_back == [idle.id, busy.id]


def test_where_there_is_no_room_for_a_thread_a_worker_is_prepared_without_one(bench: Bench) -> None:
    bench.job()
    bench.has_threads = False
    bench.grant()
    assert bench.prepared == ["l-1"]
    bench.feed(1)
    assert len(bench.batches) == 1


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_worker_that_cannot_be_prepared_ends_the_job_unless_its_lease_has_ended(
    has_ended: bool, bench: Bench
) -> None:
    """In both cases the lease is given back."""
    bench.job()

    def cannot(lease: Lease) -> None:
        lease.end = cast("Any", SimpleNamespace(reason="revoked")) if has_ended else None
        raise CapacityExceeded("no room for an interpreter")

    bench.preparing = cannot
    bench.grant()
    assert bench.given_back == ["l-1"]
    assert (bench.running.error is None) is has_ended


def test_a_lease_that_refuses_a_batch_because_it_has_ended_is_given_no_other(bench: Bench) -> None:
    bench.job()
    first = bench.grant()

    def refuses(lease: Lease) -> None:
        if lease is first:
            raise LeaseRevoked("taken")

    bench.submitting = refuses
    bench.feed(1)
    assert bench.given_back == [first.id]
    bench.grant()
    assert len(bench.batches) == 1, "it was not begun, and is not lost"
    assert not bench.failures


def test_a_worker_that_died_is_started_anew(bench: Bench) -> None:
    bench.job()
    bench.grant()
    bench.feed(1)
    bench.open[0].brings(0, error=WorkerLost("killed"))
    bench.turn()
    assert bench.prepared == ["l-1", "l-1"]


# ---- chunks


def test_of_a_batch_of_which_nothing_is_wanted_any_more_none_is_sent(bench: Bench) -> None:
    bench.job(admit=lambda index: index >= 2)
    bench.grant()
    bench.feed(3)
    assert [batch.items for batch in bench.batches] == [[2]]


def test_a_chunk_that_interrupts_its_worker_has_failed_and_the_others_go_on(bench: Bench) -> None:
    bench.job()
    bench.grant()
    bench.feed(2)
    bench.open[0].set_exception(KeyboardInterrupt())
    bench.turn()
    assert bench.failures == [(0, FailReason.RAISED)]
    bench.brings()
    assert bench.core.counts.succeeded == 1


def test_a_batch_that_was_called_off_goes_out_again(bench: Bench) -> None:
    bench.job()
    bench.grant()
    bench.feed(1)
    bench.open[0].cancel()
    bench.turn()
    bench.turn()
    assert [batch.items for batch in bench.batches] == [[0], [0]]
    assert not bench.failures


def test_a_chunk_runs_since_the_one_before_it_on_its_worker_is_done(bench: Bench) -> None:
    """Not since it was sent: else one that waited there would seem to run too long."""
    bench.job()
    bench.grant()
    bench.feed(1)
    bench.brings(each_ns=10 * MS)
    bench.feed(2)
    assert [batch.items for batch in bench.open] == [[1], [2]]
    bench.clock.advance_ns(NS_PER_S)
    bench.brings()
    (slot,) = bench.running._slots.values()
    assert [batch.since_ns for batch, _ in slot.under_way.values()] == [bench.clock.now_ns()]


# ---- the end, and what is waited for


def test_a_job_that_is_fed_again_is_not_over(bench: Bench) -> None:
    bench.job()
    bench.grant()
    bench.running.complete()
    bench.turn()
    assert bench.is_over()
    bench.core.is_complete = False
    bench.feed(1)
    assert not bench.is_over()


def test_a_phase_that_was_asked_for_is_waited_for_before_it_has_begun(bench: Bench) -> None:
    """The one before it is over, and a step of that is taken just now. Its failures are told as those before it."""
    bench.job()
    bench.grant()
    bench.feed(1)
    bench.open[0].set_exception(KeyboardInterrupt())
    bench.running.complete()
    bench.turn()
    assert bench.is_over()
    bench.running.next_phase(bench.made(), "second")
    bench.running._step()
    assert not bench.is_over()
    bench.turn()
    bench.core = bench.running.core
    bench.feed(1)
    bench.grant()
    bench.open[0].set_exception(KeyboardInterrupt())
    bench.turn()
    assert [reason for _, reason in bench.failures] == [FailReason.RAISED] * 2


def test_a_job_that_is_stopped_waits_for_nothing_that_executes(bench: Bench) -> None:
    bench.job()
    bench.grant()
    bench.feed(2)
    bench.running.complete()
    bench.running.stop()
    bench.running._take_events()
    assert bench.core.outstanding == 0


def test_who_waits_for_results_is_woken_when_the_job_ends(bench: Bench) -> None:
    bench.job()
    bench.delivered.clear()
    bench.ends()
    assert bench.delivered[-1] == []
    assert len(bench.delivered) == 1


def test_what_is_made_when_a_mistake_ends_the_job_is_delivered(bench: Bench) -> None:
    job = bench.job()
    bench.grant()
    bench.feed(1)
    bench.open[0].results.append(b"r")
    job._post(lambda: (_ for _ in ()).throw(InvalidRequest("no such chunk")))
    bench.turn()
    assert [one.results for some in bench.delivered for one in some] == [[b"r"]]


def test_as_many_chunks_may_be_fed_as_the_next_lease_will_need_and_those_that_wait_for_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, store=Store())
    job = bench.job(want=2)
    assert job.window() == 4
    bench.grant()
    assert job.window() == 8
    bench.grant()
    assert job.window(grows=False) == 8
    bench.feed(1)
    before = job.window(grows=False)
    bench.brings()
    assert job.window(grows=False) == before + 1, "it has a result, which is not published"


def test_the_picture_keeps_so_many_points(bench: Bench) -> None:
    job = bench.job()
    job.history = [(number, 0, 0) for number in range(HISTORY_MAX)]
    job._note("leases", 1)
    job._record_events()
    assert job.history[0] == (0, 0, 0)
    assert len(job.history) <= HISTORY_MAX // 2 + 2
    assert job.history[-1][0] == bench.clock.now_ns()


# ---- the store


def stored(monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, Store]:
    store = Store()
    bench = Bench(monkeypatch, store=store)
    bench.job()
    bench.grant()
    return bench, store


def test_results_wait_for_others_and_are_published_together_one_publication_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, store = stored(monkeypatch)
    bench.feed(6)
    bench.brings()
    assert not bench.publications
    bench.wait(NS_PER_S // 2)
    assert len(bench.publications) == 1
    bench.brings()
    bench.wait(NS_PER_S)
    assert len(bench.publications) == 1, "the next one waits for it"
    window = bench.running.window(grows=False)
    bench.publications.pop()()
    bench.turn()
    assert store.published == 1
    assert bench.running.window(grows=False) < window
    assert len(bench.publications) == 1


def test_many_bytes_are_published_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PUBLISH_BYTES", 1)
    assert PUBLISH_BYTES > 1
    bench, _ = stored(monkeypatch)
    bench.feed(6)
    bench.brings()
    assert len(bench.publications) == 1


@pytest.mark.parametrize("what", ["put", "publish"])
def test_a_store_that_failed_is_not_tried_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had may be half written; and each attempt may take as long as a disk that hangs."""
    bench, store = stored(monkeypatch)
    bench.feed(12)
    bench.brings()
    if what == "put":
        bench.open[1].results.append(b"r")
        store.put_fails = True
        bench.brings()
        store.put_fails = False
    else:
        bench.wait(NS_PER_S)
        bench.brings()
        bench.open[0].results.append(b"r")

        def fails(state: bytes) -> None:
            raise CheckpointFailed("an error of the disk")

        with monkeypatch.context() as patch:
            patch.setattr(store, "publish", fails)
            bench.publications.pop()()
        bench.turn()
    assert isinstance(bench.running.error, CheckpointFailed)
    bench.ends()
    assert store.published == 0
    assert store.attempts == 2
