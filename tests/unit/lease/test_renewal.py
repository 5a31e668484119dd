"""Many leases at once: who is renewed, when, in which batch, and what a tick says of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from sublet.errors import Disconnected, InvalidRequest, NotFound
from sublet.lease.holder import Holder
from sublet.lease.policy import RenewalPolicy
from sublet.lease.renewal import Renewable, RenewalManager
from sublet.lease.states import LeaseStatus
from sublet.lease.value import (
    Attempt,
    HolderWord,
    Outcome,
    RenewalGranted,
    RenewalRefused,
    RenewalUnknown,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import NS_PER_S, Epoch, LeaseId
from tests.unit.lease.held import HeldClock, Office

ON_TIME = RenewalPolicy(jitter_fraction=0.0)


def managed(office: Office, *leases: str, clock: HeldClock | None = None, **how: int) -> RenewalManager:
    manager = RenewalManager(office.renew, clock=clock or HeldClock(), **how)
    for lease in leases:
        manager.register(lease, 60.0, ON_TIME)
    return manager


# ---- one lease, as the recipes have it


def test_a_lease_registered_by_its_id_is_renewed_when_it_is_due_and_not_before() -> None:
    office = Office()
    manager = managed(office, "a")
    due = manager.tick(0).next_wake
    assert due == pytest.approx(42.0)
    assert due is not None
    assert not manager.tick(due - 0.001)
    assert manager.tick(due).renewed == ("a",)
    assert not manager.tick(due + 1)
    assert office.asked == ["a"]


def test_a_renewal_counts_from_when_it_was_sent() -> None:
    clock = HeldClock()

    def slow(attempts: Sequence[Attempt]) -> list[Outcome]:
        clock.ns += 2 * NS_PER_S
        return [RenewalGranted(granted_ns=60 * NS_PER_S)] * len(attempts)

    manager = RenewalManager(slow, clock=clock)
    holder = manager.register("a", 60.0, ON_TIME)
    clock.ns = 42 * NS_PER_S
    manager.tick()
    assert holder.deadline_ns == 42 * NS_PER_S + ON_TIME.deadline_after_ns(60 * NS_PER_S)


def test_an_office_that_does_not_answer_is_tried_again_until_the_own_deadline_and_not_after() -> None:
    """Z14, and L7: no answer is no loss; after the deadline nothing is sent and nothing comes back."""
    office = Office(answer=lambda attempt: RenewalUnknown(detail="timeout"))
    manager = managed(office, "a")
    now, seen = 0.0, Counter[str]()
    while (wake := manager.tick(now).next_wake) is not None:
        now = wake
        summary = manager.tick(now)
        seen.update(failed=len(summary.failed), unanswered=len(summary.unanswered), expired=len(summary.expired))
        if not summary.next_wake:
            break
    assert seen["failed"] == 0
    assert seen["unanswered"] == len(office.asked) >= 5
    assert seen["expired"] == 1
    assert now == pytest.approx(52.0)
    assert "a" not in manager
    assert not manager.tick(1000.0)


@pytest.mark.parametrize("error", [Disconnected("no answer"), ConnectionRefusedError("refused"), TimeoutError()])
def test_a_request_that_fails_settles_nothing_for_any_of_its_leases(error: Exception) -> None:
    def broken(attempts: Sequence[Attempt]) -> list[Outcome]:
        raise error

    manager = RenewalManager(broken, clock=HeldClock())
    for lease in ("a", "b"):
        manager.register(lease, 60.0, ON_TIME)
    summary = manager.tick(42)
    assert sorted(summary.unanswered) == ["a", "b"]
    assert (summary.failed, summary.expired) == ((), ())
    assert {news.word for news in summary.news} == {HolderWord.JEOPARDY}


def test_a_bug_in_the_renew_function_is_not_taken_for_silence() -> None:
    manager = RenewalManager(lambda attempts: [], clock=HeldClock())
    manager.register("a", 60.0, ON_TIME)
    with pytest.raises(ValueError, match="given 1 attempts and answered 0"):
        manager.tick(42)


def test_a_refused_lease_is_failed_at_once_and_expired_when_its_time_is_over() -> None:
    office = Office(answer=lambda attempt: RenewalRefused(reason=EndReason.FAIR_SHARE))
    manager = managed(office, "a")
    assert manager.tick(42).failed == ("a",)
    assert not manager.tick(44)
    assert manager.tick(52).expired == ("a",)
    assert len(office.asked) == 1


def test_a_lease_that_the_office_has_ended_is_failed_and_expired_in_one() -> None:
    end = LeaseEnd(reason=EndReason.PREEMPTED, at="then")
    manager = managed(Office(answer=lambda attempt: RenewalRefused(reason=end.reason, end=end)), "a")
    summary = manager.tick(42)
    assert (summary.failed, summary.expired) == (("a",), ("a",))
    assert summary.next_wake is None


def test_an_idle_lease_is_not_renewed_and_says_so_once() -> None:
    office = Office()
    manager = RenewalManager(office.renew, clock=HeldClock())
    manager.register("a", 60.0, ON_TIME, busy=False)
    words = [news.word for now in (42, 43, 50, 52) for news in manager.tick(now).news]
    assert words == [HolderWord.IDLE, HolderWord.WARNING, HolderWord.OVER]
    assert office.asked == []


def test_an_idleness_that_the_office_finds_is_not_a_failure() -> None:
    manager = managed(Office(answer=lambda attempt: RenewalRefused(reason=EndReason.IDLE)), "a")
    with manager.change(LeaseId("a")) as holder:
        holder.finish(0)
        holder.use(RenewalPolicy(jitter_fraction=0.0, mode="always"))  # type: ignore[arg-type]
    summary = manager.tick(42)
    assert summary.failed == ()
    assert [news.word for news in summary.news] == [HolderWord.IDLE]


def test_work_that_begins_after_the_renewal_point_is_renewed_on_the_next_tick() -> None:
    office = Office()
    manager = RenewalManager(office.renew, clock=HeldClock())
    manager.register("a", 60.0, ON_TIME, busy=False)
    manager.tick(42)
    with manager.change(LeaseId("a")) as holder:
        holder.begin(48 * NS_PER_S)
    assert manager.tick(48).renewed == ("a",)


# ---- lease objects


class Lease:
    """What a program holds: knows its holder, and how to send."""

    def __init__(self, clock: HeldClock) -> None:
        self.clock = clock
        self.sent: list[Attempt] = []
        self.error: Exception | None = None
        self._holder = Holder(LeaseId("L-1"), ttl_ns=60 * NS_PER_S, policy=ON_TIME, stamp=str)
        self._holder.held(0, sent_ns=0, granted_ns=60 * NS_PER_S, epoch=Epoch(1, 7))
        self._holder.begin(0)

    @property
    def holder(self) -> Holder:
        return self._holder

    def send_renewal(self, attempt: Attempt) -> Outcome:
        self.sent.append(attempt)
        if self.error is not None:
            raise self.error
        return RenewalGranted(granted_ns=60 * NS_PER_S)


def test_a_lease_object_is_registered_as_it_is_and_sends_its_own_renewal() -> None:
    clock = HeldClock()
    lease = Lease(clock)
    renewable: Renewable = lease
    manager = RenewalManager(clock=clock)
    manager.register(renewable, RenewalPolicy(every=10, jitter_fraction=0.0))
    assert manager.tick(10).renewed == ("L-1",)
    assert [(attempt.epoch, attempt.sent_ns) for attempt in lease.sent] == [(Epoch(1, 7), 10 * NS_PER_S)]


def test_a_lease_object_whose_request_fails_is_unanswered() -> None:
    clock = HeldClock()
    lease = Lease(clock)
    lease.error = Disconnected("no answer")
    manager = RenewalManager(clock=clock)
    manager.register(lease)
    assert manager.tick(42).unanswered == ("L-1",)
    assert lease.holder.status is LeaseStatus.JEOPARDY


def test_a_lease_that_waits_in_line_can_be_registered_before_it_is_held() -> None:
    clock, office = HeldClock(), Office()
    manager = RenewalManager(office.renew, clock=clock)
    holder = manager.add(Holder(LeaseId("L-2"), ttl_ns=60 * NS_PER_S, policy=ON_TIME, stamp=str))
    assert manager.tick(100).next_wake is None
    with manager.change(LeaseId("L-2")) as same:
        assert same is holder
        same.held(100 * NS_PER_S, sent_ns=100 * NS_PER_S, granted_ns=60 * NS_PER_S, epoch=Epoch(1, 1))
        same.begin(100 * NS_PER_S)
    assert manager.tick(142).renewed == ("L-2",)


# ---- bad input


def test_what_cannot_be_registered_says_why() -> None:
    clock = HeldClock(ns=100 * NS_PER_S)
    manager = RenewalManager(Office().renew, clock=clock)
    with pytest.raises(InvalidRequest, match="without its expiry"):
        manager.register("a", ON_TIME)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match=r"expired 40\.0 s ago"):
        manager.register("a", 60.0)
    with pytest.raises(InvalidRequest, match="given twice"):
        manager.register(Lease(clock), 60.0)  # type: ignore[call-overload]
    manager.register("a", 160.0)
    with pytest.raises(InvalidRequest, match="registered already"):
        manager.register("a", 160.0)
    with pytest.raises(InvalidRequest, match="no thread could send renewals"):
        RenewalManager(clock=clock).register("a", 160.0)
    with pytest.raises(InvalidRequest, match="batch_max is 0"):
        RenewalManager(clock=clock, batch_max=0)
    with pytest.raises(NotFound, match="not registered here"), manager.change(LeaseId("z")):
        pass


def test_unregistering_is_harmless_twice_and_stops_everything() -> None:
    office = Office()
    manager = managed(office, "a")
    manager.unregister(LeaseId("a"))
    manager.unregister(LeaseId("a"))
    assert manager.tick(1000.0).next_wake is None
    assert office.asked == []


def test_an_outcome_for_a_lease_that_was_dropped_meanwhile_is_counted_and_changes_nothing() -> None:
    manager = managed(Office(), "a")
    batch = manager.collect(42 * NS_PER_S)
    manager.unregister(LeaseId("a"))
    assert not manager.record_outcomes(batch, [RenewalGranted(granted_ns=NS_PER_S)], 42 * NS_PER_S)
    assert manager.counts.late == 1


# ---- many


def test_what_is_due_together_goes_in_one_request_and_in_no_more_than_the_limit() -> None:
    office = Office()
    manager = managed(office, *(f"L-{n}" for n in range(250)), batch_max=100)
    summary = manager.tick(42)
    assert [len(batch) for batch in office.batches] == [100, 100, 50]
    assert len(summary.renewed) == 250
    assert (manager.counts.batches, manager.counts.batches_full) == (3, 2)


def test_the_most_urgent_go_first() -> None:
    office = Office()
    manager = RenewalManager(office.renew, clock=HeldClock(), batch_max=2)
    for lease, expiry in (("late", 104.0), ("soon", 100.0), ("middle", 102.0)):
        manager.register(lease, expiry, ON_TIME)
    manager.tick(74)
    assert office.asked[:2] == ["soon", "middle"]


def test_a_batch_waits_as_long_as_its_most_patient_attempt() -> None:
    manager = managed(Office(answer=lambda attempt: RenewalUnknown()), "old")
    manager.tick(42)
    manager.tick(43)
    manager.register("new", 60.0, RenewalPolicy(every=1, jitter_fraction=0))
    batch = manager.collect(44 * NS_PER_S)
    assert {attempt.lease for attempt in batch.attempts} == {"old", "new"}
    assert batch.timeout_ns == max(attempt.timeout_ns for attempt in batch.attempts)


@pytest.mark.parametrize("count", [100, 10_000])
def test_the_work_of_a_tick_grows_with_what_is_due_and_not_with_what_is_registered(count: int) -> None:
    """Ten thousand leases, over three lives: every one renewed each time, and nothing looked at in between."""
    office = Office()
    manager = RenewalManager(office.renew, clock=HeldClock())
    for n in range(count):
        manager.register(f"L-{n}", 60.0)
    now = 0.0
    while now < 120.0:
        now += 0.5
        summary = manager.tick(now)
        assert not summary.expired
        assert not summary.failed
    per_lease = Counter(office.asked)
    assert len(per_lease) == count
    assert {*per_lease.values()} <= {2, 3, 4}
    assert len(manager._heap) <= 2 * count + 1001
    busiest = Counter(int(attempt.sent_ns / NS_PER_S) for batch in office.batches for attempt in batch).most_common(1)
    assert busiest[0][1] <= max(20, count * 0.15), "renewals come in a herd"


def test_an_outage_of_ten_thousand_leases_costs_no_lease_that_could_be_saved() -> None:
    """L11: the office is away for 10 s of a minute's lease, and all of them are renewed when it is back."""
    away = False
    office = Office(answer=lambda attempt: RenewalUnknown() if away else RenewalGranted(granted_ns=60 * NS_PER_S))
    manager = managed(office, *(f"L-{n}" for n in range(10_000)))
    now, renewed, expired = 0.0, 0, 0
    while now < 60.0:
        now += 0.25
        away = 35.0 < now < 45.0
        summary = manager.tick(now)
        renewed += len(summary.renewed)
        expired += len(summary.expired)
    assert expired == 0
    assert renewed == 10_000


