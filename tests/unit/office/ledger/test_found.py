"""Bugs that a second reading of the ledger found; each stays findable here."""

from __future__ import annotations

import pytest

from sublet.errors import InvalidRequest, LeaseEnded, LeaseNotActive
from sublet.lease.states import LeaseStatus, SliceState
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Granted
from sublet.office.ledger.fold import apply
from sublet.office.ledger.records import LOCAL_TENANT, Quota, Want
from sublet.office.ledger.scheduler import WALK_MAX
from sublet.values import GIB, Kind, NodeId, RequestId, ResourceId, Tier
from sublet.wire.orders import End, Extend, Failed, Fault, Grant, Notify, TornDown
from tests.unit.office.ledger.bench import ANN, BEN, Bench, cores, device, disk, gpu, inventory, seconds, shared

N1 = NodeId("n1")


def test_a_drain_reaches_those_who_had_notice_for_somebody_else() -> None:
    """The promise on the node is dropped, so its victim is spared, and then given notice of the drain."""
    bench = Bench()
    victim = bench.granted(tier=Tier.SPOT, tenant=ANN)
    bench.queued(tenant=BEN)
    assert victim.status is LeaseStatus.NOTICED
    bench.do(cmd.Drain(node=N1))
    assert victim.status is LeaseStatus.NOTICED
    assert victim.notice is not None
    assert victim.notice.reason is EndReason.DRAINED


def test_what_failed_hard_is_still_quarantined_after_its_node_was_away() -> None:
    bench = Bench()
    lease = bench.granted()
    bench.obedient = False
    bench.release(lease)
    resource = lease.parts[0].resource
    assert lease.epoch
    bench.report(Failed(node=N1, lease=lease.id, epoch=lease.epoch, resource=resource, detail="scrub", hard=True))
    bench.do(cmd.NodeGone(node=N1))
    bench.do(cmd.NodeUp(inventory=inventory("n1", device("gpu0"))))
    bench.report(TornDown(node=N1, lease=lease.id, epoch=lease.epoch, resources=(resource,)))
    piece = bench.state.resources[resource].slices[str(lease.epoch)]
    assert piece.state is SliceState.QUARANTINED


def test_a_node_that_comes_back_brings_its_old_slices_for_verification() -> None:
    bench = Bench()
    bench.obedient = False
    lease = bench.granted()
    bench.do(cmd.NodeGone(node=N1))
    assert lease.status is LeaseStatus.ENDED
    bench.unsent.clear()
    outcome = bench.do(cmd.NodeUp(inventory=inventory("n1", device("gpu0"))))
    assert any(isinstance(order, End) and order.epoch == lease.epoch for order in outcome.orders)


def test_clearing_the_soft_epoch_leaves_the_hard_one() -> None:
    """Two epochs of one lease on one resource, one of them failed for good."""
    bench = Bench(inventory("n1", device("mem0", Kind.MEMORY)))
    bench.obedient = False
    lease = bench.granted(Want(kind=Kind.MEMORY, amount=40 * GIB), tenant=ANN)
    offer = bench.offered(Want(kind=Kind.MEMORY, amount=30 * GIB, least=GIB), tenant=BEN)
    first = offer.epoch
    mem = ResourceId("mem0")
    bench.do(cmd.Decline(tenant=BEN, lease=offer.id))
    assert first is not None
    bench.report(Failed(node=N1, lease=offer.id, epoch=first, resource=mem, detail="scrub", hard=True))
    bench.release(lease)
    assert lease.epoch is not None
    bench.report(TornDown(node=N1, lease=lease.id, epoch=lease.epoch, resources=(mem,)))
    assert offer.status is LeaseStatus.GRANTED
    second = offer.epoch
    assert second is not None
    bench.claim(offer)
    bench.release(offer)
    bench.report(Failed(node=N1, lease=offer.id, epoch=second, resource=mem, detail="slow"))
    bench.report(TornDown(node=N1, lease=offer.id, epoch=second, resources=(mem,)))
    assert set(bench.state.resources[mem].slices) == {str(first)}


