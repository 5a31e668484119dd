"""The sessions of people: how many wait, whose they are, and what one person's trouble is to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, JournalError, QuotaExceeded, SubletError
from sublet.studio import service
from sublet.studio.config import StudioSettings
from sublet.studio.look import SessionsSnapshot
from sublet.studio.office import this_process
from sublet.studio.people import Person
from sublet.studio.records import Abandoned, Asked, Entry, ProcessIdentity, Started, Terms
from sublet.studio.service import NAME, Admission, PersonSessions, Studio
from sublet.studio.sessions import Asking
from sublet.values import GIB
from tests.traces import until
from tests.unit.studio.test_sessions_beside_others import IDENT
from tests.unit.studio.test_sessions_beside_others import Office as ScriptedOffice

TERMS = Terms(vram=GIB, ttl_s=300.0)
ANA = Person(id="p-1", name="Ana", tenant="ana")


class Fabric:
    """The office as pages read it: no lease is to be seen."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def leases(self, **_: Any) -> list[Any]:
        self.asked.append("leases")
        return []

    def bill(self, **_: Any) -> list[Any]:
        return []

    def status(self) -> Any:
        return SimpleNamespace(estimates=None)


class Look:
    """What is seen for all pages together."""

    def __init__(self) -> None:
        self.moment_s = 0.0
        self.is_disabled = False

    def since(self, moment_s: float) -> SessionsSnapshot:
        tenants: Any = {"ana": SimpleNamespace(disabled=self.is_disabled)}
        return SessionsSnapshot(began_s=moment_s, leases={}, places={}, bills={}, tenants=tenants)


class Stage:
    """One person's sessions over an office that answers as the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.fabric, self.look, self.office = folder, Fabric(), Look(), ScriptedOffice()
        self.admission = Admission(StudioSettings({"studio.waiting": 2, "person.sessions": 3, "person.records": 12}))
        self.go_on = threading.Event()
        self.office.answer = self.granted
        monkeypatch.setattr(service, "FabricOffice", lambda fabric, **_: self.office)
        monkeypatch.setattr(service, "RETRY_S", 0.01)
        self.sessions = self.opened()

    def opened(self) -> PersonSessions:
        """As a process of the studio has them."""
        look: Any = self.look
        fabric: Any = self.fabric
        return PersonSessions(fabric, ANA, self.folder, self.admission, look)

    def granted(self, asking: Asking) -> str:
        return self.office.held(f"l-{len(self.office.leases)}")

    def late(self, asking: Asking) -> str:
        """It has a place in the queue, and waits."""
        asking.more["on_place"](None)
        assert self.go_on.wait(30)
        raise CapacityExceeded("nothing came free")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(service, "PLACE_S", 0.3)
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.go_on.set()
    until("no request is held", lambda: made.admission.waiting == 0)


# ---- how many wait


def test_requests_wait_up_to_the_limit_and_those_that_are_over_make_room(stage: Stage) -> None:
    stage.office.answer = stage.late
    for name in ("one", "two"):
        assert stage.sessions.start(name, TERMS)["state"] == "waiting"
    with pytest.raises(Disconnected, match="2 requests of this studio wait already"):
        stage.sessions.start("three", TERMS)
    stage.go_on.set()
    until("none waits", lambda: stage.admission.waiting == 0)
    stage.office.answer = stage.granted
    stage.sessions.resume("one")
    assert stage.admission.waiting == 0


def test_a_request_for_which_there_is_no_thread_leaves_nothing_behind(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: str, run: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(service, "start_thread", none)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            stage.sessions.start("one", TERMS)
    assert stage.admission.waiting == 0
    assert stage.sessions.resume("one")["lease"] is None
    assert stage.office.left, "it was asked for, granted, and left to the notebook"


def test_an_office_that_is_started_again_is_asked_again_under_the_same_id(stage: Stage) -> None:
    asked: list[str] = []

    def away_once(asking: Asking) -> str:
        asked.append(asking.request_id)
        if len(asked) < 3:
            raise Disconnected("the office is away")
        return stage.granted(asking)

    stage.office.answer = away_once
    stage.sessions.start("one", TERMS)
    until("granted", lambda: stage.office.left)
    assert len(asked) == 3
    assert len(set(asked)) == 1


# ---- records


def entry(seq: int, record: Any, session: str = IDENT) -> Entry:
    return Entry(seq=seq, session=session, at_ns=seq, record=record)


def test_a_person_has_so_many_sessions_and_records_and_no_more(stage: Stage) -> None:
    for number in range(3):
        stage.sessions.start(f"s{number}", TERMS, later=True)
    for how in (
        lambda: stage.sessions.start("more", TERMS, later=True),
        lambda: stage.sessions.add_record(entry(4, Started(name="more", terms=TERMS))),
    ):
        with pytest.raises(QuotaExceeded, match="at most 3 sessions"):
            how()
    stage.sessions.end("s0")
    assert stage.sessions.add_record(entry(5, Started(name="more", terms=TERMS)))
    by = ProcessIdentity(host="h", pid=1, started=1, name="a notebook")
    for seq in range(6, 12, 2):
        assert stage.sessions.add_record(entry(seq, Asked(by=by)))
        assert stage.sessions.add_record(entry(seq + 1, Abandoned()))
    assert stage.sessions.add_record(entry(12, Asked(by=by)))
    with pytest.raises(QuotaExceeded, match="at most 12 records"):
        stage.sessions.add_record(entry(13, Abandoned()))


def test_a_studio_that_is_started_again_repeats_its_own_requests_and_no_notebooks(stage: Stage) -> None:
    asked: list[Asking] = []

    def noted(asking: Asking) -> str:
        asked.append(asking)
        return stage.late(asking)

    for number, name in enumerate((NAME, "a notebook")):
        by = structs.replace(this_process(name), started=1)  # of this machine, and gone
        ident = f"s-00000000000{number}"
        stage.sessions.add_record(entry(2 * number + 1, Started(name=f"of-{number}", terms=TERMS), ident))
        stage.sessions.add_record(entry(2 * number + 2, Asked(by=by), ident))
    stage.office.answer = noted
    again = stage.opened()
    again.repeat_requests()
    until("asked again", lambda: asked)
    assert len(asked) == 1
    assert stage.admission.waiting == 1


# ---- what pages show


def test_a_page_of_a_disabled_tenant_asks_the_office_which_says_so(stage: Stage) -> None:
    stage.sessions.shown()
    assert not stage.fabric.asked
    stage.look.is_disabled = True
    stage.sessions.shown()
    assert stage.fabric.asked == ["leases"], "where the office raises what it says to such a tenant"


def test_a_page_whose_records_say_otherwise_than_the_office_compares_them_first(stage: Stage) -> None:
    stage.sessions.start("one", TERMS)
    until("granted", lambda: stage.office.left)
    assert stage.sessions.one("one")["state"] == "active"
    for lease in list(stage.office.leases):
        stage.office.ended(lease, "preempted", 7)
    assert stage.sessions.shown()[0]["state"] == "resting"


# ---- all people


def test_what_was_granted_in_this_moment_is_waited_for_before_it_is_ended() -> None:
    request: Any = service._Request()
    tried: list[int] = []

    def act() -> Any:
        tried.append(1)
        if len(tried) == 1:
            threading.Timer(0.05, request.is_over.set).start()
            raise InvalidRequest("it is busy")
        assert request.is_over.is_set()
        return "ended"

    found: Any = service._once_set_down(request, act)
    assert found == "ended"
    with pytest.raises(InvalidRequest, match="it is busy"):
        service._once_set_down(None, lambda: (_ for _ in ()).throw(InvalidRequest("it is busy")))


class Right:
    """The studio's right at an office that is away, or answers late."""

    def __init__(self) -> None:
        self.greeted = 0
        self.error: SubletError | None = None

    def greet(self, timeout_s: float) -> None:
        self.greeted += 1
        if self.error is not None:
            raise self.error

    def fabric(self, for_tenant: str = "", *, start: bool = True) -> Any:
        return Fabric()

    def news(self) -> Any:
        raise Disconnected("away")

    def as_operator(self, token: str) -> Any:
        raise AssertionError("nobody is an operator here")


