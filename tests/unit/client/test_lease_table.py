"""What a program knows of its leases, and what it says about them, on a held clock."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from sublet.client import background_requests
from sublet.client.lease_entry import LeaseEntry, Owed
from sublet.client.lease_table import RETURN_AGAIN_NS, LeaseTable
from sublet.client.model import LeaseChange
from sublet.client.operations import OfficeOperations, ReceivedGrant
from sublet.client.outcomes import outcome_of
from sublet.client.sse import ServerEvent
from sublet.client.steps import HttpReply, Program, Revive
from sublet.errors import (
    Disconnected,
    LeaseExpired,
    LeaseNotActive,
    LeaseRevoked,
    NotFound,
    QuotaExceeded,
    StaleEpoch,
    SubletError,
    Unauthorized,
)
from sublet.lease.policy import RenewalPolicy
from sublet.lease.renewal import RenewalBatch
from sublet.lease.states import LeaseStatus
from sublet.lease.value import (
    Attempt,
    Outcome,
    RenewalGranted,
    RenewalRefused,
    RenewalUnknown,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import NS_PER_S, Epoch, LeaseId, RenewMode, RequestId
from sublet.wire.http import ErrorBody, ErrorView, LeaseView, News, RenewalsAnswer, RenewAnswer
from tests.unit.client.script import NOBODY, SILENCE, HeldClock, Script, ended, error, noticed, reply, view


class Desk:
    """A book on a held clock, with a script for the office and an ear for what is told."""

    def __init__(self) -> None:
        self.clock = HeldClock()
        self.script = Script(self.clock)
        self.core = OfficeOperations(self.clock)
        self.book = LeaseTable(self.clock, lambda: "r-release")
        self.told: list[LeaseChange] = []

    def open(self, policy: RenewalPolicy | None = None, **facts: Any) -> LeaseEntry:
        lease = view(**facts)
        held = self.book.open(ReceivedGrant(view=lease, sent_ns=self.clock.now_ns()), policy or RenewalPolicy())
        held.listeners.append(self.told.append)
        return held

    def collect(self) -> tuple[Attempt, ...]:
        return self.book.collect().attempts

    def settle(self, outcome: Outcome) -> None:
        """Renew what is due, and let this come of all of it."""
        batch = self.book.collect()
        self.book.record_outcomes(batch, [outcome] * len(batch.attempts))

    def news(self, what: str, lease: LeaseView) -> bool:
        return self.book.on_event(ServerEvent(what, msgspec.json.encode(News(what=what, lease=lease)).decode()))

    def run(self, program: Program[None], *answers: object) -> list[str]:
        self.script.answers += answers  # type: ignore[arg-type]
        self.script.run(program)
        return self.script.asked

    @property
    def whats(self) -> list[str]:
        return [change.what for change in self.told]


@pytest.fixture
def desk() -> Desk:
    return Desk()


ALWAYS = RenewalPolicy(mode=RenewMode.ALWAYS, jitter_fraction=0.0)
WHILE_BUSY = RenewalPolicy(jitter_fraction=0.0)
TRY_LATER = ErrorView(kind="CapacityExceeded", message="too many at once", do="Try again.", transient=True)


# ---- the deadline


def test_a_lease_is_over_at_its_own_deadline_even_if_nobody_says_so(desk: Desk) -> None:
    """It counts from the sending: 95 % of 100 s, less the request time-out of 5 s."""
    held = desk.open(RenewalPolicy(mode=RenewMode.NEVER))
    desk.clock.go(89.9)
    desk.book.refresh(held)
    assert held.holder.status is LeaseStatus.ACTIVE
    desk.clock.go(0.2)
    desk.book.refresh(held)
    assert held.holder.end is not None
    assert held.holder.end.reason is EndReason.EXPIRED
    desk.collect()
    assert desk.whats[-1] == "ended"
    assert desk.book.live == []


def test_what_is_left_counts_not_what_was_asked_for(desk: Desk) -> None:
    """A repeated acquire is answered with the lease that the first one got, which has less left."""
    held = desk.open(remaining=20.0)
    assert held.holder.remaining_ns(desk.clock.now_ns()) == (20 - 1 - 2) * NS_PER_S


def test_a_grant_that_took_too_long_to_arrive_is_over(desk: Desk) -> None:
    sent_ns = desk.clock.now_ns()
    desk.clock.go(120)
    held = desk.book.open(ReceivedGrant(view=view(), sent_ns=sent_ns), RenewalPolicy())
    assert held.over
    assert desk.book.live == []


# ---- renewal


def test_a_busy_lease_is_renewed_in_one_message_with_the_others(desk: Desk) -> None:
    one, two = desk.open(WHILE_BUSY, id="l-1"), desk.open(WHILE_BUSY, id="l-2")
    for held in (one, two):
        desk.book.begin(held)
    desk.clock.go(70)
    batch = desk.book.collect()
    assert {attempt.lease for attempt in batch.attempts} == {"l-1", "l-2"}
    answers = [RenewAnswer(lease=a.lease, epoch=Epoch(1, 7), deadline=0.0, ttl=100.0, number=2) for a in batch.attempts]
    asked = desk.run(
        background_requests.renew(desk.core, desk.book, batch),
        reply(RenewalsAnswer(items=list(answers), errors=[None, None])),
    )
    assert asked == ["POST /v1/renewals"]
    assert b'"active":true,"busy":70.0' in (desk.script.calls[0].body or b"")
    desk.clock.go(60)
    desk.book.refresh(one)
    assert one.holder.status is LeaseStatus.ACTIVE


def test_an_idle_lease_is_not_renewed_and_the_office_hears_why(desk: Desk) -> None:
    """Silence would make its end `expired`; it is said once that it is idle."""
    held = desk.open(WHILE_BUSY)
    desk.clock.go(2)
    words = desk.book.pending_activity_reports()
    assert [(word.held.id, word.active) for word in words] == [("l-1", False)]
    asked = desk.run(background_requests.report_activity(desk.core, desk.book, words[0]), reply(view(idle=True)))
    assert asked == ["POST /v1/leases/l-1/activity"]
    desk.clock.go(75)
    assert desk.collect() == ()
    assert desk.book.pending_activity_reports() == []
    assert desk.whats == ["idle", "warning"]
    desk.clock.go(20)
    desk.collect()
    assert held.holder.end is not None
    assert held.holder.end.reason is EndReason.IDLE


def test_the_warning_comes_at_a_quarter(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.open(WHILE_BUSY)
    with caplog.at_level(logging.WARNING, "sublet.client"):
        desk.clock.go(74.9)
        desk.collect()
        assert caplog.messages == []
        desk.clock.go(0.2)
        desk.collect()
    assert caplog.messages == ["lease l-1 ends soon and is not being renewed, for nothing runs under it: 15s left"]


def test_work_that_begins_late_is_renewed_at_once(desk: Desk) -> None:
    held = desk.open(WHILE_BUSY)
    desk.clock.go(80)
    assert desk.collect() == ()
    desk.book.begin(held)
    assert [attempt.active for attempt in desk.collect()] == [True]


def test_a_pause_between_cells_is_not_worth_a_word(desk: Desk) -> None:
    """Only what was idle for a fifth of a second is told, and only what the office does not know already."""
    held = desk.open(WHILE_BUSY)
    for _ in range(20):
        desk.book.begin(held)
        desk.clock.go(0.9)
        desk.book.finish(held)
        desk.clock.go(0.19)
        assert desk.book.pending_activity_reports() == []
    desk.clock.go(0.2)
    assert [word.active for word in desk.book.pending_activity_reports()] == [False]
    desk.book.begin(held)
    assert [word.active for word in desk.book.pending_activity_reports()] == [True]
    desk.book.finish(held)
    desk.book.begin(held)
    desk.clock.go(5)
    assert desk.book.pending_activity_reports() == []


def test_the_first_work_under_a_lease_that_was_idle_when_it_was_attached_is_told_at_once(desk: Desk) -> None:
    """The office would let any request that waits have it while a cell runs."""
    held = desk.open(WHILE_BUSY, idle=True)
    desk.clock.go(1.5)
    assert desk.book.pending_activity_reports() == [], "it is known"
    desk.book.begin(held)
    assert [word.active for word in desk.book.pending_activity_reports()] == [True]


def test_a_word_that_was_not_heard_is_said_again(desk: Desk) -> None:
    desk.open(WHILE_BUSY)
    desk.clock.go(1.5)
    (word,) = desk.book.pending_activity_reports()
    desk.run(background_requests.report_activity(desk.core, desk.book, word), SILENCE)
    assert desk.book.pending_activity_reports() == []
    desk.clock.go(6)
    assert [word.active for word in desk.book.pending_activity_reports()] == [False]


def test_busy_time_is_said_once(desk: Desk) -> None:
    held = desk.open(WHILE_BUSY)
    desk.book.begin(held)
    desk.clock.go(3)
    desk.book.finish(held)
    desk.clock.go(1.5)
    (word,) = desk.book.pending_activity_reports()
    desk.book.activity_reported(word, received=True)
    assert word.busy_ns == 3 * NS_PER_S
    assert held.holder.busy_time.unsaid_ns(desk.clock.now_ns()) == 0


def test_silence_is_jeopardy_and_a_late_answer_still_counts(desk: Desk) -> None:
    """An answer to the first attempt may come while the second is under way."""
    held = desk.open(ALWAYS)
    desk.clock.go(70)
    first = desk.book.collect()
    desk.clock.go(2)
    second = desk.book.collect()
    assert len(second.attempts) == 1
    before = held.holder.status
    desk.book.record_outcomes(first, [RenewalGranted(granted_ns=100 * NS_PER_S)])
    assert (before, held.holder.status) == (LeaseStatus.JEOPARDY, LeaseStatus.ACTIVE)
    assert desk.whats == ["jeopardy", "recovered"]


def test_silence_to_the_end_is_the_end(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    for _ in range(100):
        wake_ns = desk.book.next_wake_ns()
        if wake_ns is None:
            break
        desk.clock.ns = max(desk.clock.ns, wake_ns)
        desk.settle(RenewalUnknown())
        desk.book.pending_activity_reports()
    assert held.over
    assert desk.whats == ["jeopardy", "warning", "ended"]
    assert held.holder.end is not None
    assert "without an answer" in held.holder.end.detail


def test_an_office_that_is_gone_is_started_again_for_a_renewal(desk: Desk) -> None:
    """Leases outlive the office; somebody has to start it, and the holder is who needs it."""
    desk.open(ALWAYS)
    desk.clock.go(70)
    desk.run(background_requests.renew(desk.core, desk.book, desk.book.collect()), NOBODY)
    assert [type(step) for step in desk.script.steps][-1] is Revive


def test_a_refused_renewal_stops_new_work_but_not_the_lease(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.clock.go(70)
    desk.settle(RenewalRefused(reason=EndReason.FAIR_SHARE, detail="others wait"))
    assert held.holder.status is LeaseStatus.NOTICED
    assert held.holder.why_not_start(desk.clock.now_ns(), 0) is not None
    assert desk.whats == ["refused"]


ATTEMPT = Attempt(
    lease=LeaseId("l-1"), epoch=Epoch(1, 7), sent_ns=0, timeout_ns=NS_PER_S, active=True, busy_ns=0, busy_total_ns=0
)
END = LeaseEnd(reason=EndReason.PREEMPTED, at="2026-11-21T07:00:00.000Z", detail="for l-9")


@pytest.mark.parametrize(
    ("failure", "kind", "reason"),
    [
        (LeaseRevoked("taken", end=END), RenewalRefused, EndReason.PREEMPTED),
        (LeaseExpired("late", end=END), RenewalRefused, EndReason.PREEMPTED),
        (LeaseRevoked("others wait"), RenewalRefused, EndReason.FAIR_SHARE),
        (LeaseRevoked("nothing runs", reason="idle"), RenewalRefused, EndReason.IDLE),
        (LeaseRevoked("others wait", reason="fair_share"), RenewalRefused, EndReason.FAIR_SHARE),
        (LeaseNotActive("gone there", reason="not_held"), RenewalRefused, EndReason.NODE_LOST),
        (LeaseRevoked("of a newer office", reason="full_moon"), RenewalRefused, EndReason.FAIR_SHARE),
        (QuotaExceeded("used up", reason="quota"), RenewalRefused, EndReason.QUOTA),
        (QuotaExceeded("used up"), RenewalRefused, EndReason.QUOTA),
        (StaleEpoch("newer"), RenewalRefused, EndReason.RELEASED),
        (NotFound("who?"), RenewalRefused, EndReason.EXPIRED),
        (Disconnected("silence"), RenewalUnknown, None),
        (Unauthorized("token?"), RenewalUnknown, None),
        (SubletError("oops"), RenewalUnknown, None),
    ],
)
def test_what_an_error_means_to_a_renewal(failure: SubletError, kind: type[Outcome], reason: EndReason | None) -> None:
    """Only what settles the matter is a refusal; an office with a bug or a changed token settles nothing."""
    found = outcome_of(ATTEMPT, None, failure, "now")
    assert isinstance(found, kind)
    assert getattr(found, "reason", None) is reason


def test_each_renewal_of_a_message_is_answered_on_its_own(desk: Desk) -> None:
    desk.open(ALWAYS, id="l-1")
    lost = desk.open(ALWAYS, id="l-2")
    desk.clock.go(70)
    batch = desk.book.collect()
    gone = ErrorView(kind="NotFound", message="there is no lease l-2", do="", transient=False)
    good = RenewAnswer(lease="l-1", epoch=Epoch(1, 7), deadline=0.0, ttl=100.0, number=2)
    pairs = [(good, None) if attempt.lease == "l-1" else (None, gone) for attempt in batch.attempts]
    answer = RenewalsAnswer(items=[p[0] for p in pairs], errors=[p[1] for p in pairs])
    desk.run(background_requests.renew(desk.core, desk.book, batch), reply(answer))
    assert [held.id for held in desk.book.live] == ["l-1"]
    assert lost.holder.end is not None
    assert lost.holder.end.detail == "the office does not know it (any more)"


def test_another_number_of_answers_than_renewals_is_no_answer(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.clock.go(70)
    desk.run(
        background_requests.renew(desk.core, desk.book, desk.book.collect()), reply(RenewalsAnswer(items=[], errors=[]))
    )
    assert held.holder.status is LeaseStatus.JEOPARDY


# ---- news


def test_a_notice_is_heard_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    held = desk.open(ALWAYS)
    for _ in range(3):
        desk.news("notice", noticed(30.0))
    assert desk.whats == ["notice"]
    assert held.notice is not None
    assert (held.notice.reason, held.notice.in_seconds) == (EndReason.PREEMPTED, 30.0)
    assert held.holder.remaining_ns(desk.clock.now_ns()) < 30 * NS_PER_S
    assert "will be taken in 30s: preempted (for l-9)" in caplog.text


def test_a_spared_lease_goes_on(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.news("notice", noticed(30.0))
    desk.clock.go(5)
    desk.news("spared", view())
    assert (held.notice, held.holder.status) == (None, LeaseStatus.ACTIVE)
    assert desk.whats == ["notice", "spared"]


def test_the_end_is_told_once_with_the_offices_reason(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.news("ending", ended("preempted", "for l-9"))
    desk.news("ended", ended("preempted", "for l-9"))
    assert desk.whats == ["ended"]
    assert desk.told[0].end is not None
    assert desk.told[0].end.reason is EndReason.PREEMPTED
    assert held.confirmed
    assert desk.book.next_wake_ns() is None


def test_news_of_older_epochs_and_of_strangers_change_nothing(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.news("notice", noticed(30.0, epoch=Epoch(1, 6)))
    desk.news("notice", noticed(30.0, id="l-other"))
    assert held.notice is None


def test_a_newer_epoch_fences_the_older_holder(desk: Desk) -> None:
    """Somebody attached: this program's object is over, whatever it believes."""
    held = desk.open(ALWAYS)
    desk.news("attached", view(epoch=Epoch(1, 8)))
    assert held.holder.end is not None
    assert "newer epoch" in held.holder.end.detail
    assert desk.book.live == []


