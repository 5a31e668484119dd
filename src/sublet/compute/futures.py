"""The future of a call: a ``concurrent.futures.Future`` that can be cancelled while the function runs."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

__all__ = ["CallFuture"]


class CallFuture(concurrent.futures.Future[Any]):
    """What will come of a call.

    It can be cancelled at any time before it is done. A function that runs is interrupted (``KeyboardInterrupt`` in the
    worker); if it does not leave within a grace, its process is ended. To ``concurrent.futures`` a future of ours is
    pending until it is done, so that it stays cancellable; ``running()`` tells the truth all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._withdraw: Callable[[], None] = _nothing
        self._is_running: Callable[[], bool] = _never

    def attach(self, withdraw: Callable[[], None], is_running: Callable[[], bool]) -> None:
        """What to do when it is cancelled, and how to see whether it runs."""
        self._withdraw, self._is_running = withdraw, is_running

    def cancel(self) -> bool:
        """Whether it is cancelled now. What it was to give is dropped."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()  # who waits for it is told
        withdraw, self._withdraw = self._withdraw, _nothing
        withdraw()
        return True

    def running(self) -> bool:
        """Whether its function is being executed just now."""
        return not self.done() and self._is_running()

    def deliver(self, value: Any = None, *, error: BaseException | None = None) -> None:
        """It is done. Nothing if it was cancelled meanwhile."""
        if self.done() or not self.set_running_or_notify_cancel():
            return
        self._withdraw, self._is_running = _nothing, _never
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


def _nothing() -> None:
    return


def _never() -> bool:
    return False
