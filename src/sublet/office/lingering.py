"""Delays renewals that are not urgent, so that many share one commit."""

from __future__ import annotations

from collections import deque
from typing import Final

LINGER_S: Final = 0.002
"""A report that no caller waits for is handled after this long, or with the next command that comes, so that both share
a commit: a program that takes a lease right after it gave one back is back by then. (With a request in the queue it may
be what that request waits for, and does not linger.)"""
RENEWALS_LINGER_S: Final = 0.050
"""The same for a renewal among many others. Holders renew in the background and count from when they asked, so none
is harmed; and with ten thousand of them it is the difference between a hundred commits a second and twenty."""
MANY_RENEWALS: Final = 64
"""Turns with renewals in ``MANY_WITHIN_S`` from which on they linger: ten thousand holders of one lease each bring
several within ``RENEWALS_LINGER_S``, and a commit for each would cost more than all the rest of it. A renewal by
hand never meets this, and a program that renews in a tight loop meets it once in so many: lingering that gathered no
other renewal is not tried again before as many have come."""
MANY_WITHIN_S: Final = 0.4
RENEWAL_SLACK_NS: Final = 250_000_000
"""A renewal of a lease with less than this left does not linger."""


class Renewals:
    """How many renewals came lately."""

    def __init__(self) -> None:
        self._turns: deque[float] = deque(maxlen=MANY_RENEWALS)
        """The last turns of the loop in which renewals came."""
        self._gathered = 0
        """Renewals that linger now."""

    def many(self, now_s: float) -> bool:
        """One came in the turn of this time. Whether there are so many that it had better wait for the next."""
        turns = self._turns
        if not turns or turns[-1] != now_s:
            turns.append(now_s)
        return len(turns) == MANY_RENEWALS and now_s - turns[0] <= MANY_WITHIN_S

    def lingers(self) -> None:
        """One waits."""
        self._gathered += 1

    def over(self, *, waited: bool) -> None:
        """None waits any more; ``waited``: the whole time was waited."""
        if waited and self._gathered == 1:
            self._turns.clear()
        self._gathered = 0
