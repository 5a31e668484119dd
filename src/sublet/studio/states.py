"""The state table of a session.

``SESSION_TABLE`` maps (state, event) to the next state; an event that the table does not know is an error and changes
nothing. A session outlives its leases: it has at most one at a time, and between two of them it rests. The page of the
docs shows the table (``python -m sublet.studio.drawing``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class SessionState(enum.StrEnum):
    """Where a session is."""

    WAITING = "waiting"
    """A lease was asked for, and the office has not granted it yet."""
    OFFERED = "offered"
    """The office has set a smaller amount or another model aside; it is accepted or declined before it runs out."""
    ACTIVE = "active"
    """It has a lease."""
    RESTING = "resting"
    """It has no lease, and what it saved is kept."""
    ENDED = "ended"
    """It is over and gets no further lease; a ``SessionEnd`` says why. What its last lease saved may still be recorded.
    """


class SessionEvent(enum.StrEnum):
    """What can happen to a session."""

    ASK = "ask"
    """Its holder is about to ask the office for a lease."""
    OFFER = "offer"
    """The office offers less than was asked for, or another model."""
    ACCEPT = "accept"
    """Its person accepted the offer; the process that asks takes it."""
    DECLINE = "decline"
    """The offer was declined or ran out: back into the queue."""
    GRANT = "grant"
    """The office granted the lease."""
    REFUSE = "refuse"
    """The office refused the request, or the request was withdrawn."""
    ABANDON = "abandon"
    """The process that asked is gone, or got no answer. The next request has the same id, so it has one effect."""
    MOVE = "move"
    """Its holder goes on under another lease or epoch: attached, replaced, resumed, or found in the office."""
    RUN = "run"
    """A cell has run under a lease of it, and what it consumed is known."""
    LOSE = "lose"
    """Its lease has ended, for the reason that is recorded; again when nothing is left of it, as what it saved is known
    then."""
    END = "end"
    """Its person ended the session."""


_S, _E = SessionState, SessionEvent
SESSION_TABLE: Final[Mapping[tuple[SessionState, SessionEvent], SessionState]] = {
    (_S.RESTING, _E.ASK): _S.WAITING,
    (_S.RESTING, _E.MOVE): _S.ACTIVE,
    (_S.RESTING, _E.RUN): _S.RESTING,
    (_S.RESTING, _E.LOSE): _S.RESTING,
    (_S.RESTING, _E.END): _S.ENDED,
    (_S.WAITING, _E.ASK): _S.WAITING,
    (_S.WAITING, _E.OFFER): _S.OFFERED,
    (_S.WAITING, _E.GRANT): _S.ACTIVE,
    (_S.WAITING, _E.REFUSE): _S.RESTING,
    (_S.WAITING, _E.ABANDON): _S.RESTING,
    (_S.WAITING, _E.RUN): _S.WAITING,
    (_S.WAITING, _E.END): _S.ENDED,
    (_S.OFFERED, _E.ASK): _S.WAITING,
    (_S.OFFERED, _E.ACCEPT): _S.OFFERED,
    (_S.OFFERED, _E.GRANT): _S.ACTIVE,
    (_S.OFFERED, _E.DECLINE): _S.WAITING,
    (_S.OFFERED, _E.REFUSE): _S.RESTING,
    (_S.OFFERED, _E.ABANDON): _S.RESTING,
    (_S.OFFERED, _E.RUN): _S.OFFERED,
    (_S.OFFERED, _E.END): _S.ENDED,
    (_S.ACTIVE, _E.MOVE): _S.ACTIVE,
    (_S.ACTIVE, _E.RUN): _S.ACTIVE,
    (_S.ACTIVE, _E.LOSE): _S.RESTING,
    (_S.ACTIVE, _E.END): _S.ENDED,
    (_S.ENDED, _E.LOSE): _S.ENDED,
}


class SessionEnd(enum.StrEnum):
    """Why a session is over."""

    ENDED = "ended"
    """Its person ended it."""


class SessionTransitionError(ValueError):
    """The event is not possible in this state; nothing was changed."""


def next_session(state: SessionState, event: SessionEvent, subject: str = "the session") -> SessionState:
    """The state after this event."""
    then = SESSION_TABLE.get((state, event))
    if then is None:
        raise SessionTransitionError(f"{subject} is {state}: {event} is not possible")
    return then
