"""Calls the user's callbacks on a thread of its own, in order, one at a time."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from sublet.background import start_thread

_log = logging.getLogger("sublet.client")


class Courier:
    """Its thread starts with the first delivery. A callback that raises is logged; the next is called all the same."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[Any], object], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def deliver(self, callback: Callable[[Any], object], what: object) -> None:
        """Call ``callback(what)`` soon. Call this under the fabric's lock."""
        self._queue.put((callback, what))
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no room for a thread now: the next delivery tries again
                self._thread = start_thread("callbacks", self._run, again=True)

    def _run(self) -> None:
        while True:
            callback, what = self._queue.get()
            try:
                callback(what)
            except Exception:  # noqa: BLE001 - it is the user's, and the next one has done nothing wrong
                _log.exception("a callback of a lease failed: %r", callback)
            del callback, what
