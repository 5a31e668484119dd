"""Runs work in a fork of this process, sees the system calls that it makes, and spoils one of them.

What is spoiled is what a machine spoils: the process is killed before a call, or behind it; the call fails; a write
takes only half of its bytes, and then all goes on, or the process is killed (a torn write), or there is no space for
the rest. A short write is a real one: the kernel is asked for less, so what it says that it wrote it has written.

This process has everything loaded, so a run costs a fork. A filter in the fork (seccomp) stops it at the calls of
interest and at no other; tracing belongs to the one thread of this process that forked, so it must be the only one.
Threads and children of the work are followed, and a filter and a tracer are all that tells its world from a plain one.
Linux on x86-64: elsewhere system calls have other numbers and registers (:func:`works` says what is missing).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import platform
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["ERRORS", "NUMBERS", "SHORTENED", "Fault", "Run", "Seen", "run", "works"]

NUMBERS: Final = {
    "write": 1,
    "open": 2,
    "pwrite64": 18,
    "writev": 20,
    "msync": 26,
    "getpid": 39,
    "sendfile": 40,
    "fsync": 74,
    "fdatasync": 75,
    "truncate": 76,
    "ftruncate": 77,
    "rename": 82,
    "mkdir": 83,
    "rmdir": 84,
    "creat": 85,
    "link": 86,
    "unlink": 87,
    "chmod": 90,
    "fchmod": 91,
    "fchown": 93,
    "openat": 257,
    "mkdirat": 258,
    "unlinkat": 263,
    "renameat": 264,
    "linkat": 265,
    "fchmodat": 268,
    "sync_file_range": 277,
    "fallocate": 285,
    "pwritev": 296,
    "renameat2": 316,
    "copy_file_range": 326,
    "pwritev2": 328,
}
"""The calls that can be asked for, as x86-64 numbers them."""
SHORTENED: Final = {"write": "rdx", "pwrite64": "rdx", "sendfile": "r10", "copy_file_range": "r8"}
"""Calls that may take less than they were given, and which register says how much."""
VECTORS: Final = {"writev": "write", "pwritev": "pwrite64", "pwritev2": "pwrite64"}
"""The same with several pieces; cut short, each becomes a call with half of its first piece."""
_NAMED: Final = {
    **dict.fromkeys(("open", "creat", "truncate", "rename", "mkdir", "rmdir", "link", "unlink", "chmod"), "rdi"),
    **dict.fromkeys(("openat", "mkdirat", "unlinkat", "renameat", "renameat2", "linkat", "fchmodat"), "rsi"),
}
_PATH_MAX, _HERE = 4096, -100
ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}
KINDS: Final = ("kill", "killed after", "short", "torn", "full", *ERRORS)

_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS, _GETEVENTMSG = 0, 7, 12, 13, 24, 0x4200, 0x4201
_OPTIONS: Final = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000  # good, fork, vfork, clone, exec, seccomp, exitkill
_BIRTHS: Final = (1, 2, 3)
_SECCOMP_STOP: Final = 7
_EXIT_STOP: Final = signal.SIGTRAP | 0x80
_ANY_THREAD: Final = 0x40000000  # __WALL
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_ARCHITECTURE: Final = 0xC000003E
_TRACE, _ALLOW = 0x7FF00000, 0x7FFF0000


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of the n-th call of this name."""

    call: str
    n: int
    kind: str
    """One of ``KINDS``."""
    first_thread: bool = False
    """Whether only calls of the thread that the work began in count."""
    grain: int = 1
    """A torn write ends at a multiple of so many bytes; one without any is not made."""
    flags: int | None = None
    """Of ``openat``: only calls with these flags count, and no other stops the work, which is most of what a run costs
    on a busy machine. Then nothing else can be looked at."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A call of interest, as it was about to be made."""

    call: str
    path: str
    """Of the file: as it is named, or behind its descriptor."""
    size: int
    """Bytes that may be fewer; 0 if there is no fewer."""
    first_thread: bool
    flags: int = -1
    """Of ``openat``."""


@dataclass(slots=True)
class Run:
    """What came of the work."""

    status: int = 0
    """Its exit status, negative for a signal."""
    struck: int | None = None
    """At which call (from 0, of all that were of interest) the fault was done; None if it did not come to that."""
    answered: int | None = None
    """What the spoiled call answered: a number of bytes, or an error below 0. None if nobody lived to hear it."""
    seen: list[Seen] = field(default_factory=list)
    """All calls of interest, if they were to be listed."""

    @classmethod
    def of(cls, said: dict[str, Any]) -> Run:
        """From what ``dataclasses.asdict`` makes of one, through JSON."""
        return cls(**said | {"seen": [Seen(**one) for one in said["seen"]]})


