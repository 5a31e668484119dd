"""One thread receives the events of all guests that a fabric's leases have started: that they exited, and why."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from sublet.background import Guard, is_shortage, start_thread
from sublet.errors import Disconnected
from sublet.wire.conversation import Conversation
from sublet.wire.link_events import Happening, Over

_LOOK_AGAIN_MS = 5_000
"""A wait stands still while the machine sleeps."""

Hear = Callable[[Happening], bool]
"""Told everything that happens on a connection; True: that was all, and it may be closed."""


class GuestWatch:
    """Its thread lives while there is something to hear. It owns the connections it was given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[Conversation, Hear]] = {}
        self._thread: threading.Thread | None = None
        self._wake = -1

    def add(self, conversation: Conversation, hear: Hear) -> None:
        """Listen to this one from now on."""
        with self._lock:
            if self._thread is None:
                woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                self._watched[conversation.fileno()] = (conversation, hear)
                try:
                    self._thread = start_thread("guests", lambda: self._run(woken), again=True)
                except BaseException:
                    del self._watched[conversation.fileno()]
                    os.close(woken)
                    os.close(wake)
                    raise
                self._wake = wake
            else:
                self._watched[conversation.fileno()] = (conversation, hear)
                self._nudge()

    def close(self) -> None:
        """Stop listening and tell the waiting readers. The guests go on."""
        with self._lock:
            watched, self._watched = self._watched, {}
            if self._thread is not None:
                self._nudge()
        for conversation, hear in watched.values():
            hear(Over(None, by_peer=False))
            conversation.close()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake, b"!")

    def _run(self, woken: int) -> None:
        guard = Guard("guests")
        while True:
            with self._lock:
                watched = dict(self._watched)
                if not watched:
                    self._thread = None
                    os.close(self._wake)
                    os.close(woken)
                    return
            try:
                self._wait(woken, watched)
                for fd, (conversation, hear) in watched.items():
                    self._pump(fd, conversation, hear)
            except (OSError, MemoryError) as error:  # of the wait itself, or a shortage: nothing was lost
                time.sleep(guard.failed(error))
            else:
                guard.passed()

    def _pump(self, fd: int, conversation: Conversation, hear: Hear) -> None:
        """What came on one connection. A connection that cannot be read any more is over, and its reader is told."""
        try:
            happened = conversation.pump()
        except Exception as error:
            if isinstance(error, OSError) and is_shortage(error):
                raise
            self._drop(fd, conversation)
            hear(Over(Disconnected(f"the connection to the guest failed ({error})"), by_peer=False))
            return
        is_over = False
        for happening in happened:
            is_over = hear(happening) or is_over
        if is_over:
            self._drop(fd, conversation)

    def _wait(self, woken: int, watched: dict[int, tuple[Conversation, Hear]]) -> None:
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        for fd, (conversation, _) in watched.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if conversation.wants_write else 0))
        has_kept = any(conversation.has_kept for conversation, _ in watched.values())
        poll.poll(0 if has_kept else _LOOK_AGAIN_MS)
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)

    def _drop(self, fd: int, conversation: Conversation) -> None:
        with self._lock:
            if self._watched.get(fd, (None, None))[0] is conversation:
                del self._watched[fd]
                conversation.close()
