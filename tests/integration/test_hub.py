"""The studio as a service of a real JupyterHub: its users, their browsers, their servers and what runs in them."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

import sublet
from sublet.studio.hub_api import Handshake
from sublet.studio.people import HUB_LABEL
from tests.browser.lab import PATIENCE_MS, Page, browser, cells_in, keep_quiet
from tests.browser.test_studio import picture
from tests.integration.hub_stage import PASSWORD, Guest, HubStage, hub_stage, local_users, until_hub_says
from tests.integration.studio_stage import PATIENCE_S, Member
from tests.light_jupyter import python_module
from tests.security.other_users import ROOT, closed_folder
from tests.traces import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("setpriv", "unshare", "useradd", "hub"),
    pytest.mark.skipif(os.geteuid() != 0, reason="other users can only be made by root"),
    pytest.mark.skipif(closed_folder(ROOT) is not None, reason="other users cannot enter this checkout"),
]
SETTINGS = 'tenants = { "guests" = "visitors" }\nteachers = { "staff" = "ml1" }\nrecheck = "1s"\nreport = "1s"\n'


@pytest.fixture(scope="module")
def users() -> Iterator[list[str]]:
    with local_users("ana", "bob") as made:
        yield made


@pytest.fixture(scope="module")
def hub(users: list[str]) -> Iterator[HubStage]:
    ana, bob = users
    with hub_stage("2x2GiB", {"students": [ana, bob], "staff": [bob]}, settings=SETTINGS) as made:
        ask = made.office.office.ask
        assert ask("POST", "/v1/groups", {"id": "ml1"}).status == 201
        for user in users:  # as `sublet tenant add NAME --uid UID --no-token-needed --group ml1` does it
            body = {"id": f"of-{user}", "uid": pwd.getpwnam(user).pw_uid, "needs_token": False, "group": "ml1"}
            assert ask("POST", "/v1/tenants", body).status == 201
        made.studio.tenant("visitors")
        yield made


@pytest.fixture(autouse=True)
def _browsers_are_closed(hub: HubStage) -> Iterator[None]:
    yield
    hub.close_browsers()


@pytest.fixture(scope="module")
def ana(users: list[str]) -> str:
    return users[0]


@pytest.fixture(scope="module")
def bob(users: list[str]) -> str:
    return users[1]


def read_again(hub: HubStage) -> None:
    """The studio takes over its settings."""
    written = len(hub.studio.log.read_text())
    assert hub.studio.process is not None
    hub.studio.process.send_signal(signal.SIGHUP)
    until("the settings are read", lambda: "read again" in hub.studio.log.read_text()[written:], PATIENCE_S)


def logged_in(hub: HubStage, user: str) -> Guest:
    made = hub.browser()
    made.log_in(user)
    return made


# ---- browsers


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


def test_signing_out_of_the_studio_or_of_the_hub_signs_out(hub: HubStage, ana: str) -> None:
    """The studio's page then asks the hub, which knows the browser still, or asks who it is."""
    browser = logged_in(hub, ana)
    assert browser.studio().status_code == 200
    signed_out = browser.press("/sign-out")
    assert signed_out.url.path == "/services/studio/sign-in"
    assert browser.studio().url.path == "/services/studio/"
    browser.client.get("/hub/logout")
    until("the hub has told the studio", lambda: browser.studio().url.path == "/hub/login", PATIENCE_S)


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
    if user == "physics":
        hub.studio.tenant(user)
    answer = logged_in(hub, user).studio()
    assert answer.status_code == 401
    assert said in answer.text
    assert user not in [one.name for one in hub.studio.people.all()]


def test_a_user_without_a_tenant_has_that_of_a_group_of_the_hub(hub: HubStage) -> None:
    hub.ask("POST", "/users/kim")
    hub.ask("POST", "/groups/guests")
    assert hub.ask("POST", "/groups/guests/users", {"users": ["kim"]}).status_code == 200
    assert "kim · tenant visitors" in logged_in(hub, "kim").studio().text


def test_a_person_whom_the_operator_has_added_keeps_tenant_and_role(hub: HubStage) -> None:
    hub.studio.tenant("chemistry")
    cora = hub.studio.member("cora", "chemistry")
    hub.studio.people.set_role("cora", operator=True)
    browser = logged_in(hub, "cora")
    assert "cora · tenant chemistry" in browser.studio().text
    assert browser.studio("/office").status_code == 200
    assert cora.ask("GET", "/v1/sessions").status == 200, "her token is as good as before"


def test_settings_that_are_read_again_hold_for_the_next_sign_in(hub: HubStage) -> None:
    """No people are made any more; a tenant that the office does not have is the operator's to add."""
    path = hub.studio.home / "studio.toml"
    before = path.read_text()
    try:
        for line, said in (
            ("create_people = false\n", "is no person of this studio"),
            ('tenants = { "late" = "nowhere" }\n', "he office has no tenant nowhere"),
        ):
            path.write_text(before.replace(SETTINGS, 'recheck = "1s"\n' + line))
            read_again(hub)
            user = f"late-{len(line)}"
            hub.ask("POST", f"/users/{user}")
            hub.ask("POST", "/groups/late")
            assert hub.ask("POST", "/groups/late/users", {"users": [user]}).status_code == 200
            answer = logged_in(hub, user).studio()
            assert (answer.status_code, said in answer.text) == (401, True), answer.text
    finally:
        path.write_text(before)
        read_again(hub)


