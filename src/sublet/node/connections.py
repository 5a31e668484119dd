"""One connection in the supervisor's loop: its socket, its link, and when to service each.

What is said through the link goes out at the end of the turn, so that ten answers are one system call.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Final

from sublet.background import is_shortage
from sublet.errors import Disconnected, SubletError
from sublet.node.loop import READ, WRITE, Loop, NotRead, log_internal_error, reading
from sublet.node.output_budget import UNREAD_LEAST_BYTES, OutputBudget
from sublet.wire.link import Link
from sublet.wire.link_events import Happening, Over
from sublet.wire.sockets import receive_some, send_some

AGAIN_S: Final = 0.2
"""After something could not be sent for want of memory."""


class Connection:
    """Owns the socket. ``on_happening`` is told everything that happens on the link; the last thing is ``Over``."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        link: Link,
        on_happening: Callable[[Happening], None],
        unread: OutputBudget | None = None,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """``unread``: the account of what it leaves unread, with that of others. ``on_room`` is called when everything
        went out, if before that a stream had too little room."""
        sock.setblocking(False)
        self.link = link
        self._on_room = on_room
        self._unread = OutputBudget() if unread is None else unread
        self._is_short = False
        self._loop = loop.guarded(self._failed)
        self.sock = sock
        """Only for handing it on: no other code reads from it or writes to it."""
        self._on_happening = on_happening
        self._watching = READ
        self._is_open = True
        self._will_push = False
        self._loop.watch(sock.fileno(), READ, self._ready)

    def may_add(self, most: int) -> int:
        """How much of this a stream may queue now. Where that is little, ``on_room`` tells when there is more."""
        room = min(most, self._unread.room(self.link.waiting)) if self._is_open else 0
        self._is_short = self._is_short or room < UNREAD_LEAST_BYTES
        return room

    def push(self, *, at_once: bool = False) -> None:
        """What was said is to go out, at the end of this turn; ``at_once``: now, as far as the socket takes it."""
        if self._is_open and at_once:
            self._send()
        if self._is_open:
            self._unread.now(self, self.link.waiting)
        if self._is_open and not self._will_push:
            self._will_push = True
            self._loop.soon(self._push)

    def cut(self, error: SubletError | None = None) -> None:
        """Hang up, on both sides and on every duplicate of the descriptor."""
        if self._is_open:
            self.link.end(error)
            self._send()
            self._shut()
            self._on_happening(Over(error, by_peer=False))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Guards what is done for this connection in a turn of another one: if it fails, this connection is cut, and
        that turn goes on."""
        try:
            yield
        except SubletError as error:
            self.cut(error)
        except Exception as error:  # noqa: BLE001 - one connection must not be able to end the guests of all others
            log_internal_error(error)
            self.cut(internal_error())

    def hand_over(self) -> socket.socket | None:
        """The socket, which is served elsewhere from now on; all output was sent. None if that cannot be:
        something is still under way, and the connection is cut."""
        if not self._is_open:
            return None
        if not self._send() or self.link.over is not None or not self.link.is_between:
            self.cut(Disconnected("more was under way on this connection when it was to be handed on"))
            return None
        self._is_open = False
        self._unread.now(self, 0)
        self._loop.forget(self.sock.fileno())
        return self.sock

    def _failed(self, error: Exception) -> None:
        self.cut(internal_error())

    def _ready(self, events: int) -> None:
        short: NotRead | None = None
        with self.guard():
            if events & WRITE:
                self._push()
            if self._is_open and events & ~WRITE:
                try:
                    happened = reading(lambda: receive_some(self.sock, self.link))
                except NotRead as error:
                    short = error
                else:
                    self._handle_events(happened)
                    self.push()
        if short is not None:
            raise short  # to the loop, which calls again

    def _handle_events(self, happened: list[Happening]) -> None:
        for happening in happened:
            if isinstance(happening, Over):
                self._send()
                self._shut()
            self._on_happening(happening)

    def _push(self) -> None:
        self._will_push = False
        if self._is_open:
            is_out = self._send()
            wanted = (READ if self.link.wants_input else 0) | (0 if is_out else WRITE)
            if self.link.over is not None:  # too much piled up: a peer that does not read is not waited for
                self._handle_events(self.link.news())
            elif wanted != self._watching:
                self._watching = wanted
                self._loop.change(self.sock.fileno(), wanted)
            if is_out and self._is_short and self._is_open:
                self._is_short = False
                self._on_room()
            self._unread.relieve()

    def _send(self) -> bool:
        try:
            return send_some(self.sock, self.link)
        except OSError as error:
            if is_shortage(error):  # what is to be sent is still there
                self._loop.after(AGAIN_S, self._push)
            return True  # else the reading side will find out, and says so
        finally:
            self._unread.now(self, self.link.waiting)

    def _shut(self) -> None:
        self._is_open = False
        self._unread.now(self, 0)
        self._loop.forget(self.sock.fileno())
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def internal_error() -> SubletError:
    """What is said of an error that was not foreseen."""
    return SubletError("internal error in the supervisor; see its log")
