"""What other processes see of a forked guest: its command line and its marks.

/proc shows the arguments and the environment a process was *started* with, and it reads them from the process's own
memory each time. A guest forked from a zygote would look like the zygote: ``ps`` could not tell guests apart, and a
supervisor that looks for unknown guests would not find them. So the guest writes over that memory.

The arguments are the program's by convention (as ``setproctitle`` uses them: one text, and a last byte that is not zero
tells the kernel so). In the environment only the value of one variable of ours is written over (``ROOM``), because some
library may still hold on to the others.

All of it is for those who look on: where it cannot be done, nothing else changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from sublet.wire.zygote import ROOM

_ARGUMENTS = 48 - 3
_ENVIRONMENT = 50 - 3
"""Places in /proc/self/stat after the name, of the first of two addresses each."""


def show(title: str, marks: Mapping[str, str]) -> bool:
    """Look like this from outside; whether it worked."""
    try:
        with open("/proc/self/stat", "rb") as file:
            numbers = file.read().rpartition(b")")[2].split()
        _write_title(title.encode("utf-8", "surrogateescape"), *map(int, numbers[_ARGUMENTS : _ARGUMENTS + 2]))
        _write_marks(marks, *map(int, numbers[_ENVIRONMENT : _ENVIRONMENT + 2]))
    except (OSError, ValueError, IndexError):
        return False
    return True


def shown_marks(marks: Mapping[str, str], room: int) -> bytes:
    """As many of the marks as fit, as /proc/<pid>/environ separates them, and nothing after them."""
    made = b""
    for name, value in marks.items():
        more = b"\0" + f"{name}={value}".encode("utf-8", "surrogateescape")
        if len(made) + len(more) <= room:
            made += more
    return made.ljust(room, b"\0")


def _write_title(title: bytes, start: int, end: int) -> None:
    room = end - start
    if start and room >= 2:
        ctypes.memmove(start, title[: room - 2].ljust(room - 1, b"\0") + b".", room)


def _write_marks(marks: Mapping[str, str], start: int, end: int) -> None:
    if not start or end <= start:
        return
    found = ctypes.string_at(start, end - start)
    name = f"{ROOM}=".encode()
    at = found.find(name)
    if at >= 0 and (at == 0 or found[at - 1] == 0):
        room = found.index(b"\0", at) - at - len(name)
        ctypes.memmove(start + at + len(name), shown_marks(marks, room), room)
