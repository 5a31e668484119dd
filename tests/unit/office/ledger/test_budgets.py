"""Budgets: refused before the start, warned at 80 %, ended with notice; what is used is what the bill has."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from sublet.errors import IdempotencyConflict, InvalidRequest, LeaseRevoked, NotFound, RenewalRefusal, SubletError
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.journal.history import AuditHistory, _AuditedEvent
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Done
from sublet.office.ledger.bills import GRAINS_PER_MICRO, Rates, fold
from sublet.office.ledger.budgets import money, prices_record, standing_now
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.fold_spending import CREDITS_REMEMBERED
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.records import (
    BudgetRecord,
    GroupRecord,
    HeldRecord,
    LeaseRecord,
    Now,
    ReservationRecord,
    Span,
    SpentRecord,
)
from sublet.office.ledger.spending import add_past, standing, window_of
from sublet.office.ledger.state import State
from sublet.values import (
    GIB,
    BudgetId,
    BudgetLevel,
    BudgetWindow,
    GroupId,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    ReservationId,
    Suspend,
    TenantId,
    Tier,
)
from sublet.wire.orders import Notify, Parkable
from tests.unit.office.ledger.bench import ANN, BEN, Bench, cores, device, disk, gpu, inventory, seconds

COURSE = GroupId("course")
HOUR, DAY = 3600, 86_400
CREDIT = 1_000_000
"""Of money, in millionths: what a GPU costs for an hour."""


def budget(bench: Bench, amount: float, *, group: bool = False, per: str = "total") -> SubletError | object:
    tenant, of = (None, COURSE) if group else (ANN, None)
    amount_micros = round(amount * CREDIT)
    command = cmd.SetBudget(tenant=tenant, group=of, per=BudgetWindow(per), amount=amount_micros)
    return bench.do(command).answer


def credit(bench: Bench, amount: float, *, per: str = "total") -> object:
    return bench.do(cmd.CreditBudget(tenant=ANN, per=BudgetWindow(per), amount=round(amount * CREDIT))).answer


def levels(bench: Bench) -> list[str]:
    return [str(event.level) for event in bench.events if isinstance(event, ev.BudgetReached)]


def status(lease: LeaseRecord) -> LeaseStatus:
    """As of now."""
    return lease.status


def used(bench: Bench, name: str = "tenant/ann/total") -> int:
    return standing_now(bench.state, bench.state.books.budgets[BudgetId(name)], bench.now).used


def held(bench: Bench, **how: object) -> LeaseRecord:
    return bench.granted(tenant=ANN, ttl_s=24 * HOUR, **how)


# ---- the value


SINCE = seconds(1000)
RECORD = BudgetRecord(
    id=BudgetId("tenant/ann/total"),
    tenant=ANN,
    per=BudgetWindow.TOTAL,
    amount=CREDIT,
    currency="credits",
    since_wall_ns=SINCE,
)


def holding(start_s: float, wall_s: float, millis: int = 1000) -> HeldRecord:
    return HeldRecord(
        tenant=ANN,
        group=COURSE,
        start_ns=seconds(start_s),
        wall_ns=seconds(wall_s),
        units={"gpu": millis},
    )


@pytest.mark.parametrize(
    ("holdings", "now_s", "expected_s", "level", "next_s"),
    [
        ([], 500, 0, "open", None),
        ([holding(0, 1000)], 0, 0, "open", 2880),
        ([holding(0, 1000)], 2879, 2879, "open", 2880),
        ([holding(0, 1000)], 2880, 2880, "warned", 3600),
        ([holding(0, 1000)], 3600, 3600, "used_up", None),
        ([holding(0, 1000)], 4000, 4000, "used_up", None),
        ([holding(0, 1000, 500)], 0, 0, "open", 5760),
        ([holding(0, 1000), holding(0, 1000)], 10, 20, "open", 1440),
        ([holding(0, 900)], 200, 100, "open", 2980),  # 100 s of it were before the budget
        ([holding(0, 100)], 200, 0, "open", 900),  # the wall clock was set forward since: none of it counts yet
    ],
)
def test_the_moment_is_computed(
    holdings: list[HeldRecord], now_s: int, expected_s: int, level: str, next_s: int | None
) -> None:
    """One GPU costs one credit an hour, and there is one credit."""
    now = Now(seconds(now_s), seconds(now_s + 1000))
    found = standing(RECORD, SpentRecord(), holdings, Rates(), now)
    assert found.used * 3600 == seconds(expected_s) * CREDIT * GRAINS_PER_MICRO // seconds(1)
    assert found.level is BudgetLevel(level)
    assert found.next_ns == (None if next_s is None else seconds(next_s))


def test_a_moment_that_is_no_whole_nanosecond_is_the_one_after_it() -> None:
    """Never early: at the moment before, not all is used; at the moment itself it is."""
    rates = Rates(gpu=999_999)
    one = holding(0, 1000, 333)
    found = standing(RECORD, SpentRecord(), [one], rates, Now(seconds(9_000), seconds(10_000)))
    assert found.level is BudgetLevel.WARNED
    at = found.next_ns
    assert at is not None
    for ns, level in ((at - 1, BudgetLevel.WARNED), (at, BudgetLevel.USED_UP)):
        assert standing(RECORD, SpentRecord(), [one], rates, Now(ns, ns + SINCE)).level is level


def test_a_holding_is_divided_between_the_days_in_which_it_lies() -> None:
    daily = BudgetRecord(
        id=BudgetId("d"), tenant=ANN, per=BudgetWindow.DAY, amount=CREDIT, currency="credits", since_wall_ns=0
    )
    spent = SpentRecord()
    add_past(daily, spent, holding(0, DAY - 600), seconds(DAY + 900))
    assert spent.past == {
        "1970-01-01": {"gpu": 1000 * seconds(600)},
        "1970-01-02": {"gpu": 1000 * seconds(DAY)},
        "1970-01-03": {"gpu": 1000 * seconds(300)},
    }
    assert window_of(BudgetWindow.DAY, seconds(DAY)) == ("1970-01-02", seconds(DAY), seconds(2 * DAY))
    assert window_of(BudgetWindow.MONTH, seconds(40 * DAY))[0] == "1970-02"
    found = standing(daily, spent, [], Rates(), Now(0, seconds(2 * DAY + 1)))
    assert (found.window, found.level, found.next_ns) == ("1970-01-03", BudgetLevel.OPEN, None)
    assert found.used == Rates().grains(Kind.GPU) * 1000 * seconds(300)


@pytest.mark.parametrize(
    ("micros", "text"), [(0, "0.00 EUR"), (1, "0.000001 EUR"), (12_500_000, "12.50 EUR"), (-5, "-0.000005 EUR")]
)
def test_money_is_written_with_two_decimals_or_as_many_as_it_has(micros: int, text: str) -> None:
    assert money(micros, "EUR") == text


# ---- the story


def test_a_budget_runs_out_with_a_warning_and_a_notice() -> None:
    """Nobody looks meanwhile: the ledger is woken at 80 %, at the end, and when the notice is due."""
    bench = Bench(gpus=2)
    budget(bench, 1)
    lease = held(bench)
    begin_ns = bench.now_ns
    wakes = []
    for _ in range(3):
        wake_ns = bench.ledger.next_wake_ns()
        assert wake_ns is not None
        wakes.append(wake_ns - begin_ns)
        bench.wait((wake_ns - bench.now_ns) / 1e9)
        if len(wakes) == 2:
            assert status(lease) is LeaseStatus.NOTICED
            assert lease.notice is not None
            assert lease.notice.reason is EndReason.BUDGET
            assert lease.notice.take_at_ns == bench.now_ns + bench.policy.notice_ns
            assert lease.notice.detail == "the budget of tenant ann is used up: 1.00 credits in all"
    assert wakes == [seconds(2880), seconds(3600), seconds(3630)]
    assert lease.end is not None
    assert lease.end.reason is EndReason.BUDGET
    assert levels(bench) == ["warned", "used_up"]
    assert used(bench) == Rates().grains(Kind.GPU) * 1000 * seconds(3630)
    assert bench.state.snapshot() == bench.folded().snapshot()


def test_a_request_is_refused_before_the_start_and_told_when_it_may_ask_again() -> None:
    bench = Bench(gpus=2)
    budget(bench, 0, per="day")
    refusal = bench.refused(tenant=ANN)
    assert refusal.code == "quota"
    assert refusal.reason == (
        "the budget of tenant ann is used up: 0.00 credits a day; it begins anew at 1970-01-13 00:00 UTC"
    )
    assert refusal.do == "Ask again then, or ask an operator for credit: `sublet budget credit`."
    assert bench.refused(tenant=ANN, wait_s=0).code == "quota"
    many = cmd.AcquireMany(
        tenant=ANN,
        each=cmd.Acquire(
            tenant=ANN, lease=LeaseId("m"), request_id=RequestId("m"), wants=(gpu(),), ttl_ns=seconds(60), wait_ns=0
        ),
        leases=(LeaseId("m"),),
    )
    assert getattr(bench.do(many).answer, "code", None) == "quota"
    bench.granted(tenant=BEN)
    assert not [lease for lease in bench.state.leases.values() if lease.tenant == ANN]


def test_a_budget_in_all_names_no_day() -> None:
    bench = Bench()
    budget(bench, 0)
    refusal = bench.refused(tenant=ANN)
    assert "anew" not in refusal.reason
    assert refusal.do == "Ask an operator for credit: `sublet budget credit`."


def test_what_waits_or_is_set_aside_ends_with_the_budget() -> None:
    """A place in the queue, and a grant that was not claimed in time; another tenant is let in."""
    bench = Bench(gpus=2)
    budget(bench, 0.5)
    running, theirs = held(bench), bench.granted(tenant=BEN, ttl_s=24 * HOUR)
    waiting, second = bench.queued(tenant=ANN), bench.queued(tenant=ANN)
    bench.wait(1795)
    bench.release(theirs)
    assert status(waiting) is LeaseStatus.GRANTED
    bench.wait(2.4)
    still = waiting.end
    assert still is None
    bench.wait(0.1)  # the grant is paid for since it was made, so there are two to pay for
    assert waiting.end is not None
    assert waiting.end.reason is EndReason.BUDGET
    assert second.end is not None
    assert second.end.reason is EndReason.BUDGET
    assert status(running) is LeaseStatus.NOTICED
    bench.granted(tenant=BEN)


def test_credit_spares_who_has_notice_and_is_for_this_window_alone() -> None:
    bench = Bench(start_s=400)
    budget(bench, 1, per="day")
    lease = held(bench)
    bench.wait(HOUR + 10)
    assert status(lease) is LeaseStatus.NOTICED
    credit(bench, 0.5, per="day")
    assert status(lease) is LeaseStatus.ACTIVE
    assert levels(bench) == ["warned", "used_up", "open"]
    bench.wait(HOUR / 2)
    assert levels(bench)[3:] == ["warned", "used_up"]
    bench.wait(60)
    assert status(lease) is LeaseStatus.ENDED
    known = bench.state.books.budgets[BudgetId("tenant/ann/day")]
    assert list(known.credits.values()) == [CREDIT // 2]
    bench.wait(DAY)
    assert used(bench, "tenant/ann/day") == 0
    lease = held(bench)
    bench.wait(HOUR - 1)
    assert status(lease) is LeaseStatus.ACTIVE
    bench.wait(1)
    assert status(lease) is LeaseStatus.NOTICED, "the credit was for the day before"


def test_a_credit_that_is_sent_again_counts_once() -> None:
    """In the next window too, and after the fold of the journal; the same id with another amount is misuse."""
    bench = Bench(gpus=1)
    bench.do(cmd.SetBudget(tenant=ANN, per=BudgetWindow.DAY, amount=5))
    credit = cmd.CreditBudget(tenant=ANN, per=BudgetWindow.DAY, amount=3, request_id=RequestId("c"))

    def added() -> list[int]:
        (budget,) = bench.state.books.budgets.values()
        return list(budget.credits.values())

    for _ in range(3):
        assert not isinstance(bench.do(credit).answer, SubletError)
    bench.wait(90_000)
    bench.do(cmd.SetBudget(tenant=ANN, per=BudgetWindow.DAY, amount=6))
    assert not isinstance(bench.do(credit).answer, SubletError)
    assert added() == [3]
    assert bench.folded().snapshot() == bench.state.snapshot()
    assert isinstance(bench.do(replace(credit, amount=4)).answer, IdempotencyConflict)
    for number in range(CREDITS_REMEMBERED):
        bench.do(replace(credit, request_id=RequestId(str(number))))
    assert sum(added()) == 3 + 3 * CREDITS_REMEMBERED
    assert len(next(iter(bench.state.books.budgets.values())).credited) == CREDITS_REMEMBERED


def test_the_next_window_spares_who_has_notice() -> None:
    """Midnight comes between the end of the budget and that of the notice."""
    bench = Bench()
    to_midnight_s = -(bench.now.wall_ns // seconds(1)) % DAY
    bench.wait(to_midnight_s - 370)
    budget(bench, 0.1, per="day")
    lease = held(bench)
    bench.wait(360)
    assert status(lease) is LeaseStatus.NOTICED
    bench.wait(10)
    assert status(lease) is LeaseStatus.ACTIVE
    assert used(bench, "tenant/ann/day") == 0
    bench.wait(360)
    assert status(lease) is LeaseStatus.NOTICED
    assert bench.state.snapshot() == bench.folded().snapshot()


def test_a_larger_amount_or_none_at_all_spares_too() -> None:
    for command in (
        cmd.SetBudget(tenant=ANN, per=BudgetWindow.TOTAL, amount=9 * CREDIT),
        cmd.RemoveBudget(tenant=ANN, per=BudgetWindow.TOTAL),
    ):
        bench = Bench()
        budget(bench, 0.01)
        lease = held(bench)
        bench.wait(36)
        assert status(lease) is LeaseStatus.NOTICED
        bench.do(command)
        assert status(lease) is LeaseStatus.ACTIVE
        assert not bench.state.books.held or command.per in str(bench.state.books.budgets)


def test_a_group_pays_for_all_its_tenants_and_for_leases_that_were_asked_for_in_it() -> None:
    """Ann leaves the group; the lease goes on being paid for by it, on the bill as in the budget."""
    bench = Bench(gpus=3)
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    for tenant in (ANN, BEN):
        bench.do(cmd.SetTenant(tenant=tenant, group=COURSE))
    budget(bench, 1, group=True)
    first = held(bench)
    second = bench.granted(tenant=BEN, ttl_s=24 * HOUR)
    bench.do(cmd.SetTenant(tenant=ANN, group=GroupId("default")))
    bench.wait(HOUR / 2)
    assert status(first) is LeaseStatus.NOTICED
    assert status(second) is LeaseStatus.NOTICED
    assert "group course" in bench.refused(tenant=BEN).reason
    bench.granted(tenant=ANN)  # she is in it no more
    assert_as_billed(bench)


def test_the_group_in_which_it_was_asked_for_pays_for_a_lease_that_waited() -> None:
    """Ann changes groups while she waits; budget and bill agree on who pays."""
    bench = Bench()
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    bench.do(cmd.SetTenant(tenant=ANN, group=COURSE))
    budget(bench, 1, group=True)
    theirs = bench.granted(tenant=BEN)
    waiting = bench.queued(tenant=ANN, ttl_s=HOUR)
    bench.do(cmd.SetTenant(tenant=ANN, group=GroupId("default")))
    bench.release(theirs)
    bench.claim(waiting)
    bench.wait(100)
    assert used(bench, "group/course/total") == Rates().grains(Kind.GPU) * 1000 * seconds(100)
    assert_as_billed(bench)


def test_a_request_that_waits_is_not_kept_back_by_the_budget_of_a_group_that_does_not_pay_for_it() -> None:
    """Ann asked in no group, and waits. She joins the course, whose budget is used up: her next request is refused."""
    bench = Bench()
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    bench.do(cmd.SetTenant(tenant=BEN, group=COURSE))
    budget(bench, 0.01, group=True)
    theirs = bench.granted(tenant=BEN, ttl_s=24 * HOUR)
    waiting = bench.queued(tenant=ANN, ttl_s=HOUR)
    bench.do(cmd.SetTenant(tenant=ANN, group=COURSE))
    bench.wait(70)
    assert theirs.end is not None
    assert status(waiting) is LeaseStatus.GRANTED
    assert "group course" in bench.refused(tenant=ANN).reason


def test_a_later_end_that_was_announced_is_drawn_forward() -> None:
    """A drain in two hours does not let a lease outlive its budget."""
    bench = Bench()
    budget(bench, 0.01)
    lease = held(bench)
    bench.do(cmd.Drain(node=NodeId("n1"), notice_ns=seconds(2 * HOUR)))
    bench.wait(36)
    assert lease.notice is not None
    assert lease.notice.reason is EndReason.BUDGET
    bench.wait(30)
    assert lease.end is not None


def test_spot_has_the_notice_of_spot() -> None:
    bench = Bench()
    budget(bench, 0.01)
    lease = held(bench, tier=Tier.SPOT)
    bench.wait(36 + 5)
    assert lease.end is not None
    assert lease.end.reason is EndReason.BUDGET


def test_a_budget_that_is_used_up_from_the_first_moment_of_each_day_refuses_on_each_of_them() -> None:
    bench = Bench()
    budget(bench, 0, per="day")
    for _ in range(3):
        assert bench.refused(tenant=ANN).code == "quota"
        bench.wait(DAY)


def test_a_notice_that_is_not_of_this_budget_stays_as_it_is() -> None:
    """Of a drain, or of another budget, which is changed or removed while this one is used up."""
    bench = Bench(gpus=2)
    budget(bench, 1)
    lease = held(bench)
    bench.do(cmd.Drain(node=NodeId("n1"), notice_ns=seconds(2 * HOUR)))
    told = lease.notice
    credit(bench, 0.5)
    assert told is not None
    assert (status(lease), lease.notice) == (LeaseStatus.NOTICED, told)

    bench = Bench()
    budget(bench, 0.01, per="day")
    budget(bench, 5)
    lease = held(bench)
    bench.wait(40)
    told = lease.notice
    assert told is not None
    credit(bench, 0.5)
    assert lease.notice == told
    bench.wait(1)
    assert isinstance(bench.do(cmd.RemoveBudget(tenant=ANN, per=BudgetWindow.TOTAL)).answer, Done)
    assert (status(lease), lease.notice) == (LeaseStatus.NOTICED, told)


def test_a_notice_that_a_reservation_gave_is_not_drawn_forward() -> None:
    """Another group is to have its device then, and the holder was told how long it has."""
    bench = Bench()
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    start_ns = bench.now.wall_ns + seconds(100)
    span = Span(start_ns=start_ns, end_ns=start_ns + seconds(HOUR))
    record = ReservationRecord(id=ReservationId("lab"), group=COURSE, gpus=1, spans=(span,))
    bench.do(cmd.SetReservation(reservation=record))
    budget(bench, 15 / HOUR)
    lease = held(bench, tier=Tier.SPOT)
    bench.wait(12)
    told = lease.notice
    assert told is not None
    assert told.reservation == "lab"
    bench.wait(5)
    assert levels(bench)[-1] == "used_up"
    assert lease.notice == told


def test_another_amount_does_not_forget_what_was_used() -> None:
    bench = Bench()
    budget(bench, 1)
    held(bench)
    bench.wait(100)
    before = used(bench)
    budget(bench, 2)
    assert used(bench) == before > 0
    bench.wait(1)
    told = list(bench.events)
    budget(bench, 2)
    assert bench.events == told, "nothing is written where nothing changes"


def test_priority_alone_may_be_what_costs() -> None:
    bench = Bench(gpus=2)
    bench.do(cmd.SetPrices(prices=prices_record(Rates(gpu=0, priority=CREDIT))))
    budget(bench, 0)
    bench.granted(tenant=ANN)
    assert bench.refused(tenant=ANN, pays_priority=True).code == "quota"


def test_what_costs_nothing_needs_no_budget() -> None:
    nodes = inventory("n1", device("gpu0"), device("cpu", Kind.CPU))
    bench = Bench(nodes)
    bench.do(cmd.SetPrices(prices=prices_record(Rates(cpu=0))))
    free = bench.granted(cores(2), tenant=ANN)
    budget(bench, 0)
    assert status(free) is LeaseStatus.ACTIVE
    bench.granted(cores(2), tenant=ANN)
    bench.refused(gpu(), tenant=ANN)


def test_volumes_stay_and_go_on_being_paid_for() -> None:
    bench = Bench(inventory("n1", device("gpu0"), device("disk", Kind.BLOCK)))
    bench.do(cmd.SetPrices(prices=prices_record(Rates(block=CREDIT))))
    budget(bench, 1)
    lease = bench.granted(disk(1), tenant=ANN, name="data", ttl_s=24 * HOUR)
    bench.wait(HOUR + 30)
    assert lease.end is not None
    assert lease.end.reason is EndReason.BUDGET
    assert [volume.state for volume in bench.state.volumes.values()] == ["retained"]
    before = used(bench)
    bench.wait(HOUR)
    assert used(bench) - before == Rates(block=CREDIT).grains(Kind.BLOCK) * GIB * seconds(HOUR)
    assert_as_billed(bench)


def test_guests_are_parked_and_stay_to_the_end_of_that_lease() -> None:
    """What runs is not lost with the money: credit within half an hour, and it goes on."""
    node = inventory("n1", device("gpu0", suspend=Suspend.SAME_DEVICE), device("mem", Kind.MEMORY))
    bench = Bench(node)
    bench.is_empty = False
    budget(bench, 0.01)
    lease = held(bench)
    bench.wait(36)
    assert status(lease) is LeaseStatus.NOTICED
    assert any(isinstance(order, Notify) and order.reason is EndReason.BUDGET for order in bench.sent)
    assert lease.epoch is not None
    bench.report(Parkable(node=NodeId("n1"), lease=lease.id, epoch=lease.epoch, amount=GIB))
    bench.wait(30)
    assert lease.end is not None
    assert lease.end.resume is not None
    parking = bench.lease(lease.end.resume.lease)
    assert status(parking) is LeaseStatus.ACTIVE
    answer = bench.renew(parking)
    assert isinstance(answer, LeaseRevoked)
    assert answer.reason is RenewalRefusal.BUDGET
    bench.wait(30 * 60)
    assert parking.end is not None
    assert parking.end.reason is EndReason.BUDGET


# ---- what operators may not ask


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        (cmd.SetBudget(tenant=ANN, per=BudgetWindow.DAY, amount=-1), InvalidRequest, "negative"),
        (cmd.SetBudget(tenant=ANN, per=BudgetWindow.DAY, amount=10**16), InvalidRequest, "too large"),
        (cmd.SetBudget(tenant=TenantId("cleo"), per=BudgetWindow.DAY, amount=1), NotFound, "no tenant cleo"),
        (cmd.SetBudget(group=COURSE, per=BudgetWindow.DAY, amount=1), NotFound, "no group course"),
        (cmd.SetBudget(per=BudgetWindow.DAY, amount=1), InvalidRequest, "one tenant or of one group"),
        (cmd.SetBudget(tenant=ANN, group=COURSE, per=BudgetWindow.DAY, amount=1), InvalidRequest, "one tenant"),
        (cmd.SetBudget(tenant=ANN, per=BudgetWindow.DAY, amount=1, currency="EUR"), InvalidRequest, "not in 'EUR'"),
        (cmd.SetBudget(tenant=ANN, per=BudgetWindow.DAY, amount=1, missing=("gpu",)), InvalidRequest, "price of gpu"),
        (cmd.SetBudget(tenant=ANN, per=BudgetWindow.DAY, amount=3 * CREDIT), InvalidRequest, "which is less"),
        (cmd.SetBudget(tenant=ANN, per=BudgetWindow.TOTAL, amount=1), InvalidRequest, "which is less"),
        (cmd.CreditBudget(tenant=ANN, per=BudgetWindow.MONTH, amount=0), InvalidRequest, "nothing"),
        (cmd.CreditBudget(tenant=ANN, per=BudgetWindow.MONTH, amount=-5), InvalidRequest, "negative"),
        (cmd.CreditBudget(tenant=ANN, per=BudgetWindow.MONTH, amount=10**15), InvalidRequest, "too large"),
        (cmd.CreditBudget(tenant=BEN, per=BudgetWindow.MONTH, amount=5), NotFound, "tenant ben has no budget"),
        (cmd.RemoveBudget(tenant=ANN, per=BudgetWindow.DAY), NotFound, "no budget a day"),
        (cmd.SetPrices(prices=prices_record(Rates(currency="EUR"))), InvalidRequest, "in credits"),
        (cmd.SetPrices(prices=prices_record(Rates()), missing=("gpu", "cpu")), InvalidRequest, "gpu and cpu"),
        (cmd.SetPrices(prices=prices_record(Rates(gpu=0, cpu=0, memory=0, block=0))), InvalidRequest, "are zero"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(command: cmd.Command, kind: type[SubletError], words: str) -> None:
    bench = Bench()
    budget(bench, 2, per="month")
    before = bench.state.snapshot()
    answer = bench.do(command).answer
    assert isinstance(answer, kind), answer
    assert words in str(answer)
    assert bench.state.snapshot() == before


def test_prices_of_another_currency_are_no_matter_without_budgets() -> None:
    bench = Bench()
    bench.do(cmd.SetPrices(prices=prices_record(Rates(currency="EUR"))))
    budget(bench, 1)
    assert bench.state.books.budgets[BudgetId("tenant/ann/total")].currency == "EUR"


def test_a_budget_goes_with_its_tenant_and_with_its_group() -> None:
    bench = Bench()
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    budget(bench, 1)
    budget(bench, 1, group=True)
    bench.do(cmd.RemoveTenant(tenant=ANN))
    bench.do(cmd.RemoveGroup(group=COURSE))
    assert not bench.state.books.budgets
    assert not bench.state.books.spent


def test_the_moment_of_a_budget_that_is_gone_is_forgotten() -> None:
    """Another one stays; nothing is due at the moment at which the first would have been used up."""
    bench = Bench()
    budget(bench, 1, per="total")
    budget(bench, 0.5, per="month")
    held(bench)
    first_ns = bench.ledger.next_wake_ns()
    assert first_ns == bench.now_ns + seconds(0.8 * HOUR / 2)
    bench.do(cmd.RemoveBudget(tenant=ANN, per=BudgetWindow.MONTH))
    assert bench.ledger.next_wake_ns() == bench.now_ns + seconds(0.8 * HOUR)
    bench.wait(HOUR)
    assert levels(bench) == ["warned", "used_up"]


# ---- the bill, and restarts


def assert_as_billed(bench: Bench) -> None:
    """What is used of each budget is what the bill has since it was made, to the grain."""
    past = AuditHistory()
    for now, events in bench.history:
        for event in events:
            if isinstance(event, _AuditedEvent):
                past._apply(event, now.ns, now.wall_ns)
    for one in bench.state.books.budgets.values():
        by, key = ("tenant", one.tenant) if one.group is None else ("group", one.group)
        bill = fold(
            past.usages(bench.now_ns), by=by, rates=bench.state.rates, since_ns=one.since_wall_ns, until_ns=None
        )
        assert used(bench, one.id) == next(line.grains for line in bill.lines if line.key == key) > 0


def test_what_begins_after_the_wall_clock_was_set_back_is_paid_for() -> None:
    """It lies before the budget on the wall clock, and the budget pays for it all the same."""
    bench = Bench(gpus=2)
    before = held(bench)
    bench.wait(1000)
    budget(bench, 1)
    bench.wait(600)
    bench.release(before)
    assert used(bench) == Rates().grains(Kind.GPU) * 1000 * seconds(600), "not what it had before the budget"
    bench.wall_ahead_ns -= seconds(DAY)
    lease = held(bench)
    bench.wait(HOUR)
    assert levels(bench) == ["warned", "used_up"]
    assert lease.end is not None
    assert lease.end.reason is EndReason.BUDGET
    assert bench.state.snapshot() == bench.folded().snapshot()


@pytest.mark.parametrize("seed", range(12))
def test_money_stays_right_when_the_wall_clock_is_set(seed: int) -> None:
    """An hour, a day or a month forth and back, while leases are held, begin and end: after each step every budget has
    used what the bill of its window has, to the grain, no level is skipped, and a fold of the journal is the same."""
    rng, bench = random.Random(seed), Bench(gpus=3)
    bench.wall_ahead_ns = seconds(10**9)
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    bench.do(cmd.SetTenant(tenant=ANN, group=COURSE))
    past, seen = AuditHistory(), 0
    for group, per, amount in ((False, "total", 200), (False, "day", 8), (True, "month", 90)):
        budget(bench, amount, group=group, per=per)
    for _ in range(40):
        match rng.randrange(4):
            case 0:
                bench.wall_ahead_ns += rng.choice((-1, 1)) * seconds(rng.choice((7, HOUR, DAY, 31 * DAY)))
                bench.do(cmd.Tick())
            case 1:
                bench.ask(tenant=rng.choice((ANN, BEN)), ttl_s=DAY, wait_s=0)
            case 2:
                live = [lease for lease in bench.state.leases.values() if lease.status is LeaseStatus.ACTIVE]
                if live:
                    bench.release(rng.choice(live))
            case _:
                bench.wait(rng.randrange(1, 4 * HOUR))
        for now, events in bench.history[seen:]:
            for event in events:
                if isinstance(event, _AuditedEvent):
                    past._apply(event, now.ns, now.wall_ns)
        seen = len(bench.history)
        assert (bench.ledger.next_wake_ns(bench.now) or bench.now_ns + 1) > bench.now_ns, "nothing is overdue"
        for one in bench.state.books.budgets.values():
            by, key = ("tenant", one.tenant) if one.group is None else ("group", one.group)
            _, low_ns, high_ns = window_of(one.per, bench.now.wall_ns)
            bill = fold(past.usages(bench.now_ns), by=by, rates=bench.state.rates, since_ns=low_ns, until_ns=high_ns)
            found = standing_now(bench.state, one, bench.now)
            assert found.used == sum(line.grains for line in bill.lines if line.key == key)
            spent = bench.state.books.spent[one.id]
            assert found.level is (spent.level if spent.window == found.window else BudgetLevel.OPEN)
    assert bench.state.snapshot() == bench.folded().snapshot()


def test_new_prices_hold_for_what_was_used_too_as_on_the_bill() -> None:
    bench = Bench(gpus=2)
    early = held(bench)
    bench.wait(100)
    budget(bench, 10)
    bench.wait(HOUR)
    bench.release(early)
    before = used(bench)
    bench.do(cmd.SetPrices(prices=prices_record(Rates(gpu=3 * CREDIT))))
    assert used(bench) == 3 * before
    assert_as_billed(bench)
    held(bench)
    assert levels(bench) == []
    bench.do(cmd.SetPrices(prices=prices_record(Rates(gpu=10 * CREDIT))))
    assert levels(bench) == ["used_up"], "the price of what was used rose"
    assert_as_billed(bench)


def test_an_agent_that_ended_a_lease_earlier_is_believed_as_on_the_bill() -> None:
    bench = Bench()
    budget(bench, 10)
    lease = bench.granted(tenant=ANN, ttl_s=60)
    bench.at(1500)
    bench.do(cmd.Tick())
    assert lease.end is not None
    assert_as_billed(bench)


@pytest.mark.parametrize("at_s", [10, 2880, 3000, 3600, 3610])
def test_a_restart_changes_nothing(at_s: int) -> None:
    """Out of the snapshot, under the same clock or another one that is far behind."""
    for boot, shift_s in (("boot-1", 0), ("boot-2", -900)):
        bench = Bench(gpus=2)
        budget(bench, 1)
        lease = held(bench)
        bench.wait(at_s)
        last_ns = bench.now_ns
        state = State.restore(bench.state.snapshot())
        bench.ledger = Ledger(bench.policy, state)
        bench.now_ns += seconds(shift_s)
        bench.do(cmd.OpenOffice(incarnation=1, clock_domain=boot, last_ns=last_ns))
        bench.wait(3630 - at_s)
        end = state.leases[lease.id].end
        assert end is not None
        assert end.reason is EndReason.BUDGET
        assert levels(bench) == ["warned", "used_up"]
        assert bench.state.snapshot() == bench.folded().snapshot()
        if not shift_s:
            assert_as_billed(bench)


def test_an_office_of_before_opens_and_counts_from_the_budget_on() -> None:
    """Its leases do not say where on the wall clock they began, nor which group pays."""
    bench = Bench()
    lease = held(bench)
    bench.wait(500)
    lease.granted_wall_ns = lease.group = None
    state = State.restore(bench.state.snapshot())
    check_books(state)
    assert b"budgets" not in bench.state.snapshot() or not state.books.budgets
    bench.ledger = Ledger(bench.policy, state)
    budget(bench, 1)
    bench.wait(100)
    assert used(bench) == Rates().grains(Kind.GPU) * 1000 * seconds(100)
    assert_as_billed(bench)
