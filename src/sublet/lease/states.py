"""The states of a lease, of a slice and of a guest, as data.

Each machine is a mapping ``(state, event) → state``. An event the table does not know is an error that names state,
event and subject and leaves everything as it was. The three machines meet in ``COUPLING``: what happens to a lease
says what happens to its slices and guests. A volume is the slice of a named block lease beyond that lease; its machine
is the fourth. What the holder believes of its lease is a machine of its own,
since it runs on another clock and hears late, or never. The drawing in the docs is made from these tables
(``lease.drawing``).

Free means verified: the only ways into ``SliceState.FREE`` are ``VERIFIED`` (the agent looked and found nothing left)
and ``CLEARED`` (a later full verification, or the operator's word, audited). No time-out is an event of this table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeVar


class LeaseStatus(enum.StrEnum):
    """Where a lease is. ``JEOPARDY`` exists only on the holder's side."""

    QUEUED = "queued"
    """Asked for and waiting in line. It holds nothing, though hardware may be promised to it."""
    GRANTED = "granted"
    """The hardware is set aside; the clock starts when the holder claims it. An offer of less is such a grant too."""
    ACTIVE = "active"
    """Held, with a deadline."""
    JEOPARDY = "jeopardy"
    """The holder has renewals unanswered: nothing new starts that would not fit before its own deadline."""
    NOTICED = "noticed"
    """It will be taken at a stated moment; work goes on until then."""
    ENDING = "ending"
    """Over for the holder; what ran under it is being ended and checked."""
    ENDED = "ended"
    """Nothing is left of it, or what is left is quarantined, or on a machine that does not answer."""


class LeaseEvent(enum.StrEnum):
    """What can happen to a lease."""

    GRANT = "grant"
    """The ledger set hardware aside, with a new epoch."""
    UNGRANT = "ungrant"
    """An offer was declined or ran out, and the request goes back into the line."""
    CLAIM = "claim"
    """The holder took it; the clock runs."""
    RENEW = "renew"
    """The holder asked for more time in time, and got it."""
    ATTACH = "attach"
    """The holder, or its successor, took a new epoch."""
    NOTICE = "notice"
    """It was announced that the lease will be taken."""
    SPARE = "spare"
    """The reason for the notice went away before it was due."""
    END = "end"
    """Released, expired, taken: the reason is a fact of its own."""
    SUSPEND = "suspend"
    """Taken as announced, and its guests are to live on under a parking lease."""
    RESUME = "resume"
    """The holder took it, for guests that are parked: the clock runs, and they go on."""
    TORN_DOWN = "torn_down"
    """The agent has verified, or quarantined, every slice."""


class SliceState(enum.StrEnum):
    """Where a part of a resource is."""

    FREE = "free"
    """Verified: nothing of any lease is left on it."""
    LEASED = "leased"
    """Set aside for one lease, under one epoch."""
    TEARDOWN = "teardown"
    """Its lease is over; the agent has not yet verified that nothing is left."""
    QUARANTINED = "quarantined"
    """It could not be verified, and is not lent."""
    RETAINED = "retained"
    """Verified, with no process on it; what its last lease left there is kept as a volume."""
    DRAINING = "draining"
    """Free, but the operator keeps it so."""
    LOST = "lost"
    """Its node does not answer, or the device vanished."""


class SliceEvent(enum.StrEnum):
    """What can happen to a slice."""

    LEASE = "lease"
    """Set aside for a lease."""
    TEARDOWN = "teardown"
    """Its lease is over, or its offer was not taken; or what was kept in it is to go, or is looked for."""
    KEEP = "keep"
    """The agent verified that no process is on it; it has a volume that is kept."""
    TAKE = "take"
    """Set aside for a lease that goes on with the volume in it."""
    VERIFIED = "verified"
    """TORN_DOWN(epoch): the agent looked, and nothing of that epoch is left."""
    FAILED = "failed"
    """Teardown tried to its bound, or the device reported a fault."""
    CLEARED = "cleared"
    """A later full verification succeeded, or the operator vouches for it."""
    DRAIN = "drain"
    """The operator empties the node."""
    UNDRAIN = "undrain"
    """The operator lets it be leased again."""
    VANISH = "vanish"
    """Its node stopped answering, or the device is gone."""
    RETURN = "return"
    """The node or device is back; what was on it is not known to be gone."""


class GuestState(enum.StrEnum):
    """Where a process tree under a lease is."""

    STARTING = "starting"
    """Forked; it has not said yet that it is ready."""
    RUNNING = "running"
    """At work, or ready for it, on what its lease holds."""
    PARKING = "parking"
    """Its device memory is being copied to the host."""
    PARKED = "parked"
    """Alive without its GPU, under a parking lease."""
    RESUMING = "resuming"
    """Under a new GPU lease; its device memory is being copied back."""
    ENDING = "ending"
    """It was told to end and has its grace; after that the whole tree is killed."""
    GONE = "gone"
    """No process of its tree is left."""


