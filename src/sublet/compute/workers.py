"""The workers of a lease: started at the first call, kept warm while the lease lives, replaced when they die.

There is one for each combination of interpreter, environment and folder. A worker that died takes with it only the call
it was executing; those behind it, which it had not begun, go to its successor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sublet.background import shortage_explained
from sublet.client.line import open_line
from sublet.compute.buffer_cache import BufferCache
from sublet.compute.calls import Exchange, PendingCall
from sublet.compute.completion_thread import CompletionThread
from sublet.compute.functions import Functions, PeerInterpreter, is_library
from sublet.compute.outcomes import read
from sublet.compute.worker_guest import Options, end_worker, parked_worker, start_worker, why_lost
from sublet.errors import Disconnected, SubletError
from sublet.guest.cargo import encode, out_of_band, place_buffers
from sublet.lease_end import LeaseEnd
from sublet.values import LeaseId
from sublet.wire.guests import Service
from sublet.wire.line import SharedConnection
from sublet.wire.work import Flag, HolderMessage, OutgoingMessage, pack, pack_numbers

if TYPE_CHECKING:
    from sublet.client.guests import Guest
    from sublet.client.handle import LeaseHandle


class WorkerCall(NamedTuple):
    """What is to be called."""

    function: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    is_many: bool = False
    """``args`` is then a list of argument tuples."""


class Worker:
    """One process, with what it was given. Safe to use from several threads."""

    def __init__(self, line: SharedConnection, lease: LeaseId, guest: Guest | None, end: Callable[[], object]) -> None:
        """``guest`` is None where it is no guest: in tests."""
        self.lease_id = lease
        self.guest = guest
        self.exchange = Exchange(line, end, self._check_life)
        self.completions = CompletionThread(self.exchange)
        self.life = SignsOfLife(lambda: self.exchange.board.marks, self._cpu_ns, self._who)
        """For calls under way: they are use of the lease."""
        self.dropped: deque[int] = deque()
        """Generators without a reference here; to be closed with the next message. Finalisers add to it."""
        self._kept = BufferCache()
        self._in_doubt = False
        """Whether the worker may know less than we believe."""
        self._why: SubletError | None = None
        self._why_lock = threading.Lock()
        try:
            self.peer = self._introduce()
        except BaseException:
            self.exchange.close()
            raise
        self._functions = Functions(self.peer, self._kept)

    def _check_life(self) -> None:
        self.life.check()

    @property
    def is_lost(self) -> bool:
        return self.exchange.lost is not None

    def send(self, pending: PendingCall, job: WorkerCall) -> None:
        """Send a call. Raises what keeps it from being sent; where the worker is gone, ``pending`` says so."""
        try:
            self.exchange.send(pending, lambda: self._message(job))
        except SubletError:
            raise
        except BaseException:  # a Ctrl-C, most often: it is unknown which of the kept objects it was told of
            self._in_doubt = True
            raise

    def send_by_value(self, function: Callable[..., object]) -> bool:
        """The worker does not know it under its name. False if that cannot be."""
        with self.exchange.sending:
            return self._functions.send_by_value(function)

    def why_lost(self, lease: LeaseHandle) -> SubletError:
        """Why there is no answer. Found out once, by the first caller that asks."""
        with self._why_lock:
            if self._why is None:
                lost = self.exchange.lost
                error = None if lost is None or lost.over is None else lost.over.error
                if self.guest is None:
                    self._why = error or Disconnected("the worker hung up")
                else:
                    self._why = why_lost(lease, self.guest)
            return self._why

    @property
    def _who(self) -> str:
        return "the worker" if self.guest is None else f"worker {self.guest.id} (pid {self.guest.pid})"

    def _cpu_ns(self) -> int | None:
        """What its processes have used, as the supervisor says; None where it says nothing."""
        if self.guest is None:
            return None
        try:
            return self.guest.view().cpu_ns
        except SubletError:
            return None
        finally:
            self.guest.close()  # what it was asked on

    def close(self) -> None:
        """Hang up. The process lives on until its lease ends, or until it is ended."""
        self.exchange.close()
        self.completions.wake()

    def _message(self, job: WorkerCall) -> OutgoingMessage:
        """The call, after what must be said before it."""
        if self._in_doubt:
            self._kept.forget_all()
            self.exchange.send_event(self._functions.forget_all())
            self._in_doubt = False
        number, before = self._functions.refer(job.function)
        for message in before:
            self.exchange.send_event(message)
        what = (
            job.args
            if job.is_many
            else (out_of_band(job.args), {name: out_of_band(job.kwargs[name]) for name in job.kwargs})
        )
        placed = place_buffers(encode(what, "the arguments" if job.is_many else "(args, kwargs)"), self._kept)
        for message in self._functions.to_forget():
            self.exchange.send_event(message)
        if numbers := self._kept.to_forget():
            self.exchange.send_event(OutgoingMessage(pack(HolderMessage.FORGET, inline=(pack_numbers(numbers),))))
        while self.dropped:
            self.exchange.ask_nobody(OutgoingMessage(pack(HolderMessage.CLOSE, subject=self.dropped.popleft())))
        body = pack(
            HolderMessage.RUN,
            flags=Flag.MANY if job.is_many else Flag.NONE,
            subject=number,
            amount=logging.getLogger().getEffectiveLevel(),
            pieces=placed.pieces,
            inline=placed.inline,
        )
        return OutgoingMessage(body, placed.fds)

    def _introduce(self) -> PeerInterpreter:
        """Say what our interpreter looks like, and hear about the other."""
        wish = json.dumps({"path": own_paths()}).encode()
        pending = PendingCall()
        self.exchange.send(
            pending, lambda: OutgoingMessage(pack(HolderMessage.OPEN, inline=(wish,)), self.exchange.take_shared())
        )
        self.exchange.wait(pending)
        if pending.came is None:
            raise Disconnected("the worker ended before it began")
        interpreter = read(pending.came, self.lease_id)
        major, minor, micro = interpreter["python"]
        return PeerInterpreter((major, minor, micro), interpreter["executable"], interpreter["cloudpickle"])


class Workers:
    """Those of one lease. It does not hold on to the lease, so that one that is dropped is given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Options, Worker] = {}
        self._starting: dict[Options, threading.Lock] = {}

    def __del__(self) -> None:
        """Close the workers of a lease that was parked and not resumed here."""
        if self._found:
            self.close()

    def find(self, lease: LeaseHandle, options: Options) -> Worker:
        """The worker for this; started if there is none, or if it died."""
        place = options.place
        worker = self._found.get(place)
        if worker is not None and not worker.is_lost:
            return worker
        with self._lock:
            starting = self._starting.setdefault(place, threading.Lock())
        with starting:
            worker = self._found.get(place)
            if worker is None or worker.is_lost:
                with lease.activity():  # else a lease is idle, and may be taken, while its first call comes up
                    worker = self._found[place] = _started(lease, options)
            return worker

    def now_under(self, lease: LeaseHandle) -> None:
        """They were parked, and go on under this lease; so do the calls that were not answered yet."""
        with self._lock:
            found = list(self._found.values())
        for worker in found:
            worker.lease_id = lease.id
            if worker.guest is not None:
                worker.guest.lease_id = lease.id
            worker.life.now_under(lease)
        workers = weakref.ref(self)
        lease.on_end(lambda end: _close_workers(workers(), end))

    def close(self) -> None:
        """Hang up with all of them: waiting callers are told. Harmless twice."""
        with self._lock:
            found, self._found = list(self._found.values()), {}
        for worker in found:
            worker.close()


