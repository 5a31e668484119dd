"""Commands under a lease, for asyncio programs: ``await lease.start(["python", "train.py"])``.

The same guests as in ``client.guests``, awaited. Questions to the supervisor take a millisecond and are asked on other
threads; output is read in the loop, so that very many guests can be followed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from sublet.background import start_task
from sublet.client import guests
from sublet.client.guests import Output, StdioText, attach, piece_of
from sublet.client.line import connect_data
from sublet.client.responses import end_of
from sublet.client.volume_line import lend
from sublet.errors import Disconnected, LeaseEnded, NotFound, SubletError
from sublet.lease.value import ended_error
from sublet.lease_end import EndReason
from sublet.values import GuestId, LeaseId
from sublet.wire.channels import WINDOW
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Attach, GuestView
from sublet.wire.http import TokenView
from sublet.wire.link_events import Closed, Data, Over

if TYPE_CHECKING:
    from sublet.client.handle import LoopLease

LOOK_AGAIN_S: Final = 5.0
"""A wait stands still while the machine sleeps."""


class Guest:
    """A command under a lease. Made by ``lease.start``; for the loop it was made in.

    As an asynchronous context manager it is stopped at the end of the block, if it still runs. Otherwise it runs until
    it is done, or until its lease ends.
    """

    def __init__(self, inner: guests.Guest, ended: asyncio.Event) -> None:
        self._inner = inner
        self._ended = ended

    def __repr__(self) -> str:
        return repr(self._inner)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop it. What the body raised goes on as it is."""
        try:
            await self.stop()
        except NotFound:  # gone so long that it is forgotten
            pass
        except SubletError as failed:
            if error is None:
                raise
            error.add_note(f"guest {self.id} could not be stopped: {failed}")
        finally:
            await self.close()

    @property
    def id(self) -> GuestId:
        return self._inner.id

    @property
    def pid(self) -> int:
        return self._inner.pid

    @property
    def lease_id(self) -> LeaseId:
        return self._inner.lease_id

    @property
    def exit_code(self) -> int | None:
        """Of its command: 128 + n if signal n ended it; None while it runs."""
        return self._inner.exit_code

    @property
    def reason(self) -> EndReason | None:
        """Why it was ended; None if it was not, and ended by itself."""
        return self._inner.reason

    async def wait(self) -> int:
        """Until its command has ended; the exit code. Bound it with ``asyncio.timeout``."""
        await self._ended.wait()
        return self._inner.wait(0)

    async def send_signal(self, number: int, *, tree: bool = False) -> None:
        """Send it a signal: its command, or (``tree``) every process it has."""
        await asyncio.to_thread(self._inner.send_signal, number, tree=tree)

    async def resize(self, rows: int, cols: int) -> None:
        """Its terminal has another size now. Nothing happens without one."""
        await asyncio.to_thread(self._inner.resize, rows, cols)

    async def stop(self, grace: float | str | None = None) -> int:
        """SIGTERM, and after the grace (its own by default) the end of every process it has. Returns when they are
        gone."""
        return await asyncio.to_thread(self._inner.stop, grace)

    async def view(self) -> GuestView:
        """Everything about it: state, processes, CPU time, peak memory, size of its output."""
        return await asyncio.to_thread(self._inner.view)

    async def output(self, *, offset: int = 0, lossless: bool = True) -> AsyncIterator[Output]:
        """What it says, from the beginning (or an offset in bytes) until it is gone; see `sublet` for ``lossless``."""
        conversation, channel = await asyncio.to_thread(self._attached, offset, lossless)
        with conversation:
            conversation.link.grant(channel, WINDOW)
            while True:
                for happening in conversation.pump():
                    if isinstance(happening, Closed):
                        return
                    if isinstance(happening, Over):
                        raise happening.error or Disconnected("the supervisor hung up")
                    if (piece := piece_of(happening)) is not None:
                        yield piece
                    if isinstance(happening, Data):
                        conversation.link.consumed(happening.channel, happening.cost)
                await _something(conversation)

    async def write(self, data: bytes) -> None:
        """Give it something to read. Returns when all of it is on its way; ``BrokenPipeError`` if it has ended."""
        await asyncio.to_thread(self._inner.write, data)

    async def close_stdin(self) -> None:
        """Nothing more comes: it finds the end of its input."""
        await asyncio.to_thread(self._inner.close_stdin)

    async def close(self) -> None:
        """Let go of our connection to it. It goes on; everything here still works."""
        await asyncio.to_thread(self._inner.close)

    def _attached(self, offset: int, lossless: bool) -> tuple[Conversation, int]:
        conversation = connect_data(self._inner._address, "")
        try:
            attached = attach(conversation, Attach(guest=self.id, offset=offset, lossless=lossless))
        except BaseException:
            conversation.close()
            raise
        return conversation, attached.output


