"""What a test leaves behind is laid to that test, and to no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.small_suite import run_small

DROPS = """
import asyncio, gc
def test_drops():
    loop = asyncio.new_event_loop()
    gc.collect(1)  # it has grown old, and is garbage once the test is over
def test_next():
    gc.collect()
"""
KEEPS = """
import asyncio, gc
@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()
def test_uses(loop): asyncio.run(asyncio.sleep(0))
def test_uses_it_again(loop): gc.collect()
"""


@pytest.mark.parametrize("options", [(), ("-n", "1", "--dist=loadgroup")], ids=["one process", "a worker"])
def test_an_event_loop_that_was_dropped_open_is_laid_to_its_own_test(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The next test, which looks for all garbage, finds nothing of it."""
    result = run_small(tmp_path, DROPS, "-W", "error", *options)
    assert result.returncode == 0, result.stdout
    [said] = [line for line in result.stdout.splitlines() if line.startswith("left open: ")]
    assert said == "left open: test_small.py::test_drops dropped an event loop that it had not closed"


def test_an_event_loop_that_a_fixture_of_the_file_closes_is_left_alone(tmp_path: Path) -> None:
    result = run_small(tmp_path, KEEPS, "-W", "error")
    assert result.returncode == 0, result.stdout
    assert "left open" not in result.stdout


IMPORTS = """
import gc, sys, types
def test_imports_little(): sys.modules["one"] = types.ModuleType("one")
def test_finds_as_much_to_look_at(): BEFORE.append(gc.get_freeze_count())
def test_imports_much(): sys.modules.update((f"made_{n}", types.ModuleType(f"made_{n}")) for n in range(100))
def test_finds_it_left_out(): assert gc.get_freeze_count() > BEFORE[0] + 100
BEFORE = []
"""


def test_what_a_test_imports_is_not_walked_through_by_later_ones(tmp_path: Path) -> None:
    result = run_small(tmp_path, IMPORTS, "-W", "error")
    assert result.returncode == 0, result.stdout
