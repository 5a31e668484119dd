"""Reservations: devices that are free at the start, lent in between, and everybody's at the end."""

from __future__ import annotations

import json

import pytest

from sublet.errors import InvalidRequest, NotFound
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Done, Granted
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.explain import ReasonKind
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import GroupRecord, LeaseRecord, Now, Quota, ReservationRecord, Span
from sublet.office.ledger.state import State
from sublet.values import (
    GIB,
    GroupId,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    ReservationId,
    ResourceId,
    TenantId,
    Tier,
)
from sublet.wire.orders import Device, Failed, Fault
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, cores, device, gpu, inventory, seconds

COURSE, LAB = GroupId("course"), GroupId("lab")
LAB_HOUR = ReservationId("lab-hour")
CLEO = TenantId("cleo")
POLICY = Policy()
START, END = 1600, 4000
"""Of the reservation, by the clock of the bench in seconds."""
LEAD = 90
"""Notice and clearing."""
KEEP = 600
"""For so long after its start nothing of it is lent."""


def office(gpus: int = 3, policy: Policy = POLICY, **how: object) -> Bench:
    """Ann and Cleo are in the course, Ben is in the lab."""
    bench = Bench(gpus=gpus, policy=policy, **how)  # type: ignore[arg-type]
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    for name, tenants in ((COURSE, (ANN, CLEO)), (LAB, (BEN,))):
        bench.do(cmd.SetGroup(group=GroupRecord(id=name)))
        for tenant in tenants:
            bench.do(cmd.SetTenant(tenant=tenant, group=name))
    return bench


def span(bench: Bench, start_s: float = START, end_s: float = END) -> Span:
    ahead_ns = bench.now.wall_ns - bench.now.ns
    return Span(seconds(start_s) + ahead_ns, seconds(end_s) + ahead_ns)


def reserve(
    bench: Bench, gpus: int = 2, group: GroupId = COURSE, name: str = LAB_HOUR, model: str | None = None, **when: float
) -> object:
    spans = (span(bench, **when),)
    record = ReservationRecord(id=ReservationId(name), group=group, gpus=gpus, spans=spans, model=model)
    return bench.do(cmd.SetReservation(reservation=record)).answer


def kept(bench: Bench) -> list[str]:
    return [str(resource) for resource in sorted(bench.state.reserved_by)]


def busy(bench: Bench, tenant: TenantId, *, tier: Tier = Tier.INTERACTIVE, count: int = 1) -> LeaseRecord:
    return bench.granted(gpu(8, count=count), tenant=tenant, tier=tier, ttl_s=24 * 3600)


def status(lease: LeaseRecord) -> LeaseStatus:
    """As of now."""
    return lease.status


def began(bench: Bench) -> list[int]:
    return [event.ready for event in bench.events if isinstance(event, ev.ReservationBegan)]


# ---- which devices


def test_a_device_that_guests_of_tenants_cannot_use_is_kept_for_no_group_of_theirs() -> None:
    """It was tried out, and only guests of tenant local could. That tenant is in the default group."""
    walled = Device(id=ResourceId("n1/a"), kind=Kind.GPU, capacity=16 * GIB, walled_trouble="cuInit said 100")
    bench = Bench(inventory("n1", walled, device("n1/b"), device("n1/c")))
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    assert "3 GPUs are more than there are (2) for guests of tenants" in str(refused(bench, gpus=3))
    reserve(bench, 2)
    reserve(bench, 1, group=DEFAULT_GROUP, name="mine")
    bench.wait(START - LEAD - 1000)
    keeps = {name: reserved.resources for name, reserved in bench.state.books.reserved.items()}
    assert keeps == {LAB_HOUR: ("n1/b", "n1/c"), "mine": ("n1/a",)}


# ---- the start


