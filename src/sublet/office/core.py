"""Decides and answers without I/O: which commands are due, what they lead to, and what each answer still waits for.

One turn is: ``decide`` a batch, make its events durable, ``carry_out``: orders first, then the answers. An answer that
promises what an agent must hold waits for its ``Held``. The runner (the driver, or a pretended world in the simulation)
brings clock, disk and agents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, Final

from sublet.errors import Disconnected, LeaseNotActive, RenewalRefusal, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.office.ledger.answers import Outcome
from sublet.office.ledger.commands import AgentReport, Command, Tick
from sublet.office.ledger.events import Event
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.records import Now
from sublet.values import LeaseId
from sublet.wire.orders import Held, NotHeld, Order, Report

BATCH_MAX: Final = 1024
"""Commands in one commit: bounds how long the first of them waits for the last."""
PENDING_MAX: Final = 50_000
"""Commands in the queue; beyond it a command is refused."""
HOLD_TIMEOUT_S: Final = 5.0
"""How long an answer waits for the agent to hold what it promises."""


class PendingCommand:
    """One command on its way, and the function that gets its answer or its error."""

    __slots__ = ("_done", "_over", "_render", "_value", "_without", "awaits", "command", "unheld", "until")

    def __init__(
        self,
        command: Command,
        done: Callable[[Any, SubletError | None], None] | None = None,
        render: Callable[[Any, Now], Any] | None = None,
        without: Callable[[Any, Mapping[LeaseId, SubletError]], Any] | None = None,
    ) -> None:
        """``render`` makes the outer form of the answer when it is decided: the record behind it changes later.
        ``without`` makes of it what is left where agents did not take the orders of some of its leases; with None it is
        all or nothing."""
        self.command = command
        self.awaits: dict[LeaseId, int] = {}
        """The orders that agents must hold before the answer is given, by their leases."""
        self.unheld: dict[LeaseId, SubletError] = {}
        """Leases whose agent did not take the order, or was silent for too long."""
        self.until: float | None = None
        """How long it waits for agents, by the clock of the runner; None: it does not."""
        self._done = done
        self._render = render
        self._without = without
        self._over: list[Callable[[], None]] = []
        self._value: Any = None

    @property
    def wanted(self) -> bool:
        """Whether a caller still waits."""
        return self._done is not None

    def on_over(self, call: Callable[[], None]) -> None:
        """Call this once no caller waits any more."""
        self._over.append(call)

    def decided(self, answer: Any, now: Now) -> None:
        """This is the answer; it is kept in its outer form until it may be given."""
        self._value = answer if self._render is None else self._render(answer, now)

    def finish(self) -> None:
        """Every agent that was waited for has answered, or its time is over."""
        if self.unheld and self._without is None:
            self.fail(next(iter(self.unheld.values())))
            return
        if self.unheld and self._without is not None:
            self._value = self._without(self._value, self.unheld)
        self.answer()

    def answer(self) -> None:
        """Give the answer."""
        self._end(self._value, None)

    def fail(self, error: SubletError) -> None:
        """Give an error instead."""
        self._end(None, error)

    def abandon(self) -> None:
        """The caller has gone."""
        self._done = None
        self._end(None, None)

    def _end(self, value: Any, error: SubletError | None) -> None:
        done, self._done = self._done, None
        over, self._over = self._over, []
        if done is not None:
            done(value, error)
        for call in over:
            call()


@dataclass(kw_only=True, slots=True)
class DecisionBatch:
    """What was decided in one turn, and the events that must be durable before it is carried out."""

    outcomes: list[tuple[PendingCommand, Outcome]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class OfficeCore:
    """The ledger, the commands before it, and the answers after it."""

    def __init__(
        self, ledger: Ledger, *, observe: Callable[[Command, Outcome, Now], None] = lambda command, outcome, now: None
    ) -> None:
        """``observe`` is called after each decision, before the next one."""
        self.ledger = ledger
        self._observe = observe
        self._queue: deque[PendingCommand] = deque()
        self._holds = Holds()

    @property
    def has_pending(self) -> bool:
        return bool(self._queue)

    @property
    def next_expiry(self) -> float | None:
        """When the next answer stops waiting for its agents."""
        return self._holds.next_expiry()

    def take(self, pending: PendingCommand) -> bool:
        """Queue a command for the next turn; False, and it has failed, if there are too many."""
        if len(self._queue) >= PENDING_MAX:
            pending.fail(too_many(PENDING_MAX))
            return False
        self._queue.append(pending)
        return True

    def report(self, report: Report) -> bool:
        """An agent's report. Whether it needs a decision; what only confirms is done at once."""
        if type(report) is Held:
            needs_decision = self.ledger.confirm(report)
            for pending in self._holds.held(report):
                pending.finish()
            if not needs_decision:
                return False
        self._queue.append(PendingCommand(AgentReport(report=report)))
        return True

    def decide(self, now: Now, *, tick: bool = False) -> DecisionBatch:
        """Take what is queued, at most ``BATCH_MAX``. ``tick``: what time has changed is decided first."""
        if tick:
            self._queue.appendleft(PendingCommand(Tick()))
        batch = DecisionBatch()
        while self._queue and len(batch.outcomes) < BATCH_MAX:
            pending = self._queue.popleft()
            outcome = self.ledger.handle(pending.command, now)
            if pending.wanted and not isinstance(outcome.answer, SubletError):
                pending.decided(outcome.answer, now)
            self._observe(pending.command, outcome, now)
            batch.events.extend(outcome.events)
            batch.outcomes.append((pending, outcome))
        return batch

    def carry_out(
        self, batch: DecisionBatch, until: float, *, send: Callable[[Order], None], sent: Callable[[], None]
    ) -> None:
        """The events are durable: send all orders, then give the answers that wait for no agent. ``until``: when those
        that do stop waiting. ``sent`` is called between the two."""
        for pending, outcome in batch.outcomes:
            # The hold is noted before the order goes out: an agent in this process reports from inside ``send``.
            if outcome.holds and pending.wanted:
                self._holds.add(pending, outcome.holds, until)
            for order in outcome.orders:
                send(order)
        sent()
        for pending, outcome in batch.outcomes:
            if isinstance(pending.command, AgentReport):
                if isinstance(pending.command.report, NotHeld):
                    for waiting in self._holds.not_held(pending.command.report):
                        waiting.finish()
            elif isinstance(outcome.answer, SubletError):
                pending.fail(outcome.answer)
            elif not outcome.holds:
                pending.answer()

    def expire(self, now: float) -> None:
        """Answer those that have waited long enough for their agents."""
        for pending in self._holds.expired(now, HOLD_TIMEOUT_S):
            pending.finish()

    def waiting(self, lease: LeaseId) -> list[PendingCommand]:
        """Commands of this lease that wait for its agent: a read must not tell of what they decided."""
        return self._holds.waiting(lease)


