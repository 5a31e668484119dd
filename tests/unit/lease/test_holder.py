"""The holder against an office on another clock: whatever is lost, late or repeated, the holder stops first.

The stories in tests/transcripts/holder tell each rule once; here they are tried in every order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import LeaseNotActive
from sublet.lease.holder import HELD_STATES, Holder
from sublet.lease.policy import RenewalPolicy
from sublet.lease.states import LeaseStatus
from sublet.lease.value import (
    Attempt,
    HolderWord,
    Outcome,
    RenewalGranted,
    RenewalRefused,
    RenewalUnknown,
    rfc3339,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import NS_PER_S, Epoch, LeaseId, RenewMode

TTL_NS = 60 * NS_PER_S
LEASE = LeaseId("L-1")
ALWAYS = RenewalPolicy(mode=RenewMode.ALWAYS)


def s(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def holder_of(policy: RenewalPolicy = ALWAYS, *, ttl_ns: int = TTL_NS) -> Holder:
    holder = Holder(LEASE, ttl_ns=ttl_ns, policy=policy, stamp=rfc3339)
    holder.held(0, sent_ns=0, granted_ns=ttl_ns, epoch=Epoch(1, 1))
    return holder


@dataclass
class Office:
    """The dumb other side: it grants while the lease lives, on its own clock, and never brings one back."""

    expires_ns: float
    granted: int = 0
    ended: bool = False

    def renew(self, now_ns: float) -> Outcome:
        self.pass_time(now_ns)
        if self.ended:
            end = LeaseEnd(reason=EndReason.EXPIRED, at="then")
            return RenewalRefused(reason=EndReason.EXPIRED, end=end)
        self.granted += 1
        self.expires_ns = max(self.expires_ns, now_ns + TTL_NS)
        return RenewalGranted(granted_ns=TTL_NS)

    def pass_time(self, now_ns: float) -> None:
        self.ended = self.ended or now_ns >= self.expires_ns


@dataclass
class Wire:
    """Loses, delays and repeats what it carries."""

    rng: random.Random
    lossy: float
    under_way: list[tuple[float, bool, Attempt, Outcome | None]] = field(default_factory=list)
    """(arrives, at the office?, attempt, outcome)"""

    def carry(self, now: float, attempt: Attempt, outcome: Outcome | None = None) -> None:
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            if self.rng.random() >= self.lossy:
                delay = self.rng.choice([0.001, 0.01, 0.5, 3.0, 20.0, 90.0]) * NS_PER_S * self.rng.random()
                self.under_way.append((now + delay, outcome is None, attempt, outcome))

    def arriving(self, now: float) -> list[tuple[float, bool, Attempt, Outcome | None]]:
        due = sorted((item for item in self.under_way if item[0] <= now), key=lambda item: item[0])
        self.under_way = [item for item in self.under_way if item[0] > now]
        return due


@cache
def walk(seed: int) -> frozenset[LeaseStatus | HolderWord]:
    """One life on a bad wire, with L6, L7 and L8 checked at every step; returns what it came by."""
    rng = random.Random(seed)
    rate = rng.choice([0.95, 0.96, 1.0, 1.05])  # of the holder's clock, while the office's runs at 1
    wire, office = Wire(rng, lossy=rng.choice([0.0, 0.2, 0.6, 0.95])), Office(expires_ns=TTL_NS)
    holder = holder_of()
    met: set[LeaseStatus | HolderWord] = set()
    true_ns, over = 0.0, False
    for _ in range(400):
        true_ns += rng.choice([0.05, 0.5, 2.0, 10.0]) * rng.random() * NS_PER_S
        for arrives, at_office, attempt, outcome in wire.arriving(true_ns):
            if at_office:
                wire.carry(arrives, attempt, office.renew(arrives))
                continue
            assert outcome is not None
            before_ns = holder.deadline_ns
            holder.take(attempt, outcome, int(true_ns * rate))
            assert holder.deadline_ns is not None
            assert before_ns is not None
            assert holder.deadline_ns >= before_ns, f"seed {seed}: an answer moved the deadline back"
        office.pass_time(true_ns)
        now_ns = int(true_ns * rate)
        holder.tick(now_ns)
        if holder.attempt_due(now_ns):
            wire.carry(true_ns, holder.attempt(now_ns))
        if holder.may_start(now_ns):
            assert not office.ended, f"seed {seed}: the holder would start work on a lease that is over"
        assert holder.deadline_ns is not None
        assert holder.deadline_ns / rate <= office.expires_ns + 1, f"seed {seed}: L6"
        assert not (over and holder.status in HELD_STATES), f"seed {seed}: back from the end"
        over = over or holder.status not in HELD_STATES
        assert (holder.next_wake_ns() is None) == over, f"seed {seed}"
        met |= {holder.status, *(news.word for news in holder.take_news())}
    return frozenset(met)


SEEDS = range(150)


def test_the_holder_stops_before_the_office_whatever_the_wire_does() -> None:
    """With clocks that run apart by up to the 5 % that were promised. The walks come by every state that there is: they
    would prove little if none came to jeopardy, recovered, or heard of the end."""
    met = set[LeaseStatus | HolderWord]()
    for seed in SEEDS:
        try:
            met |= walk(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert {LeaseStatus.ACTIVE, LeaseStatus.JEOPARDY, LeaseStatus.ENDING, LeaseStatus.ENDED} <= met
    assert {HolderWord.JEOPARDY, HolderWord.RECOVERED, HolderWord.WARNING, HolderWord.OVER} <= met


ATTEMPT_ORDERS = st.permutations(range(4))


@given(order=ATTEMPT_ORDERS)
def test_answers_in_any_order_come_to_the_same_deadline(order: list[int]) -> None:
    """The last one sent decides, whenever its answer comes."""
    holder = holder_of()
    attempts = [holder.attempt(s(35) + s(number)) for number in range(4)]
    for number in order:
        holder.take(attempts[number], RenewalGranted(granted_ns=TTL_NS), s(40))
    assert holder.deadline_ns == s(38) + ALWAYS.deadline_after_ns(TTL_NS)
    assert holder.status is LeaseStatus.ACTIVE


@given(order=ATTEMPT_ORDERS, lost=st.sets(st.integers(0, 3), max_size=3))
def test_losing_some_answers_loses_no_lease(order: list[int], lost: set[int]) -> None:
    """Z14: an error is not a loss. One answer is enough, and the others leave no trace."""
    holder = holder_of()
    attempts = [holder.attempt(s(35) + s(number)) for number in range(4)]
    for number in order:
        outcome: Outcome = RenewalUnknown() if number in lost else RenewalGranted(granted_ns=TTL_NS)
        holder.take(attempts[number], outcome, s(40))
    latest = max(set(range(4)) - lost)
    assert holder.deadline_ns == s(35 + latest) + ALWAYS.deadline_after_ns(TTL_NS)
    assert holder.status is LeaseStatus.ACTIVE


def test_silence_alone_changes_nothing_before_the_deadline() -> None:
    holder = holder_of()
    deadline_ns = holder.deadline_ns
    now_ns = 0
    while True:
        wake_ns = holder.next_wake_ns()
        if wake_ns is None:
            break
        now_ns = max(now_ns, wake_ns)
        holder.tick(now_ns)
        if holder.attempt_due(now_ns):
            assert holder.deadline_ns == deadline_ns
            holder.take(holder.attempt(now_ns), RenewalUnknown(), now_ns)
            assert holder.status is LeaseStatus.JEOPARDY
    assert now_ns == deadline_ns
    assert holder.end is not None
    assert (holder.status, holder.end.reason) == (LeaseStatus.ENDING, EndReason.EXPIRED)


def test_five_attempts_are_really_made_before_the_deadline() -> None:
    """From the shortest lease to the longest, with an office that never answers."""
    for ttl in (2, 30, 120, 300, 3600):
        holder, sent = holder_of(ttl_ns=s(ttl)), 0
        while (wake_ns := holder.next_wake_ns()) is not None:
            holder.tick(wake_ns)
            if holder.attempt_due(wake_ns):
                holder.attempt(wake_ns)
                sent += 1
        assert sent >= 5, ttl


@given(
    outcome=st.sampled_from(
        [RenewalGranted(granted_ns=TTL_NS), RenewalRefused(reason=EndReason.QUOTA), RenewalUnknown()]
    )
)
def test_nothing_brings_a_lease_back(outcome: Outcome) -> None:
    """L8 on the holder's side, for the answer to a request that was sent in time."""
    holder = holder_of()
    attempt = holder.attempt(s(40))
    holder.tick(s(60))
    assert not holder.take(attempt, outcome, s(61))
    assert holder.status is LeaseStatus.ENDING
    assert not holder.held(s(61), sent_ns=s(50), granted_ns=TTL_NS, epoch=Epoch(1, 9))
    with pytest.raises(LeaseNotActive, match="it is ending"):
        holder.attempt(s(62))