def test_a_failure_that_turns_out_hard_is_hard() -> None:
    bench = Bench()
    lease = bench.granted()
    bench.obedient = False
    bench.release(lease)
    resource = lease.parts[0].resource
    assert lease.epoch
    late = Failed(node=N1, lease=lease.id, epoch=lease.epoch, resource=resource, detail="late")
    hard = Failed(node=N1, lease=lease.id, epoch=lease.epoch, resource=resource, detail="scrub", hard=True)
    bench.report(late)
    bench.report(hard)
    bench.report(late)
    bench.report(TornDown(node=N1, lease=lease.id, epoch=lease.epoch, resources=(resource,)))
    piece = bench.state.resources[resource].slices[str(lease.epoch)]
    assert piece.state is SliceState.QUARANTINED
    assert piece.hard


def test_an_end_of_an_old_epoch_does_not_strike_off_the_new_grant() -> None:
    """The offer's slice is still in teardown while the grant that followed is already held."""
    bench = Bench(inventory("n1", device("mem0", Kind.MEMORY)))
    bench.obedient = False
    lease = bench.granted(Want(kind=Kind.MEMORY, amount=40 * GIB), tenant=ANN)
    offer = bench.offered(Want(kind=Kind.MEMORY, amount=30 * GIB, least=GIB), tenant=BEN)
    bench.do(cmd.Decline(tenant=BEN, lease=offer.id))
    bench.release(lease)
    assert lease.epoch is not None
    bench.report(TornDown(node=N1, lease=lease.id, epoch=lease.epoch, resources=(ResourceId("mem0"),)))
    assert offer.status is LeaseStatus.GRANTED
    bench.claim(offer)
    bench.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-1"))  # every order goes out anew
    bench.now_ns += seconds(3)
    again = bench.ledger.orders_due(bench.now)
    assert any(isinstance(order, Grant) and order.lease == offer.id for order in again), again


def test_a_notice_is_told_to_the_new_epoch_too() -> None:
    """The notice is not confirmed when somebody attaches: it is said again under the new epoch."""
    bench = Bench()
    bench.obedient = False
    victim = bench.granted(tier=Tier.SPOT, tenant=ANN)
    bench.queued(tenant=BEN)
    bench.do(cmd.Attach(tenant=ANN, lease=victim.id, request_id=RequestId("again")))
    bench.now_ns += seconds(3)
    told = [order for order in bench.ledger.orders_due(bench.now) if isinstance(order, Notify)]
    assert [order.epoch for order in told] == [victim.epoch]


def test_an_extension_sent_again_says_what_remains_now() -> None:
    bench = Bench()
    lease = bench.granted()
    bench.obedient = False
    bench.renew(lease)
    bench.now_ns += seconds(4)
    (again,) = [order for order in bench.ledger.orders_due(bench.now) if isinstance(order, Extend)]
    assert again.ttl_ns == seconds(296)


def test_an_order_is_sent_again_once_in_each_interval_however_often_it_was_renewed() -> None:
    bench = Bench()
    lease = bench.granted()
    for _ in range(5):
        bench.now_ns += seconds(0.1)
        bench.renew(lease)
    bench.obedient = False
    bench.now_ns += seconds(0.1)
    bench.renew(lease)
    sent = 0
    for _ in range(40):
        bench.now_ns += seconds(0.1)
        sent += len(bench.ledger.orders_due(bench.now))
    assert sent == 2


def test_a_quota_holds_for_a_promise_as_well() -> None:
    """The tenant got its one GPU elsewhere meanwhile: the promise is dropped, and the victim stays."""
    one = Quota(gpus=1)
    bench = Bench(gpus=2, quotas={BEN: one})
    victim = bench.granted(tier=Tier.SPOT, tenant=ANN)
    other = bench.granted(tier=Tier.INTERACTIVE, tenant=ANN)
    first = bench.queued(gpu(16), tenant=BEN, tier=Tier.BATCH)
    assert first.promise
    bench.release(other)
    assert bench.state.held_by(BEN).gpus == 1
    assert victim.status is LeaseStatus.ACTIVE


