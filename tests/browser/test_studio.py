"""The studio as people meet it in browsers: with tokens of its own, and as a service of a real JupyterHub, with its
users, their servers and what runs in them. One hub, one office, one studio and one browser stand for all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import httpx
import pytest

import sublet
from sublet.studio.hub_api import Handshake
from sublet.studio.office import sessions_folder
from sublet.studio.people import HUB_LABEL
from sublet.studio.plan import CoursePlan, Queue, save_plan
from tests.browser.lab import PATIENCE_MS, PICTURES, Page, browser, cells_in, keep_quiet
from tests.integration.hub_stage import (
    HUB_NEEDS,
    PASSWORD,
    Guest,
    HubStage,
    can_have_hub,
    hub_stage,
    local_users,
    until_hub_says,
)
from tests.integration.office_stage import office_stage
from tests.integration.studio_load import Judge, Load
from tests.integration.studio_stage import PATIENCE_S, Member, StudioStage, studio_stage
from tests.light_jupyter import python_module
from tests.security.other_users import ROOT, closed_folder
from tests.traces import until

pytestmark = pytest.mark.slow

Visit: TypeAlias = Callable[..., Any]
_Test = TypeVar("_Test", bound=Callable[..., None])
DEVICES: Final = "2x16GiB"
WHOLE: Final = 16 << 30
SETTINGS: Final = 'tenants = { "guests" = "visitors" }\nteachers = { "staff" = "ml1" }\nrecheck = "1s"\nreport = "1s"\n'
NEEDS_HUB: Final = (
    pytest.mark.needs(*HUB_NEEDS),
    pytest.mark.skipif(os.geteuid() != 0, reason="other users can only be made by root"),
    pytest.mark.skipif(closed_folder(ROOT) is not None, reason="other users cannot enter this checkout"),
)


def at_hub(test: _Test) -> _Test:
    """The test needs a hub, whose users are users of the machine."""
    for mark in NEEDS_HUB:
        test = mark(test)
    return test


def looks(test: _Test) -> _Test:
    """The test needs a real browser."""
    for mark in (pytest.mark.needs("chromium"), pytest.mark.browser):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def users() -> Iterator[list[str]]:
    with local_users("ana", "bob") as made:
        yield made


@pytest.fixture(scope="module")
def hub(users: list[str]) -> Iterator[HubStage]:
    ana, bob = users
    with hub_stage(DEVICES, {"students": [ana, bob], "staff": [bob]}, settings=SETTINGS) as made:
        ask = made.office.office.ask
        assert ask("POST", "/v1/groups", {"id": "ml1"}).status == 201
        for user in users:  # as `sublet tenant add NAME --uid UID --no-token-needed --group ml1` does it
            body = {"id": f"of-{user}", "uid": pwd.getpwnam(user).pw_uid, "needs_token": False, "group": "ml1"}
            assert ask("POST", "/v1/tenants", body).status == 201
        for tenant in ("visitors", "physics"):
            made.studio.tenant(tenant)
        yield made


@pytest.fixture(autouse=True)
def _browsers_are_closed(request: pytest.FixtureRequest) -> Iterator[None]:
    hub = request.getfixturevalue("hub") if "hub" in request.fixturenames else None
    yield
    if hub is not None:
        hub.close_browsers()


@pytest.fixture(scope="module")
def ana(users: list[str]) -> str:
    return users[0]


@pytest.fixture(scope="module")
def bob(users: list[str]) -> str:
    return users[1]


@pytest.fixture(scope="module")
def studio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudioStage]:
    """That of the hub, which has an address of its own as well; one without a hub where none can be had."""
    if can_have_hub():
        stage: HubStage = request.getfixturevalue("hub")
        yield stage.studio
    else:
        with office_stage(tmp_path_factory.mktemp("office"), DEVICES) as office, studio_stage(office) as alone:
            alone.tenant("physics")
            yield alone


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all; its start is most of what a look at a page costs."""
    with browser() as made:
        yield made


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """A page of a person who has been nowhere yet: nothing of another test's is known to it."""
    contexts = []

    def opened(**more: Any) -> Any:
        contexts.append(chromium.new_context(**{"viewport": {"width": 1000, "height": 900}, **more}))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        return page

    yield opened
    for context in contexts:
        context.close()


PRESSED_TWICE: Final = """() => {
    const button = document.querySelector("form.start button");
    button.click();
    setTimeout(() => button.click(), 60);
}"""
"""As a double click of a person does: the second comes when the first is on its way to the studio."""