class Holds:
    """Which answers wait for which lease's agent, and until when."""

    def __init__(self) -> None:
        self._by_lease: dict[LeaseId, list[PendingCommand]] = {}
        self._in_order: deque[PendingCommand] = deque()
        """As they came, which is the order in which their patience ends. Those that wait no more leave at the front."""

    def add(self, waiting: PendingCommand, holds: Iterable[tuple[LeaseId, int]], until: float) -> None:
        """``holds``: leases, and the numbers of the orders that their agents must hold. ``until`` is never earlier
        than that of the one before."""
        waiting.awaits = dict(holds)
        waiting.until = until
        for lease in waiting.awaits:
            self._by_lease.setdefault(lease, []).append(waiting)
        self.next_expiry()
        self._in_order.append(waiting)

    def held(self, report: Held) -> list[PendingCommand]:
        """Those that waited for this confirmation, and now for nothing more. That of a notice confirms no deadline,
        though its number is higher."""
        return [] if report.told else self._take(report.lease, report.number, None)

    def not_held(self, report: NotHeld) -> list[PendingCommand]:
        """Those whose order was not taken, and that wait for nothing more."""
        return self._take(report.lease, report.number, not_held(report.lease))

    def _take(self, lease: LeaseId, number: int, unheld: SubletError | None) -> list[PendingCommand]:
        waiters = self._by_lease.get(lease)
        if waiters is None:
            return []
        over = []
        for waiting in [one for one in waiters if one.awaits[lease] <= number]:
            self._drop(waiting, lease, unheld)
            if not waiting.awaits:
                waiting.until = None
                over.append(waiting)
        return over

    def expired(self, now: float, after_s: float) -> list[PendingCommand]:
        """Those whose patience is over, ``after_s`` seconds after they began to wait; they wait no more."""
        found = []
        while (until := self.next_expiry()) is not None and until <= now:
            waiting = self._in_order[0]
            for lease in list(waiting.awaits):
                self._drop(waiting, lease, not_confirmed(lease, after_s))
            waiting.until = None
            found.append(waiting)
        return found

    def next_expiry(self) -> float | None:
        """When the patience of the first one ends."""
        while self._in_order and self._in_order[0].until is None:
            self._in_order.popleft()
        return self._in_order[0].until if self._in_order else None

    def waiting(self, lease: LeaseId) -> list[PendingCommand]:
        """What is still waited for."""
        return [waiting for waiting in self._by_lease.get(lease, ()) if waiting.wanted]

    def _drop(self, waiting: PendingCommand, lease: LeaseId, unheld: SubletError | None) -> None:
        del waiting.awaits[lease]
        if unheld is not None:
            waiting.unheld[lease] = unheld
        waiters = self._by_lease[lease]
        waiters.remove(waiting)
        if not waiters:
            del self._by_lease[lease]


def not_confirmed(lease: LeaseId, after_s: float) -> Disconnected:
    """What is answered when the agent stayed silent."""
    return Disconnected(
        f"the machine of lease {lease} did not confirm within {after_s:g} s; whether it took effect is not known",
        do="Ask again with the same request id, or look with `sublet lease show`.",
    )


def not_held(lease: LeaseId) -> LeaseNotActive:
    """What is answered when the agent did not take the order."""
    return LeaseNotActive(f"lease {lease} ended on its machine before the answer", reason=RenewalRefusal.NOT_HELD)


def too_many(most: int) -> Disconnected:
    """What is answered when too many are waiting for their turn."""
    return Disconnected(f"office overloaded: {most} requests are queued", do="Try again in a moment, less often.")
