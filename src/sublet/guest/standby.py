"""A guest in advance: forked, twice, from a warm interpreter before one is asked for.

Two forks of an interpreter that has numpy or torch loaded are most of the time a guest takes to begin, and nothing in
them depends on what the guest is to be. So a zygote that has nothing to do makes one copy of itself that waits: at most
one, and never while it is asked for guests. It has no lease, no group and no user of its own, it stays in the zygote's
session (so it is counted as the zygote's, and scans do not take it for a guest), and computes nothing. When a guest
is wanted the zygote hands it the descriptors of the call, the request among them, which it reads itself; and it becomes
that guest exactly as a fresh fork would.

It ends with its zygote: the only other end of its socket is there. What it costs is the memory that it does not share:
page tables and what the forks touched, 1.5 MB with numpy and 2.5 MB with torch loaded.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final, NoReturn

from sublet.wire.zygote import Forked

_WANTED: Final = b"!"
"""The message that its descriptors come with."""
FDS_MAX: Final = 64


class Standby:
    """The zygote's end of one that waits."""

    def __init__(self, sock: socket.socket, forked: Forked) -> None:
        self._sock = sock
        self._forked = forked

    def fileno(self) -> int:
        """For ``poll``: it hangs up if it ended."""
        return self._sock.fileno()

    def become(self, fds: tuple[int, ...]) -> Forked | None:
        """Let it be this guest; None where it cannot, and then it is not there any more, or was not asked."""
        try:
            socket.send_fds(self._sock, [_WANTED], fds, socket.MSG_DONTWAIT)
        except OSError:
            return None
        finally:
            self.close()
        return self._forked

    def close(self) -> None:
        """It is not wanted any more, or has what it needs: it ends, if it was not asked to be a guest."""
        self._sock.close()


def await_request(sock: socket.socket) -> tuple[int, ...]:
    """In the one that waits: the descriptors of what it is to be. Does not return if it is not wanted."""
    said, fds = b"", list[int]()
    with contextlib.suppress(OSError):
        said, fds, _, _ = socket.recv_fds(sock, len(_WANTED), FDS_MAX, socket.MSG_CMSG_CLOEXEC)
    if not said:
        _leave()
    sock.close()
    return tuple(fds)


def _leave() -> NoReturn:
    """Not as Python ends: nothing here is ours to put away."""
    os._exit(0)
