"""``lease.options(...)``: calls with options that stay apart from the function's own arguments."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from sublet.client.command_words import absolute, checked_env
from sublet.client.paths import valid_path
from sublet.compute.futures import CallFuture
from sublet.compute.posting import map_calls, run_call, submit_call
from sublet.compute.worker_guest import Options
from sublet.values import parse_duration_ns, valid_text

if TYPE_CHECKING:
    from sublet.client.handle import LeaseHandle
    from sublet.client.volume_line import HasVolume

__all__ = ["CallFuture", "Calls", "Options", "options_of", "submit_call"]

P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """Calls of Python functions under a lease, with these options. From ``lease.options(...)``."""

    def __init__(self, lease: LeaseHandle, options: Options) -> None:
        self._lease = lease
        self._options = options

    @overload
    def run(self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call it in the worker and wait for what it returns; see `sublet.Lease.run`."""
        return run_call(self._lease, self._options, function, args, kwargs)

    @overload
    def submit(
        self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[R]: ...
    @overload
    def submit(
        self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[R]: ...
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Call it and do not wait; see `sublet.Lease.submit`."""
        future = CallFuture()
        try:
            submit_call(future, self._lease, self._options, function, args, kwargs)
        except BaseException:
            future.cancel()  # the caller has nothing to do so with
            raise
        return future

    def map(self, function: Callable[..., R], /, *iterables: Iterable[Any]) -> Iterator[R]:
        """Call it for each; see `sublet.Lease.map`."""
        return map_calls(self._lease, self._options, function, iterables)


def options_of(
    *,
    timeout: float | str | None = None,
    python: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    name: str = "",
    volume: HasVolume | None = None,
) -> Options:
    """Checked here, so that what is wrong is told at once."""
    return Options(
        python="" if python is None else valid_path(python, "python="),
        env=None if env is None else tuple(sorted(checked_env(env).items())),
        cwd="" if cwd is None else absolute(cwd),
        name=valid_text(name, "name"),
        timeout_ns=None if timeout is None else parse_duration_ns(timeout, "timeout"),
        volume=volume,
    )
