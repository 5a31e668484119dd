"""A device is taken and nobody ends: parking leases, from the notice to the resume, and every way in which it fails."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from sublet.errors import InvalidRequest, LeaseEnded, NotFound, StaleEpoch, SubletError
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Granted, Place
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import EndRecord, GroupRecord, LeaseRecord, Parks, Quota, Want
from sublet.office.ledger.state import State
from sublet.values import (
    GIB,
    Epoch,
    Exclusivity,
    GroupId,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    Suspend,
    Tier,
    Way,
)
from sublet.wire.orders import End, EndedHere, Grant, NotHeld, Parkable, Parking, Resumed, Saved, TornDown
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, cores, device, gpu, inventory, seconds, shared

NODE = NodeId("n1")


def bench_with(
    gpus: int = 1, *, memory_gib: int = 8, suspend: Suspend = Suspend.SAME_TYPE, quota: Quota | None = None
) -> Bench:
    devices = [device(f"gpu{number}", model="pretend", suspend=suspend) for number in range(gpus)]
    rest = (device("memory", Kind.MEMORY, memory_gib * GIB), device("cpu", Kind.CPU))
    policy = Policy(ttl_parking_ns=seconds(300))
    return Bench(inventory("n1", *devices, *rest), quotas={BEN: quota or Quota()}, policy=policy)


def noticed(bench: Bench, *wants: Want, need_gib: float = 2, why: str = "") -> LeaseRecord:
    """Ben has a device as spot, Ann wants it; the agent says what Ben's guests need."""
    lease = bench.granted(*(wants or (gpu(),)), tenant=BEN, tier=Tier.SPOT, renew="always")
    bench.queued(tenant=ANN, lease="ann")
    assert lease.status is LeaseStatus.NOTICED
    say_need(bench, lease, need_gib, why)
    return lease


def say_need(bench: Bench, lease: LeaseRecord, need_gib: float = 2, why: str = "") -> None:
    assert lease.epoch is not None
    amount = 0 if why else int(need_gib * GIB)
    bench.report(Parkable(node=NODE, lease=lease.id, epoch=lease.epoch, amount=amount, why=why))


def parking_of(bench: Bench, lease: LeaseRecord) -> LeaseRecord:
    assert lease.parked_under is not None
    return bench.state.leases[lease.parked_under]


def parks(lease: LeaseRecord) -> Parks:
    assert lease.parks is not None
    return lease.parks


def parked(bench: Bench) -> tuple[LeaseRecord, LeaseRecord]:
    """Ben's guests are parked: for Ann, who has been granted the device, or, of several, for nobody. His lease, and his
    parking lease."""
    several = sum(resource.device.kind is Kind.GPU for resource in bench.state.resources.values()) > 1
    lease = noticed_by_operator(bench) if several else noticed(bench)
    bench.wait(6)
    under = parking_of(bench, lease)
    assert parks(under).holds
    return lease, under


def resume(
    bench: Bench,
    under: LeaseId,
    *,
    epoch: Epoch | None = None,
    wait_s: float | None = None,
    number: int = 1,
    wants: tuple[Want, ...] = (),
) -> Answer | SubletError:
    command = cmd.Acquire(
        tenant=BEN,
        lease=LeaseId(f"again{number}"),
        request_id=RequestId(f"again{number}"),
        wants=wants,
        ttl_ns=seconds(300),
        wait_ns=None if wait_s is None else seconds(wait_s),
        resume=under,
        resume_epoch=epoch,
    )
    return bench.do(command).answer


def restart(bench: Bench) -> None:
    """The office dies, and another reads its journal."""
    bench.ledger = Ledger(bench.policy, State.restore(bench.state.snapshot()))
    bench.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-1"))
    bench.do(cmd.NodeUp(inventory=_inventory(bench)))


def _inventory(bench: Bench):  # type: ignore[no-untyped-def]
    node = bench.state.nodes[NODE]
    return inventory("n1", *(bench.state.resources[resource].device for resource in node.resources))


