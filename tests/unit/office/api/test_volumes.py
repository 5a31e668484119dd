"""The control API, volumes: made and found by asking for a block with a name, listed, shown, given up."""

from __future__ import annotations

from typing import Any

import pytest

from sublet.office.ledger.checks import check_books
from sublet.office.ledger.policy import Policy
from sublet.values import GIB, NS_PER_S, Epoch, LeaseId, ResourceId
from sublet.wire.orders import Saved, TornDown
from tests.unit.office.api.bench import Bench, bench, run

LEAVE_OUT = [{"kind": "block", "amount": 0}]


async def _one(b: Bench, name: str = "ckpt", token: str | None = None) -> Any:
    return (await b.ask("GET", f"/v1/volumes/{name}", token=token)).json


def test_a_volume_is_live_then_kept_then_taken_again_and_given_up() -> None:
    async def story() -> None:
        async with bench() as b:
            lease = await b.volume(None, "ckpt", live=True)
            live = await _one(b)
            assert (live["state"], live["lease"], live["keep_until"]) == ("live", lease["id"], None)
            assert live["epoch"] == lease["epoch"]
            await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            await b.pass_time("1s")
            kept = await _one(b)
            assert (kept["state"], kept["lease"], kept["last_lease"]) == ("retained", None, lease["id"])
            assert kept["retain"] == 7 * 86_400
            assert 7 * 86_400 - 10 < kept["remaining"] <= 7 * 86_400
            again = (await b.acquire(wants=LEAVE_OUT, name="ckpt", retain=3600))["lease"]
            assert [part["amount"] for part in again["parts"]] == [GIB]
            assert Epoch(*again["epoch"]) > Epoch(*lease["epoch"])
            taken = await _one(b)
            assert (taken["state"], taken["retain"], taken["made_at"]) == ("live", 3600, kept["made_at"])
            refused = await b.ask("POST", "/v1/volumes/ckpt/remove")
            assert (refused.status, refused.error["kind"]) == (400, "InvalidRequest")
            assert again["id"] in refused.error["message"]
            await b.ask("POST", f"/v1/leases/{again['id']}/release", {})
            await b.pass_time("1s")
            gone = await b.ask("POST", "/v1/volumes/ckpt/remove")
            assert gone.json["state"] in ("removing", "removed")
            await b.pass_time("1s")
            assert (await b.ask("GET", "/v1/volumes")).json == []
            assert (await b.ask("POST", "/v1/volumes/ckpt/remove")).status == 404

    run(story)


