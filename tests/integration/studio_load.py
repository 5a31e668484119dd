"""People at work with a studio that is killed under them: what they were told, and whether it is still so afterwards.

Each person is a thread with a chance of its own, and asks over HTTP as programs and browsers do; one has a notebook on
the machine as well, which takes sessions over and runs a command under their leases.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sublet
from sublet.errors import SubletError
from sublet.node.processes.procs import ProcessInstance, Procs
from sublet.node.processes.tree import LEASE_MARK
from sublet.office.journal.files import JOURNAL_NAME
from sublet.office.journal.history import AuditHistory
from sublet.office.journal.journal import verify_file
from sublet.office.journal.reader import JournalReader
from sublet.office.ledger import bills
from sublet.studio import FabricOffice, open_sessions
from sublet.studio.people import Person
from sublet.studio.records import Entry, Session, Terms, fold_all
from sublet.studio.service import person_folder
from sublet.studio.states import SessionState
from sublet.studio.store import SqliteStore
from sublet.values import GIB, Kind, ResourceId, Way
from sublet.wire.http_views import SESSION_LABEL
from tests.crash.office_judge import judge_office
from tests.integration.studio_stage import PATIENCE_S, Answer, Browser, Member, StudioStage
from tests.traces import now_ns, until

Json = dict[str, Any]
TTL_S: Final = 3.0
UNDERSTOOD: Final = {200, 303, 400, 409, 410, 503}
"""Whatever else is answered is a fault: 404 of a session that was started, 500, 401 of a token that is good."""
LIVE: Final = ("queued", "granted", "active", "noticed")
LOOK_S: Final = 0.2
PAUSE_S: Final = 0.03
REFUSED_S: Final = 0.2
PEOPLE: Final = (("ana", "physics"), ("bob", "biology"), ("cy", "physics"))
"""With the tenant of each; the first has a notebook."""


@dataclass
class Told:
    """What one person knows for certain."""

    tried: set[str] = field(default_factory=set)
    """Names of sessions whose start was asked for, whatever came of it."""
    started: dict[str, str] = field(default_factory=dict)
    """By id, the name of each session that an answer has shown."""
    ended: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    """Sessions that were to be ended, whatever the answer: where it was cut off they may have been."""
    """Ids whose end was answered."""
    entries: list[Entry] = field(default_factory=list)
    """The records as they were when they were looked at last."""


class PersonAtWork:
    """One person: asks for whatever comes to mind, and keeps what is answered."""

    def __init__(self, name: str, member: Member, seed: int, faults: list[str]) -> None:
        """``faults``: where what must not be is said."""
        self.name, self.member, self.told = name, member, Told()
        self._chance, self._faults = random.Random(seed), faults
        self._browser: Browser | None = None
        self._numbers = 0
        self.asked: Counter[str] = Counter()

    def turn(self) -> None:
        """One request. What is refused is not asked for again at once."""
        known = sorted(self.told.started.keys() - self.told.ended)
        acts: list[Callable[[str], Answer | None]] = [self._rest, self._resume, self._resume, self._end, self._show]
        draw = self._chance.random()
        if draw < 0.2:
            answer = self._list()
        elif draw < 0.3:
            answer = self._page()
        elif draw < 0.6 or not known:
            answer = self._start()
        else:
            answer = self._chance.choice(acts)(self._chance.choice(known))
        self.asked["unanswered" if answer is None else str(answer.status)] += 1
        if answer is None or answer.status == 503:
            time.sleep(REFUSED_S)
        if answer is not None and answer.status not in UNDERSTOOD:
            self._faults.append(f"{self.name} was answered {answer.status}: {answer.text[:300]}")

    def _ask(self, method: str, path: str, body: object = None) -> Answer | None:
        """None: it was cut off, or nothing listens."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.member.ask(method, path, body)
        return None

    def _start(self) -> Answer | None:
        self._numbers += 1
        name = f"{self.name}-{self._numbers}"
        self.told.tried.add(name)
        body = {"name": name, "vram": self._chance.choice((GIB, 2 * GIB)), "ttl": TTL_S}
        if self._chance.random() < 0.3:
            body["later"] = True
        elif self._chance.random() < 0.3:
            body["wait"] = self._chance.choice((0, 1))
        answer = self._ask("POST", "/v1/sessions", body)
        if answer is not None and answer.status == 200:
            self.told.started[answer.doc["id"]] = name
        return answer

    def _list(self) -> Answer | None:
        before = self.told.started.keys() - self.told.leaving
        answer = self._ask("GET", "/v1/sessions")
        if answer is not None and answer.status == 200:
            shown = [view["id"] for view in answer.doc]
            if missing := before - set(shown):
                self._faults.append(f"{self.name} is not shown {sorted(missing)}")
            if len(shown) != len(set(shown)):
                self._faults.append(f"{self.name} is shown a session twice: {shown}")
        return answer

    def _page(self) -> Answer | None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if self._browser is not None:
                answer = self._browser.look()
                if answer.status == 303:  # by a clock that jumped ahead it was signed in for long enough
                    self._browser = None
                return answer
            made = Browser(self.member.stage)
            answer = made.send("/sign-in", {"token": self.member.token})
            if answer.status == 303:
                self._browser = made
            return answer
        return None

    def _show(self, ident: str) -> Answer | None:
        return self._ask("GET", f"/v1/sessions/{ident}")

    def _rest(self, ident: str) -> Answer | None:
        return self._ask("POST", f"/v1/sessions/{ident}/rest", {"now": self._chance.random() < 0.7})

    def _resume(self, ident: str) -> Answer | None:
        return self._ask("POST", f"/v1/sessions/{ident}/resume", {"wait": self._chance.choice((0, 1, 30))})

    def _end(self, ident: str) -> Answer | None:
        self.told.leaving.add(ident)
        answer = self._ask("POST", f"/v1/sessions/{ident}/end", {"now": self._chance.random() < 0.7})
        if answer is not None and answer.status == 200 and answer.doc["state"] == "ended":
            self.told.ended.add(ident)
        elif answer is not None and answer.status < 500:
            self.told.leaving.discard(ident)
        return answer


