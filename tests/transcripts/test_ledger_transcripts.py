"""The stories of the ledger come out as they are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transcripts.ledger.story import replayed

STORIES = sorted((Path(__file__).parent / "ledger").glob("*.txt"))


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
    told = "> 0s node n1 gpu0=16GiB\n  done\n> 0s ann asks L1 gpu=8GiB\n  refused\n"
    assert replayed(told) != told


def test_there_are_stories() -> None:
    assert len(STORIES) >= 15
