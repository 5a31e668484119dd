"""Who is told to leave is told why; who has left by himself is told nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sublet.clock import SystemClock
from sublet.lease_end import EndReason
from sublet.node.loop import Loop
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.termination import Terminations

LINE = "the lease is over (released)"


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop(SystemClock())
    yield found
    found.close()


def guest(*, boxed: bool, main_runs: bool, members: int) -> Any:
    said: list[str] = []
    return SimpleNamespace(
        id=f"g-{boxed}-{main_runs}-{members}",
        said=said,
        main_runs=main_runs,
        tree=SimpleNamespace(is_boxed=boxed, members=members),
        stdio=SimpleNamespace(write_notice=said.append, stop_blocking=lambda: None),
        ends=lambda reason: None,
    )


class Signals:
    """Trees that count whom a signal reached, or in which nobody can be looked for."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def scan(self) -> object:
        return object()

    def signal_boxed(self, tree: Any, number: int) -> int:
        if self.fails:
            raise ValueError("a list that no one can read")
        return int(tree.members)

    def signal_seen(self, tree: Any, number: int, look: object) -> int:
        return self.signal_boxed(tree, number)


def endings(loop: Loop, trees: Signals) -> Terminations:
    def safely(_: GuestProcess, call: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):
            call()

    priority: Any = SimpleNamespace(first=lambda: None)
    return Terminations(loop, cast("Any", trees), priority, killed=lambda: None, safely=safely)


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize(
    ("main_runs", "members", "hears"),
    [(True, 2, True), (True, 0, True), (False, 1, True), (False, 0, False)],
    ids=["it runs", "it just ends", "it left somebody behind", "nobody is left"],
)
def test_a_line_is_for_whom_it_is_news(loop: Loop, boxed: bool, main_runs: bool, members: int, hears: bool) -> None:
    one = guest(boxed=boxed, main_runs=main_runs, members=members)
    endings(loop, Signals()).terminate([one], LINE, EndReason.RELEASED)
    loop.turn(0)
    assert one.said == [LINE] * hears


def test_where_nobody_can_be_looked_for_the_line_is_said(loop: Loop) -> None:
    one = guest(boxed=True, main_runs=False, members=0)
    endings(loop, Signals(fails=True)).terminate([one], LINE, EndReason.RELEASED)
    loop.turn(0)
    assert one.said == [LINE]
