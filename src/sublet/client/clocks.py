"""The client's clock: CLOCK_BOOTTIME on Linux, elsewhere the nearest clock that runs while the machine sleeps."""

from __future__ import annotations

import sys
import time

from sublet.clock import Clock, SystemClock


class _PortableClock:
    """For clients on other systems. Its instants are compared with no other clock's, so its domain has no name."""

    domain = "this process"

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()


def client_clock() -> Clock:
    """The clock a holder's deadlines are reckoned by."""
    return SystemClock() if sys.platform == "linux" else _PortableClock()
