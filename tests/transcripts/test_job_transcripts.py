"""The stories of a job's coordinator come out as they are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transcripts.jobs.story import replayed

STORIES = sorted((Path(__file__).parent / "jobs").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_comes_out_as_it_is_told(path: Path) -> None:
    """`SUBLET_REWRITE=1` writes down what really came of it."""
    told = path.read_text(encoding="utf-8")
    real = replayed(told)
    if os.environ.get("SUBLET_REWRITE") == "1":
        path.write_text(real, encoding="utf-8")
        return
    assert real == told


def test_a_story_that_tells_it_otherwise_is_caught() -> None:
    told = "> 0s chunks 1\n  2 wait\n"
    assert replayed(told) != told


def test_there_are_stories() -> None:
    assert len(STORIES) >= 3
