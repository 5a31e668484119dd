"""What is explained is what decides: places, reasons and advice against what the ledger then does."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.api.to_wire import explain_answer
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.explain import Because, Explanation, Reason, ReasonKind
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.records import GroupRecord, LeaseRecord, Quota
from sublet.values import GIB, GroupId, TenantId, Tier, format_size
from tests.unit.office.ledger.bench import ANN, BEN, Bench, device, gpu, inventory, seconds

CAT = TenantId("cat")
LAB = GroupId("lab")
MINUTE = 60.0


def bench_with_a_lab(*members: TenantId, gpus: int = 1, floor: int = 0) -> Bench:
    bench = Bench(gpus=gpus)
    bench.do(cmd.AddTenant(tenant=CAT, token_hash="", quota=Quota()))
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, floor=floor), is_new=True))
    for tenant in members:
        bench.do(cmd.SetTenant(tenant=tenant, group=LAB))
    return bench


def explained(bench: Bench, lease: LeaseRecord) -> Explanation:
    return bench.ledger.explain(bench.lease(lease.id), bench.now)


def the(kind: ReasonKind, found: Explanation) -> Reason:
    (reason,) = (reason for reason in found.reasons if reason.kind is kind)
    return reason


def kinds(found: Explanation) -> set[ReasonKind]:
    return {reason.kind for reason in found.reasons}


# ---- who goes first


def test_requests_ahead_are_counted_by_the_first_difference_and_granted_in_that_order() -> None:
    """A tier, another group's share, another tenant's share in the group, and an earlier request of its own."""
    bench = bench_with_a_lab(BEN, CAT)
    holder = bench.granted(tenant=BEN, ttl_s=3600)  # so that ben and the lab have had a share, and ann and cat none
    bench.wait(MINUTE)
    high = bench.queued(tenant=CAT)
    group = bench.queued(tenant=ANN, tier=Tier.BATCH)
    other = bench.queued(tenant=CAT, tier=Tier.BATCH)
    first = bench.queued(tenant=BEN, tier=Tier.BATCH)
    last = bench.queued(tenant=BEN, tier=Tier.BATCH)

    found = explained(bench, last)
    assert [(ahead.because, [one.id for one in ahead.requests]) for ahead in found.ahead] == [
        (Because.TIER, [high.id]),
        (Because.GROUP, [group.id]),
        (Because.TENANT, [other.id]),
        (Because.ARRIVAL, [first.id]),
    ]
    assert found.position == 5

    for before, after in zip([holder, high, group, other, first], [high, group, other, first, last], strict=True):
        bench.release(bench.lease(before.id))
        assert bench.lease(after.id).status is LeaseStatus.GRANTED


def test_a_request_whose_holder_has_held_less_is_said_to_go_first() -> None:
    """Ann's second request came later than the one that goes on with what was taken from her after half an hour."""
    bench = Bench()
    bench.granted(tenant=ANN, ttl_s=3600)
    bench.wait(31 * MINUTE)
    taker = bench.queued(tenant=BEN)
    bench.wait(31)
    bench.claim(taker)
    goes_on, fresh = bench.queued(tenant=ANN), bench.queued(gpu(4), tenant=ANN)
    assert [(ahead.because, ahead.requests) for ahead in explained(bench, goes_on).ahead] == [(Because.HELD, (fresh,))]
    assert explained(bench, fresh).ahead == ()


