"""The command that counts green runs of the suite beside a load: what counts, what starts the count anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import under_load
from tools.under_load import in_a_row, load, main, run_once, state_of_the_source

SAYS = "import sys; print({said!r}); sys.exit({code})"
UNSTEADY = "unsteady: tests/a.py::test_b failed among the others and passed alone, so this run FAILS; find out why."


def said_by(said: str, code: int) -> list[str]:
    return [sys.executable, "-c", SAYS.format(said=said, code=code)]


@pytest.mark.parametrize(
    ("said", "code", "failed", "unsteady"),
    [
        ("== 3 passed in 0.10s ==", 0, [], []),
        ("FAILED tests/a.py::b[x - y] - assert 0\n== 1 failed, 2 passed in 0.10s ==", 1, ["tests/a.py::b[x - y]"], []),
        ("ERROR tests/a.py::test_b - boom\n== 1 error in 0.10s ==", 1, ["tests/a.py::test_b"], []),
        (UNSTEADY, 0, [], ["tests/a.py::test_b"]),
        ("make: *** [test] Error 2", 2, [], []),
    ],
)
def test_a_run_is_green_only_if_nothing_failed_even_once(
    said: str, code: int, failed: list[str], unsteady: list[str]
) -> None:
    found = run_once(said_by(said, code), processes=1, seed=3)
    assert found["green"] is (said == "== 3 passed in 0.10s ==")
    assert (found["failed"], found["unsteady"], found["exit_status"]) == (failed, unsteady, code)
    assert found["hash_seed"] == 3


def test_a_run_that_hangs_is_ended_and_red() -> None:
    found = run_once([sys.executable, "-c", "import time; time.sleep(600)"], processes=1, seed=1, longest_s=0.5)
    assert found["exit_status"] == -9
    assert not found["green"]
    assert found["seconds"] < 300


def test_the_load_ends_with_the_block() -> None:
    before = children()
    with load(2, 60):
        assert len(children() - before) == 2
    assert not children() - before


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


RUN: dict[str, Any] = {"green": True, "source": "now", "load": 8}


@pytest.mark.parametrize(
    ("runs", "count"),
    [
        ([], 0),
        ([RUN, RUN], 2),
        ([RUN, {**RUN, "green": False}, RUN], 1),
        ([RUN, {**RUN, "source": "before"}, RUN, RUN], 2),
        ([RUN, {**RUN, "load": 4}], 0),
    ],
)
def test_a_red_run_or_another_source_or_less_load_starts_the_count_anew(runs: list[dict[str, Any]], count: int) -> None:
    assert in_a_row(runs, "now", 8) == count


def test_whatever_tests_may_read_is_part_of_the_source_and_a_result_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed, or added and not committed yet."""
    monkeypatch.setattr(under_load, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    for name in ("tools", "docs", "tests/mutants"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text("before")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["add", "."], [*author, "commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    states = [state_of_the_source()]
    for name, text in (("docs/page.md", "after"), ("tools/new.py", "1"), ("tools/new.py", "2")):
        (tmp_path / name).write_text(text)
        states.append(state_of_the_source())
    assert len(set(states)) == 4
    for name in ("tools/under_load.json", "tests/mutants/table.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("new")
    assert state_of_the_source() == states[-1]


def test_a_run_in_which_the_source_changed_counts_for_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(("before", "after"))
    monkeypatch.setattr(under_load, "state_of_the_source", lambda: next(states))
    found = run_once(said_by("3 passed in 0.1s", 0), processes=1, seed=1)
    assert found["green"]
    assert [in_a_row([found], source, 1) for source in ("before", "after")] == [0, 0]


def test_the_count_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three commands of one run each are as good as one of three, and what was interrupted is not in the result."""
    monkeypatch.setattr(under_load, "state_of_the_source", lambda: "now")
    result = tmp_path / "result.json"
    words = ["--result", str(result), "--green", "3", "--load", "1", "--runs", "1", *said_by("3 passed in 0.1s", 0)]
    words.insert(8, "--")
    assert main(words) == 1
    with monkeypatch.context() as patch:
        patch.setattr(under_load, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(words)
    assert len(json.loads(result.read_text())["runs"]) == 1
    assert main(words) == 1
    assert main(words) == 0
    told = json.loads(result.read_text())
    assert told["green_in_a_row"] == 3
    assert [one["hash_seed"] for one in told["runs"]] == [1, 2, 3]
    assert main(words) == 0, "it is done"
    assert len(json.loads(result.read_text())["runs"]) == 3


def interrupted(processes: int, seconds: float) -> Any:
    raise KeyboardInterrupt
