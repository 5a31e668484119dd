"""The leases of one program: what it holds, what must be sent to the office now, and the subscribers to changes.

Pure but for the clock it is handed: no socket, no thread, no lock. ``keeper`` (a thread) and ``aio_keeper`` (a task)
carry out what it says is due and bring back what came of it.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Never

import msgspec

from sublet.client.lease_entry import ActivityReport, LeaseEntry, Owed
from sublet.client.model import Notice
from sublet.client.operations import ReceivedGrant
from sublet.client.outcomes import fenced_end
from sublet.client.responses import end_of
from sublet.client.sse import ServerEvent
from sublet.clock import Clock
from sublet.lease.holder import Holder
from sublet.lease.policy import RenewalPolicy
from sublet.lease.renewal import RenewalBatch, RenewalManager
from sublet.lease.states import LeaseStatus
from sublet.lease.value import (
    Attempt,
    HolderNews,
    HolderWord,
    Outcome,
    RenewalGranted,
    RenewalRefused,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import (
    NS_PER_S,
    Epoch,
    LeaseId,
    RenewMode,
    RequestId,
    format_duration,
)
from sublet.wire.decoders import decoder
from sublet.wire.http import LeaseView, News

IDLE_REPORTED_AFTER_NS: Final = NS_PER_S // 5
"""A lease under which nothing has run for so long is told to be idle. Less would tell of every pause between cells."""
SAY_AGAIN_AFTER_NS: Final = 5 * NS_PER_S
"""A word that the office did not hear is repeated after so long."""

RETURN_AGAIN_NS: Final = 5 * NS_PER_S
"""A release that got no answer is sent again after so long, until the lease's time to live has passed."""
SWEEP_NS: Final = 5 * NS_PER_S
"""How often it is looked for leases whose handle is gone without a word: a finaliser can be interrupted too."""
REQUEST_LIVES_NS: Final = 600 * NS_PER_S
"""What was requested, and neither answered nor withdrawn, has run out by then."""

_log = logging.getLogger("sublet.client")
_decode_news = decoder(News).decode


