"""The records of sessions, and their fold. Pure: no clock, no file, no office.

Every change of a session is one record. A session *is* the fold of its records, so after a restart it is what it was.
Fields are only ever added, each with a usual value, and a record's tag never changes: old records stay readable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec
from msgspec import structs

from sublet.studio.states import SessionEnd, SessionEvent, SessionState, SessionTransitionError, next_session

LEASES_KEPT: Final = 100
"""Ended leases that a session shows. The records of older ones stay, and so does the bill."""
CELLS_KEPT: Final = 20
"""Cells that a session shows. The records of earlier ones stay."""


class _Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class Terms(_Value, frozen=True, kw_only=True):
    """What each lease of the session is asked with, where its holder says nothing else."""

    vram: int
    """Bytes on each device."""
    count: int = 1
    ttl_s: float | None = None
    tier: str = "interactive"
    pay_priority: bool = False
    """Go before requests that do not pay, for a rate. Each lease of the session pays."""
    exclusivity: str | None = None
    model: str | None = None
    or_smaller: bool | int = False
    """Whether less may be offered where no more is free: any amount, or at least these bytes on each device."""
    or_model: bool | str = False
    """Whether another model may be offered where none of ``model`` is free: any, or those named."""


class ProcessIdentity(_Value, frozen=True, kw_only=True):
    """One process of one machine; a number that was used again is another process."""

    host: str
    pid: int
    started: int
    """Clock ticks since the machine was started, as the kernel counts them."""
    name: str = ""


class LeaseRecord(_Value, frozen=True, kw_only=True):
    """One lease of the session."""

    id: str
    epoch: tuple[int, int]
    at_ns: int
    """Since when it is the session's; wall time."""
    devices: tuple[str, ...] = ()
    holder: ProcessIdentity | None = None
    ended_ns: int | None = None
    reason: str = ""
    detail: str = ""
    saved_at: str | None = None
    """When the last checkpoint was published under it."""
    is_ending: bool = False
    """The office was still tearing it down when its end was recorded: what was saved under it may not be known yet."""


class CellRecord(_Value, frozen=True, kw_only=True):
    """What one cell consumed, as its notebook measured it."""

    cell: int
    """Its number in the notebook."""
    lease: str
    at_ns: int
    """When it ended; wall time."""
    held_s: float
    """The lease was the notebook's, from the cell before (or its grant) to the end of this one."""
    busy_s: float
    vram_byte_s: float
    launches: int | None = None
    """None where they were not counted."""
    bytes_saved: int = 0
    waited_s: float = 0.0
    failed: bool = False
    """It raised, or its lease ended under it."""


class CheckpointLocator(_Value, frozen=True, kw_only=True):
    """Where a checkpoint lies."""

    volume: str
    number: int


class LeaseOutcome(_Value, frozen=True, kw_only=True):
    """How a lease ended, as the office says it."""

    reason: str
    detail: str = ""
    ended_ns: int | None = None
    """When, by the office; wall time."""
    saved_at: str | None = None
    checkpoint: CheckpointLocator | None = None
    is_ending: bool = False
    """Nothing is said yet of what was saved."""


# ---- records ----


class Started(_Value, frozen=True, kw_only=True, tag="started"):
    """A new session."""

    name: str
    terms: Terms
    person: str = ""
    """The name of the studio's person whose it is; empty: of the user of this machine."""
    tenant: str = ""
    """Whose its leases are to be; empty, in records of before and where the office was away: that is known with the
    first of them."""


class Asked(_Value, frozen=True, kw_only=True, tag="asked"):
    """A lease is about to be asked for, under the request id of the attempt."""

    by: ProcessIdentity


class Offered(_Value, frozen=True, kw_only=True, tag="offered"):
    """The office offers less, or another model."""

    offered: int
    asked: int
    valid_s: float | None
    model: str | None = None
    """Of the device that is offered, where it is another than was asked for."""
    asked_model: str | None = None
    estimate_s: float | None = None
    """Until what was asked for may be granted."""
    price: str | None = None
    """Of what is offered, for an hour, as a decimal number; known where the model is another."""
    asked_price: str | None = None
    currency: str | None = None
    until_ns: int = 0
    """Until when it may be accepted; wall time."""


class Accepted(_Value, frozen=True, kw_only=True, tag="accepted"):
    """The person accepted the offer."""


class Declined(_Value, frozen=True, kw_only=True, tag="declined"):
    """The offer was not taken."""


class Granted(_Value, frozen=True, kw_only=True, tag="granted"):
    """The lease that was asked for is the session's."""

    lease: LeaseRecord
    tenant: str


class Refused(_Value, frozen=True, kw_only=True, tag="refused"):
    """The request is over without a lease."""

    reason: str
    detail: str = ""
    is_known: bool = False
    """The office remembers the request's id, so no copy of it that is still under way can be granted."""


