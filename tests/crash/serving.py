"""What every program of the crash tests does around its stories: a process that is warm, and a fork for each order.

An order is a line of JSON on stdin. The fork says its pid, waits until somebody holds it (a traced ``getppid`` that
lies), and plays; its exit status is the answer. What the tests inject counts the calls of the story alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sublet.errors import SubletError
from tests.crash.journal_program import HELD, REFUSED, Diary

__all__ = ["serve", "take_orders"]

_PR_SET_PTRACER: Final = 0x59616D61
_ANYBODY: Final = ctypes.c_ulong(-1)

Story = Callable[[Path, Callable[[dict[str, object]], None]], object]


def serve(stories: Mapping[str, Story], *, refused: tuple[type[Exception], ...] = (SubletError,)) -> None:
    """Until stdin ends. ``refused``: what a story may be refused with."""
    take_orders(lambda order: _play(stories, order, refused))


def take_orders(play: Callable[[dict[str, Any]], int]) -> None:
    """Until stdin ends: each line is an order, carried out in a child, whose exit status is answered."""
    line = b""
    while byte := os.read(0, 1):
        if byte != b"\n":
            line += byte
            continue
        order, line = json.loads(line), b""
        child = os.fork()
        if child == 0:
            os._exit(play(order))
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _play(stories: Mapping[str, Story], order: dict[str, Any], refused: tuple[type[Exception], ...]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)  # where only parents may trace; refused elsewhere
    diary = Diary(Path(order["diary"]))
    os.write(1, f"{os.getpid()}\n".encode())  # only now may strace come, or the diary's calls would count as well
    while os.getppid() != HELD:
        time.sleep(0.0002)
    try:
        stories[order["story"]](Path(order["home"]), diary.note)
    except refused:
        return REFUSED
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
