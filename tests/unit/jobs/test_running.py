"""Jobs from end to end on leases that are threads: map, coordinator, phases, executor."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future
from dataclasses import dataclass
from typing import Any

import pytest

from sublet.client.fabric import Fabric
from sublet.errors import CapacityExceeded, InvalidRequest, JobFailed, LeaseRevoked, Unpicklable
from sublet.jobs import (
    Chunk,
    ChunkFailed,
    Executor,
    JobCoordinator,
    MemoryOutputStore,
    Outputs,
    Phase,
    RetryPolicy,
    coordinator,
    executor,
    load_result,
    mapping,
    running,
    session,
)
from sublet.jobs import map as job_map
from sublet.jobs.chunks import Needs
from sublet.jobs.core import Coordinator
from sublet.jobs.identity import ChunkId
from sublet.jobs.running import RunningJob
from sublet.jobs.states import FailReason
from sublet.testing import HeldClock
from tests.traces import until
from tests.unit.jobs.stage import FakeLease, FakePool, pool

__all__ = ["pool"]

AT_ONCE = RetryPolicy(initial_backoff=0, max_backoff=0)
LONG_S = 30


LET_GO = threading.Event()


def stuck_at_zero(x: int) -> int:
    if x == 0:
        LET_GO.wait(LONG_S)
    return x


def square(x: int) -> int:
    return x * x


def fails_at_three(x: int) -> int:
    if x == 3:
        raise ValueError("three")
    return x


class Numbers:
    """A chunk of a user's own class."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def chunk_id(self) -> bytes:
        return f"{self.first:08d}-{self.last:08d}".encode()

    def to_bytes(self) -> bytes:
        return f"{self.first} {self.last}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Numbers:
        return cls(*map(int, data.split()))


def add_up(data: bytes) -> bytes:
    numbers = Numbers.from_bytes(data)
    return b"%d" % sum(range(numbers.first, numbers.last))


def total(outputs: Outputs) -> int:
    return sum(map(int, outputs))


# ---- map


@pytest.mark.parametrize("ordered", [True, False])
def test_map_gives_what_the_built_in_gives(pool: FakePool, ordered: bool) -> None:
    found = list(job_map(square, range(1000), ordered=ordered, make_pool=pool.make))
    assert sorted(found) == [x * x for x in range(1000)]
    assert ordered is False or found == sorted(found)
    assert pool.is_closed


def test_map_acquires_nothing_before_the_first_result_and_nothing_for_nothing(pool: FakePool) -> None:
    results = job_map(square, range(3), make_pool=pool.make)
    assert pool.made == 0
    assert next(results) == 0
    assert pool.made > 0
    results.close()
    assert pool.is_closed
    empty = FakePool()
    assert list(job_map(square, [], make_pool=empty.make)) == []
    assert empty._on_lease is None, "there is no pool either"


def test_map_reads_items_only_as_results_are_consumed(pool: FakePool) -> None:
    """An infinite iterable passes in bounded memory. Results count as consumed some at once."""
    read = itertools.count()
    results = job_map(square, read, want=2, make_pool=pool.make)
    for expected in range(500):
        assert next(results) == expected * expected
    assert next(read) < 500 + mapping.TOP_UP_EVERY + running.WINDOW_MAX
    results.close()


