"""The control API: every good request has its answer, every bad one a sentence of what is wrong and what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from sublet.errors import SubletError
from sublet.lease.states import LeaseStatus
from sublet.office.api.app import BODY_MAX_BYTES, STATUS_OF
from sublet.office.api.reservations import plan_recurrences
from sublet.office.api.routes import ROUTES
from sublet.office.ledger.commands import SetReservation, Tick
from sublet.office.ledger.events import Event, Granted, Queued
from sublet.office.ledger.records import Span
from sublet.testing import FaultName
from sublet.values import GIB, Epoch, LeaseId, ReservationId
from sublet.wire.http import WIRE_VERSION
from sublet.wire.http_views import SESSION_LABEL
from sublet.wire.version import FOR_TENANT_HEADER
from tests.unit.office.api.bench import Bench, HeldLoop, bench, exchange, run, turns

GPU = [{"kind": "gpu", "amount": GIB}]


def ask(method: str, path: str, body: object = None, **more: Any) -> Any:
    """One request to a fresh office."""

    async def story() -> Any:
        async with bench() as b:
            return await b.ask(method, path, body, **more)

    return run(story)


# ---- what a holder does ----


def test_a_lease_is_acquired_renewed_shown_and_released() -> None:
    """The life of a lease over HTTP, each step with its status."""

    async def story() -> None:
        async with bench() as b:
            granted = await b.ask("POST", "/v1/leases", {"request_id": "r", "wants": GPU, "ttl": 60})
            assert granted.status == 201
            lease = granted.json["lease"]
            assert (lease["status"], lease["remaining"], lease["ttl"]) == ("active", 60.0, 60.0)
            assert lease["parts"][0]["host"] is True
            assert granted.json["token"] is None, "a token costs more than a grant and was not asked for"
            b.clock.advance("30s")
            renewed = await b.ask("POST", f"/v1/leases/{lease['id']}/renew", {"epoch": lease["epoch"], "busy": 30})
            assert (renewed.status, renewed.json["ttl"], renewed.json["epoch"]) == (200, 60.0, lease["epoch"])
            assert renewed.json["deadline"] == lease["deadline"] + 30
            longer = await b.ask("POST", f"/v1/leases/{lease['id']}/renew", {"epoch": lease["epoch"], "ttl": 90})
            assert (longer.status, longer.json["ttl"]) == (200, 90.0)
            shown = await b.ask("GET", f"/v1/leases/{lease['id']}")
            assert (shown.json["answer"], shown.json["lease"]["busy"]) == ("grant", 30.0)
            released = await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            assert (released.status, released.json["status"]) == (200, "ending")
            await b.pass_time("1s")
            ended = await b.ask("GET", f"/v1/leases/{lease['id']}")
            assert ended.json["lease"]["end"]["reason"] == "released"
            late = await b.ask("POST", f"/v1/leases/{lease['id']}/renew", {"epoch": lease["epoch"]})
            assert (late.status, late.error["end"]["reason"]) == (410, "released")

    run(story)


def test_the_same_request_has_one_effect() -> None:
    """A lost answer is asked for again: same lease, no second one; another content under the id is a conflict."""

    async def story() -> None:
        async with bench() as b:
            body = {"request_id": "r", "wants": GPU}
            first = await b.ask("POST", "/v1/leases", body)
            again = await b.ask("POST", "/v1/leases", body)
            assert again.json["lease"]["id"] == first.json["lease"]["id"]
            assert b.driver.ledger.state.live_count == 1
            other = await b.ask("POST", "/v1/leases", {**body, "ttl": 77})
            assert (other.status, other.error["kind"]) == (409, "IdempotencyConflict")

    run(story)


def test_the_four_answers_have_four_statuses() -> None:
    """201 granted, 202 a place with its reason, 200 a smaller offer, 409 a refusal with numbers."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            shared = [{"kind": "gpu", "amount": 3 * GIB, "exclusivity": "shared"}]
            first = await b.ask("POST", "/v1/leases", {"request_id": "a", "wants": shared})
            assert (first.status, first.json["answer"]) == (201, "grant")
            place = await b.ask("POST", "/v1/leases", {"request_id": "b", "wants": GPU})
            assert (place.status, place.json["answer"], place.json["position"]) == (202, "place", 1)
            assert place.json["reason"]
            refused = await b.ask("POST", "/v1/leases", {"request_id": "c", "wants": GPU, "wait": 0})
            assert (refused.status, refused.json["answer"], refused.json["code"]) == (409, "refusal", "capacity")
            assert refused.json["do"]
            await b.ask("POST", f"/v1/leases/{place.json['lease']['id']}/release", {})
            smaller = [{"kind": "gpu", "amount": 2 * GIB, "least": GIB >> 1, "exclusivity": "shared"}]
            offer = await b.ask("POST", "/v1/leases", {"request_id": "d", "wants": smaller})
            assert (offer.status, offer.json["answer"], offer.json["offered"]) == (200, "offer", GIB)
            taken = await b.ask("POST", f"/v1/leases/{offer.json['lease']['id']}/claim", {})
            assert (taken.status, taken.json["lease"]["status"]) == (200, "active")

    run(story)


