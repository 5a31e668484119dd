"""An idle holder yields as soon as nothing would be lost by it, and not in the pause between two cells."""

from __future__ import annotations

from typing import Any

import pytest

from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord
from sublet.values import (
    GIB,
    Kind,
    LeaseId,
    NodeId,
    RenewMode,
    RequestId,
    Suspend,
    Tier,
    Way,
)
from sublet.wire.orders import End, Held, Notify, Parkable
from tests.unit.office.ledger.bench import ANN, BEN, Bench, device, inventory, seconds

NODE = NodeId("n1")


@pytest.fixture
def bench() -> Bench:
    """One device that can be suspended, and memory to park in."""
    made = Bench(
        inventory(
            "n1",
            device("gpu0", suspend=Suspend.SAME_TYPE),
            device("memory", Kind.MEMORY, 8 * GIB),
        )
    )
    made.is_empty = False
    return made


def idle_lease(bench: Bench, *, ttl_s: float = 300) -> LeaseRecord:
    """Ben's notebook, between two cells."""
    lease = bench.granted(tenant=BEN, ttl_s=ttl_s)
    bench.idle(lease)
    bench.wait(1)
    return lease


def status(lease: LeaseRecord) -> LeaseStatus:
    """As of now."""
    return lease.status


def ann_asks(bench: Bench) -> LeaseRecord:
    return bench.queued(tenant=ANN, lease="ann")


def say_need(bench: Bench, lease: LeaseRecord, *, why: str = "", gib: int = 1, **more: bool) -> None:
    assert lease.epoch is not None
    amount = 0 if why else gib * GIB
    bench.report(Parkable(node=NODE, lease=lease.id, epoch=lease.epoch, amount=amount, why=why, **more))


def back_to_work(bench: Bench, lease: LeaseRecord) -> None:
    assert lease.epoch is not None
    bench.do(cmd.NoteActivity(tenant=lease.tenant, lease=lease.id, epoch=lease.epoch, active=True))


def test_it_is_parked_and_ends_at_once(bench: Bench) -> None:
    """No time passes: notice, parking lease, its agent holds that, end, and the next has the device."""
    lease = idle_lease(bench)
    ann = ann_asks(bench)
    assert status(lease) is LeaseStatus.NOTICED
    say_need(bench, lease)
    assert lease.end is not None
    assert (lease.end.reason, lease.end.way) == (EndReason.PREEMPTED, Way.SUSPEND)
    assert ann.status is LeaseStatus.GRANTED


def test_it_is_not_taken_before_its_agent_holds_the_parking_lease(bench: Bench) -> None:
    """The order to park would find no memory there, and the guests would be told to leave."""
    lease = idle_lease(bench)
    ann_asks(bench)
    bench.obedient = False
    say_need(bench, lease)
    say_need(bench, lease)
    assert status(lease) is LeaseStatus.NOTICED
    bench.obey()
    assert lease.end is not None
    assert lease.end.way is Way.SUSPEND


def test_without_guests_there_is_nothing_to_wait_for(bench: Bench) -> None:
    lease = idle_lease(bench)
    bench.is_empty = True
    ann = ann_asks(bench)
    assert status(lease) is LeaseStatus.ENDED
    assert ann.status is LeaseStatus.GRANTED


@pytest.mark.parametrize(("ttl_s", "save_s", "bound_s"), [(300, 0, 5), (20, 0, 2), (300, 2, 5), (300, 8, 12)])
def test_what_cannot_be_parked_has_the_time_to_save(bench: Bench, ttl_s: float, save_s: float, bound_s: float) -> None:
    """At least the grace, and one and a half times what its last save took."""
    lease = idle_lease(bench, ttl_s=ttl_s)
    assert lease.epoch is not None
    held = Held(node=NODE, lease=lease.id, epoch=lease.epoch, number=1, save_ns=seconds(save_s))
    bench.report(held)
    bench.wait(5)
    ann_asks(bench)
    say_need(bench, lease, why="its driver cannot copy what it has")
    bench.wait(bound_s - 0.1)
    assert status(lease) is LeaseStatus.NOTICED
    bench.wait(0.2)
    assert lease.end is not None
    assert lease.end.way is Way.NOT_SAVED
    assert "not parked: its driver cannot copy" in lease.end.detail


@pytest.mark.parametrize("more", [{"why": "its driver cannot copy what it has"}, {"whole": False}, {"gib": 100}])
def test_what_cannot_be_parked_and_has_nothing_left_to_save_ends_at_once(bench: Bench, more: dict[str, Any]) -> None:
    lease = idle_lease(bench)
    ann = ann_asks(bench)
    say_need(bench, lease, **more)
    assert status(lease) is LeaseStatus.NOTICED
    say_need(bench, lease, **more, safe=True)
    assert lease.end is not None
    assert ann.status is LeaseStatus.GRANTED