class Abandoned(_Value, frozen=True, kw_only=True, tag="abandoned"):
    """Nothing is known of the request; the next one repeats it."""

    detail: str = ""


class Moved(_Value, frozen=True, kw_only=True, tag="moved"):
    """The session goes on under this lease: another one, a newer epoch, or the one that it has, which is used."""

    lease: LeaseRecord
    tenant: str
    was: str = "replaced"
    """How the lease before it ended, where it was another one, had not ended yet, and the office did not say."""
    before: LeaseOutcome | None = None
    """What the office said of that; or, where it is the same lease, what the session's program has saved."""


class Lost(_Value, frozen=True, kw_only=True, tag="lost"):
    """Its lease has ended."""

    lease: str
    reason: str
    detail: str = ""
    saved_at: str | None = None
    ended_ns: int | None = None
    """When it ended, by the office; wall time. None: that is not known, or the record is of an earlier version."""
    checkpoint: CheckpointLocator | None = None
    """The last one that was published under it in a volume."""
    is_ending: bool = False
    """The office is still tearing it down, so another record of this kind follows, with what was saved."""


class Ran(_Value, frozen=True, kw_only=True, tag="ran"):
    """A cell has run."""

    cell: CellRecord


class Ended(_Value, frozen=True, kw_only=True, tag="ended"):
    """The session is over."""

    reason: SessionEnd
    detail: str = ""
    """Why its start was refused, where it is over for that."""


Record: TypeAlias = (
    Started | Asked | Offered | Accepted | Declined | Granted | Refused | Abandoned | Moved | Ran | Lost | Ended
)

_EVENTS: Final[dict[type[Record], SessionEvent]] = {
    Asked: SessionEvent.ASK,
    Offered: SessionEvent.OFFER,
    Accepted: SessionEvent.ACCEPT,
    Declined: SessionEvent.DECLINE,
    Granted: SessionEvent.GRANT,
    Refused: SessionEvent.REFUSE,
    Abandoned: SessionEvent.ABANDON,
    Moved: SessionEvent.MOVE,
    Ran: SessionEvent.RUN,
    Lost: SessionEvent.LOSE,
    Ended: SessionEvent.END,
}
"""Every record but the first is an event of the table."""


class Entry(_Value, frozen=True, kw_only=True):
    """One record as it is stored."""

    seq: int
    session: str
    at_ns: int
    record: Record


class Session(_Value, frozen=True, kw_only=True):
    """One session, as its records say."""

    id: str
    name: str
    terms: Terms
    state: SessionState
    started_ns: int
    changed_ns: int
    person: str = ""
    """The name of the studio's person whose it is; empty: of the user of this machine."""
    tenant: str = ""
    """Whose its leases are; empty where that was not known at the start, until the first of them."""
    active_ns: int = 0
    """Its last activity that is on record; wall time. A program of it took or asked for a lease, or answered requests;
    its person accepted an offer; or a cell ended."""
    attempt: int = 1
    """Of asking. It rises when the office's answer is known, so an unanswered request is asked again as itself."""
    asks: int = 0
    """How often this attempt was begun. More than once: the office may have answered it already."""
    by: ProcessIdentity | None = None
    """The person for whom a lease is being requested."""
    offer: Offered | None = None
    is_accepted: bool = False
    """Whether the person accepted the offer."""
    lease: LeaseRecord | None = None
    """The lease that it has, or had last."""
    earlier: tuple[LeaseRecord, ...] = ()
    """Leases before that, oldest first."""
    cells: tuple[CellRecord, ...] = ()
    """The last cells that ran in it, oldest first."""
    refused: str = ""
    """Why the last request came to nothing; empty where it did not."""
    saved_at: str | None = None
    """When the last checkpoint under a lease of the session was published."""
    checkpoint: CheckpointLocator | None = None
    """Where that is."""
    end: SessionEnd | None = None
    end_detail: str = ""
    records: int = 1
    """How many records it has."""

    @property
    def volume(self) -> str:
        """The name of the volume in which its checkpoints lie."""
        return self.id

    @property
    def is_over(self) -> bool:
        return self.state is SessionState.ENDED

    @property
    def was_refused(self) -> bool:
        """Its start was refused for ever, so it counts as one that was never started."""
        return self.is_over and self.lease is None and bool(self.end_detail)

    @property
    def leases(self) -> tuple[LeaseRecord, ...]:
        """All of its leases that are remembered, oldest first."""
        return self.earlier if self.lease is None else (*self.earlier, self.lease)


def request_id(session: Session) -> str:
    """The id of the request that this attempt makes: the same after a crash, so it has one effect."""
    return f"{session.id}-{session.attempt}"


def event_of(record: Record) -> SessionEvent | None:
    """The event of the table that this record is; None for the record that starts a session."""
    return _EVENTS.get(type(record))