def test_devices_are_verified_free_at_the_start_and_nobody_else_gets_them() -> None:
    """Interactive leases within their minimum run leave too, with notice and in time; the third device stays."""
    bench = office()
    others = [busy(bench, BEN) for _ in range(3)]
    reserve(bench)
    bench.wait(START - LEAD - 1 - 1000)
    assert not kept(bench)
    bench.wait(1)
    assert len(kept(bench)) == 2
    noticed = [lease for lease in others if lease.status is LeaseStatus.NOTICED]
    assert len(noticed) == 2
    for lease in noticed:
        assert lease.notice is not None
        assert lease.notice.take_at_ns == seconds(START) - POLICY.reserved_clear_ns
    waiting = bench.queued(tenant=BEN)
    bench.wait(LEAD - 61)
    assert all(lease.status is LeaseStatus.NOTICED for lease in noticed)
    bench.wait(1)
    assert all(lease.end is not None and lease.end.reason is EndReason.PREEMPTED for lease in noticed)
    assert "reserved" in (noticed[0].end.detail if noticed[0].end else "")
    bench.wait(60)
    assert began(bench) == [2]
    assert status(waiting) is LeaseStatus.QUEUED, "the devices are free, and kept"
    for tenant in (ANN, CLEO):
        bench.granted(tenant=tenant)
    assert bench.state.snapshot() == bench.folded().snapshot()


def test_the_group_keeps_its_own_leases_and_they_count() -> None:
    """A device that the group has already is the first to be kept; idle ones and spot go before work of others."""
    bench = office(gpus=4)
    mine, idle, spot, work = busy(bench, ANN), busy(bench, BEN), busy(bench, BEN, tier=Tier.SPOT), busy(bench, BEN)
    bench.idle(idle)
    reserve(bench, gpus=3)
    bench.wait(START - 1000)
    assert status(mine) is LeaseStatus.ACTIVE
    assert status(work) is LeaseStatus.ACTIVE
    assert status(idle) is LeaseStatus.ENDED
    assert status(spot) is LeaseStatus.ENDED
    assert began(bench) == [3]


def test_a_gang_that_has_to_leave_one_device_leaves_its_others_as_well() -> None:
    bench = office(gpus=4)
    gang, single = busy(bench, BEN, count=2), [busy(bench, BEN), busy(bench, BEN)]
    bench.wait(1)
    reserve(bench, gpus=2)
    bench.wait(START - 1000)
    ended = {lease.id for lease in (gang, *single) if lease.status is LeaseStatus.ENDED}
    assert ended in ({gang.id}, {lease.id for lease in single}), "as few as will do"


def test_who_claims_a_grant_on_a_reserved_device_has_notice_at_once() -> None:
    bench = office(gpus=1)
    first = busy(bench, ANN)
    waiting = bench.queued(tenant=BEN, ttl_s=3600)
    reserve(bench, gpus=1)
    bench.at(START - LEAD - 1)
    bench.release(first)
    assert status(waiting) is LeaseStatus.GRANTED
    bench.wait(2)
    assert kept(bench)
    bench.claim(waiting)
    assert status(waiting) is LeaseStatus.NOTICED
    bench.wait(START - bench.now_ns / 1e9)
    assert began(bench) == [1]


def test_a_promise_on_a_reserved_device_is_dropped_and_its_victim_has_notice_for_the_reservation() -> None:
    bench = office(gpus=1, policy=Policy(min_run_batch_ns=seconds(60)))
    victim = busy(bench, BEN, tier=Tier.BATCH)
    bench.at(START - LEAD - 10)
    waiting = bench.queued(tenant=LOCAL)
    assert waiting.promise
    reserve(bench, gpus=1)
    bench.wait(10)
    assert not waiting.promise
    assert victim.notice is not None
    assert victim.notice.reservation == LAB_HOUR
    bench.wait(LEAD)
    assert began(bench) == [1]


# ---- what is not used


