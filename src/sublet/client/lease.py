"""A lease as a program holds it, with blocking calls."""

from __future__ import annotations

import contextlib
import os
import queue
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sublet.client import errands
from sublet.client.answers import end_of
from sublet.client.book import Book, Held
from sublet.client.handle import DroppedLease, LeaseFacts, ended_error
from sublet.client.model import LeaseChange, Notice
from sublet.errors import Disconnected, LeaseRevoked, SubletError
from sublet.lease.holder import Holder
from sublet.lease.value import Attempt, Done, LeaseEnd, Outcome, Refused
from sublet.values import NS_PER_S, LeaseId, parse_duration_ns

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric

__all__ = ["Lease"]


class Lease(LeaseFacts):
    """A time-bounded grant. It has a holder (this program), and ends at its deadline unless it is renewed.

    Use it as a context manager, so that it is given back at the end of the block::

        with fabric.gpu(min_vram="2GiB") as lease:
            with lease.activity("training"):
                ...
    """

    def __init__(self, fabric: Fabric, book: Book, held: Held) -> None:
        super().__init__(book, held, fabric._clock, fabric._lock)
        self._fabric = fabric
        self._left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back. What the body raised goes on as it is, whatever becomes of the release."""
        if os.getpid() != self._pid or self._left:
            return
        try:
            self.release()
        except SubletError as failed:
            text = f"lease {self.id} could not be given back and ends by itself: {failed}"
            if error is not None:
                error.add_note(text)
            else:
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __del__(self) -> None:
        held: Held | None = getattr(self, "_held", None)
        if held is None or held.over or self._left or os.getpid() != self._pid:
            return
        self._book.dropped.append(held)
        self._fabric._keeper.wake()
        warnings.warn(
            f"lease {held.id} was dropped without a release; use `with`, or call release()",
            DroppedLease,
            stacklevel=1,
            source=self,
        )

    def renew(self, ttl: float | str | None = None) -> None:
        """Renew it now, due or not. Asking for it is a sign of life, so this counts as being in use.

        A refusal is raised, and so is silence (`Disconnected`): the lease then goes on to its own deadline, and the
        renewal may be asked again.
        """
        self._own()
        ttl_ns = None if ttl is None else parse_duration_ns(ttl, "ttl")
        with self._lock:
            self._book.refresh(self._held)
            end = self._held.holder.end
            if end is not None:
                raise ended_error(self.id, end)
            with self._in_use():
                attempt = self._book.attempt(self._held, ttl_ns)
        outcome = self.send_renewal(attempt)
        with self._lock:
            self._book.take(self._held, attempt, outcome)
        self._wake()
        if isinstance(outcome, Refused):
            if outcome.end is not None:
                raise ended_error(self.id, outcome.end)
            raise LeaseRevoked(
                f"the renewal of lease {self.id} was refused: {outcome.detail or outcome.reason}",
                do="It runs to its deadline; save what matters now.",
            )
        if not isinstance(outcome, Done):
            raise Disconnected(f"the renewal of lease {self.id} was not answered: {outcome.detail}")

    def release(self) -> None:
        """Give it back. Twice is harmless, and so is after the end.

        If the office does not answer, that is raised as `Disconnected`; the lease is over for this program all the same
        and ends by its time to live.
        """
        self._own()
        if self._held.confirmed:
            return
        with self._lock:
            busy_ns = self._held.holder.busy_time.unsaid_ns(self._clock.now_ns())
            self._book.let_go(self._held)
        program = self._fabric._core.release(self.id, request_id=self._held.release_id, busy_s=busy_ns / NS_PER_S)
        view = self._fabric._run(program)
        with self._lock:
            if view is not None and view.end is not None:
                self._book.ended(self._held, end_of(view.end))
            self._held.confirmed = True

    def leave(self) -> LeaseId:
        """Neither renew nor release it any more: it lives on to its deadline, for whoever attaches to it by this id."""
        self._own()
        with self._lock:
            self._book.leave(self._held)
        self._left = True
        return self.id

    def on_notice(self, callback: Callable[[Notice], object]) -> Callable[[Notice], object]:
        """Call this when it is announced that the lease will be taken. It runs on a thread of its own."""

        def listen(change: LeaseChange) -> None:
            if change.what == "notice" and change.notice is not None:
                self._fabric._courier.deliver(callback, change.notice)

        with self._lock:
            self._held.listeners.append(listen)
            if self._held.notice is not None:
                self._fabric._courier.deliver(callback, self._held.notice)
        return callback

    def on_end(self, callback: Callable[[LeaseEnd], object]) -> Callable[[LeaseEnd], object]:
        """Call this once, when it is over, or at once if it is. It runs on a thread of its own."""

        def listen(change: LeaseChange) -> None:
            if change.end is not None:
                self._fabric._courier.deliver(callback, change.end)

        with self._lock:
            end = self._held.holder.end
            if end is not None:
                self._fabric._courier.deliver(callback, end)
            else:
                self._held.listeners.append(listen)
        return callback

    def events(self) -> Iterator[LeaseChange]:
        """What happens to it from now on, as it happens; ends with the lease. What happens to it before the iterator
        is first asked is kept for it."""
        changes: queue.SimpleQueue[LeaseChange] = queue.SimpleQueue()
        with self._lock:
            end = self._held.holder.end
            if end is not None:
                changes.put(LeaseChange(what="ended", lease=self.id, status=self._held.holder.status, end=end))
            else:
                self._held.listeners.append(changes.put)
        return self._take_events(changes)

    # ---- for a RenewalManager of one's own

    @property
    def holder(self) -> Holder:
        """Its state machine, for a `RenewalManager` of your own. Whoever takes it renews it: the fabric stops to."""
        with self._lock:
            return self._book.hand_over(self._held)

    def send_renewal(self, attempt: Attempt) -> Outcome:
        """Send one renewal and say what came of it."""
        timeout_s = max(attempt.timeout_ns / NS_PER_S, self._least_timeout_s())
        return self._fabric._run(errands.renew_one(self._fabric._core, self._book, attempt, timeout_s))

    def _take_events(self, changes: queue.SimpleQueue[LeaseChange]) -> Iterator[LeaseChange]:
        try:
            while True:
                change = changes.get()
                yield change
                if change.end is not None:
                    return
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._held.listeners.remove(changes.put)

    def _least_timeout_s(self) -> float:
        """By hand there is nothing else to do meanwhile, so an answer is awaited for as long as it would still help."""
        return min(errands.FLIGHT_S, max(0.1, self.remaining))

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        self._book.begin(self._held)
        try:
            yield
        finally:
            self._book.finish(self._held)

    def _wake(self) -> None:
        self._fabric._keeper.wake()