def picture(page: Any, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


@contextlib.contextmanager
def settings_of(hub: HubStage, lines: str) -> Iterator[None]:
    """In place of those of the tests, in [hub]; the studio takes them over."""
    path = hub.studio.home / "studio.toml"
    before = path.read_text()
    assert SETTINGS in before

    def read_again(text: str) -> None:
        path.write_text(text)
        written = len(hub.studio.log.read_text())
        assert hub.studio.process is not None
        hub.studio.process.send_signal(signal.SIGHUP)
        until("the settings are read", lambda: "read again" in hub.studio.log.read_text()[written:], PATIENCE_S)

    read_again(before.replace(SETTINGS, lines))
    try:
        yield
    finally:
        read_again(before)


def logged_in(hub: HubStage, user: str) -> Guest:
    made = hub.browser()
    made.log_in(user)
    return made


# ---- users of the hub


@at_hub
def test_a_user_of_the_hub_is_the_same_person_in_the_studio(hub: HubStage, ana: str, bob: str) -> None:
    """Without another sign-in, with the tenant that the office binds to this user of the machine; a teacher sees the
    course. The cookie goes to the studio alone, and not to the servers of other users on the same host."""
    browser, teacher = logged_in(hub, ana), logged_in(hub, bob)
    page = browser.studio()
    assert page.status_code == 200
    assert f"{ana} · tenant of-{ana}" in page.text
    assert 'action="/services/studio/start"' in page.text
    assert browser.client.get("/services/studio/studio.css").status_code == 200
    told = httpx.get(f"{hub.studio.address}/services/studio/hub/sign-in", headers={"x-forwarded-proto": "https"})
    assert "; secure" in told.headers["set-cookie"].lower()
    cookies = [one for one in browser.client.cookies.jar if one.name == "sublet_studio"]
    assert [(one.path, one.has_nonstandard_attr("HttpOnly")) for one in cookies] == [("/services/studio/", True)]
    person = hub.studio.people.find(ana)
    assert [one.label for one in hub.studio.people.tokens(person)] == [HUB_LABEL]
    assert browser.studio("/course/ml1").status_code == 404
    course = teacher.studio("/course/ml1")
    assert course.status_code == 200
    assert ana in course.text
    assert browser.studio("/office").status_code == 404
    again = logged_in(hub, ana)
    assert again.studio().status_code == 200
    assert hub.studio.people.find(ana) == person


@at_hub
def test_signing_out_of_the_studio_or_of_the_hub_signs_out(hub: HubStage, ana: str) -> None:
    """The studio's page then asks the hub, which knows the browser still, or asks who it is."""
    browser = logged_in(hub, ana)
    assert browser.studio().status_code == 200
    signed_out = browser.press("/sign-out")
    assert signed_out.url.path == "/services/studio/sign-in"
    assert browser.studio().url.path == "/services/studio/"
    browser.client.get("/hub/logout")
    until("the hub has told the studio", lambda: browser.studio().url.path == "/hub/login", PATIENCE_S)


@at_hub
def test_a_sign_in_that_another_began_or_that_was_used_opens_nothing(hub: HubStage, ana: str, bob: str) -> None:
    browser, other = logged_in(hub, ana), logged_in(hub, bob)
    begins = browser.client.get("/services/studio/hub/sign-in", follow_redirects=False)
    comes = browser.client.get(begins.headers["location"], follow_redirects=False).headers["location"]
    assert comes.startswith("/services/studio/oauth_callback?code=")
    other.client.get("/services/studio/hub/sign-in", follow_redirects=False)
    stolen = other.client.get(comes)
    assert (stolen.status_code, "did not begin in this browser" in stolen.text) == (401, True)
    assert browser.client.get(comes).status_code == 200
    browser.client.get("/services/studio/hub/sign-in", follow_redirects=False)
    for query in (comes.partition("?")[2], "", "error=access_denied", "code=x&state=", f"code=x&state={'0' * 64}"):
        fresh = hub.browser()
        fresh.client.get("/services/studio/hub/sign-in", follow_redirects=False)
        answer = fresh.client.get(f"/services/studio/oauth_callback?{query}")
        assert answer.status_code == 401, query
        assert "sublet_studio" not in fresh.client.cookies


@at_hub
@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("ana@example.org", "cannot be a person here"),
        ("physics", "he office has no tenant yet for physics"),
        ("local", "he office has no tenant yet for local"),
    ],
)
def test_a_name_that_is_none_or_anothers_opens_nothing(hub: HubStage, user: str, said: str) -> None:
    """A user of the hub who is called as a tenant is does not become that tenant."""
    assert user != "physics" or hub.office.office.ask("GET", f"/v1/tenants/{user}").status == 200
    answer = logged_in(hub, user).studio()
    assert answer.status_code == 401
    assert said in answer.text
    assert user not in [one.name for one in hub.studio.people.all()]


@at_hub
def test_a_user_without_a_tenant_has_that_of_a_group_of_the_hub(hub: HubStage) -> None:
    hub.ask("POST", "/users/kim")
    hub.ask("POST", "/groups/guests")
    assert hub.ask("POST", "/groups/guests/users", {"users": ["kim"]}).status_code == 200
    assert "kim · tenant visitors" in logged_in(hub, "kim").studio().text


@at_hub
def test_a_person_whom_the_operator_has_added_keeps_tenant_and_role(hub: HubStage) -> None:
    hub.studio.tenant("chemistry")
    cora = hub.studio.member("cora", "chemistry")
    hub.studio.people.set_role("cora", operator=True)
    browser = logged_in(hub, "cora")
    assert "cora · tenant chemistry" in browser.studio().text
    assert browser.studio("/office").status_code == 200
    assert cora.ask("GET", "/v1/sessions").status == 200, "her token is as good as before"


