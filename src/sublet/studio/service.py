"""The sessions of many people: each person's are kept apart and asked for in the name of that person's tenant.

A person has a database of records of their own, so what is another's cannot be named at all. The studio acts for the
tenant over the owner's socket (``connect(for_tenant=...)``): the leases are the tenant's in quota, share and bill. A
request that waits is held by a thread of this process; where the process is started again it is repeated under the id
that is on record, which the office answers once. Leases go on without it.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sublet.background import start_thread
from sublet.client.fabric import Fabric, connect
from sublet.client.lease import Lease
from sublet.errors import Disconnected, InvalidRequest, QuotaExceeded, SubletError
from sublet.studio.office import FabricOffice, open_sessions, sessions_folder
from sublet.studio.overview import OfficeOverview
from sublet.studio.people import OWNER_TENANT, People, Person
from sublet.studio.records import Entry, Record, Session, Started, Terms
from sublet.studio.remote import PAGE
from sublet.studio.sessions import Sessions, no_session
from sublet.studio.states import SessionState
from sublet.studio.views import Json, session_views

NAME: Final = "the studio"
"""What the holder of its requests is called in the records."""
SESSIONS_MAX: Final = 100
"""Sessions of one person that have not ended."""
RECORDS_MAX: Final = 200_000
"""Records of one person; a lease takes about four."""
WAITING_MAX: Final = 1000
"""Requests that wait at once, of all people; each has a thread."""
ANSWER_S: Final = 1.0
"""So long an answer waits for what was asked for, before it says `waiting`."""
PLACE_S: Final = 10.0
"""And so long after that where the office is slow to take the request, or away."""
LOOK_S: Final = 0.1
RETRY_S: Final = 1.0
"""Before a request is repeated that the office did not answer."""
SHOWN_S: Final = 1.0
"""What the open pages of a person show is at most this old."""
_ASKING: Final = (SessionState.WAITING, SessionState.OFFERED)
_FOREVER: Final = float("inf")


class _Request:
    """One session for which a lease is asked for by this process."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.is_withdrawn = threading.Event()
        self.error: SubletError | None = None