def test_what_was_tried_behind_walls_counts_for_tenants_and_the_plain_trial_for_local() -> None:
    """A guest of a tenant is another user's process in a namespace of its own; what works for the office's may not."""
    card = dataclasses.replace(device("gpu0", model="pretend"), suspend=Suspend.SAME_TYPE, suspend_walled=Suspend.NONE)
    rest = (device("memory", Kind.MEMORY, 8 * GIB), device("cpu", Kind.CPU))
    for tenant, is_parked in ((LOCAL, True), (BEN, False)):
        bench = Bench(inventory("n1", card, *rest))
        lease = bench.granted(gpu(), tenant=tenant, tier=Tier.SPOT, renew="always")
        bench.queued(tenant=ANN, lease="ann")
        say_need(bench, lease)
        assert (lease.parked_under is not None) is is_parked


# ---- the way it should go ----


def test_a_parking_lease_is_set_aside_while_the_notice_runs() -> None:
    """It is Ben's: his memory, his quota, his bill; and it lies where his guests are."""
    bench = bench_with()
    lease = noticed(bench)
    under = parking_of(bench, lease)
    assert (under.status, under.tenant, under.node) == (LeaseStatus.ACTIVE, BEN, lease.node)
    assert [(part.kind, part.amount) for part in under.parts] == [(Kind.MEMORY, 2 * GIB)]
    assert bench.state.held_by(BEN).memory_bytes == 2 * GIB
    assert not parks(under).holds
    say_need(bench, lease, 3)
    assert parking_of(bench, lease) is under, "one is enough"


@pytest.mark.parametrize(("host", "grace_s"), [(True, 30), (False, 62)])
def test_a_card_gives_its_guests_the_time_that_copying_takes(host: bool, grace_s: int) -> None:
    """With half a minute for whatever was there, what had 80 GB was killed in the middle of it. Also when the order is
    sent again."""
    rest = (device("memory", Kind.MEMORY, 80 * GIB), device("cpu", Kind.CPU))
    card = dataclasses.replace(device("gpu0", suspend=Suspend.SAME_TYPE), host=host)
    bench = Bench(inventory("n1", card, *rest), policy=Policy(suspend_ns=seconds(30)))
    bench.obedient = False
    lease = noticed(bench, need_gib=64)
    bench.wait(9)
    restart(bench)
    graces = [order.grace_ns for order in bench.sent if isinstance(order, End) and order.lease == lease.id]
    assert len(graces) > 1
    assert set(graces) == {seconds(grace_s)}


def test_the_device_is_taken_and_the_guests_live() -> None:
    """The end says so, and how to go on; the next holder gets the device only after the agent has looked."""
    bench = bench_with()
    bench.obedient = False
    lease = noticed(bench)
    under = parking_of(bench, lease)
    bench.wait(6)
    assert under.epoch is not None
    here = Parking(lease=under.id, epoch=under.epoch)
    assert [order.park for order in bench.sent if isinstance(order, End) and order.lease == lease.id] == [here]
    assert lease.end is not None
    assert (lease.end.reason, lease.end.way, lease.end.resume) == (EndReason.PREEMPTED, Way.SUSPEND, here)
    assert bench.state.leases[LeaseId("ann")].status is LeaseStatus.QUEUED
    bench.obedient = True
    bench.obey()
    assert lease.status is LeaseStatus.ENDED
    assert parks(under).holds
    assert bench.state.leases[LeaseId("ann")].status is LeaseStatus.GRANTED


def test_device_seconds_stop_at_the_suspend_and_memory_is_held_from_then_on() -> None:
    """The meter of devices stands still while Ben's guests are parked."""
    bench = bench_with()
    parked(bench)
    used = bench.usage_ms(BEN)
    bench.wait(60)
    assert bench.usage_ms(BEN) == used
    assert bench.state.held_by(BEN).gpus == 0
    assert bench.state.held_by(BEN).memory_bytes == 2 * GIB


@pytest.mark.parametrize("is_idle", [False, True])
def test_what_was_parked_in_a_pause_goes_on_as_a_newcomer(is_idle: bool) -> None:
    """A notebook's kernel lives for days. If all that it ever held counted, each of its short cells would be a further
    turn, which newcomers preempt and which waits for their pauses."""
    bench = bench_with()
    bench.is_empty = False
    lease = bench.granted(tenant=BEN, tier=Tier.SPOT, renew="always", ttl_s=80_000)
    bench.wait(1860)
    if is_idle:
        bench.idle(lease)
        bench.wait(1)
    bench.queued(tenant=ANN, lease="ann")
    say_need(bench, lease)
    bench.wait(6)
    under = parking_of(bench, lease)
    assert parks(under).holds
    answer = resume(bench, under.id, epoch=under.epoch)
    assert isinstance(answer, Place)
    assert answer.lease.goes_on == lease.id
    assert (answer.lease.attained_ns == 0) is is_idle


