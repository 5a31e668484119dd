"""An interrupt is for one cell, at any moment of it, and for no other. A pretended shell; real signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import LeaseInterrupt
from sublet.guest import kernel
from sublet.guest.interrupts import KernelInterrupts
from sublet.lease_end import EndReason, LeaseEnd
from tests.left_open import left_of, threads_now


class Shell:
    """As much of IPython's as is watched: it runs the statements of a cell one by one, and shows what they raise."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.is_clean = False
        """Whether the last thing that is shown is a line of the cell."""
        self.names: dict[str, Any] = {}
        self.while_shown: Callable[[], object] = lambda: None

    async def run_code(self, code: Any, result: Any = None, *, async_: bool = False) -> bool:
        try:
            if async_:
                await eval(code, self.names)  # noqa: S307
            else:
                exec(code, self.names)  # noqa: S102
        except BaseException:
            self.showtraceback(running_compiled_code=True)
            return True
        return False

    def showtraceback(self, exc_tuple: Any = None, running_compiled_code: bool = False) -> None:
        found: Any = exc_tuple or sys.exc_info()
        kind, _, trace = found
        frames = [(one.f_code.co_filename, line) for one, line in traceback.walk_tb(trace)]
        self.is_clean = frames[-1][0] == "<cell>"
        self.shown.append(f"{kind.__name__} at {[line for file, line in frames if file == '<cell>'][-1]}")
        self.while_shown()


