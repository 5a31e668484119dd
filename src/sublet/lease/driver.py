"""Ticks a renewal manager by itself, on a thread that ends with the program.

The thread holds the lock while it decides and lets go of it while it waits for the office, so a slow answer never keeps
another thread from starting or ending work. Waiting is handed in (``Waiter``): tests hold the clock and never sleep.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from sublet.background import start_thread
from sublet.clock import Clock, SystemClock
from sublet.lease.holder import Holder
from sublet.lease.policy import RenewalPolicy
from sublet.lease.renewal import Renewable, RenewalManager, Summary
from sublet.lease.value import Attempt, Outcome
from sublet.values import NS_PER_S, LeaseId

WAIT_MAX_NS: Final = 5 * NS_PER_S
"""Look at the clock at least this often: a machine that was suspended wakes with its deadlines passed, and a waiting
thread's own clock did not run meanwhile."""
ERROR_PAUSE_NS: Final = NS_PER_S
"""After an error in a callback, so that a broken one does not spin."""

_log: Final = logging.getLogger("sublet.lease")


class Waiter(Protocol):
    """How the driver waits. ``wait`` is called by its thread only, ``wake`` by any thread."""

    def wait(self, until_ns: int) -> None:
        """Return at ``until_ns`` or later, or soon after ``wake``. A ``wake`` before the ``wait`` counts."""

    def wake(self) -> None:
        """End the present or the next wait."""


class ConditionWaiter:
    """Really waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = threading.Event()

    def wait(self, until_ns: int) -> None:
        left_ns = min(WAIT_MAX_NS, until_ns - self._clock.now_ns())
        if left_ns > 0:
            self._event.wait(left_ns / NS_PER_S)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()


class RenewalDriver:
    """A manager with a lock and a thread. Tell holders about their work through ``change``."""

    def __init__(
        self,
        manager: RenewalManager,
        *,
        clock: Clock | None = None,
        waiter: Waiter | None = None,
        on_summary: Callable[[Summary], None] | None = None,
    ) -> None:
        """``on_summary`` is called on the driver's thread whenever something happened, without the lock."""
        self._manager = manager
        self._clock = clock or SystemClock()
        self._waiter = waiter or ConditionWaiter(self._clock)
        self._on_summary = on_summary
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def register(self, lease: Renewable, policy: RenewalPolicy | None = None) -> Holder:
        """As ``RenewalManager.register(lease, policy)``."""
        with self._lock:
            holder = self._manager.register(lease, policy)
        self._waiter.wake()
        return holder

    def add(self, holder: Holder, send: Callable[[Attempt], Outcome] | None = None) -> Holder:
        """As ``RenewalManager.add``."""
        with self._lock:
            self._manager.add(holder, send)
        self._waiter.wake()
        return holder

    def unregister(self, lease: LeaseId) -> None:
        """As ``RenewalManager.unregister``."""
        with self._lock:
            self._manager.unregister(lease)

    @contextmanager
    def change(self, lease: LeaseId) -> Iterator[Holder]:
        """The holder, under the lock; afterwards the thread looks at it again. Do nothing slow in here."""
        with self._lock, self._manager.change(lease) as holder:
            yield holder
        self._waiter.wake()

    @contextmanager
    def locked(self) -> Iterator[RenewalManager]:
        """The manager, under the lock."""
        with self._lock:
            yield self._manager

    def start(self) -> None:
        """Begin ticking; harmless if it does already. The thread does not keep the program alive."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._stopping = False
                self._thread = start_thread("renewal", self.run, again=True)

    def stop(self, timeout: float | None = 5.0) -> None:
        """Stop ticking, and wait up to ``timeout`` seconds for a request in flight. Leases are left as they are."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopping = True
        self._waiter.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def run(self) -> None:
        """Tick until stopped: what the thread does."""
        while not self._stopping:
            try:
                self._waiter.wait(self.step())
            except Exception:  # noqa: BLE001 - one broken callback must not let every other lease expire in silence
                _log.exception("the renewal of leases failed in a callback; it goes on")
                self._waiter.wait(self._clock.now_ns() + ERROR_PAUSE_NS)

    def step(self) -> int:
        """Tick once; returns the moment of the next. A full batch is followed by the next one at once."""
        with self._lock:
            batch = self._manager.collect(self._clock.now_ns())
        outcomes = self._manager.send(batch) if batch.attempts else ()
        with self._lock:
            summary = self._manager.settle(batch, outcomes, self._clock.now_ns())
            wake_ns = self._manager.next_wake_ns()
        if summary and self._on_summary is not None:
            self._on_summary(summary)
        return self._clock.now_ns() + WAIT_MAX_NS if wake_ns is None else wake_ns
