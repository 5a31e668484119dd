"""Calls of the holder that a kernel answers in the middle of a cell, because the cell waits for one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["Kernel", "answer_calls", "kernels"]


class Kernel(Protocol):
    """What ``answer_calls`` needs of it."""

    def answer_calls(self, ask: Callable[[], object], until: Callable[[], bool]) -> None:
        """On the main thread: ask, and do what the holder calls for, until that is so. Interrupts wait meanwhile."""


kernels: Final[list[Kernel]] = []
"""The one of this process, if it is a kernel's guest."""


def answer_calls(ask: Callable[[], object], until: Callable[[], bool]) -> None:
    """On the main thread and within a cell: ask the holder for something, and wait for the calls by which it answers.
    Nothing is asked where this process is no kernel's guest."""
    if kernels:
        kernels[-1].answer_calls(ask, until)
