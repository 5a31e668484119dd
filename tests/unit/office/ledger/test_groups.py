"""Groups of tenants: what decays and how, who goes first, ceilings and quotas, and floors that are called in."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from typing import Any

import pytest

from sublet.errors import InvalidRequest, NotFound
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import queue_order
from sublet.office.ledger.answers import Granted, GrantedMany, Place
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.explain import Because
from sublet.office.ledger.fairness import Account, Decay, share, share_of_everything
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import InOrder, position
from sublet.office.ledger.records import GroupRecord, Quota
from sublet.office.ledger.state import State
from sublet.office.ledger.usage import UsageMeter, at_most_from
from sublet.values import (
    GIB,
    Exclusivity,
    GroupId,
    Kind,
    LeaseId,
    RequestId,
    TenantId,
    Tier,
)
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, cores, device, gpu, inventory, seconds, shared

COURSE, LAB = GroupId("course"), GroupId("lab")
CLEO = TenantId("cleo")
LONG = Policy(max_hold_ns=seconds(10**6))


def office(gpus: int = 2, policy: Policy = LONG, **groups: GroupRecord) -> Bench:
    """Ann and Cleo are in the course, Ben is in the lab."""
    bench = Bench(gpus=gpus, policy=policy)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    for name, tenants in ((COURSE, (ANN, CLEO)), (LAB, (BEN,))):
        assert not isinstance(put(bench, groups.get(name) or GroupRecord(id=name)), InvalidRequest)
        for tenant in tenants:
            bench.do(cmd.SetTenant(tenant=tenant, group=name))
    return bench


def put(bench: Bench, group: GroupRecord, *, is_new: bool | None = None) -> object:
    return bench.do(cmd.SetGroup(group=group, is_new=is_new)).answer


def waiting(bench: Bench) -> list[str]:
    return [lease.id for lease in InOrder(bench.state, bench.now_ns, bench.policy)]


# ---- decay


@pytest.mark.parametrize("seed", range(30))
def test_what_was_used_does_not_depend_on_when_it_is_asked(seed: int) -> None:
    """Nor on how often: an account that is brought up to date at random moments has what one has that never was."""
    rng = random.Random(seed)
    decay = Decay(half_life_ns=rng.choice((7, 1000, 3600 * 10**9)), origin_ns=rng.randrange(10**6))
    asked, silent = Account(), Account()
    now = decay.origin_ns
    for _ in range(80):
        now += rng.choice((0, 1, decay.half_life_ns // 3, decay.half_life_ns, 5 * decay.half_life_ns + 1))
        if rng.random() < 0.6:
            asked.change([0, 0, 0], now, decay)
            continue
        by = [rng.choice((250, 1000)), 1, 2**33] if rng.random() < 0.5 else [-level for level in silent.level]
        asked.change(by, now, decay)
        silent.change(by, now, decay)
        assert asked == silent
    later = now + 1000 * decay.half_life_ns
    assert asked.used_at(later, decay) == silent.used_at(later, decay)


@pytest.mark.parametrize("groups", [True, False], ids=["groups", "tenants"])
def test_of_two_devices_that_come_free_at_once_each_gets_one(groups: bool) -> None:
    """Who got the first goes behind the others for the second, though it waited there before them."""
    bench = Bench(gpus=2)
    if groups:
        for name, tenant in (("course", ANN), ("lab", BEN)):
            bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId(name))))
            bench.do(cmd.SetTenant(tenant=tenant, group=GroupId(name)))
    both = bench.granted(gpu(count=2), tenant=LOCAL)
    first, second = bench.queued(tenant=ANN), bench.queued(tenant=ANN)
    other = bench.queued(tenant=BEN)
    bench.release(both)
    assert [lease.status for lease in (first, second, other)] == [
        LeaseStatus.GRANTED,
        LeaseStatus.QUEUED,
        LeaseStatus.GRANTED,
    ]


def test_nobody_yields_to_a_request_of_its_own() -> None:
    """It would give its device back and wait for it again."""
    bench = Bench()
    lease = bench.granted(tenant=ANN)
    bench.queued(tenant=ANN)
    assert not queue_order.others_wait_for(bench.state, lease, bench.now.ns, bench.policy)
    bench.queued(tenant=BEN)
    assert queue_order.others_wait_for(bench.state, lease, bench.now.ns, bench.policy)


def test_an_instant_before_the_last_one_takes_nothing_away() -> None:
    """A clock that another office hands on may stand a little behind: what was used stays used."""
    decay = Decay(half_life_ns=1000)
    for behind in (500, 1500):
        account = Account()
        account.change([8, 0, 0], 0, decay)
        account.change([0, 0, 0], 2300, decay)
        used = account.used_at(2300, decay)
        assert account.used_at(2300 - behind, decay) == used
        account.change([0, 0, 0], 2300 - behind, decay)
        assert account.used == used
    account = Account()
    account.change([8, 0, 0], 300, decay)
    account.change([0, 0, 0], 200, decay)
    assert account.used == [0, 0, 0]


def test_half_of_it_counts_a_half_life_later() -> None:
    decay = Decay(half_life_ns=1000)
    account = Account()
    account.change([8, 0, 0], 0, decay)
    account.change([-8, 0, 0], 1000, decay)
    first = account.used_at(1000, decay)[0]
    assert [account.used_at(1000 * n, decay)[0] for n in (2, 3, 4)] == [first // 2, first // 4, first // 8]


def test_who_always_had_everything_has_a_share_of_one() -> None:
    decay, account = Decay(half_life_ns=1000), Account()
    account.change([4000, 3, 0], 0, decay)
    kind, share = share_of_everything(account, (4000, 8, 10), 200_500, decay)
    assert kind is Kind.GPU
    assert abs(share - 1) < Fraction(1, 10**6)


def test_books_of_before_open_with_what_their_meters_know() -> None:
    """The order of the queue goes on from the device time of the last hour; nothing else of the books changes."""
    bench = Bench(gpus=3)
    bench.granted(tenant=ANN)
    bench.at(1500)
    bench.granted(tenant=BEN)
    old = json.loads(bench.state.snapshot())
    for name in ("groups", "accounts", "group_accounts", "half_life_ns", "periods_from_ns"):
        del old[name]
    opened = State.restore(json.dumps(old).encode())
    check_books(opened)
    assert opened.books.accounts == bench.state.books.accounts
    assert opened.books.group_accounts == bench.state.books.group_accounts


def test_books_of_before_know_the_device_time_of_what_has_ended_in_the_order_in_which_it_was_used() -> None:
    """Ann's lease began before Ben's and has ended since. Of its cores nothing is known any more, and none is held."""
    bench = Bench(inventory("n1", device("gpu0"), device("gpu1"), device("cpu", Kind.CPU)))
    first = bench.granted(gpu(8), cores(2), tenant=ANN)
    bench.at(1500)
    bench.granted(tenant=BEN)
    bench.at(1700)
    bench.release(first)
    old = json.loads(bench.state.snapshot())
    for name in ("groups", "accounts", "group_accounts", "half_life_ns", "periods_from_ns"):
        del old[name]
    opened, now = State.restore(json.dumps(old).encode()).books, bench.state.books
    assert opened.accounts[ANN].level == now.accounts[ANN].level == [0, 0, 0]
    assert opened.accounts[ANN].used == [now.accounts[ANN].used[0], 0, 0]
    (group,) = opened.group_accounts
    assert opened.group_accounts[group].used[0] == now.group_accounts[group].used[0]


# ---- the order


def test_the_group_with_the_smaller_share_goes_first_then_the_tenant_in_it() -> None:
    """Ann has used most, but her group has two cards' worth of weight: Cleo, who is in it, goes before Ben."""
    bench = office(gpus=3, course=GroupRecord(id=COURSE, weight=4))
    bench.granted(tenant=ANN, ttl_s=3600)
    bench.granted(tenant=BEN, ttl_s=3600)
    bench.granted(ttl_s=3600)
    bench.wait(100)
    for tenant in (ANN, BEN, CLEO):
        bench.queued(tenant=tenant, lease=tenant)
    assert waiting(bench) == ["cleo", "ann", "ben"]
    assert [position(bench.state, bench.lease(n), bench.now_ns, bench.policy) for n in waiting(bench)] == [1, 2, 3]
    put(bench, GroupRecord(id=COURSE, weight=1))
    put(bench, GroupRecord(id=LAB, weight=10))
    assert waiting(bench) == ["ben", "cleo", "ann"]


