"""What chunks of the tests call; in a module that workers import as well."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sublet import jobs


def square(x: int) -> int:
    return x * x


def noted(where: str, x: int) -> int:
    """A tiny chunk with a side effect that can be counted."""
    time.sleep(0.001)
    with open(where, "a", encoding="utf-8") as file:
        file.write(f"{x} {os.getpid()}\n")
    return x


def row_of(table: Any, n: int) -> int:
    return int(table[n])


def row_of_bytes(table: Any, data: bytes) -> bytes:
    return b"%d" % row_of(table, int(data))


def moves(x: int) -> str:
    """Changes the working folder, for itself alone."""
    before = os.getcwd()
    os.chdir("/")
    return before


def forks(x: int) -> int:
    """The child comes out of the function as well."""
    if os.fork() == 0:
        return -1
    os.wait()
    return x


def exits(x: int) -> None:
    raise SystemExit(3)


def dies(x: int) -> None:
    os._exit(9)


def dies_once(where: str, x: int) -> int:
    mark = Path(where) / f"died-{x}"
    if x % 10 == 3 and not mark.exists():
        mark.touch()
        os._exit(9)
    return x


def large(x: int) -> bytes:
    return os.urandom(4 << 20)


def prints(begun: str, x: int) -> None:
    Path(begun).touch()
    while True:
        print("without end " * 100)


def nests(x: int) -> list[int]:
    return list(jobs.map(square, range(x), want=1))


def waits_for(gate: str) -> str:
    while not Path(gate).exists():
        time.sleep(0.01)
    return "done"