@pytest.mark.parametrize("seed", range(6))
def test_place_and_requests_ahead_agree_whatever_was_done(seed: int) -> None:
    """For every waiting request of a random office; and asking changes nothing."""
    draw = random.Random(seed)
    bench = bench_with_a_lab(ANN, CAT, gpus=3, floor=1)
    tenants, tiers = (ANN, BEN, CAT), list(Tier)
    for _ in range(60):
        bench.ask(gpu(draw.choice((4, 8, 16))), tenant=draw.choice(tenants), tier=draw.choice(tiers))
        if draw.random() < 0.3:
            bench.wait(draw.choice((1.0, MINUTE, 11 * MINUTE)))
        if draw.random() < 0.3:
            live = [one for one in bench.state.leases.values() if one.status is LeaseStatus.ACTIVE]
            if live:
                bench.release(draw.choice(live))
        before = msgspec.json.encode(bench.state.books)
        for lease in list(bench.state.leases.values()):
            found = bench.ledger.explain(lease, bench.now)
            assert found.reasons, f"seed {seed}: {lease.id} is {lease.status}, and nothing is said"
            if lease.status is LeaseStatus.QUEUED:
                assert found.position == 1 + sum(len(ahead.requests) for ahead in found.ahead), f"seed {seed}"
        assert msgspec.json.encode(bench.state.books) == before, f"seed {seed}"


# ---- what is in the way


def test_the_moment_at_which_a_holder_may_be_taken_is_when_it_is_taken() -> None:
    """A batch lease has ten minutes; then an interactive request takes it, at the second that was explained."""
    bench = Bench()
    holder = bench.granted(tenant=ANN, tier=Tier.BATCH, ttl_s=3600)
    bench.wait(MINUTE)
    request = bench.queued(tenant=BEN)
    reason = the(ReasonKind.ROOM, explained(bench, request))
    assert reason.at_ns == bench.now_ns + seconds(9 * MINUTE)
    assert "the first may be taken for it in 9m" in reason.text
    assert [one.id for one in reason.leases] == [holder.id]

    bench.wait(9 * MINUTE - 1)
    assert bench.lease(holder.id).notice is None
    bench.wait(2)
    notice = bench.lease(holder.id).notice
    assert notice is not None
    assert notice.beneficiary == request.id
    found = explained(bench, request)
    assert the(ReasonKind.NOTICE, found).leases == (bench.lease(holder.id),)
    assert [one.id for one in the(ReasonKind.NOTICE, explained(bench, holder)).leases] == [request.id]


def test_what_no_tier_may_take_is_said() -> None:
    bench = Bench()
    bench.granted(tenant=ANN, ttl_s=60)
    found = explained(bench, bench.queued(tenant=BEN, tier=Tier.SPOT))
    assert "the first ends in 1m 5s unless it is renewed" in the(ReasonKind.ROOM, found).text


def test_a_floor_that_keeps_a_lease_is_named_to_both_sides() -> None:
    bench = bench_with_a_lab(CAT, floor=1)
    kept = bench.granted(tenant=CAT, tier=Tier.SPOT, ttl_s=3600)
    request = bench.queued(tenant=ANN)
    bench.wait(MINUTE)
    assert bench.lease(kept.id).notice is None
    assert ReasonKind.FLOOR in kinds(explained(bench, request))
    assert "lab has no more than its floor" in the(ReasonKind.FLOOR, explained(bench, kept)).text


def test_room_that_is_kept_for_a_patient_request_is_said_to_be() -> None:
    bench = Bench(inventory("n1", device("gpu0"), device("gpu1")))
    bench.granted(tenant=ANN, ttl_s=7200)
    bench.queued(gpu(count=2), tenant=ANN)
    bench.wait(6 * MINUTE)
    found = explained(bench, bench.queued(tenant=BEN, tier=Tier.SPOT))
    assert kinds(found) == {ReasonKind.GANG}
    assert "a request ahead has waited for more than 5m" in the(ReasonKind.GANG, found).text


def test_a_limit_says_when_time_alone_lifts_it() -> None:
    bench = Bench(quotas={ANN: Quota(gpu_seconds=60)})
    lease = bench.granted(tenant=ANN, ttl_s=3600)
    bench.wait(MINUTE)
    bench.release(lease)
    found = explained(bench, bench.queued(tenant=ANN))
    limit = the(ReasonKind.LIMIT, found)
    assert "60 of 60 GPU-seconds" in limit.text
    assert limit.at_ns is not None
    assert limit.at_ns > bench.now_ns
    assert found.advice
    assert found.advice[0].startswith("wait ")
    bench.at(limit.at_ns / 1e9)
    bench.do(cmd.Tick())
    assert bench.lease(found.lease.id).status is LeaseStatus.GRANTED


