"""Connections of holders that were handed to a guest. A duplicate of each stays here, so that it can be cut.

Nothing that crosses such a connection passes through the supervisor. Because of the duplicate it stays open until
somebody *shuts it down*: the holder by hanging up, the guest when it has said its last word, or this, when the guest's
program ends or the rights to the connection do.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from dataclasses import replace
from typing import Final

from sublet.errors import CapacityExceeded, Disconnected
from sublet.supervisor.loop import Loop
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.codec import dumps
from sublet.wire.guests import Visit

__all__ = ["VISITS_MAX", "Visits"]

VISITS_MAX: Final = 64
"""Connections that one guest may have at once; each takes a descriptor here."""
HANG_UP: Final = select.EPOLLRDHUP


class Visits:
    """Those of one guest."""

    def __init__(self, loop: Loop, inbox: int) -> None:
        """``inbox``: where the guest takes them from."""
        self._loop = loop
        self._inbox = inbox
        self._kept: dict[int, tuple[socket.socket, Visit, int]] = {}
        """With the generation of its tenant's rights under which each was let in."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tenants(self) -> list[TenantId]:
        """By whose right each of them is here."""
        return [visit.tenant for _, visit, _ in self._kept.values()]

    def hand(self, visit: Visit, sock: socket.socket) -> None:
        """Give the guest a descriptor of this connection. Raises where it does not take any."""
        if len(self._kept) >= VISITS_MAX:
            raise CapacityExceeded(
                f"{VISITS_MAX} connections to this guest are open, and that is the most", do="Close one of them first."
            )
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", sock.fileno()))]
        with socket.socket(fileno=self._inbox) as inbox:
            try:
                inbox.sendmsg([dumps(visit)], beside, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                raise CapacityExceeded("the guest does not take connections at the moment", do="Try again.") from None
            except OSError:
                raise Disconnected("the guest takes no connections any more", sent=False) from None
            finally:
                inbox.detach()

    def keep(self, visit: Visit, sock: socket.socket, generation: int = 0) -> None:
        """Once it is the guest's: from here on the socket belongs to this."""
        self._kept[sock.fileno()] = (sock, visit, generation)
        self._loop.watch(sock.fileno(), HANG_UP, lambda _: self._drop(sock))

    def now_under(self, lease: LeaseId, epoch: Epoch) -> None:
        """Their guest lives under another lease of the same tenant, and they stay."""
        for fd, (sock, visit, generation) in tuple(self._kept.items()):
            self._kept[fd] = (sock, replace(visit, lease=lease, epoch=epoch), generation)

    def cut(self, tenant: TenantId | None = None, lease: LeaseId | None = None, generation: int = 0) -> None:
        """Those that came by the right of this tenant or lease; all, without. ``generation``: only those before it."""
        for sock, visit, of in tuple(self._kept.values()):
            older = not generation or of < generation
            if tenant in (None, visit.tenant) and lease in (None, visit.lease) and older:
                self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        del self._kept[sock.fileno()]
        self._loop.forget(sock.fileno())
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
