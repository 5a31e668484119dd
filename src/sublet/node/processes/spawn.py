"""Starts a command: one fork, and everything before the exec.

The supervisor has one thread, so its child may run Python until the exec. It waits for a word from the parent before it
does anything, so that the note of it (``notes``) is written before it runs; and it tells through a pipe that closes at
the exec which step failed, if one did.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

from sublet.lazy_dataclass import dataclass
from sublet.node import priority
from sublet.node.prctl import set_pdeathsig
from sublet.node.processes.files import give_back
from sublet.node.processes.memory_order import killed_first

NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
_FAILURE_MAX: Final = 4096
_GO: Final = b"!"
_SIGNALS: Final = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class SpawnFailed(Exception):
    """The command did not come to run."""

    def __init__(self, step: str, number: int, subject: str) -> None:
        super().__init__(_failure_text(step, number, subject))
        self.step = step
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell would answer."""
        return NOT_FOUND if self.step == "exec" and self.number == errno.ENOENT else NOT_EXECUTABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnPlan:
    """What the child does between fork and exec, in this order."""

    take_stdio: Callable[[], None]
    """A session of its own, its terminal, descriptors 0 to 2."""
    join: Sequence[str]
    """Files of control groups into which it writes itself."""
    limit: Callable[[], None]
    """Caps that hold for one process: cores, files."""
    enter: Callable[[int], int]
    """The isolation profile; it may change the user, the root, and even the process, so it is given the pid of the
    parent and returns what that is from where it came out."""
    cwd: str
    umask: int
    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass(slots=True)
class Child:
    """A process that waits for ``let_run``."""

    pid: int
    pidfd: int
    failure: int
    """Readable once it runs (then nothing is in it) or could not (then it says why)."""
    _go: int

    def let_run(self) -> None:
        """It is noted; now it may run."""
        with contextlib.suppress(BrokenPipeError):  # it was ended meanwhile, and its exit says so
            os.write(self._go, _GO)
        self._close_go()

    def forget(self) -> None:
        """It was never noted: it ends without having run."""
        self._close_go()
        os.close(self.failure)
        os.close(self.pidfd)

    def _close_go(self) -> None:
        if self._go >= 0:
            os.close(self._go)
            self._go = -1


def spawn(plan: SpawnPlan) -> Child:
    """Fork. The child waits for ``let_run`` and ends by itself if the parent ends first."""
    made: list[int] = []
    parent = os.getpid()
    try:
        made += os.pipe2(os.O_CLOEXEC)
        made += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pid = os.fork()
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    go_read, go_write, failure_read, failure_write = made
    if pid == 0:
        os.close(go_write)
        os.close(failure_read)
        _become(plan, parent, go_read, failure_write)
    os.close(go_read)
    os.close(failure_write)
    try:
        return Child(pid, os.pidfd_open(pid), failure_read, go_write)
    except OSError:  # it waits for its word, and ends without one
        os.close(go_write)
        os.close(failure_read)
        raise


def read_failure(failure: int, subject: str) -> SpawnFailed | None:
    """What the pipe says once it is readable: None if the command runs."""
    report = os.read(failure, _FAILURE_MAX)
    if not report:
        return None
    step, _, number = report.decode("utf-8", "replace").partition("\0")
    return SpawnFailed(step, int(number) if number.isdecimal() else 0, subject)  # a guest may have written it


def _become(plan: SpawnPlan, parent: int, go: int, failure: int) -> NoReturn:
    step = "start"
    gc.disable()  # a collection would write to each page that is shared with the supervisor, and so copy it
    try:
        if os.read(go, 1) != _GO:
            os._exit(NOT_EXECUTABLE)
        step = "terminal"
        plan.take_stdio()
        step = "group"
        if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):  # the office's; a group of cores takes no such one
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        priority.give_back()
        killed_first()
        for path in plan.join:
            _write(path, b"0")
        step = "limits"
        give_back()
        plan.limit()
        step = "isolation"
        parent = plan.enter(parent)
        step = "folder"
        os.chdir(plan.cwd)
        os.umask(plan.umask)
        _reset_signals()
        step = "parent"
        set_pdeathsig(signal.SIGKILL, parent)
        step = "exec"
        os.execvpe(plan.argv[0], list(plan.argv), dict(plan.env))
    except BaseException as error:  # noqa: BLE001 - nothing may return from here: this is a copy of the supervisor
        number = getattr(error, "errno", None) or 0
        step = getattr(error, "step", step)
        with contextlib.suppress(OSError):
            os.write(failure, f"{step}\0{number}".encode())
    os._exit(NOT_EXECUTABLE)


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _reset_signals() -> None:
    """Reset what the interpreter and the supervisor changed, and what their shell told them to ignore: a guest must not
    inherit it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _failure_text(step: str, number: int, subject: str) -> str:
    why = os.strerror(number) if number else "it failed"
    if step == "exec":
        return f"{subject} could not be run: {why}"
    if step == "folder":
        return f"the working folder of {subject} could not be entered: {why}"
    return f"{subject} could not be started: {why} (at the step {step!r})"