def test_in_a_course_that_has_just_begun_the_order_is_that_of_arrival_whatever_the_names() -> None:
    """No student has used anything: one that asks later stands behind those who wait, and moves none of them."""
    bench = Bench(gpus=1, policy=LONG)
    students = [TenantId(name) for name in ("zoe", "max", "ida", "aaron")]
    for student in students:
        bench.do(cmd.AddTenant(tenant=student, token_hash=student))
    held = bench.granted(ttl_s=3600)
    for number, student in enumerate(students, 1):
        bench.queued(tenant=student, lease=student)
        assert waiting(bench) == students[:number]
    bench.queued(tenant=students[0], lease="zoe-again")
    line = [*students, "zoe-again"]
    assert waiting(bench) == line
    assert [position(bench.state, bench.lease(one), bench.now_ns, bench.policy) for one in line] == [1, 2, 3, 4, 5]
    (ahead,) = bench.ledger.explain(bench.lease("aaron"), bench.now).ahead
    assert (ahead.because, [one.id for one in ahead.requests]) == (Because.ARRIVAL, ["zoe", "max", "ida"])
    for student in students:
        bench.release(bench.lease(held.id))
        held = bench.lease(student)
        assert held.status is LeaseStatus.GRANTED
        bench.claim(held)
        bench.wait(1)
    assert waiting(bench) == ["zoe-again"]


