"""Runs `sublet` commands in forks of one process that has the command line loaded.

Each command is a process of its own, with its own environment, folder, descriptors, arguments and exit status, which
ends as any interpreter does; what is saved is the start, most of what a short command costs. The office that a command
starts is started anew, as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import sublet
from sublet.cli import main

__all__ = ["Ended", "run_sublet"]

ROOT: Final = Path(__file__).parents[1]
ORDER_MAX: Final = 64 << 10
"""Bytes of an order: arguments and environment. A command with more of them is started anew."""
FDS: Final = 4
"""What comes with an order: stdin, stdout, stderr, and where the command's number and its exit status are said."""
SAID: Final = struct.Struct("=i")
PIECE: Final = 1 << 16
AT_START: Final = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_")
"""Variables that a command with a start of its own would begin with: where they differ from ours, it has one."""


class Ended(NamedTuple):
    """What a shell gets."""

    status: int
    """Negative for a signal."""
    out: bytes
    err: bytes


def run_sublet(
    *words: str,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
    umask: int = -1,
    given: bytes = b"",
    timeout: float = 200.0,
) -> Ended:
    """Run ``sublet WORDS`` to its end. ``umask``: another than ours; ``given``: what it can read."""
    folder = os.getcwd() if cwd is None else os.fspath(cwd)
    order = json.dumps({"words": words, "env": dict(env), "cwd": folder, "umask": umask}).encode()
    if given or len(order) > ORDER_MAX or _for_start(env) != _for_start(os.environ):
        command = [sys.executable, "-m", "sublet", *words]
        done = subprocess.run(command, env=env, cwd=cwd, umask=umask, input=given, capture_output=True, timeout=timeout)
        return Ended(done.returncode, done.stdout, done.stderr)
    with contextlib.ExitStack() as stack:
        ours, theirs = [], []
        for _ in range(FDS):
            reader, writer = os.pipe()
            ours.append(stack.enter_context(open(reader, "rb", buffering=0)))
            theirs.append(stack.enter_context(open(writer, "wb", buffering=0)))
        nothing, out, err, says = ours
        theirs[0].close()  # there is nothing to read
        socket.send_fds(_server(), [order], [file.fileno() for file in (nothing, *theirs[1:])])
        for file in (nothing, *theirs[1:]):
            file.close()
        pid = _number(says.read(SAID.size))
        try:
            return Ended(*_heard(out.fileno(), err.fileno(), says.fileno(), time.monotonic() + timeout))
        except TimeoutError as error:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(["sublet", *words], timeout) from error


def _for_start(env: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter, its C library and the loader of its libraries read when they start, and never again."""
    return {name: value for name, value in env.items() if name.startswith(AT_START)}


def _number(data: bytes) -> int:
    assert len(data) == SAID.size, "the process that forks commands is gone"
    (number,) = SAID.unpack(data)
    return int(number)


def _heard(out: int, err: int, says: int, until_s: float) -> tuple[int, bytes, bytes]:
    """The exit status, and all that is said until the last process has closed it."""
    heard = {out: bytearray(), err: bytearray(), says: bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in heard:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            for key, _ in selector.select(left_s):
                piece = os.read(key.fd, PIECE)
                heard[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
    return _number(bytes(heard[says])), bytes(heard[out]), bytes(heard[err])


@functools.cache
def _server() -> socket.socket:
    """One for this process and as long as it lives."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.commands", str(theirs.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    process.returncode = 0  # it ends with this process: nobody waits for it
    return ours


# ------------------------------------------------------------------------------------------- in the process that forks


def _serve(orders: socket.socket) -> dict[str, object]:
    """Until nobody gives orders any more; in a fork, the order that it is to carry out."""
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wakes:
                    os.read(wakes, PIECE)
                    _say_ends(running)
                    continue
                data, fds, _, _ = socket.recv_fds(orders, ORDER_MAX, FDS, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    orders.close()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for fd in (wakes, wake, *running.values(), fds[3]):
                        os.close(fd)
                    for fd, found in enumerate(fds[:3]):
                        os.dup2(found, fd)
                        os.close(found)
                    return dict(json.loads(data))
                running[pid] = fds[3]
                os.write(fds[3], SAID.pack(pid))
                for fd in fds[:3]:
                    os.close(fd)


def _say_ends(running: dict[int, int]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            says = running.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(says, SAID.pack(os.waitstatus_to_exitcode(status)))
            os.close(says)


def _become(words: list[str], env: dict[str, str], cwd: str, umask: int) -> None:
    """As an interpreter begins that was started with this command."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if umask >= 0:
        os.umask(umask)
    sys.argv = [str(Path(sublet.__file__).with_name("__main__.py")), *words]
    sys.path[0] = cwd
    time.tzset()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", buffering=1, closefd=False)


def _end(status: int) -> None:
    """As an interpreter ends, but that it is not taken apart, which takes longer than most commands."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _load() -> None:
    """What any command loads, its help, or what is said of one that there is not."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for words in (["no-such-command"], ["run", "--help"]):
            main(words)


def _main() -> None:
    _load()
    orders = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()  # what is loaded by now is no garbage of any command's
    order = _serve(orders)
    _become(**order)  # type: ignore[arg-type]
    _end(main())


if __name__ == "__main__":
    _main()