def test_a_lease_that_was_changed_often_is_looked_at_once() -> None:
    """What is left in the heap from before a change is passed over."""
    looked_at: list[int] = []

    class Watched(Holder):
        __slots__ = ()

        def tick(self, now_ns: int) -> None:
            looked_at.append(now_ns)
            Holder.tick(self, now_ns)

    holder = Watched(LeaseId("a"), ttl_ns=60 * NS_PER_S, policy=ON_TIME, stamp=str)
    holder.held(0, sent_ns=0, granted_ns=60 * NS_PER_S, epoch=Epoch(1, 1))
    manager = RenewalManager(Office().renew, clock=HeldClock())
    manager.add(holder)
    for _ in range(50):
        with manager.change(LeaseId("a")):
            pass
    manager.tick(42)
    assert len(looked_at) == 1


def test_changing_leases_over_and_over_does_not_grow_the_heap() -> None:
    manager = managed(Office(), *(f"L-{n}" for n in range(10)), batch_max=10)
    for _ in range(1000):
        with manager.change(LeaseId("L-3")):
            pass
    assert len(manager._heap) <= 2 * 10 + 10


def test_however_often_leases_are_changed_each_is_renewed_when_it_is_due() -> None:
    """What a change leaves behind is thrown away in between, and nobody's moment is lost with it."""

    def renewed_at(changes: int) -> dict[str, float]:
        manager = RenewalManager(Office().renew, clock=HeldClock(), batch_max=1)
        for n in range(40):
            manager.register(f"L-{n}", 30.0 + 7 * n % 40, ON_TIME)
        chance = random.Random(changes)
        for _ in range(changes):
            with manager.change(LeaseId(f"L-{chance.randrange(40)}")):
                pass
            manager.tick(1.0)
        found: dict[str, float] = {}
        now = 10.0
        while len(found) < 40:
            now += 0.25
            while batch := manager.tick(now).renewed:
                found |= {lease: now for lease in batch if lease not in found}
            assert now < 60
        return found

    undisturbed = renewed_at(0)
    assert all(renewed_at(changes) == undisturbed for changes in range(100, 120))
