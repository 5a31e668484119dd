"""The studio as its people meet it: one office, one studio beside it, two people with a tenant each."""

from __future__ import annotations

import contextlib
import html
import http.client
import http.server
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, cast

import pytest
from msgspec import structs

import sublet
from sublet.cli import main
from sublet.client.home import socket_path
from sublet.client.lease import Lease
from sublet.errors import Disconnected, InvalidRequest, NotFound, Unauthorized, Unsupported
from sublet.lease.value import wall_ns_of
from sublet.studio import FabricOffice, Sessions, open_sessions
from sublet.studio.office import sessions_folder, this_process
from sublet.studio.people import INVITE_PREFIX, TOKEN_PREFIX, People, TokenScope
from sublet.studio.records import Abandoned, Asked, CellRecord, Declined, Entry, Ran, Started, Terms
from sublet.studio.remote import RemoteStore
from sublet.studio.right import find_right
from sublet.studio.service import Studio
from sublet.studio.session_bill import bill_row
from sublet.studio.web import BODY_MAX_BYTES
from sublet.values import GIB, MIB, NS_PER_S
from sublet.wire.http_views import SESSION_LABEL
from tests.integration.office_stage import OfficeStage
from tests.integration.studio_stage import PATIENCE_S, Answer, Browser, Member, StudioStage, studio_stage
from tests.notebook.shell_stage import shell_on, stage_on
from tests.traces import until

pytestmark = pytest.mark.slow  # an office and a studio, started once for all


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeStage]:
    with stage_on(tmp_path_factory.mktemp("office"), "2x2GiB") as stage:
        yield stage


@pytest.fixture(scope="module")
def studio(office: OfficeStage) -> Iterator[StudioStage]:
    with studio_stage(office) as stage:
        for tenant in ("physics", "biology"):
            stage.tenant(tenant)
        yield stage


@pytest.fixture(scope="module")
def ana(studio: StudioStage) -> Member:
    return studio.member("ana", "physics")


@pytest.fixture(scope="module")
def bob(studio: StudioStage) -> Member:
    return studio.member("bob", "biology")


@pytest.fixture(autouse=True)
def _nothing_goes_on(studio: StudioStage, ana: Member, bob: Member) -> Iterator[None]:
    yield
    if studio.process is None:
        studio.start()
    for person in (ana, bob):
        for session in person.done("GET", "/v1/sessions"):
            person.done("POST", f"/v1/sessions/{session['id']}/end", {"now": True})


def start(person: Member, name: str, state: str = "active", **more: object) -> Any:
    """A new session, as it is when it has come so far; the answer may come before that."""
    ident = person.done("POST", "/v1/sessions", {"name": name, "vram": GIB, **more})["id"]
    found: list[Any] = []

    def is_so_far() -> bool:
        found[:] = [person.done("GET", f"/v1/sessions/{ident}")]
        return found[0]["state"] == state and (state != "waiting" or found[0]["position"] is not None)

    until(f"session {name} is {state}", is_so_far, PATIENCE_S)
    return found[0]


@contextlib.contextmanager
def offered_less(studio: StudioStage, ana: Member) -> Iterator[Any]:
    """All that is free is half of the device in whose other half something of the tenant's runs; the session asks for a
    whole one."""
    first = start(ana, "first", exclusivity="shared")["lease"]
    with (
        sublet.connect(home=studio.home, for_tenant="physics") as program,
        program.attach(first) as held,
        held.activity(),
        devices_held(studio, 1),
    ):
        yield start(ana, "second", "offered", vram=2 * GIB, or_smaller=True, exclusivity="shared")


@contextlib.contextmanager
def devices_held(studio: StudioStage, count: int = 2, *, start: bool = True) -> Iterator[None]:
    """The owner's program has this many of the two devices, and something runs under its lease. ``start``: it starts an
    office that is gone."""
    with (
        sublet.connect(home=studio.home, start=start) as fabric,
        fabric.gpu(min_vram="2GiB", count=count, ttl="5m") as lease,
        lease.activity(),
    ):
        yield


def test_a_session_is_its_tenants_and_goes_from_queue_to_lease_to_rest_to_end(
    studio: StudioStage, office: OfficeStage, ana: Member
) -> None:
    """It waits with place and reason; the lease is the tenant's, and audit records name it and who acted."""
    with devices_held(studio):
        view = start(ana, "thesis", "waiting")
        assert (view["person"], view["tenant"], view["position"]) == ("ana", "physics", 1)
        assert view["reason"]
        explained = ana.done("GET", f"/v1/sessions/{view['id']}/explain")
        assert explained["lease"]["position"] == 1
        assert explained["session"]["id"] == view["id"]
        again = ana.done("POST", f"/v1/sessions/{view['id']}/resume")
        assert again["state"] == "waiting", "asked once"
    until("it is granted", lambda: ana.state(view["id"]) == "active")
    view = ana.done("GET", "/v1/sessions/thesis")
    assert view["tenant"] == "physics"
    lease = office.office.ask("GET", f"/v1/leases/{view['lease']}").doc["lease"]
    assert lease["tenant"] == "physics"
    records = office.office.ask("GET", f"/v1/audit?of={view['lease']}").doc
    assert any(one["by"].startswith("tenant:physics (for it: studio") for one in records), [
        one["by"] for one in records
    ]
    rests = ana.done("POST", f"/v1/sessions/{view['id']}/rest")
    assert rests["state"] == "resting"
    assert rests["bill"]["leases"] == 1
    assert rests["bill"]["key"] == view["id"]
    ended = ana.done("POST", f"/v1/sessions/{view['id']}/end")
    assert (ended["state"], ended["end"]) == ("ended", "ended")
    assert ana.done("GET", "/v1/sessions") == []
    assert [one["id"] for one in ana.done("GET", "/v1/sessions?all=1")][:1] == [view["id"]]
    gone_on = ana.ask("POST", f"/v1/sessions/{view['id']}/resume")
    assert gone_on.status == 400
    assert "has ended" in gone_on.doc["error"]["message"]


def test_leaving_the_queue_is_not_waiting_any_more(studio: StudioStage, ana: Member) -> None:
    with devices_held(studio):
        view = start(ana, "impatient", "waiting")
        assert ana.done("POST", f"/v1/sessions/{view['id']}/rest")["state"] == "resting"
        queue = studio.office.office.ask("GET", "/v1/queue").doc
        assert queue == [] or queue.get("requests") == [], queue
        refused = ana.ask("POST", f"/v1/sessions/{view['id']}/resume", {"wait": 0})
        assert refused.status == 409
        error = refused.doc["error"]
        assert error["kind"] == "CapacityExceeded"
        assert error["estimate"] > 0, "as the command line says it, which has both"
        assert error["would_fit"] is None, "nothing is free"
        more = ana.ask("POST", "/v1/sessions", {"name": "large", "vram": 1 << 40, "wait": 0}).doc["error"]
        assert (more["kind"], more["would_fit"]) == ("CapacityExceeded", 2 * GIB), more
        ana.ask("POST", "/v1/sessions/large/end")
        assert ana.done("GET", f"/v1/sessions/{view['id']}")["reason"]


def test_less_is_offered_with_its_expiry_and_accepted_in_one_step(studio: StudioStage, ana: Member) -> None:
    """The API, the command and the page say the same of it; the command may accept what the page was offered."""
    with offered_less(studio, ana) as view:
        offer, path = view["offer"], f"/v1/sessions/{view['id']}"
        assert (offer["text"], offer["accepted"]) == ("1GiB instead of 2GiB", False)
        assert (offer["offered"], offer["asked"]) == (GIB, 2 * GIB)
        assert view["busy"] is False
        assert "nothing is offered" in ana.ask("POST", "/v1/sessions/first/accept").doc["error"]["message"]
        browser = ana.browser()
        shown = as_text(until_shown(browser, "Accept the offer"))
        assert f"offered 1GiB instead of 2GiB offer open until {offer['until'][11:19]} UTC" in shown
        taken = ana.done("POST", f"{path}/accept")
        assert taken["state"] == "active"
        assert taken["offer"] is None
        lease = studio.office.office.ask("GET", f"/v1/leases/{taken['lease']}").doc["lease"]
        assert [part["amount"] for part in lease["parts"]] == [GIB]
        assert ana.ask("POST", f"{path}/accept").status == 400


@pytest.mark.parametrize("button", ["decline", "rest"])
def test_an_offer_is_declined_in_one_step_and_the_session_waits_or_leaves(
    button: str, studio: StudioStage, ana: Member
) -> None:
    with offered_less(studio, ana) as view:
        browser = ana.browser()
        assert browser.press(f"/sessions/{view['id']}/{button}").status == 303
        now = ana.done("GET", f"/v1/sessions/{view['id']}")
        if button == "decline":
            assert (now["state"], now["position"], now["offer"]) == ("waiting", 1, None)
        else:
            assert (now["state"], now["offer"]) == ("resting", None)
            assert studio.office.office.ask("GET", "/v1/queue").doc == []


def test_a_resume_may_be_offered_less_than_the_session_asks_for(studio: StudioStage, ana: Member) -> None:
    """More than any device has: what there is is offered at once. The form of the page says that less will do."""
    ident = start(ana, "huge", "resting", vram=4 * GIB, later=True)["id"]
    assert ana.ask("POST", f"/v1/sessions/{ident}/resume").status == 409
    browser = ana.browser()
    assert browser.press(f"/sessions/{ident}/resume", less="1").status == 303
    assert ana.done("GET", f"/v1/sessions/{ident}")["offer"]["text"] == "2GiB instead of 4GiB"
    assert browser.press(f"/sessions/{ident}/accept").status == 303
    until("it is granted", lambda: ana.state(ident) == "active")
    bad = ana.ask("POST", "/v1/sessions", {"name": "x", "vram": GIB, "or_model": True})
    assert (bad.status, "asks for a model" in bad.doc["error"]["message"]) == (400, True)


