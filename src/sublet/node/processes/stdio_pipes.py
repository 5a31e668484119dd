"""Makes both ends of a guest's stdin, stdout and stderr before the fork.

Ours never block and close at an exec. Of a terminal we also keep the guest's half: its master would otherwise report a
hang-up whenever no process has the terminal open for a moment, and the last output could be read only by luck; once
ours is the only one left and is closed, reading the master to its error gives everything.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from dataclasses import field
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.wire.guests import STDERR, STDOUT

_WINDOW: Final = struct.Struct("HHHH")
_FIRST_FREE: Final = 3


@dataclass(frozen=True, slots=True)
class ChildEnds:
    """What becomes 0, 1 and 2 of the guest. They may be one descriptor, and are, of a terminal."""

    stdin: int
    stdout: int
    stderr: int
    is_terminal: bool = False

    @property
    def distinct(self) -> frozenset[int]:
        return frozenset((self.stdin, self.stdout, self.stderr))


@dataclass(slots=True)
class StdioPipes:
    """Both halves."""

    child: ChildEnds
    stdin: int
    """Where what the guest is to read is written; -1 for none."""
    outputs: dict[int, int]
    """Descriptor → stream."""
    open: list[int] = field(default_factory=list)
    """All that are still to be closed."""
    inbox: int = -1
    """Where connections are sent to a guest that serves; -1 for none."""

    @property
    def is_terminal(self) -> bool:
        return self.child.is_terminal

    def close_these(self, *descriptors: int) -> None:
        """Close these, if they are still open."""
        for fd in descriptors:
            if fd in self.open:
                self.open.remove(fd)
                os.close(fd)

    def give_to(self, uid: int, gid: int) -> None:
        """Let another user open them anew (``/dev/stderr``, ``/dev/tty``); of what it inherits it can only use them."""
        for fd in self.child.distinct:
            if self.is_terminal or not _is_device(fd):  # all users share the null device
                os.fchown(fd, uid, gid)

    def resize(self, rows: int, cols: int) -> None:
        """Give a terminal this size; its foreground processes get SIGWINCH if it is another."""
        if self.is_terminal and self.stdin in self.open:
            fcntl.ioctl(self.stdin, termios.TIOCSWINSZ, _WINDOW.pack(rows, cols, 0, 0))

    def end_of_file(self) -> bytes:
        """What a person types to end the input of a terminal; nothing where a program reads it raw."""
        _, _, _, local, _, _, special = termios.tcgetattr(self.stdin)
        sign = special[termios.VEOF]
        return sign if local & termios.ICANON and isinstance(sign, bytes) and sign != b"\0" else b""


def open_pipes(*, stdin: bool) -> StdioPipes:
    """Three pipes; or two, with nothing to read."""
    made: set[int] = set()
    try:
        if stdin:
            child_in, parent_in = _pipe(made)
            os.set_blocking(parent_in, False)
        else:
            child_in, parent_in = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1
            made.add(child_in)
        out, child_out = _pipe(made)
        err, child_err = _pipe(made)
        os.set_blocking(out, False)
        os.set_blocking(err, False)
    except OSError:
        _close_all(made)
        raise
    return StdioPipes(ChildEnds(child_in, child_out, child_err), parent_in, {out: STDOUT, err: STDERR}, list(made))


def open_serving() -> StdioPipes:
    """Two pipes, and in place of stdin a socket from which the guest takes the connections of holders: descriptor 0
    reaches every guest, whichever way it is started."""
    made: set[int] = set()
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        inbox, child_in = ours.detach(), theirs.detach()
        made |= {inbox, child_in}
        out, child_out = _pipe(made)
        err, child_err = _pipe(made)
        os.set_blocking(out, False)
        os.set_blocking(err, False)
    except OSError:
        _close_all(made)
        raise
    return StdioPipes(ChildEnds(child_in, child_out, child_err), -1, {out: STDOUT, err: STDERR}, list(made), inbox)


def open_terminal(rows: int, cols: int) -> StdioPipes:
    """A terminal of its own. Its master is there twice, since it is written to and read from at different times."""
    made: set[int] = set()
    try:
        master, slave = os.openpty()
        made |= {master, slave}
        writing = os.dup(master)
        made.add(writing)
        os.set_blocking(master, False)
        ends = StdioPipes(ChildEnds(slave, slave, slave, is_terminal=True), writing, {master: STDOUT}, list(made))
        ends.resize(rows, cols)
    except OSError:
        _close_all(made)
        raise
    return ends


def child_setup(ends: ChildEnds) -> None:
    """In the child, after the fork: a session of its own, its terminal if it has one, and descriptors 0 to 2.

    Only system calls, so that it holds for a child of any process. The child's other descriptors close at its exec.
    """
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()
    # The originals may be 0, 1 or 2 themselves, where the supervisor was started without: out of the way first.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for fd in (ends.stdin, ends.stdout, ends.stderr)]
    if ends.is_terminal:
        fcntl.ioctl(moved[0], termios.TIOCSCTTY, 0)
    for number, fd in enumerate(moved):
        os.dup2(fd, number)
        os.close(fd)


def read_some(fd: int, most: int) -> bytes | None:
    """What is there: None if nothing is for now, no bytes at the end, which a terminal tells by an error."""
    try:
        return os.read(fd, most)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno == errno.EIO:
            return b""
        raise


def _pipe(made: set[int]) -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    made |= {reading, writing}
    return reading, writing


def _close_all(made: set[int]) -> None:
    for fd in made:
        os.close(fd)


def _is_device(fd: int) -> bool:
    return os.fstat(fd).st_rdev != 0
