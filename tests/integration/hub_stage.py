"""A real JupyterHub with its proxy, the studio as a service of it, and an office with a shared socket, as root has it.

Users are made for the run and removed after it. What a user does goes through the hub's proxy, as it does in a browser.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
from websocket import create_connection

from sublet.node.prctl import set_pdeathsig
from tests.integration.office_stage import OfficeStage, office_stage
from tests.integration.studio_stage import PATIENCE_S, StudioStage, studio_stage
from tests.light_jupyter import light_environment, python_module
from tests.security.other_users import ROOT, closed_folder, enterable, places
from tests.traces import until

__all__ = [
    "HUB_NEEDS",
    "PASSWORD",
    "Guest",
    "HubStage",
    "Kernel",
    "can_have_hub",
    "hub_stage",
    "local_users",
    "until_hub_says",
]

PROXY: Final = ROOT / ".venv" / "hub" / "node_modules" / ".bin" / "configurable-http-proxy"
HUB_NEEDS: Final = ("setpriv", "unshare", "useradd", "hub")
"""What a test with a hub is marked to need; besides, root, and a checkout that other users can enter."""
PASSWORD: Final = "not a secret"
LOOK_S: Final = 0.5
CONFIG: Final = """
c = get_config()
c.JupyterHub.bind_url = "http://127.0.0.1:{public}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{api}"
c.JupyterHub.db_url = "sqlite:///{place}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{place}/cookie-secret"
c.ConfigurableHTTPProxy.command = ["{proxy}"]
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_api}"
c.ConfigurableHTTPProxy.pid_file = "{place}/proxy.pid"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = "{password}"
c.Authenticator.allow_all = True
c.JupyterHub.load_groups = {groups!r}
c.JupyterHub.allow_named_servers = True
c.JupyterHub.services = [{{"name": "tests", "api_token": "{admin}"}}]
c.JupyterHub.load_roles = [
    {{
        "name": "tests",
        "services": ["tests"],
        "scopes": ["admin:users", "admin:servers", "access:servers", "admin:groups"],
    }}
]
c.Spawner.cmd = {server!r}
c.Spawner.environment = {{"JUPYTERHUB_ACTIVITY_INTERVAL": "86400", **{light!r}}}
c.JupyterHub.last_activity_interval = 86400    # what is reported meanwhile is the studio's
c.Spawner.start_timeout = c.Spawner.http_timeout = 120

from sublet.studio.hub import configure
configure(c, token_file="{token_file}", studio="{studio}", office="{office}")
"""


def can_have_hub() -> bool:
    """Whether a hub can be started here, whose users are users of the machine."""
    programs = all(map(shutil.which, (*HUB_NEEDS[:-1], "node"))) and PROXY.exists()
    return os.geteuid() == 0 and closed_folder(ROOT) is None and programs and find_spec("jupyterhub") is not None


@contextlib.contextmanager
def local_users(*names: str) -> Iterator[list[str]]:
    """Users of this machine, under names that no other run has, each with an empty home."""
    with tempfile.TemporaryDirectory(prefix="sublet-homes-", dir="/tmp", ignore_cleanup_errors=True) as text:
        Path(text).chmod(0o755)
        made: list[str] = []
        try:
            for name in names:
                user = f"{name}-{secrets.token_hex(3)}"
                home = Path(text) / user
                words = ["useradd", "--no-create-home", "--home-dir", str(home), "--shell", "/bin/sh", user]
                until(f"user {user}", partial(_done, words), PATIENCE_S)  # another run may hold the file
                made.append(user)
                home.mkdir()
                entry = pwd.getpwnam(user)
                os.chown(home, entry.pw_uid, entry.pw_gid)
            yield made
        finally:
            for user in made:
                until(f"the end of user {user}", partial(_done, ["userdel", user]), PATIENCE_S)


def _done(words: list[str]) -> bool:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 8, 10), done.stderr  # busy: the file is locked, or a process is just ending
    return done.returncode == 0


@contextlib.contextmanager
def kept_ports(count: int) -> Iterator[list[int]]:
    """Ports of the loopback that are given to nothing else meanwhile. They are bound and do not listen, so a program
    that sets SO_REUSEADDR, as the hub and its proxy do, can listen there."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]


