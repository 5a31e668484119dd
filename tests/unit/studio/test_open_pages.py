"""Open pages: the office is looked at once for all of them, and each is woken by what changes in it alone."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from sublet.errors import Disconnected, JournalError
from sublet.studio import open_pages
from sublet.studio.look import SPACING_S, OfficeLook, SessionsSnapshot
from sublet.studio.open_pages import ALL_WITHIN_S, BATCH, PAUSE_S, REVOKED_S, WHOLE_OFFICE, Mark, OpenPages, Shown
from sublet.studio.people import People, Token
from sublet.wire.http import StatusView
from tests.traces import until

PATIENCE_S: Final = 60.0
NEWS: Final = b"event: active\ndata: {}\n\n"


class Office:
    """Counts how often it is read, and has a stream of news."""

    def __init__(self) -> None:
        self.read = 0
        self.streams: list[socket.socket] = []
        self.is_away = False
        self.values: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.lock = threading.Lock()
        self.may_open = threading.Event()

    def since(self, moment_s: float) -> SessionsSnapshot:
        with self.lock:
            self.read += 1
            if self.is_away:
                raise Disconnected("no answer")
            return SessionsSnapshot(began_s=moment_s, leases={}, places={}, bills={})

    def open_news(self) -> Any:
        assert self.may_open.wait(PATIENCE_S)
        if self.is_away:
            raise Disconnected("no answer")
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.streams.append(ours)
        return Stream(theirs)

    def tell(self) -> None:
        self.streams[-1].sendall(NEWS)

    def hang_up(self) -> None:
        self.streams[-1].close()


class Stream:
    """As much of a `Flight` as is used."""

    status = 200

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.complete = False

    def fileno(self) -> int:
        return self._line.fileno()

    def read(self) -> bytes:
        raw = self._line.recv(1 << 16)
        self.complete = not raw
        return raw

    def close(self) -> None:
        self._line.close()


class Mine:
    """What one person's page shows: a number of the office."""

    def __init__(self, office: Office, name: str) -> None:
        self._office, self._name = office, name

    def mark(self, seen: SessionsSnapshot, news: int) -> Mark:
        return Mark(self._office.values.get(self._name, 0), self._office.places.get(self._name, 0))


