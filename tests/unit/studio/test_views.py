"""What the studio says of a session, in words."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec import structs, to_builtins

from sublet.client.model import Offer
from sublet.studio.look import SessionsSnapshot
from sublet.studio.office import offer_of
from sublet.studio.records import Entry, Offered, Started, Terms, fold
from sublet.studio.views import advice, last_saved, offer_facts, refusal, session_views, state, the_bill
from sublet.values import GIB, Kind
from sublet.wire.http import BillLine
from tests.unit.client.script import view

LINE = BillLine(
    key="s-1",
    tenant="ana",
    leases=1,
    held_seconds=60,
    busy_seconds=30,
    gpu_seconds=60,
    core_seconds=0,
    memory_byte_seconds=0,
    block_byte_seconds=0,
    cost=0.0,
    currency="EUR",
    waited_seconds=2,
)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, ""),
        ({"cost": 0.0123}, ", 0.0123 EUR"),
        ({"cost": 2.5}, ", 2.5000 EUR"),
        ({"cost": 123456.5}, ", 123456.5000 EUR"),
        ({"launches": 7}, ", 7 launches"),
        ({"launches": None}, ", launches not counted"),
        ({"launches": 7, "launch_errors": 2}, ", 7 launches (2 failed)"),
        ({"saves": 2, "bytes_saved": 3 << 20}, ", 3MiB saved"),
        ({"ended": {"preempted": 1, "released": 4}}, ", given up to others once"),
        ({"ended": {"preempted": 2, "fair_share": 1}}, ", given up to others 3 times"),
    ],
)
def test_the_bill_of_a_session_says_what_it_consumed_and_how_often_it_gave_up(
    more: dict[str, object], text: str
) -> None:
    line = {**to_builtins(LINE), **more}
    assert the_bill(line) == f"1 lease, 1m of GPU, 30s busy, 2s in the queue{text}"


def test_the_bill_of_a_session_says_how_much_memory_was_leased() -> None:
    line = {**to_builtins(LINE), "vram_leased_byte_seconds": 240.0 * GIB}
    assert the_bill(line) == "1 lease, 1m of GPU, 240.0 GiB·s of GPU memory, 30s busy, 2s in the queue"


@pytest.mark.parametrize(
    ("checkpoint", "text"),
    [
        (None, "2026-11-21 06:38 UTC"),
        ({"volume": "s-1", "number": 4}, "2026-11-21 06:38 UTC, checkpoint 4"),
        ({"volume": "work", "number": 4}, "2026-11-21 06:38 UTC, checkpoint 4 of volume work"),
    ],
)
def test_what_was_saved_last_is_said_with_where_it_lies(checkpoint: dict[str, object] | None, text: str) -> None:
    view = {"saved_at": "2026-11-21T06:38:06.250Z", "volume": "s-1", "checkpoint": checkpoint}
    assert last_saved(view) == text
    assert last_saved({**view, "saved_at": None}) == ""


def test_a_session_that_was_never_granted_is_told_how_to_begin_with_less() -> None:
    """It may ask for more than any device has: to resume it then is no advice alone."""
    view: dict[str, Any] = {"name": "big", "end": None, "offer": None, "suspended": False, "reason": "", "leases": []}
    assert "session end" not in advice(view)
    refused = advice({**view, "reason": "capacity: no device has 40GiB"})
    assert "`sublet session end big`, then `sublet session start big --vram SIZE`" in refused
    assert "session end" not in advice({**view, "reason": "capacity: nothing is free", "leases": [{"id": "l-1"}]})
    assert "session end" not in advice({**view, "reason": "interrupted"}), "the office refused nothing"


def test_an_offer_has_the_same_words_in_every_place() -> None:
    """Those of the client; and it says the price, and until when it is open."""
    record = Offered(
        offered=16 * GIB,
        asked=16 * GIB,
        valid_s=30.0,
        model="Tesla T4",
        asked_model="A100",
        estimate_s=240.0,
        price="0.5",
        asked_price="2",
        currency="EUR",
    )
    offer = offer_of(record)
    assert str(offer) == "16GiB on Tesla T4 now, instead of A100 (that in about 4m), at 25 % of the price"
    said = {"text": str(offer), "price": "0.5", "asked_price": "2", "currency": "EUR"}
    until = {"until": "2026-11-23T10:00:29Z", "accepted": False}
    assert offer_facts(said | until) == [
        ("offered", str(offer)),
        ("price", "0.5000 EUR an hour instead of 2.0000 EUR"),
        ("offer open", "until 10:00:29 UTC"),
    ]
    smaller = Offered(offered=GIB, asked=2 * GIB, valid_s=30.0)
    assert offer_of(smaller) == Offer(kind=Kind.GPU, asked=2 * GIB, offered=GIB, valid=30.0)
    facts = offer_facts({"text": str(offer_of(smaller)), "price": None, **until, "accepted": True})
    assert facts == [("offered", "1GiB instead of 2GiB"), ("offer open", "accepted; it is handed over")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "too_big: GPU unavailable: 9 GPUs are more than any node has",
            "GPU unavailable: 9 GPUs are more than any node has",
        ),
        ("quota: the quota of gpus is 2, 2 held and 1 asked", "the quota of gpus is 2, 2 held and 1 asked"),
        ("GPU unavailable: all are lent", "GPU unavailable: all are lent"),
        ("interrupted", "interrupted"),
    ],
)
def test_why_there_was_no_lease_is_said_without_the_code(text: str, said: str) -> None:
    assert refusal(text) == said


def test_a_session_that_was_ended_is_not_said_to_be_so_twice() -> None:
    view = {"state": "ended", "end": "ended"}
    assert state(view) == "ended"
    assert state(view | {"end": "expired"}) == "ended: expired"


def test_while_something_runs_in_a_session_it_is_active_now() -> None:
    """Its record knows when a cell ended, and a cell may run for hours; what is idle is as the record says."""
    terms = Terms(vram=GIB)
    started = Entry(seq=1, session="s-0123456789ab", at_ns=10**18, record=Started(name="thesis", terms=terms))
    session, nothing = fold(None, started), cast("Any", None)
    shown = {}
    for is_idle in (True, False):
        held = structs.replace(view("active"), idle=is_idle, granted_at="2026-11-21T07:01:00.000Z")
        seen = SessionsSnapshot(began_s=0.0, leases={session.id: [held]}, places={}, bills={})
        (shown[is_idle],) = session_views(nothing, [session], seen)
    assert shown[True]["active_at"] == "2001-09-09T01:46:40.000Z"
    assert shown[False]["active_at"] > "2025"
