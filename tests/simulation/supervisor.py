"""The supervisor of an office's own machine in the simulated world: a process that outlives the office.

``node.supervisor.core`` decides, as in ``node.supervisor.service``, over the law of every node (``lease.node``): what
an office that connects is told, which orders are obeyed when, and when reports are said. A new process has an empty
table.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from sublet.errors import SubletError
from sublet.lease.fence import FenceTable
from sublet.lease.teardown import Teardown
from sublet.node.supervisor.core import OrderQueue, SupervisorCore
from sublet.testing.machine import FaultName
from sublet.values import LeaseId, ResourceId
from sublet.wire.guests import Configured, Orders, Reports
from sublet.wire.orders import Inventory, Order, Report
from tests.simulation.node import NodeProcess

if TYPE_CHECKING:
    from tests.simulation.agent import OfficeAgent
    from tests.simulation.link import LocalLink
    from tests.simulation.process import MachineClock
    from tests.simulation.world import World

LEAVING: Final = 0.5
"""How often guests have left, or so it is said, when ends are to be obeyed: then these wait."""


class WatchedLaw:
    """The law of a node, with the onlooker beside it."""

    def __init__(self, process: SupervisorProcess) -> None:
        self._process = process
        self._agent = process.agent
        self._watch = process.world.watch

    @property
    def fence(self) -> FenceTable:
        return self._agent.fence

    def send(self, order: Order, *, now_ns: int, incarnation: int | None = None) -> None:
        self._watch.before_order(self._process, order, incarnation)
        self._agent.send(order, incarnation=incarnation)
        self._watch.after_order(self._process, order, incarnation)

    def tick(self, now_ns: int) -> int | None:
        wake_ns = self._agent.tick(now_ns)
        self._watch.moved(self._process)
        self._watch.supervisor_moved(self._process)
        return wake_ns

    def hardware_changed(self, now_ns: int, *leases: LeaseId) -> int | None:
        return self.tick(now_ns)  # the agent has told its law of guests that are gone

    def inventory_changed(self, inventory: Inventory) -> None:
        self._agent.inventory_changed(inventory)

    def resend_reports(self, now_ns: int) -> None:
        self._agent.resend_reports(now_ns)

    def teardowns(self) -> tuple[Teardown, ...]:
        return self._agent.teardowns()


class OfficeConnection:
    """The supervisor's end of the connection of an office."""

    def __init__(self, supervisor: SupervisorProcess, link: LocalLink, agent: OfficeAgent, orders: OrderQueue) -> None:
        self.link = link
        self.orders = orders
        self._supervisor = supervisor
        self._agent = agent
        self._unwritten: list[Report] = []

    def report(self, reports: Reports, at_once: bool = False) -> None:
        self._unwritten += reports.reports

    def write(self) -> None:
        """What was said in this turn, as one message: a turn takes no time here, so at once and at its end are one."""
        reports, self._unwritten = self._unwritten, []
        if reports:
            self.link.to_office(self._agent.on_reports, self.link, Reports(reports=tuple(reports)))

    def cut(self, error: SubletError) -> None:
        self.link.supervisor_ends(error)
        self._supervisor.office_gone(self.link)


class SupervisorProcess(NodeProcess):
    """One supervisor after the other, on one machine."""

    def __init__(self, world: World, clock: MachineClock, inventory: Inventory) -> None:
        super().__init__(world, clock, inventory, embedded=True)
        self._core = self._new_core()
        self._connection: OfficeConnection | None = None
        self._leaving = Random(f"leaving/{world.scenario.mode}/{world.scenario.seed}")

    def _new_core(self) -> SupervisorCore[WatchedLaw]:
        return SupervisorCore(make_law=self._make_law, arm=self._arm, now_ns=self.clock.now_ns())

    def _make_law(self, inventory: Inventory) -> WatchedLaw:
        """What a dead supervisor left is looked for now."""
        self.agent.restart()
        self.agent.inventory_changed(inventory)
        return WatchedLaw(self)

    @property
    def is_configured(self) -> bool:
        """Whether an office has said what there is; until then there is no table."""
        return self._core.law is not None

    def begin(self) -> None:
        super().begin()
        self._core, self._connection = self._new_core(), None

    def begin_if_dead(self) -> None:
        """An office looked for one and found none. If two did, the second that starts ends at once."""
        if not self.alive:
            self.begin()

    def crash(self, *, reboot: bool = False) -> None:
        if not self.alive:
            if reboot:
                self._look_as_dead(reboot=True)
            return
        if self._connection is not None:
            self._connection.link.supervisor_ends()
        super().crash(reboot=reboot)
        self._core, self._connection = self._new_core(), None
        self.world.watch.supervisor_died(self, reboot=reboot)

    # ---- for the office ----

    def configure(self, link: LocalLink, agent: OfficeAgent, inventory: Inventory) -> None:
        """An office is there: the first that this process sees, or one that takes over what runs."""
        if self.is_configured:
            self.world.coverage.met_leases("taken over", self.world.office.leases())
        connection = OfficeConnection(self, link, agent, OrderQueue(self._soon, self._obey, self._are_leaving))
        is_new = self._core.configure(connection, inventory, self.clock.now_ns())
        self._connection = connection
        self._plan_tick()
        live = tuple(entry.lease for entry in self.agent.fence)
        link.to_office(
            agent.configured, link, Configured(pid=1, version="", started_ns=0, live=live, guests=0, is_new=is_new)
        )

    def ordered(self, link: LocalLink, orders: Orders) -> None:
        """One message of the office."""
        if self._connection is not None and self._connection.link is link:
            self._connection.orders.take(orders)

    def office_gone(self, link: LocalLink) -> None:
        """The connection ended."""
        connection = self._connection
        if connection is not None and connection.link is link:
            connection.orders.all()
            self._connection = None
            self._core.office_gone(connection, self.clock.now_ns())

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

    def _obey(self, orders: Orders) -> None:
        self._core.obey(orders, self.clock.now_ns())
        self._write()

    def _write(self) -> None:
        if self._connection is not None:
            self._connection.write()

    def _soon(self, call: Callable[[], None]) -> None:
        self.after(0, call)

    def _are_leaving(self) -> bool:
        return self._leaving.random() < LEAVING

    def _report(self, report: Report) -> None:
        self.world.watch.reported(self, report)
        self._core.report(report)

    def _plan_tick(self) -> None:
        self._core.step(self.clock.now_ns())
        self._write()

    def _arm(self, wake_ns: int | None) -> None:
        if wake_ns is not None and wake_ns != self._wake_ns:
            self.at(wake_ns, self._timer, wake_ns)
        self._wake_ns = wake_ns
