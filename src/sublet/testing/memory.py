"""An agent with simulated hardware and real rules.

It is what users test with (``sublet.testing``) and what the simulation runs. The rules are those of every node
(``lease.node``); here is only what a real agent has around them: a clock, a receiver of its reports, and a way to
die and come back. After a restart its tables are empty and nothing is accepted; the office sends the grants of its
journal again.
"""

from __future__ import annotations

from sublet.clock import Clock
from sublet.lease.fence import FenceTable
from sublet.lease.node import Node
from sublet.lease.teardown import Teardown
from sublet.node.agent.port import AgentPort, ReportSink
from sublet.testing.clock import HeldClock
from sublet.testing.machine import FaultName, Faults, Machine
from sublet.testing.pretended import PretendedHardware, Timings
from sublet.values import GIB, NS_PER_S, Epoch, Kind, LeaseId, NodeId, ResourceId
from sublet.wire.orders import Device, Inventory, Notify, Order, Report


class MemoryAgent:
    """Keeps every rule of an agent for one node of pretended hardware (see ``AgentPort`` for the contract)."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        report: ReportSink,
        clock: Clock,
        same_clock: bool = True,
        timings: Timings | None = None,
        faults: Faults | None = None,
        machine: Machine | None = None,
    ) -> None:
        """``same_clock`` says that the office's instants are this agent's too (one machine, one boot): deadlines are
        then taken as they are; otherwise what remains is counted from the arrival of the order.
        """
        self.faults = faults if faults is not None else Faults()
        self.machine = machine if machine is not None else Machine(inventory)
        self._inventory = inventory
        self._sink = report
        self._clock = clock
        self._same_clock = same_clock
        self._timings = timings if timings is not None else Timings()
        self._begin()

    # ---- the port ----

    @property
    def node(self) -> NodeId:
        return self._inventory.node

    def inventory(self) -> Inventory:
        return self._inventory

    def send(self, order: Order, *, incarnation: int | None = None) -> None:
        now_ns = self._clock.now_ns()
        self._lose_memory_if_told()
        self._law.send(order, now_ns=now_ns, incarnation=incarnation)

    def tick(self, now_ns: int) -> int | None:
        self._lose_memory_if_told()
        for lease in self._hardware.advance(now_ns):
            self._law.hardware_changed(now_ns, lease)
        wakes = (self._law.tick(now_ns), self._hardware.next_ns())
        return min((at_ns for at_ns in wakes if at_ns is not None), default=None)

    # ---- for those who pretend to be guests, and for tests ----

    def check(self, lease: LeaseId, epoch: Epoch, now_ns: int) -> None:
        """May an effect of this (lease, epoch) happen now? Raises the reason why not."""
        self._law.check(lease, epoch, now_ns)

    @property
    def fence(self) -> FenceTable:
        """The live (lease, epoch) pairs by device."""
        return self._law.fence

    @property
    def incarnation(self) -> int:
        """The newest incarnation of the office that it has met."""
        return self._law.incarnation

    @property
    def refused_orders(self) -> int:
        """Orders of an older incarnation of the office, which were not obeyed."""
        return self._law.refused_orders

    def touch(self, lease: LeaseId, epoch: Epoch) -> None:
        """Do something on the lease's hardware, as a guest would: refused as ``check`` refuses, else on record."""
        now_ns = self._clock.now_ns()
        live = self._law.check(lease, epoch, now_ns)
        name = self._law.names.get(lease, "")
        self.machine.touch(lease, self._law.tenants[lease], epoch, live.parts, now_ns, name=name)

    def notice(self, lease: LeaseId) -> Notify | None:
        """The notice that guests of this lease see now."""
        return self._law.notices.get(lease)

    def is_expiring(self, lease: LeaseId) -> bool:
        """Whether it was warned that its deadline is near."""
        return self._law.is_expiring(lease)

    def teardowns(self) -> tuple[Teardown, ...]:
        """What is being taken off the hardware, or could not be."""
        return self._law.teardowns()

    def restart(self) -> None:
        """The agent dies and comes back: every table is empty, guests are gone unless they cannot be ended."""
        self.machine.agent_died(self.faults)
        self._begin()

    def name_volumes(self) -> None:
        """An office has taken note of this node: it hears what is kept here."""
        self._law.shelf.report_all(self._clock.now_ns())

    def adopted(self, inventory: Inventory) -> None:
        """Another office has come to what runs here, and says what this node has now."""
        self.inventory_changed(inventory)
        self.resend_reports(self._clock.now_ns())

    def inventory_changed(self, inventory: Inventory) -> None:
        """This node has other devices now."""
        self._inventory = inventory
        self._law.inventory_changed(inventory)

    def resend_reports(self, now_ns: int) -> None:
        """An office has come that may not have heard what is still true."""
        self._law.resend_reports(now_ns)

    def _begin(self) -> None:
        self._hardware = PretendedHardware(self.machine, self.faults, self._timings)
        self._law = Node(
            self._inventory,
            self._hardware,
            report=self._report,
            same_clock=self._same_clock,
            bounds=self._timings.bounds,
        )
        if self.machine.disk.stored:
            self._law.resend_reports(self._clock.now_ns())

    def _lose_memory_if_told(self) -> None:
        if self.faults.take(FaultName.AMNESIA):
            self.restart()

    def _report(self, report: Report) -> None:
        if not self.faults.is_on(FaultName.LOST_REPORTS):
            self._sink(report)


