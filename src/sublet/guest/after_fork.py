"""Turns a copy of a zygote into a guest: everything between the forks and the program.

The order is that of a plain start: its own session and terminal, groups, limits, the user, the folder; last the tie to
the parent, because a change of user would undo it. Whatever fails is told through the ``failure`` pipe, by the name of
the step, in the form a plain start uses as well, and nothing of the program has run.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enumerations that ``signal`` makes
import ctypes
import fcntl
import io
import os
import random
import resource
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from sublet.guest.program import Program
from sublet.wire.zygote import FORK_FDS, GO, ROOM, Fork, read_request

NOT_STARTED: Final = 126
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_SIGNALS: Final = tuple(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
"""What each guest would have to find out anew is found out once, before the forks."""


def become(fds: tuple[int, ...], parent: int) -> Program:
    """Turn this process, forked twice, into the guest; what it is to run. Does not return where anything fails.

    ``fds`` are those of a call (``wire.zygote``); what the guest is to be is read from one of them, here and nowhere
    before. ``parent`` is the supervisor, whose child this must be by the time it is allowed to go.
    """
    failure = fds[4]
    doing = "go"
    try:
        if os.read(fds[3], 1) != GO:
            os._exit(NOT_STARTED)
        doing = "request"
        fork = read_request(fds[5])
        for name, step in _steps(fork, fds, parent):
            doing = name
            step()
    except BaseException as error:  # noqa: BLE001 - nothing may return from here: this is a copy of the zygote
        _fail(failure, doing, error)
    program = Program(argv=fork.argv, entry=fork.entry, args=fork.args, safe_path=bool(fork.env.get("PYTHONSAFEPATH")))
    title = f"{os.path.basename(sys.executable)} {program.name}"
    show(title, {key: value for key, value in fork.env.items() if key.startswith(fork.mark)})
    for fd in fds:
        if fd > 2:
            os.close(fd)
    if fork.walls:  # what a library of the zygote's may have opened lies outside of them
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return program


def _steps(fork: Fork, fds: tuple[int, ...], parent: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each is done before the next is asked for."""
    # Redundant: ``_tie_to`` looks again before the program begins. It stays because an orphan would take a terminal
    # and walls in vain, and stops here at the first step.
    yield "parent", lambda: _check_parent(parent)
    yield "terminal", lambda: _take_terminal(fork, fds)
    yield "group", lambda: [os.write(fd, b"0") for fd in fds[FORK_FDS:]]
    yield "limits", lambda: _limit(fork)
    yield "isolation", lambda: _change_user(fork)
    above = [parent]
    if fork.walls:
        yield "isolation", lambda: above.append(_loaded(fork.enter)(fork.walls, parent))
    yield "umask", lambda: os.umask(fork.umask)
    yield "folder", lambda: os.chdir(fork.cwd)
    yield "signals", _reset_signals
    yield "environment", lambda: _set_environment(fork)
    yield "stdio", open_stdio
    yield "chance", reseed
    yield "parent", lambda: _tie_to(above[-1])


def _loaded(name: str) -> Callable[[str, int], int]:
    """What the zygote has; nothing is imported for it."""
    module, _, attribute = name.partition(":")
    found: Callable[[str, int], int] = getattr(sys.modules[module], attribute)
    return found


def _fail(failure: int, step: str, error: BaseException) -> NoReturn:
    number = getattr(error, "errno", None) or 0
    try:
        os.write(failure, f"{step}\0{number}".encode())
    finally:
        os._exit(NOT_STARTED)


def _check_parent(parent: int) -> None:
    if os.getppid() != parent:
        raise ProcessLookupError(3, f"the parent is {os.getppid()} and not {parent}")


def _take_terminal(fork: Fork, fds: tuple[int, ...]) -> None:
    os.setsid()
    for number in range(3):
        os.dup2(fds[number], number)
    if fork.terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _limit(fork: Fork) -> None:
    for limit in fork.limits:
        resource.setrlimit(limit.resource, (limit.soft, limit.hard))
    if fork.cpus:
        os.sched_setaffinity(0, fork.cpus)


def _change_user(fork: Fork) -> None:
    if fork.gid >= 0:
        os.setgroups(fork.groups)
        os.setresgid(fork.gid, fork.gid, fork.gid)
    if fork.uid >= 0:
        os.setresuid(fork.uid, fork.uid, fork.uid)