def test_what_the_group_does_not_use_is_lent_as_spot_and_comes_back_at_once() -> None:
    """Not to other tiers; not in the first minutes; and within its minimum run, whatever tier asks for it back."""
    bench = office(gpus=1)
    reserve(bench, gpus=1)
    bench.wait(START - 1000)
    batch, spot = bench.queued(tenant=BEN, tier=Tier.BATCH), bench.queued(tenant=BEN, tier=Tier.SPOT, ttl_s=3600)
    bench.wait(KEEP - 1)
    assert status(spot) is LeaseStatus.QUEUED
    bench.wait(1)
    assert status(spot) is LeaseStatus.GRANTED
    assert status(batch) is LeaseStatus.QUEUED
    bench.claim(spot)
    assert status(spot) is LeaseStatus.ACTIVE
    mine = bench.queued(tenant=ANN, tier=Tier.SPOT)
    assert status(spot) is LeaseStatus.NOTICED, "it is lent, so it gives way to the group in any tier"
    bench.wait(5)
    assert status(mine) is LeaseStatus.GRANTED
    bench.claim(mine)
    bench.wait(10)
    assert status(mine) is LeaseStatus.ACTIVE


def test_what_is_lent_goes_on_to_another_when_its_holder_is_idle() -> None:
    """A promise to a request of tier spot holds on a device that is lent: not made and dropped again and again."""
    bench = office(gpus=1)
    reserve(bench, gpus=1)
    bench.wait(START + KEEP - 1000)
    lent = busy(bench, BEN, tier=Tier.SPOT)
    bench.idle(lent)
    other = bench.queued(tenant=LOCAL, tier=Tier.SPOT)
    bench.wait(120)
    assert sum(isinstance(event, ev.PromiseDropped) for event in bench.events) == 0
    assert status(lent) is LeaseStatus.ENDED
    assert other.granted_at_ns is not None


@pytest.mark.parametrize("tier", Tier)
def test_a_lease_of_the_group_on_its_reserved_device_is_not_taken_by_others(tier: Tier) -> None:
    """Neither by tier nor by the maximum hold; at the end of the reservation it is a lease like any other."""
    bench = office(gpus=1)
    reserve(bench, gpus=1)
    bench.wait(START - 1000)
    mine = busy(bench, ANN, tier=Tier.SPOT)
    other = bench.queued(tenant=BEN, tier=tier)
    bench.wait(END - START - 1)
    assert status(mine) is LeaseStatus.ACTIVE
    assert isinstance(bench.renew(mine), Granted), "held for longer than the maximum"
    assert not any(isinstance(event, ev.Promised) for event in bench.events), "and nobody else is promised it"
    assert status(mine) is LeaseStatus.ACTIVE
    bench.wait(1)
    assert not kept(bench)
    bench.wait(10)
    assert status(mine) is LeaseStatus.ENDED
    assert status(other) is LeaseStatus.GRANTED


def test_the_group_goes_past_a_patient_request_of_others_to_its_own_devices() -> None:
    """Room is kept for whoever waits long at the head of the line, but not on what is reserved."""
    bench = office(gpus=3)
    busy(bench, BEN, count=2)
    bench.queued(gpu(8, count=2), tenant=LOCAL)
    reserve(bench, gpus=1)
    bench.wait(START - 1000 + 400)
    bench.granted(tenant=ANN)


def test_a_request_without_gpus_has_its_turn_like_any_other() -> None:
    """Where its group has devices, only requests for devices look for victims before those ahead of them have."""
    bench = Bench(inventory("n1", device("a"), device("b"), device("cpu", Kind.CPU, 4)), policy=POLICY)
    for name, tenant in ((COURSE, ANN), (LAB, BEN)):
        bench.do(cmd.SetGroup(group=GroupRecord(id=name)))
        bench.do(cmd.SetTenant(tenant=tenant, group=name))
    reserve(bench, gpus=1)
    bench.wait(START - 1000)
    assert len(kept(bench)) == 1
    work = bench.granted(cores(4), tenant=BEN, tier=Tier.SPOT, ttl_s=3600)
    bench.granted(tenant=BEN, tier=Tier.BATCH, ttl_s=3600)
    bench.granted(tenant=ANN)
    head = bench.queued(tenant=ANN)
    assert not head.promise
    mine = bench.queued(cores(4), tenant=ANN)
    assert not mine.promise
    bench.wait(2)
    assert status(work) is LeaseStatus.NOTICED


