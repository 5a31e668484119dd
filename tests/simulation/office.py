"""The office in the pretended world: the real core, with the disk's delays made visible.

``office.core`` decides, orders and answers, as in ``office.driver``. A failed sync ends the office. Different is only
that time passes during a sync, and that a crash may come at any moment of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sublet.errors import Disconnected, SubletError
from sublet.lease.states import LIVE_STATES
from sublet.office.core import HOLD_TIMEOUT_S, DecisionBatch, OfficeCore, PendingCommand
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Granted, GrantedMany
from sublet.office.ledger.bound_leases import BoundLeases
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.queue_liveness import Presence
from sublet.office.ledger.records import LeaseRecord, Now, ProcessRecord
from sublet.values import Kind, LeaseId, TenantId
from sublet.wire.orders import Inventory, Order, Report
from tests.simulation.process import MachineClock, Process
from tests.simulation.replies import Reply, reply_for

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from tests.simulation.agent import OfficeAgent
    from tests.simulation.disk import Disk
    from tests.simulation.holder import HolderProcess
    from tests.simulation.node import NodeProcess
    from tests.simulation.world import World

_S: Final = 1_000_000_000
BEAT_NS: Final = 1 * _S
"""While anything has a deadline, the clock is looked at this often."""
SLACK_NS: Final = 2 * BEAT_NS
"""How long the clock may have run on after the last instant in the journal."""
ASK_NODES_NS: Final = 3 * _S
FEWER_CORES: Final = 0.25
"""How often a machine of its own has fewer cores than it had."""
COMPACT_EVERY: Final = 200
"""Batches; the real office compacts less often, and this one lives shorter."""


class OfficeProcess(Process):
    """One office. ``ledger`` is None while it is down."""

    def __init__(self, world: World, name: str, clock: MachineClock, disk: Disk) -> None:
        super().__init__(world, name, clock)
        self.agent: OfficeAgent | None = None
        """The way to the supervisor of its own machine, where it has one."""
        self.disk = disk
        self.ledger: Ledger | None = None
        self._core: OfficeCore | None = None
        self.opened = False
        """Whether the opening is durable: until then no request is answered."""
        self.awake_since_true = 0
        """Since when nothing has kept it from its work."""
        self.deposed = False
        """It was replaced by its restored backup, and does not know it."""
        self._reset()

    def _reset(self) -> None:
        self.presence = Presence()
        self.bound = BoundLeases()
        self._core = None
        self._listeners: dict[LeaseId, HolderProcess] = {}
        self._known_boots: dict[str, int] = {}
        self._syncing = False
        self._flush_planned = False
        self._timer_ns: int | None = None
        self.opened = False

    # ---- life ----

    def begin(self) -> None:
        super().begin()
        self._reset()
        before = self.disk.last_ns
        state = self.disk.recover()
        self.ledger = Ledger(self.world.scenario.policy, state)
        self._core = OfficeCore(self.ledger, observe=lambda *decided: self.world.watch.decided(self, *decided))
        self.world.watch.recovered(self, state)
        opening = cmd.OpenOffice(
            incarnation=self.disk.incarnation,
            clock_domain=self.clock.domain,
            last_ns=before,
            slack_ns=SLACK_NS,
            restored=self.disk.restored,
        )
        if self.agent is None:
            self.submit(opening, self._open)
            self._look_for_nodes()
        else:
            self.agent.begin(self._found_inventory(state), lambda: self.submit(opening, self._open))

    def _found_inventory(self, state: State) -> Inventory:
        """What the machine has this time: sometimes less than before, but never less than leases hold."""
        assert self.agent is not None
        found = self.agent.supervisor.machine.inventory
        if self.world.random.random() < FEWER_CORES:
            held = {record.id: record.used for record in state.resources.values()}
            few = [
                replace(device, capacity=max(device.capacity // 2, held.get(device.id, 0)))
                if device.kind is Kind.CPU
                else device
                for device in found.devices
            ]
            found = replace(found, devices=tuple(few))
        return found

    def _open(self, _reply: Reply) -> None:
        self.opened = True
        self.awake_since_true = self.world.now
        self.disk.restored = False
        assert self.ledger is not None
        for lease in self.ledger.state.leases.values():
            self.presence.restored(lease, self.clock.now_ns())
            self.bound.restored(lease)
        for process in list(self.bound):
            self.process_ended(process)
        self.world.watch.opened(self)
        if self.agent is not None:
            self.submit(cmd.NodeUp(inventory=self.agent.inventory), None)
            self.agent.listen()
        self._beat()

    def crash(self) -> None:
        if not self.alive:
            return
        was_syncing = self._syncing
        self.disk.crash(self.world.random.random())
        self.world.watch.office_died(self, was_syncing=was_syncing)
        if self.agent is not None:
            self.agent.crash()
        super().crash()
        self.ledger = None
        self._reset()

    @property
    def is_syncing(self) -> bool:
        """Whether it waits for its disk; until then nothing else is handled."""
        return self._syncing

    # ---- what others call ----

    def request(self, holder: HolderProcess, boot: int, token: int, command: cmd.Command) -> None:
        """A holder asks for something."""
        lease = getattr(command, "lease", None)

        def answer(reply: Reply) -> None:
            if reply.lease is not None:
                self._listeners[reply.lease] = holder
            if holder.boot == boot:
                self.world.net.send(self, holder, holder.answered, token, reply, lease=lease)

        self.submit(command, answer)

    def look(self, holder: HolderProcess, boot: int, token: int, tenant: TenantId, lease_id: LeaseId) -> None:
        """A holder in the line asks how it stands: a sign of life."""
        if not self.opened or self._syncing or self.ledger is None or self._core is None:
            return  # a read must not see what is not durable; the holder will ask again
        now = Now(self.clock.now_ns(), self.clock.wall_ns())
        self.presence.seen(lease_id, now.ns)
        lease = self.ledger.state.leases.get(lease_id)
        if lease is None or lease.tenant != tenant or self._core.waiting(lease_id):
            return
        if lease.status in LIVE_STATES and not self.ledger.is_held(lease_id):
            return  # a claim that was not confirmed in time may still be; he will ask again
        self._listeners[lease_id] = holder
        answer = self.ledger.answer_for(lease, now)
        reply = reply_for(answer, lease, now)
        self.world.watch.promised(self, reply, lease.deadline_ns or 0)
        if holder.boot == boot:
            self.world.net.send(self, holder, holder.answered, token, reply, lease=lease_id)

    def process_ended(self, process: ProcessRecord) -> None:
        """Look whether it has: the kernel says so, or something is bound to it now."""
        leases = self.bound.of(process)
        if leases and self.opened and not self.world.programs.lives(process):
            self.submit(cmd.HolderGone(process=process, leases=leases), None)

    def hello(self, node: NodeProcess, boot: int, inventory: Inventory) -> None:
        """An agent reports in."""
        if self.ledger is None or not self.opened:
            return
        record = self.ledger.state.nodes.get(inventory.node)
        known = self._known_boots.get(node.name)
        if known == boot and record is not None and not record.lost:
            self._welcome(node, boot)
            return
        if known is None or boot >= known:
            self._known_boots[node.name] = boot
            self.submit(cmd.NodeUp(inventory=inventory), lambda _reply: self._welcome(node, boot))

    def _welcome(self, node: NodeProcess, boot: int) -> None:
        if node.boot == boot:
            self.world.net.send(self, node, node.welcomed, self)

    def report(self, report: Report) -> None:
        """An agent's sink."""
        if not self.alive or not self.opened:
            return
        assert self._core is not None
        if self._core.report(report):
            self._plan_flush()

    def submit(self, command: cmd.Command, answer: Callable[[Reply], None] | None) -> None:
        """Into the next batch."""
        if not self.opened and not isinstance(command, cmd.OpenOffice):
            if answer is not None:
                answer(Reply(kind="unknown"))
            return
        done = None if answer is None else lambda told, error: self._answered(pending, answer, told, error)
        pending: PendingCommand = PendingCommand(command, done, _reply)
        assert self._core is not None
        self._core.take(pending)
        self._plan_flush()

    def _answered(
        self,
        pending: PendingCommand,
        answer: Callable[[Reply], None],
        told: tuple[Reply, int],
        error: SubletError | None,
    ) -> None:
        if error is None:
            self.world.watch.promised(self, *told)
            for other in told[0].others:
                self.world.watch.promised(self, *other)
            answer(told[0])
        elif isinstance(error, Disconnected):
            answer(Reply(kind="unknown", error=error))
        elif pending.unheld:  # it was decided, and its machine did not take it
            answer(Reply(kind="error", lease=next(iter(pending.unheld)), error=error, ended=True))
        else:
            answer(reply_for(error, None, _NEVER))

    # ---- one turn ----

    def _plan_flush(self) -> None:
        if self._core is not None and self._core.has_pending and not self._syncing and not self._flush_planned:
            self._flush_planned = True
            self.after(0, self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._syncing or self._core is None or not self._core.has_pending:
            return
        now = Now(self.clock.now_ns(), self.clock.wall_ns())
        batch = self._core.decide(now)
        if not batch.events:
            self._carry_out(batch)
            self._arm()
            return
        self.disk.append(now, batch.events)
        self._syncing = True
        self.after(self.world.scenario.sync_ns(self.world), self._synced, batch, now)

    def _synced(self, batch: DecisionBatch, now: Now) -> None:
        if self.world.scenario.sync_fails(self.world):
            self.world.coverage.met_leases("sync failed", self.leases())
            self.crash()
            self.world.faults.office_down()
            return
        self._syncing = False
        if self.clock.now_ns() - now.ns > BEAT_NS:
            self.awake_since_true = self.world.now
        self.disk.synced()
        assert self.ledger is not None
        if len(self.disk.batches) >= COMPACT_EVERY:
            self.disk.compact(self.ledger.state.snapshot())
        self._carry_out(batch)
        self.presence.note(batch.events, self.clock.now_ns())
        for process in self.bound.note(batch.events):
            self.process_ended(process)
        self._tell(batch.events, now)
        self._arm()
        self._plan_flush()

    def _carry_out(self, batch: DecisionBatch) -> None:
        assert self._core is not None
        until_ns = self.clock.now_ns() + round(HOLD_TIMEOUT_S * _S)
        self._core.carry_out(batch, until_ns, send=self._send, sent=self._tick_agent)
        if self._core.next_expiry is not None:
            self.at(until_ns, self._expire)

    def _tick_agent(self) -> None:
        if self.agent is not None:
            self.agent.tick()

    def _send(self, order: Order) -> None:
        assert self.ledger is not None
        node_id = self.ledger.node_of(order)
        node = self.world.node_by_id.get(node_id) if node_id is not None else None
        if node is None:
            return
        if self.agent is not None:
            self.agent.send(order)
        else:
            self.world.net.send(self, node, node.take, order, self.disk.incarnation, lease=order.lease)

    def _expire(self) -> None:
        if self._core is not None:
            self._core.expire(self.clock.now_ns())

    def _tell(self, events: list[ev.Event], now: Now) -> None:
        """The stream of news. It is a comfort: nothing may depend on its arriving."""
        for event in events:
            holder = self._listeners.get(event.lease) if isinstance(event, _NEWS) else None
            if holder is None or not isinstance(event, _NEWS):
                continue
            self.world.net.send(self, holder, holder.news, self, event, now.ns, lease=event.lease)

    # ---- time ----

    def _beat(self) -> None:
        self._timer_ns = None
        if self._syncing or self.ledger is None or not self.opened:
            return  # after the sync it is armed again
        now = Now(self.clock.now_ns(), self.clock.wall_ns())
        for order in self.ledger.orders_due(now):
            self._send(order)
        if self.agent is not None:
            self.agent.tick()
        for lease_id in self.presence.silent_holders(now.ns):
            lease = self.ledger.state.leases.get(lease_id)
            if lease is not None:
                self.submit(cmd.Release(tenant=lease.tenant, lease=lease_id, gone=True), None)
        wake_ns = self.ledger.next_wake_ns()
        if wake_ns is not None and wake_ns <= now.ns:
            self.submit(cmd.Tick(), None)
        self.disk.last_ns = now.ns
        self._arm()

    def _arm(self) -> None:
        if self.ledger is None:
            return
        now_ns = self.clock.now_ns()
        at_ns = now_ns + BEAT_NS
        for wake_ns in (self.ledger.next_wake_ns(), self.ledger.next_resend_ns()):
            if wake_ns is not None and wake_ns < at_ns:
                at_ns = max(wake_ns, now_ns + 1_000_000)
        if self._timer_ns is None or at_ns < self._timer_ns:
            self._timer_ns = at_ns
            self.at(at_ns, self._timer, at_ns)

    def _timer(self, at_ns: int) -> None:
        if self._timer_ns == at_ns:
            self._beat()

    def _look_for_nodes(self) -> None:
        """Ask those who have not reported in to this office, and those who are counted as lost."""
        for node in self.world.nodes:
            if self.ledger is None:
                continue
            record = self.ledger.state.nodes.get(node.agent.node)
            if node.name not in self._known_boots or record is None or record.lost:
                self.world.net.send(self, node, node.asked, self)
        self.after(ASK_NODES_NS, self._look_for_nodes)

    def leases(self) -> list[LeaseRecord]:
        """For the counters."""
        return [] if self.ledger is None else list(self.ledger.state.leases.values())


def _reply(answer: Answer, now: Now) -> tuple[Reply, int]:
    """The outer form of an answer, and the deadline that it promises."""
    if isinstance(answer, GrantedMany):
        first, *others = [_reply(Granted(lease=one), now) for one in answer.leases]
        return replace(first[0], others=tuple(others)), first[1]
    lease: LeaseRecord | None = getattr(answer, "lease", None)
    return reply_for(answer, lease, now), 0 if lease is None else lease.deadline_ns or 0


_NEVER: Final = Now(0, 0)
_NEWS: Final = (ev.Granted, ev.Ungranted, ev.Noticed, ev.Spared, ev.Ending, ev.Ended)
