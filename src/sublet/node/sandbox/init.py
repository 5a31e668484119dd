"""The two processes at the top of a process namespace.

*Outside* is the process that the supervisor forked and knows as the guest. It cannot enter the namespace itself (a
process never changes its own), so it waits, hands on the signals it gets, and ends exactly as the command ended.
*Init* is the first process inside: it starts the command, takes in orphans, and when the command has ended it ends,
whereupon the kernel ends everything that is left in the namespace, and only then is init gone. So when outside sees it
go, nothing of the guest is left. The command is not the first itself, because the kernel keeps from the first process
every signal it has no handler for, SIGTERM above all.

If the supervisor ends, outside is killed; if outside ends, init is killed; if init ends, everything is. Both hold a
copy of the supervisor's memory, so neither can be looked into, and neither keeps a descriptor of the guest's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import struct
import termios
from collections.abc import Iterable
from typing import Final, NoReturn

from sublet.node.prctl import set_pdeathsig
from sublet.node.sandbox import syscalls

COULD_NOT: Final = 126
"""The exit status where the command never ran; the reason went another way."""

_STATUS: Final = struct.Struct("<i")
_CAP_KILL: Final = 1 << 5
_EVERY: Final = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
_HANDED_ON: Final = _EVERY - {signal.SIGCHLD}


def become_init(parent: int) -> int:
    """Fork into a new process namespace. Comes back only inside, as its first process, with the status pipe."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _EVERY)  # what arrives from now on waits until it can be handed on
    _leave_terminal()
    syscalls.unshare(syscalls.CLONE_NEWPID)
    status_read, status_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        _outside(pid, parent, status_read)
    os.close(status_read)
    os.setsid()  # signals to the group of outside are outside's, and come once
    set_pdeathsig_or_end(status_write)
    return status_write


def become_command(status: int, mask: Iterable[int]) -> None:
    """Fork the command's process. Comes back only there."""
    pid = os.fork()
    if pid:
        _init(pid, status)
    os.close(status)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def set_pdeathsig_or_end(status: int) -> None:
    """Init cannot ask who its parent is: from inside there is none. It asks whether the pipe still has a reader."""
    set_pdeathsig(signal.SIGKILL, os.getppid())
    poll = select.poll()
    poll.register(status, select.POLLERR)
    if poll.poll(0):
        os._exit(COULD_NOT)


def take_terminal() -> None:
    """The new session gets the terminal among descriptors 0 to 2, if there is one and no other session has it."""
    for fd in range(3):
        if os.isatty(fd):
            with contextlib.suppress(OSError):  # it is the terminal of another session, and stays that
                fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
            return


def _leave_terminal() -> None:
    """So that the command's session can have it. The kernel says so with a hang-up, which is not one."""
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCNOTTY)
    os.close(fd)
    while signal.sigtimedwait({signal.SIGHUP, signal.SIGCONT}, 0):
        pass


def _outside(init: int, parent: int, status: int) -> NoReturn:
    try:
        _alone(status)
        syscalls.set_capabilities()
        syscalls.set_dumpable(False)
        set_pdeathsig(signal.SIGKILL, parent)
        ended = _watch(init, init)
        report = os.read(0, _STATUS.size)
        _end_like(_STATUS.unpack(report)[0] if len(report) == _STATUS.size else ended)
    except BaseException:  # noqa: BLE001 - this is a copy of the supervisor, and must not go on as one
        os._exit(COULD_NOT)


def _init(command: int, status: int) -> NoReturn:
    try:
        _alone(status)
        syscalls.set_capabilities(_CAP_KILL)  # the command may be another user's
    except OSError:
        syscalls.set_capabilities()  # this was not root, and the command is the same user's
    try:
        syscalls.set_dumpable(False)
        ended = _watch(command, command)
        os.write(0, _STATUS.pack(ended))
    finally:
        os._exit(0)


def _watch(child: int, hand_to: int) -> int:
    """Hand on signals and take in whatever ends, until this child does. Returns its status as the kernel gave it."""
    while True:
        number = signal.sigwaitinfo(_EVERY).si_signo
        if number in _HANDED_ON:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hand_to, number)
            continue
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == child:
                return status
            if pid == 0:
                break


def _alone(status: int) -> None:
    """Keep one descriptor, as number 0. The guest's pipes must reach their end when the guest closes them."""
    os.dup2(status, 0)
    syscalls.close_from(1)


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
