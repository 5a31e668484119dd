"""The parts of the ledger one by one: where things fit, what is metered, who goes first, who may be taken."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from sublet.errors import InvalidRequest
from sublet.lease_end import EndReason
from sublet.office.ledger import admission
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.placement import fit, fit_on_node, fits_without_leases, largest
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.preemption import standing_of_request, victim, weight
from sublet.office.ledger.queue_order import InOrder, position
from sublet.office.ledger.records import ForeignRecord, Quota, Want
from sublet.office.ledger.state import Held
from sublet.office.ledger.usage import UsageMeter
from sublet.values import GIB, Exclusivity, Kind, NodeId, ResourceId, Tier
from sublet.wire.orders import Part
from tests.unit.office.ledger.bench import ANN, BEN, Bench, cores, device, gpu, inventory, seconds, shared

# ---- placement


def room(name: str, gib: int = 16, *taken: tuple[int, str], model: str = "", node: str = "n1") -> Room:
    """A GPU with shared slices of these sizes, each with its tenant."""
    made = Room(ResourceId(name), NodeId(node), Kind.GPU, model, gib * GIB, gib * GIB)
    for amount, tenant in taken:
        part = Part(resource=made.resource, kind=Kind.GPU, amount=amount * GIB, exclusivity=Exclusivity.SHARED)
        made.take(part, tenant)  # type: ignore[arg-type]
    return made


def placed(want: Want, *rooms: Room, mix: bool = False) -> list[str]:
    parts = fit_on_node([want], ANN, rooms, mix=mix)
    return [] if parts is None else [part.resource for part in parts]


@pytest.mark.parametrize(
    ("want", "rooms", "where"),
    [
        (gpu(8), [room("a"), room("b")], ["a"]),
        (gpu(8), [room("big", 80), room("small", 16)], ["small"]),
        (gpu(8), [room("busy", 16, (4, "ann")), room("empty")], ["empty"]),
        (gpu(20), [room("a"), room("b", 24)], ["b"]),
        (gpu(20), [room("a")], []),
        (gpu(8, count=2), [room("a"), room("b")], ["a", "b"]),
        (gpu(8, count=2), [room("a")], []),
        (shared(4), [room("empty"), room("mine", 16, (4, "ann"))], ["mine"]),
        (shared(4), [room("theirs", 16, (4, "ben")), room("empty")], ["empty"]),
        (shared(4), [room("theirs", 16, (4, "ben"))], []),
        (shared(4), [room("both", 16, (2, "ann"), (2, "ben"))], []),
        (shared(4), [room("fuller", 16, (10, "ann")), room("emptier", 16, (2, "ann"))], ["fuller"]),
        (shared(8), [room("full", 16, (10, "ann"))], []),
        (gpu(8, model="h100"), [room("a", model="T4"), room("b", 80, model="NVIDIA H100 80GB")], ["b"]),
        (gpu(8, model="A100|T4"), [room("a", model="T4"), room("b", 80, model="A100")], ["b"]),
        (gpu(8, model="h100 | t4"), [room("a", model="T4"), room("b", 80, model="A100")], ["a"]),
        (gpu(8, model="H100|L4"), [room("a", model="T4"), room("b", 80, model="A100")], []),
        (
            gpu(8, count=2, model="A100|T4"),
            [room("a", model="A100"), room("b", model="T4"), room("c", model="T4")],
            ["b", "c"],
        ),
        (cores(1), [room("a")], []),
    ],
)
def test_the_tightest_place_that_will_do(want: Want, rooms: list[Room], where: list[str]) -> None:
    assert placed(want, *rooms) == where


@pytest.mark.parametrize(
    "wants",
    [
        (gpu(8),),
        (gpu(8, count=2),),
        (shared(4),),
        (gpu(8, model="A100|T4"),),
        (gpu(8, count=2, model="A100|T4"),),
        (gpu(8, exclusivity=Exclusivity.PARTITION),),
        (gpu(8), cores(2)),
        (gpu(8), gpu(20)),
        (cores(8),),
    ],
)
def test_where_wants_fit_without_leases_is_found_without_copies(wants: tuple[Want, ...]) -> None:
    """The same as if they were placed on what is left when all leases have ended, on every pair of these rooms."""
    broken, crowded = room("broken"), room("crowded", 24, (4, "ben"))
    broken.quarantined, broken.stays = 1, 8 * GIB
    foreign, part, alone = room("foreign"), room("part"), room("alone")
    foreign.subtract_foreign(ForeignRecord(amount=4 * GIB, blocks=True, detail=""))
    part.partition, alone.one_process = True, True
    cpu = Room(ResourceId("cpu"), NodeId("n1"), Kind.CPU, "", 8, 2)
    models = [room("a", model="T4"), room("b", 24, model="A100"), room("c", model="T4")]
    found = []
    for here in itertools.combinations([broken, crowded, foreign, part, alone, cpu, *models], 2):
        placed = fit_on_node(wants, BEN, [each.after_all_leases() for each in here], mix=True) is not None
        assert fits_without_leases(wants, BEN, here) is placed
        found.append(placed)
    assert any(found)
    assert not all(found)


def test_tenants_share_where_the_operator_allows_it() -> None:
    assert placed(shared(4), room("theirs", 16, (4, "ben")), mix=True) == ["theirs"]


def test_a_device_with_a_quarantined_slice_takes_nobody() -> None:
    broken = room("a")
    broken.quarantined = 1
    assert placed(shared(1), broken) == []


def test_an_exclusive_slice_is_the_whole_device_and_a_shared_one_its_part() -> None:
    whole = fit_on_node([gpu(4)], ANN, [room("a")], mix=False)
    part = fit_on_node([shared(4)], ANN, [room("a")], mix=False)
    assert whole is not None
    assert part is not None
    assert (whole[0].amount, whole[0].millis) == (16 * GIB, 1000)
    assert (part[0].amount, part[0].millis) == (4 * GIB, 250)


def test_several_wants_go_to_one_node_or_nowhere() -> None:
    cpu = Room(ResourceId("cpu"), NodeId("n2"), Kind.CPU, "", 8, 8)
    apart = {NodeId("n1"): [room("a")], NodeId("n2"): [cpu]}
    assert fit([gpu(8), cores(2)], ANN, apart, mix=False) is None
    together = {NodeId("n1"): [room("a")], NodeId("n2"): [room("b"), cpu]}
    found = fit([gpu(8), cores(2)], ANN, together, mix=False)
    assert found is not None
    assert found[0] == "n2"


def test_of_several_models_the_first_that_is_free_anywhere_is_taken() -> None:
    """Also where another node comes first, and in what waits: it gets whichever comes free."""
    apart = {NodeId("n1"): [room("a", model="T4")], NodeId("n2"): [room("b", model="A100")]}
    found = fit([gpu(8, model="A100|T4")], ANN, apart, mix=False)
    assert found is not None
    assert found[0] == "n2"

    bench = Bench(inventory("n1", device("gpu0", model="A100"), device("gpu1", model="T4")))
    first = bench.granted(gpu(8, model="H200|A100|T4"), tenant=ANN)
    second = bench.granted(gpu(8, model="H200|A100|T4"), tenant=ANN)
    assert [lease.parts[0].resource for lease in (first, second)] == ["gpu0", "gpu1"]
    third = bench.queued(gpu(8, model="A100|T4"), tenant=ANN)
    bench.release(second)
    assert bench.lease(third.id).parts[0].resource == "gpu1"
    assert bench.refused(gpu(8, model="H200|L4"), tenant=ANN).code == "unsupported"


def test_the_largest_that_would_fit() -> None:
    rooms = [room("a", 16, (4, "ann")), room("b", 8)]
    assert largest(shared(1), ANN, rooms, mix=False) == 12 * GIB
    assert largest(gpu(1), ANN, rooms, mix=False) == 8 * GIB
    assert largest(shared(1), BEN, rooms, mix=False) == 8 * GIB
    assert largest(cores(1), ANN, rooms, mix=False) == 0


def test_what_is_taken_and_given_back_leaves_a_room_as_it_was() -> None:
    seen, before = room("a", 16, (4, "ann")), room("a", 16, (4, "ann"))
    part = Part(resource=seen.resource, kind=Kind.GPU, amount=GIB, exclusivity=Exclusivity.SESSION)
    seen.take(part, BEN)
    assert seen.exclusive == 1
    assert seen != before
    seen.give_back(part, BEN)
    assert seen == before


# ---- the meter


@pytest.mark.parametrize("seed", range(20))
def test_the_meter_is_the_integral(seed: int) -> None:
    """Against a sum over every nanosecond of a short life, the window rolling on, the clock changed once."""
    rng = random.Random(seed)
    window, meter, now, level = rng.choice((5, 50, 500)), UsageMeter(), 0, 0
    held: list[int] = []
    """The level in each nanosecond so far."""
    for step in range(200):
        passed = rng.choice((0, 1, 1, 3, 20))
        held += [level] * passed
        now += passed
        if step == 100:
            meter.shift(-1000)
            now -= 1000
        change = rng.choice((-level, 250, 1000)) if rng.random() < 0.5 else 0
        if change:
            level += change
            meter.change(change, now, window)
        assert meter.used(now, window) == sum(held[-window:])
        assert meter.held_millis == level


def test_the_meter_forgets_what_left_the_window() -> None:
    meter = UsageMeter()
    for second in range(10_000):
        meter.change(1 if second % 2 == 0 else -1, second * 100, 1000)
    assert len(meter.at_ns) < 200


# ---- the order of the line


def waiting(bench: Bench) -> list[str]:
    return [lease.id for lease in InOrder(bench.state, bench.now_ns, bench.policy)]


def test_tier_then_use_then_arrival() -> None:
    bench = Bench()
    bench.granted(tenant=ANN, ttl_s=3600)
    bench.queued(tenant=ANN, tier=Tier.SPOT, lease="spot")
    bench.queued(tenant=ANN, tier=Tier.BATCH, lease="batch")
    bench.queued(tenant=ANN, lease="ann-1")
    bench.queued(tenant=ANN, lease="ann-2")
    bench.queued(tenant=BEN, lease="ben-1")
    bench.queued(tenant=BEN, lease="ben-2")
    assert waiting(bench) == ["ben-1", "ben-2", "ann-1", "ann-2", "batch", "spot"]
    places = [position(bench.state, bench.lease(name), bench.now_ns, bench.policy) for name in waiting(bench)]
    assert places == [1, 2, 3, 4, 5, 6]


def test_one_step_that_frees_several_devices_does_not_give_all_to_one_tenant() -> None:
    bench = Bench(gpus=2)
    both = bench.granted(gpu(8, count=2), tenant=BEN)
    bench.wait(100)
    for number in range(2):
        bench.queued(lease=f"local-{number}")
        bench.queued(tenant=ANN, lease=f"ann-{number}")
    bench.release(both)
    granted = [lease.id for lease in bench.state.leases.values() if lease.status == "granted"]
    assert sorted(granted) == ["ann-0", "local-0"]


def test_what_was_used_long_ago_counts_for_less() -> None:
    """Ann had the device for 50 s, Ben later for 30 s: two half-lives after hers, that is more."""
    bench = Bench(policy=Policy(half_life_ns=seconds(100), max_hold_ns=seconds(10**6)))
    ann = bench.granted(tenant=ANN)
    bench.at(1050)
    bench.release(ann)
    bench.at(1250)
    ben = bench.granted(tenant=BEN)
    bench.at(1280)
    bench.release(ben)
    bench.granted(ttl_s=3600)
    bench.queued(tenant=ANN, lease="ann")
    bench.queued(tenant=BEN, lease="ben")
    assert waiting(bench) == ["ann", "ben"]
    bench.at(10_000)
    assert waiting(bench) == ["ann", "ben"], "time alone changes no order of what was used"


# ---- who may be taken


@pytest.mark.parametrize(
    ("held", "idle", "ran_s", "asks", "standing", "reason"),
    [
        (Tier.SPOT, False, 0, Tier.INTERACTIVE, 1, EndReason.PREEMPTED),
        (Tier.SPOT, False, 0, Tier.BATCH, 1, EndReason.PREEMPTED),
        (Tier.SPOT, False, 0, Tier.SPOT, None, None),
        (Tier.SPOT, False, 1800, Tier.SPOT, 0, EndReason.FAIR_SHARE),
        (Tier.SPOT, True, 0, Tier.SPOT, 0, EndReason.PREEMPTED),
        (Tier.BATCH, False, 599, Tier.INTERACTIVE, None, None),
        (Tier.BATCH, False, 600, Tier.INTERACTIVE, 2, EndReason.PREEMPTED),
        (Tier.BATCH, False, 600, Tier.BATCH, None, None),
        (Tier.BATCH, False, 1800, Tier.BATCH, 1, EndReason.FAIR_SHARE),
        (Tier.BATCH, False, 1800, Tier.SPOT, None, None),
        (Tier.BATCH, True, 0, Tier.SPOT, 0, EndReason.PREEMPTED),
        (Tier.INTERACTIVE, False, 1799, Tier.INTERACTIVE, None, None),
        (Tier.INTERACTIVE, False, 1800, Tier.INTERACTIVE, 2, EndReason.FAIR_SHARE),
        (Tier.INTERACTIVE, False, 1800, Tier.BATCH, None, None),
        (Tier.INTERACTIVE, True, 0, Tier.SPOT, 0, EndReason.PREEMPTED),
    ],
)
def test_a_request_takes_only_from_lower_standing(
    held: Tier, idle: bool, ran_s: int, asks: Tier, standing: int | None, reason: EndReason | None
) -> None:
    bench = Bench(gpus=2)
    lease = bench.granted(tier=held, tenant=ANN, ttl_s=86_400)
    request = bench.granted(tier=asks, tenant=BEN)  # any record of this tier and tenant will do
    bench.now_ns += seconds(ran_s)
    if idle:
        bench.idle(lease)
        before = victim(lease, request, bench.state, bench.now_ns + seconds(0.19), bench.policy)
        assert before is None or not before.is_idle, "a pause between two cells is no rest"
        bench.now_ns += seconds(0.2)
    found = victim(lease, request, bench.state, bench.now_ns, bench.policy)
    assert (None if found is None else (found.standing, found.reason)) == (
        None if standing is None else (standing, reason)
    )


def test_a_volume_is_never_taken() -> None:
    bench = Bench(inventory("n1", device("disk", Kind.BLOCK)))
    lease = bench.granted(Want(kind=Kind.BLOCK, amount=GIB), tenant=ANN, tier=Tier.SPOT)
    request = bench.granted(Want(kind=Kind.BLOCK, amount=GIB), tenant=BEN)
    assert victim(lease, request, bench.state, bench.now_ns, bench.policy) is None


def test_one_step_of_standing_outweighs_every_victim_a_plan_may_have() -> None:
    for tier in Tier:
        assert 64 * weight(standing_of_request(tier) - 1) < weight(standing_of_request(tier))


# ---- quotas and checks


@pytest.mark.parametrize(
    ("quota", "held", "want", "said"),
    [
        (Quota(), Held(leases=9, gpus=9), gpu(), None),
        (Quota(gpus=2), Held(gpus=1), gpu(), None),
        (Quota(gpus=2), Held(gpus=2), gpu(), "the quota of gpus is 2, 2 held and 1 asked"),
        (Quota(gpus=2), Held(gpus=1), gpu(count=2), "the quota of gpus is 2, 1 held and 2 asked"),
        (Quota(gpus=0), Held(gpus=3), cores(1), None),
        (Quota(leases=1), Held(leases=1), cores(1), "the quota of leases is 1, 1 held and 1 asked"),
        (Quota(cores=4), Held(cores=3), cores(2), "the quota of cores is 4, 3 held and 2 asked"),
        (
            Quota(vram_bytes=8 * GIB),
            Held(vram_bytes=6 * GIB),
            shared(4),
            "the quota of vram is 8GiB, 6GiB held and 4GiB asked",
        ),
        (Quota(vram_bytes=8 * GIB), Held(), gpu(16), None),
    ],
)
def test_a_quota_says_its_numbers(quota: Quota, held: Held, want: Want, said: str | None) -> None:
    assert admission.over_quota((want,), quota, held) == said


def test_what_somebody_holds_is_counted_by_kind() -> None:
    held = Held()
    parts = (
        Part(resource=ResourceId("g"), kind=Kind.GPU, amount=16, exclusivity=Exclusivity.SESSION),
        Part(resource=ResourceId("h"), kind=Kind.GPU, amount=4, exclusivity=Exclusivity.SHARED),
        Part(resource=ResourceId("c"), kind=Kind.CPU, amount=3),
        Part(resource=ResourceId("m"), kind=Kind.MEMORY, amount=7),
        Part(resource=ResourceId("b"), kind=Kind.BLOCK, amount=9),
    )
    held.add(parts, +1)
    assert held == Held(leases=1, gpus=2, vram_bytes=4, cores=3, memory_bytes=7, block_bytes=9)
    held.add(parts, -1)
    assert held == Held()


@pytest.mark.parametrize(
    ("wants", "said"),
    [
        ((gpu(), gpu()), "the same kind stands twice"),
        ((Want(kind=Kind.CPU, amount=1, count=2),), "are for GPUs"),
        ((Want(kind=Kind.CPU, amount=1, exclusivity=Exclusivity.SHARED),), "are for GPUs"),
        ((Want(kind=Kind.MEMORY, amount=1, model="T4"),), "are for GPUs"),
        ((gpu(model=""),), "the model is empty"),
        ((gpu(model="T4\n"),), "not printable"),
        ((gpu(model="T4||A100"),), "one of the models in 'T4||A100' is empty"),
        ((gpu(model="|"),), "one of the models"),
        ((gpu(least=0),), "smallest amount"),
    ],
)
def test_a_contradiction_is_refused_before_anything_changes(wants: tuple[Want, ...], said: str) -> None:
    bench = Bench()
    before = bench.state.snapshot()
    answer = bench.ask(*wants)
    assert isinstance(answer, InvalidRequest)
    assert said in answer.message
    assert bench.state.snapshot() == before


@pytest.mark.parametrize(
    ("wants", "said"),
    [
        ((gpu(8),), "a GPU with 8GiB is not free now"),
        ((gpu(8, count=2, model="T4"),), "2 GPUs (T4) with 8GiB are not free now"),
        ((cores(1),), "1 core is not free now"),
        ((cores(4),), "4 cores are not free now"),
        ((gpu(8), cores(4)), "a GPU with 8GiB and 4 cores are not free together now"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(wants: tuple[Want, ...], said: str) -> None:
    bench = Bench(inventory("n1", device("gpu0"), device("cpu", Kind.CPU)))
    lease = bench.granted(cores(1))
    assert admission.not_free(msgspec.structs.replace(lease, wants=wants)) == said
