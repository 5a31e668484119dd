"""Raises the supervisor's priority (nice -20) while something is being ended.

Where many guests end at once each of them wants a processor for its last steps, and the one process that tells them
to, and looks whether they are gone, would have to wait its turn among them. So from an order to end something this
process comes first, if it may: as root, or with CAP_SYS_NICE. It does until it has something to report, because from
then on the office needs the processor as much; or until nothing was ended for a second or two. At other times it has
its usual priority, since its work then is done for guests, which could make it do very much.

Nothing that it starts comes first. The kernel sees to that at every fork (SCHED_RESET_ON_FORK), and a guest gets the
nice value with which the office was started (``give_back``).
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

FIRST: Final = -20
"""The nice value that comes before every other."""
_OTHER_RESET: Final = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK
_AUTOGROUP: Final = "/proc/self/autogroup"
"""Where sessions share the processors as groups, a nice value orders those of one session; the group has its own."""

_before: int | None = None


class Priority:
    """The priority of this process: its usual one, as it was at construction, until ``first``."""

    def __init__(self, autogroup: str = _AUTOGROUP) -> None:
        global _before
        self._autogroup = autogroup if os.getsid(0) == os.getpid() else ""
        self._usual = _before = os.getpriority(os.PRIO_PROCESS, 0)
        self._group_usual = self._group()
        self._is_first = False
        self._is_wanted = False
        self.may, self.finding = self._probe()
        """Whether it can come first, and what to say of it."""

    def first(self) -> None:
        """Something is being ended now: this process comes before others."""
        self._is_wanted = True
        if self.may and not self._is_first:
            self._is_first = True
            self._set(FIRST, FIRST)

    def back(self) -> None:
        """The office was told something: from now on it needs the processor as much as this process does."""
        if self._is_first:
            self._is_first = False
            self._set(self._usual, self._group_usual)

    def beat(self) -> None:
        """Once in a while: where nothing was ended since the last time, go back to the usual priority."""
        if not self._is_wanted:
            self.back()
        self._is_wanted = False

    def _probe(self) -> tuple[bool, str]:
        if os.sched_getscheduler(0) not in (os.SCHED_OTHER, _OTHER_RESET):
            return False, "as the scheduling policy has it with which the office is started"
        try:
            os.sched_setscheduler(0, _OTHER_RESET, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, 0, FIRST)
            os.setpriority(os.PRIO_PROCESS, 0, self._usual)
        except OSError:
            return False, "no right to, so the supervisor waits its turn among guests that end"
        return (
            True,
            f"the supervisor has nice {FIRST} while it ends something; guests have {self._usual}, as the office",
        )

    def _group(self) -> int:
        """The nice value of the group of our session."""
        with contextlib.suppress(OSError, ValueError), open(self._autogroup, encoding="ascii") as file:
            return int(file.read().rpartition(" ")[2])  # /autogroup-42 nice 0
        self._autogroup = ""
        return 0

    def _set(self, nice: int, group_nice: int) -> None:
        with contextlib.suppress(OSError):  # what was allowed once may have been forbidden since
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            if self._autogroup:
                with open(self._autogroup, "w", encoding="ascii") as file:
                    file.write(str(group_nice))


def give_back() -> None:
    """In a child: the nice value that this process had in the beginning."""
    if _before is not None and os.getpriority(os.PRIO_PROCESS, 0) != _before:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _before)
