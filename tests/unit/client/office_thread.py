"""A real broker behind a real unix socket, on a thread of this process: ledger, driver, service and HTTP.

Its hardware is pretended, and its clock moves only when it is told to, so that no lease ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from sublet.client.address import Address
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.office.api.server import HttpServer
from sublet.office.ledger.records import LeaseRecord
from sublet.values import Epoch, LeaseId
from tests.unit.office.api.bench import Bench, bench

__all__ = ["OfficeThread", "office_thread"]

AT_OFFICE = LIVE_STATES | {LeaseStatus.QUEUED, LeaseStatus.GRANTED}


class OfficeThread:
    """What a test asks of it, from any thread but its own."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, parts: Bench) -> None:
        self.address = Address(url=f"unix://{path}", socket=path)
        self._loop = loop
        self._parts = parts

    def left(self) -> list[LeaseRecord]:
        """Live leases and places in the queue, as the ledger has them. Ended ones are torn down meanwhile."""

        async def look() -> list[LeaseRecord]:
            await self._parts.pass_time("10ms")
            return [one for one in self._parts.driver.ledger.state.leases.values() if one.status in AT_OFFICE]

        return asyncio.run_coroutine_threadsafe(look(), self._loop).result(60)

    def touch(self, lease: str, epoch: Epoch) -> None:
        """Write something into its volume, which is kept then."""
        self._loop.call_soon_threadsafe(self._parts.agent.touch, LeaseId(lease), epoch)


@contextlib.contextmanager
def office_thread(folder: Path, name: str = "office") -> Iterator[OfficeThread]:
    path, loop = folder / name, asyncio.new_event_loop()
    ready, over = threading.Event(), asyncio.Event()
    made: list[OfficeThread] = []

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(128)
            async with bench(gpus=2) as parts:
                server = HttpServer(parts.app, on_limit=print)
                await server.start(listening)
                made.append(OfficeThread(path, loop, parts))
                ready.set()
                await over.wait()
                await server.close()

    def run() -> None:
        try:
            loop.run_until_complete(main())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run, name="office", daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield made[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)
