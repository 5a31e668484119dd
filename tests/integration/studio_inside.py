"""An office on pretended hardware and a studio, both in this process: a request is handed to the application itself, so
no process is started and none is met. For what many requests are asked, and nothing is to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Coroutine, Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import pytest

from sublet.engines.local import Office
from sublet.studio.right import find_right
from sublet.studio.service import Studio
from sublet.studio.web import studio_app
from sublet.testing.memory import MemoryAgent
from tests.integration.office_stage import OfficeStage
from tests.integration.studio_stage import PATIENCE_S, Answer, StudioStage

__all__ = ["StudioInside", "studio_inside"]

_T = TypeVar("_T")


class StudioInside(StudioStage):
    """Asked as the studio that is a process. Of a stream the head alone is read."""

    def __init__(self, place: Path, devices: str) -> None:
        super().__init__(OfficeStage(place, devices))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="studio inside")
        self._thread.start()
        self._served = Office(self.home, host_gpus=devices, make_agent=MemoryAgent)

    def start(self, *more: str) -> None:
        self._run(self._served.start())
        self.app = studio_app(Studio(self.home, find_right(self.home, {}), start=False))

    def close(self) -> None:
        for line in self.office.office.lines:
            line.close()
        self._run(self._served.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
        shutil.rmtree(self.office.runtime, ignore_errors=True)
        super().close()

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        return self._run(self._answer(method, path, body or b"", headers or {}))

    def _run(self, what: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE_S)

    async def _answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        raw_path, _, query = path.partition("?")
        host = self.address.removeprefix("http://")
        given = {"host": host, **{name.lower(): value for name, value in headers.items()}}
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(raw_path),
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", self.port),
        }
        comes = [{"type": "http.request", "body": body}]
        hangs_up, status, said, pieces = asyncio.Event(), 0, dict[str, str](), list[bytes]()

        async def receive() -> MutableMapping[str, Any]:
            if not comes:
                await hangs_up.wait()
                return {"type": "http.disconnect"}
            return comes.pop()

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                said.update((name.decode(), value.decode("latin-1")) for name, value in message["headers"])
                if said.get("content-type", "").startswith("text/event-stream"):
                    hangs_up.set()
            else:
                pieces.append(message["body"])

        await self.app(scope, receive, send)
        return Answer(status, said, b"" if hangs_up.is_set() else b"".join(pieces))


@contextlib.contextmanager
def studio_inside(place: Path, devices: str) -> Iterator[StudioInside]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(place / "state"))
        stage = StudioInside(place, devices)
        try:
            stage.start()
            yield stage
        finally:
            stage.close()
