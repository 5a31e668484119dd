"""Who connects and does not ask, or does not finish asking, is hung up on; who is served is not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from sublet.office.api import server as http_server
from sublet.office.api.server import LOOKS, HttpServer
from tests.unit.office.api.bench import HeldLoop, bench, run

HEAD_S, BODY_S = 0.05, 0.15
HELLO = b"GET /v1/hello HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
CHUNKED = b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{   \n"

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", HEAD_S)
    monkeypatch.setattr(http_server, "BODY_S", BODY_S)


@asynccontextmanager
async def served(on_limit: Callable[[str], None] = lambda _: None) -> AsyncIterator[tuple[HeldLoop, Pipe]]:
    async with bench() as b:
        server = HttpServer(b.app, on_limit=on_limit)
        here, there = socket.socketpair()
        held = HeldLoop()
        await asyncio.get_running_loop().connect_accepted_socket(server._protocol, there)
        reader, writer = await asyncio.open_connection(sock=here)
        try:
            yield held, (reader, writer)
        finally:
            held.let_go()
            writer.close()
            await server.close()


async def awake(held: HeldLoop, seconds: float) -> None:
    """So much time, in which the office runs: in steps so small that no timer takes it for asleep."""
    step_s = min(HEAD_S, BODY_S) / (2 * LOOKS)
    for _ in range(round(seconds / step_s)):
        await held.passes(step_s * 1.001)


async def asked(pipe: Pipe, request: bytes) -> int:
    reader, writer = pipe
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return int(head.split()[1])


def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    async def story() -> None:
        async with served() as (held, (reader, _writer)):
            await awake(held, HEAD_S)
            assert await reader.read() == b""

    run(story)


@pytest.mark.parametrize("sent", [b"G", HELLO[:-2], POST, POST + b"{", CHUNKED], ids=repr)
@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_a_request_that_does_not_come_whole_is_refused(sent: bytes, before: int) -> None:
    async def story() -> None:
        async with served() as (held, (reader, writer)):
            for _ in range(before):
                assert await asked((reader, writer), HELLO) == 200
            writer.write(sent)
            await awake(held, BODY_S)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b"did not come in time" in answer

    run(story)


@pytest.mark.parametrize("sent", [b"", HELLO[:-2]], ids=repr)
def test_who_is_hung_up_on_is_counted(sent: bytes) -> None:
    async def story() -> None:
        limits: list[str] = []
        async with served(limits.append) as (held, (reader, writer)):
            writer.write(sent)
            await awake(held, HEAD_S)
            await reader.read()
        assert limits == ["request_seconds"]

    run(story)


@pytest.mark.parametrize("sent", [b"", HELLO[:-2], POST + b"{"], ids=repr)
def test_an_office_that_slept_gives_a_client_its_time_when_it_is_awake(sent: bytes) -> None:
    """Both were stopped, as on a machine that was suspended: what the client could not send in time it sends now."""

    async def story() -> None:
        async with served() as (held, pipe):
            pipe[1].write(sent)
            for _ in range(3 * LOOKS):
                await held.passes(10 * BODY_S)
            await awake(held, HEAD_S / 2)
            rest = HELLO[len(sent) :] if HELLO.startswith(sent) else b" " * 98 + b"}"
            assert await asked(pipe, rest) in (200, 400)

    run(story)


def test_an_office_that_slept_hangs_up_on_who_says_nothing_afterwards() -> None:
    async def story() -> None:
        async with served() as (held, (reader, _writer)):
            await awake(held, HEAD_S / 2)
            await held.passes(10 * HEAD_S)
            await awake(held, HEAD_S)
            assert await reader.read() == b""

    run(story)


def test_a_byte_now_and_then_does_not_make_it_longer() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with bench() as b:
            held = HeldLoop()
            server = HttpServer(b.app, on_limit=b.service.limit)
            here, there = socket.socketpair()
            here.setblocking(False)
            await loop.connect_accepted_socket(server._protocol, there)
            with here:
                for byte in HELLO * 2:
                    try:
                        await loop.sock_sendall(here, bytes([byte]))
                    except ConnectionError:
                        break
                    await held.passes(HEAD_S / 5)
                else:
                    pytest.fail("it was not hung up on")
                assert (await loop.sock_recv(here, 4096)).startswith(b"HTTP/1.1 408 ")
            held.let_go()
            await server.close()

    run(story)


def test_who_waits_between_two_requests_keeps_the_connection() -> None:
    async def story() -> None:
        async with served() as (held, pipe):
            assert await asked(pipe, HELLO) == 200
            await awake(held, 2 * BODY_S)
            assert await asked(pipe, HELLO) == 200

    run(story)


def test_a_long_answer_is_not_cut() -> None:
    """A stream of events has been asked for whole, and lasts."""

    async def story() -> None:
        async with served() as (held, (reader, writer)):
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            end = asyncio.ensure_future(_until_the_end(reader))
            await awake(held, 2 * BODY_S)
            assert not end.done()
            end.cancel()

    async def _until_the_end(reader: asyncio.StreamReader) -> None:
        while await reader.read(4096):
            pass

    run(story)