def test_an_operator_sees_and_removes_what_is_anybodys_and_says_whose() -> None:
    async def story() -> None:
        async with bench() as b:
            ann, ben = await b.tenant("ann"), await b.tenant("ben")
            await b.volume(ann, "ckpt")
            await b.volume(ben, "ckpt")
            listed = (await b.ask("GET", "/v1/volumes")).json
            assert [(view["tenant"], view["name"]) for view in listed] == [("ann", "ckpt"), ("ben", "ckpt")]
            assert len((await b.ask("GET", "/v1/volumes?tenant=ben")).json) == 1
            assert [view["tenant"] for view in (await b.ask("GET", "/v1/volumes", token=ann)).json] == ["ann"]
            assert (await b.ask("GET", "/v1/volumes/ckpt")).status == 404  # his own, and he has none
            assert (await b.ask("POST", "/v1/volumes/ckpt/remove?tenant=ben")).json["tenant"] == "ben"
            await b.pass_time("1s")
            assert [view["tenant"] for view in (await b.ask("GET", "/v1/volumes")).json] == ["ann"]
            taken = [event.by for batch in b.journal.batches for event in batch if hasattr(event, "by")]
            assert "operator:local" in taken

    run(story)


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"name": "ckpt", "wants": [{"kind": "block", "amount": 2 * GIB}]}, 400, "1GiB, and 2GiB were asked for"),
        ({"name": "none", "wants": LEAVE_OUT}, 404, "there is no volume none"),
        ({"wants": LEAVE_OUT}, 400, "at least 1"),
        ({"name": "", "wants": LEAVE_OUT}, 400, "not a valid"),
        ({"name": "Ünï", "wants": LEAVE_OUT}, 400, "not a valid"),
        ({"name": "a/b", "wants": LEAVE_OUT}, 400, "not a valid"),
        ({"name": "..", "wants": LEAVE_OUT}, 400, "not a valid"),
        ({"name": "x" * 100_000, "wants": LEAVE_OUT}, 400, "not a valid"),
        ({"name": "ckpt", "wants": [{"kind": "block", "amount": -1}]}, 400, "amount"),
        ({"name": "ckpt", "wants": LEAVE_OUT, "retain": -1}, 400, "retain"),
        ({"name": "ckpt", "wants": LEAVE_OUT, "retain": 1e9}, 400, "longer than"),
        ({"name": "ckpt", "wants": LEAVE_OUT, "retain": 40_000_000}, 400, "cannot be kept"),
        ({"wants": [{"kind": "block", "amount": GIB}], "retain": 60}, 400, "with a name"),
        ({"name": "ckpt", "wants": [{"kind": "gpu", "amount": GIB}], "retain": 60}, 400, "with a name"),
        ({"name": "ckpt", "wants": [{"kind": "gpu", "amount": 0}]}, 400, "amount"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_sentence(fields: dict[str, Any], status: int, said: str) -> None:
    async def story() -> None:
        async with bench() as b:
            await b.volume(None, "ckpt")
            commits = b.driver.commits
            answer = await b.ask("POST", "/v1/leases", {"request_id": "r", **fields})
            assert answer.status == status, answer.body
            assert said in answer.error["message"], answer.error
            assert b.driver.commits == commits

    run(story)


def test_asked_for_twice_by_one_id_it_is_one_lease_and_by_another_it_is_refused() -> None:
    async def story() -> None:
        async with bench() as b:
            await b.volume(None, "ckpt")
            first = await b.acquire(request_id="same", wants=LEAVE_OUT, name="ckpt")
            again = await b.acquire(request_id="same", wants=LEAVE_OUT, name="ckpt")
            assert again["lease"]["id"] == first["lease"]["id"]
            other = await b.ask("POST", "/v1/leases", {"request_id": "other", "wants": LEAVE_OUT, "name": "ckpt"})
            assert (other.status, other.json["code"]) == (409, "capacity")
            assert first["lease"]["id"] in other.json["reason"]

    run(story)


def test_what_is_kept_counts_in_the_quota_once_and_ends_by_itself() -> None:
    async def story() -> None:
        async with bench(policy=Policy(retain_ns=60 * NS_PER_S)) as b:
            ann = await b.tenant("ann", quota={"block_bytes": GIB})
            await b.volume(ann, "ckpt")
            more = await b.ask(
                "POST",
                "/v1/leases",
                {"request_id": "x", "wants": [{"kind": "block", "amount": 4096}], "wait": 0},
                token=ann,
            )
            assert more.json["code"] == "quota"
            assert "kept in volumes" in more.json["reason"]
            again = (await b.acquire(ann, wants=LEAVE_OUT, name="ckpt"))["lease"]
            assert again["status"] == "active"
            await b.ask("POST", f"/v1/leases/{again['id']}/release", {}, token=ann)
            await b.pass_time("1s")
            await b.pass_time("61s")
            assert (await b.ask("GET", "/v1/volumes", token=ann)).json == []
            assert b.agent.machine.disk.removed

    run(story)


def test_an_office_that_only_keeps_volumes_is_not_in_use() -> None:
    """Or one that was started by itself would run for a week."""

    async def story() -> None:
        async with bench() as b:
            await b.volume(None, "ckpt")
            assert not b.service.in_use

    run(story)


def test_what_an_agent_keeps_and_the_books_do_not_know_is_adopted() -> None:
    """As after a restore: the volume is there, and can be taken by its tenant."""

    async def story() -> None:
        async with bench() as b:
            await b.volume(None, "ckpt")
            found = b.driver.ledger.state.volumes.pop("local/ckpt")
            resource = b.driver.ledger.state.resources[found.resource]
            del resource.slices[str(found.epoch)]
            resource.used = 0
            b.driver.ledger.state.rooms[resource.id] = type(b.driver.ledger.state.rooms[resource.id]).of(resource)
            b.driver.ledger.state.count_kept(found, -1)
            b.agent.adopted(b.agent.inventory())
            b.agent.tick(b.clock.now_ns())
            await b.pass_time("1s")
            view = await _one(b)
            assert (view["state"], view["size"]) == ("retained", GIB)
            again = (await b.acquire(wants=LEAVE_OUT, name="ckpt"))["lease"]
            assert again["status"] == "active"
            check_books(b.driver.ledger.state)

    run(story)


def test_what_was_saved_under_a_lease_stands_in_its_end_and_in_the_error_of_who_comes_too_late() -> None:
    async def story() -> None:
        async with bench() as b:
            lease = (await b.acquire())["lease"]
            epoch = Epoch(*lease["epoch"])
            saved = Saved(version=4, wall_ns=1_750_000_000_250_000_000, size=10, volume="work")
            resources = tuple(ResourceId(part["resource"]) for part in lease["parts"])
            await b.ask("POST", f"/v1/leases/{lease['id']}/release", {})
            torn = TornDown(
                node=b.agent.node, lease=LeaseId(lease["id"]), epoch=epoch, resources=resources, saved=saved
            )
            b.driver.report(torn)
            await b.pass_time("1s")
            at = "2025-06-15T15:06:40.250Z"
            end = (await b.ask("GET", f"/v1/leases/{lease['id']}")).json["lease"]["end"]
            assert (end["saved_at"], end["saved_version"], end["saved_volume"]) == (at, 4, "work")
            late = await b.ask("POST", f"/v1/leases/{lease['id']}/renew", {"epoch": list(epoch)})
            assert late.error["end"]["saved_at"] == at

    run(story)