def test_a_hub_that_does_not_answer_lets_no_browser_in(hub: HubStage, ana: str) -> None:
    """The page says so, and shows nothing of the person's; tokens of the studio's own, and leases, do not ask the hub:
    a session goes on though studio and office are killed meanwhile. When the hub answers again, so does the page."""
    browser = logged_in(hub, ana)
    assert browser.studio().status_code == 200
    token = hub.studio.people.new_token(ana)
    mine = Member(hub.studio, token)
    kept = mine.done("POST", "/v1/sessions", {"name": "kept", "vram": 1 << 30, "ttl": 600})
    assert hub.process is not None
    hub.process.send_signal(signal.SIGSTOP)
    try:
        found: list[httpx.Response] = []

        def is_asked() -> bool:
            found[:] = [browser.client.get("/services/studio/")]
            return found[0].status_code == 503

        until("the sign-in is checked", is_asked, PATIENCE_S)
        assert "JupyterHub did not answer in time" in found[0].text
        assert f"tenant of-{ana}" not in found[0].text
        assert mine.ask("GET", "/v1/sessions").status == 200
        fresh = hub.browser()
        fresh.client.get("/services/studio/hub/sign-in", follow_redirects=False)
        secret = fresh.client.cookies["sublet_studio_hub"]
        answer = fresh.client.get(f"/services/studio/oauth_callback?code=x&state={Handshake(secret).state('/')}")
        assert (answer.status_code, "JupyterHub did not answer" in answer.text) == (503, True)
        hub.studio.kill()
        hub.office.kill_office()
        hub.office.start()
        hub.studio.start()
        [same] = mine.done("GET", "/v1/sessions")
        assert (same["state"], same["lease"]) == ("active", kept["lease"])
    finally:
        hub.process.send_signal(signal.SIGCONT)
    until("the page is there again", lambda: card(browser, "kept") == "active", PATIENCE_S)
    mine.done("POST", f"/v1/sessions/{kept['id']}/end", {"now": True})


def test_a_studio_that_is_started_again_asks_the_hub_again(hub: HubStage, ana: str) -> None:
    browser = logged_in(hub, ana)
    assert browser.studio().status_code == 200
    before = browser.client.cookies["sublet_studio"]
    hub.studio.kill(signal.SIGTERM)
    hub.studio.start()
    assert f"tenant of-{ana}" in browser.studio().text
    assert browser.client.cookies["sublet_studio"] != before


# ---- servers


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


@pytest.mark.needs("chromium")
@pytest.mark.browser
def test_a_person_waits_runs_loses_the_device_and_goes_on_as_another_user(hub: HubStage, ana: str, bob: str) -> None:
    """The whole way of a person, in a browser: log in at the hub, which is the only sign-in, start a server, wait in
    the queue with a place, run, lose the device to another user, resume, see it on the page of the studio, in another
    tab, which changes by itself, end. The server has a token of its own."""
    home = home_of(ana)
    cells_in(home / "cells.ipynb", ENVIRONMENT, CELL, STILL)
    keep_quiet(home)
    for path in (home / "cells.ipynb", home / ".jupyter", *(home / ".jupyter").rglob("*")):
        os.chown(path, pwd.getpwnam(ana).pw_uid, -1)
    logged_in(hub, bob).studio()
    other = Member(hub.studio, hub.studio.people.new_token(bob))
    wrong: list[str] = []
    with browser() as chromium, sublet.connect(home=hub.studio.home) as owner:
        page = chromium.new_context(viewport={"width": 1000, "height": 900}).new_page()
        page.set_default_timeout(PATIENCE_MS)
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
        with owner.gpu(min_vram="2GiB", count=2, ttl="5m") as held, held.activity():
            notebook.run(1)
            notebook.wait_said(1, WAITS.pattern)
            studio.get_by_text("waiting, place 1").wait_for()
            picture(page, "hub-notebook-waits")
            picture(studio, "hub-studio-waits")
        notebook.wait_said(1, "ran with 41")
        studio.get_by_text("time left").wait_for()
        taken = other.done("POST", "/v1/sessions", {"name": "urgent", "vram": 2 << 30, "count": 2})["id"]
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


def test_the_culler_ends_servers_that_are_not_used_and_leaves_running_cells_alone(
    hub: HubStage, ana: str, bob: str
) -> None:
    """Bob has a page open, and a lease that he does not use; ana's cell says nothing for a long time. The studio tells
    the hub which of them is in use, and the hub's own culler reads that. The server that goes gives its GPU back; the
    token of the one that stays is prolonged, and ends with its server. A hub that was killed is told again once another
    runs. The command line, `sublet lab` and the kernel of `sublet kernelspec` work in a server as its cells do."""
    for user in (ana, bob):
        hub.start_server(user)
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
        until_hub_says("the studio reports her cell", lambda: hub.last_activity(ana) > began + lately)
        assert hub.last_activity(bob) < hub.last_activity(ana) - lately
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


def leases_of(hub: HubStage, user: str) -> list[Any]:
    """Those of GPUs."""
    found = hub.office.office.ask("GET", "/v1/leases").doc
    return [one for one in found if one["tenant"] == f"of-{user}" and one["wants"][0]["kind"] == "gpu"]


def card(browser: Guest, session: str) -> str:
    """The state of a session, as the page shows it; empty: it shows none of this name."""
    found = re.search(rf'{session} <span class="state (\w+)">', browser.studio().text)
    return "" if found is None else found[1]
