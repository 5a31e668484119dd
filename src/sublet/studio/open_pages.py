"""The pages that are open in browsers. One stream of the office's news serves them all.

A page is woken when what it shows has changed: something of its person's leases, places or bill, the person's records,
or what the browser may see, since a token or a sign-in was taken back or has expired. One grant moves the place of each
request behind it, so pages on which only a place or a number has changed are woken after those on which a state has, a
few at a time: people who ask for something meanwhile are answered in between. A page that is woken shows the newest
state, whatever happened before. While no page is open the office is asked for nothing.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Protocol

from sublet.background import start_thread
from sublet.client.http1 import ProtocolError
from sublet.client.sse import EventReader
from sublet.client.transport import Flight
from sublet.errors import Disconnected, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.studio.look import OfficeLook, SessionsSnapshot
from sublet.studio.people import People, Token

SPACING_S: Final = 0.2
"""Between two looks at the office, however much happens there."""
BATCH: Final = 10
"""Pages that are woken together where only a place or a number on them has changed."""
PAUSE_S: Final = 0.02
"""After that, before the next are."""
ALL_WITHIN_S: Final = 0.4
"""The pauses are shorter where there are so many pages that they would take longer together."""
SIGN_INS_S: Final = 10.0
"""Sign-ins that expire are looked for so often."""
REVOKED_S: Final = 0.25
"""Between two looks whether something of people, tokens or browsers was written, whatever the office does."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Another one where a page would show something else."""

    state: object
    """Of the sessions, their leases and the person: shown at once."""
    numbers: object = None
    """Places, estimates, time left, bills: shown within a second."""


AWAY: Final = Mark("the office cannot be read")
"""Of every page meanwhile."""


class Shown(Protocol):
    """What a page shows."""

    def mark(self, seen: SessionsSnapshot, news: int) -> Mark:
        """``news``: how often there were news of the office."""


class WholeOffice:
    """What a page shows that shows more of the office than sessions."""

    def mark(self, seen: SessionsSnapshot, news: int) -> Mark:
        return Mark(news)


WHOLE_OFFICE: Final = WholeOffice()


@dataclass(slots=True, kw_only=True)
class _Page:
    """One page that is open."""

    cookie: str
    token: Token
    shown: Shown
    wake: Callable[[bool], object]
    mark: Mark | None = None
    """Of what it showed when it was woken last; None: it was not woken yet."""


class OpenPages:
    """Wakes open pages. Safe to use from several threads."""

    def __init__(
        self,
        look: OfficeLook,
        people: People,
        open_news: Callable[[], Flight],
        update_s: Callable[[], float],
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """``open_news``: the office's stream. ``update_s``: the longest time between two looks."""
        self._look, self._people = look, people
        self._open_news, self._update_s, self._sleep = open_news, update_s, sleep
        self._lock = threading.Lock()
        self._pages: dict[int, _Page] = {}
        self.is_followed = False
        """Whether the office is looked at."""
        self._is_watched = False
        """Whether it is looked at who is signed in."""
        self._stream: tuple[Flight, EventReader] | None = None
        self._news = 0
        self.news_s = 0.0
        """When there were news of the office, on the monotonic clock."""
        self._people_mark: Hashable = None
        self._people_due_s = 0.0
        self._is_unreadable = False
        """Whether people could not be looked up."""

    @contextlib.contextmanager
    def woken(self, cookie: str, token: Token, shown: Shown, wake: Callable[[bool], object]) -> Iterator[None]:
        """``wake`` is called when the page of this browser, which shows this, is to be looked at again, with whether
        that is since the browser may see something else than before, or nothing more."""
        page = _Page(cookie=cookie, token=token, shown=shown, wake=wake)
        with self._lock:
            self._pages[id(page)] = page
            is_first, self.is_followed = not self.is_followed, True
            begins_watch, self._is_watched = not self._is_watched, True
        try:
            if is_first:
                start_thread("studio_pages", self.follow, again=True)
            if begins_watch:
                start_thread("studio_revoked", self.watch_people, again=True)
            yield
        finally:
            with self._lock:
                del self._pages[id(page)]

    def of_people(self) -> Counter[str]:
        """How many pages are open, by the id of their person."""
        with self._lock:
            return Counter(page.token.person.id for page in self._pages.values())

    def follow(self) -> None:
        """Look at the office until no page is open."""
        try:
            while self._has_pages():
                if self._wait_news():
                    self._news, self.news_s = self._news + 1, time.monotonic()
                self.wake_changed()
                self._sleep(SPACING_S)
        finally:
            self._close_stream()

    def watch_people(self) -> None:
        """Look at who is signed in until no page is open. Apart from the office, which may be slow to answer: what was
        taken back closes its pages all the same."""
        while self._has_browsers():
            self.wake_revoked()
            self._sleep(REVOKED_S)

    def _has_browsers(self) -> bool:
        with self._lock:
            self._is_watched = bool(self._pages)
            return self._is_watched

    def _has_pages(self) -> bool:
        with self._lock:
            self.is_followed = bool(self._pages)
            return self.is_followed

    def _wait_news(self) -> bool:
        """Wait for news of the office, at most for the time between two looks; whether there were any."""
        until_s = time.monotonic() + self._update_s()
        try:
            if self._stream is None:
                self._stream = self._open_news(), EventReader()
                return True  # what happened before is not in the stream
            flight, reader = self._stream
            poll = select.poll()
            poll.register(flight, select.POLLIN)
            while poll.poll(max(0.0, until_s - time.monotonic()) * 1e3):
                raw = flight.read()
                if flight.complete or flight.status not in (0, 200):
                    raise Disconnected("the stream of the office's news has ended")
                if reader.feed(raw):
                    return True
            return False
        except (SubletError, ProtocolError):  # without news it is looked at from time to time
            self._close_stream()
            time.sleep(max(0.0, until_s - time.monotonic()))
            return True

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream[0].close()
            self._stream = None

    def wake_changed(self) -> None:
        """Look at the office, and wake the pages that would show something else than before."""
        seen: SessionsSnapshot | None = None
        with contextlib.suppress(SubletError):  # the pages find that out for themselves, and show it
            seen = self._look.since(time.monotonic())
        later: list[tuple[_Page, Mark]] = []
        for page in self._opened():
            mark = AWAY if seen is None else page.shown.mark(seen, self._news)
            if page.mark is not None and mark.state == page.mark.state:
                if mark != page.mark:
                    later.append((page, mark))
            elif mark != page.mark:
                page.mark = mark
                page.wake(False)
        pause_s = min(PAUSE_S, ALL_WITHIN_S * BATCH / max(1, len(later)))
        for number, (page, mark) in enumerate(later):
            if number and not number % BATCH:
                self._sleep(pause_s)
            page.mark = mark
            page.wake(False)

    def _opened(self) -> list[_Page]:
        with self._lock:
            return list(self._pages.values())

    def wake_revoked(self) -> None:
        """Wake the pages of browsers that may see something else than before, or nothing more."""
        pages = self._opened()
        try:
            mark, now_s = self._people.mark(), time.monotonic()
            if mark == self._people_mark and now_s < self._people_due_s:
                return
            tokens = self._people.of_cookies([page.cookie for page in pages])
        except SubletError:  # the pages find that out for themselves, and show it; then they look again and again
            if not self._is_unreadable:
                self._is_unreadable = True
                for page in pages:
                    page.wake(True)
            return
        self._is_unreadable = False
        self._people_mark, self._people_due_s = mark, now_s + SIGN_INS_S
        for page in pages:
            token = tokens.get(page.cookie)
            if token != page.token:
                page.token = token or page.token
                page.wake(True)
