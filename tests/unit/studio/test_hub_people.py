"""Users of a JupyterHub as people of the studio: the real people and database, a hub and a clock that are held."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import Unauthorized
from sublet.studio import hub_people
from sublet.studio.hub_api import HubAway, HubRefused, HubUser
from sublet.studio.hub_people import HubPeople, ServerBody, server_label
from sublet.studio.people import HUB_LABEL, NotSignedIn, People
from sublet.values import NS_PER_S
from tests.unit.studio.test_course_page import of

HANDSHAKE: Any = None
MY_UID = os.getuid() or 65534


class Studio:
    """What the hub's people need of a studio, and the hub beside it."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1_000_000.0
        self.people = People(folder, wall_ns=lambda: round(self.now_s * NS_PER_S), random=os.urandom)
        self.settings = SimpleNamespace(
            hub_recheck_s=60,
            hub_answer_s=5,
            hub_creates_people=True,
            hub_teachers={},
            hub_tenants={"students": "course", "staff": "local"},
            hub_token_s=600,
            cookie_s=86_400,
        )
        self.tenants = [self.tenant("local"), self.tenant("course")]
        self.leases: list[Any] = []
        self.office = SimpleNamespace(shown=lambda: SimpleNamespace(tenants=self.tenants, leases=self.leases))
        self.sessions: dict[str, set[str]] = {}
        """Of each person."""
        self.says: HubUser | Exception = HubUser(name="ana", groups=("students",))
        """What the hub answers."""
        self.asked = 0
        self.running: dict[str, list[str]] = {}
        self.active: list[str] = []
        self.hub = HubPeople(self, self, "secret", now_s=lambda: self.now_s)  # type: ignore[arg-type]

    def tenant(self, name: str, **facts: Any) -> Any:
        return SimpleNamespace(**{"id": name, "operator": False, "studio": False, "uid": None, **facts})

    def of(self, person: Any) -> Any:
        return SimpleNamespace(has=lambda ident: ident in self.sessions.get(person.name, ()))

    # ---- the hub

    def token_for(self, code: str, handshake: object) -> str:
        return code

    def user_of(self, token: str) -> HubUser:
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def servers(self) -> dict[str, list[str]]:
        return self.running

    def report_active(self, name: str, servers: list[str], at: str) -> None:
        self.active.append(name)

    # ---- a browser

    def check(self, cookie: str) -> None:
        self.hub.check(cookie, self.people.of_cookie(cookie))


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    return Studio(tmp_path)


def test_a_browser_is_let_in_for_as_long_as_the_hub_has_said_so_lately(studio: Studio) -> None:
    cookie = studio.hub.sign_in("code", HANDSHAKE)
    studio.now_s += 60
    studio.check(cookie)
    assert studio.asked == 1
    studio.now_s += 1
    studio.check(cookie)
    assert studio.asked == 2


@pytest.mark.parametrize("says", [HubRefused("it is logged out", do=""), HubUser(name="bob", groups=("students",))])
def test_a_browser_that_the_hub_refuses_or_calls_by_another_name_is_signed_out(studio: Studio, says: Any) -> None:
    """Also where the studio keeps cookies: another process of it would let the browser in."""
    cookie = studio.hub.sign_in("code", HANDSHAKE)
    studio.now_s, studio.says = studio.now_s + 61, says
    with pytest.raises(NotSignedIn):
        studio.check(cookie)
    with pytest.raises(NotSignedIn):
        studio.people.of_cookie(cookie)


def test_a_hub_that_does_not_answer_lets_no_browser_in_and_is_asked_again_after_a_while(studio: Studio) -> None:
    cookie = studio.hub.sign_in("code", HANDSHAKE)
    user, studio.says = studio.says, HubAway("did not answer in time")
    studio.now_s += 61
    for _ in range(3):  # a page asks for many things
        with pytest.raises(HubAway):
            studio.check(cookie)
    assert studio.asked == 2
    studio.now_s, studio.says = studio.now_s + 6, user
    studio.check(cookie)
    assert studio.asked == 3