def test_others_are_told_how_long_it_is_reserved() -> None:
    bench = office(gpus=1)
    reserve(bench, gpus=1)
    bench.wait(START - 1000)
    waiting = bench.queued(tenant=BEN)
    found = bench.ledger.explain(waiting, bench.now)
    (reason,) = [reason for reason in found.reasons if reason.kind is ReasonKind.RESERVATION]
    assert reason.text == "1 GPU is reserved for another group for 40m more"
    assert "course" not in str(found)
    place = bench.ledger.place_of(waiting.id, bench.now)
    assert place is not None
    assert place.estimate_ns == seconds(END - START)
    mine = bench.granted(tenant=ANN)
    (first, *_) = bench.ledger.explain(mine, bench.now).reasons
    assert first.kind is ReasonKind.RESERVATION


def test_of_several_reservations_the_end_of_the_first_is_told() -> None:
    bench = office(gpus=2)
    reserve(bench, gpus=1, end_s=END + 600)
    bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("exam"))))
    reserve(bench, gpus=1, group=GroupId("exam"), name="exam")
    bench.wait(START - 1000)
    found = bench.ledger.explain(bench.queued(tenant=BEN), bench.now)
    (reason,) = [reason for reason in found.reasons if reason.kind is ReasonKind.RESERVATION]
    assert reason.text == "2 GPUs are reserved for another group for 40m more"


# ---- when something goes wrong


def test_another_device_is_chosen_for_one_that_fails() -> None:
    bench = office(gpus=3)
    reserve(bench, gpus=1)
    bench.wait(START - 1000)
    (was,) = kept(bench)
    work = [busy(bench, BEN), busy(bench, BEN)]
    bench.report(Fault(node=NodeId("n1"), resource=ResourceId(was), detail="Xid 79"))
    (now,) = kept(bench)
    assert now != was
    assert sum(lease.status is LeaseStatus.NOTICED for lease in work) == 1
    bench.do(cmd.ClearFence(resource=ResourceId(was), vouch=True))
    assert kept(bench) == [now], "what was chosen stays"


def test_who_has_notice_for_a_reservation_has_notice_of_a_drain_instead() -> None:
    """The device is of no use to the reservation any more, and the lease leaves the node all the same."""
    bench = office(gpus=1)
    lease = busy(bench, BEN)
    reserve(bench, gpus=1)
    bench.at(START - LEAD)
    bench.do(cmd.Tick())
    assert status(lease) is LeaseStatus.NOTICED
    bench.do(cmd.Drain(node=NodeId("n1"), draining=True))
    assert not kept(bench)
    assert status(lease) is LeaseStatus.NOTICED
    assert lease.notice is not None
    assert (lease.notice.reason, lease.notice.reservation) == (EndReason.DRAINED, None)


@pytest.mark.parametrize("names", [("early", "late"), ("late", "early")])
def test_a_reservation_right_after_that_of_another_group_gets_its_devices(names: tuple[str, str]) -> None:
    """Whichever was made first: leases of the group before have notice when their time is over."""
    bench = office(gpus=1)
    when = {"early": {"group": COURSE}, "late": {"group": LAB, "start_s": END, "end_s": END + 1000}}
    for name in names:
        reserve(bench, gpus=1, name=name, **when[name])  # type: ignore[arg-type]
    bench.wait(START - 1000)
    first = busy(bench, ANN)
    bench.wait(END - START)
    assert bench.state.reserved_by == {"gpu0": "late"}
    assert status(first) is LeaseStatus.NOTICED
    bench.wait(30)
    assert status(first) is LeaseStatus.ENDED
    bench.granted(tenant=BEN)