class Page:
    """One that is open."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)

    def wake(self, may_see_other: bool) -> None:
        self.woken.release()

    def is_woken(self) -> bool:
        return self.woken.acquire(timeout=PATIENCE_S)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(open_pages, "SPACING_S", 0.01)
    made = Stage(tmp_path)
    yield made
    made.close()
    for stream in made.office.streams:
        stream.close()


class Stage:
    """People with browsers, an office, and the pages between them. It is looked at only when there are news."""

    def __init__(self, folder: Path) -> None:
        self.people = People(folder, wall_ns=lambda: 10**18, random=secrets.token_bytes)
        self.office = Office()
        self.update_s = PATIENCE_S
        self.pages = OpenPages(self.office, self.people, self.office.open_news, lambda: self.update_s)  # type: ignore[arg-type]
        self._open = contextlib.ExitStack()

    def browser(self, name: str) -> tuple[str, Token]:
        self.people.add(name, name)
        cookie = self.people.sign_in(self.people.new_token(name))
        return cookie, self.people.of_cookie(cookie)

    def page(self, name: str) -> Page:
        return self.open(name, Mine(self.office, name))

    def open(self, name: str, shown: Shown) -> Page:
        made = Page()
        self._open.enter_context(self.pages.woken(*self.browser(name), shown, made.wake))
        return made

    def settle(self, *pages: Page) -> None:
        """All are open, and are looked at for the first time: each is woken once."""
        self.office.may_open.set()
        assert all(page.is_woken() for page in pages)

    def close(self) -> None:
        """No page is open any more."""
        self._open.close()


def test_of_many_pages_those_are_woken_that_have_changed_and_the_office_is_read_once(stage: Stage) -> None:
    pages = {name: stage.page(name) for name in ("ana", "bob", "cem")}
    whole = stage.open("olga", WHOLE_OFFICE)
    stage.settle(*pages.values(), whole)
    before = stage.office.read
    stage.office.values["bob"] = 1
    stage.office.tell()
    assert whole.is_woken(), "it is the last"
    assert [name for name, page in pages.items() if page.woken.acquire(blocking=False)] == ["bob"]
    assert stage.office.read == before + 1
    assert len(stage.office.streams) == 1


def test_a_browser_whose_token_was_taken_back_is_woken_and_another_is_not(stage: Stage) -> None:
    """No news of the office come, and it is looked at once a minute only."""
    pages = {name: stage.page(name) for name in ("bob", "ana")}
    stage.settle(*pages.values())
    stage.people.revoke("ana")
    assert pages["ana"].is_woken(), "it is the last"
    assert not pages["bob"].woken.acquire(blocking=False)


def test_an_office_that_is_away_wakes_all_and_again_when_it_is_back(stage: Stage) -> None:
    stage.update_s = 0.05
    pages = [stage.page(name) for name in ("ana", "bob")]
    stage.settle(*pages)
    stage.office.is_away = True
    stage.office.hang_up()
    assert all(page.is_woken() for page in pages)
    stage.office.is_away = False
    assert all(page.is_woken() for page in pages)


def test_without_open_pages_nothing_is_asked(stage: Stage) -> None:
    stage.settle(stage.page("ana"))
    stage.close()
    stage.office.tell()
    until("nothing follows the office", lambda: not stage.pages.is_followed)
    assert select.select([stage.office.streams[-1]], [], [], PATIENCE_S)[0], "its stream has ended"


class Held:
    """Pages that are looked at when the test says so, on a clock that stands still: what was woken, and the pauses."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(open_pages, "start_thread", lambda *_, **__: None)
        self.people, self.office = People(folder, wall_ns=lambda: self.wall_ns, random=secrets.token_bytes), Office()
        self.wall_ns = 10**18
        self._opened: list[contextlib.ExitStack] = []
        self.log: list[str | float] = []
        self.meanwhile: Callable[[], object] = lambda: None
        """Called in each pause."""
        self.pages = OpenPages(self.office, self.people, self.office.open_news, lambda: 1.0, sleep=self._sleep)  # type: ignore[arg-type]

    def _sleep(self, seconds: float) -> None:
        self.log.append(seconds)
        self.meanwhile()

    def open(self, name: str, valid_s: float | None = None) -> contextlib.ExitStack:
        """The page of a new person; closing it closes the page."""
        self.people.add(name, name)
        cookie = self.people.sign_in(self.people.new_token(name, valid_s=valid_s))
        page = contextlib.ExitStack()
        self._opened.append(page)
        page.enter_context(
            self.pages.woken(
                cookie,
                self.people.of_cookie(cookie),
                Mine(self.office, name),
                lambda may_see_other: self.log.append(f"{name}!" if may_see_other else name),
            )
        )
        return page

    def look(self) -> list[str | float]:
        self.log.clear()
        self.pages.wake_changed()
        self.pages.wake_revoked()
        return list(self.log)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(tmp_path, monkeypatch)


def names(count: int) -> list[str]:
    return [f"p{number:03}" for number in range(count)]


def test_a_state_is_shown_before_the_places_that_moved_with_it(held: Held) -> None:
    """The last of thirty is granted: it is the first to be told, before any pause."""
    for name in names(30):
        held.open(name)
    held.look()
    held.office.places = dict.fromkeys(names(29), 1)
    held.office.values["p029"] = 1
    told = held.look()
    assert told[0] == "p029"
    assert told[1:] == [*names(29)[:BATCH], PAUSE_S, *names(29)[BATCH : 2 * BATCH], PAUSE_S, *names(29)[2 * BATCH :]]


def test_a_page_is_woken_once_for_all_that_changed_since_and_not_at_all_where_nothing_did(held: Held) -> None:
    held.open("ana")
    assert held.look() == ["ana"], "it is new"
    held.office.places["ana"], held.office.values["ana"] = 5, 1
    held.office.places["ana"] = 4
    assert held.look() == ["ana"]
    assert held.look() == []


def test_a_page_that_was_opened_since_the_last_look_is_told_of_an_office_that_is_away(held: Held) -> None:
    """Once: from then on it looks by itself."""
    held.office.is_away = True
    held.open("ana")
    assert held.look() == ["ana"]
    assert held.look() == []
    held.office.is_away = False
    assert held.look() == ["ana"]


def test_places_of_many_pages_are_told_within_their_time(held: Held) -> None:
    count = 60 * BATCH
    held.office.places = dict.fromkeys(names(count), 0)
    held.open("p000")
    pages = held.pages._pages
    page = next(iter(pages.values()))
    for number in range(1, count):  # as many people would take seconds to add
        pages[-number] = replace(page, shown=Mine(held.office, f"p{number:03}"))
    held.look()
    held.office.places = dict.fromkeys(names(count), 1)
    told = held.look()
    pauses = [one for one in told if isinstance(one, float)]
    assert len(told) - len(pauses) == count
    assert sum(pauses) <= ALL_WITHIN_S