def test_without_a_token_that_is_good_now_nothing_is_answered(studio: StudioStage, ana: Member, tmp_path: Path) -> None:
    """None, garbage, the hash, one with a wrong end, the office's token of the same tenant, one of another studio, a
    cookie in its place, one that was replaced, one that expired: 401 on every route of the API, before anything is said
    of what was asked."""
    replaced = studio.member("carl", "physics")
    cookie = replaced.browser()
    studio.people.new_token("carl")
    studio.people.add("dora", "physics")
    expired = studio.people.new_token("dora", valid_s=1e-9)
    changed = studio.office.office.ask("PATCH", "/v1/tenants/physics", {"new_token": True})
    hashed = "0" * 64
    other = People(tmp_path, wall_ns=time.time_ns, random=os.urandom)
    other.add("ana", "physics")
    tokens = {
        "none": None,
        "empty": "",
        "garbage": "garbage",
        "huge": "x" * 5000,
        "not ascii": "süblet",
        "hash": hashed,
        "a wrong end": ana.token[:-2] + "xx",
        "the office's": changed.doc["token"],
        "another studio's": other.new_token("ana"),
        "replaced": replaced.token,
        "expired": expired,
        "a cookie": cookie.cookie.partition("=")[2],
    }
    for what, token in tokens.items():
        for method, path in (("GET", "/v1/sessions"), ("POST", "/v1/sessions"), ("GET", "/v1/sessions/s-0123456789ab")):
            headers = {} if token is None else {"authorization": f"Bearer {token}".encode().decode("latin-1")}
            answer = studio.ask(method, path, b"{}" if method == "POST" else None, headers)
            assert answer.status == 401, (what, answer)
            assert answer.doc["error"]["kind"] == "Unauthorized"
    with_cookie = studio.ask("GET", "/v1/sessions", None, {"cookie": ana.browser().cookie})
    assert with_cookie.status == 401, "the API looks at no cookie"
    assert cookie.look().status == 303, "the browser of a token that was replaced is out"
    assert cookie.look().headers["location"] == "/sign-in"
    assert cookie.look("/live").status == 401
    for name in ("carl", "dora"):
        studio.people.remove(name)


def test_a_token_opens_what_its_scope_says(studio: StudioStage, ana: Member) -> None:
    """One that may only read changes nothing; one of a session shows no other, on any route."""
    own, other = (start(ana, name, "resting", later=True)["id"] for name in ("own", "other"))

    def member(label: str, scope: TokenScope) -> Member:
        return Member(studio, studio.people.new_token("ana", label, scope=scope))

    reads = member("reads", TokenScope(read_only=True))
    assert {one["id"] for one in reads.done("GET", "/v1/sessions")} == {own, other}
    assert reads.done("GET", "/v1/records")
    changes = [
        ("POST", "/v1/sessions", {"name": "more", "vram": GIB, "later": True}),
        ("POST", "/v1/records", {}),
        *(("POST", f"/v1/sessions/{own}/{what}", {}) for what in ("rest", "resume", "end")),
    ]
    for method, path, body in changes:
        answer = reads.ask(method, path, body)
        assert (answer.status, "may only read" in answer.doc["error"]["message"]) == (403, True), path
    one = member("one", TokenScope(session=own))
    assert [view["id"] for view in one.done("GET", "/v1/sessions?all=1")] == [own]
    assert one.done("GET", "/v1/sessions/own")["id"] == own
    for ident in (other, "other"):
        never = "s-0123456789ab"
        for method, what in (
            ("GET", ""),
            ("GET", "/explain"),
            ("POST", "/rest"),
            ("POST", "/resume"),
            ("POST", "/end"),
        ):
            answers = [one.ask(method, f"/v1/sessions/{name}{what}", {}) for name in (ident, never)]
            assert answers[0].text.replace(ident, never) == answers[1].text
            assert [answer.status for answer in answers] == [404, 404]
    assert one.ask(*changes[0]).status == 403, "no other session is started"
    whole, store = RemoteStore(studio.address, ana.token), RemoteStore(studio.address, one.token)
    theirs = [entry.record for entry in whole.read(0) if entry.session == own]
    assert [(entry.seq, entry.session, entry.record) for entry in store.read(0)] == [
        (number, own, record) for number, record in enumerate(theirs, 1)
    ]
    assert store.read(len(theirs)) == []
    following = Entry(seq=len(theirs) + 1, session=own, at_ns=1, record=Asked(by=this_process()))
    for entry in (
        structs.replace(following, session=other),
        structs.replace(following, session="s-0123456789ab"),
        structs.replace(following, session="s-0123456789ab", record=Started(name="more", terms=Terms(vram=GIB))),
    ):
        with pytest.raises(NotFound, match="there is no session s-"):
            store.append(entry)
    assert not store.append(structs.replace(following, seq=len(theirs))), "its number is taken"
    before = len(whole.read(0))
    assert store.append(following)
    assert store.append(structs.replace(following, seq=following.seq + 1, record=Abandoned()))
    assert [entry.seq for entry in whole.read(before)] == [before + 1, before + 2], "one sequence for the person"
    with pytest.raises(Unauthorized, match="may only read"):
        RemoteStore(studio.address, reads.token).append(following)
    assert one.done("POST", f"/v1/sessions/{own}/end")["state"] == "ended"
    assert ana.state(other) == "resting"
    both = member("both", TokenScope(read_only=True, session=other))
    assert both.done("GET", f"/v1/sessions/{other}")["name"] == "other"
    assert both.ask("POST", f"/v1/sessions/{other}/end", {}).status == 403
    assert "for a program" in Browser(studio).send("/sign-in", {"token": reads.token}).text
    for label in ("reads", "one", "both"):
        studio.people.revoke("ana", label)
    assert reads.ask("GET", "/v1/sessions").status == 401


BAD: Final[dict[str, Any]] = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"name": "\xff", "vram": 1073741824}',
    "deep": b"[" * 5000,
    "another type": b"[]",
    "no name": {"vram": GIB},
    "an empty name": {"name": "", "vram": GIB},
    "another alphabet": {"name": "диплом", "vram": GIB},
    "a surrogate": b'{"name": "\\ud800", "vram": 1073741824}',
    "a path": {"name": "../up", "vram": GIB},
    "a script": {"name": "<script>", "vram": GIB},
    "a long name": {"name": "x" * 10_000, "vram": GIB},
    "no size": {"name": "thesis"},
    "a size as text": {"name": "thesis", "vram": "1GiB"},
    "a negative size": {"name": "thesis", "vram": -1},
    "a small size": {"name": "thesis", "vram": 8},
    "a huge size": {"name": "thesis", "vram": 1 << 60},
    "a size beyond numbers": {"name": "thesis", "vram": 10**400},
    "no devices": {"name": "thesis", "vram": GIB, "count": 0},
    "a short life": {"name": "thesis", "vram": GIB, "ttl": 0.1},
    "no number": b'{"name": "thesis", "vram": 1073741824, "ttl": NaN}',
    "an unknown tier": {"name": "thesis", "vram": GIB, "tier": "royal"},
    "a long model": {"name": "thesis", "vram": GIB, "model": "x" * 1000},
    "an unknown key": {"name": "thesis", "vram": GIB, "tenant": "biology"},
    "a negative wait": {"name": "thesis", "vram": GIB, "wait": -1},
}


def test_bad_input_is_refused_and_changes_nothing(ana: Member) -> None:
    before = ana.done("GET", "/v1/sessions?all=1")
    for what, body in BAD.items():
        answer = ana.ask("POST", "/v1/sessions", body)
        assert answer.status == 400, (what, answer)
        error = answer.doc["error"]
        assert error["message"], what
        assert error["do"], what
        assert len(answer.body) < 2000, what
    large = ana.ask("POST", "/v1/sessions", b" " * (BODY_MAX_BYTES + 1))
    assert large.status == 413
    for path in ("/v1/sessions/" + "x" * 5000, "/v1/sessions/%00", "/v1/sessions/%ff%fe", "/v1/sessions/%E2%98%83"):
        assert ana.ask("GET", path).status == 404, path
    assert ana.ask("DELETE", "/v1/sessions").status == 405
    assert ana.ask("GET", "/v1/nothing").status == 404
    assert ana.done("GET", "/v1/sessions?all=1") == before


def test_a_start_that_can_never_be_granted_leaves_nothing_to_program_and_page(studio: StudioStage, ana: Member) -> None:
    """It left a session that rested for ever. What was typed is there to be changed, and the name is free."""
    before = ana.done("GET", "/v1/sessions?all=1")
    answer = ana.ask("POST", "/v1/sessions", {"name": "big", "vram": 1 << 40})
    assert (answer.status, answer.doc["error"]["reason"]) == (409, "too_big"), answer.text
    assert answer.doc["error"]["transient"] is False
    assert "more than any node has" in answer.doc["error"]["message"]
    assert "session" not in answer.doc["error"]["do"]
    browser = ana.browser()
    page = browser.press("/start", name="big", vram="80GiB")
    assert "more than any node has" in page.text
    assert re.search('<input [^>]*name="name"[^>]* value="big"', page.text), "the name is there to be changed"
    assert ana.done("GET", "/v1/sessions?all=1") == before
    assert ">big <" not in browser.look().text
    assert start(ana, "big")["name"] == "big"


def test_a_start_that_is_not_granted_at_once_says_that_the_session_is_there(studio: StudioStage, ana: Member) -> None:
    with devices_held(studio):
        answer = ana.ask("POST", "/v1/sessions", {"name": "late", "vram": GIB, "wait": 0})
    assert answer.status == 409, answer.text
    assert "Session late is there and rests: `sublet session resume late`" in answer.doc["error"]["do"]
    assert ana.state("late") == "resting"


def test_a_head_without_end_is_cut_off(studio: StudioStage) -> None:
    line = http.client.HTTPConnection("127.0.0.1", studio.port, timeout=PATIENCE_S)
    line.putrequest("GET", "/livez")
    for number in range(100):
        line.putheader(f"x-{number}", "x" * 4000)
    try:
        line.endheaders()
        assert line.getresponse().status == 400
    except (BrokenPipeError, ConnectionResetError):  # it hung up before all was sent
        pass
    finally:
        line.close()
    assert studio.ask("GET", "/livez").doc == {"ok": True}


def test_it_is_ready_while_the_office_answers(studio: StudioStage) -> None:
    """It says which part fails, and no more; the log says why, and that it is over."""
    until("it is ready", lambda: studio.ask("GET", "/readyz").status == 200, PATIENCE_S)
    assert studio.ask("GET", "/livez").doc == {"ok": True}
    pid = studio.office.find_office()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        until("it is not ready", lambda: studio.ask("GET", "/readyz").status == 503, PATIENCE_S)
        assert studio.ask("GET", "/readyz").doc == {"ok": False, "failing": ["office"]}
        assert studio.ask("GET", "/livez").doc == {"ok": True}
    finally:
        os.kill(pid, signal.SIGCONT)
    answers: list[Answer] = []

    def is_ready() -> bool:
        answers[:] = [studio.ask("GET", "/readyz")]
        return answers[0].status == 200

    until("it is ready", is_ready, PATIENCE_S)
    assert answers[0].doc == {"ok": True, "failing": []}
    said = studio.log.read_text()
    assert re.search(r"^Not ready: office: .+\.$", said, re.MULTILINE), said
    assert "\nReady again.\n" in said