def test_attaching_within_one_program_fences_its_older_object(desk: Desk) -> None:
    older = desk.open(ALWAYS)
    newer = desk.open(ALWAYS, epoch=Epoch(1, 8))
    assert older.over
    assert desk.book.live == [newer]
    desk.clock.go(70)
    assert [attempt.epoch for attempt in desk.collect()] == [Epoch(1, 8)]


def test_after_missed_news_the_state_is_read_again(desk: Desk) -> None:
    """What is not among the living is looked at by itself, and its end is learnt with its reason."""
    kept, lost, unknown = (desk.open(ALWAYS, id=name) for name in ("l-1", "l-2", "l-3"))
    assert desk.book.on_event(ServerEvent("lagged", '{"what": "lagged"}'))
    asked = desk.run(
        background_requests.catch_up(desk.core, desk.book),
        reply([noticed(20.0, id="l-1")]),
        reply({"answer": "grant", "lease": ended("drained", id="l-2")}),
        error("NotFound", status=404),
    )
    assert asked == ["GET /v1/leases", "GET /v1/leases/l-2", "GET /v1/leases/l-3"]
    assert kept.notice is not None
    assert lost.holder.end is not None
    assert lost.holder.end.reason is EndReason.DRAINED
    assert unknown.over


def test_an_older_list_does_not_take_a_newer_notice_back(desk: Desk) -> None:
    """The list was asked for before the notice came, and does not have it."""
    held = desk.open(ALWAYS)
    as_of_ns = desk.clock.now_ns()
    desk.clock.go(0.1)
    desk.news("notice", noticed(30.0))
    desk.book.seen(view(), as_of_ns=as_of_ns)
    assert held.notice is not None
    desk.book.seen(view(), as_of_ns=desk.clock.now_ns() + 1)
    assert held.notice is None