def own_paths() -> list[str]:
    """Where the program finds modules of its own. Installed packages are not among them: the worker's interpreter has
    its own, and those of another one are not for it."""
    paths = [os.path.abspath(path) if path else os.getcwd() for path in sys.path]
    return [path for path in paths if not is_library(path)]


def workers_of(lease: LeaseHandle) -> Workers:
    """Those of this lease; made at the first use."""
    found: Workers | None = lease._workers
    if found is not None:
        return found
    with lease._lock:
        made = lease._workers is None
        if made:
            lease._workers = Workers()
        found = lease._workers
    if made:
        workers = weakref.ref(found)
        lease.on_end(lambda end: _close_workers(workers(), end))
    return found


def _close_workers(workers: Workers | None, end: LeaseEnd) -> None:
    """Unless they are parked: then calls wait until they go on, or until the connection breaks with their end."""
    if workers is not None and not end.parked:
        workers.close()


def _started(lease: LeaseHandle, options: Options) -> Worker:
    takes_up = lease._takes_up
    parked = parked_worker(lease) if options.place == Options() else None
    guest = parked or start_worker(lease, options)
    try:
        with shortage_explained():
            return _connected(lease, guest)
    except BaseException:
        if parked is None:
            end_worker(guest)  # the next call starts another one
        else:
            lease._takes_up = takes_up  # it has what another program left in it: the next call goes on with it
        raise


