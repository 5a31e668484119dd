"""The loop: what is guarded costs its own and nobody else, and the law's own turn is nobody's to swallow."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sublet.clock import SystemClock
from sublet.supervisor.loop import READ, Loop


class Mistake(Exception):
    """Ours."""


def fail(*_: object) -> None:
    raise Mistake


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop(SystemClock())
    yield found
    found.close()


def test_what_is_guarded_ends_nobody_else(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[Exception] = []
    did: list[str] = []
    guarded = loop.guarded(told.append)
    guarded.soon(fail)
    guarded.at(0, fail)
    guarded.after(0.0, fail)
    loop.soon(lambda: did.append("soon"))
    loop.after(0.0, lambda: did.append("timer"))
    loop.turn(0.05)
    loop.turn(0.05)
    assert [type(error) for error in told] == [Mistake] * 3
    assert did == ["soon", "timer"]
    assert "Mistake" in capfd.readouterr().err, "the log has it"


def test_a_descriptor_nobody_can_serve_does_not_spin(loop: Loop) -> None:
    told: list[Exception] = []
    reading, writing = os.pipe()
    loop.guarded(told.append).watch(reading, READ, fail)
    os.write(writing, b"x")
    for _ in range(3):
        loop.turn(0.01)
    assert len(told) == 1
    os.close(reading)
    os.close(writing)


def test_not_even_what_is_told_of_it_can_end_the_loop(loop: Loop) -> None:
    loop.guarded(fail).soon(fail)
    loop.turn(0.01)


def test_what_was_cancelled_is_not_kept_until_its_moment(loop: Loop) -> None:
    """The law sets its alarm anew with every order, most often for minutes ahead."""
    rang: list[str] = []
    loop.after(0.0, lambda: rang.append("first"))
    kept = [loop.after(300.0, lambda: rang.append("never")) for _ in range(100)]
    for _ in range(5000):
        loop.after(300.0, fail).cancel()
    assert len(loop._timers) <= 2 * len(kept) + 100
    loop.turn(0.05)
    assert rang == ["first"]


def test_the_law_is_not_guarded(loop: Loop) -> None:
    loop.soon(fail)
    with pytest.raises(Mistake):
        loop.turn(0.01)