# ---------------------------------------------------------------------------------------------------------------- bench
#
# Sets up the in-memory agent for the conformance suite.


TIMINGS = Timings(
    leave_ns=NS_PER_S // 10,
    kill_ns=NS_PER_S // 10,
    kill_slow_ns=20 * NS_PER_S,
    retry_ns=NS_PER_S // 2,
    attempts=4,
    verify_ns=NS_PER_S // 10,
)


class MemoryBench:
    """One ``MemoryAgent`` with two pretended GPUs, some cores and a disk, on a held clock."""

    def __init__(self) -> None:
        self.clock = HeldClock()
        self.faults = Faults()
        self.reports: list[Report] = []
        self.inventory = Inventory(
            node=NodeId("bench"),
            domain="bench",
            devices=(
                Device(id=ResourceId("bench/gpu0"), kind=Kind.GPU, capacity=16 * GIB, model="host", host=True),
                Device(id=ResourceId("bench/gpu1"), kind=Kind.GPU, capacity=16 * GIB, model="host", host=True),
                Device(id=ResourceId("bench/cpu"), kind=Kind.CPU, capacity=8),
                Device(id=ResourceId("bench/memory"), kind=Kind.MEMORY, capacity=8 * GIB),
                Device(id=ResourceId("bench/block"), kind=Kind.BLOCK, capacity=8 * GIB),
            ),
        )
        self.machine = Machine(self.inventory)
        self._agent = MemoryAgent(
            self.inventory,
            report=self.reports.append,
            clock=self.clock,
            timings=TIMINGS,
            faults=self.faults,
            machine=self.machine,
        )

    @property
    def agent(self) -> AgentPort:
        return self._agent

    def now_ns(self) -> int:
        return self.clock.now_ns()

    def pass_time(self, seconds: float) -> None:
        until_ns = self.clock.now_ns() + round(seconds * NS_PER_S)
        while True:
            wake_ns = self._agent.tick(self.clock.now_ns())
            if wake_ns is None or wake_ns > until_ns:
                break
            self.clock.advance_ns(wake_ns - self.clock.now_ns())
        self.clock.advance_ns(until_ns - self.clock.now_ns())
        self._agent.tick(self.clock.now_ns())

    def work(self, lease: LeaseId, epoch: Epoch) -> None:
        self._agent.touch(lease, epoch)

    def at_work(self, lease: LeaseId) -> bool:
        return any(
            resident.lease == lease
            for device in self.inventory.devices
            for resident in self.machine.residents(device.id)
        )

    def broken_rules(self) -> list[str]:
        return self.machine.overlaps

    def turn_on(self, fault: FaultName, resource: ResourceId | None = None) -> None:
        self.faults.turn_on(fault, resource)

    def turn_off(self, fault: FaultName, resource: ResourceId | None = None) -> None:
        self.faults.turn_off(fault, resource)
