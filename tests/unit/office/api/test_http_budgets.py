"""Budgets over HTTP: amounts are exact text, and a member sees its own alone."""

from __future__ import annotations

from typing import Any

from sublet.office.access import Caller
from sublet.office.ledger.bills import Rates
from sublet.office.ledger.budgets import prices_record
from sublet.office.ledger.commands import NodeGone, NodeUp, SetPrices
from sublet.values import Kind, NodeId, ResourceId, TenantId
from sublet.wire.orders import Device, Inventory
from tests.unit.office.api.bench import bench, run

GPU = [{"kind": "gpu", "amount": 1 << 30}]


def test_a_budget_is_set_credited_used_up_and_removed() -> None:
    """The holder is refused with the sentence that says when it may ask again."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            ann = (await b.ask("POST", "/v1/tenants", {"id": "ann"})).json["token"]
            asked = {"tenant": "ann", "per": "day", "amount": "0.000001"}
            made = await b.ask("POST", "/v1/budgets", asked)
            assert made.status == 200, made.body
            view = made.json
            assert (view["amount"], view["used"], view["level"], view["currency"]) == (
                *("0.000001", "0.00", "open", "credits"),
            )
            assert view["resets_at"].endswith("T00:00:00.000Z")
            assert view["lasts_until"] is None, "nothing is held"
            granted = await b.ask("POST", "/v1/leases", {"request_id": "r", "wants": GPU, "ttl": 60}, token=ann)
            assert granted.status == 201, granted.body
            await b.pass_time("5s")
            (view,) = (await b.ask("GET", "/v1/budgets", token=ann)).json
            assert view["level"] == "used_up"
            lease = (await b.ask("GET", f"/v1/leases/{granted.json['lease']['id']}", token=ann)).json["lease"]
            assert lease["notice"]["reason"] == "budget"
            refused = await b.ask("POST", "/v1/leases", {"request_id": "s", "wants": GPU, "ttl": 60}, token=ann)
            assert (refused.status, refused.json["answer"]) == (409, "refusal"), refused.body
            assert "the budget of tenant ann is used up: 0.000001 credits a day; it begins anew at" in str(refused.json)
            once = {**asked, "amount": "10", "request_id": "once"}
            await b.ask("POST", "/v1/budgets/credit", once)
            more = await b.ask("POST", "/v1/budgets/credit", once)
            other = await b.ask("POST", "/v1/budgets/credit", {**once, "amount": "11"})
            assert other.status == 409
            page = (await b.ask("GET", "/metrics")).body.decode()
            assert 'sublet_budgets{level="open"} 1.0' in page
            assert 'sublet_budgets_reached_total{level="used_up"} 1.0' in page
            assert (more.json["credit"], more.json["level"]) == ("10.00", "open")
            assert more.json["lasts_until"] is not None
            gone = await b.ask("POST", "/v1/budgets/remove", {"tenant": "ann", "per": "day"})
            assert gone.json["credit"] == "10.00"
            assert (await b.ask("GET", "/v1/budgets")).json == []
            assert (await b.ask("POST", "/v1/budgets/remove", {"tenant": "ann", "per": "day"})).status == 404

    run(story)


def test_of_a_budget_without_an_end_it_is_said_how_long_it_lasts() -> None:
    """At what is held now; where that is a thousand years, nothing is said."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            ann = (await b.ask("POST", "/v1/tenants", {"id": "ann"})).json["token"]
            await b.ask("POST", "/v1/leases", {"request_id": "r", "wants": GPU, "ttl": 60}, token=ann)
            for amount, is_said in (("1", True), ("1000000000", False)):
                made = await b.ask("POST", "/v1/budgets", {"tenant": "ann", "per": "total", "amount": amount})
                assert (made.status, made.json["resets_at"]) == (200, None), made.body
                assert (made.json["lasts_until"] is not None) is is_said, made.json

    run(story)


def test_what_is_no_budget_is_refused_and_changes_nothing() -> None:
    async def story() -> None:
        async with bench(local_rule=True) as b:
            right: dict[str, Any] = {"group": "default", "per": "month", "amount": "5"}
            wrongs: tuple[tuple[dict[str, Any], str], ...] = (
                ({"amount": "-5"}, "negative"),
                ({"amount": "5,00"}, "no amount"),
                ({"amount": "0.0000001"}, "no amount"),
                ({"amount": "٣"}, "no amount"),
                ({"per": "week"}, "week"),
                ({"group": "never"}, "no group never"),
                ({"tenant": "local"}, "one tenant or of one group"),
                ({"currency": "EUR"}, "in credits"),
            )
            for wrong, says in wrongs:
                answer = await b.ask("POST", "/v1/budgets", {**right, **wrong})
                assert answer.status in (400, 404), answer.body
                assert says.replace("no amount", "not an amount") in answer.error["message"], answer.error
            assert (await b.ask("POST", "/v1/budgets/credit", right)).status == 404
            assert (await b.ask("GET", "/v1/budgets")).json == []

    run(story)


