"""The ends of leases, followed in the office's news."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest

from sublet.errors import Disconnected, JournalError
from sublet.studio import lease_ends
from sublet.studio.lease_ends import LeaseEnds
from sublet.studio.records import CheckpointLocator
from sublet.studio.sessions import Seen
from sublet.wire.http import EndView, News, ParksView
from sublet.wire.http_views import SESSION_LABEL
from tests.traces import until
from tests.unit.client.script import view

AT: Final = "2026-11-21T06:38:06.250Z"
AT_NS: Final = 1_795_243_086_250_000_000


class Stream:
    """As much of a `Flight` as is used."""

    def __init__(self, line: socket.socket, status: int) -> None:
        self._line, self.status, self.complete = line, status, False

    def fileno(self) -> int:
        return self._line.fileno()

    def read(self) -> bytes:
        raw = self._line.recv(1 << 16)
        self.complete = not raw
        return raw

    def close(self) -> None:
        self._line.close()


class Stage:
    """An office whose streams the test writes, and what was called."""

    def __init__(self) -> None:
        self.lines: list[socket.socket] = []
        self.status = 200
        self.is_away = False
        self.opened = 0
        self.calls: list[str | Seen] = []
        self.refuses = False
        self.stopped = threading.Event()
        self._thread = threading.Thread(
            target=LeaseEnds(self.open, self.ended, lambda: self.calls.append("compare")).run, args=(self.stopped,)
        )
        self._thread.start()

    def open(self) -> Any:
        self.opened += 1
        if self.is_away:
            raise Disconnected("no answer")
        ours, theirs = socket.socketpair()
        ours.sendall(b": here\n\n")
        self.lines.append(ours)
        return Stream(theirs, self.status)

    def ended(self, seen: Seen) -> None:
        if self.refuses:
            raise JournalError("the disk is full")
        self.calls.append(seen)

    def tell(self, what: str, session: str = "s-1", **more: Any) -> None:
        end = EndView(reason="idle", at=AT, detail="8s", saved_at=AT, saved_version=4, saved_volume="s-1")
        labels = {SESSION_LABEL: session} if session else {}
        lease = msgspec.structs.replace(view("ended"), id=f"l-{what}", labels=labels, end=end, **more)
        raw = msgspec.json.encode(News(what=what, lease=None if what == "lagged" else lease))
        self.lines[-1].sendall(b"event: %s\ndata: %s\n\n" % (what.encode(), raw))

    def close(self) -> None:
        self.stopped.set()
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.sendall(b": over\n\n")
        self._thread.join()
        for line in self.lines:
            line.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(lease_ends, "RETRY_S", 0.01)
    made = Stage()
    try:
        until("all is compared first", lambda: made.calls == ["compare"])
        yield made
    finally:
        made.close()


def test_an_end_is_told_with_the_offices_time_and_reason(stage: Stage) -> None:
    """Of leases of sessions, once nothing is left of them; not of memory that was parked, and not of other leases."""
    stage.tell("ending")
    stage.tell("ended", session="")
    stage.tell("ended", parks=ParksView(of="l-0", holds=True, resumed_by=None))
    stage.tell("ended")
    until("it is told", lambda: len(stage.calls) == 2)
    seen = stage.calls[1]
    assert isinstance(seen, Seen)
    assert (seen.id, seen.session, seen.reason, seen.detail, seen.ended_ns) == ("l-ended", "s-1", "idle", "8s", AT_NS)
    assert seen.checkpoint == CheckpointLocator(volume="s-1", number=4)


def test_what_was_not_in_the_stream_is_compared(stage: Stage) -> None:
    """News that were lost; an office that was away, and refused the stream then; an end that could not be recorded."""
    stage.tell("lagged")
    until("compared after lost news", lambda: stage.calls == ["compare"] * 2)
    stage.is_away = True
    stage.lines[-1].close()
    before = stage.opened
    until("it is tried again", lambda: stage.opened > before + 1)
    assert len(stage.calls) == 2, "an office that is away is asked nothing"
    stage.status, stage.is_away = 503, False
    before = stage.opened
    until("it is tried again", lambda: stage.opened > before + 1)
    assert len(stage.calls) == 2
    stage.status = 200
    until("compared when it is back", lambda: len(stage.calls) == 3)
    stage.refuses = True
    stage.tell("ended")
    until("compared after a failure", lambda: len(stage.calls) == 4)
    assert stage.calls == ["compare"] * 4


def test_a_stream_without_a_sign_of_life_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_ends, "RETRY_S", 0.01)
    monkeypatch.setattr(lease_ends, "SILENT_S", 0.05)
    stage = Stage()
    try:
        until("another is open", lambda: stage.calls.count("compare") > 1)
    finally:
        stage.close()
