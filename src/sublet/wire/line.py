"""A conversation shared by several threads: each may send at any time, one at a time receives.

A sender waits until its message is out, so that nothing piles up and a receiver that falls behind slows the sender
down. A receiver never sends while it holds what it received, so the two never wait for each other.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from sublet.errors import Disconnected
from sublet.wire.conversation import Conversation
from sublet.wire.link import Link
from sublet.wire.link_events import Happening, Over

T = TypeVar("T")
_LOOK_AGAIN_S = 1.0
"""A wait stands still while the machine sleeps, and another thread may have been what it waits for."""


class SharedConnection:
    """Owns the conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._lock = threading.Lock()

    def send(self, words: Callable[[Link], T], between: Callable[[], object] = lambda: None) -> T:
        """Speak, and wait until it is out. ``between`` is called now and then meanwhile, and may raise: what was said
        is then sent with the next words. Where the link is over nothing is sent; the receiver is told."""
        with self._lock:
            result = words(self._conversation.link)
            done = self._conversation.send_now()
        while not done:
            between()
            _wait(self._conversation.fileno(), select.POLLOUT, 0.1)
            with self._lock:
                done = self._conversation.send_now()
        return result

    def receive(self, timeout_s: float | None) -> list[Happening]:
        """What happened, as soon as something has; an empty list after the time-out, or now and then."""
        happenings = self._receive_now()
        if not happenings and timeout_s != 0:
            _wait(self._conversation.fileno(), select.POLLIN, _LOOK_AGAIN_S if timeout_s is None else timeout_s)
            happenings = self._receive_now()
        return happenings

    @property
    def is_over(self) -> bool:
        return self._conversation.link.over is not None or self._conversation.fileno() < 0

    @property
    def over(self) -> Over | None:
        """How it ended, if it has."""
        return self._conversation.link.over

    def fileno(self) -> int:
        """For ``poll`` beside other descriptors; then ``receive(0)``. Below zero: it is closed."""
        return self._conversation.fileno()

    def is_pending(self, call: int) -> bool:
        """Whether this call of ours is on its way, or is being answered."""
        return self._conversation.link.is_pending(call)

    def hang_up(self) -> None:
        """End it, also for a receiver that waits. Harmless twice."""
        with self._lock:
            self._conversation.shut_down()

    def close(self) -> None:
        """Close the socket. No thread may be listening any more. Harmless twice."""
        with self._lock:
            self._conversation.close()

    def drop(self) -> None:
        """In a fork: close our descriptor, and no other. Takes no lock."""
        self._conversation.close()

    def __del__(self) -> None:
        """No reference is left, so no thread holds its lock either."""
        conversation = getattr(self, "_conversation", None)
        if conversation is not None:
            conversation.close()

    def _receive_now(self) -> list[Happening]:
        """A Ctrl-C while the lock is let go of must not take along what was heard."""
        happenings: list[Happening] = []
        try:
            with self._lock:
                happenings = self._conversation.receive_now()
        except KeyboardInterrupt:
            self._conversation.push_back(happenings)
            raise
        return happenings


def _wait(fd: int, events: int, timeout_s: float) -> None:
    if fd < 0:
        raise Disconnected("the connection was closed")
    poll = select.poll()
    poll.register(fd, events)
    poll.poll(min(timeout_s, _LOOK_AGAIN_S) * 1000)


def pair() -> tuple[SharedConnection, SharedConnection]:
    """Two ends of one line, greeted: for tests, and where no supervisor is between."""
    a, b = socket.socketpair()
    one, other = Conversation(a, Link.connecting()), Conversation(b, Link.accepting())
    one.pump()
    other.welcome()
    one.greet()
    return SharedConnection(one), SharedConnection(other)
