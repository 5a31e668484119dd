"""Forwards data connections of tenants' guests: bytes unchanged, descriptors only of sealed shared memory.

Over a unix socket a program can hand on whatever it has open: a device of its lease, a folder of its blocks. The
receiver has it for as long as it likes, also past the end of the lease, and the kernel cannot take it back. So a
tenant's guest is not given the holder's socket. Each side has a connection that ends here, and what comes from the one
is sent to the other. Frames carry descriptors for one purpose: large arguments and results, and the pages that both
sides look at, which are files in memory (memfd) that can neither shrink nor grow. Nothing else passes, either way.

A descriptor belongs to the frame whose header announces it and must not arrive before that frame. So headers are
looked at, and nothing else of a frame is.

Nothing piles up here: a side is read only while the other takes a whole piece (``_takes``), which the kernel then
accepts as one buffer. A side that does not read stops only the side that writes to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import struct
import termios
from collections.abc import Callable
from typing import Final

from sublet.background import is_shortage
from sublet.errors import InvalidRequest, SubletError
from sublet.node.loop import READ, WRITE, Loop, NotRead, Timer
from sublet.wire.frames import FDS_MAX, HEADER, HEADER_BYTES, close_all, protocol_error

PIECE: Final = 32 * 1024
"""Bytes read at a time. The kernel puts up to 35 KB into one buffer, and takes that as a whole or not at all."""
PIECES_AT_ONCE: Final = 2
"""Between two looks at all other connections."""
LAST_WORDS_S: Final = 2.0
"""How long the holder may take to read what a guest had said when it ended."""
_WHOLE_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEGMENT: Final = "/memfd:sublet-segment "
"""The memory of a lease, which ends with the lease (``segment``)."""
_FD: Final = struct.Struct("i")
_ANCILLARY: Final = socket.CMSG_SPACE(FDS_MAX * _FD.size)
_RECEIVING: Final = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_SENDING: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_GONE: Final = int(select.EPOLLHUP | select.EPOLLERR)
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a disk",
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a pipe",
}


def why_refused(fd: int) -> str:
    """What this descriptor is, if it may not pass; empty if it may."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return _KINDS.get(stat.S_IFMT(os.fstat(fd).st_mode), "a file")
    if seals & _WHOLE_SIZE != _WHOLE_SIZE:
        return "a file in memory that can still change its size"
    return "the memory of a lease" if os.readlink(f"/proc/self/fd/{fd}").startswith(_SEGMENT) else ""


class FrameStarts:
    """Where frames begin in what comes from one side. Pure."""

    def __init__(self) -> None:
        self._left = 0
        """Bytes of a frame that are still to come."""
        self._begun = b""
        """The first bytes of a header."""

    @property
    def is_in_header(self) -> bool:
        """Whether what came last ends in the middle of a header."""
        return bool(self._begun)

    def pieces(self, data: bytes, fds: list[int]) -> list[tuple[memoryview, list[int]]]:
        """The bytes in pieces, so that each frame with descriptors begins one, and goes with them. What is taken from
        ``fds`` is in the answer. Raises ``InvalidRequest`` where a frame announces more than came."""
        whole = memoryview(self._begun + data)
        made: list[tuple[memoryview, list[int]]] = []
        begin, at, beside = 0, 0, list[int]()
        try:
            while True:
                step = min(self._left, len(whole) - at)
                self._left, at = self._left - step, at + step
                if self._left or len(whole) - at < HEADER_BYTES:
                    break
                _, _, count, _, self._left = HEADER.unpack_from(whole, at)
                if count:
                    if count > len(fds):
                        raise protocol_error(f"a frame announced {count} descriptors and {len(fds)} came")
                    if at > begin:
                        made.append((whole[begin:at], beside))
                    begin, beside = at, fds[:count]
                    del fds[:count]
                at += HEADER_BYTES
        except BaseException:
            fds += beside + [fd for _, with_it in made for fd in with_it]
            raise
        self._begun = bytes(whole[at:])
        if at > begin:
            made.append((whole[begin:at], beside))
        return made


