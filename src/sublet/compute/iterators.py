"""Iterates in the holder a generator that runs in a worker."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from sublet.compute.calls import PendingCall
from sublet.compute.outcomes import CallCancelled, GeneratorBegun, Items, read
from sublet.compute.shown import sees_our_folders
from sublet.errors import CallTimeout, LeaseEnded, SubletError
from sublet.wire.work import HolderMessage, OutgoingMessage, pack

if TYPE_CHECKING:
    from sublet.client.handle import LeaseHandle
    from sublet.compute.worker_guest import Options
    from sublet.compute.workers import Worker

ITEMS_MAX: Final = 64
"""Asked for at a time; fewer come when they take long or are large."""


class RemoteIterator(Iterator[Any]):
    """Its items come as they are made, a bounded number ahead of the loop: while one handful is used here, the
    next is made there. Nothing is made before the first is asked for.

    Closing it (or letting go of it) closes the generator, whose ``finally`` runs in the worker. What the generator
    raises is raised here, after the items before it.
    """

    def __init__(self, lease: LeaseHandle, worker: Worker, begun: GeneratorBegun, options: Options) -> None:
        self._lease = lease
        self._worker = worker
        self._number = begun.number
        self.is_async = begun.is_async
        self._options = options
        self._items: deque[Any] = deque()
        self._ahead: PendingCall | None = None
        self._stop = contextlib.ExitStack()
        self._most = 1
        self._value: Any = None
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while not self._items:
            if self._is_over:
                raise StopIteration(self._value)
            self._fetch()
        return self._items.popleft()

    def close(self) -> None:
        """Close the generator. If it is at work on an item, it is interrupted. Harmless twice."""
        if self._is_over:
            return
        self._items.clear()
        found: Items | CallCancelled | None = None
        if self._ahead is not None:
            self._worker.exchange.cancel(self._ahead)
            self._worker.completions.wake()
            with contextlib.suppress(SubletError):
                found = self._answer()
        if self._finish() and not isinstance(
            found, CallCancelled
        ):  # one whose next items were not begun is still there
            return
        pending = PendingCall()
        with self._worker.life.use(self._lease):
            self._worker.exchange.send(
                pending, lambda: OutgoingMessage(pack(HolderMessage.CLOSE, subject=self._number))
            )
            self._worker.exchange.wait(pending)
        if pending.came is not None:
            read(pending.came, self._lease.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except SubletError:
            if error is None:
                raise

    def __del__(self) -> None:
        """Takes no lock: a finaliser may run anywhere."""
        if not getattr(self, "_is_over", True):
            self._worker.dropped.append(self._number)
            self._stop.close()

    def _finish(self) -> bool:
        """From here on it is over; whether it was already."""
        was, self._is_over = self._is_over, True
        return was

    def _fetch(self) -> None:
        self._lease.check()
        if self._ahead is None:
            self._ask()
        found = self._answer()
        if isinstance(found, Items):
            self._items.extend(found.items)
            self._is_over, self._value = found.is_done, found.value
            if not self._is_over:
                self._most = min(2 * self._most, ITEMS_MAX)
                self._ask()

    def _ask(self) -> None:
        """For the next handful. While it is made the lease is in use."""
        self._stop.enter_context(self._worker.life.use(self._lease))
        stop, self._stop = self._stop, contextlib.ExitStack()
        self._ahead = PendingCall(self._options.timeout_ns, stop.close)
        body = pack(HolderMessage.NEXT, subject=self._number, amount=self._most)
        self._worker.exchange.send(self._ahead, lambda: OutgoingMessage(body))

    def _answer(self) -> Items | CallCancelled:
        """Of what was asked for. Raises what the generator raised; then it is over."""
        pending, exchange = self._ahead, self._worker.exchange
        assert pending is not None
        try:
            if not exchange.wait(pending, lambda: exchange.due_ns(pending)):
                exchange.cancel(pending)
                self._worker.completions.wake()
                raise CallTimeout("the generator took longer for an item than it was given, and was interrupted")
            if pending.came is None:
                raise self._worker.why_lost(self._lease)
            found: Items | CallCancelled = read(
                pending.came, self._lease.id, of_tenant=not sees_our_folders(self._lease)
            )
        except (CallTimeout, KeyboardInterrupt):  # it may not have begun, and so be there still
            self._is_over = True
            self._worker.dropped.append(self._number)
            raise
        except LeaseEnded as error:
            self._is_over = True
            if self._lease.end is not None:
                error.end = self._lease.end
            raise
        except BaseException:
            self._is_over = True
            raise
        finally:
            self._ahead = None
        if isinstance(found, CallCancelled):
            self._is_over = True
        return found