@pytest.fixture
def right() -> Right:
    return Right()


@pytest.fixture
def studio(tmp_path: Path, right: Right) -> Iterator[Studio]:
    given: Any = right
    made = Studio(tmp_path, given)
    yield made
    made.watch.close()


def test_those_that_watch_the_studio_cost_it_one_look_a_second(
    studio: Studio, right: Right, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LOOKED_S", 3600.0)
    assert not any(studio.condition().wrong for _ in range(20))
    assert right.greeted == 1
    monkeypatch.setattr(service, "LOOKED_S", 0.0)
    studio.condition()
    assert right.greeted == 2


def test_an_office_that_answers_late_is_probed_until_it_does(studio: Studio, right: Right) -> None:
    right.error = Disconnected("the office did not answer in time")
    right.error.__cause__ = TimeoutError()
    assert "office" in studio.condition().wrong
    until("it is asked for nothing more", lambda: studio.watch.is_silent)
    right.error = None
    until("it answers again", lambda: not studio.watch.is_silent)


def test_people_whose_records_cannot_be_read_are_counted_and_delay_no_other(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [studio.people.add(name, name) for name in ("ana", "bob", "eve")]
    for person in made:
        studio.of(person)
    broken = studio.of(made[0])
    repeated: list[str] = []

    def read(self: PersonSessions) -> Any:
        if self is broken:
            raise JournalError("damaged")
        repeated.append("read")
        return {}

    monkeypatch.setattr(PersonSessions, "states", read)
    monkeypatch.setattr(PersonSessions, "repeat_requests", read)
    assert (studio.condition().people, studio.condition().unreadable) == (3, 1)
    repeated.clear()
    failed: list[str] = []
    assert studio.repeat_requests(lambda person, error: failed.append(person.name)) == made
    assert failed == ["ana"]
    assert len(repeated) == 2


def test_the_owners_of_sessions_are_remembered_and_not_without_a_bound(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "OWNERS_MAX", 4)
    ana = studio.people.add("ana", "local")
    monkeypatch.setattr(PersonSessions, "has", lambda self, ident: ident != "s-none")
    for number in range(20):
        assert studio._owner(f"s-{number}", [ana]) == "ana"
    assert studio._owner("s-none", [ana]) == ""
    assert len(studio._owners) <= 4