@at_hub
def test_settings_that_are_read_again_hold_for_the_next_sign_in(hub: HubStage) -> None:
    """No people are made any more; a tenant that the office does not have is the operator's to add."""
    for line, said in (
        ("create_people = false\n", "is no person of this studio"),
        ('tenants = { "late" = "nowhere" }\n', "he office has no tenant nowhere"),
    ):
        with settings_of(hub, 'recheck = "1s"\n' + line):
            user = f"late-{len(line)}"
            hub.ask("POST", f"/users/{user}")
            hub.ask("POST", "/groups/late")
            assert hub.ask("POST", "/groups/late/users", {"users": [user]}).status_code == 200
            answer = logged_in(hub, user).studio()
            assert (answer.status_code, said in answer.text) == (401, True), answer.text


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@at_hub
def test_a_hub_that_does_not_answer_lets_no_browser_in(hub: HubStage, ana: str) -> None:
    """The page says so, and shows nothing of the person's; tokens of the studio's own, and leases, do not ask the hub:
    a session goes on though studio and office are killed meanwhile. When the hub answers again, so does the page."""
    browser = logged_in(hub, ana)
    assert browser.studio().status_code == 200
    token = hub.studio.people.new_token(ana)
    mine = Member(hub.studio, token)
    kept = mine.done("POST", "/v1/sessions", {"name": "kept", "vram": 1 << 30, "ttl": 600})
    assert hub.process is not None
    fresh = hub.browser()
    fresh.client.get("/services/studio/hub/sign-in", follow_redirects=False)
    secret = fresh.client.cookies["sublet_studio_hub"]
    with settings_of(hub, SETTINGS + 'answer = "1s"\n'), stopped(hub.process):
        found: list[httpx.Response] = []

        def is_asked() -> bool:
            found[:] = [browser.client.get("/services/studio/")]
            return found[0].status_code == 503

        until("the sign-in is checked", is_asked, PATIENCE_S)
        assert "JupyterHub did not answer in time" in found[0].text
        assert f"tenant of-{ana}" not in found[0].text
        assert mine.ask("GET", "/v1/sessions").status == 200
        told = hub.browser().client.get("/services/studio/hub/sign-in")
        assert (told.status_code, "JupyterHub did not answer in time" in told.text) == (503, True), "it leads nowhere"
        answer = fresh.client.get(f"/services/studio/oauth_callback?code=x&state={Handshake(secret).state('/')}")
        assert (answer.status_code, "JupyterHub did not answer" in answer.text) == (503, True)
        hub.studio.kill()
        hub.office.kill_office()
        hub.office.start()
        hub.studio.start()
        [same] = mine.done("GET", "/v1/sessions")
        assert (same["state"], same["lease"]) == ("active", kept["lease"])
    until("the page is there again", lambda: card(browser, "kept") == "active", PATIENCE_S)
    mine.done("POST", f"/v1/sessions/{kept['id']}/end", {"now": True})


@at_hub
def test_a_studio_that_is_started_again_asks_the_hub_again(hub: HubStage, ana: str) -> None:
    browser = logged_in(hub, ana)
    assert browser.studio().status_code == 200
    before = browser.client.cookies["sublet_studio"]
    hub.studio.kill(signal.SIGTERM)
    hub.studio.start()
    assert f"tenant of-{ana}" in browser.studio().text
    assert browser.client.cookies["sublet_studio"] != before


HUB_STOPS: Final = int(os.environ.get("SUBLET_HUB_STOPS", "1"))
WORKS_S: Final = 0.3


@at_hub
def test_a_hub_that_stops_while_people_work_changes_nothing_of_their_work(hub: HubStage, ana: str) -> None:
    """No session is lost or there twice, and bills reconcile, though the office is killed meanwhile, too. Those who are
    signed in keep their pages; those who would have to sign in now are told why not. All is well with the next hub."""
    browser = logged_in(hub, ana)
    assert browser.studio().status_code == 200
    load = Load(hub.studio, HUB_STOPS, [(f"worker-{number}", "physics") for number in range(3)])
    judge = Judge(load)
    with settings_of(hub, SETTINGS.replace('recheck = "1s"\n', "")):
        for _ in range(HUB_STOPS):
            load.notebook.turn()
            with load.going_on():
                time.sleep(WORKS_S)
                hub.crash()
                assert f"tenant of-{ana}" in browser.client.get("/services/studio/").text
                told = hub.browser().client.get("/services/studio/")
                assert (told.status_code, "JupyterHub did not answer" in told.text) == (503, True), told.text
                hub.office.kill_office()
                until("the studio has started an office", hub.office.find_office, PATIENCE_S)
                time.sleep(WORKS_S)
            hub.start()
            judge.judge()
            assert f"tenant of-{ana}" in browser.client.get("/services/studio/").text
            assert f"tenant of-{ana}" in logged_in(hub, ana).studio().text
    assert sum(person.asked["200"] for person in load.people) > 0