def test_what_moves_while_others_are_told_is_told_with_the_next_look(held: Held) -> None:
    """And of a page that closes meanwhile nothing else is lost."""
    opened = {name: held.open(name) for name in names(2 * BATCH)}
    held.look()
    held.office.places = dict.fromkeys(opened, 1)

    def meanwhile() -> None:
        opened["p015"].close()
        held.office.places["p000"] = 2
        held.office.values["p001"] = 1

    held.meanwhile = meanwhile
    told = held.look()
    assert set(names(2 * BATCH)) - {"p015"} <= set(told)
    assert held.look() == ["p001", "p000"]


def test_what_is_taken_back_closes_its_page_within_half_a_second_while_the_office_does_not_answer(held: Held) -> None:
    """However seldom the office is looked at, and however long it takes to answer: by the pauses between two looks."""
    held.office.is_away = True
    page = held.open("ana")
    held.look()
    held.log.clear()
    pauses: list[None] = []

    def meanwhile() -> None:
        pauses.append(None)
        if len(pauses) == 2:
            held.people.revoke("ana")
        if "ana!" in held.log or len(pauses) == 100:
            page.close()

    held.meanwhile = meanwhile
    held.pages.watch_people()
    told = held.log.index("ana!")
    assert sum(one for one in held.log[2:told] if isinstance(one, float)) <= 0.5
    assert held.log[:2] == [REVOKED_S, REVOKED_S], "it is told of once, after it was taken back"


def test_people_who_cannot_be_looked_up_are_told_so_once(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages look again by themselves then."""
    held.open("ana")
    held.look()
    with monkeypatch.context() as patched:
        patched.setattr(held.people, "of_cookies", raise_damaged)
        held.people.add("bob", "bob")
        assert held.look() == ["ana!"]
        assert held.look() == []
    assert held.look() == []
    held.people.revoke("ana")
    assert held.look() == ["ana!"]


def raise_damaged(cookies: object) -> None:
    raise JournalError("people.db is damaged")


def test_a_sign_in_that_has_expired_wakes_its_page_though_nothing_was_written(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_pages, "SIGN_INS_S", 0.0)
    held.open("ana")
    held.open("bob", valid_s=60.0)
    assert held.look() == ["ana", "bob"]
    assert held.look() == []
    held.wall_ns += 61 * 10**9
    assert held.look() == ["bob!"]


class Fabric:
    """Answers, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def leases(self) -> list[Any]:
        self.asked.append("leases")
        return []

    def status(self) -> StatusView:
        self.asked.append("status")
        said = {"pid": 1, "version": "", "wire": 1, "home": "", "incarnation": 1, "started_at": "", "uptime": 1.0}
        said |= {"embedded": False, "nodes": [], "devices": [], "live": 0, "queued": 0, "quarantined": 0}
        return msgspec.convert(said | {"audit_head": "", "shared": "/run/sublet"}, StatusView)

    def bill(self, *, by: str) -> list[Any]:
        self.asked.append("bill")
        return []

    def request(self, method: str, path: str, *, shape: Any) -> list[Any]:
        self.asked.append(path)
        return []


def test_what_is_new_enough_is_not_read_again() -> None:
    fabric = Fabric()
    look = OfficeLook(fabric, sleep=lambda seconds: None)  # type: ignore[arg-type]
    first = look.since(0.0)
    assert look.since(first.began_s) is first
    assert look.since(first.began_s + 1e-9) is not first
    assert fabric.asked.count("leases") == 2
    assert fabric.asked.count("bill") == fabric.asked.count("status") == 1, "they are read more seldom"
    assert first.shared == "/run/sublet"


def test_changes_that_come_one_after_the_other_are_read_together() -> None:
    """A hundred leases are granted, and each page is to show its own; none waits longer than to the next look."""
    fabric, slept = Fabric(), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    look = OfficeLook(fabric, sleep=sleep)  # type: ignore[arg-type]
    began_s, number = time.monotonic(), 0
    while time.monotonic() < began_s + 3.5 * SPACING_S:
        changed_s, number = time.monotonic(), number + 1
        assert look.since(changed_s).began_s >= changed_s
    assert fabric.asked.count("leases") == number <= 5
    assert max(slept) <= SPACING_S