def test_a_tenant_that_has_used_something_goes_behind_those_that_have_not_however_early_it_asked() -> None:
    bench = office(gpus=1)
    first = bench.granted(tenant=ANN, ttl_s=3600)
    bench.wait(60)
    bench.release(first)
    bench.granted(tenant=BEN, ttl_s=3600)
    for name, tenant in (("ann-1", ANN), ("ann-2", ANN), ("cleo", CLEO)):
        bench.queued(tenant=tenant, lease=name)
    assert waiting(bench) == ["cleo", "ann-1", "ann-2"]


def test_a_tenant_that_changes_its_group_takes_with_it_what_it_holds_and_not_what_it_used() -> None:
    bench = office(gpus=1)
    bench.granted(tenant=ANN, ttl_s=3600)
    bench.queued(tenant=ANN, lease="ann-2")
    bench.wait(50)
    bench.do(cmd.SetTenant(tenant=ANN, group=LAB))
    accounts = bench.state.books.group_accounts
    assert (accounts[COURSE].level[0], accounts[LAB].level[0]) == (0, 1000)
    assert accounts[COURSE].used[0] > 0 == accounts[LAB].used[0]
    assert list(bench.state.queue[Tier.INTERACTIVE, False]) == [LAB]


def test_cores_count_as_well_as_devices() -> None:
    """Ben has all cores, Ann a quarter of the devices: his dominant share is the larger one."""
    bench = Bench(inventory("n1", *(device(f"gpu{i}") for i in range(4)), device("cpu", Kind.CPU, 8)), policy=LONG)
    bench.granted(tenant=ANN, ttl_s=3600)
    bench.granted(cores(8), tenant=BEN, ttl_s=3600)
    bench.granted(gpu(8, count=3), ttl_s=3600)
    bench.wait(10)
    for tenant in (ANN, BEN):
        bench.queued(tenant=tenant, lease=tenant)
    assert waiting(bench) == ["ann", "ben"]


def test_of_one_tenant_that_goes_first_which_was_held_for_less() -> None:
    """A request that goes on with half an hour of holding stands behind a fresh one that came later."""
    bench = office(gpus=2)
    held = bench.granted(tenant=ANN, ttl_s=3600)
    bench.granted(tenant=BEN, ttl_s=3600)
    bench.at(1000 + 1900)
    larger = cmd.Acquire(
        tenant=ANN,
        lease=LeaseId("larger"),
        request_id=RequestId("larger"),
        wants=(gpu(8, count=2),),
        ttl_ns=seconds(60),
        replaces=held.id,
    )
    assert isinstance(bench.do(larger).answer, Place)
    assert bench.lease("larger").attained_ns == seconds(1900)
    bench.queued(tenant=ANN, lease="fresh")
    assert waiting(bench) == ["fresh", "larger"]
    assert position(bench.state, bench.lease("larger"), bench.now_ns, bench.policy) == 2
    (ahead,) = bench.ledger.explain(bench.lease("larger"), bench.now).ahead
    assert ahead.because is Because.HELD


