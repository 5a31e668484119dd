"""Signs of life of a worker: what counts as one, and what its silence does to the use of the lease."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.compute.workers import STILL_S, SignsOfLife


class Lease:
    """Counts what runs under it."""

    def __init__(self) -> None:
        self.running = 0

    @contextlib.contextmanager
    def activity(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.marks = 0
        self.cpu_ns: int | None = 5_000_000_000
        self.asked = 0
        monkeypatch.setattr("sublet.compute.workers.time.monotonic", lambda: self.now_s)
        self.life = SignsOfLife(lambda: self.marks, self._cpu)
        self.lease: Any = Lease()

    def _cpu(self) -> int | None:
        self.asked += 1
        return self.cpu_ns

    def pass_s(self, seconds: float, *, marks: int = 0, cpu_ns: int = 0) -> None:
        """As who listens looks: once a second."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.marks += marks
            if self.cpu_ns is not None:
                self.cpu_ns += cpu_ns
            self.life.look()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_worker_that_makes_its_mark_lives_and_nobody_is_asked(world: World) -> None:
    with world.life.use(world.lease):
        world.pass_s(3600, marks=1)
        assert (world.lease.running, world.asked) == (1, 0)
    assert world.lease.running == 0


def test_a_worker_that_computes_with_the_interpreter_held_lives(world: World) -> None:
    with world.life.use(world.lease):
        world.pass_s(3600, cpu_ns=900_000_000)
        assert world.lease.running == 1
        assert 0 < world.asked <= 360, "now and then"


def test_one_that_stands_still_keeps_no_lease_until_it_goes_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sublet.client"), world.life.use(world.lease), world.life.use(world.lease):
        world.pass_s(60, marks=1)
        assert world.lease.running == 2
        world.pass_s(2 * STILL_S + 30)
        assert world.lease.running == 0
        with world.life.use(world.lease):
            assert world.lease.running == 0, "what is sent to it now waits as well"
        world.pass_s(10, marks=1)
        assert world.lease.running == 2
        assert [record.message.split(" has ")[0] for record in caplog.records][:1] == ["the worker"]
        assert len(caplog.records) == 2
    assert world.lease.running == 0


def test_what_is_not_known_takes_nothing_away(world: World) -> None:
    world.cpu_ns = None
    with world.life.use(world.lease):
        world.pass_s(3600)
        assert world.lease.running == 1


def test_a_use_that_ends_in_the_standstill_ends_once(world: World) -> None:
    with world.life.use(world.lease):
        world.pass_s(3 * STILL_S)
        assert world.lease.running == 0
    world.pass_s(10, marks=1)
    assert world.lease.running == 0


def test_after_a_parking_it_counts_for_the_lease_it_goes_on_under(world: World) -> None:
    other: Any = Lease()
    with world.life.use(world.lease):
        world.pass_s(3 * STILL_S)
        world.life.now_under(other)
        assert (world.lease.running, other.running) == (0, 1)
        world.pass_s(5)
        assert other.running == 1
    assert other.running == 0


def test_nobody_looks_while_nothing_is_under_way(world: World) -> None:
    world.pass_s(600)
    assert world.asked == 0
    with world.life.use(world.lease):
        assert world.lease.running == 1
