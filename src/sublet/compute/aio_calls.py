"""Calls of functions for asyncio programs: the same workers, awaited.

What may take long (starting a worker, taking a large argument apart) happens on other threads; the loop is never kept
waiting. The lease itself belongs to its loop, so those threads ask it there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast, overload

from sublet.compute.futures import CallFuture
from sublet.compute.iterators import RemoteIterator
from sublet.compute.posting import map_calls, submit_call
from sublet.compute.worker_guest import Options

if TYPE_CHECKING:
    from sublet.client.guest_watch import GuestWatch
    from sublet.client.handle import LoopFabric, LoopLease
    from sublet.client.lease import Lease as BlockingLease

__all__ = ["AioCalls", "Options", "RemoteAsyncIterator", "new_blocking_lease"]

P = ParamSpec("P")
R = TypeVar("R")
LOOP_WITHIN_S: Final = 10.0
"""How long a thread waits for a loop that does other things."""
_END: Final = object()


class AioCalls:
    """Calls of Python functions under a lease of an asyncio program, with these options."""

    def __init__(self, lease: LoopLease, options: Options) -> None:
        self._lease = lease
        self._options = options

    @overload
    async def run(self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call it and wait for what it returns; a generator comes back as an asynchronous iterator. Cancelling the task
        that waits interrupts the function."""
        with self._lease.activity():  # from here on the call itself counts
            future = await asyncio.to_thread(self._submit, function, args, kwargs)
        found = await asyncio.wrap_future(future)
        return RemoteAsyncIterator(self._lease, found) if isinstance(found, RemoteIterator) else found

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """The same as a future, which can be awaited and cancelled."""
        return asyncio.ensure_future(self.run(function, *args, **kwargs))

    def map(self, function: Callable[..., R], /, *iterables: Iterable[Any]) -> AsyncIterator[R]:
        """Call it for each; an asynchronous iterator of the results, in order."""
        return self._map(function, iterables)

    async def _map(self, function: Callable[..., R], iterables: tuple[Iterable[Any], ...]) -> AsyncIterator[R]:
        found: Iterator[Any] = await asyncio.to_thread(
            map_calls, _blocking_lease(self._lease), self._options, function, iterables
        )
        try:
            while True:
                some = await asyncio.to_thread(_some, found)
                for one in some:
                    yield one
                if not some:
                    return
        finally:
            await asyncio.to_thread(found.close)  # type: ignore[attr-defined]

    def _submit(self, function: Callable[..., Any], args: Any, kwargs: Any) -> CallFuture:
        future = CallFuture()
        submit_call(future, _blocking_lease(self._lease), self._options, function, args, kwargs)
        return future


class RemoteAsyncIterator(AsyncIterator[Any]):
    """A generator that runs in a worker, iterated by an asyncio program."""

    def __init__(self, lease: LoopLease, found: RemoteIterator) -> None:
        self._lease = lease
        self._found = found

    async def __anext__(self) -> Any:
        item = await asyncio.to_thread(next, self._found, _END)
        if item is _END:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Close the generator."""
        await asyncio.to_thread(self._found.close)


def _some(found: Iterator[Any]) -> list[Any]:
    item = next(found, _END)
    return [] if item is _END else [item]


# ------------------------------------------------------------------------------- the lease, as those threads may see it


class _Fabric:
    def __init__(self, fabric: LoopFabric, loop: asyncio.AbstractEventLoop) -> None:
        self._fabric = fabric
        self._loop = loop
        self.address = fabric.address
        self._core = fabric._core

    def _run(self, program: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self._fabric._run(program), self._loop).result()

    @property
    def _watch(self) -> GuestWatch:
        return self._fabric._watch


class _Ground:
    """Quacks like a blocking lease for threads that are not the loop's."""

    def __init__(self, lease: LoopLease) -> None:
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._fabric = _Fabric(lease._fabric, self._loop)
        self._lock = contextlib.nullcontext()
        self._workers: Any = None
        self._held = lease._held
        self.id = lease.id
        self.epoch = lease.epoch
        self.devices = lease.devices

    @property
    def _takes_up(self) -> bool:
        return self._lease._takes_up

    @_takes_up.setter
    def _takes_up(self, value: bool) -> None:
        self._lease._takes_up = value

    @property
    def end(self) -> Any:
        return self._in_loop(lambda: self._lease.end)

    def check(self, needs: float | str = 0.0) -> None:
        self._in_loop(lambda: self._lease.check(needs))

    def on_end(self, callback: Callable[[Any], Any]) -> Any:
        return self._in_loop(lambda: self._lease.on_end(callback))

    @contextlib.contextmanager
    def activity(self, what: str = "") -> Iterator[None]:
        """Begun and finished in the loop, as soon as it comes to it; the caller does not wait for that."""
        running = contextlib.ExitStack()
        self._loop.call_soon_threadsafe(lambda: running.enter_context(self._lease.activity(what)))
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the lease with it
                self._loop.call_soon_threadsafe(running.close)

    def _own(self) -> None:
        self._lease._own()

    def _in_loop(self, ask: Callable[[], R]) -> R:
        """Ask there, and wait for the answer."""
        try:
            if asyncio.get_running_loop() is self._loop:
                return ask()
        except RuntimeError:
            pass
        answer: concurrent.futures.Future[R] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return answer.result(LOOP_WITHIN_S)


def _blocking_lease(lease: LoopLease) -> BlockingLease:
    return cast("BlockingLease", lease._blocking_lease)


def new_blocking_lease(lease: LoopLease) -> Any:
    """Made once for each lease, in its loop."""
    return _Ground(lease)
