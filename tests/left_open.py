"""Counting what is open, and who runs, for tests of what must not leak.

A process of the suite is never still: garbage of earlier tests is collected and closes what it had, and their last
threads open and close things. So nothing here compares counts: what is *new* counts, and only once it stays.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

Thing = TypeVar("Thing")

PATIENCE_S: Final = 60.0
"""For how long something may still be open that whoever opened it closes in a moment; what leaks is open for ever."""


def open_now() -> frozenset[tuple[int, str]]:
    """Every open descriptor of this process with what it is, but for the one that is needed to look."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return frozenset(found)


def threads_now(name: str) -> frozenset[threading.Thread]:
    """The threads of that name."""
    return frozenset(thread for thread in threading.enumerate() if thread.name == name)


def left_of(now: Callable[[], frozenset[Thing]], before: frozenset[Thing]) -> frozenset[Thing]:
    """What has come since and stays."""
    end_s = time.monotonic() + PATIENCE_S
    left = now() - before
    while left and time.monotonic() < end_s:
        time.sleep(0.01)
        left &= now()  # what comes meanwhile is somebody else's
    return left


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """What is opened inside is closed inside."""
    before = open_now()
    yield
    left = left_of(open_now, before)
    assert not left, f"left open: {sorted(left)}"


def some_fd() -> int:
    """A descriptor worth passing on."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def same_file(left: int, right: int) -> bool:
    """Whether two descriptors are of one file."""
    return os.path.sameopenfile(left, right)
