"""One thread hears the news of all guests that a fabric's leases have started: that they exited, and why."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from sublet.wire.conversation import Conversation
from sublet.wire.happenings import Happening, Over

__all__ = ["Watch"]

_LOOK_AGAIN_MS = 5_000
"""A wait stands still while the machine sleeps."""

Hear = Callable[[Happening], bool]
"""Told everything that happens on a connection; True: that was all, and it may be closed."""


class Watch:
    """Its thread lives while there is something to hear. It owns the connections it was given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[int, tuple[Conversation, Hear]] = {}
        self._thread: threading.Thread | None = None
        self._wake = -1

    def add(self, conversation: Conversation, hear: Hear) -> None:
        """Listen to this one from now on."""
        with self._lock:
            self._heard[conversation.fileno()] = (conversation, hear)
            if self._thread is None:
                woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                self._thread = threading.Thread(target=self._run, args=(woken,), name="sublet-guests", daemon=True)
                self._thread.start()
            else:
                self._nudge()

    def close(self) -> None:
        """Listen to nobody any more; who waits is told. The guests go on."""
        with self._lock:
            heard, self._heard = self._heard, {}
            if self._thread is not None:
                self._nudge()
        for conversation, hear in heard.values():
            hear(Over(None, by_peer=False))
            conversation.close()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake, b"!")

    def _run(self, woken: int) -> None:
        try:
            while True:
                with self._lock:
                    watched = dict(self._heard)
                    if not watched:
                        self._thread = None
                        os.close(self._wake)
                        return
                self._wait(woken, watched)
                for fd, (conversation, hear) in watched.items():
                    is_over = False
                    for happening in conversation.pump():
                        is_over = hear(happening) or is_over
                    if is_over:
                        self._drop(fd, conversation)
        finally:
            os.close(woken)

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
            if self._heard.get(fd, (None, None))[0] is conversation:
                del self._heard[fd]
                conversation.close()
