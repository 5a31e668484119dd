"""The asyncio twin of ``transport``: the same exchanges over asyncio's streams, and the same reader of answers."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

from sublet.client.address import Address
from sublet.client.http1 import BODY_BYTES_MAX, AnswerReader, ProtocolError, encode_request
from sublet.client.steps import HttpCall, HttpReply
from sublet.client.transport import IDLE_MAX, headers_for, lost, tls_context
from sublet.clock import Clock
from sublet.wire import ports, unix

_Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_PIECE: Final = 256 * 1024


class AioTransport:
    """Exchanges with one office, inside one event loop."""

    def __init__(self, address: Address, clock: Clock, *, wire: int, ca: str | None = None) -> None:
        self.address = address
        self._clock = clock
        self._headers = headers_for(address, wire)
        self._tls = tls_context(address, ca)
        self._idle: list[_Pipe] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def exchange(self, call: HttpCall) -> HttpReply:
        """Send one request and read its answer whole."""
        sent, pipe, kept = False, None, False
        reader = AnswerReader()
        try:
            async with asyncio.timeout(call.timeout_s):
                pipe = self._take() or await self._open()
                sent_ns, sent = self._clock.now_ns(), True
                await self._send(pipe[1], call)
                body = await _receive(pipe[0], reader)
                kept = reader.reusable
        except (OSError, ProtocolError) as error:
            raise lost(self.address, error, sent=sent) from error
        finally:
            # Also on a cancellation: a connection in the middle of an answer must not carry the next request.
            if pipe is not None:
                self._put(pipe) if kept else pipe[1].transport.abort()
        return HttpReply(reader.status, body, sent_ns)

    async def open_stream(self, path: str, timeout_s: float) -> AioStream:
        """Ask for an answer that does not end, and return once its head is there."""
        sent, pipe = False, None
        reader = AnswerReader()
        try:
            async with asyncio.timeout(timeout_s):
                pipe = await self._open()
                sent = True
                await self._send(pipe[1], HttpCall(method="GET", path=path, timeout_s=timeout_s))
                while not reader.status:
                    reader.feed(await pipe[0].read(_PIECE))
        except BaseException as error:
            if pipe is not None:
                pipe[1].transport.abort()
            if isinstance(error, OSError | ProtocolError):
                raise lost(self.address, error, sent=sent) from error
            raise
        return AioStream(self.address, pipe, reader)

    async def close(self) -> None:
        """Close what is idle. The transport stays usable."""
        idle, self._idle = self._of_this_loop(), []
        for _, writer in idle:
            writer.transport.abort()

    async def _open(self) -> _Pipe:
        address = self.address
        if address.socket is not None:
            return await open_unix(os.fspath(address.socket), named=address.home is None)
        pipe = await asyncio.open_connection(
            address.host, address.port, ssl=self._tls, server_hostname=address.host if address.tls else None
        )
        if not address.tls:
            try:
                ports.check_port(pipe[1].get_extra_info("socket"))
            except BaseException:
                pipe[1].transport.abort()
                raise
        return pipe

    async def _send(self, writer: asyncio.StreamWriter, call: HttpCall) -> None:
        path = self.address.prefix + call.path
        writer.write(
            encode_request(call.method, path, host=self.address.host_header, headers=self._headers, body=call.body)
        )
        await writer.drain()

    def _of_this_loop(self) -> list[_Pipe]:
        """What is idle; connections of another loop, which has ended, are of no use."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._idle = loop, []
        return self._idle

    def _take(self) -> _Pipe | None:
        while self._of_this_loop():
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.transport.abort()
        return None

    def _put(self, pipe: _Pipe) -> None:
        if len(self._idle) < IDLE_MAX:
            self._idle.append(pipe)
        else:
            pipe[1].transport.abort()


class AioStream:
    """An endless answer, read as it comes."""

    def __init__(self, address: Address, pipe: _Pipe, reader: AnswerReader) -> None:
        self._address = address
        self._pipe = pipe
        self._reader = reader
        self.status = reader.status

    async def read(self) -> bytes:
        """What arrived; waits for something; ``Disconnected`` at its end."""
        piece = self._reader.take()
        try:
            while not piece:
                if self._reader.complete:
                    raise ProtocolError("the stream of events ended")
                self._reader.feed(await self._pipe[0].read(_PIECE))
                piece = self._reader.take()
        except (OSError, ProtocolError) as error:
            raise lost(self._address, error, sent=True) from error
        return piece

    def close(self) -> None:
        self._pipe[1].transport.abort()


async def open_unix(path: str, *, named: bool) -> _Pipe:
    """``unix.connect``, for asyncio."""
    owner = unix.check_folder(os.path.dirname(path), named=named)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        with unix.short_path(path) as address:
            await _connected(sock, address)
        unix.check_listener(sock, path, owner)
        return await asyncio.open_unix_connection(sock=sock)
    except BaseException:
        sock.close()
        raise


async def _connected(sock: socket.socket, address: str) -> None:
    """Connect, once the listener's backlog has room; asyncio's own takes a full one for a connection."""
    while True:
        try:
            return sock.connect(address)
        except BlockingIOError:
            await asyncio.sleep(unix.BACKLOG_PAUSE_S)


async def _receive(stream: asyncio.StreamReader, reader: AnswerReader) -> bytes:
    pieces, total = [], 0
    while not reader.complete:
        reader.feed(await stream.read(_PIECE))
        piece = reader.take()
        total += len(piece)
        if total > BODY_BYTES_MAX:
            raise ProtocolError("the answer is too long")
        pieces.append(piece)
    return b"".join(pieces)
