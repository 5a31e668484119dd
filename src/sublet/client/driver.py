"""Executes a client program's steps with blocking calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from sublet.client.steps import HttpCall, HttpReply, Pause, Program, Revive, Step

T = TypeVar("T")


def run_program(
    program: Program[T],
    exchange: Callable[[HttpCall], HttpReply],
    revive: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The program's result. Whatever goes wrong with a step, an interrupt included, is thrown into the program, so
    that it can still put things right (leave the queue, give back what was granted) before it ends. That holds for an
    interrupt between two steps as well, when an answer was brought and the program has not seen it yet.

    No variable keeps an error: this frame is in its trace, so the two would keep each other, and all that the frames of
    the callers have. A lease among that would not be noticed as dropped."""
    reply: HttpReply | None = None
    wrong: BaseException | None = None
    try:
        while True:
            try:
                while True:  # within, for an interrupt comes where a loop turns back
                    if wrong is None:
                        step = program.send(reply)
                    else:
                        thrown, wrong = wrong, None
                        try:
                            step = program.throw(thrown)
                        finally:
                            del thrown
                    reply = _carry_out(step, exchange, revive, sleep)
            except StopIteration as stop:
                result: T = stop.value
                return result
            except BaseException as error:
                if getattr(program, "gi_frame", None) is None:  # it has ended, and by this
                    raise
                wrong = error
    finally:
        wrong = None


def _carry_out(
    step: Step, exchange: Callable[[HttpCall], HttpReply], revive: Callable[[], None], sleep: Callable[[float], None]
) -> HttpReply | None:
    match step:
        case HttpCall():
            return exchange(step)
        case Pause(seconds):
            sleep(seconds)
        case Revive():
            revive()
    return None