# ---- servers


@at_hub
def test_only_the_hub_gets_tokens_for_servers(hub: HubStage, ana: str) -> None:
    """Not a person, not the hub's other services, none through the proxy; and nothing for a body that is none."""
    assert logged_in(hub, ana).studio().status_code == 200
    token = hub.studio.people.new_token(ana)
    body = json.dumps({"user": ana}).encode()
    for shown in ("", token, hub.admin, "0" * 64):
        for path in ("/v1/hub/servers", "/v1/hub/servers/end"):
            headers = {"authorization": f"Bearer {shown}"} if shown else {}
            assert hub.studio.ask("POST", path, body, headers).status == 401
    as_hub = {"authorization": f"Bearer {hub.token}"}
    for wrong in ("", "[]", "{", '{"user": ""}', '{"user": 4}', '{"user": "a", "x": 1}'):
        answer = hub.studio.ask("POST", "/v1/hub/servers", wrong.encode(), as_hub)
        assert answer.status == 400, wrong
    assert not hub.studio.people.of_servers()


ENVIRONMENT = """
import json, os
with open("environment.json", "w") as file:
    json.dump([os.getuid(), dict(os.environ)], file)
os.environ["SUBLET_SESSION"] = "essay"
%load_ext sublet
"""
CELL = """%%gpu --vram 1GiB --wait 120s
kept = 41
print("ran with", kept)
"""
STILL = "%%gpu\nprint('ran with', str(kept) + ', still')"
WAITS = re.compile(r"1st|place 1|position 1")
SILENT = "%%gpu --vram 1GiB\nimport time\nwhile True:\n    time.sleep(0.05)"


@at_hub
@looks
def test_a_person_waits_runs_loses_the_device_and_goes_on_as_another_user(
    hub: HubStage, visit: Visit, ana: str, bob: str
) -> None:
    """The whole way of a person, in a browser: log in at the hub, which is the only sign-in, start a server, wait in
    the queue with a place, run, lose the device to another user, resume, see it on the page of the studio, in another
    tab, which changes by itself, end. The server has a token of its own."""
    home = home_of(ana)
    cells_in(home / "cells.ipynb", ENVIRONMENT, CELL, STILL)
    keep_quiet(home)
    own_by(ana, home / "cells.ipynb")
    own_by(ana, home / ".jupyter")
    logged_in(hub, bob).studio()
    other = Member(hub.studio, hub.studio.people.new_token(bob))
    wrong: list[str] = []
    page = visit()
    with sublet.connect(home=hub.studio.home) as owner:
        notebook_url = f"{hub.url}/user/{ana}/lab/tree/cells.ipynb"
        page.goto(f"{hub.url}/hub/login?next=/hub/spawn?next=/user/{ana}/lab/tree/cells.ipynb")
        page.locator("#username_input").fill(ana)
        page.locator("#password_input").fill(PASSWORD)
        page.keyboard.press("Enter")
        page.wait_for_url(notebook_url)
        notebook = Page(page, notebook_url)
        studio = page.context.new_page()
        studio.on("pageerror", lambda error: wrong.append(str(error)))
        studio.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        studio.goto(f"{hub.url}/services/studio/")
        studio.get_by_text("No sessions").wait_for()
        notebook.run(0)
        notebook.wait_done(0)
        uid, environment = json.loads((home / "environment.json").read_text())
        token = environment["SUBLET_STUDIO_TOKEN"]
        mine = Member(hub.studio, token)
        assert environment["SUBLET_URL"] == hub.office_url
        assert "SUBLET_TOKEN" not in environment
        assert hub.token not in json.dumps(environment)
        assert uid == home.stat().st_uid != 0
        with owner.gpu(min_vram=WHOLE, count=2, ttl="5m") as held, held.activity():
            notebook.run(1)
            notebook.wait_said(1, WAITS.pattern)
            studio.get_by_text("waiting, place 1").wait_for()
            picture(page, "hub-notebook-waits")
            picture(studio, "hub-studio-waits")
        notebook.wait_said(1, "ran with 41")
        studio.get_by_text("time left").wait_for()
        taken = other.done("POST", "/v1/sessions", {"name": "urgent", "vram": WHOLE, "count": 2})["id"]
        studio.locator("article .state.resting").wait_for()
        until("another user has the devices", lambda: other.state(taken) == "active", PATIENCE_S)
        picture(studio, "hub-studio-lost")
        other.done("POST", f"/v1/sessions/{taken}/end", {"now": True})
        notebook.run(2)
        notebook.wait_said(2, "ran with 41, still")
        studio.get_by_text("time left").wait_for()
        assert not wrong
        [session] = mine.done("GET", "/v1/sessions")
        assert (session["name"], session["tenant"], session["state"]) == ("essay", f"of-{ana}", "active")
        lease = hub.office.office.ask("GET", f"/v1/leases/{session['lease']}").doc["lease"]
        assert lease["peer"].startswith(f"uid {uid}, ")
        # While the cell still counts as running, the studio asks before it ends the session.
        studio.get_by_role("button", name="End", exact=True).click()
        insists, ended = studio.get_by_role("button", name="End it now"), studio.get_by_text("Ended (")
        insists.or_(ended).first.wait_for()
        if insists.is_visible():
            insists.click()
        ended.wait_for()
        picture(studio, "hub-studio-ended")
    assert mine.done("GET", "/v1/sessions") == []
    assert mine.ask("GET", "/metrics").status == 404
    refused = hub.studio.ask("POST", "/sign-in", f"token={token}".encode(), {"origin": hub.studio.address})
    assert (refused.status, "for a program" in refused.text) == (401, True), "no browser is signed in by it"