class GuestEvent(enum.StrEnum):
    """What can happen to a guest."""

    STARTED = "started"
    """It said that it is ready."""
    PARK = "park"
    """It is to leave its GPU and stay alive."""
    STAYED = "stayed"
    """It is at work where it was: the park failed, or was called off."""
    PARKED = "parked"
    """No context is left on the device, and its memory is at the baseline: a park succeeded, or a resume did not."""
    RESUME = "resume"
    """It has a GPU again, under a new epoch."""
    RESUMED = "resumed"
    """Its device memory is back."""
    END = "end"
    """A lease it still uses is over."""
    EXITED = "exited"
    """The last process of its tree is gone."""


class VolumeState(enum.StrEnum):
    """Where the storage is that a tenant finds again by name."""

    LIVE = "live"
    """A lease has it, or it is just being put away after one."""
    RETAINED = "retained"
    """No lease has it. It is read-only, counts against capacity and quota, and can be leased again."""
    REMOVING = "removing"
    """Its time is over, or its tenant gave it up: it is being taken off the disk."""
    LOST = "lost"
    """Its node does not have it any more. It takes nothing, and is shown until its tenant has seen it."""
    REMOVED = "removed"
    """Nothing of it is left."""


class VolumeEvent(enum.StrEnum):
    """What can happen to a volume."""

    KEEP = "keep"
    """Its lease is over, and there is something in it; or it was looked for, and is there."""
    TAKE = "take"
    """A lease of its name was granted; an old one's epoch became a new one by attach."""
    MAKE = "make"
    """A lease was granted under the name of one that is lost: a new volume."""
    REMOVE = "remove"
    """Its retention is over, or its tenant said so."""
    REMOVED = "removed"
    """The agent looked: it is off the disk, or there was nothing in it."""
    MISS = "miss"
    """The agent looked for it, and it is not there."""
    FIND = "find"
    """An agent has it of whom the books did not know, or not so new: they are older than it is."""


class HolderEvent(enum.StrEnum):
    """What can happen to a lease as its holder sees it. Silence is never an event of the office."""

    READY = "ready"
    """The office set hardware aside, and waits for the claim."""
    BACK = "back"
    """An offer was declined or ran out: back into the line."""
    HELD = "held"
    """The acquire or the claim was answered; the clock runs from when it was sent."""
    ANSWERED = "answered"
    """A renewal was granted."""
    UNANSWERED = "unanswered"
    """A renewal stayed without an answer. It may have been granted: nothing changes until the holder's deadline."""
    REFUSED = "refused"
    """The office said no: the lease runs to its deadline, and no new device work starts."""
    NOTICE = "notice"
    """The office will take it at a stated moment."""
    SPARE = "spare"
    """The office will not take it after all."""
    OVER = "over"
    """The holder's own deadline came, or it gave the lease back."""
    ENDED = "ended"
    """The office said that it ended, and why."""


_L, _LE = LeaseStatus, LeaseEvent
LEASE_TABLE: Final[Mapping[tuple[LeaseStatus, LeaseEvent], LeaseStatus]] = {
    (_L.QUEUED, _LE.GRANT): _L.GRANTED,
    (_L.QUEUED, _LE.END): _L.ENDED,
    (_L.GRANTED, _LE.CLAIM): _L.ACTIVE,
    (_L.GRANTED, _LE.RESUME): _L.ACTIVE,
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
    (_L.NOTICED, _LE.SUSPEND): _L.ENDING,
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
    (_S.TEARDOWN, _SE.KEEP): _S.RETAINED,
    (_S.RETAINED, _SE.TAKE): _S.LEASED,
    (_S.RETAINED, _SE.TEARDOWN): _S.TEARDOWN,
    (_S.RETAINED, _SE.VANISH): _S.LOST,
    (_S.QUARANTINED, _SE.KEEP): _S.RETAINED,
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
    (_G.PARKING, _GE.STAYED): _G.RUNNING,
    (_G.PARKING, _GE.PARKED): _G.PARKED,
    (_G.PARKING, _GE.END): _G.ENDING,
    (_G.PARKING, _GE.EXITED): _G.GONE,
    (_G.PARKED, _GE.RESUME): _G.RESUMING,
    (_G.PARKED, _GE.END): _G.ENDING,
    (_G.PARKED, _GE.EXITED): _G.GONE,
    (_G.RESUMING, _GE.RESUMED): _G.RUNNING,
    (_G.RESUMING, _GE.PARKED): _G.PARKED,
    (_G.RESUMING, _GE.END): _G.ENDING,
    (_G.RESUMING, _GE.EXITED): _G.GONE,
    (_G.ENDING, _GE.END): _G.ENDING,
    (_G.ENDING, _GE.EXITED): _G.GONE,
}

