"""A node in the pretended world: the real in-memory agent on a machine that keeps its own account of who was there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sublet.errors import SubletError
from sublet.lease.teardown import TeardownPhase
from sublet.testing.machine import FaultName, Faults, Machine
from sublet.testing.memory import MemoryAgent
from sublet.values import Epoch, LeaseId, ResourceId
from sublet.wire.orders import Inventory, Order, Report
from tests.simulation.process import MachineClock, Process

if TYPE_CHECKING:
    from tests.simulation.holder import HolderProcess
    from tests.simulation.office import OfficeProcess
    from tests.simulation.world import World

_HELLO_NS = 3_000_000_000
_TROUBLE_NS = 40_000_000_000
"""So long after the hardware was mended, an end that was tried before may still be tried again."""
OUTLIVES_NS: Final = 4_000_000_000
"""A guest of healthy hardware is gone so soon after its last deadline, or after a new attempt to end it."""


class NodeProcess(Process):
    """One agent. ``embedded`` means that it is on the office's machine, and has its clock."""

    def __init__(self, world: World, clock: MachineClock, inventory: Inventory, *, embedded: bool) -> None:
        super().__init__(world, str(inventory.node), clock)
        self.embedded = embedded
        self.hardware_faults = Faults()
        self.machine = Machine(inventory, on_leave=self._left)
        self.agent = MemoryAgent(
            inventory,
            report=self._report,
            clock=clock,
            same_clock=embedded,
            timings=world.scenario.timings,
            faults=self.hardware_faults,
            machine=self.machine,
        )
        self.machine.disk.counts = "restore" not in world.scenario.rates
        self._office: OfficeProcess | None = None
        self._welcomed_by: int | None = None
        self._wake_ns: int | None = None
        self._changed_ns: dict[ResourceId | None, int] = {}

    def begin(self) -> None:
        super().begin()
        self._welcomed_by = None
        self._wake_ns = None
        if not self.embedded:
            self._hello()

    def crash(self, *, reboot: bool = False) -> None:
        """The agent dies, and its guests with it; after a reboot the hardware is empty."""
        if not self.alive:
            return
        super().crash()
        self.agent.restart()
        if reboot:
            self.machine.rebooted()

    # ---- what others call ----

    def take(self, order: Order, incarnation: int | None) -> None:
        """An order from an office."""
        self.world.watch.before_order(self, order, incarnation)
        self.agent.send(order, incarnation=incarnation)
        self.world.watch.after_order(self, order, incarnation)
        self._plan_tick()

    def effect(self, holder: HolderProcess, boot: int, lease: LeaseId, epoch: Epoch, left_true_ns: int) -> None:
        """A holder's call arrives on its data connection."""
        try:
            self.agent.touch(lease, epoch)
        except SubletError as error:
            self.world.watch.effect_refused(self, holder, lease, epoch, error, left_true_ns)
            if holder.boot == boot:
                self.world.net.send(self, holder, holder.effect_answered, lease, epoch, False)
            return
        self.world.watch.effect_taken(self, lease, epoch)
        if holder.boot == boot:
            self.world.net.send(self, holder, holder.effect_answered, lease, epoch, True)

    def asked(self, office: OfficeProcess) -> None:
        """An office looks for its nodes."""
        if self._may_serve(office):
            self._office = office
            self._say_hello()

    def welcomed(self, office: OfficeProcess) -> None:
        """The office has taken note of this agent."""
        if self._may_serve(office):
            self._office = office
            if self._welcomed_by != office.boot and self.world.scenario.volumes:
                self.agent.name_volumes()
            self._welcomed_by = office.boot

    def poke(self) -> None:
        """Something about the hardware changed."""
        self._tick()

    # ---- within ----

    def _may_serve(self, office: OfficeProcess) -> bool:
        return self._office is None or office.disk.incarnation >= self._office.disk.incarnation

    def _hello(self) -> None:
        office = self._office if self._office is not None else self.world.office
        if self._welcomed_by != office.boot:
            self._say_hello()
        self.after(_HELLO_NS, self._hello)

    def _say_hello(self) -> None:
        office = self._office if self._office is not None else self.world.office
        self.world.net.send(self, office, office.hello, self, self.boot, self.agent.inventory())

    def _report(self, report: Report) -> None:
        self.world.watch.reported(self, report)
        office = self.world.office if self._office is None else self._office
        self.world.net.send(self, office, office.report, report, lease=getattr(report, "lease", None))

    def _tick(self) -> None:
        self._wake_ns = None
        if self.alive:
            self._plan_tick()

    def _plan_tick(self) -> None:
        wake_ns = self.agent.tick(self.clock.now_ns())
        self.world.watch.moved(self)
        if wake_ns is not None and (self._wake_ns is None or wake_ns < self._wake_ns):
            self._wake_ns = wake_ns
            self.at(wake_ns, self._timer, wake_ns)

    def _timer(self, wake_ns: int) -> None:
        if self._wake_ns == wake_ns:
            self._tick()

    def _left(self, lease: LeaseId, epoch: Epoch) -> None:
        """A guest is gone from the hardware. Of those that are parked who was set going to leave does so by itself."""
        live = self.agent.fence.get(lease)
        if self.alive and live is not None and live.epoch == epoch and lease not in self.machine.set_going:
            self.world.watch.fail("L4", f"{self.name}: the guest of {lease} was taken off while its lease was live")

    def turn(self, fault: FaultName, *, on: bool, resource: ResourceId | None) -> None:
        """Break something, or mend it."""
        (self.hardware_faults.turn_on if on else self.hardware_faults.turn_off)(fault, resource)
        self._changed_ns[resource] = self.world.now
        if self.alive:
            self.poke()

    def may_be_late(self, resource: ResourceId, lease: LeaseId) -> bool:
        """Whether the hardware is, or just was, such that a guest cannot be ended in time; or this was told already."""
        stuck, slow = FaultName.STUCK_TEARDOWN, FaultName.SLOW_TEARDOWN
        if self.hardware_faults.is_on(stuck, resource) or self.hardware_faults.is_on(slow, resource):
            return True
        changed_ns = max(self._changed_ns.get(resource, -_TROUBLE_NS), self._changed_ns.get(None, -_TROUBLE_NS))
        if self.world.now - changed_ns < _TROUBLE_NS:
            return True
        now_ns = self.clock.now_ns()
        suspend_ns = self.world.scenario.policy.suspend_ns + self.world.scenario.timings.leave_ns
        return any(
            down.phase is TeardownPhase.FAILED
            or (down.phase is TeardownPhase.TOLD and now_ns < down.grace_until_ns <= (down.since_ns or 0) + suspend_ns)
            or (down.phase is TeardownPhase.KILLING and now_ns - down.grace_until_ns < OUTLIVES_NS)
            for down in self.agent.teardowns()  # one that failed and is tried again has as long as the first time
            if down.lease == lease and down.part.resource == resource
        )
