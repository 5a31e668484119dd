"""Carries a program's steps out with blocking calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from sublet.client.steps import Call, Pause, Program, Reply, Revive, Step

__all__ = ["run_program"]

T = TypeVar("T")


def run_program(
    program: Program[T],
    exchange: Callable[[Call], Reply],
    revive: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The program's result. Whatever goes wrong with a step, an interrupt included, is thrown into the program, so
    that it can still put things right (leave the queue, give back what was granted) before it ends."""
    try:
        step = next(program)
        while True:
            try:
                reply = _carry_out(step, exchange, revive, sleep)
            except BaseException as error:  # noqa: BLE001 - the program decides; what it does not take comes out again
                step = program.throw(error)
            else:
                step = program.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _carry_out(
    step: Step, exchange: Callable[[Call], Reply], revive: Callable[[], None], sleep: Callable[[float], None]
) -> Reply | None:
    match step:
        case Call():
            return exchange(step)
        case Pause(seconds):
            sleep(seconds)
        case Revive():
            revive()
    return None
