"""A transfer that takes long says which variable it is at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sublet.notebook.cell_io import EVERY_S, SLOW_S, TransferProgress, describe_names
from tests.notebook.crossing import Sides

HERE: dict[str, Any] = {"words": set(map(str, range(2000))), "x": np.zeros(1 << 17), "n": 3}


class Timers:
    """Time that passes when it is told to, and timers that go by it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.started = 0
        self._waiting: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, after_s: float, job: Callable[[], None]) -> Timers:
        self.started += 1
        self._waiting.append((self.now_s + after_s, job))
        return self

    def start(self) -> None: ...

    def cancel(self) -> None:
        self._waiting.clear()

    def clock(self) -> float:
        return self.now_s

    def let(self, seconds: float) -> None:
        """So much time passes."""
        until_s = self.now_s + seconds
        while due := [one for one in self._waiting if one[0] <= until_s]:
            first = min(due, key=lambda one: one[0])
            self._waiting.remove(first)
            self.now_s = first[0]
            first[1]()
        self.now_s = until_s


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def shown() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def progress(timers: Timers, shown: list[tuple[str, bool]]) -> TransferProgress:
    made = TransferProgress(HERE, clock=timers.clock, timer=timers)
    made.show = lambda what, is_first: shown.append((what, is_first))
    return made


@pytest.mark.parametrize(
    ("names", "nbytes", "text"),
    [
        (("words",), 0, "words (set, 2,000 items)"),
        (("x",), 0, "x (ndarray, 1MiB)"),
        (("n", "words", "x"), 0, "x (ndarray, 1MiB) and 2 more"),
        (("n",), 5 << 20, "n (int, 5MiB)"),
        (("unknown",), 1024, "unknown (1KiB)"),
        (("unknown",), 0, "unknown"),
        (("\0",), 7, ""),
    ],
)
def test_the_largest_variable_is_named(names: tuple[str, ...], nbytes: int, text: str) -> None:
    assert describe_names(names, HERE, nbytes) == text


def test_nothing_is_shown_within_a_second(progress: TransferProgress, timers: Timers, shown: list[Any]) -> None:
    with progress.of("sending"):
        for _ in range(9):
            progress.at(("words",))
            timers.let(SLOW_S / 10)
    timers.let(100)
    assert not shown


def test_a_transfer_of_nothing_starts_no_timer(progress: TransferProgress, timers: Timers) -> None:
    with progress.of("sending"):
        progress.refresh()
    progress.at(("words",))  # nothing is being sent
    assert not timers.started


def test_quick_transfers_one_after_the_other_start_one_timer(progress: TransferProgress, timers: Timers) -> None:
    for _ in range(9):
        with progress.of("sending"):
            progress.at(("words",))
            timers.let(SLOW_S / 10)
    assert timers.started == 1
    timers.let(100)
    assert timers.started == 1


def test_a_slow_transfer_behind_a_quick_one_is_shown_in_time(
    progress: TransferProgress, timers: Timers, shown: list[Any]
) -> None:
    with progress.of("sending"):
        progress.at(("words",))
    timers.let(SLOW_S * 0.9)
    with progress.of("collecting"):
        progress.at(("x",))
        timers.let(SLOW_S - 0.01)
        assert not shown
        timers.let(EVERY_S)
    assert shown == [("collecting x (ndarray, 1MiB)", True)]


def test_one_variable_that_takes_long_is_shown_once(
    progress: TransferProgress, timers: Timers, shown: list[Any]
) -> None:
    with progress.of("sending"):
        progress.at(("words",))
        timers.let(SLOW_S - 0.01)
        assert not shown
        timers.let(10)
    assert shown == [("sending words (set, 2,000 items)", True)]


def test_it_changes_a_few_times_a_second_and_the_last_is_shown(
    progress: TransferProgress, timers: Timers, shown: list[Any]
) -> None:
    with progress.of("collecting", ("n",)):
        timers.let(SLOW_S)
        progress.refresh()
        progress.at((), verb="receiving")
        for n in range(1000):
            progress.at((f"name{n}",), 1024)
            timers.let(0.001)
        timers.let(EVERY_S)
    assert shown[0] == ("collecting n (int)", True)
    assert len(shown) <= 2 + (1 + EVERY_S) / EVERY_S
    assert shown[-1] == ("receiving name999 (1KiB)", False)


def test_each_group_is_told_before_it_is_encoded_and_before_it_is_merged() -> None:
    told: list[tuple[str, ...]] = []
    sides = Sides()
    sides.here["words"] = {str(n) for n in range(5000)}
    sides.spaces[0].on_group = lambda names, nbytes: told.append((*names, "merged" if nbytes else "encoded"))
    sides.go("words")
    assert set(told) == {("words", "encoded")}
    told.clear()
    sides.there["words"].add("one more")
    sides.back("words")
    assert told[0] == ("words", "merged")
