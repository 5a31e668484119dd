"""News: who is told what, when, and what happens to a reader who is too slow."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sublet.office.access import LOCAL_CALLER, Caller
from sublet.office.api import sse as sse_module
from sublet.office.api.sse import QUEUE_MAX, EventStream
from sublet.values import GIB, LeaseId, TenantId
from tests.unit.office.api.bench import Bench, bench, exchange, run, turns

ANN = Caller(TenantId("ann"), False)


def heard(stream: EventStream) -> list[tuple[str, Any]]:
    """What waits in a stream: (event, data)."""
    frames = b"".join(stream._queue)
    stream._queue.clear()
    return parsed(frames)


def parsed(frames: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in frames.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def names(stream: EventStream) -> list[str]:
    return [what for what, _ in heard(stream)]


async def release(b: Bench, lease: Any, token: str | None = None) -> None:
    await b.ask("POST", f"/v1/leases/{lease['id']}/release", {}, token=token)
    await b.pass_time("1s")


def test_a_holder_hears_the_whole_story_of_its_lease() -> None:
    """Place, ready, active, notice, ending, ended: in this order, with the lease as it was then."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            first = (await b.acquire())["lease"]
            second = (await b.acquire(request_id="two"))["lease"]
            stream = b.service.hub.open(LOCAL_CALLER, LeaseId(second["id"]), False)
            assert [(what, news["position"]) for what, news in heard(stream)] == [("place", 1)]
            await release(b, first)
            ((what, news),) = heard(stream)
            assert (what, news["lease"]["status"]) == ("ready", "granted")
            claimed = await b.ask("POST", f"/v1/leases/{second['id']}/claim", {})
            epoch = claimed.json["lease"]["epoch"]
            await b.ask("POST", f"/v1/leases/{second['id']}/renew", {"epoch": epoch})
            await b.ask("POST", f"/v1/leases/{second['id']}/revoke", {"notice": 20})
            assert names(stream) == ["active", "renewed", "notice"]
            await b.pass_time("21s")
            await b.pass_time("10s")
            told = heard(stream)
            assert [what for what, _ in told] == ["ending", "ended"]
            assert told[-1][1]["reason"] == "operator"

    run(story)


def test_a_stream_of_one_lease_begins_with_how_it_is() -> None:
    """Nothing can fall between reading the state and listening."""

    async def story() -> None:
        async with bench() as b:
            lease = (await b.acquire())["lease"]
            assert names(b.service.hub.open(LOCAL_CALLER, LeaseId(lease["id"]), False)) == ["active"]
            await release(b, lease)
            assert names(b.service.hub.open(LOCAL_CALLER, LeaseId(lease["id"]), False)) == ["ended"]

    run(story)


def test_a_tenant_hears_of_its_own_leases_only() -> None:
    """Also nothing of nodes and fences; an operator who asks hears everything."""

    async def story() -> None:
        async with bench() as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            mine, everything = b.service.hub.open(ANN, None, False), b.service.hub.open(LOCAL_CALLER, None, True)
            await release(b, (await b.acquire(bob))["lease"], bob)
            await release(b, (await b.acquire(ann))["lease"], ann)
            await b.ask("POST", "/v1/nodes/n1/drain", {})
            told = heard(mine)
            assert [what for what, _ in told] == ["active", "ending", "ended"]
            assert {news["lease"]["tenant"] for _, news in told} == {"ann"}
            assert names(everything) == ["active", "ending", "ended"] * 2 + ["node"]

    run(story)


def test_an_immediate_grant_is_one_piece_of_news() -> None:
    """Queued, granted and claimed in one step: the holder hears ``active``, not ``ready`` for what it has already."""

    async def story() -> None:
        async with bench() as b:
            stream = b.service.hub.open(LOCAL_CALLER, None, False)
            await b.acquire()
            assert names(stream) == ["active"]

    run(story)


def test_places_are_told_at_most_once_a_second_and_only_when_they_change(monkeypatch: Any) -> None:
    """Ten leave the line in front of me: I hear one place, not ten. (The second is a long one, however busy the machine
    is, and over when the test says so.)"""
    monkeypatch.setattr(sse_module, "PLACES_EVERY_S", 3600)

    async def story() -> None:
        async with bench(gpus=1) as b:
            hub = b.service.hub

            def told_when_it_is_over() -> list[Any]:
                assert heard(stream) == []
                assert hub._places_due is not None, "what happened is still to be told"
                hub._places_due.cancel()
                hub._send_places()
                return [news["position"] for _, news in heard(stream)]

            await b.acquire()
            before_me = [(await b.acquire(request_id=f"w{i}"))["lease"] for i in range(10)]
            me = (await b.acquire(request_id="me"))["lease"]
            stream = hub.open(LOCAL_CALLER, LeaseId(me["id"]), False)
            assert [news["position"] for _, news in heard(stream)] == [11]
            for lease in before_me:
                await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            assert told_when_it_is_over() == [1]
            assert hub._places_due is None
            await b.acquire(request_id="behind")
            assert told_when_it_is_over() == [], "who comes after me changes nothing for me"

    run(story)