def test_requests_beyond_the_quota_take_nobodys_device() -> None:
    """A tenant that may have one GPU asks for three: one victim is enough."""
    bench = Bench(gpus=3, quotas={BEN: Quota(gpus=1)})
    victims = [bench.granted(tier=Tier.SPOT, tenant=ANN) for _ in range(3)]
    for _ in range(3):
        bench.queued(tenant=BEN)
    bench.wait(2)
    assert sum(victim.status is LeaseStatus.NOTICED for victim in victims) == 1


def test_a_promise_kept_does_not_break_a_quota() -> None:
    bench = Bench(gpus=2, quotas={BEN: Quota(gpus=1)})
    bench.granted(tier=Tier.SPOT, tenant=ANN)
    other = bench.granted(tier=Tier.INTERACTIVE, tenant=ANN)
    bench.queued(tenant=BEN, tier=Tier.BATCH)
    bench.do(cmd.SetTenant(tenant=BEN, quota=Quota(gpus=0)))
    bench.wait(60)
    bench.release(other)
    assert bench.state.held_by(BEN).gpus == 0


@pytest.mark.parametrize(
    ("quota", "want"),
    [
        (Quota(leases=1), cores(1)),
        (Quota(gpus=1), gpu(4)),
        (Quota(vram_bytes=4 * GIB), shared(4)),
        (Quota(cores=2), cores(2)),
        (Quota(memory_bytes=GIB), Want(kind=Kind.MEMORY, amount=GIB)),
        (Quota(block_bytes=GIB), disk(1)),
    ],
)
def test_a_quota_below_what_runs_takes_nothing_away_and_gives_nothing_more(quota: Quota, want: Want) -> None:
    """What runs goes on and is renewed; what is asked for waits until the tenant holds less than its quota."""
    rest = (device("cpu", Kind.CPU), device("memory", Kind.MEMORY), device("disk", Kind.BLOCK))
    bench = Bench(inventory("n1", *(device(f"gpu{n}") for n in range(4)), *rest))
    held = [bench.granted(want, tenant=ANN, ttl_s=3600) for _ in range(2)]
    bench.do(cmd.SetTenant(by=LOCAL_TENANT, tenant=ANN, quota=quota))
    assert bench.refused(want, tenant=ANN, wait_s=0).code == "quota"
    waiting = bench.queued(want, tenant=ANN)
    bench.wait(60)
    for lease in held:
        assert isinstance(bench.renew(lease), Granted)
        assert lease.status is LeaseStatus.ACTIVE
    bench.release(held[0])
    assert waiting.epoch is None, "what is held is all of the quota still"
    bench.release(held[1])
    assert waiting.status is LeaseStatus.GRANTED


def test_a_retried_acquire_after_the_deadline_is_told_that_it_is_over() -> None:
    """Its timer has not fired yet, but its time is over all the same."""
    bench = Bench()
    lease = bench.granted(lease="L", request="same")
    bench.at(1300)
    answer = bench.ask(lease="M", request="same")
    assert isinstance(answer, LeaseEnded), answer
    assert lease.status in (LeaseStatus.ENDING, LeaseStatus.ENDED)


def test_a_retried_claim_after_the_deadline_is_told_that_it_is_over() -> None:
    bench = Bench()
    lease = bench.granted()
    bench.at(1300)
    assert isinstance(bench.claim(lease), LeaseEnded)


def test_a_retried_attach_after_the_deadline_is_told_that_it_is_over() -> None:
    bench = Bench()
    lease = bench.granted()
    again = cmd.Attach(tenant=lease.tenant, lease=lease.id, request_id=RequestId("x"))
    bench.do(again)
    bench.at(1300)
    assert isinstance(bench.do(again).answer, LeaseEnded)


