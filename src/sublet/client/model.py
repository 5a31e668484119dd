"""The small facts a holder is told: a place, an offer, a notice, a change. Frozen; a newer fact is a new value."""

from __future__ import annotations

from dataclasses import dataclass

from sublet.lease.states import LeaseStatus
from sublet.lease.value import LeaseEnd
from sublet.values import EndReason, Exclusivity, Kind, LeaseId, format_duration, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in the queue."""

    lease: LeaseId
    position: int
    """1 is next."""
    reason: str
    """What is being waited for."""
    estimate: float | None
    """Seconds until it may be granted if holders run to their deadlines; None where that cannot be told."""

    def __str__(self) -> str:
        about = "" if self.estimate is None else f", about {format_duration(round(self.estimate * 1e9))}"
        return f"place {self.position}{about}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Less than was asked for."""

    kind: Kind
    asked: int
    offered: int
    """Bytes, or cores: what is set aside for you, or (``valid`` is None) what would have fitted."""
    valid: float | None = None
    """Seconds in which the offer must be taken. None: nothing is set aside; ask for this much to have it."""

    def __str__(self) -> str:
        return f"{_amount(self.kind, self.offered)} instead of {_amount(self.kind, self.asked)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The lease will be taken."""

    reason: EndReason
    in_seconds: float
    """Counted from when the notice was heard."""
    at: str
    """RFC 3339, UTC: for people."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedDevice:
    """One slice that a lease has."""

    id: str
    """The resource, such as ``node/gpu0``."""
    kind: Kind
    amount: int
    """Bytes, or cores."""
    model: str = ""
    host: bool = False
    """True for a host device: a CPU standing in for a GPU."""
    exclusivity: Exclusivity | None = None

    def __str__(self) -> str:
        model = f" ({self.model})" if self.model else ""
        return f"{self.id}{model}: {_amount(self.kind, self.amount)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChange:
    """Something happened to a lease. ``Lease.events()`` gives these; the last one has ``end``."""

    what: str
    """notice, spared, ended, or what the holder's own side noticed: warning, idle, busy, jeopardy, recovered, refused,
    held_long."""
    lease: LeaseId
    status: LeaseStatus
    detail: str = ""
    notice: Notice | None = None
    end: LeaseEnd | None = None


def _amount(kind: Kind, amount: int) -> str:
    return f"{amount} cores" if kind is Kind.CPU else format_size(amount)
