"""The ledger's answers. An acquire gets exactly one of grant, place, offer and refusal."""

from __future__ import annotations

import enum

from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.office.ledger.events import Event
from sublet.office.ledger.records import LeaseRecord
from sublet.values import Kind, LeaseId
from sublet.wire.orders import Order


class RefusalCode(enum.StrEnum):
    """Why a well-formed request was refused."""

    CAPACITY = "capacity"
    """Not free now, and the request did not want to wait."""
    TOO_BIG = "too_big"
    """More than exists."""
    QUOTA = "quota"
    """The tenant's own limit."""
    LIMIT = "limit"
    """A limit of the office, such as the length of the queue."""
    UNSUPPORTED = "unsupported"
    """No device can honour the class or model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The lease is held, or (``claim_by_ns`` set) set aside until it is claimed."""

    lease: LeaseRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedMany:
    """These leases are held, each under an epoch of its own."""

    leases: tuple[LeaseRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in the queue. The lease record is in state QUEUED, or (ready) GRANTED."""

    lease: LeaseRecord
    position: int
    """1 is next."""
    reason: str
    estimate_ns: int | None
    """Until it may be granted if holders run to their deadlines; None where that cannot be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Less than asked, or another model, is set aside until ``lease.claim_by_ns``."""

    lease: LeaseRecord
    requested: int
    offered: int
    kind: Kind
    model: str | None = None
    """Of what is offered, where it is another than was asked for."""
    estimate_ns: int | None = None
    """Until what was asked for may be granted; None where it never is, or that cannot be told."""
    prices: tuple[int, int] | None = None
    """Where the models differ: millionths of a unit of money for an hour, of what is offered and of what was asked."""
    currency: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No, with numbers: what was asked, what would fit."""

    code: RefusalCode
    reason: str
    do: str
    would_fit: int | None = None
    """The largest amount that would be granted now (or, for ``too_big``, ever)."""
    estimate_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Any other command succeeded; the lease as it is now, where there is one."""

    lease: LeaseRecord | None = None


Answer = Granted | GrantedMany | Place | Offer | Refusal | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command comes to. The order binds the driver:

    1. ``events`` are durable, then
    2. ``orders`` go to the agents, then
    3. each agent reports that it holds its orders in ``holds``, then
    4. the answer (or the error) goes to the caller.
    """

    answer: Answer | SubletError
    events: tuple[Event, ...] = ()
    orders: tuple[Order, ...] = ()
    holds: tuple[tuple[LeaseId, int], ...] = ()
    """(lease, number): the orders that agents must hold before the answer may be seen."""
