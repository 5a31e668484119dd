"""Saves from an asyncio program that holds a lease of blocks, on other threads, so that the loop never waits for a
disk::

    state = await asyncio.to_thread(sublet.Durable, {"step": 0}, block)
    await asyncio.to_thread(state.checkpoint)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet.client.volume_line import HolderLine
from sublet.errors import InvalidRequest
from sublet.wire.http import TokenView
from sublet.wire.volumes import VolumeCall, VolumeReply

if TYPE_CHECKING:
    from sublet.client.handle import LoopLease


class LoopLine(HolderLine):
    """The line of a lease that belongs to a loop, for any thread but that loop's."""

    def __init__(self, lease: LoopLease, loop: asyncio.AbstractEventLoop) -> None:
        fabric, name = lease._fabric, lease.id

        def token() -> str:
            query = fabric._run(fabric._core.query(f"/v1/leases/{name}/token", TokenView))
            return asyncio.run_coroutine_threadsafe(query, loop).result().token

        super().__init__(fabric.address, token, lambda: (name, lease.epoch), lambda: in_use(lease, loop))
        self._loop = loop

    def ask(self, call: VolumeCall) -> VolumeReply:
        self._check_not_on_loop()
        return super().ask(call)

    def lend(self) -> str:
        self._check_not_on_loop()
        return super().lend()

    def _check_not_on_loop(self) -> None:
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                raise InvalidRequest(
                    "saving and restoring wait for a disk, and would keep this event loop waiting",
                    do="Do it on another thread: `state = await asyncio.to_thread(sublet.Durable, value, lease)`, then "
                    "`await asyncio.to_thread(state.checkpoint)`.",
                )


def in_use(lease: LoopLease, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """It is in use from now on, until what this returns is called; each in the loop as soon as it comes to it."""
    running = contextlib.ExitStack()
    loop.call_soon_threadsafe(lambda: running.enter_context(lease.activity()))

    def end() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the lease with it
            loop.call_soon_threadsafe(running.close)

    return end