def test_who_had_notice_for_a_reservation_that_is_removed_stays() -> None:
    bench = office(gpus=1)
    lease = busy(bench, BEN)
    reserve(bench, gpus=1)
    bench.wait(START - LEAD - 1000)
    assert status(lease) is LeaseStatus.NOTICED
    bench.do(cmd.RemoveReservation(reservation=LAB_HOUR))
    assert status(lease) is LeaseStatus.ACTIVE
    bench.wait(END)
    assert status(lease) is LeaseStatus.ACTIVE
    assert not bench.state.books.reserved


@pytest.mark.parametrize("away_s", [START - 1000 - LEAD + 20, START - 1000 + 100, END + 1 - 1000])
def test_an_office_that_was_away_takes_up_what_is_due(away_s: float) -> None:
    """Restarted from its journal during the notice, during the reservation, or after it."""
    bench = office(gpus=2)
    reserve(bench, gpus=1)
    lease = bench.granted(tenant=BEN, ttl_s=24 * 3600)
    bench.ledger = Ledger(POLICY, State.restore(bench.state.snapshot()))
    bench.now_ns += seconds(away_s)
    bench.do(cmd.Tick())
    assert len(kept(bench)) == (away_s < END - 1000)
    bench.wait(LEAD)
    assert bench.lease(lease.id).status is LeaseStatus.ACTIVE, "there was a free device"


def test_what_is_kept_is_kept_by_an_office_that_starts_again() -> None:
    bench = office(gpus=1)
    reserve(bench, gpus=1)
    bench.wait(START - 1000)
    bench.ledger = Ledger(POLICY, State.restore(bench.state.snapshot()))
    assert kept(bench) == ["gpu0"]
    assert bench.refused(tenant=BEN, wait_s=0).code == "capacity"
    bench.granted(tenant=ANN)
    assert began(bench) == [1], "it did not begin twice"


@pytest.mark.parametrize("by_s", [-7200, -300, 300, 7200])
def test_the_wall_clock_is_set_during_a_reservation(by_s: float) -> None:
    """It follows the clock that people see. Whatever that does, times are taken in order and nothing hangs."""
    bench = office(gpus=1)
    reserve(bench, gpus=1)
    bench.wait(START - 1000 + 10)
    ledger = bench.ledger

    def tell(command: cmd.Command) -> None:
        ledger.handle(command, Now(bench.now_ns, bench.now.wall_ns + seconds(by_s)))
        check_books(ledger.state)

    tell(cmd.Tick())
    wake_ns = ledger.next_wake_ns()
    goes_on = START + 10 + by_s < END
    assert bool(kept(bench)) == goes_on
    assert (wake_ns is not None) == goes_on
    later = Now(bench.now_ns, bench.now.wall_ns + seconds(END))
    assert (ledger.next_wake_ns(later) or 0) <= bench.now_ns or not goes_on, "a clock that was set wakes it"


def test_books_of_before_have_no_reservations() -> None:
    bench = office()
    old = json.loads(bench.state.snapshot())
    for name in ("reservations", "reserved"):
        del old[name]
    check_books(State.restore(json.dumps(old).encode()))


# ---- bad input


def refused(bench: Bench, **how: object) -> InvalidRequest | NotFound:
    before = bench.state.snapshot()
    answer = reserve(bench, **how)  # type: ignore[arg-type]
    assert isinstance(answer, InvalidRequest | NotFound), answer
    assert bench.state.snapshot() == before, "what is refused changes nothing"
    return answer


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"gpus": 0}, "0 GPUs cannot"),
        ({"gpus": 4}, "4 GPUs are more than there are (3)"),
        ({"gpus": 1, "model": "H200"}, "1 GPU called 'H200' is more than there are (0)"),
        ({"group": GroupId("never")}, "no group 'never'"),
        ({"start_s": 100, "end_s": 200}, "all times of reservation lab-hour are past"),
        ({"start_s": 2000, "end_s": 1900}, "in order"),
        ({"name": "Lab Hour"}, "reservation name"),
        ({"gpus": 2, "group": LAB}, "group lab may have 1 GPU, fewer than the 2 to be reserved"),
    ],
)
def test_what_cannot_be_is_refused(how: dict[str, object], says: str) -> None:
    bench = office()
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, ceiling=1)))
    assert says in str(refused(bench, **how))


