"""What a program registers to be saved by: called by hand, and when its page says that it is time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sublet.errors import Unsupported
from sublet.guest.checkpoints import Checkpoints
from sublet.lease_end import EndReason
from sublet.values import Epoch, LeaseId
from sublet.wire.page import PageReader, PageState, PageView, PageWriter
from sublet.wire.usage_counters import TallyFile
from tests.traces import PATIENCE_S, until

LIVE = PageView(lease=LeaseId("l-a"), epoch=Epoch(1, 5), deadline_ns=1 << 60, now_ns=0)
NOTICED = replace(LIVE, state=PageState.NOTICED, reason=EndReason.PREEMPTED, take_at_ns=1 << 50)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Callable[[PageView], None]]:
    with PageWriter.create(str(tmp_path / "page"), LIVE) as writer:
        yield writer.write


@pytest.fixture
def saves(tmp_path: Path, page: Callable[[PageView], None]) -> Iterator[Checkpoints]:
    reader = PageReader(str(tmp_path / "page"))
    made = Checkpoints(reader)
    yield made
    page(replace(LIVE, state=PageState.OVER, reason=EndReason.RELEASED))
    if made._watcher is not None:
        made._watcher.join()
    if made._tally is not None:
        made._tally.close()
    reader.close()


def counted(saves: Checkpoints) -> list[str]:
    """For each save from here on, the thread that it was made in."""
    count: list[str] = []
    saves.register(lambda: count.append(threading.current_thread().name))
    return count


def test_by_hand_it_is_called_and_what_it_returns_is_returned(saves: Checkpoints) -> None:
    with pytest.raises(Unsupported, match="has registered no function that saves it"):
        saves.save()
    saves.register(lambda: 5)
    assert saves.save() == 5
    saves.register(lambda: 6)
    assert saves.save() == 6, "the newest counts"


def test_each_notice_is_answered_once(saves: Checkpoints, page: Callable[[PageView], None]) -> None:
    count = counted(saves)
    page(NOTICED)
    until("a save", lambda: bool(count))
    page(replace(NOTICED, now_ns=5))
    page(replace(NOTICED, state=PageState.OVER))
    saves.wait(PATIENCE_S)
    assert count == ["sublet-notice"]


def test_a_notice_that_was_taken_back_and_made_again_is_another(
    saves: Checkpoints, page: Callable[[PageView], None]
) -> None:
    count = counted(saves)
    page(NOTICED)
    until("a save", lambda: len(count) == 1)
    page(LIVE)
    until("that it was seen", lambda: saves._answered is None)
    page(NOTICED)
    until("another", lambda: len(count) == 2)


@pytest.mark.parametrize("how", ["saved", "partly", "failed", "later"])
def test_the_tally_says_whether_there_is_anything_left_to_save(
    saves: Checkpoints,
    page: Callable[[PageView], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """From the registration on, but for as long as a notice is answered with a save of everything."""
    path = str(tmp_path / "tally")
    tally = TallyFile.create(path)
    monkeypatch.setenv("SUBLET_TALLY", path)
    count: list[int] = []

    def save() -> object:
        count.append(1)
        if how == "failed":
            raise OSError("the disk is full")
        if how == "later":
            saves.ask_again()
        return how != "partly"

    assert not tally.is_unsaved()
    saves.register(save)
    assert tally.is_unsaved()
    page(NOTICED)
    until("a save", lambda: len(count) > (how == "later"))
    saves.wait(PATIENCE_S)
    assert tally.is_unsaved() == (how != "saved")
    page(LIVE)
    until("that it was seen", lambda: saves._answered is None)
    saves.wait(PATIENCE_S)
    assert tally.is_unsaved()
    page(replace(LIVE, state=PageState.OVER, reason=EndReason.RELEASED))
    tally.close()


def test_what_is_parked_is_saved_when_that_ends_whatever_was_saved_before(
    saves: Checkpoints, page: Callable[[PageView], None]
) -> None:
    """It may have stood still from the notice on, and seen nothing of what was between."""
    count = counted(saves)
    page(NOTICED)
    until("a save", lambda: len(count) == 1)
    page(replace(LIVE, lease=LeaseId("l-a-p1"), state=PageState.LEAVING, reason=EndReason.RELEASED))
    until("another", lambda: len(count) == 2)
    saves.wait(PATIENCE_S)
    assert len(count) == 2


def test_an_end_without_a_notice_is_saved_by_who_is_about_to_leave(
    saves: Checkpoints, page: Callable[[PageView], None]
) -> None:
    page(replace(LIVE, state=PageState.OVER, reason=EndReason.OPERATOR))
    count = counted(saves)
    saves.wait(PATIENCE_S)
    assert len(count) == 1


def test_what_its_holder_gave_back_is_not_saved(saves: Checkpoints, page: Callable[[PageView], None]) -> None:
    page(replace(LIVE, state=PageState.OVER, reason=EndReason.RELEASED))
    saves.register(lambda: pytest.fail("nobody wants it"))
    saves.wait(PATIENCE_S)


def test_leaving_waits_for_a_save_that_is_under_way(saves: Checkpoints, page: Callable[[PageView], None]) -> None:
    begun, done, order = threading.Event(), threading.Event(), list[str]()

    def save() -> None:
        begun.set()
        done.wait(PATIENCE_S)
        order.append("saved")

    saves.register(save)
    page(NOTICED)
    assert begun.wait(PATIENCE_S)
    saves.wait(0.01)
    assert order == [], "no longer than it may"
    threading.Timer(0.05, done.set).start()
    saves.wait(PATIENCE_S)
    assert order == ["saved"]


def test_who_cannot_save_yet_is_asked_again_until_he_can(saves: Checkpoints, page: Callable[[PageView], None]) -> None:
    calls: list[str] = []

    def save() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) < 3:
            saves.ask_again()

    saves.register(save)
    page(NOTICED)
    assert saves.is_due
    until("three calls", lambda: len(calls) == 3)
    saves.wait(PATIENCE_S)
    assert len(calls) == 3


def test_a_save_that_fails_is_told_and_ends_nothing(
    saves: Checkpoints, page: Callable[[PageView], None], capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def save() -> None:
        calls.append(1)
        raise ValueError("no room")

    saves.register(save)
    page(NOTICED)
    until("a save", lambda: bool(calls))
    saves.wait(PATIENCE_S)
    assert "no room" in capfd.readouterr().err
