"""An office's agent in the simulated world: ``node.agent.core`` on a simulated connection.

The core decides, as in ``node.agent.supervised``: which orders go out and when, what is heard, and what follows when
the supervisor of the machine came, was lost or does not start. Here are the connection and the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sublet.errors import Disconnected, SubletError
from sublet.node.agent.core import AgentCore, JoinedSupervisor, LinkLoss
from sublet.office.ledger import commands as cmd
from sublet.wire.guests import Configured, Reports
from sublet.wire.orders import Inventory, Order
from tests.simulation.link import LocalLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.office import OfficeProcess
    from tests.simulation.supervisor import SupervisorProcess

_MS: Final = 1_000_000
_S: Final = 1_000_000_000
CONFIGURE_NS: Final = 10 * _S
"""A supervisor that does not say by then who it is is connected to again; the real agent waits three times as long."""


class OfficeAgent:
    """The office's end of its connection to the supervisor."""

    def __init__(self, office: OfficeProcess, supervisor: SupervisorProcess) -> None:
        self.supervisor = supervisor
        self.inventory = supervisor.machine.inventory
        self.link: LocalLink | None = None
        self._office = office
        self._core = self._new_core()
        self._ready: Callable[[], None] | None = None

    def _new_core(self) -> AgentCore:
        return AgentCore(report=self._office.report, incarnation=lambda: self._office.disk.incarnation)

    # ---- life ----

    def begin(self, inventory: Inventory, ready: Callable[[], None]) -> None:
        """Find or start the supervisor. ``ready`` is called once, when it has said who it is."""
        self.inventory, self._ready = inventory, ready
        self._core = self._new_core()
        self._join()

    def listen(self) -> None:
        """The office is open, and hears what is reported."""
        self._core.listen()

    def crash(self) -> None:
        """The office died."""
        if self.link is not None:
            self.link.office_ends()
            self.link = None

    # ---- the port ----

    def send(self, order: Order) -> None:
        """With the next message."""
        self._core.send(order)

    def tick(self) -> None:
        """The office's turn is over."""
        self._core.turn_over()
        while self.link is not None and (message := self._core.next_message()) is not None:
            self.link.to_supervisor(self.supervisor.ordered, self.link, message)

    # ---- what comes ----

    def on_reports(self, link: LocalLink, reports: Reports) -> None:
        """The supervisor says something."""
        if link is self.link:
            self._core.on_reports(reports.reports)

    def configured(self, link: LocalLink, configured: Configured) -> None:
        """The supervisor says who it is."""
        if link is not self.link:
            return
        joined = self._core.configured(configured)
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()
        if joined.is_successor:
            self._office.submit(cmd.NodeUp(inventory=self.inventory), lambda _: self._grants_sent(joined))
        else:
            self._grants_sent(joined)

    def _grants_sent(self, joined: JoinedSupervisor) -> None:
        if self._core.grants_sent(joined) and joined.is_successor:
            self.tick()

    # ---- the connection ----

    def _join(self) -> None:
        world, supervisor = self._office.world, self.supervisor
        if not supervisor.alive:
            start_ns = int((20 + world.random.random() ** 3 * 2_000) * _MS)
            world.push(world.now + start_ns, None, supervisor.begin_if_dead)
            self._office.after(start_ns + _MS, self._join)
            return
        self._core.joining()
        link = LocalLink(
            world,
            self._office,
            supervisor,
            office_hears_end=self._lost,
            supervisor_hears_end=supervisor.office_gone,
        )
        self.link = link
        link.to_supervisor(supervisor.configure, link, self, self.inventory)
        self._office.after(CONFIGURE_NS, self._too_late, link)

    def _too_late(self, link: LocalLink) -> None:
        if self.link is link and not self._core.is_joined:
            link.office_ends()
            self._again(TimeoutError())

    def _lost(self, link: LocalLink, error: SubletError | None) -> None:
        if link is not self.link:
            return
        match self._core.lost(error):
            case LinkLoss.JOIN_AGAIN:
                self._again()
            case LinkLoss.WHILE_JOINING:
                self._again(error or Disconnected("the supervisor has ended"))
            case LinkLoss.REPLACED:
                self.link = None

    def _again(self, error: Exception | None = None) -> None:
        self.link = None
        self._core.dropped()
        pause_s = self._core.pause_s(error)
        if pause_s is None:  # an office that cannot start says so and ends; a person starts it again
            self._office.crash()
            self._office.world.faults.office_down()
        else:
            self._office.after(round(pause_s * _S), self._join)
