"""Of a test, the process that runs it sends the report of its call, and of its set-up and teardown what matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.handing_out import SHORT_S, says_something
from tests.unit.small_suite import run_small


def report(when: Any = "setup", outcome: Any = "passed", duration: float = 0.0, **more: Any) -> pytest.TestReport:
    return pytest.TestReport("test_it", ("test.py", 1, "test_it"), {}, outcome, None, when, duration=duration, **more)


@pytest.mark.parametrize(
    ("one", "is_sent"),
    [
        (report(), False),
        (report("teardown"), False),
        (report("call"), True),
        (report("setup", "failed"), True),
        (report("setup", "skipped"), True),
        (report("teardown", "failed"), True),
        (report("setup", duration=2 * SHORT_S), True),
        (report("teardown", user_properties=[("left open", "an event loop")]), True),
        (report("teardown", sections=[("Captured stderr teardown", "a warning")]), True),
    ],
)
def test_what_passed_in_no_time_and_says_nothing_is_not_sent(one: pytest.TestReport, is_sent: bool) -> None:
    assert says_something(one) is is_sent


FAILS_AROUND = """
import time
@pytest.fixture
def slow(): time.sleep(0.2)
@pytest.fixture
def breaks(): yield; raise AssertionError("in the teardown")
def test_slow(slow): pass
def test_breaks(breaks): pass
"""


def test_a_worker_tells_of_slow_setups_and_failed_teardowns(tmp_path: Path) -> None:
    result = run_small(tmp_path, FAILS_AROUND, "-n", "1", "--durations=5", "--durations-min=0.1")
    assert result.returncode == 1, result.stdout
    assert "in the teardown" in result.stdout
    assert "setup    test_small.py::test_slow" in result.stdout
    assert "2 passed, 1 error" in result.stdout
