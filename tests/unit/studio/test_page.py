"""The page as text: nothing that comes from outside is markup, and each state says what can be done next."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Final

import pytest

from sublet.errors import InvalidRequest
from sublet.studio.page import (
    ConnectView,
    Html,
    bill_page,
    error_page,
    insist_page,
    join_page,
    joined_page,
    sessions_page,
    sessions_part,
    sign_in_page,
    tag,
    token_page,
    unavailable_part,
)
from sublet.studio.people import Person, Token, TokenScope
from sublet.values import GIB
from tests.unit.studio.markup import Elements

EVIL: Final = "<script>alert('x')</script>\"><img src=x onerror=alert(1)> ' & ☃"
PERSON: Final = Person(id="p-1", name="ana", tenant="physics")


def token(person: Person = PERSON, scope: TokenScope | None = None) -> Token:
    return Token(person=person, label="main", expires_ns=None, scope=scope or TokenScope())


def connect(**more: Any) -> ConnectView:
    usual: dict[str, Any] = {
        "office_url": "unix:///run/sublet/office.sock",
        "studio_url": "https://gpu.example.org",
        "uid": 2001,
        "needs_token": False,
        "is_owner": False,
        "tokens": [token()],
    }
    return ConnectView(**usual | more)


CELL: Final[dict[str, Any]] = {
    "cell": 3,
    "lease": "l-1",
    "at": "2026-11-23T10:00:29Z",
    "held_seconds": 61.0,
    "busy_seconds": 1.5,
    "vram_leased_byte_seconds": 2.0 * GIB,
    "launches": None,
    "bytes_saved": 0,
    "waited_seconds": 0.0,
    "failed": False,
}


def view(**more: Any) -> dict[str, Any]:
    lease = {"id": "l-1", "devices": ["gpu-0"], "until": None, "reason": "", "detail": ""}
    return {
        "id": "s-1",
        "name": "thesis",
        "state": "resting",
        "end": None,
        "tenant": "physics",
        "terms": {"vram": GIB, "count": 1, "tier": "interactive", "or_smaller": False, "pay_priority": False},
        "started_at": "2026-11-23T10:00:00Z",
        "active_at": "2026-11-23T10:00:00Z",
        "volume": "s-1",
        "saved_at": None,
        "checkpoint": None,
        "lease": None,
        "remaining": None,
        "busy": False,
        "suspended": False,
        "position": None,
        "estimate": None,
        "estimate_error": None,
        "reason": "",
        "offer": None,
        "leases": [lease],
        "cells": [],
        "bill": None,
    } | more


def offer(**more: Any) -> dict[str, Any]:
    said = {"text": "16GiB on Tesla T4 now, instead of A100", "until": "2026-11-23T10:00:29Z", "accepted": False}
    return said | {"price": "0.5", "asked_price": "2.0", "currency": "EUR"} | more


def test_no_text_of_a_session_becomes_markup() -> None:
    for state, place in itertools.product(
        ("resting", "waiting", "active", "ended"),
        ("name", "state", "reason", "saved_at", "volume", "started_at", "active_at", "id", "end"),
    ):
        said = {"state": state, "lease": "l-1", "remaining": 90.0, "position": 2 if state == "waiting" else None}
        said["end"] = "ended" if state == "ended" else None
        page = sessions_page(token(), [view(**{**said, place: EVIL})], "f", connect())
        found, where = Elements(page), (state, place)
        assert found.names.count("script") == 1, f"{where}: the page's own"
        assert "img" not in found.names, where
        assert not any(name.startswith("on") for name, _ in found.attributes), where


def test_no_text_of_leases_people_and_errors_becomes_markup() -> None:
    lease = {"id": EVIL, "devices": [EVIL], "until": EVIL, "reason": EVIL, "detail": EVIL}
    person = Person(id=EVIL, name=EVIL, tenant=EVIL)
    error = InvalidRequest(EVIL, do=EVIL)
    active = view(leases=[lease], state="active", lease="l-1")
    evil = connect(
        office_url=EVIL, studio_url=EVIL, tokens=[replace(token(person), label=EVIL, scope=TokenScope(session=EVIL))]
    )
    offered = view(state="offered", offer=offer(text=EVIL, until=EVIL, currency=EVIL))
    pages = (
        sessions_page(token(person), [offered], EVIL, evil),
        sessions_page(token(person), [view(leases=[lease]), active], EVIL, connect()),
        token_page(person, EVIL, EVIL, EVIL, evil),
        error_page(error),
        insist_page(error, EVIL, EVIL),
        sign_in_page(error),
        join_page(error),
        joined_page(person, EVIL),
        unavailable_part(error),
    )
    for page in pages:
        found = Elements(page)
        assert "img" not in found.names
        assert found.names.count("script") <= 1
        assert EVIL.partition(" ")[0] in "".join(found.texts), "it is shown as it is"
        assert not any(name.startswith("on") for name, _ in found.attributes)


def test_an_element_escapes_text_and_keeps_elements() -> None:
    assert tag("p", "a < b", tag("b", "&"), class_="x", title='"') == (
        '<p class="x" title="&quot;">a &lt; b<b>&amp;</b></p>'
    )
    assert tag("input", name="n", value="") == '<input name="n">'
    assert isinstance(tag("p"), Html)


@pytest.mark.parametrize(
    ("state", "shown", "hidden"),
    [
        ({"state": "resting"}, ["Resume", "End"], ["Rest:", "Leave the queue"]),
        ({"state": "resting", "reason": "capacity: all are lent"}, ["<dd>all are lent</dd>"], ["capacity:"]),
        ({"state": "resting", "suspended": True}, ["run the next cell", "suspended"], ["Resume"]),
        ({"state": "waiting", "position": 3, "estimate": 90.0, "reason": "two before it"}, ["place 3, in about"], []),
        (
            {"state": "waiting", "position": 3, "estimate": 90.0, "estimate_error": 60.0, "reason": "two before it"},
            ["place 3, in about 2m (nine tenths of such estimates were within about 1m): two before it"],
            [],
        ),
        (
            {"state": "waiting", "position": 3, "reason": "two before it"},
            ["place 3: two before it", "Leave"],
            ["Resume"],
        ),
        ({"state": "waiting"}, ["has not answered yet"], ["Resume"]),
        (
            {"state": "offered", "offer": offer()},
            [
                "16GiB on Tesla T4 now",
                "0.5000 EUR an hour instead of 2.0000 EUR",
                "until 10:00:29 UTC",
                "Accept the offer",
                "/accept",
                "/decline",
                "Leave the queue",
            ],
            ["Resume", "Rest:"],
        ),
        ({"state": "offered", "offer": offer(accepted=True)}, ["accepted; it is handed over"], ["/accept", "/decline"]),
        ({"state": "resting"}, ["Resume: less will do"], ["Last cells"]),
        ({"cells": [CELL, {**CELL, "failed": True}]}, ["Last cells (2)", "[3]", "[3] failed", "2.0 GiB·s", "1.5s"], []),
        (
            {"terms": {"vram": GIB, "count": 1, "tier": "batch", "or_smaller": True, "pay_priority": True}},
            ["Resume", "or less, tier batch, pays for priority"],
            ["less will do"],
        ),
        ({"state": "active", "lease": "l-1", "remaining": 200.0}, ["about 3m", "gpu-0", "Rest:"], ["Resume"]),
        ({"state": "active", "lease": "l-1", "remaining": 5.0, "busy": True}, ["active, busy", "less than"], []),
        ({"state": "ended", "end": "ended"}, ["Ended (1)", "No sessions."], ["Resume", "Rest:"]),
    ],
)
def test_each_state_says_what_can_be_done(state: dict[str, Any], shown: list[str], hidden: list[str]) -> None:
    part = sessions_part(token(), [view(**state)], "f")
    for text in shown:
        assert text in part
    for text in hidden:
        assert text not in part


@pytest.mark.parametrize("read_only", [False, True])
def test_a_token_of_one_session_is_shown_no_way_to_another(read_only: bool) -> None:
    """No form starts a session, no link leads elsewhere, and what may not be changed has no buttons."""
    shows = token(Person(id="p-1", name="ana", tenant="physics", is_operator=True, teaches=("ml1",)))
    assert 'action="/start"' in sessions_page(shows, [view()], "f", connect())
    one = token(shows.person, TokenScope(session="s-1", read_only=read_only))
    page = sessions_page(one, [view()], "f", connect())
    assert "token of session s-1 alone" in page
    for other in ('action="/start"', "/office", "/course/", "/tokens", "office.sock"):
        assert other not in page
    assert ('action="/sessions/s-1/end"' in page) is not read_only


@pytest.mark.parametrize(
    ("how", "says", "exports"),
    [
        ({}, "As user 2001 of the machine, without any other token.", {"SUBLET_URL", "SUBLET_STUDIO"}),
        (
            {"needs_token": True},
            "As user 2001 of the machine, with your tenant",
            {"SUBLET_URL", "SUBLET_STUDIO", "SUBLET_TOKEN"},
        ),
        (
            {"uid": None, "needs_token": True},
            "From any user of the machine, with your tenant",
            {"SUBLET_URL", "SUBLET_STUDIO", "SUBLET_TOKEN"},
        ),
        ({"office_url": ""}, "no socket for other users", {"SUBLET_STUDIO"}),
        ({"is_owner": True, "needs_token": True, "uid": None}, "You own the office", {"SUBLET_URL", "SUBLET_STUDIO"}),
    ],
)
def test_the_page_says_how_a_program_connects(how: dict[str, Any], says: str, exports: set[str]) -> None:
    page = sessions_page(token(), [], "f", connect(**how))
    assert says in page.replace("&#x27;", "'")
    found = {line.partition("=")[0] for line in page.split("export ")[1:]}
    assert page.count("<pre") == 1
    assert found == {"SUBLET_STUDIO_TOKEN", *exports}
    assert 'action="/tokens/revoke"' in page
    assert "export SUBLET_STUDIO_TOKEN=secret" in token_page(PERSON, "f", "laptop", "secret", connect(**how))


def bill(**more: Any) -> dict[str, Any]:
    amounts: dict[str, Any] = {
        "held_seconds": 60.0,
        "busy_seconds": 4.0,
        "gpu_seconds": 60.0,
        "waited_seconds": 0.0,
        "cost": 0.5,
    }
    amounts |= {"vram_leased_byte_seconds": 120.0 * GIB, "launches": None}
    cell = {**amounts, "cell": 3, "lease": "l-1", "bytes_saved": 0, "launch_errors": None, "end": None, "failed": False}
    said: dict[str, Any] = {
        "leases": 1,
        "launch_errors": 0,
        "saves": 0,
        "bytes_saved": 0,
        "ended": {},
        "currency": "EUR",
    }
    usual = {
        "session": "s-1",
        "name": "thesis",
        "until": "2026-11-23T10:00:29Z",
        "total": {**amounts, **said},
        "count": 2,
        "before": 0,
        "lines": [cell, {**cell, "cell": None, "end": "idle"}],
        "next": None,
    }
    return usual | more


def test_a_bill_has_a_row_for_each_line_and_their_sum() -> None:
    shown = bill_page(PERSON, "f", bill())
    texts = Elements(shown).texts
    assert texts[texts.index("[3]") :][:7] == ["[3]", "1m", "4s", "1m", "120.0 GiB·s", *["not counted"] * 2]
    assert {"outside of cells", "idle", "in all", "Cost, EUR", "As of 2026-11-23 10:00:29 UTC"} <= set(texts)
    assert "lines" not in "".join(texts), "all of them are here"


@pytest.mark.parametrize(
    ("before", "lines", "following", "says"),
    [
        (0, 2, "1.2.2", ["Lines 1 to 2 of 5", "Next lines"]),
        (2, 2, "1.2.4", ["Lines 3 to 4 of 5", "First lines, as of now", "Next lines"]),
        (4, 1, None, ["Lines 5 to 5 of 5", "First lines, as of now"]),
        (9, 0, None, ["No more lines", "First lines, as of now"]),
    ],
)
def test_a_long_bill_says_which_lines_these_are(
    before: int, lines: int, following: str | None, says: list[str]
) -> None:
    part = bill()["lines"][:1] * lines
    shown = bill_page(PERSON, "f", bill(count=5, before=before, lines=part, next=following))
    found = Elements(shown)
    assert [text for text in found.texts if "ines" in text] == says
    assert (("href", "/sessions/s-1/bill?after=1.2.2") in found.attributes) is (following == "1.2.2")


def test_a_session_that_held_nothing_has_a_bill_that_says_so() -> None:
    shown = bill_page(PERSON, "f", bill(total=None, lines=[], count=0))
    assert "Nothing was held by this session" in shown
    assert "<table" not in shown


def test_no_name_in_a_bill_is_markup() -> None:
    line = bill()["lines"][0] | {"lease": EVIL, "end": EVIL}
    shown = bill_page(PERSON, "f", bill(name=EVIL, lines=[line], total=bill()["total"] | {"currency": EVIL}))
    assert "script" not in Elements(shown).names
    assert "img" not in Elements(shown).names