class PersonSessions:
    """The sessions of one person. Safe to use from several threads."""

    def __init__(self, fabric: Fabric, folder: Path, limit: threading.Semaphore) -> None:
        """``limit`` has one permit for each request that may wait."""
        self._fabric, self._limit = fabric, limit
        office = FabricOffice(fabric, bound=False)
        self._sessions: Sessions[Lease] = open_sessions(office, folder=folder, name=NAME)
        self._lock = threading.RLock()
        self._requests: dict[str, _Request] = {}
        self._shown: tuple[float, list[Json]] = (-_FOREVER, [])

    def all(self, *, ended: bool = False) -> list[Json]:
        """As documents, newest first; with ``ended`` those that have ended too."""
        return session_views(self._fabric, [one for one in self._sessions.settle() if ended or not one.is_over])

    def shown(self) -> list[Json]:
        """All of them, at most ``SHOWN_S`` old: many open pages of a person cost the office as much as one."""
        with self._lock:
            read_s, views = self._shown
            if time.monotonic() - read_s > SHOWN_S:
                views = self.all(ended=True)
                self._shown = (time.monotonic(), views)
            return views

    def one(self, text: str) -> Json:
        """By id or name."""
        found = self._sessions.find(text)
        self._sessions.settle()
        return self._view(found.id)

    def check_is(self, text: str, ident: str) -> None:
        """Raise ``NotFound`` unless this is the id or name of that session."""
        if self._sessions.find(text).id != ident:
            raise no_session(text)

    def start(self, name: str, terms: Terms, *, wait_s: float = _FOREVER, later: bool = False) -> Json:
        """A new session, for which a lease is asked unless that is left for ``later``."""
        with self._lock:
            self._check_count(Started(name=name, terms=terms))
            made = self._sessions.start(name, terms)
        return self._view(made.id) if later else self._ask(made, wait_s)

    def resume(self, text: str, *, wait_s: float = _FOREVER) -> Json:
        """Ask for a lease; what has one or waits for one goes on as it is."""
        found = self._sessions.find(text)
        self._sessions.settle()
        session = self._sessions.find(found.id)
        return self._view(session.id) if session.state is SessionState.ACTIVE else self._ask(session, wait_s)

    def rest(self, text: str, *, now: bool = False) -> Json:
        """Give the lease back, or leave the queue."""
        found = self._sessions.find(text)
        request = self._withdraw(found.id)
        self._sessions.rest(found.id, even_if_busy=now)
        if request is not None:
            request.is_over.wait(ANSWER_S + PLACE_S)
        return self._view(found.id)

    def end(self, text: str, *, now: bool = False) -> Json:
        """No further lease for it."""
        found = self._sessions.find(text)
        ended = self._sessions.end(found.id, even_if_busy=now)
        self._withdraw(found.id)
        return self._view(ended.id)

    def explain(self, text: str) -> Json:
        """Why it waits, or what may end its lease: the office's answer beside the session."""
        view = self.one(text)
        lease = view["lease"]
        why = None if lease is None else self._fabric.request("GET", f"/v1/leases/{lease}/explain", shape=dict)
        return {"session": view, "lease": why}

    def records(self, after: int) -> list[Entry]:
        """Those behind this one, ``PAGE`` at a time: the store of the person's notebooks."""
        return self._sessions.entries(after)[:PAGE]

    def add_record(self, entry: Entry) -> bool:
        """Append what a notebook of the person's has decided; False: another record came in between."""
        if entry.seq > RECORDS_MAX:
            raise QuotaExceeded(f"a person has at most {RECORDS_MAX} records", do="Ask the operator to add you anew.")
        with self._lock:
            self._check_count(entry.record)
            return self._sessions.add(entry)

    def _check_count(self, record: Record) -> None:
        if isinstance(record, Started) and sum(not one.is_over for one in self._sessions.all()) >= SESSIONS_MAX:
            raise QuotaExceeded(f"a person has at most {SESSIONS_MAX} sessions", do="End some of them first.")

    def go_on(self) -> None:
        """Repeat the requests of a process of the studio that is gone."""
        for session in self._sessions.all():
            if session.state in _ASKING and session.by is not None and session.by.name == NAME:
                self._begin(session, _FOREVER)

    def _view(self, ident: str) -> Json:
        with self._lock:
            self._shown = (-_FOREVER, [])
        return session_views(self._fabric, [self._sessions.find(ident)])[0]

    # ---- asking

    def _ask(self, session: Session, wait_s: float) -> Json:
        if session.is_over:
            raise InvalidRequest(f"session {session.name} has ended", do="Start another.")
        request = self._begin(session, wait_s)
        request.is_over.wait(ANSWER_S)
        until_s = time.monotonic() + PLACE_S
        while not request.is_over.is_set() and time.monotonic() < until_s:
            if self._sessions.lease_of(self._sessions.find(session.id)) is not None:
                break  # it has a place in the queue
            request.is_over.wait(LOOK_S)
        if request.error is not None:
            raise request.error
        self._sessions.settle()
        return self._view(session.id)

    def _begin(self, session: Session, wait_s: float) -> _Request:
        """The thread that asks for a lease of this session; the one that does already, if there is one."""
        with self._lock:
            known = self._requests.get(session.id)
            if known is not None:
                return known
            if not self._limit.acquire(blocking=False):
                raise Disconnected(f"{WAITING_MAX} requests of this studio wait already", do="Try again later.")
            made = self._requests[session.id] = _Request()
            try:
                start_thread("studio_request", lambda: self._hold(session.id, made, wait_s))
            except BaseException:
                self._over(session.id)
                raise
            return made

    def _hold(self, ident: str, request: _Request, wait_s: float) -> None:
        """Acquire the lease, and leave it to the notebook that takes it over."""
        try:
            while not request.is_withdrawn.is_set():
                try:
                    self._sessions.set_down(ident, self._sessions.acquire(ident, {"wait": wait_s}))
                except Disconnected:  # the office is restarted; the next request has the id of this one
                    request.is_withdrawn.wait(RETRY_S)
                else:
                    return
        except SubletError as error:  # recorded with the session
            request.error = error
        finally:
            self._over(ident)
            request.is_over.set()

    def _over(self, ident: str) -> None:
        with self._lock:
            del self._requests[ident]
        self._limit.release()

    def _withdraw(self, ident: str) -> _Request | None:
        with self._lock:
            request = self._requests.get(ident)
        if request is not None:
            request.is_withdrawn.set()
        return request


class Studio:
    """All people and their sessions. Safe to use from several threads."""

    def __init__(self, home: Path) -> None:
        self.people = People(sessions_folder(str(home)), wall_ns=time.time_ns, random=secrets.token_bytes)
        self._home = home
        self._lock = threading.Lock()
        self._fabrics: dict[str, Fabric] = {}
        self._known: dict[str, PersonSessions] = {}
        self._limit = threading.Semaphore(WAITING_MAX)

    def of(self, person: Person) -> PersonSessions:
        """The sessions of this person."""
        with self._lock:
            known = self._known.get(person.id)
            if known is None:
                fabric = self._fabrics.get(person.tenant)
                if fabric is None:
                    fabric = self._fabrics[person.tenant] = connect(
                        home=self._home, for_tenant=person.tenant, bound=False
                    )
                known = PersonSessions(fabric, person_folder(self._home, person), self._limit)
                self._known[person.id] = known
            return known

    @functools.cached_property
    def office(self) -> OfficeOverview:
        """The whole office, for operators."""
        return OfficeOverview(connect(home=self._home, bound=False))

    def go_on(self, failed: Callable[[Person, SubletError], object]) -> None:
        """Repeat the requests that waited when the studio ended last. A person whose tenant the office refuses keeps
        nobody else waiting; ``failed`` is told."""
        for person in self.people.all():
            try:
                self.of(person).go_on()
            except SubletError as error:
                failed(person, error)


def person_folder(home: Path, person: Person) -> Path:
    """Where the records of this person's sessions lie."""
    folder = sessions_folder(str(home))
    return folder if person.tenant == OWNER_TENANT else folder / "people" / person.id
