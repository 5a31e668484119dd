"""What `sublet top` shows of made-up offices, at the sizes that terminals have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transcripts.top.scenes import SCENES, looked_at

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", SCENES)
def test_a_screen_looks_as_it_did(name: str) -> None:
    """`SUBLET_REWRITE=1` writes down what is really shown."""
    path = FOLDER / f"{name}.txt"
    told = path.read_text(encoding="utf-8")
    real = looked_at(name, told)
    if os.environ.get("SUBLET_REWRITE") == "1":
        path.write_text(real, encoding="utf-8")
        return
    assert real == told


def test_a_transcript_that_shows_something_else_is_caught() -> None:
    told = "> 40x10\n|nothing|\n"
    assert looked_at("nothing", told) != told


def test_every_transcript_has_a_scene_and_is_seen_at_both_usual_widths() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.txt")}
    assert texts.keys() == SCENES.keys()
    for text in texts.values():
        assert "> 80x24" in text
        assert "> 200x" in text
