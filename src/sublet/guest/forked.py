"""Handles a cell that forks: the child must not continue as a second kernel.

Its loop waits on what the kernel's loop waits on, so it takes wake-ups meant for the kernel, which then misses the
next call. So it has a loop of its own from the first moment, and it is over when its cell is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import sys
from typing import Any


def end_with_the_cell(shell: Any, loop: asyncio.AbstractEventLoop) -> None:
    """From now on, for every process that a cell forks from this one and does not end itself."""
    home = os.getpid()

    def part() -> None:
        if getattr(loop, "_selector", None) is not None:
            loop._selector = selectors.DefaultSelector()  # type: ignore[attr-defined]  # only what is due, and no fd

    def leave(result: Any) -> None:
        if os.getpid() == home:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a cell may have closed it, or put anything in its place
                stream.flush()
        os._exit(status_of(result))

    os.register_at_fork(after_in_child=part)
    shell.events.register("post_run_cell", leave)


def status_of(result: Any) -> int:
    """The exit status that tells a waiting process how its cell ended."""
    error = None if result is None else result.error_in_exec or result.error_before_exec
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return int(result is None or error is not None)
