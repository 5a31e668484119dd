"""How many connections a user of the machine may have to one socket, as the operator's file says."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from sublet.office.api import server as http_server
from sublet.office.api.server import HttpServer
from tests.unit.office.api.bench import bench, run

STRANGER = 65534
HELLO = b"GET /v1/hello HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_user_has_as_many_connections_as_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_user_of", lambda _: STRANGER)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with bench() as b:
            server = HttpServer(b.app, on_limit=b.service.limit, of_user=4)
            with contextlib.ExitStack() as stack:
                answers = []
                for _ in range(5):
                    here, there = socket.socketpair()
                    stack.callback(here.close)
                    here.setblocking(False)
                    await loop.connect_accepted_socket(server._protocol, there)
                    with contextlib.suppress(ConnectionError):  # the last one is refused before it has asked
                        await loop.sock_sendall(here, HELLO)
                    answers.append((await loop.sock_recv(here, 4096)).split(b"\r\n")[0])
                assert answers[:4] == [b"HTTP/1.1 200 OK"] * 4
                assert answers[4] == b"HTTP/1.1 503 Service Unavailable"
            await server.close()

    run(story)