@pytest.mark.parametrize("status", [LeaseStatus.QUEUED, LeaseStatus.GRANTED, LeaseStatus.ENDING, LeaseStatus.ENDED])
def test_nothing_starts_and_nothing_is_renewed_where_nothing_is_held(status: LeaseStatus) -> None:
    holder = Holder(LEASE, ttl_ns=TTL_NS, stamp=rfc3339)
    holder.status = status
    assert not holder.may_start(0, 0)
    assert holder.remaining_ns(0) == 0
    assert holder.next_wake_ns() is None
    with pytest.raises(LeaseNotActive, match=f"it is {status}"):
        holder.attempt(0)


def test_overlapping_calls_count_once_and_each_answered_moment_is_reported_once() -> None:
    holder = holder_of()
    for moment, begins in [(0, True), (2, True), (5, False), (8, False), (10, True)]:
        (holder.begin if begins else holder.finish)(s(moment))
    first = holder.attempt(s(11))
    assert first.busy_ns == s(9)
    holder.take(first, RenewalUnknown(), s(12))
    second = holder.attempt(s(12))
    assert second.busy_ns == s(10), "what stayed unanswered is carried again"
    holder.take(second, RenewalGranted(granted_ns=TTL_NS), s(12))
    holder.take(first, RenewalGranted(granted_ns=TTL_NS), s(13))
    assert holder.attempt(s(15)).busy_ns == s(3)


