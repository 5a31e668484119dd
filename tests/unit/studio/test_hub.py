"""What studio and JupyterHub say to one another, with the other side as a server that answers as a test wants it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from traitlets.config import Config

from sublet.errors import InvalidRequest
from sublet.studio.hub import SCOPES, configure
from sublet.studio.hub_api import PAGE, Handshake, Hub, HubAway, HubRefused, HubUser
from sublet.studio.hub_people import is_in_use, server_label
from sublet.studio.people import SERVER_LABEL
from tests.unit.studio.test_course_page import of

TOKEN = "0123456789abcdef" * 4
USER = {"kind": "user", "name": "ana", "groups": ["students"], "scopes": ["access:services!service=studio"]}


class Other:
    """The other side: what it was asked, and what it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, bytes]] = []
        """Method, path, Authorization and body."""
        self.answer: Callable[[str], tuple[int, object]] = lambda path: (200, {})
        self.url = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[Other]:
        other = self

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                other.asked.append((self.command, self.path, self.headers.get("authorization", ""), body))
                status, said = other.answer(self.path)
                raw = said if isinstance(said, bytes) else json.dumps(said).encode()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked has stopped waiting
                    self.send_response(status)
                    self.send_header("content-length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)

            do_GET = do_POST = do  # noqa: N815 - as http.server calls them

            def log_message(self, *said: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


@pytest.fixture
def other() -> Iterator[Other]:
    with Other().listening() as made:
        yield made


@pytest.fixture
def hub(other: Other) -> Hub:
    return Hub(f"{other.url}/base/hub/api", TOKEN, "studio", answer_s=lambda: 20.0)


def test_what_a_browser_carries_follows_from_its_secret_and_does_not_show_it() -> None:
    one, same, two = Handshake("a" * 43), Handshake("a" * 43), Handshake("b" * 43)
    assert (one.state("/"), one.verifier) == (same.state("/"), same.verifier)
    assert len({one.state("/"), one.verifier, one.challenge, two.state("/"), two.verifier}) == 5
    assert "aaa" not in one.state("/") + one.verifier + repr(one)
    for path in ("/", "/course/ml1"):
        assert same.path_of(one.state(path)) == path
    for wrong in ("", "/", two.state("/"), one.state("/")[:-1], f"{one.state('/')}office", "ä", "\ud800", "0" * 65):
        assert one.path_of(wrong) is None
    assert Handshake("").path_of(Handshake("").state("/")) is None
    digest = hashlib.sha256(one.verifier.encode()).digest()
    assert base64.urlsafe_b64decode(f"{one.challenge}=") == digest


def test_a_browser_is_sent_to_the_hub_below_its_base_and_back_below_the_service(hub: Hub) -> None:
    assert hub.prefix == "/base/services/studio"
    made = urlsplit(hub.sign_in_path(Handshake("a" * 43), "/office"))
    asked = {name: values[0] for name, values in parse_qs(made.query).items()}
    assert (made.netloc, made.path) == ("", "/base/hub/api/oauth2/authorize")
    assert asked["client_id"] == "service-studio"
    assert asked["redirect_uri"] == "/base/services/studio/oauth_callback"
    assert asked["state"] == Handshake("a" * 43).state("/office")
    assert asked["code_challenge"] == Handshake("a" * 43).challenge
    assert TOKEN not in made.query


def test_a_code_becomes_a_token_and_a_token_a_user(hub: Hub, other: Other) -> None:
    """The service's own secret goes to the hub's token endpoint alone; the user is asked for with the user's token."""
    other.answer = lambda path: (200, {"access_token": "t-1"} if path.endswith("token") else USER)
    token = hub.token_for("c-1", Handshake("a" * 43))
    assert hub.user_of(token) == HubUser(name="ana", groups=("students",))
    (_, path, _, form), (_, of_user, authorization, _) = other.asked
    assert (path, of_user) == ("/base/hub/api/oauth2/token", "/base/hub/api/user")
    asked = {name: values[0] for name, values in parse_qs(form.decode()).items()}
    assert (asked["code"], asked["client_secret"], asked["grant_type"]) == ("c-1", TOKEN, "authorization_code")
    assert asked["code_verifier"] == Handshake("a" * 43).verifier
    assert authorization == "Bearer t-1"


@pytest.mark.parametrize(
    ("status", "answer", "error", "said"),
    [
        (500, {}, HubAway, "answered with 500"),
        (302, {}, HubAway, "answered with 302"),
        (200, b"<html>a proxy's page</html>", HubAway, "cannot be read"),
        (200, b"\xff", HubAway, "cannot be read"),
        (200, [], HubAway, "cannot be read"),
        (200, {"kind": "user"}, HubAway, "cannot be read"),
        (403, {}, HubRefused, "does not know this sign-in"),
        (200, {**USER, "kind": "service"}, HubRefused, "not of a user of this service"),
        (200, {**USER, "scopes": ["access:services!service=other"]}, HubRefused, "not of a user of this service"),
        (200, {**USER, "scopes": []}, HubRefused, "not of a user of this service"),
    ],
)
def test_an_answer_that_does_not_name_a_user_of_this_service_names_none(
    hub: Hub, other: Other, status: int, answer: object, error: type[Exception], said: str
) -> None:
    other.answer = lambda path: (status, answer)
    with pytest.raises(error, match=said):
        hub.user_of("t-1")


def test_a_hub_that_is_slow_or_not_there_did_not_answer(other: Other) -> None:
    """Nothing is sent again: the person decides that."""
    go_on = threading.Event()

    def slowly(path: str) -> tuple[int, object]:
        assert go_on.wait(60)
        return 200, USER

    other.answer = slowly
    with pytest.raises(HubAway, match="did not answer in time"):
        Hub(f"{other.url}/hub/api", TOKEN, "studio", answer_s=lambda: 0.05).user_of("t-1")
    go_on.set()
    assert len(other.asked) <= 1  # none where the time was over before the request had come
    with pytest.raises(HubAway, match="did not answer in time"):
        Hub("http://127.0.0.1:9/hub/api", TOKEN, "studio", answer_s=lambda: 20.0).user_of("t-1")


def test_the_servers_that_run_are_read_page_by_page_and_activity_is_reported(hub: Hub, other: Other) -> None:
    first = [{"kind": "user", "name": f"u{number}", "servers": {"": {}}} for number in range(PAGE)]
    second = [{"kind": "user", "name": "ana", "servers": {"": {}, "gpu": {}}}, {"kind": "user", "name": "ben"}]
    other.answer = lambda path: (200, second if f"offset={PAGE}" in path else first)
    found = hub.servers()
    assert len(found) == PAGE + 1
    assert found["ana"] == ["", "gpu"]
    assert [authorization for _, _, authorization, _ in other.asked] == [f"Bearer {TOKEN}"] * 2
    other.asked.clear()
    hub.report_active("ana/b", ["", "gpu"], "2026-01-01T00:00:00Z")
    [(method, path, _, body)] = other.asked
    assert (method, path) == ("POST", "/base/hub/api/users/ana%2Fb/activity")
    assert set(json.loads(body)["servers"]) == {"", "gpu"}
    other.answer = lambda path: (404, {})
    hub.report_active("gone", [""], "2026-01-01T00:00:00Z")
    other.answer = lambda path: (403, {})
    with pytest.raises(HubAway, match="403"):
        hub.report_active("ana", [""], "2026-01-01T00:00:00Z")


def test_each_server_of_a_person_has_a_label_of_its_own() -> None:
    names = ("", "gpu", "GPU", "gpu ", "ä", "a/b", "-", "x" * 40, "x" * 41, "gpu.1")
    labels = [server_label(name) for name in names]
    assert labels[:2] == [SERVER_LABEL, f"{SERVER_LABEL}-gpu"]
    assert len(set(labels)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9._-]{1,63}", label) for label in labels)


@pytest.mark.parametrize(
    ("is_used", "lease"),
    [
        (True, {"status": "active", "idle": False}),
        (True, {"status": "noticed", "idle": False}),
        (False, {"status": "active", "idle": True}),
        (False, {"status": "ended", "idle": False}),
        (True, {"status": "queued", "idle": False, "peer": "uid 1001, pid 7"}),
        (True, {"status": "granted", "idle": False, "peer": "uid 1001, pid 7"}),
        (False, {"status": "queued", "idle": False, "peer": ""}),
        (False, {"status": "active", "idle": False, "wants": [{"kind": "block", "amount": 1}]}),
    ],
)
def test_a_server_is_in_use_while_a_cell_runs_or_waits_and_not_while_a_page_does(
    is_used: bool, lease: dict[str, Any]
) -> None:
    """What a kernel holds and does not use keeps no server, and neither does what the studio waits for."""
    assert is_in_use(of("ana", "s-1", **lease)) is is_used


# ---- in the hub's configuration


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "hub-token"
    path.write_text(f"{TOKEN}\n")
    return str(path)


def test_the_configuration_adds_to_what_is_there(token_file: str) -> None:
    """Services, roles and the role of users stay, in whichever form they were given; no scope is more than needed."""
    c = Config()
    c.JupyterHub.services = [{"name": "culler"}]
    c.JupyterHub.load_roles.append({"name": "user", "scopes": ["self", "access:services!service=culler"]})
    configure(c, token_file=token_file, studio="http://127.0.0.1:9999/")
    assert [one["name"] for one in c.JupyterHub.services] == ["culler", "studio"]
    entry = c.JupyterHub.services[1]
    assert (entry["url"], entry["api_token"]) == ("http://127.0.0.1:9999", TOKEN)
    roles = {one["name"]: one for one in c.JupyterHub.load_roles}
    assert roles["sublet-studio"] == {"name": "sublet-studio", "scopes": list(SCOPES), "services": ["studio"]}
    assert roles["user"]["scopes"] == ["self", "access:services!service=culler", "access:services!service=studio"]
    alone = Config()
    configure(alone, token_file=token_file, service="gpus")
    assert {"name": "user", "scopes": ["self", "access:services!service=gpus"]} in alone.JupyterHub.load_roles


def test_a_configuration_that_cannot_work_is_refused_when_the_hub_starts(token_file: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"token_file": str(tmp_path / "none")}, "cannot be read"),
        ({"token_file": str(empty)}, "is empty"),
        ({"token_file": token_file, "studio": "unix:///run/studio.sock"}, "cannot reach"),
        ({"token_file": token_file, "studio": "http://gpu.example.org"}, "in the clear"),
        ({"token_file": token_file, "service": "Studio"}, "not a valid service name"),
    ]
    for words, said in wrong:
        with pytest.raises(InvalidRequest, match=said):
            configure(Config(), **words)