def test_going_on_is_a_new_lease_with_a_new_epoch_and_ends_the_parking_lease() -> None:
    """Ann gives the device back; Ben's request names what is parked, and needs to say nothing else."""
    bench = bench_with()
    lease, under = parked(bench)
    ann = bench.state.leases[LeaseId("ann")]
    bench.claim(ann)
    answer = resume(bench, under.id, epoch=under.epoch)
    assert isinstance(answer, Place)
    bench.release(ann)
    again = answer.lease
    bench.claim(again)
    assert again.status is LeaseStatus.ACTIVE
    assert again.resumed
    assert again.epoch is not None
    assert lease.epoch is not None
    assert again.epoch > lease.epoch
    assert [part.kind for part in again.parts] == [Kind.GPU]
    assert under.end is not None
    assert (under.status, under.end.reason) == (LeaseStatus.ENDED, EndReason.RELEASED)


def test_what_goes_on_can_be_parked_again() -> None:
    """Each time under another parking lease."""
    bench = bench_with(2)
    lease = noticed_by_operator(bench)
    first = parking_of(bench, lease)
    bench.wait(5)
    answer = resume(bench, first.id)
    assert isinstance(answer, Granted)
    bench.do(cmd.Revoke(lease=answer.lease.id, reason=EndReason.BUDGET, notice_ns=seconds(4)))
    say_need(bench, answer.lease)
    second = parking_of(bench, answer.lease)
    assert second.id != first.id
    bench.wait(5)
    assert parks(second).holds


def noticed_by_operator(bench: Bench, *wants: Want) -> LeaseRecord:
    """Taken for a reason that is not his fault, with notice, and nobody waits for it."""
    lease = bench.granted(*(wants or (gpu(),)), tenant=BEN)
    bench.do(cmd.Revoke(lease=lease.id, reason=EndReason.BUDGET, notice_ns=seconds(4)))
    say_need(bench, lease)
    return lease


# ---- who is not parked ----


@pytest.mark.parametrize(
    "wants",
    [(gpu(exclusivity=Exclusivity.DEVICE),), (gpu(), Want(kind=Kind.MEMORY, amount=GIB)), (cores(2),)],
    ids=["has the device for itself", "has memory of its own", "has no device"],
)
def test_these_are_not_parked(wants: tuple[Want, ...]) -> None:
    """``device`` is never suspended in favour of others; and memory of a lease ends with it."""
    bench = bench_with()
    lease = noticed_by_operator(bench, *wants)
    assert lease.parked_under is None
    bench.wait(5)
    assert lease.end is not None
    assert lease.end.way is None


@pytest.mark.parametrize("wants", [(gpu(),), (shared(4),), (gpu(), cores(2))], ids=["session", "shared", "with cores"])
def test_these_are(wants: tuple[Want, ...]) -> None:
    """They go on with as much as they had."""
    bench = bench_with()
    under = parking_of(bench, noticed_by_operator(bench, *wants))
    assert [(want.kind, want.amount) for want in parks(under).wants] == [(want.kind, want.amount) for want in wants]


def test_nothing_is_parked_where_it_was_never_tried_out() -> None:
    """A node that cannot suspend says so, and is not asked to."""
    bench = bench_with(suspend=Suspend.NONE)
    assert noticed(bench).parked_under is None


def test_who_is_revoked_is_not_kept() -> None:
    """Neither at once nor with notice."""
    bench = bench_with()
    lease = bench.granted(tenant=BEN)
    bench.do(cmd.Revoke(lease=lease.id, notice_ns=seconds(4)))
    say_need(bench, lease)
    assert lease.parked_under is None


# ---- when it cannot be had ----


def test_without_memory_the_end_says_plainly_that_nothing_was_saved() -> None:
    """And why."""
    bench = bench_with(memory_gib=1)
    lease = noticed(bench)
    bench.wait(6)
    assert lease.end is not None
    assert (lease.end.reason, lease.end.way) == (EndReason.PREEMPTED, Way.NOT_SAVED)
    assert "not parked: 2GiB of memory would be needed" in lease.end.detail


def test_without_quota_as_well() -> None:
    """The parking lease is the tenant's."""
    bench = bench_with(quota=Quota(memory_bytes=GIB))
    lease = noticed(bench)
    bench.wait(6)
    assert lease.end is not None
    assert "not parked: the quota of memory is 1GiB" in lease.end.detail


