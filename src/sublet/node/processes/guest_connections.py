"""Holders' connections that were passed to a guest; a duplicate of each is kept, to shut it down.

Of the owner's own guests nothing that crosses such a connection passes through the supervisor. Because of the duplicate
it stays open until it is *shut down*: by the holder, which hangs up, by the guest when it has said its last word, or
here, when the guest's program ends or the rights to the connection do. A tenant's guest is given an end of another
connection, between which and the holder's the bytes are forwarded (``forwarding``).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from sublet.errors import CapacityExceeded, Disconnected, SubletError
from sublet.node.loop import Loop
from sublet.node.processes.forwarding import Forwarding
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.codec import dumps
from sublet.wire.guests import Front, Visit

VISITS_MAX: Final = 64
"""Connections that one guest may have at once; each takes a descriptor here, or two."""
HANG_UP: Final = select.EPOLLRDHUP


class GuestConnections:
    """Those of one guest."""

    def __init__(self, loop: Loop, inbox: int, refused: Callable[[SubletError], None] | None = None) -> None:
        """``inbox``: where the guest takes them from. ``refused``: told why a connection of a tenant's guest was closed
        that broke a rule; None: the guest is the owner's, and is given the holders' own connections."""
        self._loop = loop
        self._inbox = inbox
        self._refused = refused
        self._kept: dict[int, tuple[_Given | Forwarding, Visit, Front]] = {}
        """With the rights by which each was let in."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tenants(self) -> list[TenantId]:
        """By whose right each of them is here."""
        return [visit.tenant for _, visit, _ in self._kept.values()]

    def connect(self, visit: Visit, sock: socket.socket) -> socket.socket | None:
        """Give the guest this connection of a holder. Where it is given another one in its place, our end of that."""
        if self._refused is None:
            self.pass_socket(visit, sock)
            return None
        ours, theirs = socket.socketpair()
        try:
            self.pass_socket(visit, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def pass_socket(self, visit: Visit, sock: socket.socket) -> None:
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

    def keep(self, visit: Visit, sock: socket.socket, front: Front, ours: socket.socket | None = None) -> None:
        """Once it is the guest's: from here on the socket belongs to this, and so does what ``connect`` returned."""
        fd = sock.fileno()

        def over() -> None:
            del self._kept[fd]

        if ours is None or self._refused is None:
            self._kept[fd] = _Given(self._loop, sock, over), visit, front
        else:
            self._kept[fd] = Forwarding(self._loop, sock, ours, over, self._refused), visit, front

    def now_under(self, lease: LeaseId, epoch: Epoch) -> None:
        """Their guest lives under another lease of the same tenant, and they stay."""
        for fd, (kept, visit, front) in tuple(self._kept.items()):
            self._kept[fd] = (kept, replace(visit, lease=lease, epoch=epoch), front)

    def cut(self, tenant: TenantId | None = None, lease: LeaseId | None = None, generation: int = 0) -> None:
        """Those that came by the right of this tenant or lease; all, without. ``generation``: only those before it."""
        for kept, visit, front in tuple(self._kept.values()):
            if (tenant is None or front.is_by(tenant, generation)) and lease in (None, visit.lease):
                kept.cut()

    def end(self) -> None:
        """The guest is over. What it has said still reaches the holders, and then all are closed."""
        for kept, _, _ in tuple(self._kept.values()):
            kept.end()


class _Given:
    """A holder's own connection, which the guest has, and of which a duplicate is here."""

    def __init__(self, loop: Loop, sock: socket.socket, on_over: Callable[[], None]) -> None:
        self._loop = loop
        self._sock = sock
        self._on_over = on_over
        loop.watch(sock.fileno(), HANG_UP, lambda _: self.cut())

    def cut(self) -> None:
        """Shut it down, for all who have it."""
        self._loop.forget(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._on_over()

    end = cut
