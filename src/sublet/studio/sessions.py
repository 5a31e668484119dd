"""Operations on sessions: start, acquire, rest, end, and reconcile with the office.

Each step is a durable record before its result is seen. A lease is asked for in three steps: a record with the id of
the request, the request, a record with the lease. Where the first record is found without the last, the request is
repeated under the same id, and the office, which answers an id once, gives the lease that it gave before. So a crash
between any two steps leads to at most one lease. Leases carry the label ``session``, by which those that no record
names are found.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from msgspec import structs

from sublet.errors import (
    Disconnected,
    IdempotencyConflict,
    InvalidRequest,
    LeaseEnded,
    NotFound,
    SubletError,
)
from sublet.lazy_dataclass import dataclass
from sublet.studio.records import (
    Abandoned,
    Accepted,
    Asked,
    CellRecord,
    CheckpointLocator,
    Declined,
    Ended,
    Entry,
    Granted,
    LeaseOutcome,
    LeaseRecord,
    Lost,
    Moved,
    Offered,
    ProcessIdentity,
    Ran,
    Record,
    Refused,
    Session,
    Started,
    Terms,
    event_of,
    fold,
    fold_all,
    request_id,
)
from sublet.studio.states import SESSION_TABLE, SessionEnd, SessionState
from sublet.studio.store import Store
from sublet.values import NS_PER_S, shown, valid_name
from sublet.wire.http_views import SESSION_LABEL

ATTEMPT: Final = "attempt"
"""The label by which the office is asked whether it remembers a request."""
TRIES: Final = 50
"""Of an append, or of a request, that another process was quicker with."""
CLAIM_S: Final = 1.0
"""Before the end of an offer it is not accepted any more: the office has to hear of it in time."""
LOOK_S: Final = 0.25
"""Between two looks for the answer to an offer, which any process may record."""
NOTHING: Final[Mapping[str, Any]] = {}
_IDENT: Final = re.compile(r"s-[0-9a-f]{12}")
_ASKING: Final = (SessionState.WAITING, SessionState.OFFERED)
_AT_REST: Final = (SessionState.RESTING, SessionState.ENDED)
L = TypeVar("L")
OnOffer: TypeAlias = "Callable[[Offered], bool] | None"


class NameTaken(InvalidRequest):
    """A session of this name goes on."""


class WouldBeLost(InvalidRequest):
    """Something runs in the session, or is suspended, and whether it is to be ended was not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A lease as the office tells it."""

    id: str
    session: str
    """The value of its label."""
    tenant: str = ""
    epoch: tuple[int, int] | None = None
    is_held: bool = False
    """It was granted and claimed, and has not ended."""
    is_busy: bool = False
    is_queued: bool = False
    is_parked: bool = False
    """It has no GPU: it is the memory of a suspended program, which goes on under another lease of the session."""
    bound_to: int | None = None
    devices: tuple[str, ...] = ()
    is_over: bool = False
    """Nothing is left of it, so all is known of it."""
    reason: str = ""
    """Why it ended, if it has; also while it is torn down."""
    detail: str = ""
    ended_ns: int | None = None
    """When, by the office; wall time."""
    saved_at: str | None = None
    checkpoint: CheckpointLocator | None = None
    """The last one that was published under it in a volume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """One request for a lease of a session."""

    request_id: str
    labels: dict[str, str]
    terms: Terms
    more: Mapping[str, Any]
    """Further arguments of ``Fabric.gpu``, which go before the terms."""
    offered: Callable[[Offered], bool]
    """Told of a smaller amount, or another model; whether it is accepted."""


