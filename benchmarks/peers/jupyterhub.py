"""JupyterHub with its proxy, as most have it on one machine: how long until a user's first cell has an answer.

Both come from their own registries (PyPI and npm) and run in a folder of the row, on loopback ports that were free.
A user's server runs as the user who measures (``SimpleLocalProcessSpawner``), which needs no change of user and no
session of its own: the least that a spawner does. The hub answers the request for a server when that is ready, so no
time is lost in between.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.peers.venv import version_in
from benchmarks.procs import Child, free_port, wait_until

__all__ = ["DISTRIBUTIONS", "JupyterHub"]

DISTRIBUTIONS: Final = ("jupyterhub", "jupyter_server", "jupyterlab", "ipykernel")
START_WITHIN_S: Final = 60.0
PATIENCE_S: Final = 120.0
USER: Final = "ana"
TOKEN: Final = "benchmark"
"""Of a service that may start servers; the hub listens on loopback, in a folder of the row."""
PROXY: Final = Path(__file__).parents[2] / ".venv" / "hub" / "node_modules" / ".bin" / "configurable-http-proxy"
_CONFIG: Final = """
import sys
c = get_config()
c.JupyterHub.bind_url = "http://127.0.0.1:{public}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{api}"
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie-secret"
c.JupyterHub.log_level = "WARN"
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": {patience:.0f}}}
c.ConfigurableHTTPProxy.command = ["{proxy}"]
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_api}"
c.ConfigurableHTTPProxy.pid_file = "{folder}/proxy.pid"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.services = [{{"name": "benchmark", "api_token": "{token}"}}]
c.JupyterHub.load_roles = [
    {{
        "name": "benchmark",
        "services": ["benchmark"],
        "scopes": ["admin:users", "admin:servers", "access:servers"],
    }}
]
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/home"
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.args = ["--allow-root"]
c.Spawner.start_timeout = c.Spawner.http_timeout = {patience:.0f}
"""


class JupyterHub:
    """A hub with one user, whose server is started and stopped."""

    def __init__(self, folder: Path) -> None:
        proxy = str(PROXY) if PROXY.exists() else shutil.which("configurable-http-proxy")
        if proxy is None:
            raise RuntimeError("configurable-http-proxy is missing: `sh tools/hub_proxy.sh` installs it")
        place = folder / "hub"
        (place / "home").mkdir(parents=True)
        self._port = free_port()
        config = place / "jupyterhub_config.py"
        config.write_text(
            _CONFIG.format(
                public=self._port,
                api=free_port(),
                proxy_api=free_port(),
                folder=place,
                proxy=proxy,
                token=TOKEN,
                patience=PATIENCE_S,
            )
        )
        env = {**os.environ, "CONFIGPROXY_AUTH_TOKEN": uuid.uuid4().hex}
        words = [sys.executable, "-m", "jupyterhub", "-f", str(config)]
        self._child = Child(words, name="jupyterhub", env=env, folder=place)
        self.version = version_in(Path(sys.executable), "jupyterhub")
        try:
            wait_until(self._answers, within_s=START_WITHIN_S, what="the hub did not answer")
            self._ask("POST", f"/hub/api/users/{USER}", (201,))
        except BaseException:
            self._child.end()
            raise

    def _answers(self) -> bool:
        if not self._child.alive:
            raise RuntimeError(f"the hub ended at once: {self._child.complaint()}")
        try:
            self._ask("GET", "/hub/api/", (200,))
        except (OSError, RuntimeError, http.client.HTTPException):
            return False
        return True

    def first_cell_ms(self, *cells: str) -> list[float]:
        """Start the user's server and a kernel, and run these cells: when each had its answer, from the beginning."""
        began, found = time.perf_counter(), list[float]()
        self._ask("POST", f"/hub/api/users/{USER}/server", (201,))
        kernel = self._ask("POST", f"/user/{USER}/api/kernels", (201,), {"name": "python3"})["id"]
        from websocket import create_connection

        url = f"ws://127.0.0.1:{self._port}/user/{USER}/api/kernels/{kernel}/channels"
        line: Any = create_connection(url, header=[f"Authorization: token {TOKEN}"], timeout=PATIENCE_S)
        try:
            for code in cells:
                _run(line, code)
                found.append((time.perf_counter() - began) * 1e3)
        finally:
            line.close()
        return found

    def stop_server(self) -> None:
        """Returns when it is gone."""
        self._ask("DELETE", f"/hub/api/users/{USER}/server", (202, 204))

        def is_gone() -> bool:
            return not self._ask("GET", f"/hub/api/users/{USER}", (200,))["servers"]

        wait_until(is_gone, within_s=PATIENCE_S, what="the user's server did not end")

    def _ask(self, method: str, path: str, allowed: tuple[int, ...], body: object = None) -> Any:
        line = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            line.request(method, path, json.dumps(body or {}), {"authorization": f"token {TOKEN}"})
            answer = line.getresponse()
            raw = answer.read()
        finally:
            line.close()
        if answer.status not in allowed:
            raise RuntimeError(f"{method} {path} was answered {answer.status}: {raw[:500]!r}")
        return json.loads(raw) if raw else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The hub ends its proxy and its users' servers."""
        self._child.end()


def _run(line: Any, code: str) -> None:
    """Run a cell, as a notebook's front end does; raises where it does."""
    ident = uuid.uuid4().hex
    header = {"msg_id": ident, "msg_type": "execute_request", "username": "", "session": "benchmark", "version": "5.3"}
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    line.send(
        json.dumps({"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content})
    )
    while True:
        message = json.loads(line.recv())
        is_ours = message.get("parent_header", {}).get("msg_id") == ident
        if is_ours and message["msg_type"] == "execute_reply":
            if message["content"]["status"] != "ok":
                raise RuntimeError(f"a cell failed: {message['content']}")
            return
