"""Blocking sockets under the client: one exchange at a time per connection, and a small pool of connections.

Nothing is retried here. What could not be brought back is `Disconnected`, which says whether the request may have
reached the office; what to make of that is decided by the programs in ``core``.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sublet.client.address import Address
from sublet.client.http1 import BODY_BYTES_MAX, AnswerReader, ProtocolError, encode_request
from sublet.client.steps import HttpCall, HttpReply
from sublet.clock import Clock
from sublet.errors import Disconnected
from sublet.wire import ports, unix
from sublet.wire.version import AS_TENANT_HEADER, FOR_TENANT_HEADER

if TYPE_CHECKING:
    import ssl

IDLE_MAX: Final = 8
"""Connections kept open between calls; more threads than that open one for each call."""
_PIECE: Final = 256 * 1024
_FIRST: Final = 8 * 1024
"""Of the beginning of an answer: a call may wait for it for long, and what it is to be read into is there meanwhile."""


def headers_for(address: Address, wire: int) -> dict[str, str]:
    """What every request carries."""
    headers = {"sublet-wire": str(wire), "accept": "application/json"}
    if address.token is not None:
        headers["authorization"] = f"Bearer {address.token}"
    if address.as_tenant:
        headers[AS_TENANT_HEADER] = "1"
    if address.for_tenant:
        headers[FOR_TENANT_HEADER] = address.for_tenant
    return headers


def lost(address: Address, why: BaseException, *, sent: bool) -> Disconnected:
    """The error of a failed exchange, for both transports."""
    if isinstance(why, TimeoutError):
        reason = "in time"
    elif isinstance(why, FileNotFoundError):
        reason = "there: nothing runs behind its socket"
    else:
        reason = f"({getattr(why, 'strerror', None) or why})"
    return Disconnected(f"the office at {address.url} did not answer {reason}", sent=sent)


def tls_context(address: Address, ca: str | None) -> ssl.SSLContext | None:
    """Verification as the system does it, or against the given authority; it cannot be turned off."""
    if not address.tls:
        return None
    import ssl

    return ssl.create_default_context(cafile=ca)


class Transport:
    """Exchanges with one office. Safe to use from several threads; after a fork the child opens its own connections."""

    def __init__(self, address: Address, clock: Clock, *, wire: int, ca: str | None = None) -> None:
        self.address = address
        self._clock = clock
        self._headers = headers_for(address, wire)
        self._tls = tls_context(address, ca)
        self._idle: list[socket.socket] = []
        """Taken from and added to by single calls, so it needs no lock."""
        self._keeps = True
        """Connections are kept for the next call."""
        self._pid = os.getpid()

    def exchange(self, call: HttpCall) -> HttpReply:
        """Send one request and read its answer whole."""
        until = time.monotonic() + call.timeout_s
        sock = self._take() or self._open(until)
        reader, sent_ns = AnswerReader(), self._clock.now_ns()
        kept = False
        try:
            self._send(sock, call, until)
            body = b"".join(_receive(sock, reader, until))
            kept = reader.reusable
        except (OSError, ProtocolError) as error:
            raise lost(self.address, error, sent=True) from error
        finally:
            # Also on an interrupt: a connection that is in the middle of an answer must not carry the next request.
            self.give_back(sock) if kept else sock.close()
        return HttpReply(reader.status, body, sent_ns)

    def launch(self, call: HttpCall) -> Flight:
        """Send one request and do not wait for its answer: the caller waits for several, and for other things."""
        until = time.monotonic() + call.timeout_s
        sock = self._take() or self._open(until)
        sent_ns = self._clock.now_ns()
        try:
            self._send(sock, call, until)
        except (OSError, ProtocolError) as error:
            sock.close()
            raise lost(self.address, error, sent=True) from error
        except BaseException:
            sock.close()
            raise
        return Flight(self, sock, sent_ns)

    def close(self) -> None:
        """Close what is idle, and from now on each connection after its call. The transport stays usable."""
        self._keeps = False
        while (sock := self._pop()) is not None:
            sock.close()

    def after_fork(self) -> None:
        """In the child: forget the parent's connections without a word on them, for the parent goes on using them."""
        for sock in self._idle:
            os.close(sock.detach())
        self._idle = []

    def _open(self, until: float) -> socket.socket:
        address = self.address
        sock: socket.socket | None = None
        try:
            if address.socket is not None:
                sock = unix.connect(
                    os.fspath(address.socket), timeout_s=_remaining_s(until), named=address.home is None
                )
            else:
                sock = socket.create_connection((address.host, address.port), timeout=_remaining_s(until))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    sock = self._tls.wrap_socket(sock, server_hostname=address.host)
                else:
                    ports.check_port(sock)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise lost(address, error, sent=False) from error
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        return sock

    def _send(self, sock: socket.socket, call: HttpCall, until: float) -> None:
        raw = encode_request(
            call.method,
            self.address.prefix + call.path,
            host=self.address.host_header,
            headers=self._headers,
            body=call.body,
            content_type=call.content_type,
        )
        sock.settimeout(_remaining_s(until))
        sock.sendall(raw)

    def _take(self) -> socket.socket | None:
        """A kept connection on which nothing has arrived: an unasked answer, or an end, makes it useless."""
        while (sock := self._pop()) is not None:
            if not _readable(sock, 0):
                return sock
            sock.close()
        return None

    def _pop(self) -> socket.socket | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, sock: socket.socket) -> None:
        """Keep it for the next call, if there are not enough already."""
        if not self._keeps or len(self._idle) >= IDLE_MAX:
            sock.close()
            return
        self._idle.append(sock)
        self._close_if_closed()

    def _close_if_closed(self) -> None:
        """Another thread may have closed the transport since it was looked at."""
        if not self._keeps:
            self.close()


