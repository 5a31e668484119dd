"""A lease as an asyncio program holds it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar, overload

from sublet.background import shortage_explained
from sublet.client import background_requests
from sublet.client.handle import DroppedLease, LoopFabric, LoopLease
from sublet.client.lease_entry import LeaseEntry
from sublet.client.lease_table import LeaseTable
from sublet.client.many import LeaseSequence, could_not_release
from sublet.client.model import LeaseChange, Notice
from sublet.errors import SubletError
from sublet.lease_end import LeaseEnd
from sublet.values import LeaseId

if TYPE_CHECKING:
    from sublet.client.aio_guests import Guest
    from sublet.client.aio_volume import LoopLine
    from sublet.client.guests import StdioText
    from sublet.compute.aio_calls import AioCalls

P = ParamSpec("P")
R = TypeVar("R")


class Lease(LoopLease):
    """A time-bounded grant, for asyncio. ``activity``, ``check`` and the facts are as in `sublet.Lease`: they wait for
    nothing, so they are not awaited."""

    def __init__(self, fabric: LoopFabric, book: LeaseTable, held: LeaseEntry) -> None:
        self._fabric = fabric
        super().__init__(book, held, fabric._clock, contextlib.nullcontext())
        self._blocking_lease = None
        self._loop = asyncio.get_running_loop()
        self._volume_line: Callable[[], LoopLine | None] = lambda: None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back. What the body raised goes on as it is, whatever becomes of the release."""
        try:
            if os.getpid() == self._pid and not self._left:
                await self.release()
        except SubletError as failed:
            self._could_not_release(failed, error)
        except BaseException:
            self._held.owed.left = True  # at once: the next interrupt may come with the call
            self._release_in_background()
            raise

    def __del__(self) -> None:
        if self._is_dropped():
            self._fabric._keeper.wake()
            warnings.warn(self._dropped_text(), DroppedLease, stacklevel=1, source=self)

    async def renew(self, ttl: float | str | None = None) -> None:
        """Renew it now, due or not; see `sublet.Lease.renew`."""
        attempt = self._renewal_by_hand(ttl)
        program = background_requests.renew_one(self._fabric._core, self._book, attempt, self._patience_s(attempt))
        self._renewed_by_hand(attempt, await self._fabric._run(program))

    async def release(self) -> None:
        """Give it back. Twice is harmless, and so is after the end; see `sublet.Lease.release`."""
        try:
            self._own()
            if not self._is_returned():
                self._released(await self._fabric._run(self._letting_go(self._fabric._core)))
        except BaseException:
            self._held.owed.left = True  # at once: the next interrupt may come with the call
            self._release_in_background()
            raise
        finally:
            await self._close_what_runs()

    async def _close_what_runs(self) -> None:
        if self._blocking_lease is not None and self._blocking_lease._workers is not None:
            self._blocking_lease._workers.close()
        if (line := self._volume_line()) is not None:
            await asyncio.to_thread(line.close)

    def leave(self) -> LeaseId:
        """Neither renew nor release it any more: it lives on to its deadline; a program can attach to it by this id.

        It also outlives this process then. The office is told in the background; closing the fabric waits for that.
        """
        self._own()
        if (epoch := self._bound_epoch()) is not None:
            self._fabric._unbind(self.id, epoch)
        return self._leave()

    def on_notice(self, callback: Callable[[Notice], Any]) -> Callable[[Notice], Any]:
        """Call this (a function or a coroutine function) when it is announced that the lease will be taken."""
        self._callable(callback)
        fabric = self._fabric  # and not the lease: a listener must not keep it from being dropped
        self._listen(lambda change: None if change.notice is None else fabric._deliver(callback, change.notice))
        if self._held.notice is not None:
            fabric._deliver(callback, self._held.notice)
        return callback

    def on_end(self, callback: Callable[[LeaseEnd], Any]) -> Callable[[LeaseEnd], Any]:
        """Call this (a function or a coroutine function) once, when it is over, or soon if it is."""
        self._callable(callback)
        fabric = self._fabric
        self._listen(lambda change: None if change.end is None else fabric._deliver(callback, change.end))
        return callback

    def events(self) -> AsyncIterator[LeaseChange]:
        """What happens to it from now on, as it happens; ends with the lease."""
        changes: asyncio.Queue[LeaseChange] = asyncio.Queue()
        self._listen(changes.put_nowait)
        return self._take_events(changes)

    # ---- commands under it

    async def start(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdio: StdioText = "pipes",
        rows: int = 24,
        cols: int = 80,
        name: str = "",
        grace: float | str | None = None,
        volume: Lease | None = None,
    ) -> Guest:
        """Start a command under it; see `sublet.Lease.start`. It is in use while the command runs."""
        with shortage_explained():
            from sublet.client.aio_guests import start_guest

        self._own()
        self.check()
        return await start_guest(
            self, argv, env=env, cwd=cwd, stdio=stdio, rows=rows, cols=cols, name=name, grace=grace, volume=volume
        )

    def volume_line(self) -> LoopLine:
        """The way to its volume, for a lease of blocks: `sublet.Durable` saves over it, on a thread that is not the
        loop's: ``await asyncio.to_thread(state.checkpoint)``."""
        with shortage_explained():
            from sublet.client.aio_volume import LoopLine

        line = self._volume_line()
        if line is None:
            line = LoopLine(self, self._loop)
            self._volume_line = weakref.ref(line)
        return line

    def _in_use(self) -> Callable[[], None]:
        with shortage_explained():
            from sublet.client.aio_volume import in_use

        return in_use(self, self._loop)

    # ---- Python functions under it

    @overload
    async def run(self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a Python function in a process that has the lease's devices; see `sublet.Lease.run`. A generator comes
        back as an asynchronous iterator. Cancelling the task that waits interrupts the function."""
        return await self._calls().run(function, *args, **kwargs)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """The same as a future, which can be awaited and cancelled."""
        return self._calls().submit(function, *args, **kwargs)

    def map(self, function: Callable[..., R], /, *iterables: Iterable[Any]) -> AsyncIterator[R]:
        """Call it for each; an asynchronous iterator of the results, in order; see `sublet.Lease.map`."""
        return self._calls().map(function, *iterables)

    def options(
        self,
        *,
        timeout: float | str | None = None,
        python: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        name: str = "",
        volume: Lease | None = None,
    ) -> AioCalls:
        """The same three with options; see `sublet.Lease.options`."""
        with shortage_explained():
            from sublet.compute.options import options_of

        return self._calls(options_of(timeout=timeout, python=python, env=env, cwd=cwd, name=name, volume=volume))

    def _calls(self, options: Any = None) -> AioCalls:
        with shortage_explained():
            from sublet.compute.aio_calls import AioCalls, Options, new_blocking_lease

        if self._blocking_lease is None:
            self._blocking_lease = new_blocking_lease(self)
        return AioCalls(self, Options() if options is None else options)

    def _resume_from(self, old: Lease) -> None:
        """What ran under that one was parked, and is under this one now; see `sublet.Lease`."""
        with shortage_explained():
            from sublet.compute.aio_calls import new_blocking_lease

        workers = None if old._blocking_lease is None else old._blocking_lease._workers
        if workers is not None:
            old._blocking_lease._workers = None
            self._blocking_lease = new_blocking_lease(self)
            self._blocking_lease._workers = workers
            workers.now_under(self._blocking_lease)

    async def _take_events(self, changes: asyncio.Queue[LeaseChange]) -> AsyncIterator[LeaseChange]:
        try:
            while True:
                change = await changes.get()
                yield change
                if change.end is not None:
                    return
        finally:
            self._stop_listening(changes.put_nowait)

    def _release_in_background(self) -> None:
        """Giving it back was interrupted, or not answered: that goes on in the background."""
        if not self._left and os.getpid() == self._pid:
            self._fabric._release_in_background(self._held.owed)

    def _wake(self) -> None:
        self._fabric._keeper.wake()


class _Fabric(LoopFabric, Protocol):
    async def release(self, leases: Iterable[Lease], /) -> None: ...


class Leases(LeaseSequence[Lease]):
    """The leases that one request was granted, in the order of their grant; see `sublet.Leases`."""

    def __init__(self, fabric: _Fabric, leases: Iterable[Lease]) -> None:
        super().__init__(leases)
        self._fabric = fabric
        self._pid = os.getpid()
        self._held = tuple(lease._held for lease in self._leases)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back. What the body raised goes on as it is, whatever becomes of the release."""
        try:
            if os.getpid() == self._pid:
                await self._fabric.release([lease for lease in self._leases if not lease._left])
        except SubletError as failed:
            could_not_release(failed, error)
        except BaseException:
            self._fabric._book.abandoned.append(self._held)  # at once: the next interrupt may come with the call
            self._fabric._keeper.wake()
            raise

    async def release(self) -> None:
        """Give all of them back, in one message. Twice is harmless, and so is after the end."""
        await self._fabric.release(self._leases)
