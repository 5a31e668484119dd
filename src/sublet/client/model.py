"""Facts shown to a holder: a queue place, an offer, a notice, a change. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import Exclusivity, Kind, LeaseId, format_duration, format_size


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
    """Less than was asked for, or another model."""

    kind: Kind
    asked: int
    offered: int
    """Bytes, or cores: what is set aside for you, or (``valid`` is None) what would have fitted."""
    valid: float | None = None
    """Seconds in which the offer must be taken. None: nothing is set aside; ask for this much to have it."""
    model: str | None = None
    """Of the device that is offered, where it is another than was asked for."""
    asked_model: str | None = None
    estimate: float | None = None
    """Seconds until what was asked for may be granted; None where that cannot be told."""
    price: Decimal | None = None
    """Of what is offered, for an hour; None where the model is the one that was asked for, or the office says none."""
    asked_price: Decimal | None = None
    """Of what was asked for."""
    currency: str | None = None

    def __str__(self) -> str:
        about = "" if self.estimate is None else f" (that in about {format_duration(round(self.estimate) * 10**9)})"
        if self.model is None:
            return f"{_amount(self.kind, self.offered)} instead of {_amount(self.kind, self.asked)}"
        text = f"{_amount(self.kind, self.offered)} on {self.model} now, instead of {self.asked_model}{about}"
        if self.price is None or not self.asked_price:
            return text
        return f"{text}, at {100 * self.price / self.asked_price:.0f} % of the price"


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
