"""The law of a training step: which acts, in which order, and what follows from what is found."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sublet.replicated import Effect, Save
from sublet.training.step_protocol import (
    ACTS,
    DECISION,
    Act,
    Reserved,
    Saved,
    StepVerdict,
    drawing,
    what_is_saved,
)
from sublet.values import Epoch
from tests.unit.training.stage import after_death_before

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


def save(version: int, step: int | None, fingerprint: str = "f") -> Save:
    effect = None if step is None else Effect(f"k{step}", fingerprint, step)
    return Save(version=version, size=0, hash="", schema="", policy="", epoch=Epoch(1, 1), wall_ns=0, effect=effect)


def test_every_pair_of_records_has_one_answer() -> None:
    assert set(DECISION) == set(itertools.product(Reserved, Saved))


def test_only_a_new_reservation_over_the_expected_state_runs() -> None:
    assert [pair for pair, verdict in DECISION.items() if verdict is StepVerdict.RUN] == [(Reserved.NEW, Saved.BEFORE)]


def test_what_is_saved_is_never_done_again() -> None:
    """Whatever the store says."""
    done = {DECISION[reserved, saved] for reserved in Reserved for saved in (Saved.THIS, Saved.OTHER, Saved.LATER)}
    assert StepVerdict.RUN not in done


def test_the_page_shows_the_table() -> None:
    assert drawing() in PAGE.read_text()
    assert all(f"`{act}`" in PAGE.read_text() for act in ACTS)


@pytest.mark.parametrize(
    ("saves", "step", "expected", "found"),
    [
        ([], 1, None, Saved.BEFORE),
        ([], 1, 0, Saved.BEFORE),
        ([], 1, 1, Saved.ELSEWHERE),
        ([save(4, 41)], 42, 4, Saved.BEFORE),
        ([save(4, 41)], 42, None, Saved.BEFORE),
        ([save(4, 41)], 42, 3, Saved.ELSEWHERE),
        ([save(4, 41)], 42, 9, Saved.ELSEWHERE),
        ([save(5, 42), save(4, 41)], 42, 4, Saved.THIS),
        ([save(5, 42), save(4, 41)], 42, 9, Saved.THIS),
        ([save(5, 42), save(4, 41)], 41, None, Saved.THIS),
        ([save(5, 42, "other"), save(4, 41)], 42, 4, Saved.OTHER),
        ([save(5, 42), save(4, 41)], 40, None, Saved.LATER),
        ([save(6, None), save(5, 42)], 42, None, Saved.THIS),
        ([save(6, None), save(5, 42)], 43, 6, Saved.BEFORE),
        ([save(1, None)], 1, 1, Saved.BEFORE),
    ],
)
def test_what_the_saves_say_of_a_step(saves: list[Save], step: int, expected: int | None, found: Saved) -> None:
    assert what_is_saved(saves, f"k{step}", "f", step, expected) is found


def test_what_is_left_by_a_death_before_each_act() -> None:
    """Up to the save nothing happened; one act long the record decides; then it is known."""
    left = [after_death_before(act) for act in ACTS]
    assert left[: ACTS.index(Act.COMPLETE)] == [StepVerdict.RUN] * ACTS.index(Act.COMPLETE)
    assert left[ACTS.index(Act.COMPLETE) :] == [StepVerdict.SETTLE, StepVerdict.DUPLICATE]
