"""The properties common to blocking and asyncio lease objects, read from the table of leases. Never talks to the
office."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, assert_never

from sublet.background import start_thread
from sublet.client.lease_entry import LeaseEntry, Owed
from sublet.client.lease_table import LeaseTable
from sublet.client.model import LeaseChange, LeasedDevice, Notice
from sublet.client.operations import REQUEST_TIMEOUT_S, OfficeOperations
from sublet.client.responses import end_of
from sublet.client.steps import Program
from sublet.clock import Clock
from sublet.errors import (
    Disconnected,
    InvalidRequest,
    LeaseNotActive,
    LeaseRevoked,
    SubletError,
)
from sublet.lease.policy import RenewalPolicy
from sublet.lease.states import LeaseStatus
from sublet.lease.value import (
    Attempt,
    Outcome,
    RenewalGranted,
    RenewalRefused,
    RenewalUnknown,
    ended_error,
)
from sublet.lease_end import LeaseEnd
from sublet.values import NS_PER_S, Epoch, LeaseId, RenewMode, parse_duration_ns, shown
from sublet.wire.http import LeaseView

if TYPE_CHECKING:
    from sublet.client.address import Address
    from sublet.client.aio_keeper import AioKeeper
    from sublet.client.guest_watch import GuestWatch
    from sublet.client.renewal_thread import RenewalThread

T = TypeVar("T")


class DroppedLease(ResourceWarning):
    """A lease object was dropped without a release. It is given back, but later than it could have been: use ``with``,
    or call ``release()``."""


class LeaseFacts:
    """The facts of a lease, as its holder knows them now."""

    def __init__(
        self, book: LeaseTable, held: LeaseEntry, clock: Clock, lock: contextlib.AbstractContextManager[object]
    ) -> None:
        self._book = book
        self._clock = clock
        self._lock = lock
        self._pid = os.getpid()
        self._left = False
        self._held = held  # from here on the finaliser has all that it needs
        held.handle = weakref.ref(self)
        self._takes_up = False
        """Whether what runs under it was started by another program, and is to be resumed."""

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self.devices)
        return f"<{type(self).__name__} {self.id} {self.status} {self.remaining:.0f}s [{devices}]>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise InvalidRequest(
            f"lease {self.id} cannot travel to another process: it belongs to the program that acquired it",
            do="Hand over lease.id, for fabric.attach; inside a function that runs under it, use sublet.current().",
        )

    @property
    def id(self) -> LeaseId:
        return self._held.id

    @property
    def epoch(self) -> Epoch:
        """The fencing number: whatever is written under the lease carries it, and an older one is refused."""
        return self._held.epoch

    @property
    def name(self) -> str | None:
        return self._held.view.name

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._held.view.labels)

    @property
    def status(self) -> LeaseStatus:
        """Where it is, as its holder knows: JEOPARDY while renewals stay unanswered, and over at its own deadline, also
        where the office says nothing."""
        with self._lock:
            self._book.refresh(self._held)
            return self._held.holder.status

    @property
    def end(self) -> LeaseEnd | None:
        """Why it ended; None while it is held."""
        with self._lock:
            self._book.refresh(self._held)
            return self._held.holder.end

    @property
    def notice(self) -> Notice | None:
        """That it will be taken, when, and why; None if nothing of the kind was said."""
        return self._held.notice

    @property
    def devices(self) -> tuple[LeasedDevice, ...]:
        """The slices it has, of whatever kind."""
        return self._held.devices

    @property
    def ttl(self) -> float:
        """Seconds each renewal asks for: what was asked for at first, or four times what saving has come to need."""
        return self._held.holder.requested_ns / NS_PER_S

    @property
    def remaining(self) -> float:
        """Seconds that are left for sure: to the holder's own deadline, or to the moment it will be taken."""
        with self._lock:
            return self._held.holder.remaining_ns(self._clock.now_ns()) / NS_PER_S

    @property
    def deadline(self) -> float | None:
        """The holder's own deadline, in seconds of this machine's CLOCK_BOOTTIME. It is never after the office's."""
        deadline_ns = self._held.holder.deadline_ns
        return None if deadline_ns is None else deadline_ns / NS_PER_S

    @property
    def expires_at(self) -> dt.datetime:
        """About when it ends if it is not renewed: for people, since the wall clock may be set."""
        wall_ns = self._clock.wall_ns() + round(self.remaining * NS_PER_S)
        return dt.datetime.fromtimestamp(wall_ns / NS_PER_S, dt.UTC)

    @property
    def busy(self) -> bool:
        """Whether something of this program runs under it."""
        return self._held.holder.busy

    def check(self, needs: float | str = 0.0) -> None:
        """Raise if it is over, or if work that takes ``needs`` must not begin on it any more.

        ``LeaseExpired`` if it was not renewed, ``LeaseRevoked`` if it was taken or will not be renewed,
        ``LeaseNotActive`` otherwise. Passing this proves nothing: the resource checks the epoch itself.
        """
        needs_ns = parse_duration_ns(needs, "needs", zero_ok=True)
        end = self.end
        if end is not None:
            raise ended_error(self.id, end)
        with self._lock:
            why = self._held.holder.why_not_start(self._clock.now_ns(), needs_ns)
        if why is not None:
            raise LeaseRevoked(
                f"nothing may begin under lease {self.id}: {why}", do="Save what matters and release it."
            )

    def use(self, policy: RenewalPolicy) -> None:
        """Renew by another policy from now on."""
        if not isinstance(policy, RenewalPolicy):
            raise InvalidRequest(f"{shown(policy)} is not a policy", do="Give a sublet.RenewalPolicy(...).")
        policy.check(self._held.holder.ttl_ns)
        with self._lock:
            self._held.holder.use(policy)
            self._book.reschedule(self._held)
        self._wake()

    @contextlib.contextmanager
    def activity(self, what: str = "") -> Iterator[None]:
        """Something runs under it: while it does, the lease is renewed (``renew="while-busy"``) and counts as busy.

        ``what`` is for the reader of the code. Activities nest and may overlap between threads.
        """
        self._own()
        token = object()
        try:
            with self._lock:
                self._book.begin(self._held, token)
            self._wake()
            yield
        finally:
            with self._lock:
                self._book.finish(self._held, token)
            self._wake()

    @staticmethod
    def _callable(callback: object) -> None:
        if not callable(callback):
            raise InvalidRequest(f"{shown(callback)} cannot be called", do="Hand over a function of one argument.")

    def _own(self) -> None:
        if os.getpid() != self._pid:
            raise LeaseNotActive(
                f"lease {self.id} belongs to the process that acquired it, not to its fork",
                do="Acquire or attach in the process that uses it.",
            )

    # ---- what both kinds of object do around a request

    def _renewal_by_hand(self, ttl: float | str | None) -> Attempt:
        """A renewal to send now. Asking for it is a sign of life, so it says that the lease is in use."""
        self._own()
        ttl_ns = None if ttl is None else parse_duration_ns(ttl, "ttl")
        end = self.end
        if end is not None:
            raise ended_error(self.id, end)
        token = object()
        with self._lock:
            try:
                self._book.begin(self._held, token)
                return self._book.attempt(self._held, ttl_ns)
            finally:
                self._book.finish(self._held, token)

    def _renewed_by_hand(self, attempt: Attempt, outcome: Outcome) -> None:
        with self._lock:
            self._book.take(self._held, attempt, outcome)
        self._wake()
        match outcome:
            case RenewalGranted():
                return
            case RenewalRefused(end=LeaseEnd() as end):
                raise ended_error(self.id, end)
            case RenewalRefused():
                raise LeaseRevoked(
                    f"the renewal of lease {self.id} was refused: {outcome.detail or outcome.reason}",
                    do="It runs to its deadline; save what matters now.",
                    reason=outcome.reason.value,
                )
            case RenewalUnknown():
                raise Disconnected(f"the renewal of lease {self.id} was not answered: {outcome.detail}")
            case _:
                assert_never(outcome)

    def _patience_s(self, attempt: Attempt) -> float:
        """By hand there is nothing else to do meanwhile, so an answer is awaited for as long as it would still help."""
        return max(attempt.timeout_ns / NS_PER_S, min(REQUEST_TIMEOUT_S, self.remaining))

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Renewed whatever runs under it: a request waits that is to take its place."""
        holder = self._held.holder
        policy = holder.policy
        try:
            with self._lock:
                holder.use(replace(policy, mode=RenewMode.ALWAYS))
                self._book.reschedule(self._held)
                self._wake()
            yield
        finally:
            with self._lock:
                holder.use(policy)
                self._book.reschedule(self._held)

    def _is_returned(self) -> bool:
        """Whether there is nothing to give back: the office knows, or the time ran out, which it knows by itself. What
        was given back without an answer may be given back again."""
        with self._lock:
            self._book.refresh(self._held)
            return self._held.confirmed or (self._held.over and not self._held.returned)

    def _letting_go(self, core: OfficeOperations) -> Program[LeaseView | None]:
        """From here on nothing starts under it; what is returned tells the office."""
        with self._lock:
            self._book.begin_release(self._held)
        return core.release(self.id, request_id=self._held.release_id, busy_s=self._held.owed.busy_s)

    def _to_let_go(self) -> Owed:
        """The same for several at once: what is owed for it."""
        with self._lock:
            self._book.begin_release(self._held)
        return self._held.owed

    def _released(self, view: LeaseView | None) -> None:
        """The office confirmed the release. Its end reason counts: the lease may have been taken a moment before."""
        with self._lock:
            if view is not None and view.end is not None:
                self._book.ended(self._held, end_of(view.end))
            self._book.release_done(self._held.owed)

    def _could_not_release(self, failed: SubletError, error: BaseException | None) -> None:
        text = f"lease {self.id} could not be given back yet; it is tried again until its time to live ends: {failed}"
        if error is not None:
            error.add_note(text)
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _bound_epoch(self) -> Epoch | None:
        """The epoch of a lease that would end with this process; None if it would not."""
        with self._lock:
            held = self._held
            return held.epoch if held.view.bound_to is not None and not held.over else None

    def _leave(self) -> LeaseId:
        self._own()
        with self._lock:
            self._book.leave(self._held)
        self._left = True
        return self.id

    def _is_dropped(self) -> bool:
        """Whether this object goes while it still holds the lease; if so, the keeper is told to give it back. Takes no
        lock: a finaliser may run anywhere, in the middle of something that holds it."""
        held: LeaseEntry | None = getattr(self, "_held", None)
        if held is None or held.over or self._left or os.getpid() != self._pid:
            return False
        self._book.dropped.append(held)
        return True

    def _dropped_text(self) -> str:
        return f"lease {self.id} was dropped without a release; use `with`, or call release()"

    def _listen(self, listener: Callable[[LeaseChange], None]) -> None:
        """Hear of every change. Where it is over already, that is said at once, and it is the last."""
        with self._lock:
            holder = self._held.holder
            if holder.end is not None:
                listener(LeaseChange(what="ended", lease=self.id, status=holder.status, end=holder.end))
            else:
                self._held.listeners.append(listener)

    def _stop_listening(self, listener: Callable[[LeaseChange], None]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._held.listeners.remove(listener)

    def _wake(self) -> None:
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------- for what blocks


class FabricLink(Protocol):
    """What a blocking lease, and what runs under it, needs of the fabric that opened it."""

    @property
    def address(self) -> Address: ...
    @property
    def _core(self) -> OfficeOperations: ...
    @property
    def _clock(self) -> Clock: ...
    @property
    def _lock(self) -> contextlib.AbstractContextManager[object]: ...
    @property
    def _book(self) -> LeaseTable: ...
    @property
    def _keeper(self) -> RenewalThread: ...
    @property
    def _callbacks(self) -> CallbackThread: ...
    @property
    def _watch(self) -> GuestWatch: ...
    def _run(self, program: Program[T], /) -> T: ...
    def close(self, patience: float, /) -> None: ...
    def _release_in_background(self, owed: Owed, /) -> None: ...
    def lease(self, lease: LeaseId | str, /) -> LeaseView: ...


class LeaseHandle(LeaseFacts):
    """A blocking lease, as what runs under it knows it. ``client.lease.Lease`` is it."""

    _fabric: FabricLink
    _workers: Any
    """What runs Python functions under it (``compute.workers``), from the first call on."""

    def on_end(self, callback: Callable[[LeaseEnd], object]) -> Callable[[LeaseEnd], object]:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def _close_what_runs(self) -> None:
        raise NotImplementedError


# --------------------------------------------------------------------------------------------------------- for asyncio


class LoopFabric(Protocol):
    """What a lease of an asyncio program, and what runs under it, needs of the fabric that opened it."""

    @property
    def address(self) -> Address: ...
    @property
    def _core(self) -> OfficeOperations: ...
    @property
    def _clock(self) -> Clock: ...
    @property
    def _book(self) -> LeaseTable: ...
    @property
    def _keeper(self) -> AioKeeper: ...
    @property
    def _watch(self) -> GuestWatch: ...
    async def _run(self, program: Program[T], /) -> T: ...
    def _release_in_background(self, owed: Owed, /) -> None: ...
    def _unbind(self, lease: LeaseId, epoch: Epoch, /) -> None: ...
    def _deliver(self, callback: Callable[[Any], Any], what: object, /) -> None: ...
    async def lease(self, lease: LeaseId | str, /) -> LeaseView: ...


class LoopLease(LeaseFacts):
    """A lease of an asyncio program, as what runs under it knows it. ``client.aio_lease.Lease`` is it."""

    _fabric: LoopFabric
    _blocking_lease: Any
    """What runs Python functions under it, from the first call on."""

    def on_end(self, callback: Callable[[LeaseEnd], object]) -> Callable[[LeaseEnd], object]:
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------------- callbacks

_log = logging.getLogger("sublet.client")


class CallbackThread:
    """Calls the user's callbacks on a thread of its own, in order, one at a time.

    Its thread starts with the first delivery. A callback that raises is logged; the next is called all the same."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[Any], object], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def deliver(self, callback: Callable[[Any], object], what: object) -> None:
        """Call ``callback(what)`` soon. Call this under the fabric's lock."""
        self._queue.put((callback, what))
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no room for a thread now: the next delivery tries again
                self._thread = start_thread("callbacks", self._run, again=True)

    def _run(self) -> None:
        while True:
            callback, what = self._queue.get()
            try:
                callback(what)
            except Exception:  # noqa: BLE001 - it is the user's, and the next one has done nothing wrong
                _log.exception("a callback of a lease failed: %r", callback)
            del callback, what
