"""Runs the office's core: commands in, one commit for each batch, then orders and answers.

One asyncio loop decides everything. Commands that became ready together are handled together and share one commit;
then the orders go out, and then the answers, those that promise something only once the agent holds it (``core``).

The commit runs in the loop itself, on purpose. It is one blocking fsync of about 0.1 ms, and while it runs the kernel
gathers the requests of other callers, which the next turn handles as one batch. A thread would have to hand batches
over twice, and reads would have to be kept from seeing what is decided but not yet durable. Here nothing runs between
a decision and its commit, so whatever a read sees *is* durable.

A commit that fails ends the office at once: what is on disk is then unknown, so nothing may be answered on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from sublet.clock import Clock
from sublet.errors import JournalError, JournalFailed, SubletError
from sublet.office.core import HOLD_TIMEOUT_S, DecisionBatch, OfficeCore, PendingCommand
from sublet.office.ledger.answers import Answer
from sublet.office.ledger.commands import Command, NodeUp, OpenOffice, Release
from sublet.office.ledger.events import Event
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.queue_liveness import Presence
from sublet.office.ledger.records import Now
from sublet.office.ports import Agent, JournalPort, Listener
from sublet.values import NS_PER_S, LeaseId, NodeId
from sublet.wire.orders import Order, Report

_log = logging.getLogger("sublet.office")

LIVE_BEAT_S: Final = 1.0
"""While anything has a deadline, the clock is looked at this often: a timer of the loop stands still while the machine
sleeps, CLOCK_BOOTTIME does not."""
SLOW_BEAT_S: Final = 30.0
"""With nothing live, how often the office wakes at all."""
SHORTEST_NAP_NS: Final = 1_000_000
"""The shortest delay of the timer that the office sets for itself."""
RESEND_NAP_NS: Final = 250_000_000
"""To repeat an order is never urgent, so many are repeated together."""
COMPACT_EVERY: Final = 200_000
"""Events after which the state is written down whole and the older events leave the journal (never before as many
events as there are leases, so that writing everything costs a bounded share). It takes about 10 ms for each thousand
leases remembered, in which nothing is answered, so a quiet moment is preferred."""
COMPACT_QUIET: Final = 10_000
"""Events after which a second without a commit is such a moment. An office that starts reads what is left."""
COMPACT_SHORT: Final = 2_000
"""The same when the disk is nearly full: what is removed is written over, so the journal's file stays as large as it
is."""
COMPACT_ON_STOP: Final = 1_000
"""The same when the office ends."""

T = TypeVar("T")


class Driver:
    """Owns the ledger, the journal and the way between them and the agents."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        journal: JournalPort,
        clock: Clock,
        die: Callable[[str], None],
        since_snapshot: int = 0,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        """``die`` ends the process; ``since_snapshot`` is how many events the journal keeps after its snapshot;
        ``is_short`` tells whether the journal's disk is nearly full."""
        self.ledger = ledger
        self.clock = clock
        self.presence = Presence()
        self.commits = 0
        self.on_limit: Callable[[str], None] = lambda name: None
        """Told the name of a limit that was hit."""
        self._journal = journal
        self._die = die
        self._agents: dict[NodeId, Agent] = {}
        self._touched: set[NodeId] = set()
        """Agents that got an order in this turn."""
        self._agent_wake_ns: dict[NodeId, int] = {}
        self._listeners: list[Listener] = []
        self._observers: list[Callable[[int, int], None]] = []
        self._core = OfficeCore(ledger)
        self._flush_at: asyncio.Handle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns = 0
        self._since_snapshot = since_snapshot
        self._is_short = is_short
        self._last_commit_ns = 0
        self._tick_due_ns: int | None = None
        self._dead = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- life ----

    async def start(self, opening: OpenOffice, agents: Iterable[Agent]) -> None:
        """Open the office: the ledger learns its incarnation, then its nodes, and unconfirmed orders go out again."""
        self._loop = asyncio.get_running_loop()
        await self.submit(opening)
        for agent in agents:
            self._agents[agent.node] = agent
            await self.submit(NodeUp(inventory=agent.inventory()))
        now = self.now()
        for lease in self.ledger.state.leases.values():
            self.presence.restored(lease, now.ns)
        self._beat()

    def stop(self) -> None:
        """No more timers. What was not answered stays unanswered."""
        if not self._dead and self._since_snapshot > COMPACT_ON_STOP:
            with contextlib.suppress(JournalError):  # all of it is durable as it is; it would only be read faster
                self._compact_beyond(0, self.now())
        self._dead = True
        for handle in (self._timer, self._flush_at, self._patience):
            if handle is not None:
                handle.cancel()

    def listen(self, listener: Listener) -> None:
        """Called with each batch of facts once it is durable, in order."""
        self._listeners.append(listener)

    def time_commits(self, observer: Callable[[int, int], None]) -> None:
        """Called after each commit with its nanoseconds and the number of its events."""
        self._observers.append(observer)

    def now(self) -> Now:
        return Now(self.clock.now_ns(), self.clock.wall_ns())

    # ---- commands ----

    def submit(
        self,
        command: Command,
        render: Callable[[Answer, Now], T] | None = None,
        without: Callable[[T, Mapping[LeaseId, SubletError]], T] | None = None,
    ) -> asyncio.Future[T] | asyncio.Future[Any]:
        """Queue a command; the future has its answer, or the ledger's error, once it may be known.

        ``render`` makes the answer's outer form at the moment of the decision: the record behind an answer is alive,
        and what it says a moment later (a newer deadline, say) has not been promised to *this* caller. ``without`` is
        what is left of it where agents did not take some of the leases that it speaks of; else that is an error.
        """
        assert self._loop is not None, "the driver was not started"
        future: asyncio.Future[Any] = self._loop.create_future()

        def done(value: Any, error: SubletError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
                future.exception()  # read once, so that a caller who went away leaves no complaint behind

        pending = PendingCommand(command, done, render, cast("Any", without))
        future.add_done_callback(lambda _: pending.abandon() if future.cancelled() else None)
        self._submit(pending)
        return future

    def report(self, report: Report) -> None:
        """The sink of the agents."""
        if self._core.report(report):
            self._flush_soon()

    def post(self, command: Command) -> None:
        """Queue a command whose answer no caller waits for."""
        self._submit(PendingCommand(command))

    async def wait_confirmed(self, lease: LeaseId) -> None:
        """Until nothing that was decided for this lease still waits for its agent: then what a read says was held."""
        assert self._loop is not None
        while waiting := self._core.waiting(lease):
            over = [asyncio.Event() for _ in waiting]
            for pending, event in zip(waiting, over, strict=True):
                pending.on_over(event.set)
            for event in over:
                await event.wait()

    def _submit(self, pending: PendingCommand) -> None:
        if self._core.take(pending):
            self._flush_soon()
        else:
            self.on_limit("pending_commands")

    def _flush_soon(self) -> None:
        if self._flush_at is None and not self._dead:
            assert self._loop is not None
            self._flush_at = self._loop.call_soon(self._flush)

    # ---- one turn ----

    def _flush(self) -> None:
        """Decide, make durable, order, answer: one batch."""
        assert self._loop is not None
        self._flush_at = None
        if self._dead:
            return
        now = self.now()
        try:
            batch = self._core.decide(now, tick=self._tick_due_ns is not None and self._tick_due_ns <= now.ns)
        except Exception as error:  # noqa: BLE001 - whatever it was, it ends the office below
            # A ledger that raised may have stopped half-way through a change. The journal has not: the next office
            # folds the last good state from it.
            _log.exception("the ledger could not handle a command")
            self._end(f"the office stopped: the ledger failed on a command ({type(error).__name__}: {error})")
            return
        if batch.events and not self._commit(batch.events, now):
            return
        try:
            self._carry_out(batch, now)
        except Exception as error:  # noqa: BLE001 - whatever it was, it ends the office
            self._agent_failed(error)
            return
        if batch.events:
            self._notify_observers(now, batch.events)
        self._arm(now)
        if self._core.has_pending:
            self._flush_soon()

    def _commit(self, events: list[Event], now: Now) -> bool:
        began_ns = self.clock.now_ns()
        try:
            self._journal.commit(events, now)
            took_ns = self.clock.now_ns() - began_ns
            self._last_commit_ns = now.ns
            self._since_snapshot += len(events)
            is_short = self._since_snapshot > COMPACT_SHORT and self._is_short()
            self._compact_beyond(COMPACT_SHORT if is_short else COMPACT_EVERY, now)
        except Exception as error:  # noqa: BLE001 - whatever it was, it ends the office
            self._journal_failed(error)
            return False
        self.commits += 1
        for observer in self._observers:
            observer(took_ns, len(events))
        return True

    def _compact_beyond(self, events: int, now: Now) -> None:
        if self._since_snapshot > max(events, len(self.ledger.state.leases)):
            self._since_snapshot = 0
            self._journal.compact(self.ledger.state.snapshot(), now)

    def _carry_out(self, batch: DecisionBatch, now: Now) -> None:
        assert self._loop is not None
        until_s = self._loop.time() + HOLD_TIMEOUT_S
        self._core.carry_out(batch, until_s, send=self._send, sent=lambda: self._tick_touched(now))
        self._await_agents()

    def _notify_observers(self, now: Now, events: Sequence[Event]) -> None:
        self.presence.note(events, now.ns)
        for listener in self._listeners:
            try:
                listener(now, events)
            except Exception:  # noqa: BLE001 - who watches must not be able to stop what is watched
                _log.exception("a listener failed on a batch of %d facts", len(events))

    # ---- agents ----

    def _send(self, order: Order) -> None:
        node = self.ledger.node_of(order)
        agent = self._agents.get(node) if node is not None else None
        if agent is not None:  # a lost node gets its orders when it is back: the ledger repeats them
            agent.send(order)
            self._touched.add(agent.node)

    def _tick_agents(self, nodes: Iterable[NodeId], now: Now) -> None:
        for node in nodes:
            wake_ns = self._agents[node].tick(now.ns)
            if wake_ns is None:
                self._agent_wake_ns.pop(node, None)
            else:
                self._agent_wake_ns[node] = wake_ns

    def _tick_touched(self, now: Now) -> None:
        touched, self._touched = self._touched, set()
        self._tick_agents(touched, now)

    def _await_agents(self) -> None:
        """One timer is enough for all answers that wait for agents."""
        assert self._loop is not None
        next_s = self._core.next_expiry
        if self._patience is None and next_s is not None and not self._dead:
            self._patience = self._loop.call_at(next_s, self._expire)

    def _expire(self) -> None:
        assert self._loop is not None
        self._patience = None
        self._core.expire(self._loop.time())
        self._await_agents()

    # ---- time ----

    def _arm(self, now: Now) -> None:
        """Set the timer for the next thing that is due; it is only ever moved forward, an early look does no harm."""
        assert self._loop is not None
        wakes = [*self._agent_wake_ns.values()]
        self._tick_due_ns, resend_ns = self.ledger.next_wake_ns(now), self.ledger.next_resend_ns()
        if self._tick_due_ns is not None:
            wakes.append(self._tick_due_ns)
        if resend_ns is not None:
            wakes.append(max(resend_ns, now.ns + RESEND_NAP_NS))
        wake_ns = min(wakes, default=None)
        live = wake_ns is not None or len(self.presence) > 0
        delay_ns = round((LIVE_BEAT_S if live else SLOW_BEAT_S) * NS_PER_S)
        if wake_ns is not None:
            delay_ns = min(delay_ns, max(SHORTEST_NAP_NS, wake_ns - now.ns))
        at_ns = now.ns + delay_ns
        if self._timer is not None:
            if self._timer_at_ns <= at_ns:
                return
            self._timer.cancel()
        self._timer_at_ns = at_ns
        self._timer = self._loop.call_later(delay_ns / NS_PER_S, self._beat)

    def _beat(self) -> None:
        """Look at the clock: agents first, which end what is over, then the ledger, which may give it to the next."""
        self._timer = None
        if self._dead:
            return
        now = self.now()
        try:
            for order in self.ledger.orders_due(now):
                self._send(order)
            self._touched.clear()
            self._tick_agents(self._agents, now)
        except Exception as error:  # noqa: BLE001 - whatever it was, it ends the office
            self._agent_failed(error)
            return
        for lease_id in self.presence.silent_holders(now.ns):
            lease = self.ledger.state.leases.get(lease_id)
            if lease is not None:
                self.post(Release(tenant=lease.tenant, lease=lease_id, gone=True))
        self._tick_due_ns = self.ledger.next_wake_ns(now)
        if self._tick_due_ns is not None and self._tick_due_ns <= now.ns:
            self._flush_soon()
        try:
            self._journal.beat(now)
            if now.ns - self._last_commit_ns >= NS_PER_S:
                self._compact_beyond(COMPACT_QUIET, now)
        except Exception as error:  # noqa: BLE001 - whatever it was, it ends the office
            self._journal_failed(error)
            return
        if self._flush_at is None:
            self._arm(now)

    def _journal_failed(self, error: Exception) -> None:
        what = error.message if isinstance(error, JournalFailed) else f"its journal could not be written ({error})"
        self._end(f"the office stopped: {what}; nothing was answered on it\n  {JournalFailed.default_do}")

    def _agent_failed(self, error: Exception) -> None:
        """An office whose agent breaks would live on without timers and answers; the next one finds everything."""
        _log.exception("the agent failed")
        self._end(f"the office stopped: its agent failed ({type(error).__name__}: {error})")

    def _end(self, message: str) -> None:
        self._dead = True  # first: a state that may be half-way through a change must not be written down
        self.stop()
        self._die(message)
