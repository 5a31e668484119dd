"""The pretended world: a queue of moments, and everything that stands around it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, Final

from sublet.office.ledger import commands as cmd
from sublet.values import LeaseId, NodeId, TenantId
from tests.simulation.agent import OfficeAgent
from tests.simulation.bound import Programs
from tests.simulation.coverage import Coverage
from tests.simulation.disk import Disk
from tests.simulation.faults import FaultPlan
from tests.simulation.holder import HolderProcess
from tests.simulation.net import Network
from tests.simulation.node import NodeProcess
from tests.simulation.office import OfficeProcess
from tests.simulation.process import MachineClock, Process
from tests.simulation.progress import Progress
from tests.simulation.scenario import Mode, Scenario, draw
from tests.simulation.sharing import Sharing
from tests.simulation.supervisor import SupervisorProcess
from tests.simulation.watch import Watch

_S: Final = 1_000_000_000
LOOK_EVERY_NS: Final = _S
HEAL_SHARE: Final = 0.6
"""In liveness mode, the share of the time after which a core is healed for good."""
STEPS_MAX: Final = 400_000
"""More would be a loop: nothing here happens that often."""


class World:
    """One seed, from its start to its end. ``run`` raises ``Violation`` at the first broken rule."""

    office_class: type[OfficeProcess] = OfficeProcess

    def __init__(self, seed: int, mode: Mode = "safety") -> None:
        self.scenario, self.random = self.drawn(seed, mode)
        self.now = 0
        self.steps = 0
        self._heap: list[tuple[int, int, Process | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.in_jeopardy: set[LeaseId] = set()
        self.programs = Programs()
        self.coverage = Coverage(self)
        self.watch = self.onlooker()
        self.net = Network(self)
        self._build()
        self.faults = FaultPlan(self)
        self.sharing = Sharing(self) if self.scenario.shared else None
        self.progress = Progress(self)

    def drawn(self, seed: int, mode: Mode) -> tuple[Scenario, random.Random]:
        """What the seed comes to, and where all other chance comes from."""
        return draw(seed, mode)

    def onlooker(self) -> Watch:
        """What checks the rules."""
        return Watch(self)

    def _build(self) -> None:
        plan, chance = self.scenario, self.random.random
        self.office_clock = MachineClock(self, "office", start_ns=int(chance() * 10_000) * _S)
        disk = Disk(plan.policy)
        self.office = self.office_class(self, "office", self.office_clock, disk)
        self.deposed: OfficeProcess | None = None
        self.supervisor: SupervisorProcess | None = None
        if plan.embedded:
            self.supervisor = SupervisorProcess(self, self.office_clock, plan.inventories[0])
            self.office.agent = OfficeAgent(self.office, self.supervisor)
        self.nodes: list[NodeProcess] = (
            [self.supervisor]
            if self.supervisor is not None
            else [
                NodeProcess(self, self._clock(str(found.node), node=True), found, embedded=False)
                for found in plan.inventories
            ]
        )
        self.node_by_id = {NodeId(str(node.agent.node)): node for node in self.nodes}
        self.node_by_name = {node.name: node for node in self.nodes}
        self.tenants = [TenantId(f"t{index}") for index in range(plan.tenants)]
        self.holders = [
            HolderProcess(self, f"h{index}", self._clock(f"h{index}", node=False), self.tenants[index % plan.tenants])
            for index in range(plan.holders)
        ]

    def _clock(self, name: str, *, node: bool) -> MachineClock:
        """Embedded, all processes are on the office's machine. Else holder and agent together stay within the rate
        error that the rules allow, unless the scenario wants agents that are far off."""
        plan, chance = self.scenario, self.random.random
        if plan.embedded:
            return self.office_clock
        rate = 1 + (chance() - 0.5) * 0.048
        if node and not plan.true_clocks:
            rate = 1 + (chance() - 0.5) * 0.4
        return MachineClock(self, name, rate_ppm=int(rate * 1_000_000), start_ns=int(chance() * 10_000) * _S)

    # ---- the queue ----

    def push(self, at: int, process: Process | None, do: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
        """Do this at that true time, unless the process has died by then."""
        self._count += 1
        boot = process.boot if process is not None else 0
        heapq.heappush(self._heap, (at, self._count, process, boot, do, args))

    def run(self) -> None:
        """From the start to the end."""
        plan = self.scenario
        end = plan.seconds * _S
        self.office.begin()
        for node in self.nodes:
            if node is not self.supervisor:  # which the office starts
                node.begin()
        self.push(_S // 10, None, self._settle_in)
        self.push(LOOK_EVERY_NS, None, self._look)
        self.faults.begin(until=int(end * HEAL_SHARE) if plan.mode == "liveness" else end)
        if plan.mode == "liveness":
            self.push(int(end * HEAL_SHARE) + 1, None, self.progress.heal)
        self.run_until(end)
        if plan.mode == "liveness":
            self.progress.finish()
        self.watch.finish()

    def run_until(self, end: int) -> None:
        """Let moments pass."""
        heap, watch = self._heap, self.watch
        overlaps = [node.machine.overlaps for node in self.nodes]
        while heap and heap[0][0] <= end:
            at, _, process, boot, do, args = heapq.heappop(heap)
            self.now = at
            if process is not None:
                if process.boot != boot or not process.alive:
                    continue
                if at < process.paused_until:
                    process.backlog.append((boot, do, args))
                    continue
            do(*args)
            self.steps += 1
            if any(overlaps):
                watch.fail("L1", next(filter(None, overlaps))[0])
        self.now = max(self.now, end)
        if self.steps > STEPS_MAX:
            watch.fail("S2", f"{self.steps} steps: something goes round in circles")

    def _settle_in(self) -> None:
        """The operator makes the tenants, as often as it takes; then people come."""
        if self.make_tenants():
            for holder in self.holders:
                holder.begin()
            if self.sharing is not None:
                self.sharing.begin()
            return
        self.push(self.now + _S, None, self._settle_in)

    def make_tenants(self) -> bool:
        """Those that the office does not know, perhaps because it came out of a backup from before. Whether it knew
        them all."""
        office = self.office
        known = office.ledger.state.tenants if office.ledger is not None and office.opened else {}
        unknown = [tenant for tenant in self.tenants if tenant not in known]
        for tenant in unknown:
            office.submit(cmd.AddTenant(tenant=tenant, token_hash=f"hash of {tenant}"), None)
        return not unknown

    def office_of(self, holder: Process) -> OfficeProcess:
        """Whom this holder talks to: some have not heard that the office was replaced."""
        if self.deposed is not None and int(holder.name[1:]) % 2:
            return self.deposed
        return self.office

    def _look(self) -> None:
        self.watch.look()
        self.push(self.now + LOOK_EVERY_NS, None, self._look)
