"""Whether leases with some labels are left: the office answers once none is, and each tenant of its own only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sublet.testing import FaultName
from sublet.values import MIB
from tests.unit.office.api.bench import Bench, HeldLoop, bench, exchange, run, turns

LABELS = {"program": "burst", "job": "mine"}


async def leases(b: Bench, count: int, caller: str | None = None, **labels: str) -> list[str]:
    """So many new ones with these labels."""
    wants = [{"kind": "memory", "amount": MIB}]
    return [
        (await b.acquire(caller, wants=wants, labels=labels, request_id=f"r-{caller}-{labels}-{n}"))["lease"]["id"]
        for n in range(count)
    ]


async def left(b: Bench, caller: str | None = None, wait: float = 0, **more: Any) -> int:
    answer = await b.ask("POST", "/v1/ends", {"labels": LABELS, "wait": wait, **more}, token=caller)
    assert answer.status == 200, answer.body
    count: int = answer.json["left"]
    return count


def test_the_answer_comes_with_the_last_end_and_one_that_is_ending_counts() -> None:
    async def story() -> None:
        async with bench() as b:
            loop = HeldLoop()
            found = await leases(b, 3, **LABELS, more="x")
            await leases(b, 1, job="mine")  # without the other label it is not meant
            assert await left(b) == 3
            waits = asyncio.ensure_future(left(b, wait=60))
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            await b.ask("POST", "/v1/releases", {"items": [{"lease": lease} for lease in found[:2]]})
            assert await left(b) == 3, "what is ending may still run"
            b.agent.faults.turn_off(FaultName.LOST_REPORTS)
            await b.pass_time("2s")
            assert (await left(b), waits.done()) == (1, False)
            late = await leases(b, 1, **LABELS)  # of the job as well, though it began while the answer is awaited
            await b.ask("POST", f"/v1/leases/{found[2]}/release", {})
            await b.pass_time("1s")
            assert not waits.done()
            await b.ask("POST", f"/v1/leases/{late[0]}/release", {})
            await b.pass_time("1s")
            assert await waits == 0
            loop.let_go()

    run(story)


def test_each_tenant_has_its_own_and_an_operator_all_only_if_it_says_so() -> None:
    """Bursts of two tenants may have the same name."""

    async def story() -> None:
        async with bench() as b:
            ann, bob = await b.tenant("ann"), await b.tenant("bob")
            await leases(b, 2, ann, **LABELS)
            await leases(b, 1, **LABELS)
            assert [await left(b, caller) for caller in (ann, bob, None)] == [2, 0, 1]
            assert [await left(b, caller, all=True) for caller in (ann, bob, None)] == [2, 0, 3]
            for path, count in (("/v1/leases", 3), ("/v1/leases?own=1", 1), ("/v1/leases?own=1&tenant=ann", 1)):
                assert len((await b.ask("GET", path)).json) == count
            await b.volume(ann, "kept")
            assert [len((await b.ask("GET", f"/v1/volumes?own={own}")).json) for own in (0, 1)] == [1, 0]

    run(story)


def test_the_wait_is_bounded_and_ends_with_the_caller_and_the_office() -> None:
    async def story() -> None:
        async with bench() as b:
            await leases(b, 2, **LABELS)
            loop = HeldLoop()
            try:
                late = asyncio.ensure_future(left(b, wait=5))
                await loop.passes(4.9)
                assert not late.done()
                await loop.passes(0.2)
                assert await late == 2
            finally:
                loop.let_go()
            gone = asyncio.Event()
            body = b'{"labels": {}, "wait": 60}'
            away = asyncio.ensure_future(exchange(b.app, "POST", "/v1/ends", [body], gone=gone))
            stays = asyncio.ensure_future(left(b, wait=60))
            await turns()
            gone.set()
            await away
            assert not stays.done()
            b.service.close()
            assert await stays == 2
            assert not b.service._watchers, "nothing is kept of those that waited"

    run(story)


@pytest.mark.parametrize(
    "body",
    [{}, {"labels": {}, "wait": -1}, {"labels": {}, "wait": 61}, {"labels": {"a": "x\n"}}, {"labels": {"": "x"}}],
    ids=str,
)
def test_a_question_that_makes_no_sense_is_refused(body: Any) -> None:
    async def story() -> None:
        async with bench() as b:
            answer = await b.ask("POST", "/v1/ends", body)
            assert (answer.status, answer.error["kind"]) == (400, "InvalidRequest")

    run(story)