def test_who_showed_a_token_of_the_studios_own_is_no_matter_of_the_hub(studio: Studio) -> None:
    studio.people.add("eva", "course")
    cookie = studio.people.sign_in(studio.people.new_token("eva"))
    studio.says = HubAway("is away")
    studio.check(cookie)
    assert studio.asked == 0


def test_only_so_many_browsers_are_remembered(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is forgotten signs in again."""
    monkeypatch.setattr(hub_people, "SIGN_INS_MAX", 2)
    first, *others = [studio.hub.sign_in("code", HANDSHAKE) for _ in range(3)]
    with pytest.raises(NotSignedIn, match="started again"):
        studio.check(first)
    for cookie in others:
        studio.check(cookie)


def test_a_new_person_gets_the_tenant_that_the_settings_name_for_a_group(studio: Studio) -> None:
    assert studio.hub.admit(HubUser(name="ana", groups=("others", "students"))).tenant == "course"


@pytest.mark.parametrize("groups", [("staff",), (), ("others",)])
def test_no_user_of_a_hub_becomes_the_owner_or_comes_without_a_tenant(studio: Studio, groups: tuple[str, ...]) -> None:
    """The owner's tenant is never a user's, though the settings say so."""
    with pytest.raises(Unauthorized, match="no tenant"):
        studio.hub.admit(HubUser(name="ana", groups=groups))


@pytest.mark.parametrize(
    ("tenant", "uid", "is_theirs"),
    [
        ({}, MY_UID, True),
        ({"operator": True}, MY_UID, False),
        ({"studio": True}, MY_UID, False),
        ({}, 0, False),
    ],
    ids=["plain", "operator", "studio", "root"],
)
def test_a_tenant_that_the_office_binds_to_the_user_is_theirs_unless_it_has_rights_over_others(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, tenant: dict[str, Any], uid: int, is_theirs: bool
) -> None:
    monkeypatch.setattr(pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid=uid))
    studio.tenants.append(studio.tenant("bound", uid=uid, **tenant))
    user = HubUser(name="ana", groups=())
    if is_theirs:
        assert studio.hub.admit(user).tenant == "bound"
    else:
        with pytest.raises(Unauthorized, match="no tenant"):
            studio.hub.admit(user)


def test_the_token_of_a_server_is_good_while_that_server_runs(studio: Studio) -> None:
    """And not because another one of the same person does."""
    for server in ("", "gpu"):
        studio.hub.begin_server(ServerBody(user="ana", server=server, groups=["students"]))
    studio.running = {"ana": ["gpu"]}
    studio.now_s += 500
    studio.hub.update_servers()
    studio.now_s += 500
    until = {token.label: token.expires_ns for token in studio.people.of_servers()}
    now_ns = studio.now_s * NS_PER_S
    assert {label: (ns or 0) > now_ns for label, ns in until.items()} == {
        server_label(""): False,
        server_label("gpu"): True,
    }
    studio.hub.begin_server(ServerBody(user="ana", server="third", groups=["students"]))
    labels = {token.label for token in studio.people.of_servers()}
    assert labels == {server_label("gpu"), server_label("third")}, "what has expired does not stay"


def test_of_people_with_one_tenant_that_one_is_active_whose_session_has_the_lease(studio: Studio) -> None:
    """Else the hub would keep the servers of a whole course for one student."""
    for user in ("ana", "bob"):
        studio.hub.begin_server(ServerBody(user=user, groups=["students"]))
    studio.running = {"ana": [""], "bob": [""]}
    studio.sessions = {"ana": {"s-1"}, "bob": {"s-2"}}
    studio.leases = [of("course", "s-1", status="active", idle=False)]
    studio.hub.update_servers()
    assert studio.active == ["ana"]


def test_signing_in_through_the_hub_is_told_from_other_tokens_by_its_label(studio: Studio) -> None:
    cookie = studio.hub.sign_in("code", HANDSHAKE)
    assert studio.people.of_cookie(cookie).label == HUB_LABEL
