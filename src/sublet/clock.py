"""Time as something handed in.

Two kinds of time that must never be mixed: an *instant* decides expiry (nanoseconds of CLOCK_BOOTTIME, which goes on
during suspend, unlike CLOCK_MONOTONIC) and *wall time* is for people and records. An instant means something only
inside its *domain*: one boot of one machine, in one time namespace.
"""

from __future__ import annotations

import os
import time
from typing import Protocol


class Clock(Protocol):
    """The time, for drivers alone. The pure parts get ``now_ns`` as an argument."""

    @property
    def domain(self) -> str:
        """Two instants compare only if their domains are equal."""

    def now_ns(self) -> int:
        """The instant, in nanoseconds of CLOCK_BOOTTIME."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, UTC; it may jump, so nothing is decided by it."""


class SystemClock:
    """The clock of this machine."""

    def __init__(self) -> None:
        self._domain: str | None = None

    @property
    def domain(self) -> str:
        if self._domain is None:  # only when it is asked for: to read it takes a descriptor
            self._domain = _read_domain()
        return self._domain

    def now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_ns(self) -> int:
        return time.time_ns()


def _read_domain() -> str:
    """Boot id and time namespace: a new boot or another namespace starts its instants from elsewhere."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # kernels before 5.6 have one namespace only
        namespace = "time:[0]"
    return f"{boot_id}/{namespace}"
