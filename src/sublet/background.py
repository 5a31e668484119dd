"""Starts threads and tasks that run in the background, and defines what happens when one of them fails.

A background loop meets two kinds of failure. A *shortage* (no file descriptor, no memory, no room for another thread)
passes when what is short is freed: the loop pauses and goes on. Any other error is a mistake, and what follows depends
on whose process it is. The office ends with one line, since a part of it that stopped unnoticed would be worse. In a
user's program the loop is started again, because a library does not end the program that uses it. The supervisor has
one thread and a loop of its own (``node.loop``), which goes on.

In each case the first failure is logged and every one is counted (``troubles``): the office shows the counts in its
metrics, the supervisor in ``sublet doctor``. ``tests/unit/test_background.py`` holds that no thread and no task is
started in another way. Standard library only, and what is large of it is imported on use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    import asyncio
    import socket
    import threading

SHORTAGES: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN))
"""Errors of the operating system that pass when descriptors, memory or processes are freed."""
PAUSES_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
"""After the first, second, … failure in a row."""
SAY_AGAIN_S: Final = 60.0
"""A loop that fails and recovers again and again is logged at most so often."""
LAST_MAX: Final = 500
"""Characters that are kept of an error."""
STEADY_S: Final = 5.0
"""A loop that has run for so long has recovered."""
START_S: Final = 10.0
"""A new thread takes its first step within this time, or it never will."""
START_LOOKS: Final = 10
_NO_THREAD: Final = ("can't start new thread",)
_NOT_OPENED: Final = tuple(f": {os.strerror(number)}" for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))
_SHORT_DO: Final = (
    "Close files or end threads of this program, or raise its limits (`ulimit -n`, `ulimit -u`), then try again."
)
_BROKEN: Final = frozenset((errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP))
"""What ``accept`` answers when the listening socket itself is useless. Its other errors belong to the connection that
was to be accepted, or are shortages."""


def is_shortage(error: BaseException) -> bool:
    """Whether the error passes when descriptors, memory or processes are freed."""
    if isinstance(error, OSError):
        return error.errno in SHORTAGES
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and error.args == _NO_THREAD)


@contextlib.contextmanager
def shortage_explained() -> Iterator[None]:
    """What fails in here for want of a descriptor or a thread of this program is raised as an error that says so. A
    module that is imported here for the first time may be what fails; a library that cannot be opened is an
    ``ImportError``, with no number, which ends with the words of the operating system."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        if not is_shortage(error) and not (isinstance(error, ImportError) and str(error).endswith(_NOT_OPENED)):
            raise
        from sublet.errors import SubletError

        why = getattr(error, "strerror", None) or error
        raise SubletError(f"this program is short of a resource ({why})", do=_SHORT_DO) from error


class Trouble:
    """The failures of all background loops of one name in this process."""

    __slots__ = ("errors", "failing", "last", "name", "shortages")

    def __init__(self, name: str) -> None:
        self.name = name
        self.shortages = 0
        self.errors = 0
        """Failures that were no shortage."""
        self.failing = 0
        """Loops of this name that have failed and not recovered yet, or have ended by a failure."""
        self.last = ""


_troubles: dict[str, Trouble] = {}


def troubles() -> tuple[Trouble, ...]:
    """One for each name under which something has failed, by name."""
    return tuple(_troubles[name] for name in sorted(_troubles))


def _log(text: str, error: BaseException | None) -> None:
    import logging

    info = None if error is None or is_shortage(error) else (type(error), error, error.__traceback__)
    logging.getLogger("sublet.background").log(logging.WARNING if error is None else logging.ERROR, text, exc_info=info)


def count(name: str, error: BaseException) -> Trouble:
    """Note one failure under this name."""
    trouble = _troubles.setdefault(name, Trouble(name))
    if is_shortage(error):
        trouble.shortages += 1
    else:
        trouble.errors += 1
    trouble.last = f"{type(error).__name__}: {error}"[:LAST_MAX]
    return trouble


class Guard:
    """Decides how long one loop pauses after a failure, logs the first in a row, and counts each."""

    __slots__ = ("_in_a_row", "_log", "_logged_s", "_trouble", "name")

    def __init__(self, name: str, log: Callable[[str, BaseException | None], None] = _log) -> None:
        """``name`` is the label of the metric; ``log`` is told a text, and the error if there is one."""
        self.name = name
        self._log = log
        self._trouble: Trouble | None = None
        self._in_a_row = 0
        self._logged_s = -SAY_AGAIN_S

    @property
    def is_failing(self) -> bool:
        return self._in_a_row > 0

    def failed(self, error: BaseException, what_now: str = "it goes on") -> float:
        """Note a failure. Returns how long to pause before the loop goes on."""
        pause_s = PAUSES_S[min(self._in_a_row, len(PAUSES_S) - 1)]
        with contextlib.suppress(MemoryError):  # to tell of a shortage must not fail for want of the same
            trouble = self._trouble = count(self.name, error)
            trouble.failing += self._in_a_row == 0
            self._in_a_row += 1
            if self._in_a_row == 1 and time.monotonic() - self._logged_s >= SAY_AGAIN_S:
                self._logged_s = time.monotonic()
                self._log(f"{self.name}: {trouble.last}; {what_now}", error)
        return pause_s

    def passed(self) -> None:
        """Note that the loop works."""
        if self._in_a_row and self._trouble is not None:
            self._trouble.failing -= 1
            if self._in_a_row > 1:
                self._log(f"{self.name}: works again after {self._in_a_row} failures", None)
            self._in_a_row = 0


