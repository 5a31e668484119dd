"""Programs that ask for several leases in one request, in the pretended world: every rule holds for each of them."""

from __future__ import annotations

from collections import Counter

from tests.simulation.run import MODES, run_seed
from tests.simulation.scenario import MANY_FROM

SEEDS = 12
"""`make soak` comes to more of them after its million others."""


def test_requests_for_many_break_no_rule() -> None:
    """Lost and doubled answers, restarts, crashes: a repeated request is the same leases, and none is left behind."""
    seen: Counter[str] = Counter()
    for seed in range(MANY_FROM, MANY_FROM + SEEDS):
        tally = run_seed(seed, MODES[seed % 2])
        assert not tally.failures, "\n".join(map(str, tally.failures))
        seen += tally.seen
    assert seen["asked for many"] > 3 * SEEDS
    assert seen["granted beside another"] > SEEDS


def test_the_seeds_of_before_ask_for_one_at_a_time() -> None:
    assert not run_seed(7, "safety").seen["asked for many"]