def test_what_has_nothing_left_to_save_stays_when_it_works_again(bench: Bench) -> None:
    lease = idle_lease(bench)
    ann_asks(bench)
    say_need(bench, lease, why="its driver cannot copy what it has")
    back_to_work(bench, lease)
    say_need(bench, lease, why="its driver cannot copy what it has", safe=True)
    assert status(lease) is LeaseStatus.ACTIVE


def test_what_would_be_lost_stays_when_it_works_again(bench: Bench) -> None:
    """The one who waits goes on waiting, and gets it when it is idle again."""
    lease = idle_lease(bench)
    ann = ann_asks(bench)
    say_need(bench, lease, why="its driver cannot copy what it has")
    back_to_work(bench, lease)
    assert (lease.status, ann.status) == (LeaseStatus.ACTIVE, LeaseStatus.QUEUED)
    bench.idle(lease)
    bench.wait(0.3)
    assert status(lease) is LeaseStatus.NOTICED


def test_what_is_parked_waits_in_line(bench: Bench) -> None:
    """A cell that begins after the notice takes nothing back."""
    lease = idle_lease(bench)
    ann = ann_asks(bench)
    back_to_work(bench, lease)
    say_need(bench, lease)
    assert lease.end is not None
    assert lease.end.way is Way.SUSPEND
    assert ann.status is LeaseStatus.GRANTED


def test_what_a_session_has_on_the_device_is_given_its_notice(bench: Bench) -> None:
    """Parking does not keep it, so it is not safe; its holder has until the bound to read it back."""
    lease = idle_lease(bench)
    ann_asks(bench)
    say_need(bench, lease, whole=False)
    assert status(lease) is LeaseStatus.NOTICED
    bench.wait(5)
    assert lease.end is not None
    assert lease.end.way is Way.SUSPEND


# ---- its own time


@pytest.mark.parametrize("ttl_s", [2, 30, 300])
def test_its_own_time_runs_out_in_the_same_way(bench: Bench, ttl_s: float) -> None:
    """The agent asks when the deadline is near; its guests live on, and nobody waits for the device."""
    lease = idle_lease(bench, ttl_s=ttl_s)
    bench.wait(ttl_s * 0.8 - 1)
    say_need(bench, lease, expiring=True)
    assert lease.end is not None
    assert (lease.end.reason, lease.end.way) == (EndReason.IDLE, Way.SUSPEND)
    assert lease.parked_under is not None
    assert bench.lease(lease.parked_under).status is LeaseStatus.ACTIVE


def test_where_nothing_can_be_suspended_its_own_time_runs_out_without_more_words() -> None:
    """Its agent asks all the same, without a notice: the lease lasts to its deadline."""
    bench = Bench(inventory("n1", device("gpu0", suspend=Suspend.NONE), device("memory", Kind.MEMORY, 8 * GIB)))
    bench.is_empty = False
    lease = idle_lease(bench)
    bench.wait(280)
    say_need(bench, lease, expiring=True)
    assert (status(lease), lease.notice) == (LeaseStatus.ACTIVE, None)
    bench.wait(60)
    assert lease.end is not None
    assert (lease.end.reason, lease.parked_under) == (EndReason.IDLE, None)


def test_a_silent_holder_is_not_parked(bench: Bench) -> None:
    """Something ran when it was heard last: its program is gone, and nobody would come for it."""
    lease = bench.granted(tenant=BEN)
    bench.wait(280)
    say_need(bench, lease, expiring=True)
    assert (lease.status, lease.parked_under) == (LeaseStatus.ACTIVE, None)


def test_an_end_without_a_parking_lease_says_why(bench: Bench) -> None:
    lease = idle_lease(bench)
    bench.wait(280)
    say_need(bench, lease, gib=80, expiring=True)
    assert status(lease) is LeaseStatus.ACTIVE
    bench.wait(60)
    assert lease.end is not None
    assert (lease.end.reason, lease.end.way) == (EndReason.IDLE, Way.NOT_SAVED)
    assert "not parked: 80GiB of memory would be needed" in lease.end.detail


def test_a_cell_that_begins_while_its_time_runs_out_keeps_the_lease(bench: Bench) -> None:
    """Nobody else waits for the device."""
    lease = idle_lease(bench)
    bench.wait(280)
    bench.obedient = False
    say_need(bench, lease, expiring=True)
    assert status(lease) is LeaseStatus.NOTICED
    back_to_work(bench, lease)
    bench.renew(lease)
    bench.obey()
    assert status(lease) is LeaseStatus.ACTIVE
    assert not [order for order in bench.sent if isinstance(order, End) and order.lease == lease.id]