def test_beyond_what_its_group_may_hold_nothing_is_parked() -> None:
    """The group's limits count as its tenant's do."""
    bench = bench_with()
    limit = Quota(memory_bytes=GIB)
    bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("lab"), quota=limit)))
    bench.do(cmd.SetTenant(tenant=BEN, group=GroupId("lab")))
    lease = noticed(bench)
    bench.wait(6)
    assert lease.end is not None
    assert "not parked: group lab: the quota of memory is 1GiB" in lease.end.detail


def test_memory_that_comes_free_in_time_is_taken() -> None:
    """The agent says again what is needed, and a no is not for ever."""
    bench = bench_with(memory_gib=2)
    other = bench.granted(Want(kind=Kind.MEMORY, amount=GIB), tenant=ANN)
    lease = noticed(bench)
    assert lease.parked_under is None
    bench.release(other)
    say_need(bench, lease)
    bench.wait(6)
    assert lease.end is not None
    assert lease.end.way is Way.SUSPEND


def test_a_guest_that_cannot_be_copied_is_named() -> None:
    """The agent knows why."""
    bench = bench_with()
    lease = noticed(bench, why="it uses managed memory")
    bench.wait(6)
    assert lease.end is not None
    assert lease.end.detail.endswith("not parked: it uses managed memory")


def test_a_park_that_does_not_come_off_is_corrected_and_the_memory_given_back() -> None:
    """The end that was said first promised more than there was; the last word is right."""
    bench = bench_with()
    bench.obedient = False
    lease = noticed(bench)
    under = parking_of(bench, lease)
    bench.wait(6)
    assert lease.epoch is not None
    resources = tuple(part.resource for part in lease.parts)
    bench.report(TornDown(node=NODE, lease=lease.id, epoch=lease.epoch, resources=resources, parked=False))
    assert lease.end is not None
    assert (lease.end.way, lease.end.resume) == (Way.NOT_SAVED, None)
    ends = [event.end for event in bench.events if isinstance(event, ev.Ended) and event.lease == lease.id]
    assert [end.way for end in ends] == [Way.NOT_SAVED]
    assert under.status is LeaseStatus.ENDING


@pytest.mark.parametrize("how", ["release", "revoke", "spare"])
def test_what_was_set_aside_is_given_back_when_it_is_not_needed(how: str) -> None:
    """Released during the notice, revoked, or spared because the other went away."""
    bench = bench_with()
    lease = noticed(bench)
    under = parking_of(bench, lease)
    if how == "release":
        bench.release(lease)
    elif how == "revoke":
        bench.do(cmd.Revoke(lease=lease.id))
    else:
        bench.release(bench.state.leases[LeaseId("ann")])
        assert lease.status is LeaseStatus.ACTIVE
    assert under.status is LeaseStatus.ENDED
    assert under.end is not None
    assert under.end.reason is EndReason.WITHDRAWN
    assert bench.state.held_by(BEN).memory_bytes == 0


def test_a_spared_lease_that_has_notice_again_is_parked_all_the_same() -> None:
    """Under another parking lease."""
    bench = bench_with()
    lease = noticed(bench)
    bench.release(bench.state.leases[LeaseId("ann")])
    bench.wait(70)
    bench.renew(lease)
    bench.queued(tenant=ANN, lease="ann2")
    bench.wait(1)
    say_need(bench, lease)
    bench.wait(6)
    assert lease.end is not None
    assert lease.end.way is Way.SUSPEND


# ---- going on, or not ----


def test_an_old_epoch_of_the_parking_lease_goes_on_with_nothing() -> None:
    """Another program has attached to it."""
    bench = bench_with(2)
    _, under = parked(bench)
    old = under.epoch
    bench.do(cmd.Attach(tenant=BEN, lease=under.id, request_id=RequestId("takeover")))
    assert isinstance(resume(bench, under.id, epoch=old), StaleEpoch)
    assert isinstance(resume(bench, under.id, epoch=under.epoch), Granted)


def test_a_resume_is_refused_once_the_parking_lease_is_over() -> None:
    """With its end, so that the holder knows what became of it."""
    bench = bench_with(2)
    _, under = parked(bench)
    bench.wait(bench.policy.ttl_parking_ns / 1e9)
    assert under.status is LeaseStatus.ENDED
    answer = resume(bench, under.id)
    assert isinstance(answer, LeaseEnded)
    assert answer.end is not None
    assert answer.end.reason is EndReason.EXPIRED


