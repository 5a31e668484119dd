"""Starting a command under a lease, where the line to the supervisor breaks in the middle of it."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.client import aio_guests, guests
from sublet.client.address import Address
from sublet.errors import Disconnected, InvalidRequest
from sublet.values import GuestId, LeaseId
from sublet.wire.guests import EndGuest


class Line:
    """A connection on which a step fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fails: Exception) -> None:
        self.closed = 0
        self.in_use: list[str] = []
        monkeypatch.setattr(guests, "connect_data", lambda *_: self)
        self.asked: list[object] = []
        self.watch: Any = SimpleNamespace(add=self._step(fails.get("watch")))
        monkeypatch.setattr(guests, "_ask", lambda _, asked: self.asked.append(asked))
        for name in ("_start", "attach"):
            monkeypatch.setattr(guests, name, self._step(fails.get(name)))

    def _step(self, error: Exception | None) -> Any:
        def step(*_: object) -> Any:
            if error is not None:
                raise error
            view = SimpleNamespace(exit_code=-1, reason="")
            return SimpleNamespace(guest="g-1", pid=7, view=view)

        return step

    def close(self) -> None:
        self.closed += 1

    def begin(self) -> Any:
        def use() -> Any:
            self.in_use.append("begun")
            return lambda: self.in_use.append("ended")

        spec: Any = None
        return guests.begin(Address(url="unix:///s", token=""), "token", LeaseId("l-1"), spec, self.watch, use)


def test_a_command_that_cannot_be_started_is_told_and_uses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, _start=InvalidRequest("no such command"))
    with pytest.raises(InvalidRequest, match="no such command"):
        line.begin()
    assert (line.in_use, line.closed) == ([], 1)


def test_a_command_that_cannot_be_followed_does_not_keep_its_lease_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, and nothing here would hear of its end: a lease that counted as in use would be renewed for ever."""
    line = Line(monkeypatch, attach=Disconnected("the connection broke"))
    with pytest.raises(Disconnected, match="the connection broke"):
        line.begin()
    assert (line.in_use, line.closed) == (["begun", "ended"], 1)


@pytest.mark.parametrize("step", ["attach", "watch"])
def test_a_command_whose_start_fails_once_it_runs_is_ended(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The caller has nothing to end it by, and starts it again: two of them would run under one lease."""
    line = Line(monkeypatch, **{step: OSError(errno.EMFILE, "Too many open files")})
    with pytest.raises(OSError, match="Too many open files"):
        line.begin()
    assert (line.in_use, line.closed) == (["begun", "ended"], 1)
    assert line.asked == [EndGuest(guest=GuestId("g-1"), grace_ns=0)]


def test_a_command_that_runs_is_watched_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    assert line.begin().id == "g-1"
    assert (line.in_use, line.closed, line.asked) == (["begun"], 0, [])


def test_a_start_that_nobody_waits_for_any_more_may_fail_in_silence() -> None:
    """Its error has no reader: it must not come up in whatever the loop does at that moment."""
    loop = asyncio.new_event_loop()
    begun: asyncio.Future[guests.Guest] = loop.create_future()
    begun.set_exception(Disconnected("the line broke"))
    aio_guests._stopped(begun)
    loop.close()
