"""A thread for calls that no caller waits for: futures, and interrupted calls that must not end.

It is there while there is something to do, and a moment longer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from sublet.background import is_shortage, start_thread
from sublet.compute.calls import WINDOW, Exchange, PendingCall

LINGER_S: Final = 1.0
LISTEN_S: Final = 0.25
"""It looks so often whether something became due that was not when it began to listen."""


class WatchedCall(Protocol):
    """A call that no caller waits for."""

    pending: PendingCall

    def begin(self) -> bool:
        """Send it; False if it is not wanted any more."""

    def finish(self) -> None:
        """It is done: complete it."""

    def time_is_up(self) -> None:
        """It ran for too long."""


class CompletionThread:
    """Of one exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._changed = threading.Condition()
        self._waiting: deque[WatchedCall] = deque()
        self._running: set[WatchedCall] = set()
        self._finished: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._stirred = False
        exchange.kept_by(self.wake)

    def add(self, one: WatchedCall) -> None:
        """See that it is sent when there is room, and completed when it is done."""
        with self._changed:
            self._waiting.append(one)
        self._start()

    def withdraw(self, one: WatchedCall) -> bool:
        """Take it back; False if it was sent."""
        with self._changed:
            try:
                self._waiting.remove(one)
            except ValueError:
                return False
            return True

    def done(self, one: WatchedCall) -> None:
        """It has an answer. Called while a thread listens, so it is completed later."""
        with self._changed:
            self._running.discard(one)
            self._finished.append(one.finish)
        self._start()

    def wake(self) -> None:
        """Look again."""
        with self._changed:
            self._stirred = True
            if self._thread is None and not self._has_to_do():
                return
        self._start()

    def _start(self) -> None:
        with self._changed:
            self._stirred = True
            if self._thread is None:
                self._thread = start_thread("calls", self._run, again=True)
            else:
                self._changed.notify()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            if not is_shortage(error):  # its calls would wait for ever: they are lost, and their callers are told
                self._exchange.close()
            raise

    def _work(self) -> None:
        idle_s: float | None = None
        while True:
            while self._finished:
                self._finished.popleft()()
            self._begin_waiting()
            self._check_time()
            if self._exchange.listen(lambda: self._stirred or bool(self._finished), self._patience_s()):
                idle_s = None
                continue
            with self._changed:
                busy = self._has_to_do()
                now_s = time.monotonic()
                idle_s = None if busy else (idle_s or now_s)
                if idle_s is not None and now_s - idle_s >= LINGER_S:
                    self._thread = None
                    return
                if not self._stirred and not self._finished:
                    self._changed.wait(self._patience_s() if busy else LINGER_S)
                self._stirred = False

    def _has_to_do(self) -> bool:
        return bool(self._waiting or self._running or self._finished) or self._exchange.next_doom_ns() is not None

    def _begin_waiting(self) -> None:
        with self._changed:
            self._stirred = False
        while self._waiting and (self._exchange.under_way < WINDOW or self._exchange.lost is not None):
            with self._changed:
                if not self._waiting:
                    return
                one = self._waiting.popleft()
                self._running.add(one)
            try:
                is_begun = one.begin()
            except BaseException:
                with self._changed:
                    self._running.discard(one)
                    self._waiting.appendleft(one)
                raise
            if not is_begun:
                with self._changed:
                    self._running.discard(one)

    def _check_time(self) -> None:
        self._exchange.end_doomed()
        now_ns = time.monotonic_ns()
        for one in list(self._running):
            due_ns = self._exchange.due_ns(one.pending)
            if due_ns is not None and now_ns >= due_ns - 1_000_000 and not one.pending.is_done:
                with self._changed:
                    self._running.discard(one)
                one.time_is_up()

    def _patience_s(self) -> float:
        moments = [self._exchange.due_ns(one.pending) for one in list(self._running)]
        moments.append(self._exchange.next_doom_ns())
        left = [(at_ns - time.monotonic_ns()) / 1e9 for at_ns in moments if at_ns is not None]
        return max(0.0, min([LISTEN_S, *left]))
