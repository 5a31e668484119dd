"""The states of a lease, of a slice and of a guest, as data.

Each machine is a mapping ``(state, event) → state``. An event the table does not know is an error that names state,
event and subject and leaves everything as it was. The three machines meet in ``COUPLING``: what happens to a lease
says what happens to its slices and guests. The drawing in the docs is made from these tables (``lease.drawing``).

Free means verified: the only ways into ``SliceState.FREE`` are ``VERIFIED`` (the agent looked and found nothing left)
and ``CLEARED`` (a later full verification, or the operator's word, audited). No time-out is an event of this table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeVar

__all__ = [
    "COUPLING",
    "GUEST_TABLE",
    "LEASE_TABLE",
    "LIVE_STATES",
    "SLICE_TABLE",
    "GuestEvent",
    "GuestState",
    "LeaseEvent",
    "LeaseStatus",
    "SliceEvent",
    "SliceState",
    "TransitionError",
    "next_guest",
    "next_lease",
    "next_slice",
]


class LeaseStatus(enum.StrEnum):
    """Where a lease is. ``JEOPARDY`` exists only on the holder's side."""

    QUEUED = "queued"
    """Asked for and waiting in line; holds nothing, or holds what it was offered until the offer ends."""
    GRANTED = "granted"
    """The hardware is set aside; the clock starts when the holder claims it."""
    ACTIVE = "active"
    """Held, with a deadline."""
    JEOPARDY = "jeopardy"
    """The holder has renewals unanswered: nothing new starts that would not fit before its own deadline."""
    NOTICED = "noticed"
    """It will be taken at a stated moment; work goes on until then."""
    ENDING = "ending"
    """Over for the holder; what ran under it is being ended and checked."""
    ENDED = "ended"
    """Nothing is left of it, or what is left is quarantined."""


class LeaseEvent(enum.StrEnum):
    """What can happen to a lease."""

    GRANT = "grant"
    """The ledger set hardware aside, with a new epoch."""
    UNGRANT = "ungrant"
    """An offer was declined or ran out, and the request goes back into the line."""
    CLAIM = "claim"
    """The holder took it; the clock runs."""
    RENEW = "renew"
    ATTACH = "attach"
    """The holder, or its successor, took a new epoch."""
    NOTICE = "notice"
    """It was announced that the lease will be taken."""
    SPARE = "spare"
    """The reason for the notice went away before it was due."""
    END = "end"
    """Released, expired, taken: the reason is a fact of its own."""
    TORN_DOWN = "torn_down"
    """The agent has verified, or quarantined, every slice."""


class SliceState(enum.StrEnum):
    """Where a part of a resource is."""

    FREE = "free"
    LEASED = "leased"
    TEARDOWN = "teardown"
    """Its lease is over; the agent has not yet verified that nothing is left."""
    QUARANTINED = "quarantined"
    """It could not be verified. Nobody gets it."""
    DRAINING = "draining"
    """Free, but the operator keeps it so."""
    LOST = "lost"
    """Its node does not answer, or the device vanished."""


class SliceEvent(enum.StrEnum):
    """What can happen to a slice."""

    LEASE = "lease"
    TEARDOWN = "teardown"
    VERIFIED = "verified"
    """TORN_DOWN(epoch): the agent looked, and nothing of that epoch is left."""
    FAILED = "failed"
    """Teardown tried to its bound, or the device reported a fault."""
    CLEARED = "cleared"
    """A later full verification succeeded, or the operator vouches for it."""
    DRAIN = "drain"
    UNDRAIN = "undrain"
    VANISH = "vanish"
    RETURN = "return"
    """The node or device is back; what was on it is not known to be gone."""


class GuestState(enum.StrEnum):
    """Where a process tree under a lease is."""

    STARTING = "starting"
    RUNNING = "running"
    PARKING = "parking"
    PARKED = "parked"
    """Alive without its GPU, under a parking lease."""
    RESUMING = "resuming"
    ENDING = "ending"
    GONE = "gone"


class GuestEvent(enum.StrEnum):
    """What can happen to a guest."""

    STARTED = "started"
    PARK = "park"
    PARKED = "parked"
    RESUME = "resume"
    RESUMED = "resumed"
    END = "end"
    EXITED = "exited"


_L, _LE = LeaseStatus, LeaseEvent
LEASE_TABLE: Final[Mapping[tuple[LeaseStatus, LeaseEvent], LeaseStatus]] = {
    (_L.QUEUED, _LE.GRANT): _L.GRANTED,
    (_L.QUEUED, _LE.END): _L.ENDED,
    (_L.GRANTED, _LE.CLAIM): _L.ACTIVE,
    (_L.GRANTED, _LE.UNGRANT): _L.QUEUED,
    (_L.GRANTED, _LE.END): _L.ENDING,
    (_L.ACTIVE, _LE.RENEW): _L.ACTIVE,
    (_L.ACTIVE, _LE.ATTACH): _L.ACTIVE,
    (_L.ACTIVE, _LE.NOTICE): _L.NOTICED,
    (_L.ACTIVE, _LE.END): _L.ENDING,
    (_L.NOTICED, _LE.RENEW): _L.NOTICED,
    (_L.NOTICED, _LE.ATTACH): _L.NOTICED,
    (_L.NOTICED, _LE.SPARE): _L.ACTIVE,
    (_L.NOTICED, _LE.END): _L.ENDING,
    (_L.ENDING, _LE.TORN_DOWN): _L.ENDED,
}

