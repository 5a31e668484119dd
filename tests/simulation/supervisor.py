"""The supervisor of an office's own machine in the pretended world: a process that outlives the office.

It runs the same law as every node (``lease.node``). What is here is what ``node.supervisor.service`` has around it: an
office that connects, says what the machine has, orders and hears reports, and is gone again; another that comes and
takes over; and a table that is empty when the process is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.testing.machine import FaultName
from sublet.values import ResourceId
from sublet.wire.orders import Inventory, Order, Report
from tests.simulation.node import NodeProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.link import LocalLink
    from tests.simulation.process import MachineClock
    from tests.simulation.thin import ThinAgent
    from tests.simulation.world import World


class SupervisorProcess(NodeProcess):
    """One supervisor after the other, on one machine."""

    def __init__(self, world: World, clock: MachineClock, inventory: Inventory) -> None:
        super().__init__(world, clock, inventory, embedded=True)
        self.is_configured = False
        """Whether an office has said what there is; until then there is no table."""
        self._link: LocalLink | None = None
        self._heard: Callable[..., None]
        self._reports: list[Report] = []

    def begin(self) -> None:
        super().begin()
        self.is_configured = False
        self._link = None
        self._reports.clear()

    def begin_if_dead(self) -> None:
        """An office looked for one and found none. If two did, the second that starts ends at once."""
        if not self.alive:
            self.begin()

    def crash(self, *, reboot: bool = False) -> None:
        if not self.alive:
            if reboot:
                self._look_as_dead(reboot=True)
            return
        if self._link is not None:
            self._link.supervisor_ends()
        super().crash(reboot=reboot)
        self.is_configured = False
        self.world.watch.supervisor_died(self, reboot=reboot)

    # ---- for the office ----

    def configure(self, link: LocalLink, agent: ThinAgent, inventory: Inventory) -> None:
        """An office is there: the first that this process sees, or one that takes over what runs."""
        if self.is_configured:
            self.world.coverage.met_leases("taken over", self.world.office.leases())
            self.agent.adopted(inventory)
        else:
            self.is_configured = True
            self.agent.restart()  # what is left is looked for now
            self.agent.adopted(inventory)
        if self._link is not None and self._link is not link:
            self._link.supervisor_ends()
        self._link, self._heard = link, agent.heard
        self._plan_tick()
        link.to_office(agent.configured, link)

    def obey(self, orders: tuple[Order, ...], incarnation: int) -> None:
        """One message of the office."""
        if self.is_configured:
            for order in orders:
                self.world.watch.before_order(self, order, incarnation)
                self.agent.send(order, incarnation=incarnation)
                self.world.watch.after_order(self, order, incarnation)
            self._plan_tick()

    def office_gone(self, link: LocalLink) -> None:
        """The connection ended."""
        if self._link is link:
            self._link = None

    # ---- within ----

    def turn(self, fault: FaultName, *, on: bool, resource: ResourceId | None) -> None:
        super().turn(fault, on=on, resource=resource)
        if not self.is_configured:
            self._look_as_dead(reboot=False)

    def _look_as_dead(self, *, reboot: bool) -> None:
        """Guests of a dead supervisor have been sent SIGKILL: who was stuck dies when he is not any more."""
        self.machine.agent_died(self.hardware_faults)
        if reboot:
            self.machine.rebooted()
            self.world.watch.supervisor_died(self, reboot=True)

    def _report(self, report: Report) -> None:
        self.world.watch.reported(self, report)
        self._reports.append(report)

    def _plan_tick(self) -> None:
        if not self.is_configured:
            return
        super()._plan_tick()
        self.world.watch.supervisor_moved(self)
        reports, self._reports = self._reports, []
        if reports and self._link is not None:
            self._link.to_office(self._heard, self._link, tuple(reports))
        # Else they are dropped: what is still true is said again when an office comes.