def test_an_idle_lease_that_is_renewed_while_its_time_runs_out_keeps_what_was_answered(bench: Bench) -> None:
    """A holder that renews always may do so with nothing running."""
    lease = bench.granted(tenant=BEN, ttl_s=300, renew=RenewMode.ALWAYS)
    bench.idle(lease)
    bench.wait(280)
    bench.obedient = False
    say_need(bench, lease, expiring=True)
    assert status(lease) is LeaseStatus.NOTICED
    bench.renew(lease, active=False)
    bench.obey()
    bench.wait(100)
    assert status(lease) is LeaseStatus.ACTIVE
    assert lease.deadline_ns is not None
    assert lease.deadline_ns > bench.now.ns


def test_a_notice_that_is_longer_than_its_time_loses_nothing(bench: Bench) -> None:
    """Ben's spot lease had notice while it worked; it became idle, and is not renewed. Its own deadline comes first."""
    lease = bench.granted(tenant=BEN, tier=Tier.BATCH, ttl_s=20, renew=RenewMode.WHILE_BUSY)
    bench.do(cmd.Revoke(lease=lease.id, reason=EndReason.BUDGET, notice_ns=seconds(60)))
    say_need(bench, lease)
    bench.idle(lease)
    bench.wait(16)
    say_need(bench, lease, expiring=True)
    assert lease.end is not None
    assert lease.end.way is Way.SUSPEND


def test_who_becomes_idle_with_a_notice_does_not_wait_for_its_moment(bench: Bench) -> None:
    """The one who waits has it as soon as nothing runs there any more."""
    lease = bench.granted(tenant=BEN, ttl_s=3600)
    bench.wait(1801)
    bench.renew(lease)
    ann = ann_asks(bench)
    assert lease.notice is not None
    assert not lease.notice.when_safe
    say_need(bench, lease)
    bench.wait(2)
    bench.idle(lease)
    assert status(lease) is LeaseStatus.NOTICED
    bench.wait(0.3)
    assert lease.end is not None
    assert (lease.end.reason, lease.end.way) == (EndReason.FAIR_SHARE, Way.SUSPEND)
    assert ann.status is LeaseStatus.GRANTED


# ---- against going back and forth


def test_the_rest_before_it_yields_is_as_long_as_the_last_move_took(bench: Bench) -> None:
    """Two seconds to suspend it and one to resume it: after the next cell it has three before it may be taken."""
    lease = idle_lease(bench)
    ann = ann_asks(bench)
    bench.obedient = False
    say_need(bench, lease)
    bench.obey_until(End)
    bench.now_ns += seconds(2)
    bench.obey()
    bench.obedient = True
    bench.claim(ann)
    bench.release(ann)
    assert lease.parked_under is not None
    bench.obedient = False
    answer = bench.do(
        cmd.Acquire(
            tenant=BEN,
            lease=LeaseId("again"),
            request_id=RequestId("again"),
            wants=(),
            ttl_ns=seconds(300),
            resume=lease.parked_under,
        )
    ).answer
    assert not isinstance(answer, Exception)
    bench.now_ns += seconds(1)
    bench.obey()
    bench.obedient = True
    again = bench.lease("again")
    assert again.moving_ns == seconds(3)
    bench.idle(again)
    bench.queued(tenant=ANN, lease="ann2")
    bench.wait(2.9)
    assert status(again) is LeaseStatus.ACTIVE
    bench.wait(0.2)
    assert status(again) is LeaseStatus.NOTICED


@pytest.mark.parametrize(
    ("moving_s", "save_s", "rest_s"), [(0, 0, 0.2), (1, 9, 1), (0, 1, 2), (60, 0, 5), (0, 60, 5), (0.01, 0, 0.2)]
)
def test_it_is_bounded_both_ways(moving_s: float, save_s: float, rest_s: float) -> None:
    assert Policy().idle_before_yielding_ns(seconds(moving_s), seconds(save_s)) == seconds(rest_s)


def test_the_guests_are_told_of_the_bound(bench: Bench) -> None:
    """And the office is woken for the moment at which a holder may be taken from, not at its next look."""
    lease = bench.granted(tenant=BEN)
    ann_asks(bench)
    bench.idle(lease)
    bench.wait(0.25)
    notices = [order for order in bench.sent if isinstance(order, Notify) and order.lease == lease.id]
    assert [order.take_at_ns for order in notices] == [seconds(1000) + seconds(0.2) + seconds(5)]
