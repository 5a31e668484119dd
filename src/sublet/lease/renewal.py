"""Renews many leases: which are due, and the outcome of each. 10,000 need a heap and one batch at a time.

::

    manager = RenewalManager(renew)                     # renew(attempts) -> outcomes, one request for all of them
    for lease_id, expiry in cpu_leases:
        manager.register(lease_id, expiry, RenewalPolicy(renew_at_fraction=0.70))
    ...
    summary = manager.tick(now)
    summary.renewed, summary.failed, summary.expired    # lease ids

Seconds outside, nanoseconds inside: ``expiry`` and ``now`` are seconds of one clock that only runs forward, by default
CLOCK_BOOTTIME, which ``lease.deadline`` is told in. The wall clock will not do: it jumps.

A renewal that failed to be *answered* is not in ``failed``. It is in ``unanswered``, is tried again with growing waits
until the holder's own deadline, and needs no reaction. ``failed`` holds the leases the office refused to renew: start
nothing more on them. ``expired`` holds those that are over; each lease appears there once.

The manager decides and keeps the books; it waits for nothing and starts no thread. ``tick`` is for a loop of one's own;
an asyncio program calls ``collect``, sends, and calls ``record_outcomes``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Final, Protocol, TypeAlias, overload

from sublet.clock import Clock, SystemClock
from sublet.errors import InvalidRequest, NotFound, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease.holder import Holder
from sublet.lease.policy import RenewalPolicy
from sublet.lease.states import LeaseStatus
from sublet.lease.value import Attempt, HolderNews, Outcome, RenewalGranted, RenewalRefused, RenewalUnknown, rfc3339
from sublet.lease_end import EndReason
from sublet.values import NS_PER_S, Epoch, LeaseId

BATCH_MAX: Final = 1000
"""Renewals in one request at most. The rest goes into the next one, at once: after an outage everything is due."""

Renewer: TypeAlias = Callable[[Sequence[Attempt]], Sequence[Outcome]]
"""Sends the attempts and says what came of each, in their order. Raising ``Disconnected`` (any ``SubletError`` or
``OSError``) means that nothing is known about any of them."""

_NOBODY: Final = Epoch(0, 0)
"""For a lease registered by id alone: there is no successor to tell apart from."""


class Renewable(Protocol):
    """A lease that can be registered as it is."""

    @property
    def holder(self) -> Holder:
        """Its state as its holder sees it. The manager has the only hand in its renewal from then on."""

    def send_renewal(self, attempt: Attempt) -> Outcome:
        """Send this one renewal. Used where the manager was given no ``renew`` of its own."""


@dataclass(frozen=True, slots=True)
class RenewalBatch:
    """Attempts to send now, in one request."""

    attempts: tuple[Attempt, ...]

    @property
    def timeout_ns(self) -> int:
        """Long enough for the most patient of them: those that fail again and again wait longer, and must be heard."""
        return max((attempt.timeout_ns for attempt in self.attempts), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one tick came to."""

    renewed: tuple[LeaseId, ...] = ()
    failed: tuple[LeaseId, ...] = ()
    """Refused by the office. What runs has until the deadline; nothing new may start."""
    expired: tuple[LeaseId, ...] = ()
    """Over, for whatever reason (``holder.end``). The manager has dropped them."""
    unanswered: tuple[LeaseId, ...] = ()
    """Sent, and no answer yet. Not a loss: they are tried again until their own deadlines."""
    news: tuple[HolderNews, ...] = ()
    """What the holders had to say: warnings, jeopardy, idleness, the end."""
    next_wake: float | None = None
    """When to tick again, in seconds of the same clock; None if there is nothing to wait for."""

    def __bool__(self) -> bool:
        """Whether anything happened."""
        return bool(self.renewed or self.failed or self.expired or self.unanswered or self.news)

    @classmethod
    def joined(cls, parts: Sequence[Summary]) -> Summary:
        """Several in a row as one; the last one says when to tick again."""
        return cls(
            renewed=tuple(lease for part in parts for lease in part.renewed),
            failed=tuple(lease for part in parts for lease in part.failed),
            expired=tuple(lease for part in parts for lease in part.expired),
            unanswered=tuple(lease for part in parts for lease in part.unanswered),
            news=tuple(item for part in parts for item in part.news),
            next_wake=parts[-1].next_wake if parts else None,
        )


@dataclass(slots=True)
class RenewalCounts:
    """How it has gone so far."""

    batches: int = 0
    batches_full: int = 0
    """How often ``BATCH_MAX`` was reached."""
    sent: int = 0
    answered: int = 0
    refused: int = 0
    unanswered: int = 0
    late: int = 0
    """Outcomes that came too late, or for an older epoch, and changed nothing."""
    expired: int = 0


@dataclass(slots=True)
class _Entry:
    holder: Holder
    send: Callable[[Attempt], Outcome] | None
    turn: int = -1
    """The heap entry that counts; others of this lease are left over from before a change."""