_V, _VE = VolumeState, VolumeEvent
VOLUME_TABLE: Final[Mapping[tuple[VolumeState, VolumeEvent], VolumeState]] = {
    (_V.LIVE, _VE.TAKE): _V.LIVE,
    (_V.LIVE, _VE.KEEP): _V.RETAINED,
    (_V.LIVE, _VE.REMOVED): _V.REMOVED,
    (_V.LIVE, _VE.MISS): _V.LOST,
    (_V.RETAINED, _VE.TAKE): _V.LIVE,
    (_V.RETAINED, _VE.KEEP): _V.RETAINED,
    (_V.RETAINED, _VE.REMOVE): _V.REMOVING,
    (_V.RETAINED, _VE.MISS): _V.LOST,
    (_V.RETAINED, _VE.FIND): _V.RETAINED,
    (_V.REMOVING, _VE.REMOVED): _V.REMOVED,
    (_V.REMOVING, _VE.FIND): _V.RETAINED,
    (_V.LOST, _VE.MAKE): _V.LIVE,
    (_V.LOST, _VE.REMOVED): _V.REMOVED,
    (_V.LOST, _VE.FIND): _V.RETAINED,
}
"""There is no way back from REMOVING but that an older office ordered it and the volume was held since."""

_H = HolderEvent
HOLDER_TABLE: Final[Mapping[tuple[LeaseStatus, HolderEvent], LeaseStatus]] = {
    (_L.QUEUED, _H.READY): _L.GRANTED,
    (_L.QUEUED, _H.HELD): _L.ACTIVE,
    (_L.QUEUED, _H.OVER): _L.ENDING,
    (_L.QUEUED, _H.ENDED): _L.ENDED,
    (_L.GRANTED, _H.READY): _L.GRANTED,
    (_L.GRANTED, _H.BACK): _L.QUEUED,
    (_L.GRANTED, _H.HELD): _L.ACTIVE,
    (_L.GRANTED, _H.OVER): _L.ENDING,
    (_L.GRANTED, _H.ENDED): _L.ENDED,
    (_L.ACTIVE, _H.ANSWERED): _L.ACTIVE,
    (_L.ACTIVE, _H.UNANSWERED): _L.JEOPARDY,
    (_L.ACTIVE, _H.REFUSED): _L.NOTICED,
    (_L.ACTIVE, _H.NOTICE): _L.NOTICED,
    (_L.ACTIVE, _H.OVER): _L.ENDING,
    (_L.ACTIVE, _H.ENDED): _L.ENDED,
    (_L.JEOPARDY, _H.ANSWERED): _L.ACTIVE,
    (_L.JEOPARDY, _H.UNANSWERED): _L.JEOPARDY,
    (_L.JEOPARDY, _H.REFUSED): _L.NOTICED,
    (_L.JEOPARDY, _H.NOTICE): _L.JEOPARDY,
    (_L.JEOPARDY, _H.SPARE): _L.JEOPARDY,
    (_L.JEOPARDY, _H.OVER): _L.ENDING,
    (_L.JEOPARDY, _H.ENDED): _L.ENDED,
    (_L.NOTICED, _H.ANSWERED): _L.NOTICED,
    (_L.NOTICED, _H.UNANSWERED): _L.JEOPARDY,
    (_L.NOTICED, _H.REFUSED): _L.NOTICED,
    (_L.NOTICED, _H.NOTICE): _L.NOTICED,
    (_L.NOTICED, _H.SPARE): _L.ACTIVE,
    (_L.NOTICED, _H.OVER): _L.ENDING,
    (_L.NOTICED, _H.ENDED): _L.ENDED,
    (_L.ENDING, _H.ENDED): _L.ENDED,
}
"""The holder's side. JEOPARDY outranks a notice while it lasts, since it is the stricter of the two; a notice that is
still standing when an answer comes is told again. There is no way back from ENDING: what comes too late changes
nothing, even if the office would still have the lease."""

COUPLING: Final[Mapping[LeaseEvent, tuple[SliceEvent | None, GuestEvent | None]]] = {
    LeaseEvent.GRANT: (SliceEvent.LEASE, None),
    LeaseEvent.UNGRANT: (SliceEvent.TEARDOWN, None),
    LeaseEvent.CLAIM: (None, None),
    LeaseEvent.RENEW: (None, None),
    LeaseEvent.ATTACH: (None, None),
    LeaseEvent.NOTICE: (None, None),
    LeaseEvent.SPARE: (None, None),
    LeaseEvent.END: (SliceEvent.TEARDOWN, GuestEvent.END),
    LeaseEvent.SUSPEND: (SliceEvent.TEARDOWN, GuestEvent.PARK),
    LeaseEvent.RESUME: (None, GuestEvent.RESUME),
    LeaseEvent.TORN_DOWN: (None, None),
}
"""What an event of a lease does to each of its slices and to each guest that still uses one of them (of a resume: to
each that is parked under the lease it names). A suspend that does not come off is an end: a guest that cannot be parked
in time goes the way of all others, and so does one that is parked when its parking lease ends."""


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


def next_volume(state: VolumeState, event: VolumeEvent, subject: str) -> VolumeState:
    """The volume's next state."""
    return _next(VOLUME_TABLE, state, event, subject)


def next_holder(state: LeaseStatus, event: HolderEvent, subject: str) -> LeaseStatus:
    """The lease's next state as its holder sees it."""
    return _next(HOLDER_TABLE, state, event, subject)


def _next(table: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event, subject: str) -> _State:
    found = table.get((state, event))
    if found is None:
        raise TransitionError(f"{subject} is {state}: {event} is not possible now")
    return found