def test_a_newcomer_in_a_long_line_costs_no_look_at_shares_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of a tenant that holds nothing stays the same; that of the group, which holds a lease, does not."""
    bench = Bench(gpus=1, policy=LONG)
    tenants = [TenantId(f"t{number}") for number in range(20)]
    for tenant in tenants:
        bench.do(cmd.AddTenant(tenant=tenant, token_hash=tenant))
        lease = bench.granted(tenant=tenant)
        bench.wait(5)
        bench.release(lease)
    bench.granted()
    for tenant in tenants:
        bench.queued(tenant=tenant)
    looked = 0

    def counting(*how: Any) -> int:
        nonlocal looked
        looked += 1
        return share(*how)

    monkeypatch.setattr(queue_order, "share", counting)
    bench.queued(tenant=tenants[0])
    assert 1 <= looked <= 3
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE, weight=2)))
    bench.queued(tenant=tenants[1])
    assert len(tenants) <= looked <= len(tenants) + 6, "with another weight all are computed anew, once"


# ---- ceilings and quotas


def test_a_ceiling_holds_for_all_tenants_of_the_group_together() -> None:
    bench = office(gpus=3, course=GroupRecord(id=COURSE, ceiling=1))
    first = bench.granted(tenant=ANN)
    second = bench.queued(tenant=CLEO)
    place = bench.ledger.place_of(second.id, bench.now)
    assert place is not None
    assert place.reason == "the ceiling of group course is 1 GPU, 1 held and 1 asked"
    assert bench.refused(tenant=CLEO, wait_s=0).reason == place.reason
    assert bench.refused(gpu(8, count=2), tenant=CLEO).code == "quota", "it could never be"
    bench.granted(tenant=BEN)
    bench.release(first)
    assert second.status is LeaseStatus.GRANTED


def test_a_group_has_so_many_places_in_the_line_and_a_tenant_as_well() -> None:
    """In all tiers together. Who is refused is told how many wait, and when to ask again; others are let in."""
    bench = office(gpus=1, course=GroupRecord(id=COURSE, quota=Quota(queue=3)))
    bench.do(cmd.SetTenant(tenant=ANN, quota=Quota(queue=2)))
    bench.granted()
    for tier in (Tier.BATCH, Tier.SPOT):
        bench.queued(tenant=ANN, tier=tier)
    own = bench.refused(tenant=ANN)
    assert (own.code, own.reason) == ("limit", "the queue is full: 2 of your requests wait already, and 2 may")
    assert own.do == "Ask again in about 5m 5s, or withdraw one."
    bench.queued(tenant=CLEO)
    of_group = bench.refused(tenant=CLEO)
    assert of_group.reason == "the queue is full: 3 requests of group course wait already, and 3 may"
    bench.queued(tenant=BEN)
    bench.do(cmd.SetTenant(tenant=ANN, quota=Quota(queue=0)))
    assert bench.refused(tenant=ANN).code == "limit"


def test_parts_of_a_card_are_parts_of_a_ceiling() -> None:
    bench = office(gpus=2, course=GroupRecord(id=COURSE, ceiling=1))
    for _ in range(4):
        bench.granted(shared(4), tenant=ANN)
    assert bench.refused(shared(4), tenant=ANN, wait_s=0).code == "quota"


def cards_of_two_sizes() -> Bench:
    """A small card on one machine, one of twice the size on another; the course may have one GPU."""
    small, large = device("small", capacity=8 * GIB), device("large", capacity=16 * GIB)
    bench = Bench(inventory("n1", small, card="small"), inventory("n2", large, card="large"), policy=LONG)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    put(bench, GroupRecord(id=COURSE, ceiling=1))
    for tenant in (ANN, CLEO):
        bench.do(cmd.SetTenant(tenant=tenant, group=COURSE))
    return bench


def test_the_same_part_is_more_of_a_smaller_card() -> None:
    """8 GiB are half of the large card and all of the small one, which is more than the ceiling leaves."""
    bench = cards_of_two_sizes()
    half = bench.granted(shared(8), tenant=ANN, card="large")
    whole = bench.queued(shared(8), tenant=CLEO)
    reasons = [reason.text for reason in bench.ledger.explain(whole, bench.now).reasons]
    assert "its part of 1 smaller GPU would be more than the ceiling of group course leaves" in reasons
    bench.release(half)
    assert whole.status is LeaseStatus.GRANTED


def test_what_was_promised_is_dropped_where_the_ceiling_leaves_too_little() -> None:
    """While a lease leaves the small card for Ann, Cleo gets half of the large one: now all of the small one would be
    too much, and the lease stays."""
    bench = cards_of_two_sizes()
    spot = bench.granted(tenant=BEN, tier=Tier.SPOT, card="small")
    ann = bench.queued(shared(8), tenant=ANN, card="small")
    assert (spot.status, len(ann.promise)) == (LeaseStatus.NOTICED, 1)
    bench.granted(shared(8), tenant=CLEO, card="large")
    bench.wait(2)
    assert (spot.status, ann.promise) == (LeaseStatus.ACTIVE, ())


def test_two_parts_that_are_above_the_ceiling_on_any_cards_are_refused() -> None:
    bench = Bench(inventory("n1", device("small", capacity=8 * GIB), device("large", capacity=16 * GIB)), policy=LONG)
    both = gpu(8, count=2, exclusivity=Exclusivity.SHARED)
    put(bench, GroupRecord(id=GroupId("default"), ceiling=1))
    assert bench.refused(both, tenant=ANN).reason == (
        "2 GPUs with 8GiB would be above the ceiling of its group on the devices that are here"
    )
    put(bench, GroupRecord(id=GroupId("default"), ceiling=2))
    assert [part.millis for part in bench.granted(both, tenant=ANN).parts] == [1000, 500]


def test_many_parts_in_one_request_keep_to_a_ceiling() -> None:
    """Eight of them would be eight eighths of the large card; four fill the small one, and with it the ceiling."""
    bench = cards_of_two_sizes()
    each = cmd.Acquire(
        tenant=ANN,
        lease=LeaseId("a0"),
        request_id=RequestId("a"),
        wants=(shared(2),),
        ttl_ns=seconds(60),
        wait_ns=0,
    )
    leases = tuple(LeaseId(f"a{index}") for index in range(8))
    answer = bench.do(cmd.AcquireMany(tenant=ANN, each=each, leases=leases)).answer
    assert isinstance(answer, GrantedMany)
    assert sum(part.millis for lease in answer.leases for part in lease.parts) == 1000


def test_many_leases_in_one_request_keep_to_the_limits_of_group_and_office() -> None:
    """The office's own limit for tenants that have none was not asked for them before."""
    policy = Policy(quota_default=Quota(leases=3))
    bench = Bench(inventory("n1", device("cpu", Kind.CPU, 64)), policy=policy)
    put(bench, GroupRecord(id=COURSE, quota=Quota(cores=2)))

    def many(tenant: TenantId, name: str) -> int:
        each = cmd.Acquire(
            tenant=tenant,
            lease=LeaseId(f"{name}0"),
            request_id=RequestId(name),
            wants=(cores(1),),
            ttl_ns=seconds(60),
            wait_ns=0,
        )
        ids = tuple(LeaseId(f"{name}{index}") for index in range(10))
        answer = bench.do(cmd.AcquireMany(tenant=tenant, each=each, leases=ids)).answer
        return len(getattr(answer, "leases", ()))

    assert many(ANN, "a") == 3
    bench.do(cmd.SetTenant(tenant=BEN, group=COURSE))
    assert many(BEN, "b") == 2


