"""Every route of the studio for every role, on a studio and an office in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from sublet.studio.people import TokenScope
from sublet.values import GIB
from tests.integration.studio_inside import StudioInside, studio_inside
from tests.integration.studio_stage import Answer, Browser, Member, StudioStage


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudioInside]:
    with studio_inside(tmp_path_factory.mktemp("studio"), "2x2GiB") as stage:
        for tenant in ("physics", "biology"):
            stage.tenant(tenant)
        yield stage


@pytest.fixture(scope="module")
def ana(studio: StudioInside) -> Member:
    return studio.member("ana", "physics")


@pytest.fixture(scope="module")
def bob(studio: StudioInside) -> Member:
    return studio.member("bob", "biology")


@pytest.fixture(scope="module")
def operator(studio: StudioInside) -> Member:
    made = studio.member("olga", "physics")
    studio.people.set_role("olga", operator=True)
    return made


@pytest.fixture(autouse=True)
def _nothing_goes_on(ana: Member, bob: Member) -> Iterator[None]:
    yield
    for person in (ana, bob):
        for session in person.done("GET", "/v1/sessions"):
            person.done("POST", f"/v1/sessions/{session['id']}/end", {"now": True})


def resting(person: Member, name: str) -> Any:
    """A new session that asks for nothing yet."""
    return person.done("POST", "/v1/sessions", {"name": name, "vram": GIB, "later": True})


def test_what_is_anothers_does_not_exist(studio: StudioInside, ana: Member, bob: Member) -> None:
    """On every route a session of another person is answered as an id that never was, and stays as it is. Both may use
    one name."""
    hers = resting(ana, "secret")
    before = ana.done("GET", "/v1/sessions?all=1")
    never = "s-0123456789ab"
    browser = bob.browser()
    met = 0
    for route in studio.app.routes:
        path = str(route.path)  # type: ignore[attr-defined]
        if "{id}" not in path:
            continue
        for method in sorted(route.methods - {"HEAD"}):  # type: ignore[attr-defined]
            for what in ("rest", "resume", "accept", "decline", "end") if "{what}" in path else ("",):
                met += 1
                answers = []
                for ident in (hers["id"], never, "secret"):
                    asked = path.replace("{id}", ident).replace("{what}", what)
                    if path.startswith("/v1/"):
                        answer = bob.ask(method, asked, {} if method == "POST" else None)
                    elif method == "GET":
                        answer = browser.look(asked)
                    else:
                        answer = browser.press(asked)
                    answers.append((answer.status, answer.text.replace(ident, "ID")))
                assert answers[0] == answers[1] == answers[2], path
                assert answers[0][0] == 404
    assert met == 14
    assert bob.done("GET", "/v1/sessions?all=1") == []
    assert hers["id"] not in browser.look().text
    assert ana.done("GET", "/v1/sessions?all=1") == before
    assert resting(bob, "secret")["id"] != hers["id"]


OPEN: Final = {
    "GET /livez",
    "GET /readyz",
    "GET /sign-in",
    "POST /sign-in",
    "GET /join",
    "POST /join",
    "GET /openapi.json",
} | {f"GET /{name}" for name in ("studio.css", "studio.js", "join.js")}
HERS: Final = {"one", "ana"}
"""Who may change ana's session."""
BY_TOKEN: Final[dict[str, set[str]]] = {
    "GET /metrics": {"olga"},
    "GET /metrics/office": {"olga"},
    "GET /v1/records": {"bob", "other", "one", "looks", "reads", "ana", "olga"},
    "POST /v1/records": {"bob", "other", "one", "ana", "olga"},
    "GET /v1/sessions": {"bob", "other", "one", "looks", "reads", "ana", "olga"},
    "POST /v1/sessions": {"bob", "ana", "olga"},
    "GET /v1/sessions/{id}": {"looks", "reads", *HERS},
    "GET /v1/sessions/{id}/explain": {"looks", "reads", *HERS},
    "GET /v1/sessions/{id}/bill": {"looks", "reads", *HERS},
    "POST /v1/sessions/{id}/resume": HERS,
    "POST /v1/sessions/{id}/accept": HERS,
    "POST /v1/sessions/{id}/decline": HERS,
    "POST /v1/sessions/{id}/rest": HERS,
    "POST /v1/sessions/{id}/end": HERS,
}
BY_COOKIE: Final[dict[str, set[str]]] = {
    "GET /": {"bob", "other", "one", "looks", "ana", "tea", "olga"},
    "GET /live": {"bob", "other", "one", "looks", "ana", "tea", "olga"},
    "POST /start": {"bob", "ana", "tea", "olga"},
    "POST /tokens": {"bob", "ana", "tea", "olga"},
    "POST /tokens/revoke": {"bob", "ana", "tea", "olga"},
    "GET /office": {"olga"},
    "GET /office/audit": {"olga"},
    "GET /office/live": {"olga"},
    "POST /office/audit": {"olga"},
    "POST /office/drain": {"olga"},
    "POST /office/clear": {"olga"},
    "GET /course/{group}": {"tea", "olga"},
    "GET /course/{group}/live": {"tea", "olga"},
    "GET /sessions/{id}/bill": {"looks", *HERS},
    "POST /sessions/{id}/{what}": HERS,
    "POST /sign-out": {"bob", "other", "one", "looks", "ana", "tea", "olga"},
}
"""Routes that a role opens. To all others they are refused, and an object is answered as one that never was."""


