"""Carries out the office's orders in the order of arrival; of many ends, a few in each turn.

To tell many guests to leave takes as long as to see that they have left, and to report it. Where all are told first,
the first that has left waits until the last was told. So guests that have left come before those still to be told, for
a while at least: grace runs from when a guest is told, so no guest's grace is shorter for it.

Only ends can wait. As soon as any other order is behind them (a grant or an extension, for which a holder waits), all
up to it are obeyed at once; and so it is when the office asks anything, which may be about what it has ordered before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from sublet.node.loop import Loop
from sublet.wire.guests import Orders
from sublet.wire.orders import End, Order

AT_ONCE_MAX: Final = 16
"""Ends in one turn."""
WAITS_MAX: Final = 6
"""Turns in a row in which those who have left come first."""


class Obeying:
    """What came on one connection and is not done yet."""

    def __init__(self, loop: Loop, obey: Callable[[Orders], None], are_leaving: Callable[[], bool]) -> None:
        """``are_leaving``: whether there are guests that have left and are still to be handled."""
        self._loop = loop
        self._obey = obey
        self._are_leaving = are_leaving
        self._waiting: deque[tuple[Order, int]] = deque()
        self._waits = 0
        self._will_go_on = False

    def take(self, orders: Orders) -> None:
        """These came."""
        self._waiting.extend((order, orders.incarnation) for order in orders.orders)
        if any(not isinstance(order, End) for order in orders.orders):
            self.all()
        elif not self._will_go_on:
            self._go_on()

    def all(self) -> None:
        """None waits any longer."""
        while self._waiting:
            self._some(len(self._waiting))

    def _go_on(self) -> None:
        self._will_go_on = False
        try:
            if self._waits < WAITS_MAX and self._are_leaving():
                self._waits += 1
            else:
                self._waits = 0
                self._some(AT_ONCE_MAX)
        finally:
            if self._waiting:
                self._will_go_on = True
                self._loop.soon(self._go_on)

    def _some(self, most: int) -> None:
        """The next, up to where another incarnation of the office speaks."""
        if not self._waiting:
            return
        incarnation, orders = self._waiting[0][1], list[Order]()
        while self._waiting and len(orders) < most and self._waiting[0][1] == incarnation:
            orders.append(self._waiting.popleft()[0])
        self._obey(Orders(orders=tuple(orders), incarnation=incarnation))
