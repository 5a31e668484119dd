"""Keeps a snapshot of an office current on its own thread, so that keys never wait for the office.

News change the snapshot when they come. It is read again at most once a second, and no oftener than that the office
spends a twentieth of its time on it. If the office does not answer, what was known stays, marked as old.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable
from typing import Final

from sublet.background import start_thread
from sublet.cli.top.reading import OfficeReader
from sublet.cli.top.snapshot import OfficeSnapshot, apply_news, merged
from sublet.client.http1 import ProtocolError
from sublet.client.sse import EventReader
from sublet.client.transport import Flight
from sublet.errors import SubletError

EVERY_S: Final = 2.0
"""Between two readings while there are no news: CPU time, memory and renewals make none."""
SOON_S: Final = 1.0
"""After news, and while the office does not answer."""
BILL_EVERY_S: Final = 5.0
PART: Final = 20
"""A reading that takes long is followed by a pause so many times as long."""
LISTEN_AGAIN_S: Final = 3.0
SILENCE_S: Final = 40.0
"""The office gives a sign of life every fifteen seconds."""


class SnapshotWatch:
    """``known`` is always the newest; ``on_change`` is called, on the thread, whenever it is another one."""

    def __init__(self, reader: OfficeReader, known: OfficeSnapshot, on_change: Callable[[], None]) -> None:
        self.known = known
        self._reader = reader
        self._on_change = on_change
        self._ours, self._theirs = os.pipe()
        self._stopped = False
        self._news: Flight | None = None
        self._events = EventReader()
        self._listen_at_s = self._last_event_s = 0.0
        self._read_at_s = known.at_s + EVERY_S
        self._soonest_s = known.at_s + SOON_S
        self._bill_at_s = known.at_s + BILL_EVERY_S

    def start(self) -> None:
        _ = start_thread("top_watch", self._run, again=True)

    def stop(self) -> None:
        """Does not wait for an answer that is under way: the thread ends with the process."""
        self._stopped = True
        with contextlib.suppress(OSError):
            os.write(self._theirs, b".")

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._turn(time.monotonic())
            except Exception as error:  # noqa: BLE001 - a view that looks live and is not would be worse than any error
                self._close_stream()
                self._lost(SubletError(f"{type(error).__name__}: {error}"), time.monotonic())
        self._close_stream()
        self._reader.close()

    def _turn(self, now_s: float) -> None:
        if self._news is None and now_s >= self._listen_at_s:
            self._listen(now_s)
        if now_s >= self._read_at_s:
            self._read(now_s)
        self._wait()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        until_s = self._read_at_s
        if self._news is None:
            until_s = min(until_s, self._listen_at_s)
        else:
            poll.register(self._news.fileno(), select.POLLIN)
        ready = dict(poll.poll(max(0.0, until_s - time.monotonic()) * 1000))
        if self._news is not None and self._news.fileno() in ready:
            self._read_events()
        elif self._news is not None and time.monotonic() > self._last_event_s + SILENCE_S:
            self._close_stream()

    # ---- reading ----

    def _read(self, now_s: float) -> None:
        everything = self.known.lost_s is not None or now_s >= self._bill_at_s
        try:
            fresh = self._reader.read(everything=everything)
        except SubletError as error:
            self._lost(error, now_s)
            return
        took_s = fresh.at_s - now_s
        self._read_at_s = fresh.at_s + max(EVERY_S, PART * took_s)
        self._soonest_s = fresh.at_s + max(SOON_S, PART * took_s)
        if everything:
            self._bill_at_s = fresh.at_s + max(BILL_EVERY_S, PART * took_s)
        self._change(merged(self.known, fresh))

    def _lost(self, error: SubletError, now_s: float) -> None:
        self._read_at_s = time.monotonic() + SOON_S
        since_s = now_s if self.known.lost_s is None else self.known.lost_s
        self._change(self.known._replace(lost_s=since_s, lost_why=error.message))

    def _change(self, known: OfficeSnapshot) -> None:
        self.known = known
        self._on_change()

    # ---- news ----

    def _listen(self, now_s: float) -> None:
        self._listen_at_s, self._last_event_s = now_s + LISTEN_AGAIN_S, now_s
        try:
            self._news = self._reader.listen()
        except SubletError:
            return  # the reading that fails as well says so
        self._events = EventReader()

    def _read_events(self) -> None:
        assert self._news is not None
        try:
            events = self._events.feed(self._news.read())
        except (SubletError, ProtocolError):
            self._lost_the_stream()
            return
        if self._news.complete or self._news.status not in (0, 200):
            self._lost_the_stream()
            return
        now_s = self._last_event_s = time.monotonic()
        known = self.known
        for event in events:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # of a newer office
                known = apply_news(known, event.event, json.loads(event.data), now_s)
            if event.event != "place":
                self._read_at_s = min(self._read_at_s, max(now_s, self._soonest_s))
        if known is not self.known:
            self._change(known)

    def _lost_the_stream(self) -> None:
        """It ends with the office, or the office has enough of them: a reading tells which."""
        if self._news is not None and self._news.complete:
            self._news = None  # its connection is the transport's again
        self._close_stream()
        self._listen_at_s = time.monotonic() + LISTEN_AGAIN_S
        self._read_at_s = min(self._read_at_s, max(time.monotonic(), self._soonest_s))

    def _close_stream(self) -> None:
        if self._news is not None:
            self._news.close()
            self._news = None
