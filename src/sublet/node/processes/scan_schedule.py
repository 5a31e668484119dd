"""Schedules process scans: soon after a process ended, and not so often that nothing else is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sublet.node.loop import Loop, log_internal_error

REST_MAX_NS: Final = 20_000_000
UNSEEN_S: Final = 0.2
"""After a look that could not be taken, for want of descriptors or memory: nothing is concluded from it."""


class ScanSchedule:
    """The looks of one supervisor."""

    def __init__(self, loop: Loop, look: Callable[[bool], None], is_needed: Callable[[], bool]) -> None:
        """``look`` is told whether it is to scan all processes, whatever that costs."""
        self._loop = loop
        self._take = look
        self._is_needed = is_needed
        self._will_look = False
        self._at_all = False
        self._rest_until_ns = 0
        """After a scan, twice its time is left for other work: one scan then finds most of many that end one by one."""

    def soon(self, *, at_all: bool = False) -> None:
        """Look who is left, once in this turn."""
        if not self._is_needed():  # and the next look, which may be the end of a lease, need not scan all for this one
            return
        self._at_all |= at_all
        if not self._will_look:
            self._will_look = True
            if self._loop.now_ns() >= self._rest_until_ns:
                self._loop.soon(self._scan)
            else:
                self._loop.at(self._rest_until_ns, self._scan)

    def _scan(self) -> None:
        self._will_look = False
        began_ns = self._loop.now_ns()
        at_all, self._at_all = self._at_all, False
        try:
            self._take(at_all)
        except Exception as error:  # noqa: BLE001 - nothing is concluded, so nothing becomes free by it
            if not isinstance(error, OSError):
                log_internal_error(error)
            self._loop.after(UNSEEN_S, lambda: self.soon(at_all=at_all))
        now_ns = self._loop.now_ns()
        self._rest_until_ns = now_ns + min(2 * (now_ns - began_ns), REST_MAX_NS)
