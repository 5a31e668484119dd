"""An interrupt that comes while a cell's results are taken waits until they are: half of them is worse than all."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["AFTERWARDS", "interrupts_wait"]

AFTERWARDS: Final = "interrupted after the cell was done"
"""What a ``KeyboardInterrupt`` says that has waited."""


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """The first one is raised at the end of the block, where nothing else is; the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts come on the main thread only
        return
    came = 0

    def note(number: int, frame: Any) -> None:
        nonlocal came
        came += 1
        if came > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if before is not None:  # else it was set by a library in C, and cannot be set again from here
            signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt(AFTERWARDS)
