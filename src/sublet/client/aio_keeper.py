"""The asyncio twin of ``keeper``: one task maintains all leases of a fabric, with a task for each operation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from sublet.background import Guard, start_task
from sublet.client import background_requests
from sublet.client.aio_driver import run_program
from sublet.client.aio_transport import AioStream, AioTransport
from sublet.client.lease_table import LeaseTable
from sublet.client.operations import OfficeOperations
from sublet.client.renewal_thread import LISTEN_AFTER_S, LISTEN_AGAIN_S, LISTEN_LINGER_S, SILENCE_S
from sublet.client.sse import EventReader
from sublet.client.steps import Program
from sublet.clock import Clock
from sublet.errors import Disconnected
from sublet.values import NS_PER_S


class AioKeeper:
    """Starts its tasks with the first lease, in the loop that acquired it."""

    def __init__(
        self,
        book: LeaseTable,
        core: OfficeOperations,
        transport: AioTransport,
        clock: Clock,
        revive: Callable[[], Awaitable[None]],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_end`` is called when the loop ends it, with whatever is left to give back."""
        self._book = book
        self._core = core
        self._transport = transport
        self._clock = clock
        self._revive = revive
        self._on_end = on_end
        self.loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._guard = Guard("keeper")
        self._stopped = False

    def start(self) -> None:
        """See that the task runs, and looks at what is due."""
        self.prepare()
        self._wake.set()

    def prepare(self) -> None:
        """See that the task runs."""
        if not self._stopped and (self._keeping is None or self._keeping.done()):
            self.loop = asyncio.get_running_loop()
            self._keeping = self._kept(start_task("keeper", self._keep, again=True))

    def wake(self) -> None:
        """Look again at what is due. Harmless from any thread, a finaliser included."""
        loop = self.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake.set)

    async def stop(self) -> None:
        """End all tasks. What is under way is dropped."""
        self._stopped = True
        if self.loop is not asyncio.get_running_loop():  # that one has ended, and its tasks with it
            self._tasks.clear()
            self._listening = None
        tasks = [*self._tasks, *([] if self._listening is None else [self._listening])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._listening = None

    def _kept(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin(self, program: Program[None]) -> None:
        async def run() -> None:
            await run_program(program, self._transport.exchange, self._revive)
            self._wake.set()

        _ = self._kept(start_task("background_request", run))

    async def _keep(self) -> None:
        try:
            await self._keep_all()
        except (asyncio.CancelledError, GeneratorExit):
            if not self._stopped:
                self._on_end()
            raise

    async def _keep_all(self) -> None:
        while True:
            try:
                self._begin_what_is_due()
                await self._wait()
            except Exception as error:  # noqa: BLE001 - one broken turn must not let every lease expire
                await asyncio.sleep(self._guard.failed(error, "leases go on being renewed"))
            else:
                self._guard.passed()

    async def _wait(self) -> None:
        moments = [ns for ns in (self._book.next_wake_ns(), self._book.next_return_ns()) if ns is not None]
        timeout_s = max(0.0, (min(moments) - self._clock.now_ns()) / NS_PER_S) if moments else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    def _begin_what_is_due(self) -> None:
        self._wake.clear()
        for program in background_requests.give_back_what_is_owed(self._core, self._book, self._book.due_releases()):
            self._begin(program)
        while (batch := self._book.collect()).attempts:
            self._begin(background_requests.renew(self._core, self._book, batch))
        for program in background_requests.report_all_activity(
            self._core, self._book, self._book.pending_activity_reports()
        ):
            self._begin(program)
        if self._book.live and (self._listening is None or self._listening.done()):
            self._listening = start_task("news", self._listen, again=True)

    async def _listen(self) -> None:
        """Hear the news for as long as there are leases, and a little longer."""
        await asyncio.sleep(LISTEN_AFTER_S)
        failures = 0
        while self._book.live:
            try:
                stream = await self._transport.open_stream("/v1/events", background_requests.FLIGHT_S)
            except Disconnected:
                stream = None
            if stream is not None and stream.status == 200:
                failures = 0
                # What happened before the stream was open is not in it.
                self._begin(background_requests.catch_up(self._core, self._book))
                await self._read_events(stream)
            if not self._book.live:
                return
            await asyncio.sleep(LISTEN_AGAIN_S[min(failures, len(LISTEN_AGAIN_S) - 1)])
            failures += 1

    async def _read_events(self, stream: AioStream) -> None:
        """Until the stream breaks, falls silent, or is no longer wanted."""
        reader = EventReader()
        last_event_ns = live_ns = self._clock.now_ns()
        try:
            while True:
                now_ns = self._clock.now_ns()
                live_ns = now_ns if self._book.live else live_ns
                if now_ns - last_event_ns > SILENCE_S * NS_PER_S or now_ns - live_ns > LISTEN_LINGER_S * NS_PER_S:
                    return
                try:
                    async with asyncio.timeout(LISTEN_LINGER_S):
                        raw = await stream.read()
                except TimeoutError:
                    continue
                last_event_ns = self._clock.now_ns()
                for event in reader.feed(raw):
                    if self._book.on_event(event):
                        self._begin(background_requests.catch_up(self._core, self._book))
                self._wake.set()
        except Disconnected:
            return
        finally:
            stream.close()
