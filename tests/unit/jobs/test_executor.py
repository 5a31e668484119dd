"""What programs rely on of ``concurrent.futures``: the same stories with the standard executor and with ours."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from sublet.jobs import Executor
from sublet.jobs import executor as executor_module
from tests.unit.jobs.stage import FakePool, pool

__all__ = ["pool"]

LONG_S = 30
Make = Callable[[int], concurrent.futures.Executor]


@pytest.fixture(params=["standard", "leases"])
def make(request: pytest.FixtureRequest, pool: FakePool) -> Iterator[Make]:
    """Makes executors of so many workers."""
    made: list[concurrent.futures.Executor] = []

    def make_one(workers: int) -> concurrent.futures.Executor:
        if request.param == "standard":
            made.append(concurrent.futures.ThreadPoolExecutor(workers))
        else:
            pool.most = workers
            made.append(Executor(workers, make_pool=pool.make))
        return made[-1]

    yield make_one
    for one in made:
        one.shutdown(cancel_futures=True)


def given(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


def divided(a: int, b: int) -> float:
    return a / b


class Gate:
    """A call that began and waits."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.go_on.wait(LONG_S)
        return "done"


def test_arguments_of_any_name_reach_the_function(make: Make) -> None:
    with make(1) as executor:
        assert executor.submit(given, 1, 2).result(LONG_S) == ((1, 2), {})
        names = {"self": 3, "fn": 4, "args": 5, "wait": 6, "timeout": 7}
        assert executor.submit(given, 1, **names).result(LONG_S) == ((1,), names)
        with pytest.raises(TypeError):
            executor.submit()  # type: ignore[call-arg]


def test_a_short_call_does_not_wait_behind_a_long_one_while_a_worker_is_free(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all calls before were so short that many of them go to a worker together. The idle worker gets them
    at once, and not when it would be given back."""
    monkeypatch.setattr(executor_module, "IDLE_S", 3600.0)
    with make(2) as executor:
        assert list(executor.map(abs, range(3000))) == list(range(3000))
        gate = Gate()
        long, short = executor.submit(gate), [executor.submit(abs, -n) for n in range(200)]
        assert [future.result(LONG_S) for future in short] == list(range(200))
        assert not long.done()
        gate.go_on.set()
        assert long.result(LONG_S) == "done"


def test_map_takes_several_iterables_to_the_end_of_the_shortest_and_keeps_their_order(make: Make) -> None:
    with make(2) as executor:
        assert list(executor.map(pow, range(10), range(10))) == [n**n for n in range(10)]
        assert list(executor.map(pow, [2, 3], [1, 2, 3])) == [2, 9]
        assert list(executor.map(pow, [], [])) == []


def test_map_raises_at_the_place_of_what_raised(make: Make) -> None:
    with make(2) as executor:
        found = executor.map(divided, [1, 2, 3], [1, 0, 1])
        assert next(found) == 1
        with pytest.raises(ZeroDivisionError):
            next(found)
        with pytest.raises(StopIteration):
            next(found)


def test_map_submits_at_once_and_times_out(make: Make) -> None:
    gate = Gate()
    with make(1) as executor:
        executor.map(lambda call: call(), [gate])
        assert gate.began.wait(LONG_S), "nothing was asked of its results"
        gate.go_on.set()
        assert list(executor.map(lambda call: call(), [lambda: "in time"], timeout=LONG_S)) == ["in time"]
        late = Gate()
        results = executor.map(lambda call: call(), [late], timeout=0.2)
        try:
            with pytest.raises(TimeoutError):
                next(results)
        finally:
            late.go_on.set()


def test_a_future_tells_its_result_its_exception_and_that_it_is_not_ready(make: Make) -> None:
    gate = Gate()
    with make(1) as executor:
        future = executor.submit(gate)
        assert gate.began.wait(LONG_S)
        assert (future.running(), future.done(), future.cancel()) == (True, False, False)
        for ask in (future.result, future.exception):
            with pytest.raises(TimeoutError):
                ask(timeout=0)
        gate.go_on.set()
        assert (future.result(LONG_S), future.exception(), future.done()) == ("done", None, True)
        failed = executor.submit(divided, 1, 0)
        assert isinstance(failed.exception(LONG_S), ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            failed.result()


def test_callbacks_are_called_once_whatever_becomes_of_the_future(make: Make) -> None:
    heard: list[tuple[str, bool]] = []

    def told(name: str) -> Callable[[Future[Any]], None]:
        return lambda future: heard.append((name, future.cancelled()))

    gate = Gate()
    with make(1) as executor:
        calls: tuple[Callable[[], Any], ...] = (gate, given, lambda: 1 / 0)
        first, second, third = (executor.submit(call) for call in calls)
        assert gate.began.wait(LONG_S)
        for name, future in (("first", first), ("second", second), ("third", third)):
            future.add_done_callback(told(name))
        assert second.cancel()
        assert heard == [("second", True)]
        gate.go_on.set()
        assert isinstance(third.exception(LONG_S), ZeroDivisionError)
    assert sorted(heard) == [("first", False), ("second", True), ("third", False)]
    first.add_done_callback(told("late"))
    assert heard[-1] == ("late", False)
    with pytest.raises(CancelledError):
        second.result()


def test_waiting_for_some_and_taking_them_as_they_come(make: Make) -> None:
    gate = Gate()
    with make(2) as executor:
        slow: Future[Any] = executor.submit(gate)
        quick: Future[Any] = executor.submit(given)
        bad: Future[Any] = executor.submit(divided, 1, 0)
        done, left = concurrent.futures.wait([slow, bad], LONG_S, concurrent.futures.FIRST_EXCEPTION)
        assert (done, left) == ({bad}, {slow})
        came = concurrent.futures.as_completed([slow, quick, bad], LONG_S)
        assert {next(came), next(came)} == {quick, bad}
        gate.go_on.set()
        assert next(came) is slow
        assert concurrent.futures.wait([slow, quick, bad], LONG_S).not_done == set()


def test_shutdown_waits_for_what_was_submitted_and_takes_no_more(make: Make) -> None:
    executor = make(2)
    futures = [executor.submit(time.sleep, 0.001) for _ in range(30)]
    executor.shutdown()
    executor.shutdown()
    assert all(future.done() and not future.cancelled() for future in futures)
    for submit in (lambda: executor.submit(given), lambda: executor.map(given, [1])):
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            submit()


def test_shutdown_that_cancels_lets_what_runs_end(make: Make) -> None:
    executor, gate = make(1), Gate()
    running, waiting = executor.submit(gate), [executor.submit(given) for _ in range(9)]
    assert gate.began.wait(LONG_S)
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in waiting)
    gate.go_on.set()
    assert running.result(LONG_S) == "done"


def test_an_executor_that_was_never_used_shuts_down(make: Make) -> None:
    with make(1):
        pass