async def start_guest(
    lease: LoopLease,
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    stdio: StdioText,
    rows: int,
    cols: int,
    name: str,
    grace: float | str | None,
    volume: LoopLease | None = None,
) -> Guest:
    """Run a command under the lease, and count it as being in use until the command has ended. If the task is cancelled
    meanwhile, the command is stopped as soon as it runs."""
    environment = guests.environment(lease, env)
    spec = guests.command_spec(
        argv, env=environment, cwd=cwd, stdio=stdio, rows=rows, cols=cols, name=name, grace=grace
    )
    fabric, loop = lease._fabric, asyncio.get_running_loop()
    async with _with_its_end(lease):
        token = (await fabric._run(fabric._core.query(f"/v1/leases/{lease.id}/token", TokenView))).token
    ticket = "" if volume is None else await _lent(volume)
    ended, running = asyncio.Event(), contextlib.ExitStack()
    for used in (lease, volume) if volume is not None else (lease,):
        running.enter_context(used.activity())

    def on_end() -> None:
        running.close()
        ended.set()

    def end_in_loop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(on_end)

    def work() -> guests.Guest:
        def in_use() -> Callable[[], None]:
            return end_in_loop

        return guests.begin(fabric.address, token, lease.id, spec, fabric._watch, in_use, volume=ticket)

    beginning = loop.run_in_executor(None, work)
    try:
        async with _with_its_end(lease):
            return Guest(await asyncio.shield(beginning), ended)
    except asyncio.CancelledError:
        beginning.add_done_callback(_stopped)
        raise
    except BaseException:
        running.close()
        raise


@contextlib.asynccontextmanager
async def _with_its_end(lease: LoopLease) -> AsyncIterator[None]:
    """What refuses to start a guest knows that the lease is over, and not why: raise the lease's own end."""
    try:
        yield
    except LeaseEnded as refused:
        end = lease.end
        if refused.end is None and end is None:
            with contextlib.suppress(SubletError):
                if (view := (await lease._fabric.lease(lease.id)).end) is not None:
                    end = end_of(view)
        if refused.end is not None or end is None:
            raise
        raise ended_error(lease.id, end) from refused


async def _lent(volume: LoopLease) -> str:
    fabric = volume._fabric
    token = (await fabric._run(fabric._core.query(f"/v1/leases/{volume.id}/token", TokenView))).token
    return await asyncio.to_thread(lend, fabric.address, token)


def _stopped(beginning: asyncio.Future[guests.Guest]) -> None:
    """Stop a guest whose start was cancelled meanwhile."""
    if not beginning.cancelled() and beginning.exception() is None:
        guest = beginning.result()
        _ = start_task("stop_guest", lambda: asyncio.to_thread(_stop, guest))


def _stop(guest: guests.Guest) -> None:
    with contextlib.suppress(SubletError), contextlib.closing(guest):
        guest.stop(0)


async def _something(conversation: Conversation) -> None:
    """Until there is something to do on this connection."""
    if conversation.has_kept:
        await asyncio.sleep(0)
        return
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    fd = conversation.fileno()
    loop.add_reader(fd, ready.set)
    if conversation.wants_write:
        loop.add_writer(fd, ready.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S):
                await ready.wait()
    finally:
        loop.remove_reader(fd)
        loop.remove_writer(fd)
