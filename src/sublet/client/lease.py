"""A lease as a program holds it, with blocking calls."""

from __future__ import annotations

import contextlib
import os
import queue
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from sublet.background import shortage_explained
from sublet.client import background_requests
from sublet.client.handle import DroppedLease, FabricLink, LeaseHandle
from sublet.client.lease_entry import LeaseEntry
from sublet.client.lease_table import LeaseTable
from sublet.client.model import LeaseChange, Notice
from sublet.errors import SubletError
from sublet.lease.holder import Holder
from sublet.lease.value import Attempt, Outcome
from sublet.lease_end import LeaseEnd
from sublet.values import LeaseId

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sublet.client.guests import Guest, StdioText
    from sublet.client.volume_line import HasVolume, HolderLine
    from sublet.compute.options import Calls

P = ParamSpec("P")
R = TypeVar("R")


class Lease(LeaseHandle):
    """A time-bounded grant. It has a holder (this program), and ends at its deadline unless it is renewed.

    Use it as a context manager, so that it is given back at the end of the block::

        with fabric.gpu(min_vram="2GiB") as lease:
            with lease.activity("training"):
                ...
    """

    def __init__(self, fabric: FabricLink, book: LeaseTable, held: LeaseEntry) -> None:
        self._fabric = fabric
        super().__init__(book, held, fabric._clock, fabric._lock)
        self._workers = None
        self._volume_line: Callable[[], HolderLine | None] = lambda: None
        """The line holds the lease, and not the other way round, so that a dropped lease is noticed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back. What the body raised goes on as it is, whatever becomes of the release."""
        try:
            if os.getpid() == self._pid and not self._left:
                self.release()
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

    def renew(self, ttl: float | str | None = None) -> None:
        """Renew it now, due or not. Asking for it is a sign of life, so this counts as being in use.

        A refusal is raised, and so is silence (`Disconnected`): the lease then goes on to its own deadline, and the
        renewal may be asked again.
        """
        attempt = self._renewal_by_hand(ttl)
        program = background_requests.renew_one(self._fabric._core, self._book, attempt, self._patience_s(attempt))
        self._renewed_by_hand(attempt, self._fabric._run(program))

    def release(self) -> None:
        """Give it back. Twice is harmless, and so is after the end.

        If the office does not answer, that is raised as `Disconnected`; the lease is over for this program all the
        same. It is tried again in the background, as after an interrupt, until its time to live ends.
        """
        try:
            self._own()
            if not self._is_returned():
                self._released(self._fabric._run(self._letting_go(self._fabric._core)))
        except BaseException:
            self._held.owed.left = True  # at once: the next interrupt may come with the call
            self._release_in_background()
            raise
        finally:
            self._close_what_runs()

    def _close_what_runs(self) -> None:
        if self._workers is not None:
            self._workers.close()
        if (line := self._volume_line()) is not None:
            line.close()

    def leave(self) -> LeaseId:
        """Neither renew nor release it any more: it lives on to its deadline; a program can attach to it by this id.

        It also outlives this process then. That is the office's to know: if it does not answer, `Disconnected` is
        raised, and the lease stays as it was.
        """
        self._own()
        if (epoch := self._bound_epoch()) is not None:
            self._fabric._run(self._fabric._core.unbind(self.id, epoch))
        return self._leave()

    def on_notice(self, callback: Callable[[Notice], object]) -> Callable[[Notice], object]:
        """Call this when it is announced that the lease will be taken. It runs on a thread of its own."""
        self._callable(callback)
        callbacks = self._fabric._callbacks  # and not the lease: a listener must not keep it from being dropped

        def listen(change: LeaseChange) -> None:
            if change.notice is not None:
                callbacks.deliver(callback, change.notice)

        with self._lock:
            self._listen(listen)
            if self._held.notice is not None:
                callbacks.deliver(callback, self._held.notice)
        return callback

    def on_end(self, callback: Callable[[LeaseEnd], object]) -> Callable[[LeaseEnd], object]:
        """Call this once, when it is over, or at once if it is. It runs on a thread of its own."""
        self._callable(callback)
        callbacks = self._fabric._callbacks

        def listen(change: LeaseChange) -> None:
            if change.end is not None:
                callbacks.deliver(callback, change.end)

        self._listen(listen)
        return callback

    def events(self) -> Iterator[LeaseChange]:
        """What happens to it from now on, as it happens; ends with the lease. What happens to it before the iterator
        is first asked is kept for it."""
        changes: queue.SimpleQueue[LeaseChange] = queue.SimpleQueue()
        self._listen(changes.put)
        return self._take_events(changes)

    # ---- what runs under it

    def start(
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
        volume: HasVolume | None = None,
    ) -> Guest:
        """Start a command under it. While the command runs the lease is in use, so it is renewed; when the lease ends,
        so do the command and everything it has started.

        It gets this program's folder, environment and umask, unless ``cwd`` and ``env`` (the whole environment) say
        otherwise. ``stdio`` is ``"pipes"``, ``"pty"`` (a terminal of ``rows`` and ``cols``) or ``"null"`` (nothing to
        read). ``grace`` is how long it may take to leave when it is stopped alone. ``volume`` is a lease of
        blocks that it may save to, as long as that lives (``sublet.current().volume``); one that it starts under needs
        no naming. Raises ``InvalidRequest`` if there is no such command, or it may not be run.
        """
        with shortage_explained():
            from sublet.client.guests import start_guest

        self._own()
        self.check()
        return start_guest(
            self, argv, env=env, cwd=cwd, stdio=stdio, rows=rows, cols=cols, name=name, grace=grace, volume=volume
        )

    def volume_line(self) -> HolderLine:
        """The way to its volume, for a lease of blocks: `Durable(state, lease)` saves over it."""
        with shortage_explained():
            from sublet.client.volume_line import HolderLine, lease_token

        with self._lock:
            line = self._volume_line()
            if line is None:
                line = HolderLine(
                    self._fabric.address, lambda: lease_token(self), lambda: (self.id, self.epoch), self._in_use
                )
                self._volume_line = weakref.ref(line)
            return line

    # ---- Python functions under it

    @overload
    def run(self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a Python function in a process that has the lease's devices, and wait for what it returns.

        The process (a *worker*) starts with the first call and stays warm while the lease lives. Arguments and results
        are copies; large arrays go through shared memory, and those that have not changed since an earlier call do not
        go again. What the function prints and logs appears here, what it raises is raised here. A coroutine function
        is awaited there; a generator comes back as an iterator, whose items are made as they are asked for.

        When the lease ends in the middle, the function is interrupted (``LeaseInterrupt``) and `LeaseEnded` is raised
        here. When the process dies, `WorkerLost` says how; the lease lives, and the next call gets another process.
        """
        return self._calls().run(function, *args, **kwargs)

    @overload
    def submit(
        self, function: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same without waiting: a ``concurrent.futures.Future``. Calls are executed one after the other, in the
        order they were made. One that is cancelled before it began never runs; one that runs is interrupted."""
        with shortage_explained():
            from sublet.compute.options import CallFuture, Options, submit_call

        future = CallFuture()
        try:
            submit_call(future, self, Options(), function, args, kwargs)
        except BaseException:
            future.cancel()
            raise
        return future

    def map(self, function: Callable[..., R], /, *iterables: Iterable[Any]) -> Iterator[R]:
        """Call it for each item, as ``map`` does; results come in order. Small calls are sent together. Items are
        taken from the iterables as results are asked for, a bounded number ahead."""
        return self._calls().map(function, *iterables)

    def options(
        self,
        *,
        timeout: float | str | None = None,
        python: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        name: str = "",
        volume: HasVolume | None = None,
    ) -> Calls:
        """``run``, ``submit`` and ``map`` with options: ``lease.options(timeout="1m").run(f, x)``.

        ``timeout`` is how long one call may run once it has begun; then it is interrupted, and `CallTimeout` is raised.
        ``python`` is another interpreter, ``env`` the whole environment and ``cwd`` the folder of the worker: each
        combination has a worker of its own. ``name`` is for people. ``volume`` is a lease of blocks that the worker may
        save to (``sublet.current().volume``).
        """
        with shortage_explained():
            from sublet.compute.options import options_of

        return self._calls(options_of(timeout=timeout, python=python, env=env, cwd=cwd, name=name, volume=volume))

    def _calls(self, options: Any = None) -> Calls:
        with shortage_explained():
            from sublet.compute.options import Calls, Options

        return Calls(self, Options() if options is None else options)

    def _resume_from(self, old: Lease) -> None:
        """What ran under that one was parked, and is under this one now: workers with what they keep and the calls they
        have not answered yet."""
        with old._lock:
            workers, old._workers = old._workers, None
        if workers is not None:
            self._workers = workers
            workers.now_under(self)

    def _in_use(self) -> Callable[[], None]:
        """Something runs under it, until what is returned is called."""
        running = contextlib.ExitStack()
        running.enter_context(self.activity())
        return running.close

    # ---- for a RenewalManager of one's own

    @property
    def holder(self) -> Holder:
        """Its state machine, for a `RenewalManager` of your own. The fabric stops to renew it then."""
        with self._lock:
            return self._book.hand_over(self._held)

    def send_renewal(self, attempt: Attempt) -> Outcome:
        """Send one renewal and say what came of it."""
        program = background_requests.renew_one(self._fabric._core, self._book, attempt, self._patience_s(attempt))
        return self._fabric._run(program)

    def _take_events(self, changes: queue.SimpleQueue[LeaseChange]) -> Iterator[LeaseChange]:
        try:
            while True:
                change = changes.get()
                yield change
                if change.end is not None:
                    return
        finally:
            self._stop_listening(changes.put)

    def _release_in_background(self) -> None:
        """Giving it back was interrupted, or not answered: that goes on in the background."""
        if not self._left and os.getpid() == self._pid:
            self._fabric._release_in_background(self._held.owed)

    def _wake(self) -> None:
        self._fabric._keeper.wake_in_time()
