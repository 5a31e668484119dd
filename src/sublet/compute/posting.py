"""Calls functions under a lease: blocking, as a future, as an ordered map.

Each of them asks the lease first whether anything may begin, counts as use of the lease while it is under way, and
finds a worker. A call that the worker had not begun when it died goes to the next worker; so does one whose function
the worker knows under the same name as another. A call of many does not go there by itself: its sender knows what
else was sent, and in which order.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from sublet.compute.calls import PendingCall
from sublet.compute.functions import checked_callable
from sublet.compute.futures import CallFuture
from sublet.compute.iterators import RemoteIterator
from sublet.compute.outcomes import CallCancelled, CallResults, GeneratorBegun, Unlike, read, read_many
from sublet.compute.shown import sees_our_folders
from sublet.compute.worker_guest import Options
from sublet.compute.workers import Worker, WorkerCall, workers_of
from sublet.devices.primary_contexts import contexts, loaded_driver
from sublet.errors import CallTimeout, InvalidRequest, LeaseEnded, SubletError
from sublet.guest.main_thread import is_worker
from sublet.lazy_dataclass import dataclass
from sublet.values import NS_PER_S, Kind, format_duration, shown

if TYPE_CHECKING:
    from sublet.client.handle import LeaseFacts, LeaseHandle

TRIES: Final = 4
"""Workers that one call is sent to: each but the last died before it began, or knew the function as another."""
RUN_MAX: Final = 128
"""Calls that may be under way at once on one connection; with more threads than that, the others wait."""
BATCH_FOR_NS: Final = 5_000_000
"""Small calls of a map are sent together, as many as take about so long."""
BATCH_MAX: Final = 2048
MADE_WITHIN_NS: Final = NS_PER_S
"""Results that a worker has sent have been read from its connection by then."""
AHEAD: Final = 2
"""Batches of a map that are under way before the first of their results is asked for."""


class CallNotBegun:
    """The call did not begin; it can be sent again."""


AGAIN: Final = CallNotBegun()


def run_call(
    lease: LeaseHandle, options: Options, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Call it and wait."""
    job = WorkerCall(checked_callable(function), args, kwargs)
    for _ in range(TRIES):
        worker = _ready(lease, options)
        if worker.exchange.under_way >= RUN_MAX:
            future = CallFuture()
            try:
                _submit(future, lease, worker, job, options)
                return future.result()
            except KeyboardInterrupt:
                future.cancel()
                raise
        with worker.life.use(lease):
            found = _run_once(lease, worker, job, options)
        if found is not AGAIN:
            if isinstance(found, GeneratorBegun):
                return RemoteIterator(lease, worker, found, options)
            return found
    raise SubletError("the call did not come to begin: its workers ended before", do="See `sublet logs`.")


def submit_call(
    future: CallFuture,
    lease: LeaseHandle,
    options: Options,
    function: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
) -> None:
    """Call it and do not wait. The caller makes the future and so has it before anything is sent: where an interrupt
    comes as this returns, it can still cancel the call."""
    job = WorkerCall(checked_callable(function), args, kwargs)
    worker = _ready(lease, options)
    _submit(future, lease, worker, job, options)


def submit_many(lease: LeaseHandle, options: Options, function: Callable[..., Any], items: Sequence[Any]) -> CallFuture:
    """Call it with each of these, in one message; the future brings a ``CallResults``."""
    job = WorkerCall(checked_callable(function), _Singles(items), {}, is_many=True)
    future = CallFuture()
    _submit(future, lease, _ready(lease, options), job, options)
    return future


