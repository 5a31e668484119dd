"""The thread that renews by itself, on a clock that the test holds: nothing here sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from sublet.lease import driver as driver_module
from sublet.lease.driver import ConditionWaiter, RenewalDriver
from sublet.lease.holder import Holder
from sublet.lease.policy import RenewalPolicy
from sublet.lease.renewal import RenewalManager, Summary
from sublet.lease.value import Attempt, Done, Outcome
from sublet.values import NS_PER_S, Epoch, LeaseId
from tests.left_open import threads_now
from tests.unit.lease.held import HeldClock, Office

ON_TIME = RenewalPolicy(jitter_fraction=0.0)


@dataclass
class Leap:
    """Waits by moving the clock, and stops the driver when the story is over."""

    clock: HeldClock
    until_ns: int
    stop: Callable[[], None] = lambda: None
    waits: list[int] = field(default_factory=list)
    woken: int = 0

    def wait(self, until_ns: int) -> None:
        self.waits.append(until_ns)
        self.clock.ns = max(self.clock.ns, until_ns)
        if self.clock.ns >= self.until_ns:
            self.stop()

    def wake(self) -> None:
        self.woken += 1


def driven(office: Office, seconds: int, on_summary: Callable[[Summary], None] | None = None) -> RenewalDriver:
    clock = HeldClock()
    manager = RenewalManager(office.renew, clock=clock)
    leap = Leap(clock, seconds * NS_PER_S)
    driver = RenewalDriver(manager, clock=clock, waiter=leap, on_summary=on_summary)
    leap.stop = driver.stop
    holder = Holder(LeaseId("a"), ttl_ns=60 * NS_PER_S, policy=ON_TIME, stamp=manager.stamp)
    holder.held(0, sent_ns=0, granted_ns=60 * NS_PER_S, epoch=Epoch(1, 1))
    holder.begin(0)
    driver.add(holder)
    return driver


def test_it_renews_for_as_long_as_it_runs() -> None:
    office = Office()
    driven(office, 3600).run()
    sent = [attempt.sent_ns / NS_PER_S for batch in office.batches for attempt in batch]
    assert sent[:3] == [42, 84, 126]
    assert 85 <= len(office.asked) <= 86


def test_what_happened_is_told_once_and_quiet_ticks_are_not() -> None:
    told: list[Summary] = []
    office = Office()
    driven(office, 100, told.append).run()
    assert [summary.renewed for summary in told] == [("a",)] * len(office.asked)


def test_a_callback_that_breaks_does_not_let_the_lease_expire(caplog: pytest.LogCaptureFixture) -> None:
    def broken(summary: Summary) -> None:
        raise RuntimeError("a bug in somebody's callback")

    office = Office()
    driver = driven(office, 300, broken)
    driver.run()
    assert len(office.asked) >= 7
    assert "failed in a callback" in caplog.text


def test_a_renew_function_that_breaks_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    office = Office()
    good, calls = office.renew, 0

    def breaks_once(attempts: Sequence[Attempt]) -> list[Outcome]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a bug")
        return good(attempts)

    clock = HeldClock()
    manager = RenewalManager(breaks_once, clock=clock)
    leap = Leap(clock, 50 * NS_PER_S)
    driver = RenewalDriver(manager, clock=clock, waiter=leap)
    leap.stop = driver.stop
    with driver.locked() as same:
        holder = same.register("a", 60.0, ON_TIME)
    driver.run()
    assert calls == 2
    assert holder.deadline_ns is not None
    assert holder.deadline_ns > 60 * NS_PER_S


def test_a_renewal_counts_from_before_it_was_sent() -> None:
    """The office answers after five seconds, and has counted since an instant of them that nobody here knows."""
    clock = HeldClock()

    def slow(attempt: Attempt) -> Outcome:
        clock.ns += 5 * NS_PER_S
        return Done(granted_ns=60 * NS_PER_S)

    driver = RenewalDriver(RenewalManager(Office(answer=slow).renew, clock=clock), clock=clock, waiter=Leap(clock, 0))
    with driver.locked() as manager:
        holder = manager.register("a", 60.0, ON_TIME)
    first_ns = holder.deadline_ns
    assert first_ns is not None
    clock.ns = 42 * NS_PER_S
    driver.step()
    assert holder.deadline_ns == first_ns + 42 * NS_PER_S
    assert clock.ns == 47 * NS_PER_S


def test_nobody_is_kept_from_working_while_the_office_is_slow() -> None:
    """The lock is free while a request is under way; another thread begins work in the middle of it."""
    began = threading.Event()

    def begin_elsewhere(attempt: Attempt) -> Outcome:
        def begin() -> None:
            with driver.change(LeaseId("a")) as holder:
                holder.begin(0)
            began.set()

        thread = threading.Thread(target=begin)
        thread.start()
        thread.join(60.0)
        return Done(granted_ns=60 * NS_PER_S)

    driver = driven(Office(answer=begin_elsewhere), 43)
    driver.run()
    assert began.is_set()


def test_a_change_wakes_the_thread() -> None:
    clock = HeldClock()
    leap = Leap(clock, 0)
    driver = RenewalDriver(RenewalManager(Office().renew, clock=clock), clock=clock, waiter=leap)
    with driver.locked() as manager:
        manager.register("a", 60.0)
    before = leap.woken
    with driver.change(LeaseId("a")) as holder:
        holder.let_go(0)
    assert leap.woken == before + 1


def test_it_looks_at_the_clock_now_and_then_even_with_nothing_to_do() -> None:
    clock = HeldClock(ns=7)
    driver = RenewalDriver(RenewalManager(Office().renew, clock=clock), clock=clock, waiter=Leap(clock, 0))
    assert driver.step() == 7 + 5 * NS_PER_S


def test_starting_and_stopping_twice_is_harmless_and_leaves_no_thread() -> None:
    clock = HeldClock()
    driver = RenewalDriver(RenewalManager(Office().renew, clock=clock), clock=clock)
    for _ in range(2):
        before = threads_now("sublet-renewal")
        driver.start()
        driver.start()
        threads = threads_now("sublet-renewal") - before
        assert [thread.daemon for thread in threads] == [True]
        driver.stop(timeout=60.0)
        driver.stop()
        assert not any(thread.is_alive() for thread in threads)


def test_a_wake_before_the_wait_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait returns at once; with the wake forgotten it would last for an hour."""
    monkeypatch.setattr(driver_module, "WAIT_MAX_NS", 3600 * NS_PER_S)
    clock = HeldClock()
    waiter = ConditionWaiter(clock)
    waiter.wake()
    done = threading.Thread(target=waiter.wait, args=(3600 * NS_PER_S,), daemon=True)
    done.start()
    done.join(60.0)
    assert not done.is_alive()
    assert not waiter._event.is_set(), "a wake that is kept would end every later wait as well"


def test_a_moment_in_the_past_is_not_waited_for() -> None:
    clock = HeldClock(ns=10)
    ConditionWaiter(clock).wait(5)
