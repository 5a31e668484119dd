"""Python functions under a lease: a real office, real workers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sublet
from sublet.client.guests import start_spec
from sublet.compute import workers
from sublet.compute.kernel_guest import KernelGuest
from sublet.compute.posting import AHEAD
from sublet.compute.session_line import device_guest
from sublet.compute.worker_guest import Options
from sublet.errors import CallTimeout, RemoteError, Unpicklable, WorkerLost
from sublet.wire.guests import GuestSpec
from sublet.wire.sealed_memory import write_shared
from tests.integration import run_functions
from tests.traces import until

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def fabric(two_devices: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=two_devices) as made:
        yield made


@pytest.fixture(scope="module")
def held(fabric: sublet.Fabric) -> Iterator[sublet.Lease]:
    """One lease for all tests that leave it as they found it. Not of a core: while a test's own lease is torn down
    and the next waits for a core, it would be preempted as the idle holder."""
    with fabric.memory("1GiB", ttl="60s", renew="always") as lease:
        yield lease


@pytest.fixture
def lease(fabric: sublet.Fabric) -> Iterator[sublet.Lease]:
    with fabric.cpu(1, ttl="2m") as lease:
        yield lease


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to interrupt a function, and to say how a process has ended."""
    monkeypatch.setattr("sublet.compute.calls.GRACE_S", PATIENCE_S)
    monkeypatch.setattr("sublet.compute.worker_guest.END_REPORTED_S", PATIENCE_S)


# ---- what a call is


def test_a_function_runs_in_another_process_that_stays(held: sublet.Lease) -> None:
    first, second = held.run(run_functions.where), held.run(run_functions.where)
    assert first == second
    assert first[0] != os.getpid()
    assert os.path.realpath(first[1]) == os.path.realpath(sys.executable)
    assert [held.run(run_functions.count) for _ in range(3)] == [1, 2, 3]
    assert run_functions.COUNT == 0


def test_what_can_be_called(held: sublet.Lease) -> None:
    factor = 3
    assert held.run(lambda x: factor * x, 4) == 12
    assert held.run(max, 1, 5) == 5
    assert held.run(functools.partial(pow, 2), 5) == 32
    assert held.run(run_functions.Scale(2).times, 4) == 8
    assert held.run(run_functions.Scale(2), 4) == 8
    assert held.run(str.upper, "a") == "A"
    assert held.run(dict, a=1, b=2) == {"a": 1, "b": 2}
    assert held.run(os.path.join, "a", "b") == "a/b"


def test_globals_and_closures_are_those_of_the_moment_of_the_call(held: sublet.Lease) -> None:
    box = [1]

    def look() -> list[int]:
        return box

    assert held.run(look) == [1]
    box.append(2)
    assert held.run(look) == [1, 2]


def test_a_class_of_the_caller_comes_back_as_itself(held: sublet.Lease) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    def move(point: Point) -> Point:
        return type(point)(point.x + 1)

    back = held.run(move, Point(1))
    assert isinstance(back, Point)
    assert back.x == 2


def test_the_name_of_a_keyword_is_the_functions_own(held: sublet.Lease) -> None:
    def keep(timeout: int, function: int, self: int) -> tuple[int, int, int]:
        return timeout, function, self

    assert held.run(keep, timeout=1, function=2, self=3) == (1, 2, 3)


