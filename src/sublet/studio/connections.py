"""The HTTP connections of a studio: those that ask nothing have little time, and make room for others.

uvicorn keeps a connection without a request for ever. So any user of the machine could open as many as this process may
have descriptors, and no other caller was answered.
"""

from __future__ import annotations

import asyncio
import functools
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
FILES_WANTED: Final = 8192
USER_SHARE: Final = 4
"""Over a unix socket each user of the machine has a part of the connections, and so have root and the studio's own."""
NO_USER: Final = -1
"""The peer of all TCP connections."""
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def bounded_protocol(listening: socket.socket) -> type[asyncio.Protocol]:
    """For uvicorn's ``Config(http=…)``."""
    made = functools.partial(BoundedProtocol, limits=connection_limits(listening))
    return cast("type[asyncio.Protocol]", made)


def connection_limits(listening: socket.socket) -> PeerLimits[BoundedProtocol]:
    """Fewer where descriptors are few: the database and connections to the office need some as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_WANTED:
        soft = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, soft * 3 // 4)
    if listening.family != socket.AF_UNIX:
        return PeerLimits(most=most, per_user=most, reserved=0, owners=frozenset())
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
            transport.write(_FULL)
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


def _user_of(transport: asyncio.Transport) -> int:
    sock = transport.get_extra_info("socket")
    return peer_of(sock).uid if sock.family == socket.AF_UNIX else NO_USER