def test_reservations_that_overlap_are_refused_where_they_cannot_both_be() -> None:
    bench = office(gpus=3)
    reserve(bench, gpus=2)
    assert "is a reservation lab-hour already" in str(refused(bench, gpus=1))
    assert "overlap with lab-hour of the same group" in str(refused(bench, name="again", gpus=1, start_s=END - 1))
    said = str(refused(bench, name="other", gpus=2, group=LAB, start_s=END - 1, end_s=END + 9))
    assert "(lab-hour, other) and floors would add up to 4 GPUs, and there are 3" in said
    assert not isinstance(reserve(bench, name="after", gpus=3, group=LAB, start_s=END, end_s=END + 9), InvalidRequest)
    assert not isinstance(reserve(bench, name="beside", gpus=1, group=GroupId("default")), InvalidRequest)


def test_floors_and_reservations_of_others_add_up() -> None:
    bench = office(gpus=3)
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, floor=1)))
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE, floor=2)))
    assert "floors would add up to 4" in str(refused(bench, gpus=3))
    assert not isinstance(reserve(bench, gpus=2), InvalidRequest), "its own floor is part of it"
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    before = bench.state.snapshot()
    for group in (
        GroupRecord(id=LAB, floor=2),
        GroupRecord(id=COURSE, ceiling=1),
        GroupRecord(id=COURSE, quota=Quota(gpus=0)),
    ):
        assert isinstance(bench.do(cmd.SetGroup(group=group)).answer, InvalidRequest)
    assert bench.state.snapshot() == before


def test_two_models_are_reserved_apart() -> None:
    cards = [device("a", model="A100"), device("b", model="A100"), device("t", model="T4")]
    bench = office(1, POLICY)
    bench.do(cmd.NodeUp(inventory=inventory("n2", *cards)))
    reserve(bench, gpus=2, model="a100")
    assert "would add up to 3 GPUs called a100, and there are 2" in str(
        refused(bench, name="x", group=LAB, gpus=1, model="a100")
    )
    assert not isinstance(reserve(bench, name="t4", group=LAB, gpus=1, model="T4"), InvalidRequest)
    bench.wait(START - 1000)
    assert bench.state.reserved_by == {"a": LAB_HOUR, "b": LAB_HOUR, "t": "t4"}


@pytest.mark.parametrize("names", [("any", "a100"), ("a100", "any")])
def test_any_device_is_none_that_another_reservation_needs(names: tuple[str, str]) -> None:
    """Even where that is the free one, and even where the other begins later."""
    bench = Bench(inventory("n1", device("a", model="A100"), device("b", model="T4")), policy=POLICY)
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB)))
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE)))
    bench.do(cmd.SetTenant(tenant=ANN, group=COURSE))
    bench.granted(gpu(8, model="T4"), tenant=ANN, ttl_s=24 * 3600)
    how = {"any": {"group": LAB}, "a100": {"group": GroupId("default"), "model": "a100", "start_s": START + 100}}
    for name in names:
        assert not isinstance(reserve(bench, gpus=1, name=name, **how[name]), InvalidRequest)  # type: ignore[arg-type]
    bench.wait(START + 100 - 1000)
    assert bench.state.reserved_by == {"a": "a100", "b": "any"}
    assert began(bench) == [1, 1]


def test_a_floor_can_be_lowered_while_too_much_is_promised() -> None:
    """A node is gone, so that floors and reservations do not fit any more: lowering a floor a little is allowed."""
    bench = office(gpus=2)
    bench.do(cmd.NodeUp(inventory=inventory("n2", device("b"), device("c"))))
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, floor=2)))
    reserve(bench, gpus=2)
    bench.do(cmd.NodeGone(node=NodeId("n2"), detail="silent"))
    assert not isinstance(bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, floor=1))).answer, InvalidRequest)
    assert isinstance(bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, floor=2))).answer, InvalidRequest)


