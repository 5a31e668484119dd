"""A test that fails among others and passes alone is named, and fails the run as any other failure does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.again import plain
from tests.unit.small_suite import run_small

TRIES_TWICE = """
def once(name):
    if not os.path.exists(name):
        open(name, "w").close()
        raise AssertionError("the first time")

def test_steady(): pass
@pytest.mark.xdist_group("some")
def test_one(): once("one")
@pytest.mark.parametrize("case", ["a@b"])
def test_two(case): once("two")
"""


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist=loadgroup")], ids=["one process", "two workers"])
def test_a_test_that_passes_alone_is_named_and_fails_the_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = run_small(tmp_path, TRIES_TWICE, *options, SUBLET_AGAIN="1")
    assert result.returncode == 1, result.stdout
    assert "the first time" in result.stdout, "how it failed is shown"
    assert "unsteady: test_small.py::test_one failed among the others" in result.stdout
    assert "unsteady: test_small.py::test_two[a@b] failed among the others" in result.stdout
    assert "test_steady" not in result.stdout


def test_nobody_is_asked_again_unless_it_is_wished(tmp_path: Path) -> None:
    result = run_small(tmp_path, TRIES_TWICE)
    assert result.returncode == 1, result.stdout
    assert "once more" not in result.stdout


@pytest.mark.parametrize(
    "fault", ["def test_bad(): assert False", "@pytest.fixture\ndef x(): 1 / 0\ndef test_bad(x): pass"]
)
def test_who_fails_twice_fails_the_run(tmp_path: Path, fault: str) -> None:
    result = run_small(tmp_path, "def test_good(): pass\n" + fault, SUBLET_AGAIN="1")
    assert result.returncode == 1, result.stdout
    assert "once more, alone: test_small.py::test_bad" in result.stdout
    assert "unsteady:" not in result.stdout


def test_three_failures_are_no_chance(tmp_path: Path) -> None:
    result = run_small(tmp_path, TRIES_TWICE + "def test_three(): once('three')", SUBLET_AGAIN="1")
    assert result.returncode == 1, result.stdout
    assert "once more" not in result.stdout


def test_an_unsteady_test_is_named_beside_one_that_fails_twice(tmp_path: Path) -> None:
    result = run_small(
        tmp_path, TRIES_TWICE.replace("def test_two(case): once", "def test_two(case): 1 / 0; once"), SUBLET_AGAIN="1"
    )
    assert result.returncode == 1, result.stdout
    assert "unsteady: test_small.py::test_one failed among the others" in result.stdout
    assert "unsteady: test_small.py::test_two" not in result.stdout


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("tests/a.py::test_b", "tests/a.py::test_b"),
        ("tests/a.py::test_b@tests/a.py", "tests/a.py::test_b"),
        ("tests/a.py::test_b[c@d]", "tests/a.py::test_b[c@d]"),
        ("tests/a.py::test_b[c@d]@group", "tests/a.py::test_b[c@d]"),
    ],
)
def test_the_group_is_no_part_of_the_name(told: str, name: str) -> None:
    assert plain(told) == name
