"""One thread per fabric maintains its leases: renews them, receives events, releases dropped ones.

Nothing in it waits for one answer. Requests are sent and their answers awaited together, beside the stream of news, so
a stuck request delays no other renewal, and an answer that comes late still counts. No callback of the user runs here:
those have a thread of their own (``CallbackThread``), because a slow one must not cost a lease.

A turn that fails (no descriptors, no memory) is followed by a pause and another turn: leases go on being renewed in a
program that is short of something for a while. A turn of the thread takes no new descriptor.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from sublet.background import Guard, start_thread
from sublet.client import background_requests
from sublet.client.lease_table import SWEEP_NS, LeaseTable
from sublet.client.operations import OfficeOperations
from sublet.client.sse import EventReader
from sublet.client.steps import HttpCall, HttpReply, Pause, Program, Revive
from sublet.client.transport import Flight, Transport
from sublet.clock import Clock
from sublet.errors import Disconnected, SubletError
from sublet.values import NS_PER_S

LISTEN_AFTER_S: Final = 0.2
"""The stream of news is opened once a lease has lived so long: most of a burst's leases are shorter."""
LISTEN_LINGER_S: Final = 5.0
"""And kept so long after the last lease, for the next is often near."""
LISTEN_AGAIN_S: Final = (0.2, 1.0, 5.0, 15.0)
"""Waits before it is opened again, if it broke or was refused."""
SILENCE_S: Final = 45.0
"""The office gives a sign of life every 15 s; a stream without any for so long is dead."""
_CONNECT_S: Final = 2.0
_FOR_EVER_NS: Final = 1 << 62


class _BackgroundRequest:
    """A program under way."""

    __slots__ = ("flight", "program", "raw", "until_ns")

    def __init__(self, program: Program[None]) -> None:
        self.program = program
        self.flight: Flight | None = None
        self.raw = b""
        self.until_ns = 0
        """Until when the answer is awaited, or the pause lasts."""


