"""The logs of office and studio as JSON lines, and the secrets that were planted in requests and are not in them."""

from __future__ import annotations

import http.client
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from sublet.client.home import socket_path
from tests.crash.office_process import Call, Line
from tests.integration.deploy_stage import PATIENCE_S, Machine, machine_stage
from tests.traces import until

pytestmark = pytest.mark.slow


@pytest.fixture
def machine() -> Iterator[Machine]:
    with machine_stage() as made:
        made.start_office("--log-format", "json")
        made.start("sublet-studio", "--listen", "127.0.0.1:0", "--log-format", "json")
        until("the studio is up", lambda: "The studio is up" in made.said("sublet-studio"), PATIENCE_S)
        until("the office answers", lambda: made.readiness() == (200, []), PATIENCE_S)
        yield made


def logged(machine: Machine, name: str) -> list[dict[str, Any]]:
    """What a unit wrote to its log, which is JSON line by line; what it says to people on stdout is not part of it."""
    said = machine.said(name).splitlines()
    lines = [
        line
        for line in said
        if not re.match(r"The (studio|office) is up|Waiting for the office|Until `|There are no people", line)
    ]
    return [json.loads(line) for line in lines]


def ask(machine: Machine, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> int:
    line = http.client.HTTPConnection(urlsplit(machine.address).netloc, timeout=PATIENCE_S)
    try:
        line.request(method, path, body, headers)
        return line.getresponse().status
    finally:
        line.close()


def test_no_secret_of_a_request_is_in_a_log(machine: Machine) -> None:
    """Of tokens, invites, cookies and the tokens of forms, in heads, paths, queries and bodies, where they belong and
    where they do not, whether they are good or refused. Each request has its line, with its route and person."""
    office_token = machine.run("tenant", "add", "physics").stdout.strip()
    token = machine.run("person", "add", "ana", "--tenant", "physics").stdout.strip()
    invite = machine.run("person", "invite", "ana", "--url", machine.address).stdout.strip().partition("#")[2]
    form = {"content-type": "application/x-www-form-urlencoded", "origin": machine.address}
    sign_in = http.client.HTTPConnection(urlsplit(machine.address).netloc, timeout=PATIENCE_S)
    sign_in.request("POST", "/sign-in", urlencode({"token": token}).encode(), form)
    cookie = (sign_in.getresponse().headers["set-cookie"] or "").partition(";")[0].partition("=")[2]
    sign_in.close()
    secrets = {"tenant": office_token, "person": token, "invite": invite, "cookie": cookie}
    assert all(len(one) > 40 for one in secrets.values()), secrets
    for secret, wrong in itertools.product(secrets.values(), ("", "x")):
        said = secret + wrong
        for path in (f"/{said}", f"/v1/sessions/{said}", f"/?token={said}", f"/office/audit?of={said}"):
            for headers in (
                {"authorization": f"Bearer {said}"},
                {"cookie": f"sublet_studio={said}"},
                {"authorization": said, "referer": f"{machine.address}/join#{said}", "x-forwarded-for": said},
            ):
                ask(machine, "GET", path, headers)
        bearer = {"authorization": f"Bearer {token}"}
        body = json.dumps({"name": said, "vram": 1 << 30, "later": True}).encode()
        ask(machine, "POST", "/v1/sessions", bearer, body)
        ask(machine, "POST", "/v1/sessions", bearer, f'{{"{said}": '.encode())
        for path in ("/sign-in", "/join", "/start", "/sign-out", f"/sessions/{said}/end"):
            fields = {"token": said, "invite": said, "form": said, "name": said}
            ask(machine, "POST", path, {**form, "cookie": f"sublet_studio={said}"}, urlencode(fields).encode())
        line = Line(socket_path(machine.home))
        for where in (f"/v1/leases/{said}", f"/v1/leases?tenant={said}", f"/{said}"):
            line.ask(Call(method="GET", path=where, token=said))
        line.ask(Call(method="POST", path="/v1/leases", body={"tenant": said, "token": said}, token=said))
        line.close()
    for name in ("sublet-studio", "sublet-office"):
        lines = logged(machine, name)
        assert {"at", "level", "part", "logger", "message"} <= set.intersection(*(set(one) for one in lines))
        assert lines[0]["event"] == "started"
        assert {one["part"] for one in lines} == {name.removeprefix("sublet-")}
        written = machine.said(name) + (machine.home / "supervisor.log").read_text()
        for what, secret in secrets.items():
            core = re.sub(r"^sublet_(studio_|invite_)?", "", secret)
            assert core[:20] not in written, (name, what)
    requests = [one for one in logged(machine, "sublet-studio") if one.get("event") == "request"]
    routes = {(one["method"], one["route"], one["status"]) for one in requests}
    for met in (
        ("POST", "/sign-in", 303),
        ("GET", "/v1/sessions/{id}", 404),
        ("GET", "none", 404),
        ("POST", "/join", 401),
    ):
        assert met in routes, routes
    assert {"ana", None} == {one.get("person") for one in requests}
    assert all(one["tenant"] == "physics" for one in requests if one.get("person"))


def test_an_office_comes_back_with_the_format_that_it_had(machine: Machine) -> None:
    assert machine.stop("sublet-office") == 0
    until("the studio notices", lambda: machine.readiness() == (503, ["office"]), PATIENCE_S)
    machine.start_office()
    until("the office answers", lambda: machine.readiness() == (200, []), PATIENCE_S)
    assert [one["event"] for one in logged(machine, "sublet-office")] == ["started", "started"]
    ready = [one for one in logged(machine, "sublet-studio") if one.get("event") == "readiness"]
    assert [one["failing"] for one in ready][-2:] == [["office"], []]
