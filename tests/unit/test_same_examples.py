"""Property tests try the same examples whatever ran before them in the same process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SUBLET: Final = settings.get_profile("sublet")


def examples() -> list[int]:
    """Those of one property, as a test would try them."""
    seen: list[int] = []

    @settings(SUBLET)
    @given(st.integers())
    def note(number: int) -> None:
        seen.append(number)

    note()
    return seen


def test_they_are_derandomized_and_have_no_deadline() -> None:
    assert SUBLET.derandomize
    assert SUBLET.deadline is None


def test_a_module_that_was_loaded_since_changes_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = examples()
    path = tmp_path / "loaded_since.py"
    path.write_text(f"NUMBERS = {tuple(range(10**9, 10**9 + 500))}\n")
    spec = importlib.util.spec_from_file_location("loaded_since", path)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "loaded_since", importlib.util.module_from_spec(spec))
    assert examples() == before
