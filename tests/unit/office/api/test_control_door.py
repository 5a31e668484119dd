"""The control socket: what cannot be accepted now is accepted later, on the loop of an office and on asyncio's own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sublet import background
from sublet.background import SHORTAGES
from sublet.office.api.server import HttpServer
from tests.shortages import fail_accepts
from tests.unit.office.api.bench import bench

HELLO = b"GET /v1/hello HTTP/1.1\r\nHost: x\r\n\r\n"


def _listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


class _Short:
    """A listening socket that fails so many times."""

    def __init__(self, sock: socket.socket, error: BaseException, times: int) -> None:
        self._sock, self._error, self.left = sock, error, times

    def accept(self) -> Any:
        if self.left:
            self.left -= 1
            raise self._error
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "error", [*(OSError(number, os.strerror(number)) for number in sorted(SHORTAGES)), MemoryError()], ids=repr
)
def test_it_answers_again_after_a_shortage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    error: BaseException,
) -> None:
    monkeypatch.setattr(background, "PAUSES_S", (0.001,))

    async def story() -> None:
        if isinstance(asyncio.get_running_loop(), uvloop.Loop):  # its methods cannot be replaced
            short = _Short(_listening(tmp_path / "office.sock"), error, 3)
            listening: Any = short
        else:
            fail_accepts(monkeypatch, error)
            listening = _listening(tmp_path / "office.sock")
        ended: list[str] = []
        async with bench() as b:
            server = HttpServer(b.app, on_limit=b.service.limit, die=ended.append)
            await server.start(listening)
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "office.sock"))
            writer.write(HELLO)
            async with asyncio.timeout(20):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
            await server.close()
        assert ended == []

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(story())


def test_one_that_ends_ends_the_office_with_one_line(tmp_path: Path) -> None:
    async def story() -> None:
        ended: list[str] = []
        async with bench() as b:
            server = HttpServer(b.app, on_limit=b.service.limit, die=ended.append)
            listening = _listening(tmp_path / "office.sock")
            await server.start(listening)
            listening.close()
            async with asyncio.timeout(20):
                while not ended:  # noqa: ASYNC110 - what is waited for is no event
                    await asyncio.sleep(0.002)
            await server.close()
        assert len(ended) == 1
        assert ended[0].startswith("the office stopped: its control door ended (")

    asyncio.run(story())
