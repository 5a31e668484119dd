"""``tests/gpu`` and ``benchmarks/gpu`` on pretended cards, so that no user with a card is the first to run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.rows import ROWS
from tests.rig.gpu_suite import ROWS_LEFT_OUT, TESTS_LEFT_OUT
from tests.rig.personalities import FOUR_H100, H100, Personality
from tests.rig.rig import make_rig
from tests.traces import plain_env

pytestmark = pytest.mark.needs("gcc")

ROOT: Final = Path(__file__).parents[2]
FILES: Final = sorted((ROOT / "tests/gpu").glob("test_*.py"))
SMALL: Final = {"SUBLET_GPU_MIB": "16", "SUBLET_GPU_PROGRAMS": "4"}
LIMIT_S: Final = 240.0
ONE_H100: Final = Personality(name="an H100, driver 580, bare metal", cards=(H100,), lines=FOUR_H100.lines)
"""Most machines have one card."""


def on_cards(place: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """A Python program on a machine with pretended cards."""
    env = plain_env() | make_rig(place, ONE_H100).env | SMALL
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_what_needs_a_gpu_passes_on_pretended_cards(tmp_path: Path) -> None:
    """In one process, as `make test-gpu` runs it: first the file that wants a card which nobody of it ever used."""
    words = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.rig.gpu_suite",
        *(word for plugin in ("cacheprovider", "xdist", "hypothesispytest") for word in ("-p", f"no:{plugin}")),
        f"--basetemp={tmp_path}/tests",
    )
    done = on_cards(tmp_path, *words, *map(str, FILES))
    assert done.returncode == 0, done.stdout
    assert re.search(r"^[1-9]\d* passed(, \d+ deselected)? in ", done.stdout, re.MULTILINE), done.stdout


def test_what_is_left_out_there_is_there_and_is_said() -> None:
    said = (ROOT / "docs/proof.md").read_text()
    assert [name for name in (*TESTS_LEFT_OUT, *ROWS_LEFT_OUT) if f"`{name}`" not in said] == []
    assert [why for why in (*TESTS_LEFT_OUT.values(), *ROWS_LEFT_OUT.values()) if f"| {why} |" not in said] == []
    files = (*FILES, ROOT / "src/sublet/testing/device_conformance.py")
    text = "".join(file.read_text() for file in files)
    assert [name for name in TESTS_LEFT_OUT if not re.search(rf"^ *(class|def) {name}\b", text, re.MULTILINE)] == []


def test_rows_run_in_their_short_form(tmp_path: Path) -> None:
    """Two rounds of each. A pretended card has no speed, so nothing is made of the figures."""
    rows = ["suspended 16 MiB", *(row for row in ROWS if not row.startswith("suspended") and row not in ROWS_LEFT_OUT)]
    done = on_cards(tmp_path, "-m", "benchmarks.gpu", *rows)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| ") + 1 == len(rows) + 1, done.stdout  # going and coming back are two
    assert ROWS_LEFT_OUT.keys() < ROWS.keys()


def test_a_row_that_is_none_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lunches"]) == 2
    assert "There is no row lunches; there are: launches, counted, written" in capsys.readouterr().err