def test_an_offer_is_declined_into_the_line_again() -> None:
    """Saying no to less does not mean leaving: the request waits for what it asked."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.acquire(wants=[{"kind": "gpu", "amount": 3 * GIB, "exclusivity": "shared"}])
            wants = [{"kind": "gpu", "amount": 2 * GIB, "least": GIB >> 1, "exclusivity": "shared"}]
            offer = await b.acquire(wants=wants)
            assert offer["answer"] == "offer"
            declined = await b.ask("POST", f"/v1/leases/{offer['lease']['id']}/decline")
            assert (declined.status, declined.json["answer"]) == (200, "place")

    run(story)


def test_many_renewals_are_answered_each_on_its_own() -> None:
    """One stale epoch in a message of three costs the other two nothing, and the order is that of the request."""

    async def story() -> None:
        async with bench() as b:
            wants = [{"kind": "memory", "amount": 4096}]
            leases = [(await b.acquire(request_id=f"m{i}", wants=wants))["lease"] for i in range(3)]
            items = [{"lease": one["id"], "epoch": one["epoch"]} for one in leases]
            items[1]["epoch"] = [1, 9999]
            answer = await b.ask("POST", "/v1/renewals", {"items": items})
            assert [one and one["lease"] for one in answer.json["items"]] == [leases[0]["id"], None, leases[2]["id"]]
            assert [one and one["kind"] for one in answer.json["errors"]] == [None, "StaleEpoch", None]

    run(story)


def test_a_long_poll_answers_when_the_status_changes() -> None:
    """The holder of a queue place asks once and is told when it is ready, without asking again and again."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            first = (await b.acquire())["lease"]
            place = (await b.acquire(request_id="second"))["lease"]
            poll = asyncio.ensure_future(b.ask("GET", f"/v1/leases/{place['id']}?wait=60&after=queued"))
            await turns()
            assert not poll.done()
            await b.ask("POST", f"/v1/leases/{first['id']}/release", {})
            await b.pass_time("1s")
            answer = await poll
            assert answer.json["lease"]["status"] == "granted"
            assert 0 < answer.json["lease"]["claim_within"] <= 10

    run(story)


async def new_token(b: Bench) -> None:
    answer = await b.ask("PATCH", "/v1/tenants/ann", {"new_token": True})
    assert answer.status == 200


async def disabled(b: Bench) -> None:
    answer = await b.ask("POST", "/v1/tenants/ann/disable", {"notice": False})
    assert answer.status == 200


@pytest.mark.parametrize("change", [new_token, disabled])
def test_a_request_whose_rights_are_taken_back_comes_to_nothing(change: Callable[[Bench], Awaitable[None]]) -> None:
    """One whose body is not whole yet, and one that waits: both are refused, and the second one at once. Nothing was
    done for the first."""

    async def story() -> None:
        async with bench() as b:
            token = await b.tenant("ann")
            lease = (await b.acquire(token))["lease"]["id"]
            late = asyncio.Event()
            body = json.dumps({"request_id": "late", "wants": [{"kind": "memory", "amount": GIB}]}).encode()
            pieces = [body[:9], body[9:]]
            half = asyncio.ensure_future(exchange(b.app, "POST", "/v1/leases", pieces, token=token, held=late))
            poll = asyncio.ensure_future(b.ask("GET", f"/v1/leases/{lease}?wait=60&after=active", token=token))
            ends = asyncio.ensure_future(b.ask("POST", "/v1/ends", {"labels": {}, "wait": 60}, token=token))
            await turns()
            assert not any(one.done() for one in (half, poll, ends))
            await change(b)
            late.set()
            for answer in (await half, await poll, await ends):
                assert (answer.status, answer.json["error"]["kind"]) == (401, "Unauthorized")
            assert "late" not in str(b.driver.ledger.state.requests)

    run(story)


