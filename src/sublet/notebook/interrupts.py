"""Delays an interrupt during a transfer until a safe point.

Wherever else it came it would tear something: a message that was read and not yet passed on, a lease that was granted
and not yet written down, results of which one half is here. So it is only noted, and the code that runs the cell says
where it may be raised: where it waits for something that may take long.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

AFTERWARDS: Final = "interrupted after the cell was done"
"""What a ``KeyboardInterrupt`` says that has waited to the end."""
INSISTS_S: Final = 1.0
"""An interrupt so long after one that still waits is raised at once: what they wait for may never end. A sooner one
repeats the first."""


class Interrupts:
    """Those that wait."""

    def __init__(self) -> None:
        self._waiting = 0
        self._since_s = 0.0
        """The first of them came then."""
        self._is_open = False
        self._is_patient = False

    def note(self, _number: int = signal.SIGINT, _frame: object = None) -> None:
        """For SIGINT."""
        now_s = time.monotonic()
        insists = self._waiting > 0 and now_s - self._since_s >= INSISTS_S and not self._is_patient
        self._since_s = self._since_s if self._waiting else now_s
        self._waiting += 1
        if self._is_open or insists:
            self._is_open = False
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Whether one has come; it does not wait any longer."""
        has_come, self._waiting = self._waiting > 0, 0
        return has_come

    @property
    def are_waiting(self) -> bool:
        return self._waiting > 0

    def check(self) -> None:
        """Here it may be raised, if one has come."""
        if self.take():
            raise KeyboardInterrupt

    def put_back(self) -> None:
        """Note an interrupt again that was taken and had no effect."""
        self._waiting, self._since_s = self._waiting + 1, self._since_s if self._waiting else time.monotonic()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """In the block one is raised wherever it comes, and one that has come at once. It is not taken by that."""
        try:
            self._is_open = True
            if self._waiting:
                raise KeyboardInterrupt
            yield
        finally:
            self._is_open = False

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """In the block the caller polls for interrupts, and a repeated one is not raised at once."""
        self._is_patient = True
        try:
            yield
        finally:
            self._is_patient = False

    def cut_short(self, wait: Callable[[], object]) -> None:
        """Wait, but no longer than until one comes."""
        with contextlib.suppress(KeyboardInterrupt), self.open():
            wait()


@contextlib.contextmanager
def interrupts_wait() -> Iterator[Interrupts]:
    """The first one is raised at the end of the block, where nothing else is; one that insists at once."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # interrupts come on the main thread only
        return
    before: Any = signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        if before is not None:  # else it was set by a library in C, and cannot be set again from here
            signal.signal(signal.SIGINT, before)
    if interrupts.take():
        raise KeyboardInterrupt(AFTERWARDS)
