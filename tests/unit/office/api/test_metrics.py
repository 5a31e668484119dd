"""The metrics page says what happened, and nothing about who."""

from __future__ import annotations

import errno
import re

import pytest

from sublet import background
from sublet.background import Guard
from sublet.errors import Disconnected
from sublet.office.ledger.events import Metered as Event
from sublet.office.policy_file import PolicyLimits
from sublet.values import GIB, LeaseId
from sublet.wire.guests import TroubleNote, Troubles
from sublet.wire.orders import Metered
from tests.unit.office.api.bench import Bench, bench, run


async def page(b: Bench) -> str:
    answer = await b.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.body.decode()


def value(text: str, sample: str) -> float:
    """The value of one sample, named with its labels."""
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"no {sample} in:\n{text}"
    return float(found[1])


def test_what_happens_is_counted() -> None:
    """Grants, refusals, places, renewals, ends with their reasons, commits, and device time to the second."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            lease = (await b.acquire(ttl=100))["lease"]
            await b.acquire(request_id="place")
            await b.acquire(request_id="no", wait=0)
            await b.pass_time("10s")
            text = await page(b)
            assert value(text, 'sublet_grants_total{kind="gpu",tier="interactive"}') == 1
            assert value(text, "sublet_queue_places_total") == 1
            assert value(text, 'sublet_refusals_total{code="capacity"}') == 1
            assert value(text, "sublet_queue_length") == 1
            assert value(text, 'sublet_live_leases{kind="gpu"}') == 1
            assert value(text, 'sublet_live_leases{kind="cpu"}') == 0
            assert value(text, "sublet_gpu_seconds_total") == 10
            assert value(text, 'sublet_capacity{kind="gpu"}') == 4 * GIB
            assert value(text, 'sublet_used{kind="gpu"}') == 4 * GIB
            await b.ask("POST", f"/v1/leases/{lease['id']}/renew", {"epoch": lease["epoch"]})
            await b.pass_time("10s")
            await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            await b.pass_time("5s")
            text = await page(b)
            assert value(text, 'sublet_live_leases{kind="gpu"}') == 1, "the second"
            assert value(text, "sublet_renewals_total") == 1
            assert value(text, 'sublet_ends_total{kind="gpu",reason="released"}') == 1
            assert value(text, "sublet_teardown_seconds_count") == 1
            assert value(text, "sublet_wait_seconds_count") == 2, "the second got what the first gave back"
            assert value(text, "sublet_gpu_seconds_total") >= 20
            assert value(text, "sublet_commits_total") == b.driver.commits
            assert value(text, "sublet_commit_seconds_count") == b.driver.commits

    run(story)


def test_what_the_rate_of_a_group_refuses_is_not_counted_as_its_tenants() -> None:
    async def story() -> None:
        async with bench() as b:
            assert (
                await b.ask("POST", "/v1/groups", {"id": "lab", "quota": {"requests_per_minute": 60}})
            ).status == 201
            ann, bob = await b.tenant("ann", group="lab"), await b.tenant("bob")
            while (await b.ask("GET", "/v1/leases", token=ann)).status == 200:
                pass
            assert value(await page(b), 'sublet_limits_hit_total{limit="requests_of_group"}') == 1
            b.service.set_limits(PolicyLimits(given={"tenant.requests_per_minute": 60}))
            while (await b.ask("GET", "/v1/leases", token=bob)).status == 200:
                pass
            text = await page(b)
            assert value(text, 'sublet_limits_hit_total{limit="requests_of_group"}') == 1
            assert value(text, 'sublet_limits_hit_total{limit="requests_of_tenant"}') == 1

    run(story)


def test_estimates_are_compared_with_what_came() -> None:
    """Of requests that waited and were granted; who was granted at once, or went away, was given none to compare."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            lease = (await b.acquire(ttl=100))["lease"]
            place = await b.acquire(request_id="second")
            gone = (await b.acquire(request_id="third"))["lease"]
            assert (await b.ask("GET", "/v1/status")).json["estimates"] is None
            await b.ask("POST", f"/v1/leases/{gone['id']}/release", {})
            await b.pass_time("20s")
            await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            await b.pass_time("5s")
            found = (await b.ask("GET", "/v1/status")).json["estimates"]
            assert (found["requests"], found["early"]) == (1, 1.0)
            status = await b.ask("GET", "/v1/status", token=await b.tenant("ann"))
            assert status.json["estimates"] == found, "a tenant waits by them too, and they name nobody"
            assert place["estimate"] - 25 <= found["median_error"] == found["p90_error"] <= place["estimate"] - 20
            told = await page(b)
            assert value(told, "sublet_estimate_error_seconds_count") == 1
            for quantile, error in (("0.5", found["median_error"]), ("0.9", found["p90_error"])):
                assert value(told, f'sublet_estimate_error_quantile_seconds{{quantile="{quantile}"}}') == error

    run(story)


