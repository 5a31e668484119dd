"""Processes that are forked from one that has loaded what they run, in the place of an interpreter's start.

Such a process has its own environment, folder, descriptors, session, command line and exit status; /proc shows of it
what it shows of one that was started. Standard library only, and little of it: supervisors are forked by this, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

ORDER_MAX: Final = 64 << 10
"""Bytes of an order: arguments and environment. A process with more of them is started anew."""
STREAMS: Final = 3
SAID: Final = struct.Struct("=i")
PIECE: Final = 1 << 16

Order = dict[str, Any]


class Forked:
    """One of them, for the process that asked for it: as ``subprocess.Popen`` shows a process."""

    def __init__(self, pid: int, says: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._says = says
        self._handle = -1
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._heard(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._heard(None if timeout is None else max(timeout, 0) * 1000)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Harmless when it has ended."""
        if self.poll() is None and self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _heard(self, within_ms: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._says, select.POLLIN)
            if poll.poll(within_ms):
                self.returncode = _number(os.read(self._says, SAID.size))
                self._close()
        return self.returncode

    def _close(self) -> None:
        for fd in (self._says, self._handle):
            if fd >= 0:
                os.close(fd)
        self._says = self._handle = -1

    def __del__(self) -> None:
        self._close()


def fork(server: str, order: Order, streams: Sequence[int]) -> Forked:
    """Have the process forked that the order describes, with these as its stdin, stdout and stderr."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(f"\0{server}")
        socket.send_fds(sock, [json.dumps(order).encode()], list(streams))
        pid = _number(sock.recv(SAID.size))
        return Forked(pid, sock.detach())


def order_for(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    umask: int = -1,
    session: bool = False,
    alone: bool = False,
) -> Order:
    """``session``: it leads one of its own. ``alone``: it is in one of its own, and no process waits for its end."""
    return {"argv": argv, "env": dict(env), "cwd": cwd, "umask": umask, "session": session, "alone": alone}


def fits(order: Order) -> bool:
    return len(json.dumps(order)) <= ORDER_MAX


def listening() -> socket.socket:
    """At a name of the kernel's choice, which goes with the last process that has it open."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind("")
    sock.listen(128)
    return sock


def name_of(sock: socket.socket) -> str:
    """Without the zero that it begins with, so that it can be an argument."""
    name: bytes = sock.getsockname()
    return name[1:].decode("ascii")


def _number(data: bytes) -> int:
    assert len(data) == SAID.size, "the process that forks others is gone"
    (number,) = SAID.unpack(data)
    return int(number)


# ------------------------------------------------------------------------------------------- in the process that forks


def serve(orders: socket.socket, alive: int) -> Order:
    """Until the other end of ``alive`` is closed; in a fork, the order that it is to carry out."""
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket | None] = {}
    poll = select.poll()
    for fd in (orders.fileno(), alive, wakes):
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == alive:
                os._exit(0)
            if fd == wakes:
                os.read(wakes, PIECE)
                _say_ends(running)
                continue
            asks, _ = orders.accept()
            data, fds, _, _ = socket.recv_fds(asks, ORDER_MAX, STREAMS, socket.MSG_CMSG_CLOEXEC)
            if not data:  # the program that asked was killed
                asks.close()
                continue
            order = json.loads(data)
            pid = os.fork()
            if pid == 0:
                orders.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (wakes, wake, alive):
                    os.close(other)
                for sock in filter(None, running.values()):
                    sock.close()
                for to, found in enumerate(fds):
                    os.dup2(found, to)
                    os.close(found)
                return _become(order, asks)
            if order["alone"]:
                asks.close()
            running[pid] = None if order["alone"] else asks
            for found in fds:
                os.close(found)


def _say_ends(running: dict[int, socket.socket | None]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            says = running.pop(pid)
            if says is not None:
                with says, contextlib.suppress(OSError):  # the program that asked may have ended
                    says.send(SAID.pack(os.waitstatus_to_exitcode(status)))


def _become(order: Order, says: socket.socket) -> Order:
    """All that is of the process, and not of its program."""
    if order["alone"] or order["session"]:
        os.setsid()
    if order["alone"]:
        if os.fork():
            os._exit(0)
        for number in (signal.SIGINT, signal.SIGQUIT):  # as a shell has it for what it starts in the background
            signal.signal(number, signal.SIG_IGN)
    os.environ.clear()  # thereby nothing is left that points at what /proc shows
    os.environ.update(order["env"])
    _show(order["argv"], order["env"])
    os.chdir(order["cwd"])
    if order["umask"] >= 0:
        os.umask(order["umask"])
    time.tzset()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", buffering=1, closefd=False)
    with says, contextlib.suppress(BrokenPipeError):
        says.send(SAID.pack(os.getpid()))
    return order


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.sbrk.restype = ctypes.c_void_p
_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
_MAP: Final = struct.Struct("=11QQII")
"""struct prctl_mm_map of linux/prctl.h."""
_shown: list[ctypes.Array[ctypes.c_char]] = []


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """In /proc, as the command line and the environment that this process was started with."""
    texts = (argv, (f"{name}={value}" for name, value in env.items()))
    _shown[:] = (ctypes.create_string_buffer(b"".join(os.fsencode(text) + b"\0" for text in some)) for some in texts)
    with open("/proc/self/stat", "rb") as file:
        stat = list(map(_as_number, file.read().rpartition(b")")[2].split()))
    code_data_brk = (*stat[23:25], *stat[42:45], _LIBC.sbrk(0), stat[25])
    places = [at for made in _shown for at in (ctypes.addressof(made), ctypes.addressof(made) + len(made) - 1)]
    wanted = _MAP.pack(*code_data_brk, *places, 0, 0, 0xFFFFFFFF)
    if _LIBC.prctl(_PR_SET_MM, _PR_SET_MM_MAP, wanted, ctypes.c_ulong(len(wanted)), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl PR_SET_MM_MAP")


def _as_number(word: bytes) -> int:
    return int(word) if word.lstrip(b"-").isdigit() else 0


def can_be_shown() -> bool:
    """Whether this kernel lets a process say what /proc shows of it."""
    size = ctypes.c_uint()
    return bool(_LIBC.prctl(_PR_SET_MM, 15, ctypes.byref(size), 0, 0) == 0)


def serve_supervisors(orders: int, alive: int, modules: Sequence[str] = ()) -> None:
    """In an interpreter as supervisors have it, with these modules beside. Each fork is one, and ends as an interpreter
    does."""
    from sublet.errors import SubletError
    from sublet.node.supervisor import service  # noqa: F401 - what each loads
    from sublet.node.supervisor.__main__ import main
    from sublet.wire.program_files import check_program

    with contextlib.suppress(SubletError):  # each says it itself
        check_program()
    if modules:
        import site

        own = list(sys.path)
        site.main()
        for module in modules:
            importlib.import_module(module)
        sys.path[:] = own

    order = serve(socket.socket(fileno=orders), alive)
    sys.argv = ["-c", *order["argv"][-2:]]
    status = main(sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
