"""The control API over a socket: the application's answers, in the order of the requests, until the office closes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sublet.office.api.server import HttpServer
from sublet.testing import FaultName
from sublet.values import MIB
from sublet.wire.http import WIRE_HEADER, WIRE_VERSION
from tests.unit.office.api.bench import Bench, bench, run, turns

WANTS = [{"kind": "memory", "amount": MIB}]
LEASE = {"request_id": "r", "wants": WANTS}


class Line:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, *pieces: bytes) -> None:
        self.writer.write(b"".join(pieces))

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and document of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:-2])
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Bench, HttpServer, Line]]:
    async with bench() as b:
        server = HttpServer(b.app, on_limit=b.service.limit)
        here, there = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(server._protocol, there)
        line = Line(*await asyncio.open_connection(sock=here))
        try:
            yield b, server, line
        finally:
            line.writer.close()
            await server.close()


def post(path: str, body: object, *more: bytes, version: bytes = b"1.1") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = b"POST %s HTTP/%s\r\nHost: x\r\nContent-Length: %d\r\n" % (path.encode(), version, len(data))
    return head + b"".join(one + b"\r\n" for one in more) + b"\r\n" + data


def test_a_body_of_known_length_and_one_in_chunks_are_answered_alike() -> None:
    """Same status, same headers, same document."""

    async def story() -> None:
        async with served() as (_, _, line):
            line.say(post("/v1/leases", LEASE))
            status, headers, granted = await line.answer()
            assert (status, granted["answer"]) == (201, "grant")
            again = b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
            body = json.dumps(LEASE).encode()
            line.say(again % (len(body), body))
            other_status, other_headers, other = await line.answer()
            assert (other_status, other["lease"]["id"]) == (201, granted["lease"]["id"]), "one request, one lease"
            assert headers == other_headers | {"content-length": headers["content-length"]}
            assert headers[WIRE_HEADER] == str(WIRE_VERSION)

    run(story)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/leases", b"{"),
        ("/v1/leases", {"request_id": "r"}),
        ("/v1/leases", {**LEASE, "request_id": ""}),
        ("/v1/leases", {**LEASE, "ttl": -1}),
        ("/v1/leases/l-1/release", {}),
        ("/v1/leases/l-1/renew", {"epoch": [1, 1]}),
        ("/v1/leases/%zz/renew", {"epoch": [1, 1]}),
        ("/v1/leases/l-1/nothing", {}),
        ("/v1/hello", {}),
    ],
)
def test_what_is_wrong_is_said_in_the_same_words(path: str, body: object) -> None:
    """Bad requests: status and error are those of the application."""

    async def story() -> None:
        async with served() as (b, _, line):
            line.say(post(path, body))
            status, _, document = await line.answer()
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            direct = await b.ask("POST", path, raw=[data])
            assert (status, document) == (direct.status, direct.json)

    run(story)


def test_a_caller_without_the_right_is_refused() -> None:
    """Two Authorization headers, an unknown token, a wire version from elsewhere."""

    async def story() -> None:
        async with served() as (b, _, line):
            for more in (
                (b"Authorization: Bearer sublet_x", b"Authorization: Bearer sublet_y"),
                (b"Authorization: Bearer sublet_nobody",),
                (b"%b: 99" % WIRE_HEADER.encode(),),
            ):
                line.say(post("/v1/leases", LEASE, *more))
                status, _, document = await line.answer()
                headers = [(name.lower(), value) for name, _, value in (one.partition(b": ") for one in more)]
                direct = await b.ask("POST", "/v1/leases", raw=[json.dumps(LEASE).encode()], headers=headers)
                assert (status, document) == (direct.status, direct.json)
                assert status >= 400
            assert not b.driver.ledger.state.live_count

    run(story)


def test_answers_come_in_the_order_of_the_requests() -> None:
    """Pipelined: what was asked first is answered first, though the agent confirms it late."""

    async def story() -> None:
        async with served() as (b, _, line):
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            line.say(post("/v1/leases", LEASE), b"GET /v1/hello HTTP/1.1\r\nHost: x\r\n\r\n", post("/v1/leases", b"{"))
            await turns()
            b.agent.faults.turn_off(FaultName.LOST_REPORTS)
            await b.pass_time("2s")
            assert [(await line.answer())[0] for _ in range(3)] == [201, 200, 400]
            line.say(post("/v1/leases", {**LEASE, "request_id": "s"}))
            assert (await line.answer())[0] == 201, "and then as before"

    run(story)


def test_a_body_in_pieces_and_a_large_one() -> None:
    """Pieces are put together, and a large body is read whole."""

    async def story() -> None:
        async with served() as (_, _, line):
            whole = post("/v1/leases", LEASE)
            for start in range(0, len(whole), 7):
                line.say(whole[start : start + 7])
                await turns(2)
            assert (await line.answer())[0] == 201
            line.say(post("/v1/leases", {**LEASE, "request_id": "s", "holder": "x" * 65536}))
            status, _, document = await line.answer()
            assert (status, document["error"]["kind"]) == (400, "InvalidRequest")

    run(story)


@pytest.mark.parametrize(
    "request_", [post("/v1/leases", LEASE, b"Connection: close"), post("/v1/leases", LEASE, version=b"1.0")]
)
def test_a_connection_that_is_not_kept_is_closed(request_: bytes) -> None:
    """HTTP/1.0 and ``Connection: close``: the answer, then the end."""

    async def story() -> None:
        async with served() as (_, _, line):
            line.say(request_)
            assert (await line.answer())[0] == 201
            assert await line.reader.read() == b""

    run(story)


def test_the_end_waits_for_what_is_in_progress() -> None:
    """An office that closes answers what it has taken, and says that it hangs up."""

    async def story() -> None:
        async with served() as (b, server, line):
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            line.say(post("/v1/leases", LEASE))
            await turns()
            assert server.busy == 1
            closing = asyncio.ensure_future(server.close())
            await turns()
            assert not closing.done()
            b.agent.faults.turn_off(FaultName.LOST_REPORTS)
            await b.pass_time("2s")
            status, headers, _ = await line.answer()
            assert (status, headers["connection"]) == (201, "close")
            assert await line.reader.read() == b""
            await closing
            assert server.busy == 0

    run(story)


def test_who_hangs_up_before_the_answer_harms_nobody() -> None:
    """The lease is granted all the same, and asked for again it is the same one."""

    async def story() -> None:
        async with served() as (b, server, line):
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            line.say(post("/v1/leases", LEASE))
            await turns()
            line.writer.transport.abort()
            await turns()
            b.agent.faults.turn_off(FaultName.LOST_REPORTS)
            await b.pass_time("2s")
            assert server.busy == 0
            assert (await b.ask("POST", "/v1/leases", LEASE)).status == 201
            assert b.driver.ledger.state.live_count == 1
            assert not b.deaths

    run(story)