def test_a_member_sees_its_own_budget_and_no_other() -> None:
    """Not that of its group either, in which others spend; and it may change none."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            tokens = {name: (await b.ask("POST", "/v1/tenants", {"id": name})).json["token"] for name in ("ann", "ben")}
            for whose in ({"tenant": "ann"}, {"tenant": "ben"}, {"group": "default"}):
                assert (await b.ask("POST", "/v1/budgets", {**whose, "amount": "5"})).status == 200
            seen = (await b.ask("GET", "/v1/budgets", token=tokens["ann"])).json
            assert [view["id"] for view in seen] == ["tenant/ann/month"]
            assert len((await b.ask("GET", "/v1/budgets")).json) == 3
            for path in ("", "/credit", "/remove"):
                answer = await b.ask(
                    "POST", f"/v1/budgets{path}", {"tenant": "ann", "amount": "9"}, token=tokens["ann"]
                )
                assert answer.status == 401

    run(story)


def test_a_level_is_news_for_those_who_pay_and_for_operators() -> None:
    """Its tenant hears of it, another does not; of a group's all its tenants do, and of no amount that was used."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            for name in ("ann", "ben"):
                await b.ask("POST", "/v1/tenants", {"id": name})
            hub = b.service.hub
            ann, ben = (
                hub.open(Caller(tenant=TenantId(name), operator=False), None, everything=False)
                for name in ("ann", "ben")
            )
            root = hub.open(Caller(tenant=TenantId("local"), operator=True), None, everything=True)
            await b.ask("POST", "/v1/budgets", {"tenant": "ann", "per": "total", "amount": "0"})
            said = b"the budget of tenant ann is used up (0.00 credits in all)"
            for stream in (ann, root):
                assert said in (await stream.next() or b"")
            await b.ask("POST", "/v1/budgets", {"group": "default", "per": "day", "amount": "0"})
            heard = await ben.next() or b""
            assert said not in heard
            assert b"the budget of group default is used up (0.00 credits a day)" in heard

    run(story)


def test_a_budget_that_lasts_longer_than_a_calendar_is_listed() -> None:
    """As one of millions for a lease of little memory: its end would be in the year 900,000,000."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            large = {"tenant": "local", "per": "total", "amount": "999999999"}
            assert (await b.ask("POST", "/v1/budgets", large)).status == 200
            little = [{"kind": "memory", "amount": 1 << 20}]
            await b.ask("POST", "/v1/leases", {"request_id": "r", "wants": little, "ttl": 60})
            answer = await b.ask("GET", "/v1/budgets")
            assert answer.status == 200, answer.body
            (view,) = answer.json
            assert (view["level"], view["lasts_until"]) == ("open", None)

    run(story)


def test_another_model_is_offered_with_time_and_prices_as_text() -> None:
    """And what is left of a tenant's burst credit is shown."""

    async def story() -> None:
        async with bench(local_rule=True, gpus=1) as b:
            large = Device(id=ResourceId("n2/gpu0"), kind=Kind.GPU, capacity=16 << 30, model="A100")
            inventory = Inventory(node=NodeId("n2"), domain="d2", devices=(large,))
            await b.driver.submit(NodeUp(inventory=inventory))
            rates = Rates(currency="EUR", models={"A100": 2_000_000, "m": 500_000})
            await b.driver.submit(SetPrices(prices=prices_record(rates)))
            quota = {"gpu_seconds": 60, "burst_seconds": 90, "burst_refill_seconds": 30}
            made = await b.ask("POST", "/v1/tenants", {"id": "ann", "quota": quota})
            assert made.json["tenant"]["burst_seconds_left"] == 90
            want = {"kind": "gpu", "amount": 1 << 30, "model": "A100"}
            held = {"request_id": "r", "wants": [want], "ttl": 60}
            await b.driver.submit(NodeGone(node=NodeId("n2")))
            answer = await b.ask("POST", "/v1/leases", {**held, "wants": [{**want, "or_model": "*"}]})
            assert answer.json["answer"] == "offer", answer.body
            found = {key: answer.json[key] for key in ("model", "offered", "price", "asked_price", "currency")}
            assert found == {
                "model": "m",
                "offered": 1 << 30,
                "price": "0.50",
                "asked_price": "2.00",
                "currency": "EUR",
            }
            assert "or_model" not in answer.json["lease"]["wants"][0], "a client of the version before reads it"

    run(story)


def test_priority_is_paid_for_where_the_office_sells_it() -> None:
    """Refused without a rate; with one it goes first, and a request that waits behind it learns of no other tenant."""

    async def story() -> None:
        async with bench(local_rule=True) as b:
            tokens = {who: (await b.ask("POST", "/v1/tenants", {"id": who})).json["token"] for who in ("ann", "ben")}

            async def asks(who: str, **more: Any) -> Any:
                wanted = {"request_id": f"{who}{more}", "wants": GPU, "ttl": 600, **more}
                return await b.ask("POST", "/v1/leases", wanted, token=tokens[who])

            refused = await asks("ann", pay_priority=True)
            assert refused.status == 400, refused.body
            assert "not for sale" in refused.error["message"]
            assert (await asks("ann", pay_priority="yes")).status == 400
            await b.driver.submit(SetPrices(prices=prices_record(Rates(priority=250_000))))
            devices = [one for one in (await b.ask("GET", "/v1/status")).json["devices"] if one["kind"] == "gpu"]
            for number, _ in enumerate(devices):
                held = await asks("ann", name=f"h{number}")
                assert held.json["answer"] == "grant", held.body
                assert not held.json["lease"]["pays_priority"]
            plain = (await asks("ben")).json
            paid = (await asks("ann", pay_priority=True)).json
            assert (plain["position"], paid["position"], paid["lease"]["pays_priority"]) == (1, 1, True)
            line = (await b.ask("GET", "/v1/queue")).json
            assert [place["lease"]["id"] for place in line] == [paid["lease"]["id"], plain["lease"]["id"]]
            said = (await b.ask("GET", f"/v1/leases/{plain['lease']['id']}/explain", token=tokens["ben"])).json
            assert said["ahead"] == [{"because": "priority", "requests": 1, "leases": [], "tenants": []}]
            assert "ann" not in str(said)

    run(story)
