"""What others than our guests have of a device is not lent, and whoever waits for it is told who they are."""

from __future__ import annotations

import pytest

from sublet.lease.states import LeaseStatus
from sublet.office.api.to_wire import device_view
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Offer, Place, RefusalCode
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.records import Want
from sublet.office.ledger.state import State
from sublet.values import GIB, NS_PER_S, Exclusivity, Kind, NodeId, ResourceId, Tier
from sublet.wire.orders import Device, Foreign
from tests.unit.office.ledger.bench import ANN, BEN, Bench, device, gpu, inventory, shared

WHO = "3GiB of n1/a is used by process 4711 (python) of user ada, which Sublet did not start"
A = ResourceId("n1/a")


def two() -> Bench:
    return Bench(inventory("n1", device("n1/a"), device("n1/b")))


def one() -> Bench:
    return Bench(inventory("n1", device("n1/a")))


def strangers(gib: int = 3, *, blocks: bool = True, resource: ResourceId = A, node: str = "n1") -> Foreign:
    return Foreign(node=NodeId(node), resource=resource, amount=gib * GIB, blocks=blocks, detail=WHO)


def test_a_device_for_oneself_is_one_where_nobody_else_is() -> None:
    bench = two()
    bench.report(strangers())
    assert [part.resource for part in bench.granted(gpu(1)).parts] == ["n1/b"]
    refusal = bench.refused(gpu(1), wait_s=0)
    assert WHO in refusal.reason


def test_what_strangers_have_is_not_lent_and_the_rest_is() -> None:
    bench = one()
    bench.report(strangers(15))
    assert WHO in bench.refused(shared(2), wait_s=0).reason
    assert bench.granted(shared(1)).parts[0].amount == GIB


def test_whoever_waits_is_told_for_whom_and_gets_it_when_they_leave() -> None:
    bench = one()
    bench.report(strangers())
    lease = bench.queued(gpu(8))
    place = bench.ask(gpu(8))
    assert WHO in str(place)
    bench.report(Foreign(node=NodeId("n1"), resource=A))
    assert bench.lease(lease.id).status is LeaseStatus.GRANTED


def test_whoever_waits_for_something_else_is_not_told_of_them() -> None:
    """They are in nobody's way who could not have the device anyway, or could have it beside them."""
    bench = one()
    bench.granted(shared(12))
    bench.report(strangers(1))
    assert WHO not in bench.refused(shared(8), wait_s=0).reason
    assert WHO not in bench.refused(shared(17), wait_s=0).reason


def test_where_the_operator_allows_it_a_device_for_oneself_is_what_they_leave_of_it() -> None:
    bench = one()
    bench.report(strangers(blocks=False))
    assert bench.granted(gpu(8)).parts[0].amount == 13 * GIB
    assert bench.state.resources[A].used == 13 * GIB


def test_a_smaller_offer_is_made_of_what_they_leave() -> None:
    bench = one()
    bench.report(strangers(12))
    offer = bench.ask(Want(kind=Kind.GPU, amount=8 * GIB, exclusivity=Exclusivity.SHARED, least=GIB))
    assert isinstance(offer, Offer)
    assert offer.offered == 4 * GIB


def test_leases_that_are_there_stay_when_strangers_come() -> None:
    bench = one()
    lease = bench.granted(gpu(8))
    bench.report(strangers())
    assert bench.lease(lease.id).status is LeaseStatus.ACTIVE
    assert bench.state.rooms[A].free == -3 * GIB
    view = device_view(bench.state.resources[A], None)
    assert (view.free, view.detail) == (0, WHO)


def test_nobody_is_taken_for_the_sake_of_a_device_that_strangers_keep() -> None:
    bench = one()
    bench.granted(shared(4), tier=Tier.SPOT)
    bench.report(strangers())
    lease = bench.queued(gpu(8))
    assert not bench.lease(lease.id).promise


def test_whoever_was_promised_a_device_does_not_get_it_while_strangers_are_there() -> None:
    bench = one()
    victim = bench.granted(gpu(8), tier=Tier.SPOT)
    lease = bench.queued(gpu(8))
    assert bench.lease(lease.id).promise
    bench.report(strangers())
    bench.release(bench.lease(victim.id))
    bench.obey()
    assert bench.lease(lease.id).status is LeaseStatus.QUEUED
    bench.report(Foreign(node=NodeId("n1"), resource=A))
    assert bench.lease(lease.id).status is LeaseStatus.GRANTED


def test_a_patient_request_keeps_nobody_from_a_node_that_strangers_keep_from_it() -> None:
    """Nothing that ends by itself would make room for it, and others could use the rest for ever."""
    bench = one()
    bench.report(strangers(2))
    bench.queued(gpu(8))
    bench.wait(bench.policy.gang_patience_ns / NS_PER_S + 1)
    assert [part.resource for part in bench.granted(shared(2), tier=Tier.SPOT).parts] == [A]


def test_the_same_again_is_no_event_and_what_makes_no_sense_is_cut_to_what_there_is() -> None:
    bench = one()
    assert bench.report(Foreign(node=NodeId("n1"), resource=A)).events == ()
    assert len(bench.report(strangers(1 << 20)).events) == 1
    assert bench.report(strangers(1 << 20)).events == ()
    assert bench.state.resources[A].foreign is not None
    assert bench.state.rooms[A].free == 0
    assert bench.report(strangers(resource=ResourceId("n1/none"))).events == ()
    assert bench.report(strangers(node="n2")).events == (), "a node speaks of its own devices only"


