"""Receives the connections that the supervisor passes to a guest.

The supervisor sends each as a descriptor through a socket that this guest was given in place of stdin; with it comes
what the connection is for and by whose right. What may be done on it is still asked at every call: of the guest's page.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from sublet.errors import SubletError, Unsupported
from sublet.wire.codec import loads
from sublet.wire.frames import close_all
from sublet.wire.guests import Visit

VISIT_BYTES_MAX: Final = 64 * 1024
FDS_MAX: Final = 4
_FD_BYTES: Final = struct.calcsize("i")


class Inbox:
    """Where they come from. There is one in a guest."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def from_stdin(cls) -> Inbox:
        """Take the socket from where stdin is, and put nothing to read in its place. Raises ``Unsupported``."""
        try:
            sock = socket.socket(fileno=os.dup(0))
        except OSError:
            raise Unsupported("this program was not started as a guest that serves") from None
        if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            sock.close()
            raise Unsupported("this program was not started as a guest that serves")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return cls(sock)

    def take(self) -> tuple[Visit, socket.socket] | None:
        """Wait for the next; None when there will be none. What is no visit is dropped."""
        while True:
            data, ancillary, _, _ = self._sock.recvmsg(
                VISIT_BYTES_MAX, socket.CMSG_SPACE(FDS_MAX * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                return None
            fds = _fds_in(ancillary)
            try:
                visit = loads(Visit, data)
            except SubletError:
                close_all(fds)
                continue
            if len(fds) == 1:
                return visit, socket.socket(fileno=fds[0])
            close_all(fds)

    def close(self) -> None:
        """Take no more."""
        self._sock.close()


def _fds_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) - len(data) % _FD_BYTES
            found += struct.unpack(f"{whole // _FD_BYTES}i", data[:whole])
    return found
