"""Liveness: a core is healed for good, the rest stays broken, and within a bound everything must come to rest.

After the healing the core works on for a while. Then its people go home: what they hold must end, be torn down and be
verified, and hardware without a lasting fault must be free. Last, a new holder must get a lease at once and use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sublet.lease.states import LeaseStatus, SliceState
from sublet.office.ledger import commands as cmd
from sublet.testing.machine import FaultName
from sublet.values import Kind, NodeId, ResourceId
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

_S: Final = 1_000_000_000
WORK_ON_NS: Final = 30 * _S
"""Between the healing and the evening."""
REST_WITHIN_NS: Final = 180 * _S
"""Longest TTL, notices, teardown to its bound, one verification, and the repetitions of lost messages."""
PROBE_WITHIN_NS: Final = 60 * _S
"""Long enough for a first grant to meet a device that was not known to be unclean, and for the operator to clear it."""


class Progress:
    """Heals, waits, and says what did not come to rest."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lost: set[str] = set()
        """Processes that stay away for good."""
        self._broken: set[ResourceId] = set()
        """Hardware that stays broken."""

    def heal(self) -> None:
        """From now on the core is well."""
        world, draw = self._world, self._world.random
        if world.sharing is not None:
            world.sharing.end()
        world.faults.end_deposed()
        world.net.heal()
        world.scenario.slow_disk_until = 0
        world.scenario.sync_failure = 0.0
        if len(world.nodes) > 1 and draw.random() < 0.5:
            self._lose(world.nodes[-1])
        if draw.random() < 0.5:
            self._lose(world.holders[-1])
        for node in world.nodes:
            broken = draw.choice(node.agent.inventory().devices).id if draw.random() < 0.3 else None
            for fault in FaultName:
                for resource in (None, *(device.id for device in node.agent.inventory().devices)):
                    if fault is not FaultName.STUCK_TEARDOWN or resource is None or resource != broken:
                        node.turn(fault, on=False, resource=resource)
            if broken is not None:
                self._broken.add(broken)
                node.turn(FaultName.STUCK_TEARDOWN, on=True, resource=broken)
        self._wake_up()
        world.push(world.now + WORK_ON_NS, None, self._go_home)

    def _lose(self, process: Process) -> None:
        """Gone, or out of reach: to the others it is the same."""
        world = self._world
        self._lost.add(process.name)
        if world.random.random() < 0.5:
            process.crash()
        for other in (world.office, *world.nodes, *world.holders):
            world.net.cuts |= {(process.name, other.name), (other.name, process.name)}

    def _wake_up(self) -> None:
        """Each process of the core that is down or paused comes back; operators undo what they did."""
        world = self._world
        world.faults.office_up(world.office)
        for process in (world.office, *world.nodes, *world.holders):
            process.paused_until = min(process.paused_until, world.now)
            process.resume()
            if process.name not in self._lost and not process.alive and process is not world.supervisor:
                process.begin()  # (a supervisor is started by its office)
        self._look_after()

    def _look_after(self) -> None:
        world = self._world
        if world.office.opened:
            world.make_tenants()
            for node in world.nodes:
                world.office.submit(cmd.Drain(node=node.agent.node, draining=False), None)
                if node.name in self._lost:
                    world.office.submit(cmd.NodeGone(node=node.agent.node, detail="it stays away"), None)
            world.faults.clear_fences(vouch=True)
        world.push(world.now + 10 * _S, None, self._look_after)

    def _go_home(self) -> None:
        for holder in self._world.holders:
            holder.retire()

    def finish(self) -> None:
        """Everything must come to rest, and then a new holder must be served."""
        world = self._world
        until = world.now + REST_WITHIN_NS
        while self._restless() and world.now < until:
            world.run_until(world.now + 5 * _S)
        restless = self._restless()
        if restless:
            world.watch.fail("S3", f"{restless[0]}, {REST_WITHIN_NS // _S} s after everybody went home")
        self._probe()

    def _restless(self) -> list[str]:
        world = self._world
        office = world.office
        if office.ledger is None or not office.opened:
            return ["the office does not answer"]
        state = office.ledger.state
        found = [
            f"{lease.id} is still {lease.status} on {lease.node}"
            for lease in state.leases.values()
            if lease.status is not LeaseStatus.ENDED
        ]
        for resource in state.resources.values():
            if resource.id in self._broken or self._is_lost(resource.node):
                continue
            left = [piece for piece in resource.slices.values() if piece.state is not SliceState.RETAINED]
            if resource.state is not SliceState.FREE or left:
                states = ", ".join(piece.state for piece in resource.slices.values())
                found.append(f"{resource.id} is {resource.state} ({states})")
        return found

    def _is_lost(self, node: NodeId) -> bool:
        return self._world.node_by_id[node].name in self._lost

    def _probe(self) -> None:
        """A holder comes, asks for one core, and works."""
        world = self._world
        holder = next(h for h in world.holders if h.name not in self._lost)
        cores = [
            device.id
            for node in world.nodes
            for device in node.agent.inventory().devices
            if device.kind is Kind.CPU and not self._is_lost(node.agent.node)
        ]
        if self._broken.intersection(cores):
            return  # it might be sent to cores on which no guest can be ended
        taken = world.coverage.seen["effect taken"]
        holder.come_back()
        world.run_until(world.now + PROBE_WITHIN_NS)
        if world.coverage.seen["effect taken"] == taken:
            world.watch.fail("S3", f"{holder.name} asked for one core of an idle cluster and could not use it")
