"""The supervisor's loop: descriptors and timers, in one thread.

It is the smallest thing that does the work. asyncio would cost eight megabytes in a process that is on every machine,
and its timers stand still while the machine sleeps; these are CLOCK_BOOTTIME, as every deadline is.

A callback may fail, and an error in the handling of one guest or connection must not end all others. So every part but
the law itself takes a loop of its own (``guarded``) and says what an error costs: its guest, its connection, or
nothing. What the law's own turn raises is not caught, and ends the process.
"""

from __future__ import annotations

import contextlib
import heapq
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

from sublet.background import Guard, count, is_shortage
from sublet.clock import Clock
from sublet.values import NS_PER_S

T = TypeVar("T")

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
LONGEST_WAIT_S: Final = 1.0
"""A wait stands still while the machine sleeps, so it is never trusted for longer."""
READY_MAX: Final = 256
MISTAKES: Final = "supervisor"
"""Internal errors of this process are counted under this name."""
SAY_AGAIN_S: Final = 60.0
LOGGED_MAX: Final = 64
TIMERS_LEAST: Final = 64
"""Cancelled timers are removed once there are so many: most timers are cancelled long before they are due."""

OnReady = Callable[[int], None]
"""Told which events came (``READ``, ``WRITE``, or what epoll says of a descriptor that broke)."""


class NotRead(Exception):
    """Raised by a callback that has read nothing, for want of memory in the kernel: it is called again later."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


def reading(read: Callable[[], T]) -> T:
    """What was read. A shortage becomes ``NotRead``, so it is waited out; other errors are raised as they are."""
    try:
        return read()
    except OSError as error:
        if is_shortage(error):
            raise NotRead(error) from error
        raise


class Timer:
    """Something that is to happen at a moment."""

    __slots__ = ("at_ns", "call")

    def __init__(self, at_ns: int, call: Callable[[], None]) -> None:
        self.at_ns = at_ns
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Not any more; harmless when it has happened."""
        self.call = None


class Loop:
    """Waits for descriptors and timers, and runs their callbacks, one at a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[OnReady, _Guarded | None, int]] = {}
        """By descriptor: what is called, under which guard, and the events that are waited for."""
        self._paused: set[int] = set()
        """Descriptors that are not waited for just now: what came could not be read, for want of memory or
        descriptors."""
        self._shortage = Guard("supervisor_loop", log_trouble)
        self._timers: list[tuple[int, int, Timer]] = []
        self._timers_room = TIMERS_LEAST
        self._made = 0
        self._soon: list[Callable[[], None]] = []
        self._running = False

    def now_ns(self) -> int:
        return self.clock.now_ns()

    def watch(self, fd: int, events: int, on_ready: OnReady) -> None:
        """From now on ``on_ready`` is called when one of the events is there. With no events only a hang-up tells."""
        self._watch(fd, events, on_ready, None)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events on a watched descriptor."""
        if fd not in self._paused:
            self._epoll.modify(fd, events)
        on_ready, guard, _ = self._watched[fd]
        self._watched[fd] = (on_ready, guard, events)

    def forget(self, fd: int) -> None:
        """No longer; to be called before the descriptor is closed. Harmless if it was not watched."""
        if self._watched.pop(fd, None) is not None:
            self._paused.discard(fd)
            self._epoll.unregister(fd)

    def at(self, when_ns: int, call: Callable[[], None]) -> Timer:
        """Call at this moment, or as soon after it as can be."""
        timer = Timer(when_ns, call)
        self._made += 1
        if len(self._timers) >= self._timers_room:
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._timers_room = max(TIMERS_LEAST, 2 * len(self._timers))
        heapq.heappush(self._timers, (when_ns, self._made, timer))
        return timer

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call after this long."""
        return self.at(self.now_ns() + round(seconds * NS_PER_S), call)

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the next turn, before anything is waited for."""
        self._soon.append(call)

    def run(self) -> None:
        """Go on until ``stop``."""
        self._running = True
        while self._running:
            self.turn(LONGEST_WAIT_S)

    def stop(self) -> None:
        """Return from ``run`` after this turn."""
        self._running = False

    def turn(self, longest_s: float) -> None:
        """Wait once, at most for so long, and do what came up."""
        for fd, events in self._epoll.poll(self._wait_s(longest_s), READY_MAX):
            watched = self._watched.get(fd)
            if watched is None:  # another one called in this turn has forgotten it
                continue
            on_ready, guard, _ = watched
            if fd in self._paused:  # a hang-up is reported whatever is waited for
                continue
            if guard is None:
                on_ready(events)
            else:
                guard.ready(fd, events, on_ready)
        calls, self._soon = self._soon, []
        for call in calls:
            call()
        self._ring()

    def guarded(self, on_error: Callable[[Exception], None]) -> Loop:
        """The same loop for a part whose errors are caught here: ``on_error`` is told, and the loop goes on."""
        return _Guarded(self, on_error)

    def close(self) -> None:
        """Let go of the descriptor of the loop itself."""
        self._epoll.close()

    def _watch(self, fd: int, events: int, on_ready: OnReady, guard: _Guarded | None) -> None:
        self._epoll.register(fd, events)
        self._watched[fd] = (on_ready, guard, events)

    def pause(self, fd: int, error: BaseException) -> None:
        """Wait for nothing on a watched descriptor until a shortage may be over."""
        self._paused.add(fd)
        self._epoll.modify(fd, select.EPOLLET)
        self.after(self._shortage.failed(error), lambda: self._resume(fd))

    def _resume(self, fd: int) -> None:
        if fd in self._paused:
            self._paused.discard(fd)
            self._epoll.modify(fd, self._watched[fd][2])
        if not self._paused:
            self._shortage.passed()

    def _wait_s(self, longest_s: float) -> float:
        if self._soon:
            return 0.0
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return longest_s
        return min(longest_s, max(0.0, (self._timers[0][0] - self.now_ns()) / NS_PER_S))

    def _ring(self) -> None:
        now_ns = self.now_ns()
        while self._timers and self._timers[0][0] <= now_ns:
            timer = heapq.heappop(self._timers)[2]
            call, timer.call = timer.call, None
            if call is not None:
                call()