# ---- what its holder can do


def test_advice_is_what_would_be_granted_now() -> None:
    bench = Bench(inventory("n1", device("gpu0", model="A100"), device("gpu1", capacity=8 * GIB, model="T4")))
    bench.granted(gpu(16), tenant=ANN, ttl_s=3600)
    found = explained(bench, bench.queued(gpu(16), tenant=BEN))
    assert "ask for 8GiB, which is free now" in found.advice
    found = explained(bench, bench.queued(gpu(8, model="A100"), tenant=BEN))
    assert "leave the model out: another one is free now" in found.advice


def test_fewer_gpus_are_advised_where_they_are_free_now() -> None:
    bench = Bench(gpus=4)
    bench.granted(gpu(count=2), tenant=ANN, ttl_s=3600)
    request = bench.queued(gpu(count=4), tenant=BEN)
    assert (
        f"ask for 2 GPUs with {format_size(request.wants[0].amount)}, which are free now"
        in explained(bench, request).advice
    )
    refused = bench.refused(gpu(count=4), tenant=BEN, wait_s=0)
    assert refused.do.startswith("Wait in line for it, or ask for 2 GPUs with ")
    bench.do(cmd.Release(tenant=BEN, lease=request.id))
    bench.granted(gpu(count=2), tenant=BEN)
    assert not explained(bench, bench.queued(gpu(count=4), tenant=BEN)).advice, "none is free"


def test_a_ceiling_that_other_members_use_up_says_when_the_first_of_their_leases_ends_at_the_latest() -> None:
    """Nothing of its own could be released. They are renewed for as long as they may be: until then, and no longer."""
    bench = bench_with_a_lab(ANN, BEN, gpus=2)
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, ceiling=1), is_new=False))
    holder = bench.granted(tenant=ANN, ttl_s=300)
    bench.wait(10)
    refused = bench.refused(tenant=BEN, wait_s=0)
    assert refused.do.startswith(
        "Wait in line for it: other members of your group have what its limit allows; the first"
    )
    request = bench.queued(tenant=BEN)
    first, second = explained(bench, request).advice
    assert first == (
        "wait until other members of your group hold less: they have what its limit allows; "
        "the first of their leases ends within 34m 55s"
    )
    assert second == "ask the operator for a higher limit of your group"
    assert refused.estimate_ns == seconds(34 * MINUTE + 55)
    latest_ns = bench.now_ns + refused.estimate_ns
    while bench.lease(holder.id).status is LeaseStatus.ACTIVE and bench.now_ns < latest_ns:
        bench.renew(bench.lease(holder.id))
        bench.wait(1)
    assert bench.now_ns > latest_ns - seconds(10), "it was renewed as late as it could be"
    bench.wait(latest_ns / 1e9 - bench.now_ns / 1e9)
    assert bench.lease(request.id).status is LeaseStatus.GRANTED


def test_what_other_members_hold_is_what_is_waited_for_and_not_what_is_its_own() -> None:
    """Ben has held for ten minutes longer than Ann; that his lease ends would not be enough."""
    bench = bench_with_a_lab(ANN, BEN, gpus=3)
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, ceiling=2), is_new=False))
    bench.granted(tenant=BEN, ttl_s=700)
    bench.wait(10 * MINUTE)
    bench.granted(tenant=ANN, ttl_s=300)
    request = bench.queued(gpu(8, count=2), tenant=BEN)
    assert explained(bench, request).advice[0].endswith("the first of their leases ends within 35m 5s")