def test_a_holder_thought_gone_who_claimed_in_time_keeps_the_lease() -> None:
    """The word that the holder left the line came after the grant: it speaks of the line only."""
    bench = Bench()
    first = bench.granted(tenant=ANN)
    second = bench.queued(tenant=ANN)
    bench.release(first)
    gone = cmd.Release(tenant=ANN, lease=second.id, gone=True)
    bench.do(gone)
    assert isinstance(bench.claim(second), Granted)
    bench.do(gone)
    assert second.status is LeaseStatus.ACTIVE


def test_amounts_that_no_journal_can_hold_are_a_callers_mistake() -> None:
    bench = Bench()
    assert isinstance(bench.ask(Want(kind=Kind.GPU, amount=1 << 70)), InvalidRequest)
    assert isinstance(bench.ask(wait_s=1e15), InvalidRequest)
    assert isinstance(bench.do(cmd.Drain(node=N1, notice_ns=1 << 70)).answer, InvalidRequest)
    assert isinstance(bench.do(cmd.Drain(node=N1, notice_ns=-1)).answer, InvalidRequest)


def test_ended_leases_are_forgotten_in_whatever_order_a_restart_lists_them() -> None:
    """Two leases that ended in one order and were torn down in the other, then a restart, then both are forgotten."""
    bench = Bench(gpus=2)
    bench.obedient = False
    slow, quick = bench.granted(), bench.granted()
    bench.release(slow)
    bench.at(1001)
    bench.release(quick)
    for lease in (quick, slow):
        assert lease.epoch is not None
        parts = tuple(part.resource for part in lease.parts)
        bench.report(TornDown(node=N1, lease=lease.id, epoch=lease.epoch, resources=parts))
    state = type(bench.state).restore(bench.state.snapshot())
    for gone in (quick.id, slow.id):
        apply(state, ev.Forgotten(leases=(gone,)), bench.now)
    assert not state.ended


def test_a_tenant_may_go_on_taking_from_itself() -> None:
    """The cool-down keeps others from taking back; one's own spot leases are one's own."""
    bench = Bench(gpus=2)
    for _ in range(2):
        bench.granted(tier=Tier.SPOT, tenant=ANN)
    first = bench.queued(tenant=ANN)
    second = bench.queued(tenant=ANN)
    assert first.promise
    assert second.promise


def test_a_device_belongs_to_one_node() -> None:
    bench = Bench()
    bench.granted()
    answer = bench.do(cmd.NodeUp(inventory=inventory("n2", device("gpu0")))).answer
    assert isinstance(answer, InvalidRequest)


def test_no_victim_is_taken_while_enough_is_on_its_way_out_elsewhere() -> None:
    bench = Bench(inventory("a", device("a0")), inventory("b", device("b0")))
    bench.obedient = False
    leaving = bench.granted(tenant=ANN)
    spot = bench.granted(tenant=ANN, tier=Tier.SPOT)
    bench.release(leaving)
    bench.queued(tenant=BEN)
    bench.wait(2)
    assert spot.status is LeaseStatus.ACTIVE


def test_who_came_later_takes_nobody_before_who_came_first_did() -> None:
    """The batch lease passes its minimum run a moment before the newcomer asks: the victim is for the first in line."""
    bench = Bench()
    batch = bench.granted(tier=Tier.BATCH, tenant=ANN, ttl_s=3600)
    first = bench.queued(tenant=BEN)
    bench.wait(599.5)
    bench.at(1600.2)
    bench.queued(tenant=BEN)
    bench.wait(2)
    assert batch.notice is not None
    assert batch.notice.beneficiary == first.id


def test_a_patient_head_keeps_only_the_nodes_that_could_have_it() -> None:
    """It waits for zone a; zone b is not kept idle for it."""
    bench = Bench(inventory("a", device("a0"), zone="a"), inventory("b", device("b0"), zone="b"))
    bench.granted(tenant=ANN, zone="a", ttl_s=3600)
    bench.queued(tenant=ANN, zone="a")
    bench.wait(400)
    bench.granted(tenant=BEN, zone="b")