def test_it_survives_a_restart_and_is_no_matter_for_the_audit() -> None:
    bench = one()
    bench.report(strangers())
    restored = State.restore(bench.state.snapshot())
    check_books(restored)
    assert restored.rooms[A] == bench.state.rooms[A]
    assert restored.rooms[A].blocked
    assert ev.ForeignSeen not in ev.AUDITED
    bench.do(cmd.NodeUp(inventory=inventory("n1", device("n1/a", capacity=8 * GIB))))
    assert bench.state.rooms[A].free == 5 * GIB, "also when the device is described anew"


# ---- partitions


def split() -> Bench:
    part = Device(id=ResourceId("n1/mig"), kind=Kind.GPU, capacity=10 * GIB, partition=True, machine_id="GPU-1")
    return Bench(inventory("n1", device("n1/whole"), part))


def test_a_partition_goes_to_whoever_asks_for_one_and_to_nobody_else() -> None:
    bench = split()
    want = Want(kind=Kind.GPU, amount=4 * GIB, exclusivity=Exclusivity.PARTITION)
    [part] = bench.granted(want).parts
    assert (part.resource, part.amount, part.exclusivity) == ("n1/mig", 10 * GIB, Exclusivity.PARTITION)
    bench.refused(want, wait_s=0)
    assert [part.resource for part in bench.granted(gpu(4)).parts] == ["n1/whole"]


@pytest.mark.parametrize("exclusivity", [Exclusivity.SHARED, Exclusivity.SESSION, Exclusivity.DEVICE])
def test_no_other_class_is_honoured_by_a_partition(exclusivity: Exclusivity) -> None:
    part = Device(id=ResourceId("n1/mig"), kind=Kind.GPU, capacity=10 * GIB, partition=True)
    bench = Bench(inventory("n1", part))
    bench.refused(Want(kind=Kind.GPU, amount=GIB, exclusivity=exclusivity))


def test_where_nothing_is_split_a_partition_is_refused() -> None:
    refusal = one().refused(Want(kind=Kind.GPU, amount=GIB, exclusivity=Exclusivity.PARTITION))
    assert "partitioned" in refusal.reason


# ---- cards that let one process in


def test_a_card_that_lets_one_process_in_is_not_shared() -> None:
    """The second lease's guest would have failed at its first call of CUDA."""
    alone = Device(id=ResourceId("n1/gpu0"), kind=Kind.GPU, capacity=80 * GIB, one_process=True)
    bench = Bench(inventory("n1", alone))
    refusal = bench.refused(shared(1))
    assert refusal.code is RefusalCode.UNSUPPORTED
    assert "EXCLUSIVE_PROCESS" in refusal.reason
    bench.granted(gpu(1))
    other = Device(id=ResourceId("n1/gpu1"), kind=Kind.GPU, capacity=8 * GIB)
    bench = Bench(inventory("n1", alone, other))
    lease = bench.granted(shared(1))
    assert [part.resource for part in lease.parts] == ["n1/gpu1"]
    assert bench.refused(shared(16)).reason


# ---- cards that guests of tenants cannot use


def walled(name: str, why: str = "cuInit said 100 (no device)") -> Device:
    return Device(id=ResourceId(name), kind=Kind.GPU, capacity=16 * GIB, walled_trouble=why)


def test_a_card_that_guests_of_tenants_cannot_use_is_refused_to_them_with_the_reason() -> None:
    """They were granted the lease, and refused when its first guest was started."""
    bench = Bench(inventory("n1", walled("n1/GPU-1")))
    refusal = bench.refused(gpu(8), tenant=ANN)
    assert refusal.code is RefusalCode.UNSUPPORTED
    assert "a guest of a tenant cannot use GPU-1" in refusal.reason
    assert "cuInit said 100 (no device)" in refusal.reason
    assert "doctor --gpu" in refusal.do
    assert "more than any node has" in bench.refused(gpu(80), tenant=ANN).reason, "nor could tenant local have it"
    assert [part.resource for part in bench.granted(gpu(8)).parts] == ["n1/GPU-1"]


def test_tenants_are_lent_the_other_cards_and_wait_for_them() -> None:
    bench = Bench(inventory("n1", walled("n1/a"), device("n1/b", capacity=16 * GIB)))
    lease = bench.granted(gpu(8), tenant=ANN)
    assert [part.resource for part in lease.parts] == ["n1/b"]
    assert "1 of 2 cannot be used by guests of tenants" in bench.refused(gpu(8), tenant=BEN, wait_s=0).reason
    assert "a guest of a tenant cannot use n1/a" in bench.refused(gpu(8, count=2), tenant=BEN).reason
    waiting = bench.queued(gpu(8), tenant=BEN)
    assert bench.granted(gpu(8)).parts[0].resource == "n1/a", "local need not wait behind it"
    bench.release(lease)
    bench.claim(bench.lease(waiting.id))
    assert [part.resource for part in bench.lease(waiting.id).parts] == ["n1/b"]


def test_an_estimate_for_a_tenant_leaves_out_what_it_is_never_lent() -> None:
    bench = Bench(inventory("n1", walled("n1/a"), device("n1/b", capacity=16 * GIB)))
    bench.granted(gpu(8), tenant=ANN, ttl_s=120)
    place = bench.ask(gpu(8), tenant=BEN)
    assert isinstance(place, Place)
    assert (place.estimate_ns or 0) >= 120 * NS_PER_S, "not at once, on the other card"


def test_a_card_that_guests_of_tenants_can_use_again_is_lent_to_them() -> None:
    bench = Bench(inventory("n1", walled("n1/a")))
    bench.refused(gpu(8), tenant=ANN)
    bench.do(cmd.NodeUp(inventory=inventory("n1", walled("n1/a", ""))))
    assert bench.granted(gpu(8), tenant=ANN).parts[0].resource == "n1/a"
