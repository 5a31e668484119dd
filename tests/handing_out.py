"""How tests are handed to several processes: as ``--dist=loadgroup`` of pytest-xdist does it, but without walking
through all that was ever handed out each time a test ends. With ten thousand tests that takes seconds, of a core that
tests could have.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

__all__ = ["HandingOut"]


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