def test_places_are_told_by_themselves(monkeypatch: Any) -> None:
    monkeypatch.setattr(sse_module, "PLACES_EVERY_S", 0.01)

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.acquire()
            before_me = (await b.acquire(request_id="before"))["lease"]
            me = (await b.acquire(request_id="me"))["lease"]
            stream = b.service.hub.open(LOCAL_CALLER, LeaseId(me["id"]), False)
            assert [news["position"] for _, news in heard(stream)] == [2]
            await b.ask("POST", f"/v1/leases/{before_me['id']}/release", {})
            for _ in range(6000):
                if b.service.hub._places_due is None:
                    break
                await asyncio.sleep(0.01)
            assert [news["position"] for _, news in heard(stream)] == [1]

    run(story)


def test_a_slow_reader_loses_what_waited_is_told_and_costs_nobody_else() -> None:
    """The queue is bounded; ``lagged`` says read the state again; the others miss nothing."""

    async def story() -> None:
        async with bench() as b:
            slow, quick = (b.service.hub.open(LOCAL_CALLER, None, False) for _ in range(2))
            count, received = 0, 0
            while slow.lagged == 0:
                wants = [{"kind": "memory", "amount": 4096}]
                await b.acquire(request_id=f"x{count}", wants=wants)
                count += 1
                received += len(heard(quick))
                assert len(slow._queue) <= QUEUE_MAX
            assert count == QUEUE_MAX + 1 == received
            assert names(slow) == ["lagged", "active"]
            page = (await b.ask("GET", "/metrics")).body.decode()
            assert "sublet_events_lagged_total 1.0" in page

    run(story)


def test_a_stream_over_http_ends_with_its_reader_or_with_the_office() -> None:
    """No stream is left behind; the last frame is whole."""

    async def story() -> None:
        async with bench() as b:
            gone = asyncio.Event()
            got: list[bytes] = []
            reader = asyncio.ensure_future(exchange(b.app, "GET", "/v1/events", [b""], gone=gone, on_body=got.append))
            other = asyncio.ensure_future(exchange(b.app, "GET", "/v1/events", [b""]))
            await turns()
            assert len(b.service.hub) == 2
            await b.acquire()
            await turns()
            assert [what for what, _ in parsed(b"".join(got))] == ["active"]
            gone.set()
            answer = await reader
            assert answer.headers["content-type"] == "text/event-stream"
            assert len(b.service.hub) == 1
            b.service.close()
            await other
            assert len(b.service.hub) == 0

    run(story)


@pytest.mark.parametrize(("query", "told"), [("", [1]), ("&places=1", [1]), ("&places=0", [])])
def test_a_stream_tells_places_unless_its_reader_asks_for_none(query: str, told: list[int]) -> None:
    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.acquire()
            waits = (await b.acquire(request_id="waits"))["lease"]
            got: list[bytes] = []
            path = f"/v1/events?lease={waits['id']}{query}"
            reader = asyncio.ensure_future(exchange(b.app, "GET", path, [b""], on_body=got.append))
            await turns()
            assert [news["position"] for what, news in parsed(b"".join(got)) if what == "place"] == told
            b.service.close()
            await reader

    run(story)


def test_a_quiet_stream_says_that_it_is_still_there(monkeypatch: Any) -> None:
    """A comment now and then: otherwise nobody would notice a dead connection."""
    monkeypatch.setattr(sse_module, "KEEP_ALIVE_S", 0.01)

    async def story() -> None:
        stream = EventStream(LOCAL_CALLER, None, False)
        frame = await stream.next()
        assert frame is not None
        assert frame.startswith(b":")
        assert frame.endswith(b"\n\n")

    run(story)


def test_streams_are_limited_per_tenant_and_in_all(monkeypatch: Any) -> None:
    """One tenant cannot take all the streams there are; hitting the limit is counted and said."""
    monkeypatch.setattr("sublet.office.api.service.STREAMS_TENANT_MAX", 2)
    monkeypatch.setattr("sublet.office.api.service.STREAMS_MAX", 3)

    async def story() -> None:
        async with bench() as b:
            token = await b.tenant("ann")
            for _ in range(2):
                b.service.hub.open(ANN, None, False)
            full = await b.ask("GET", "/v1/events", token=token)
            assert (full.status, full.error["kind"]) == (409, "CapacityExceeded")
            b.service.hub.open(LOCAL_CALLER, None, False)
            assert (await b.ask("GET", "/v1/events")).status == 409
            page = (await b.ask("GET", "/metrics")).body.decode()
            assert 'sublet_limits_hit_total{limit="streams_of_tenant"} 1.0' in page
            assert 'sublet_limits_hit_total{limit="streams"} 1.0' in page

    run(story)


def test_an_offer_is_news_of_its_own() -> None:
    """Less than asked is set aside: the reader learns that it has to say yes or no."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            stream = b.service.hub.open(LOCAL_CALLER, None, False)
            await b.acquire(wants=[{"kind": "gpu", "amount": 3 * GIB, "exclusivity": "shared"}])
            wants = [{"kind": "gpu", "amount": 2 * GIB, "least": GIB, "exclusivity": "shared"}]
            await b.acquire(request_id="o", wants=wants)
            assert names(stream) == ["active", "offer"]

    run(story)
