"""The sessions of many people: kept apart, and requested for each person's tenant.

A person has a database of records of their own, so what is another's cannot be named at all. The studio acts for the
tenant with a right of its own (``right``): the leases are the tenant's in quota, share and bill. A
request that waits is held by a thread of this process; where the process is started again it is repeated under the id
that is on record, which the office answers once. Leases go on without it.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sublet.background import start_thread
from sublet.client.fabric import Fabric
from sublet.client.lease import Lease
from sublet.errors import Disconnected, InvalidRequest, QuotaExceeded, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.studio.config import DEFAULTS, StudioSettings
from sublet.studio.course_page import Course, group_of
from sublet.studio.lease_ends import LeaseEnds
from sublet.studio.look import OfficeLook, SessionsSnapshot
from sublet.studio.office import FabricOffice, open_sessions, seen_as, sessions_folder
from sublet.studio.open_pages import Mark, OpenPages
from sublet.studio.overview import OfficeOverview
from sublet.studio.page import ENDED_SHOWN, ConnectView
from sublet.studio.people import OWNER_TENANT, People, Person, records_folder
from sublet.studio.plan import CoursePlan, last_plan
from sublet.studio.presence import PersonPresence, Presences
from sublet.studio.records import Entry, Granted, Moved, Record, Session, Started, Terms
from sublet.studio.remote import PAGE
from sublet.studio.right import OfficeRight
from sublet.studio.session_bill import LINES, BillPlace, bill_view
from sublet.studio.sessions import NOTHING, Seen, Sessions, no_session
from sublet.studio.states import SessionState
from sublet.studio.store import SqliteStore
from sublet.studio.turns import OfficeWatch
from sublet.studio.views import Json, about, session_views
from sublet.values import shown
from sublet.wire.http import LeaseView
from sublet.wire.http_views import SESSION_LABEL

NAME: Final = "the studio"
"""What the holder of its requests is called in the records."""
PLACE_S: Final = 10.0
"""So long an answer waits for the place in the queue, where the office is slow to take the request, or away."""
LOOK_S: Final = 0.1
"""And so long for the lease once the place is known: that of an idle holder comes at once."""
RETRY_S: Final = 1.0
"""Before a request is repeated that the office did not answer."""
SHOWN_S: Final = 1.0
"""What the open pages of a person show is at most this old."""
CONNECT_S: Final = 60.0
"""How to connect is at most this old."""
LOOKED_S: Final = 1.0
"""So are its answers to those that watch it."""
SHARED_SOCKET: Final = "office.sock"
"""In the folder of the sockets for every user of the machine."""
OWNERS_MAX: Final = 20_000
"""Sessions whose owner is remembered."""
PROBE_S: Final = 2.0
"""While the office has not answered by then, the studio is not ready."""
SILENT_S: Final = 5.0
"""An office that has not answered by then is asked for nothing more until it does. A busy one may take two seconds."""
_ASKING: Final = (SessionState.WAITING, SessionState.OFFERED)
_FOREVER: Final = float("inf")


class _Request:
    """One session for which a lease is asked for by this process."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.is_placed = threading.Event()
        """The office has said which place it has in the queue, or it is over."""
        self.is_withdrawn = threading.Event()
        self.error: SubletError | None = None


class Admission:
    """What the settings allow now, and how many requests wait. Safe to use from several threads."""

    def __init__(self, settings: StudioSettings) -> None:
        self.settings = settings
        """Replaced as a whole, so two reads may see different settings."""
        self._lock = threading.Lock()
        self.waiting = 0
        """Requests that wait now; each has a thread."""

    def enter(self) -> None:
        """One more waits; raises ``Disconnected`` where that are too many."""
        with self._lock:
            most = self.settings.waiting_max
            if self.waiting >= most:
                raise Disconnected(f"{most} requests of this studio wait already", do="Try again later.")
            self.waiting += 1

    def release(self) -> None:
        """One waits no more."""
        with self._lock:
            self.waiting -= 1