@pytest.mark.parametrize("role", ["operator", "studio"])
def test_what_was_opened_for_a_tenant_ends_with_the_rights_of_who_opened_it(role: str) -> None:
    """What the tenant opened itself stays; a new token of another operator changes nothing."""

    async def story() -> None:
        async with bench() as b:
            token, actor = await b.tenant("ann"), await b.tenant("otto", **{role: True})
            await b.tenant("olga", operator=True)
            lease = (await b.acquire(token, labels={SESSION_LABEL: "s"}))["lease"]["id"]
            for_ann = ((FOR_TENANT_HEADER.encode(), b"ann"),)
            poll = f"/v1/leases/{lease}?wait=60&after=active"
            opened = [
                asyncio.ensure_future(b.ask("GET", path, token=actor, headers=for_ann)) for path in (poll, "/v1/events")
            ]
            own = [asyncio.ensure_future(b.ask("GET", path, token=token)) for path in (poll, "/v1/events")]
            await turns()
            await b.ask("PATCH", "/v1/tenants/olga", {"new_token": True})
            await turns()
            assert not any(one.done() for one in (*opened, *own))
            await b.ask("PATCH", "/v1/tenants/otto", {"new_token": True})
            waited, stream = [await asyncio.wait_for(one, 5) for one in opened]
            assert waited.status == 401
            assert stream.body == b": news\n\n"
            assert not any(one.done() for one in own)
            for one in own:
                one.cancel()

    run(story)


def test_what_others_are_allowed_changes_nothing_for_who_waits() -> None:
    async def story() -> None:
        async with bench() as b:
            token = await b.tenant("ann")
            lease = (await b.acquire(token))["lease"]["id"]
            poll = asyncio.ensure_future(b.ask("GET", f"/v1/leases/{lease}?wait=60&after=active", token=token))
            await turns()
            await b.tenant("ben")
            await b.ask("PATCH", "/v1/tenants/ben", {"new_token": True})
            assert not poll.done()
            await b.ask("POST", f"/v1/leases/{lease}/release", {}, token=token)
            await b.pass_time("1s")
            assert (await poll).json["lease"]["status"] == "ending"

    run(story)


def test_a_newcomer_in_the_same_batch_keeps_no_news_from_who_polls() -> None:
    """The facts of one commit may begin with a request that joins the line and go on with a grant to who waits."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            facts: list[Event] = []
            b.driver.listen(lambda now, events: facts.extend(events))
            first = (await b.acquire())["lease"]
            place = (await b.acquire(request_id="second"))["lease"]
            await b.ask("POST", f"/v1/leases/{first['id']}/release", {})
            await b.pass_time("1s")
            queued = next(fact for fact in facts if isinstance(fact, Queued))
            granted = next(fact for fact in facts if isinstance(fact, Granted) and fact.lease == place["id"])
            poll = asyncio.ensure_future(b.ask("GET", f"/v1/leases/{place['id']}?wait=60&after=granted"))
            await turns()
            b.driver.ledger.state.leases[LeaseId(place["id"])].status = LeaseStatus.ACTIVE
            b.driver._notify_observers(b.driver.now(), [queued, granted])
            await turns()
            assert poll.done()

    run(story)


def test_an_open_poll_keeps_the_place_and_a_closed_one_does_not() -> None:
    """As long as the connection stands the holder is there; thirty seconds after it broke the place is gone."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.acquire()
            place = (await b.acquire(request_id="second"))["lease"]
            gone = asyncio.Event()
            path = f"/v1/leases/{place['id']}?wait=60"
            poll = asyncio.ensure_future(exchange(b.app, "GET", path, [b""], gone=gone))
            await turns()
            for _ in range(4):
                await b.pass_time("20s")
            lease = b.driver.ledger.state.leases[place["id"]]
            assert lease.status == "queued"
            gone.set()
            await poll
            await b.pass_time("31s")
            assert lease.end is not None
            assert lease.end.reason == "holder_gone"

    run(story)


def test_a_token_comes_with_a_grant_that_asks_for_one() -> None:
    """And with each renewal, and by itself; it says this lease and this epoch."""

    async def story() -> None:
        async with bench() as b:
            granted = await b.acquire(token=True)
            assert len(granted["token"]) > 100
            lease = granted["lease"]
            renewed = await b.ask("POST", f"/v1/leases/{lease['id']}/renew", {"epoch": lease["epoch"], "token": True})
            assert renewed.json["token"]
            alone = await b.ask("GET", f"/v1/leases/{lease['id']}/token")
            assert alone.json["expires_at"].endswith("Z")
            await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            over = await b.ask("GET", f"/v1/leases/{lease['id']}/token")
            assert (over.status, over.error["kind"]) == (410, "LeaseNotActive")

    run(story)


