"""The driver: hands commands to the ledger and carries out its decisions in the order that keeps promises.

One asyncio loop decides everything. Commands that became ready together are handled together and share one commit;
then the orders go out, then an answer that must not be seen before the agent holds it waits for ``Held``, and only
then is any caller told of it.

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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from sublet.clock import Clock
from sublet.errors import JournalError, SubletError
from sublet.office import last_words
from sublet.office.ledger.answers import Answer, Outcome
from sublet.office.ledger.commands import AgentReport, Command, NodeUp, OpenOffice, Release, Renew, Tick
from sublet.office.ledger.events import Event
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.presence import Presence
from sublet.office.ledger.records import Now
from sublet.office.lingering import LINGER_S, RENEWAL_SLACK_NS, RENEWALS_LINGER_S, Renewals
from sublet.office.ports import Agent, Journal, Listener
from sublet.office.vigil import ASLEEP, Vigil
from sublet.office.waiting import Holds, Waiting, too_many
from sublet.values import NS_PER_S, LeaseId, NodeId
from sublet.wire.orders import Held, NotHeld, Order, Report

_log = logging.getLogger("sublet.office")

BATCH_MAX: Final = 1024
"""Commands in one commit: bounds how long the first of them waits for the last."""
ANSWERED_FIRST: Final = 16  # of more in one batch, the orders do not wait for the answers
PENDING_MAX: Final = 50_000
"""Commands waiting for their turn; beyond it a command is turned away, and said so."""
HOLD_TIMEOUT_S: Final = 5.0
"""How long an answer waits for the agent to hold what it promises."""
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
_UNASKED: Final = frozenset((AgentReport, Tick))

T = TypeVar("T")


class Driver:
    """Owns the ledger, the journal and the way between them and the agents."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        journal: Journal,
        clock: Clock,
        die: Callable[[str], None],
        since_snapshot: int = 0,
        vigil: Vigil = ASLEEP,
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
        self._pending: deque[Waiting] = deque()
        self._holds = Holds()
        self._flush_at: asyncio.Handle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._renewals = Renewals()
        self._patience: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns = 0
        self._since_snapshot = since_snapshot
        self._is_short = is_short
        self._last_commit_ns = 0
        self._tick_due_ns: int | None = None
        self._dead = False
        self._vigil = vigil
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
        for handle in (self._timer, self._linger, self._flush_at, self._patience):
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
        """Hand in a command; the future has its answer, or the ledger's error, once it may be known.

        ``render`` makes the answer's outer form at the moment of the decision: the record behind an answer is alive,
        and what it says a moment later (a newer deadline, say) has not been promised to *this* caller. ``without`` is
        what is left of it where agents did not take some of the leases that it speaks of; else that is an error.
        """
        assert self._loop is not None, "the driver was not started"
        future: asyncio.Future[Any] = self._loop.create_future()
        self._take(Waiting(command, future, render, without=without))
        return future

    def submit_then(
        self,
        command: Command,
        render: Callable[[Answer, Now], T],
        then: Callable[[T, SubletError | None], None],
        without: Callable[[T, Mapping[LeaseId, SubletError]], T] | None = None,
    ) -> None:
        """The same for who wants no future: ``then`` is called with the answer or an error, within a turn, and must not
        raise. It may be called before this returns."""
        self._take(Waiting(command, None, render, then, without))

    def _take(self, waiting: Waiting) -> None:
        if len(self._pending) >= PENDING_MAX:
            self.on_limit("pending_commands")
            waiting.fail(too_many(PENDING_MAX))
        elif type(waiting.command) is Renew and self._may_linger(waiting.command):
            self._renewals.lingers()
            self._pending.append(waiting)
            self._flush_later(RENEWALS_LINGER_S)
        else:
            self._enqueue(waiting)

    def report(self, report: Report) -> None:
        """The sink of the agents."""
        if type(report) is Held:  # hardly ever a decision, so it is taken at once
            self._vigil.passes()
            is_waited_for = self.ledger.confirm(report)
            for held in self._holds.held(report):
                held.conclude()
            if is_waited_for:
                self.post(AgentReport(report=report))
            return
        self._pending.append(Waiting(AgentReport(report=report)))
        if type(report) is NotHeld or self.ledger.state.queued_count:
            self._flush_soon()
        else:
            self._flush_later(LINGER_S)

    def post(self, command: Command) -> None:
        """Hand in a command whose answer no caller waits for."""
        self._enqueue(Waiting(command))

    async def settled(self, lease: LeaseId) -> None:
        """Until nothing that was decided for this lease still waits for its agent: then what a read says was held."""
        assert self._loop is not None
        while waiting := self._holds.waiting(lease):
            await asyncio.wait([one.future(self._loop.create_future) for one in waiting])

    def _enqueue(self, waiting: Waiting) -> None:
        self._pending.append(waiting)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if self._flush_at is None and not self._dead:
            assert self._loop is not None
            self._vigil.came()
            self._flush_at = self._loop.call_soon(self._flush)

    def _flush_later(self, after_s: float) -> None:
        if self._flush_at is None and self._linger is None and not self._dead:
            assert self._loop is not None
            self._linger = self._loop.call_later(after_s, self._flush_lingering)

    def _flush_lingering(self) -> None:
        self._vigil.came()
        self._renewals.over(waited=True)
        self._flush()

    def _may_linger(self, command: Renew) -> bool:
        """Whether so many renewals come that this one had better wait for the next, and it has the time."""
        assert self._loop is not None
        if not self._renewals.many(self._loop.time()):
            return False
        lease = self.ledger.state.leases.get(command.lease)
        deadline_ns = None if lease is None else lease.deadline_ns
        return deadline_ns is not None and deadline_ns - self.clock.now_ns() > RENEWAL_SLACK_NS

    # ---- one turn ----

    def _flush(self) -> None:
        """Decide, make durable, order, answer: one batch."""
        assert self._loop is not None
        self._flush_at = None
        self._renewals.over(waited=False)
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._dead:
            return
        now = self.now()
        if self._tick_due_ns is not None and self._tick_due_ns <= now.ns:
            self._pending.appendleft(Waiting(Tick()))  # what time has changed comes before what people want
        batch: list[tuple[Waiting, Outcome]] = []
        events: list[Event] = []
        try:
            while self._pending and len(batch) < BATCH_MAX:
                waiting = self._pending.popleft()
                outcome = self.ledger.handle(waiting.command, now)
                if waiting.wanted and not isinstance(outcome.answer, SubletError):
                    waiting.decided(outcome.answer, now, more=bool(self._pending))
                events.extend(outcome.events)
                batch.append((waiting, outcome))
        except Exception as error:  # noqa: BLE001 - whatever it was, it ends the office below
            # A ledger that raised may have stopped half-way through a change. The journal has not: the next office
            # folds the last good state from it.
            _log.exception("the ledger could not handle a command")
            self._end(last_words.of_ledger(error))
            return
        if events and not self._commit(events, now):
            return
        try:
            self._carry_out(batch, now)
        except Exception as error:  # noqa: BLE001 - whatever it was, it ends the office
            self._agent_failed(error)
            return
        if events:
            self._tell(now, events)
        self._arm(now)
        self._vigil.done(sum(type(waiting.command) not in _UNASKED for waiting, _ in batch))
        if self._pending and self._linger is None:
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
            self._end(last_words.of_journal(error))
            return False
        self.commits += 1
        for observer in self._observers:
            observer(took_ns, len(events))
        return True

    def _compact_beyond(self, events: int, now: Now) -> None:
        if self._since_snapshot > max(events, len(self.ledger.state.leases)):
            self._since_snapshot = 0
            self._journal.compact(self.ledger.state.snapshot(), now)

    def _carry_out(self, batch: list[tuple[Waiting, Outcome]], now: Now) -> None:
        """Orders that a caller waits for, or very many, go out before anything else; the others after the answers."""
        assert self._loop is not None
        holding, until_s = False, self._loop.time() + HOLD_TIMEOUT_S
        for waiting, outcome in batch:
            # The hold is noted before the order goes out: an agent in this process reports from inside ``send``.
            if outcome.holds and waiting.wanted:
                self._holds.add(waiting, outcome.holds, until_s)
                holding = True
            for order in outcome.orders:
                self._send(order)
        if holding or len(batch) > ANSWERED_FIRST:
            self._tick_touched(now)
        for waiting, outcome in batch:
            waiting.make()  # as late as this, so that an agent that is waited for has its order by now
            if isinstance(waiting.command, AgentReport):
                if isinstance(waiting.command.report, NotHeld):
                    self._refused(waiting.command.report)
            elif isinstance(outcome.answer, SubletError):
                waiting.fail(outcome.answer)
            elif not outcome.holds:
                waiting.answer()
        if holding and self._patience is None:
            self._patience = self._loop.call_at(until_s, self._lose_patience)
        if self._touched:
            self._loop.call_soon(self._tick_soon)

    def _tell(self, now: Now, events: Sequence[Event]) -> None:
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

    def _tick_soon(self) -> None:
        if self._touched and not self._dead:
            try:
                self._tick_touched(now := self.now())
            except Exception as error:  # noqa: BLE001 - whatever it was, it ends the office
                self._agent_failed(error)
                return
            self._arm(now)

    def _refused(self, report: NotHeld) -> None:
        for waiting in self._holds.not_held(report):
            waiting.conclude()

    def _lose_patience(self) -> None:
        """One timer is enough for all who wait for agents."""
        assert self._loop is not None
        self._patience = None
        for waiting in self._holds.late(self._loop.time(), HOLD_TIMEOUT_S):
            waiting.conclude()
        next_s = self._holds.next_s()
        if next_s is not None and not self._dead:
            self._patience = self._loop.call_at(next_s, self._lose_patience)

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
        """Look at the clock: agents first, who end what is over, then the ledger, which may give it to the next."""
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
        for lease_id in self.presence.gone(now.ns):
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
            self._end(last_words.of_journal(error))
            return
        if self._flush_at is None:
            self._arm(now)

    def _agent_failed(self, error: Exception) -> None:
        """An office whose agent breaks would live on without timers and answers; the next one finds everything."""
        _log.exception("the agent failed")
        self._end(last_words.of_agent(error))

    def _end(self, message: str) -> None:
        self._dead = True  # first: a state that may be half-way through a change must not be written down
        self.stop()
        self._die(message)
