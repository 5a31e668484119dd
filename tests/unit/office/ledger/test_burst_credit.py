"""Burst credit: it runs down beyond the quota of the window, fills up, and does not depend on when it is asked."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from msgspec.structs import replace

from sublet.errors import InvalidRequest, QuotaExceeded
from sublet.lease.states import LeaseStatus
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Granted, GrantedMany, Refusal
from sublet.office.ledger.burst_credit import HOUR, remaining, remaining_seconds
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import BurstRecord, GroupRecord, Quota
from sublet.values import MILLIS_PER_DEVICE, NS_PER_S, GroupId, LeaseId, RequestId
from tests.unit.office.ledger.bench import ANN, Bench, gpu, seconds

UNIT = MILLIS_PER_DEVICE * NS_PER_S * HOUR
"""One GPU-second."""
QUOTA = Quota(gpu_seconds=100, burst_seconds=300, burst_refill_seconds=60)


def office(quota: Quota = QUOTA, gpus: int = 2) -> Bench:
    return Bench(gpus=gpus, quotas={ANN: quota})


def credit(bench: Bench) -> int:
    return remaining_seconds(bench.state, ANN, bench.now_ns)


@pytest.mark.parametrize("seed", range(40))
def test_the_line_is_that_of_a_reckoning_in_fractions_however_often_it_is_asked(seed: int) -> None:
    """Seconds as fractions, moved on in small steps, clipped at each of them; asked at random moments as well."""
    rng = random.Random(seed)
    bound, refill = rng.choice((7, 300)), rng.choice((0, 1, 59, 7200))
    record = BurstRecord(at_ns=0, credit=rng.randrange(bound + 1) * UNIT, bound=bound * UNIT, refill=refill)
    slow, now_s, asked = Fraction(record.credit, UNIT), 0, record
    for _ in range(30):
        drawn = rng.choice((0, 250, 1000, 3000))
        record = BurstRecord(
            at_ns=now_s * NS_PER_S,
            credit=remaining(record, now_s * NS_PER_S),
            bound=record.bound,
            refill=refill,
            drawn=drawn,
        )
        asked = BurstRecord(
            at_ns=record.at_ns, credit=remaining(asked, record.at_ns), bound=record.bound, refill=refill, drawn=drawn
        )
        for _ in range(rng.randrange(1, 200)):
            now_s += 1
            slow = max(Fraction(0), min(Fraction(bound), slow + Fraction(refill, 3600) - Fraction(drawn, 1000)))
            if rng.random() < 0.1:
                at_ns = now_s * NS_PER_S
                asked = BurstRecord(
                    at_ns=at_ns, credit=remaining(asked, at_ns), bound=record.bound, refill=refill, drawn=drawn
                )
        assert Fraction(remaining(record, now_s * NS_PER_S), UNIT) == slow
        assert remaining(asked, now_s * NS_PER_S) == remaining(record, now_s * NS_PER_S)


def test_the_credit_is_used_when_the_quota_is_and_fills_up_again() -> None:
    bench = office()
    first = bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(100)
    assert first.end is not None, "nobody renewed it"
    assert credit(bench) == 300
    second = bench.granted(gpu(), tenant=ANN, ttl_s=100)
    assert second.draws == MILLIS_PER_DEVICE
    bench.wait(60)
    assert credit(bench) == 300 - 60 + 1, "a minute brings back one second"
    bench.do(cmd.Release(tenant=ANN, lease=second.id))
    assert second.draws == 0
    before = credit(bench)
    bench.wait(3000)
    assert before == 241
    assert credit(bench) == 291
    bench.wait(3600)
    assert credit(bench) == 300, "to the bound and no further"
    assert bench.folded().snapshot() == bench.state.snapshot()


def test_what_is_not_covered_for_its_time_to_live_is_refused_or_waits() -> None:
    """And the refusal says when to ask again: here when the credit covers it, before the window has room."""
    bench = office(Quota(gpu_seconds=100, burst_seconds=100, burst_refill_seconds=600))
    bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(100)
    bench.granted(gpu(), tenant=ANN, ttl_s=60)
    refused = bench.refused(gpu(), tenant=ANN, ttl_s=60, wait_s=0)
    assert "of burst credit are left" in refused.reason
    waiting = bench.queued(gpu(), tenant=ANN, ttl_s=60)
    bench.wait(61)
    assert credit(bench) == 50
    assert waiting.status is LeaseStatus.QUEUED
    refused = bench.refused(gpu(), tenant=ANN, ttl_s=90, wait_s=0)
    assert refused.do == "Ask again in 3m 59s."
    bench.wait(60)
    assert bench.state.leases[waiting.id].status is LeaseStatus.GRANTED


def test_a_renewal_draws_and_is_refused_when_the_credit_is_used_up() -> None:
    bench = office(Quota(gpu_seconds=100, burst_seconds=130))
    lease = bench.granted(gpu(), tenant=ANN, ttl_s=60)
    for draws, left_s in ((0, 130), (MILLIS_PER_DEVICE, 130), (MILLIS_PER_DEVICE, 80)):
        bench.wait(50)
        assert isinstance(bench.renew(lease), Granted)
        assert (lease.draws, credit(bench)) == (draws, left_s)
    bench.wait(50)
    refused = bench.renew(lease)
    assert isinstance(refused, QuotaExceeded), "30 of 60 seconds are left"
    assert "and 30s of burst credit are left" in refused.message


def test_credit_is_none_of_a_group_and_nothing_without_a_quota() -> None:
    bench = office(Quota(burst_seconds=10))
    lease = bench.granted(gpu(), tenant=ANN, ttl_s=3600)
    bench.wait(1000)
    assert (lease.draws, credit(bench)) == (0, 10)
    group = GroupRecord(id=GroupId("course"), quota=Quota(burst_seconds=5))
    assert isinstance(bench.do(cmd.SetGroup(group=group)).answer, InvalidRequest)


def test_a_changed_quota_holds_from_that_moment_on() -> None:
    """What is above the new bound is gone, and what comes back comes at the new rate, though nothing draws on it."""
    bench = office()
    bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(100)
    lease = bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(50)
    bench.do(cmd.SetTenant(tenant=ANN, quota=replace(QUOTA, burst_seconds=60, burst_refill_seconds=0)))
    assert credit(bench) == 60
    bench.do(cmd.Release(tenant=ANN, lease=lease.id))
    assert isinstance(bench.ask(gpu(), tenant=ANN, ttl_s=100, wait_s=0), Refusal)
    bench.wait(1000)
    bench.do(cmd.SetTenant(tenant=ANN, quota=replace(QUOTA, burst_refill_seconds=1200)))
    bench.wait(60)
    assert credit(bench) == 80
    assert bench.folded().snapshot() == bench.state.snapshot()


def test_a_request_that_waits_for_credit_is_granted_when_the_new_rate_has_brought_it() -> None:
    """It waited for good before: nothing came back at the old rate, and the new one held from its grant on."""
    bench = office(Quota(gpu_seconds=1, burst_seconds=100))
    bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(100)
    bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(100)
    assert credit(bench) == 0
    waiting = bench.queued(gpu(), tenant=ANN, ttl_s=50)
    bench.do(cmd.SetTenant(tenant=ANN, quota=Quota(gpu_seconds=1, burst_seconds=100, burst_refill_seconds=3600)))
    bench.wait(49)
    assert waiting.status is LeaseStatus.QUEUED
    bench.wait(1)
    assert bench.lease(waiting.id).status is LeaseStatus.GRANTED


def test_a_changed_default_holds_from_the_next_command_on() -> None:
    bench = Bench(policy=Policy(quota_default=QUOTA))
    bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(100)
    bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(100)
    waiting = bench.queued(gpu(), tenant=ANN, ttl_s=250)
    assert credit(bench) == 201
    bench.ledger.set_policy(Policy(quota_default=replace(QUOTA, burst_seconds=250, burst_refill_seconds=3600)))
    bench.do(cmd.Tick())
    bench.wait(48)
    assert (credit(bench), waiting.status) == (249, LeaseStatus.QUEUED)
    bench.wait(1)
    assert bench.lease(waiting.id).status is LeaseStatus.GRANTED
    assert bench.folded().snapshot() == bench.state.snapshot()


def test_a_request_that_lacked_a_default_limit_alone_is_granted_when_that_changes() -> None:
    bench = Bench(gpus=2, policy=Policy(quota_default=Quota(gpus=1)))
    bench.granted(gpu(), tenant=ANN)
    waiting = bench.queued(gpu(), tenant=ANN)
    bench.ledger.set_policy(Policy())
    bench.do(cmd.Tick())
    assert bench.lease(waiting.id).status is LeaseStatus.GRANTED


def test_many_leases_of_one_request_are_covered_together() -> None:
    """The credit lasts for a time to live of each of them, and of those before them. Before, one that was covered let
    all of them in."""
    bench = office(Quota(gpu_seconds=1, burst_seconds=250), gpus=4)
    bench.granted(gpu(), tenant=ANN, ttl_s=10)
    bench.wait(10)
    ids = tuple(LeaseId(f"m{number}") for number in range(4))
    each = cmd.Acquire(
        tenant=ANN, lease=ids[0], request_id=RequestId("many"), wants=(gpu(),), ttl_ns=seconds(100), wait_ns=0
    )
    answer = bench.do(cmd.AcquireMany(tenant=ANN, each=each, leases=ids, at_least=1)).answer
    assert isinstance(answer, GrantedMany)
    assert len(answer.leases) == 2
    bench.wait(100)
    assert credit(bench) == 50


def test_many_leases_of_one_request_are_expected_to_need_their_time_together() -> None:
    bench = office(Quota(gpu_seconds=100), gpus=4)
    ids = tuple(LeaseId(f"m{number}") for number in range(4))
    each = cmd.Acquire(
        tenant=ANN,
        lease=ids[0],
        request_id=RequestId("many"),
        wants=(gpu(),),
        ttl_ns=seconds(100),
        wait_ns=0,
        expect_ns=seconds(40),
    )
    answer = bench.do(cmd.AcquireMany(tenant=ANN, each=each, leases=ids, at_least=1)).answer
    assert isinstance(answer, GrantedMany)
    assert len(answer.leases) == 2


def test_a_shift_of_the_clock_changes_nothing() -> None:
    bench = office()
    bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.wait(100)
    bench.granted(gpu(), tenant=ANN, ttl_s=250)
    bench.wait(10)
    before = credit(bench)
    bench.do(cmd.OpenOffice(incarnation=2, clock_domain="another", last_ns=bench.now_ns))
    assert credit(bench) == before
