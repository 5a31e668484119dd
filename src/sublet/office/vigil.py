"""Busy-polls for the next request where the last ones came within a moment.

A loop with nothing to do goes to sleep, and to be woken takes some tens of microseconds: a processor that was halted
meanwhile is started again, and what runs then runs on cold caches. A program that takes a lease, waits for the answer
and gives it back lets the office sleep and wake three times for each request, and every time what it sleeps for comes
some hundred microseconds later. While that goes on the loop looks again at once instead.

It is left where it does not pay: nearly all of the last waits must have been shorter than the moment. So an office that
is idle, or is asked now and then, sleeps as ever; and where processors are short waits get longer, and it sleeps too.
Nor does it pay where several ask at a time: while the office sleeps and wakes more of them gather, and share a commit.
Between two looks any other thread that wants this processor has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

MOMENT_NS: Final = 500_000
"""More than a supervisor takes to carry out an order and say so, or a program from an answer to its next request."""
WAITS: Final = 16
"""Waits that are remembered."""
SHORT_LEAST: Final = 12
"""So many of them were shorter than the moment where it pays. It is then awake in vain for a quarter of them at most;
and who never rests gets there within a few requests."""
_ALL: Final = (1 << WAITS) - 1


class Vigil:
    """Told when something came and when it was done; in between, if it pays, the loop does not sleep."""

    def __init__(
        self,
        moment_ns: int,
        *,
        now_ns: Callable[[], int],
        call_soon: Callable[[Callable[[], None]], Any],
        give_way: Callable[[], None],
    ) -> None:
        """``call_soon`` is that of the loop; ``give_way`` lets others have the processor; a moment of 0 never comes."""
        self._moment_ns = moment_ns
        self._call_soon = call_soon
        self._now_ns = now_ns
        self._give_way = give_way
        self._lately = 0
        """A bit for each of the last waits: whether it was short."""
        self._since_ns: int | None = None
        """Since when the next is waited for; None while something is being done."""
        self._is_looking = False
        self._is_passing = False

    def passes(self) -> None:
        """Something came and is done at once. More of it may come in this turn of the loop, and is no new wait."""
        if self._moment_ns and not self._is_passing:
            self._is_passing = True
            self.came()
            self._call_soon(self._passed)

    def came(self) -> None:
        """Something is there to be done."""
        if self._since_ns is not None:
            is_short = self._now_ns() - self._since_ns <= self._moment_ns
            self._lately = (self._lately << 1 | is_short) & _ALL
            self._since_ns = None

    def done(self, asked: int = 0) -> None:
        """It was done: from now on the next is waited for. ``asked``: how many had asked for it together."""
        if self._moment_ns == 0:
            return
        if asked > 1:
            self._lately = 0
        self._since_ns = self._now_ns()
        if not self._is_looking and self._lately.bit_count() >= SHORT_LEAST:
            self._is_looking = True
            self._call_soon(self._look)

    def _passed(self) -> None:
        self._is_passing = False
        self.done()

    def _look(self) -> None:
        """Once in each turn of the loop, which does not sleep while a call is due in the next."""
        if self._since_ns is not None and self._now_ns() - self._since_ns < self._moment_ns:
            self._give_way()
            self._call_soon(self._look)
        else:
            self._is_looking = False


ASLEEP: Final = Vigil(0, now_ns=lambda: 0, call_soon=lambda call: None, give_way=lambda: None)
"""For a loop that always sleeps."""
