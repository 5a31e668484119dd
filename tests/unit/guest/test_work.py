"""A worker that has no memory or no descriptor for its answer: the holder hears of it all the same."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from sublet.guest.calls import CallRunner
from sublet.guest.main_thread import MainThreadQueue
from sublet.guest.streams import Speech, SpokenRecords
from sublet.guest.work import GuestWorker
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.guests import Service, Visit
from sublet.wire.line import SharedConnection
from sublet.wire.line import pair as line_pair
from sublet.wire.link_events import CallRefused, Over, Replied
from sublet.wire.page import PageReader, PageState
from sublet.wire.work import Flag, HolderMessage, WorkerMessage, pack, unpack

PATIENCE_S = 30.0


class Inline(MainThreadQueue):
    """As that of a kernel, whose loop logs what a job raises and goes on."""

    def put(self, job: Callable[[], None]) -> None:
        with contextlib.suppress(Exception):
            job()


class Page:
    def check(self, lease: LeaseId, epoch: Epoch) -> None:
        """It lives."""

    def read(self) -> Any:
        return types.SimpleNamespace(state=PageState.OVER)


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedConnection]:
    ours, theirs = line_pair()
    worker = GuestWorker(
        Inline(), cast("PageReader", Page()), Speech(), cast("SpokenRecords", type("Records", (), {})())
    )
    visit = Visit(
        service=Service.WORK, tenant=TenantId("t"), lease=LeaseId("l"), epoch=Epoch(1, 1), operations=("exec",)
    )
    thread = threading.Thread(target=lambda: worker.serve(theirs._conversation, visit))
    thread.start()
    yield ours
    ours.close()
    thread.join(PATIENCE_S)
    theirs.close()


def answer(line: SharedConnection, body: bytes) -> str:
    """What the holder is told of a call."""
    line.send(lambda link: link.call(body))
    while True:
        for happening in line.receive(PATIENCE_S):
            match happening:
                case Replied():
                    said = unpack(happening.body)
                    return f"{WorkerMessage(said.kind).name} {bytes(said.blob).decode()}"
                case CallRefused() | Over():
                    return type(happening).__name__
                case _:
                    pass


def test_what_cannot_be_taken_in_is_answered(holder: SharedConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(CallRunner, "store_buffers", none_left)
    assert "Too many open files" in answer(holder, pack(HolderMessage.RUN, subject=1, flags=Flag.NONE))


def test_an_answer_for_which_there_is_no_memory_is_replaced_by_one_that_says_so(
    holder: SharedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sublet.guest.answers import WorkerAnswer

    packed, failures = WorkerAnswer.packed, [MemoryError()]

    def once(self: WorkerAnswer) -> Any:
        if failures:
            raise failures.pop()
        return packed(self)

    monkeypatch.setattr(WorkerAnswer, "packed", once)
    assert "MemoryError" in answer(holder, pack(HolderMessage.RUN, subject=1, flags=Flag.NONE))


def test_where_nothing_can_be_answered_the_connection_ends(
    holder: SharedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sublet.guest.answers import WorkerAnswer

    def never(self: WorkerAnswer) -> Any:
        raise MemoryError

    monkeypatch.setattr(WorkerAnswer, "packed", never)
    assert answer(holder, pack(HolderMessage.RUN, subject=1, flags=Flag.NONE)) == "Over"
