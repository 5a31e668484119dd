"""A real Jupyter server as its front ends see it: HTTP for kernels, a websocket for their messages."""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from tests.light_jupyter import python_module

PATIENCE_S = 90.0

Message = dict[str, Any]


class Server:
    """One Jupyter server, and what it answers."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token

    def ask(self, method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    @contextmanager
    def kernel(self, name: str = "python3") -> Iterator[Kernel]:
        made = self.ask("POST", "kernels", {"name": name})["id"]
        kernel = Kernel(self, made)
        try:
            yield kernel
        finally:
            kernel.hang_up()
            self.ask("DELETE", f"kernels/{made}")


class Cell:
    """What one request to execute came to."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reply: Message | None = None
        self.is_idle = False

    def of(self, *kinds: str) -> list[Message]:
        """The contents of messages of these kinds, in order."""
        return [one["content"] for one in self.messages if one["header"]["msg_type"] in kinds]

    def text(self, name: str = "stdout") -> str:
        return "".join(one["text"] for one in self.of("stream") if one["name"] == name)

    @property
    def status(self) -> list[str]:
        """The texts of Sublet's line, as it changed."""
        shown = self.of("display_data", "update_display_data")
        texts = [one["data"].get("text/plain", "") for one in shown]
        return [text for text in texts if text.startswith("sublet:")]

    @property
    def is_done(self) -> bool:
        return self.is_idle and self.reply is not None


class Kernel:
    """One kernel, and a websocket to it."""

    def __init__(self, server: Server, kernel: str) -> None:
        self.id = kernel
        self._server = server
        self._session = uuid.uuid4().hex
        self._connect()

    def _connect(self) -> None:
        address = self._server.url.replace("http", "ws", 1)
        self._socket = websocket.create_connection(
            f"{address}api/kernels/{self.id}/channels?session_id={self._session}&token={self._server.token}",
            timeout=PATIENCE_S,
        )

    def hang_up(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        self._server.ask("POST", f"kernels/{self.id}/interrupt", {})

    def restart(self) -> None:
        self._server.ask("POST", f"kernels/{self.id}/restart", {})
        self._socket.close()
        self._connect()

    def run(self, code: str, told: Callable[[Message], object] = lambda _: None, **how: Any) -> Cell:
        """Run a cell, telling of each message as it comes."""
        cell = Cell()
        asked = self.start(code, **how)
        until_s = time.monotonic() + PATIENCE_S
        while not cell.is_done:
            assert time.monotonic() < until_s, f"the cell does not end: {cell.messages}"
            message = self.hear()
            told(message)
            self.note(cell, asked, message)
        return cell

    def start(self, code: str, *, silent: bool = False, store_history: bool = True, allow_stdin: bool = True) -> str:
        content = {"code": code, "silent": silent, "store_history": store_history, "allow_stdin": allow_stdin}
        return self.send("shell", "execute_request", {**content, "user_expressions": {}, "stop_on_error": True})

    def note(self, cell: Cell, asked: str, message: Message) -> None:
        kind = message["header"]["msg_type"]
        if message["parent_header"].get("msg_id") != asked:
            return
        if kind == "execute_reply":
            cell.reply = message["content"]
        elif kind == "status" and message["content"]["execution_state"] == "idle":
            cell.is_idle = True
        else:
            cell.messages.append(message)

    def hear(self) -> Message:
        said = self._socket.recv()
        return _from_bytes(said) if isinstance(said, bytes) else json.loads(said)

    def send(self, channel: str, kind: str, content: object, parent: Message | None = None) -> str:
        number = uuid.uuid4().hex
        message = {
            "header": {
                "msg_id": number,
                "msg_type": kind,
                "session": self._session,
                "username": "somebody",
                "version": "5.3",
                "date": "2020-01-01T00:00:00.000000Z",
            },
            "parent_header": {} if parent is None else parent["header"],
            "metadata": {},
            "content": content,
            "channel": channel,
        }
        self._socket.send(json.dumps(message))
        return number


def _from_bytes(said: bytes) -> Message:
    """A message with buffers: how many parts there are, where each begins, the parts."""
    (count,) = struct.unpack_from("!I", said)
    at = [*struct.unpack_from(f"!{count}I", said, 4), len(said)]
    message: Message = json.loads(said[at[0] : at[1]])
    message["buffers"] = [said[one:next_] for one, next_ in itertools.pairwise(at[1:])]
    return message


@contextmanager
def serving(folder: Path, env: dict[str, str], *words: str) -> Iterator[Server]:
    """A Jupyter server that shows this folder, with its own configuration and nobody else's."""
    places = {f"JUPYTER_{name}_DIR": str(folder / f".jupyter-{name.lower()}") for name in ("RUNTIME", "CONFIG", "DATA")}
    runtime = Path(places["JUPYTER_RUNTIME_DIR"])
    said = folder / ".jupyter.log"
    with open(said, "wb") as log:
        process = subprocess.Popen(
            [
                *(*python_module("jupyter_server"), "--no-browser", f"--port={free_port()}", "--allow-root"),
                *(f"--ServerApp.root_dir={folder}", *words),
            ],
            env={**os.environ, **env, **places, "IPYTHONDIR": str(folder / ".ipython")},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        facts = told(process, runtime / f"jpserver-{process.pid}.json", said)
        yield Server(facts["url"], facts["token"])
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """Jupyter takes the next one, should somebody be quicker."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def told(process: subprocess.Popen[bytes], facts: Path, log: Path) -> dict[str, Any]:
    """What a server writes down about itself when it listens."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            found: dict[str, Any] = json.loads(facts.read_text())
            socket.create_connection((found["hostname"], found["port"]), 1.0).close()
        except (OSError, ValueError):  # not there, not yet whole, or not yet listening
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        else:
            return found
    raise AssertionError(log.read_text())