class _Guarded(Loop):
    """Another name for a loop, under which nothing is called that can end it."""

    def __init__(self, loop: Loop, on_error: Callable[[Exception], None]) -> None:
        self.clock = loop.clock
        self._loop = loop
        self._on_error = on_error

    def watch(self, fd: int, events: int, on_ready: OnReady) -> None:
        self._loop._watch(fd, events, on_ready, self)

    def ready(self, fd: int, events: int, on_ready: OnReady) -> None:
        """Something came; called by the loop itself."""
        try:
            on_ready(events)
        except Exception as error:  # noqa: BLE001 - see the head of the module
            if isinstance(error, NotRead):
                self._loop.pause(fd, error.why)
                return
            self._loop.forget(fd)  # the event was not handled, so it would be reported again for ever
            self._failed(error)

    def change(self, fd: int, events: int) -> None:
        self._loop.change(fd, events)

    def forget(self, fd: int) -> None:
        self._loop.forget(fd)

    def at(self, when_ns: int, call: Callable[[], None]) -> Timer:
        return self._loop.at(when_ns, lambda: self._call_safely(call))

    def soon(self, call: Callable[[], None]) -> None:
        self._loop.soon(lambda: self._call_safely(call))

    def guarded(self, on_error: Callable[[Exception], None]) -> Loop:
        return self._loop.guarded(on_error)

    def _call_safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - see the head of the module
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        log_internal_error(error)
        try:
            self._on_error(error)
        except Exception as worse:  # noqa: BLE001 - the same
            log_internal_error(worse)


def log_internal_error(error: BaseException) -> None:
    """Count and log an internal error that ends only the part that it concerns; `sublet doctor` shows the count. The
    same error is logged once a minute at most, since some come again with every turn."""
    count(MISTAKES, error)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = (type(error), "" if at is None else at.tb_frame.f_code.co_filename, 0 if at is None else at.tb_lineno)
    now_s = time.monotonic()
    if now_s - _logged_s.get(where, -SAY_AGAIN_S) < SAY_AGAIN_S:
        return
    if len(_logged_s) >= LOGGED_MAX:
        _logged_s.clear()
    _logged_s[where] = now_s
    sys.excepthook(type(error), error, error.__traceback__)


_logged_s: dict[tuple[object, str, int], float] = {}
"""When each internal error was last logged, by its type and place."""


def log_trouble(text: str, error: BaseException | None) -> None:
    """How a ``Guard`` in this process logs: to stderr, which is the supervisor's log."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"sublet: {text}\n")
        sys.stderr.flush()
    if error is not None and not is_shortage(error):
        sys.excepthook(type(error), error, error.__traceback__)


class Accepting:
    """Accepts on one listening socket. A shortage stops it for a moment; nothing stops it for good."""

    def __init__(self, loop: Loop, name: str, listening: socket.socket, take: Callable[[socket.socket], None]) -> None:
        listening.setblocking(False)
        self._loop = loop
        self._listening = listening
        self._take = take
        self._guard = Guard(name, log_trouble)
        self._timer: Timer | None = None

    def begin(self) -> None:
        """From now on. Raises where the socket cannot be watched."""
        self._loop.watch(self._listening.fileno(), READ, self._ready)

    def rest(self, seconds: float) -> None:
        """Accept nothing for so long: new connections wait, and nothing else is affected."""
        self._loop.forget(self._listening.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.after(seconds, self._again)

    def close(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.forget(self._listening.fileno())
        self._listening.close()

    def _again(self) -> None:
        self._timer = None
        try:
            self.begin()
        except Exception as error:  # noqa: BLE001 - no room to watch it, or no memory: later there is
            self._timer = self._loop.after(self._guard.failed(error), self._again)

    def _ready(self, events: int) -> None:
        try:
            sock, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except Exception as error:  # noqa: BLE001 - too many are open, mostly
            self.rest(self._guard.failed(error))
            return
        self._guard.passed()
        try:
            self._take(sock)
        except Exception as error:  # noqa: BLE001 - one connection must not be able to close the door for others
            sock.close()
            if not is_shortage(error):
                log_internal_error(error)
            self.rest(self._guard.failed(error))
