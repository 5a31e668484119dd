"""Decides what a supervisor does for the office of its machine, without I/O.

It says what a connecting office is told, when each order is obeyed, when reports are sent, and whether the process is
still needed. The rules of leases are the law's (``lease.node``), over whatever hardware it was given. The runner
(``service``, or a simulated supervisor) has the connections, the guests and the clock.

There is one office at a time. One that comes later takes over, which is how an office that was killed and started anew
goes on with what runs. Reports that no office can hear are dropped: what is still true is said again when one comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from sublet.errors import SubletError, Unauthorized
from sublet.lease.fence import FenceTable
from sublet.lease.teardown import Teardown
from sublet.values import NS_PER_S, LeaseId, ResourceId
from sublet.wire.guests import Orders, Reports
from sublet.wire.orders import End, Inventory, Order, Report

REPORTS_MAX: Final = 256
"""In one message: thousands of leases may end at the same moment."""
ALONE_NS: Final = 60 * NS_PER_S
"""So long it waits for an office while nothing is left to look after."""


class Law(Protocol):
    """The rules of one node (``lease.node.Node``). It leaves its reports with ``SupervisorCore.report``."""

    @property
    def fence(self) -> FenceTable: ...

    def send(self, order: Order, *, now_ns: int, incarnation: int | None = None) -> None: ...

    def tick(self, now_ns: int) -> int | None: ...

    def hardware_changed(self, now_ns: int, *leases: LeaseId) -> int | None: ...

    def inventory_changed(self, inventory: Inventory) -> None: ...

    def resend_reports(self, now_ns: int) -> None: ...

    def teardowns(self) -> tuple[Teardown, ...]: ...


class OfficeEnd(Protocol):
    """The connection of an office."""

    def report(self, reports: Reports, at_once: bool = False) -> None:
        """Say it; ``at_once``: a holder waits for it, so not only at the end of the turn."""

    def cut(self, error: SubletError) -> None:
        """Hang up."""


L = TypeVar("L", bound=Law)


class SupervisorCore(Generic[L]):
    """What one supervisor has decided, and what it has to say."""

    def __init__(
        self,
        *,
        make_law: Callable[[Inventory], L],
        arm: Callable[[int | None], None],
        now_ns: int,
        on_reports_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """``make_law``: over the hardware as it is when the first office says what there is. ``arm``: ``step`` is to be
        called at that instant, and at no other; None: not before something happens. ``on_reports_sent`` is called when
        reports were sent."""
        self.law: L | None = None
        """None until the first office has come: then there is no table yet, and nothing is accepted."""
        self.office: OfficeEnd | None = None
        self._make_law = make_law
        self._arm = arm
        self._on_reports_sent = on_reports_sent
        self._reports: list[Report] = []
        self._gone: set[LeaseId] = set()
        """Leases with guests that are gone since the last turn."""
        self._alone_since_ns = now_ns
        self.may_quit = False
        """The office needs it no longer: it ends once nothing is left to look after, and waits for no other office."""

    # ---- the office ----

    def configure(self, office: OfficeEnd, inventory: Inventory, now_ns: int) -> bool:
        """An office is there: the first that this process sees, or one that takes over what runs. It hears again what
        is still true at the next ``step``. Whether the tables are new."""
        is_new = self.law is None
        if self.law is None:
            self.law = self._make_law(inventory)
        else:
            self.law.inventory_changed(inventory)
        self.law.resend_reports(now_ns)
        if self.office is not None:
            self.office.cut(Unauthorized("another office of the same home took over"))
        self.office, self.may_quit = office, False
        return is_new

    def obey(self, orders: Orders, now_ns: int) -> None:
        """Orders of an office, in order."""
        if self.law is None:
            return
        for order in orders.orders:
            self.law.send(order, now_ns=now_ns, incarnation=orders.incarnation)
        if not any(isinstance(order, End) for order in orders.orders):
            self.send_reports(
                at_once=True
            )  # a holder waits to hear that its lease is held; the rest of the turn can wait
        self.step(now_ns)

    def office_gone(self, office: OfficeEnd, now_ns: int) -> None:
        """The connection is over."""
        if self.office is office:
            self.office = None
            self._alone_since_ns = now_ns

    def used(self) -> set[ResourceId]:
        """What leases have, or what could not be taken from them yet."""
        if self.law is None:
            return set()
        live = (part.resource for entry in self.law.fence for part in entry.parts)
        return {*live, *(teardown.part.resource for teardown in self.law.teardowns())}

    def is_needed(self, now_ns: int, *, has_guests: bool, can_be_found: bool) -> bool:
        """Whether there is anything to look after. ``can_be_found``: whether another office could come; else it waits
        for none."""
        if has_guests:
            return True
        if self.office is None and not can_be_found:
            return False
        if self.law is not None and (len(self.law.fence) or self.law.teardowns()):
            return True
        if self.may_quit:
            return False
        return self.office is not None or now_ns - self._alone_since_ns < ALONE_NS

    # ---- the law's turn ----

    @property
    def has_gone(self) -> bool:
        """Whether guests are gone of which the law was not told yet."""
        return bool(self._gone)

    def guest_gone(self, lease: LeaseId) -> bool:
        """A guest of this lease is gone. Whether it is the first since the last ``process_gone_guests``, which is to be
        called in the next turn: of some that are gone at once all are reported together."""
        is_first = not self._gone
        self._gone.add(lease)
        return is_first

    def process_gone_guests(self, now_ns: int) -> None:
        """Tell the law which guests are gone; it continues at once with what waited for that."""
        gone, self._gone = self._gone, set()
        if self.law is not None:
            self._arm(self.law.hardware_changed(now_ns, *gone))
            self.send_reports()

    def step(self, now_ns: int) -> None:
        """Do what is due, and say what there is to say."""
        if self.law is not None:
            self._arm(self.law.tick(now_ns))
            self.send_reports()

    # ---- reports ----

    def report(self, *reports: Report) -> None:
        """To be said with the next ones. It may be called from inside the law."""
        self._reports += reports

    def send_reports(self, *, at_once: bool = False) -> None:
        """What was reported, in messages of a size that is taken."""
        if self.office is None:
            self._reports.clear()  # what is still true is said again when an office comes
        elif self._reports:
            reports, self._reports = self._reports, []
            for start in range(0, len(reports), REPORTS_MAX):
                self.office.report(Reports(reports=tuple(reports[start : start + REPORTS_MAX])), at_once)
            self._on_reports_sent()


# -------------------------------------------------------------------------------------------------------------- obeying
#
# Carries out the office's orders in the order of arrival; of many ends, a few in each turn.
#
# To tell many guests to leave takes as long as to see that they have left, and to report it. Where all are told first,
# the first that has left waits until the last was told. So guests that have left come before those still to be told,
# for a while at least: grace runs from when a guest is told, so no guest's grace is shorter for it.
#
# Only ends can wait. As soon as any other order is behind them (a grant or an extension, for which a holder waits), all
# up to it are obeyed at once; and so it is when the office asks anything, which may be about what it has ordered
# before.


AT_ONCE_MAX: Final = 16
"""Ends in one turn."""
WAITS_MAX: Final = 6
"""Turns in a row in which guests that have left come first."""


class OrderQueue:
    """What came on one connection and is not done yet."""

    def __init__(
        self,
        soon: Callable[[Callable[[], None]], None],
        obey: Callable[[Orders], None],
        are_leaving: Callable[[], bool],
    ) -> None:
        """``soon`` calls it in the next turn. ``are_leaving``: whether there are guests that have left and are still to
        be handled."""
        self._soon = soon
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
            self._take_next()

    def all(self) -> None:
        """None waits any longer."""
        while self._waiting:
            self._some(len(self._waiting))

    def _take_next(self) -> None:
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
                self._soon(self._take_next)

    def _some(self, most: int) -> None:
        """The next, up to where another incarnation of the office speaks."""
        if not self._waiting:
            return
        incarnation, orders = self._waiting[0][1], list[Order]()
        while self._waiting and len(orders) < most and self._waiting[0][1] == incarnation:
            orders.append(self._waiting.popleft()[0])
        self._obey(Orders(orders=tuple(orders), incarnation=incarnation))
