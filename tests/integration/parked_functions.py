"""Functions that a worker imports by name, to be suspended in the middle."""

from __future__ import annotations

import os
import time
from pathlib import Path


def pid() -> int:
    return os.getpid()


def count_up(path: str, times: int) -> int:
    """A byte for each time; how many there are."""
    with open(path, "ab", buffering=0) as file:
        for _ in range(times):
            file.write(b".")
            time.sleep(0.02)
    return times


def count_until(path: str, enough: str) -> int:
    """The same until a file is there."""
    times = 0
    with open(path, "ab", buffering=0) as file:
        while not os.path.exists(enough):
            times += file.write(b".")
            time.sleep(0.02)
    return times


_kept: list[str] = []


def remember(what: str) -> None:
    _kept.append(what)


def remembered() -> str:
    return _kept[-1] if _kept else "nothing"


def save_in_the_end() -> int:
    """When its lease is taken for good, a word is left in the volume."""
    import sublet

    here, durable = sublet.current(), sublet.Durable  # imported now: in the end there are five seconds

    @here.on_checkpoint
    def save() -> None:
        with durable("saved in the end", here.volume) as state:
            state.checkpoint()

    return os.getpid()


def save_slowly(folder: str) -> int:
    """At a notice: say that it has begun, and go on when it is told to."""
    import sublet

    @sublet.current().on_checkpoint
    def save() -> None:
        Path(folder, "begun").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)

    return os.getpid()