def test_nobody_goes_on_twice() -> None:
    """A second request is refused and names the first; a repetition of the first is the same answer."""
    bench = bench_with()
    _, under = parked(bench)
    first = resume(bench, under.id)
    assert isinstance(first, Place)
    second = resume(bench, under.id, number=2)
    assert isinstance(second, InvalidRequest)
    assert "again1" in str(second)
    repeated = resume(bench, under.id)
    assert isinstance(repeated, Place)
    assert repeated.lease is first.lease
    bench.release(first.lease)
    assert isinstance(resume(bench, under.id, number=3), Place), "the first left the line"


def test_the_request_says_what_and_nothing_else() -> None:
    """Neither amounts nor another's, nor a lease that is no parking lease."""
    bench = bench_with()
    lease, under = parked(bench)
    assert isinstance(resume(bench, under.id, wants=(gpu(),)), InvalidRequest)
    assert isinstance(resume(bench, LeaseId("nobody")), NotFound)
    assert isinstance(resume(bench, lease.id), InvalidRequest)
    stranger = cmd.Acquire(
        tenant=ANN, lease=LeaseId("x"), request_id=RequestId("x"), wants=(), ttl_ns=seconds(60), resume=under.id
    )
    assert isinstance(bench.do(stranger).answer, NotFound)


def test_a_parking_lease_is_kept_while_its_request_is_in_the_line() -> None:
    """For as long as that takes; whether anybody still waits is seen to elsewhere."""
    bench = bench_with()
    _, under = parked(bench)
    ann = bench.state.leases[LeaseId("ann")]
    bench.claim(ann)
    answer = resume(bench, under.id)
    assert isinstance(answer, Place)
    for _ in range(10):
        bench.renew(ann)
        bench.wait(120)
    assert under.status is LeaseStatus.ACTIVE
    bench.release(answer.lease)
    bench.wait(bench.policy.ttl_parking_ns / 1e9)
    assert under.end is not None, "nobody waits for it any more"


def test_a_request_ends_with_the_parking_lease_it_waits_for() -> None:
    """Nothing is left to go on with."""
    bench = bench_with()
    _, under = parked(bench)
    answer = resume(bench, under.id)
    assert isinstance(answer, Place)
    bench.release(under)
    assert answer.lease.end is not None
    assert (answer.lease.status, answer.lease.end.reason) == (LeaseStatus.ENDED, EndReason.REFUSED)


def test_a_deadline_that_races_with_the_handing_over_is_decided_by_the_agent() -> None:
    """Once the new lease is claimed only the agent knows which was first. Here it was the deadline."""
    bench = bench_with(2)
    _, under = parked(bench)
    bench.obedient = False
    bench.wait(200)
    answer = resume(bench, under.id)
    assert isinstance(answer, Granted)
    bench.wait(150)
    assert under.status is LeaseStatus.ACTIVE, "its time is over, and the office does not end it"
    assert under.epoch is not None
    again = answer.lease
    assert again.epoch is not None
    bench.report(EndedHere(node=NODE, lease=under.id, epoch=under.epoch, reason=EndReason.EXPIRED))
    bench.report(NotHeld(node=NODE, lease=again.id, epoch=again.epoch, number=again.number, reason=EndReason.REFUSED))
    assert again.end is not None
    assert again.end.reason is EndReason.REFUSED


def test_only_the_same_device_where_nothing_else_was_tried_out() -> None:
    """The other one is free, and is no use."""
    bench = bench_with(2, suspend=Suspend.SAME_DEVICE)
    lease = noticed_by_operator(bench)
    bench.wait(5)
    taken = bench.granted(tenant=ANN)
    if taken.parts[0].resource != lease.parts[0].resource:
        bench.release(taken)
        bench.granted(gpu(), tenant=ANN, lease="x")
        taken = bench.granted(gpu(), tenant=ANN, lease="y")
    answer = resume(bench, parking_of(bench, lease).id)
    if isinstance(answer, Granted):
        assert answer.lease.parts[0].resource == lease.parts[0].resource
    else:
        assert isinstance(answer, Place)


# ---- restarts ----