def test_an_older_list_does_not_replace_a_newer_notice(desk: Desk) -> None:
    """It was asked for before the notice was moved, and would give the lease a moment that is no longer true."""
    held = desk.open(ALWAYS)
    older, newer = noticed(30.0), noticed(5.0, reason="operator")
    desk.news("notice", older)
    desk.clock.go(0.1)
    as_of_ns = desk.clock.now_ns()
    desk.clock.go(0.1)
    desk.news("notice", newer)
    desk.book.seen(older, as_of_ns=as_of_ns)
    assert held.notice is not None
    assert (held.notice.reason, held.notice.in_seconds) == (EndReason.OPERATOR, 5.0)
    assert held.view.notice == newer.notice
    assert desk.whats == ["notice", "notice"]


def test_an_older_list_does_not_bring_back_a_notice_that_was_taken_back(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.news("notice", noticed(30.0))
    desk.clock.go(0.1)
    as_of_ns = desk.clock.now_ns()
    desk.clock.go(0.1)
    desk.news("spared", view())
    desk.book.seen(noticed(30.0), as_of_ns=as_of_ns)
    assert held.notice is None
    assert desk.whats == ["notice", "spared"]


@pytest.mark.parametrize("data", ["", "{", "[]", '{"lease": 1}', '{"what": 1}'])
def test_news_that_cannot_be_read_are_read_again_elsewhere(desk: Desk, data: str) -> None:
    assert desk.book.on_event(ServerEvent("notice", data))


# ---- letting go


def test_what_is_let_go_is_over_before_anything_is_sent(desk: Desk) -> None:
    """Nothing of this holder can then be caught on hardware that is somebody else's."""
    held = desk.open(ALWAYS)
    desk.book.begin_release(held)
    assert (held.over, held.confirmed, desk.book.live) == (True, False, [])
    assert desk.whats == ["ended"]
    desk.clock.go(70)
    assert desk.collect() == ()


def test_what_is_left_is_neither_renewed_nor_ended(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.book.leave(held)
    desk.clock.go(70)
    assert desk.collect() == ()
    assert desk.whats == []


def test_a_lease_renewed_by_somebody_else_is_left_alone(desk: Desk) -> None:
    """A `RenewalManager` of the user's own has the only hand in it; news and the end still arrive."""
    held = desk.open(ALWAYS)
    desk.book.hand_over(held)
    desk.clock.go(70)
    assert desk.collect() == ()
    desk.clock.go(30)
    desk.book.refresh(held)
    assert desk.whats == ["ended"]


def test_a_dropped_lease_is_given_back_with_its_busy_time(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.book.begin(held)
    desk.clock.go(2)
    desk.book.dropped.append(held)
    (owed,) = desk.book.due_releases()
    asked = desk.run(background_requests.retry_release(desk.core, desk.book, owed), SILENCE, reply(view("ending")))
    assert asked == ["POST /v1/leases/l-1/release"] * 2
    assert not desk.book.owed
    assert desk.script.calls[0].body == b'{"request_id":"r-release","busy":2.0}'


def test_background_work_never_raises_for_what_a_network_does(desk: Desk) -> None:
    held = desk.open(ALWAYS)
    desk.clock.go(70)
    batch = desk.book.collect()
    for program in (
        background_requests.renew(desk.core, desk.book, batch),
        background_requests.retry_release(desk.core, desk.book, held.owed),
        background_requests.catch_up(desk.core, desk.book),
        background_requests.renew(desk.core, desk.book, RenewalBatch(())),
    ):
        desk.run(program, *[HttpReply(500, b"oops", 0)] * 3)
        desk.script.answers.clear()


def test_an_activity_that_has_not_begun_ends_harmlessly_if_it_can_be_told_from_others(desk: Desk) -> None:
    """An interrupt may come before it begins. Without a token it would end another one."""
    held = desk.open()
    desk.book.finish(held, object())
    with pytest.raises(ValueError, match="without begin"):
        desk.book.finish(held)
    desk.book.begin(held)
    desk.book.finish(held, object())
    assert held.holder.busy


def test_what_was_given_up_before_anything_was_sent_is_forgotten_at_once(desk: Desk) -> None:
    """Or the keeper would look at it without a pause, and a fabric that is dropped would not end."""
    owed = Owed(RequestId("r-1"))
    owed.left = True
    desk.book.owed.add(owed)
    assert desk.book.due_releases() == []
    assert desk.book.owed == set()
    desk.run(desk.core.give_back(owed))
    assert (owed.done, desk.script.asked) == (True, [])


def test_the_leases_of_a_request_for_many_are_given_back_once_its_caller_has_given_up(desk: Desk) -> None:
    """Before that they are about to be handed over: nothing but the caller may release them."""
    whole, member = Owed(RequestId("r-1")), Owed(RequestId("r-2"))
    member.lease, whole.members = LeaseId("l-1"), (member,)
    desk.book.owed.add(whole)
    assert desk.book.due_releases() == []
    assert desk.book.owed == {whole}
    whole.left = True
    assert desk.book.due_releases() == [member]
    assert desk.book.owed == {member}


def test_what_is_said_of_a_budget_reaches_the_program(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """As a line of the logger; no lease is concerned by it, and nothing is read again."""
    with caplog.at_level(logging.WARNING, "sublet.client"):
        assert not desk.book.on_event(ServerEvent("budget", '{"what": "budget", "reason": "80 % of it are used"}'))
    assert caplog.messages == ["80 % of it are used"]


def test_an_attach_that_was_given_up_is_looked_for_once_it_can_have_arrived(desk: Desk) -> None:
    """At once the office may not have heard of it yet: it would look as if there were nothing to give back."""
    owed = Owed(RequestId("r-1"))
    owed.lease, owed.attaching, owed.left = LeaseId("l-1"), "me", True
    desk.book.owed.add(owed)
    assert desk.book.due_releases() == []
    assert desk.book.next_return_ns() == desk.clock.now_ns() + RETURN_AGAIN_NS
    desk.clock.go(RETURN_AGAIN_NS / NS_PER_S)
    assert desk.book.due_releases() == [owed]


def test_a_busy_lease_whose_renewal_said_so_says_nothing_more(desk: Desk) -> None:
    """The renewal told the office as well; and after a pause the office hears that it is idle."""
    held = desk.open(WHILE_BUSY, idle=True)
    desk.book.begin(held)
    desk.clock.go(75)
    desk.settle(RenewalGranted(granted_ns=100 * NS_PER_S))
    assert desk.book.pending_activity_reports() == []
    desk.book.finish(held)
    desk.clock.go(50)
    assert [word.active for word in desk.book.pending_activity_reports()] == [False]


def test_what_the_office_could_not_take_back_just_now_is_given_back_again(desk: Desk) -> None:
    """One alone, or several in one message: an answer that says to come again leaves them at the office."""
    for count in (1, 2):
        owed = []
        for n in range(count):
            held = desk.open(ALWAYS, id=f"l-{count}-{n}")
            desk.book.dropped.append(held)
            owed.append(held.owed)
        assert set(desk.book.due_releases()) == set(owed)
        for program in background_requests.give_back_what_is_owed(desk.core, desk.book, owed):
            desk.run(program, reply(ErrorBody(error=TRY_LATER), 429))
        assert desk.book.owed == set(owed)
        assert [one.tries for one in owed] == [1] * count
        desk.clock.go(RETURN_AGAIN_NS / NS_PER_S)
        assert set(desk.book.due_releases()) == set(owed)
        for one in owed:
            desk.book.release_done(one)


def test_a_list_that_was_asked_for_before_a_notice_came_does_not_take_it_back(desk: Desk) -> None:
    """It counts from before the question was sent, not from when the answer came."""
    held = desk.open(ALWAYS)

    def answer(_: object) -> HttpReply:
        desk.clock.go(0.1)
        desk.news("notice", noticed(30.0))
        desk.clock.go(0.1)
        return reply([view()])

    desk.run(background_requests.catch_up(desk.core, desk.book), answer)
    assert held.notice is not None
