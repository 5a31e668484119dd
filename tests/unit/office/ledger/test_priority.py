"""Paying for priority: what it changes in the order, for how long it passes requests that do not pay, what it costs."""

from __future__ import annotations

import pytest

from sublet.errors import IdempotencyConflict, InvalidRequest
from sublet.lease.states import LeaseStatus
from sublet.office.journal.history import AuditHistory, _AuditedEvent
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Granted, Place
from sublet.office.ledger.bills import GRAINS_PER_MICRO, Bill, Rates, fold
from sublet.office.ledger.budgets import prices_record, standing_now
from sublet.office.ledger.explain import Because
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import InOrder
from sublet.values import BudgetWindow, GroupId, Kind, LeaseId, RequestId, Tier
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, cores, device, gpu, inventory, seconds, shared

HOUR = 3600
CREDIT = 1_000_000
RATES = Rates(priority=CREDIT // 2, models={"H200": 3 * CREDIT})


def selling(*, gpus: int = 1, policy: Policy | None = None, rates: Rates = RATES) -> Bench:
    bench = Bench(gpus=gpus, policy=policy)
    bench.do(cmd.SetPrices(prices=prices_record(rates)))
    return bench


def line(bench: Bench) -> list[str]:
    return [lease.id for lease in InOrder(bench.state, bench.now_ns, bench.policy)]


def billed(bench: Bench, by: str = "lease") -> Bill:
    history = AuditHistory()
    for now, events in bench.history:
        for event in events:
            if isinstance(event, _AuditedEvent):
                history._apply(event, now.ns, now.wall_ns)
    return fold(history.usages(bench.now_ns), rates=RATES, by=by)


# ---- the order


def test_a_request_that_pays_goes_before_those_of_its_tier_that_do_not() -> None:
    """Whatever the shares are; and a higher tier goes before it."""
    bench = selling()
    bench.granted(tenant=ANN, ttl_s=10 * HOUR)
    bench.wait(60)
    bench.queued(tenant=BEN, lease="plain")
    bench.queued(tenant=ANN, lease="pays", pays_priority=True)
    bench.queued(tenant=LOCAL, lease="low", tier=Tier.BATCH, pays_priority=True)
    bench.queued(tenant=LOCAL, lease="low-plain", tier=Tier.BATCH)
    assert line(bench) == ["pays", "plain", "low", "low-plain"]
    places = [bench.ledger.place_of(LeaseId(name), bench.now) for name in line(bench)]
    assert [place and place.position for place in places] == [1, 2, 3, 4]
    assert bench.state.snapshot() == bench.folded().snapshot()


def test_shares_decide_between_those_that_pay() -> None:
    bench = selling()
    bench.granted(tenant=ANN, ttl_s=10 * HOUR)
    bench.wait(60)
    bench.queued(tenant=ANN, lease="ann", pays_priority=True)
    bench.queued(tenant=BEN, lease="ben", pays_priority=True)
    assert line(bench) == ["ben", "ann"]


def test_after_half_an_hour_a_request_has_priority_without_paying() -> None:
    """Then it is ordered with those that pay: here it goes first, since its tenant has used less."""
    bench = selling(policy=Policy(max_hold_ns=seconds(10 * HOUR)))
    bench.granted(tenant=ANN, ttl_s=10 * HOUR)
    waits = bench.queued(tenant=BEN, lease="plain")
    bench.queued(tenant=ANN, lease="pays", pays_priority=True)
    bench.wait(30 * 60 - 1)
    assert line(bench) == ["pays", "plain"]
    bench.wait(1)
    assert line(bench) == ["plain", "pays"]
    assert [type(event) for event in bench.events].count(ev.PriorityGained) == 1
    assert not bench.lease(waits.id).pays_priority
    assert bench.state.snapshot() == bench.folded().snapshot()


def test_a_request_that_may_not_wait_so_long_ends_as_before() -> None:
    bench = selling()
    bench.granted(tenant=ANN, ttl_s=10 * HOUR, tier=Tier.BATCH)
    short, at_once = (bench.queued(tenant=BEN, wait_s=wait_s, tier=Tier.SPOT) for wait_s in (600, 30 * 60))
    bench.wait(600)
    assert bench.lease(short.id).end is not None
    bench.wait(30 * 60)
    assert bench.lease(at_once.id).end is not None
    assert not any(isinstance(event, ev.PriorityGained) for event in bench.events)


def test_the_moment_moves_with_the_clock() -> None:
    """An office on another clock: what was waited counts, what the machine was off does not."""
    bench = selling(policy=Policy(max_hold_ns=seconds(10 * HOUR)))
    bench.granted(tenant=ANN, ttl_s=10 * HOUR)
    waits = bench.queued(tenant=BEN)
    bench.wait(10 * 60)
    before = bench.lease(waits.id).priority_at_ns
    assert before is not None
    last_ns, bench.now_ns = bench.now_ns, seconds(50)
    bench.do(cmd.OpenOffice(incarnation=2, clock_domain="boot-2", last_ns=last_ns))
    assert bench.lease(waits.id).priority_at_ns == bench.now_ns + before - last_ns


def test_nothing_is_preempted_because_a_request_pays() -> None:
    bench = selling()
    holder = bench.granted(tenant=ANN, ttl_s=10 * HOUR)
    bench.queued(tenant=BEN, pays_priority=True)
    bench.wait(29 * 60)
    assert bench.lease(holder.id).status is LeaseStatus.ACTIVE


def test_without_a_rate_no_request_has_priority() -> None:
    """And none is remembered to get it: the order is the one of an office that never heard of it."""
    bench = Bench()
    bench.granted(tenant=ANN, ttl_s=10 * HOUR)
    waits = bench.queued(tenant=BEN)
    assert bench.lease(waits.id).priority_at_ns is None
    bench.wait(29 * 60)
    assert not bench.lease(waits.id).has_priority


# ---- what is refused


@pytest.mark.parametrize(
    ("rates", "wants", "said"),
    [(Rates(), gpu(), "not for sale"), (RATES, cores(1), "paid for by the GPU")],
)
def test_priority_that_cannot_be_sold_is_refused(rates: Rates, wants: object, said: str) -> None:
    bench = Bench(inventory("n1", device("gpu0"), device("cpu", Kind.CPU)))
    bench.do(cmd.SetPrices(prices=prices_record(rates)))
    answer = bench.ask(wants, tenant=ANN, pays_priority=True)  # type: ignore[arg-type]
    assert isinstance(answer, InvalidRequest)
    assert said in answer.message
    assert not bench.state.leases


def test_the_same_request_with_and_without_it_is_another_one() -> None:
    bench = selling()
    assert isinstance(bench.ask(tenant=ANN, request="one", pays_priority=True), Granted)
    assert isinstance(bench.ask(tenant=ANN, request="one", pays_priority=True), Granted)
    assert isinstance(bench.ask(tenant=ANN, request="one"), IdempotencyConflict)


def test_a_rate_that_is_taken_away_leaves_places_as_they_are() -> None:
    """And costs nothing from then on, as with every price."""
    bench = selling()
    bench.granted(tenant=ANN, ttl_s=10 * HOUR)
    bench.queued(tenant=BEN, lease="plain")
    bench.queued(tenant=LOCAL, lease="pays", pays_priority=True)
    bench.do(cmd.SetPrices(prices=prices_record(Rates())))
    assert line(bench) == ["pays", "plain"]
    assert isinstance(bench.ask(tenant=BEN, pays_priority=True), InvalidRequest)


# ---- what it costs


def test_the_bill_has_the_rate_beside_the_price_and_by_itself() -> None:
    """An hour of an H200, and a quarter of another GPU for two hours; by device, by tenant and by lease."""
    bench = Bench(inventory("n1", device("gpu0"), device("gpu1", model="H200")))
    bench.do(cmd.SetPrices(prices=prices_record(RATES)))
    whole = bench.granted(gpu(16, model="H200"), tenant=ANN, ttl_s=10 * HOUR, pays_priority=True)
    part = bench.granted(shared(4), tenant=BEN, ttl_s=10 * HOUR, pays_priority=True)
    bench.wait(HOUR)
    bench.release(whole)
    plain = bench.granted(gpu(16, model="H200"), tenant=ANN, ttl_s=10 * HOUR)
    bench.wait(HOUR)
    by_lease = {line.key: line for line in billed(bench).lines}
    assert [str(by_lease[one.id].cost) for one in (whole, part, plain)] == ["3.500000", "0.750000", "3.000000"]
    assert [str(by_lease[one.id].priority_cost) for one in (whole, part, plain)] == ["0.500000", "0.250000", "0.000000"]
    for by in ("tenant", "device", "group"):
        bill = billed(bench, by=by)
        assert sum(line.grains for line in bill.lines) == bill.total.grains == 7_250_000 * GRAINS_PER_MICRO
        assert sum(line.priority_grains for line in bill.lines) == bill.total.priority_grains
        assert str(bill.total.priority_cost) == "0.750000"


@pytest.mark.parametrize("group", [None, GroupId("default")])
def test_budget_and_bill_agree_to_the_grain(group: GroupId | None) -> None:
    """One and a half credits an hour: the budget of one is used up after 40 minutes, as the bill says."""
    bench = selling()
    tenant = ANN if group is None else None
    bench.do(cmd.SetBudget(tenant=tenant, group=group, per=BudgetWindow.TOTAL, amount=CREDIT))
    lease = bench.granted(tenant=ANN, ttl_s=10 * HOUR, pays_priority=True)
    (budget,) = bench.state.books.budgets.values()
    for moment_s in (1, 1000.000000001, 40 * 60 - 1):
        bench.wait(moment_s - (bench.now_ns - seconds(1000)) / 1e9)
        assert standing_now(bench.state, budget, bench.now).used == billed(bench).total.grains
        assert bench.lease(lease.id).status is LeaseStatus.ACTIVE
    bench.wait(1)
    assert bench.lease(lease.id).status is LeaseStatus.NOTICED
    bench.wait(60)
    assert bench.lease(lease.id).end is not None
    assert standing_now(bench.state, budget, bench.now).used == billed(bench).total.grains
    assert bench.state.snapshot() == bench.folded().snapshot()


def test_a_used_up_budget_refuses_what_costs_nothing_but_the_priority() -> None:
    bench = selling(gpus=2, rates=Rates(gpu=0, priority=CREDIT))
    bench.do(cmd.SetBudget(tenant=ANN, per=BudgetWindow.TOTAL, amount=0))
    bench.granted(tenant=ANN)
    assert "is used up" in bench.refused(tenant=ANN, pays_priority=True).reason


# ---- what is said


def test_explain_and_the_estimate_go_by_the_same_order() -> None:
    bench = selling()
    bench.granted(tenant=ANN, ttl_s=300)
    plain = bench.queued(tenant=BEN, ttl_s=300)
    paying = [bench.queued(tenant=LOCAL, ttl_s=300, pays_priority=True) for _ in range(3)]
    found = bench.ledger.explain(bench.lease(plain.id), bench.now)
    assert [(ahead.because, [one.id for one in ahead.requests]) for ahead in found.ahead] == [
        (Because.PRIORITY, [one.id for one in paying])
    ]
    (advice,) = (one for one in found.advice if "priority" in one)
    assert advice.startswith("pay for priority (0.50 credits an hour for a GPU, beside its price): ")
    first = bench.ledger.explain(bench.lease(paying[0].id), bench.now)
    assert not any("priority" in advice for advice in first.advice)
    assert found.estimate_ns is not None
    assert first.estimate_ns is not None
    assert found.estimate_ns - first.estimate_ns == 3 * seconds(300)


def test_advice_on_priority_is_what_happens() -> None:
    """The place that was named is the place that is had."""
    bench = selling()
    bench.granted(tenant=LOCAL, ttl_s=10 * HOUR)
    bench.wait(60)
    bench.queued(tenant=BEN, pays_priority=True)
    for _ in range(2):
        bench.queued(tenant=BEN)
    mine = bench.queued(tenant=LOCAL)
    (advice,) = (one for one in bench.ledger.explain(bench.lease(mine.id), bench.now).advice if "priority" in one)
    assert advice.endswith("only 1 of the 3 requests would go first")
    answer = bench.ask(tenant=LOCAL, pays_priority=True)
    assert isinstance(answer, Place)
    assert answer.position == 2


def test_many_leases_in_one_request_pay_each() -> None:
    bench = selling(gpus=2)
    each = cmd.Acquire(
        tenant=ANN,
        lease=LeaseId("a"),
        request_id=RequestId("many"),
        wants=(gpu(),),
        ttl_ns=seconds(10 * HOUR),
        pays_priority=True,
    )
    bench.do(cmd.AcquireMany(tenant=ANN, each=each, leases=(LeaseId("a"), LeaseId("b"))))
    bench.wait(HOUR)
    assert [str(line.cost) for line in billed(bench).lines] == ["1.500000", "1.500000"]