def test_every_route_is_open_to_its_roles_and_to_no_other(
    studio: StudioInside, ana: Member, bob: Member, operator: Member
) -> None:
    """Stranger, another person, tokens of another session, of this one, of this one to look at, to read with; member,
    teacher, operator. A route that is added has to be in the table."""
    routes: Any = studio.app.routes
    there = {f"{method} {route.path}" for route in routes for method in route.methods - {"HEAD"}}
    assert there == OPEN | BY_TOKEN.keys() | BY_COOKIE.keys()
    own, another = (resting(ana, name)["id"] for name in ("own", "another"))
    scopes = {
        "other": TokenScope(session=another),
        "one": TokenScope(session=own),
        "looks": TokenScope(session=own, read_only=True),
        "reads": TokenScope(read_only=True),
    }
    tea = studio.member("tea", "biology")
    studio.people.set_role("tea", teaches=["default"])
    members = {"ana": ana, "bob": bob, "olga": operator, "tea": tea} | {
        label: Member(studio, studio.people.new_token("ana", label, scope=scope)) for label, scope in scopes.items()
    }
    try:
        for name, allowed in BY_TOKEN.items():
            for role in sorted({"stranger", *members} - {"tea"}, key=allowed.__contains__):
                token = members[role].token if role in members else ""
                answers = [_by_token(studio, name, token, ident) for ident in (own, "s-0123456789ab")]
                opened = answers[0].status not in (401, 403, 404)
                assert opened is (role in allowed), (name, role, answers[0])
                if not opened:
                    assert answers[0].text.replace(own, "ID") == answers[1].text.replace("s-0123456789ab", "ID")
                    assert ana.state(own) != "ended"
        again = resting(ana, "again")["id"]
        scopes = {label: moved_to(scope, own, again) for label, scope in scopes.items()}
        for label, scope in scopes.items():
            members[label] = Member(studio, studio.people.new_token("ana", label, scope=scope))
        browsers = {role: member.browser() for role, member in members.items() if role != "reads"}
        browsers["stranger"] = Browser(studio)
        for name, allowed in BY_COOKIE.items():
            for role in sorted(browsers, key=allowed.__contains__):
                answer = _by_cookie(browsers[role], name, again)
                asks_for_token = answer.headers.get("location") == "/sign-in"
                opened = answer.status not in (401, 403, 404) and not asks_for_token
                assert opened is (role in allowed), (name, role, answer)
    finally:
        for label in scopes:
            studio.people.revoke("ana", label)
        studio.people.remove("tea")


def moved_to(scope: TokenScope, was: str, now: str) -> TokenScope:
    """The same for another session."""
    return TokenScope(read_only=scope.read_only, session=now if scope.session == was else scope.session)


def _by_token(studio: StudioStage, name: str, token: str, ident: str) -> Answer:
    """A request that is well-formed where that changes nothing, or what may be changed again and again."""
    method, path = name.split()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return studio.ask(method, path.replace("{id}", ident), b"{}" if method == "POST" else None, headers)


def _by_cookie(browser: Browser, name: str, ident: str) -> Answer:
    """The same, with the cookie and the token of the page's forms."""
    method, path = name.split()
    path = path.replace("{id}", ident).replace("{what}", "rest").replace("{group}", "default")
    if method == "POST":
        form = browser.form_token if browser.cookie else ""
        fields = {"form": form, "node": "nothing", "draining": "1", "resource": "x", "vouch": "1"}
        if path == "/office/audit":
            fields["token"] = browser.stage.operators_token()
        return browser.send(path, fields)
    return browser.stage.ask(method, path, None, {"cookie": browser.cookie})