def start_thread(
    name: str,
    run: Callable[[], object],
    *,
    again: bool = False,
    failed: Callable[[BaseException], object] | None = None,
    called: str = "",
) -> threading.Thread:
    """Start a thread that does not keep the program from ending.

    If ``run`` raises, that is logged and counted; with ``again`` it is called again after a pause, until it returns,
    else ``failed`` is told. ``called`` is the name of the thread (default: ``name`` after "sublet-"). Raises
    RuntimeError if the system has no room for another thread.
    """
    import threading

    given_up: list[bool] = []

    def guarded() -> None:
        if given_up:  # its first step took that long, and its starter was told that there is none
            return
        guard = Guard(name)
        while True:
            began_s = time.monotonic()
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - no caller of a thread could catch it
                if sys.is_finalizing():
                    return
                if time.monotonic() - began_s > STEADY_S:
                    guard.passed()
                pause_s = guard.failed(error, "it is started again" if again else "it has ended")
                if not again:
                    if failed is not None:
                        failed(error)
                    return
                time.sleep(pause_s)
            else:
                guard.passed()
                return

    thread = threading.Thread(target=guarded, name=called or "sublet-" + name.replace("_", "-"), daemon=True)
    begin(thread, lambda: given_up.append(True))
    return thread


def begin(thread: threading.Thread, gave_up: Callable[[], object] = lambda: None) -> None:
    """Start it, or raise RuntimeError. ``Thread.start`` waits without end for a thread that found no memory for its
    first step. ``gave_up`` is told of that: it may come later all the same."""
    import threading

    class Started(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                return super().wait(timeout)
            for _ in range(START_LOOKS):  # a process that is paused meanwhile loses one of them
                if super().wait(START_S / START_LOOKS):
                    return True
            gave_up()
            raise RuntimeError(*_NO_THREAD)

    thread._started = Started()  # type: ignore[attr-defined]
    thread.start()


def start_timer(name: str, seconds: float, call: Callable[[], object]) -> threading.Timer:
    """Call once, so much later, on a thread that does not keep the program from ending. A failure is logged."""
    import threading

    def guarded() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - no caller of a thread could catch it
            Guard(name).failed(error, "it has ended")

    timer = threading.Timer(seconds, guarded)
    timer.daemon = True
    begin(timer)
    return timer


def start_task(
    name: str,
    work: Callable[[], Awaitable[object]],
    *,
    again: bool = False,
    failed: Callable[[BaseException], object] | None = None,
) -> asyncio.Task[None]:
    """Start a task in the running loop, as ``start_thread`` starts a thread. It is kept alive until it ends."""
    import asyncio

    async def guarded() -> None:
        guard = Guard(name)
        while True:
            began_s = time.monotonic()
            try:
                await work()
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # noqa: BLE001 - a task that is not awaited would end silently
                if time.monotonic() - began_s > STEADY_S:
                    guard.passed()
                pause_s = guard.failed(error, "it is started again" if again else "it has ended")
                if not again:
                    if failed is not None:
                        failed(error)
                    return
                await asyncio.sleep(pause_s)
            else:
                guard.passed()
                return

    task = asyncio.get_running_loop().create_task(guarded(), name=f"sublet-{name}")
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


_tasks: set[asyncio.Task[None]] = set()
"""A loop has only weak references to its tasks."""


async def accept_connections(name: str, listening: socket.socket, take: Callable[[socket.socket], object]) -> NoReturn:
    """Accept for ever, and hand each connection to ``take``. During a shortage clients wait in the backlog."""
    import asyncio

    loop, guard = asyncio.get_running_loop(), Guard(name)
    while True:
        try:
            sock, _ = await loop.sock_accept(listening)
        except (OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno in _BROKEN:
                raise
            await asyncio.sleep(guard.failed(error))
            continue
        try:
            sock.setblocking(False)
            take(sock)
        except Exception as error:  # noqa: BLE001 - one connection must not be able to close the door for others
            sock.close()
            await asyncio.sleep(guard.failed(error))
        else:
            guard.passed()


def end_process(message: str) -> NoReturn:
    """End this process at once with one line of output."""
    with contextlib.suppress(OSError):
        os.write(2, f"sublet: {message}\n".encode())
    os._exit(1)
