"""How much a tenant may ask of the office in a while."""

from __future__ import annotations

import random

import pytest

from sublet.errors import QuotaExceeded
from sublet.office.ledger.rate_limits import (
    BURST_MIN,
    HOUR_NS,
    KEEPING,
    MINUTE_NS,
    Bucket,
    RateLimits,
    RequestRates,
    TooMany,
)
from sublet.office.ledger.records import LOCAL_TENANT
from sublet.values import NS_PER_S, GroupId, TenantId

ANA, BEN = TenantId("ana"), TenantId("ben")
RATES = RequestRates(requests_per_minute=600, leases_per_hour=10)


def many(limits: RateLimits, number: int, now_ns: int, *, keeps: bool = False) -> int:
    """How many of so many requests at this moment are answered."""
    done = 0
    for _ in range(number):
        try:
            limits.request(ANA, now_ns, keeps=keeps)
        except TooMany:
            continue
        done += 1
    return done


def test_a_burst_is_answered_and_then_as_many_as_come_back() -> None:
    limits = RateLimits(RATES)
    assert many(limits, 1000, 0) == 100
    assert many(limits, 1000, NS_PER_S) == 10
    assert many(limits, 1000, 3600 * NS_PER_S) == 100


def test_who_waits_as_long_as_it_says_is_answered() -> None:
    limits = RateLimits(RATES)
    many(limits, 1000, 0)
    with pytest.raises(QuotaExceeded) as caught:
        limits.request(ANA, 0)
    assert caught.value.message == "tenant ana sends more than 600 requests a minute"
    assert caught.value.do == "Ask again in 1s."
    assert isinstance(caught.value, TooMany)
    assert caught.value.kind == "QuotaExceeded"
    limits.request(ANA, caught.value.retry_s * NS_PER_S)


def test_what_keeps_or_gives_back_goes_on_where_other_requests_are_too_many() -> None:
    limits = RateLimits(RATES)
    assert many(limits, 1000, 0) == 100
    assert many(limits, 5000, 0, keeps=True) == 100 * (KEEPING - 1)
    assert many(limits, 1, 60 * NS_PER_S) == 0, "it has taken what other requests would have had"


def test_tenants_do_not_count_for_each_other_and_the_owner_is_not_counted() -> None:
    limits = RateLimits(RATES)
    many(limits, 1000, 0)
    limits.request(BEN, 0)
    for _ in range(10_000):
        limits.request(LOCAL_TENANT, 0)
        limits.lease(LOCAL_TENANT, 0)


def test_a_group_has_a_rate_of_its_own_which_a_renewal_does_not_meet() -> None:
    """One tenant's flood uses up what its group may send, and takes no lease from its neighbours; a tenant of the same
    name as the group is another thing."""
    limits, group = RateLimits(RATES), (GroupId("ben"), 60)
    for _ in range(60):
        limits.request(ANA, 0, group=group)
    with pytest.raises(TooMany, match="group ben sends more than 60 requests a minute") as caught:
        limits.request(BEN, 0, group=group)
    limits.request(BEN, 0, group=group, keeps=True)
    limits.request(BEN, 0, own=60)
    limits.request(BEN, caught.value.retry_s * NS_PER_S, group=group)


def test_a_tenant_may_have_a_rate_of_its_own() -> None:
    limits = RateLimits(RATES)
    for _ in range(60):
        limits.request(ANA, 0, own=60)
    with pytest.raises(TooMany, match="tenant ana sends more than 60 requests a minute"):
        limits.request(ANA, 0, own=60)
    limits.request(ANA, 0, own=6000)


def test_leases_that_begin_are_counted_by_the_hour() -> None:
    limits = RateLimits(RATES)
    for _ in range(10):
        limits.lease(ANA, 0)
    with pytest.raises(TooMany, match="tenant ana has begun 10 leases within an hour"):
        limits.lease(ANA, 0)
    limits.no_lease(ANA)
    limits.lease(ANA, 0)
    limits.lease(ANA, HOUR_NS // 10)


def test_many_leases_in_one_request_count_as_many() -> None:
    limits = RateLimits(RATES)
    with pytest.raises(QuotaExceeded, match="may begin 10 leases within an hour, not 11"):
        limits.lease(ANA, 0, 11)
    limits.lease(ANA, 0, 8)
    with pytest.raises(TooMany):
        limits.lease(ANA, 0, 3)
    limits.no_lease(ANA, 1)
    limits.lease(ANA, 0, 3)


def test_even_a_small_rate_has_a_burst() -> None:
    assert many(RateLimits(RequestRates(requests_per_minute=60)), 1000, 0) == BURST_MIN


@pytest.mark.parametrize("seed", range(20))
def test_never_more_than_rate_and_burst(seed: int) -> None:
    """Whatever the moments are: in any stretch no more than what comes back in it, and one burst."""
    chance = random.Random(seed)
    amount, burst = chance.randint(1, 10_000), chance.randint(1, 200)
    bucket, now_ns, taken = Bucket(amount=amount, within_ns=MINUTE_NS, burst=burst), 10**18, list[int]()
    for _ in range(2000):
        now_ns += chance.choice((0, 1, chance.randint(0, MINUTE_NS // amount * 3)))
        if bucket.take(now_ns) == 0:
            taken.append(now_ns)
    each_ns = MINUTE_NS // amount
    for first in range(0, len(taken), 37):
        for last in range(first, len(taken), 41):
            assert last - first + 1 <= burst + (taken[last] - taken[first]) // each_ns + 1, f"seed {seed}"
    assert len(taken) >= burst
