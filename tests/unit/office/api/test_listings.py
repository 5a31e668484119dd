"""What an onlooker is told: what runs, and who waits; each tenant of its own only."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Final

import pytest

from sublet.office.api import listings as serve_looking
from sublet.office.api.leases import AT_ONCE
from sublet.office.api.listings import COMMAND_MAX, PLACES_MAX
from sublet.office.api.service import REFUSAL_EVERY_S, ApiService
from sublet.office.core import BATCH_MAX
from sublet.office.policy_file import PolicyLimits
from sublet.values import GIB, Epoch, GuestId, LeaseId, TenantId
from sublet.wire.guests import Guests, GuestView, ListGuests, Profile
from tests.unit.office.api.bench import Bench, bench, run, turns

PAGE = 4
DEVICE = [{"kind": "gpu", "amount": GIB}]


def guest(number: int, tenant: str, **changes: Any) -> GuestView:
    facts: dict[str, Any] = {
        "id": GuestId(f"g-{number}"),
        "lease": LeaseId(f"l-{number}"),
        "epoch": Epoch(1, number),
        "tenant": TenantId(tenant),
        "name": "",
        "argv": ("sleep", "9"),
        "profile": Profile.LOCAL,
        "state": "running",
        "pid": 100 + number,
        "processes": 2,
        "started_at": 1_700_000_000_123_456_789,
        "ended_at": 0,
        "exit_code": -1,
        "reason": "",
        "cpu_ns": 1_500_000_000,
        "peak_bytes": 1 << 20,
        "log_bytes": 7,
        "log_dropped": 0,
        "number": number,
    }
    return GuestView(**(facts | changes))


class Listing:
    """A supervisor that has these guests."""

    def __init__(self, *found: GuestView) -> None:
        self.found = found
        self.asked: list[ListGuests] = []

    async def __call__(self, asked: ListGuests) -> Guests:
        self.asked.append(asked)
        rest = tuple(one for one in self.found if one.number > asked.after)
        page = rest[:PAGE]
        return Guests(guests=page, more=page[-1].number if len(rest) > PAGE else 0)


def test_a_tenant_sees_its_own_guests_and_an_operator_all() -> None:
    async def story() -> None:
        async with bench() as b:
            b.service.list_guests = Listing(guest(1, "ann"), guest(2, "bob"), guest(3, "ann"))
            tokens = {name: await b.tenant(name) for name in ("ann", "bob", "eve")}
            seen = {name: await _guests(b, token=token) for name, token in tokens.items()}
            assert seen == {"ann": ["g-1", "g-3"], "bob": ["g-2"], "eve": []}
            assert await _guests(b) == ["g-1", "g-2", "g-3"]

    run(story)


def test_very_many_are_told_page_by_page() -> None:
    async def story() -> None:
        async with bench() as b:
            listing = b.service.list_guests = Listing(*(guest(n, "ann" if n % 2 else "bob") for n in range(1, 30)))
            ann = await b.tenant("ann")
            mine = [f"g-{n}" for n in range(1, 30, 2)]
            assert await _guests(b, token=ann) == mine
            assert await _guests(b, "/v1/guests?limit=3", ann) == mine[:3]
            assert listing.asked[-1].after == PAGE, "no further than needed"
            assert await _guests(b, "/v1/guests?limit=3&after=5", ann) == mine[3:6]
            assert await _guests(b, "/v1/guests?after=29", ann) == []
            for wrong in ("limit=1001", "after=-1", "after=x"):
                assert (await b.ask("GET", f"/v1/guests?{wrong}")).status == 400

    run(story)


async def _guests(b: Bench, path: str = "/v1/guests", token: str | None = None) -> list[str]:
    return [found["id"] for found in (await b.ask("GET", path, token=token)).json]


def test_a_guest_is_told_in_the_units_of_every_document() -> None:
    async def story() -> None:
        async with bench() as b:
            ended = {"ended_at": 1_700_000_001_000_000_000, "exit_code": 137, "reason": "expired", "state": "gone"}
            b.service.list_guests = Listing(guest(1, "local"), guest(2, "local", **ended))
            runs, over = (await b.ask("GET", "/v1/guests")).json
            assert (runs["started_at"], runs["ended_at"]) == ("2023-11-14T22:13:20.123Z", None)
            assert (runs["exit_code"], runs["reason"], runs["cpu"], runs["epoch"]) == (None, None, 1.5, [1, 1])
            assert (over["exit_code"], over["reason"], over["ended_at"]) == (137, "expired", "2023-11-14T22:13:21.000Z")

    run(story)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("a", "b"), ["a", "b"]),
        (("x" * COMMAND_MAX,), ["x" * COMMAND_MAX]),
        (("x" * (COMMAND_MAX + 1), "b"), ["x" * COMMAND_MAX + "…"]),
        (("x" * (COMMAND_MAX - 1), "bcd"), ["x" * (COMMAND_MAX - 1), "…"]),
        (("",) * (3 * COMMAND_MAX), None),
        ((), []),
    ],
)
def test_of_an_endless_command_line_the_beginning_is_shown(argv: tuple[str, ...], shown: list[str] | None) -> None:
    found = serve_looking._beginning(argv)
    assert sum(map(len, found)) <= COMMAND_MAX + 1
    assert len(found) <= COMMAND_MAX + 2
    assert shown is None or found == shown


def test_what_is_asked_for_reaches_the_supervisor() -> None:
    async def story() -> None:
        async with bench() as b:
            listing = b.service.list_guests = Listing()
            lease = (await b.acquire())["lease"]["id"]
            await b.ask("GET", "/v1/guests")
            await b.ask("GET", f"/v1/guests?all=1&lease={lease}")
            assert listing.asked == [ListGuests(), ListGuests(lease=lease, ended=True)]

    run(story)


def test_guests_of_a_lease_that_is_not_ones_own_are_those_of_no_lease() -> None:
    async def story() -> None:
        async with bench() as b:
            listing = b.service.list_guests = Listing(guest(1, "local"))
            bob = await b.tenant("bob")
            lease = (await b.acquire())["lease"]["id"]
            other = await b.ask("GET", f"/v1/guests?lease={lease}", token=bob)
            never = await b.ask("GET", "/v1/guests?lease=l-never", token=bob)
            assert (other.status, never.status) == (404, 404)
            assert other.body == never.body.replace(b"l-never", lease.encode())
            assert listing.asked == []

    run(story)


def test_where_nothing_can_run_nothing_runs() -> None:
    async def story() -> None:
        async with bench() as b:
            assert await _guests(b) == []

    run(story)


def test_a_supervisor_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_looking, "ANSWER_S", 0.05)

    async def silence(asked: ListGuests) -> Guests:
        await asyncio.Event().wait()
        raise AssertionError

    async def story() -> None:
        async with bench() as b:
            b.service.list_guests = silence
            answer = await b.ask("GET", "/v1/guests")
            assert (answer.status, answer.error["kind"]) == (503, "Disconnected")

    run(story)


def test_the_line_is_listed_with_who_is_next_first() -> None:
    """With place, reason and estimate; a tenant sees its own entries at their real places."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            await b.acquire(wants=DEVICE, request_id="holds", ttl=60)
            waiting = [
                (await b.acquire(who, wants=DEVICE, request_id=f"w{i}", tier=tier))["lease"]["id"]
                for i, (who, tier) in enumerate([(ann, "batch"), (bob, "batch"), (ann, "interactive")])
            ]
            line = (await b.ask("GET", "/v1/queue")).json
            assert line[0]["lease"]["id"] == waiting[2], "a higher tier goes first"
            assert [place["position"] for place in line] == [1, 2, 3]
            assert all(place["answer"] == "place" and place["reason"] for place in line)
            assert line[0]["estimate"] > 0
            own = (await b.ask("GET", "/v1/queue", token=bob)).json
            assert [place["lease"]["id"] for place in own] == [waiting[1]]
            assert own[0]["position"] in (2, 3)
            first = (await b.ask("GET", "/v1/queue?limit=1")).json
            assert first == line[:1]

    run(story)


