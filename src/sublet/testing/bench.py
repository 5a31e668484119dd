"""Sets up the in-memory agent for the conformance suite."""

from __future__ import annotations

from sublet.node.agent.port import AgentPort
from sublet.testing.clock import HeldClock
from sublet.testing.machine import FaultName, Faults, Machine
from sublet.testing.memory import MemoryAgent
from sublet.testing.pretended import Timings
from sublet.values import GIB, NS_PER_S, Epoch, Kind, LeaseId, NodeId, ResourceId
from sublet.wire.orders import Device, Inventory, Report

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