class RenewalManager:
    """The leases of one program and when each is due. Not thread-safe."""

    def __init__(self, renew: Renewer | None = None, *, clock: Clock | None = None, batch_max: int = BATCH_MAX) -> None:
        """Without ``renew``, only leases that can send their own renewal (``Renewable``) can be registered."""
        if batch_max < 1:
            raise InvalidRequest(f"batch_max is {batch_max}", do="Give a number above zero.")
        self._renew = renew
        self._clock = clock or SystemClock()
        self._batch_max = batch_max
        self._entries: dict[LeaseId, _Entry] = {}
        self._heap: list[tuple[int, int, LeaseId]] = []
        self._turns = count()
        self._expired: list[LeaseId] = []
        self._news: list[HolderNews] = []
        self.counts = RenewalCounts()

    # ---- who is in it

    @overload
    def register(self, lease: Renewable, policy: RenewalPolicy | None = None, /) -> Holder: ...

    @overload
    def register(
        self,
        lease: str,
        expiry: float,
        policy: RenewalPolicy | None = None,
        /,
        *,
        epoch: Epoch = _NOBODY,
        busy: bool = True,
    ) -> Holder: ...

    def register(
        self,
        lease: Renewable | str,
        expiry: float | RenewalPolicy | None = None,
        policy: RenewalPolicy | None = None,
        /,
        *,
        epoch: Epoch = _NOBODY,
        busy: bool = True,
    ) -> Holder:
        """Keep a lease alive from now on, by its policy.

        ``register(lease, policy)`` takes a lease object, which knows whether it is busy. ``register(lease_id, expiry,
        policy)`` takes an id and when the lease expires; such a lease counts as busy, since the caller is
        using it, until ``change`` or ``unregister`` says otherwise.
        """
        if not isinstance(lease, str):
            if expiry is not None and not isinstance(expiry, RenewalPolicy):
                raise InvalidRequest(
                    f"the expiry of lease {lease.holder.lease} was given twice",
                    do="A lease object knows its expiry: use register(lease, policy).",
                )
            if expiry is not None:
                lease.holder.use(expiry)
            return self.add(lease.holder, lease.send_renewal)
        if expiry is None or isinstance(expiry, RenewalPolicy):
            raise InvalidRequest(
                f"lease {lease} was registered by its id, without its expiry",
                do="Use register(lease_id, expiry, policy), with the expiry in seconds of the clock given to tick.",
            )
        now_ns = self._clock.now_ns()
        granted_ns = _ns(expiry) - now_ns
        if granted_ns <= 0:
            raise InvalidRequest(
                f"lease {lease} expired {-granted_ns / NS_PER_S:.1f} s ago",
                do="Acquire a new one; and give the expiry in seconds of CLOCK_BOOTTIME, not of the wall clock.",
            )
        holder = Holder(LeaseId(lease), ttl_ns=granted_ns, policy=policy or RenewalPolicy(), stamp=self.stamp)
        holder.held(now_ns, sent_ns=now_ns, granted_ns=granted_ns, epoch=epoch)
        if busy:
            holder.begin(now_ns)
        return self.add(holder)

    def add(self, holder: Holder, send: Callable[[Attempt], Outcome] | None = None) -> Holder:
        """Register a holder, in whatever state it is."""
        if holder.lease in self._entries:
            raise InvalidRequest(f"lease {holder.lease} is registered already", do="Unregister it first.")
        if self._renew is None and send is None:
            raise InvalidRequest(
                f"no thread could send renewals for lease {holder.lease}",
                do="Give the manager a function: RenewalManager(renew).",
            )
        entry = self._entries[holder.lease] = _Entry(holder, send)
        self._schedule(entry)
        return holder

    def unregister(self, lease: LeaseId) -> None:
        """Leave it alone from now on; harmless if it is not there. Says nothing to the office."""
        self._entries.pop(lease, None)

    @contextmanager
    def change(self, lease: LeaseId) -> Iterator[Holder]:
        """Tell the holder something (work begins, a notice came); it is looked at again on the next tick."""
        entry = self._entries.get(lease)
        if entry is None:
            raise NotFound(f"lease {lease} is not registered here", do="It may have ended; see lease.end.")
        try:
            yield entry.holder
        finally:
            if self._entries.get(lease) is entry:
                self._schedule(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, lease: object) -> bool:
        return lease in self._entries

    # ---- what time does

    def tick(self, now: float | None = None) -> Summary:
        """Renew what is due, one batch after another, and say what came of it."""
        now_ns = self._clock.now_ns() if now is None else _ns(now)
        parts: list[Summary] = []
        for _ in range(len(self._entries) // self._batch_max + 1):  # what is due again by then waits for the next
            batch = self.collect(now_ns)
            if not batch.attempts:
                break
            outcomes = self.send(batch)
            if now is None:
                now_ns = self._clock.now_ns()
            parts.append(self.record_outcomes(batch, outcomes, now_ns))
        return Summary.joined([*parts, self.drain()])

    def collect(self, now_ns: int) -> RenewalBatch:
        """Pass the time on to every holder that is due, and hand out what is to be sent now."""
        attempts: list[Attempt] = []
        while self._heap and self._heap[0][0] <= now_ns and len(attempts) < self._batch_max:
            _, turn, lease = heapq.heappop(self._heap)
            entry = self._entries.get(lease)
            if entry is None or entry.turn != turn:
                continue
            entry.holder.tick(now_ns)
            if entry.holder.attempt_due(now_ns):
                attempts.append(entry.holder.attempt(now_ns))
            self._schedule(entry)
        self.counts.batches += bool(attempts)
        self.counts.batches_full += len(attempts) == self._batch_max
        self.counts.sent += len(attempts)
        return RenewalBatch(tuple(attempts))

    def send(self, batch: RenewalBatch) -> Sequence[Outcome]:
        """Carry a batch out, with the function given or lease by lease. This is the part that blocks."""
        if self._renew is None:
            return [self._send_one(attempt) for attempt in batch.attempts]
        try:
            outcomes = self._renew(batch.attempts)
        except (SubletError, OSError) as error:  # not an answer, whatever it was: nothing is known of any of them
            return [RenewalUnknown(detail=str(error))] * len(batch.attempts)
        if len(outcomes) != len(batch.attempts):
            raise ValueError(f"renew was given {len(batch.attempts)} attempts and answered {len(outcomes)}")
        return outcomes

    def record_outcomes(self, batch: RenewalBatch, outcomes: Sequence[Outcome], now_ns: int) -> Summary:
        """Tell the holders what came of their attempts."""
        renewed: list[LeaseId] = []
        failed: list[LeaseId] = []
        unanswered: list[LeaseId] = []
        for attempt, outcome in zip(batch.attempts, outcomes, strict=True):
            entry = self._entries.get(attempt.lease)
            changed = entry is not None and entry.holder.take(attempt, outcome, now_ns)
            match outcome:
                case RenewalUnknown():
                    self.counts.unanswered += 1
                    if changed:
                        unanswered.append(attempt.lease)
                case RenewalGranted() if changed:
                    self.counts.answered += 1
                    renewed.append(attempt.lease)
                case RenewalRefused() if changed:
                    self.counts.refused += 1
                    if outcome.end is not None or outcome.reason is not EndReason.IDLE:
                        failed.append(attempt.lease)  # for want of work is no failure: the holder would say so itself
                case _:
                    self.counts.late += 1
            if entry is not None:
                self._schedule(entry)
        summary = self.drain()
        return replace(summary, renewed=tuple(renewed), failed=tuple(failed), unanswered=tuple(unanswered))

    def next_wake_ns(self) -> int | None:
        """The earliest moment at which ``collect`` has something to do."""
        while self._heap:
            at_ns, turn, lease = self._heap[0]
            entry = self._entries.get(lease)
            if entry is not None and entry.turn == turn:
                return at_ns
            heapq.heappop(self._heap)
        return None

    def stamp(self, instant_ns: int) -> str:
        """An instant of this manager's clock, for people."""
        return rfc3339(self._clock.wall_ns() + instant_ns - self._clock.now_ns())

    def drain(self) -> Summary:
        """What has been said and has ended since it was last asked."""
        wake_ns = self.next_wake_ns()
        expired, self._expired = tuple(self._expired), []
        news, self._news = tuple(self._news), []
        return Summary(expired=expired, news=news, next_wake=None if wake_ns is None else wake_ns / NS_PER_S)

    # ---- within

    def _send_one(self, attempt: Attempt) -> Outcome:
        entry = self._entries.get(attempt.lease)
        if entry is None or entry.send is None:
            return RenewalUnknown(detail="it is not registered any more")
        try:
            return entry.send(attempt)
        except (SubletError, OSError) as error:
            return RenewalUnknown(detail=str(error))

    def _schedule(self, entry: _Entry) -> None:
        """Put it where its next moment is. One entry of the heap counts; older ones are passed over when they come up,
        which is cheaper than to find them."""
        holder = entry.holder
        self._news += holder.take_news()
        if holder.status in (LeaseStatus.ENDING, LeaseStatus.ENDED):
            del self._entries[holder.lease]
            self._expired.append(holder.lease)
            self.counts.expired += 1
            return
        at_ns = holder.next_wake_ns()
        entry.turn = next(self._turns)
        if at_ns is not None:
            heapq.heappush(self._heap, (at_ns, entry.turn, holder.lease))
        if len(self._heap) > 2 * len(self._entries) + self._batch_max:
            self._sweep()

    def _sweep(self) -> None:
        """Throw left-over heap entries away, so that they never outnumber the leases for long."""
        self._heap = [item for item in self._heap if (e := self._entries.get(item[2])) and e.turn == item[1]]
        heapq.heapify(self._heap)


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