class PersonSessions:
    """The sessions of one person. Safe to use from several threads."""

    def __init__(self, fabric: Fabric, person: Person, folder: Path, admission: Admission, look: OfficeLook) -> None:
        """``fabric``: the office, for the person's tenant. ``look``: for the pages of all tenants."""
        self._fabric, self._tenant, self._admission, self._look = fabric, person.tenant, admission, look
        office = FabricOffice(fabric, bound=False)
        self._sessions: Sessions[Lease] = open_sessions(
            office, folder=folder, name=NAME, owner=(person.name, person.tenant)
        )
        self._store = SqliteStore(folder)
        self._lock = threading.RLock()
        """Never held while the office is asked."""
        self._requests: dict[str, _Request] = {}
        self._open: dict[int, Callable[[], object]] = {}
        self._showing = threading.Lock()
        self._changed_s = -_FOREVER
        """When this process last changed something, on the monotonic clock."""
        self._shown: tuple[Hashable, list[Json]] = (None, [])
        self._read: Hashable = None
        """The mark of the records that were read last."""

    def all(self, *, ended: bool = False) -> list[Json]:
        """As documents, newest first; with ``ended`` those that have ended too."""
        return session_views(self._fabric, [one for one in self._sessions.reconcile() if ended or not one.is_over])

    def shown(self) -> list[Json]:
        """All of them, for pages: as the office was seen for all pages together, and not before the person's last
        change. Where the records do not agree with that they are compared with the office itself."""
        with self._showing:
            seen = self._look.since(max(self._changed_s, time.monotonic() - SHOWN_S))
            written = self._store.mark()
            if seen.is_disabled(self._tenant):
                self.check_allowed()
            if (seen.began_s, written) != self._shown[0]:
                listed = self._listed(written)
                if not self._sessions.agree(listed, [seen_as(one) for many in self._of(listed, seen) for one in many]):
                    self._sessions.reconcile()
                    seen, written = self._look.since(time.monotonic()), self._store.mark()
                    listed = self._listed(written)
                self._shown = ((seen.began_s, written), session_views(self._fabric, listed, seen))
            return self._shown[1]

    def _listed(self, written: Hashable) -> list[Session]:
        """Those that a page shows. The database is opened only where something was written since it was read: that
        takes longer than all the rest of a page."""
        if written != self._read:
            self._sessions.all()
            self._read = written
        return self._sessions.recent(ENDED_SHOWN)

    def mark(self, seen: SessionsSnapshot, news: int) -> Mark:
        """Another one where the person's page would show something else."""
        listed = self._sessions.recent(ENDED_SHOWN)
        leases = [one for many in self._of(listed, seen) for one in many]
        states = [(one.id, one.status, one.idle, one.granted_at) for one in leases]
        return Mark(
            (self._store.mark(), self._changed_s, states, seen.is_disabled(self._tenant)),
            ([_numbers(one, seen) for one in leases], [seen.bills.get(one.id) for one in listed], _accuracy(seen)),
        )

    def lease_ended(self, seen: Seen) -> bool:
        """Record that this lease has ended; whether it is of a session of this person."""
        return self._sessions.lost(seen)

    def compare(self, seen: SessionsSnapshot) -> None:
        """Record what became of the leases of all sessions. The office itself is asked only where it was seen to have
        something else than the records, or they lack what it said later."""
        known = self._sessions.all()
        listed = [one for one in known if not one.is_over]
        lacks = any(one.lease is not None and one.lease.is_ending for one in known)
        if lacks or not self._sessions.agree(listed, [seen_as(one) for many in self._of(listed, seen) for one in many]):
            self._sessions.reconcile()

    def check_allowed(self) -> None:
        """Raise what the office says where the tenant may do nothing now."""
        self._fabric.leases(own=True)

    @staticmethod
    def _of(listed: Sequence[Session], seen: SessionsSnapshot) -> Iterator[Sequence[LeaseView]]:
        return (seen.leases.get(one.id, ()) for one in listed)

    def states(self) -> Counter[SessionState]:
        """How many are in which state, by the records alone."""
        return Counter(one.state for one in self._sessions.all())

    def has(self, ident: str) -> bool:
        """Whether the session of this id is the person's, by the records alone."""
        return any(one.id == ident for one in self._sessions.all())

    def one(self, text: str) -> Json:
        """By id or name."""
        found = self._sessions.find(text)
        self._sessions.reconcile()
        return self._view(found.id)

    def ident_of(self, text: str) -> str:
        """The id of the session with this id or name."""
        return self._sessions.find(text).id

    def check_is(self, text: str, ident: str) -> None:
        """Raise ``NotFound`` unless this is the id or name of that session."""
        if self.ident_of(text) != ident:
            raise no_session(text)

    def start(self, name: str, terms: Terms, *, wait_s: float = _FOREVER, later: bool = False) -> Json:
        """A new session, for which a lease is asked unless that is left for ``later``."""
        with self._store.kept():
            with self._lock:
                self._check_count(Started(name=name, terms=terms))
                made = self._sessions.start(name, terms)
            self._changed()
            if later:
                return self._view(made.id)
            try:
                return self._ask(made, wait_s)
            except SubletError as error:
                self._sessions.note_first_refusal(made, error)
                raise
            finally:
                self._changed()

    def resume(
        self, text: str, *, wait_s: float = _FOREVER, or_smaller: bool | int = False, or_model: bool | str = False
    ) -> Json:
        """Ask for a lease; what has one or waits for one goes on as it is. ``or_smaller`` and ``or_model``: whether
        less or another model may be offered, beside what the session allows."""
        found = self._sessions.find(text)
        self._sessions.reconcile()
        session = self._sessions.find(found.id)
        if session.state is SessionState.ACTIVE:
            return self._view(session.id)
        more = {name: value for name, value in (("or_smaller", or_smaller), ("or_model", or_model)) if value}
        if session.terms.model is None:
            more.pop("or_model", None)
        with self._store.kept():
            return self._ask(session, wait_s, more)

    def accept(self, text: str) -> Json:
        """Accept the offer that is open. Raises where none is, and what became of it."""
        found = self._sessions.accept(text)
        if (request := self._request_of(found.id)) is not None:
            self._until_answered(found.id, request)
            if request.error is not None:
                raise request.error
        return self._view(found.id)

    def decline(self, text: str) -> Json:
        """Decline the offer that is open, and wait for what was asked for."""
        found = self._sessions.decline(text)
        if (request := self._request_of(found.id)) is not None:
            self._until_answered(found.id, request)
        return self._view(found.id)

    def rest(self, text: str, *, now: bool = False) -> Json:
        """Give the lease back, or leave the queue."""
        found = self._sessions.find(text)
        request = self._withdraw(found.id)
        _once_set_down(request, lambda: self._sessions.rest(found.id, even_if_busy=now))
        if request is not None:
            request.is_over.wait(PLACE_S)
        return self._view(found.id)

    def end(self, text: str, *, now: bool = False) -> Json:
        """No further lease for it."""
        found = self._sessions.find(text)
        request = self._request_of(found.id)
        ended = _once_set_down(request, lambda: self._sessions.end(found.id, even_if_busy=now))
        self._withdraw(found.id)
        return self._view(ended.id)

    def explain(self, text: str) -> Json:
        """Why it waits, or what may end its lease: the office's answer beside the session."""
        view = self.one(text)
        lease = view["lease"]
        why = None if lease is None else self._fabric.request("GET", f"/v1/leases/{lease}/explain", shape=dict)
        return {"session": view, "lease": why}

    def bill(self, text: str, *, after: str = "", most: int = LINES) -> Json:
        """The bill of a session, a line for each cell: at most so many lines, the first ones, or those ``after`` the
        lines of an earlier answer."""
        found, now_ns = self._sessions.find(text), time.time_ns()
        place = BillPlace.read(after, now_ns) if after else None
        self._sessions.reconcile()
        entries = self._sessions.entries(0)
        if place is None:
            place = BillPlace(now_ns, entries[-1].seq)
        return bill_view(self._fabric, found, entries, place, most)

    def records(self, after: int, only: str | None = None) -> list[Entry]:
        """Those behind this one, ``PAGE`` at a time: the store of the person's notebooks. ``only``: as if there were no
        other session."""
        return self._sessions.entries(after, only)[:PAGE]

    def add_record(self, entry: Entry, only: str | None = None) -> bool:
        """Append what a notebook of the person's has decided; False: another record came in between."""
        most = self._admission.settings.records_max
        if entry.seq > most:
            raise QuotaExceeded(f"a person has at most {most} records", do="Ask the operator to add you anew.")
        self._check_tenant(entry.record)
        with self._lock:
            self._check_count(entry.record)
            is_added = self._sessions.add(entry, only)
        self._changed()
        return is_added

    def _check_tenant(self, record: Record) -> None:
        """A program that shows the person's token may ask the office as another tenant, as its owner's programs do."""
        if isinstance(record, Granted | Moved) and record.tenant != self._tenant:
            raise InvalidRequest(
                f"the session is of tenant {self._tenant}, and the lease of tenant {shown(record.tenant)}",
                do=f"Set SUBLET_TOKEN to a token of tenant {self._tenant}; an operator's program may connect with "
                f'for_tenant="{self._tenant}".',
            )

    def _check_count(self, record: Record) -> None:
        most = self._admission.settings.sessions_max
        if isinstance(record, Started) and sum(not one.is_over for one in self._sessions.all()) >= most:
            raise QuotaExceeded(f"a person has at most {most} sessions", do="End some of them first.")

    def repeat_requests(self) -> None:
        """Repeat the requests of a process of the studio that is gone."""
        for session in self._sessions.all():
            if session.state in _ASKING and session.by is not None and session.by.name == NAME:
                self._begin(session, _FOREVER)

    @contextlib.contextmanager
    def wake_on_change(self, wake: Callable[[], object]) -> Iterator[None]:
        """``wake`` is called after each change that comes of this process: a request of the person, or its answer."""
        with self._lock:
            self._open[id(wake)] = wake
        try:
            yield
        finally:
            with self._lock:
                del self._open[id(wake)]

    def _changed(self) -> None:
        with self._lock:
            self._changed_s = time.monotonic()
            for wake in self._open.values():
                wake()

    def _view(self, ident: str) -> Json:
        self._changed()
        return session_views(self._fabric, [self._sessions.find(ident)])[0]

    # ---- asking

    def _ask(self, session: Session, wait_s: float, more: Mapping[str, Any] = NOTHING) -> Json:
        if session.is_over:
            raise InvalidRequest(f"session {session.name} has ended", do="Start another.")
        request = self._begin(session, wait_s, more)
        self._until_answered(session.id, request)
        if request.error is not None:
            raise request.error
        self._sessions.reconcile()
        return self._view(session.id)

    def _until_answered(self, ident: str, request: _Request) -> None:
        """Wait until what was asked for is there, refused, offered or queued; not for long where the office is slow."""
        until_s = time.monotonic() + PLACE_S
        while not request.is_over.is_set() and time.monotonic() < until_s:
            session = self._sessions.find(ident)
            if session.offer is not None and not session.is_accepted:
                return
            if request.is_placed.wait(LOOK_S) and not request.is_over.wait(LOOK_S):
                seen = self._sessions.lease_of(session)
                if seen is not None and seen.is_queued:
                    return

    def _begin(self, session: Session, wait_s: float, more: Mapping[str, Any] = NOTHING) -> _Request:
        """The thread that asks for a lease of this session; the one that does already, if there is one."""
        with self._lock:
            known = self._requests.get(session.id)
            if known is not None:
                return known
            self._admission.enter()
            made = self._requests[session.id] = _Request()
            try:
                start_thread("studio_request", lambda: self._hold(session.id, made, {**more, "wait": wait_s}))
            except BaseException:
                self._over(session.id)
                raise
            return made

    def _hold(self, ident: str, request: _Request, more: Mapping[str, Any]) -> None:
        """Acquire the lease, and leave it to the notebook that takes it over."""
        try:
            while not request.is_withdrawn.is_set():
                try:
                    terms = {**more, "on_place": lambda place: request.is_placed.set()}
                    self._sessions.set_down(ident, self._sessions.acquire(ident, terms, for_other=True))
                except Disconnected:  # the office is restarted; the next request has the id of this one
                    request.is_withdrawn.wait(RETRY_S)
                else:
                    return
        except SubletError as error:  # recorded with the session
            request.error = error
        finally:
            self._over(ident)
            request.is_over.set()
            request.is_placed.set()
            self._changed()

    def _over(self, ident: str) -> None:
        with self._lock:
            del self._requests[ident]
        self._admission.release()

    def _request_of(self, ident: str) -> _Request | None:
        with self._lock:
            return self._requests.get(ident)

    def _withdraw(self, ident: str) -> _Request | None:
        request = self._request_of(ident)
        if request is not None:
            request.is_withdrawn.set()
        return request