class LeaseTable:
    """All leases of one fabric. Not thread-safe, but for ``dropped``, ``abandoned`` and ``owed``, to which anything may
    add."""

    def __init__(self, clock: Clock, new_request_id: Callable[[], str]) -> None:
        self._clock = clock
        self._new_request_id = new_request_id
        self._manager = RenewalManager(_sent_by_the_keeper, clock=clock)
        self._held: dict[LeaseId, LeaseEntry] = {}
        self._to_tell: dict[LeaseId, LeaseEntry] = {}
        self._gone: weakref.WeakValueDictionary[LeaseId, LeaseEntry] = weakref.WeakValueDictionary()
        """Over by their own clock, while the program still references them: the office may yet say why."""
        self.dropped: deque[LeaseEntry] = deque()
        """Leases whose object was dropped without a release."""
        self.abandoned: deque[Sequence[LeaseEntry]] = deque()
        """Leases whose common release was interrupted, or not answered."""
        self.owed: set[Owed] = set()
        """What the office has, or may have, without a handle here: under way, or to be given back."""
        self.closing = False
        """Nothing in ``owed`` is waited for any more: all of it is to be given back."""
        self._sweep_ns = 0
        _books.add(self)

    # ---- what is held

    def open(self, grant: ReceivedGrant, policy: RenewalPolicy, owed: Owed | None = None) -> LeaseEntry:
        """A lease was granted, or attached. What was owed for the request is then owed for the lease."""
        view, now_ns = grant.view, self._clock.now_ns()
        lease = LeaseId(view.id)
        holder = Holder(lease, ttl_ns=_ns(view.ttl), stamp=self._manager.stamp, policy=policy)
        left_ns = _ns(view.remaining if view.remaining is not None else view.ttl)
        holder.held(now_ns, sent_ns=grant.sent_ns, granted_ns=left_ns, epoch=view.epoch or Epoch(0, 0))
        held = LeaseEntry(view, holder, Owed(RequestId(self._new_request_id())) if owed is None else owed)
        held.owed.lease, held.owed.epoch, held.owed.attaching = lease, holder.epoch, None
        held.owed.held = held
        self._supersede(held, now_ns)
        if not held.over:  # else it took too long to arrive
            self._held[lease] = held
            self._manager.add(holder)
            if view.notice is not None:
                held.seen_ns = now_ns
                self._noticed(held, view, now_ns, since_ns=grant.sent_ns)
            self._on_busy_change(held, now_ns)
        return held

    def hand_over(self, held: LeaseEntry) -> Holder:
        """A ``RenewalManager`` renews it from now on."""
        held.by_hand = True
        self._manager.unregister(held.id)
        return held.holder

    def begin_release(self, held: LeaseEntry) -> None:
        """Before a release is sent: nothing starts any more, and nothing is renewed. It stays in ``owed`` until the
        office has confirmed that it is over."""
        owed, now_ns = held.owed, self._clock.now_ns()
        if not held.over:
            owed.busy_s = held.holder.busy_time.unsaid_ns(now_ns) / NS_PER_S
        owed.until_ns = held.holder.deadline_ns
        self.owed.add(owed)
        held.returned = True
        held.holder.begin_release(now_ns)
        self._forget(held)
        held.notify("ended")

    def leave(self, held: LeaseEntry) -> None:
        """Neither renewed nor released: it lives on to its deadline, so that a program can attach to it."""
        self._forget(held)

    def ended(self, held: LeaseEntry, end: LeaseEnd) -> None:
        """The office says that it is over."""
        self.release_done(held.owed)
        held.holder.ended(end, self._clock.now_ns())
        self._forget(held)
        held.notify("ended")

    def refresh(self, held: LeaseEntry) -> None:
        """Time has passed: a look at the lease must not show what its own clock knows to be over."""
        held.holder.tick(self._clock.now_ns())
        if held.by_hand and held.over:  # otherwise the manager says so, when it comes to it
            self._forget(held)
            held.notify("ended")

    def now_text(self) -> str:
        """This moment, for people."""
        return self._manager.stamp(self._clock.now_ns())

    def now_ns(self) -> int:
        return self._clock.now_ns()

    @property
    def live(self) -> list[LeaseEntry]:
        """What is held now, as far as is known here."""
        return list(self._held.values())

    # ---- what is to be given back

    def due_releases(self) -> list[Owed]:
        """What is to be given back now. Each is handed out until ``release_failed`` says that it failed."""
        now_ns, found = self._clock.now_ns(), []
        if self.closing:
            for held in self.live:
                self.begin_release(held)
        while self.dropped:
            self._orphaned(self.dropped.popleft())
        while self.abandoned:
            for held in self.abandoned.popleft():
                if not held.confirmed and (held.returned or self._held.get(held.id) is held):
                    held.owed.left = True
                    self.owed.add(held.owed)
        for whole in [owed for owed in list(self.owed) if owed.members is not None]:
            if not whole.under_way and (whole.left or self.closing):
                self._split(whole)
        if now_ns >= self._sweep_ns:
            self._sweep_ns = now_ns + SWEEP_NS
            for held in self.live:
                if held.handle is not None and held.handle() is None:
                    self._orphaned(held)
            for owed in list(self.owed):  # of a release that was interrupted before it could say so
                if owed.held is not None and owed.held.handle is not None and owed.held.handle() is None:
                    owed.left = True
        for owed in list(self.owed):
            if owed.under_way or now_ns < owed.retry_ns or not (owed.left or self.closing):
                continue
            if owed.held is not None and not owed.held.returned and not owed.held.confirmed:
                self.begin_release(owed.held)
            elif owed.until_ns is None:
                owed.until_ns = now_ns + REQUEST_LIVES_NS
                if owed.attaching is not None and not self.closing:  # it may yet arrive, or be asked for again
                    owed.retry_ns = now_ns + RETURN_AGAIN_NS
                    continue
            if owed.done or (owed.is_empty and owed.left) or (owed.until_ns is not None and now_ns >= owed.until_ns):
                self.owed.discard(owed)
            elif not owed.is_empty:
                found.append(owed)
        for owed in found:  # at last: what is marked and not handed out would be waited for without end
            owed.under_way = True
        return found

    def _split(self, whole: Owed) -> None:
        """A request for many is given up after its answer: each of its leases is given back."""
        for member in whole.members or ():
            if not member.done:
                member.left = True
                self.owed.add(member)
        self.owed.discard(whole)

    def release_done(self, owed: Owed) -> None:
        """The office knows that it is over, or has nothing of it."""
        owed.done = True
        if owed.held is not None:
            owed.held.confirmed = True
        self.owed.discard(owed)

    def release_failed(self, owed: Owed) -> None:
        """The office did not answer: it is tried again."""
        owed.tries += 1
        owed.retry_ns = self._clock.now_ns() + RETURN_AGAIN_NS
        owed.under_way = False

    def next_return_ns(self) -> int | None:
        """When ``due_releases`` should be asked again."""
        moments = [owed.retry_ns for owed in list(self.owed) if not owed.under_way and (owed.left or self.closing)]
        if self._held or self.owed:
            moments.append(self._sweep_ns)
        return min(moments, default=None)

    def _orphaned(self, held: LeaseEntry) -> None:
        if not held.over and self._held.get(held.id) is held:
            held.owed.left = True
            self.owed.add(held.owed)

    # ---- activity

    def begin(self, held: LeaseEntry, token: object = None, *, since_ns: int | None = None) -> None:
        """Something runs under it; ``token`` stands for it."""
        held.activities.append(token)
        self._activity_changed(held, since_ns)

    def finish(self, held: LeaseEntry, token: object = None) -> None:
        """The counterpart. Harmless for a token that has not begun: an interrupt may have come before that."""
        if token in held.activities:
            held.activities.remove(token)
        elif token is None:
            raise ValueError("finish() without begin()")
        self._activity_changed(held, None)

    def _activity_changed(self, held: LeaseEntry, since_ns: int | None) -> None:
        """Make the holder busy or not, as the tokens say. What an interrupted call left undone is done by the next."""
        now_ns, holder = self._clock.now_ns(), held.holder
        if held.activities and not holder.busy:
            holder.begin(now_ns if since_ns is None else since_ns)
        elif not held.activities and holder.busy:
            holder.finish(now_ns)
        self.reschedule(held)
        self._on_busy_change(held, now_ns)

    # ---- what is due

    def collect(self) -> RenewalBatch:
        """Renewals to send now."""
        batch = self._manager.collect(self._clock.now_ns())
        self._drain_news()
        return batch

    def pending_activity_reports(self) -> list[ActivityReport]:
        """What became busy or idle since the office was told. Handed out once; a renewal says it again."""
        now_ns, found = self._clock.now_ns(), []
        for held in list(self._to_tell.values()):
            busy = held.holder.busy
            if held.over or busy != held.reported_idle:  # what the office was told is true
                del self._to_tell[held.id]
            elif held.idle_due_ns is None or now_ns >= held.idle_due_ns:
                del self._to_tell[held.id]
                held.reported_idle = not busy
                found.append(ActivityReport(held, now_ns))
        return found

    def activity_reported(self, word: ActivityReport, *, received: bool) -> None:
        """Whether the office heard it. If not, it is said again, unless it has become untrue by then."""
        held = word.held
        if received:
            held.holder.busy_time.reported(word.busy_total_ns)
        elif not held.over:
            held.reported_idle = word.active
            held.idle_due_ns = self._clock.now_ns() + SAY_AGAIN_AFTER_NS
            self._to_tell[held.id] = held

    def next_wake_ns(self) -> int | None:
        """When something is due next."""
        moments = [held.idle_due_ns for held in self._to_tell.values() if held.idle_due_ns is not None]
        wake_ns = self._manager.next_wake_ns()
        return min([*moments, wake_ns] if wake_ns is not None else moments, default=None)

    def next_due_ns(self) -> int | None:
        """The same, where what must be said at once counts as due long ago."""
        for held in self._to_tell.values():
            if held.idle_due_ns is None and held.holder.busy == held.reported_idle and not held.over:
                return 0
        return self.next_wake_ns()

    # ---- what came of it

    def record_outcomes(self, batch: RenewalBatch, outcomes: Sequence[Outcome]) -> None:
        """What came of renewals."""
        summary = self._manager.record_outcomes(batch, outcomes, self._clock.now_ns())
        for attempt, outcome in zip(batch.attempts, outcomes, strict=True):
            held = self._held.get(attempt.lease)
            if held is None:
                continue
            if isinstance(outcome, RenewalGranted):
                held.reported_idle = not attempt.active
                held.view.renewals += 1
            elif isinstance(outcome, RenewalRefused) and outcome.end is not None:
                self.release_done(held.owed)
        self._notify_listeners(summary.news)

    def attempt(self, held: LeaseEntry, ttl_ns: int | None) -> Attempt:
        """A renewal by hand, due or not."""
        attempt = held.holder.attempt(self._clock.now_ns(), ttl_ns=ttl_ns)
        self.reschedule(held)
        return attempt

    def take(self, held: LeaseEntry, attempt: Attempt, outcome: Outcome) -> None:
        """What came of a renewal by hand."""
        held.holder.take(attempt, outcome, self._clock.now_ns())
        if isinstance(outcome, RenewalGranted):
            held.view.renewals += 1
        self.reschedule(held)
        self._drain_news()

    # ---- what the office tells by itself

    def on_event(self, event: ServerEvent) -> bool:
        """One event of the stream. Returns True where the state should be read again."""
        try:
            news = _decode_news(event.data)
        except msgspec.DecodeError:
            return True
        if news.what == "lagged":
            return True
        if news.what == "budget":
            _log.warning("%s", news.reason)
        if news.lease is not None:
            self.seen(news.lease)
        return False

    def seen(self, view: LeaseView, *, as_of_ns: int | None = None) -> None:
        """How a lease is, as the office sees it now, or saw it at some moment from ``as_of_ns`` on. What was heard of
        the lease since then may be newer, and stands: what changed after that is heard as well."""
        held = self._held.get(LeaseId(view.id)) or self._gone.get(LeaseId(view.id))
        if held is None or (held.over and view.end is None):
            return
        if view.end is not None:
            self.ended(held, end_of(view.end))
            return
        if view.epoch is not None and view.epoch > held.epoch:
            self.ended(held, fenced_end(self._manager.stamp(self._clock.now_ns())))
            return
        if view.epoch != held.epoch:
            return  # news of the time before an attach
        now_ns = self._clock.now_ns()
        if as_of_ns is not None and as_of_ns <= held.seen_ns:
            return
        held.seen_ns = now_ns if as_of_ns is None else as_of_ns
        held.view = view
        if view.notice is not None:
            if held.notice is None or (held.notice.reason, held.notice.at) != (view.notice.reason, view.notice.at):
                self._noticed(held, view, now_ns, since_ns=None)
        elif held.notice is not None:
            held.notice = None
            held.holder.cancel_notice(now_ns)
            self.reschedule(held)
            held.notify("spared")

    def missing(self, seen: Sequence[LeaseView]) -> list[LeaseEntry]:
        """Which leases a list of what lives does not have: each must be looked at by itself."""
        ids = {view.id for view in seen}
        return [held for held in self._held.values() if held.id not in ids]

    # ---- within

    def _noticed(self, held: LeaseEntry, view: LeaseView, now_ns: int, *, since_ns: int | None) -> None:
        notice = view.notice
        if notice is None:
            return
        reason = EndReason(notice.reason)
        held.notice = Notice(reason=reason, in_seconds=notice.in_seconds, at=notice.at, detail=notice.detail)
        held.holder.notice(now_ns, reason=reason, in_ns=_ns(notice.in_seconds), since_ns=since_ns, detail=notice.detail)
        self.reschedule(held)
        _log.log(
            _loudness(held),
            "lease %s will be taken in %s: %s%s",
            *(held.id, format_duration(_ns(notice.in_seconds)), reason, f" ({notice.detail})" if notice.detail else ""),
        )
        held.notify("notice", notice.detail)

    def _supersede(self, held: LeaseEntry, now_ns: int) -> None:
        """The same program attached to a lease it already holds: the older object is fenced like any other."""
        older = self._held.pop(held.id, None)
        if older is not None and older.epoch != held.epoch:
            self._manager.unregister(older.id)
            self._to_tell.pop(older.id, None)
            older.holder.ended(fenced_end(self._manager.stamp(now_ns)), now_ns)
            older.confirmed = True
            older.notify("ended")

    def _forget(self, held: LeaseEntry) -> None:
        if self._held.get(held.id) is held:
            del self._held[held.id]
            self._manager.unregister(held.id)
            self._to_tell.pop(held.id, None)

    def reschedule(self, held: LeaseEntry) -> None:
        """Its next moment may have moved."""
        if held.id in self._manager and self._held.get(held.id) is held:
            with self._manager.change(held.id):
                pass

    def _on_busy_change(self, held: LeaseEntry, now_ns: int) -> None:
        """It became busy or idle: see to it that the office hears of it, soon or after a while."""
        if held.over:
            return
        held.idle_due_ns = None if held.holder.busy else now_ns + IDLE_REPORTED_AFTER_NS
        if held.holder.busy == held.reported_idle:
            self._to_tell[held.id] = held

    def _drain_news(self) -> None:
        self._notify_listeners(self._manager.drain().news)

    def _notify_listeners(self, news: Sequence[HolderNews]) -> None:
        for one in news:
            held = self._held.get(one.lease)
            if held is not None:
                self._handle_news(held, one)

    def _handle_news(self, held: LeaseEntry, news: HolderNews) -> None:
        match news.word:
            case HolderWord.OVER:
                self._forget(held)
                self._gone[held.id] = held
                _log.log(_loudness(held), "lease %s is over: %s", held.id, news.detail)
                held.notify("ended", news.detail)
                return
            case HolderWord.WARNING:
                why = _why_not_renewed(held.holder)
                _log.log(_loudness(held), "lease %s ends soon%s: %s", held.id, why, news.detail)
            case HolderWord.JEOPARDY | HolderWord.REFUSED | HolderWord.LONGER:
                _log.warning("lease %s: %s: %s", held.id, news.word, news.detail)
            case _:
                _log.info("lease %s: %s: %s", held.id, news.word, news.detail)
        held.notify(news.word.value, news.detail)


_books: weakref.WeakSet[LeaseTable] = weakref.WeakSet()


def is_held(lease: LeaseId, epoch: Epoch | None) -> bool:
    """Whether this process holds the lease under this epoch, by whichever fabric."""
    found = [book._held.get(lease) for book in list(_books)]
    return any(held is not None and held.epoch == epoch for held in found)


def _loudness(held: LeaseEntry) -> int:
    return logging.INFO if held.quiet and not held.holder.busy else logging.WARNING


def _why_not_renewed(holder: Holder) -> str:
    if holder.status is LeaseStatus.JEOPARDY:
        return ", for its renewals stay unanswered"
    if holder.policy.mode is RenewMode.WHILE_BUSY and not holder.busy:
        return " and is not being renewed, for nothing runs under it"
    return " and is not being renewed"


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _sent_by_the_keeper(attempts: Sequence[Attempt]) -> Never:
    raise AssertionError(f"{len(attempts)} renewals were to be sent by the manager; the keeper sends them")