def test_an_older_holder_gets_no_token_for_the_newer_epoch() -> None:
    """Two attach at the same moment: each answer carries its own epoch, and only the live one brings a token."""

    async def story() -> None:
        async with bench() as b:
            lease = (await b.acquire())["lease"]
            path = f"/v1/leases/{lease['id']}/attach"
            one, two = await asyncio.gather(
                b.ask("POST", path, {"request_id": "x", "token": True}),
                b.ask("POST", path, {"request_id": "y", "token": True}),
            )
            assert one.json["lease"]["epoch"] < two.json["lease"]["epoch"]
            assert one.json["token"] is None
            assert two.json["token"]

    run(story)


# ---- what an operator does ----


def test_an_operator_sees_revokes_drains_and_clears() -> None:
    """The operator's routes, once around."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            lease = (await b.acquire())["lease"]
            b.agent.touch(lease["id"], Epoch(*lease["epoch"]))
            b.agent.faults.turn_on(FaultName.STUCK_TEARDOWN)
            revoked = await b.ask("POST", f"/v1/leases/{lease['id']}/revoke", {"detail": "maintenance"})
            assert (revoked.status, revoked.json["end"]["reason"]) == (200, "operator")
            for _ in range(12):
                await b.pass_time("10s")
            fences = (await b.ask("GET", "/v1/fences")).json
            assert [fence["resource"] for fence in fences] == ["n1/gpu0"]
            assert (await b.ask("GET", "/v1/status")).json["quarantined"] == 1
            in_use = b.service.in_use
            assert in_use, "or an office that a program has started would end, and nobody clear it"
            b.agent.faults.turn_off(FaultName.STUCK_TEARDOWN)
            of_another = {"vouch": True, "lease": "another"}
            assert (await b.ask("POST", "/v1/fences/clear?resource=n1/gpu0", of_another)).status == 400
            assert len((await b.ask("GET", "/v1/fences")).json) == 1
            cleared = await b.ask("POST", "/v1/fences/clear?resource=n1/gpu0", {"vouch": True})
            assert (cleared.status, cleared.json) == (200, [])
            assert not b.service.in_use
            drained = await b.ask("POST", "/v1/nodes/n1/drain", {})
            assert drained.json["state"] == "draining"
            assert (await b.ask("POST", "/v1/nodes/n1/drain", {"draining": False})).json["state"] == "up"

    run(story)


def test_a_tenant_is_added_changed_and_its_old_token_ends() -> None:
    """The token is shown once; a new one replaces it at once."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            old = await b.tenant("ann", quota={"gpus": 1}, tier_max="batch")
            seen = (await b.ask("GET", "/v1/tenants/ann")).json
            assert (seen["quota"]["gpus"], seen["tier_max"], seen["operator"]) == (1, "batch", False)
            listed = json.dumps((await b.ask("GET", "/v1/tenants")).json)
            assert old not in listed
            assert "token_hash" not in listed
            assert (await b.ask("GET", "/v1/leases", token=old)).status == 200
            changed = await b.ask("PATCH", "/v1/tenants/ann", {"new_token": True, "quota": {"gpus": 2}})
            new = changed.json["token"]
            assert changed.json["tenant"]["quota"]["gpus"] == 2
            assert (await b.ask("GET", "/v1/leases", token=old)).status == 401
            assert (await b.ask("GET", "/v1/leases", token=new)).status == 200
            twice = await b.ask("POST", "/v1/tenants", {"id": "ann"})
            assert twice.status == 400

    run(story)


def test_the_office_ends_only_if_nothing_lives_or_somebody_says_what_becomes_of_it() -> None:
    """``idle`` is refused while leases live, ``keep`` leaves them, ``now`` ends them first."""

    async def story() -> None:
        async with bench() as b:
            await b.acquire()
            refused = await b.ask("POST", "/v1/down", {})
            assert (refused.status, b.stops) == (400, [])
            kept = await b.ask("POST", "/v1/down", {"how": "keep"})
            assert (kept.json, b.stops) == ({"leases": 1}, [True])
            assert b.driver.ledger.state.live_count == 1
            b.stops.clear()
            await b.ask("POST", "/v1/down", {"how": "now"})
            await b.pass_time("10s")
            assert b.stops
            assert b.driver.ledger.state.live_count == 0

    run(story)


