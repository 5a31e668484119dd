"""Encodes renewals, and interprets their answers for the holder."""

from __future__ import annotations

from sublet.errors import Disconnected, LeaseEnded, NotFound, QuotaExceeded, RenewalRefusal, StaleEpoch, SubletError
from sublet.lease.value import (
    Attempt,
    Outcome,
    RenewalGranted,
    RenewalRefused,
    RenewalUnknown,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import NS_PER_S, Epoch
from sublet.wire.http import RenewAnswer, RenewItem


def outcome_of(attempt: Attempt, answer: RenewAnswer | None, error: SubletError | None, now: str) -> Outcome:
    """What the office's answer to one renewal means to its holder."""
    if answer is not None:
        return RenewalGranted(granted_ns=_ns(answer.ttl), save_ns=_ns(answer.save))
    if error is None or isinstance(error, Disconnected):
        return RenewalUnknown(detail="" if error is None else error.message)
    if isinstance(error, LeaseEnded) and error.end is not None:
        return RenewalRefused(reason=error.end.reason, detail=error.end.detail, end=error.end)
    if isinstance(error, StaleEpoch):
        end = fenced_end(now)
        return RenewalRefused(reason=end.reason, detail=end.detail, end=end)
    if isinstance(error, NotFound):
        end = LeaseEnd(reason=EndReason.EXPIRED, at=now, detail="the office does not know it (any more)")
        return RenewalRefused(reason=end.reason, detail=end.detail, end=end)
    if isinstance(error, QuotaExceeded):
        return RenewalRefused(reason=EndReason.QUOTA, detail=error.message)
    if isinstance(error, LeaseEnded):
        return RenewalRefused(reason=_reason(error, attempt), detail=error.message)
    return RenewalUnknown(detail=error.message)  # an answer that settles nothing


def _reason(error: LeaseEnded, attempt: Attempt) -> EndReason:
    """The end that this refusal announces. An office that is older than the word leaves it to be guessed."""
    match error.reason:
        case RenewalRefusal.IDLE | RenewalRefusal.QUOTA | RenewalRefusal.BUDGET | RenewalRefusal.FAIR_SHARE:
            return EndReason(error.reason)
        case RenewalRefusal.NOT_HELD:
            return EndReason.NODE_LOST
        case _:
            return EndReason.FAIR_SHARE if attempt.active else EndReason.IDLE


def item_of(attempt: Attempt) -> RenewItem:
    """A renewal as it travels."""
    return RenewItem(
        lease=attempt.lease,
        epoch=attempt.epoch or Epoch(0, 0),
        active=attempt.active,
        busy=attempt.busy_ns / NS_PER_S,
        lead=attempt.lead_ns / NS_PER_S,
    )


def fenced_end(at: str) -> LeaseEnd:
    return LeaseEnd(
        reason=EndReason.RELEASED,
        at=at,
        detail="another holder attached to it, under a newer epoch",
        resume_hint="Attach to it again, or go on where it is held now.",
    )


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
