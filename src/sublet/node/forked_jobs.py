"""Runs blocking work of the supervisor in short-lived forked children.

A copy does one thing that waits for the kernel (a file system is made, a disk is written to) and says what came of it
in one text. It keeps nothing of the supervisor's open but its own pipe, ends with the supervisor, and is known to the
trees as no stranger. At most a few run at a time; the others wait, and tenants take turns (``fair_slots``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable
from typing import Final, NoReturn

from sublet.lazy_dataclass import dataclass
from sublet.node.fair_slots import NO_DEADLINE, FairSlots
from sublet.node.loop import READ, Loop, Timer
from sublet.node.prctl import ParentGone, set_pdeathsig
from sublet.node.priority import give_back
from sublet.node.sandbox.syscalls import close_from

FORKED_JOBS_MAX: Final = 8
"""At a time, of which one tenant has half; the other half is for tenants that have none."""
FORKED_JOB_S: Final = 300.0
"""What takes longer is ended, if it can be, and counts as failed: a disk that hangs."""
ANSWER_MAX: Final = 60_000
"""Bytes: they fit into the pipe, so that no copy waits until its answer is read."""
ANSWER_FD: Final = 3
"""Where a copy writes its answer: ``ANSWERED``, and then the text."""
HANDED_FD: Final = 4
"""Where a copy finds the descriptor that it was given to keep."""
ANSWERED: Final = b"="
FAILED: Final = b"!"
"""In place of ``ANSWERED``: there is no answer, and the text says why."""
_STDERR: Final = 2

Work = Callable[[], str]
Done = Callable[[str | None], None]
"""Told the answer; None if there is none, because it failed or took too long."""


@dataclass(slots=True)
class _ForkedJob:
    pid: int
    pidfd: int
    answer: int
    done: Done
    timer: Timer
    key: object
    is_late: bool = False


class ForkedJobs:
    """The forked jobs of one supervisor, whose ``Reaper`` reaps the copies."""

    def __init__(self, loop: Loop, on_life: Callable[[int, bool], None], *, longest_s: float = FORKED_JOB_S) -> None:
        """``on_life`` is told the pid of each copy that was made, and of each that has ended."""
        self._longest_s = longest_s
        self._loop = loop.guarded(lambda _: self._next())  # its caller was answered, or never will be
        self._on_life = on_life
        self.why_failed = ""
        """Why there is no answer, for the caller that is just being told so: the log may lie on a full disk."""
        self._slots: FairSlots[object] = FairSlots(FORKED_JOBS_MAX)
        self._wanted: dict[object, tuple[Work, Done, int]] = {}
        """Those that wait, by key."""
        self._running: dict[int, _ForkedJob] = {}

    def run(self, work: Work, done: Done, *, tenant: str = "", by_ns: int = NO_DEADLINE, keep: int = -1) -> object:
        """Have it done, soon. ``tenant``: for whom; empty: for the supervisor itself. ``by_ns``: of one tenant, what is
        due first is done first. What is returned names it for ``stop``. ``keep``: a descriptor that the copy has
        besides, as ``HANDED_FD``; the caller leaves it open until it is told that the work is done."""
        key = object()
        self._wanted[key] = work, done, keep
        self._slots.add(key, tenant, by_ns)
        self._next()
        return key

    def stop(self, key: object) -> None:
        """End it where it is; the caller that waits for it is told so. Harmless if it is over."""
        if self._slots.drop(key):
            _, done, _ = self._wanted.pop(key)
            self._loop.soon(lambda: self._fail(done, "it was stopped before its turn"))
            return
        for job in self._running.values():
            if job.key is key:
                _stop(job.pidfd)

    def close(self) -> None:
        """End them all; no caller waits for them any more."""
        self._slots.clear()
        self._wanted.clear()
        for job in tuple(self._running.values()):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(job.pidfd, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(job.pid, 0)
            self._forget(job)

    def _next(self) -> None:
        while (key := self._slots.take()) is not None:
            work, done, keep = self._wanted.pop(key)
            try:
                self._start(work, done, key, keep)
            except (OSError, MemoryError) as error:  # its caller asks again
                self._slots.over(key)
                why = f"no process could be started for it ({getattr(error, 'strerror', None) or 'no memory'})"
                self._loop.soon(lambda done=done, why=why: self._fail(done, why))  # type: ignore[misc]

    def _fail(self, done: Done, why: str) -> None:
        self.why_failed = why
        done(None)

    def _start(self, work: Work, done: Done, key: object, keep: int) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(reading)
            raise
        finally:
            if os.getpid() == parent:
                os.close(writing)
        if pid == 0:
            _be(work, writing, parent, keep)
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)
            self._on_life(pid, True)
            os.set_blocking(reading, False)
            self._loop.watch(pidfd, READ, lambda _: self._ended(pidfd))
        except BaseException:  # no caller would ever be told of its end
            os.kill(pid, signal.SIGKILL)
            self._on_life(pid, False)
            for fd in (reading, pidfd):
                if fd >= 0:
                    os.close(fd)
            raise
        timer = self._loop.after(self._longest_s, lambda: self._on_late(pidfd))
        self._running[pidfd] = _ForkedJob(pid, pidfd, reading, done, timer, key)

    def _on_late(self, pidfd: int) -> None:
        self._running[pidfd].is_late = True
        _stop(pidfd)

    def _ended(self, pidfd: int) -> None:
        job = self._running[pidfd]
        answer = b""
        with contextlib.suppress(BlockingIOError):  # it has ended, so all is there that will ever be
            answer = os.read(job.answer, ANSWER_MAX + 1)
        self._forget(job)
        text = answer[1:].decode("utf-8", "surrogateescape")
        if answer.startswith(ANSWERED):
            job.done(text)
        else:
            self._fail(job.done, text or ("it took too long" if job.is_late else "its process was killed"))
        self._next()

    def _forget(self, job: _ForkedJob) -> None:
        job.timer.cancel()
        del self._running[job.pidfd]
        self._slots.over(job.key)
        self._loop.forget(job.pidfd)
        self._on_life(job.pid, False)
        os.close(job.pidfd)
        os.close(job.answer)


def _stop(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended just now
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _be(work: Work, writing: int, parent: int, keep: int) -> NoReturn:
    """The copy: nothing may return from here."""
    can_answer = False
    try:
        signal.set_wakeup_fd(-1)
        if keep >= 0:
            keep = fcntl.fcntl(keep, fcntl.F_DUPFD_CLOEXEC, HANDED_FD + 1)
        if writing != ANSWER_FD:  # which takes no descriptor more: there may be none
            os.dup2(writing, ANSWER_FD, inheritable=False)
        can_answer = True
        if keep >= 0:
            os.dup2(keep, HANDED_FD, inheritable=False)
        # Before all else, so that no peer takes the sockets this copy inherited for ones that are served.
        close_from((ANSWER_FD if keep < 0 else HANDED_FD) + 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        give_back()
        set_pdeathsig(signal.SIGKILL, parent)
        answer = work().encode("utf-8", "surrogateescape")
        os.write(ANSWER_FD, ANSWERED + answer[:ANSWER_MAX])
        os._exit(0)
    except (ParentGone, BrokenPipeError):  # the supervisor that would read it is gone
        pass
    except BaseException as error:  # noqa: BLE001 - this is a copy of the supervisor
        why = (error.strerror if isinstance(error, OSError) else None) or repr(error)
        with contextlib.suppress(OSError):
            if can_answer:  # else this number is of a file of the supervisor's
                os.write(ANSWER_FD, FAILED + why.encode("utf-8", "surrogateescape")[:ANSWER_MAX])
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"sublet: a forked job failed: {error!r}\n".encode())
    finally:
        os._exit(1)
