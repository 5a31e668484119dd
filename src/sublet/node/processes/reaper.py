"""Reaps children: whose they were, and how they ended.

All orphans come to the supervisor, so most of what it reaps it never started. SIGCHLD says only that a child ended, and
several may become one signal, so at each signal all ended children are reaped.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable

from sublet.node.loop import READ, Loop, log_internal_error


class ProcessExit:
    """How a process ended."""

    __slots__ = ("cpu_ns", "peak_bytes", "pid", "status")

    def __init__(self, pid: int, status: int, used: resource.struct_rusage) -> None:
        self.pid = pid
        self.status = status
        self.cpu_ns = round((used.ru_utime + used.ru_stime) * 1e9)
        self.peak_bytes = used.ru_maxrss * 1024

    @property
    def code(self) -> int:
        """As a shell says it: 128+n for signal n."""
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code


class Reaper:
    """Reaps every child of this process, and tells the part that waits for it."""

    def __init__(self, loop: Loop, then: Callable[[], None]) -> None:
        """``then`` is called after each round in which anything was reaped."""
        self._loop = loop
        self._then = then
        self._waiting: dict[int, Callable[[ProcessExit], None]] = {}
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old_handler = signal.signal(signal.SIGCHLD, lambda *_: None)
        loop.watch(self._read, READ, self._woken)

    def expect(self, pid: int, exited: Callable[[ProcessExit], None]) -> None:
        """Tell when this child ended. To be said in the turn in which it was started."""
        self._waiting[pid] = exited

    def close(self) -> None:
        """Reap nothing more."""
        signal.set_wakeup_fd(self._old_fd)
        signal.signal(signal.SIGCHLD, self._old_handler)
        self._loop.forget(self._read)
        os.close(self._read)
        os.close(self._write)

    def reap(self) -> None:
        """Reap all children that have ended."""
        any_ended = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                any_ended = True
                exited = self._waiting.pop(pid, None)
                if exited is not None:
                    try:
                        exited(ProcessExit(pid, status, used))
                    except Exception as error:  # noqa: BLE001 - others wait to be reaped
                        log_internal_error(error)
        if any_ended:
            try:
                self._then()
            except Exception as error:  # noqa: BLE001 - others end later, and are reaped then
                log_internal_error(error)

    def _woken(self, events: int) -> None:
        with contextlib.suppress(OSError):  # there is nothing, or no memory to read it: it comes again
            os.read(self._read, 4096)
        self.reap()
