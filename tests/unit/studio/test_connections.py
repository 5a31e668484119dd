"""Connections to a studio that ask nothing keep no one out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from uvicorn import Config, Server

from sublet.studio import connections
from sublet.studio.connections import bounded_protocol, connection_limits

MOST = 4
PATIENCE_S = 60.0


class Served:
    """A server with room for a few connections, whose answers may be held back."""

    def __init__(self) -> None:
        self.may_answer, self.asked = threading.Event(), threading.Semaphore(0)
        self.opened = contextlib.ExitStack()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        config = Config(
            self.app, http=bounded_protocol(self.listening), interface="asgi3", lifespan="off", log_config=None
        )
        self.server = Server(config)
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self.thread = threading.Thread(target=self.server.run, args=([self.listening],))
        self.thread.start()

    async def app(
        self, scope: dict[str, Any], receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        self.asked.release()
        if scope["path"] == "/slow":
            await asyncio.to_thread(self.may_answer.wait, PATIENCE_S)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self, said: bytes = b"") -> socket.socket:
        sock = self.opened.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S))
        sock.sendall(said)
        return sock

    def close(self) -> None:
        self.opened.close()
        self.may_answer.set()
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        self.listening.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", MOST)
    made = Served()
    yield made
    made.close()


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode()


def answer(sock: socket.socket) -> bytes:
    """All that comes until it is whole, or the other end hangs up."""
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while not came.endswith(b"ok") and (piece := sock.recv(4096)):
            came += piece
    return came


def test_who_asks_nothing_makes_room_for_who_does(served: Served) -> None:
    silent = [served.connect() for _ in range(MOST)]
    assert answer(served.connect(request("/"))).startswith(b"HTTP/1.1 200")
    assert answer(silent[0]) == b"", "the oldest was closed"


def test_who_asks_is_not_hung_up_on_for_others(served: Served) -> None:
    asking = [served.connect(request("/slow")) for _ in range(MOST)]
    for _ in asking:
        assert served.asked.acquire(timeout=PATIENCE_S)
    refused = b""
    with contextlib.closing(served.connect()) as sock:
        while piece := sock.recv(4096):
            refused += piece
    assert refused.startswith(b"HTTP/1.1 503")
    assert refused.endswith(b"Too many connections: 4 connections are open here. Try again in some seconds.\n")
    served.may_answer.set()
    assert [answer(sock)[:15] for sock in asking] == [b"HTTP/1.1 200 OK"] * MOST


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nhost: he"])
def test_a_head_that_does_not_come_is_not_waited_for(
    served: Served, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a request that is being answered is not cut off by that time."""
    asks = served.connect(request("/slow"))
    assert served.asked.acquire(timeout=PATIENCE_S)
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    assert answer(served.connect(said)) == b""
    served.may_answer.set()
    assert answer(asks).endswith(b"ok")


def test_the_head_of_a_second_request_has_the_same_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    sock = served.connect(request("/"))
    assert answer(sock).endswith(b"ok")
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    sock.sendall(b"GET / HT")
    assert answer(sock) == b""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "raised", "most"),
    [
        (1024, 65_536, 12_000, 65_536, 12_000),
        (1024, 1 << 20, 12_000, 1 << 18, 12_000),
        (1024, resource.RLIM_INFINITY, 12_000, 1 << 18, 12_000),
        (65_536, 65_536, 12_000, None, 12_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 12_000, None, 12_000),
        (1024, 4096, 12_000, 4096, 3072),
    ],
)
def test_as_many_open_files_are_taken_as_there_may_be(
    soft: int,
    hard: int,
    wanted: int,
    raised: int | None,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the user may not have so many, there are fewer connections, and the log says what to do."""
    became: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: became.append(limits))
    with caplog.at_level(logging.WARNING, "sublet.studio"), socket.socket() as listening:
        assert connection_limits(listening, wanted).most == most
    assert became == ([] if raised is None else [(raised, hard)])
    assert ("LimitNOFILE=" in caplog.text) is (most < wanted)
    assert most == wanted or f"{most} connections are the most, not {wanted}" in caplog.text
