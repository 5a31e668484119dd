"""Background operations of leases, as programs of steps: renew, report activity, release, catch up on events.

Each ends with the book knowing what came of it. None raises for what a network does: silence is a fact to note.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sublet.background import is_shortage
from sublet.client.lease_entry import ActivityReport, Owed
from sublet.client.lease_table import LeaseTable
from sublet.client.operations import OfficeOperations
from sublet.client.outcomes import item_of, outcome_of
from sublet.client.responses import end_of, error_of
from sublet.client.steps import Program, Revive
from sublet.errors import Disconnected, NotFound, SubletError
from sublet.lease.renewal import RenewalBatch
from sublet.lease.value import Attempt, Outcome, RenewalUnknown
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import NS_PER_S, Epoch
from sublet.wire.http import LeaseView, RenewRequest

FLIGHT_S: Final = 5.0
"""How long an answer to a background request is awaited at most. A renewal is repeated much sooner, by its own plan,
and the answer to the earlier one still counts when it comes."""


REPORTS_MAX: Final = 8
"""Messages about leases that became busy or idle, side by side."""


def renew(core: OfficeOperations, book: LeaseTable, batch: RenewalBatch) -> Program[None]:
    """Send renewals that are due. Those that ask for another TTL go alone, the rest in one message."""
    together = [attempt for attempt in batch.attempts if attempt.ttl_ns is None]
    for attempt in batch.attempts:
        if attempt.ttl_ns is not None:
            outcome = yield from renew_one(core, book, attempt, FLIGHT_S)
            book.record_outcomes(RenewalBatch((attempt,)), (outcome,))
    if together:
        outcomes = yield from _renew_together(core, book, together)
        book.record_outcomes(RenewalBatch(tuple(together)), outcomes)


def renew_one(core: OfficeOperations, book: LeaseTable, attempt: Attempt, timeout_s: float) -> Program[Outcome]:
    """One renewal, and what its answer means."""
    request = RenewRequest(
        epoch=attempt.epoch or Epoch(0, 0),
        active=attempt.active,
        busy=attempt.busy_ns / NS_PER_S,
        ttl=None if attempt.ttl_ns is None else attempt.ttl_ns / NS_PER_S,
        lead=attempt.lead_ns / NS_PER_S,
    )
    try:
        answer, _ = yield from core.renew(attempt.lease, request, timeout_s)
    except SubletError as error:
        if _is_absent(error) and not core.was_ended():
            yield Revive()
        return outcome_of(attempt, None, error, book.now_text())
    return outcome_of(attempt, answer, None, "")


def report_all_activity(
    core: OfficeOperations, book: LeaseTable, words: Sequence[ActivityReport]
) -> list[Program[None]]:
    """Tell the office that leases became busy or idle: side by side, but on a bounded number of connections."""
    return [_report_some(core, book, words[start::REPORTS_MAX]) for start in range(min(len(words), REPORTS_MAX))]


def _report_some(core: OfficeOperations, book: LeaseTable, words: Sequence[ActivityReport]) -> Program[None]:
    for word in words:
        yield from report_activity(core, book, word)


def report_activity(core: OfficeOperations, book: LeaseTable, word: ActivityReport) -> Program[None]:
    """Tell the office that a lease became busy or idle."""
    held = word.held
    try:
        yield from core.report_activity(held.id, held.epoch, active=word.active, busy_s=word.busy_ns / NS_PER_S)
    except SubletError as error:
        # What the office refuses (the lease is over, say) is no use repeating; the renewal will tell.
        book.activity_reported(word, received=not isinstance(error, Disconnected))
    else:
        book.activity_reported(word, received=True)


def give_back_what_is_owed(core: OfficeOperations, book: LeaseTable, owed: Sequence[Owed]) -> list[Program[None]]:
    """Give back what nothing in this program holds: several leases in one message, anything else by itself."""
    plain = [one for one in owed if one.is_plain]
    if len(plain) < 2:
        return [retry_release(core, book, one) for one in owed]
    return [_give_back_many(core, book, plain), *(retry_release(core, book, one) for one in owed if not one.is_plain)]


def _give_back_many(core: OfficeOperations, book: LeaseTable, owed: Sequence[Owed]) -> Program[None]:
    try:
        yield from core.release_many(owed)
    except SubletError as error:
        again = isinstance(error, Disconnected) or error.transient
        for one in owed:
            if again and not one.done:
                book.release_failed(one)
            else:
                book.release_done(one)
    except BaseException:  # whatever carried this out has ended
        for one in owed:
            book.release_failed(one)
        raise
    else:
        for one in owed:
            book.release_done(one)


def retry_release(core: OfficeOperations, book: LeaseTable, owed: Owed) -> Program[None]:
    """Give back what nothing in this program holds. If the office cannot be reached, it is tried again later."""
    try:
        yield from core.give_back(owed)
    except SubletError as error:
        if isinstance(error, Disconnected) or error.transient:
            book.release_failed(owed)
        else:
            book.release_done(owed)
    except BaseException:  # whatever carried this out has ended
        book.release_failed(owed)
        raise
    else:
        book.release_done(owed)


def catch_up(core: OfficeOperations, book: LeaseTable) -> Program[None]:
    """Read the state again, after news may have been missed."""
    try:
        as_of_ns = book.now_ns()
        views = yield from core.query("/v1/leases", list[LeaseView])
        for view in views:
            book.seen(view, as_of_ns=as_of_ns)
        for held in book.missing(views):
            try:
                view = yield from core.get_lease(held.id)
            except NotFound:
                book.ended(held, LeaseEnd(reason=EndReason.EXPIRED, at=book.now_text(), detail=_FORGOTTEN))
            else:
                if view.end is not None:
                    book.ended(held, end_of(view.end))
    except SubletError:
        return  # the stream of news is opened again, and then this is done again


_FORGOTTEN: Final = "the office does not know it (any more)"


def _renew_together(core: OfficeOperations, book: LeaseTable, attempts: Sequence[Attempt]) -> Program[list[Outcome]]:
    try:
        answer, _ = yield from core.renew_many([item_of(attempt) for attempt in attempts], FLIGHT_S)
    except SubletError as error:
        if _is_absent(error) and not core.was_ended():
            yield Revive()
        return [RenewalUnknown(detail=error.message)] * len(attempts)
    now = book.now_text()
    return [
        outcome_of(attempt, item, None if error is None else error_of(error), now)
        for attempt, item, error in zip(attempts, answer.items, answer.errors, strict=True)
    ]


def _is_absent(error: SubletError) -> bool:
    """Whether no office answers: that of this machine is then started again, for leases outlive it. A request that
    this program could not send for want of descriptors or memory tells nothing of the office."""
    cause = error.__cause__
    return isinstance(error, Disconnected) and not error.sent and not (cause is not None and is_shortage(cause))
