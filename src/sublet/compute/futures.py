"""The future of a call: a ``concurrent.futures.Future`` that can be cancelled while the function runs."""

from __future__ import annotations

import concurrent.futures
from typing import Any, Protocol


class CancellableCall(Protocol):
    """What a future stands for."""

    def withdraw(self) -> None:
        """It is not wanted any more."""

    def is_running(self) -> bool:
        """Whether it is being executed just now."""

    def stop_further_items(self) -> bool:
        """Begin no further item."""

    def begun(self) -> int | None:
        """How many items were begun."""

    def made(self) -> list[Any]:
        """Results that are there."""


class CallFuture(concurrent.futures.Future[Any]):
    """What will come of a call.

    It can be cancelled at any time before it is done. A function that runs is interrupted (``KeyboardInterrupt`` in the
    worker); if it does not leave within a grace, its process is ended. To ``concurrent.futures`` a future of ours is
    pending until it is done, so that it stays cancellable; ``running()`` tells the truth all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._call: CancellableCall | None = None

    def attach(self, call: CancellableCall) -> None:
        """What it stands for."""
        self._call = call

    def withhold(self) -> bool:
        """Of a call of many: let what executes go on, and begin no further item. The results are then fewer than the
        items, without an error. False if that cannot be said now. Harmless twice."""
        call = self._call
        return call is not None and call.stop_further_items()

    def begun(self) -> int | None:
        """Of a call of many from which the rest is withheld since a moment: how many items were begun at most; None
        where it is not being executed, or is done."""
        call = self._call
        return None if call is None else call.begun()

    def made(self) -> list[Any]:
        """Of a call of many that is given up: its results that are there, in order, though it is not done. What it
        comes to is not changed by this."""
        call = self._call
        if call is not None and not self.done():
            return call.made()
        if self.cancelled() or self.exception() is not None:
            return []
        found: list[Any] = self.result().results
        return found

    def cancel(self) -> bool:
        """Whether it is cancelled now. What it was to give is dropped."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()  # who waits for it is told
        call, self._call = self._call, None
        if call is not None:
            call.withdraw()
        return True

    def running(self) -> bool:
        """Whether its function is being executed just now."""
        call = self._call
        return call is not None and not self.done() and call.is_running()

    def deliver(self, value: Any = None, *, error: BaseException | None = None) -> None:
        """It is done. Nothing if it was cancelled meanwhile."""
        if self.done() or not self.set_running_or_notify_cancel():
            return
        self._call = None
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)
