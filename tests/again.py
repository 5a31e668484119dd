"""With ``SUBLET_AGAIN=1`` a test that failed among thousands is run once more, alone, and is named if it passes then.

The run has failed all the same. The second run only tells the person who reads the end of it what to look for: a test
that passes alone is *unsteady*, which is a bug in the test or in what it tests; a test that fails twice is simply
broken. Where more than ``ASKED_AT_MOST`` tests failed, nothing is run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

ASKED_AT_MOST: Final = 2
"""Tests that may fail in one run before nothing is run again."""


class Again:
    """Notes, in the process that reports, what failed; runs it again when all is over. It changes no result."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}  # in the order in which they failed
        self.unsteady: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[plain(report.nodeid)] = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and len(self.failed) <= ASKED_AT_MOST:
            self.unsteady = [test for test in self.failed if passes_alone(test)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.unsteady:
            terminalreporter.write_line(
                f"unsteady: {test} failed among the others and passed alone, so this run FAILS; find out why."
            )


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
