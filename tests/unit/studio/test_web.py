"""The studio's application, asked without a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sublet.errors import Disconnected
from sublet.studio import store, web
from sublet.studio.people import People
from sublet.studio.turns import OfficeWatch

PATIENCE_S = 60.0
HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/sessions"), ("POST", "/sign-in"), ("POST", "/join")])
def test_a_message_that_never_ends_is_broken_off(method: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is looked up for it."""
    monkeypatch.setattr(web, "BODY_S", 0.01)
    begins = iter([{"type": "http.request", "body": b"{", "more_body": True}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(begins, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "scheme": "http"}
    asyncio.run(web.studio_app(cast("Any", None))(scope, receive, send))
    assert sent[0]["status"] == 408
    assert b"did not arrive within 0.01 s" in sent[1]["body"].lower()


class Page:
    """An open page of one person: what its browser hears, how often it was made, and its sign-in looked up."""

    def __init__(self, folder: Path) -> None:
        self.people = People(folder, wall_ns=time.time_ns, random=secrets.token_bytes)
        self.people.add("ana", "ana")
        self.cookie = self.people.sign_in(self.people.new_token("ana"))
        self.made, self.looked_up = 0, 0
        self.content: Callable[[], str] = lambda: "as it was"
        self.wake: Callable[..., object] = lambda: None

    def make(self, visit: object) -> str:
        self.made += 1
        return self.content()

    @contextlib.contextmanager
    def woken(self, cookie: str, token: object, shown: object, wake: Callable[..., object]) -> Iterator[None]:
        self.wake = wake
        yield

    async def opened(self, *, of_office: bool = False) -> AsyncIterator[str]:
        """The stream of its news."""

        async def never() -> bool:
            return False

        mine = SimpleNamespace(wake_on_change=lambda wake: contextlib.nullcontext())
        studio = SimpleNamespace(
            people=self.people,
            pages=self,
            presences=SimpleNamespace(on_request=self._looked_up),
            watch=OfficeWatch(lambda: None),
            settings=SimpleNamespace(answer_s=PATIENCE_S, update_s=0),
            of=lambda person: mine,
        )
        request = SimpleNamespace(cookies={web.COOKIE: self.cookie}, state=SimpleNamespace(), is_disconnected=never)
        routes = web._Web(cast("Any", studio), None)
        async for event in routes._news(routes._visit(cast("Any", request)), self.make, of_office):
            yield event

    def _looked_up(self, token: object) -> None:
        self.looked_up += 1

    def reads(
        self, play: Callable[[Callable[[], Awaitable[str]]], Awaitable[None]], *, of_office: bool = False
    ) -> None:
        """Run ``play`` with a function that waits for what the browser hears next."""

        async def run() -> None:
            async with contextlib.aclosing(cast("Any", self.opened(of_office=of_office))) as events:
                await play(lambda: asyncio.wait_for(anext(events), PATIENCE_S))

        asyncio.run(run())


AS_BEFORE = ": as before\n\n"


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Without pauses. Heartbeats come at once where nothing has changed."""
    monkeypatch.setattr(web, "SPACING_S", 0.0)
    monkeypatch.setattr(web, "HEARTBEAT_S", 0.0)
    return Page(tmp_path)


def test_a_heartbeat_neither_makes_a_page_anew_nor_looks_its_sign_in_up(
    opened: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FRESH_NS", 0)

    async def play(heard: Callable[[], Awaitable[str]]) -> None:
        assert await heard() == "data: as it was\n\n"
        before = opened.made, opened.looked_up
        assert [await heard() for _ in range(3)] == [AS_BEFORE] * 3
        assert (opened.made, opened.looked_up) == before
        opened.wake()
        assert await heard() == AS_BEFORE
        assert opened.made == before[0] + 1

    opened.reads(play)


def test_what_changes_while_a_page_is_made_is_shown_next(opened: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a heartbeat: the change itself has the page made once more."""
    monkeypatch.setattr(web, "HEARTBEAT_S", PATIENCE_S)

    def changing() -> str:
        opened.content = lambda: "newer"
        opened.wake()
        return "older"

    async def play(heard: Callable[[], Awaitable[str]]) -> None:
        opened.content = changing
        assert [await heard(), await heard()] == ["data: older\n\n", "data: newer\n\n"]

    opened.reads(play)


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_sign_in_that_is_taken_back_ends_the_page(opened: Page, is_woken: bool) -> None:
    """At once where the page is woken for it; with the next heartbeat in any case."""

    async def play(heard: Callable[[], Awaitable[str]]) -> None:
        await heard()
        opened.people.revoke("ana")
        if is_woken:
            opened.wake(True)
        assert await heard() == "event: over\ndata:\n\n"
        with pytest.raises(StopAsyncIteration):
            await heard()

    opened.reads(play)


def test_a_page_that_says_what_is_wrong_is_made_anew_before_the_next_heartbeat(
    opened: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as a change would be shown (``studio.update``)."""
    monkeypatch.setattr(web, "HEARTBEAT_S", PATIENCE_S)

    def away() -> str:
        raise Disconnected("the office is away")

    async def play(heard: Callable[[], Awaitable[str]]) -> None:
        opened.content = away
        assert "The office is away" in await heard()
        assert await heard() == AS_BEFORE
        opened.content = lambda: "back"
        assert await heard() == "data: back\n\n"

    opened.reads(play)


def test_a_page_of_the_office_is_made_anew_with_each_heartbeat(opened: Page) -> None:
    async def play(heard: Callable[[], Awaitable[str]]) -> None:
        await heard()
        opened.content = lambda: "an hour later"
        assert await heard() == "data: an hour later\n\n"

    opened.reads(play, of_office=True)


def test_a_second_write_within_one_tick_of_the_clock_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may leave the same size and time: what was written just now is read again until it is old."""
    monkeypatch.setattr(store, "FRESH_NS", HOUR_NS)
    people = People(tmp_path, wall_ns=time.time_ns, random=secrets.token_bytes)
    people.add("ana", "ana")
    (database,) = tmp_path.glob("*.db")
    os.utime(database, ns=(0, time.time_ns() - 10 * HOUR_NS))
    assert people.mark() == people.mark()
    os.utime(database)
    assert people.mark() != people.mark()