PHONE_DARK: Final = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"}
TABS_MAX: Final = 60


def focus(page: Any, target: Any) -> None:
    """With the Tab key alone."""
    target.wait_for()
    for _ in range(TABS_MAX):
        if target.evaluate("one => one === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{target} is not reached by the keyboard")


def press(page: Any, target: Any) -> None:
    """By keyboard alone. A button of the part that changes by itself keeps the focus, unless it is gone."""
    focus(page, target)
    page.keyboard.press("Enter")


def log_in_by_keyboard(page: Any, hub: HubStage, user: str, goes_to: str) -> None:
    """At the hub, on the way to this page."""
    page.goto(f"{hub.url}{goes_to}")
    focus(page, page.locator("#username_input"))
    page.keyboard.type(user)
    page.keyboard.press("Tab")
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")


def check_narrow(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@at_hub
@looks
def test_a_teacher_of_the_hub_goes_all_the_way_by_keyboard_on_a_phone(hub: HubStage, visit: Visit, bob: str) -> None:
    """Opens a server in the hub; starts a session, lets it rest, resumes and ends it; looks at the course."""
    own_by(bob, write_config(home_of(bob) / ".jupyter"))
    page = visit(**PHONE_DARK)
    log_in_by_keyboard(page, hub, bob, "/hub/login?next=/hub/home")
    press(page, page.get_by_role("button", name="Start My Server"))
    page.wait_for_url(f"{hub.url}/user/{bob}/**")
    assert hub.servers(bob)[""]["ready"]
    page.goto(f"{hub.url}/services/studio/")
    page.get_by_text("No sessions").or_(page.get_by_text("Ended (")).first.wait_for()
    focus(page, page.get_by_label("Name"))
    page.keyboard.type("by-keyboard")
    page.keyboard.press("Tab")
    page.keyboard.type("1GiB")
    page.keyboard.press("Enter")
    page.get_by_text("time left").wait_for()
    press(page, page.get_by_role("button", name="Rest: give the GPU back"))
    page.get_by_text("last lease").wait_for()
    press(page, page.get_by_role("button", name="Resume", exact=True))
    page.get_by_text("time left").wait_for()
    check_narrow(page)
    picture(page, "hub-teacher-phone")
    press(page, page.get_by_role("button", name="End", exact=True))
    page.get_by_text("Ended (").wait_for()
    assert page.get_by_text("time left").count() == 0
    press(page, page.get_by_role("link", name="Course ml1"))
    page.get_by_text("with a GPU").first.wait_for()
    check_narrow(page)
    picture(page, "hub-course-phone")
    hub.stop_server(bob)


@at_hub
@looks
def test_an_operator_and_a_stranger_come_by_the_hub_on_a_phone(hub: HubStage, visit: Visit, ana: str) -> None:
    """By keyboard alone. The operator drains a node and ends that; the stranger is told what to ask for, on each page,
    and sees nothing else."""
    hub.studio.people.add("olaf", "physics")
    hub.studio.people.set_role("olaf", operator=True)
    page = visit(**PHONE_DARK)
    log_in_by_keyboard(page, hub, "olaf", "/services/studio/")
    press(page, page.get_by_role("link", name="Office"))
    for button, state in (("Drain: grant nothing here, give notice to holders", "draining"), ("End the drain", "up")):
        press(page, page.get_by_role("button", name=button))
        focus(page, page.get_by_label("Your access token of the office"))
        page.keyboard.type(hub.studio.operators_token())
        page.keyboard.press("Enter")
        page.locator(f"h3 .state.{state}").wait_for()
        check_narrow(page)
    stranger = visit(**PHONE_DARK)
    log_in_by_keyboard(stranger, hub, "zoe", "/services/studio/")
    for path in ("/", "/office", "/course/ml1"):
        stranger.get_by_text("The office has no tenant yet for zoe").wait_for()
        assert ana not in stranger.content()
        check_narrow(stranger)
        stranger.goto(f"{hub.url}/services/studio{path}")
    picture(stranger, "hub-stranger-phone")
    assert "zoe" not in [one.name for one in hub.studio.people.all()]


LAB = """
import signal, subprocess, sys
words = [sys.executable, "-m", "sublet", "lab", "--no-browser", "."]
lab = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
for line in lab.stdout:
    print(line, end="")
    if "JupyterLab is up" in line:
        break
lab.send_signal(signal.SIGINT)
print(lab.stdout.read(), lab.wait())
"""
IDLE_S = 10


@at_hub
def test_the_culler_ends_servers_that_are_not_used_and_leaves_running_cells_alone(
    hub: HubStage, ana: str, bob: str
) -> None:
    """Bob has a page open, and a lease that he does not use; ana's cell says nothing for a long time. The studio tells
    the hub which of them is in use, and the hub's own culler reads that. The server that goes gives its GPU back; the
    token of the one that stays is prolonged, and ends with its server. A hub that was killed is told again once another
    runs. The command line, `sublet lab` and the kernel of `sublet kernelspec` work in a server as its cells do."""
    own_by(bob, write_config(home_of(bob) / ".jupyter"))
    hub.start_servers(ana, bob)
    with hub.kernel(ana) as runs, hub.kernel(bob) as idle:
        idle.run("%load_ext sublet")
        idle.run("%%gpu --vram 1GiB\npass")
        assert leases_of(hub, bob)
        mine = Member(hub.studio, runs.run("import os; print(os.environ['SUBLET_STUDIO_TOKEN'])").strip())
        assert mine.ask("GET", "/v1/sessions").status == 200
        said = runs.run("!sublet kernelspec install --user --vram 1GiB\n!sublet session ls")
        assert "The kernel is there" in said
        assert "No sessions" in said, said
        said = runs.run(LAB)
        assert "The office is up already" in said
        assert "JupyterLab is up" in said
        with hub.kernel(ana, "sublet") as leasing:
            assert "without a word: 42" in leasing.run("print('without a word:', 6 * 7)")
            assert leases_of(hub, ana)
        runs.run("%load_ext sublet")
        runs.ask(SILENT)
        until("her cell runs", lambda: any(not one["idle"] for one in leases_of(hub, ana)), PATIENCE_S)
        began = datetime.now(UTC)
        [hers] = [one["id"] for one in leases_of(hub, ana) if not one["idle"]]
        until("his lease is idle", lambda: all(one["idle"] for one in leases_of(hub, bob)), PATIENCE_S)
        [token] = [one for one in hub.studio.people.of_servers() if one.person.name == ana]
        lately = timedelta(seconds=IDLE_S)
        until_hub_says(
            "the studio reports her cell, and has not reported his lease for long",
            lambda: hub.last_activity(ana) > max(began, hub.last_activity(bob) + lately),
        )
        culler = subprocess.Popen(
            [*python_module("jupyterhub_idle_culler"), f"--timeout={IDLE_S}", "--cull-every=1"],
            env={**os.environ, "JUPYTERHUB_API_TOKEN": hub.admin, "JUPYTERHUB_API_URL": f"{hub.url}/hub/api"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until_hub_says("the culler has ended his server", lambda: not hub.servers(bob))
        finally:
            culler.kill()
            culler.wait()
        until("what his server held is given back", lambda: leases_of(hub, bob) == [], PATIENCE_S)
        assert hub.servers(ana)[""]["ready"]
        assert [one["id"] for one in leases_of(hub, ana) if not one["idle"]] == [hers], "her cell runs as before"
        [now] = hub.studio.people.of_servers()
        assert now.person.name == ana
        assert now.expires_ns is not None
        assert token.expires_ns is not None
        assert now.expires_ns > token.expires_ns
        hub.crash()
        hub.start()
        started = datetime.now(UTC)
        until_hub_says("the studio reports her cell to the next hub", lambda: hub.last_activity(ana) > started)
        hub.stop_server(ana)
        assert mine.ask("GET", "/v1/sessions").status == 401
        assert not hub.studio.people.of_servers()
        until("what her cell held is given back", lambda: leases_of(hub, ana) == [], PATIENCE_S)


def home_of(user: str) -> Path:
    return Path(pwd.getpwnam(user).pw_dir)


def own_by(user: str, path: Path) -> None:
    for one in (path, *path.rglob("*")):
        os.chown(one, pwd.getpwnam(user).pw_uid, -1)


def write_config(folder: Path) -> Path:
    """Of a server that nobody looks at: JupyterLab and what belongs to it are two thirds of its start."""
    folder.mkdir(exist_ok=True)
    parts = dict.fromkeys(("jupyterlab", "jupyter_lsp", "jupyter_server_terminals", "notebook_shim"), False)
    (folder / "jupyter_server_config.json").write_text(json.dumps({"ServerApp": {"jpserver_extensions": parts}}))
    return folder


def leases_of(hub: HubStage, user: str) -> list[Any]:
    """Those of GPUs."""
    found = hub.office.office.ask("GET", "/v1/leases").doc
    return [one for one in found if one["tenant"] == f"of-{user}" and one["wants"][0]["kind"] == "gpu"]


def card(browser: Guest, session: str) -> str:
    """The state of a session, as the page shows it; empty: it shows none of this name."""
    found = re.search(rf'{session} <span class="state (\w+)">', browser.studio().text)
    return "" if found is None else found[1]


# ---- people with a token of the studio


@looks
def test_a_person_signs_in_waits_gets_the_gpu_and_ends(studio: StudioStage, visit: Visit) -> None:
    """The page changes without being loaded again, what is typed into a form stays, a request that waits shows its
    place, reason and estimate; nothing is fetched from elsewhere, and nothing goes wrong in the console."""
    ana = studio.member("ana", "physics")
    wrong: list[str] = []
    page = visit()
    with sublet.connect(home=studio.home) as owner:
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda sent: None if sent.url.startswith(studio.address) else wrong.append(sent.url))
        page.goto(studio.address)
        picture(page, "studio-sign-in")
        page.get_by_label("Your token").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("The token is not known here.").wait_for()
        wrong.clear()  # the browser notes the 401
        picture(page, "studio-refused")
        page.get_by_label("Your token").fill(ana.token)
        page.keyboard.press("Enter")
        page.get_by_text("No sessions.").wait_for()
        picture(page, "studio-empty")
        assert ana.token not in page.content()
        with owner.gpu(min_vram=WHOLE, count=2, ttl="10m") as held, held.activity():
            page.get_by_label("Name").fill("thesis")
            page.get_by_label("GPU memory").fill("8GiB")
            page.evaluate(PRESSED_TWICE)  # which is no second session, and no error
            page.get_by_text("waiting, place 1").wait_for()
            picture(page, "studio-waiting")
            page.evaluate("window.isTheSame = true")
            page.get_by_label("Name").fill("half typed")
        page.get_by_text("time left").wait_for()
        assert page.evaluate("window.isTheSame === true"), "it was not loaded again"
        assert page.get_by_label("Name").input_value() == "half typed"
        picture(page, "studio-active")
        assert not wrong
        studio.office.kill_office()
        until("the studio has started an office", studio.office.find_office, PATIENCE_S)
        page.get_by_label("Name").fill("still typed")
        page.get_by_text("time left").wait_for()
        assert page.evaluate("window.isTheSame === true"), "nor while the office was started again"
        assert page.get_by_label("Name").input_value() == "still typed"
        page.get_by_role("button", name="Rest: give the GPU back").click()
        page.get_by_text("released").wait_for()
        picture(page, "studio-resting")
        page.get_by_role("button", name="Resume", exact=True).click()
        page.get_by_text("time left").wait_for()
        lease = ana.done("GET", "/v1/sessions/thesis")["lease"]
        with sublet.connect(home=studio.home, for_tenant="physics") as program, program.attach(lease).activity():
            page.get_by_text("active, busy").wait_for()
            page.get_by_role("button", name="End", exact=True).click()
            page.get_by_text("Something runs in session thesis").wait_for()
            picture(page, "studio-asks")
            page.get_by_role("button", name="End it now").click()
            page.get_by_text("Ended (1)").wait_for()
        assert page.locator("details#ended").get_attribute("open") is None
        page.get_by_text("Ended (1)").click()
        picture(page, "studio-ended")
        studio.people.new_token("ana")
        page.get_by_label("Your token").wait_for()  # its sign-in is over, and the page asks again
        assert page.url == f"{studio.address}/sign-in"


@looks
def test_a_browser_that_slept_for_a_day_asks_for_the_sign_in(studio: StudioStage, visit: Visit) -> None:
    """Before, while a proxy answered for the studio, the page tried again by itself, and was not loaded again."""
    eve = studio.member("eve", "physics")
    page = visit()
    page.clock.install()
    page.goto(studio.address)
    page.get_by_label("Your token").fill(eve.token)
    page.keyboard.press("Enter")
    page.get_by_text("No sessions.").wait_for()
    page.evaluate("window.isTheSame = true")
    away = True

    def by_proxy(route: Any) -> None:
        if away and route.request.resource_type != "document":
            route.fulfill(status=502)
        else:
            route.fallback()

    page.route("**/*", by_proxy)
    page.clock.fast_forward("01:00:00")
    page.get_by_text("Connection lost").wait_for()
    away = False
    page.get_by_text("Connection lost").wait_for(state="hidden")
    assert page.evaluate("window.isTheSame === true")

    def in_the_morning(route: Any) -> None:
        studio.people.revoke("eve")  # as a sign-in is over after 12 hours
        route.fallback()

    page.route("**/live", in_the_morning)
    page.clock.fast_forward("24:00:00")
    page.get_by_label("Your token").wait_for()
    assert page.url == f"{studio.address}/sign-in"


@looks
def test_the_page_on_a_phone_in_the_dark_without_scripts(studio: StudioStage, visit: Visit) -> None:
    """By keyboard alone; nothing is wider than the screen."""
    bea = studio.member("bea", "physics")
    for number in range(3):
        bea.done("POST", "/v1/sessions", {"name": f"experiment-{number}", "vram": 1 << 30, "later": number != 1})
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "java_script_enabled": False}
    page = visit(**phone)
    page.goto(studio.address)
    page.keyboard.press("Tab")
    page.keyboard.type(bea.token)
    page.keyboard.press("Enter")
    page.get_by_text("experiment-2").wait_for()
    picture(page, "studio-phone")
    for card in page.locator("article").all():
        box = card.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 360


def check_cards(page: Any) -> None:
    """On a phone a row that says something is a card: nothing of it is beside the screen."""
    boxes = [cell.bounding_box() for cell in page.locator(".cards td").all()]
    assert boxes
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 360 for box in boxes), boxes