class _Side:
    """One of the two connections, and what is known of what comes from it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fd = sock.fileno()
        self.frames = FrameStarts()
        self.watched = -1
        """The events that are waited for here; -1: none, not even that it hangs up."""
        self.is_held = False
        """What comes from here is not read until the other side takes it."""
        self.is_deaf = False
        """It hung up; what it had said before may still be here."""
        self._room = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def arrived(self) -> int:
        """Bytes that came from here and were not read yet."""
        return int(_FD.unpack(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(_FD.size)))[0])

    def takes(self) -> bool:
        """Whether a piece can be sent here now: at most a quarter of the buffer is full, as epoll reports it."""
        return bool(4 * _FD.unpack(fcntl.ioctl(self.fd, termios.TIOCOUTQ, bytes(_FD.size)))[0] <= self._room)

    def receive(self, fds: list[int]) -> bytes:
        """Some bytes, none at the end. Descriptors that came with them are the caller's in any case."""
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(PIECE, _ANCILLARY, _RECEIVING)
        except BlockingIOError:
            raise
        except OSError as error:
            if is_shortage(error):
                raise NotRead(error) from error
            raise
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += [fd for (fd,) in _FD.iter_unpack(payload[: len(payload) // _FD.size * _FD.size])]
        if flags & socket.MSG_CTRUNC:
            raise protocol_error("descriptors were lost: too many came at once, or too many are open here")
        for why in filter(None, map(why_refused, fds)):
            raise InvalidRequest(
                f"a connection to this command was closed: the descriptor of {why} was sent over it",
                do="Send what is in it. Only shared memory passes between a tenant's guest and its holder.",
            )
        return data

    def send(self, data: memoryview, fds: list[int]) -> None:
        """All of it. Raises where that cannot be."""
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else ()
        try:
            if self.sock.sendmsg([data], beside, _SENDING) != len(data):
                raise protocol_error("a frame was only partly sent")
        finally:
            close_all(fds)


class Forwarding:
    """One connection between a holder and a guest, until either hangs up, breaks a rule, or it is closed."""

    def __init__(
        self,
        loop: Loop,
        holder: socket.socket,
        guest: socket.socket,
        on_over: Callable[[], None],
        refused: Callable[[SubletError], None],
    ) -> None:
        """Both sockets belong to this from here on. ``refused`` is told why it was closed, if a rule was broken."""
        self._loop = loop.guarded(lambda _: self.close())
        self._holder, self._guest = _Side(holder), _Side(guest)
        self._on_over = on_over
        self._refused = refused
        self._is_ending = False
        self._last_bytes = 0
        """What the guest had said when it ended, and was not sent on yet."""
        self._timer: Timer | None = None
        self.is_open = True
        self._wait()

    def end(self) -> None:
        """The guest has ended: what it has written is still sent, and then this is closed. What a child that has
        inherited its end writes after that is not sent: endless output would occupy this thread and delay all its
        deadlines."""
        if self.is_open and not self._is_ending:
            self._is_ending = True
            self._last_bytes = self._guest.arrived()
            self._timer = self._loop.after(LAST_WORDS_S, self.close)
            with contextlib.suppress(NotRead):
                self._forward(self._guest, self._holder)

    def cut(self) -> None:
        """Close it, after what the guest has said and the holder takes at once."""
        self.end()
        self.close()

    def close(self) -> None:
        """Hang up on both sides. Harmless twice."""
        if not self.is_open:
            return
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        for side in (self._holder, self._guest):
            self._loop.forget(side.fd)
            with contextlib.suppress(OSError):
                side.sock.shutdown(socket.SHUT_RDWR)
            side.sock.close()
        self._on_over()

    def _ready(self, side: _Side, other: _Side, events: int) -> None:
        if events & WRITE and other.is_held:
            other.is_held = False
            self._forward(other, side)
        if self.is_open and events & ~WRITE:
            if other.is_deaf:
                if events & _GONE:  # both hung up
                    self.close()
            elif not side.is_held:
                self._forward(side, other)
            elif events & _GONE:  # that is told again and again; what it had said is read in its turn
                self._loop.forget(side.fd)
                side.watched = -1

    def _forward(self, side: _Side, to: _Side) -> None:
        """Send on what came from here: one connection's share, or a guest's last words."""
        count, is_last = 0, self._is_ending and side is self._guest
        try:
            while self.is_open and not to.is_deaf and (is_last or count < PIECES_AT_ONCE):
                count += 1
                side.is_held = not to.takes()
                if side.is_held or not self._piece(side, to):
                    break
        finally:
            self._wait()

    def _piece(self, side: _Side, to: _Side) -> bool:
        """Whether there was one."""
        fds: list[int] = []
        is_last = self._is_ending and side is self._guest
        try:
            while True:
                if is_last and self._last_bytes <= 0:
                    self.close()  # all that it had said was sent
                    return False
                data = side.receive(fds)
                if is_last:
                    self._last_bytes -= len(data)
                if not data:
                    self.close()
                    return False
                for piece, beside in side.frames.pieces(data, fds):
                    self._send(to, piece, beside)
                if not fds:
                    return True
                if not side.frames.is_in_header:
                    raise protocol_error("descriptors came that no frame announced")
                # The header was cut in two by our own reading: the rest of it is here, or they came without a frame.
        except BlockingIOError:
            if fds:
                self._refuse(protocol_error("descriptors came without a frame"))
        except ConnectionError:
            self.close()
        except SubletError as error:
            self._refuse(error)
        finally:
            close_all(fds)
        return False

    def _send(self, to: _Side, piece: memoryview, fds: list[int]) -> None:
        try:
            if to.is_deaf:
                close_all(fds)
            else:
                to.send(piece, fds)
        except (BrokenPipeError, ConnectionResetError):
            to.is_deaf = True  # its last words are still sent to the other side
        except BlockingIOError:
            raise protocol_error("the system took no part of a frame") from None

    def _refuse(self, error: SubletError) -> None:
        self._refused(error)
        self.close()

    def _wait(self) -> None:
        """For what there is to wait for, on both."""
        if not self.is_open:
            return
        for side, other in ((self._holder, self._guest), (self._guest, self._holder)):
            wanted = (0 if side.is_held or other.is_deaf else READ) | (WRITE if other.is_held else 0)
            if wanted == side.watched or (side.watched < 0 and not wanted & READ and side.is_held):
                continue
            if side.watched < 0:
                self._watch(side, other, wanted)
            else:
                self._loop.change(side.fd, wanted)
            side.watched = wanted

    def _watch(self, side: _Side, other: _Side, wanted: int) -> None:
        self._loop.watch(side.fd, wanted, lambda events: self._ready(side, other, events))
