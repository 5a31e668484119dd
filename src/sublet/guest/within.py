"""Lets a holder's calls use the kernel that executes them: to run a cell, or to answer other calls during one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol


class CallingKernel(Protocol):
    """What is needed of it."""

    def answer_calls(self, ask: Callable[[], object], until: Callable[[], bool]) -> None:
        """On the main thread: ask, and do what the holder calls for, until that is so. Interrupts wait meanwhile."""

    async def run_cell(self, request: dict[str, Any], then: Callable[[], Any]) -> tuple[Any, ...]:
        """Run the cell of an ``execute_request``: the content of its reply, and what ``then`` gives when it is over.
        Its outputs, and after them ``idle``, go to the kernel's channels."""


kernels: Final[list[CallingKernel]] = []
"""The one of this process, if it is a kernel's guest."""


def answer_calls(ask: Callable[[], object], until: Callable[[], bool]) -> None:
    """On the main thread and within a cell: ask the holder for something, and wait for the calls by which it answers.
    Nothing is asked where this process is no kernel's guest."""
    if kernels:
        kernels[-1].answer_calls(ask, until)


def run_cell(request: dict[str, Any], then: Callable[[], Any]) -> Coroutine[Any, Any, tuple[Any, ...]]:
    """Run a cell in the kernel of this process, as ``CallingKernel.run_cell`` says. A service returns this to
    its caller: the answer is what comes of it."""
    return kernels[-1].run_cell(request, then)