def test_a_module_that_is_another_file_there_goes_by_value(held: sublet.Lease, tmp_path: Path) -> None:
    """Edited and reloaded here, it would be the old one there: what was handed over is what runs."""
    module = tmp_path / "edited_module.py"
    module.write_text("def helper():\n    return 'old'\n\ndef say():\n    return helper()\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import edited_module  # type: ignore[import-not-found]

        assert held.run(edited_module.say) == "old"
        module.write_text("def helper():\n    return 'new one'\n\ndef say():\n    return helper()\n")
        import importlib

        importlib.invalidate_caches()
        importlib.reload(edited_module)
        assert held.run(edited_module.say) == "new one"
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("edited_module", None)


def test_coroutine_functions_are_awaited(held: sublet.Lease) -> None:
    async def twice(x: int) -> int:
        await asyncio.sleep(0.001)
        return 2 * x

    assert held.run(twice, 4) == 8
    assert held.submit(twice, 5).result(PATIENCE_S) == 10


# ---- arrays


def test_arrays_arrive_as_they_are_each_time(held: sublet.Lease) -> None:
    """Unchanged ones are not sent again; one that was changed in place always arrives changed."""
    array = np.ones(1 << 20)
    assert held.run(run_functions.total, array) == array.sum()
    assert held.run(run_functions.total, array) == array.sum()
    array[-1] = 5
    assert held.run(run_functions.total, array) == array.sum()
    array[0] = 7
    assert held.run(run_functions.total, array[: 1 << 19]) == array[: 1 << 19].sum()
    assert held.run(run_functions.total, array) == array.sum()


def test_what_a_function_does_to_its_argument_stays_there(held: sublet.Lease) -> None:
    array = np.ones(1 << 18)
    assert held.run(run_functions.spoil, array) == -(1 << 18)
    assert array.sum() == 1 << 18
    assert held.run(run_functions.total, array) == 1 << 18


def test_unchanged_arrays_are_not_sent_again(held: sublet.Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def counted(pieces: Any, **more: Any) -> Any:
        written.append(sum(piece.nbytes for piece in pieces))
        return write_shared(pieces, **more)

    monkeypatch.setattr("sublet.guest.cargo.write_shared", counted)
    array, other = np.arange(1 << 18), np.arange(1 << 18) + 1
    for _ in range(3):
        held.run(run_functions.total, array)
        held.run(lambda x: float(x.sum()), other)
    held.run(run_functions.total, array.copy())  # the same at another place
    assert written == [array.nbytes, other.nbytes]


def test_results_are_the_callers_own(held: sublet.Lease) -> None:
    array = held.run(np.arange, 1 << 18)
    array[0] = 9
    assert array.flags.writeable
    assert held.run(run_functions.total, array) == array.sum()


def test_large_pickles_and_many_arrays(held: sublet.Lease) -> None:
    blob = os.urandom(3 << 20)
    assert held.run(len, blob) == len(blob)
    many = [np.full(20_000, index, dtype=np.int64) for index in range(40)]
    back = held.run(lambda items: [item + 1 for item in items], many)
    assert all((item == index + 1).all() for index, item in enumerate(back))


@pytest.mark.needs("torch")
def test_tensors_keep_what_they_share(held: sublet.Lease) -> None:
    import torch

    base = torch.zeros(100_000)

    def fill(pair: dict[str, Any]) -> Any:
        pair["view"][:] = 1
        return pair

    back = held.run(fill, {"base": base, "view": base[10:20]})
    assert back["base"].sum() == 10
    back["view"][:] = 2
    assert back["base"].sum() == 20
    assert base.sum() == 0
    layer = held.run(lambda: torch.nn.Linear(300, 300))
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.requires_grad


# ---- what it says


def test_what_is_printed_and_logged_appears_here_in_order(
    held: sublet.Lease, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def speak() -> None:
        print("one")
        print("two", file=sys.stderr)
        sys.stdout.buffer.write("drei ä\n".encode())
        logging.getLogger("of.theirs").warning("careful: %d", 3)
        print("no line end", end="")

    with caplog.at_level(logging.INFO):
        held.run(speak)
    said = capsys.readouterr()
    assert said.out == "one\ndrei ä\nno line end"
    assert said.err == "two\n"
    assert ("of.theirs", logging.WARNING, "careful: 3") in caplog.record_tuples


def test_output_is_live(lease: sublet.Lease, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def speak(gate: str) -> None:
        print("before")
        while not os.path.exists(gate):
            time.sleep(0.01)

    future = lease.submit(speak, str(gate))
    said = ""

    def heard() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "before" in said

    until("word of it", heard, PATIENCE_S)
    assert not future.done()
    gate.touch()
    future.result(PATIENCE_S)


def test_the_log_of_the_guest_has_it_too(fabric: sublet.Fabric, lease: sublet.Lease) -> None:
    lease.run(print, "for the log")
    [view] = fabric.guests(lease)
    from sublet.client.guests import Guest

    guest = Guest(view.id, view.pid, lease.id, fabric.address)
    pieces = guest.output()
    said = b""
    while b"for the log" not in said:
        said += next(pieces).data
    pieces.close()  # type: ignore[attr-defined]


# ---- what it raises


def test_an_exception_is_itself_and_says_where(held: sublet.Lease) -> None:
    class Mine(Exception):
        pass

    def fail() -> None:
        error = Mine("words", 3)
        error.add_note("a note")
        raise error

    with pytest.raises(Mine) as caught:
        held.run(fail)
    assert caught.value.args == ("words", 3)
    assert caught.value.__notes__ == ["a note"]
    text = "".join(traceback.format_exception(caught.value.__cause__))
    assert "in fail" in text
    assert "sublet/guest" not in text
    future = held.submit(fail)
    assert isinstance(future.exception(PATIENCE_S), Mine)


def test_an_exception_that_cannot_travel_is_told_in_words(held: sublet.Lease) -> None:
    with pytest.raises(RemoteError, match="Demanding: 1 and 2") as caught:
        held.run(run_functions.demand)
    assert caught.value.type_name.endswith("Demanding")

    def fail() -> None:
        raise ValueError(threading.Lock())

    with pytest.raises(RemoteError, match="ValueError"):
        held.run(fail)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, MemoryError, asyncio.CancelledError])
def test_exceptions_of_python_itself(held: sublet.Lease, kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("x")

    with pytest.raises(kind, match="x"):
        held.run(fail)
    assert held.run(run_functions.where)


# ---- bad input


def test_what_cannot_travel_is_named_with_the_way_to_it(held: sublet.Lease) -> None:
    lock, sock = threading.Lock(), socket.socket()
    with sock:
        with pytest.raises(Unpicklable, match="captured variable 'lock'"):
            held.run(lambda: lock)
        with pytest.raises(Unpicklable, match=r"^argument 1\['deep'\]\[1\].*socket"):
            held.run(len, {"deep": [1, sock]})
        with pytest.raises(Unpicklable, match="generator"):
            held.run(list, (i for i in range(3)))
        with pytest.raises(Unpicklable, match="the result"):
            held.run(lambda: {"a": threading.Lock()})
        with pytest.raises(sublet.InvalidRequest, match="cannot travel"):
            held.run(lambda: held.id)
    with pytest.raises(sublet.InvalidRequest, match="cannot be called"):
        held.run(3)  # type: ignore[call-overload]
    with pytest.raises(sublet.InvalidRequest, match="nothing to map"):
        held.map(len)


@pytest.mark.parametrize("python", ["python3", "/no/such/python", "/bin/true", "/etc/passwd", "/"])
def test_a_python_that_is_none(held: sublet.Lease, python: str) -> None:
    with pytest.raises(sublet.InvalidRequest, match="python="):
        held.options(python=python).run(len, "x")


@pytest.mark.parametrize("wrong", [{"env": ["A=1"]}, {"env": {"A": 1}}, {"cwd": 5}, {"python": 5}])
def test_options_of_a_wrong_type(held: sublet.Lease, wrong: dict[str, Any]) -> None:
    with pytest.raises(sublet.InvalidRequest, match=f"{next(iter(wrong))}= must"):
        held.options(**wrong)


def test_a_call_in_a_worker_is_explained(held: sublet.Lease, fabric: sublet.Fabric) -> None:
    home = str(fabric.address.home)

    def again() -> None:
        with sublet.connect(home=home) as fabric, fabric.cpu(1) as lease:
            lease.run(len, "x")

    with pytest.raises(sublet.InvalidRequest, match="already runs under a lease"):
        held.run(again)


def test_the_lease_can_be_seen_from_inside(held: sublet.Lease) -> None:
    assert held.run(lambda: (sublet.current().lease, sublet.current().epoch)) == (held.id, held.epoch)


# ---- options


def test_options_choose_the_worker(lease: sublet.Lease, tmp_path: Path) -> None:
    mine = lease.options(env={**os.environ, "MARK": "x"}, cwd=tmp_path)
    assert mine.run(lambda: (os.environ["MARK"], os.getcwd())) == ("x", str(tmp_path.resolve()))
    assert mine.run(os.getpid) == lease.options(env={**os.environ, "MARK": "x"}, cwd=tmp_path).run(os.getpid)
    assert mine.run(os.getpid) != lease.run(os.getpid)
    assert lease.options(timeout=5).run(os.getpid) == lease.run(os.getpid)


def test_a_timeout_interrupts(lease: sublet.Lease, patient: None) -> None:
    seen: list[str] = []

    def sleep() -> None:
        try:
            time.sleep(6000)  # were it waited for, the test would never end
        finally:
            print("left")

    with pytest.raises(CallTimeout, match="took longer than"):
        lease.options(timeout=0.2).run(sleep)
    pid = lease.run(os.getpid)
    future = lease.options(timeout=0.2).submit(sleep)
    with pytest.raises(TimeoutError):
        future.result(PATIENCE_S)
    assert lease.run(os.getpid) == pid
    assert not seen


def test_a_timeout_counts_from_when_the_call_begins(lease: sublet.Lease) -> None:
    """Were it from when it is asked for, it would be over each time; a machine that stands still makes it so once, and
    each time for the longer that is bearable."""
    for times in (1, 4, 16):
        first = lease.submit(time.sleep, 0.6 * times)
        second = lease.options(timeout=0.5 * times).submit(time.sleep, 0.01)
        assert first.result(PATIENCE_S) is None
        try:
            assert second.result(PATIENCE_S) is None
            break
        except CallTimeout:
            assert times < 16


TIMEOUTS_S = (0.3, 5.0, 50.0)
"""The next where a call has not even begun within the one before."""


def test_who_does_not_leave_is_ended(lease: sublet.Lease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sublet.compute.calls.GRACE_S", 0.3)
    entered = tmp_path / "entered"

    def stubborn(entered: str) -> None:
        while True:
            with contextlib.suppress(BaseException):
                Path(entered).touch()
                time.sleep(60)

    pid = lease.run(os.getpid)
    for timeout_s in TIMEOUTS_S:
        if not entered.exists():
            with pytest.raises(CallTimeout):
                lease.options(timeout=timeout_s).run(stubborn, str(entered))
    assert lease.run(os.getpid) != pid


# ---- futures


def test_futures_are_futures(held: sublet.Lease) -> None:
    futures = [held.submit(pow, 2, n) for n in range(200)]
    assert [future.result(PATIENCE_S) for future in futures] == [2**n for n in range(200)]
    done, late = concurrent.futures.wait([held.submit(len, "abc"), held.submit(len, "a")], PATIENCE_S)
    assert {future.result() for future in done} == {1, 3}
    assert not late
    heard = threading.Event()
    held.submit(len, "x").add_done_callback(lambda future: heard.set())
    assert heard.wait(PATIENCE_S)


def test_a_callback_may_call(held: sublet.Lease) -> None:
    answers: list[int] = []
    heard = threading.Event()

    def again(future: concurrent.futures.Future[int]) -> None:
        answers.append(held.run(len, "abc"))
        heard.set()

    held.submit(len, "x").add_done_callback(again)
    assert heard.wait(PATIENCE_S)
    assert answers == [3]


def test_cancelled_before_it_begins_it_never_runs(lease: sublet.Lease, tmp_path: Path) -> None:
    ran, gate = tmp_path / "ran", tmp_path / "gate"
    first = lease.submit(run_functions.wait_for, str(gate))
    until("a call that runs", first.running, PATIENCE_S)
    second = lease.submit(ran.touch)
    third = lease.submit(len, "abc")
    assert second.cancel()
    assert second.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        second.result(0)
    gate.touch()
    assert third.result(PATIENCE_S) == 3
    assert first.done()
    assert not ran.exists()


def test_cancelled_while_it_runs_it_is_interrupted(lease: sublet.Lease, tmp_path: Path, patient: None) -> None:
    entered, left = tmp_path / "entered", tmp_path / "left"

    def work(entered: str, left: str) -> None:
        try:
            Path(entered).touch()
            time.sleep(60)
        except KeyboardInterrupt:
            Path(left).touch()
            raise

    pid = lease.run(os.getpid)
    future = lease.submit(work, str(entered), str(left))
    until("a call that has begun", entered.exists, PATIENCE_S)
    assert future.running()
    assert future.cancel()
    assert concurrent.futures.wait([future], PATIENCE_S).done
    until("a call that was left", left.exists, PATIENCE_S)
    assert lease.run(os.getpid) == pid
    assert not future.cancel() or future.cancelled()


def test_an_interrupted_coroutine_cleans_up(lease: sublet.Lease, tmp_path: Path) -> None:
    entered, left = tmp_path / "entered", tmp_path / "left"

    async def work(entered: str, left: str) -> None:
        try:
            Path(entered).touch()  # noqa: ASYNC240 - nobody waits for this loop
            await asyncio.sleep(60)
        finally:
            Path(left).touch()  # noqa: ASYNC240 - nobody waits for this loop

    for timeout_s in TIMEOUTS_S:
        if not entered.exists():
            with pytest.raises(CallTimeout):
                lease.options(timeout=timeout_s).run(work, str(entered), str(left))
    until("a call that was left", left.exists, PATIENCE_S)

    async def fine() -> int:
        await asyncio.sleep(0)
        return 1

    assert lease.run(fine) == 1


def test_many_threads_share_one_worker(held: sublet.Lease) -> None:
    def many(start: int) -> list[int]:
        return [held.run(pow, start + n, 2) for n in range(30)]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for start, found in zip(range(6), pool.map(many, range(6)), strict=True):
            assert found == [(start + n) ** 2 for n in range(30)]


# ---- map


def test_map_is_map(held: sublet.Lease) -> None:
    assert list(held.map(pow, range(2000), [2] * 2000)) == [n * n for n in range(2000)]
    assert list(held.map(len, [])) == []
    assert list(held.map(run_functions.total, [np.ones(50_000) * n for n in range(5)])) == [
        50_000.0 * n for n in range(5)
    ]


def test_map_raises_where_it_happens_and_takes_items_as_needed(held: sublet.Lease) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for n in range(100_000):
            taken.append(n)
            yield n

    def check(n: int) -> int:
        if n == 30:
            raise ValueError("thirty")
        return n

    found: list[int] = []
    with pytest.raises(ValueError, match="thirty"):
        found.extend(held.map(check, items()))
    assert found == list(range(30))
    assert len(taken) < 5000


def test_map_gives_what_was_finished_and_then_says_that_its_lease_has_ended(lease: sublet.Lease) -> None:
    found = lease.map(abs, range(0, -5000, -1))
    got = [next(found)]
    until("an idle lease", lambda: not lease.busy, PATIENCE_S)  # what was sent ahead is answered
    lease.release()
    with pytest.raises(sublet.LeaseEnded):
        got.extend(found)
    assert got == list(range(AHEAD))


def test_map_over_several_devices_has_a_worker_for_each(fabric: sublet.Fabric, tmp_path: Path, patient: None) -> None:
    """They work at the same time, and the results come in the order of the items, whoever had them."""
    with fabric.gpu(min_vram="64MiB", count=2, ttl="2m") as both:
        (first, no_device), (second, device) = both.map(run_functions.meet, [str(tmp_path)] * 2, (0, 1), (1, 0))
        assert first == both.run(os.getpid) != second
        assert (no_device, device) == ("", "1")
        assert list(both.map(pow, range(3000), [2] * 3000)) == [n * n for n in range(3000)]
        os.kill(second, signal.SIGKILL)
        assert list(both.map(abs, range(-500, 0))) == list(range(500, 0, -1))

        def dies(n: int) -> int:
            if n == 5:
                os._exit(7)
            return n

        found: list[int] = []
        with pytest.raises(WorkerLost, match="exit code 7"):
            found.extend(both.map(dies, range(100)))
        assert found == [0, 1, 2, 3, 4]
        with pytest.raises(sublet.InvalidRequest, match="no device of number 2: it has 2"):
            both._calls(Options(device=2)).run(len, "abc")


# ---- generators


def test_a_generator_comes_as_an_iterator_lazily(held: sublet.Lease, tmp_path: Path) -> None:
    made, closed = tmp_path / "made", tmp_path / "closed"

    def numbers(made: str, closed: str) -> Iterator[int]:
        try:
            for n in range(10_000):
                with open(made, "a") as file:
                    file.write("x")
                yield n
        finally:
            Path(closed).touch()

    found = held.run(numbers, str(made), str(closed))
    assert not made.exists()
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    assert made.stat().st_size < 200
    assert held.run(len, "abc") == 3
    found.close()  # type: ignore[attr-defined]
    assert closed.exists()
    with pytest.raises(StopIteration):
        next(found)


def test_a_generator_is_closed_at_any_moment(held: sublet.Lease, tmp_path: Path) -> None:
    """Also while the worker has not begun with the items that were asked for ahead."""

    def endless(closed: str) -> Iterator[int]:
        try:
            yield from iter(int, 1)
        finally:
            Path(closed).touch()

    for number in range(10):
        found = held.run(endless, str(tmp_path / str(number)))
        assert next(found) == 0
        found.close()  # type: ignore[attr-defined]
        assert (tmp_path / str(number)).exists()


def test_a_generator_raises_and_returns(held: sublet.Lease) -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("three")

    found: list[int] = []
    with pytest.raises(ValueError, match="three"):
        found.extend(held.run(numbers))
    assert found == [1, 2]

    def returns() -> Any:
        yield 1
        return "last"

    def outer() -> Any:
        return (yield from held.run(returns))

    generator = outer()
    assert next(generator) == 1
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "last"


def test_asynchronous_generators_and_dropped_ones(held: sublet.Lease, tmp_path: Path) -> None:
    async def numbers() -> Any:
        for n in range(5):
            await asyncio.sleep(0)
            yield n

    assert list(held.run(numbers)) == [0, 1, 2, 3, 4]
    closed = tmp_path / "closed"

    def endless(closed: str) -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            Path(closed).touch()

    found = held.run(endless, str(closed))
    assert next(found) == 1
    del found
    held.run(len, "x")
    held.run(len, "x")
    until("a closed connection", closed.exists, PATIENCE_S)


# ---- ends


def test_the_end_of_the_lease_interrupts_and_is_raised(fabric: sublet.Fabric, tmp_path: Path) -> None:
    """Swallowing it changes nothing."""
    entered, saved = tmp_path / "entered", tmp_path / "saved"

    def work(entered: str, saved: str) -> str:
        try:
            Path(entered).touch()
            time.sleep(60)
        except BaseException as error:
            Path(saved).write_text(type(error).__name__)
        return "as if nothing had happened"

    lease = fabric.cpu(1, ttl="20s")
    future = lease.submit(work, str(entered), str(saved))
    until("a call that has begun", entered.exists, PATIENCE_S)
    lease.release()
    with pytest.raises(sublet.LeaseEnded) as ended:
        future.result(PATIENCE_S)
    assert ended.value.end is not None
    assert ended.value.end.reason is sublet.EndReason.RELEASED
    until("a saved interrupt", lambda: saved.exists() and saved.read_text() == "LeaseInterrupt", PATIENCE_S)
    with pytest.raises(sublet.LeaseEnded):
        lease.run(len, "x")


def test_an_expiry_is_an_expiry(fabric: sublet.Fabric) -> None:
    lease = fabric.cpu(1, ttl="2s", renew="never")
    with pytest.raises(sublet.LeaseExpired) as ended:
        lease.run(time.sleep, 60)
    assert ended.value.end is not None
    until("the end of the lease", lambda: lease.end is not None, PATIENCE_S)


def test_an_end_that_comes_while_the_worker_starts_says_why(fabric: sublet.Fabric, tmp_path: Path) -> None:
    started, go_on = tmp_path / "started", tmp_path / "go-on"
    with fabric.cpu(1, ttl="20s") as lease, concurrent.futures.ThreadPoolExecutor(1) as pool:
        calls = lease.options(python=slow_python(tmp_path / "python", started, go_on))
        asked = pool.submit(calls.run, len, "abc")
        try:
            until("a call that has begun", started.exists, PATIENCE_S)
            fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {"detail": "for the test"}, shape=dict)
            until("the end of the lease", lambda: fabric.lease(lease.id).end, PATIENCE_S)
        finally:
            go_on.touch()
        with pytest.raises(sublet.LeaseRevoked, match="for the test") as ended:
            asked.result(PATIENCE_S)
    assert ended.value.end is not None


@pytest.mark.parametrize("what", ["kernel", "devices", "command"])
def test_what_is_started_under_a_lease_that_was_revoked_says_why(fabric: sublet.Fabric, what: str) -> None:
    """Each is started by way of the supervisor, which knows the leases that live and not how others ended."""
    start: dict[str, Callable[[sublet.Lease], object]] = {
        "kernel": KernelGuest,
        "devices": device_guest,
        "command": lambda lease: start_spec(lease, GuestSpec(argv=("true",))),
    }
    with fabric.cpu(1, ttl="20s") as lease:
        fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {"detail": "for the test"}, shape=dict)
        until("the end of the lease", lambda: fabric.lease(lease.id).end, PATIENCE_S)
        with pytest.raises(sublet.LeaseRevoked, match="for the test") as ended:
            start[what](lease)
    assert ended.value.end is not None
    assert ended.value.end.reason is sublet.EndReason.OPERATOR


def test_a_command_of_an_asynchronous_program_under_a_lease_that_was_revoked_says_why(fabric: sublet.Fabric) -> None:
    async def story() -> None:
        async with await sublet.aio.connect(home=fabric.address.home) as own, await own.cpu(1, ttl="20s") as lease:
            fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {"detail": "for the test"}, shape=dict)
            until("the end of the lease", lambda: fabric.lease(lease.id).end, PATIENCE_S)
            with pytest.raises(sublet.LeaseRevoked, match="for the test") as ended:
                await lease.start(["true"])
            assert ended.value.end is not None

    asyncio.run(story())


def slow_python(place: Path, started: Path, go_on: Path) -> str:
    """An interpreter that says that it was started, and begins when it may."""
    place.write_text(
        f'#!/bin/sh\ntouch {started}\nwhile [ ! -e {go_on} ]; do sleep 0.01; done\nexec {sys.executable} "$@"\n'
    )
    place.chmod(0o755)
    return str(place)


def test_a_revocation_says_so(fabric: sublet.Fabric) -> None:
    lease = fabric.cpu(1, ttl="20s")
    future = lease.submit(time.sleep, 60)
    until("a call that runs", future.running, PATIENCE_S)
    fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {"detail": "for the test"}, shape=dict)
    with pytest.raises(sublet.LeaseRevoked) as ended:
        future.result(PATIENCE_S)
    assert ended.value.end is not None
    until("the end of the lease", lambda: lease.end is not None, PATIENCE_S)