@pytest.mark.parametrize(
    "path", ["/v1/queue", "/v1/leases", "/v1/status", "/v1/leases/{id}/explain", "/v1/leases/{id}"]
)
def test_who_asks_very_often_at_one_moment_waits_and_others_do_not(path: str) -> None:
    """Each look goes through many leases. One tenant is looked for once in a turn of the loop."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            await b.acquire(wants=DEVICE, request_id="holds", ttl=60)
            lease = (await b.acquire(ann, wants=DEVICE, request_id="waits"))["lease"]["id"]
            asked = [asyncio.ensure_future(b.ask("GET", path.replace("{id}", lease), token=ann)) for _ in range(200)]
            await asyncio.sleep(0)
            answer = await b.ask("GET", "/v1/leases", token=bob)
            assert answer.status == 200
            assert sum(one.done() for one in asked) < 10, "they were all answered first"
            assert {one.status for one in await asyncio.gather(*asked)} == {200}
            assert not b.service._turns, "nothing is left of it"

    run(story)


@pytest.mark.parametrize(("path", "count"), [("/v1/queue", 40), ("/v1/leases", 3 * AT_ONCE)])
def test_a_long_list_is_made_in_pieces_between_which_others_are_answered(path: str, count: int) -> None:
    async def story() -> None:
        async with bench(gpus=1) as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            await b.acquire(wants=DEVICE, request_id="holds", ttl=60)
            for number in range(count):
                await b.acquire(ann, wants=DEVICE, request_id=f"w{number}")
            listing = asyncio.ensure_future(b.ask("GET", path, token=ann))
            await turns(2)
            assert (await b.ask("GET", "/v1/leases", token=bob)).json == []
            assert not listing.done(), "it was made at one go"
            assert len((await listing).json) == count

    run(story)


def test_who_goes_while_it_waits_for_its_turn_keeps_no_turn() -> None:
    async def story() -> None:
        async with bench(gpus=1) as b:
            ann = await b.tenant("ann")
            asked = [asyncio.ensure_future(b.ask("GET", "/v1/leases", token=ann)) for _ in range(20)]
            await asyncio.sleep(0)
            for one in asked[:19]:
                one.cancel()
            assert (await asked[19]).status == 200
            await asyncio.gather(*asked, return_exceptions=True)
            await turns(3)
            assert not b.service._turns

    run(story)


def test_looking_at_the_line_is_no_sign_of_life_of_those_who_wait() -> None:
    """Who waits and says nothing loses the place, however many look on."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.acquire(wants=DEVICE, request_id="holds", ttl=3600)
            await b.acquire(wants=DEVICE, request_id="waits")
            for _ in range(40):
                await b.pass_time("30s")
                line = (await b.ask("GET", "/v1/queue")).json
                if not line:
                    return
            pytest.fail("it waits for ever")

    run(story)