def _reset_signals() -> None:
    """As a fresh interpreter has them."""
    for number in _SIGNALS:
        if _signal.getsignal(number) not in (_signal.SIG_DFL, None):
            _signal.signal(number, _signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _set_environment(fork: Fork) -> None:
    wanted = {key: value for key, value in fork.env.items() if key != ROOM}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update((key, value) for key, value in wanted.items() if os.environ.get(key) != value)


def _tie_to(parent: int) -> None:
    """End when the supervisor does. It may have ended before the wish was made, so the parent is looked at again."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    _check_parent(parent)


# ------------------------------------------------------------------------------------- what an interpreter begins with


def open_stdio() -> None:
    """``sys.stdin``, ``stdout`` and ``stderr`` on descriptors 0 to 2, as the interpreter makes them when it starts."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, f"__{name}__") or getattr(sys, name)
        raw = io.FileIO(fd, mode, closefd=False)
        binary: Any = io.BufferedReader(raw) if mode == "r" else raw if unbuffered else io.BufferedWriter(raw)
        made = io.TextIOWrapper(
            binary,
            encoding=getattr(old, "encoding", "utf-8"),
            errors=getattr(old, "errors", "backslashreplace" if fd == 2 else "strict"),
            newline="\n",
            line_buffering=fd == 2 or raw.isatty(),
            write_through=unbuffered and mode == "w",
        )
        made.mode = mode  # type: ignore[misc]  # as the interpreter sets it
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def reseed() -> None:
    """Two guests of one zygote must not draw the same numbers; what Python itself does at a fork is done again."""
    random.seed()
    seed = int.from_bytes(os.urandom(8), "little")
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "seed"):
        numpy.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()  # not torch.seed(), which would think of the devices
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


# ------------------------------------------- What other processes see of a forked guest: its command line and its marks
# /proc shows the arguments and the environment a process was *started* with, and it reads them from the process's own
# memory each time. A guest forked from a zygote would look like the zygote: ``ps`` could not tell guests apart, and a
# supervisor that looks for unknown guests would not find them. So the guest writes over that memory.
#
# The arguments are the program's by convention (as ``setproctitle`` uses them: one text, and a last byte that is not
# zero tells the kernel so). In the environment only the value of one variable of ours is written over (``ROOM``),
# because some library may still hold on to the others.
#
# All of it is for those who look on: where it cannot be done, nothing else changes.

_ARGUMENTS = 48 - 3
_ENVIRONMENT = 50 - 3
"""Places in /proc/self/stat after the name, of the first of two addresses each."""


def show(title: str, marks: Mapping[str, str]) -> bool:
    """Look like this from outside; whether it worked."""
    try:
        with open("/proc/self/stat", "rb") as file:
            numbers = file.read().rpartition(b")")[2].split()
        _write_title(title.encode("utf-8", "surrogateescape"), *map(int, numbers[_ARGUMENTS : _ARGUMENTS + 2]))
        _write_marks(marks, *map(int, numbers[_ENVIRONMENT : _ENVIRONMENT + 2]))
    except (OSError, ValueError, IndexError):
        return False
    return True


def shown_marks(marks: Mapping[str, str], room: int) -> bytes:
    """As many of the marks as fit, as /proc/<pid>/environ separates them, and nothing after them."""
    made = b""
    for name, value in marks.items():
        more = b"\0" + f"{name}={value}".encode("utf-8", "surrogateescape")
        if len(made) + len(more) <= room:
            made += more
    return made.ljust(room, b"\0")


def _write_title(title: bytes, start: int, end: int) -> None:
    room = end - start
    if start and room >= 2:
        ctypes.memmove(start, title[: room - 2].ljust(room - 1, b"\0") + b".", room)


def _write_marks(marks: Mapping[str, str], start: int, end: int) -> None:
    if not start or end <= start:
        return
    found = ctypes.string_at(start, end - start)
    name = f"{ROOM}=".encode()
    at = found.find(name)
    if at >= 0 and (at == 0 or found[at - 1] == 0):
        room = found.index(b"\0", at) - at - len(name)
        ctypes.memmove(start + at + len(name), shown_marks(marks, room), room)
