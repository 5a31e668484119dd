"""Counting what is open, for tests of what must not leak."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def open_now() -> frozenset[tuple[int, str]]:
    """Every open descriptor of this process with what it is, but for the one that is needed to look."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return frozenset(found)


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """What is opened inside is closed inside."""
    before = open_now()
    yield
    left = open_now() - before
    assert not left, f"left open: {sorted(left)}"


def some_fd() -> int:
    """A descriptor worth passing on."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def same_file(left: int, right: int) -> bool:
    """Whether two descriptors are of one file."""
    return os.path.sameopenfile(left, right)