def test_device_time_of_a_group_is_that_of_its_tenants_together() -> None:
    bench = office(gpus=2, course=GroupRecord(id=COURSE, quota=Quota(gpu_seconds=100)))
    ann = bench.granted(tenant=ANN)
    bench.wait(101)
    bench.release(ann)
    assert bench.refused(tenant=CLEO, wait_s=0).code == "quota"
    later = bench.queued(tenant=CLEO, ttl_s=60)
    bench.at(1000 + 3599)
    bench.do(cmd.Tick())
    assert later.status is LeaseStatus.QUEUED
    bench.wait(4)
    assert later.status is not LeaseStatus.QUEUED, "what left the window made room, and it was looked at then"


@pytest.mark.parametrize("seed", range(30))
def test_when_a_quota_has_room_again_is_known_to_the_nanosecond(seed: int) -> None:
    rng = random.Random(seed)
    meters = [UsageMeter() for _ in range(rng.choice((1, 3)))]
    now = 1000
    for _ in range(25):
        now += rng.randrange(1, 40)
        meter = rng.choice(meters)
        meter.change(rng.choice((1, 2, 5)) if not meter.held_millis else -meter.held_millis, now, 300)

    def used(at: int) -> int:
        return sum(meter.used(at, 300) for meter in meters)

    most = rng.randrange(max(1, used(now)))
    found = at_most_from(meters, most, now, 300)
    first = next((at for at in range(now, now + 700) if used(at) <= most), None)
    assert found == first


