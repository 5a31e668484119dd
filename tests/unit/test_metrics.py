"""What is counted without prometheus_client comes out as its own parser reads it."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sublet.metrics import OfficeMetrics, Readings, Spread

NOTHING = Readings(queued=0, live={}, quarantined=0, lost=0, streams=0, commits=0, gpu_seconds=0.0)


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(page.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_a_count_rises_for_its_labels_alone_and_one_without_labels_begins_at_zero() -> None:
    metrics = OfficeMetrics(lambda: NOTHING)
    for labels in (("gpu", "batch"), ("gpu", "batch"), ("cpu", "spot")):
        metrics.grants.inc(*labels)
    found = samples(metrics.page())
    assert found["sublet_grants_total", (("kind", "gpu"), ("tier", "batch"))] == 2
    assert found["sublet_grants_total", (("kind", "cpu"), ("tier", "spot"))] == 1
    assert found["sublet_renewals_total", ()] == 0
    assert not any(name == "sublet_ends_total" for name, _ in found)


@pytest.mark.parametrize("seed", range(3))
def test_a_spread_says_what_a_histogram_of_prometheus_says(seed: int) -> None:
    """Bounds belong to the bucket they close; what lies beyond all of them is only in the last."""
    bounds = (0.0001, 0.5, 1, 14400)
    registry = CollectorRegistry(auto_describe=False)
    theirs = Histogram("x", "a text", buckets=bounds, registry=registry)
    ours = Spread("x", "a text", bounds)
    rng = random.Random(seed)
    for value in (*bounds, *(rng.choice((0.1, 1, 1000)) * rng.random() * 20 for _ in range(100))):
        theirs.observe(value)
        ours.observe(value)
    expected = {key: value for key, value in samples(generate_latest(registry)).items() if key[0] != "x_created"}
    family = ours.family()
    assert {(s.name, tuple(sorted(s.labels.items()))): pytest.approx(s.value) for s in family.samples} == expected
