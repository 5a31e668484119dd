"""The replicated register from seeds: every rule holds, and the known ways to get it wrong are found."""

from __future__ import annotations

import pytest

from tests.simulation.linearizable import Call, is_linearizable
from tests.simulation.register_mutants import MUTANTS, Mutant, switched_on
from tests.simulation.register_world import FAULTS
from tests.simulation.registers import hunt, run_many, run_seed

SEEDS = 100
"""As many as it takes until each fault was met often; `make soak` runs a million."""
SEEDS_MAX = 2_500
CAUGHT_AT = {"R5": 1593, "R10": 181, "R11": 73, "R20": 119, "R25": 61}
"""The first seed that catches it, where that is a late one. It is tried before the others."""
MET = (
    *("Took", "BallotRefused", "ForeignRegister", "Outdated", "Behind", "lost", "cut", "asked in vain"),
    *("crash", "slow", "amnesia", "spare", "change done", "change failed", "equal lease", "restored office"),
    *("adoption", "writer died", "writer fenced", "writer foreign", "cas done", "cas refused", "cas unknown", "read"),
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_seeds_break_no_rule_and_leave_no_fault_untried() -> None:
    """A failure names its seed and the command that repeats it."""
    tally = run_many(range(SEEDS), processes=1)
    assert not tally.failures, "\n".join(map(str, tally.failures))
    assert not [what for what in MET if tally.seen[what] < SEEDS // 10]


def test_a_seed_always_tells_the_same_story() -> None:
    """The same seed twice: the same steps."""
    first, second = run_seed(11), run_seed(11)
    assert (first.steps, first.seen) == (second.steps, second.seen)
    assert first.steps > 200


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name: str) -> None:
    """By a rule of the register, not by falling over."""
    failures = run_seed(CAUGHT_AT[name], name).failures if name in CAUGHT_AT else []
    failure = failures[0] if failures else hunt(name, SEEDS_MAX)[1]
    assert failure is not None, f"{name} ({MUTANTS[name].breaks}) got through {SEEDS_MAX} seeds"
    assert failure.rule != "error", str(failure)
    assert f"--mutant {name}" in str(failure)


def test_what_catches_a_mutant_is_the_mutant() -> None:
    """The seeds that are tried first break no rule by themselves."""
    assert all(seed < SEEDS_MAX for seed in CAUGHT_AT.values())
    assert not [seed for seed in CAUGHT_AT.values() if run_seed(seed).failures]


def test_a_mutant_is_gone_after_its_context() -> None:
    """Nothing of it stays behind."""
    for name, mutant in MUTANTS.items():
        before = state_of(mutant)
        with pytest.raises(ZeroDivisionError), switched_on(name):
            fail_if_unchanged(mutant, before)
        assert state_of(mutant) == before


def state_of(mutant: Mutant) -> list[object]:
    return [owner.__dict__[attribute] for owner, attribute, _ in mutant.changes]


def fail_if_unchanged(mutant: Mutant, before: list[object]) -> None:
    assert state_of(mutant) != before
    raise ZeroDivisionError


def test_every_fault_is_a_switch() -> None:
    """A seed has each with the chance of a coin."""
    assert set(FAULTS) == {
        *("cut", "crash", "slow", "amnesia", "replace", "equal lease", "restored office", "other office")
    }


# ---- the checker itself, on histories whose answer is plain ----


def wrote(at: float, until: float, expected: int, name: bytes, *, maybe: bool = False) -> Call:
    return Call(at, until, None, expected=expected, wrote=name, maybe=maybe)


def saw(at: float, until: float, version: int, name: bytes = b"") -> Call:
    return Call(at, until, (version, name))


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [wrote(0, 1, 0, b"a"), saw(2, 3, 1, b"a")],
        [wrote(0, 9, 0, b"a"), saw(1, 2, 1, b"a"), saw(3, 4, 1, b"a")],
        [wrote(0, 9, 0, b"a"), saw(1, 2, 0), saw(3, 4, 1, b"a")],
        [wrote(0, 1, 0, b"a", maybe=True), saw(5, 6, 0), saw(7, 8, 1, b"a")],
        [wrote(0, 1, 0, b"a", maybe=True), saw(5, 6, 0), saw(7, 8, 0)],
        [wrote(0, 5, 1, b"b"), wrote(0, 5, 0, b"a"), saw(6, 7, 2, b"b")],
    ],
)
def test_the_checker_finds_an_order_where_there_is_one(calls: list[Call]) -> None:
    assert is_linearizable(calls)


@pytest.mark.parametrize(
    "calls",
    [
        [saw(0, 1, 1, b"a")],
        [wrote(0, 1, 0, b"a"), saw(2, 3, 0)],
        [wrote(0, 9, 0, b"a"), saw(1, 2, 1, b"a"), saw(3, 4, 0)],
        [wrote(0, 1, 0, b"a"), wrote(0, 1, 0, b"b")],
        [wrote(0, 1, 0, b"a"), saw(2, 3, 1, b"b")],
        [wrote(5, 6, 0, b"a", maybe=True), saw(0, 1, 1, b"a")],
        [wrote(0, 1, 0, b"a", maybe=True), wrote(2, 3, 0, b"b"), saw(4, 5, 1, b"a")],
    ],
)
def test_the_checker_finds_none_where_there_is_none(calls: list[Call]) -> None:
    assert not is_linearizable(calls)