class NotebookAtWork:
    """A program of a person's on this machine: takes sessions over, and runs a command under their leases."""

    def __init__(self, stage: StudioStage, person: str, told: Told, seed: int) -> None:
        """``told``: what the person knows."""
        self._stage, self._person, self._told = stage, stage.people.find(person), told
        self._chance = random.Random(seed)
        self.ran = 0
        self.refused: Counter[str] = Counter()

    def turn(self) -> None:
        try:
            self._cell()
        except SubletError as error:  # the office is away, the session is another program's, its lease ended
            self.refused[f"{error.kind}: {error.message}"[:120]] += 1

    def _cell(self) -> None:
        tenant = self._person.tenant
        with sublet.connect(home=self._stage.home, for_tenant=tenant, as_tenant=True, start=False) as fabric:
            sessions = open_sessions(
                FabricOffice(fabric), folder=person_folder(self._stage.home, self._person), name="a notebook"
            )
            free = [one for one in sessions.all() if one.state in (SessionState.RESTING, SessionState.ACTIVE)]
            if not free:
                name = f"notebook-{len(self._told.tried)}"
                self._told.tried.add(name)
                free = [sessions.start(name, Terms(vram=GIB, ttl_s=TTL_S))]
            session = self._chance.choice(free)
            held = sessions.acquire(session.id, {"wait": 1})
            try:
                with held.start(["sleep", "1000"], cwd="/", stdio="null"):
                    self.ran += 1
            finally:
                if self._chance.random() < 0.5:
                    sessions.set_down(session.id, held)
                else:
                    sessions.rest(session.id, even_if_busy=True)


