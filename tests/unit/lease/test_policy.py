"""The policy of renewal: the deadline rule for every clock and delay, jitter, waits, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sublet.errors import InvalidRequest
from sublet.lease.policy import ATTEMPTS_LEAST, RenewalPolicy, lead_ns
from sublet.values import NS_PER_S, LeaseId, RenewMode

POLICY = RenewalPolicy()
TTLS = st.integers(2 * NS_PER_S, 24 * 3600 * NS_PER_S)
IDS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=20).map(LeaseId)
RHO = Fraction(5, 100)


def s(seconds: float) -> int:
    return round(seconds * NS_PER_S)


# ---- L6: the holder's deadline is not after the office's expiry


@given(
    ttl_ns=st.integers(1, 24 * 3600 * NS_PER_S),
    rate=st.fractions(1 - RHO, 1 / (1 - RHO), max_denominator=10_000),
    there_ns=st.integers(0, 3600 * NS_PER_S),
    sent_at=st.fractions(0, 10_000, max_denominator=1000),
)
@example(ttl_ns=s(300), rate=1 - RHO, there_ns=0, sent_at=Fraction(0))
@example(ttl_ns=1, rate=1 - RHO, there_ns=0, sent_at=Fraction(0))
def test_for_every_clock_within_the_rate_and_every_delay_the_holder_stops_first(
    ttl_ns: int, rate: Fraction, there_ns: int, sent_at: Fraction
) -> None:
    """L6, in exact arithmetic on the time line of the office's clock.

    ``rate`` is how fast the holder's clock runs while the office's runs 1. The office counts from when the request
    arrives; the holder from when it was sent, by its own clock.
    """
    office_expires = sent_at + there_ns + ttl_ns
    holder_stops = sent_at + Fraction(POLICY.deadline_after_ns(ttl_ns)) / rate
    assert holder_stops <= office_expires


@given(ttl_ns=TTLS, rate_error=st.sampled_from([0.0, 0.01, 0.03, 0.05]))
def test_the_margin_is_spent_on_the_clock_and_the_request_alone(ttl_ns: int, rate_error: float) -> None:
    """Safe must not come to mean stingy: the deadline is ttl·(1−ρ) − time-out, to the nanosecond of rounding."""
    policy = RenewalPolicy(rate_error=rate_error)
    exact = ttl_ns * (1 - Fraction(str(rate_error))) - policy.request_timeout_ns(ttl_ns)
    assert 0 <= exact - policy.deadline_after_ns(ttl_ns) < 1


def test_a_clock_slower_than_the_policy_allows_does_overrun() -> None:
    """The bound is a bound: beyond it the promise would be broken, so the number must be chosen for the machines."""
    policy = RenewalPolicy(request_timeout_max=0.001)
    assert policy.deadline_after_ns(s(300)) / (1 - 0.06) > s(300)


def test_the_request_timeout_is_a_tenth_of_the_ttl_and_five_seconds_at_most() -> None:
    assert [POLICY.request_timeout_ns(s(ttl)) for ttl in (2, 50, 300, 86_400)] == [s(0.2), s(5), s(5), s(5)]


# ---- when renewal is due


@given(ttl_ns=st.integers(s(85), 24 * 3600 * NS_PER_S), lease=IDS)
def test_renewal_is_due_between_60_and_80_percent(ttl_ns: int, lease: LeaseId) -> None:
    """0.70 ± 0.10 of the TTL, for every lease of 85 s or more."""
    due_ns = POLICY.plan(ttl_ns, lease).due_ns
    assert 0.6 * ttl_ns - 2 <= due_ns <= 0.8 * ttl_ns + 2


@given(ttl_ns=TTLS, lease=IDS)
def test_at_least_five_attempts_fit_between_due_and_deadline(ttl_ns: int, lease: LeaseId) -> None:
    """Each with the whole wait for its answer, whatever the TTL and the jitter."""
    plan = POLICY.plan(ttl_ns, lease)
    at_ns, fits = plan.due_ns, 0
    while at_ns + plan.wait_ns(fits) <= plan.deadline_ns:
        at_ns += plan.wait_ns(fits)
        fits += 1
    assert fits >= ATTEMPTS_LEAST


@given(ttl_ns=TTLS, lease=IDS)
def test_a_short_lease_is_spread_as_widely_as_a_long_one(ttl_ns: int, lease: LeaseId) -> None:
    """Earlier, to make room for retries, but not bunched at the latest moment."""
    latest = POLICY.plan(ttl_ns, lease).due_ns / ttl_ns
    assert 0.49 <= latest <= 0.80001


@given(lease=IDS)
def test_the_same_lease_is_due_at_the_same_share_every_time(lease: LeaseId) -> None:
    assert POLICY.plan(s(300), lease) == RenewalPolicy().plan(s(300), lease)


@pytest.mark.parametrize("name", ["L-{}", "{}", "{:08x}", "lease/{}"])
def test_leases_numbered_in_a_row_are_spread_evenly(name: str) -> None:
    """10,000 leases granted together: no tenth of the span gets more than 12 % of them, none less than 8 %."""
    span = [0] * 10
    for number in range(10_000):
        share = POLICY.plan(s(300), LeaseId(name.format(number))).due_ns / s(300)
        span[min(9, int((share - 0.6) / 0.02))] += 1
    assert max(span) <= 1200, span
    assert min(span) >= 800, span


def test_no_jitter_means_exactly_the_fraction() -> None:
    assert RenewalPolicy(jitter_fraction=0).plan(s(300), LeaseId("x")).due_ns == s(210)


@given(lease=IDS)
def test_every_renews_that_often_give_or_take_a_tenth(lease: LeaseId) -> None:
    assert s(54) <= RenewalPolicy(every="1m").plan(s(300), lease).due_ns <= s(66)


@given(lease=IDS, ttl_ns=TTLS, share=st.floats(0.0, 0.25))
def test_saving_has_room_twice(lease: LeaseId, ttl_ns: int, share: float) -> None:
    """Due at TTL − 2 × lead at the latest, so that one whole lead passes before the one in which saving happens."""
    lead = int(ttl_ns * share)
    POLICY.check(ttl_ns, lead)
    assert POLICY.plan(ttl_ns, lease, lead).due_ns <= ttl_ns - 2 * lead


def test_a_lead_that_outgrew_its_ttl_does_not_renew_in_a_loop() -> None:
    """The lease asks for a longer TTL; until it has it, a tenth of the time passes between renewals."""
    assert POLICY.plan(s(60), LeaseId("x"), s(30)).due_ns == s(6)


def test_the_lead_is_the_grace_or_half_as_much_again_as_the_last_save() -> None:
    assert lead_ns(s(5), 0) == s(5)
    assert lead_ns(s(5), s(10)) == s(15)


# ---- waits


def test_waits_double_and_are_capped() -> None:
    plan = POLICY.plan(s(300), LeaseId("x"))
    assert [plan.wait_ns(attempt) / NS_PER_S for attempt in range(6)] == [1, 2, 4, 5, 5, 5]


def test_waits_stay_capped_after_very_many_attempts() -> None:
    assert POLICY.plan(s(86_400), LeaseId("x")).wait_ns(10**9) == s(5)


@given(ttl_ns=TTLS, lease=IDS)
def test_no_wait_is_shorter_than_a_disk_needs(ttl_ns: int, lease: LeaseId) -> None:
    """A first wait below 1/200 of the TTL would only repeat requests that are being answered."""
    assert POLICY.plan(ttl_ns, lease).wait_first_ns >= min(s(1), ttl_ns // 200 - 2, s(0.25) - 2)


# ---- what is refused


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"renew_at_fraction": 0.0}, "renew_at_fraction is 0.0"),
        ({"renew_at_fraction": 1.5}, "renew_at_fraction is 1.5"),
        ({"renew_at_fraction": float("nan")}, "renew_at_fraction is nan"),
        ({"renew_at_fraction": "0.7"}, "renew_at_fraction is '0.7'"),
        ({"renew_at_fraction": 0.9}, "after the holder's own deadline"),
        ({"renew_at_fraction": 0.1}, "reaches back to the start"),
        ({"rate_error": 0.3}, "after the holder's own deadline"),
        ({"rate_error": True}, "rate_error is True"),
        ({"renew_at_fraction": 0.5, "request_timeout_fraction": 0.3}, "no room for 5 attempts"),
        ({"jitter_fraction": -0.1}, "jitter_fraction is -0.1"),
        ({"backoff_first": 0}, "backoff_first is 0"),
        ({"backoff_first": 9}, "more than backoff_max"),
        ({"request_timeout_max": -1}, "request_timeout_max is -1"),
        ({"every": "soon"}, "not a renewal interval"),
        ({"every": 0}, "must be more than zero"),
        ({"max_hold": "-1m"}, "not a maximum hold"),
        ({"mode": "sometimes"}, "'sometimes' is not a way to renew"),
        ({"warn_fraction": 1}, "warn_fraction is 1"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused_when_it_is_made(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refusal:
        RenewalPolicy(**wrong)  # type: ignore[arg-type]
    assert refusal.value.do


def test_what_a_refusal_advises_is_accepted() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        RenewalPolicy(renew_at_fraction=0.9)
    assert refusal.value.do == "Use renew_at_fraction=0.75 or less."
    RenewalPolicy(renew_at_fraction=0.75)


def test_a_lead_over_a_quarter_of_the_ttl_is_refused_with_the_ttl_it_needs() -> None:
    with pytest.raises(InvalidRequest, match=r"20s before the end.*TTL of 1m") as refusal:
        POLICY.check(s(60), s(20))
    assert refusal.value.do == "Ask for a TTL of at least 1m 20s."
    POLICY.check(s(80), s(20))


def test_an_interval_too_long_for_the_ttl_is_refused() -> None:
    policy = RenewalPolicy(every="5m")
    with pytest.raises(InvalidRequest, match="too seldom for a TTL of 5m"):
        policy.check(s(300))
    policy.check(s(600))


def test_a_maximum_hold_below_the_ttl_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="maximum hold of 1m is less than the TTL of 5m"):
        RenewalPolicy(max_hold="1m").check(s(300))


def test_the_mode_may_be_given_as_its_text() -> None:
    policy = RenewalPolicy(mode="always")  # type: ignore[arg-type]
    assert policy.mode is RenewMode.ALWAYS


@pytest.mark.parametrize(("save_s", "ttl_s", "lead_s"), [(0, 30, 0), (1, 30, 0), (2, 30, 0), (4, 30, 6), (4, 600, 6)])
def test_a_lead_counts_from_where_the_grace_is_no_longer_enough(save_s: int, ttl_s: int, lead_s: int) -> None:
    """Up to the grace of its TTL a lease renews like any other; a save of 2 s needs just the 3 s that 30 s have."""
    assert RenewalPolicy.lead_of(s(save_s), s(ttl_s)) == s(lead_s)
