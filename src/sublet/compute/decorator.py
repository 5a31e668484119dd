"""``@sublet.gpu``: a lease around each call, reused while it is idle-held.

Between calls the lease is not renewed: it stays to the end of its time to live, for the next call of any decorated
function with the same terms, and is then gone. So a loop pays for acquiring once, and keeps no card by mistake.
Calls that share a lease are executed one after the other. Where another set of terms finds no room, leases of ours that
lie idle are given back first, rather than waited for. Where another request has taken an idle one and its worker is
parked, the next call goes on with that worker.

Inside a worker a decorated function is the plain function: it has the device already.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, overload

from sublet.background import start_thread
from sublet.client.requests import Duration, ExclusivityText, Size, TierText
from sublet.compute.options import Calls, options_of
from sublet.compute.worker_guest import Options
from sublet.errors import CapacityExceeded, InvalidRequest, LeaseEnded, NotFound, StaleEpoch
from sublet.guest.main_thread import is_worker
from sublet.values import NS_PER_S, parse_duration_ns, shown

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.handle import LeaseHandle
    from sublet.client.lease import Lease

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
LEFT_S: Final = 1.0
"""An idle lease with less than this left is not used again."""
FIXED: Final = (
    *("min_vram", "count", "exclusivity", "model", "or_smaller", "or_model"),
    *("tier", "spot", "pay_priority", "selector"),
)
"""Terms that must be the same for two functions to share a lease."""
RESUMED: Final = ("ttl", "expect", "wait", "name", "labels", "tier", "spot", "pay_priority")
"""Terms of a request to go on with what is parked, which knows itself what it needs."""
END_REPORTED_S: Final = 1.0
"""So long it may take until a holder hears how a lease has ended."""
TERMS: Final = frozenset((*FIXED, "ttl", "expect", "wait", "name", "labels", "timeout", "fabric"))


@overload
def gpu(function: Callable[P, R], /) -> GpuFunction[P, R]: ...
@overload
def gpu(
    *,
    min_vram: Size,
    ttl: Duration | Callable[..., Duration] | None = None,
    expect: Duration | Callable[..., Duration] | None = None,
    count: int = 1,
    exclusivity: ExclusivityText | None = None,
    model: str | None = None,
    or_smaller: bool | Size = False,
    or_model: bool | str = False,
    tier: TierText | None = None,
    spot: bool = False,
    pay_priority: bool = False,
    wait: Duration | None = None,
    name: str | None = None,
    labels: dict[str, str] | None = None,
    selector: dict[str, str] | None = None,
    timeout: Duration | None = None,
    fabric: Fabric | None = None,
) -> Callable[[Callable[P, R]], GpuFunction[P, R]]: ...
def gpu(function: Any = None, /, *, min_vram: Size | None = None, **terms: Any) -> Any:
    """Run the function on a leased GPU whenever it is called::

        @sublet.gpu(min_vram="8GiB", ttl="2m")
        def embed(texts): ...

        embed(texts)               # waits for a GPU, runs there, and returns what the function returns
        embed.submit(texts)        # a future
        embed.map(batches)         # an iterator of results, in order
        embed.options(ttl="10m")   # the same function on other terms

    ``ttl`` and ``expect`` may be functions of the arguments. The terms are those of `sublet.Fabric.gpu`; ``timeout``
    is how long one call may run; ``fabric`` is where to acquire, and otherwise ``sublet.connect()`` says. It works on
    functions, methods, coroutine functions (the call is then awaited) and generators of either kind.
    """
    if function is not None or min_vram is None:
        raise InvalidRequest("@sublet.gpu needs to know how much memory", do='Write @sublet.gpu(min_vram="2GiB").')
    _check_names(terms)
    return lambda decorated: GpuFunction(decorated, {"min_vram": min_vram, **terms})


def _check_names(terms: dict[str, Any]) -> None:
    """A misspelt term is told where it stands, also when a lease that is held would do for the first call."""
    unknown = sorted(terms.keys() - TERMS)
    if unknown:
        raise TypeError(f"@sublet.gpu has no argument {unknown[0]!r}; it has {', '.join(sorted(TERMS))}")


class GpuFunction(Generic[P, R]):
    """A function that runs on a leased GPU. Made by ``@sublet.gpu``."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[P, R], terms: dict[str, Any], bound: tuple[Any, ...] = ()) -> None:
        self._function: Any = function
        self._terms = terms
        self._bound = bound
        functools.update_wrapper(self, function)
        plain = inspect.unwrap(function)
        self._is_coroutine_function = inspect.iscoroutinefunction(plain)
        self._is_generator = inspect.isgeneratorfunction(plain)
        self._is_async_generator = inspect.isasyncgenfunction(plain)
        if self._is_coroutine_function and hasattr(inspect, "markcoroutinefunction"):
            inspect.markcoroutinefunction(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it on a GPU, and wait. Awaited, if it is a coroutine function."""
        if is_worker():
            found: R = self._function(*self._bound, *args, **kwargs)
            return found
        if self._is_coroutine_function:
            return self._awaited(args, kwargs)  # type: ignore[return-value]
        if self._is_async_generator:
            return self._iterated(args, kwargs)  # type: ignore[return-value]
        if self._is_generator:
            return self._generated(args, kwargs)  # type: ignore[return-value]
        with self._run(args, kwargs) as found:
            result: R = found
            return result

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[Any]:
        """Call it and do not wait, neither for a GPU nor for the result."""
        outer = _Chained()
        try:
            _ = start_thread("acquire", lambda: self._submit(outer, args, kwargs))
        except BaseException:
            outer.cancel()  # the thread may run already
            raise
        return outer

    def map(self, *iterables: Iterable[Any]) -> Iterator[Any]:
        """Call it for each, on one lease; results in order."""
        with self._leased((), {}) as calls:
            yield from calls.map(_Partial(self._sent(), self._bound) if self._bound else self._sent(), *iterables)

    def options(self, **terms: Any) -> GpuFunction[P, R]:
        """The same function on other terms."""
        _check_names(terms)
        return GpuFunction(self._function, {**self._terms, **terms}, self._bound)

    @overload
    def __get__(self, owner: None, kind: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: GpuFunction[Concatenate[Any, Q], R], owner: object, kind: type | None = None
    ) -> GpuFunction[Q, R]: ...
    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """A method of an object; the object is sent along."""
        return self if owner is None else GpuFunction(self._function, self._terms, (*self._bound, owner))

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels as what it decorates, with its terms. Where it can be imported it goes by name before that."""
        return GpuFunction, (self._function, {**self._terms, "fabric": None}, self._bound)

    def __repr__(self) -> str:
        return f"<GpuFunction {getattr(self, '__qualname__', self._function)}>"

    # ---- within

    def _sent(self) -> Callable[..., Any]:
        """What is handed over: this object where the worker can import it, for then it has its module's state; else the
        plain function."""
        from sublet.compute.functions import name_of

        return self._function if self._bound or name_of(self) is None else self

    @contextlib.contextmanager
    def _leased(self, args: Any, kwargs: Any) -> Iterator[Calls]:
        terms = dict(self._terms)
        fabric, timeout = terms.pop("fabric", None), terms.pop("timeout", None)
        for name in ("ttl", "expect"):
            if callable(terms.get(name)):
                terms[name] = terms[name](*self._bound, *args, **kwargs)
        options = Options() if timeout is None else options_of(timeout=timeout)
        if fabric is not None and not hasattr(fabric, "gpu"):
            raise InvalidRequest(f"fabric={shown(fabric)} is none", do="Give what sublet.connect() returns.")
        with _pool.lease(_default_fabric() if fabric is None else fabric, terms) as lease:
            yield Calls(lease, options)

    @contextlib.contextmanager
    def _begun(self, args: Any, kwargs: Any, begin: Callable[[Calls], T]) -> Iterator[T]:
        """What ``begin`` returns, on a lease that is in use by us while this is open. One that was held may have ended
        before word of it was here: if nothing was begun under it, another will do."""
        with contextlib.ExitStack() as stack:
            calls = stack.enter_context(self._leased(args, kwargs))
            try:
                found = begin(calls)
            except LeaseEnded as error:
                if error.begun:
                    raise
                stack.close()
                _pool.drop(calls._lease)
                found = begin(stack.enter_context(self._leased(args, kwargs)))
            yield found

    def _run(self, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        return self._begun(args, kwargs, lambda calls: calls.run(self._sent(), *self._bound, *args, **kwargs))

    def _submit(self, outer: _Chained, args: Any, kwargs: Any) -> None:
        def follow(calls: Calls) -> None:
            if outer.cancelled():
                return
            inner = calls.submit(self._sent(), *self._bound, *args, **kwargs)
            outer.chain(inner)
            concurrent.futures.wait([inner])
            error = None if inner.cancelled() else inner.exception()
            if isinstance(error, LeaseEnded) and not error.begun:
                raise error
            outer.take(inner)

        try:
            with self._begun(args, kwargs, follow):
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the future
            if not outer.done() and outer.set_running_or_notify_cancel():
                outer.set_exception(error)

    def _generated(self, args: Any, kwargs: Any) -> Generator[Any, None, Any]:
        """From the first item on until the last, or until it is closed, the lease is in use by us."""
        with self._run(args, kwargs) as iterator, iterator as found:
            return (yield from found)

    async def _awaited(self, args: Any, kwargs: Any) -> Any:
        return await asyncio.wrap_future(self.submit(*args, **kwargs))

    async def _iterated(self, args: Any, kwargs: Any) -> AsyncIterator[Any]:
        found = await asyncio.wrap_future(self.submit(*args, **kwargs))
        try:
            while (item := await asyncio.to_thread(next, found, _END)) is not _END:
                yield item
        finally:
            await asyncio.to_thread(found.close)


class _Chained(concurrent.futures.Future[Any]):
    """A future whose call is found once there is a lease for it."""

    def __init__(self) -> None:
        super().__init__()
        self._inner: concurrent.futures.Future[Any] | None = None

    def cancel(self) -> bool:
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        if self._inner is not None:
            self._inner.cancel()
        return True

    def running(self) -> bool:
        return not self.done() and self._inner is not None and self._inner.running()

    def chain(self, inner: concurrent.futures.Future[Any]) -> None:
        self._inner = inner
        if self.cancelled():
            inner.cancel()

    def take(self, inner: concurrent.futures.Future[Any]) -> None:
        """The call is over."""
        if self.done() or not self.set_running_or_notify_cancel():
            return
        if inner.cancelled():
            self.set_exception(concurrent.futures.CancelledError())
        elif (error := inner.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(inner.result())


class _Partial:
    """A bound method's function, for a map."""

    def __init__(self, function: Callable[..., Any], bound: tuple[Any, ...]) -> None:
        self._function, self._bound = function, bound

    def __call__(self, *args: Any) -> Any:
        return self._function(*self._bound, *args)


class _Pool:
    """The leases that decorated functions of this process hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Any, Lease] = {}
        self._acquiring: dict[Any, threading.Lock] = {}
        self._users: dict[Any, int] = {}

    @contextlib.contextmanager
    def lease(self, fabric: Fabric, terms: dict[str, Any]) -> Iterator[Lease]:
        key = (id(fabric), *(_frozen(terms.get(name)) for name in FIXED))
        with self._lock:
            acquiring = self._acquiring.setdefault(key, threading.Lock())
            self._users[key] = self._users.get(key, 0) + 1
        try:
            with acquiring:
                lease = self._held.get(key)
                if lease is None or not self._is_good(lease, terms.get("ttl")):
                    resumed = None if lease is None else self._resumed(fabric, lease, terms)
                    if lease is not None:
                        _give_back(lease)
                    lease = self._held[key] = resumed or self._acquire(fabric, terms)
                    lease._held.quiet = True
            yield lease
        finally:
            with self._lock:
                self._users[key] -= 1

    def drop(self, lease: LeaseHandle) -> None:
        """It is of no use any more, unless its worker is parked: then the next call goes on with that."""
        until_s = time.monotonic() + END_REPORTED_S
        while lease.end is None and time.monotonic() < until_s:
            time.sleep(0.02)
        if lease.end is not None and lease.end.parked:
            return
        _give_back(lease)  # first: an interrupt must not leave it to nothing but a trace
        with self._lock:
            for key in [key for key, held in self._held.items() if held is lease]:
                del self._held[key]

    def clear(self) -> None:
        """A fork begins without any; what its parent holds stays its parent's."""
        self.__init__()  # type: ignore[misc]

    def _resumed(self, fabric: Fabric, lease: Lease, terms: dict[str, Any]) -> Lease | None:
        """A lease under which the worker of this one goes on, if it is parked: with the state of its modules."""
        if lease.end is None or not lease.end.parked:
            return None
        given = {name: terms[name] for name in RESUMED if terms.get(name) is not None}
        with contextlib.suppress(NotFound, StaleEpoch, InvalidRequest, LeaseEnded):  # it is gone
            return fabric.gpu(resume=lease, **given)
        return None

    def _acquire(self, fabric: Fabric, terms: dict[str, Any]) -> Lease:
        given = {name: term for name, term in terms.items() if term is not None}
        if self._idle():
            with contextlib.suppress(CapacityExceeded):
                return fabric.gpu(**{**given, "wait": 0})
            for key in self._idle():
                with self._lock:
                    lease = self._held.get(key)
                if lease is not None:
                    _give_back(lease)
                    with self._lock:
                        if self._held.get(key) is lease:
                            del self._held[key]
        return fabric.gpu(**given)

    def _idle(self) -> list[Any]:
        with self._lock:
            return [key for key, lease in self._held.items() if not self._users.get(key) and not lease.busy]

    def _is_good(self, lease: Lease, ttl: Duration | None) -> bool:
        """Whether it can be used once more; where more time is asked for than it has ever had, it is renewed so."""
        if lease.end is not None or (not lease.busy and lease.remaining < LEFT_S):
            return False
        try:
            lease.check()
            wanted_s = 0.0 if ttl is None else parse_duration_ns(ttl, "ttl") / NS_PER_S
            if wanted_s > lease.ttl:
                lease.renew(ttl)
        except LeaseEnded:
            return False
        return True


_END: Final = object()
_pool: Final = _Pool()
_fabrics: dict[str, Fabric] = {}


def _default_fabric() -> Fabric:
    """One for the process: the office of this machine, or the one that SUBLET_URL names."""
    from sublet.client.fabric import connect

    fabric = _fabrics.get("")
    if fabric is None or fabric._closed:
        fabric = _fabrics[""] = connect()
    return fabric


def _give_back(lease: LeaseHandle) -> None:
    with contextlib.suppress(Exception):
        lease.release()


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return tuple(sorted(value.items(), key=repr))
    try:
        hash(value)
    except TypeError:  # whatever it is, it will be told that it is wrong
        return repr(value)
    return value


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.clear)