class Load:
    """Everybody at once, for as long as that is wanted."""

    def __init__(self, stage: StudioStage, seed: int, people: Sequence[tuple[str, str]] = PEOPLE) -> None:
        self.stage, self.faults = stage, list[str]()
        self.looks = 0
        self.together: list[tuple[str, set[tuple[str, bool]]]] = []
        """Devices on which there were processes of several leases at one moment: which leases, and whether the process
        was stopped."""
        self.people = []
        for number, (name, tenant) in enumerate(people):
            self.people.append(PersonAtWork(name, stage.member(name, tenant), seed * 100 + number, self.faults))
        self.notebook = NotebookAtWork(stage, people[0][0], self.people[0].told, seed * 100 + 99)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Meanwhile. A turn that has begun is waited for."""
        over = threading.Event()

        def work(turn: Callable[[], None], pause_s: float) -> None:
            try:
                while not over.is_set():
                    turn()
                    over.wait(pause_s)
            except BaseException as error:  # a thread's own end is not seen
                self.faults.append(f"{type(error).__name__}: {error}")
                raise

        turns = [(person.turn, PAUSE_S) for person in self.people]
        threads = [
            threading.Thread(target=work, args=given)
            for given in (*turns, (self.notebook.turn, PAUSE_S), (self._look, LOOK_S))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _look(self) -> None:
        """Processes of two leases on one device, at one moment: devices are lent as a whole here."""
        traces = self.stage.office.traces
        assert traces is not None
        found: dict[str, list[tuple[str, ProcessInstance]]] = {}
        for one in traces.marked():
            marks = traces.procs.marks(one.pid, "SUBLET_")
            for device in (marks.get("SUBLET_DEVICES") or "").split(","):
                if device:
                    found.setdefault(device, []).append((marks.get(LEASE_MARK) or "", one))
        self.looks += 1
        for device, there in found.items():
            still = {(lease, _is_stopped(traces.procs, one)) for lease, one in there if traces.procs.is_there(one)}
            if len({lease for lease, _ in still}) > 1:  # each was seen before all of them were seen again
                self.together.append((device, still))


def _is_stopped(procs: Procs, one: ProcessInstance) -> bool:
    stat = procs.stat(one.pid)
    return stat is not None and stat.is_stopped


class Judge:
    """When nobody asks for anything: the records, the office and its journal, and the bills."""

    def __init__(self, load: Load) -> None:
        self.load, self.stage = load, load.stage
        at_work = {one.name for one in load.people}
        others = [one for one in self.stage.people.all() if one.name not in at_work]
        self._others = {entry.session for one in others for entry in self._entries_of(one)}
        """Sessions of people who ask for nothing meanwhile: of the tests before, where the studio is theirs too."""

    def judge(self) -> None:
        """Raises at the first thing that is wrong. Afterwards hardly a session has a lease."""
        assert not self.load.faults, self.load.faults
        for person in self.load.people:
            self._sessions(person)
        found = [""]

        def agree() -> bool:
            found[0] = self._disagreement()
            return not found[0]

        try:
            until("records and office that agree", agree, PATIENCE_S)
        except AssertionError as error:
            error.add_note(found[0])
            raise
        for device, there in self.load.together:
            uses = sorted(lease for lease, is_stopped in there if not (is_stopped and self._is_suspended(lease)))
            assert len(uses) < 2, f"device {device} is used under {uses}"
        self.load.together.clear()
        self._journal()

    def _sessions(self, person: PersonAtWork) -> None:
        """None is lost, none is there twice, and each is the fold of its records, which only grow."""
        told = person.told
        views: list[Json] = person.member.done("GET", "/v1/sessions?all=1")
        by_id = {view["id"]: view for view in views}
        assert len(by_id) == len(views), f"{person.name} is shown a session twice"
        assert told.started.keys() <= by_id.keys(), f"sessions of {person.name} are lost"
        names = Counter(view["name"] for view in views)
        assert set(names) <= told.tried, f"{person.name} has sessions that were never asked for"
        assert max(names.values(), default=1) == 1, f"one start of {person.name} made two sessions: {names}"
        for ident, name in told.started.items():
            assert by_id[ident]["name"] == name
        assert {by_id[ident]["state"] for ident in told.ended} <= {"ended"}, "what has ended goes on"
        entries = self._entries(person)
        assert entries[: len(told.entries)] == told.entries, f"records of {person.name} are lost, or others now"
        told.entries = entries
        for view in views:
            told.started[view["id"]] = view["name"]
            if view["state"] not in ("ended", "resting"):
                self._rest(person, view["id"])

    def _rest(self, person: PersonAtWork, ident: str) -> None:
        answers: list[str] = []

        def is_at_rest() -> bool:
            answer = person.member.ask("POST", f"/v1/sessions/{ident}/rest", {"now": True})
            answers.append(f"{answer.status}: {answer.text[:300]}")
            return answer.status == 200 and answer.doc["state"] == "resting"

        try:
            until("a session at rest", is_at_rest, PATIENCE_S)
        except AssertionError as error:
            error.add_note(f"session {ident} of {person.name} was answered: {Counter(answers)}")
            raise

    def _is_suspended(self, lease: str) -> bool:
        """Whether its device was taken from programs that are suspended: stopped, and none of them on the device."""
        answer = self.stage.office.office.ask("GET", f"/v1/leases/{lease}")
        assert answer.status == 200, (lease, answer)
        end = answer.doc["lease"]["end"]
        return end is not None and end["way"] == Way.SUSPEND

    def _entries(self, person: PersonAtWork) -> list[Entry]:
        return self._entries_of(self.stage.people.find(person.name))

    def _entries_of(self, person: Person) -> list[Entry]:
        return SqliteStore(person_folder(self.stage.home, person)).read(0)

    def _disagreement(self) -> str:
        """Between what the studio shows, what its records come to and which leases the office has."""
        leases: list[Json] = self.stage.office.office.ask("GET", "/v1/leases").doc
        live: dict[str, list[str]] = {}
        suspended: set[str] = set()
        for lease in leases:
            if lease["labels"].get(SESSION_LABEL, "") in {"", *self._others}:
                continue
            if lease["status"] in LIVE:
                if lease["parks"] is None:
                    live.setdefault(lease["labels"][SESSION_LABEL], []).append(lease["id"])
                else:  # the memory of a suspended program, which a session keeps while it rests
                    suspended.add(lease["labels"][SESSION_LABEL])
        for person in self.load.people:
            folded: dict[str, Session] = {}
            fold_all(folded, self._entries(person))
            shown = {view["id"]: view["state"] for view in person.member.done("GET", "/v1/sessions?all=1")}
            if shown != {ident: one.state.value for ident, one in folded.items()}:
                return f"{person.name} is shown {shown}"
            for session in folded.values():
                has = session.lease.id if session.state is SessionState.ACTIVE and session.lease is not None else None
                found = live.pop(session.id, [])
                if found != ([] if has is None else [has]):
                    return f"{session.id} is {session.state}, and has {found}"
                if session.is_over and session.id in suspended:
                    return f"{session.id} has ended, and keeps a suspended program"
                suspended.discard(session.id)
        if suspended:
            return f"suspended programs of sessions that no record knows: {suspended}"
        return f"leases of sessions that no record knows: {live}" if live else ""

    def _journal(self) -> None:
        """No device was ever lent to more than it has room for, no session had two leases at one moment, and the sums
        over tenants, devices and sessions are the same."""
        office = self.stage.office.office
        judge_office(office)
        path = office.home / JOURNAL_NAME
        verdict = verify_file(path, office.anchors)
        assert verdict.ok, verdict.problem
        with contextlib.closing(JournalReader(path)) as reader:
            records = list(reader.records())
        history, at_ns = AuditHistory().read(records), now_ns()
        usages = history.usages(at_ns)
        account = bills.reconcile(usages, history.devices(at_ns))
        assert account.ok, f"the bill does not reconcile: {account}"
        sums = {}
        for by in ("lease", "session", "tenant", "device"):
            folded = bills.fold(usages, by=by)
            sums[by] = ([sum(line.of(kind) for line in folded.lines) for kind in Kind], sum(map(_grains, folded.lines)))
        assert len({repr(one) for one in sums.values()}) == 1, sums
        known = self._others | {ident for person in self.load.people for ident in person.told.started}
        billed = {usage.labels[SESSION_LABEL] for usage in usages if SESSION_LABEL in usage.labels}
        assert billed <= known, f"sessions on the bill that nobody has: {billed - known}"
        capacity = self._capacity()
        by_device: dict[str, list[tuple[int, int]]] = {}
        by_session: dict[str, list[tuple[int, int]]] = {}
        for usage in usages:
            for held in usage.holdings:
                session = usage.labels.get(SESSION_LABEL)
                has_gpu = any(charge.kind is Kind.GPU for charge in held.charges)  # else it is what was suspended
                if session is not None and has_gpu:
                    by_session.setdefault(session, []).extend(((held.start_ns, 1), (held.stop_ns, -1)))
                for charge in held.charges:
                    if charge.kind is Kind.GPU:
                        lent = ((held.start_ns, charge.units), (held.stop_ns, -charge.units))
                        by_device.setdefault(charge.resource, []).extend(lent)
        for device, steps in by_device.items():
            assert _most(steps) <= capacity[device], f"{device} was lent twice"
        for session, steps in by_session.items():
            assert _most(steps) <= 1, f"session {session} had two leases at one moment"

    def _capacity(self) -> dict[str, int]:
        """Thousandths of each device."""
        devices: list[Json] = self.stage.office.office.ask("GET", "/v1/status").doc["devices"]
        return {ResourceId(one["id"]): 1000 for one in devices if one["kind"] == "gpu"}


def _grains(line: bills.Line) -> int:
    return line.grains


def _most(steps: list[tuple[int, int]]) -> int:
    """The largest sum on the way; what ends in the moment in which another begins is not with it."""
    total = most = 0
    for _, step in sorted(steps):
        total += step
        most = max(most, total)
    return most
