"""What those who wait, or try once, are told of when."""

from __future__ import annotations

import pytest

from sublet.office.ledger.answers import Place
from sublet.office.ledger.estimate import SLICES_MAX
from sublet.values import Kind
from sublet.wire.orders import Failed
from tests.unit.office.ledger.bench import ANN, BEN, Bench, cores, device, gpu, inventory, seconds, shared


def estimate_s(bench: Bench, *wants: object, **how: object) -> float | None:
    answer = bench.ask(*wants, tenant=BEN, **how)  # type: ignore[arg-type]
    assert isinstance(answer, Place), answer
    return None if answer.estimate_ns is None else answer.estimate_ns / 1e9


def test_a_device_is_free_when_its_holder_is_due_and_has_been_given_its_grace() -> None:
    bench = Bench()
    bench.granted(tenant=ANN, ttl_s=100)
    assert estimate_s(bench) == 105


def test_of_a_divisible_resource_only_so_much_has_to_come_free_as_was_asked() -> None:
    bench = Bench(inventory("n1", device("cpu", Kind.CPU, 8)))
    for ttl_s in (50, 100, 200, 300):
        bench.granted(cores(2), tenant=ANN, ttl_s=ttl_s)
    assert estimate_s(bench, cores(4)) == pytest.approx(105)


def test_all_of_a_request_has_to_be_free_on_one_node() -> None:
    bench = Bench(
        inventory("n1", device("gpu0"), device("cpu0", Kind.CPU, 4)),
        inventory("n2", device("gpu1"), device("cpu1", Kind.CPU, 4)),
    )
    bench.granted(gpu(), tenant=ANN, ttl_s=100)
    bench.granted(cores(4), tenant=ANN, ttl_s=300)
    bench.granted(cores(4), tenant=ANN, ttl_s=200)
    assert estimate_s(bench, gpu(), cores(4)) == 205


def test_a_node_without_the_labels_does_not_count() -> None:
    bench = Bench(inventory("n1", device("gpu0"), zone="a"), inventory("n2", device("gpu1"), zone="b"))
    bench.granted(tenant=ANN, ttl_s=300, zone="a")
    bench.granted(tenant=ANN, ttl_s=100, zone="b")
    assert estimate_s(bench, zone="a") == 305


def test_those_ahead_take_their_turn() -> None:
    bench = Bench()
    bench.granted(tenant=ANN, ttl_s=100)
    bench.queued(tenant=BEN)
    assert estimate_s(bench, ttl_s=300) == 405


def test_a_shared_neighbour_leaves_enough_for_a_shared_request() -> None:
    bench = Bench()
    bench.granted(shared(12), tenant=BEN, ttl_s=100)
    bench.granted(shared(4), tenant=BEN, ttl_s=50)
    assert estimate_s(bench, shared(4)) == 55


def test_what_cannot_be_told_for_little_is_not_told() -> None:
    bench = Bench(inventory("n1", device("cpu", Kind.CPU, SLICES_MAX + 1)))
    for _ in range(SLICES_MAX + 1):
        bench.granted(cores(1), tenant=ANN)
    assert estimate_s(bench, cores(SLICES_MAX + 1)) is None
    assert estimate_s(bench, cores(1)) is not None


def test_quarantine_has_no_end() -> None:
    bench = Bench(gpus=2)
    lease = bench.granted(tenant=ANN)
    bench.granted(tenant=ANN, ttl_s=300)
    bench.obedient = False
    bench.release(lease)
    bench.now_ns += seconds(1)
    resource = bench.state.resources[lease.parts[0].resource]
    assert lease.epoch is not None
    bench.report(Failed(node=resource.node, lease=lease.id, epoch=lease.epoch, resource=resource.id, detail="late"))
    assert estimate_s(bench) == 304


def test_a_neighbour_of_another_tenant_has_to_leave_whatever_is_free_beside_him() -> None:
    bench = Bench()
    bench.granted(shared(4), tenant=ANN, ttl_s=100)
    assert estimate_s(bench, shared(4)) == 105


@pytest.mark.parametrize("ahead", [*range(12), 50, 51])
def test_a_long_line_is_reckoned_as_if_each_took_its_turn(ahead: int) -> None:
    """Three devices come free at moments that lie further apart than the time to live of those who wait."""
    bench = Bench(inventory("n1", *(device(f"gpu{number}") for number in range(3))))
    for ttl_s in (100, 130, 290):
        bench.granted(tenant=ANN, ttl_s=ttl_s)
    free_at = [105.0, 135.0, 295.0]
    for _ in range(ahead):
        bench.queued(tenant=BEN, ttl_s=70)
    for _ in range(ahead):
        free_at[free_at.index(min(free_at))] += 70
    assert estimate_s(bench, ttl_s=70) == pytest.approx(min(free_at))
