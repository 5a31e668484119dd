"""``sublet.jobs.Executor``: the executor of ``concurrent.futures``, over leases."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, Unpack

from sublet.jobs.core import Works
from sublet.jobs.identity import ID_BYTES, ChunkId
from sublet.jobs.inside import Task, call_chunk, load_result
from sublet.jobs.mapping import ExecutorTerms
from sublet.jobs.running import Delivered
from sublet.jobs.session import JobResult, JobSession, raise_failure, terms_of
from sublet.jobs.states import FailReason

if TYPE_CHECKING:
    from sublet.jobs.core import ChunkFailed
    from sublet.jobs.policy import RetryPolicy
    from sublet.jobs.running import PoolMaker

P = ParamSpec("P")
T = TypeVar("T")
TASKS_MAX: Final = 256
"""Functions for which the message that defines them in a worker is kept."""
IDLE_S: Final = 10.0


class Executor(concurrent.futures.Executor):
    """Calls functions on CPU leases. Leases are acquired when something is submitted, up to ``want``, and given back
    when there was nothing to do for ten seconds, or at ``shutdown``.

    All else is as in the standard library: ``submit``, ``map``, ``shutdown``, the context manager, and futures that can
    be cancelled until they run.
    """

    def __init__(
        self,
        want: int = 64,
        *,
        policy: RetryPolicy | None = None,
        make_pool: PoolMaker | None = None,
        **terms: Unpack[ExecutorTerms],
    ) -> None:
        terms.setdefault("errors", "collect")
        self._terms = terms_of(want=want, policy=policy, **terms)
        self._make_pool = make_pool
        self._lock = threading.Lock()
        self._session: JobSession | None = None
        self._futures: dict[int, Future[Any]] = {}
        self._tasks: dict[int, Task] = {}
        self._any = Task(call_chunk, spread=True)
        self._submitted = 0
        self._is_shut = False
        self._is_idle = threading.Event()
        self._is_idle.set()
        self.result: JobResult | None = None
        """What it came to, after ``shutdown``."""
        _executors.add(self)

    @property
    def _max_workers(self) -> int:
        """As the standard executors have it; some programs look."""
        return self._terms.want

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``fn(*args, **kwargs)`` on a lease; the future brings what it returns."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            session = self._session or self._begin()
            if session.running.error is not None:
                raise BrokenExecutor(str(session.running.error)) from session.running.error
            index = self._submitted
            self._submitted += 1
            self._futures[index] = future
            self._is_idle.clear()
            task, given = self._task(fn, args, kwargs)
            key = ChunkId(index.to_bytes(ID_BYTES, "big"))
            session.running.feed(Works([key], [index], [given], task, self._terms.needs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; wait until what was submitted is done, and give the leases back."""
        with self._lock:
            self._is_shut = True
            session = self._session
            waiting = list(self._futures.values()) if cancel_futures else []
        for future in waiting:
            future.cancel()
        if session is None:
            return
        session.running.complete()
        if wait:
            self._finish(session)
        else:
            from sublet.background import start_thread

            start_thread("burst_end", functools.partial(self._finish, session))

    # ---- inside

    def _begin(self) -> JobSession:
        self._session = JobSession(
            self._terms,
            self._deliver,
            keeps_ids=False,
            linger_s=IDLE_S,
            admit=self._admit,
            make_pool=self._make_pool,
        )
        return self._session

    def _task(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Task, tuple[Any, ...]]:
        """Plain functions are sent once to each worker; what else can be called goes with its arguments."""
        if kwargs or not isinstance(fn, types.FunctionType | types.BuiltinFunctionType):
            return self._any, (fn, args, kwargs)
        task = self._tasks.get(id(fn))
        if task is None:
            if len(self._tasks) >= TASKS_MAX:
                self._tasks.pop(next(iter(self._tasks)))
            task = self._tasks[id(fn)] = Task(fn, spread=True)
        return task, args

    def _admit(self, index: int) -> bool:
        """On the job's thread: the chunk is about to go to a worker, for the first time or again. From the first time
        on its future cannot be cancelled."""
        future = self._futures.get(index)
        return future is not None and (future.running() or future.set_running_or_notify_cancel())

    def _deliver(self, finished: list[Delivered]) -> None:
        session = self._session
        ended = None if session is None else session.running.error
        for one in finished:
            for index, result in zip(one.indexes, one.results or (None,), strict=True):
                future = self._futures.pop(index, None)
                if future is None or future.cancelled():
                    continue
                if one.failure is not None:
                    self._set_error(future, one.failure, ended)
                    continue
                assert result is not None
                try:
                    value = load_result(result)
                except BaseException as error:  # noqa: BLE001 - the caller asked for it
                    future.set_exception(error)
                else:
                    future.set_result(value)
        if ended is not None:
            self._break(ended)
        with self._lock:  # else one that is submitted between the two would not be waited for
            if not self._futures:
                self._is_idle.set()

    def _set_error(self, future: Future[Any], failure: ChunkFailed, ended: BaseException | None) -> None:
        """``ended``: what ended the job as a whole, for chunks that were only stopped by that."""
        try:
            if ended is not None and failure.reason is FailReason.CANCELLED:
                raise ended
            raise_failure([failure], as_itself=True)
        except BaseException as error:  # noqa: BLE001 - the caller's
            if not future.running():
                future.set_running_or_notify_cancel()
            if not future.cancelled():
                future.set_exception(error)

    def _break(self, error: BaseException) -> None:
        while self._futures:
            _, future = self._futures.popitem()
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(error)

    def _finish(self, session: JobSession) -> None:
        self._is_idle.wait()
        session.close()
        with self._lock:
            if self.result is None:
                session.fold_phase()
                self.result = session.result(None)


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """What was submitted is done before the program ends, as with the standard executors."""
    for executor in list(_executors):
        executor.shutdown()
