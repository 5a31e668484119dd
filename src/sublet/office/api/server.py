"""Serves the control API with uvicorn's HTTP protocol on our own socket, with limits per peer.

uvicorn's own ``Server`` is left out: it wakes ten times a second, takes the process's signals, and makes its unix
socket writable for all users. What is used is its protocol: HTTP/1.1 on httptools, keep-alive, pipelining, flow
control.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Final

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from sublet.background import accept_connections, end_process, start_task
from sublet.errors import Disconnected, InvalidRequest, SubletError
from sublet.office.api.app import App
from sublet.office.api.processes import PeerConnection, ProcessTable
from sublet.wire.http import ErrorBody, ErrorView
from sublet.wire.peer_limits import PeerLimits, PeerRefused
from sublet.wire.sockets import peer_of

CONNECTIONS_MAX: Final = 4096
"""Open connections of one office."""
USER_SHARE: Final = 4
"""One user of the machine, other than the owner and root, has a quarter of them at most."""
RESERVED_SHARE: Final = 4
"""A quarter is for the owner and root alone."""
HEAD_MAX_BYTES: Final = 32 * 1024
"""Request line and headers. The parser has no limit of its own."""
KEEP_ALIVE_S: Final = 120
"""An idle connection is closed after this long."""
HEAD_S: Final = 5.0
"""From the connection, or the first byte of a later request, to the end of its headers."""
BODY_S: Final = 30.0
"""From there to the end of its body, which has a megabyte at most."""
LOOKS: Final = 5
"""In how many parts these times pass. A part that the office slept through (it was stopped, or had no processor) counts
for nothing: the client may have slept as well, and could not tell a closed connection from an office that has ended."""
CLOSE_PATIENCE_S: Final = 2.0
"""How long requests in progress may take to end when the office closes."""
NO_USER: Final = -1


class HttpServer:
    """Serves one application on a listening socket."""

    def __init__(
        self,
        app: App,
        *,
        on_limit: Callable[[str], None],
        processes: ProcessTable | None = None,
        die: Callable[[str], object] = end_process,
        of_user: int | None = None,
        shared: bool = False,
    ) -> None:
        """``processes`` tells which process is at the other end of a connection; without it none is known. ``die`` ends
        the process with a line. ``of_user``: connections that each other user may have; None: a quarter of all.
        ``shared``: it serves the shared socket."""
        self._shared = shared
        self._connected = app.service.connected
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients send wrongly is told to clients
        config = Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        self._config = config
        self._state = ServerState()
        self._on_limit = on_limit
        self._limits: PeerLimits[_Protocol] = peer_limits(of_user)
        self._processes = processes
        self._die = die
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    @property
    def busy(self) -> int:
        """Requests in progress, event streams included."""
        return len(self._state.tasks)

    def bound_users(self, of_user: int | None) -> None:
        """So many connections for each other user from now on (None: a quarter of all); those that are open stay."""
        self._limits.bound_users(self._limits.most // USER_SHARE if of_user is None else of_user)

    async def start(self, listening: socket.socket) -> None:
        """Serve until ``close``. Connections are accepted here: uvloop's own server hangs up, without a log line, on
        those for which there is no descriptor, and its callers would take the office for gone."""

        def failed(error: BaseException) -> None:
            self._die(f"the office stopped: its control door ended ({type(error).__name__}: {error})")

        listening.setblocking(False)
        self._listening = listening
        self._accepting = start_task(
            "control_door", lambda: accept_connections("control_door", listening, self._take), failed=failed
        )

    def _take(self, sock: socket.socket) -> None:
        async def serve() -> None:
            try:
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, sock)
            except BaseException:
                sock.close()
                raise

        _ = start_task("control_connections", serve)

    async def close(self) -> None:
        """Accept nothing more, let requests in progress end, then hang up."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = list(self._state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_PATIENCE_S)
            for task in late:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*late, return_exceptions=True)
        for connection in list(self._state.connections):
            if isinstance(connection, _Protocol) and connection.transport is not None:
                connection.transport.abort()

    def _protocol(self) -> _Protocol:
        return _Protocol(
            self._config,
            self._state,
            on_limit=self._on_limit,
            processes=self._processes,
            limits=self._limits,
            shared=self._shared,
            connected=self._connected,
        )