@pytest.mark.parametrize("moment", ["set aside", "taken", "parked", "in line", "going on"])
def test_the_office_may_die_at_any_moment(moment: str) -> None:
    """The journal has all there is to know, and the agent is told again."""
    bench = bench_with()
    bench.obedient = False
    lease = noticed(bench)
    name, under = lease.id, parking_of(bench, lease).id
    if moment == "set aside":
        bench.unsent.clear()
        restart(bench)
    bench.wait(6)
    if moment == "taken":
        bench.unsent.clear()
        restart(bench)
    bench.obey()
    bench.obedient = True
    if moment == "parked":
        restart(bench)
    bench.claim(bench.state.leases[LeaseId("ann")])
    answer = resume(bench, under)
    assert isinstance(answer, Place)
    if moment == "in line":
        restart(bench)
    bench.release(bench.state.leases[LeaseId("ann")])
    if moment == "going on":
        bench.obedient = False
        bench.claim(bench.state.leases[LeaseId("again1")])
        bench.unsent.clear()
        restart(bench)
        bench.obey()
    else:
        bench.claim(bench.state.leases[LeaseId("again1")])
    again, old = bench.state.leases[LeaseId("again1")], bench.state.leases[name]
    assert again.status is LeaseStatus.ACTIVE
    assert again.resumed
    assert old.end is not None
    assert old.end.way is Way.SUSPEND
    assert bench.state.leases[under].end is not None


def test_what_holds_guests_says_so_to_every_agent_that_comes() -> None:
    """One that has none of them does not hold it, and the office hears of the loss."""
    bench = bench_with()
    _, under = parked(bench)
    bench.obedient = False
    bench.do(cmd.NodeUp(inventory=_inventory(bench)))
    grants = [order for order in bench.unsent if isinstance(order, Grant) and order.lease == under.id]
    assert [order.parked for order in grants] == [True]
    assert under.epoch is not None
    bench.report(NotHeld(node=NODE, lease=under.id, epoch=under.epoch, number=grants[0].number, detail="gone"))
    assert under.end is not None
    assert under.end.reason is EndReason.NODE_LOST


def test_a_report_of_a_resume_that_comes_late_hurts_nobody() -> None:
    """Twice, or when both are over."""
    bench = bench_with(2)
    _, under = parked(bench)
    answer = resume(bench, under.id)
    assert isinstance(answer, Granted)
    again = answer.lease
    bench.release(again)
    assert under.epoch is not None
    assert again.epoch is not None
    report = Resumed(node=NODE, lease=again.id, epoch=again.epoch, under=Parking(lease=under.id, epoch=under.epoch))
    assert not bench.report(report).events
    assert LOCAL in bench.state.tenants


def test_what_was_parked_and_saved_in_the_end_is_told_of_both_leases() -> None:
    """Of the one that was taken, which people ask for, as of the parking lease, which pays for it."""
    bench = bench_with()
    lease, under = parked(bench)
    bench.obedient = False
    assert under.epoch is not None
    ended = EndedHere(node=NODE, lease=under.id, epoch=under.epoch, reason=EndReason.EXPIRED, detail="it left before")
    bench.report(ended)
    assert under.end is not None
    assert under.end.reason is EndReason.EXPIRED
    saved = Saved(version=3, wall_ns=77, size=10, count=2)
    resources = tuple(part.resource for part in under.parts)
    torn = TornDown(node=NODE, lease=under.id, epoch=under.epoch, resources=resources, saved=saved)
    events = [event for event in bench.report(torn).events if isinstance(event, ev.Saved)]
    assert [(event.lease, event.saved.count) for event in events] == [(under.id, 2), (lease.id, 0)]
    assert (under.saved_wall_ns, lease.saved_wall_ns) == (77, 77)
    assert not [event for event in bench.report(torn).events if isinstance(event, ev.Saved)], "once"


def test_who_saved_has_not_lost_everything() -> None:
    """The way that is told follows from whether anything was saved; others stay as they are."""
    ended = EndRecord(reason=EndReason.PREEMPTED, at_ns=1, wall_ns=1, way=Way.NOT_SAVED)
    assert ended.reported_way(None) is Way.NOT_SAVED
    assert ended.reported_way(5) is Way.SAVED
    assert msgspec.structs.replace(ended, way=Way.SUSPEND).reported_way(5) is Way.SUSPEND
    assert msgspec.structs.replace(ended, way=None).reported_way(5) is None