@pytest.mark.parametrize("reason", [EndReason.IDLE, EndReason.QUOTA, EndReason.FAIR_SHARE])
def test_busy_time_that_came_with_a_refused_renewal_is_not_reported_again(reason: EndReason) -> None:
    """The office refuses to renew and counts what was done: reported twice, it would be on the bill twice."""
    holder = holder_of()
    holder.begin(s(0))
    holder.finish(s(8))
    attempt = holder.attempt(s(10))
    assert attempt.busy_ns == s(8)
    holder.take(attempt, RenewalRefused(reason=reason), s(11))
    holder.begin(s(12))
    assert holder.attempt(s(15)).busy_ns == s(3)


def test_finishing_what_did_not_begin_is_a_bug_that_shows() -> None:
    with pytest.raises(ValueError, match=r"finish\(\) without begin"):
        holder_of().finish(0)


def test_idleness_is_said_once_and_is_the_reason_of_the_end() -> None:
    holder = holder_of(RenewalPolicy())
    said = []
    while (wake_ns := holder.next_wake_ns()) is not None:
        holder.tick(wake_ns)
        assert not holder.attempt_due(wake_ns)
        said += [news.word for news in holder.take_news()]
    assert said == [HolderWord.IDLE, HolderWord.WARNING, HolderWord.OVER]
    assert holder.end is not None
    assert holder.end.reason is EndReason.IDLE


