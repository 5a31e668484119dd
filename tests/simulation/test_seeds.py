"""The pretended world, from seeds: every rule holds, and every fault was there to break it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from sublet.errors import SubletError
from sublet.node.agent.core import AgentCore, LinkLoss
from sublet.node.supervisor.core import SupervisorCore
from sublet.office.ledger import preemption, scheduler
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.placement import fit_on_node
from sublet.office.ledger.records import Want
from sublet.office.ledger.scheduler import Schedule
from sublet.values import TenantId
from tests.simulation import coverage
from tests.simulation.mutant import Change, in_force
from tests.simulation.run import CHUNK, MODES, run_many, run_seed

RARE: Final = (226, 172, 64, 208, 102, 266, 90, 271, 210, 137, 43, 294, 178, 152, 188)
"""Seeds in which every fault meets every state, found greedily among the first few hundred. They are tried first."""
SEEDS: Final = 40
SEEDS_MAX: Final = 500
"""As many as it takes until every fault has met every state; `make soak` runs a million."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_seeds_break_no_rule_and_leave_no_fault_untried() -> None:
    """Safety and liveness in turns. A failure names its seed and the command that repeats it."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # else other tests run on the other cores
    processes = min(2, os.cpu_count() or 1) if alone else 1
    order = [*RARE, *(seed for seed in range(SEEDS_MAX) if seed not in RARE)]
    tally = run_many(order[:SEEDS], processes=processes)
    while coverage.missing(tally.met) and tally.seeds < SEEDS_MAX:
        tally.add(run_many(order[tally.seeds : tally.seeds + 2 * CHUNK], processes=processes))
    assert not tally.failures, "\n".join(map(str, tally.failures))
    assert not coverage.missing(tally.met), f"never met: {coverage.missing(tally.met)}\n{coverage.table(tally.met)}"
    assert tally.seen["effect taken"] > 50 * tally.seeds
    assert tally.seen["effect refused"] > tally.seeds
    assert tally.seen["ended with its process"] > tally.seeds // 10
    assert tally.seen["parked, and ended with its process"]


def test_a_seed_always_tells_the_same_story() -> None:
    """The same seed twice: the same steps, the same faults in the same states."""
    for mode in ("safety", "liveness"):
        first, second = run_seed(11, mode), run_seed(11, mode)
        assert (first.steps, first.met, first.seen) == (second.steps, second.met, second.seen)
        assert first.steps > 1_000


def test_a_failure_names_the_command_that_repeats_it() -> None:
    """What is printed can be pasted."""
    failure = run_seed(0, "safety", "Z13").failures[0]
    assert failure.repeat == "python -m tests.simulation --mode safety --from 0 --seeds 1 --mutant Z13"
    assert failure.repeat in str(failure)
    assert run_seed(0, "safety").failures == []


@pytest.mark.parametrize(
    ("part", "name", "rule"),
    [(preemption, "victim", "S6"), (Schedule, "_fit", "S4")],
    ids=["nobody is ever taken", "nobody in the line is ever let in"],
)
def test_a_scheduler_that_sits_on_its_hands_is_noticed(
    part: object, name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a few seeds, and by the rule that is about it."""
    monkeypatch.setattr(part, name, lambda *_, **__: None)
    rules = (failure.rule for seed in range(25) for failure in run_seed(seed, "safety").failures)
    assert rule in rules, "no seed broke it"


def _never_joins_again(original: Any) -> Any:
    def lost(self: AgentCore, error: SubletError | None) -> LinkLoss:
        loss: LinkLoss = original(self, error)
        return LinkLoss.REPLACED if loss is LinkLoss.JOIN_AGAIN else loss

    return lost


def _forgets_its_table(original: Any) -> Any:
    def configure(self: SupervisorCore[Any], *asked: Any) -> bool:
        self.law = None
        is_new: bool = original(self, *asked)
        return is_new

    return configure


@pytest.mark.parametrize(
    ("change", "seed", "rule"),
    [
        ((AgentCore, "lost", _never_joins_again), 13, "S3"),
        ((SupervisorCore, "configure", _forgets_its_table), 0, "L4"),
    ],
    ids=["a lost supervisor is not replaced", "a takeover empties the supervisor's table"],
)
def test_a_mistake_between_an_office_and_its_supervisor_is_noticed(change: Change, seed: int, rule: str) -> None:
    """The first seed that shows it is given: an office without a supervisor frees nothing, and a new table ends guests
    whose leases live."""
    with in_force([change]):
        failures = run_seed(seed, MODES[seed % len(MODES)]).failures
    assert [failure.rule for failure in failures] == [rule]


def test_who_waits_for_what_is_quarantined_and_keeps_the_rest_from_others_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the scheduler once did: a person may look after it tomorrow, or never. Seed 33 is the first to notice."""

    def as_if_it_came_clean(room: Room) -> Room:
        return replace(room, free=room.capacity - room.foreign, slices=0, exclusive=0, quarantined=0, tenants={})

    def fits(wants: Sequence[Want], tenant: TenantId, rooms: Sequence[Room]) -> bool:
        return fit_on_node(wants, tenant, list(map(as_if_it_came_clean, rooms)), mix=True) is not None

    monkeypatch.setattr(scheduler, "fits_without_leases", fits)
    seeds = ((seed, MODES[seed % len(MODES)]) for seed in (33, *range(60)))
    failures = (failure for seed, mode in seeds for failure in run_seed(seed, mode).failures)
    assert next(failures).rule == "S4"


def test_what_an_older_office_ordered_to_be_removed_is_kept_for_the_restored_one() -> None:
    """Safety seed 5441: its disk was stuck, and the order was carried out after the new office had taken it in."""
    assert run_seed(5441, "safety").failures == []


@pytest.mark.parametrize("seed", [1591, 2616])
def test_the_healed_core_is_whole(seed: int) -> None:
    """1591: who heard of his place in the line after he went home waited on, for a device on which somebody was stuck
    for good. 2616: the office had come out of a backup from before there were tenants, and nobody made them again."""
    assert run_seed(seed, "liveness").failures == []
