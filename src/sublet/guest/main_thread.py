"""The queue of a worker: listening threads add calls, the main thread executes them one by one.

The main thread, because only there can Python code be interrupted: by the end of the lease, and by the holder who does
not want the result any more. An interrupt is let into the holder's functions and nowhere else, so that no message is
cut in two; what comes at another moment waits for the next one at which it may be raised.

The holder's code may fork. A child of it that comes back here ends: what there is to answer is its parent's to answer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    import asyncio

CANCELLED: Final = "the call was cancelled"
T = TypeVar("T")
Job = Callable[[], None]


class MainThreadQueue:
    """There is one in a worker; made on its main thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held to decide whether a call begins or is cancelled."""
        self.running: object = None
        """What is executing: whatever was given to ``begin``."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._is_open = False
        self._unwanted: object = None
        self._end_seen: BaseException | None = None
        self._leave: Callable[[], object] = _nothing

    def arrange(self) -> None:
        """Take over the signals: SIGTERM as the bootstrap has arranged it, SIGINT for what is not wanted any more."""
        before = signal.getsignal(signal.SIGTERM)
        if callable(before):
            end_of_lease = before

            def on_end(number: int, frame: FrameType | None) -> None:
                if self._is_open:
                    self._end(lambda: end_of_lease(number, frame))
                else:
                    self._leave = lambda: self._end(lambda: end_of_lease(number, frame))
                    self._jobs.put(None)

            signal.signal(signal.SIGTERM, on_end)
        signal.signal(signal.SIGINT, self._on_unwanted)
        _workers.add(self._main)

    def put(self, job: Job) -> None:
        """To be done on the main thread, after what is there already."""
        self._jobs.put(job)

    def work(self) -> None:
        """Do what comes, until the lease ends: that comes out as ``LeaseInterrupt``."""
        while True:
            job = self._jobs.get()
            if job is not None:
                job()
            leave, self._leave = self._leave, _nothing
            leave()
            if self._end_seen is not None:  # the program caught it; that changes nothing
                raise self._end_seen

    @property
    def is_ending(self) -> bool:
        """Whether the end of the lease was raised, whatever became of it."""
        return self._end_seen is not None

    # ---- what is interrupted

    def execute(self, work: Callable[[], T]) -> T:
        """Run the holder's code; here and nowhere else interrupts are let in."""
        try:
            self._is_open = True
            self._raise_pending()
            return work()
        finally:
            self._is_open = False
            if os.getpid() != self._pid:
                _end_fork(sys.exc_info()[1])

    def awaited(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Future[object] | None:
        """Run it where this thread has a loop of its own that runs already; None: it has none."""
        return None

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """In the middle of the holder's code: something of ours that must not be cut in two. Other threads are never
        disturbed."""
        if threading.get_ident() != self._main or not self._is_open:
            yield
            return
        self._is_open = False
        try:
            yield
        finally:
            self._is_open = True
        self._raise_pending()

    def interrupt(self, what: object) -> None:
        """``what`` is not wanted any more. From a thread that listens, under the lock; nothing if it is not running."""
        if self.running == what:
            self._unwanted = what
            signal.pthread_kill(self._main, signal.SIGINT)

    def raise_pending(self) -> None:
        """While something of ours takes long in the middle of the holder's code: raise what came meanwhile."""
        if threading.get_ident() == self._main:
            self._raise_pending()

    def done(self) -> None:
        """Nothing is running."""
        with self.lock:
            self.running = self._unwanted = None

    def _on_unwanted(self, number: int, frame: FrameType | None) -> None:
        if self._is_open:
            self._raise_pending()

    def _raise_pending(self) -> None:
        """Raise what came while nothing could be raised."""
        leave, self._leave = self._leave, _nothing
        leave()
        if self._unwanted is not None and self._unwanted == self.running and self._end_seen is None:
            self._unwanted = None
            raise KeyboardInterrupt(CANCELLED)

    def _end(self, raise_it: Callable[[], object]) -> None:
        try:
            raise_it()
        except BaseException as end:  # LeaseInterrupt, as this interpreter's own Sublet has it
            self._end_seen = end
            raise


def is_worker() -> bool:
    """Whether this process is a worker: its functions run under a lease already."""
    return bool(_workers)


def _end_fork(raised: BaseException | None) -> NoReturn:
    """As a program of its own would end; but nothing of the worker's is put away twice."""
    raised = getattr(raised, "error", raised)  # as the calls wrap it
    status = 0 if raised is None else 1
    if isinstance(raised, SystemExit) and isinstance(raised.code, int | None):
        status = (raised.code or 0) & 0xFF
    elif raised is not None:
        with contextlib.suppress(BaseException):
            traceback.print_exception(raised)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(status)


def _nothing() -> None:
    return


_workers: set[int] = set()