class _Singles:
    """Argument tuples of one, made where they are used: here they would be garbage, and their pickles work."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        return zip, (self._items,)


def prepare_worker(lease: LeaseHandle, options: Options) -> None:
    """Start the worker of these options, if there is none, and wait until it can be given calls."""
    _ready(lease, options)


def map_calls(
    lease: LeaseHandle, options: Options, function: Callable[..., Any], iterables: tuple[Iterable[Any], ...]
) -> Iterator[Any]:
    """Call it for each, in order; results come in order as they are asked for, a little ahead."""
    checked_callable(function)
    if not iterables:
        raise InvalidRequest("there is nothing to map over", do="Give at least one iterable.")
    for one in iterables:
        _check_iterable(one)
    check_call(lease, options)
    return _mapped(lease, options, function, zip(*iterables, strict=False))


def _check_iterable(one: object) -> None:
    if not isinstance(one, Iterable) and not hasattr(one, "__getitem__"):
        raise InvalidRequest(f"{shown(one)} cannot be mapped over", do="Give lists, arrays or other iterables.")


def _ready(lease: LeaseHandle, options: Options) -> Worker:
    """The worker for the call. Nothing of the call has begun if this raises, nor on a worker that was tried before."""
    try:
        check_call(lease, options)
        return workers_of(lease).find(lease, options)
    except LeaseEnded as error:
        error.begun = False
        raise


def check_is_holder() -> None:
    """Raise in a worker: what runs there is under a lease already, and holds none."""
    if is_worker():
        raise InvalidRequest(
            "this function already runs under a lease, in a worker; there is no lease to hold from here",
            do="Call the function directly: it has the device. Leases are held by the program that called this one.",
        )


def check_call(lease: LeaseHandle, options: Options) -> None:
    """Whether a call may begin now. Raises why not."""
    check_is_holder()
    lease._own()
    lease.check(0.0 if options.timeout_ns is None else options.timeout_ns / NS_PER_S)
    check_holder(lease)


def outcome(lease: LeaseHandle, worker: Worker, pending: PendingCall, job: WorkerCall) -> Any:
    """What came of a call that is done; AGAIN where it can be sent again. Raises what it raised."""
    if pending.came is None:
        error = worker.why_lost(lease)
        if pending.lost is not None and job.is_many and (many := _made_before(lease, pending, job, error)) is not None:
            return many
        if pending.was_begun or (pending.call == 0 and worker.guest is None):
            raise error
        if isinstance(error, LeaseEnded):
            raise _not_begun(error)
        return CallResults([], error, 0, is_begun=False) if job.is_many else AGAIN
    try:
        found = read(pending.came, lease.id, of_tenant=not sees_our_folders(lease))
    except LeaseEnded as error:
        if error.end is not None and lease.end is not None:
            error.end = lease.end  # the office's own word
        if pending.parts:
            return _with_results(lease, pending, error)
        raise
    except SubletError as error:
        if pending.parts:
            return _with_results(lease, pending, error)
        raise
    if isinstance(found, CallResults):
        return _with_results(lease, pending, found.error)._replace(took_ns=found.took_ns)
    if isinstance(found, Unlike):
        if not worker.send_by_value(job.function):
            raise InvalidRequest(f"the worker does not know the function: {found.why}")
        return AGAIN
    return found


def _with_results(lease: LeaseHandle, pending: PendingCall, error: BaseException | None) -> CallResults:
    """The results of a call of many, and what ended it early."""
    made = read_many(pending.parts, of_tenant=not sees_our_folders(lease))
    return CallResults(made.results, made.error or error, 0)


def _made_before(lease: LeaseHandle, pending: PendingCall, job: WorkerCall, error: SubletError) -> CallResults | None:
    """The results of a call of many that were made before its worker was lost, and why there are no more; None where
    the call was not begun. Only the item that was executing was begun, and its error says so."""
    lost = pending.lost
    if lost is None or not (pending.was_begun or pending.parts):
        return None
    left = (lost.first, lost.results) if pending.was_begun else (0, ())
    made = read_many(pending.parts, left, of_tenant=not sees_our_folders(lease))
    if made.error is not None or len(made.results) == len(job.args):
        return made
    return CallResults(made.results, error, 0)


def _not_begun(error: LeaseEnded) -> LeaseEnded:
    """The same for a call that was still in line; the error itself is for all that were lost with the worker."""
    own = copy.copy(error)
    own.begun = False
    return own


def _run_once(lease: LeaseHandle, worker: Worker, job: WorkerCall, options: Options) -> Any:
    pending = PendingCall(options.timeout_ns)
    try:
        worker.send(pending, job)
        if not worker.exchange.wait(pending, lambda: worker.exchange.due_ns(pending)):
            worker.exchange.cancel(pending)
            worker.completions.wake()
            raise timed_out(job, options)
    except KeyboardInterrupt:
        if not pending.doomed_ns:  # a second time would interrupt what it does to leave
            worker.exchange.cancel(pending)
        worker.completions.wake()
        raise
    found = outcome(lease, worker, pending, job)
    if isinstance(found, CallCancelled):
        raise KeyboardInterrupt
    return found


def timed_out(job: WorkerCall, options: Options) -> CallTimeout:
    name = getattr(job.function, "__qualname__", "the function")
    return CallTimeout(f"{name} took longer than {format_duration(options.timeout_ns or 0)}, and was interrupted")


class _Watched:
    """A call that a future stands for."""

    def __init__(
        self, lease: LeaseHandle, worker: Worker, job: WorkerCall, options: Options, future: CallFuture
    ) -> None:
        self.pending = PendingCall(options.timeout_ns, self._is_done)
        self._lease: LeaseHandle | None = lease
        self._worker = worker
        self._job = job
        self._options = options
        self._future = future
        self._tries = TRIES
        self._stop = contextlib.ExitStack()
        self._reading = threading.Lock()
        """Held while the results that have come are read: reading them for the future closes their descriptors."""
        future.attach(self)

    def begin(self) -> bool:
        """Send it, unless it was cancelled."""
        lease = self._lease
        if lease is None or self._future.cancelled():
            self._end()
            return False
        try:
            self._worker.send(self.pending, self._job)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the future
            self._future.deliver(error=error)
            self._end()
            return False
        return True

    def finish(self) -> None:
        """Complete the future."""
        with self._reading:
            self._finish()

    def _finish(self) -> None:
        lease = self._lease
        if lease is None or self._future.done():
            self._end()
            return
        try:
            found = outcome(lease, self._worker, self.pending, self._job)
            if found is AGAIN:
                self._again(lease)
                return
            if isinstance(found, GeneratorBegun):
                found = RemoteIterator(lease, self._worker, found, self._options)
            if isinstance(found, CallCancelled):
                self._future.cancel()
            else:
                self._future.deliver(found)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the future
            self._future.deliver(error=error)
        self._end()

    def time_is_up(self) -> None:
        """It ran too long: interrupt it."""
        self._worker.exchange.cancel(self.pending)
        self._future.deliver(error=timed_out(self._job, self._options))
        self._end()

    def withdraw(self) -> None:
        """Its future was cancelled."""
        if not self._worker.completions.withdraw(self):
            self._worker.exchange.cancel(self.pending)
            self._worker.completions.wake()
        self._end()

    def stop_further_items(self) -> bool:
        """Of a call of many: begin no further item. False if that cannot be said now."""
        if self._lease is not None and self._worker.completions.withdraw(self):
            self._future.deliver(CallResults([], None, 0))
            self._end()
            return True
        return self.pending.call != 0 and self._worker.exchange.board.stop_further_items(self.pending.call)

    def begun(self) -> int | None:
        """How many items of it were begun, as the board says."""
        return self._worker.exchange.board.begun(self.pending.call)

    def made(self) -> list[Any]:
        """Results of a call of many that are there: those that were sent, and those in the worker's buffer."""
        until_ns = time.monotonic_ns() + MADE_WITHIN_NS
        while True:
            with self._reading:
                lease, is_all = self._lease, self.pending.is_done
                if lease is None or self.pending.call == 0:
                    break
                first, pickles = self._worker.exchange.results.read(self.pending.call)
                copied = [(message, tuple(map(os.dup, fds))) for message, fds in list(self.pending.parts)]
            found = read_many(copied, (first, pickles), of_tenant=not sees_our_folders(lease)).results
            now_ns = time.monotonic_ns()
            if is_all or len(found) >= first or now_ns >= until_ns:  # else some that were sent have not come
                return found
            self._worker.exchange.wait(self.pending, lambda: now_ns + 1_000_000)  # noqa: B023 - called in here
        return self._future.made() if self._future.done() else []

    def is_running(self) -> bool:
        return self._worker.exchange.is_executing(self.pending)

    def _again(self, lease: LeaseHandle) -> None:
        self._tries -= 1
        if not self._tries:
            raise SubletError("the call did not come to begin: its workers ended before", do="See `sublet logs`.")
        self._worker = _ready(lease, self._options)
        self.count(lease)
        self.pending = PendingCall(self._options.timeout_ns, self._is_done)
        self._worker.completions.add(self)

    def count(self, lease: LeaseHandle) -> None:
        """The lease is in use from now on."""
        self._stop.close()  # with the worker it was sent to before, if there was one
        self._stop.enter_context(self._worker.life.use(lease))

    def _is_done(self) -> None:
        self._worker.completions.done(self)

    def _end(self) -> None:
        self._lease = None
        self._stop.close()


