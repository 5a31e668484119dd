"""Open pages: the office is looked at once for all of them, and each is woken by what changes in it alone."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from sublet.errors import Disconnected
from sublet.studio import open_pages
from sublet.studio.look import OfficeLook, Snapshot
from sublet.studio.open_pages import WHOLE_OFFICE, OpenPages, Shown
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
        self.lock = threading.Lock()
        self.may_open = threading.Event()

    def since(self, moment_s: float) -> Snapshot:
        with self.lock:
            self.read += 1
            if self.is_away:
                raise Disconnected("no answer")
            return Snapshot(began_s=moment_s, leases={}, places={}, bills={})

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

    def mark(self, seen: Snapshot, news: int) -> Hashable:
        return self._office.values.get(self._name, 0)


class Page:
    """One that is open."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)

    def wake(self) -> None:
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
    pages = {name: stage.page(name) for name in ("bob", "ana")}
    stage.settle(*pages.values())
    stage.people.revoke("ana")
    stage.office.tell()
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
    look = OfficeLook(fabric)  # type: ignore[arg-type]
    first = look.since(0.0)
    assert look.since(first.began_s) is first
    assert look.since(first.began_s + 1e-9) is not first
    assert fabric.asked.count("leases") == 2
    assert fabric.asked.count("bill") == fabric.asked.count("status") == 1, "they are read more seldom"
    assert first.shared == "/run/sublet"