class _Registers(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_ulonglong)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
            *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
        )
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def run(work: Callable[[], int], calls: Iterable[str], fault: Fault | None = None, *, listed: bool = False) -> Run:
    """Fork, do the work there, and be told of these calls. The work's answer is the fork's exit status."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would leave this process's other threads behind"
    assert fault is None or fault.kind in KINDS
    names, flags = sorted(calls), fault.flags if fault else None
    assert flags is None or names == ["openat"]
    code = _filter_of([NUMBERS[name] for name in names], flags)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _begin(work, code)
        finally:
            os._exit(status)
    return _Tracer(child, names, fault, listed).follow()


@functools.cache
def works() -> str:
    """Why nothing can be traced here; empty if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is written for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the caller may have threads; what is forked here has one
        child = os.fork()
    if child == 0:
        try:
            found = run(lambda: os.getpid() > 0 and 7, ["getpid"], listed=True)
            os.write(writer, f"{found.status} {len(found.seen)}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as said:
        answer = said.read()
    os.waitpid(child, 0)
    return "" if answer == b"7 1" else "the system does not let a process trace its child here"


# ---- in the fork


def _begin(work: Callable[[], int], code: bytes) -> int:
    _ptrace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)  # until whoever traces has said what to follow
    zero = ctypes.c_ulong(0)
    for option, first, second in (
        (_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero),
        (_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), ctypes.byref(_Filter(len(code) // 8, code))),
    ):
        if _libc().prctl(option, first, second, zero, zero):
            raise OSError(ctypes.get_errno(), "the filter of system calls was refused")
    return work()


def _filter_of(numbers: list[int], flags: int | None = None) -> bytes:
    """A program of the packet filter's language: the how-manieth of these it is, told to the tracer; else go on.
    ``flags``: what the third argument of the only one must be."""
    lines = [(0x20, 0, 0, 4), (0x15, 1, 0, _ARCHITECTURE), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    if flags is not None:
        lines += [(0x15, 0, 3, numbers[0]), (0x20, 0, 0, 32), (0x15, 0, 1, flags), (0x06, 0, 0, _TRACE)]
        numbers = []
    for at, number in enumerate(numbers):
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, _TRACE | at)]
    return b"".join(struct.pack("=HBBI", *line) for line in [*lines, (0x06, 0, 0, _ALLOW)])


# ---- in the one that traces


class _Tracer:
    def __init__(self, child: int, names: list[str], fault: Fault | None, listed: bool) -> None:
        self.child, self.names, self.fault, self.listed = child, names, fault, listed
        self.found = Run()
        self.calls = self.of_the_name = 0
        self.known = {child}
        """Threads that live, and"""
        self.begun = {child}
        """those of them that were told to go on at their beginning."""
        self.spoiled: dict[int, _Registers] = {}
        """Threads in the middle of a call that was changed, and the registers they came with."""
        self.no_space: int | None = None
        """A thread whose next call of that name finds the disk full."""

    def follow(self) -> Run:
        _, status = os.waitpid(self.child, _ANY_THREAD)
        assert os.WIFSTOPPED(status), f"the fork ended with {status} before it could be traced"
        _ptrace(_SETOPTIONS, self.child, _OPTIONS)
        _ptrace(_CONT, self.child)
        over = False
        while self.known or not over:
            try:
                thread, status = os.waitpid(-1, _ANY_THREAD)
            except ChildProcessError:
                break
            if not os.WIFSTOPPED(status):
                self.known.discard(thread)
                if thread == self.child:
                    self.found.status, over = os.waitstatus_to_exitcode(status), True
                    for left in self.known:  # what the work started and did not wait for
                        with contextlib.suppress(ProcessLookupError):
                            _kill(left)
                continue
            self._stopped(thread, status >> 8)
        return self.found

    def _stopped(self, thread: int, why: int) -> None:
        self.known.add(thread)
        sign, event = why & 0xFF, why >> 8
        if event == _SECCOMP_STOP:
            self._about_to_call(thread)
        elif sign == _EXIT_STOP:
            self._has_called(thread)
        elif event:
            if event in _BIRTHS and (born := _message(thread)):
                self.known.add(born)
            _ptrace(_CONT, thread)
        elif thread not in self.begun and sign == signal.SIGSTOP:
            self.begun.add(thread)
            _ptrace(_CONT, thread)
        else:
            _ptrace(_CONT, thread, sign)

    def _about_to_call(self, thread: int) -> None:
        name = self.names[_message(thread)] if len(self.names) > 1 else self.names[0]
        if self.listed:
            self.found.seen.append(self._look(thread, name))
        self.calls += 1
        fault = self.fault
        if fault is None or fault.call != name or (fault.first_thread and thread != self.child):
            _ptrace(_CONT, thread)
        elif self.no_space == thread:
            self.no_space = None
            self._fail(thread, errno.ENOSPC)
        else:
            self.of_the_name += 1
            if self.of_the_name == fault.n:
                self._strike(thread, fault)
            else:
                _ptrace(_CONT, thread)

    def _strike(self, thread: int, fault: Fault) -> None:
        self.found.struck, kind = self.calls - 1, fault.kind
        if kind == "kill":
            _kill(thread)
        elif kind in ERRORS:
            self.found.answered = -ERRORS[kind]
            self._fail(thread, ERRORS[kind])
        else:
            registers = _registers(thread)
            self.spoiled[thread] = registers
            if kind != "killed after" and not _cut_short(thread, registers, fault.grain if kind == "torn" else 1):
                _kill(thread)
            else:
                _ptrace(_SYSCALL, thread)

    def _has_called(self, thread: int) -> None:
        """Behind a call that was changed: the program's own registers again, but for the answer."""
        assert self.fault is not None
        registers, kind = self.spoiled.pop(thread), self.fault.kind
        self.found.answered = ctypes.c_longlong(_registers(thread).rax).value
        if kind in ("torn", "killed after"):
            _kill(thread)
            return
        registers.rax = self.found.answered
        _ptrace(_SETREGS, thread, ctypes.byref(registers))
        self.no_space = thread if kind == "full" else None
        _ptrace(_CONT, thread)

    def _fail(self, thread: int, number: int) -> None:
        """The call is not made, and answers with this error."""
        registers = _registers(thread)
        registers.orig_rax, registers.rax = -1, -number
        _ptrace(_SETREGS, thread, ctypes.byref(registers))
        _ptrace(_CONT, thread)

    def _look(self, thread: int, name: str) -> Seen:
        registers, size = _registers(thread), 0
        if register := _NAMED.get(name):
            path = os.fsdecode(_memory(thread, getattr(registers, register), _PATH_MAX).split(b"\0")[0])
            folder = ctypes.c_int(registers.rdi).value if register == "rsi" else _HERE
            if not path.startswith("/"):
                path = os.path.join(_file_behind(thread, folder), path)
        else:
            path = _file_behind(thread, registers.rdi)
        if name in SHORTENED:
            size = getattr(registers, SHORTENED[name])
        elif name in VECTORS:
            size = sum(length for _, length in _pieces(thread, registers))
        return Seen(name, path, size, thread == self.child, registers.rdx if name == "openat" else -1)


def _cut_short(thread: int, registers: _Registers, grain: int) -> int:
    """Ask for half of it, rounded down to the grain. How much that is; nothing is not asked for."""
    changed = _Registers.from_buffer_copy(registers)
    name = next(name for name, number in NUMBERS.items() if number == registers.orig_rax)
    register = SHORTENED[VECTORS.get(name, name)]
    size = getattr(registers, register)
    if name in VECTORS:
        address, size = _pieces(thread, registers)[0]
        changed.orig_rax, changed.rsi = NUMBERS[VECTORS[name]], address
    half: int = size // 2 // grain * grain
    setattr(changed, register, half)
    if half:
        _ptrace(_SETREGS, thread, ctypes.byref(changed))
    return half


def _pieces(thread: int, registers: _Registers) -> list[tuple[int, int]]:
    """Where each piece of a vector lies, and how long it is."""
    return list(struct.iter_unpack("=QQ", _memory(thread, registers.rsi, 16 * registers.rdx)))


def _file_behind(thread: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{thread}/" + ("cwd" if descriptor == _HERE else f"fd/{descriptor}"))
    except OSError:
        return ""


def _memory(thread: int, address: int, size: int) -> bytes:
    """So much of it as there is."""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(size)


def _registers(thread: int) -> _Registers:
    registers = _Registers()
    _ptrace(_GETREGS, thread, ctypes.byref(registers))
    return registers


def _message(thread: int) -> int:
    """What came with an event: the number of a call, or of a thread that begins."""
    message = ctypes.c_ulong()
    _ptrace(_GETEVENTMSG, thread, ctypes.byref(message))
    return message.value


def _kill(thread: int) -> None:
    """The process that it belongs to. It is ours and not waited for, so nobody else has the number."""
    os.kill(thread, signal.SIGKILL)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


_ptrace_raw = _libc().ptrace
_ptrace_raw.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_ptrace_raw.restype = ctypes.c_long


def _ptrace(request: int, thread: int, data: Any = None) -> None:
    """Who was killed meanwhile is not there to be asked, and will be waited for."""
    if _ptrace_raw(request, thread, None, data) == -1 and (number := ctypes.get_errno()) != errno.ESRCH:
        raise OSError(number, f"ptrace({request:#x}): {os.strerror(number)}")
