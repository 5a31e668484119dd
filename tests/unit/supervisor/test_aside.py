"""What is put aside waits for the last that comes, so that of many ends none waits for it; and not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.supervisor.aside import WAIT_S, WAITING_MAX, Aside
from sublet.supervisor.loop import Loop
from sublet.testing.clock import HeldClock

NEARLY_NS = round(WAIT_S * 0.9e9)


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def loop(clock: HeldClock) -> Iterator[Loop]:
    found = Loop(clock)
    yield found
    found.close()


def test_it_waits_for_the_last_that_comes(loop: Loop, clock: HeldClock) -> None:
    did: list[int] = []
    aside = Aside(loop, no_errands())
    for number in range(20):
        aside.later(lambda number=number: did.append(number))  # type: ignore[misc]
        clock.advance_ns(NEARLY_NS)
        loop.turn(0)
    assert not did
    clock.advance_ns(NEARLY_NS)
    while len(did) < 20:
        before = len(did)
        loop.turn(0)
        assert len(did) > before, "a few in each turn"
    assert did == list(range(20))


def test_where_somebody_ends_at_every_moment_it_does_not_pile_up(loop: Loop, clock: HeldClock) -> None:
    did: list[int] = []
    aside = Aside(loop, no_errands())
    for number in range(2 * WAITING_MAX):
        aside.later(lambda number=number: did.append(number))  # type: ignore[misc]
        if number % 4 == 0:
            clock.advance_ns(NEARLY_NS)
            loop.turn(0)
        assert number - len(did) <= WAITING_MAX + 8
    aside.finish()
    assert did == list(range(2 * WAITING_MAX))


def test_one_that_fails_harms_no_other(loop: Loop, clock: HeldClock) -> None:
    did: list[str] = []
    aside = Aside(loop, no_errands())

    def fail() -> None:
        raise OSError("a disk that is full")

    for act in (lambda: did.append("first"), fail, lambda: did.append("last")):
        aside.later(act)
    clock.advance_ns(2 * NEARLY_NS)
    for _ in range(3):
        loop.turn(0)
    assert did == ["first", "last"]


def no_errands() -> Any:
    return SimpleNamespace(run=lambda *_: pytest.fail("nothing here is large"))