@pytest.mark.parametrize("limit", ["-1", "nan", "x", str(PLACES_MAX + 1)])
def test_a_limit_that_makes_no_sense_is_refused(limit: str) -> None:
    async def story() -> None:
        async with bench() as b:
            assert (await b.ask("GET", f"/v1/queue?limit={limit}")).status == 400

    run(story)


def test_a_tenant_that_asks_for_much_at_once_waits_for_itself() -> None:
    """While all requests of a moment were decided together, another tenant waited for those of the first."""

    async def story() -> None:
        async with bench() as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            asked = [asyncio.ensure_future(b.acquire(ann, request_id=f"a{number}")) for number in range(100)]
            await turns(2)
            await b.acquire(bob, request_id="b")
            answered = sum(one.done() for one in asked)
            assert answered < 20, "the other waited for them"
            assert len({answer["lease"]["id"] for answer in await asyncio.gather(*asked)}) == 100

    run(story)


FLOOD_BETWEEN: Final = 1
"""Requests of a tenant that floods, at most, between another tenant's request and its answer."""


def test_a_flood_delays_the_requests_of_another_tenant_by_one_of_its_own_however_large_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S11: both ask for leases, the one all the time, so what lies between is the factor by which the other waits
    longer: for each of its requests, not only for most of them."""

    async def between(at_once: int, requests: int) -> list[int]:
        async with bench() as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            most = {"tenant.requests_per_minute": 10_000_000, "tenant.leases_per_hour": 10_000_000}
            b.service.set_limits(PolicyLimits(given=most))
            answered, found, over = 0, [], asyncio.Event()

            async def flood(number: int) -> None:
                nonlocal answered
                for count in itertools.count():
                    if over.is_set():
                        return
                    await b.acquire(ann, request_id=f"a{number}-{count}", wait=0)
                    answered += 1

            floods = [asyncio.ensure_future(flood(number)) for number in range(at_once)]
            await turns(50)
            for number in range(requests):
                before = answered
                await b.acquire(bob, request_id=f"b{number}", wait=0)
                found.append(answered - before)
                await turns(3)
            over.set()
            await asyncio.gather(*floods)
            return found

    async def story() -> None:
        for at_once in (5, 50):
            assert max(await between(at_once, 50)) <= FLOOD_BETWEEN
        monkeypatch.setattr(ApiService, "turn", lambda self, tenant: asyncio.sleep(0))
        assert max(await between(50, 5)) > 10 * FLOOD_BETWEEN, "without turns it waits for all of them"

    run(story)


def test_a_tenant_beyond_its_rate_hears_of_it_at_an_even_pace_on_all_its_connections() -> None:
    async def story() -> None:
        async with bench() as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            b.service.set_limits(PolicyLimits(given={"tenant.requests_per_minute": 60}))
            while (await b.ask("GET", "/v1/leases", token=ann)).status == 200:
                pass
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            refused = [asyncio.ensure_future(b.ask("GET", "/v1/leases", token=ann)) for _ in range(6)]
            assert (await b.ask("GET", "/v1/leases", token=bob)).status == 200
            assert not any(one.done() for one in refused), "their pace is no other tenant's"
            assert {answer.status for answer in await asyncio.gather(*refused)} == {429}
            assert loop.time() - began_s >= 6 * REFUSAL_EVERY_S
            assert len(b.service._refused_at_s) == 1

    run(story)


@pytest.mark.parametrize("path", ["/v1/renewals", "/v1/releases"])
def test_a_message_with_many_in_it_counts_for_them_and_others_come_in_between(path: str) -> None:
    """One lease is enough to fill a message with."""

    async def story() -> None:
        async with bench() as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            lease = (await b.acquire(ann, request_id="one"))["lease"]
            mine = (await b.acquire(bob, request_id="other"))["lease"]
            many = {"items": [{"lease": lease["id"], "epoch": lease["epoch"]}] * 2 * BATCH_MAX}
            asked = [asyncio.ensure_future(b.ask("POST", path, many, token=ann)) for _ in range(20)]
            await turns(2)
            submitted = len(b.driver._core._queue)
            assert submitted < 3 * BATCH_MAX, "all of them are before everybody else's now"
            renewed = await b.ask("POST", f"/v1/leases/{mine['id']}/renew", {"epoch": mine["epoch"]}, token=bob)
            assert renewed.status == 200
            assert not all(one.done() for one in asked)
            answers = await asyncio.gather(*asked)
            assert sorted({answer.status for answer in answers}) == [200, 429], "the last of them are too many"
            assert "requests a minute" in answers[-1].error["message"]
            renewed = await b.ask("POST", f"/v1/leases/{mine['id']}/renew", {"epoch": mine["epoch"]}, token=bob)
            assert renewed.status == 200

    run(story)
