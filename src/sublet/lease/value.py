"""Frozen facts about a lease as its holder knows it. A change makes a new value."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import TypeAlias

from sublet.errors import LeaseEnded, LeaseExpired, LeaseNotActive, LeaseRevoked
from sublet.lazy_dataclass import dataclass
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import Epoch, LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One renewal that is to be sent now. It is marked as sent when it is handed out, so send it at once."""

    lease: LeaseId
    epoch: Epoch | None
    sent_ns: int
    """What the answer grants counts from here, so a slow send costs the holder time, never the next holder."""
    timeout_ns: int
    """How long to wait for the answer. A later answer still counts; another attempt will be under way by then."""
    active: bool
    """Whether work runs under the lease now."""
    busy_ns: int
    """Busy time since the last word that was answered."""
    busy_total_ns: int
    """Busy time of the whole lease; what the holder notes once this is answered."""
    ttl_ns: int | None = None
    """Ask for this much instead of what the lease has, because saving has come to take longer."""
    lead_ns: int = 0
    """How long before the deadline saving must begin, as the holder reckons: warnings to its guests may go by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalGranted:
    """The renewal was granted."""

    granted_ns: int
    """What the office says is left, as of when it got the request: not the TTL that was asked for."""
    save_ns: int = 0
    """How long the last save under the lease took; 0 if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalRefused:
    """The office said no. With ``end`` the lease is over; without, it runs to its deadline and is not renewed."""

    reason: EndReason
    detail: str = ""
    end: LeaseEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalUnknown:
    """No answer, or one that settles nothing. It may have been granted; it is never taken for a refusal."""

    detail: str = ""


Outcome: TypeAlias = RenewalGranted | RenewalRefused | RenewalUnknown


class HolderWord(enum.StrEnum):
    """What a holder's side has to say by itself."""

    WARNING = "warning"
    """A quarter of the time is left, and nothing that would renew it is in sight."""
    JEOPARDY = "jeopardy"
    """A renewal stayed unanswered: the countdown to the holder's own deadline is on."""
    RECOVERED = "recovered"
    """A renewal was answered after all."""
    IDLE = "idle"
    """It was time to renew and nothing ran, so it was not renewed. Tell the office, so that the end says so too."""
    BUSY = "busy"
    """Work began after the holder had said that it was idle."""
    HELD_LONG = "held_long"
    """The policy's ``max_hold`` is reached: it is not renewed again."""
    LONGER = "longer"
    """Saving has come to take so long that more time to live is asked for from now on."""
    REFUSED = "refused"
    """The office will not renew it; no new device work starts."""
    OVER = "over"
    """It is over for the holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderNews:
    """One thing the holder's side says, once."""

    lease: LeaseId
    word: HolderWord
    at_ns: int
    detail: str = ""


def wall_ns_of(moment: str) -> int:
    """What ``rfc3339`` wrote. Raises ``ValueError``."""
    return round(datetime.fromisoformat(moment).timestamp() * 1000) * 1_000_000


def rfc3339(wall_ns: int) -> str:
    """A moment of the wall clock, for people and records: ``2026-11-21T06:38:06.250Z``."""
    text = datetime.fromtimestamp(wall_ns // 1_000_000 / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def ended_error(lease: LeaseId, end: LeaseEnd) -> LeaseEnded:
    """The end of a lease as an error, of the class by which its holder can tell what kind of end it was."""
    kind: type[LeaseEnded]
    match end.reason:
        case EndReason.EXPIRED | EndReason.IDLE:
            kind = LeaseExpired
        case EndReason.RELEASED | EndReason.WITHDRAWN | EndReason.REFUSED | EndReason.HOLDER_GONE:
            kind = LeaseNotActive
        case _:
            kind = LeaseRevoked
    detail = f" ({end.detail})" if end.detail else ""
    return kind(f"lease {lease} has ended: {end.reason}{detail}", end=end, do=end.resume_hint)
