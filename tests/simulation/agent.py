"""What an office has of its supervisor: the rules of ``node.agent.supervised`` without its sockets.

Orders are gathered within a turn and go out as one message; without a connection they are dropped, since the
next supervisor gets everything that is live. A supervisor that is gone is replaced, and the office
then sees the node come up anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sublet.office.ledger import commands as cmd
from sublet.wire.orders import Inventory, Order, Report
from tests.simulation.link import LocalLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.office import OfficeProcess
    from tests.simulation.supervisor import SupervisorProcess

_MS: Final = 1_000_000
AGAIN_NS: Final = (50 * _MS, 200 * _MS, 1_000 * _MS, 5_000 * _MS)
CONFIGURE_NS: Final = 10_000 * _MS
"""A supervisor that does not say by then that it has understood is connected to again."""


class ThinAgent:
    """One office's end."""

    def __init__(self, office: OfficeProcess, supervisor: SupervisorProcess) -> None:
        self.supervisor = supervisor
        self.inventory = supervisor.machine.inventory
        self.link: LocalLink | None = None
        self._office = office
        self._out: list[Order] = []
        self._early: list[Report] | None = []
        self._ready: Callable[[], None] | None = None
        self._tries = 0
        self._unanswered: LocalLink | None = None
        """The connection on which the supervisor has not said yet that it knows us."""

    # ---- life ----

    def begin(self, inventory: Inventory, ready: Callable[[], None]) -> None:
        """Find or start the supervisor. ``ready`` is called once, when it has understood what this machine has."""
        self.inventory, self._ready = inventory, ready
        self._out, self._early, self._tries = [], [], 0
        self._join()

    def listen(self) -> None:
        """The office is open, and hears what is reported."""
        early, self._early = self._early or [], None
        for report in early:
            self._office.report(report)

    def crash(self) -> None:
        """The office died."""
        if self.link is not None:
            self.link.office_ends()
            self.link = None

    # ---- the port ----

    def send(self, order: Order) -> None:
        """With the next message."""
        self._out.append(order)

    def tick(self) -> None:
        """The office's turn is over."""
        orders, self._out = tuple(self._out), []
        if orders and self.link is not None:
            self.link.to_supervisor(self.supervisor.obey, orders, self._office.disk.incarnation)

    # ---- what comes ----

    def heard(self, link: LocalLink, reports: tuple[Report, ...]) -> None:
        """The supervisor says something."""
        if link is not self.link:
            return
        for report in reports:
            if self._early is not None:
                self._early.append(report)
            else:
                self._office.report(report)

    def configured(self, link: LocalLink) -> None:
        """The supervisor knows us."""
        if link is not self.link:
            return
        self._tries, self._unanswered = 0, None
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()
        elif self._early is None:
            self._office.submit(cmd.NodeUp(inventory=self.inventory), None)

    # ---- the connection ----

    def _join(self) -> None:
        if self.link is not None:
            return
        world, supervisor = self._office.world, self.supervisor
        if not supervisor.alive:
            start_ns = int((20 + world.random.random() ** 3 * 2_000) * _MS)
            world.push(world.now + start_ns, None, supervisor.begin_if_dead)
            self._office.after(start_ns + _MS, self._join)
            return
        link = LocalLink(
            world,
            self._office,
            supervisor,
            office_hears_end=self._lost,
            supervisor_hears_end=supervisor.office_gone,
        )
        self.link = link
        link.to_supervisor(supervisor.configure, link, self, self.inventory)
        self._unanswered = link
        self._office.after(CONFIGURE_NS, self._too_late, link)

    def _too_late(self, link: LocalLink) -> None:
        if self._unanswered is link and self.link is link:
            link.office_ends()
            self._lost(link)

    def _lost(self, link: LocalLink) -> None:
        if link is not self.link:
            return
        self.link = None
        pause_ns = AGAIN_NS[min(self._tries, len(AGAIN_NS) - 1)]
        self._tries += 1
        self._office.after(pause_ns, self._join)
