"""The program of ``sublet run --per-device`` and ``sublet train --gpus N``: one process per device.

It is the guest's first process, and the others are its children. They find what torchrun would give them, so programs
written for that run unchanged (``init_method="env://"``): each sees the leased cards in one order, and its own is
number ``LOCAL_RANK``. They meet on the loopback interface; a tenant's guest has one that no other process is on.

What the end of one means for the others is decided by ``sublet.lease.ranks``. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, Protocol

from sublet.guest import bootstrap
from sublet.guest.current import current
from sublet.guest.ending import end_at_once, end_forked
from sublet.guest.program import Program
from sublet.lease.ranks import Do, Ranks
from sublet.wire.cards import OWN_DEVICE

LOOPBACK: Final = "127.0.0.1"
NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
LEAVE_S: Final = 30.0
"""For those that leave by themselves, from when the first one has."""
LOOK_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_FORWARDED: Final = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
"""What is sent to a guest's first process alone."""
_OF_ALL: Final = frozenset({signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""What is sent to every process of a guest, so that it need not be passed on."""
_STOPS: Final = _OF_ALL | {signal.SIGTERM}
_AWAITED: Final = _FORWARDED | _OF_ALL | {signal.SIGCHLD}
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Process(Protocol):
    """One of them; ``subprocess.Popen``, say."""

    def poll(self) -> int | None:
        """Its status, a signal as the negative number; None while it runs."""

    def send_signal(self, number: int) -> object:
        """Send it a signal, if it still runs."""


def main(argv: Sequence[str], grace_s: float, name: str = "", source: str = "", is_python: bool = False) -> NoReturn:
    """Run it as often as the lease has devices, until all have ended. ``source`` is the text of a Python script that
    the guest does not see where ``argv`` names it, second; it is put into the guest's home as ``name``. ``is_python``:
    the first word is this interpreter, so that what it has imported need not be imported again."""
    if source:
        path = os.path.join(os.environ.get("HOME", os.getcwd()), os.path.basename(name))
        with open(path, "w", encoding="utf-8") as file:
            file.write(source)
        argv = [argv[0], path, *argv[2:]]
    count = max(1, len(current().devices))
    with contextlib.closing(_reserved_port()) as reserved:
        base = shared_environment(os.environ, count, reserved.getsockname()[1], current().lease)
        environments = [base | rank_environment(rank) for rank in range(count)]
        sys.exit(_run(argv, environments, grace_s, _forked if is_python else _executed))


def shared_environment(given: Mapping[str, str], count: int, port: int, run: str) -> dict[str, str]:
    """What all of them find. The interfaces and the number of threads are left as the holder has set them."""
    found = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **given}
    return found | {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "ROLE_WORLD_SIZE": str(count),
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def rank_environment(rank: int) -> dict[str, str]:
    """What one of them finds besides."""
    return {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK", OWN_DEVICE)}


def _reserved_port() -> socket.socket:
    """A port of the loopback interface that no other program is given while this is open. Rank 0 can listen on it all
    the same: nothing listens here, and both say that the address may be used again."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((LOOPBACK, 0))
    return reserved


Begin = Callable[[Sequence[str], Mapping[str, str], bool], Process]


def _run(argv: Sequence[str], environments: Sequence[Mapping[str, str]], grace_s: float, begin: Begin) -> int:
    if shutil.which(argv[0], path=environments[0].get("PATH")) is None:
        exists = os.sep in argv[0] and os.path.exists(argv[0])
        _print(f"{argv[0]} cannot be executed" if exists else f"there is no command {argv[0]}")
        return NOT_EXECUTABLE if exists else NOT_FOUND
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    ranks = Ranks(len(environments))
    processes: list[Process] = []
    for rank, environment in enumerate(environments):
        try:
            processes.append(begin(argv, environment, rank == 0))
        except OSError as error:
            _print(f"rank {rank} of {len(environments)} could not be started: {error.strerror or error}")
            _signal(processes, range(rank), signal.SIGKILL)
            return NOT_EXECUTABLE
    return _attended(ranks, processes, grace_s)


def _attended(ranks: Ranks, processes: Sequence[Process], grace_s: float) -> int:
    end_at_s = float("inf")
    """When those that still run are killed."""
    while ranks.running:
        left_s = max(0.0, min(LOOK_S, end_at_s - time.monotonic()))
        came = signal.sigtimedwait(_AWAITED, left_s)
        number, is_noticed = 0 if came is None else came.si_signo, current().noticed is not None
        if number in _FORWARDED and not is_noticed:  # else all have been sent it
            _signal(processes, ranks.running, number)
        if number in _STOPS or is_noticed:
            ranks.mark_stopping()
        for rank in ranks.running:
            status = processes[rank].poll()
            if status is None:
                continue
            match ranks.exited(rank, status if status >= 0 else 128 - status):
                case Do.END:
                    _signal(processes, ranks.running, signal.SIGTERM)
                    end_at_s = min(end_at_s, time.monotonic() + grace_s)
                case Do.AWAIT:
                    end_at_s = min(end_at_s, time.monotonic() + LEAVE_S)
                case Do.NOTHING:
                    pass
        if time.monotonic() >= end_at_s:
            _signal(processes, ranks.running, signal.SIGKILL)
    if sentence := ranks.sentence(describe_exit(ranks.status)):
        _print(sentence)
    return ranks.status


def describe_exit(status: int) -> str:
    """What an exit status says, in words."""
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(status - 128).name}"
    return f"with exit code {status}"


def _executed(argv: Sequence[str], environment: Mapping[str, str], reads: bool) -> Process:
    return subprocess.Popen(
        argv,
        env=environment,
        stdin=None if reads else subprocess.DEVNULL,
        close_fds=False,  # as any command of a guest's has what it was given
        preexec_fn=_in_child,  # noqa: PLW1509 - there is one thread
    )


def _forked(argv: Sequence[str], environment: Mapping[str, str], reads: bool) -> Process:
    """A copy of this interpreter, with all that it has imported."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return _Forked(pid)
    try:
        _in_child()
        if not reads:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
        os.environ.update(environment)
        if (torch := sys.modules.get("torch")) is not None:  # it has read the old number
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        bootstrap.run(Program(argv=tuple(argv[1:])), _end)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(1)  # ``run`` ends the process; nothing may return into the copy of what started it


def _end(status: int) -> NoReturn:
    if threading.active_count() > 1:
        end_at_once(status)
    end_forked(status)


class _Forked:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)


def _in_child() -> None:
    """It ends with the process that started it, and hears every signal."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def _signal(processes: Sequence[Process], ranks: Sequence[int], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            processes[rank].send_signal(number)


def _print(sentence: str) -> None:
    sys.stderr.write(f"sublet: {sentence}\n")
