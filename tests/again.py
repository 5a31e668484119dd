"""With ``SUBLET_AGAIN=1`` a test that failed among thousands is run once more, alone, and is named if it passes then.

Thousands of tests share a few cores here, many of them with processes and clocks of their own, and on a machine that
stands still for seconds one of them may see what it would not see otherwise. Such a test is *unsteady*: it does not
fail the run, but the run says which it was and shows how it failed, since that is a bug to be found, in the test or in
what it tests. Whoever fails twice has failed, and so has a run in which more than ``UNSTEADY_AT_MOST`` fail at all:
that is not chance.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

UNSTEADY_AT_MOST: Final = 2
"""Tests that may fail in one run before nothing is run again."""


class Again:
    """Notes, in the process that reports, what failed; looks again when all is over."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}  # in the order in which they failed
        self.unsteady: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[plain(report.nodeid)] = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(self.failed) <= UNSTEADY_AT_MOST:
            return
        passed = [test for test in self.failed if passes_alone(test)]
        if len(passed) == len(self.failed):
            self.unsteady = passed
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.unsteady:
            terminalreporter.write_line(f"unsteady: {test} failed among the others and passed alone; find out why.")


def plain(nodeid: str) -> str:
    """The name by which pytest finds a test: without the group that pytest-xdist writes behind it."""
    test, at, group = nodeid.rpartition("@")
    return test if at and "]" not in group else nodeid


def passes_alone(test: str) -> bool:
    """Whether the test passes by itself, in a process of its own."""
    print(f"\nonce more, alone: {test}", flush=True)
    environment = {key: value for key, value in os.environ.items() if key not in ("SUBLET_AGAIN", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "--timeout=300", test]
    return subprocess.run(command, env=environment, check=False).returncode == 0