def _submit(future: CallFuture, lease: LeaseHandle, worker: Worker, job: WorkerCall, options: Options) -> None:
    watched = _Watched(lease, worker, job, options, future)
    watched.count(lease)
    worker.completions.add(watched)


@dataclass(slots=True)
class _Batch:
    """Items of a map that go to a worker together."""

    items: list[tuple[Any, ...]]
    lane: int = -1
    """To which of the map's workers it was sent."""
    worker: Worker | None = None
    future: CallFuture | None = None
    """None while it is with no worker."""
    is_failed: bool = False
    """It is known to end in an error, so nothing that follows it is sent."""

    def take_back(self) -> None:
        """It is to be sent again."""
        if self.future is not None:
            self.future.cancel()
        self.lane, self.worker, self.future = -1, None, None


def lanes_of(lease: LeaseHandle, options: Options) -> list[Options]:
    """One worker for each GPU of the lease; the first has no device in particular, since it finds that one first."""
    gpus = sum(device.kind is Kind.GPU for device in lease.devices)
    return [options, *(options._replace(device=number) for number in range(1, gpus))]


def _mapped(
    lease: LeaseHandle, options: Options, function: Callable[..., Any], items: Iterator[tuple[Any, ...]]
) -> Iterator[Any]:
    """Batches grow while calls are small, so that their number does not decide how long a map takes. Each goes to the
    worker with the fewest, and the results are put in order. One worker executes what it has in order: what one had not
    begun when it died is sent to its successor before anything else is."""
    lanes = lanes_of(lease, options)
    batches: deque[_Batch] = deque()
    """Those whose results were not handed on, in order."""
    size, tries, is_read = 1, TRIES, False
    ended: SubletError | None = None
    """Why no more batches can be sent; the results of those that were sent come first."""
    try:
        while True:
            while ended is None and (lane := _free_lane(batches, len(lanes))) is not None:
                batch = next((one for one in batches if one.future is None or one.is_failed), None)
                if batch is None:
                    if is_read:
                        break
                    batch = _Batch(list(islice(items, size)))
                    is_read = len(batch.items) < size
                    if not batch.items:
                        break
                    batches.append(batch)
                elif batch.is_failed:
                    break
                try:
                    check_call(lease, options)
                    worker = workers_of(lease).find(lease, lanes[lane])
                except SubletError as error:
                    ended = error
                    break
                before = [one for one in batches if one.lane == lane and one.worker is not worker]
                if before:
                    _reclaim(before, tries)
                    tries -= 1
                    continue
                batch.lane, batch.worker = lane, worker
                batch.future = CallFuture()
                job = WorkerCall(function, batch.items, {}, is_many=True)
                _submit(batch.future, lease, worker, job, lanes[lane])
            first = batches[0] if batches else None
            if first is None or first.future is None:
                if ended is not None:
                    raise ended
                return
            many: CallResults = first.future.result()  # still among them: an interrupt here must reach it as well
            if not many.is_begun and tries > 1:
                _reclaim([one for one in batches if one.worker is first.worker], tries)
                tries -= 1
                continue
            batches.popleft()
            tries = TRIES
            if options.timeout_ns is None:
                each_ns = max(1, many.took_ns // max(1, len(many.results)))
                size = max(1, min(2 * size, BATCH_MAX, BATCH_FOR_NS // each_ns))
            yield from many.results
            if many.error is not None:
                raise many.error
    finally:
        for one in batches:
            one.take_back()


def _reclaim(batches: Iterable[_Batch], tries: int) -> None:
    """Take back those that their worker, which is gone, had not begun."""
    for one in batches:
        assert one.future is not None
        one.lane = -1
        try:
            many: CallResults = one.future.result()
        except Exception:  # noqa: BLE001 - raised in its turn
            one.is_failed = True
            continue
        if many.is_begun or tries <= 1:
            one.is_failed = many.error is not None
        else:
            one.take_back()


def _free_lane(batches: Iterable[_Batch], lanes: int) -> int | None:
    """The worker with the fewest batches under way; None where each has enough."""
    under_way = Counter(one.lane for one in batches)
    lane = min(range(lanes), key=lambda one: under_way[one])
    return lane if under_way[lane] < AHEAD else None


# ---------------------------------------------------------------------------------------------------------- holder cuda
#
# Detects CUDA in the program that holds a lease, before it does harm.
#
# The holder's process must not touch the GPU: what it allocates lies outside of every lease, is not torn down, and
# memory that is not back at its baseline keeps the card from the next lease. Most often it is one call too many, such
# as ``torch.cuda.is_available()`` being followed by ``.to("cuda")`` at import. So it is said at the first call, in
# words.
#
# What counts is a context. CUDA that was only begun (that very question does it, in the first cell of most notebooks)
# keeps device files open and has nothing of a card; so has who asks NVML.


ALLOWED_BY: Final = "SUBLET_HOLDER_CUDA"
"""Set to ``allow`` by a user who has a card of their own in this program, on purpose."""
_DO: Final = (
    "Move what uses CUDA into the function that is called, and restart this program; "
    f"or, if it has another card of its own, set {ALLOWED_BY}=allow."
)


def check_holder(lease: LeaseFacts) -> None:
    """Raise if this program uses CUDA while it holds a lease of a real GPU."""
    if not any(device.kind is Kind.GPU and not device.host for device in lease.devices):
        return
    if os.environ.get(ALLOWED_BY) == "allow":
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise InvalidRequest("torch has begun to use CUDA in the program that holds the lease", do=_DO)
    count = contexts(loaded_driver())
    if count:
        cards = "a card" if count == 1 else f"{count} cards"
        raise InvalidRequest(f"the program that holds the lease has a CUDA context on {cards}", do=_DO)