def test_calls_keep_the_lease(fabric: sublet.Fabric, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fabric.cpu(1, ttl="20s", renew_every="300ms") as lease:
        assert fabric.lease(lease.id).renewals == 0
        future = lease.submit(run_functions.wait_for, str(gate))
        assert lease.busy
        until("a renewal", lambda: fabric.lease(lease.id).renewals > 0, PATIENCE_S)
        gate.touch()
        future.result(PATIENCE_S)
        until("an idle lease", lambda: not lease.busy, PATIENCE_S)


def test_a_worker_that_was_stopped_does_not_keep_the_lease(
    fabric: sublet.Fabric, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It neither answers nor uses a processor. Once it goes on its call counts again."""
    for name, seconds in (("LOOK_EVERY_S", 0.1), ("ASK_AFTER_S", 0.2), ("STILL_S", 0.6)):
        monkeypatch.setattr(workers, name, seconds)
    with fabric.cpu(1, ttl="20s") as lease:
        pid = lease.run(os.getpid)
        gate = tmp_path / "gate"
        future = lease.submit(run_functions.wait_for, str(gate))
        until("a call that runs", future.running, PATIENCE_S)
        os.kill(pid, signal.SIGSTOP)
        try:
            until("an idle lease", lambda: not lease.busy, PATIENCE_S)
            assert not future.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        gate.touch()
        future.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os._exit(7), "exit code 7"),
        (os.abort, "SIGABRT"),
    ],
)
def test_the_death_of_a_worker_is_told_and_the_lease_lives(
    lease: sublet.Lease, how: Callable[[], object], said: str, patient: None
) -> None:
    pid = lease.run(os.getpid)
    with pytest.raises(WorkerLost, match=said):
        lease.run(how)
    assert lease.run(os.getpid) != pid
    future = lease.submit(how)
    waiting = [lease.submit(len, "abc") for _ in range(5)]
    with pytest.raises(WorkerLost, match=said):
        future.result(PATIENCE_S)
    assert [one.result(PATIENCE_S) for one in waiting] == [3] * 5, "only the call that was executing is to blame"


def test_a_worker_that_dies_and_leaves_a_child_behind(lease: sublet.Lease, tmp_path: Path, patient: None) -> None:
    """Its child has all that the worker had open, and keeps nobody waiting."""
    left = tmp_path / "left"

    def leave(left: str) -> None:
        if os.fork() == 0:
            os.setsid()
            Path(left).write_text(str(os.getpid()))
            time.sleep(600)
        while not Path(left).exists():
            time.sleep(0.01)
        os.write(2, b"below Python\n")
        os._exit(7)

    lost = lease.submit(leave, str(left)).exception(PATIENCE_S)
    assert isinstance(lost, WorkerLost)
    assert "exit code 7" in str(lost)
    assert "below Python" in str(lost)
    # It goes with the worker, and not with the lease.
    until("the end of the process", lambda: not os.path.exists(f"/proc/{left.read_text()}"), PATIENCE_S)
    assert lease.run(len, "abc") == 3
    assert lease.end is None


def test_who_uses_too_much_memory_is_told_so(fabric: sublet.Fabric) -> None:
    """By its group of processes where there is one for memory; else by Python, which is refused more."""

    def eat() -> None:
        eaten = []
        while True:
            eaten.append(np.ones(1 << 22))

    with fabric.memory("256MiB", ttl="20s") as lease:
        with pytest.raises((sublet.OutOfMemory, MemoryError)):
            lease.run(eat)
        assert lease.run(len, "abc") == 3


def test_a_fork_of_the_holder_has_no_part_in_it(held: sublet.Lease) -> None:
    held.run(len, "x")
    exchange = held._workers.find(held, Options()).exchange
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            held.run(len, "x")
        except sublet.LeaseNotActive:
            status = 0 if exchange.line.is_over else 2  # of our copy of the descriptor
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert held.run(len, "abc") == 3


def _fork(how: str) -> tuple[str, int]:
    pid = os.fork()
    if pid == 0:
        print("said by the fork")
        if how == "raises":
            raise ValueError("of the fork")
        if how == "exits":
            sys.exit(7)
        return "the fork's", 0
    return "the worker's", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork_and_yield() -> Iterator[str]:
    pid = os.fork()
    if pid == 0:
        yield "the fork's"
        return
    os.waitpid(pid, 0)
    yield "the worker's"


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("raises", 1), ("exits", 7)])
def test_a_fork_of_the_function_answers_nothing(
    held: sublet.Lease, how: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = held.run(os.getpid)
    assert held.submit(_fork, how).result(PATIENCE_S) == ("the worker's", status)
    assert list(held.run(_fork_and_yield)) == ["the worker's"]
    assert held.submit(os.getpid).result(PATIENCE_S) == pid
    assert capsys.readouterr().out == ""  # it would be written into the worker's own messages


@pytest.mark.parametrize("how", ["run", "map"])
def test_an_interrupt_here_interrupts_there(lease: sublet.Lease, tmp_path: Path, how: str) -> None:
    entered, left = tmp_path / "entered", tmp_path / "left"

    def work(entered: str, left: str) -> None:
        try:
            Path(entered).touch()
            time.sleep(600)
        finally:
            Path(left).touch()

    main = threading.get_ident()

    def interrupt() -> None:
        until("a call that has begun", entered.exists, PATIENCE_S)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    asking: dict[str, Callable[[], object]] = {
        "run": lambda: lease.run(work, str(entered), str(left)),
        "map": lambda: list(lease.map(work, [str(entered)] * 3, [str(left)] * 3)),
    }
    with pytest.raises(KeyboardInterrupt):
        asking[how]()
    interrupting.join()
    until("a call that was left", left.exists, PATIENCE_S)
    assert lease.run(len, "abc") == 3


# ---- other interpreters


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter of the same version, with nothing installed."""
    place = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return str(place / "bin" / "python")


def test_a_lease_is_busy_while_the_worker_of_its_first_call_starts(lease: sublet.Lease, tmp_path: Path) -> None:
    """One that was idle meanwhile would be the first to be taken: the holder could never begin."""
    started, go_on = tmp_path / "started", tmp_path / "go-on"
    slow = slow_python(tmp_path / "python", started, go_on)
    found: list[int] = []
    caller = threading.Thread(target=lambda: found.append(lease.options(python=slow).run(len, "abc")))
    caller.start()
    try:
        until("a call that has begun", started.exists, PATIENCE_S)
        assert lease.busy
    finally:
        go_on.touch()
        caller.join()
    assert found == [3]
    until("an idle lease", lambda: not lease.busy, PATIENCE_S)


def test_another_interpreter_runs_what_it_can_import(held: sublet.Lease, bare_python: str) -> None:
    calls = held.options(python=bare_python)
    assert calls.run(run_functions.where)[1] == bare_python
    assert calls.run(os.path.join, "a", "b") == "a/b"
    assert list(calls.map(len, ["a", "bc"])) == [1, 2]
    with pytest.raises(sublet.Unsupported, match="no cloudpickle"):
        calls.run(lambda: 1)
    with pytest.raises(sublet.NotFound, match="no module 'numpy'"):
        calls.run(run_functions.total, np.ones(3))
    with pytest.raises(ZeroDivisionError):
        calls.run(divmod, 1, 0)


def test_code_of_another_version_of_python_is_refused(held: sublet.Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would crash there. By name it is fine."""
    calls = held.options(env={**os.environ, "ANOTHER": "1"})
    calls.run(len, "x")
    worker = held._workers.find(held, calls._options)
    worker._functions._peer = worker.peer._replace(python=(3, 99, 0))
    with pytest.raises(sublet.Unsupported, match=r"does not run on the worker's 3\.99"):
        calls.run(lambda: 1)
    assert calls.run(run_functions.where)[0] != os.getpid()