def test_a_group_with_a_reservation_is_not_removed() -> None:
    bench = office()
    bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("empty"))))
    reserve(bench, group=GroupId("empty"), gpus=1)
    answer = bench.do(cmd.RemoveGroup(group=GroupId("empty"))).answer
    assert isinstance(answer, InvalidRequest)
    assert "has reservation lab-hour" in str(answer)
    assert isinstance(bench.do(cmd.RemoveReservation(reservation=ReservationId("never"))).answer, NotFound)


def test_instants_that_are_worked_out_anew_replace_the_old_ones_and_nothing_else() -> None:
    bench = office(gpus=1)
    reserve(bench, gpus=1)
    known = bench.state.books.reservations[LAB_HOUR]
    later = ReservationRecord(id=LAB_HOUR, group=COURSE, gpus=1, spans=(span(bench), span(bench, 9000, 9100)))
    bench.do(cmd.SetReservation(reservation=later, is_new=False))
    assert bench.state.books.reservations[LAB_HOUR] == later != known
    for other in (LAB, COURSE):
        changed = ReservationRecord(id=LAB_HOUR, group=other, gpus=2 if other is COURSE else 1, spans=known.spans)
        bench.do(cmd.SetReservation(reservation=changed, is_new=False))
    assert bench.state.books.reservations[LAB_HOUR] == later
    bench.wait(9050 - 1000)
    assert len(kept(bench)) == 1
    assert len(began(bench)) == 2


def test_times_that_follow_one_another_at_once_are_two_times_of_one_reservation() -> None:
    bench = office()
    spans = (span(bench), span(bench, start_s=END, end_s=END + 100))
    record = ReservationRecord(id=LAB_HOUR, group=COURSE, gpus=2, spans=spans)
    assert isinstance(bench.do(cmd.SetReservation(reservation=record)).answer, Done)


def test_times_that_are_past_take_nothing_from_new_reservations() -> None:
    bench = office(gpus=2)
    spans = (span(bench), span(bench, start_s=END + 1000, end_s=END + 2000))
    bench.do(cmd.SetReservation(reservation=ReservationRecord(id=LAB_HOUR, group=COURSE, gpus=2, spans=spans)))
    bench.wait(END - 1000 + 10)
    long = (span(bench, start_s=END + 20, end_s=END + 900),)
    record = ReservationRecord(id=ReservationId("other"), group=LAB, gpus=2, spans=long)
    assert isinstance(bench.do(cmd.SetReservation(reservation=record)).answer, Done)


def test_a_lease_that_has_to_go_anyway_gives_its_other_device_first() -> None:
    """Two groups lose one lease, and not two."""
    bench = office(gpus=3)
    first = busy(bench, BEN)
    alone = busy(bench, BEN)
    bench.release(first)
    both = busy(bench, BEN, count=2)
    assert [part.resource for part in both.parts] == ["gpu0", "gpu2"]
    reserve(bench, gpus=2)
    bench.wait(START - LEAD - 1000)
    assert (status(both), status(alone)) == (LeaseStatus.NOTICED, LeaseStatus.ACTIVE)


def test_a_reservation_that_is_over_before_a_notice_for_it_has_ended_spares_the_lease() -> None:
    bench = office(gpus=1)
    lease = busy(bench, BEN)
    at_s = bench.now.ns / seconds(1)
    reserve(bench, gpus=1, start_s=at_s + 1, end_s=at_s + 10)
    assert status(lease) is LeaseStatus.NOTICED
    bench.wait(11)
    assert status(lease) is LeaseStatus.ACTIVE


def test_a_reservation_that_is_shorter_than_what_is_kept_from_lending_is_over_at_its_end() -> None:
    bench = office(gpus=1)
    reserve(bench, gpus=1, end_s=START + KEEP / 2)
    bench.wait(START - 1000 + KEEP / 2 - 1)
    waiting = bench.queued(gpu(8), tenant=BEN)
    bench.wait(1)
    assert status(waiting) is LeaseStatus.GRANTED
    assert kept(bench) == []