class RenewalThread:
    """Starts its thread with the first lease. The book is touched only under the lock it shares with the fabric."""

    def __init__(
        self,
        book: LeaseTable,
        core: OfficeOperations,
        transport: Transport,
        clock: Clock,
        lock: threading.RLock,
        revive: Callable[[], None],
    ) -> None:
        self._book = book
        self._core = core
        self._transport = transport
        self._clock = clock
        self._lock = lock
        self._revive = revive
        self._thread: threading.Thread | None = None
        self._reviver: threading.Thread | None = None
        self._running = threading.Lock()
        self._guard = Guard("keeper")
        self._stopping = False
        self._retiring = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._asleep_until_ns = 0
        """Changed under the lock, together with the look at the book that it comes from."""
        self._requests: list[_BackgroundRequest] = []
        self._news: Flight | None = None
        self._events = EventReader()
        self._behind = False
        self._last_event_ns = 0
        self._wanted_since_ns: int | None = None
        self._idle_since_ns: int | None = None
        self._listen_at_ns = 0
        self._failures = 0

    def start(self) -> None:
        """See that the thread runs, and looks at what is due. Call it under the lock."""
        if not self.prepare():
            self.wake()

    def prepare(self) -> bool:
        """See that the thread runs. Call it under the lock. Whether it was started by this call."""
        if self._stopping or (self._thread is not None and self._thread.is_alive()):
            return False
        try:
            started = start_thread("keeper", self._run, again=True)
        except RuntimeError as error:
            raise SubletError(
                f"the thread that renews leases could not be started ({error})",
                do="End other threads or processes of this user, or raise the limit (`ulimit -u`), then try again.",
            ) from error
        if self._thread is None or not self._thread.is_alive():
            self._thread = started
        return True

    def wake(self) -> None:
        """Look again at what is due. Harmless from anywhere, a finaliser included."""
        with contextlib.suppress(OSError):
            self._wake_in.send(b"!")

    def wake_in_time(self) -> None:
        """See that what is due next is not slept through. Where the thread wakes by then anyway it is left alone: calls
        of functions begin and end by the thousand, and to wake it costs more than one of them."""
        with self._lock:
            due_ns = self._book.next_due_ns()
            if due_ns is not None and due_ns < self._asleep_until_ns:
                self.wake()

    def wake_for_releases(self) -> None:
        """See that the thread looks at what is owed from time to time, before anything is asked for: an interrupt may
        come between the moment at which a lease is given up and the word to the thread, and then no other call says it.
        Call it under the lock. A thread that holds anything does so anyway."""
        if self._asleep_until_ns > self._clock.now_ns() + SWEEP_NS:
            self.wake()

    def stop(self, timeout_s: float) -> None:
        """End the thread. What is under way is dropped."""
        self._stopping = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        if self._thread is None:
            self._close_wake()

    def retire(self) -> None:
        """No lease is acquired any more: end once what was dropped has been given back. Takes no lock: finalisers
        call."""
        self._retiring = True
        self.wake()
        if self._thread is None:
            self._close_wake()

    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            return  # another was started before: an interrupt kept its starter from noting it
        self._thread = threading.current_thread()
        try:
            self._keep()
        finally:
            self._running.release()

    def _keep(self) -> None:
        while not self._stopping and not (self._retiring and self._is_done()):
            try:
                self._begin_what_is_due()
                self._wait()
            except Exception as error:  # noqa: BLE001 - one broken turn must not let every lease expire
                time.sleep(self._guard.failed(error, "leases go on being renewed"))
            else:
                self._guard.passed()
        for request in self._requests:
            if request.flight is not None:
                request.flight.close()
        self._stop_listening()
        self._close_wake()
        if self._retiring:
            self._transport.close()

    def _is_done(self) -> bool:
        with self._lock:
            return not (
                self._book.dropped or self._book.abandoned or self._book.live or self._book.owed or self._requests
            )

    def _close_wake(self) -> None:
        self._wake_in.close()
        self._wake_out.close()

    # ---- what is due

    def _begin_what_is_due(self) -> None:
        with self._lock:
            begun = self._note(
                background_requests.give_back_what_is_owed(self._core, self._book, self._book.due_releases())
            )
            while (batch := self._book.collect()).attempts:
                begun += self._note([background_requests.renew(self._core, self._book, batch)])
            begun += self._note(
                background_requests.report_all_activity(self._core, self._book, self._book.pending_activity_reports())
            )
            self._update_stream_state(bool(self._book.live))
        for request in begun:
            self._advance(request, None)
        if self._listen_now():
            self._listen()

    def _note(self, programs: Sequence[Program[None]]) -> list[_BackgroundRequest]:
        """At once: nothing else refers to them, and what fails before they have begun must not lose them. They begin in
        the next turn then."""
        noted = [_BackgroundRequest(program) for program in programs]
        self._requests += noted
        return noted

    def _advance(self, request: _BackgroundRequest, reply: HttpReply | BaseException | None) -> None:
        """Take a program to its next step that takes time."""
        while True:
            request.flight = None
            try:
                with self._lock:
                    if isinstance(reply, BaseException):
                        step = request.program.throw(reply)
                    else:
                        step = request.program.send(reply)
            except StopIteration:
                self._requests.remove(request)
                return
            except BaseException:  # a program that raised is over; the plan of each lease has its next attempt
                self._requests.remove(request)
                raise
            match step:
                case Pause(seconds):
                    request.until_ns = self._clock.now_ns() + round(seconds * NS_PER_S)
                    return
                case Revive():
                    self._revive_apart()
                    reply = None
                case HttpCall():
                    try:
                        request.flight = self._transport.launch(replace(step, timeout_s=_CONNECT_S))
                    except (OSError, MemoryError) as error:
                        reply = _not_sent(error)
                    except Exception as error:  # noqa: BLE001 - the program is told, whatever it is, and ends by a mistake
                        reply = error
                    else:
                        request.raw = b""
                        request.until_ns = request.flight.sent_ns + round(step.timeout_s * NS_PER_S)
                        return

    def _revive_apart(self) -> None:
        """Starting an office takes a while, and meanwhile other leases may have an office that answers."""
        if self._reviver is None or not self._reviver.is_alive():
            with contextlib.suppress(RuntimeError):  # no room for a thread, or the interpreter is ending
                self._reviver = start_thread("revive", self._revive)

    # ---- waiting

    def _wait(self) -> None:
        poll = select.poll()  # takes no descriptor, as epoll would
        poll.register(self._wake_out, select.POLLIN)
        for request in self._requests:
            if request.flight is not None:
                poll.register(request.flight, select.POLLIN)
        news = None if self._news is None else self._news.fileno()
        if news is not None:
            poll.register(news, select.POLLIN)
        timeout_s = self._timeout_s()
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))}
        arrived = [one for one in self._requests if one.flight is not None and one.flight.fileno() in ready]
        if self._wake_out.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wake_out.recv(4096):
                    pass
        if news is not None and news in ready:
            self._read_news()
        now_ns = self._clock.now_ns()
        for request in list(self._requests):
            if request in arrived:
                self._read(request)
            elif now_ns >= request.until_ns:
                self._give_up_waiting(request)

    def _timeout_s(self) -> float | None:
        with self._lock:
            moments = [request.until_ns for request in self._requests]
            moments += [ns for ns in (self._book.next_wake_ns(), self._book.next_return_ns()) if ns is not None]
            self._asleep_until_ns = min(moments, default=_FOR_EVER_NS)
            if self._book.next_due_ns() == 0:  # said since what was due was begun
                return 0.0
        if self._news is not None:
            moments.append(self._last_event_ns + round(SILENCE_S * NS_PER_S))
            if self._idle_since_ns is not None:
                moments.append(self._idle_since_ns + round(LISTEN_LINGER_S * NS_PER_S))
        elif self._wanted_since_ns is not None:
            moments.append(self._listen_at_ns)
        if not moments:
            return None
        return max(0.0, (min(moments) - self._clock.now_ns()) / NS_PER_S)

    def _read(self, request: _BackgroundRequest) -> None:
        flight = request.flight
        if flight is None:
            return
        try:
            request.raw += flight.read()
        except (Disconnected, MemoryError) as error:
            flight.close()
            self._advance(request, error if isinstance(error, Disconnected) else _not_read(error))
            return
        if flight.complete:
            self._advance(request, HttpReply(flight.status, request.raw, flight.sent_ns))

    def _give_up_waiting(self, request: _BackgroundRequest) -> None:
        if request.flight is None:  # a pause is over, or it has not begun
            self._advance(request, None)
            return
        request.flight.close()
        self._advance(request, Disconnected("the office did not answer in time"))

    # ---- the stream of news

    def _update_stream_state(self, wanted: bool) -> None:
        """Whether there is anything to listen for, and since when."""
        now_ns = self._clock.now_ns()
        if wanted:
            self._idle_since_ns = None
            if self._wanted_since_ns is None:
                self._wanted_since_ns = now_ns
                self._listen_at_ns = max(self._listen_at_ns, now_ns + round(LISTEN_AFTER_S * NS_PER_S))
            return
        self._wanted_since_ns = None
        if self._news is not None:
            if self._idle_since_ns is None:
                self._idle_since_ns = now_ns
            elif now_ns >= self._idle_since_ns + round(LISTEN_LINGER_S * NS_PER_S):
                self._stop_listening()

    def _listen_now(self) -> bool:
        now_ns = self._clock.now_ns()
        if self._news is not None and now_ns >= self._last_event_ns + round(SILENCE_S * NS_PER_S):
            self._lost_the_stream()
        return self._news is None and self._wanted_since_ns is not None and now_ns >= self._listen_at_ns

    def _listen(self) -> None:
        try:
            self._news = self._transport.launch(HttpCall(method="GET", path="/v1/events", timeout_s=_CONNECT_S))
        except (Disconnected, OSError, MemoryError):
            self._lost_the_stream()
            return
        self._events = EventReader()
        self._last_event_ns = self._clock.now_ns()
        self._behind = True

    def _read_news(self) -> None:
        news = self._news
        if news is None:
            return
        try:
            raw = news.read()
        except Disconnected:
            self._lost_the_stream()
            return
        if news.complete or news.status not in (0, 200):
            self._lost_the_stream()
            return
        self._last_event_ns = self._clock.now_ns()
        if raw:
            self._failures = 0
        # What happened before the stream was open is not in it, so once it is, the state is read again.
        missed, self._behind = self._behind and news.status == 200, self._behind and news.status != 200
        with self._lock:
            for event in self._events.feed(raw):
                missed = self._book.on_event(event) or missed
        if missed:
            self._note([background_requests.catch_up(self._core, self._book)])  # and ``_wait`` begins it

    def _lost_the_stream(self) -> None:
        self._stop_listening()
        pause_s = LISTEN_AGAIN_S[min(self._failures, len(LISTEN_AGAIN_S) - 1)]
        self._failures += 1
        self._listen_at_ns = self._clock.now_ns() + round(pause_s * NS_PER_S)

    def _stop_listening(self) -> None:
        if self._news is not None:
            self._news.close()
            self._news = None


def _not_sent(error: BaseException) -> Disconnected:
    """A request that this program could not send for want of something of its own. The office may well be there."""
    return Disconnected(f"the request could not be sent ({error})", sent=True)


def _not_read(error: BaseException) -> Disconnected:
    return Disconnected(f"the answer could not be read ({type(error).__name__})", sent=True)
