"""A lease as its holder sees it: a state machine without a clock, a socket or a thread.

The holder runs on another clock than the office and hears from it late, twice or never. Four rules keep its belief
safe; for each there is a system that failed without it:

* The deadline counts from when the last answered request was *sent*. Counting from the answer adds the time the answer
  took to a promise that does not contain it.
* Silence is not a refusal. An unanswered renewal may have been granted, so nothing changes before the holder's own
  deadline; until then it shows as JEOPARDY, and nothing begins that would not be done in time.
* A refusal is not silence. After one no new device work begins, though what runs has until the deadline.
* The end is final. After its own deadline the holder takes no answer any more, even if the office would still have
  the lease; the work has been told that it is over.

None of this is a fence. A holder may be paused between asking ``may_start`` and starting; that is why the resource
checks (lease, epoch) itself. What is here keeps an honest holder from being surprised.

All methods take ``now_ns`` from one clock, the one that ``sent_ns`` was read from. A ``Holder`` is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, field, replace
from typing import Final, assert_never

from sublet.errors import LeaseNotActive
from sublet.lazy_dataclass import dataclass
from sublet.lease.policy import RenewalPlan, RenewalPolicy
from sublet.lease.states import HolderEvent, LeaseStatus, next_holder
from sublet.lease.value import (
    Attempt,
    HolderNews,
    HolderWord,
    Outcome,
    RenewalGranted,
    RenewalRefused,
    RenewalUnknown,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import Epoch, LeaseId, RenewMode, format_duration

# ----------------------------------------- How long work ran under a lease, so that it can be said once and billed once


@dataclass(slots=True)
class BusyMeter:
    """The time during which at least one thing ran. Calls that overlap count once."""

    running: int = 0
    _ended_ns: int = 0
    """Up to the last moment at which everything had finished."""
    _since_ns: int = 0
    _reported_ns: int = 0

    def begin(self, now_ns: int) -> bool:
        """One more runs; True if it is the only one."""
        self.running += 1
        if self.running == 1:
            self._since_ns = now_ns
        return self.running == 1

    def finish(self, now_ns: int) -> None:
        """One fewer runs."""
        if self.running == 0:
            raise ValueError("finish() without begin()")
        self.running -= 1
        if self.running == 0:
            self._ended_ns += max(0, now_ns - self._since_ns)

    def total_ns(self, now_ns: int) -> int:
        """All of it, up to now."""
        return self._ended_ns + (max(0, now_ns - self._since_ns) if self.running else 0)

    def unsaid_ns(self, now_ns: int) -> int:
        """What no answered report has carried yet. An unanswered report may have been counted all the same, and its
        time is carried again; so the receiver that adds up counts no more of one than has passed since the last."""
        return max(0, self.total_ns(now_ns) - self._reported_ns)

    def reported(self, total_ns: int) -> None:
        """A word was answered that carried everything up to this total."""
        self._reported_ns = max(self._reported_ns, total_ns)


HELD_STATES: Final = frozenset({LeaseStatus.ACTIVE, LeaseStatus.JEOPARDY, LeaseStatus.NOTICED})
"""The states in which the holder has the hardware, as far as it knows."""


@dataclass(slots=True, eq=False)
class Holder:
    """One lease in the eyes of its holder."""

    lease: LeaseId
    _: KW_ONLY
    ttl_ns: int
    """The time to live it asks for."""
    stamp: Callable[[int], str] = field(repr=False)
    """Writes an instant for people (``LeaseEnd.at``)."""
    policy: RenewalPolicy = field(default_factory=RenewalPolicy, repr=False)
    lead_ns: int = field(default=0, repr=False)
    """How long before the deadline its saving must begin (``policy.lead_ns``)."""
    status: LeaseStatus = field(default=LeaseStatus.QUEUED, init=False)
    epoch: Epoch | None = field(default=None, init=False)
    end: LeaseEnd | None = field(default=None, init=False)
    """Set once it is over for the holder. The office's own word, when it comes, replaces the holder's guess."""
    claim_by_ns: int | None = field(default=None, init=False, repr=False)
    """While GRANTED: about when the office will give it to the next in line."""
    busy_time: BusyMeter = field(default_factory=BusyMeter, init=False, repr=False)
    _plan: RenewalPlan | None = field(default=None, init=False, repr=False)
    _sent_ns: int = field(default=0, init=False, repr=False)
    """When the last answered request was sent: what ``_plan`` counts from."""
    _held_since_ns: int = field(default=0, init=False, repr=False)
    _attempts: int = field(default=0, init=False, repr=False)
    """Renewals sent since the last answered one."""
    _pending: Attempt | None = field(default=None, init=False, repr=False)
    """The last of them, while it may be answered."""
    _retry_ns: int = field(default=0, init=False, repr=False)
    _quiet: HolderWord | None = field(default=None, init=False, repr=False)
    """Why it is not being renewed: IDLE or HELD_LONG."""
    _fate: RenewalRefused | None = field(default=None, init=False, repr=False)
    """The refusal that stands; a renewal that was sent after it and granted lifts it."""
    _fate_sent_ns: int = field(default=0, init=False, repr=False)
    _notice: tuple[EndReason, int, str] | None = field(default=None, init=False, repr=False)
    _capped: bool = field(default=False, init=False, repr=False)
    """Held up to the moment at which it will be taken, so there is nothing to renew."""
    _raised_ns: int = field(default=0, init=False, repr=False)
    _warned: bool = field(default=False, init=False, repr=False)
    _news: list[HolderNews] = field(default_factory=list, init=False, repr=False)

    # ---- what it may do

    def may_start(self, now_ns: int, needs_ns: int | None = None) -> bool:
        """Whether device work that takes ``needs_ns`` (None: not known) may begin now."""
        return self.why_not_start(now_ns, needs_ns) is None

    def why_not_start(self, now_ns: int, needs_ns: int | None = None) -> str | None:
        """Why nothing, or not this, may begin now; None if it may."""
        deadline_ns = self.deadline_ns
        if self.status not in HELD_STATES or deadline_ns is None:
            return f"the lease is {self.status}"
        if now_ns >= deadline_ns:
            return "the lease's own deadline has passed"
        if self._fate is not None:
            return f"the office refused to renew the lease ({self._fate.reason})"
        until_ns = deadline_ns
        if self._notice is not None:
            reason, take_at_ns, _ = self._notice
            if now_ns >= take_at_ns:
                return f"the lease was to be taken by now ({reason})"
            until_ns = min(until_ns, take_at_ns)
        if self.status is LeaseStatus.ACTIVE:
            return None
        left = f"{format_duration(until_ns - now_ns)} left"
        if needs_ns is None:
            return None if self.status is LeaseStatus.NOTICED else f"the office does not answer, and {left} for sure"
        if now_ns + needs_ns > until_ns:
            return f"it needs {format_duration(needs_ns)} and there are {left}"
        return None

    @property
    def deadline_ns(self) -> int | None:
        """The holder's own deadline; never after the office's."""
        return None if self._plan is None else self._sent_ns + self._plan.deadline_ns

    def remaining_ns(self, now_ns: int) -> int:
        """Until it is over for sure if nothing is answered any more: the deadline, or the moment it will be taken."""
        if self.status not in HELD_STATES or self.deadline_ns is None:
            return 0
        until_ns = self.deadline_ns if self._notice is None else min(self.deadline_ns, self._notice[1])
        return max(0, until_ns - now_ns)

    @property
    def take_at_ns(self) -> int | None:
        """When it will be taken, if announced."""
        return None if self._notice is None else self._notice[1]

    @property
    def requested_ns(self) -> int:
        """The TTL it asks for: its own, or what its saves have come to need. That stays, if they get shorter again."""
        return max(self.ttl_ns, self._raised_ns, self.policy.ttl_for_ns(self.lead_ns))

    # ---- how it comes to be held

    def ready(self, now_ns: int, epoch: Epoch, claim_within_ns: int) -> None:
        """The office set hardware aside. Claim at once: a holder that waits to hear it twice loses the place."""
        if self.status in (LeaseStatus.QUEUED, LeaseStatus.GRANTED):
            self._apply(HolderEvent.READY)
            self.epoch = epoch
            self.claim_by_ns = now_ns + claim_within_ns

    def back_in_line(self) -> None:
        """The offer was declined or ran out."""
        if self.status is LeaseStatus.GRANTED:
            self._apply(HolderEvent.BACK)
            self.epoch = self.claim_by_ns = None

    def held(self, now_ns: int, *, sent_ns: int, granted_ns: int, epoch: Epoch) -> bool:
        """An acquire, claim or attach that was sent at ``sent_ns`` is answered: ``granted_ns`` are left.

        Take what the answer says is *left*, never the TTL that was asked for: a repeated request is answered with the
        lease that the first one got. Returns False, and changes nothing, for what is over or superseded.
        """
        self._pass(now_ns)
        live = self.status in HELD_STATES
        is_older = live and self.epoch is not None and epoch <= self.epoch
        if self.status in (LeaseStatus.ENDING, LeaseStatus.ENDED) or is_older:
            return False
        if not live:
            self._held_since_ns = sent_ns
        self.epoch = epoch
        self.claim_by_ns = None
        self._grant(now_ns, sent_ns, granted_ns, HolderEvent.ANSWERED if live else HolderEvent.HELD)
        self._pass(now_ns)
        return True

    # ---- renewal

    def attempt(self, now_ns: int, *, active: bool | None = None, ttl_ns: int | None = None) -> Attempt:
        """A renewal to send now, due or not, even after a refusal: the caller asks for it. It counts as sent from here.

        ``active`` says that work runs under it; by default whether the holder knows of any.
        """
        self._pass(now_ns)
        if self.status not in HELD_STATES or self._plan is None:
            raise LeaseNotActive(f"lease {self.lease} cannot be renewed: it is {self.status}", end=self.end)
        if ttl_ns is not None:
            self.ttl_ns = ttl_ns
        wait_ns = self._plan.wait_ns(self._attempts)
        self._attempts += 1
        self._retry_ns = now_ns + wait_ns
        self._pending = Attempt(
            lease=self.lease,
            epoch=self.epoch,
            sent_ns=now_ns,
            timeout_ns=wait_ns,
            active=self.busy if active is None else active,
            busy_ns=self.busy_time.unsaid_ns(now_ns),
            busy_total_ns=self.busy_time.total_ns(now_ns),
            ttl_ns=None if ttl_ns is None and self.requested_ns == self.ttl_ns else self.requested_ns,
            lead_ns=self.lead_ns,
        )
        return self._pending

    def attempt_due(self, now_ns: int) -> bool:
        """Whether a renewal should be sent now. Call ``tick`` first: it decides whether this one is to be made."""
        at_ns = self._renewal_at_ns()
        return at_ns is not None and now_ns >= at_ns

    def take(self, attempt: Attempt, outcome: Outcome, now_ns: int) -> bool:
        """What came of an attempt, in whatever order outcomes arrive. Returns whether it changed anything."""
        self._pass(now_ns)
        if isinstance(outcome, RenewalRefused) and outcome.end is not None and attempt.epoch == self.epoch:
            return self.ended(outcome.end, now_ns)
        if self.status not in HELD_STATES or attempt.epoch != self.epoch:
            return False
        match outcome:
            case RenewalGranted(granted_ns=granted_ns, save_ns=save_ns):
                self.busy_time.reported(attempt.busy_total_ns)
                if attempt.sent_ns <= self._sent_ns:
                    return False  # an answer to an older request says less than what is known already
                self._reckon(now_ns, save_ns)
                self._grant(now_ns, attempt.sent_ns, granted_ns, HolderEvent.ANSWERED)
                self._pass(now_ns)
            case RenewalRefused(reason=EndReason.IDLE):
                self.busy_time.reported(attempt.busy_total_ns)  # the office counts what comes with a renewal it refuses
                self._pending = None
                if self.status is LeaseStatus.JEOPARDY:
                    self._apply(HolderEvent.ANSWERED)
                    self._reapply_refusal_or_notice()
                if not self.busy:  # if work has begun meanwhile, the next attempt will say so
                    self._put_off(now_ns)
            case RenewalRefused():
                self.busy_time.reported(attempt.busy_total_ns)
                self._pending = None
                self._attempts = 0
                self._fate, self._fate_sent_ns = outcome, attempt.sent_ns
                self._apply(HolderEvent.REFUSED)
                self._report(now_ns, HolderWord.REFUSED, outcome.detail or outcome.reason.value)
            case RenewalUnknown():
                if attempt is not self._pending:
                    return False  # the next attempt is under way, or another answer came meanwhile
                self._unanswered(now_ns)
            case _:
                assert_never(outcome)
        return True

    def use(self, policy: RenewalPolicy, *, lead_ns: int | None = None) -> None:
        """Renew by another policy, or with another lead, from now on. The deadline never moves out by that."""
        self.policy, self.lead_ns = policy, self.lead_ns if lead_ns is None else lead_ns
        if self._quiet is HolderWord.HELD_LONG or policy.mode is RenewMode.ALWAYS:
            self._quiet = None
        if self._plan is not None:
            deadline_ns = self._plan.deadline_ns
            plan = policy.plan(self._plan.granted_ns, self.lease, self.lead_ns)
            self._plan = replace(plan, deadline_ns=min(plan.deadline_ns, deadline_ns))

    # ---- what the office says

    def notice(
        self, now_ns: int, *, reason: EndReason, in_ns: int, since_ns: int | None = None, detail: str = ""
    ) -> None:
        """It will be taken ``in_ns`` after the moment that was said, which was not before ``since_ns``."""
        self._pass(now_ns)
        if self.status in HELD_STATES:
            take_at_ns = (now_ns if since_ns is None else since_ns) + self.policy.deadline_after_ns(in_ns)
            self._notice = (reason, take_at_ns, detail)
            self._capped = False
            self._apply(HolderEvent.NOTICE)

    def cancel_notice(self, now_ns: int) -> None:
        """It will not be taken after all. A refused renewal is not undone by this."""
        self._pass(now_ns)
        if self._notice is None or self.status not in HELD_STATES:
            return
        self._notice, self._capped = None, False
        if self._fate is None:
            self._apply(HolderEvent.SPARE)

    def ended(self, end: LeaseEnd, now_ns: int) -> bool:
        """The office says that it ended. Its reason replaces the holder's guess."""
        if self.status is LeaseStatus.ENDED:
            return False
        is_known = self.end is not None
        self._apply(HolderEvent.ENDED)
        self._finish(now_ns, end, tell=not is_known)
        return True

    def begin_release(self, now_ns: int) -> None:
        """The holder gives it back, or leaves the line. Call it *before* the request is sent: from here on nothing
        starts, so nothing of this holder can be caught on hardware that is another lease's."""
        self._pass(now_ns)
        if self.status not in (LeaseStatus.ENDING, LeaseStatus.ENDED):
            held = self.status in HELD_STATES
            self._over(now_ns, now_ns, EndReason.RELEASED if held else EndReason.WITHDRAWN, "")

    # ---- activity

    @property
    def busy(self) -> bool:
        """Whether a cell, a call or a guest command runs under it."""
        return self.busy_time.running > 0

    def begin(self, now_ns: int) -> None:
        """Something begins to run under it; nests. If renewal was put off for want of work, it is due at once."""
        if self.busy_time.begin(now_ns) and self._quiet is HolderWord.IDLE:
            self._quiet = None
            self._report(now_ns, HolderWord.BUSY, "")

    def finish(self, now_ns: int) -> None:
        """The counterpart of ``begin``."""
        self.busy_time.finish(now_ns)

    # ---- time

    def tick(self, now_ns: int) -> None:
        """Time has passed: notice silence, decide whether to renew, warn, end."""
        self._pass(now_ns)
        if self.status not in HELD_STATES or self._plan is None:
            return
        if self._pending is not None and now_ns >= self._retry_ns:
            self._unanswered(now_ns)
        if self.attempt_due(now_ns):
            self._consider(now_ns)
        if self._warning_at_ns() is not None and now_ns >= self._sent_ns + self._plan.warn_ns:
            self._warned = True
            self._report(now_ns, HolderWord.WARNING, f"{format_duration(self.remaining_ns(now_ns))} left")

    def next_wake_ns(self) -> int | None:
        """When ``tick`` has something to do next; None if never again."""
        if self.status not in HELD_STATES:
            return None
        retry_ns = None if self._pending is None else self._retry_ns
        moments = (self.deadline_ns, self._renewal_at_ns(), retry_ns, self._warning_at_ns())
        return min(at_ns for at_ns in moments if at_ns is not None)

    def take_news(self) -> tuple[HolderNews, ...]:
        """What it has to say, once."""
        news, self._news = tuple(self._news), []
        return news

    # ---- within

    def _consider(self, now_ns: int) -> None:
        """Renewal is due: is it wanted?"""
        cap_ns = self.policy.max_hold_ns
        if self.policy.mode is RenewMode.WHILE_BUSY and not self.busy:
            self._put_off(now_ns)
        elif cap_ns is not None and now_ns + self.requested_ns > self._held_since_ns + cap_ns:
            self._quiet = HolderWord.HELD_LONG
            self._report(now_ns, HolderWord.HELD_LONG, f"it may be held for {format_duration(cap_ns)} at most")

    def _put_off(self, now_ns: int) -> None:
        """Not renewed for want of work. Said once; when work begins, the renewal is due at once."""
        if self._quiet is not HolderWord.IDLE:
            self._quiet = HolderWord.IDLE
            self._report(
                now_ns, HolderWord.IDLE, f"nothing runs; it ends in {format_duration(self.remaining_ns(now_ns))}"
            )

    def _renewal_at_ns(self) -> int | None:
        """When the next renewal is to be sent; None if none is in prospect."""
        if self._plan is None or self.status not in HELD_STATES or self.policy.mode is RenewMode.NEVER:
            return None
        if self._fate is not None or self._quiet is not None or self._capped:
            return None
        return self._retry_ns if self._attempts else self._sent_ns + self._plan.due_ns

    def _warning_at_ns(self) -> int | None:
        """When to warn; None while there is no cause, which is as long as a renewal is due and none was lost."""
        if self._warned or self._plan is None:
            return None
        if self._renewal_at_ns() is not None and self.status is not LeaseStatus.JEOPARDY:
            return None
        return self._sent_ns + self._plan.warn_ns

    def _reckon(self, now_ns: int, save_ns: int) -> None:
        """A save takes so long: from here on renewals leave time for it, if need be by asking for more time."""
        if save_ns:
            before_ns, self.lead_ns = self.requested_ns, self.policy.lead_of(save_ns, self.ttl_ns)
            self._raised_ns = max(self._raised_ns, self.policy.ttl_for_ns(self.lead_ns))
            if self.requested_ns > before_ns:
                text = f"saving takes {format_duration(save_ns)}, so it asks for {format_duration(self.requested_ns)}"
                self._report(now_ns, HolderWord.LONGER, text)

    def _grant(self, now_ns: int, sent_ns: int, granted_ns: int, event: HolderEvent) -> None:
        recovered = self.status is LeaseStatus.JEOPARDY
        self._sent_ns = sent_ns
        self._plan = self.policy.plan(granted_ns, self.lease, self.lead_ns)
        self._attempts = 0
        self._pending = None
        self._quiet = None
        self._warned = False
        # Granted up to the moment it will be taken: there is nothing more to be had, unless it is spared.
        self._capped = self._notice is not None and sent_ns + granted_ns >= self._notice[1]
        self._apply(event)
        if self._fate is not None and sent_ns > self._fate_sent_ns:
            self._fate = None
            if self._notice is None and self.status is LeaseStatus.NOTICED:
                self._apply(HolderEvent.SPARE)
        self._reapply_refusal_or_notice()
        if recovered:
            self._report(now_ns, HolderWord.RECOVERED, f"{format_duration(self.remaining_ns(now_ns))} left")

    def _reapply_refusal_or_notice(self) -> None:
        """An answer ended the jeopardy: a refusal or a notice that still stands shows again."""
        if self.status is LeaseStatus.ACTIVE and self._fate is not None:
            self._apply(HolderEvent.REFUSED)
        elif self.status is LeaseStatus.ACTIVE and self._notice is not None:
            self._apply(HolderEvent.NOTICE)

    def _unanswered(self, now_ns: int) -> None:
        first = self.status is not LeaseStatus.JEOPARDY
        self._pending = None
        self._apply(HolderEvent.UNANSWERED)
        if first:
            self._report(now_ns, HolderWord.JEOPARDY, f"{format_duration(self.remaining_ns(now_ns))} left for sure")

    def _pass(self, now_ns: int) -> None:
        """Before anything else is looked at: is it over by the holder's own clock?"""
        deadline_ns = self.deadline_ns
        if self.status in HELD_STATES and deadline_ns is not None and now_ns >= deadline_ns:
            self._over(now_ns, deadline_ns, *self._guess(deadline_ns))

    def _guess(self, deadline_ns: int) -> tuple[EndReason, str]:
        """The most likely reason. Only the office knows; what it says later replaces this."""
        if self._notice is not None and self._notice[1] <= deadline_ns:
            return self._notice[0], self._notice[2]
        if self._fate is not None:
            return self._fate.reason, self._fate.detail
        if self._quiet is HolderWord.IDLE:
            return EndReason.IDLE, "nothing ran when it was time to renew"
        if self._quiet is HolderWord.HELD_LONG:
            return EndReason.EXPIRED, f"held for its maximum of {format_duration(self.policy.max_hold_ns or 0)}"
        if self._attempts:
            renewals = "a renewal" if self._attempts == 1 else f"{self._attempts} renewals in a row"
            return EndReason.EXPIRED, f"{renewals} stayed without an answer"
        if self.policy.mode is RenewMode.NEVER:
            return EndReason.EXPIRED, "it was not to be renewed"
        return EndReason.EXPIRED, "the holder did not come to renew it in time"

    def _over(self, now_ns: int, at_ns: int, reason: EndReason, detail: str) -> None:
        self._apply(HolderEvent.OVER)
        self._finish(now_ns, LeaseEnd(reason=reason, at=self.stamp(at_ns), detail=detail), tell=True)

    def _finish(self, now_ns: int, end: LeaseEnd, *, tell: bool) -> None:
        self.end = end
        self._pending = None
        self._notice = None
        if tell:
            self._report(now_ns, HolderWord.OVER, f"{end.reason}: {end.detail}" if end.detail else end.reason.value)

    def _apply(self, event: HolderEvent) -> None:
        self.status = next_holder(self.status, event, f"lease {self.lease}")

    def _report(self, now_ns: int, word: HolderWord, detail: str) -> None:
        self._news.append(HolderNews(lease=self.lease, word=word, at_ns=now_ns, detail=detail))
