"""Drives a session's operations: when they are sent, which callers wait for them, and what happens on failure.

Everything here is done under one lock, by the caller. A small thread beside it sends what no caller has waited for, a
moment after it was queued, and takes answers as they come; it sleeps while nothing is done with the session.
While something is, the lease counts as being in use.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sublet.background import start_thread
from sublet.compute.session_line import DeviceLine, open_device_line, why_ended
from sublet.compute.session_queue import Sent, SessionQueue, failure_of
from sublet.errors import (
    Disconnected,
    GpuSessionEnded,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    OutOfMemory,
    StaleEpoch,
    SubletError,
)
from sublet.values import Epoch, LeaseId
from sublet.wire.device import (
    Batch,
    BatchDone,
    CloseSession,
    Free,
    LaunchShape,
    Op,
    OpenSession,
    SessionClosed,
    SessionOpened,
    Sync,
)
from sublet.wire.frames import close_all
from sublet.wire.sealed_memory import write_shared

if TYPE_CHECKING:
    from sublet.client.lease import Lease

MOMENT_S: Final = 0.005
"""How long something waits to be sent together with what comes after it."""
IDLE_S: Final = 1.0
"""So long after its last operation the session does nothing any more, and its lease may be idle."""


class Engine:
    """The moving half of a session."""

    def __init__(
        self,
        line: DeviceLine,
        lease: LeaseId,
        epoch: Epoch,
        *,
        device: int = 0,
        check: Callable[[], None] = lambda: None,
        explain: Callable[[SubletError], SubletError] = lambda error: error,
        in_use: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        """``check`` raises where the lease is over, ``explain`` says why a connection broke, ``in_use`` tells that
        something runs under the lease, until what it returns is called."""
        self.lock = threading.RLock()
        self.over: SubletError | None = None
        """Why nothing can be done any more."""
        self.on_never_made: Callable[[Sequence[int], str], None] = lambda numbers, why: None
        self.closed: SessionClosed | None = None
        """What was exact about it, once it was closed in peace."""
        self._line = line
        self._lease = lease
        self._epoch = epoch
        self._check = check
        self._explain = explain
        self._in_use = in_use
        self._done_with: Callable[[], None] | None = None
        self._pid = os.getpid()
        self._queue = SessionQueue()
        self._sent: Sent | None = None
        self._failure: SubletError | None = None
        self._to_give_back: list[Op] = []
        self._never_made: set[int] = set()
        self._is_synced = True
        self._last_used_s = 0.0
        self._awake = threading.Event()
        self._helper: threading.Thread | None = None
        request = OpenSession(lease=lease, epoch=epoch, device=device, takes_limits=True)
        try:
            line.ask(request)
            opened, fds = line.answer()
        except InvalidRequest:  # the guest is of an older version; if it is not, it refuses this as well
            line.ask(replace(request, takes_limits=False))
            opened, fds = line.answer()
        close_all(fds)
        if not isinstance(opened, SessionOpened):
            raise Disconnected(f"the guest answered with a {type(opened).__name__}")
        self.opened: SessionOpened = opened

    @classmethod
    def open(cls, lease: Lease, device: int) -> Engine:
        """On the lease's device at this place."""
        lease.check()
        with lease.activity():
            line, guest = open_device_line(lease)
            try:
                return cls(
                    line,
                    lease.id,
                    lease.epoch,
                    device=device,
                    check=lease.check,
                    explain=lambda error: why_ended(lease, guest, error),
                    in_use=lease._in_use,
                )
            except BaseException:
                line.close()
                raise

    # ---- operations ----

    def put(self, op: Op) -> None:
        """Write it down; it goes off with others."""
        self._begin()
        if self._failure is not None:
            self._drop(Sent((op,), (), 0), 0, 0)
            return
        if self._queue.is_full:
            self._send()
        self._queue.put(op)

    def launch(self, shape: LaunchShape, values: bytes) -> None:
        """The same for a launch."""
        self._begin()
        if self._failure is None:
            if self._queue.is_full:
                self._send()
            self._queue.launch(shape, values)

    def put_shared(self, pieces: Sequence[memoryview], make: Callable[[Sequence[int]], Op]) -> None:
        """An operation with its bytes in shared memory; ``make`` is told where each piece begins there. It goes off at
        once, since what crosses beside a batch belongs to that batch."""
        self._begin()
        if self._failure is not None:
            return
        try:
            fd, starts = write_shared(pieces, name="sublet-write")
        except OSError as error:
            raise OutOfMemory(
                f"this machine has no {sum(map(len, pieces))} bytes to hand over ({error})", do="Write less at once."
            ) from error
        self._queue.put(make(starts))
        self._send((fd,))

    def sync(self) -> None:
        """Wait until everything is done; raises what went wrong."""
        self._begin()
        if self._failure is None:
            self._queue.put(Sync())
        close_all(self._wait()[1])
        self._is_synced = True

    def wait(self) -> BatchDone:
        """Send what is written down and wait for the answer to it; raises what went wrong."""
        done, fds = self._wait()
        close_all(fds)
        return done

    def read(self, length: int) -> bytes:
        """The same; what was read."""
        done, fds = self._wait()
        self._is_synced = True
        if not fds:
            return done.data
        try:
            found = os.pread(fds[0], length, 0)  # copied once, and no page fault for each page
            while len(found) < length and (more := os.pread(fds[0], length - len(found), len(found))):
                found += more
            return found
        finally:
            close_all(fds)

    def read_into(self, into: memoryview) -> None:
        """The same into memory of the caller."""
        done, fds = self._wait()
        self._is_synced = True
        if not fds:
            into[:] = done.data
            return
        try:
            at = 0
            while at < len(into) and (count := os.preadv(fds[0], [into[at:]], at)):
                at += count
        finally:
            close_all(fds)

    # ---- its end ----

    def close(self) -> None:
        """Do what is written down, free everything, hang up. Raises what went wrong; what has been seen to be done
        cannot go wrong any more."""
        with self.lock:
            try:
                if self.over is None and not (self._is_synced and self._failure is None):
                    self.sync()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Free everything and hang up; what is written down is not done any more."""
        with self.lock:
            self._queue.take()
            try:
                if self.over is None:
                    close_all(self._take()[1])
                    self._line.ask(CloseSession(session=self.opened.session))
                    closed, fds = self._answer()
                    close_all(fds)
                    self.closed = closed if isinstance(closed, SessionClosed) else None
            except (GpuSessionEnded, StaleEpoch):  # then it is freed
                pass
            finally:
                self._end(GpuSessionEnded("this session is closed", do="Open a new one."))

    def drop(self) -> None:
        """The program holds no reference to it any more: hang up, and the guest frees everything."""
        with self.lock:
            self._end(GpuSessionEnded("this session was dropped", do="Open a new one."))

    def _end(self, over: SubletError) -> None:
        self.over = self.over or over
        self._line.close()
        self._finish()
        self._awake.set()  # so that the thread sees it

    # ---- sending, and what comes back ----

    def _begin(self) -> None:
        """Before every operation."""
        if self.over is not None:
            raise copy(self.over)
        if self._done_with is None:
            self._wake()
        self._is_synced = False

    def _send(self, fds: Sequence[int] = ()) -> None:
        """Send what is written down, after the answer to what was sent before. Nothing goes off behind a failure. The
        descriptors are taken, whatever happens."""
        try:
            close_all(self._take()[1])
            if self._failure is not None or not self._queue.ops:
                close_all(fds)
                return
            self._check_lease()
        except BaseException:
            close_all(fds)
            raise
        self._sent = sent = self._queue.take()
        self._last_used_s = time.monotonic()
        self._line.ask(
            Batch(session=self.opened.session, lease=self._lease, epoch=self._epoch, ops=sent.ops, shapes=sent.shapes),
            fds,
        )

    def _check_lease(self) -> None:
        """No operation goes off under a lease that is known to be over; the guest asks for itself, before each."""
        try:
            self._check()
        except LeaseEnded as error:
            if error.end is None:
                raise  # it is not over, but nothing may be begun on it any more
            message = f"the GPU session went with its lease: {error.message}"
            self._is_over(GpuSessionEnded(message, end=error.end), error)

    def _take(self) -> tuple[BatchDone | None, tuple[int, ...]]:
        """The answer to what was sent, if anything was. A failure in it is kept for the next caller that waits."""
        if self._sent is None:
            return None, ()
        done, fds = self._answer()
        sent, self._sent = self._sent, None
        assert isinstance(done, BatchDone)
        failed = done.failed
        if failed is None:
            return done, fds
        close_all(fds)
        self._failure = error = failure_of(sent, failed)
        if isinstance(error, GpuSessionEnded | StaleEpoch):
            self._is_over(self._explain(error), error)
        self._drop(sent, failed.index, failed.index + 1)
        self._drop(self._queue.take(), 0, 0)
        return None, ()

    def _drop(self, sent: Sent, failed: int, behind: int) -> None:
        """What failed and what stood behind it does not happen; but what gives something back is done later."""
        never = sent.never_made(failed)
        self._never_made.update(never)
        self.on_never_made(never, "it was not allocated, since something before it failed")
        self._to_give_back += sent.given_back(behind)

    def _wait(self) -> tuple[BatchDone, tuple[int, ...]]:
        """Everything is sent and answered: the last answer. Raises a failure, once."""
        if self._queue.ops:
            self._send()
        done, fds = self._take()
        self._last_used_s = time.monotonic()
        self._queue.sent = 0
        failure, self._failure = self._failure, None
        if failure is None:
            return done or BatchDone(done=0), fds
        for op in self._to_give_back:
            if not (isinstance(op, Free) and op.buffer in self._never_made):
                self._queue.put(op)
        self._to_give_back.clear()
        self._never_made.clear()
        try:
            raise failure
        finally:
            del failure  # or it would hold this frame, and this frame it

    def _answer(self) -> tuple[Any, tuple[int, ...]]:
        try:
            return self._line.answer()
        except (Disconnected, LeaseEnded, StaleEpoch) as error:
            self._sent = None
            self._is_over(self._explain(error), error)

    def _is_over(self, over: SubletError, cause: SubletError) -> NoReturn:
        self._queue.take()
        self._failure = None
        self._end(copy(over))  # kept without what is on the stack now, whose memory may be large
        if over is cause:
            raise over
        raise over from cause

    # ---- the thread beside it ----

    def _wake(self) -> None:
        if os.getpid() != self._pid:
            raise LeaseNotActive(
                "this session belongs to the process that opened it, not to its fork",
                do="Open one in the process that uses it.",
            )
        self._last_used_s = time.monotonic()
        self._done_with = self._in_use()
        self._awake.set()
        if self._helper is None:
            self._helper = start_thread("session", self._help, again=True)

    def _finish(self) -> None:
        done, self._done_with = self._done_with, None
        if done is not None:
            with contextlib.suppress(SubletError):
                done()

    def _help(self) -> None:
        while self._awake.wait() and self.over is None:
            time.sleep(MOMENT_S)
            if self.lock.acquire(blocking=False):  # else a caller is at it
                try:
                    self._advance()
                except SubletError:  # it is over, or nothing may be begun: raised by the next call
                    pass
                finally:
                    self.lock.release()

    def _advance(self) -> None:
        """What can be done without waiting."""
        if self.over is not None:
            return
        if self._sent is not None:
            if not self._line.has_answer():
                return
            close_all(self._take()[1])
        if self._queue.ops and self._failure is None:
            self._send()
        elif time.monotonic() - self._last_used_s > IDLE_S:
            self._finish()
            self._awake.clear()