def test_an_office_that_does_not_answer_keeps_waiting_only_what_asks_it(
    studio: StudioStage, ana: Member, bob: Member
) -> None:
    """With more requests on the way than the studio has threads: people sign in, records are read and written, pages
    say what is wrong. What asks the office is answered 503, and goes on when the office does."""
    kept = start(bob, "kept", "resting", later=True)
    browser, pid = bob.browser(), studio.office.find_office()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(100) as pool:
            flood = [pool.submit(ana.ask, "GET", "/v1/sessions") for _ in range(100)]
            assert bob.browser().cookie
            assert [one["session"] for one in bob.done("GET", "/v1/records")][-1:] == [kept["id"]]
            assert studio.ask("GET", "/livez").status == 200
            for answer in (bob.ask("GET", "/v1/sessions"), *(one.result(PATIENCE_S) for one in flood)):
                assert (answer.status, answer.doc["error"]["kind"]) == (503, "Disconnected")
                assert answer.doc["error"]["transient"]
                assert int(answer.headers["retry-after"])
        assert "The office did" in (page := browser.look().text) or "The office does not answer" in page
        with open_page(studio, browser) as news:
            assert "The office d" in next_event(news)
            os.kill(pid, signal.SIGCONT)
            while "kept" not in (event := next_event(news)):
                assert "The office d" in event
    finally:
        os.kill(pid, signal.SIGCONT)
    assert browser.send("/sign-out", {"form": browser.form_token}).status == 303
    assert ana.done("GET", "/v1/sessions") == []


@contextlib.contextmanager
def open_page(studio: StudioStage, browser: Browser) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", studio.port, timeout=PATIENCE_S)) as line:
        line.request("GET", "/live", headers={"cookie": browser.cookie})
        yield line.getresponse()


def test_a_studio_that_may_start_no_office_waits_for_the_one_of_the_system(
    studio: StudioStage, office: OfficeStage, ana: Member, bob: Member
) -> None:
    """Meanwhile it says so and starts none; then what waited goes on."""
    with devices_held(studio, start=False):
        start(bob, "waits", "waiting")
        studio.kill()
        office.kill_office()
        studio.start("--no-start")
        assert studio.ask("GET", "/readyz").doc == {"ok": False, "failing": ["office"]}
        assert ana.ask("GET", "/v1/sessions").status == 503
        assert office.find_office() is None
        assert office.office.start()
        until("it is ready", lambda: studio.ask("GET", "/readyz").status == 200, PATIENCE_S)
        until("it waits again", lambda: bob.done("GET", "/v1/sessions/waits")["position"] == 1, PATIENCE_S)
    until("what waited is granted", lambda: bob.state("waits") == "active", PATIENCE_S)


def test_its_numbers_are_for_operators(studio: StudioStage, ana: Member, operator: Member) -> None:
    """Also to a token that may only read; to others there is nothing. No name and no id is in them."""
    view = start(ana, "counted", "resting", later=True)
    reading = studio.people.new_token("olga", "prometheus", scope=TokenScope(read_only=True))
    assert operator.ask("GET", "/metrics").status == 200
    pages: list[Answer] = []

    def is_ready() -> bool:
        pages[:] = [Member(studio, reading).ask("GET", "/metrics")]
        return "\nsublet_studio_ready 1.0\n" in pages[0].text

    until("it is ready", is_ready, PATIENCE_S)
    page = pages[0]
    found = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
    assert float(found["sublet_studio_people"]) >= 2
    assert float(found['sublet_studio_requests_total{part="api",status="2xx"}']) >= 1
    for name in ("ana", "olga", "physics", view["id"]):
        assert name not in page.text
    resting = 'sublet_studio_sessions{state="resting"}'
    until("the session is counted", lambda: f"\n{resting} 1.0\n" in operator.ask("GET", "/metrics").text)
    one = studio.people.new_token("olga", "one", scope=TokenScope(session=view["id"]))
    for token in (ana.token, one):
        answer = Member(studio, token).ask("GET", "/metrics")
        assert (answer.status, answer.doc["error"]["kind"]) == (404, "NotFound")
    assert studio.ask("GET", "/metrics").status == 401
    assert studio.ask("GET", "/metrics", None, {"cookie": operator.browser().cookie}).status == 401


def read_again(studio: StudioStage, settings: str, said: str) -> None:
    """These are the settings of the studio from now on, without a restart; what its log says of that."""
    file, before = studio.home / "studio.toml", len(studio.log.read_text())
    file.write_text(settings)
    file.chmod(0o644)
    assert studio.process is not None
    studio.process.send_signal(signal.SIGHUP)
    until(said, lambda: said in studio.log.read_text()[before:], PATIENCE_S)


def test_settings_are_read_again_without_a_restart_and_with_a_mistake_in_them_nothing_changes(
    studio: StudioStage, ana: Member
) -> None:
    """The limit holds for the next request, and what is there already stays; the log has the mistake with its line."""
    kept = [start(ana, f"kept-{number}", "resting", later=True) for number in range(2)]
    try:
        read_again(studio, '[person]\nsessions = 1\nsign_in = "1h"\n', "person.sessions is 1 now, and was 100.")
        refused = ana.ask("POST", "/v1/sessions", {"name": "more", "vram": GIB, "later": True})
        assert (refused.status, refused.doc["error"]["message"]) == (409, "a person has at most 1 sessions")
        assert len(ana.done("GET", "/v1/sessions")) == len(kept)
        browser = Browser(studio)
        assert browser.send("/sign-in", {"token": ana.token}).status == 303
        assert "Max-Age=3600;" in browser.given
        read_again(
            studio,
            "[person]\n\nsesions = 100\n",
            "studio.toml:3: [person] has no key 'sesions'; did you mean sessions?",
        )
        assert ana.ask("POST", "/v1/sessions", {"name": "more", "vram": GIB, "later": True}).status == 409
    finally:
        read_again(studio, "", "person.sessions is 100 now, and was 1.")
        (studio.home / "studio.toml").unlink()
    start(ana, "more", "resting", later=True)


