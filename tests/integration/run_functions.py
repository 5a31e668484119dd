"""Functions that a worker imports by name."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

COUNT = 0


def where() -> tuple[int, str]:
    return os.getpid(), sys.executable


def count() -> int:
    """How often it was called in this process."""
    global COUNT
    COUNT += 1
    return COUNT


def wait_for(path: str) -> None:
    """Until this file is there."""
    while not os.path.exists(path):
        time.sleep(0.02)


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, value: float) -> float:
        return self.factor * value

    def __call__(self, value: float) -> float:
        return self.times(value)


class Demanding(Exception):
    """Can be pickled, and cannot be loaded."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def demand() -> None:
    raise Demanding(1, 2)


def total(array: Any) -> float:
    return float(array.sum())


def spoil(array: Any) -> float:
    """Change the argument in place."""
    array[:] = -1
    return float(array.sum())


def meet(folder: str, me: int, other: int) -> tuple[int, str]:
    """Come together with a call in another process; which process and device this one has."""
    with open(os.path.join(folder, str(me)), "w"):
        wait_for(os.path.join(folder, str(other)))
    return os.getpid(), os.environ.get("SUBLET_DEVICE", "")