def test_restarts_that_used_up_a_lease_are_metered_on_one_clock() -> None:
    """The lease ends after the shift, so neither its meter nor its end mixes two clocks."""
    bench = Bench()
    lease = bench.granted(ttl_s=60)
    bench.at(1010)
    last_ns, bench.now_ns = bench.now_ns, seconds(5_000_000)
    bench.do(cmd.OpenOffice(incarnation=2, clock_domain="boot-2", last_ns=last_ns, slack_ns=seconds(90)))
    assert lease.status is not LeaseStatus.ACTIVE
    assert lease.end is not None
    assert lease.end.at_ns == bench.now_ns
    assert bench.usage_ms(LOCAL_TENANT) == 10_000


def test_after_a_restart_of_the_machine_who_was_taken_from_waits_out_the_rest_of_its_cool_down() -> None:
    """The new clock reads millions of seconds more, or less; the cool-down is as long as it was."""
    for reads_s in (5_000_000, 50):
        bench = Bench()
        bench.granted(tier=Tier.SPOT, tenant=BEN)
        bench.queued(tenant=ANN)
        assert bench.state.is_cooling(BEN, ANN, bench.now.ns)
        last_ns, bench.now_ns = bench.now_ns, seconds(reads_s)
        bench.do(cmd.OpenOffice(incarnation=2, clock_domain="boot-2", last_ns=last_ns))
        assert bench.state.is_cooling(BEN, ANN, bench.now.ns)
        assert not bench.state.is_cooling(BEN, ANN, bench.now.ns + bench.policy.cool_down_ns + 1)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\n", "x" * 300])
def test_a_lease_cannot_have_a_name_that_its_volume_could_not_have(name: str) -> None:
    """It stands in paths and in messages."""
    bench = Bench()
    assert isinstance(bench.ask(name=name), InvalidRequest)
    assert not bench.state.leases


def test_timers_of_leases_that_are_over_do_not_pile_up() -> None:
    """Each lease is released long before its day is over."""
    bench = Bench(inventory("n1", device("cpu", Kind.CPU)))
    bench.checked = False
    for _ in range(3000):
        lease = bench.granted(cores(1), ttl_s=86_400)
        bench.now_ns += seconds(11)
        bench.do(cmd.Tick())
        bench.release(lease)
    assert len(bench.state.timers) < 1500


def test_the_claim_of_an_offer_that_ran_out_says_where_the_request_is() -> None:
    bench = Bench(inventory("n1", device("mem0", Kind.MEMORY)))
    bench.granted(Want(kind=Kind.MEMORY, amount=40 * GIB), tenant=ANN)
    offer = bench.offered(Want(kind=Kind.MEMORY, amount=30 * GIB, least=GIB), tenant=BEN)
    bench.at(1030)
    answer = bench.claim(offer)
    assert isinstance(answer, LeaseEnded)
    assert "in the line" in answer.do


def test_when_the_patient_leaves_what_was_kept_for_him_is_free_at_once() -> None:
    bench = Bench(gpus=2)
    bench.granted(tenant=ANN, ttl_s=3600)
    patient = bench.queued(gpu(8, count=2), tenant=ANN)
    bench.wait(301)
    other = bench.queued(tenant=BEN, tier=Tier.BATCH)
    assert other.status is LeaseStatus.QUEUED
    bench.release(patient)
    assert isinstance(bench.claim(other), Granted)


def test_behind_a_long_line_of_others_whoever_fits_goes_in_at_the_next_look_at_all() -> None:
    bench = Bench(inventory("n1", device("cpu", Kind.CPU, 8)))
    bench.checked = False
    first = bench.granted(cores(1), tenant=ANN, ttl_s=3600)
    bench.granted(cores(7), tenant=ANN, ttl_s=3600)
    for _ in range(WALK_MAX):
        bench.queued(cores(8), tenant=BEN)
    last = bench.queued(cores(1), tenant=ANN)
    bench.release(first)
    assert isinstance(bench.claim(last), LeaseNotActive)
    bench.wait(1)
    assert isinstance(bench.claim(last), Granted)