def test_a_studio_does_not_start_with_a_mistake_in_its_settings(
    studio: StudioStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong key, a file that others can write, one that is not there, a folder: said, and nothing is started."""
    monkeypatch.setenv("SUBLET_HOME", str(studio.home))
    file = tmp_path / "studio.toml"
    for text, mode, said in (
        ("[studio]\nwaitin = 5", 0o644, "studio.toml:2: [studio] has no key 'waitin'; did you mean waiting?"),
        ("[studio]\nwaiting = 5", 0o666, "other users can write"),
        (
            '[hub]\napi = "http://127.0.0.1:8081/hub/api"\ntoken_file = "/nowhere"',
            0o644,
            "hub.token_file: there is no file /nowhere",
        ),
        (None, 0, "there is no file"),
    ):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
            file.chmod(mode)
        assert main(["studio", "--config", str(file)]) == 2
        assert said in capsys.readouterr().err
    assert main(["studio", "--check", "--config", str(tmp_path)]) == 2
    assert "is not a file" in capsys.readouterr().err
    file.write_text("[studio]\nwaiting = 5")
    file.chmod(0o644)
    assert main(["studio", "--check", "--config", str(file)]) == 0
    assert "is right: 1 key set" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_sessions_go_on_when_the_studio_is_started_again(
    number: signal.Signals, studio: StudioStage, ana: Member, bob: Member
) -> None:
    """A lease lives on and is the same one; a request that waited is granted afterwards, once; cookies are good."""
    browser = ana.browser()
    with devices_held(studio, 1):
        held = start(ana, "held", ttl=600)
        start(bob, "waits", "waiting", count=2)
        assert studio.kill(number) == (0 if number == signal.SIGTERM else -number)
        assert held["lease"] in active_leases(studio, "physics"), "it ends with its time to live, not with the studio"
        studio.start()
        assert ana.done("GET", f"/v1/sessions/{held['id']}")["lease"] == held["lease"]
        until("it waits again", lambda: bob.done("GET", "/v1/sessions/waits")["position"] == 1)
        assert browser.look().status == 200
        ana.done("POST", f"/v1/sessions/{held['id']}/rest")
    until("what waited is granted", lambda: bob.state("waits") == "active")
    granted = bob.done("GET", "/v1/sessions/waits")
    assert active_leases(studio, "biology") == [granted["lease"]], "and nothing is acquired twice"
    assert bob.done("POST", "/v1/sessions/waits/rest")["bill"]["leases"] == 1


def active_leases(studio: StudioStage, tenant: str) -> list[str]:
    with sublet.connect(home=studio.home) as fabric:
        return [lease.id for lease in fabric.leases(tenant=tenant) if lease.status == "active"]


@pytest.mark.parametrize("is_away", [False, True], ids=["while it runs", "while it is away"])
def test_the_end_of_a_lease_is_recorded_as_the_office_tells_it_though_nobody_looks(
    is_away: bool, studio: StudioStage, ana: Member
) -> None:
    """Its time and its reason, by the studio itself: the records are read, which compares nothing with the office."""
    view = start(ana, "left", ttl=2)
    assert (view["person"], view["tenant"]) == ("ana", "physics")
    lease = f"/v1/leases/{view['lease']}"
    if is_away:
        studio.kill()
    until("it has ended", lambda: studio.office.office.ask("GET", lease).doc["lease"]["status"] == "ended")
    if is_away:
        studio.start()

    def is_recorded() -> bool:
        found = [one["record"] for one in ana.done("GET", "/v1/records") if one["session"] == view["id"]]
        return any(one["type"] == "lost" for one in found)

    until("its end is on record", is_recorded)
    end = studio.office.office.ask("GET", lease).doc["lease"]["end"]
    (recorded,) = ana.done("GET", f"/v1/sessions/{view['id']}")["leases"]
    assert (recorded["until"], recorded["reason"]) == (end["at"], end["reason"])
    (line,) = (one for one in studio.office.office.ask("GET", "/v1/bill").doc if one["key"] == view["lease"])
    assert line["end"] == end["reason"]
    assert abs(wall_ns_of(line["ended_at"]) - wall_ns_of(end["at"])) < NS_PER_S, "which is all that is left of it later"


def test_a_second_studio_on_one_state_folder_is_refused(studio: StudioStage) -> None:
    second = StudioStage(studio.office)
    with pytest.raises(AssertionError, match="a studio runs already"):
        second.start()
    assert second.process is not None
    assert second.process.wait(PATIENCE_S) == 2
    second.close()


def test_a_notebook_of_another_user_goes_on_with_a_session_of_the_studio(
    studio: StudioStage, office: OfficeStage, tmp_path: Path
) -> None:
    """It has the tenant's token for the office and one of its session for the studio, and nothing of the owner's. Its
    first cell takes over the lease that the studio acquired, and the studio sees that something runs."""
    studio.tenant("geology")
    token = office.office.ask("PATCH", "/v1/tenants/geology", {"new_token": True}).doc["token"]
    gina = studio.member("gina", "geology")
    other = start(gina, "other", "resting", later=True)
    made = start(gina, "maps", vram=256 * MIB, ttl=600)
    narrow = studio.people.new_token("gina", "maps", scope=TokenScope(session=made["id"]))
    env = {
        "SUBLET_HOME": str(tmp_path / "home"),
        "SUBLET_URL": f"unix://{socket_path(studio.home)}",
        "SUBLET_TOKEN": token,
        "SUBLET_AS_TENANT": "1",
        "SUBLET_SESSION": made["id"],
        "SUBLET_STUDIO": studio.address,
        "SUBLET_STUDIO_TOKEN": narrow,
    }
    with shell_on(office, tmp_path / "folder", **env) as shell:
        answer = shell.run("%%gpu\nimport os\nlease = os.environ['SUBLET_LEASE']")
        assert answer["error"] == "", answer
        assert shell.value("lease") == made["lease"], "the lease that was there is taken over"
        view = gina.done("GET", "/v1/sessions/maps")
        assert len(view["leases"]) == 1
        assert view["leases"][0]["epoch"] > made["leases"][0]["epoch"], "under a new epoch"
        shell.ask("%%gpu\nimport time\ntime.sleep(600)")
        until("something runs in it", lambda: gina.done("GET", "/v1/sessions/maps")["busy"])
        assert gina.ask("POST", "/v1/sessions/maps/end").status == 400
        shell.kill()
    until("the lease of a kernel that was killed is over", lambda: gina.state("maps") == "resting")
    assert gina.done("POST", "/v1/sessions/maps/end")["bill"]["leases"] == 1
    with shell_on(office, tmp_path / "folder", **{**env, "SUBLET_SESSION": other["id"]}) as shell:
        answer = shell.run("%%gpu --vram 256MiB\npass")
        assert answer["error"] == "NotFound", "another session is none to this token"
    assert gina.state("other") == "resting"
    assert len(gina.done("GET", "/v1/sessions?all=1")) == 2
    studio.people.remove("gina")


def test_a_session_of_the_studio_has_leases_of_its_tenant_alone(
    studio: StudioStage, ana: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's program shows the person's token, and asks the office as its owner: what it was granted is given
    back, and the session waits for nothing. One that acts for the tenant holds a lease of the tenant's."""
    monkeypatch.setenv("SUBLET_STUDIO", studio.address)
    monkeypatch.setenv("SUBLET_STUDIO_TOKEN", ana.token)
    session = start(ana, "borrowed", "resting", later=True)["id"]
    with sublet.connect(home=studio.home) as owner:
        with pytest.raises(InvalidRequest, match="is of tenant physics") as refused:
            open_sessions(FabricOffice(owner)).acquire(session)
        assert "for_tenant" in refused.value.do
        given = [one for one in owner.leases(all=True) if one.labels.get(SESSION_LABEL) == session]
        until("its lease is over", lambda: all(owner.lease(one.id).status == "ended" for one in given))
        assert [one.tenant for one in given] == ["local"]
    view = ana.done("GET", f"/v1/sessions/{session}")
    assert (view["state"], view["leases"]) == ("resting", [])
    assert "is of tenant physics" in view["reason"]
    with (
        sublet.connect(home=studio.home, for_tenant="physics") as program,
        open_sessions(FabricOffice(program)).acquire(session),
    ):
        view = ana.done("GET", f"/v1/sessions/{session}")
        assert (view["state"], program.lease(view["lease"]).tenant) == ("active", "physics")
        with sublet.connect(home=studio.home) as owner:
            foreign = open_sessions(FabricOffice(owner))
            for stop in (foreign.rest, foreign.end):  # the office would do nothing, and the session stayed active
                with pytest.raises(InvalidRequest, match="is of tenant physics, and this program asks the office as"):
                    stop(session, even_if_busy=True)
        assert ana.state(session) == "active"


def test_records_are_taken_from_the_persons_own_programs_as_the_table_allows(studio: StudioStage, ana: Member) -> None:
    """Another's session, one that never was, a wrong order, a malformed one: refused, and nothing changes."""
    session = start(ana, "own", "resting", later=True)["id"]
    store = RemoteStore(studio.address, ana.token)
    entries = store.read(0)
    assert entries == store.read(0)
    last = entries[-1]
    assert (last.session, type(last.record)) == (session, Started)
    assert store.read(last.seq) == []
    asked = Entry(seq=last.seq + 1, session=session, at_ns=1, record=Declined())
    assert not store.append(structs.replace(asked, seq=last.seq)), "its number is taken"
    assert not store.append(structs.replace(asked, seq=last.seq + 2)), "there is none before it"
    bad = [
        asked,  # it waits for nothing
        structs.replace(asked, session="s-0123456789ab"),
        structs.replace(asked, session="../up"),
        structs.replace(asked, at_ns=-1),
        structs.replace(asked, session="s-0123456789ab", record=Started(name="own", terms=Terms(vram=GIB))),
        structs.replace(asked, session="s-0123456789ab", record=Started(name="☃", terms=Terms(vram=GIB))),
        structs.replace(asked, session="mine", record=Started(name="another", terms=Terms(vram=GIB))),
    ]
    for entry in bad:
        with pytest.raises(InvalidRequest):
            store.append(entry)
    for body in (b"", b"[]", b'{"seq": 1}', b'{"seq": 1, "session": "s", "at_ns": 1e400, "record": {"type": "x"}}'):
        assert ana.ask("POST", "/v1/records", body).status == 400, body
    for after in ("-1", "x", "", "9" * 30, "%F0%9D%9F%8F"):
        assert ana.ask("GET", f"/v1/records?after={after}").status == 400, after
    assert store.read(0) == entries
    stranger = studio.member("hugo", "biology")
    assert RemoteStore(studio.address, stranger.token).read(0) == []
    with pytest.raises(InvalidRequest, match="never started"):
        RemoteStore(studio.address, stranger.token).append(structs.replace(asked, seq=1))
    studio.people.remove("hugo")
    with pytest.raises(Unauthorized):
        RemoteStore(studio.address, stranger.token).read(0)
    with pytest.raises(InvalidRequest, match="SUBLET_STUDIO='localhost' is no address of a studio"):
        RemoteStore("localhost", ana.token)
    with pytest.raises(InvalidRequest, match="SUBLET_STUDIO_TOKEN is not set"):
        RemoteStore(studio.address, None)
    with pytest.raises(Disconnected, match=r"the studio at .* did not answer") as away:
        RemoteStore("http://127.0.0.1:1", "x").read(0)
    assert "start it with `sublet studio`" in away.value.do, "`sublet status` shows the office alone"


def test_a_bill_by_cell_is_the_same_to_program_and_page_and_comes_to_the_sessions_bill(
    studio: StudioStage, ana: Member
) -> None:
    """Of two leases and the cells that its notebook told of, also some lines at a time; and of what held nothing."""
    session = start(ana, "billed")["id"]
    start(ana, "empty", "resting", later=True)
    store, number = RemoteStore(studio.address, ana.token), 0
    for _ in range(2):
        lease = ana.done("GET", f"/v1/sessions/{session}")["lease"]
        for _ in range(2):
            number += 1
            cell = CellRecord(
                cell=number, lease=lease, at_ns=time.time_ns(), held_s=0.01, busy_s=0.004, vram_byte_s=1.0
            )
            entry = Entry(seq=store.read(0)[-1].seq + 1, session=session, at_ns=time.time_ns(), record=Ran(cell=cell))
            assert store.append(entry)
        ana.done("POST", f"/v1/sessions/{session}/rest", {})
        if number < 4:
            assert ana.done("POST", f"/v1/sessions/{session}/resume", {})["state"] == "active"
    path = f"/v1/sessions/{session}/bill"
    until("both leases are billed", lambda: ana.done("GET", path)["count"] == 6)
    whole = ana.done("GET", path)
    assert [one["cell"] for one in whole["lines"]] == [1, 2, None, 3, 4, None]
    assert [one["end"] for one in whole["lines"] if one["cell"] is None] == ["released", "released"]
    assert whole["next"] is None
    with sublet.connect(home=studio.home) as owner:
        (billed,) = [line for line in owner.bill(by="session") if line.key == session]
    for what, unit in (("cost", 10**6), ("gpu_seconds", 10**9), ("held_seconds", 10**9)):
        came_to = sum(round(one[what] * unit) for one in whole["lines"])
        assert came_to == round(whole["total"][what] * unit) == round(getattr(billed, what) * unit), what
    parts, after = list[Any](), cast("str | None", "")
    while after is not None:
        part = ana.done("GET", f"{path}?limit=4&after={after}" if after else f"{path}?limit=4")
        parts += part["lines"]
        after = part["next"]
    assert parts == whole["lines"]
    for bad in ("limit=0", "limit=1001", "limit=x", "after=x", f"after={time.time_ns() + 10**12}.1.1"):
        assert ana.ask("GET", f"{path}?{bad}").status == 400, bad
    browser = ana.browser()
    shown = as_text(browser.look(f"/sessions/{session}/bill"))
    for one in whole["lines"]:
        assert " ".join(bill_row(one)) in shown, (one, shown)
    until_shown(browser, f"/sessions/{session}/bill")  # what a lease costs is read for pages every few seconds
    empty = ana.done("GET", "/v1/sessions/empty")["id"]
    assert "Nothing was held by this session" in browser.look(f"/sessions/{empty}/bill").text
    assert browser.look(f"/sessions/{session}/bill?after=x").status == 400


def test_the_owners_person_has_the_sessions_of_the_command(studio: StudioStage) -> None:
    owner = studio.member("owner", "local")
    with sublet.connect(home=studio.home) as fabric:
        sessions = open_sessions(FabricOffice(fabric), home=str(studio.home))
        made = start(owner, "thesis")
        assert sessions.find("thesis").id == made["id"]
        other = sessions.start("other", Terms(vram=GIB))
        assert owner.state(other.id) == "resting"
        for one in (made["id"], other.id):
            owner.done("POST", f"/v1/sessions/{one}/end", {"now": True})
    studio.people.remove("owner")


def test_the_operator_adds_lists_and_removes_people(
    studio: StudioStage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token alone goes to stdout. One who has sessions is removed only when that is said, and they end."""
    monkeypatch.setenv("SUBLET_HOME", str(studio.home))

    def person(*words: str, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert main(["person", *words]) == status
        said = capsys.readouterr()
        return said.out, said.err

    assert "there is no tenant nowhere" in person("add", "ivy", "--tenant", "nowhere", status=1)[1]
    token, said = person("add", "ivy", "--tenant", "physics", "--valid", "90d")
    assert token.startswith(TOKEN_PREFIX)
    assert token.strip() not in said
    assert "there is a person ivy already" in person("add", "ivy", "--tenant", "physics", status=2)[1]
    assert person("add", "Ivy!", "--tenant", "physics", status=2)[1]
    ivy = Member(studio, token.strip())
    listed = json.loads(person("ls", "--json")[0])
    tokens = {one["name"]: one["tokens"] for one in listed}["ivy"]
    assert [(one["label"], one["opens"], one["expires_at"] is None) for one in tokens] == [
        ("main", "everything", False)
    ]
    assert token.strip() not in person("ls")[0]
    again = Member(studio, person("token", "ivy")[0].strip())
    assert ivy.ask("GET", "/v1/sessions").status == 401
    board = Member(studio, person("token", "ivy", "--label", "board", "--read-only", "--valid", "1d")[0].strip())
    assert board.done("GET", "/v1/sessions") == []
    shown = person("show", "ivy")[0]
    assert re.search(r"board +everything, read only +\d{4}-", shown)
    assert board.token not in shown
    assert person("invite", "ivy")[0].startswith("http://127.0.0.1:8320/join#")
    assert "invite: 2" in person("show", "ivy")[0]
    assert person("revoke", "ivy", "board")[0] == "Person ivy: token board revoked.\n"
    assert board.ask("GET", "/v1/sessions").status == 401
    assert "ivy has no token board" in person("revoke", "ivy", "board", status=1)[1]
    session = start(again, "herbarium")
    for told in ("herbarium", session["id"]):  # a name was refused as no id
        narrow = Member(studio, person("token", "ivy", "--label", "narrow", "--session", told)[0].strip())
        assert narrow.done("GET", "/v1/sessions/herbarium")["id"] == session["id"]
        assert narrow.ask("POST", "/v1/sessions", {"name": "more", "vram": GIB}).status == 403
    for wrong in ("nowhere", "s-0123456789ab", "Ünï\n"):
        assert "ivy has no session" in person("token", "ivy", "--label", "other", "--session", wrong, status=1)[1]
    assert "other" not in person("show", "ivy")[0]
    assert "ivy has 1 session" in person("rm", "ivy", status=2)[1]
    assert again.state(session["id"]) == "active"
    assert person("rm", "ivy", "--now")[0] == "Person ivy is removed.\n"
    assert again.ask("GET", "/v1/sessions").status == 401
    until("its lease is over", lambda: session["lease"] not in active_leases(studio, "physics"))
    assert "there is no person ivy" in person("rm", "ivy", status=1)[1]


def test_a_person_makes_tokens_on_the_page_and_takes_them_back(studio: StudioStage, ana: Member, bob: Member) -> None:
    """Each is shown once, with what a shell sets beside it; one that is revoked opens nothing from then on."""
    browser = ana.browser()
    session = start(ana, "own", "resting", later=True)["id"]
    made = browser.press("/tokens", label="laptop", valid="2d")
    found = re.search(rf"{TOKEN_PREFIX}[\w-]{{43}}", made.text)
    assert found is not None
    assert f"export SUBLET_STUDIO={studio.address}" in as_text(made)
    laptop = Member(studio, found[0])
    assert [one["id"] for one in laptop.done("GET", "/v1/sessions")] == [session]
    assert found[0] not in browser.look().text
    assert re.search(r"laptop everything \d{4}-", as_text(browser.look()))
    for fields, status, said in (
        ({"label": "laptop"}, 400, "There is a token laptop already"),
        ({"label": "hub-server-x"}, 400, "There is a token hub-server-x already"),
        ({"label": "Not a label"}, 400, "label"),
        ({"label": "x", "valid": "for ever"}, 400, "for ever"),
        ({"label": "x", "session": "s-0123456789ab"}, 404, "There is no session"),
    ):
        answer = browser.press("/tokens", **fields)
        assert (answer.status, said in answer.text) == (status, True), answer.text
    one = re.search(rf"{TOKEN_PREFIX}[\w-]{{43}}", browser.press("/tokens", label="one", session="own").text)
    assert one is not None, "a session is named as people name it"
    narrow = Member(studio, one[0])
    start(ana, "other", "resting", later=True)
    assert [one["id"] for one in narrow.done("GET", "/v1/sessions")] == [session]
    assert narrow.state(session) == "resting"
    assert narrow.browser().press("/tokens", label="wider").status == 404
    assert bob.browser().press("/tokens/revoke", label="laptop").status == 303
    assert laptop.ask("GET", "/v1/sessions").status == 200, "that was bob's to revoke, and he has none"
    for label in ("laptop", "one", "one"):
        assert browser.press("/tokens/revoke", label=label).status == 303
    assert laptop.ask("GET", "/v1/sessions").status == 401
    assert narrow.ask("GET", "/v1/sessions").status == 401


def test_the_operator_sees_who_is_connected(studio: StudioStage, ana: Member, operator: Member) -> None:
    ana.done("GET", "/v1/sessions")
    with open_page(studio, ana.browser()):
        until_shown(operator.browser(), "1 open page", "/office")
        shown = as_text(operator.browser().look("/office"))
        assert re.search(r"ana physics - member 1 open page", shown), shown
    until("the page is closed", lambda: "with token main" in as_text(operator.browser().look("/office")), PATIENCE_S)


def test_the_operator_enrols_a_course_from_a_list(
    studio: StudioStage, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wrong line is named and then nothing is added; each person's link opens the page once and shows a token."""
    monkeypatch.setenv("SUBLET_HOME", str(studio.home))
    roster = tmp_path / "course.csv"

    def enrol(text: str, *words: str, status: int = 0) -> tuple[str, str]:
        roster.write_text(text)
        capsys.readouterr()
        assert main(["person", "enrol", str(roster), *words]) == status
        said = capsys.readouterr()
        return said.out, said.err

    before = studio.people.all()
    out, said = enrol("name,tenant\nkim,physics\nKim,physics\nlee,nowhere\nana,physics\n", status=2)
    assert out == ""
    for line in (
        "line 3: 'Kim' is not a valid",
        "line 4: there is no tenant 'nowhere'",
        "line 5: there is a person ana",
    ):
        assert line in said
    assert "3 lines of the list are wrong, and nothing was added" in said
    assert studio.people.all() == before
    out, said = enrol("name,email\nkim,kim@example.org\nlee,\n", "--tenant", "physics", "--url", f"{studio.address}/")
    assert said == "2 people added; columns left alone: email.\n"
    rows = [line.split(",") for line in out.splitlines()]
    assert [row[:2] for row in rows] == [["name", "tenant"], ["kim", "physics"], ["lee", "physics"]]
    link = rows[1][2]
    assert link.startswith(f"{studio.address}/join#{INVITE_PREFIX}")
    again, said = enrol("name\nkim\nmax\n", "--tenant", "physics", "--skip-known", "--valid", "1d")
    assert again.splitlines()[1].startswith("max,physics,http://127.0.0.1:8320/join#")
    assert "1 person added; 1 person of the list there already" in said
    assert "is not the address of a studio" in enrol("name\nnia\n", "--tenant", "physics", "--url", "x", status=2)[1]
    assert main(["person", "enrol", str(tmp_path / "none.csv"), "--tenant", "physics"]) == 2
    browser = Browser(studio)
    assert 'src="/join.js"' in browser.look("/join").text
    assert "location.hash" in studio.ask("GET", "/join.js").text
    invite = link.partition("#")[2]
    forged = browser.send("/join", {"invite": invite}, origin="http://evil.example")
    assert forged.status == 401
    joined = browser.send("/join", {"invite": invite})
    assert joined.status == 200
    found = re.search(rf"{TOKEN_PREFIX}[\w-]+", joined.text)
    assert found is not None
    assert Member(studio, found[0]).done("GET", "/v1/sessions") == []
    assert "kim · tenant physics" in browser.look().text
    for tried in (invite, "", "garbage", found[0]):
        answer = Browser(studio).send("/join", {"invite": tried})
        assert (answer.status, "used already" in answer.text) == (401, True)
    for name in ("kim", "lee", "max"):
        studio.people.remove(name)


# ---- the page


def test_a_browser_signs_in_with_the_token_and_never_sends_it_again(studio: StudioStage, ana: Member) -> None:
    stranger = Browser(studio)
    assert stranger.look().headers["location"] == "/sign-in"
    for wrong in ("", "garbage", "<script>alert(1)</script>", ana.token[:-1], "x" * 10_000):
        answer = stranger.send("/sign-in", {"token": wrong})
        assert answer.status == 401
        assert "not known" in answer.text
        assert "<script>alert" not in answer.text
        assert not stranger.cookie
    browser = ana.browser()
    assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(browser.given.split("; "))
    assert ana.token not in browser.cookie
    page = browser.look()
    assert "ana · tenant physics" in page.text
    assert ana.token not in page.text
    for answer in (page, browser.look("/sign-in"), browser.look("/nothing"), studio.ask("GET", "/v1/sessions")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert browser.press("/sign-out").status == 303
    assert browser.look().status == 303, "the cookie opens nothing any more"


def test_no_token_and_no_cookie_is_kept_or_logged(studio: StudioStage, ana: Member) -> None:
    """Not in a file of the studio, not in what it prints, not in its command line or environment."""
    browser = ana.browser()
    start(ana, "traces", "resting", later=True)
    secrets = [ana.token.removeprefix(TOKEN_PREFIX).encode(), browser.cookie.partition("=")[2].encode()]
    assert studio.process is not None
    proc = [f"/proc/{studio.process.pid}/{name}" for name in ("cmdline", "environ")]
    files = [str(path) for path in studio.home.rglob("*") if path.is_file() and "studio" in str(path)]
    assert any(path.endswith("people.db") for path in files)
    for path in (*proc, *files):
        with open(path, "rb") as file:
            content = file.read()
        assert not any(secret in content for secret in secrets), path
    said = studio.log.read_text()
    assert not re.search(r"^(GET|POST) ", said, re.MULTILINE), "a line for each request is for machines alone"


def test_a_form_is_taken_from_the_page_itself_alone(studio: StudioStage, ana: Member, bob: Member) -> None:
    """Without the form token, with another browser's, from another origin: refused, and nothing is changed."""
    browser, other = ana.browser(), bob.browser()
    fields = {"name": "forged", "vram": "1GiB"}
    mine = {"form": browser.form_token}
    tries: list[tuple[dict[str, str], dict[str, str]]] = [
        ({}, {}),
        ({"form": ""}, {}),
        ({"form": "☃"}, {}),
        ({"form": other.form_token}, {}),
        (mine, {"origin": "http://evil.example"}),
        (mine, {"origin": "null"}),
        (mine, {"origin": f"{studio.address}.evil.example"}),
        (mine, {"sec_fetch_site": "cross-site"}),
        (mine, {"sec_fetch_site": "same-site"}),
        (mine, {"cookie": ""}),
    ]
    for more, headers in tries:
        answer = browser.send("/start", {**fields, **more}, **headers)
        assert answer.status == 401, (more, headers, answer.text)
    forged = browser.send("/sign-in", {"token": ana.token}, origin="http://evil.example")
    assert forged.status == 401
    assert ana.done("GET", "/v1/sessions") == []
    assert browser.send("/start", {**fields, **mine}).status == 303
    assert [one["name"] for one in ana.done("GET", "/v1/sessions")] == ["forged"]


def test_the_page_shows_place_reason_and_bill_and_its_buttons_work(studio: StudioStage, ana: Member) -> None:
    browser = ana.browser()
    assert "No sessions. Start one below" in browser.look().text
    for vram, said in (("8", "has no unit"), ("lots", "lots"), ("", "GPU memory"), ("1KiB", "between 1MiB and 1PiB")):
        answer = browser.press("/start", name="thesis", vram=vram)
        assert answer.status == 400, vram
        assert said in answer.text, answer.text
    for count, said in (("two", "no number of GPUs"), ("0", "has 1 to 1024 GPUs"), ("9999", "has 1 to 1024 GPUs")):
        answer = browser.press("/start", name="thesis", vram="1GiB", count=count)
        assert (answer.status, said in answer.text) == (400, True), answer.text
    for ttl in ("1s", "8d"):
        answer = browser.press("/start", name="thesis", vram="1GiB", ttl=ttl)
        assert (answer.status, "between 2s and 7d" in answer.text) == (400, True), answer.text
    answer = browser.press("/start", name="Thesis", vram="1GiB")
    assert "is not a valid session name" in answer.text, answer.text
    typed = {"name": "<thesis>", "vram": "1GB", "count": "2", "ttl": '"', "model": "A100", "less": "1"}
    found = browser.press("/start", **typed).text
    assert 'action="/start"' in found
    for name, value in typed.items():
        given = "checked=" if name == "less" else f'value="{html.escape(value)}"'
        assert re.search(rf'<input [^>]*name="{name}"[^>]* {re.escape(given)}', found), (name, found)
    assert not re.search('name="pay"[^>]* checked', found)
    answer = browser.press("/start", name="other", vram="1GiB", model="H900")
    assert re.search('<input [^>]*name="model"[^>]* value="H900"', answer.text), (
        "no session is there, and it is changed"
    )
    assert "No sessions. Start one below" in browser.look().text
    assert ana.done("POST", "/v1/sessions", {"name": "other", "vram": GIB, "later": True})["state"] == "resting"
    again = browser.press("/start", name="other", vram="1GiB")
    assert "There is a session other already" in again.text
    assert re.search('<input [^>]*name="name"[^>]* value="other"', again.text), "the name is there to be changed"
    assert (answer.status, "No device here is called" in answer.text) == (409, True), "it is no failure of the studio's"
    assert ana.done("POST", "/v1/sessions/other/end")["state"] == "ended"
    with devices_held(studio):
        assert browser.press("/start", name="thesis", vram="1GiB", ttl="10m", count="2").status == 303
        shown = as_text(until_shown(browser, "place 1"))
        assert "waiting, place 1" in shown
        assert re.search(r"queue place 1.*: \w+", shown)
    answer = browser.press("/start", name="paid", vram="1GiB", pay="1")
    assert (answer.status, "Priority is not for sale in this office" in answer.text) == (400, True), answer.text
    assert re.search('name="pay"[^>]* checked', answer.text), "what was typed is there to be changed"
    body = {"name": "paid", "vram": GIB, "later": True, "pay_priority": True}
    assert ana.done("POST", "/v1/sessions", body)["terms"]["pay_priority"] is True
    assert "pays for priority" in as_text(until_shown(browser, "paid"))
    assert ana.done("POST", "/v1/sessions/paid/end")["state"] == "ended"
    session = ana.done("GET", "/v1/sessions/thesis")["id"]
    shown = as_text(until_shown(browser, "time left"))
    assert "2 × 1GiB of GPU memory" in shown
    assert f"SUBLET_SESSION={session}" in shown
    until("the page shows the bill", lambda: "bill so far 1 lease" in as_text(browser.look()))
    assert browser.press(f"/sessions/{session}/rest").status == 303
    assert "released" in as_text(until_shown(browser, "last lease"))
    assert browser.press(f"/sessions/{session}/resume").status == 303
    until_shown(browser, "time left")
    assert browser.press(f"/sessions/{session}/explode").status == 404
    assert browser.press(f"/sessions/{session}/end").status == 303
    assert "Ended (" in as_text(until_shown(browser, "No sessions."))


@pytest.mark.parametrize("what", ["rest", "end"])
def test_a_lease_that_was_granted_in_this_moment_is_not_taken_for_busy(
    what: str, studio: StudioStage, ana: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs under it before its notebook can take it over, so the person is not told that something does."""
    is_granted, is_refused, may_go_on = threading.Event(), threading.Event(), threading.Event()
    set_down, stop = FabricOffice.set_down, getattr(Sessions, what)

    def late(office: FabricOffice, held: Lease) -> None:
        with held.activity():  # else its holder may have said by now that nothing runs under it
            until("the office takes it for busy", lambda: not office.fabric.lease(held.id).idle)
            is_granted.set()
            assert may_go_on.wait(PATIENCE_S)
        set_down(office, held)

    def tried(sessions: Sessions[Lease], text: str, *, even_if_busy: bool = False) -> object:
        try:
            return stop(sessions, text, even_if_busy=even_if_busy)
        except InvalidRequest:
            is_refused.set()
            raise

    monkeypatch.setattr(FabricOffice, "set_down", late)
    monkeypatch.setattr(Sessions, what, tried)
    mine = Studio(studio.home, find_right(studio.home, {})).of(studio.people.find("ana"))
    with ThreadPoolExecutor(2) as pool:
        try:
            started = pool.submit(mine.start, "quick", Terms(vram=GIB))
            assert is_granted.wait(PATIENCE_S)
            stopped = pool.submit(getattr(mine, what), "quick")
            assert is_refused.wait(PATIENCE_S)
        finally:
            may_go_on.set()
        assert started.result(PATIENCE_S)["name"] == "quick"
        assert stopped.result(PATIENCE_S)["state"] == {"rest": "resting", "end": "ended"}[what]


def test_a_lease_that_has_ended_before_its_notebook_came_is_no_failed_start(
    studio: StudioStage, ana: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ran under it, so it may go to a request that waits at once. The session rests, and says why."""
    set_down = FabricOffice.set_down

    def late(office: FabricOffice, held: Lease) -> None:
        office.release(held.id)
        set_down(office, held)

    monkeypatch.setattr(FabricOffice, "set_down", late)
    mine = Studio(studio.home, find_right(studio.home, {})).of(studio.people.find("ana"))
    started = mine.start("quick", Terms(vram=GIB))
    assert (started["state"], started["leases"][-1]["reason"]) == ("resting", "released")
    mine.end("quick")


def test_what_runs_is_ended_only_when_that_is_said(studio: StudioStage, ana: Member) -> None:
    """The page asks; its second form says so."""
    session = start(ana, "busy")["id"]
    with sublet.connect(home=studio.home, for_tenant="physics") as program:
        lease = program.attach(ana.done("GET", f"/v1/sessions/{session}")["lease"])
        with lease.activity():
            until("something runs in it", lambda: ana.done("GET", f"/v1/sessions/{session}")["busy"])
            refused = ana.ask("POST", f"/v1/sessions/{session}/end")
            assert (refused.status, refused.doc["error"]["kind"]) == (400, "InvalidRequest"), (
                "a class that programs know"
            )
            browser = ana.browser()
            asks = browser.press(f"/sessions/{session}/end")
            assert asks.status == 200, "it is a question, and no error"
            assert "Something runs in session busy" in asks.text
            assert 'name="now" value="1"' in asks.text
            assert ana.state(session) == "active"
            assert browser.press(f"/sessions/{session}/end", now="1").status == 303
    assert ana.state(session) == "ended"


def test_an_open_page_is_told_of_changes_and_of_its_end(studio: StudioStage, ana: Member) -> None:
    erin = studio.member("erin", "physics")
    browser = erin.browser()
    with open_page(studio, browser) as news:
        assert news.headers["content-type"].startswith("text/event-stream")
        assert "No sessions" in next_event(news)
        start(erin, "fresh", "resting", later=True)
        while "fresh" not in (event := next_event(news)):  # how often the page is sent is not said
            assert not event.startswith("event: over")
        studio.people.new_token("erin")
        while not (event := next_event(news)).startswith("event: over"):  # the token was taken back
            assert "fresh" in event
        assert news.read() == b""
    studio.people.remove("erin")


def test_an_open_page_is_told_at_once_of_what_the_person_does(studio: StudioStage, ana: Member) -> None:
    """Not only when it looks again: with an interval of a minute a session, and its lease, are shown all the same."""
    read_again(studio, '[studio]\nupdate = "1m"\n', "studio.update is 1m now, and was 2s.")
    try:
        with open_page(studio, ana.browser()) as news:
            assert "No sessions" in next_event(news)
            began_s = time.monotonic()
            ana.done("POST", "/v1/sessions", {"name": "quick", "vram": GIB})
            while "time left" not in next_event(news):
                pass
            assert time.monotonic() - began_s < PATIENCE_S
    finally:
        read_again(studio, "", "studio.update is 2s now, and was 1m.")
        (studio.home / "studio.toml").unlink()


def test_an_open_page_closes_when_its_token_is_revoked_however_seldom_pages_are_updated(studio: StudioStage) -> None:
    """Its bound, in pauses, is held by a unit test; here an update would come after a minute, a heartbeat after ten
    seconds."""
    erin = studio.member("erin", "physics")
    read_again(studio, '[studio]\nupdate = "1m"\n', "studio.update is 1m now, and was 2s.")
    try:
        with open_page(studio, erin.browser()) as news:
            assert "No sessions" in next_event(news)
            began_s = time.monotonic()
            studio.people.revoke("erin")
            while not next_event(news).startswith("event: over"):
                pass
            assert time.monotonic() - began_s < 5.0
    finally:
        read_again(studio, "", "studio.update is 2s now, and was 1m.")
        (studio.home / "studio.toml").unlink()
        studio.people.remove("erin")


def test_a_studio_that_is_stopped_ends_its_open_pages_and_logs_no_error(studio: StudioStage, ana: Member) -> None:
    """It cut them off after two seconds, and logged each with a trace of fifty lines."""
    browser, before = ana.browser(), len(studio.log.read_text())
    with open_page(studio, browser) as one, open_page(studio, browser) as other:
        for news in (one, other):
            assert "No sessions" in next_event(news)
        try:
            assert studio.kill(signal.SIGTERM) == 0
            said = set(studio.log.read_text()[before:].splitlines())
            assert said <= {"GET /live: 200", "POST /sign-in: 303"}
            for news in (one, other):
                news.read()  # raises if it is not whole
        finally:
            studio.start()


def next_event(news: http.client.HTTPResponse) -> str:
    """The next one; comments are passed over."""
    lines: list[str] = []
    while True:
        read = news.readline().decode()
        assert read, "the stream ended"
        line = read.rstrip("\n")
        if line.startswith(":"):
            continue
        if line:
            lines.append(line)
        elif lines:
            return "\n".join(lines)


def until_shown(browser: Browser, text: str, path: str = "/") -> Answer:
    found: list[Answer] = []

    def is_shown() -> bool:
        found[:] = [browser.look(path)]
        return text in found[0].text

    until(f"the page shows {text}", is_shown)
    return found[0]


def as_text(answer: Answer) -> str:
    """What a person reads."""
    return " ".join(re.sub(r"<[^>]*>", " ", answer.text).split())


def test_a_tenant_that_the_operator_disables_is_told_so_and_keeps_nobody_else_waiting(
    studio: StudioStage, bob: Member
) -> None:
    studio.tenant("chemistry")
    fred = studio.member("fred", "chemistry")
    browser = fred.browser()
    start(fred, "fine", "resting", later=True)
    assert studio.office.office.ask("POST", "/v1/tenants/chemistry/disable", {}).status == 200
    answer = fred.ask("GET", "/v1/sessions")
    assert answer.status == 403
    assert "disabled" in answer.doc["error"]["message"]
    assert "disabled" in browser.look().text
    studio.kill()
    studio.start()
    assert bob.done("GET", "/v1/sessions") == []
    studio.people.remove("fred")


def test_only_an_operator_acts_for_a_tenant(studio: StudioStage) -> None:
    token = studio.office.office.ask("PATCH", "/v1/tenants/biology", {"new_token": True}).doc["token"]
    with (
        sublet.connect(home=studio.home, token=token, as_tenant=True, for_tenant="physics") as fabric,
        pytest.raises(Unauthorized, match="only an operator acts for a tenant"),
    ):
        fabric.leases()
    with sublet.connect(home=studio.home, for_tenant="physics") as fabric:
        with pytest.raises(Unauthorized, match="that is for operators"):
            fabric.request("GET", "/v1/tenants", shape=list)
        assert json.dumps([lease.tenant for lease in fabric.leases()]) == "[]"


# ---- backup


def test_a_backup_of_office_and_studio_while_both_work_is_one_moment_of_both(
    studio: StudioStage, ana: Member, bob: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions get leases while it is made. Where it is put back every lease that a session names is the office's and
    has ended; tokens open what they opened, and the session gets another lease."""
    monkeypatch.setenv("SUBLET_HOME", str(studio.home))
    held, file, place = start(ana, "held"), tmp_path / "both", tmp_path / "other"
    is_over, before = threading.Event(), len(bob.done("GET", "/v1/sessions?all=1"))

    def come_and_go() -> int:
        for number in itertools.count():
            if is_over.is_set() and number:
                return number
            one = bob.done("POST", "/v1/sessions", {"name": f"short-{number}", "vram": MIB})["id"]
            bob.done("POST", f"/v1/sessions/{one}/end", {"now": True})
        raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(come_and_go)
        until("sessions come and go", lambda: len(bob.done("GET", "/v1/sessions?all=1")) > before + 1, PATIENCE_S)
        try:
            assert main(["backup", str(file), "--studio"]) == 0
        finally:
            is_over.set()
        assert counted.result(PATIENCE_S) > 1
    assert main(["restore", str(file)]) == 2, "not while they run"
    monkeypatch.setenv("SUBLET_HOME", str(place / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    assert main(["restore", str(file)]) == 0
    with stage_on(place, "2x2GiB") as other, studio_stage(other) as again:
        hers, his = Member(again, ana.token), Member(again, bob.token)
        assert {one["state"] for one in hers.done("GET", "/v1/sessions")} == {"resting"}
        known = {one["id"] for one in other.office.ask("GET", "/v1/leases?all=1").doc}
        for person in (hers, his):
            for one in person.done("GET", "/v1/sessions?all=1"):
                assert {lease["id"] for lease in one["leases"]} <= known
        now = start_again(hers, "held")
        assert now["id"] == held["id"]
        assert now["leases"][-1]["epoch"] > held["leases"][-1]["epoch"]
        hers.done("POST", "/v1/sessions/held/end", {"now": True})


def start_again(person: Member, name: str) -> Any:
    """As it is when it has a lease."""
    person.done("POST", f"/v1/sessions/{name}/resume")
    until(f"session {name} is active", lambda: person.state(name) == "active", PATIENCE_S)
    return person.done("GET", f"/v1/sessions/{name}")


# ---- the studio's own right


def test_the_studio_has_a_right_of_its_own_and_no_wider_one(studio: StudioStage, office: OfficeStage) -> None:
    """Made on its first start, kept where its user alone reads it, found again; whoever has it makes no operator, and
    reads no volume, no key, no token and no audit log."""
    kept = sessions_folder(str(studio.home)) / "office-token"
    token = kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert find_right(studio.home, {}).token == token
    assert token.encode() not in b"".join(path.read_bytes() for path in studio.home.glob("journal*"))
    with sublet.connect(home=studio.home, token=token, as_tenant=True) as stolen:
        assert stolen.status().devices
        for method, path, body in (
            ("POST", "/v1/tenants", {"id": "mine", "operator": True}),
            ("PATCH", "/v1/tenants/physics", {"new_token": True}),
            ("GET", "/v1/volumes", None),
            ("GET", "/v1/checkpoint-key", None),
            ("GET", "/v1/audit", None),
            ("GET", "/v1/guests", None),
            ("POST", "/v1/down", {}),
        ):
            with pytest.raises(Unauthorized):
                stolen.request(method, path, body, shape=dict)
    with (
        sublet.connect(home=studio.home, for_tenant="physics") as owner,
        owner.gpu(min_vram=GIB, labels={"sublet-session": "s-0123456789ab"}) as lease,
        owner.gpu(min_vram=GIB) as cell,
        sublet.connect(home=studio.home, token=token, as_tenant=True, for_tenant="physics") as stolen,
    ):
        assert {view.id for view in stolen.leases()} == {lease.id, cell.id}
        for path in (f"/v1/leases/{lease.id}/token", "/v1/volumes", "/v1/guests"):
            with pytest.raises(Unauthorized, match="not for studios"):
                stolen.request("GET", path, shape=dict)
        with pytest.raises(NotFound, match="there is no lease"):
            stolen.attach(cell.id)


def test_the_right_is_made_anew_where_it_was_lost_and_not_where_it_was_taken_away(studio: StudioStage) -> None:
    kept, ask = sessions_folder(str(studio.home)) / "office-token", studio.office.office.ask
    lost = kept.read_text()
    studio.kill()
    for left in (None, "sublet_garbage", "two words", ""):
        if left is None:
            kept.unlink()
        else:
            kept.write_text(left)
        right = find_right(studio.home, {})
        assert kept.read_text() == right.token != left
    with sublet.connect(home=studio.home, token=lost, as_tenant=True) as old, pytest.raises(Unauthorized):
        old.request("GET", "/v1/groups", shape=list)
    assert ask("POST", "/v1/tenants/studio/disable", {}).status == 200
    try:
        with pytest.raises(Unauthorized, match="an operator has disabled studio") as refused:
            find_right(studio.home, {})
        assert "sublet tenant enable studio" in refused.value.do
    finally:
        assert ask("POST", "/v1/tenants/studio/enable", {}).status == 200
    studio.start()


def test_what_holds_while_its_right_is_taken_away(studio: StudioStage, ana: Member) -> None:
    """Its people are told, from the next request on, and it is not ready; leases go on."""
    view = start(ana, "thesis", ttl=600)
    ask = studio.office.office.ask
    assert ask("PATCH", "/v1/tenants/studio", {"new_token": True}).status == 200
    assert ana.ask("GET", "/v1/sessions").status == 403
    until("it says so", lambda: studio.ask("GET", "/readyz").doc == {"ok": False, "failing": ["office"]})
    assert ask("GET", f"/v1/leases/{view['lease']}").doc["lease"]["status"] == "active"
    studio.kill()
    studio.start()
    assert ana.done("POST", "/v1/sessions/thesis/end")["end"] == "ended"


def test_a_studio_of_another_user_is_given_its_right(studio: StudioStage, tmp_path: Path) -> None:
    """With a state folder of its own, and a token of a studio: that of a tenant opens too little, an operator's too
    much. Its people are its own; the leases are the tenant's."""
    ask, url = studio.office.office.ask, f"unix://{socket_path(studio.home)}"
    tenant = ask("PATCH", "/v1/tenants/biology", {"new_token": True}).doc["token"]
    made = ask("POST", "/v1/tenants", {"id": "page", "studio": True}).doc["token"]
    with pytest.raises(InvalidRequest, match="SUBLET_TOKEN is not"):
        find_right(tmp_path, {"SUBLET_URL": url})
    with pytest.raises(Unauthorized, match="no right of a studio"):
        find_right(tmp_path, {"SUBLET_URL": url, "SUBLET_TOKEN": tenant})
    with pytest.raises(InvalidRequest, match="is an operator's"):
        find_right(tmp_path, {"SUBLET_URL": url, "SUBLET_TOKEN": studio.operators_token()})
    other = Studio(tmp_path, find_right(tmp_path, {"SUBLET_URL": url, "SUBLET_TOKEN": made}))
    zoe = other.people.add("zoe", "physics")
    view = other.of(zoe).start("thesis", Terms(vram=GIB))
    assert (view["state"], view["tenant"]) == ("active", "physics")
    by = [one["by"] for one in ask("GET", f"/v1/audit?of={view['lease']}").doc]
    assert any(one.startswith("tenant:physics (for it: page") for one in by), by
    assert other.of(zoe).end(view["id"])["state"] == "ended"
    assert ask("POST", "/v1/tenants/page/disable", {}).status == 200
    with pytest.raises(Unauthorized):
        other.of(zoe).all()


def test_an_office_of_before_is_to_be_upgraded(tmp_path: Path) -> None:
    """It has no right of its own for a studio, and is asked for nothing else."""
    asked: list[str] = []

    class Old(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b'{"wire": 1, "wire_oldest": 1, "version": "0.1.0", "pid": 0}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Old) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            env = {"SUBLET_URL": f"http://127.0.0.1:{server.server_port}", "SUBLET_TOKEN": "sublet_x"}
            with pytest.raises(Unsupported, match="has no right of its own for a studio") as refused:
                find_right(tmp_path, env)
        finally:
            server.shutdown()
            thread.join()
    assert "Upgrade the office" in refused.value.do
    assert set(asked) == {"/v1/hello"}


# ---- the operators' page


@pytest.fixture(scope="module")
def operator(studio: StudioStage) -> Member:
    made = studio.member("olga", "physics")
    studio.people.set_role("olga", operator=True)
    return made


def test_an_operator_sees_the_office(studio: StudioStage, ana: Member, operator: Member) -> None:
    """Devices with what they are, who holds and who waits and why, the last hour as a drawing, tenants and groups."""
    browser = operator.browser()
    assert '<a href="/office">Office</a>' in browser.look().text
    with devices_held(studio):
        waits = start(ana, "thesis", "waiting")
        page = until_shown(browser, waits["reason"], "/office")
    shown = as_text(page)
    assert "host device, no GPU" in shown
    assert re.search(r"\d+ live leases?, 1 waiting, 0 in quarantine", shown)
    assert re.search(r"Queue .* 1 physics 1GiB of GPU memory, tier interactive .* UTC", shown)
    assert re.search(r"Groups .* default 1 \d+\.\d% of", shown)
    assert re.search(r"Tenants .* physics default 1", shown)
    bars = re.findall(r'<rect [^>]*class="held"[^>]*><title>([^<]*)</title>', page.text)
    assert len(bars) == 2
    assert all(bar.startswith("local, lease l-") for bar in bars)
    assert ana.token not in page.text


def test_the_office_is_for_operators_alone_from_one_request_to_the_next(
    studio: StudioStage, bob: Member, operator: Member
) -> None:
    """To a member its routes are not there; one who is no operator any more meets that on an open page."""
    node = operator_node(studio)
    member, other = bob.browser(), operator.browser()
    assert "/office" not in member.look().text
    never = member.look("/nothing")
    for path in ("/office", "/office/audit"):
        answer = member.look(path)
        assert (answer.status, answer.text) == (404, never.text), path
    assert member.look("/office/live").status == 404
    token = studio.operators_token()
    for path, fields in (
        ("drain", {"node": node, "draining": "1", "token": token}),
        ("clear", {"resource": "x", "token": token}),
        ("audit", {"of": "physics", "token": token}),
    ):
        assert member.press(f"/office/{path}", **fields).status == 404, path
        assert other.send(f"/office/{path}", fields).status == 401, "without the token of the page's forms"
    assert operator_node(studio, "state") == "up"
    assert Browser(studio).look("/office").headers["location"] == "/sign-in"
    assert other.look("/office").status == 200
    studio.people.set_role("olga", operator=False)
    try:
        assert other.look("/office").status == 404
    finally:
        studio.people.set_role("olga", operator=True)


def test_a_drain_is_asked_about_and_undone(studio: StudioStage, operator: Member) -> None:
    browser, node = operator.browser(), operator_node(studio)
    asks = browser.press("/office/drain", node=node, draining="1")
    assert asks.status == 200
    assert f"Drain {node}?" in asks.text
    assert operator_node(studio, "state") == "up", "nothing is done before the answer"
    token, drain = studio.operators_token(), {"node": node, "draining": "1"}
    member = studio.office.office.ask("PATCH", "/v1/tenants/biology", {"new_token": True}).doc["token"]
    own = (sessions_folder(str(studio.home)) / "office-token").read_text()
    for wrong in (member, own, operator.token, "sublet_nothing", "two words", "☃"):
        answer = browser.press("/office/drain", **drain, token=wrong)
        assert answer.status in (400, 401), (wrong, answer)
        assert browser.press("/office/audit", of="physics", token=wrong).status in (400, 401)
    assert operator_node(studio, "state") == "up", "the studio has no right to it, and neither has a tenant"
    answer = browser.press("/office/drain", **drain, token=token)
    assert (answer.status, answer.headers["location"]) == (303, "/office")
    try:
        assert operator_node(studio, "state") == "draining"
        assert "End the drain" in browser.look("/office").text
    finally:
        assert "End the drain of" in browser.press("/office/drain", node=node, draining="").text
        assert browser.press("/office/drain", node=node, draining="", token=token).status == 303
    assert operator_node(studio, "state") == "up"
    assert browser.press("/office/drain", node="../up", draining="1", token=token).status == 404
    gone = browser.press("/office/clear", resource="nothing/here", token=token)
    assert gone.status == 404
    assert "not in quarantine" in gone.text
    asks = browser.press("/office/clear", resource="<b>", vouch="1")
    assert "Return &lt;b&gt; to service on your word?" in asks.text
    assert "Operator olga drains node" in studio.log.read_text()
    assert "<td" not in browser.look("/office/audit").text, "it is asked for with the operator's token"
    found = as_text(browser.press("/office/audit", of=node, token=token))
    assert re.search(r"operator:head \(uid \d+, pid \d+\) node_drained", found), "the operator, not the studio"
    assert "No such records." in browser.press("/office/audit", of="<script>", token=token).text
    assert token not in studio.log.read_text()


# ---- the teachers' page


def test_a_teacher_sees_the_course_and_nothing_else(
    studio: StudioStage,
    ana: Member,
    bob: Member,
    operator: Member,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From one request to the next. To a member, and for another group, the page is not there; operators see each."""
    monkeypatch.setenv("SUBLET_HOME", str(studio.home))
    ask = studio.office.office.ask
    for group in ("ml1", "ml2"):
        assert ask("POST", "/v1/groups", {"id": group, "weight": 3}).status == 201
    assert ask("PATCH", "/v1/tenants/biology", {"group": "ml1"}).status == 200
    tea = studio.member("tea", "physics")
    browser, never = tea.browser(), bob.browser().look("/nothing").text
    assert (browser.look("/course/ml1").status, browser.look("/course/ml1").text) == (404, never)
    assert main(["person", "set", "tea", "--teacher", "nothing"]) != 0
    assert "there is no group nothing" in capsys.readouterr().err
    assert main(["person", "set", "tea"]) == 2
    assert main(["person", "set", "tea", "--teacher", "ml1", "--operator"]) == 2
    assert studio.people.find("tea").teaches == ()
    assert main(["person", "set", "tea", "--teacher", "ml1"]) == 0
    assert main(["person", "ls"]) == 0
    assert "tea (teacher of ml1)" in capsys.readouterr().out
    words = ["simulate", "--sessions", "4", "--days", "1", "--gpus", "2", "--save", "ml1", "--json"]
    try:
        assert '<a href="/course/ml1">Course ml1</a>' in browser.look().text
        assert main(words) == 0
        with devices_held(studio):
            hers, his = start(ana, "secret", "waiting"), start(bob, "lab-1", "waiting")
            page = until_shown(browser, his["reason"], "/course/ml1")
            shown = as_text(page)
            assert "1 member; 0 with a GPU, 1 waiting." in shown
            assert re.search(r"Waiting .* \d bob 1GiB of GPU memory, tier interactive .* UTC", shown)
            assert re.search(r"2 \d+\.\d% of cells .* 1 \d+\.\d% of cells .* As planned on \d{4}-", shown)
            assert "ana" not in re.findall(r"<td[^>]*>([^<]*)", page.text)
            assert hers["id"] not in page.text
            told = studio.ask("GET", "/course/ml2/live", None, {"cookie": browser.cookie})
            assert told.status == 404
        until("it is granted", lambda: bob.state("lab-1") == "active")
        page = until_shown(browser, "1 with a GPU", "/course/ml1")
        assert re.search(r"With a GPU .* bob 1GiB of GPU memory", as_text(page))
        for path in ("/course/ml2", "/course/nothing", "/office"):
            assert (browser.look(path).status, browser.look(path).text) == (404, never), path
        assert bob.browser().look("/course/ml1").status == 404
        assert Browser(studio).look("/course/ml1").headers["location"] == "/sign-in"
        assert operator.browser().look("/course/ml2").status == 200
        assert operator.browser().look("/course/nothing").status == 404
        assert main(["person", "set", "tea", "--member"]) == 0
        assert browser.look("/course/ml1").status == 404
    finally:
        studio.people.remove("tea")
        for one in (ana, bob):
            for session in one.done("GET", "/v1/sessions"):
                one.done("POST", f"/v1/sessions/{session['id']}/end", {"now": True})
        assert ask("PATCH", "/v1/tenants/biology", {"group": "default"}).status == 200
        for group in ("ml1", "ml2"):
            assert ask("POST", f"/v1/groups/{group}/remove", {}).status == 200


def operator_node(studio: StudioStage, what: str = "id") -> str:
    return str(studio.office.office.ask("GET", "/v1/status").doc["nodes"][0][what])
