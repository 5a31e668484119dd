"""Each step of a job is applied once, whoever stops wherever; a known bug is found."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.replica_steps import STEP_MUTANTS, StepBroken, run_step_seed, switched_on

SEEDS = 2_000


def test_every_step_is_applied_once() -> None:
    """And every way to meet another program was met."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            seen += run_step_seed(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert all(seen[what] >= 50 for what in ("New", "Pending", "Completed", "StaleEpoch", "died", "recovered")), seen


@pytest.mark.parametrize("name", STEP_MUTANTS)
def test_the_mutant_is_caught(name: str) -> None:
    """By a rule, not by falling over."""
    with switched_on(name):
        for seed in range(SEEDS):
            try:
                run_step_seed(seed)
            except StepBroken:
                return
    raise AssertionError(f"{name} ({STEP_MUTANTS[name][0]}) got through {SEEDS} seeds")