class SessionOffice(Protocol[L]):
    """What the office does for sessions, through the public API. ``L`` is what a program holds a lease by."""

    def live(self) -> list[Seen]:
        """Every lease with the label whose end has not begun, queued requests and suspended programs included."""

    def find(self, lease: str) -> Seen | None:
        """One lease; None where the office does not know it any more."""

    def acquire(self, asking: Asking) -> L:
        """Ask, wait and hold. Raises what ``Fabric.gpu`` raises."""

    def remembers(self, asking: Asking) -> bool:
        """Whether a lease was made for this request, also where it has ended."""

    def attach(self, lease: str) -> L:
        """Take a lease over under a new epoch."""

    def release(self, lease: str) -> None:
        """Give it back, or leave the queue; harmless where it has ended."""

    def tenant(self) -> str:
        """As which this program asks the office; empty where that is not known."""

    def is_ours(self, lease: str) -> bool:
        """Whether it is of the tenant as which this program asks the office; an operator sees those of others too."""

    def set_down(self, held: L) -> None:
        """Leave it to the program that takes it over; nothing runs under it until then."""

    def leave(self, held: L) -> None:
        """Let it outlive this process, which holds it no more."""

    def drop(self, held: L) -> None:
        """Give back what this program holds."""

    def seen(self, held: L) -> Seen:
        """What is held, as the office told it."""