def test_a_holder_that_renews_outlives_any_number_of_reboots() -> None:
    """What boots add counts against a silent holder only; it used to end a living one after some weeks."""
    bench = Bench()
    lease = bench.granted()
    for boot in range(2, 9):
        opening = cmd.OpenOffice(
            incarnation=1, clock_domain=f"boot-{boot}", last_ns=bench.now.ns, slack_ns=seconds(100)
        )
        bench.do(opening)
        assert isinstance(bench.renew(lease), Granted)
    assert lease.status is LeaseStatus.ACTIVE


def test_a_silent_holder_gains_one_time_to_live_at_most() -> None:
    """Three boots of 100 s each would be a whole time to live of 300 s and more; the next one ends it."""
    bench = Bench()
    lease = bench.granted()
    for boot in range(2, 6):
        bench.do(
            cmd.OpenOffice(incarnation=1, clock_domain=f"boot-{boot}", last_ns=bench.now.ns, slack_ns=seconds(100))
        )
    assert lease.end is not None
    assert lease.end.reason is EndReason.EXPIRED


def test_what_is_said_of_a_newer_epoch_holds_for_the_older() -> None:
    """A restored office knows an older epoch than the agent met; the agent's word about the newer one frees it."""
    bench = Bench()
    bench.obedient = False
    lease = bench.granted()
    bench.release(lease)
    assert lease.epoch is not None
    resource = lease.parts[0].resource
    newer = lease.epoch._replace(n=lease.epoch.n + 5)
    bench.report(TornDown(node=N1, lease=lease.id, epoch=newer, resources=(resource,)))
    assert not bench.state.resources[resource].slices
    assert lease.status is LeaseStatus.ENDED


def test_a_drain_may_give_no_notice_at_all() -> None:
    bench = Bench()
    lease = bench.granted()
    bench.do(cmd.Drain(node=N1, notice_ns=0))
    assert bench.state.nodes[N1].draining
    bench.wait(1)
    assert lease.end is not None


def test_a_node_that_is_lost_is_lost_once() -> None:
    """Its link is found broken from several sides, and each says so."""
    bench = Bench()
    bench.granted()
    assert bench.do(cmd.NodeGone(node=N1)).events
    assert not bench.do(cmd.NodeGone(node=N1)).events


def test_a_fault_of_a_device_is_told_by_its_own_node_alone() -> None:
    """An agent cannot take a device of another machine out of service."""
    bench = Bench(inventory("n1", device("gpu0")), inventory("n2", device("gpu1")))
    lease = bench.granted()
    resource, own = lease.parts[0].resource, lease.node
    assert own is not None
    (other,) = bench.state.nodes.keys() - {own}
    assert not bench.report(Fault(node=other, resource=resource, detail="Xid 79")).events
    bench.report(Fault(node=own, resource=resource, detail="Xid 79"))
    assert bench.state.resources[resource].detail == "Xid 79"


def test_who_attached_last_is_shown_as_the_holder() -> None:
    """By the name that it gave, or by that of the one before; and it is the one who asked."""
    bench = Bench()
    lease = bench.granted(tenant=ANN)
    bench.do(cmd.Attach(tenant=ANN, lease=lease.id, request_id=RequestId("1"), holder="trainer", peer="one"))
    assert (bench.lease(lease.id).holder, bench.lease(lease.id).peer) == ("trainer", "one")
    bench.do(cmd.Attach(tenant=ANN, lease=lease.id, request_id=RequestId("2"), peer="two"))
    assert (bench.lease(lease.id).holder, bench.lease(lease.id).peer) == ("trainer", "two")
