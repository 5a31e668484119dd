"""The thread that hears the news of guests: it hears them at once, outlasts shortages, and tells of what broke."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from sublet.client import guest_watch
from sublet.client.guest_watch import GuestWatch
from sublet.errors import Disconnected
from sublet.wire.conversation import Conversation
from sublet.wire.link import Link
from sublet.wire.link_events import Event, Happening, Over

PATIENCE_S = 60.0


class Pair:
    """A connection that a watch has, its far end, and what was heard."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        self.near, self.far = Conversation(near, Link.connecting()), Conversation(far, Link.accepting())
        self.near.pump()
        self.far.welcome()
        self.near.greet()
        self.heard: list[Happening] = []
        self.came = threading.Event()

    def say(self, body: bytes) -> None:
        self.far.link.event(body)
        self.far.flush()

    def hear(self, happening: Happening) -> bool:
        self.heard.append(happening)
        self.came.set()
        return isinstance(happening, Over)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuestWatch]:
    """It never looks by itself."""
    monkeypatch.setattr(guest_watch, "_LOOK_AGAIN_MS", 3_600_000)
    made = GuestWatch()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.far.close()
    made.near.close()


def test_news_is_heard_when_it_comes(watch: GuestWatch, pair: Pair) -> None:
    watch.add(pair.near, pair.hear)
    pair.say(b"news")
    assert pair.came.wait(PATIENCE_S), "it was not heard"
    assert [one.body for one in pair.heard if isinstance(one, Event)] == [b"news"]


def failing_once(pair: Pair, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The first time that something is to be read from the connection."""
    real, left = pair.near.pump, [OSError(number, os.strerror(number))]

    def pump() -> list[Happening]:
        if left:
            raise left.pop()
        return real()

    monkeypatch.setattr(pair.near, "pump", pump)


def test_a_shortage_loses_no_news(watch: GuestWatch, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_once(pair, monkeypatch, errno.ENOMEM)
    pair.say(b"news")
    watch.add(pair.near, pair.hear)
    assert pair.came.wait(PATIENCE_S), "it was not heard"
    assert [one.body for one in pair.heard if isinstance(one, Event)] == [b"news"]


def test_a_connection_that_cannot_be_read_is_over_and_the_others_go_on(
    watch: GuestWatch, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Pair()
    try:
        failing_once(pair, monkeypatch, errno.EIO)
        watch.add(pair.near, pair.hear)
        watch.add(other.near, other.hear)
        pair.say(b"news")
        assert pair.came.wait(PATIENCE_S), "nobody was told"
        over = pair.heard[0]
        assert isinstance(over, Over)
        assert isinstance(over.error, Disconnected)
        other.say(b"news")
        assert other.came.wait(PATIENCE_S), "it was not heard"
        assert isinstance(other.heard[0], Event)
    finally:
        other.far.close()