def test_a_member_of_more_weight_holds_for_longer_and_the_moment_says_so() -> None:
    """Ann's weight is three times Ben's: at the maximum her share is not the larger one yet. Eight turns bound it."""
    bench = bench_with_a_lab(ANN, BEN, gpus=2)
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, ceiling=1), is_new=False))
    bench.do(cmd.SetTenant(tenant=ANN, weight=3))
    bench.granted(tenant=ANN, ttl_s=300)
    request = bench.queued(tenant=BEN)
    assert explained(bench, request).advice[0].endswith("the first of their leases ends within 4h 5m")


def test_a_ceiling_that_its_own_lease_uses_up_is_said_so() -> None:
    bench = bench_with_a_lab(ANN, BEN, gpus=2)
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, ceiling=1), is_new=False))
    bench.granted(tenant=BEN)
    found = explained(bench, bench.queued(tenant=BEN))
    assert found.advice == ("release a lease of your own, or ask the operator for a higher limit of your group",)


def test_a_higher_tier_is_advised_where_it_would_help() -> None:
    bench = Bench()
    bench.granted(tenant=ANN, ttl_s=3600)
    bench.queued(tenant=BEN, tier=Tier.BATCH)
    found = explained(bench, bench.queued(tenant=ANN, tier=Tier.SPOT))
    assert "ask in tier interactive: no request would go first" in found.advice


# ---- leases that are held, and leases that have ended


def test_of_a_lease_that_is_held_it_is_said_who_may_take_it_and_when() -> None:
    bench = Bench(gpus=2)
    batch = bench.granted(tenant=ANN, tier=Tier.BATCH, ttl_s=3600)
    assert the(ReasonKind.MINIMUM, explained(bench, batch)).at_ns == bench.now_ns + seconds(10 * MINUTE)
    assert the(ReasonKind.MAXIMUM, explained(bench, batch)).at_ns == bench.now_ns + seconds(30 * MINUTE)
    bench.idle(batch)
    bench.wait(MINUTE)
    assert kinds(explained(bench, batch)) == {ReasonKind.IDLE, ReasonKind.DEADLINE}


def test_of_a_lease_that_waits_for_its_claim_only_the_end_of_that_wait_is_said() -> None:
    """Nothing else can end it earlier, and its time to live begins with the claim."""
    bench = Bench()
    held = bench.granted(tenant=ANN)
    waits = bench.queued(tenant=BEN)
    bench.release(held)
    (reason,) = explained(bench, waits).reasons
    assert (reason.kind, reason.at_ns) == (ReasonKind.DEADLINE, bench.lease(waits.id).claim_by_ns)
    assert "must be claimed" in reason.text


def test_of_a_lease_that_has_ended_it_is_said_why() -> None:
    bench = Bench()
    lease = bench.granted(tenant=ANN)
    bench.release(lease)
    found = explained(bench, lease)
    assert found.summary == f"it ended ({EndReason.RELEASED})"


# ---- who is told what


def test_a_member_learns_of_no_other_tenant() -> None:
    """Not its name, its leases, its group or its share: only how many requests go first and why."""
    bench = bench_with_a_lab(BEN, gpus=1)
    bench.granted(tenant=BEN, tier=Tier.BATCH, ttl_s=3600)
    bench.queued(tenant=BEN, name="secret-of-ben")
    own = bench.queued(tenant=ANN, tier=Tier.BATCH)
    others = [lease for lease in bench.state.leases.values() if lease.tenant == BEN]

    def told(caller: TenantId | None) -> str:
        return msgspec.json.encode(explain_answer(explained(bench, own), bench.state, bench.now, caller)).decode()

    for word in (BEN, LAB, "secret-of-ben", *(lease.id for lease in others)):
        assert not re.search(rf"\b{word}\b", told(ANN)), word
    assert all(f'"{lease.id}"' in told(None) for lease in others)
    assert f'"{DEFAULT_GROUP}"' in told(ANN)