class Sessions(Generic[L]):
    """All sessions of one store. Safe to use from several threads, and beside others on the same store."""

    def __init__(
        self,
        store: Store,
        office: SessionOffice[L],
        *,
        me: ProcessIdentity,
        is_alive: Callable[[ProcessIdentity], bool],
        wall_ns: Callable[[], int],
        new_id: Callable[[], str],
        person: str = "",
        tenant: str = "",
    ) -> None:
        """``person`` and ``tenant``: whose new sessions are, where the studio has them; else they are of the tenant as
        which this program asks the office."""
        self._person, self._tenant = person, tenant
        self._store, self._office, self._me = store, office, me
        self._is_alive, self._wall_ns, self._new_id = is_alive, wall_ns, new_id
        self._lock = threading.RLock()
        self._recorded = threading.Condition(self._lock)
        self._seq = 0
        self._found: dict[str, Session] = {}

    # ---- looking

    def all(self) -> list[Session]:
        """Every session, newest first, as the records have it now, but for those whose start was refused."""
        with self._lock:
            self._catch_up()
            found = [one for one in self._found.values() if not one.was_refused]
            return sorted(found, key=lambda one: one.started_ns, reverse=True)

    def find(self, text: str) -> Session:
        """By its id or its name. A name that was used again means the newest of them."""
        return find_session(self.all(), text)

    def lease_of(self, session: Session) -> Seen | None:
        """Its live lease, or its request in the queue, as the office has it; None where there is none."""
        if session.state is SessionState.ACTIVE and session.lease is not None:
            found = self._office.find(session.lease.id)
            return found if found is not None and found.is_held else None
        return next((one for one in self._live(session) if not one.is_parked), None)

    def recent(self, most: int) -> list[Session]:
        """Those that have not ended and the newest of the others, as they were last read."""
        with self._lock:
            newest = enumerate(one for one in reversed(self._found.values()) if not one.was_refused)
            return [session for number, session in newest if number < most or not session.is_over]

    def agree(self, listed: Sequence[Session], live: Sequence[Seen]) -> bool:
        """Whether the records of these sessions say of their leases what the office says, so that ``reconcile`` would
        change nothing."""
        return all(self._agrees(session, [one for one in live if _is_of(session, one)]) for session in listed)

    def _agrees(self, session: Session, live: list[Seen]) -> bool:
        if session.is_over:
            return not live
        is_held = any(one.is_held and not one.is_parked for one in live)
        if session.state is SessionState.ACTIVE:
            return session.lease is not None and any(one.id == session.lease.id and one.is_held for one in live)
        if session.state is SessionState.RESTING:
            return not is_held
        return self._asker_lives(session)  # which records itself what it gets

    # ---- doing

    def start(self, name: str, terms: Terms) -> Session:
        """A new session. It rests until a lease is asked for."""
        ident, record = self._new_id(), self._owned(Started(name=name, terms=terms))
        if not record.tenant:
            record = structs.replace(record, tenant=self._office.tenant())

        def begun() -> Record:
            self._check_start(record)
            return record

        self._append(ident, begun)
        return self._found[ident]

    def note_first_refusal(self, session: Session, error: SubletError) -> None:
        """The first request of a session that was just started came to this error; where the session stays, the error
        says so."""
        if not self.end_refused(session, error) and not self._found[session.id].is_over:
            error.do = f"{error.do} {resting_message(session)}".lstrip()

    def end_refused(self, session: Session, error: SubletError) -> bool:
        """End a session that was just started if what it asks for can never be granted; whether it is over so."""
        if error.transient:
            return False
        refused = Ended(reason=SessionEnd.ENDED, detail=error.message)
        alone = 3  # records: it was started, it asked, and was refused; no other program came to it meanwhile
        self._append(session.id, lambda: refused if self._found[session.id].records == alone else None)
        return self._found[session.id].was_refused

    def _owned(self, record: Started) -> Started:
        return structs.replace(record, person=self._person, tenant=self._tenant)

    def _check_start(self, record: Started) -> None:
        name = valid_name(record.name, "session name")
        if is_ident(name):
            raise InvalidRequest(f"a session cannot be named like an id ({name})", do="Give it another name.")
        if any(one.name == name and not one.is_over for one in self._found.values()):
            raise NameTaken(
                f"there is a session {name} already",
                do=f"Go on with it (`sublet session resume {name}`), use another name, or end it first, to start "
                f"it anew with other amounts: `sublet session end {name}`.",
            )

    # ---- for programs elsewhere, whose store is behind this one

    def entries(self, after: int, only: str | None = None) -> list[Entry]:
        """Every record behind this one. With ``only`` those of this session, numbered as if there were no others."""
        if only is None:
            return self._store.read(after)
        own = (entry for entry in self._store.read(0) if entry.session == only)
        return [structs.replace(entry, seq=number) for number, entry in enumerate(own, 1) if number > after]

    def add(self, entry: Entry, only: str | None = None) -> bool:
        """Append what another program has decided, if the table allows it; False: its number is taken. With ``only``
        it is numbered as ``entries`` numbers them, and of that session."""
        with self._lock:
            self._catch_up()
            if only is not None:
                known = self._found.get(only)
                if known is None or entry.session != only:
                    raise no_session(entry.session)
                if entry.seq != known.records + 1:
                    return False
                entry = structs.replace(entry, seq=self._seq + 1)
            if entry.seq != self._seq + 1:
                return False
            if not is_ident(entry.session) or not 0 <= entry.at_ns < 1 << 63:
                raise InvalidRequest(f"{shown(entry.session)} is no record of a session", do="Upgrade the program.")
            if isinstance(entry.record, Started):
                self._check_start(entry.record)
                entry = structs.replace(entry, record=self._owned(entry.record))  # whatever the program says
            return self._put(entry)

    def acquire(
        self, text: str, more: Mapping[str, Any] = NOTHING, on_offer: OnOffer = None, *, for_other: bool = False
    ) -> L:
        """The session's lease: the one that it has, taken over, or one that is asked for. It waits as the office does.

        ``more`` is for ``Fabric.gpu``. ``on_offer`` accepts an offer or declines it; without it ``accept`` and
        ``decline`` do, from any process, and an offer without an answer runs out. Refused while another living process
        asks for a lease of the session, holds it, or keeps a suspended program of it. ``for_other``: it is to be
        ``set_down`` for another program, so on record it has no holder from the first.
        """
        holder = None if for_other else self._me
        for _ in range(TRIES):
            session = self.find(text)
            # A new session has no lease, whatever became of other processes: who asks for one is on record before.
            live = [] if session.records == 1 else self._live(session)
            self._compare(session, live)
            session = self.find(session.id)
            if session.is_over:
                raise InvalidRequest(
                    f"session {session.name} has ended",
                    do=f"Start another: `sublet session start {session.name} --vram SIZE`.",
                )
            self._check_free(session, live)
            if session.state is SessionState.ACTIVE:
                held = self._taken_over(session, holder)
            else:
                held = self._requested(session, more, on_offer, holder)
            if held is not None:
                return held
        raise Disconnected(f"session {text} is changed by others again and again", do="Try again.")

    def accept(self, text: str) -> Session:
        """Accept the offer that is open; the process that asks takes it. Raises where none is open any more."""
        session = self._offer_open(text)
        self._append(session.id, lambda: None if self._offer_open(session.id).is_accepted else Accepted())
        return self._found[session.id]

    def decline(self, text: str) -> Session:
        """Decline the offer that is open: the session waits for what it asked for."""
        session = self._offer_open(text)

        def declined() -> Record:
            if self._offer_open(session.id).is_accepted:
                raise InvalidRequest(
                    f"the offer to session {session.name} was accepted",
                    do=f"Give it back: `sublet session rest {session.name}`.",
                )
            return Declined()

        self._append(session.id, declined)
        return self._found[session.id]

    def _offer_open(self, text: str) -> Session:
        session = self.find(text)
        if session.state is not SessionState.OFFERED or session.offer is None:
            raise InvalidRequest(
                f"nothing is offered to session {session.name}",
                do=f"See how it stands: `sublet session show {session.name}`.",
            )
        if session.offer.until_ns and self._wall_ns() >= session.offer.until_ns and not session.is_accepted:
            raise InvalidRequest(
                f"the offer to session {session.name} has run out", do="It waits for what it asked for, or ask again."
            )
        return session

    def moved(self, text: str, held: L) -> None:
        """Its holder goes on under this lease: a larger one in its place, or one that what was parked resumed under.
        Another one that was acquired for the session meanwhile is given back."""
        ident = self.find(text).id

        def made(lease: LeaseRecord, tenant: str) -> Record:
            return Moved(lease=lease, tenant=tenant, before=self._outcome(self._found[ident], lease.id))

        self._record_held(ident, held, self._me, made)
        now = self._office.seen(held).id
        for one in self._live(self.find(ident)):
            if one.id != now and not one.is_parked:
                self._office.release(one.id)

    def ran(self, text: str, cell: CellRecord) -> None:
        """A cell of the session has run; what it consumed is on record."""
        ident = self.find(text).id
        self._append(ident, lambda: None if self._found[ident].is_over else Ran(cell=cell))

    def used(self, text: str) -> None:
        """Work goes on under the lease that this process holds for the session: its last activity, on record as the
        lease that it has, taken again."""
        ident = self.find(text).id

        def again() -> Record | None:
            found = self._found[ident]
            if found.state is not SessionState.ACTIVE or found.lease is None or found.lease.holder != self._me:
                return None
            return Moved(lease=found.lease, tenant=found.tenant)

        self._append(ident, again)

    def saved(self, text: str, saved_at: str, checkpoint: CheckpointLocator) -> None:
        """A program of the session has saved its state: on record from then on, and not only once its lease is over."""
        ident = self.find(text).id

        def record() -> Record | None:
            found = self._found[ident]
            lease = found.lease
            if lease is None or found.checkpoint == checkpoint:
                return None
            now = LeaseOutcome(reason=lease.reason, saved_at=saved_at, checkpoint=checkpoint)
            if found.state is SessionState.ACTIVE:
                return Moved(lease=lease, tenant=found.tenant, before=now)
            if found.state in _AT_REST:
                return Lost(
                    lease=lease.id,
                    reason=lease.reason,
                    detail=lease.detail,
                    saved_at=saved_at,
                    ended_ns=lease.ended_ns,
                    checkpoint=checkpoint,
                    is_ending=lease.is_ending,
                )
            return None

        self._append(ident, record)

    def set_down(self, text: str, held: L) -> None:
        """Leave the lease to the program that takes it over: from here on no process holds it."""
        ident = self.find(text).id
        self._office.set_down(held)

        def without_holder() -> Record | None:
            found = self._found[ident]
            if found.state is not SessionState.ACTIVE or found.lease is None or found.lease.holder != self._me:
                return None
            return Moved(lease=structs.replace(found.lease, holder=None), tenant=found.tenant)

        self._append(ident, without_holder)

    def rest(self, text: str, *, even_if_busy: bool = False) -> Session:
        """Give the lease back, or leave the queue; what was saved is kept. Refused while something runs."""
        session = self._reconciled(self.find(text))
        if session.is_over:
            raise InvalidRequest(f"session {session.name} has ended", do="There is nothing to give back.")
        seen = self.lease_of(session)
        if seen is not None:
            self._check_idle(session, seen, even_if_busy)
            self._check_ours(session, seen)
            self._office.release(seen.id)
        self._append(session.id, lambda: self._declined(session.id))
        session = self._reconciled(session)
        if session.by is not None and self.lease_of(session) is None:
            # It asks on another machine, has not asked yet, or asks no more: the end of its request found a full disk.
            self._append_if(session, Abandoned(detail="withdrawn"))
        return self.find(session.id)

    def end(self, text: str, *, even_if_busy: bool = False) -> Session:
        """No further lease for it. Its volume is kept for as long as volumes are."""
        session = self._reconciled(self.find(text))
        if session.is_over:
            return session
        seen = self.lease_of(session)
        self._check_idle(session, seen, even_if_busy)
        if seen is not None:
            self._check_ours(session, seen)
        if session.state is SessionState.ACTIVE and seen is not None:
            self._office.release(seen.id)  # first, so that the records have the office's time and reason of its end
            self._reconciled(session)
        self._append(session.id, lambda: None if self._found[session.id].is_over else Ended(reason=SessionEnd.ENDED))
        for lease in self._live(session):  # from here on nothing is asked for; what is there goes
            self._office.release(lease.id)
        return self._found[session.id]

    def _check_idle(self, session: Session, seen: Seen | None, even_if_busy: bool) -> None:
        """Refuse where something runs under this lease, or is suspended, unless that is to be ended."""
        if even_if_busy:
            return
        if seen is not None and seen.is_busy:
            raise WouldBeLost(
                f"something runs in session {session.name}, and would be lost",
                do="Wait until it is done, or add --now to end it.",
            )
        if any(one.is_parked and one.is_held for one in self._live(session)):
            raise WouldBeLost(
                f"a program of session {session.name} is suspended, and would be lost",
                do="Run the next cell of its notebook, which resumes it, or add --now to end it.",
            )

    def lost(self, seen: Seen) -> bool:
        """The office says that this lease has ended; whether it was a session's of this store."""
        found = next((one for one in self.all() if one.id == seen.session), None)
        if found is None:
            return False
        is_its = found.lease is not None and found.lease.id == seen.id
        if is_its and (found.state is SessionState.ACTIVE or self._tells_more(found, seen)):
            self._append_if(found, _lost(seen))
        return True

    def _tells_more(self, session: Session, seen: Seen) -> bool:
        """Whether what the office says of the session's last lease is not on record, though its end is. What was saved
        is known once nothing is left of the lease, and the end is recorded before that."""
        lease = session.lease
        if lease is None or session.state not in _AT_REST:
            return False
        return (seen.is_over and lease.is_ending) or (seen.saved_at is not None and lease.saved_at is None)

    def _check_ours(self, session: Session, seen: Seen) -> None:
        """Refuse what the office would: a program that shows a person's token may ask the office as another tenant."""
        if self._office.is_ours(seen.id):
            return
        now = self._office.find(seen.id)
        if now is not None and (now.is_held or now.is_queued):  # else it has ended in this moment
            raise InvalidRequest(
                f"the lease of session {session.name} is of tenant {seen.tenant}, and this program asks the office as "
                "another",
                do=f"Set SUBLET_TOKEN to a token of tenant {seen.tenant}, or do it on the page of the studio.",
            )

    def reconcile(self) -> list[Session]:
        """Compare every session with the office: leases that have ended, that no record names, and requests of
        processes that are gone. All sessions, newest first."""
        with self._lock:  # before the leases: what is recorded meanwhile is not compared with what was
            self._catch_up()
            listed = list(self._found.values())
        live = self._office.live()
        for session in listed:
            self._compare(session, [one for one in live if _is_of(session, one)])
        return self.all()

    # ---- comparing with the office

    def _live(self, session: Session) -> list[Seen]:
        return [one for one in self._office.live() if _is_of(session, one)]

    def _reconciled(self, session: Session) -> Session:
        self._compare(session, self._live(session))
        return self.find(session.id)

    def _compare(self, session: Session, live: list[Seen]) -> None:
        held = next((one for one in live if one.is_held and not one.is_parked), None)
        if session.state in _AT_REST and session.lease is not None and session.lease.is_ending and held is None:
            self._compare_ending(session, session.lease)
        if session.is_over:
            for one in live:
                self._office.release(one.id)
        elif session.state is SessionState.ACTIVE:
            self._compare_active(session, held, live)
        elif session.state is SessionState.RESTING and held is not None:
            self._append_if(session, Moved(lease=_lease_record(held, None, self._wall_ns()), tenant=held.tenant))
        elif session.state in _ASKING and not self._asker_lives(session):
            if held is not None:  # it got what it asked for, and was gone before that was written down
                self._append_if(session, Granted(lease=_lease_record(held, None, self._wall_ns()), tenant=held.tenant))
            elif all(one.is_parked for one in live):
                self._append_if(session, Abandoned(detail="the process that asked is gone"))

    def _compare_active(self, session: Session, held: Seen | None, live: list[Seen]) -> None:
        lease = session.lease
        if lease is None or any(one.id == lease.id and one.is_held for one in live):
            return
        if held is not None:
            made = _lease_record(held, None, self._wall_ns())
            self._append_if(session, Moved(lease=made, tenant=held.tenant, before=self._outcome(session, held.id)))
            return
        seen = self._office.find(lease.id)
        if seen is not None and seen.is_held:  # it came back into view since the list was made
            return
        if seen is None:
            self._append_if(session, Lost(lease=lease.id, reason="unknown", detail="the office has forgotten it"))
        else:
            self._append_if(session, _lost(seen))

    def _compare_ending(self, session: Session, lease: LeaseRecord) -> None:
        seen = self._office.find(lease.id)
        if seen is None:  # the office has forgotten it, so what is on record is all that is known
            seen = Seen(
                id=lease.id,
                session=session.id,
                is_over=True,
                reason=lease.reason,
                detail=lease.detail,
                ended_ns=lease.ended_ns,
                saved_at=lease.saved_at,
            )
        if self._tells_more(session, seen):
            self._append_if(session, _lost(seen))

    def _outcome(self, session: Session, then: str) -> LeaseOutcome | None:
        """How the session's lease ended before it goes on under the lease ``then``, where the office knows that."""
        lease = session.lease
        if lease is None or lease.id == then or lease.ended_ns is not None:
            return None
        seen = self._office.find(lease.id)
        if seen is None or not seen.reason:
            return None
        return LeaseOutcome(
            reason=seen.reason,
            detail=seen.detail,
            ended_ns=seen.ended_ns,
            saved_at=seen.saved_at,
            checkpoint=seen.checkpoint,
        )

    def _asker_lives(self, session: Session) -> bool:
        return session.by is not None and (session.by == self._me or self._is_alive(session.by))

    def _check_free(self, session: Session, live: list[Seen]) -> None:
        """Raise if another living process asks for a lease of the session, holds it, or keeps its suspended program."""
        lease, asks = session.lease, session.state in _ASKING
        if session.state is SessionState.RESTING:
            parked = next((one for one in live if one.is_parked and one.is_held), None)
            holder = None if lease is None else lease.holder
            if parked is None or holder == self._me:
                return
            kept_by = parked.bound_to
            if kept_by is None and holder is not None and self._is_alive(holder):
                kept_by = holder.pid
            if kept_by is not None and kept_by != self._me.pid:
                raise InvalidRequest(
                    f"a program of session {session.name} is suspended, and process {kept_by} goes on with it",
                    do=f"Run the next cell there, or give it up: `sublet session end {session.name} --now`.",
                )
            return
        other = session.by if asks else None if lease is None else lease.holder
        if other == self._me:
            return
        pid = other.pid if other is not None and self._is_alive(other) else None
        if not asks and lease is not None and pid is None:  # a lease that is bound ends with its process
            seen = self._office.find(lease.id)
            pid = seen.bound_to if seen is not None and seen.is_held else None
        if pid is not None and pid != self._me.pid:
            name = other.name if other is not None and other.name else "a program"
            raise InvalidRequest(
                f"session {session.name} {'waits for a lease of' if asks else 'is held by'} {name} (process {pid})",
                do=f"Go on there, or give it back first: `sublet session rest {session.name}`.",
            )

    # ---- the lease

    def _taken_over(self, session: Session, holder: ProcessIdentity | None) -> L | None:
        assert session.lease is not None
        try:
            held = self._office.attach(session.lease.id)
        except (LeaseEnded, NotFound):
            return None  # in this moment; it is compared with the office once more
        return self._record_held(session.id, held, holder, lambda lease, tenant: Moved(lease=lease, tenant=tenant))

    def _requested(
        self, session: Session, more: Mapping[str, Any], on_offer: OnOffer, holder: ProcessIdentity | None
    ) -> L | None:
        ident = session.id
        if not self._append_if(session, Asked(by=self._me)):
            return None  # another process was quicker: look again
        is_repeat = self._found[ident].asks > 1
        asking = Asking(
            request_id=request_id(session),
            labels={SESSION_LABEL: ident, ATTEMPT: str(session.attempt)},
            terms=session.terms,
            more=more,
            offered=lambda offer: self._offered(ident, offer, on_offer),
        )
        try:
            held = self._office.acquire(asking)
            self.all()
            if is_repeat or not self._is_mine(ident):  # another process may have it as well: a new epoch fences that
                self._office.leave(held)
                held = self._office.attach(self._office.seen(held).id)
        except IdempotencyConflict as error:
            # The request before this one arrived after all, and was for something else. So it is in the list now.
            for one in self._live(session):
                if not one.is_parked:
                    self._office.release(one.id)
            self._answered(ident, "repeated", error.message, is_known=True)
            return None
        except Disconnected as error:
            self._unanswered(ident, error.message)
            raise
        except SubletError as error:
            is_known = isinstance(error, LeaseEnded) or (is_repeat and self._remembers(asking))
            self._answered(ident, error.reason or error.kind, error.message, is_known=is_known)
            if is_repeat and is_known and not self._found[ident].is_over:
                return None  # that was the answer to the request before; now ask anew
            raise
        except BaseException:
            self._unanswered(ident, "interrupted")
            raise
        return self._record_held(ident, held, holder, lambda lease, tenant: Granted(lease=lease, tenant=tenant))

    def _remembers(self, asking: Asking) -> bool:
        with contextlib.suppress(SubletError):  # then the next one asks under this id again
            return self._office.remembers(asking)
        return False

    def _answered(self, ident: str, reason: str, detail: str, *, is_known: bool) -> None:
        record = Refused(reason=reason, detail=detail, is_known=is_known)
        self._append(ident, lambda: record if self._is_mine(ident) else None)

    def _unanswered(self, ident: str, detail: str) -> None:
        self._append(ident, lambda: Abandoned(detail=detail) if self._is_mine(ident) else None)

    def _is_mine(self, ident: str) -> bool:
        found = self._found[ident]
        return found.state in _ASKING and found.by == self._me

    def _offered(self, ident: str, offer: Offered, on_offer: OnOffer) -> bool:
        """Record the offer and the answer to it; whether it is accepted."""
        open_s = max(0.0, (offer.valid_s or 0.0) - CLAIM_S)
        made = structs.replace(offer, until_ns=self._wall_ns() + round(open_s * NS_PER_S))
        self._append(ident, lambda: made if self._is_mine(ident) else None)
        is_accepted = self._is_accepted(ident, made, open_s) if on_offer is None else on_offer(made)
        if not is_accepted:
            self._append(ident, lambda: self._declined(ident) if self._is_mine(ident) else None)
        return is_accepted

    def _is_accepted(self, ident: str, offer: Offered, open_s: float) -> bool:
        """Wait until the person has answered, or the offer has run out."""
        until_s = time.monotonic() + open_s
        with self._recorded:
            while True:
                self._catch_up()
                if not self._is_mine(ident) or self._found[ident].offer != offer:
                    return False
                if self._found[ident].is_accepted:
                    return True
                if (left_s := until_s - time.monotonic()) <= 0:
                    return False
                self._recorded.wait(min(LOOK_S, left_s))

    def _declined(self, ident: str) -> Record | None:
        return Declined() if self._found[ident].state is SessionState.OFFERED else None

    def _record_held(
        self, ident: str, held: L, holder: ProcessIdentity | None, record: Callable[[LeaseRecord, str], Record]
    ) -> L:
        """The lease is the session's once that is on disk; where it cannot be, it is given back."""
        try:
            seen = self._office.seen(held)
            lease = _lease_record(seen, holder, self._wall_ns())
            made = record(lease, seen.tenant)
            self._append(ident, lambda: made if self._allows(ident, made) else Moved(lease=lease, tenant=seen.tenant))
        except SubletError as error:
            self._office.drop(held)
            with contextlib.suppress(SubletError):  # of a full disk, as the record before
                self._answered(ident, error.reason or error.kind, error.message, is_known=True)
            raise
        except BaseException:
            self._office.drop(held)
            raise
        return held

    def _allows(self, ident: str, record: Record) -> bool:
        event = event_of(record)
        return event is not None and (self._found[ident].state, event) in SESSION_TABLE

    # ---- records

    def _catch_up(self) -> None:
        entries = self._store.read(self._seq)
        fold_all(self._found, entries)
        if entries:
            self._seq = entries[-1].seq

    def _append(self, ident: str, decide: Callable[[], Record | None]) -> bool:
        """Append what is decided on the newest records; whether there was anything. Raises ``InvalidRequest`` where the
        state does not allow it."""
        with self._lock:
            for _ in range(TRIES):
                self._catch_up()
                record = decide()
                if record is None:
                    return False
                if self._put(Entry(seq=self._seq + 1, session=ident, at_ns=self._wall_ns(), record=record)):
                    return True
        raise Disconnected("the sessions are changed by others again and again", do="Try again.")

    def _put(self, entry: Entry) -> bool:
        """Append this one behind the newest; whether it was the next."""
        try:
            folded = fold(self._found.get(entry.session), entry)
        except ValueError as error:
            raise InvalidRequest(str(error), do="`sublet session show` tells how it stands now.") from error
        if not self._store.append(entry):
            return False
        self._found[entry.session], self._seq = folded, entry.seq
        self._recorded.notify_all()
        return True

    def _append_if(self, session: Session, record: Record) -> bool:
        """Append it if the session is still what was looked at."""
        return self._append(session.id, lambda: record if self._found[session.id] == session else None)