class Stage:
    """One kernel, and its cells."""

    def __init__(self) -> None:
        self.wakings = 0
        self.interrupts = KernelInterrupts(self._wake)
        self.shell = Shell()
        self.interrupts.watch(self.shell)
        self.shell.names |= {"ask": self.interrupts.ask, "signal": signal, "asyncio": asyncio}

    def _wake(self) -> None:
        self.wakings += 1
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def run(self, cell: str, *statements: str, between: Callable[[], object] = lambda: None) -> bool:
        """Whether an interrupt was left over."""
        self.interrupts.begin(cell)
        for line, text in enumerate(statements, 1):
            code = compile("\n" * (line - 1) + text, "<cell>", "exec")
            is_over = _finished(self.shell.run_code(code))
            between()
            if is_over:
                break
        return self.interrupts.finish()

    def wait(self, cell: str, text: str) -> None:
        """A cell with ``await`` in it."""
        code = compile(text, "<cell>", "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT

        async def main() -> None:
            task = asyncio.ensure_future(self.shell.run_code(code, async_=True))
            self.interrupts.begin(cell)
            self.interrupts.begin_task(task)
            await task
            self.interrupts.finish()

        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.close()


def _finished(coroutine: Coroutine[Any, Any, bool]) -> bool:
    """What it gives, that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return bool(stop.value)
    raise AssertionError("it waits")


@pytest.fixture
def stage() -> Iterator[Stage]:
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    made = Stage()
    signal.signal(signal.SIGINT, made.interrupts.on_signal)
    insisting = threads_now("sublet-interrupt")
    yield made
    left = left_of(lambda: threads_now("sublet-interrupt"), insisting)
    assert not left, "what it sends after this would interrupt the test runner"
    signal.signal(signal.SIGINT, before)
    sys.unraisablehook = hook


def test_it_is_raised_in_the_cells_own_code(stage: Stage) -> None:
    assert not stage.run("a", "ask('a')\nwhile True: pass")
    assert stage.shell.shown == ["KeyboardInterrupt at 1"]


def test_who_is_interrupted_sees_his_own_lines_and_none_of_ours(stage: Stage) -> None:
    assert not stage.run("a", "signal.raise_signal(signal.SIGINT)")
    assert stage.shell.is_clean


def test_one_that_comes_before_its_cell_is_raised_at_the_first_line_and_in_no_other_cell(stage: Stage) -> None:
    assert stage.interrupts.ask("b")
    assert not stage.run("a", "x = 1")
    assert stage.interrupts.ask("b")
    assert not stage.run("b", "\n\ny = 1")
    assert stage.shell.shown == ["KeyboardInterrupt at 3"]
    assert stage.shell.names["x"] == 1
    assert "y" not in stage.shell.names


def test_one_that_comes_between_two_statements_is_raised_at_the_second(stage: Stage) -> None:
    assert not stage.run("a", "x = 1", "y = 2", between=lambda: stage.shell.shown or stage.interrupts.ask("a"))
    assert stage.shell.shown == ["KeyboardInterrupt at 2"]


def test_one_that_comes_after_the_last_is_left_over(stage: Stage) -> None:
    assert stage.run("a", "x = 1", between=lambda: stage.interrupts.ask("a"))
    assert stage.shell.shown == []


def test_one_for_a_cell_that_is_over_stops_nothing(stage: Stage) -> None:
    stage.run("a", "x = 1")
    assert not stage.interrupts.ask("a")
    assert not stage.interrupts.ask("")
    assert not stage.run("b", "y = 1", between=lambda: stage.interrupts.ask("a"))
    assert stage.shell.names["y"] == 1
    assert stage.wakings == 0


def test_the_second_of_two_does_not_cut_short_what_is_shown_of_the_first(stage: Stage) -> None:
    stage.shell.while_shown = lambda: stage.interrupts.ask("a")
    stage.run("a", "ask('a')\nwhile True: pass", "x = 1")
    assert stage.shell.shown == ["KeyboardInterrupt at 1"]


def test_a_cell_may_take_one_and_go_on_and_the_next_is_raised_again(stage: Stage) -> None:
    taking = (
        "try:\n    ask('a')\n    while True: pass\nexcept KeyboardInterrupt: taken = True\nask('a')\nwhile True: pass"
    )
    assert not stage.run("a", taking)
    assert stage.shell.names["taken"]
    assert stage.shell.shown == ["KeyboardInterrupt at 5"]


def test_one_of_somebody_else_is_raised_as_well(stage: Stage) -> None:
    assert not stage.run("a", "signal.raise_signal(signal.SIGINT)\nx = 1")
    assert stage.shell.shown == ["KeyboardInterrupt at 1"]
    signal.raise_signal(signal.SIGINT)  # between cells it is for nobody
    assert not stage.run("b", "x = 1")


def test_what_is_raised_where_nobody_hears_it_is_raised_again(stage: Stage) -> None:
    forgets = "class It:\n    def __del__(self): ask('a'); [n for n in range(9)]\nIt()\nwhile True: pass"
    assert not stage.run("a", forgets)
    assert [one.split()[0] for one in stage.shell.shown] == ["KeyboardInterrupt"]  # wherever it is by then


def test_a_signal_that_did_not_wake_anybody_is_sent_again(stage: Stage) -> None:
    stage.interrupts._wake = lambda: None
    assert not stage.run("a", "ask('a')\nwhile True: pass")
    assert [one.split()[0] for one in stage.shell.shown] == ["KeyboardInterrupt"]  # wherever it is by then


@pytest.mark.parametrize("waits", ["await asyncio.sleep(60)", "await asyncio.sleep(0)\nwhile True: pass"])
def test_a_cell_that_waits_is_interrupted_like_any_other(stage: Stage, waits: str) -> None:
    threading.Timer(0.1, stage.interrupts.ask, ("a",)).start()
    stage.wait("a", waits)
    assert [one.split()[0] for one in stage.shell.shown] == ["KeyboardInterrupt"]


@pytest.mark.parametrize("asks", ["ask, 'a'", "signal.raise_signal, signal.SIGINT"])
def test_a_cell_that_stands_aside_and_is_about_to_go_on_is_interrupted(stage: Stage, asks: str) -> None:
    """What it waited for is there already: its next step is due before anything that the loop is asked for now."""
    stage.wait("a", f"asyncio.get_running_loop().call_soon({asks})\nawait asyncio.sleep(0)\nwhile True: pass")
    assert [one.split()[0] for one in stage.shell.shown] == ["KeyboardInterrupt"]


def test_the_end_of_a_lease_in_a_function_is_the_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(BaseException):
        error = LeaseInterrupt(LeaseEnd(reason=EndReason.OPERATOR, at="2026-01-01T00:00:00Z"))

    def raises(error: BaseException) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    monkeypatch.setattr(kernel, "_loop", SimpleNamespace)
    shell = SimpleNamespace(builtin_trap=contextlib.nullcontext())
    main_queue = kernel._KernelQueue(SimpleNamespace(), shell)  # type: ignore[arg-type]
    with pytest.raises(LeaseInterrupt):
        main_queue.execute(raises(Wrapped()))
    with pytest.raises(ValueError, match="mine"):
        main_queue.execute(raises(ValueError("mine")))
