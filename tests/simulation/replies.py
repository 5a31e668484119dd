"""What a holder in the pretended world gets to hear from the office."""

from __future__ import annotations

from dataclasses import dataclass

from sublet.errors import SubletError
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger.answers import Answer, Granted, Offer, Place, Refusal
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.values import Epoch, LeaseId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a holder gets to hear."""

    kind: str
    """granted, ready, offer, place, refusal, error, unknown, done"""
    lease: LeaseId | None = None
    epoch: Epoch | None = None
    left_ns: int = 0
    """Until the deadline, or to claim it, as of the decision."""
    notice: tuple[EndReason, int] | None = None
    node: NodeId | None = None
    reason: EndReason | None = None
    ended: bool = False
    error: SubletError | None = None
    others: tuple[tuple[Reply, int], ...] = ()
    """Of a request for many: the other leases that it was granted, with the deadlines that are promised."""


def reply_for(answer: Answer | SubletError, lease: LeaseRecord | None, now: Now) -> Reply:
    """The outer form of an answer, as of the moment of the decision."""
    if isinstance(answer, SubletError):
        ended = getattr(answer, "end", None)
        reason = ended.reason if ended is not None else None
        return Reply(kind="error", error=answer, ended=ended is not None, reason=reason)
    if isinstance(answer, Refusal):
        return Reply(kind="refusal")
    if lease is None:
        return Reply(kind="done")
    if isinstance(answer, Granted) and lease.status in LIVE_STATES:
        notice = lease.notice
        return Reply(
            kind="granted",
            lease=lease.id,
            epoch=lease.epoch,
            left_ns=(lease.deadline_ns or 0) - now.ns,
            notice=None if notice is None else (notice.reason, notice.take_at_ns - now.ns),
            node=lease.node,
        )
    if isinstance(answer, Granted | Offer):
        kind = "offer" if isinstance(answer, Offer) else "ready"
        left_ns = (lease.claim_by_ns or 0) - now.ns
        return Reply(kind=kind, lease=lease.id, epoch=lease.epoch, left_ns=left_ns, node=lease.node)
    if isinstance(answer, Place):
        return Reply(kind="place", lease=lease.id)
    return Reply(kind="done", lease=lease.id, ended=lease.status in (LeaseStatus.ENDING, LeaseStatus.ENDED))