def find_session(listed: Sequence[Session], text: str) -> Session:
    """The one of these, newest first, with this id or name."""
    for session in listed:
        if text == session.id:
            return session
    named = [session for session in listed if session.name == text]
    for session in [one for one in named if not one.is_over] or named:
        return session
    raise no_session(text)


def resting_message(session: Session) -> str:
    """What is said of a new session that got no lease yet."""
    name = session.name
    return (
        f"Session {name} is there and rests: `sublet session resume {name}` asks again, `sublet session end {name}` "
        "ends it."
    )


def no_session(text: str) -> NotFound:
    """What is said of a session that is not there, or is another person's."""
    return NotFound(f"there is no session {text[:40]}", do="`sublet session ls` lists them.")


def is_ident(text: str) -> bool:
    """Whether this is the id of a session, here or elsewhere."""
    return _IDENT.fullmatch(text) is not None


def new_id(random: bytes) -> str:
    """The id of a session, which is also the name of its volume."""
    return f"s-{random[:6].hex()}"


def _is_of(session: Session, lease: Seen) -> bool:
    """Whether its label says so, and its tenant may say so: an operator is shown the labels of every tenant."""
    return lease.session == session.id and session.tenant in ("", lease.tenant)


def _lost(seen: Seen) -> Lost:
    return Lost(
        lease=seen.id,
        reason=seen.reason or "ending",
        detail=seen.detail,
        saved_at=seen.saved_at,
        ended_ns=seen.ended_ns,
        checkpoint=seen.checkpoint,
        is_ending=not seen.is_over,
    )


def _lease_record(seen: Seen, holder: ProcessIdentity | None, now_ns: int) -> LeaseRecord:
    return LeaseRecord(id=seen.id, epoch=seen.epoch or (0, 0), at_ns=now_ns, devices=tuple(seen.devices), holder=holder)