def test_the_office_ends_when_what_has_ended_is_cleared_away() -> None:
    """Right after a command it was refused: "1 lease lives". If it takes too long that is said."""

    async def story() -> None:
        async with bench() as b:
            lease = (await b.acquire())["lease"]
            b.agent.touch(lease["id"], Epoch(*lease["epoch"]))
            b.agent.faults.turn_on(FaultName.STUCK_TEARDOWN)
            await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            loop = HeldLoop()
            asked = asyncio.create_task(b.ask("POST", "/v1/down", {}))
            await loop.passes(4.9)
            assert not asked.done()
            await loop.passes(0.2)
            refused = await asked
            assert (refused.status, b.stops) == (400, [])
            assert "1 lease has ended, and what was there is still being cleared away" in refused.error["message"]
            loop.let_go()
            asked = asyncio.create_task(b.ask("POST", "/v1/down", {}))
            await turns()
            b.agent.faults.turn_off(FaultName.STUCK_TEARDOWN)
            for _ in range(6):
                await b.pass_time("10s")
            assert ((await asked).json, b.stops) == ({"leases": 0}, [True])

    run(story)


def test_who_drains_may_still_end_it_now() -> None:
    """``now`` ends also what is under notice already, and waits for no notice."""

    async def story() -> None:
        async with bench() as b:
            lease = (await b.acquire(ttl=300))["lease"]
            await b.ask("POST", "/v1/down", {"how": "drain"})
            await turns()
            assert not b.stops
            await b.ask("POST", "/v1/down", {"how": "now"})
            await turns()
            shown = (await b.ask("GET", f"/v1/leases/{lease['id']}")).json["lease"]
            assert shown["end"]["reason"] == "operator"
            assert shown["status"] in ("ending", "ended"), "without a notice; its teardown may be reported by now"

    run(story)


def test_draining_to_the_end_gives_notice_first() -> None:
    """``drain``: the holder has its notice, and the office ends when the last lease has ended."""

    async def story() -> None:
        async with bench() as b:
            lease = (await b.acquire(ttl=300))["lease"]
            await b.ask("POST", "/v1/down", {"how": "drain"})
            await turns()
            shown = (await b.ask("GET", f"/v1/leases/{lease['id']}")).json["lease"]
            assert (shown["status"], shown["notice"]["in_seconds"]) == ("noticed", 30.0)
            assert not b.stops
            late = await b.ask("POST", "/v1/leases", {"request_id": "late", "wants": GPU})
            assert (late.status, late.error["kind"]) == (503, "Disconnected"), "or it would never end"
            await b.pass_time("31s")
            await b.pass_time("10s")
            assert b.stops

    run(story)


# ---- bad input ----

