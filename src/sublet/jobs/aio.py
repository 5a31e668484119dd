"""``sublet.jobs`` for asyncio: ``async for`` over a map, and an executor whose futures are awaited.

The job runs on threads of its own, as it does for blocking programs; here nothing blocks the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Self, TypeVar, Unpack

from sublet.background import start_thread
from sublet.jobs import executor as blocking
from sublet.jobs.mapping import ExecutorTerms, JobTerms, MapIterator, map_items

if TYPE_CHECKING:
    from sublet.jobs.policy import RetryPolicy
    from sublet.jobs.running import PoolMaker
    from sublet.jobs.session import JobResult
    from sublet.jobs.stores import JobOutputStore

P = ParamSpec("P")
R = TypeVar("R")
AHEAD: Final = 64
"""Results that are read before the loop asks for them; with few leases as many as they have at once."""


class AsyncMap(Generic[R]):
    """Results of ``map``, as they are asked for; see `sublet.jobs.map`.

    One thread reads items and results, a few ahead of the loop. Leave a loop early with ``await results.aclose()``, or
    use the map in ``async with``.
    """

    def __init__(self, results: MapIterator[R], ahead: int = AHEAD) -> None:
        self._results = results
        self._room = threading.Semaphore(ahead)
        self._queue: asyncio.Queue[tuple[bool, Any]] | None = None
        self._is_over = False
        self._is_closing = False

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        if self._is_over:
            raise StopAsyncIteration
        if self._queue is None:
            self._begin()
        assert self._queue is not None
        is_value, found = await self._queue.get()
        if is_value:
            self._room.release()
            value: R = found
            return value
        self._is_over = True
        if found is not None:
            raise found
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop, keep what is stored, and give all leases back. Harmless twice."""
        if self._queue is None or self._is_over:
            self._is_over = True
            return
        self._is_closing = True
        self._results.stop_soon()
        self._room.release()
        while (await self._queue.get())[0]:
            self._room.release()
        self._is_over = True

    @property
    def result(self) -> JobResult | None:
        """What it came to; None while it runs."""
        return self._results.result

    def _begin(self) -> None:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[bool, Any]]()
        self._queue = queue

        def pump() -> None:
            error: BaseException | None = None
            try:
                for value in self._results:
                    self._room.acquire()
                    if self._is_closing:
                        break
                    loop.call_soon_threadsafe(queue.put_nowait, (True, value))
                self._results.close()
            except BaseException as failed:  # noqa: BLE001 - raised where it is awaited
                error = failed
            loop.call_soon_threadsafe(queue.put_nowait, (False, error))

        start_thread("burst_aio", pump)


def map(  # noqa: A001 - the name it has everywhere else
    fn: Callable[[Any], R],
    items: Iterable[Any],
    *,
    ordered: bool = True,
    store: JobOutputStore | None = None,
    make_pool: PoolMaker | None = None,
    **terms: Unpack[JobTerms],
) -> AsyncMap[R]:
    """Call ``fn`` for each item, on up to ``want`` leases; see `sublet.jobs.map`."""
    results = map_items(fn, items, ordered=ordered, store=store, make_pool=make_pool, **terms)
    return AsyncMap(results, min(AHEAD, 2 * terms.get("want", AHEAD)))


class Executor:
    """Calls functions on CPU leases and awaits them; see `sublet.jobs.Executor`."""

    def __init__(
        self,
        want: int = 64,
        *,
        policy: RetryPolicy | None = None,
        make_pool: PoolMaker | None = None,
        **terms: Unpack[ExecutorTerms],
    ) -> None:
        self._executor = blocking.Executor(want, policy=policy, make_pool=make_pool, **terms)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Call ``fn(*args, **kwargs)`` on a lease; await the future for what it returns."""
        return asyncio.wrap_future(self._executor.submit(fn, *args, **kwargs))

    async def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Take nothing more; wait until what was submitted is done, and give the leases back."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            try:
                self._executor.shutdown(cancel_futures=cancel_futures)
            finally:
                loop.call_soon_threadsafe(done.set)

        start_thread("burst_end", end)
        await done.wait()

    @property
    def result(self) -> JobResult | None:
        """What it came to, after ``shutdown``."""
        return self._executor.result