def test_a_lease_that_is_still_in_the_way_keeps_its_notice_when_other_devices_are_chosen() -> None:
    """It has one of the reserved devices, and another one of these fails. A further notice would give it more time."""
    bench = office(gpus=5)
    both, alone = busy(bench, BEN, count=2, tier=Tier.SPOT), busy(bench, BEN)
    reserve(bench, gpus=3)
    bench.wait(START - LEAD - 1000)
    assert kept(bench) == ["gpu0", "gpu3", "gpu4"]
    before = both.notice
    assert before is not None
    bench.wait(10)
    bench.idle(alone)
    bench.report(Fault(node=NodeId("n1"), resource=ResourceId("gpu3"), detail="Xid 79"))
    assert kept(bench) == ["gpu0", "gpu2", "gpu4"]
    assert both.notice == before


def test_a_device_that_could_not_be_cleaned_is_not_reserved_until_it_is_cleared() -> None:
    bench = office(gpus=1)
    lease = busy(bench, BEN)
    bench.obedient = False
    bench.release(lease)
    assert lease.epoch is not None
    (gpu0,) = (part.resource for part in lease.parts)
    bench.report(Failed(node=NodeId("n1"), lease=lease.id, epoch=lease.epoch, resource=gpu0, detail="not clean"))
    bench.unsent.clear()
    bench.obedient = True
    reserve(bench, gpus=1)
    bench.wait(START - 1000)
    assert (kept(bench), began(bench)) == ([], [0])
    bench.do(cmd.ClearFence(resource=gpu0, vouch=True))
    assert kept(bench) == [gpu0]


def test_a_part_of_a_card_is_no_device_that_can_be_reserved() -> None:
    part = Device(id=ResourceId("part"), kind=Kind.GPU, capacity=8 * GIB, partition=True)
    bench = office(1, POLICY)
    bench.do(cmd.NodeUp(inventory=inventory("n2", part)))
    assert "are more than there are (1)" in str(refused(bench, gpus=2))
    assert not isinstance(reserve(bench, gpus=1), InvalidRequest)


def test_a_device_is_left_to_another_reservation_only_as_long_as_that_has_not_all_of_its_own() -> None:
    """The lab has its two of the three A100: so the third is the course's, and a lease on the T4 stays."""
    cards = [*(device(name, model="A100") for name in "abc"), device("t", model="T4")]
    bench = Bench(inventory("n1", *cards), policy=POLICY)
    for name in (COURSE, LAB):
        bench.do(cmd.SetGroup(group=GroupRecord(id=name)))
    other = bench.granted(gpu(8, model="T4"), tenant=LOCAL, ttl_s=24 * 3600)
    reserve(bench, gpus=2, group=LAB, name="a100", model="a100")
    reserve(bench, gpus=1, group=COURSE, name="any", start_s=START + 200)
    bench.wait(START + 200 - 1000)
    assert bench.state.reserved_by == {"a": "a100", "b": "a100", "c": "any"}
    assert status(other) is LeaseStatus.ACTIVE


def test_a_thousand_requests_of_others_do_not_touch_what_is_reserved() -> None:
    """Requests for many leases, offers and whole batches see the same rooms as one request."""
    bench = office(gpus=3)
    reserve(bench, gpus=2)
    bench.wait(START - 1000)
    each = cmd.Acquire(
        tenant=BEN, lease=LeaseId("m0"), request_id=RequestId("m"), wants=(gpu(8),), ttl_ns=seconds(60), wait_ns=0
    )
    bench.do(cmd.AcquireMany(tenant=BEN, each=each, leases=tuple(LeaseId(f"m{i}") for i in range(9))))
    assert bench.state.held_by(BEN).gpus == 1
    smaller = bench.refused(gpu(16, least=1), tenant=BEN, wait_s=0)
    assert smaller.code == "capacity"
