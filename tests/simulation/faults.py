"""What goes wrong, when, and to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from sublet.lease.states import LIVE_STATES, SliceState
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.records import LOCAL_TENANT, LeaseRecord
from sublet.testing.machine import FaultName
from sublet.values import ResourceId
from tests.simulation.office import OfficeProcess
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.disk import Backup
    from tests.simulation.node import NodeProcess
    from tests.simulation.world import World

_S: Final = 1_000_000_000
BACKUP_EVERY_NS: Final = 25 * _S
HARDWARE: Final = tuple(name for name in FaultName if name is not FaultName.AMNESIA)


class FaultPlan:
    """Draws the moments of each fault that is on in this seed, and makes it happen."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random.random
        self._until = 0
        self.backups: list[Backup] = []
        self._do: dict[str, Callable[[], None]] = {
            "cut": self._cut,
            "office crash": self._office_crash,
            "office pause": self._office_pause,
            "slow disk": self._slow_disk,
            "reboot": self._reboot,
            "restore": self._restore,
            "wall jump": self._wall_jump,
            "holder crash": self._holder_crash,
            "holder pause": self._holder_pause,
            "node crash": self._node_crash,
            "node pause": self._node_pause,
            "amnesia": self._amnesia,
            "link broken": self._link_broken,
            "node gone": self._node_gone,
            "node drained": self._node_drained,
            "revoked": self._revoked,
            "hardware": self._hardware,
            "cleared": self._cleared,
        }

    def begin(self, *, until: int) -> None:
        """Faults happen up to this true time."""
        self._until = until
        for fault, rate in self._world.scenario.rates.items():
            self._plan(fault, rate)
        self._world.push(BACKUP_EVERY_NS, None, self._backup)

    def _plan(self, fault: str, rate: float) -> None:
        at = self._world.now + int(self._world.random.expovariate(rate) * 60 * _S)
        if at < self._until:
            self._world.push(at, None, self._happen, (fault, rate))

    def _happen(self, fault: str, rate: float) -> None:
        self._do[fault]()
        self._plan(fault, rate)

    def _in(self, low_s: float, high_s: float) -> int:
        """A true time within so many seconds; short ones are more likely."""
        return self._world.now + int((low_s + (high_s - low_s) * self._random() ** 2) * _S)

    def _met(self, fault: str, leases: Iterable[LeaseRecord] | None = None) -> None:
        self._world.coverage.met_leases(fault, self._world.office.leases() if leases is None else leases)

    # ---- network ----

    def _cut(self) -> None:
        world = self._world
        one = world.random.choice((world.office, *world.nodes, *world.holders))
        rest: list[Process] = [p for p in (world.office, *world.nodes, *world.holders) if p is not one]
        both = self._random() < 0.6
        if self._random() < 0.5:
            rest = [world.random.choice(rest)]
        pairs = {(one.name, other.name) for other in rest}
        if both:
            pairs |= {(other.name, one.name) for other in rest}
        elif self._random() < 0.5:
            pairs = {(there, here) for here, there in pairs}
        self._met("cut, both ways" if both else "cut, one way")
        world.net.cuts |= pairs
        world.push(self._in(1, 45), None, world.net.cuts.difference_update, (pairs,))

    # ---- the office ----

    def _office_crash(self) -> None:
        self._met("office crash")
        self._world.office.crash()
        self.office_down()

    def office_down(self, *, reboot: bool = False) -> None:
        """It is down; on a machine that starts anew, so is its supervisor. It comes back."""
        if reboot and self._world.supervisor is not None:
            self._world.supervisor.crash(reboot=True)
        self._world.push(self._in(0.2, 15), None, self.office_up, (self._world.office,))

    def office_up(self, office: OfficeProcess) -> None:
        """Start it, if it was not started yet."""
        if not office.alive and office is self._world.office:
            office.begin()

    def _office_pause(self) -> None:
        self._met("office pause")
        self._pause(self._world.office, 20)
        if self._world.supervisor is not None and self._random() < 0.3:  # all of the machine stood still
            self._world.supervisor.pause(self._world.office.paused_until)

    def _pause(self, process: Process, most_s: float) -> None:
        process.pause(self._in(0.1, most_s))

    def _slow_disk(self) -> None:
        self._met("slow disk")
        self._world.scenario.slow_disk_until = self._in(2, 30)

    def _backup(self) -> None:
        world = self._world
        if world.office.opened and not world.office.disk.restored:
            self.backups.append(world.office.disk.backup())
        if world.now < self._until:
            world.push(world.now + BACKUP_EVERY_NS, None, self._backup)

    def _restore(self) -> None:
        """From a backup, onto a new office. The old one may live on and not know it."""
        world = self._world
        if not self.backups or world.deposed is not None:
            return
        old = world.office
        self._met("restore")
        backup = world.random.choice(self.backups[-3:])
        if old.alive and not world.scenario.embedded and world.scenario.deposed:
            disk = old.disk.copy()
            old.deposed = True
            world.deposed = old
            world.office = OfficeProcess(world, f"{old.name}'", world.office_clock, disk)
            world.push(self._in(10, 60), None, self.end_deposed)
        else:
            old.crash()
        world.office.disk.restore(backup)
        world.watch.restored(world.office)
        self.office_down()

    def end_deposed(self) -> None:
        """The replaced office is gone at last."""
        if self._world.deposed is not None:
            self._world.deposed.crash()
            self._world.deposed = None

    def _reboot(self) -> None:
        world = self._world
        if not world.scenario.embedded and self._random() < 0.5:
            self._reboot_node(world.random.choice(world.nodes))
            return
        self._met("reboot")
        world.office.crash()
        self.end_deposed()
        world.office_clock.reboot()
        if world.scenario.embedded:
            for holder in world.holders:
                self._restart_holder(holder)
        self.office_down(reboot=True)

    def _reboot_node(self, node: NodeProcess) -> None:
        self._met("reboot", self._near(node))
        node.crash(reboot=True)
        node.clock.reboot()
        self._world.push(self._in(2, 30), None, self._begin, (node,))

    def _wall_jump(self) -> None:
        self._met("wall jump")
        self._world.office_clock.jump_wall(int((self._random() - 0.5) * 7200 * _S))

    # ---- holders ----

    def _holder_crash(self) -> None:
        world = self._world
        victims = world.holders if self._random() < 0.2 else [world.random.choice(world.holders)]
        for holder in victims:
            self._met_holder("holder crash", holder)
            self._restart_holder(holder)

    def _restart_holder(self, holder: Process) -> None:
        holder.crash()
        self._world.push(self._in(1, 25), None, self._begin, (holder,))

    def _begin(self, process: Process) -> None:
        if not process.alive:
            process.begin()

    def _holder_pause(self) -> None:
        holder = self._world.random.choice(self._world.holders)
        self._met_holder("holder pause", holder)
        self._pause(holder, 120)

    def _met_holder(self, fault: str, holder: Process) -> None:
        lease_id = getattr(holder, "lease", None)
        self._met(fault, [lease for lease in self._world.office.leases() if lease.id == lease_id])

    # ---- nodes ----

    def _near(self, node: NodeProcess) -> list[LeaseRecord]:
        """Leases on the node, and those that wait and might come to it."""
        return [lease for lease in self._world.office.leases() if lease.node in (None, node.agent.node)]

    def _node_crash(self) -> None:
        node = self._world.random.choice(self._world.nodes)
        self._met("supervisor crash" if node.embedded else "node crash", self._near(node))
        node.crash()
        if not node.embedded:  # another supervisor is started by the office
            self._world.push(self._in(1, 30), None, self._begin, (node,))

    def _node_pause(self) -> None:
        node = self._world.random.choice(self._world.nodes)
        self._met("supervisor pause" if node.embedded else "node pause", self._near(node))
        self._pause(node, 25)

    def _amnesia(self) -> None:
        """Its tables are empty from one moment to the next, and no other process has seen it go."""
        node = self._world.random.choice(self._world.nodes)
        if node.alive:
            self._met("amnesia", self._near(node))
            node.crash()
            node.begin()

    def _link_broken(self) -> None:
        agent = self._world.office.agent
        if agent is not None and agent.link is not None:
            self._met("link broken")
            agent.link.break_()

    def _node_gone(self) -> None:
        """The office is told that the node is gone. That may be wrong."""
        node = self._world.random.choice(self._world.nodes)
        if not node.embedded:
            self._met("node gone", self._near(node))
            self._world.office.submit(cmd.NodeGone(node=node.agent.node, detail="it did not answer"), None)

    def _node_drained(self) -> None:
        node = self._world.random.choice(self._world.nodes)
        self._met("node drained", self._near(node))
        self._world.office.submit(cmd.Drain(node=node.agent.node), None)
        self._world.push(self._in(5, 40), None, self._undrain, (node,))

    def _undrain(self, node: NodeProcess) -> None:
        office = self._world.office
        if office.opened:
            office.submit(cmd.Drain(node=node.agent.node, draining=False), None)
        else:
            self._world.push(self._world.now + 3 * _S, None, self._undrain, (node,))

    def _revoked(self) -> None:
        leases = self._world.office.leases()
        if not leases:
            return
        lease = self._world.random.choice(leases)
        self._met("revoked", (lease,))
        notice_ns = 5 * _S if self._random() < 0.5 and lease.status in LIVE_STATES else 0
        self._world.office.submit(cmd.Revoke(lease=lease.id, notice_ns=notice_ns), None)

    def _hardware(self) -> None:
        node = self._world.random.choice(self._world.nodes)
        fault = self._world.random.choice(HARDWARE)
        resource = self._world.random.choice(node.agent.inventory().devices).id
        if fault is FaultName.LOST_REPORTS:
            node.hardware_faults.turn_on(fault)
        self._met(fault.value, self._near(node))
        node.turn(fault, on=True, resource=resource)
        self._world.push(self._in(2, 45), None, self._mend, (node, fault, resource))

    def _mend(self, node: NodeProcess, fault: FaultName, resource: ResourceId) -> None:
        node.hardware_faults.turn_off(fault)
        node.turn(fault, on=False, resource=resource)

    def _cleared(self) -> None:
        self.clear_fences(vouch=self._random() < 0.5)

    def clear_fences(self, *, vouch: bool) -> None:
        """The operator looks after quarantined hardware. He vouches only for what he has seen to be clean."""
        world = self._world
        office = world.office
        if office.ledger is None or not office.opened:
            return
        for resource in office.ledger.state.resources.values():
            held = [piece for piece in resource.slices.values() if piece.state is SliceState.QUARANTINED]
            at_fault = resource.state is SliceState.QUARANTINED
            if not held and not at_fault:
                continue
            machine = world.node_by_id[resource.node].machine
            faults = world.node_by_id[resource.node].hardware_faults
            if faults.is_on(FaultName.DEVICE_FAULT, resource.id):
                continue
            stuck = faults.is_on(FaultName.STUCK_TEARDOWN, resource.id)
            there = any(machine.is_there(resource.id, piece.lease, piece.epoch) for piece in held)
            said = vouch and not (there and stuck)
            if said:
                for piece in held:
                    machine.leave(resource.id, piece.lease)
                    machine.scrub(resource.id, piece.lease)
            office.submit(cmd.ClearFence(by=LOCAL_TENANT, resource=resource.id, vouch=said), None)
