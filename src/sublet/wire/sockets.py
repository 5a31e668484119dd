"""A link on a socket: moves bytes and descriptors to and from the kernel.

Descriptors go out with the first byte of their frame, once, however the kernel cuts what it takes; and they come in
close-on-exec. No call here waits, whether the socket is blocking or not. Nothing is raised for what a peer or the
network does: it comes as ``Over`` among the happenings.

With a time-out set on the socket Python itself would wait; set none.

An interrupt (Ctrl-C) between the kernel and the link leaves unknown what went out or came in. The link is over
then: the same bytes sent twice, or an answer lost, would be worse.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Final, NamedTuple

from sublet.errors import Disconnected
from sublet.wire.frames import FDS_MAX, close_all, protocol_error
from sublet.wire.link import Link
from sublet.wire.link_events import Happening

RECEIVE_MAX: Final = 256 * 1024
"""Bytes taken from a socket at a time, so that one busy connection does not keep the others waiting."""
RECEIVE_USUAL: Final = 32 * 1024
"""The same while messages are small. Python makes room for all of it before each call; where malloc has to ask the
kernel for that, it costs three calls more and a new page each time, several times what the message itself does."""
SENDS_MAX: Final = 16
"""Calls to the kernel for one ``send_some``, for the same reason."""

INTERRUPTED: Final = "an interrupt (Ctrl-C) cut a message in two"

_SENDING: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVING: Final = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
"""Joined once: as flags they are joined in Python."""
_FD_BYTES: Final = struct.calcsize("i")
_ANCILLARY: Final = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)
_CREDENTIALS: Final = struct.Struct("iII")
_GONE: Final = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNABORTED, errno.ETIMEDOUT))


class PeerProcess(NamedTuple):
    """The process on the other side of a unix socket, as the kernel noted when it connected."""

    pid: int
    """By now it may be another process's; and 0 where the peer is in a pid namespace that we do not see."""
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> PeerProcess:
    """The process that connected. Only for unix sockets."""
    return PeerProcess(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def send_some(sock: socket.socket, link: Link) -> bool:
    """Send what the socket takes now; True if nothing is left. Where it is not, call again when it can be written.

    When the other side is gone what is left is dropped: that it is gone is told by reading, after its last words.
    Sending may end the link as well (see ``Link.over``).
    """
    try:
        for _ in range(SENDS_MAX):
            pieces, fds = link.next_output()
            if not pieces:
                return True
            try:
                count = _send(sock, pieces, fds)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    link.cut(Disconnected("too many descriptors are under way to programs that do not take them"))
                elif error.errno not in _GONE:
                    raise
                link.drop_output()
                return True
            link.sent(count)
    except KeyboardInterrupt:
        link.cut(Disconnected(INTERRUPTED))
        link.drop_output()
        raise
    return not link.has_output


def receive_some(sock: socket.socket, link: Link, max_bytes: int = RECEIVE_MAX) -> list[Happening]:
    """Take what is there, at most so much; what happened. An empty list also says that nothing was there."""
    try:
        return _receive_some(sock, link, max_bytes)
    except KeyboardInterrupt:
        link.cut(Disconnected(INTERRUPTED))
        raise


def _receive_some(sock: socket.socket, link: Link, max_bytes: int) -> list[Happening]:
    room = max_bytes if link.much_comes else min(RECEIVE_USUAL, max_bytes)
    try:
        data, ancillary, flags, _ = sock.recvmsg(room, _ANCILLARY, _RECEIVING)
    except (BlockingIOError, InterruptedError):
        link.much_comes = False
        return link.news()
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return link.receive_end()
    link.much_comes = len(data) >= RECEIVE_USUAL
    fds = _fds_in(ancillary)
    if flags & socket.MSG_CTRUNC:
        close_all(fds)
        return link.cut(protocol_error("descriptors were lost: too many came at once, or too many are open here"))
    if not data:
        close_all(fds)
        return link.receive_end()
    return link.receive(data, fds)


def _send(sock: socket.socket, pieces: list[memoryview], fds: tuple[int, ...]) -> int:
    if not fds:
        return sock.sendmsg(pieces, (), _SENDING)
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
    return sock.sendmsg(pieces, beside, _SENDING)


def _fds_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) - len(data) % _FD_BYTES
            fds += struct.unpack(f"{whole // _FD_BYTES}i", data[:whole])
    return fds