class Flight:
    """A request that was sent and whose answer comes when it comes, whole or as an endless stream."""

    def __init__(self, transport: Transport, sock: socket.socket, sent_ns: int) -> None:
        self._transport = transport
        self._sock = sock
        self._reader = AnswerReader()
        self.sent_ns = sent_ns
        self._is_over = False
        sock.settimeout(0.0)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def status(self) -> int:
        """0 until the head of the answer is there."""
        return self._reader.status

    @property
    def complete(self) -> bool:
        return self._reader.complete

    def read(self) -> bytes:
        """What has arrived of the body, without waiting. When it is complete the flight is over."""
        pieces = []
        try:
            while not self._reader.complete:
                self._reader.feed(self._sock.recv(_PIECE))
                pieces.append(self._reader.take())
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ProtocolError) as error:
            if not _is_want_read(error):
                self.close()
                raise lost(self._transport.address, error, sent=True) from error
        if self._reader.complete and not self._is_over:
            self._is_over = True
            self._transport.give_back(self._sock) if self._reader.reusable else self._sock.close()
        return b"".join(pieces)

    def close(self) -> None:
        """Harmless when it is over: the connection is the next call's by then."""
        if not self._is_over:
            self._sock.close()


def _is_want_read(error: BaseException) -> bool:
    """TLS says "nothing yet" in its own class, which exists only where TLS is loaded."""
    return type(error).__name__ in ("SSLWantReadError", "SSLWantWriteError")


def _receive(sock: socket.socket, reader: AnswerReader, until: float) -> Iterator[bytes]:
    total, most = 0, _FIRST
    while not reader.complete:
        reader.feed(_read(sock, until, most))
        most = _PIECE
        piece = reader.take()
        total += len(piece)
        if total > BODY_BYTES_MAX:
            raise ProtocolError("the answer is too long")
        yield piece


def _read(sock: socket.socket, until: float, most: int) -> bytes:
    sock.settimeout(_remaining_s(until))
    return sock.recv(most)


def _remaining_s(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _readable(sock: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