# ---- floors


def test_a_floor_is_called_in_after_the_minimum_run_whatever_the_tiers() -> None:
    """The lab has both cards, interactively; the course has a floor of one and asks as batch."""
    bench = office(gpus=2, course=GroupRecord(id=COURSE, floor=1))
    first, second = (bench.granted(tenant=BEN, ttl_s=3600) for _ in range(2))
    asked = bench.queued(tenant=ANN, tier=Tier.BATCH)
    bench.wait(590)
    assert not bench.state.promises, "within the minimum run"
    bench.wait(20)
    noticed = [lease for lease in (first, second) if lease.status is LeaseStatus.NOTICED]
    assert len(noticed) == 1
    assert noticed[0].notice is not None
    assert noticed[0].notice.reason is EndReason.PREEMPTED
    assert noticed[0].notice.detail == "a request within the floor of its group has priority"
    bench.wait(25)
    assert isinstance(bench.claim(asked), Granted)


def test_what_is_within_a_floor_is_not_taken_by_a_higher_tier() -> None:
    bench = office(gpus=2, course=GroupRecord(id=COURSE, floor=1))
    kept = bench.granted(tenant=ANN, tier=Tier.BATCH, ttl_s=3600)
    other = bench.granted(tenant=CLEO, tier=Tier.BATCH, ttl_s=3600)
    bench.wait(700)
    bench.queued(tenant=BEN)
    bench.queued(tenant=BEN)
    bench.wait(5)
    assert sorted((kept.status, other.status)) == [LeaseStatus.ACTIVE, LeaseStatus.NOTICED], "one is above the floor"


def test_an_idle_holder_yields_also_within_a_floor() -> None:
    """The device is not kept idle: when its group needs it again, the floor is called in."""
    bench = office(gpus=1, course=GroupRecord(id=COURSE, floor=1))
    held = bench.granted(tenant=ANN, ttl_s=3600)
    bench.idle(held)
    bench.queued(tenant=BEN)
    bench.wait(2)
    assert held.status is not LeaseStatus.ACTIVE


def test_two_requests_are_not_both_inside_a_floor_with_room_for_one() -> None:
    bench = office(gpus=2, course=GroupRecord(id=COURSE, floor=1))
    held = [bench.granted(tenant=BEN, ttl_s=3600) for _ in range(2)]
    bench.wait(700)
    for tenant in (ANN, CLEO):
        bench.queued(tenant=tenant)
    bench.wait(3)
    assert sorted(lease.status for lease in held) == [LeaseStatus.ACTIVE, LeaseStatus.NOTICED]