def _connected(lease: LeaseHandle, guest: Guest) -> Worker:
    try:
        line = SharedConnection(open_line(lease, guest.id, Service.WORK))
        try:
            return Worker(line, lease.id, guest, lambda: end_worker(guest))
        except BaseException:
            line.close()
            raise
    except SubletError as error:
        if lease.end is not None:
            lease.check()
        if isinstance(error, Disconnected):
            raise why_lost(lease, guest, "before it could begin") from error
        raise


# -------------------------------------------------------------------------------------------------------- signs of life
#
# Decides whether a worker is responsive. While it is not, its calls do not renew the lease.
#
# A call in flight is use of the lease, however long it takes. But a worker that was stopped (SIGSTOP) or frozen never
# answers, and a lease must not be kept for ever by that. A sign of life is either of two: a mark on the board, which
# the worker's listening thread makes once a second, whatever function runs; or time on a processor, for that thread
# cannot run while C code holds the interpreter. Where both stand still for ``STILL_S``, the calls of this worker stop
# to count, and the lease ends by its time to live as one that is not used. With the next sign they count again.
#
# No thread waits for this: the one that listens for answers looks here when it has heard nothing for a while.


LOOK_EVERY_S: Final = 5.0
ASK_AFTER_S: Final = 10.0
"""Without a mark for so long, the supervisor is asked about the processor."""
STILL_S: Final = 30.0
CPU_MIN_NS: Final = 1_000_000
"""Less than this is what the kernel counts for being looked at."""

_log = logging.getLogger("sublet.client")


class _Use:
    """One thing under way in the worker."""

    def __init__(self, lease: LeaseHandle) -> None:
        self.lease = lease
        self.is_over = False
        self._counted = contextlib.ExitStack()
        """Closing it twice is harmless, so no lock is needed: the end of a use may come in a finaliser."""

    def count(self) -> None:
        counted = self._counted
        counted.enter_context(self.lease.activity())
        if self.is_over:
            counted.close()

    def pause(self) -> None:
        counted, self._counted = self._counted, contextlib.ExitStack()
        counted.close()


class SignsOfLife:
    """Of one worker."""

    def __init__(self, mark: Callable[[], int], cpu_ns: Callable[[], int | None], who: str = "the worker") -> None:
        """``mark`` is how often the worker has made its mark; ``cpu_ns`` its time on processors, None where that is not
        known."""
        self._mark = mark
        self._cpu_ns = cpu_ns
        self._who = who
        self._uses: set[_Use] = set()
        self._is_still = False
        self._seen = (mark(), 0)
        self._seen_s = self._looked_s = self._probed_s = time.monotonic()

    @contextlib.contextmanager
    def use(self, lease: LeaseHandle) -> Iterator[None]:
        """Something is under way there: it counts as use of the lease while the worker lives."""
        use = _Use(lease)
        if not self._is_still:
            use.count()
        self._uses.add(use)
        if self._is_still:  # since we looked
            use.pause()
        try:
            yield
        finally:
            use.is_over = True
            self._uses.discard(use)
            use.pause()

    def now_under(self, lease: LeaseHandle) -> None:
        """The worker was parked, and goes on under this lease with what was under way."""
        self._is_still = False
        self._seen_s = time.monotonic()
        for use in list(self._uses):
            use.pause()
            use.lease = lease
            if not use.is_over:
                use.count()

    def check(self) -> None:
        """Nothing was heard for a while. One thread at a time."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S or not self._uses:
            return
        self._looked_s = now_s
        mark, cpu_ns = self._mark(), self._seen[1]
        if mark == self._seen[0]:
            if now_s - self._seen_s < ASK_AFTER_S or now_s - self._probed_s < ASK_AFTER_S:
                return
            self._probed_s = now_s
            found = self._cpu_ns()
            if found is None:  # what is not known takes nothing away
                return
            cpu_ns = found
        if mark != self._seen[0] or cpu_ns > self._seen[1] + CPU_MIN_NS:
            self._seen = (mark, max(cpu_ns, self._seen[1]))
            self._alive(now_s)
        elif not self._is_still and now_s - self._seen_s >= STILL_S:
            self._mark_silent()

    def _alive(self, now_s: float) -> None:
        self._seen_s = now_s
        if self._is_still:
            self._is_still = False
            _log.warning("%s gives signs of life again; its calls keep the lease", self._who)
            for use in list(self._uses):
                use.count()

    def _mark_silent(self) -> None:
        self._is_still = True
        _log.warning(
            "%s has given no sign of life for %.0f s (was it stopped?); its calls do not keep the lease meanwhile",
            self._who,
            STILL_S,
        )
        for use in list(self._uses):
            use.pause()
