"""Executes a client program's steps in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sublet.client.steps import HttpCall, HttpReply, Pause, Program, Revive, Step

T = TypeVar("T")


async def run_program(
    program: Program[T],
    exchange: Callable[[HttpCall], Awaitable[HttpReply]],
    revive: Callable[[], Awaitable[None]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """The program's result. A cancellation is thrown into the program like everything else, so that it can leave the
    queue or give back what it was granted before it ends."""
    try:
        step = next(program)
        while True:
            try:
                reply = await _carry_out(step, exchange, revive, sleep)
            except BaseException as error:  # noqa: BLE001 - the program decides; what it does not take comes out again
                step = program.throw(error)
            else:
                step = program.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def _carry_out(
    step: Step,
    exchange: Callable[[HttpCall], Awaitable[HttpReply]],
    revive: Callable[[], Awaitable[None]],
    sleep: Callable[[float], Awaitable[None]],
) -> HttpReply | None:
    match step:
        case HttpCall():
            return await exchange(step)
        case Pause(seconds):
            await sleep(seconds)
        case Revive():
            await revive()
    return None
