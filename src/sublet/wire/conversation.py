"""A blocking connection: connect, ask, receive the answer, and other events in order.

For those that also watch a terminal: ``fileno`` and ``wants_write`` say what to poll for, ``pump`` does what can be
done now and never waits. What happened while an answer was waited for is kept and comes with the next ``pump`` or
``wait``, in order.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from sublet.clock import Clock, SystemClock
from sublet.errors import CapacityExceeded, Disconnected
from sublet.values import NS_PER_S
from sublet.wire import unix
from sublet.wire.frames import close_all
from sublet.wire.link import Link
from sublet.wire.link_events import Called, CallRefused, Event, Happening, Opened, Over, PeerHello, Replied, Welcome
from sublet.wire.sockets import receive_some, send_some

PATIENCE_S: Final = 10.0
"""How long an answer may take where nothing else is said."""
KEPT_MAX: Final = 4096
"""Happenings kept while an answer is waited for."""
LONGEST_WAIT_S: Final = 1.0
"""A wait stands still while the machine sleeps, so it is never trusted for longer."""


class Conversation:
    """One connection of a program that does one thing at a time. Owns the socket."""

    def __init__(self, sock: socket.socket, link: Link, *, clock: Clock | None = None) -> None:
        """Rather use ``connect``; this is for a socket that is already connected."""
        self.link = link
        """For streams and events: ``open_channel``, ``send_data``, ``consumed``, … Then ``pump``."""
        self._sock = sock
        self._clock = clock or SystemClock()
        self._kept: list[Happening] = []
        sock.setblocking(False)

    @classmethod
    def connect(
        cls,
        path: str,
        hello: bytes = b"",
        *,
        named: bool = False,
        timeout_s: float = PATIENCE_S,
        clock: Clock | None = None,
    ) -> Conversation:
        """Connect to a unix socket (``unix.connect``) and be welcomed. Raises ``Disconnected``, or the error one is
        turned away with."""
        try:
            sock = unix.connect(path, timeout_s=timeout_s, named=named)
        except OSError as error:
            words = error.strerror or "it took too long"
            raise Disconnected(f"no answer at {path}: {words}", sent=False) from error
        made = cls(sock, Link.connecting(hello), clock=clock)
        try:
            made.greet(timeout_s)
        except BaseException:
            made.close()
            raise
        return made

    def greet(self, timeout_s: float = PATIENCE_S) -> Welcome:
        """Wait to be welcomed."""
        found = self._until(lambda one: isinstance(one, Welcome), timeout_s, "welcome")
        assert isinstance(found, Welcome)
        return found

    def call(self, body: bytes, fds: Sequence[int] = (), *, timeout_s: float = PATIENCE_S) -> Replied:
        """Ask and wait for the answer. Raises the error it was refused with, or ``Disconnected``; then whether the
        call had an effect is not known."""
        call = self.link.call(body, fds)
        try:
            found = self._until(
                lambda one: isinstance(one, Replied | CallRefused) and one.call == call, timeout_s, "answer"
            )
        except BaseException:
            self.link.abandon(call)
            raise
        if isinstance(found, CallRefused):
            raise found.error
        assert isinstance(found, Replied)
        return found

    def begin_anew(self) -> None:
        """The other side has handed the connection to another process: greet that one."""
        if self._kept or not self.link.is_between:
            raise Disconnected("more came on a connection that was handed on")
        self.link = Link.connecting()
        self.greet()

    def welcome(self, *, timeout_s: float = PATIENCE_S) -> PeerHello:
        """For the accepting side: wait for the greeting, and answer it."""
        found = self._until(lambda one: isinstance(one, PeerHello), timeout_s, "greeting")
        assert isinstance(found, PeerHello)
        self.link.welcome()
        self.flush(timeout_s)
        return found

    def hang_up(self) -> None:
        """Close it, for those too who have a duplicate of the descriptor."""
        self.shut_down()
        self.close()

    def send_now(self) -> bool:
        """Send what the socket takes now, and hear nothing; True if nothing is left. For who shares it (``line``)."""
        return self._sock.fileno() < 0 or send_some(self._sock, self.link)

    def receive_now(self) -> list[Happening]:
        """What happened, in order, without sending anything. Never waits."""
        if self._sock.fileno() >= 0:
            self._kept += receive_some(self._sock, self.link) if self.link.over is None else self.link.news()
        kept, self._kept = self._kept, []
        return kept

    def push_back(self, happened: list[Happening]) -> None:
        """Take back what was heard and not dealt with; it comes again, before everything else."""
        self._kept = happened + self._kept

    def shut_down(self) -> None:
        """Nothing goes through it any more, for those too who have a duplicate of the descriptor; it stays open, so
        that a waiting thread does not come to wait for another. Harmless twice."""
        if self._sock.fileno() >= 0:
            self.link.end()
            send_some(self._sock, self.link)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """For ``poll``: always for reading, and for writing while ``wants_write``."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether something still waits to be sent."""
        return self.link.has_output

    @property
    def has_kept(self) -> bool:
        """Whether ``pump`` has something at once, so that there is nothing to poll for first."""
        return bool(self._kept)

    def pump(self) -> list[Happening]:
        """Send and receive what can be now; what happened, in order. Never waits."""
        self._poll()
        kept, self._kept = self._kept, []
        return kept

    def wait(self, timeout_s: float) -> list[Happening]:
        """What happened, as soon as something has; an empty list after the time-out, or when it is over and said."""
        until_ns = self._clock.now_ns() + round(timeout_s * NS_PER_S)
        while not (happened := self.pump()) and self.link.over is None:
            if not self._wait_ready(until_ns):
                break
        return happened

    def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until everything is sent; False if that took too long. What comes meanwhile is kept."""
        until_ns = self._clock.now_ns() + round(timeout_s * NS_PER_S)
        self._poll()
        while self.link.has_output:
            if not self._wait_ready(until_ns):
                return False
            self._poll()
        return True

    def close(self) -> None:
        """Send what can be sent without waiting, and close. Descriptors that were not taken are closed. Harmless
        twice."""
        if self._sock.fileno() < 0:
            return
        self.link.end()
        send_some(self._sock, self.link)
        self.link.drop_output()
        self._sock.close()
        for one in self._kept:
            _close_descriptors(one)
        self._kept = []

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _poll(self) -> None:
        if self._sock.fileno() < 0:
            return
        send_some(self._sock, self.link)
        self._kept += receive_some(self._sock, self.link) if self.link.over is None else self.link.news()
        send_some(self._sock, self.link)
        if len(self._kept) > KEPT_MAX:
            error = CapacityExceeded(f"more than {KEPT_MAX} things happened before an answer came")
            self._kept += self.link.cut(error)

    def _until(self, is_it: Callable[[Happening], bool], timeout_s: float, what: str) -> Happening:
        until_ns = self._clock.now_ns() + round(timeout_s * NS_PER_S)
        seen = 0
        while True:
            self._poll()
            for index in range(seen, len(self._kept)):
                if is_it(self._kept[index]):
                    return self._kept.pop(index)
            seen = len(self._kept)
            if self.link.over is not None:
                raise self._ended(self.link.over)
            if not self._wait_ready(until_ns):
                raise Disconnected(f"no {what} came within {timeout_s:g} s")

    def _ended(self, over: Over) -> Exception:
        return over.error or Disconnected("the other side hung up")

    def _wait_ready(self, until_ns: int) -> bool:
        left_s = (until_ns - self._clock.now_ns()) / NS_PER_S
        if left_s <= 0:
            return False
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self.link.has_output else 0))
        poll.poll(1 + int(min(left_s, LONGEST_WAIT_S) * 1000))
        return True


def _close_descriptors(one: Happening) -> None:
    match one:
        case Called() | Replied() | Event() | Opened():
            close_all(one.fds)
        case _:
            pass
