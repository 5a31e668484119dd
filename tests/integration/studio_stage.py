"""``sublet studio`` as a process beside an office, and people who speak to it as programs and as browsers do."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from sublet.studio.office import sessions_folder
from sublet.studio.people import People
from tests.commands import start_piped
from tests.integration.office_stage import OfficeStage
from tests.traces import until

__all__ = ["PATIENCE_S", "Answer", "Browser", "Member", "StudioStage", "studio_stage"]

PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def doc(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


class StudioStage:
    """The studio, started and killed by the tests, always on the same port."""

    def __init__(self, office: OfficeStage, settings: str = "") -> None:
        """``settings``: the text of studio.toml."""
        self.office = office
        self.home = office.office.home
        self.people = People(sessions_folder(str(self.home)), wall_ns=time.time_ns, random=secrets.token_bytes)
        self.log = self.home / "studio-said"
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))  # the studio may listen there, and no other gets it while that is dead
        self.port: int = self._reserved.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        if settings:
            (self.home / "studio.toml").write_text(settings)
        self._operators_token = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *more: str) -> None:
        """With more options, if there are any. Returns when it says that it is up."""
        with self.log.open("a") as errors:
            words = [sys.executable, "-m", "sublet", "studio", "--listen", f"127.0.0.1:{self.port}", *more]
            env = {**self.office.office.env(), "SUBLET_HOME": str(self.home)}
            self.process = start_piped(words, env, stderr=errors.fileno())
        assert self.process.stdout is not None
        said = self.process.stdout.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
        assert found is not None, (said, self.log.read_text())
        self.port = int(found[1])

    def kill(self, number: int = signal.SIGKILL) -> int:
        """By this signal; its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.gone()

    def gone(self) -> int:
        """Wait for the end of one that did not come up; its exit status."""
        assert self.process is not None
        status = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return status

    def close(self) -> None:
        """It ends, and its port is anybody's."""
        if self.process is not None:
            self.kill()
        self._reserved.close()

    def tenant(self, name: str) -> None:
        """In the office."""
        answer = self.office.office.ask("POST", "/v1/tenants", {"id": name})
        assert answer.status == 201, answer

    def operators_token(self) -> str:
        """The access token of an operator of the office, who confirms with it what the studio may not do alone."""
        if not self._operators_token:
            answer = self.office.office.ask("POST", "/v1/tenants", {"id": "head", "operator": True})
            self._operators_token = answer.doc["token"]
        return self._operators_token

    def member(self, name: str, tenant: str) -> Member:
        """A new person."""
        self.people.add(name, tenant)
        return Member(self, self.people.new_token(name))

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as line:
            line.request(method, path, body, headers or {})
            got = line.getresponse()
            return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())


class Member:
    """A person's program, with the token."""

    def __init__(self, stage: StudioStage, token: str) -> None:
        self.stage, self.token = stage, token

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        raw = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.stage.ask(method, path, raw, {"authorization": f"Bearer {self.token}"})

    def done(self, method: str, path: str, body: object = None) -> Any:
        """An answer that is no error. A busy machine's office may not answer in time: what may be asked twice is."""
        answers: list[Answer] = []

        def is_answered() -> bool:
            answers[:] = [self.ask(method, path, body)]
            return answers[0].status != 503 or (method, path) == ("POST", "/v1/sessions")

        until(f"an answer to {method} {path}", is_answered, PATIENCE_S)
        answer = answers[0]
        assert answer.status == 200, answer
        return answer.doc

    def state(self, session: str) -> str:
        return str(self.done("GET", f"/v1/sessions/{session}")["state"])

    def browser(self) -> Browser:
        """One that is signed in."""
        made = Browser(self.stage)
        answer = made.send("/sign-in", {"token": self.token})
        assert (answer.status, answer.headers["location"]) == (303, "/"), answer
        return made


class Browser:
    """What a browser sends: a cookie, and the origin of its forms."""

    def __init__(self, stage: StudioStage) -> None:
        self.stage, self.cookie, self.given = stage, "", ""
        self._forms: dict[str, str] = {}

    def look(self, path: str = "/") -> Answer:
        return self.stage.ask("GET", path, None, {"cookie": self.cookie})

    @property
    def form_token(self) -> str:
        """That of the first page it looked at, which holds for as long as the cookie."""
        if self.cookie not in self._forms:
            found = re.search(r'name="form" value="(\w+)"', self.look().text)
            assert found is not None
            self._forms[self.cookie] = found[1]
        return self._forms[self.cookie]

    def send(self, path: str, fields: dict[str, str], **headers: str) -> Answer:
        """A form."""
        said = {
            "content-type": "application/x-www-form-urlencoded",
            "cookie": self.cookie,
            "origin": self.stage.address,
            "sec-fetch-site": "same-origin",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        answer = self.stage.ask("POST", path, urlencode(fields).encode(), said)
        if given := answer.headers.get("set-cookie"):
            self.given, self.cookie = given, given.partition(";")[0]
        return answer

    def press(self, path: str, **fields: str) -> Answer:
        """A form of the page."""
        return self.send(path, {"form": self.form_token, **fields})


@contextlib.contextmanager
def studio_stage(office: OfficeStage, settings: str = "") -> Iterator[StudioStage]:
    stage = StudioStage(office, settings)
    try:
        stage.start()
        yield stage
    finally:
        stage.close()
