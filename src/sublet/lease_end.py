"""Why and when a lease ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EndReason(enum.StrEnum):
    """Why a lease ended. The reason reaches the cell, the exception, the bill, the metric and the audit record."""

    RELEASED = "released"
    """The holder gave it back."""
    EXPIRED = "expired"
    """It was not renewed: the holder was silent until the deadline."""
    IDLE = "idle"
    """The holder was alive, said that it had nothing to do, and did not renew."""
    PREEMPTED = "preempted"
    """Taken, after notice, for a request that goes before it."""
    FAIR_SHARE = "fair_share"
    """Held too long while others waited."""
    QUOTA = "quota"
    """The tenant's device time in the rolling window is used up."""
    BUDGET = "budget"
    """The tenant's money is used up."""
    DRAINED = "drained"
    """The operator is emptying the node."""
    OPERATOR = "operator"
    """The operator revoked it."""
    NODE_LOST = "node_lost"
    """The machine it ran on is gone."""
    OUT_OF_MEMORY = "out_of_memory"
    """What ran under it exceeded its cap."""
    DEVICE_LOST = "device_lost"
    """The device vanished or reported a fault."""
    GUEST_FAILED = "guest_failed"
    """What it was to carry could not be started."""
    HOLDER_GONE = "holder_gone"
    """A grant was not claimed, or a queue place was abandoned."""
    REFUSED = "refused"
    """It was never granted within the time the holder was willing to wait."""
    WITHDRAWN = "withdrawn"
    """The holder left the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnd:
    """Why and when a lease ended, and how to go on."""

    reason: EndReason
    at: str
    """RFC 3339, UTC: for people and records."""
    detail: str = ""
    saved_at: str | None = None
    """When the state was last saved, if it was."""
    resume_hint: str = "Acquire a new lease and go on from the last checkpoint."
    """What to do now."""
    way: str = ""
    """How its devices were taken back, where that was asked: ``suspend`` or ``not saved`` (see ``values.Way``)."""
    parked: str = ""
    """Where what ran under it lives on: hand it (or the ended lease) on as ``resume=``. Empty if it does not."""