def test_what_was_done_on_devices_is_counted_when_their_lease_is_torn_down() -> None:
    """Launches, failures and bytes, as the machine has metered them; and how long each step took."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            now, counts = (
                b.driver.now(),
                Metered(launches=7, failures=2, bytes_in=30, bytes_out=50, vram_byte_seconds=9, fuel=11),
            )
            lease = (await b.acquire(ttl=100))["lease"]["id"]
            b.driver._notify_observers(
                now, [Event(lease=LeaseId(lease), counts=counts, steps={"verify": 2_000_000_000})]
            )
            text = await page(b)
            assert value(text, "sublet_launches_total") == 7
            assert value(text, "sublet_launch_errors_total") == 2
            assert value(text, "sublet_uncounted_leases_total") == 1
            assert value(text, 'sublet_device_bytes_total{way="in"}') == 30
            assert value(text, 'sublet_device_bytes_total{way="out"}') == 50
            assert value(text, "sublet_vram_byte_seconds_total") == 9
            assert value(text, "sublet_fuel_used_total") == 11

    run(story)


def test_no_name_of_anybody_is_on_the_page() -> None:
    """More people read metrics than leases: no lease id, no tenant, no token, no label, no holder."""

    async def story() -> None:
        async with bench() as b:
            token = await b.tenant("very-secret-tenant")
            lease = (await b.acquire(token, name="secret-name", labels={"secretkey": "secretvalue"}, holder="secret"))[
                "lease"
            ]
            await b.acquire(token, request_id="too-big", wants=[{"kind": "gpu", "amount": 1 << 50}])
            text = await page(b)
            assert "secret" not in text
            assert lease["id"] not in text
            assert token not in text

    run(story)


def test_reading_the_page_changes_nothing() -> None:
    """Levels are read when somebody asks: no commit, no event, the same page twice."""

    async def story() -> None:
        async with bench() as b:
            await b.acquire()
            commits = b.driver.commits
            assert await page(b) == await page(b)
            assert b.driver.commits == commits

    run(story)


def test_device_time_stands_still_when_nothing_is_held() -> None:
    """Held time is counted from grant to end, exactly; an offer that is declined counts while it stood."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            lease = (await b.acquire())["lease"]
            await b.pass_time("10s")
            await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            await b.pass_time("100s")
            assert value(await page(b), "sublet_gpu_seconds_total") == 10
            half = [{"kind": "gpu", "amount": 2 * GIB, "exclusivity": "shared"}]
            await b.acquire(request_id="half", wants=half)
            await b.pass_time("10s")
            assert value(await page(b), "sublet_gpu_seconds_total") == 15

    run(story)


def test_what_failed_in_the_background_is_counted_and_told_to_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the office itself, and of the supervisor as long as it answers."""
    monkeypatch.setattr(background, "_troubles", {})

    async def of_supervisor() -> Troubles:
        note = TroubleNote(loop="publish_door", shortages=2, errors=1, failing=1, last="OSError: no")
        return Troubles(troubles=(note,))

    async def away() -> Troubles:
        raise Disconnected("the supervisor of this machine is being started")

    async def story() -> None:
        async with bench(gpus=1) as b:
            guard = Guard("data_door")
            guard.failed(OSError(errno.EMFILE, "Too many open files"))
            b.service.list_troubles = of_supervisor
            text = await page(b)
            name = "sublet_background_failures_total"
            assert value(text, name + '{kind="shortage",loop="data_door",part="office"}') == 1
            assert value(text, name + '{kind="error",loop="publish_door",part="supervisor"}') == 1
            assert value(text, 'sublet_background_failing{loop="data_door",part="office"}') == 1
            told = (await b.ask("GET", "/v1/troubles")).json
            assert [(one["part"], one["loop"], one["failing"]) for one in told] == [
                ("office", "data_door", 1),
                ("supervisor", "publish_door", 1),
            ]
            assert told[0]["last"] == "OSError: [Errno 24] Too many open files"
            guard.passed()
            b.service.list_troubles = away
            assert value(await page(b), 'sublet_background_failing{loop="data_door",part="office"}') == 0
            assert [one["part"] for one in (await b.ask("GET", "/v1/troubles")).json] == ["office"]

    run(story)