def test_a_map_over_an_iterable_reads_no_more_than_its_leases_need(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four items for each lease; of a list at least twice as many as leases are wanted."""
    monkeypatch.setattr(mapping, "READ_FOR_S", LONG_S)  # a pause while it reads would leave the last item unread
    LET_GO.clear()
    lazily, wide = itertools.count(1), iter(range(1, 1000))
    all_read = threading.Event()

    def counted() -> Iterator[int]:
        for n in lazily:
            if n == 8:
                all_read.set()
            yield 0

    results = job_map(stuck_at_zero, counted(), want=2, make_pool=pool.make)
    other = FakePool()
    sized = job_map(stuck_at_zero, _Counted(wide), want=20, make_pool=other.make)
    try:
        for one in (results, sized):
            stopper = threading.Thread(target=lambda one=one: all_read.wait(LONG_S) and one.stop_soon())
            stopper.start()
            assert next(one, None) is None
            stopper.join()
        assert next(lazily) == 9
        assert next(wide) == 41
    finally:
        LET_GO.set()
        results.close()
        sized.close()


class _Counted:
    """As long as a list, and it tells how much of it was read."""

    def __init__(self, read: Iterator[int]) -> None:
        self._read = read

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[int]:
        return (0 for _ in self._read)


def test_results_are_handed_out_while_a_slow_iterable_is_read(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item is read only once the chunk before it was executed: so it went to a worker alone."""
    monkeypatch.setattr(mapping, "READ_FOR_S", 0.0)
    executed = [threading.Event() for _ in range(100)]
    read = [0]

    def slow() -> Iterator[int]:
        for n in range(100):
            if n:
                assert executed[n - 1].wait(LONG_S)
            read[0] = n + 1
            yield n

    def execute(n: int) -> int:
        executed[n].set()
        return n

    results = job_map(execute, slow(), want=2, make_pool=pool.make)
    assert next(results) == 0
    assert read[0] < 50
    assert list(results) == list(range(1, 100))


def test_map_raises_the_chunks_own_error_and_gives_the_leases_back(pool: FakePool) -> None:
    with pytest.raises(ValueError, match="three") as caught:
        list(job_map(fails_at_three, range(10), make_pool=pool.make))
    assert any("This was chunk 3" in note for note in caught.value.__notes__)
    assert pool.is_closed


def test_map_that_collects_puts_the_failure_in_its_place(pool: FakePool) -> None:
    found: list[Any] = list(job_map(fails_at_three, range(6), errors="collect", make_pool=pool.make))
    assert [one for one in found if not isinstance(one, ChunkFailed)] == [0, 1, 2, 4, 5]
    assert isinstance(found[3], ChunkFailed)
    assert found[3].reason is FailReason.RAISED


def test_equal_items_are_different_chunks_of_a_map(pool: FakePool) -> None:
    store = MemoryOutputStore()
    assert list(job_map(square, [7] * 100, store=store, make_pool=pool.make)) == [49] * 100
    assert len(store) == 100


def test_a_map_goes_on_with_what_its_store_has(pool: FakePool) -> None:
    store, ran = MemoryOutputStore(), []

    def noted(x: int) -> int:
        ran.append(x)
        return x

    first = job_map(noted, range(10), store=store, make_pool=pool.make)
    for _ in range(10):
        next(first)
    first.close()
    ran.clear()
    again = job_map(noted, range(12), store=store, make_pool=FakePool().make)
    assert list(again) == list(range(12))
    assert sorted(ran) == [10, 11]
    assert again.result is not None
    assert (again.result.chunks_skipped, again.result.chunks_succeeded) == (10, 2)


def test_a_worker_that_dies_costs_the_chunk_it_executed_and_no_other(pool: FakePool) -> None:
    pool.most = 1  # beside another one it might never come to so many chunks
    ran: list[int] = []
    died: list[int] = []

    def dies_once(lease: FakeLease) -> None:
        if not died:
            died.append(1)
            lease.lose_at = 7

    def noted(x: int) -> int:
        ran.append(x)
        return x

    pool.on_made = dies_once
    results = job_map(noted, range(200), policy=AT_ONCE, make_pool=pool.make)
    assert list(results) == list(range(200))
    assert sorted(ran) == list(range(200))
    assert results.result is not None
    assert results.result.retries == 1


def test_a_map_that_is_left_early_accounts_for_every_chunk_that_it_read(pool: FakePool) -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for n in itertools.count():
            read.append(n)
            yield n

    results = job_map(square, items(), make_pool=pool.make)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    results.close()
    assert results.result is not None
    assert results.result.chunks_succeeded + results.result.chunks_failed == len(read)
    assert {one.reason for one in results.result.failures} <= {FailReason.CANCELLED}


@dataclass(frozen=True)
class Burned:
    value: int
    fuel: int


class Tasklet:
    """As a WASM tasklet, its results say what fuel they used."""

    fuel = 1000

    def __call__(self, x: int) -> Burned:
        return Burned(x, 10 + x)


def test_the_fuel_of_tasklets_is_in_the_figures_of_their_map(pool: FakePool) -> None:
    results = job_map(Tasklet(), range(5), make_pool=pool.make)
    assert [one.value for one in results] == list(range(5))
    assert results.result is not None
    assert results.result.metrics.fuel == 5 * 10 + sum(range(5))


class CannotBeRead:
    def __reduce__(self) -> Any:
        return int, ("no number",)


class Exits:
    def __reduce__(self) -> Any:
        return sys.exit, ("as it is read",)


@pytest.mark.parametrize(
    ("make_result", "error", "text"), [(CannotBeRead, ValueError, "no number"), (Exits, SystemExit, "as it is read")]
)
def test_a_result_that_cannot_be_read_fails_its_future_alone(
    pool: FakePool, make_result: Any, error: type[BaseException], text: str
) -> None:
    with Executor(2, make_pool=pool.make) as executor:
        with pytest.raises(error, match=text):
            executor.submit(make_result).result(LONG_S)
        assert executor.submit(square, 3).result(LONG_S) == 9


def test_what_ends_a_job_is_what_its_futures_raise(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only that it was stopped."""

    def make(on_lease: Any, on_refusal: Any) -> Any:
        def want(needs: Needs, count: int) -> None:
            if count:
                on_refusal(needs, CapacityExceeded("more than any machine has"), True)

        monkeypatch.setattr(pool, "want", want)
        return pool

    executor = Executor(2, make_pool=make)
    future = executor.submit(square, 2)
    with pytest.raises(CapacityExceeded, match="more than any machine has"):
        future.result(LONG_S)
    with pytest.raises(BrokenExecutor, match="more than any machine has"):
        executor.submit(square, 3)
    executor.shutdown()


def test_a_mistake_on_the_jobs_thread_ends_all_futures(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of calls that it had not taken in yet."""

    def mistaken(self: Coordinator, *_: object) -> None:
        raise ZeroDivisionError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "add", mistaken)
        executor = Executor(2, make_pool=pool.make)
        future = executor.submit(square, 2)
        with pytest.raises(ZeroDivisionError, match="a mistake"):
            future.result(LONG_S)
    executor.shutdown()


def test_a_job_that_is_stopped_ends_without_a_lease_in_its_figures(pool: FakePool) -> None:
    results = job_map(square, itertools.count(), want=2, make_pool=pool.make)
    assert next(results) == 0
    results.close()
    assert results.result is not None
    assert results.result.leases_most > 0
    assert results.result.metrics.cpu_leases_active == 0
    assert results.result.history[-1][1] == 0


def test_an_executor_goes_on_after_a_worker_died(pool: FakePool) -> None:
    """A call that goes to a worker once more has a future that runs already."""
    pool.most = 1  # beside another one it might never come to so many calls

    def dies_once(lease: FakeLease) -> None:
        lease.lose_at = 7 if pool.made == 1 else None

    pool.on_made = dies_once
    with Executor(2, policy=AT_ONCE, make_pool=pool.make) as executor:
        assert list(executor.map(square, range(100))) == [x * x for x in range(100)]
    assert executor.result is not None
    assert executor.result.retries == 1


def test_as_many_long_chunks_as_leases_run_at_once(pool: FakePool) -> None:
    """None stands in line behind another one while a lease has nothing to do."""
    together = threading.Barrier(2)

    def meets(x: int) -> int:
        together.wait(LONG_S)
        return x

    assert list(job_map(meets, range(2), want=2, make_pool=pool.make)) == [0, 1]


def test_leases_that_are_taken_are_replaced_and_the_job_goes_on(pool: FakePool) -> None:
    def ends_soon(lease: FakeLease) -> None:
        if pool.made <= 6:
            lease.lose_at, lease.lost_as = 5, LeaseRevoked("preempted")

    pool.on_made = ends_soon
    results = job_map(square, range(300), policy=RetryPolicy(50, 0, 0), make_pool=pool.make)
    assert list(results) == [x * x for x in range(300)]
    assert pool.made > 6


def test_a_chunk_that_is_always_preempted_after_the_same_time_fails_with_that(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time counts from when its worker began it, whatever the worker made before."""
    clock = HeldClock()
    monkeypatch.setattr(session, "SystemClock", lambda: clock)

    def long(x: int) -> int:
        if x == 3:
            clock.advance("60s")
        return x

    def ends_in_the_middle(lease: FakeLease) -> None:
        lease.lose_after, lease.lost_as = 3, LeaseRevoked("preempted")

    pool.on_made = ends_in_the_middle
    found: list[Any] = list(job_map(long, range(6), errors="collect", policy=RetryPolicy(9, 0, 0), make_pool=pool.make))
    assert [one for one in found if not isinstance(one, ChunkFailed)] == [0, 1, 2, 4, 5]
    assert found[3].reason is FailReason.TOO_LONG
    assert "3 leases in a row ended when it had run for about 1m" in str(found[3])


def test_a_result_that_cannot_be_serialized_is_named(pool: FakePool) -> None:
    def lock(_: int) -> object:
        return threading.Lock()

    with pytest.raises(Unpicklable, match=r"the result, a _thread\.lock, cannot be serialized"):
        list(job_map(lock, [1], make_pool=pool.make))


def test_a_deadline_ends_a_job_whose_chunk_does_not(pool: FakePool) -> None:
    let_go = threading.Event()

    def waits(_: int) -> None:
        let_go.wait(LONG_S)

    try:
        with pytest.raises(JobFailed, match="deadline passed"):
            list(job_map(waits, range(3), deadline="100ms", make_pool=pool.make))
    finally:
        let_go.set()


@pytest.mark.parametrize(
    "given",
    [
        {"want": 0},
        {"want": "many"},
        {"cores": 0},
        {"memory": 8},
        {"errors": "ignore"},
        {"tier": "first"},
        {"name": "No Such Name"},
        {"deadline": -1},
        {"policy": 3},
        {"gpu": "1GiB", "memory": "1GiB"},
        {"fabric": "local"},
        {"store": {}},
        {"options": {"time": "1m"}},
        {"options": ["timeout"]},
        {"pay_priority": True},
        {"pay_priority": "yes", "gpu": "1GiB"},
    ],
)
def test_terms_that_cannot_be_are_refused_before_anything_is_acquired(pool: FakePool, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        job_map(square, range(3), make_pool=pool.make, **given)
    assert pool.made == 0


@pytest.mark.parametrize("items", [7, "text", None])
def test_what_is_no_iterable_is_refused(pool: FakePool, items: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be mapped over"):
        job_map(square, items, make_pool=pool.make)


class OfficeOfJobs(Fabric):
    """What a job asks its office, counted."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def bill(self, **_: Any) -> list[Any]:
        self.asked["bill"] += 1
        return []

    def close(self, patience: float = 0.0) -> None:
        self.asked["close"] += 1


@pytest.mark.parametrize("is_given", [False, True])
def test_a_job_asks_for_its_bill_once_and_closes_the_connection_that_it_made_and_no_other(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    office = OfficeOfJobs()
    monkeypatch.setattr(session, "connect", lambda: office)
    monkeypatch.setattr(session, "leases_left", lambda *_, **__: 0)
    monkeypatch.setattr(session, "LeasePool", lambda *_, on_lease, on_refusal, **__: pool.make(on_lease, on_refusal))
    terms: Any = {"fabric": office} if is_given else {}
    JobCoordinator(**terms).run([Numbers(0, 1)], MemoryOutputStore(), add_up, total)
    assert office.asked == ({"bill": 1} if is_given else {"bill": 1, "close": 1})


# ---- the coordinator


def test_the_coordinator_runs_the_recipes_four_arguments(pool: FakePool) -> None:
    chunks = [Numbers(first, first + 10) for first in range(0, 100, 10)]
    store = MemoryOutputStore()
    result = JobCoordinator(RetryPolicy(), make_pool=pool.make).run(chunks, store, add_up, total)
    assert result.aggregate == sum(range(100))
    assert (result.chunks_succeeded, result.chunks_failed, result.chunks_skipped) == (10, 0, 0)
    again = JobCoordinator(make_pool=FakePool().make).run(chunks, store, add_up, total)
    assert (again.aggregate, again.chunks_succeeded, again.chunks_skipped) == (sum(range(100)), 0, 10)


def test_the_same_chunk_twice_runs_once(pool: FakePool) -> None:
    chunks = [Numbers(0, 10), Numbers(0, 10), Numbers(10, 20)]
    result = JobCoordinator(make_pool=pool.make).run(chunks, MemoryOutputStore(), add_up, total)
    assert (result.aggregate, result.chunks_succeeded) == (sum(range(20)), 2)
    copies = itertools.repeat(Numbers(0, 10), 1000)
    result = JobCoordinator(make_pool=pool.make).run(copies, MemoryOutputStore(), add_up, total)
    assert (result.aggregate, result.chunks_succeeded) == (sum(range(10)), 1)


def test_the_coordinator_reads_chunks_only_as_others_are_finished(pool: FakePool) -> None:
    """Chunks that come without an end pass in bounded memory."""
    LET_GO.clear()
    timer = threading.Timer(0.3, LET_GO.set)
    ahead = [0]

    def chunks() -> Iterator[Chunk]:
        for n in range(500):
            if not LET_GO.is_set():
                ahead[0] = n
            yield Chunk(waits_unless_first, (n,))

    timer.start()
    result = JobCoordinator(make_pool=pool.make, want=2).run(chunks(), MemoryOutputStore(), None, len)
    timer.join()
    assert result.aggregate == 500
    assert ahead[0] < 200


class Copied:
    """Each copy differs from the one it was made of."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def __reduce__(self) -> tuple[object, ...]:
        return _next_copy, (self.n,)

    def __call__(self) -> int:
        return self.n


def _next_copy(n: int) -> Copied:
    return Copied(n + 1)


@pytest.mark.parametrize("kwargs", [{}, {"key": 1}])
def test_a_named_job_of_chunks_that_could_not_be_resumed_is_refused(pool: FakePool, kwargs: dict[str, int]) -> None:
    chunks = [Chunk(square, (1,)), Chunk(Copied(), (), kwargs)]
    with pytest.raises(InvalidRequest, match="another process could not compute the same id for the function of chunk"):
        JobCoordinator(make_pool=pool.make, name="named").run(chunks, MemoryOutputStore(), None, len)
    assert pool.made == 0


class Liar(Numbers):
    def chunk_id(self) -> bytes:
        return b"the same for all"


def test_a_named_map_that_could_not_be_resumed_is_refused(pool: FakePool) -> None:
    copied: Any = Copied()
    with pytest.raises(InvalidRequest, match="another process could not compute the same id for the function"):
        job_map(copied, range(3), name="named", store=MemoryOutputStore(), make_pool=pool.make)
    assert pool.made == 0


def test_a_job_of_many_functions_lets_go_of_those_whose_chunks_are_done(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "FUNCTIONS_MAX", 4)
    monkeypatch.setattr(running, "WINDOW_MAX", 20)
    alive: list[weakref.ref[Any]] = []
    most = 0

    def made(n: int) -> Callable[[], int]:
        return lambda: n

    def chunks() -> Iterator[Chunk]:
        nonlocal most
        for n in range(400):
            function = made(n)
            alive.append(weakref.ref(function))
            most = max(most, sum(one() is not None for one in alive))
            yield Chunk(function)
            del function

    result = JobCoordinator(make_pool=pool.make, want=2).run(chunks(), MemoryOutputStore(), None, len)
    assert result.aggregate == 400
    assert most < 200


FAILED_ONCE: list[int] = []


def fails_once(x: int) -> int:
    if x not in FAILED_ONCE:
        FAILED_ONCE.append(x)
        raise ConnectionError("not yet")
    return x


@pytest.mark.parametrize(("phase", "is_done"), [("phase one", False), ("renamed", True)])
def test_retries_that_an_earlier_run_used_count_in_their_phase_alone(pool: FakePool, phase: str, is_done: bool) -> None:
    FAILED_ONCE.clear()
    policy = RetryPolicy(1, 0, 0, transient=(ConnectionError,))
    chunk = Chunk(fails_once, (1,))
    store = MemoryOutputStore()
    store.begin("again")
    used = {chunk.chunk_id().hex(): [1, 0, []]}
    store.publish(json.dumps({"version": 1, "phase": "phase one", "chunks": used}).encode())
    job = JobCoordinator(policy, make_pool=pool.make, name="again", errors="collect")
    result = job.run_phases([Phase(name=phase, chunks=[chunk])], store, len)
    assert result.aggregate == int(is_done)


def test_one_id_with_two_contents_is_an_error_before_anything_runs(pool: FakePool) -> None:
    chunks: list[Any] = [Liar(0, 1), Liar(1, 2)]
    with pytest.raises(InvalidRequest, match="with another content"):
        JobCoordinator(make_pool=pool.make).run(chunks, MemoryOutputStore(), add_up, total)
    assert pool.made == 0
    far_apart = [Liar(0, 1), *(Numbers(n, n + 1) for n in range(coordinator.FEED)), Liar(1, 2)]
    with pytest.raises(InvalidRequest, match="Nothing was begun"):
        JobCoordinator(make_pool=pool.make).run(far_apart, MemoryOutputStore(), add_up, total)
    assert pool.made == 0
    store = MemoryOutputStore()
    with pytest.raises(InvalidRequest, match="with another content"):
        JobCoordinator(make_pool=pool.make).run(iter(chunks), store, add_up, total)
    assert len(store) <= 1


def test_phases_make_their_chunks_of_the_outputs_before(pool: FakePool) -> None:
    def reduce_chunks(outputs: Outputs) -> Iterator[Chunk]:
        values = [load_result(data) for data in outputs]
        for at in range(0, len(values), 5):
            yield Chunk(sum, (values[at : at + 5],))

    phases = [
        Phase(name="map", chunks=[Chunk(square, (n,)) for n in range(20)]),
        Phase(name="reduce", chunks=reduce_chunks),
    ]
    store = MemoryOutputStore()
    result = JobCoordinator(make_pool=pool.make).run_phases(
        phases, store, lambda outputs: sum(load_result(data) for data in outputs)
    )
    assert result.aggregate == sum(n * n for n in range(20))
    assert result.chunks_succeeded == 24


BROKEN: list[int] = []


def breaks_when_told(values: list[int]) -> int:
    if BROKEN and values[0] in BROKEN:
        raise ValueError("broken")
    return sum(values)


def test_a_job_resumes_in_the_middle_of_a_phase(pool: FakePool) -> None:
    """The map is stored, and so is the half of the reduce that was finished; only the rest runs again."""

    def groups(outputs: Outputs) -> list[Chunk]:
        values = [load_result(data) for data in outputs]
        return [Chunk(breaks_when_told, (values[at : at + 2],)) for at in range(0, len(values), 2)]

    phases = [
        Phase(name="map", chunks=[Chunk(square, (n,)) for n in range(8)]),
        Phase(name="reduce", chunks=groups),
    ]
    store = MemoryOutputStore()
    BROKEN[:] = [16]
    with pytest.raises(JobFailed, match="ValueError: broken"):
        JobCoordinator(make_pool=pool.make, name="resumed", want=1).run_phases(phases, store, len)
    assert 8 <= len(store) < 12
    had = len(store)
    BROKEN.clear()
    again = JobCoordinator(make_pool=FakePool().make, name="resumed", want=1)
    result = again.run_phases(phases, store, lambda outputs: sum(map(load_result, outputs)))
    assert result.aggregate == sum(n * n for n in range(8))
    assert (result.chunks_skipped, result.chunks_succeeded) == (had, 12 - had)
    with pytest.raises(InvalidRequest, match="has the results of job 'resumed', not of 'another'"):
        JobCoordinator(make_pool=FakePool().make, name="another").run_phases(phases, store, len)


def test_an_infinite_iterable_with_a_chunk_that_never_ends_stays_bounded(pool: FakePool) -> None:
    read = itertools.count()
    LET_GO.clear()
    results = job_map(stuck_at_zero, read, want=2, make_pool=pool.make)
    try:
        stopper = threading.Timer(0.3, results.stop_soon)
        stopper.start()
        assert next(results, None) is None
        assert next(read) < 1000
    finally:
        LET_GO.set()
        results.close()


def test_chunks_of_different_size_get_leases_of_their_own_size(pool: FakePool) -> None:
    chunks = [Chunk(square, (n,), cores=1 + 3 * (n % 2)) for n in range(10)]
    result = JobCoordinator(make_pool=pool.make).run(chunks, MemoryOutputStore(), None, len)
    assert result.aggregate == 10
    assert {lease.needs.cores for lease in pool.leases} == {1, 4}


def test_a_failed_chunk_stops_a_job_and_what_is_stored_stays(pool: FakePool) -> None:
    chunks = [Chunk(fails_at_three, (n,)) for n in range(6)]
    store = MemoryOutputStore()
    with pytest.raises(JobFailed, match=r"chunk 3 .*ValueError: three") as caught:
        JobCoordinator(make_pool=pool.make, want=1).run(chunks, store, None, len)
    assert caught.value.failures
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(store) >= 1


def test_a_failed_chunk_stops_a_job_whose_chunks_have_no_end(pool: FakePool) -> None:
    chunks = (Chunk(fails_at_three, (n,)) for n in itertools.count())
    with pytest.raises(JobFailed, match=r"chunk 3 .*ValueError: three"):
        JobCoordinator(make_pool=pool.make).run(chunks, MemoryOutputStore(), None, len)
    assert pool.is_closed


def test_a_job_that_collects_aggregates_the_results_that_there_are(pool: FakePool) -> None:
    chunks = [Chunk(fails_at_three, (n,)) for n in range(6)]
    job = JobCoordinator(make_pool=pool.make, errors="collect")
    result = job.run(chunks, MemoryOutputStore(), None, lambda outputs: [load_result(data) for data in outputs])
    assert result.aggregate == [0, 1, 2, 4, 5]
    assert (result.chunks_succeeded, [one.index for one in result.failures]) == (5, [3])


class Worded(Numbers):
    def to_bytes(self) -> bytes:
        return "words"  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("chunks", "exec_fn", "text"),
    [
        ([], add_up, "there are no chunks"),
        ([3], add_up, "item 0 is 3, which is no chunk"),
        ([Numbers(0, 1)], None, "has no function of its own"),
        (7, add_up, "7 holds no chunks"),
        ([Numbers(0, 1)], "f", "exec_fn is 'f'"),
        ([Worded(0, 1)], add_up, r"to_bytes\(\) of chunk 0 returned 'words'"),
    ],
)
def test_what_cannot_be_run_is_refused(pool: FakePool, chunks: Any, exec_fn: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        JobCoordinator(make_pool=pool.make).run(chunks, MemoryOutputStore(), exec_fn, total)
    assert pool.made == 0


def test_an_exec_fn_that_returns_no_bytes_fails_its_chunk(pool: FakePool) -> None:
    with pytest.raises(JobFailed, match="returned a int instead of bytes"):
        JobCoordinator(make_pool=pool.make).run([Numbers(0, 1)], MemoryOutputStore(), len, total)  # type: ignore[arg-type]


class FullStore(MemoryOutputStore):
    def publish(self, state: bytes) -> None:
        raise OSError(28, "No space left on device")


def test_a_store_that_fails_ends_the_job(pool: FakePool) -> None:
    with pytest.raises(OSError, match="No space left"):
        JobCoordinator(make_pool=pool.make).run([Numbers(0, 1)], FullStore(), add_up, total)
    assert pool.is_closed


class SlowStore(MemoryOutputStore):
    """Publishes many at once, as a store on disk does."""

    publish_after = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.put_first: dict[ChunkId, bytes] = {}
        self.publications = 0

    def put(self, results: Any) -> None:
        for chunk, data in results:
            self.put_first.setdefault(chunk, data)

    def publish(self, state: bytes) -> None:
        self.publications += 1
        super().put(list(self.put_first.items()))


def test_results_count_only_when_they_are_published(pool: FakePool) -> None:
    store = SlowStore()
    chunks = [Chunk(square, (n,)) for n in range(300)]
    result = JobCoordinator(make_pool=pool.make).run(chunks, store, None, len)
    assert (result.aggregate, len(store)) == (300, 300)
    assert store.publications < 300


class LateStore(SlowStore):
    """Publishes when it must, and not before."""

    publish_after = 3600.0


class SecondOfBatch:
    """A function that comes to a stand at the second item of a batch: the first is finished, and was not sent."""

    def __init__(self, pool: FakePool) -> None:
        self._pool = pool
        self.ran: list[int] = []
        self.stands, self.go_on = threading.Event(), threading.Event()

    def __reduce__(self) -> str:  # what it counts as in the ids of its chunks
        return "second_of_batch"

    def __call__(self, x: int) -> int:
        self.ran.append(x)
        if self._pool.leases[0].executing.items_begun > 1:
            self.stands.set()
            self.go_on.wait(LONG_S)
        return x

    def finished(self, store: MemoryOutputStore) -> list[int]:
        """What the store has, when the job was stopped."""
        assert self.stands.is_set()
        return sorted(load_result(store.get(chunk)) for chunk in store.chunks())


@pytest.mark.parametrize("kind", [MemoryOutputStore, LateStore])
def test_what_is_finished_of_a_batch_under_way_is_stored_when_a_job_is_stopped(
    pool: FakePool, kind: type[MemoryOutputStore]
) -> None:
    store, function = kind(), SecondOfBatch(pool)
    results = job_map(function, range(40), want=1, store=store, make_pool=pool.make)
    thread = threading.Thread(target=lambda: list(results))
    thread.start()
    assert function.stands.wait(LONG_S)
    results.stop_soon()
    thread.join(LONG_S)
    before = list(function.ran)
    assert function.finished(store) == before[:-1]
    function.go_on.set()
    pool.leases.clear()
    again = FakePool(1)
    function._pool = again
    assert list(job_map(function, range(40), want=1, store=store, make_pool=again.make)) == list(range(40))
    assert sorted(function.ran) == sorted([*range(40), before[-1]]), "only the one that was executing runs again"


@pytest.mark.parametrize("kind", [MemoryOutputStore, LateStore])
def test_what_is_finished_of_a_batch_under_way_is_stored_when_its_coordinator_is_interrupted(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch, kind: type[MemoryOutputStore]
) -> None:
    store, function = kind(), SecondOfBatch(pool)
    pool.most = 1

    def interrupted(self: RunningJob, timeout_s: float) -> bool:
        assert function.stands.wait(LONG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunningJob, "wait_over", interrupted)
    chunks = [Chunk(function, (n,)) for n in range(40)]
    with pytest.raises(KeyboardInterrupt):
        JobCoordinator(make_pool=pool.make).run(chunks, store, None, len)
    assert function.finished(store) == function.ran[:-1]
    function.go_on.set()


def test_what_waits_for_its_publication_is_published_when_a_mistake_ends_the_job(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the store's."""
    monkeypatch.setattr(coordinator, "READ_FOR_S", 0.0)  # each chunk is handed on before the next one is read
    store, go_on = LateStore(), threading.Event()

    def add_up_the_second_later(data: bytes) -> bytes:
        assert data == b"0 10" or go_on.wait(LONG_S)  # as long as it executes nothing needs to be published
        return add_up(data)

    def chunks() -> Iterator[Any]:
        yield Numbers(10, 20)
        yield Liar(0, 10)
        until("a chunk to be finished", lambda: any(lease.executing.results for lease in pool.leases))
        yield Liar(1, 2)

    with pytest.raises(InvalidRequest, match="with another content"):
        JobCoordinator(make_pool=pool.make).run(chunks(), store, add_up_the_second_later, total)
    go_on.set()
    assert [store.get(chunk) for chunk in store.chunks()] == [b"45"]


def waits_unless_first(x: int) -> int:
    if x:
        LET_GO.wait(LONG_S)
    return x


class SlowestStore(SlowStore):
    """Its publication takes until the test lets it go on."""

    publish_after = 0.001

    def __init__(self) -> None:
        super().__init__()
        self.publishes, self.go_on = threading.Event(), threading.Event()

    def publish(self, state: bytes) -> None:
        self.publishes.set()
        assert self.go_on.wait(LONG_S)
        super().publish(state)


def test_a_job_that_is_closed_waits_for_the_publication_under_way_and_counts_it(pool: FakePool) -> None:
    """Else the lease of the store's volume would be given back while its files are still being published."""
    store = SlowestStore()
    LET_GO.clear()
    results = job_map(waits_unless_first, range(2), want=2, store=store, make_pool=pool.make)
    thread = threading.Thread(target=lambda: next(iter(results), None))
    thread.start()
    assert store.publishes.wait(LONG_S)
    results.stop_soon()
    thread.join(0.3)
    assert thread.is_alive(), "it was closed while its results were being published"
    store.go_on.set()
    thread.join(LONG_S)
    LET_GO.set()
    assert len(store) == 1
    assert results.result is not None
    assert results.result.chunks_succeeded == 1


# ---- the executor


def test_the_executor_calls_functions_and_gives_leases_back(pool: FakePool) -> None:
    with Executor(2, make_pool=pool.make) as executor:
        futures = [executor.submit(square, n) for n in range(50)]
        assert [future.result(LONG_S) for future in futures] == [n * n for n in range(50)]
        assert executor.submit(pow, 2, exp=5).result(LONG_S) == 32
        assert list(executor.map(square, range(5), timeout=LONG_S)) == [0, 1, 4, 9, 16]
        with pytest.raises(ValueError, match="three"):
            executor.submit(fails_at_three, 3).result(LONG_S)
        assert executor.submit(square, 4).result(LONG_S) == 16
    assert pool.is_closed
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(square, 1)
    executor.shutdown()
    assert executor.result is not None
    assert (executor.result.chunks_succeeded, executor.result.chunks_failed) == (57, 1)


def test_an_executor_lets_go_of_functions_that_were_called_long_ago(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a program that submits a new function each time would grow without a bound."""
    monkeypatch.setattr(executor, "TASKS_MAX", 4)

    def made(n: int) -> Callable[[], int]:
        return lambda: n

    alive: list[weakref.ref[Any]] = []
    with Executor(2, make_pool=pool.make) as shared:
        for n in range(20):
            function = made(n)
            alive.append(weakref.ref(function))
            assert shared.submit(function).result(LONG_S) == n
            del function
        until("few functions are kept", lambda: gc.collect() >= 0 and sum(one() is not None for one in alive) <= 6)


def test_what_was_submitted_is_done_when_the_program_ends(pool: FakePool) -> None:
    """Also by one who forgot ``shutdown``, as with the standard executors."""
    forgotten = Executor(2, make_pool=pool.make)
    futures = [forgotten.submit(square, n) for n in range(20)]
    executor._finish_all()
    assert [future.result(0) for future in futures] == [n * n for n in range(20)]
    assert pool.is_closed


def test_a_future_that_has_not_run_can_be_cancelled(pool: FakePool) -> None:
    pool.most = 1
    let_go, began = threading.Event(), threading.Event()

    def waits() -> None:
        began.set()
        let_go.wait(LONG_S)

    with Executor(1, make_pool=pool.make) as executor:
        first = executor.submit(waits)
        assert began.wait(LONG_S)
        assert first.running()
        assert not first.cancel()
        others = [executor.submit(square, n) for n in range(20)]
        assert others[-1].cancel()
        let_go.set()
        assert others[0].result(LONG_S) == 0
        with pytest.raises(CancelledError):
            others[-1].result(LONG_S)
    assert first.done()


def test_shutdown_without_waiting_still_does_what_was_submitted(pool: FakePool) -> None:
    executor = Executor(2, make_pool=pool.make)
    futures = [executor.submit(square, n) for n in range(20)]
    executor.shutdown(wait=False)
    assert [future.result(LONG_S) for future in futures] == [n * n for n in range(20)]


def test_shutdown_can_cancel_what_has_not_run(pool: FakePool) -> None:
    pool.most = 1
    let_go = threading.Event()
    executor = Executor(1, make_pool=pool.make)
    began = threading.Event()

    def waits() -> None:
        began.set()
        let_go.wait(LONG_S)

    executor.submit(waits)
    assert began.wait(LONG_S)
    others = [executor.submit(square, n) for n in range(5)]
    let_go.set()
    executor.shutdown(cancel_futures=True)
    assert all(future.done() for future in others)


def test_what_is_submitted_as_the_last_result_comes_is_waited_for(pool: FakePool) -> None:
    """Between the look whether all is done and the word that it is, on the job's thread."""
    executor = Executor(1, make_pool=pool.make)
    let_go, submitted = threading.Event(), threading.Event()
    begun: list[threading.Thread] = []
    late: list[Future[bool]] = []

    def submit() -> None:
        late.append(executor.submit(let_go.wait, LONG_S))
        submitted.set()

    class Idle(threading.Event):
        def set(self) -> None:
            if not begun:
                begun.append(threading.Thread(target=submit))
                begun[0].start()
                begun[0].join(0.3)  # it is done so soon only where it may come in between
            super().set()

    executor._is_idle = Idle()
    assert executor.submit(square, 1).result(LONG_S) == 1
    assert submitted.wait(LONG_S)
    ends = threading.Thread(target=executor.shutdown)
    ends.start()
    ends.join(0.3)
    let_go.set()
    ends.join(LONG_S)
    assert late[0].result(0)


def test_a_mistake_on_the_jobs_thread_is_raised_where_results_are_waited_for(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(self: Coordinator, now_ns: int) -> None:
        raise ZeroDivisionError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "tick", mistaken)
        with pytest.raises(ZeroDivisionError, match="a mistake"):
            list(job_map(square, range(3), make_pool=pool.make))
    assert pool.is_closed


def batches_of(chunks: int, each_ns: int) -> list[int]:
    """How many chunks each batch of a job has, on two leases, once it is known how long one takes."""
    pace, found = running._Pace(), list[int]()
    for _ in range(10):
        pace.adapt(each_ns)
    while chunks:
        found.append(min(chunks, pace.batch(chunks, 2)))
        chunks -= found[-1]
    return found


def test_the_last_short_chunks_go_out_in_few_batches_and_long_ones_by_and_by() -> None:
    """A batch costs about as much as two milliseconds of chunks, so no smaller one is made of short chunks."""
    assert batches_of(100, 100_000) == [25, 20, 20, 20, 15]
    assert batches_of(100, 10_000_000) == [20, 20, 15, 12, 9, 6, 5, 4, 3, 2, 1, 1, 1, 1]
    assert batches_of(3, 60_000_000_000) == [1, 1, 1]