def _accuracy(seen: SessionsSnapshot) -> str:
    """As a page shows it."""
    return "" if seen.estimates is None else about(seen.estimates.p90_error)


def _numbers(lease: LeaseView, seen: SessionsSnapshot) -> object:
    """What a page shows of a lease's time, or of its place in the queue."""
    place = seen.places.get(lease.id) if lease.granted_at is None else None
    if place is None:
        return None if lease.remaining is None else about(lease.remaining)
    return place.position, place.reason, None if place.estimate is None else about(place.estimate)


def _once_set_down(request: _Request | None, act: Callable[[], Session]) -> Session:
    """Rest or end a session. A lease that was granted in this moment counts as busy until it is left to the notebook
    that takes it over: while this process asked for it, nothing can run under it, so that is waited for."""
    try:
        return act()
    except InvalidRequest:
        if request is None:
            raise
        request.is_over.wait(PLACE_S)
        return act()


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The studio at one moment, for those that watch it."""

    wrong: Mapping[str, str]
    """By part, why the studio is not ready to serve; empty: it is."""
    people: int
    sessions: Mapping[SessionState, int]
    """Of the people who were looked up since the studio started."""
    unreadable: int
    """People whose sessions cannot be read."""
    waiting: int
    waiting_max: int


class Studio:
    """All people and their sessions. Safe to use from several threads."""

    def __init__(
        self, home: Path, right: OfficeRight, settings: StudioSettings = DEFAULTS, *, start: bool = True
    ) -> None:
        """``start``: start an office where none runs; else the one that the system starts is waited for."""
        self.people = People(sessions_folder(str(home)), wall_ns=time.time_ns, random=secrets.token_bytes)
        self.watch = OfficeWatch(lambda: right.greet(SILENT_S), may_start=start)
        self._home, self._right, self._start = home, right, start
        self._lock = threading.Lock()
        self._fabrics: dict[str, Fabric] = {}
        self._known: dict[str, PersonSessions] = {}
        self._admission = Admission(settings)
        self._looking = threading.Lock()
        self._looked: tuple[float, Condition] | None = None
        self._owners: dict[str, str] = {}
        self.presences = Presences(time.time)
        self._for_pages = OfficeLook(right.fabric(start=start))
        self.pages = OpenPages(self._for_pages, self.people, right.news, lambda: self.settings.update_s)

    @property
    def settings(self) -> StudioSettings:
        """What holds now."""
        return self._admission.settings

    def apply(self, settings: StudioSettings) -> None:
        """They hold from the next request on. What exists and waits already goes on, also where it is more."""
        self._admission.settings = settings

    def of(self, person: Person) -> PersonSessions:
        """The sessions of this person."""
        with self._lock:
            known = self._known.get(person.id)
            if known is None:
                fabric = self._fabrics.get(person.tenant)
                if fabric is None:
                    fabric = self._fabrics[person.tenant] = self._right.fabric(person.tenant, start=self._start)
                known = PersonSessions(
                    fabric, person, person_folder(self._home, person), self._admission, self._for_pages
                )
                self._known[person.id] = known
            return known

    @functools.cached_property
    def office(self) -> OfficeOverview:
        """The whole office, for operators."""
        return OfficeOverview(self._right.fabric(start=self._start), self._right.as_operator, lambda: self.pages.news_s)

    def connected(self) -> list[PersonPresence]:
        """All people, those who are connected first."""
        return self.presences.of(self.people.all(), self.pages.of_people())

    def connect_view(self, person: Person, studio_url: str) -> ConnectView:
        """How the person's programs come to the office and here."""
        seen = self._for_pages.since(time.monotonic() - CONNECT_S)
        tenant = seen.tenants.get(person.tenant)
        return ConnectView(
            office_url=f"unix://{seen.shared}/{SHARED_SOCKET}" if seen.shared else "",
            studio_url=studio_url,
            uid=None if tenant is None else tenant.uid,
            needs_token=tenant is None or tenant.needs_token,
            is_owner=person.tenant == OWNER_TENANT,
            tokens=self.people.tokens(person),
        )

    def office_metrics(self) -> bytes:
        """The office's numbers for Prometheus."""
        return self._right.metrics(SILENT_S)

    def course(self, group: str) -> Course:
        """A group of the office, for its teachers; raises ``NotFound``."""
        seen = self.office.shown()
        tenants = frozenset(group_of(seen, group).tenants)
        members = [one for one in self.people.all() if one.tenant in tenants]
        owners: dict[str, str] = {}
        for lease in seen.leases:
            if lease.tenant in tenants and lease.end is None and (ident := lease.labels.get(SESSION_LABEL)):
                owners[ident] = self._owner(ident, [one for one in members if one.tenant == lease.tenant])
        try:
            plan: CoursePlan | SubletError | None = last_plan(sessions_folder(str(self._home)), group)
        except SubletError as error:
            plan = error
        return Course(group=group, seen=seen, members=members, owners=owners, plan=plan)

    def _owner(self, ident: str, people: Sequence[Person]) -> str:
        """Whose session this is; empty where it is none of theirs. It does not change."""
        if ident not in self._owners:
            found = ""
            for person in people:
                with contextlib.suppress(SubletError):
                    if self.of(person).has(ident):
                        found = person.name
                        break
            if len(self._owners) >= OWNERS_MAX:
                self._owners.clear()
            self._owners[ident] = found
        return self._owners[ident]

    def condition(self) -> Condition:
        """At most ``LOOKED_S`` old, or the last where another thread looks now: those who ask often cost no more, and
        an office that does not answer takes one thread."""
        if self._looking.acquire(blocking=self._looked is None):
            try:
                if self._looked is None or time.monotonic() - self._looked[0] > LOOKED_S:
                    found = self._check_condition()
                    self._looked = (time.monotonic(), found)
            finally:
                self._looking.release()
        assert self._looked is not None
        return self._looked[1]

    def _check_condition(self) -> Condition:
        wrong: dict[str, str] = {}
        people: list[Person] = []
        try:
            people = self.people.all()
        except SubletError as error:
            wrong["people"] = error.message
        try:
            self.watch.check()
            self._right.greet(PROBE_S)  # it is not started for that: its watchers are to see that it is away
        except SubletError as error:
            wrong["office"] = error.message
            if self.watch.means_silence(error):
                self.watch.start_probing()
        sessions: Counter[SessionState] = Counter()
        unreadable = 0
        for person in people:
            try:
                known = self._known.get(person.id)
                sessions += known.states() if known is not None else Counter()
            except SubletError:
                unreadable += 1
        return Condition(
            wrong=wrong,
            people=len(people),
            sessions=sessions,
            unreadable=unreadable,
            waiting=self._admission.waiting,
            waiting_max=self.settings.waiting_max,
        )

    def repeat_requests(self, failed: Callable[[Person, SubletError], object]) -> list[Person]:
        """Repeat the requests that waited when the studio ended last; they wait for the office. A person whose records
        cannot be read delays no other person; ``failed`` is called. Returns all people."""
        people = self.people.all()
        for person in people:
            try:
                self.of(person).repeat_requests()
            except SubletError as error:
                failed(person, error)
        return people

    def follow_ends(self, stopped: threading.Event, failed: Callable[[Person, SubletError], object]) -> None:
        """Record the ends of leases of sessions as the office tells them, until stopped. A person whose records cannot
        be read or written delays no other person; ``failed`` is called."""

        def each(act: Callable[[Person], bool]) -> None:
            for person in self.people.all():
                try:
                    if act(person):
                        return
                except SubletError as error:
                    failed(person, error)

        def compare() -> None:
            seen = self._for_pages.since(time.monotonic())

            def compared(person: Person) -> bool:
                self.of(person).compare(seen)
                return False  # the next one

            each(compared)

        def ended(lease: Seen) -> None:
            each(lambda person: person.tenant == lease.tenant and self.of(person).lease_ended(lease))

        LeaseEnds(self._right.news, ended, compare).run(stopped)

    def start_office(self) -> None:
        """See that an office runs; where the system starts it, look until it does. Raises ``SubletError``."""
        if not self._start:
            self.watch.start_probing()
        else:
            self._right.start_office()


def person_folder(home: Path, person: Person) -> Path:
    """Where the records of this person's sessions lie."""
    return records_folder(sessions_folder(str(home)), person)