LIVE_STATES: Final = frozenset({_L.ACTIVE, _L.NOTICED})
"""The states in which (lease, epoch) is accepted by the resource."""

_S, _SE = SliceState, SliceEvent
SLICE_TABLE: Final[Mapping[tuple[SliceState, SliceEvent], SliceState]] = {
    (_S.FREE, _SE.LEASE): _S.LEASED,
    (_S.FREE, _SE.DRAIN): _S.DRAINING,
    (_S.FREE, _SE.FAILED): _S.QUARANTINED,
    (_S.FREE, _SE.VANISH): _S.LOST,
    (_S.LEASED, _SE.TEARDOWN): _S.TEARDOWN,
    (_S.TEARDOWN, _SE.VERIFIED): _S.FREE,
    (_S.TEARDOWN, _SE.FAILED): _S.QUARANTINED,
    (_S.TEARDOWN, _SE.VANISH): _S.LOST,
    (_S.QUARANTINED, _SE.CLEARED): _S.FREE,
    (_S.QUARANTINED, _SE.VANISH): _S.LOST,
    (_S.DRAINING, _SE.UNDRAIN): _S.FREE,
    (_S.DRAINING, _SE.FAILED): _S.QUARANTINED,
    (_S.DRAINING, _SE.VANISH): _S.LOST,
    (_S.LOST, _SE.RETURN): _S.TEARDOWN,
}

_G, _GE = GuestState, GuestEvent
GUEST_TABLE: Final[Mapping[tuple[GuestState, GuestEvent], GuestState]] = {
    (_G.STARTING, _GE.STARTED): _G.RUNNING,
    (_G.STARTING, _GE.END): _G.ENDING,
    (_G.STARTING, _GE.EXITED): _G.GONE,
    (_G.RUNNING, _GE.PARK): _G.PARKING,
    (_G.RUNNING, _GE.END): _G.ENDING,
    (_G.RUNNING, _GE.EXITED): _G.GONE,
    (_G.PARKING, _GE.PARKED): _G.PARKED,
    (_G.PARKING, _GE.END): _G.ENDING,
    (_G.PARKING, _GE.EXITED): _G.GONE,
    (_G.PARKED, _GE.RESUME): _G.RESUMING,
    (_G.PARKED, _GE.END): _G.ENDING,
    (_G.PARKED, _GE.EXITED): _G.GONE,
    (_G.RESUMING, _GE.RESUMED): _G.RUNNING,
    (_G.RESUMING, _GE.END): _G.ENDING,
    (_G.RESUMING, _GE.EXITED): _G.GONE,
    (_G.ENDING, _GE.EXITED): _G.GONE,
}

COUPLING: Final[Mapping[LeaseEvent, tuple[SliceEvent | None, GuestEvent | None]]] = {
    LeaseEvent.GRANT: (SliceEvent.LEASE, None),
    LeaseEvent.UNGRANT: (SliceEvent.TEARDOWN, None),
    LeaseEvent.CLAIM: (None, None),
    LeaseEvent.RENEW: (None, None),
    LeaseEvent.ATTACH: (None, None),
    LeaseEvent.NOTICE: (None, None),
    LeaseEvent.SPARE: (None, None),
    LeaseEvent.END: (SliceEvent.TEARDOWN, GuestEvent.END),
    LeaseEvent.TORN_DOWN: (None, None),
}
"""What an event of a lease does to each of its slices and to each guest that still uses one of them."""


class TransitionError(Exception):
    """The table does not know this event in this state: a bug, never a user's mistake. Nothing was changed."""


_State = TypeVar("_State", bound=enum.StrEnum)
_Event = TypeVar("_Event", bound=enum.StrEnum)


def next_lease(state: LeaseStatus, event: LeaseEvent, subject: str) -> LeaseStatus:
    """The lease's next state."""
    return _next(LEASE_TABLE, state, event, subject)


def next_slice(state: SliceState, event: SliceEvent, subject: str) -> SliceState:
    """The slice's next state."""
    return _next(SLICE_TABLE, state, event, subject)


def next_guest(state: GuestState, event: GuestEvent, subject: str) -> GuestState:
    """The guest's next state."""
    return _next(GUEST_TABLE, state, event, subject)


def _next(table: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event, subject: str) -> _State:
    found = table.get((state, event))
    if found is None:
        raise TransitionError(f"{subject} is {state}: {event} is not possible now")
    return found