def until_hub_says(what: str, is_so: Callable[[], object]) -> None:
    """Asks it now and then: an answer takes the hub some twenty milliseconds of a processor, and its proxy as well."""

    def is_so_now() -> bool:
        found = bool(is_so())
        if not found:
            time.sleep(LOOK_S)
        return found

    until(what, is_so_now, PATIENCE_S)


def browser_of(url: str) -> httpx.Client:
    """Cookies, redirects, and connections that are kept; to this machine alone, so nothing of TLS is loaded."""
    return httpx.Client(base_url=url, follow_redirects=True, timeout=PATIENCE_S, verify=False)


@dataclass
class HubStage:
    """The hub, started and ended by the tests."""

    place: Path
    office: OfficeStage
    studio: StudioStage
    url: str
    office_url: str
    admin: str
    token: str
    """By which the hub knows the studio."""
    process: subprocess.Popen[bytes] | None = None
    browsers: list[Guest] = field(default_factory=list)
    said: Path = field(init=False)

    def __post_init__(self) -> None:
        self.said = self.place / "hub-said"
        self.client = browser_of(self.url)

    def start(self) -> None:
        """Returns when it answers through its proxy."""
        with self.said.open("ab") as said:
            words = [*python_module("jupyterhub"), "-f", str(self.place / "jupyterhub_config.py")]
            self.process = subprocess.Popen(
                enterable(words),
                cwd=self.place,
                env={**os.environ, **places(self.place / "interpreter"), "PYTHONPATH": str(ROOT / "src")},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                preexec_fn=partial(set_pdeathsig, signal.SIGTERM, os.getpid()),  # noqa: PLW1509 - it ends with us
            )
        until_hub_says("the hub", self._answers)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.said.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get(f"{self.url}/hub/api/", timeout=5).status_code == 200
        return False

    def crash(self) -> None:
        """The hub is killed. Its proxy and the servers of its users go on, and the next hub finds them."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        """The hub, its proxy and the servers of its users."""
        self.client.close()
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process = None

    # ---- what the operator of the hub does

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        """The hub's API, as a service that may do everything with users and servers."""
        return self.client.request(method, f"/hub/api{path}", json=body, headers=self.auth)

    @property
    def auth(self) -> dict[str, str]:
        return {"authorization": f"token {self.admin}"}

    def start_servers(self, *users: str) -> None:
        """All at the same time, and those that do not run already."""
        for user in users:
            answer = self.ask("POST", f"/users/{user}/server")
            assert answer.status_code in (201, 202) or "is already running" in answer.text, answer.text
        for user in users:
            until_hub_says(f"the server of {user}", partial(self._is_ready, user))

    def _is_ready(self, user: str) -> bool:
        return bool(self.servers(user).get("", {}).get("ready"))

    def stop_server(self, user: str, server: str = "") -> None:
        where = f"/users/{user}/servers/{server}" if server else f"/users/{user}/server"
        answer = self.ask("DELETE", where)
        assert answer.status_code in (202, 204), answer.text
        until_hub_says(f"the end of the server of {user}", lambda: server not in self.servers(user))

    def servers(self, user: str) -> dict[str, Any]:
        answer = self.ask("GET", f"/users/{user}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["servers"]
        return found

    def last_activity(self, user: str) -> datetime:
        """Of the user's server, which runs, as its culler reads it."""
        return datetime.fromisoformat(self.servers(user)[""]["last_activity"])

    @contextlib.contextmanager
    def kernel(self, user: str, name: str = "python3") -> Iterator[Kernel]:
        """A kernel of the user's server, which runs."""
        at = f"{self.url}/user/{user}/api/kernels"
        answer = self.client.post(at, headers=self.auth, json={"name": name})
        assert answer.status_code == 201, answer.text
        ident = answer.json()["id"]
        made = Kernel(f"{at.replace('http', 'ws', 1)}/{ident}/channels", self.admin)
        try:
            yield made
        finally:
            made.line.close()
            self.client.delete(f"{at}/{ident}", headers=self.auth)

    def browser(self) -> Guest:
        """A new one, with no cookies."""
        self.browsers.append(Guest(self))
        return self.browsers[-1]

    def close_browsers(self) -> None:
        while self.browsers:
            self.browsers.pop().client.close()


class Kernel:
    """Runs cells, as a notebook's front end does."""

    def __init__(self, url: str, token: str) -> None:
        self.line = create_connection(url, header=[f"Authorization: token {token}"], timeout=PATIENCE_S)
        self.said = ""
        """What the cell that runs has shown up to now."""
        self._waits: set[str] = set()

    def ask(self, code: str) -> str:
        """Run a cell; the id by which its answer is known."""
        self.said, self._waits = "", {"reply", "idle"}  # they come over two channels, in any order
        ident = uuid.uuid4().hex
        header = {"msg_id": ident, "msg_type": "execute_request", "username": "", "session": "tests", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
        self.line.send(json.dumps(message))
        return ident

    def hear(self, ident: str) -> bool:
        """Take one message; whether it says that the cell is done."""
        message = json.loads(self.line.recv())
        if message.get("parent_header", {}).get("msg_id") != ident:
            return False
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                self.said += content["text"]
            case "display_data" | "update_display_data" | "execute_result":
                self.said += f"{content['data'].get('text/plain', '')}\n"
            case "error":
                self.said += "\n".join(content["traceback"])
            case "execute_reply":
                self._waits.discard("reply")
                assert content["status"] == "ok", self.said or content
            case "status" if content["execution_state"] == "idle":
                self._waits.discard("idle")
        return not self._waits

    def run(self, code: str) -> str:
        """Run a cell that works; what it showed."""
        return self.hear_all(self.ask(code))

    def hear_all(self, ident: str) -> str:
        """Wait until the cell is done; what it showed."""
        while not self.hear(ident):
            pass
        return self.said


class Guest:
    """A person's browser: cookies, forms and redirects, everything through the hub's proxy."""

    def __init__(self, stage: HubStage) -> None:
        self.stage = stage
        self.client = browser_of(stage.url)

    def log_in(self, user: str) -> None:
        """At the hub."""
        page = self.client.get("/hub/login")
        found = re.search(r'name="_xsrf"\s+value="([^"]+)"', page.text)
        assert found is not None, page.text
        fields = {"username": user, "password": PASSWORD, "_xsrf": found[1]}
        answer = self.client.post("/hub/login", data=fields, params={"next": "/hub/home"})
        assert answer.url.path.startswith("/hub/home"), answer.url

    def studio(self, path: str = "/") -> httpx.Response:
        """A page of the studio, signed in if the hub says so; as a browser does, it goes on where a page says so."""
        answer = self.client.get(f"/services/studio{path}")
        onward = re.search(r'http-equiv="refresh" content="0; url=([^"]+)"', answer.text)
        return answer if onward is None else self.client.get(onward[1])

    def press(self, path: str, **fields: str) -> httpx.Response:
        """A form of the studio's page."""
        found = re.search(r'name="form" value="(\w+)"', self.studio().text)
        assert found is not None
        headers = {"origin": self.stage.url, "sec-fetch-site": "same-origin"}
        return self.client.post(f"/services/studio{path}", data={"form": found[1], **fields}, headers=headers)


@contextlib.contextmanager
def hub_stage(
    devices: str,
    groups: dict[str, list[str]],
    *,
    settings: str = "",
) -> Iterator[HubStage]:
    """Everything together. ``settings`` are lines of [hub] in studio.toml."""
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="sublet-hub-", dir="/tmp", ignore_cleanup_errors=True)
        )
        place = Path(text)
        place.chmod(0o755)
        shared = place / "shared"
        office = stack.enter_context(office_stage(place / "office", devices, "--shared", str(shared)))
        public, api, proxy_api = stack.enter_context(kept_ports(3))
        token_file, token, admin = place / "hub-token", secrets.token_hex(32), secrets.token_hex(32)
        token_file.write_text(f"{token}\n")
        token_file.chmod(0o600)
        toml = f'[hub]\napi = "http://127.0.0.1:{api}/hub/api"\ntoken_file = "{token_file}"\n{settings}'
        studio = stack.enter_context(studio_stage(office, toml))
        office_url = f"unix://{shared}/office.sock"
        made = HubStage(place, office, studio, f"http://127.0.0.1:{public}", office_url, admin, token)
        (place / "jupyterhub_config.py").write_text(
            CONFIG.format(
                public=public,
                api=api,
                proxy_api=proxy_api,
                place=place,
                proxy=PROXY,
                password=PASSWORD,
                groups={name: {"users": users} for name, users in groups.items()},
                server=python_module("jupyterhub.singleuser"),
                admin=admin,
                light=light_environment(place / "light", str(ROOT / "src")),
                token_file=token_file,
                studio=studio.address,
                office=office_url,
            )
        )
        stack.callback(made.stop)
        made.start()
        yield made
