"""What the suite promises about tests it cannot run here, tried on small suites of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.unit.small_suite import run_small

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run pytest on one test file in a process of its own, with this suite's conftest."""
    return partial(run_small, tmp_path)


NEEDS_A_MISSING_PROGRAM = """
@pytest.mark.needs("no-such-program")
def test_one(): raise AssertionError
@pytest.mark.needs("no-such-program", "sh")
def test_two(): raise AssertionError
@pytest.mark.needs("sh")
def test_three(): pass
"""


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_missing_program_is_named_with_the_tests_it_leaves_out(run: Run, options: tuple[str, ...]) -> None:
    result = run(NEEDS_A_MISSING_PROGRAM, *options)
    assert result.returncode == 0, result.stdout
    assert "left out: 2 tests for want of no-such-program" in result.stdout
    assert "(2 in test_small.py)" in result.stdout
    assert "1 passed, 2 skipped" in result.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_where_all_is_required_a_missing_program_fails_the_run(run: Run, options: tuple[str, ...]) -> None:
    result = run(NEEDS_A_MISSING_PROGRAM, *options, SUBLET_REQUIRE_ALL="1")
    assert result.returncode == 1, result.stdout
    assert "this run FAILS" in result.stdout


@pytest.mark.parametrize("body", ["pytest.skip('for no good reason')", "pytest.importorskip('no_such_module')"])
def test_where_all_is_required_a_skip_by_hand_fails_the_run(run: Run, body: str) -> None:
    result = run(f"def test_one(): {body}", SUBLET_REQUIRE_ALL="1")
    assert result.returncode == 1, result.stdout
    assert "left out: 1 test for a reason of their own (test_small.py::test_one)" in result.stdout


def test_where_all_is_required_gpu_tests_may_still_be_left_out(run: Run) -> None:
    source = "@pytest.mark.gpu\ndef test_one(): pass\n@pytest.mark.needs('gpu')\ndef test_two(): pass"
    result = run(source, SUBLET_REQUIRE_ALL="1")
    assert result.returncode == 0, result.stdout
    assert "left out: 2 tests for want of a GPU" in result.stdout or "2 passed" in result.stdout


def test_an_expected_failure_is_not_left_out(run: Run) -> None:
    result = run("@pytest.mark.xfail\ndef test_one(): raise AssertionError", SUBLET_REQUIRE_ALL="1")
    assert result.returncode == 0, result.stdout
    assert "left out" not in result.stdout


def test_a_failing_test_fails_the_run_whatever_was_left_out(run: Run) -> None:
    result = run(NEEDS_A_MISSING_PROGRAM + "def test_four(): assert False")
    assert result.returncode == 1, result.stdout


def test_a_file_cannot_leave_itself_out_as_a_whole(run: Run) -> None:
    result = run("pytest.skip('all of it', allow_module_level=True)")
    assert result.returncode != 0
    assert "mark its tests with pytest.mark.needs" in result.stdout