@looks
def test_an_operator_at_the_page_of_the_office(studio: StudioStage, visit: Visit) -> None:
    """It changes by itself; a drain is asked about. In the dark, on a phone, nothing but tables is wider."""
    olga = studio.member("olga", "physics")
    studio.people.set_role("olga", operator=True)
    dan = studio.member("dan", "physics")
    page = visit()
    with sublet.connect(home=studio.home) as owner:
        page.goto(studio.address)
        page.get_by_label("Your token").fill(olga.token)
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Office").click()
        page.get_by_text("0 waiting").wait_for()
        with owner.gpu(min_vram=WHOLE, count=2, ttl="10m", name="training-run") as held, held.activity():
            dan.done("POST", "/v1/sessions", {"name": "thesis", "vram": 8 << 30})
            page.get_by_text("1 waiting").wait_for()
            page.locator("svg.timeline rect.held").first.wait_for()
            picture(page, "studio-office")
            page.set_viewport_size({"width": 360, "height": 740})
            page.emulate_media(color_scheme="dark")
            picture(page, "studio-office-phone")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            check_cards(page)
        dan.done("POST", "/v1/sessions/thesis/end", {"now": True})
        page.get_by_role("button", name="Drain").click()
        page.get_by_text("No new lease is granted there").wait_for()
        picture(page, "studio-office-asks")
        page.get_by_role("link", name="No, back to the office").click()
        page.get_by_role("link", name="Audit log").click()
        page.get_by_label("Lease, tenant or device").fill("physics")
        page.get_by_label("Your access token of the office").fill(studio.operators_token())
        page.keyboard.press("Enter")
        page.get_by_role("cell", name="tenant_set").first.wait_for()
        picture(page, "studio-office-audit")