BAD_BODIES = {
    "not JSON": b"{bad",
    "not UTF-8": b'{"request_id": "\xff"}',
    "nothing": b"",
    "a list": b"[]",
    "NaN": b'{"request_id": "r", "wants": [], "ttl": NaN}',
    "an endless number": b'{"request_id": "r", "wants": [], "ttl": 1e999}',
    "nested without end": b'{"request_id": ' + b"[" * 100_000,
    "an unknown field": b'{"request_id": "r", "wants": [], "colour": 1}',
    "a wrong type": b'{"request_id": 7, "wants": []}',
    "half a surrogate": b'{"request_id": "\\ud800", "wants": []}',
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_message_that_does_not_fit_is_refused_in_words(what: str) -> None:
    """400, one sentence, what to do; and nothing happened."""

    async def story() -> None:
        async with bench() as b:
            answer = await b.ask("POST", "/v1/leases", raw=[BAD_BODIES[what]])
            assert (answer.status, answer.error["kind"]) == (400, "InvalidRequest")
            assert answer.error["message"]
            assert answer.error["do"]
            assert not b.driver.ledger.state.leases

    run(story)


BAD_FIELDS: dict[str, dict[str, object]] = {
    "zero": {"wants": [{"kind": "gpu", "amount": 0}]},
    "negative": {"wants": [{"kind": "memory", "amount": -5}]},
    "no core": {"wants": [{"kind": "cpu", "amount": 0}]},
    "absurd": {"wants": [{"kind": "block", "amount": 1 << 62}]},
    "unknown kind": {"wants": [{"kind": "tpu", "amount": 1}]},
    "unknown class": {"wants": [{"kind": "gpu", "amount": 1, "exclusivity": "mine"}]},
    "no wants": {"wants": []},
    "too many": {"wants": [{"kind": "gpu", "amount": 1, "count": 10_000}]},
    "unknown tier": {"tier": "urgent"},
    "contradiction": {"tier": "batch", "spot": True},
    "ttl zero": {"ttl": 0},
    "ttl negative": {"ttl": -1},
    "ttl too short": {"ttl": 0.5},
    "ttl for ever": {"ttl": 1e12},
    "wait negative": {"wait": -1},
    "unknown renewal": {"renew": "sometimes"},
    "name with a slash": {"name": "../x"},
    "label with a line break": {"labels": {"a": "b\n"}},
    "holder too long": {"holder": "x" * 1000},
    "request id empty": {"request_id": ""},
    "request id too long": {"request_id": "x" * 1000},
}


@pytest.mark.parametrize("what", BAD_FIELDS)
def test_a_wish_that_makes_no_sense_changes_nothing(what: str) -> None:
    """Zero, negative, huge, unknown and contradictory values are refused before anything is touched."""

    async def story() -> None:
        async with bench() as b:
            body = {"request_id": "r", "wants": GPU, **BAD_FIELDS[what]}
            answer = await b.ask("POST", "/v1/leases", body)
            assert answer.status in (400, 409), answer.body
            if answer.status == 400:
                assert answer.error["do"], answer.error
            assert not b.driver.ledger.state.live_count
            assert not b.driver.ledger.state.queued_count

    run(story)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/leases/", 404),
        ("GET", "/v1/leases/{id}", 404),
        ("GET", "/v1/leases/%7Bid%7D", 404),
        ("GET", "/v1/leases/a/b/c", 404),
        ("GET", "/v1/leases/none", 404),
        ("GET", "/v1/leases/" + "x" * 5000, 404),
        ("GET", "/v1/leases/%2e%2e%2fkeys", 404),
        ("GET", "/v1/leases/%", 400),
        ("GET", "/v1/leases/%zz", 400),
        ("GET", "/v1/leases/%ff", 400),
        ("GET", "/v1/leases/%00", 400),
        ("GET", "/v1/leases/a%0ab", 400),
        ("GET", "/v1/leases?colour=1", 400),
        ("GET", "/v1/leases?all=1&all=0", 400),
        ("GET", "/v1/leases?all=maybe", 400),
        ("GET", "/v1/leases?all=%", 400),
        ("GET", "/v1/leases/none?wait=nan", 400),
        ("GET", "/v1/leases/none?wait=-1", 400),
        ("GET", "/v1/leases/none?wait=1e9", 400),
        ("GET", "/v1/bill?format=pdf", 400),
        ("GET", "/v1/bill?since=yesterday", 400),
        ("GET", "/v1/bill?since=2026-01-01", 400),
        ("GET", "/v1/bill?by=colour", 400),
        ("GET", "/v1/events?lease=none", 404),
        ("GET", "/v1/tenants/none", 404),
        ("PUT", "/v1/leases", 405),
        ("DELETE", "/v1/leases/none", 405),
        ("HEAD", "/v1/status", 405),
        ("BREW", "/v1/status", 405),
        ("POST", "/v1/fences/clear", 404),
        ("POST", "/v1/nodes/none/drain", 404),
    ],
)
def test_a_request_to_nowhere_is_told_so(method: str, path: str, status: int) -> None:
    """Unknown paths, methods, parameters, bad encodings: the right status and a message without surprises."""
    answer = ask(method, path, {} if method == "POST" else None)
    assert answer.status == status, answer.body
    assert answer.error["message"].isprintable()
    if status == 405:
        assert answer.headers["allow"]