def test_a_part_is_inside_a_floor_by_the_card_that_it_is_of() -> None:
    """8 GiB are half of a card with 16, and the whole of one with 8: more than is left of a floor of one GPU."""
    sizes = {"large": 16, "small": 8}
    cards = [device(f"n1/{name}", capacity=size * GIB) for name, size in sizes.items()]
    bench = Bench(inventory("n1", *cards), policy=Policy(max_hold_ns=seconds(10**6), share_across_tenants=True))
    for name, tenant in ((COURSE, ANN), (LAB, BEN)):
        assert not isinstance(put(bench, GroupRecord(id=name, floor=1 if name is COURSE else 0)), InvalidRequest)
        bench.do(cmd.SetTenant(tenant=tenant, group=name))
    old = bench.granted(gpu(8), tenant=BEN, ttl_s=3600)
    mine = bench.granted(shared(4), tenant=ANN, ttl_s=3600)  # a quarter of the large card
    bench.wait(700)
    young = bench.granted(shared(12), tenant=BEN, ttl_s=3600)
    assert [lease.parts[0].resource for lease in (old, mine, young)] == ["n1/small", "n1/large", "n1/large"]
    asked = bench.queued(shared(8), tenant=ANN)
    bench.wait(2)
    assert old.status is LeaseStatus.ACTIVE, "with all of the small card the group would have more than its floor"
    bench.wait(700)
    assert young.status is not LeaseStatus.ACTIVE, "with half of the large one it has not"
    assert old.status is LeaseStatus.ACTIVE
    assert [part.resource for part in bench.state.leases[asked.id].parts] == ["n1/large"]


def test_a_lease_within_its_floor_is_renewed_beyond_the_maximum_hold_while_other_groups_wait() -> None:
    bench = office(gpus=1, policy=Policy(), course=GroupRecord(id=COURSE, floor=1))
    held = bench.granted(tenant=ANN, ttl_s=3600)
    bench.queued(tenant=BEN)
    bench.at(1000 + 1900)
    assert isinstance(bench.renew(held), Granted)
    bench.queued(tenant=CLEO)
    assert not isinstance(bench.renew(held), Granted), "somebody of its own group waits"


# ---- bad input


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (GroupRecord(id=COURSE, weight=0), "a weight of 0 for group course is not possible"),
        (GroupRecord(id=COURSE, weight=-3), "a weight of -3"),
        (GroupRecord(id=COURSE, floor=3, ceiling=2), "a floor of 3 GPUs above its 2 at most"),
        (GroupRecord(id=COURSE, floor=2, quota=Quota(gpus=1)), "a floor of 2 GPUs above its 1 at most"),
        (GroupRecord(id=COURSE, floor=3), "floors would add up to 3 GPUs, and there are 2"),
        (GroupRecord(id=COURSE, floor=-1), "a floor or a ceiling is a number of GPUs"),
        (GroupRecord(id=GroupId("Ü")), "is not a valid group name"),
    ],
)
def test_a_contradiction_is_refused_and_changes_nothing(group: GroupRecord, said: str) -> None:
    bench = office()
    before = bench.state.snapshot()
    answer = put(bench, group)
    assert isinstance(answer, InvalidRequest)
    assert said in answer.message
    assert bench.state.snapshot() == before


def test_floors_of_several_groups_do_not_promise_more_than_there_is() -> None:
    bench = office(gpus=2, course=GroupRecord(id=COURSE, floor=1))
    answer = put(bench, GroupRecord(id=LAB, floor=2))
    assert isinstance(answer, InvalidRequest)
    assert answer.do == "Give group lab at most 1, or lower the floor of another."


def test_a_group_goes_only_when_it_is_empty_and_the_default_group_never() -> None:
    bench = office()
    held = bench.do(cmd.RemoveGroup(group=COURSE)).answer
    assert isinstance(held, InvalidRequest)
    assert held.message == "group course still has ann, cleo"
    assert isinstance(bench.do(cmd.RemoveGroup(group=GroupId("default"))).answer, InvalidRequest)
    assert isinstance(bench.do(cmd.RemoveGroup(group=GroupId("none"))).answer, NotFound)
    assert isinstance(bench.do(cmd.SetTenant(tenant=ANN, group=GroupId("none"))).answer, NotFound)
    assert isinstance(bench.do(cmd.SetTenant(tenant=ANN, weight=0)).answer, InvalidRequest)
    assert isinstance(put(bench, GroupRecord(id=COURSE), is_new=True), InvalidRequest)
    assert isinstance(put(bench, GroupRecord(id=GroupId("none")), is_new=False), NotFound)
    for tenant in (ANN, CLEO):
        bench.do(cmd.SetTenant(tenant=tenant, group=GroupId("default")))
    bench.do(cmd.RemoveGroup(group=COURSE))
    assert COURSE not in bench.state.books.groups
    assert LOCAL in bench.state.tenants