@given(cap=st.integers(60, 900))
def test_a_lease_is_never_held_beyond_the_cap(cap: int) -> None:
    """And it is used to within one TTL of it."""
    holder = holder_of(RenewalPolicy(mode=RenewMode.ALWAYS, max_hold=cap))
    last_ns = 0
    while (wake_ns := holder.next_wake_ns()) is not None:
        holder.tick(wake_ns)
        last_ns = wake_ns
        if holder.attempt_due(wake_ns):
            holder.take(holder.attempt(wake_ns), RenewalGranted(granted_ns=TTL_NS), wake_ns)
    assert s(cap) - TTL_NS - s(15) <= last_ns <= s(cap)


@given(needs=st.integers(0, 60), at=st.integers(0, 60))
def test_in_jeopardy_exactly_what_fits_may_start(needs: int, at: int) -> None:
    holder = holder_of()
    holder.take(holder.attempt(s(1)), RenewalUnknown(), s(1))
    deadline_ns = holder.deadline_ns
    assert deadline_ns is not None
    now_ns = s(1) + s(at)
    assert holder.may_start(now_ns, s(needs)) == (now_ns < deadline_ns and now_ns + s(needs) <= deadline_ns)


def test_another_policy_never_moves_the_deadline_out() -> None:
    holder = holder_of()
    before = holder.deadline_ns
    holder.use(RenewalPolicy(rate_error=0.0))
    assert holder.deadline_ns == before
    holder.use(RenewalPolicy(rate_error=0.08))
    assert holder.deadline_ns is not None
    assert before is not None
    assert holder.deadline_ns < before


def test_a_moment_is_written_for_people() -> None:
    assert rfc3339(1_795_243_086_250_000_000) == "2026-11-21T06:38:06.250Z"


# ---- saving that takes long


def renewed(holder: Holder, now_ns: int, save_s: float) -> Attempt:
    """A renewal, and its answer with what the last save took."""
    attempt = holder.attempt(now_ns)
    granted_ns = attempt.ttl_ns or holder.ttl_ns
    assert holder.take(attempt, RenewalGranted(granted_ns=granted_ns, save_ns=s(save_s)), now_ns)
    return attempt


def test_a_lead_over_a_quarter_of_the_ttl_raises_the_ttl_asked_for() -> None:
    """From the answer on that says so; it is told once, and stays when saves get shorter again."""
    holder = holder_of(ttl_ns=s(300))
    assert renewed(holder, s(10), 100).ttl_ns is None
    assert (holder.lead_ns, holder.requested_ns) == (s(150), s(600))
    assert [one.word for one in holder.take_news()] == [HolderWord.LONGER]
    assert (holder.next_wake_ns() or 0) <= s(40), "it is asked for soon"
    attempt = renewed(holder, s(40), 100)
    assert (attempt.ttl_ns, attempt.lead_ns) == (s(600), s(150))
    assert holder.take_news() == ()
    assert (holder.next_wake_ns() or 0) <= s(40 + 600 - 2 * 150)
    renewed(holder, s(50), 1)
    attempt = renewed(holder, s(60), 1)
    assert (attempt.ttl_ns, attempt.lead_ns, holder.requested_ns) == (s(600), 0, s(600))


def test_a_save_within_the_grace_changes_nothing() -> None:
    holder = holder_of(ttl_ns=s(300))
    before = holder._plan
    attempt = renewed(holder, 0, 3) if before is None else renewed(holder, s(1), 3)
    assert (attempt.lead_ns, holder.lead_ns, holder.requested_ns) == (0, 0, s(300))
    assert holder._plan == before
    assert holder.take_news() == ()


def test_a_lead_below_a_quarter_only_moves_the_renewal() -> None:
    holder = holder_of(ttl_ns=s(300))
    renewed(holder, s(10), 40)
    assert (holder.lead_ns, holder.requested_ns) == (s(60), s(300))
    assert (holder.next_wake_ns() or 0) <= s(10 + 300 - 120)
    assert holder.take_news() == ()


def test_no_more_is_asked_for_than_it_may_be_held() -> None:
    policy = RenewalPolicy(mode=RenewMode.ALWAYS, max_hold="7m")
    holder = holder_of(policy, ttl_ns=s(300))
    renewed(holder, s(10), 100)
    assert holder.requested_ns == s(420)
