"""Groups, weights, floors, ceilings, reservations and budgets in the simulated world, beside programs that want more
than their share: every rule holds while everything else goes wrong."""

from __future__ import annotations

from collections import Counter

from tests.simulation.run import MODES, run_seed
from tests.simulation.scenario import SHARED_FROM

SEEDS = 16
"""`make soak` runs more of them, after its million others."""
MET = (
    "ReservationBegan",
    "ReservationLent",
    "ReservationOver",
    "granted what is reserved for it",
    "preempted by another group",
    "budget warned",
    "ended budget",
    "hog",
    "liar",
    "tiny",
)


def test_who_wants_more_than_its_share_breaks_no_rule() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SHARED_FROM, SHARED_FROM + SEEDS):
        tally = run_seed(seed, MODES[seed % 2])
        assert not tally.failures, "\n".join(map(str, tally.failures))
        seen += tally.seen
    assert not [what for what in MET if not seen[what]]


def test_the_seeds_of_before_have_no_groups() -> None:
    assert not run_seed(7, "safety").seen["ReservationBegan"]