def spawner(name: str = "", **environment: str) -> Any:
    user = SimpleNamespace(name="ana", groups=[SimpleNamespace(name="students")])
    return SimpleNamespace(user=user, name=name, environment=environment, log=logging.getLogger("spawner"))


def hooks(token_file: str, studio: str, **set_before: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    c = Config()
    for name, value in set_before.items():
        c.Spawner[name] = value
    configure(c, token_file=token_file, studio=studio)
    return c.Spawner.pre_spawn_hook, c.Spawner.post_stop_hook


def test_a_server_starts_with_a_token_of_its_own_and_the_hub_s_stays_with_the_hub(
    token_file: str, other: Other
) -> None:
    """Hooks that were set before run first, whether they are coroutines or not."""
    came: list[str] = []

    async def slow(one: Any) -> None:
        came.append(f"slow {one.name}")

    first = {"pre_spawn_hook": lambda one: came.append(one.name), "post_stop_hook": slow}
    before, after = hooks(token_file, other.url, **first)
    other.answer = lambda path: (200, {"token": "sublet_studio_x"})
    one = spawner("gpu", EDITOR="vi", SUBLET_STUDIO_TOKEN="stale")
    asyncio.run(before(one))
    assert one.environment == {
        "EDITOR": "vi",
        "SUBLET_URL": "unix:///run/sublet/office.sock",
        "SUBLET_STUDIO": other.url,
        "SUBLET_STUDIO_TOKEN": "sublet_studio_x",
    }
    asyncio.run(after(one))
    assert came == ["gpu", "slow gpu"]
    (_, begins, shown, body), (_, ends, _, ended) = other.asked
    assert (begins, ends) == ("/v1/hub/servers", "/v1/hub/servers/end")
    assert shown == f"Bearer {TOKEN}"
    assert json.loads(body) == {"user": one.user.name, "server": "gpu", "groups": ["students"]}
    assert json.loads(ended) == {"user": one.user.name, "server": "gpu"}


@pytest.mark.parametrize("status", [401, 503])
def test_without_the_studio_a_server_starts_without_a_token_and_stops_as_ever(
    token_file: str, other: Other, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Also where nothing listens; the hub's log says why, and not with which token."""
    error = {"kind": "Unauthorized", "message": "no", "do": None, "transient": False, "reason": None}
    other.answer = lambda path: (status, {"error": error})
    for studio in (other.url, "http://127.0.0.1:9"):
        before, after = hooks(token_file, studio)
        one = spawner(SUBLET_STUDIO_TOKEN="stale")
        asyncio.run(before(one))
        assert "SUBLET_STUDIO_TOKEN" not in one.environment
        asyncio.run(after(one))
    assert caplog.text.count("starts without the studio") == 2
    assert caplog.text.count("was not told") == 2
    assert TOKEN not in caplog.text