def fold(session: Session | None, entry: Entry) -> Session:
    """The session after this record. Raises ``SessionTransitionError`` where the table does not know it."""
    record, at_ns = entry.record, entry.at_ns
    if isinstance(record, Started):
        if session is not None:
            raise SessionTransitionError(f"session {session.id} was started already")
        return Session(
            id=entry.session,
            name=record.name,
            terms=record.terms,
            state=SessionState.RESTING,
            person=record.person,
            tenant=record.tenant,
            started_ns=at_ns,
            changed_ns=at_ns,
            active_ns=at_ns,
        )
    if session is None:
        raise SessionTransitionError(f"session {entry.session} was never started")
    state = next_session(session.state, _EVENTS[type(record)], f"session {session.name}")
    if isinstance(record, Ran):
        cells = (*session.cells, record.cell)[-CELLS_KEPT:]
        active_ns = max(session.active_ns, record.cell.at_ns)
        return structs.replace(session, cells=cells, changed_ns=at_ns, active_ns=active_ns, records=session.records + 1)
    base = structs.replace(
        session, state=state, changed_ns=at_ns, by=None, offer=None, is_accepted=False, records=session.records + 1
    )
    match record:
        case Asked():
            return structs.replace(base, by=record.by, refused="", asks=session.asks + 1, active_ns=at_ns)
        case Offered():
            return structs.replace(base, by=session.by, offer=record)
        case Accepted():
            return structs.replace(base, by=session.by, offer=session.offer, is_accepted=True, active_ns=at_ns)
        case Declined():
            return structs.replace(base, by=session.by)
        case Refused():
            why = f"{record.reason}: {record.detail}" if record.detail else record.reason
            if session.asks > 1 and not record.is_known:  # an earlier request under this id may still arrive
                return structs.replace(base, refused=why)
            return structs.replace(base, attempt=session.attempt + 1, asks=0, refused=why)
        case Abandoned():
            return structs.replace(base, refused=record.detail)
        case Granted():
            held = _with_lease(base, record.lease, record.tenant, at_ns, "replaced")
            return structs.replace(held, attempt=session.attempt + 1, asks=0)
        case Moved():
            if record.lease.holder is not None:  # else the studio has found it, or it was set down
                base = structs.replace(base, active_ns=at_ns)
            return _with_lease(base, record.lease, record.tenant, at_ns, record.was, record.before)
        case Lost():
            return _without_lease(base, record, at_ns)
        case Ended():
            lease = session.lease
            if lease is not None and lease.ended_ns is None:
                lease = structs.replace(lease, ended_ns=at_ns, reason="session ended", is_ending=True)
            return structs.replace(base, lease=lease, end=record.reason, end_detail=record.detail)


def _with_lease(
    session: Session, lease: LeaseRecord, tenant: str, at_ns: int, was: str, before: LeaseOutcome | None = None
) -> Session:
    old, earlier = session.lease, session.earlier
    if old is not None and old.id == lease.id:  # the same one, under a newer epoch
        lease = structs.replace(lease, at_ns=old.at_ns)
    elif old is not None:
        if old.ended_ns is None:
            old = _ended(old, before or LeaseOutcome(reason=was), at_ns)
        earlier = (*earlier, old)[-LEASES_KEPT:]
    if before is not None:
        session = _saved(session, before)
    return structs.replace(session, lease=lease, earlier=earlier, tenant=tenant, refused="")


def _without_lease(session: Session, record: Lost, at_ns: int) -> Session:
    lease = session.lease
    if lease is None or lease.id != record.lease:
        raise SessionTransitionError(f"session {session.name} has no lease {record.lease}")
    outcome = LeaseOutcome(
        reason=record.reason,
        detail=record.detail,
        ended_ns=record.ended_ns,
        saved_at=record.saved_at,
        checkpoint=record.checkpoint,
        is_ending=record.is_ending,
    )
    return structs.replace(_saved(session, outcome), lease=_ended(lease, outcome, at_ns))


def _saved(session: Session, outcome: LeaseOutcome) -> Session:
    """With the checkpoint that a lease left, if it left one, and no later one of the same volume is known."""
    if outcome.saved_at is None:
        return session
    known, left = session.checkpoint, outcome.checkpoint
    if known is not None and left is not None and known.volume == left.volume and left.number < known.number:
        return session
    return structs.replace(session, saved_at=outcome.saved_at, checkpoint=outcome.checkpoint)


def _ended(lease: LeaseRecord, outcome: LeaseOutcome, at_ns: int) -> LeaseRecord:
    """This lease with how it ended. Where the office did not say when, that is the time of the record."""
    return structs.replace(
        lease,
        ended_ns=at_ns if outcome.ended_ns is None else outcome.ended_ns,
        reason=outcome.reason,
        detail=outcome.detail,
        saved_at=outcome.saved_at,
        is_ending=outcome.is_ending,
    )


def fold_all(sessions: dict[str, Session], entries: Iterable[Entry]) -> None:
    """Bring these sessions up to date, in place."""
    for entry in entries:
        sessions[entry.session] = fold(sessions.get(entry.session), entry)
