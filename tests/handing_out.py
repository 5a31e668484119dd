"""How tests are handed to several processes: as ``--dist=loadgroup`` of pytest-xdist does it, but without walking
through all that was ever handed out each time a test ends. With ten thousand tests that takes seconds, of a core that
tests could have.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

__all__ = ["HandingOut", "Reporting"]

SHORT_S: Final = 0.1
"""What took longer is reported in any case: it may be among the slowest."""


class _WhatIsLeft(LoadGroupScheduling):  # type: ignore[misc]
    """Forgets the groups that are done."""

    def _reschedule(self, node: Any) -> None:
        given = self.assigned_work[node]
        for group in [group for group, tests in given.items() if all(tests.values())]:
            del given[group]
        super()._reschedule(node)


class HandingOut:
    """For the process that hands out and reports."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        return _WhatIsLeft(config, log) if config.getvalue("dist") == "loadgroup" else None


class Reporting:
    """For each process that runs tests: of a test that passes, one report is sent, not six messages, each of which
    costs the process that reports as much as a short test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if says_something(report):
                item.ihook.pytest_runtest_logreport(report=report)
        return True


def says_something(report: pytest.TestReport) -> bool:
    """Whether it is the test's own, or has more to say than that a set-up or a teardown went well."""
    is_own = report.when == "call" or not report.passed
    return is_own or bool(report.user_properties or report.sections) or report.duration > SHORT_S