@looks
def test_a_teacher_at_the_page_of_the_course(studio: StudioStage, visit: Visit) -> None:
    """It changes by itself. In the dark, on a phone, nothing but tables is wider."""
    ask = studio.office.office.ask
    assert ask("POST", "/v1/groups", {"id": "ml2", "weight": 3, "floor": 1}).status == 201
    studio.tenant("class")
    assert ask("PATCH", "/v1/tenants/class", {"group": "ml2"}).status == 200
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 10 * 86_400))  # it begins when no test runs
    reserved = {"id": "exam", "group": "ml2", "gpus": 1, "when": f"{day} 10:00-12:00", "zone": "UTC"}
    assert ask("POST", "/v1/reservations", reserved).status == 201
    lines = [Queue(gpus=8, at_once=0.991, median_s=0, p95_s=70, longest=9)]
    lines.append(Queue(gpus=7, at_once=0.94, median_s=0, p95_s=310, longest=31))
    plan = CoursePlan(made_at="2026-03-01T10:00:00Z", now=lines[0], less=lines[1])
    save_plan(sessions_folder(str(studio.home)), "ml2", plan)
    members = [studio.member(name, "class") for name in ("hal", "ida", "jon")]
    teacher = studio.member("tea", "physics")
    studio.people.set_role("tea", teaches=["ml2"])
    page = visit()
    page.goto(studio.address)
    page.get_by_label("Your token").fill(teacher.token)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Course ml2").click()
    page.get_by_text("No member of the course has a GPU").wait_for()
    members[0].done("POST", "/v1/sessions", {"name": "lab-1", "vram": 12 << 30})
    page.get_by_text("1 with a GPU").wait_for()
    lease = members[0].done("GET", "/v1/sessions/lab-1")["lease"]
    with (
        sublet.connect(home=studio.home) as owner,
        owner.gpu(min_vram=WHOLE, ttl="10m") as other,
        other.activity(),
        sublet.connect(home=studio.home, for_tenant="class") as program,
        program.attach(lease) as held,
        held.activity(),
    ):
        members[1].done("POST", "/v1/sessions", {"name": "lab-1", "vram": 12 << 30})
        page.get_by_text("1 with a GPU, 1 waiting").wait_for()
        picture(page, "studio-course")
        page.set_viewport_size({"width": 360, "height": 740})
        page.emulate_media(color_scheme="dark")
        picture(page, "studio-course-phone")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        check_cards(page)
    for one in members[:2]:
        one.done("POST", "/v1/sessions/lab-1/end", {"now": True})


@looks
def test_an_invite_is_put_into_the_form_and_not_kept_in_the_address(studio: StudioStage, visit: Visit) -> None:
    studio.people.add("gil", "physics")
    invite = studio.people.invite("gil")
    page = visit()
    page.goto(f"{studio.address}/join#{invite}")
    page.wait_for_url(f"{studio.address}/join")
    page.get_by_role("button", name="Join").click()
    page.get_by_text("Welcome, gil").wait_for()
    picture(page, "studio-joined")
    assert invite not in page.content()
    page.get_by_role("link", name="Go to your sessions").click()
    page.get_by_text("gil · tenant physics").wait_for()
