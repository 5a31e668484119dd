"""Workers: what a start that fails leaves, and what counts as a sign of life."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.compute import workers
from sublet.compute.calls import Exchange
from sublet.compute.worker_guest import Options
from sublet.compute.workers import STILL_S, SignsOfLife
from sublet.errors import SubletError
from sublet.wire.conversation import Conversation
from sublet.wire.line import SharedConnection
from sublet.wire.link import Link
from tests.left_open import left_of, open_now


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
            self.life.check()


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


def no_descriptor(*_: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Starting:
    """A lease whose worker starts, and then cannot be connected to."""

    def __init__(self, patch: pytest.MonkeyPatch, *, parked: bool = False) -> None:
        self.lease: Any = SimpleNamespace(id="l", end=None, _takes_up=parked)
        self.started: list[str] = []
        self.ended: list[str] = []

        def take_up(lease: Any) -> Any:
            was, lease._takes_up = lease._takes_up, False
            return SimpleNamespace(id="parked") if was else None

        def start(lease: Any, options: Options) -> Any:
            self.started.append(f"w{len(self.started)}")
            return SimpleNamespace(id=self.started[-1])

        patch.setattr(workers, "parked_worker", take_up)
        patch.setattr(workers, "start_worker", start)
        patch.setattr(workers, "end_worker", lambda guest: self.ended.append(guest.id))
        patch.setattr(workers, "open_line", no_descriptor)


def test_a_worker_that_cannot_be_connected_to_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that failed for want of a descriptor left one running, and said only ``Too many open files``."""
    stage = Starting(monkeypatch)
    for _ in range(2):
        with pytest.raises(SubletError, match="short of a resource") as told:
            workers._started(stage.lease, Options())
        assert "ulimit -n" in told.value.do
    assert stage.ended == stage.started == ["w0", "w1"]


def test_a_parked_worker_that_cannot_be_connected_to_is_taken_up_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its functions kept is in it: the next call began with an empty one."""
    stage = Starting(monkeypatch, parked=True)
    with pytest.raises(SubletError, match="short of a resource"):
        workers._started(stage.lease, Options())
    assert (stage.started, stage.ended) == ([], [])
    assert stage.lease._takes_up


def test_an_exchange_that_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a shortage each attempt made it worse."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(Conversation(ours, Link.connecting())) as talk, theirs:
        before = open_now()
        monkeypatch.setattr("sublet.compute.calls.ResultBuffer.create", no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            Exchange(SharedConnection(talk), lambda: None)
        assert not left_of(open_now, before)