def test_a_message_may_have_a_megabyte_and_not_more() -> None:
    """Said by its header it is not even read; sent in pieces it is cut off; both are counted."""

    async def story() -> None:
        async with bench() as b:
            length = [(b"content-length", str(BODY_MAX_BYTES + 1).encode())]
            declared = await b.ask("POST", "/v1/leases", raw=[b"x"], headers=length)
            assert (declared.status, declared.headers["connection"]) == (413, "close")
            chunk = b"x" * (BODY_MAX_BYTES // 4)
            sent = await b.ask("POST", "/v1/leases", raw=[chunk] * 5)
            assert sent.status == 413
            page = (await b.ask("GET", "/metrics")).body.decode()
            assert 'sublet_limits_hit_total{limit="message_bytes"} 2.0' in page

    run(story)


def test_a_request_that_breaks_off_has_no_effect() -> None:
    """Half a message, then silence: that is not a request."""

    async def story() -> None:
        async with bench() as b:
            sent = False

            async def receive() -> dict[str, object]:
                nonlocal sent
                if sent:
                    return {"type": "http.disconnect"}
                sent = True
                return {"type": "http.request", "body": b'{"request_id":"r","wants":[]}', "more_body": True}

            statuses: list[int] = []

            async def send(message: Any) -> None:
                statuses.append(message.get("status", 0))

            head = {"type": "http", "method": "POST", "path": "/v1/leases", "raw_path": b"/v1/leases"}
            await b.app({**head, "query_string": b"", "headers": []}, receive, send)
            assert statuses[0] == 400
            assert not b.driver.ledger.state.leases

    run(story)


@pytest.mark.parametrize(
    ("version", "status"), [(b"1", 200), (str(WIRE_VERSION + 1).encode(), 200), (b"7", 501), (b"-3", 501), (b"x", 400)]
)
def test_a_client_of_another_wire_version_gets_one_clear_sentence(version: bytes, status: int) -> None:
    """One version apart they understand each other; further apart the older one is named."""
    answer = ask("GET", "/v1/status", headers=[(b"sublet-wire", version)])
    assert answer.status == status
    assert answer.headers["sublet-wire"] == str(WIRE_VERSION)
    if status == 501:
        assert ("Upgrade the client" if version == b"-3" else "Upgrade the office") in answer.error["do"]
    hello = ask("GET", "/v1/hello", headers=[(b"sublet-wire", version)])
    assert hello.status == 200, "everybody may ask who is there"


def test_two_authorization_headers_are_refused() -> None:
    """Which of the two was checked must never be a question."""
    headers = [(b"authorization", b"Bearer sublet_a"), (b"authorization", b"Bearer sublet_b")]
    assert ask("GET", "/v1/status", headers=headers).status == 400


def test_a_bug_is_an_answer_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """500 with a sentence, the trace in the log, and the office goes on."""

    async def story() -> None:
        async with bench() as b:
            monkeypatch.setattr(type(b.service), "view", lambda *_: 1 / 0)
            broken = await b.ask("GET", "/v1/leases")
            assert broken.status == 200, "nothing to view, nothing to break"
            await b.tenant("ann")
            monkeypatch.setattr("sublet.office.api.office._tenant", lambda *_: 1 / 0)
            answer = await b.ask("GET", "/v1/tenants")
            assert (answer.status, answer.error["kind"]) == (500, "SubletError")
            assert "ZeroDivisionError" in caplog.text
            assert (await b.ask("GET", "/v1/status")).status == 200

    run(story)


def test_every_error_of_the_tree_has_a_status() -> None:
    """A new class of error inherits the status of its parent; the root has one, so none is without."""
    assert SubletError in STATUS_OF
    assert all(400 <= status < 600 for status in STATUS_OF.values())


def test_ids_stand_where_the_application_looks_for_them() -> None:
    """The dispatch relies on it: ``{id}`` is the fourth piece of a path, or nowhere."""
    for route in ROUTES:
        pieces = route.path.split("/")
        assert [piece for n, piece in enumerate(pieces) if "{" in piece and n != 3] == []
        assert ("{id}" in pieces) == bool(route.of)


def test_a_group_is_made_changed_shown_and_removed() -> None:
    """By operators alone; what is left out of a change stays."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            token = await b.tenant("ann")
            made = await b.ask("POST", "/v1/groups", {"id": "course", "weight": 3, "ceiling": 1, "quota": {"cores": 4}})
            assert made.status == 201
            assert (await b.ask("POST", "/v1/groups", {"id": "course"})).status == 400
            changed = (await b.ask("PATCH", "/v1/groups/course", {"no_ceiling": True, "floor": 1})).json
            assert (changed["weight"], changed["floor"], changed["ceiling"]) == (3, 1, None)
            assert changed["quota"]["cores"] == 4
            moved = (await b.ask("PATCH", "/v1/tenants/ann", {"group": "course", "weight": 2})).json["tenant"]
            assert (moved["group"], moved["weight"], moved["share"]) == ("course", 2, 0.0)
            await b.acquire(token)
            listed = {view["id"]: view for view in (await b.ask("GET", "/v1/groups")).json}
            assert listed["course"]["tenants"] == ["ann"]
            assert listed["course"]["gpus"] == 1.0
            assert "ann" not in listed["default"]["tenants"]
            assert (await b.ask("POST", "/v1/groups/course/remove", {})).status == 400
            await b.ask("PATCH", "/v1/tenants/ann", {"group": "default"})
            assert (await b.ask("POST", "/v1/groups/course/remove", {})).status == 200
            for method, path in (("PATCH", "/v1/groups/course"), ("POST", "/v1/groups/none/remove")):
                assert (await b.ask(method, path, {})).status == 404
            for path in ("/v1/groups", "/v1/groups/default/remove"):
                assert (await b.ask("POST", path, {"id": "x"} if path == "/v1/groups" else {}, token=token)).status in (
                    401,
                    403,
                )

    run(story)


def test_a_reservation_is_made_shown_and_removed() -> None:
    """Its rule is worked out in its zone; what is no rule is refused with the reason, and changes nothing."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            asked = {"id": "lab", "group": "default", "gpus": 1, "when": " every  day 00:00-24:00", "zone": "UTC"}
            made = await b.ask("POST", "/v1/reservations", asked)
            assert made.status == 201, made.body
            assert (made.json["when"], made.json["zone"], len(made.json["times"])) == (
                "every day 00:00-24:00",
                "UTC",
                3,
            )
            assert made.json["times"][0]["ends_at"] == made.json["times"][1]["begins_at"]
            (listed,) = (await b.ask("GET", "/v1/reservations")).json
            assert listed["state"] in ("kept", "lent")
            assert (len(listed["devices"]), listed["ready"]) == (1, 1)
            wrongs: tuple[tuple[dict[str, Any], str], ...] = (
                ({"when": "every Teusday 10:00-12:00"}, "did you mean tuesday"),
                ({"zone": "Europe/Belrin"}, "did you mean Europe/Berlin"),
                ({"when": "2019-03-31 02:10-02:50", "zone": "Europe/Berlin"}, "the clock in Europe/Berlin jumps"),
                ({"when": "2019-04-01 02:10-02:50"}, "all times of reservation other are past"),
                ({"gpus": 99}, "99 GPUs are more than there are"),
                ({"group": "never"}, "there is no group"),
            )
            for wrong, says in wrongs:
                answer = await b.ask("POST", "/v1/reservations", {**asked, "id": "other", **wrong})
                assert answer.status in (400, 404)
                assert says in answer.error["message"], answer.error
            assert len((await b.ask("GET", "/v1/reservations")).json) == 1
            assert (await b.ask("POST", "/v1/reservations/lab/remove", {})).json["state"] == listed["state"]
            assert (await b.ask("POST", "/v1/reservations/lab/remove", {})).status == 404
            assert (await b.ask("GET", "/v1/reservations")).json == []

    run(story)


def test_times_of_a_reservation_are_worked_out_again_before_they_end() -> None:
    """At a start, and when much of what is known is over; a rule that was changed by a newer database is replaced."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            asked = {"id": "lab", "group": "default", "gpus": 1, "when": "every day 10:00-12:00", "zone": "UTC"}
            await b.ask("POST", "/v1/reservations", asked)
            books = b.driver.ledger.state.books
            name = ReservationId("lab")
            whole = books.reservations[name]
            short = msgspec.structs.replace(whole, spans=whole.spans[:2])
            await b.driver.submit(SetReservation(reservation=short, is_new=False))
            assert len(books.reservations[name].spans) == 2
            plan_recurrences(b.driver)
            await b.driver.submit(Tick())
            assert books.reservations[name].spans == whole.spans
            moved = tuple(Span(start + 1, end + 1) for start, end in whole.spans)
            await b.driver.submit(SetReservation(reservation=msgspec.structs.replace(whole, spans=moved), is_new=False))
            plan_recurrences(b.driver)
            await b.driver.submit(Tick())
            assert books.reservations[name].spans[1:] == whole.spans[1:]

    run(story)


def test_the_operator_sees_all_leases_and_a_tenant_its_own() -> None:
    """Lists, status and bills show each caller what is his."""

    async def story() -> None:
        async with bench() as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            mine = (await b.acquire(ann))["lease"]["id"]
            await b.acquire(bob)

            async def listed(b: Bench, token: str | None, query: str = "") -> list[str]:
                return [one["tenant"] for one in (await b.ask("GET", f"/v1/leases{query}", token=token)).json]

            assert sorted(await listed(b, None)) == ["ann", "bob"]
            assert await listed(b, None, "?tenant=ann") == ["ann"]
            assert await listed(b, ann) == ["ann"]
            assert await listed(b, ann, "?tenant=bob") == []
            devices = (await b.ask("GET", "/v1/status", token=ann)).json["devices"]
            assert sorted(lease for device in devices for lease in device["leases"]) == [mine]
            devices = (await b.ask("GET", "/v1/status")).json["devices"]
            assert sum(len(device["leases"]) for device in devices) == 2

    run(story)
