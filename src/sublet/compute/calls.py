"""The calls of one worker: those in flight, the threads that wait for them, and their outcomes.

No work is handed to another thread that the waiting one can do. A thread that waits for a result listens to the
connection meanwhile, also for the others: it prints what the functions print and stores answers where they belong. When
its own has come it leaves, and the next waiting thread takes over; where no thread waits, the *completion thread* does,
a thread that exists while there are futures. It also completes futures (their callbacks may do anything, so never while
it listens) and ends calls that take too long.

A Ctrl-C may come between any two steps here, and the others must not be left waiting by it. So a call leaves the list
of those under way only after it is settled, to settle it twice changes nothing, what was heard is let go of only after
it was dealt with, and the listening thread always passes that on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from sublet.errors import CapacityExceeded, Disconnected
from sublet.wire.frames import close_all
from sublet.wire.line import SharedConnection
from sublet.wire.link import Link
from sublet.wire.link_events import CallRefused, Event, Happening, Over, Replied
from sublet.wire.log_records import load_log_record
from sublet.wire.work import (
    Board,
    HolderMessage,
    OutgoingMessage,
    ReceivedMessage,
    ResultBuffer,
    WorkerMessage,
    pack,
    unpack,
)

GRACE_S: Final = 5.0
"""How long an interrupted function may take to leave; then its process is ended."""
WINDOW: Final = 64
"""Calls that the worker has at once; more wait here."""
_LISTEN_S: Final = 5.0


class PendingCall:
    """One call under way."""

    __slots__ = ("call", "came", "doomed_ns", "is_done", "lost", "parts", "signal", "timeout_ns", "when_done")

    def __init__(self, timeout_ns: int | None = None, when_done: Callable[[], object] = lambda: None) -> None:
        self.timeout_ns = timeout_ns
        """How long it may run, from when it begins."""
        self.when_done = when_done
        """Called by the thread that finds it done; quick, takes no lock of ours, and harmless twice."""
        self.call = 0
        self.is_done = False
        self.came: Replied | CallRefused | None = None
        """The answer."""
        self.parts: list[tuple[ReceivedMessage, tuple[int, ...]]] = []
        """Of a call of many: results that came before the answer. The reader closes the descriptors."""
        self.lost: ConnectionLost | None = None
        """Or that there is none to come."""
        self.doomed_ns = 0
        """It was interrupted; if it is not done by then, its process is ended."""
        self.signal: threading.Lock | None = None

    def __del__(self) -> None:
        """Of a call that was given up."""
        for _, fds in self.parts:
            close_all(fds)

    @property
    def was_begun(self) -> bool:
        """Of a lost one: whether the worker was executing it, or its answer was lost with the worker."""
        return self.lost is not None and self.lost.executing == self.call != 0


class ConnectionLost:
    """The connection broke."""

    def __init__(self, over: Over | None, executing: int, first: int = 0, results: Sequence[bytes] = ()) -> None:
        self.over = over
        self.executing = executing
        """The call that the worker had begun; 0: none."""
        self.first = first
        self.results = results
        """Of that call, if it is one of many: results that were made and not sent, from item ``first`` on."""


class Exchange:
    """The holder's end of one connection for work. Safe to use from several threads."""

    def __init__(
        self, line: SharedConnection, end_worker: Callable[[], object], on_silence: Callable[[], object] = lambda: None
    ) -> None:
        """``end_worker`` ends the process, because it does not answer. ``on_silence`` is called now and then by who
        listens, while nothing is heard."""
        self.line = line
        self.board, self._board_fd = Board.create()
        try:
            self.results, self._results_fd = ResultBuffer.create()
        except BaseException:
            os.close(self._board_fd)
            raise
        self.sending = threading.Lock()
        """Held while messages are made and sent: what one defines the next may use."""
        self.lost: ConnectionLost | None = None
        self._end_worker = end_worker
        self._lock = threading.Lock()
        self._leader: object = None
        """The wait that receives for all; each wait has a mark of its own."""
        self._pending: dict[int, PendingCall] = {}
        self._followers: dict[int, PendingCall] = {}
        self._received: deque[Happening] = deque()
        self._doomed: dict[int, PendingCall] = {}
        self._completions: Callable[[], object] | None = None
        self._on_silence = on_silence
        _exchanges.add(self)

    # ---- asking

    def send(self, pending: PendingCall, make: Callable[[], OutgoingMessage]) -> None:
        """Send a call. Raises what keeps its message from being made; then nothing was sent."""
        with self.sending:
            if self._settle_lost(pending):
                return
            message = make()
            try:
                self.line.send(lambda link: self._ask(link, pending, message))
            except CapacityExceeded:
                self._unlist(pending)
                close_all(message.fds)
                raise
            except Disconnected:  # closed here meanwhile
                self._complete(pending, None, ConnectionLost(None, 0))
            except KeyboardInterrupt:
                if self.line.is_pending(pending.call):
                    self.cancel(pending)  # no caller will wait for it
                else:
                    self._unlist(pending)
                    pending.call = 0  # the number is the next call's
                raise
            self._settle_lost(pending)  # since we looked

    def send_event(self, message: OutgoingMessage) -> None:
        """Say something that is not answered. Under ``sending``."""
        self.line.send(lambda link: link.event(message.body, message.fds))

    def ask_nobody(self, message: OutgoingMessage) -> None:
        """Send a request whose answer is discarded. Under ``sending``."""
        self.line.send(lambda link: link.abandon(link.call(message.body, message.fds)))

    def cancel(self, pending: PendingCall) -> None:
        """It is not wanted any more: if it waits it never runs, if it runs it is interrupted."""
        if pending.is_done or not pending.call:
            return
        pending.doomed_ns = time.monotonic_ns() + round(GRACE_S * 1e9)
        with contextlib.suppress(Disconnected):
            self.line.send(lambda link: link.event(pack(HolderMessage.CANCEL, subject=pending.call)))
        with self._lock:
            if pending.call in self._pending:
                self._doomed[pending.call] = pending

    def _ask(self, link: Link, pending: PendingCall, message: OutgoingMessage) -> None:
        """Listed first: the sender must not be the only one that knows of it."""
        with self._lock:
            pending.call = link.next_call
            self._pending[pending.call] = pending
        link.call(message.body, message.fds)

    def _unlist(self, pending: PendingCall) -> None:
        with self._lock:
            self._pending.pop(pending.call, None)
            self._doomed.pop(pending.call, None)

    # ---- waiting

    def wait(self, pending: PendingCall, until_ns: Callable[[], int | None] = lambda: None) -> bool:
        """Wait until it is done, or until a moment (CLOCK_MONOTONIC); whether it is."""
        while not pending.is_done:
            left_s = _remaining_s(until_ns())
            if left_s <= 0:
                return False
            mark = object()
            try:
                signal = self._lead_or_follow(pending, mark)
                if signal is None:
                    self._listen(lambda: pending.is_done, left_s)
                else:
                    signal.acquire(timeout=min(left_s, 60.0))
            finally:
                self._stop_waiting(pending, mark)
        return True

    def poll(self, pending: PendingCall) -> bool:
        """Take in what has come, unless another thread listens and does so; whether this one is done. Never waits."""
        if not pending.is_done:
            with self._lock:
                if self._leader is not None:
                    return pending.is_done
                self._leader = mark = object()
            try:
                self._listen(lambda: pending.is_done, 0)
            finally:
                self._pass_on(mark)
        return pending.is_done

    def _lead_or_follow(self, pending: PendingCall, mark: object) -> threading.Lock | None:
        """None: listen. Else what to wait for: it is released when the answer is there, or when no thread listens."""
        with self._lock:
            if self._leader is None:
                self._leader = mark
                return None
            signal = pending.signal = threading.Lock()
            if not pending.is_done:
                signal.acquire()
                self._followers[id(pending)] = pending
            return signal

    def listen(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """For the completion thread: listen if no thread does. False if one does."""
        with self._lock:
            if self._leader is not None or not self._pending:
                return False
            self._leader = mark = object()
        try:
            self._listen(until, timeout_s)
        finally:
            self._pass_on(mark)
        return True

    def _stop_waiting(self, pending: PendingCall, mark: object) -> None:
        """Out of the wait, whatever ended it."""
        try:
            self._step_aside(pending, mark)
        except KeyboardInterrupt:
            self._step_aside(pending, mark)
            raise

    def _step_aside(self, pending: PendingCall, mark: object) -> None:
        """Harmless twice. What was handed to one who does not want it any more goes to the next."""
        with self._lock:
            self._followers.pop(id(pending), None)
            was_handed = self._leader is None and not pending.is_done
        if was_handed or self._leader is mark:
            self._pass_on(mark)

    def _pass_on(self, mark: object) -> None:
        """The listening thread leaves; the next takes over. The last on a connection that is over closes it."""
        with self._lock:
            if self._leader is mark:
                self._leader = None
            if self._leader is not None:
                return
            if self.lost is not None:
                self.line.close()
            for follower in self._followers.values():
                if follower.signal is not None and follower.signal.locked():
                    follower.signal.release()
                    return
        if self._pending and self._completions is not None:
            self._completions()

    def take_shared(self) -> tuple[int, int]:
        """The descriptors of board and result buffer, for the other side; the taker's."""
        fds, self._board_fd, self._results_fd = (self._board_fd, self._results_fd), -1, -1
        return fds

    def kept_by(self, wake: Callable[[], object]) -> None:
        """There is one: call this when something is to be done."""
        self._completions = wake

    @property
    def under_way(self) -> int:
        """Calls without an answer."""
        return len(self._pending)

    def next_doom_ns(self) -> int | None:
        """When a process must be ended, if what was interrupted does not leave."""
        with self._lock:
            return min((pending.doomed_ns for pending in self._doomed.values()), default=None)

    def end_doomed(self) -> None:
        """End the process if its time to leave is over."""
        now_ns = time.monotonic_ns()
        with self._lock:
            over = [pending for pending in self._doomed.values() if now_ns >= pending.doomed_ns]
            for pending in over:
                del self._doomed[pending.call]
        if over:
            self._end_worker()

    def due_ns(self, pending: PendingCall) -> int | None:
        """When it will have run for too long (CLOCK_MONOTONIC), or when to look again because it has not begun."""
        if pending.timeout_ns is None:
            return None
        call, at_ns = self.board.read()
        ran_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - at_ns if call == pending.call != 0 else 0
        return time.monotonic_ns() + max(0, pending.timeout_ns - ran_ns)

    def is_executing(self, pending: PendingCall) -> bool:
        """Whether the worker is at it just now."""
        return pending.call != 0 and self.board.read()[0] == pending.call

    def close(self) -> None:
        """Hang up. What is under way is lost; waiting callers are told. Harmless twice."""
        self.line.hang_up()
        self._break(Over(None, by_peer=False))
        for fd in self.take_shared():
            if fd >= 0:  # it ends before the other side was given them
                os.close(fd)
        with self._lock:
            if self._leader is None:
                self.line.close()

    # ---- listening

    def _listen(self, until: Callable[[], bool], timeout_s: float) -> None:
        end_s, has_looked = time.monotonic() + timeout_s, False
        while not until():
            while self._received:
                if isinstance(self._received[0], Event):
                    self._on_event(self._received.popleft())  # once, whatever our own streams do
                else:
                    self._on_event(self._received[0])  # an interrupt of ours in the middle of it: then once more
                    self._received.popleft()
            if self.lost is not None:
                self._break(Over(None, by_peer=False))  # an interrupt may have cut that short
                return
            left_s = max(0.0, end_s - time.monotonic())
            if until() or (has_looked and not left_s):
                return
            has_looked = True
            self._received.extend(self.line.receive(min(left_s, _LISTEN_S)))
            if not self._received and (over := self.line.over) is not None:
                self._break(over)  # an interrupt took the news of it
            if not self._received and left_s:
                self._on_silence()

    def _on_event(self, happening: Happening) -> None:
        match happening:
            case Replied(call=call) | CallRefused(call=call):
                pending = self._pending.get(call)
                if pending is not None:
                    self._complete(pending, happening, None)
            case Event(body=body, fds=fds):
                message = unpack(body)
                if (
                    message.kind in (WorkerMessage.RESULTS, WorkerMessage.RESULT)
                    and (pending := self._pending.get(message.subject)) is not None
                ):
                    pending.parts.append((message, fds))
                    return
                close_all(fds)
                _print_output(message)
            case Over():
                self._break(happening)
            case _:
                close_all(getattr(happening, "fds", ()))

    def _break(self, over: Over) -> None:
        with self._lock:
            if self.lost is None:
                call = self.board.last_begun()
                self.lost = ConnectionLost(over, call, *self.results.read(call))
            lost, left = self.lost, list(self._pending.values())
        for pending in left:
            self._complete(pending, None, lost)

    def _settle_lost(self, pending: PendingCall) -> bool:
        if self.lost is not None:
            self._complete(pending, None, self.lost)
        return self.lost is not None

    def _complete(self, pending: PendingCall, came: Replied | CallRefused | None, lost: ConnectionLost | None) -> None:
        """It is done. Harmless twice: the first answer counts."""
        with self._lock:
            if not pending.is_done:
                pending.came, pending.lost, pending.is_done = came, lost, True
            if pending.signal is not None and pending.signal.locked():
                pending.signal.release()
        pending.when_done()
        self._unlist(pending)


def _remaining_s(until_ns: int | None) -> float:
    return 3600.0 if until_ns is None else (until_ns - time.monotonic_ns()) / 1e9


_STREAMS: Final = {1: "stdout", 2: "stderr"}


def _print_output(message: ReceivedMessage) -> None:
    """What a function prints or logs, here."""
    with contextlib.suppress(OSError, ValueError):  # our own output may be closed
        if message.kind == WorkerMessage.OUTPUT:
            stream: Any = getattr(sys, _STREAMS.get(message.subject, "stderr"))
            if stream is not None:
                stream.write(bytes(message.data).decode("utf-8", "replace"))
        elif message.kind == WorkerMessage.LOG:
            record = logging.makeLogRecord(load_log_record(bytes(message.data)))
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)


_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _in_child() -> None:
    """A fork lets go of its parent's connections, so that workers see when the parent hangs up. It takes no lock:
    another thread of the parent may have held it."""
    for exchange in list(_exchanges):
        exchange.line.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
