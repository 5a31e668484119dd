"""Whether the supervisor still turns: it is asked a question every second, and has some time to answer. Pure.

Only its clock ends guests, so a supervisor that stands still (stopped, or waiting for a disk that does not answer)
enforces no deadline. It is not ended for that, since its end is the end of all guests: the operator is told.
"""

from __future__ import annotations

from typing import Final

from sublet.values import NS_PER_S

EVERY_NS: Final = 1 * NS_PER_S
SILENT_NS: Final = 10 * NS_PER_S
"""A question that was not answered for so long was met by a supervisor that stands still."""


class Watchdog:
    """The questions to one supervisor."""

    def __init__(self) -> None:
        self._asked_ns: int | None = None
        """When the question was asked that was not answered yet."""
        self._answered_ns: int | None = None
        """When the last one was answered, or the first look was taken."""
        self._looked_ns: int | None = None

    def look(self, now_ns: int) -> bool:
        """Whether a question is to be asked now. To be called every second or so, while there is a supervisor."""
        paused = self._looked_ns is not None and now_ns - self._looked_ns > SILENT_NS // 2
        self._looked_ns = now_ns
        if self._asked_ns is not None:
            if paused:  # the office, or the machine, stood still itself: from now on it counts
                self._asked_ns = now_ns
            return False
        if self._answered_ns is None:
            self._answered_ns = now_ns
        if now_ns - self._answered_ns < EVERY_NS:
            return False
        self._asked_ns = now_ns
        return True

    def answered(self, now_ns: int) -> None:
        """It turns."""
        self._asked_ns, self._answered_ns = None, now_ns

    def gone(self) -> None:
        """There is no supervisor any more, or another one."""
        self._asked_ns = self._answered_ns = self._looked_ns = None

    def silent_ns(self, now_ns: int) -> int:
        """For how long it has not answered; 0 while that is no reason to speak of it."""
        if self._asked_ns is None or now_ns - self._asked_ns < SILENT_NS:
            return 0
        return now_ns - self._asked_ns