def peer_limits(of_user: int | None = None) -> PeerLimits[_Protocol]:
    """Fewer where descriptors are few: the data door, the journal and the supervisor's link need some as well."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, soft * 3 // 4)
    owners = frozenset((0, os.geteuid()))
    per_user = most // USER_SHARE if of_user is None else of_user
    return PeerLimits(most=most, per_user=per_user, reserved=most // RESERVED_SHARE, owners=owners)


def _user_of(transport: asyncio.Transport) -> int:
    """The user number of the peer. Every peer without one counts as the same user."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return NO_USER
    return peer_of(sock).uid


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with a bounded head and a bounded number of connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        *,
        on_limit: Callable[[str], None],
        processes: ProcessTable | None,
        limits: PeerLimits[_Protocol],
        shared: bool,
        connected: dict[PeerConnection, None],
    ) -> None:
        self._shared = shared
        self._connected = connected
        self._peer: PeerConnection | None = None
        self._limits = limits
        self._is_silent = True
        """Until the head of a first request has come."""
        super().__init__(config, server_state, {})
        self._processes = processes
        self._on_limit = on_limit
        self._in_head = True
        self._head_bytes = 0
        self._piece = 0
        """Bytes of what came last, which may have the heads of several requests in it."""
        self._awaited = ""
        """What the client owes us: the head or the body of a request. Empty between two requests."""
        self._late: tuple[str, asyncio.TimerHandle] | None = None
        """What is timed now, and by which timer."""
        self._looks = 0
        """Parts of its time that are left."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._processes is not None:
            sock, accepted_ns = transport.get_extra_info("socket"), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self._peer = self.app_state["peer"] = PeerConnection(
                self._processes, sock, accepted_ns, shared=self._shared
            )
            if self._shared:
                self._connected[self._peer] = None
        admitted = self._limits.admit(self, _user_of(transport))
        if isinstance(admitted, PeerRefused):
            self._on_limit(admitted.limit)
            message = f"the office has too many connections: {admitted.message}"
            self._hang_up(b"503 Service Unavailable", Disconnected(message, do="Close some, or try again in a moment."))
        elif admitted.closed is not None:
            self._on_limit("silent_connections")
            admitted.closed.transport.abort()
        self._awaited = "head"
        self._time_what_is_awaited()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.disconnected(self)
        if self._peer is not None:
            self._connected.pop(self._peer, None)
        self._awaited = ""
        self._time_what_is_awaited()
        super().connection_lost(exc)

    def _time_what_is_awaited(self) -> None:
        """Called once for all that came together: most requests come whole and are never timed."""
        if self._late is not None and self._late[0] != self._awaited:
            self._late[1].cancel()
            self._late = None
        if self._awaited and self._late is None:
            self._looks = LOOKS
            self._schedule_check(self._awaited)

    def _schedule_check(self, awaited: str) -> None:
        part_s = (HEAD_S if awaited == "head" else BODY_S) / LOOKS
        slept_s = self.loop.time() + 2 * part_s
        self._late = awaited, self.loop.call_later(part_s, self._check_time, awaited, slept_s)

    def _check_time(self, awaited: str, slept_s: float) -> None:
        """Count one part of the time. What comes from the moment ``slept_s`` on was late: the office slept."""
        if self.loop.time() < slept_s:
            self._looks -= 1
        if self._looks:
            self._schedule_check(awaited)
        else:
            self._time_out()

    def _time_out(self) -> None:
        if self.transport.is_closing():
            return
        self._on_limit("request_seconds")
        if self._awaited == "head" and not self._head_bytes:
            self.transport.close()  # nothing was asked, so nothing is answered: a client may have been paused just here
        else:
            late = f"the {self._awaited} of the request did not come in time"
            self._hang_up(b"408 Request Timeout", InvalidRequest(late, do="Send it whole."))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._piece = len(data)
        self._head_bytes += self._piece
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_MAX_BYTES and not self.transport.is_closing():
            self._head_too_large()
        self._time_what_is_awaited()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._awaited = "head"

    def on_headers_complete(self) -> None:
        came, self._head_bytes, self._in_head = self._head_bytes + self._piece, 0, False
        self._awaited = "body"
        if self._is_silent:
            self._is_silent = False
            self._limits.handshake_done(self)
        if came > HEAD_MAX_BYTES and self._head_size() > HEAD_MAX_BYTES:  # it is seldom worth adding up
            self._head_too_large()
        else:
            super().on_headers_complete()

    def _head_size(self) -> int:
        return sum(len(name) + len(value) for name, value in self.headers) + len(self.url)

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._awaited = ""
        if not self.transport.is_closing():
            super().on_message_complete()

    # ---- what is refused before it is a request ----

    def send_400_response(self, msg: str) -> None:
        self._hang_up(b"400 Bad Request", InvalidRequest("that is not HTTP", do="Speak HTTP/1.1."))

    def _head_too_large(self) -> None:
        self._on_limit("head_bytes")
        too_large = f"the headers are larger than {HEAD_MAX_BYTES} bytes"
        self._hang_up(
            b"431 Request Header Fields Too Large", InvalidRequest(too_large, do="Send fewer or shorter headers.")
        )

    def _hang_up(self, status: bytes, error: SubletError) -> None:
        view = ErrorView(kind=error.kind, message=error.message, do=error.do, transient=error.transient)
        body = msgspec.json.encode(ErrorBody(error=view))
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
