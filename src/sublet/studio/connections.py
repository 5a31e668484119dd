"""The HTTP connections of a studio: those that ask nothing have little time, and make room for others.

uvicorn keeps a connection without a request for ever. So any user of the machine could open as many as this process may
have descriptors, and no other caller was answered.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import socket
from typing import Any, Final, cast

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sublet.wire.peer_limits import PeerLimits, PeerRefused
from sublet.wire.sockets import peer_of

HEAD_S: Final = 10.0
"""The head of a request has arrived by then, from when its connection was opened or its first byte came."""
CONNECTIONS_MAX: Final = 4096
"""Unless the settings have another number."""
FILES_MAX: Final = 1 << 18
"""As many open files as this user may have, and no more than these: a request that waits needs three to the office,
and a person's database some."""
USER_SHARE: Final = 4
"""Over a unix socket each user of the machine has a part of the connections, and so have root and the studio's own."""
NO_USER: Final = -1
"""The peer of all TCP connections, who has all of them."""
_log = logging.getLogger("sublet.studio")


def bounded_protocol(listening: socket.socket, most: int | None = None) -> type[asyncio.Protocol]:
    """For uvicorn's ``Config(http=…)``. ``most``: so many connections at once (default: ``CONNECTIONS_MAX``)."""
    limits = connection_limits(listening, CONNECTIONS_MAX if most is None else most)
    return cast("type[asyncio.Protocol]", functools.partial(BoundedProtocol, limits=limits))


def connection_limits(listening: socket.socket, wanted: int) -> PeerLimits[BoundedProtocol]:
    """Raises the limit of open files as far as this user may. Where that is too few, connections have three quarters of
    it, and the log says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES_MAX if hard == resource.RLIM_INFINITY else min(FILES_MAX, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        soft = files
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft * 3 // 4)
    if most < wanted:
        _log.warning(
            "%d connections are the most, not %d: this user may have %d open files in one process. Raise that limit "
            "(`ulimit -Hn %d`, or LimitNOFILE= of a service) and start again.",
            *(most, wanted, soft, 2 * wanted),
        )
    if listening.family != socket.AF_UNIX:
        return PeerLimits(most=most, per_user=most, reserved=0, owners=frozenset((NO_USER,)))
    owners = frozenset((0, os.geteuid()))
    return PeerLimits(most=most, per_user=most // USER_SHARE, reserved=most // USER_SHARE, owners=owners)


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a time limit for the head of a request, and a bounded number of connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: PeerLimits[BoundedProtocol],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        admitted = self._limits.admit(self, _user_of(transport))
        if isinstance(admitted, PeerRefused):
            transport.write(_full(admitted.message))
            transport.close()
            return
        if admitted.closed is not None:
            admitted.closed.transport.abort()
        self._time_the_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._limits.handshake_done(self)
        self._time_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.disconnected(self)
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _time_the_head(self) -> None:
        """While one is awaited. Between two requests uvicorn's own time limit holds until the first byte."""
        is_awaited = self.conn.their_state is h11.IDLE
        if is_awaited and self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)
        elif not is_awaited and self._late is not None:
            self._late.cancel()
            self._late = None


def _full(message: str) -> bytes:
    """The answer to a connection that is refused."""
    body = f"Too many connections: {message}. Try again in some seconds.\n".encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-type: text/plain; charset=utf-8\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


def _user_of(transport: asyncio.Transport) -> int:
    sock = transport.get_extra_info("socket")
    return peer_of(sock).uid if sock.family == socket.AF_UNIX else NO_USER
