"""Processes we started: their processor time, their memory, and their end. Nothing here ends a process by name."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

__all__ = [
    "Child",
    "Memory",
    "cpu_seconds",
    "free_port",
    "memory_of",
    "time_command",
    "tree",
    "wait_until",
    "waited_for_seconds",
]

END_WITHIN_S: Final = 15.0
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """Between fork and exec: the kernel ends the child if we are killed, since nothing of ours runs then."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One process of ours. Its error output goes to a file, so that a full pipe can never stop it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        pipes: bool = False,
    ) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else self._errors,
            stderr=self._errors,
            env=None if env is None else dict(env),
            cwd=folder,
            text=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - the harness has one thread
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: str) -> str:
        """Write a line, read a line; empty where the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()

    def ask_json(self, message: dict[str, Any]) -> dict[str, Any]:
        """Write a document, read one; an error where the process has ended."""
        line = self.ask(json.dumps(message))
        if not line:
            raise RuntimeError(f"the {self.name} ended: {self.complaint()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def answer(self) -> str:
        """Another line, for one that says more than one."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def complaint(self) -> str:
        """The end of what it wrote to its error output."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:].strip()

    def end(self) -> None:
        """Ask, wait, then insist. Harmless when it has ended already."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self._process.stdin is None and self.alive:
            self._process.terminate()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def time_command(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Seconds from starting a command to its end; its output goes nowhere.

    No time-out here: `subprocess` waits for one by sleeping longer and longer, which would be measured. The harness's
    limit interrupts the wait, and then the command is ended.
    """
    before = time.perf_counter()
    process = subprocess.Popen(list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        status = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    took = time.perf_counter() - before
    if status:
        raise RuntimeError(f"{command[-1]!r} ended with status {status}.")
    return took


def wait_until(check: Callable[[], bool], *, within_s: float, what: str, every_s: float = 0.05) -> None:
    """Look again and again; a bound on the wait, and a sentence when it is over."""
    end = time.monotonic() + within_s
    while not check():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} within {within_s:.0f} s")
        time.sleep(every_s)


def free_port() -> int:
    """A port on the loopback interface that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def tree(pid: int) -> list[int]:
    """The process and its living descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            fields = text[text.rindex(")") + 2 :].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))

    def walk(one: int) -> Iterator[int]:
        yield one
        for child in children.get(one, []):
            yield from walk(child)

    return list(walk(pid))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, ended threads included, to the nanosecond: its clock as ``clock_gettime(2)``
    has it for any process (``clock_getcpuclockid(3)`` makes the number so).
    """
    return time.clock_gettime((~pid << 3) | 2)


def waited_for_seconds(pid: int) -> float:
    """Processor time of the children of a process that it has waited for, and of theirs."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


class Memory:
    """Resident memory of a process in bytes: all of it, what it shares with nobody, and its share: of what it shares
    with others a part each, so that shares add up."""

    def __init__(self, *, rss: int, own: int, share: int) -> None:
        self.rss = rss
        self.own = own
        self.share = share


def memory_of(pid: int) -> Memory:
    """From the kernel's roll-up, which is exact (``statm`` may be off by some pages per thread)."""
    values: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        key, _, rest = line.partition(":")
        values[key] = int(rest.split()[0]) * 1024
    return Memory(rss=values["Rss"], own=values["Private_Clean"] + values["Private_Dirty"], share=values["Pss"])
