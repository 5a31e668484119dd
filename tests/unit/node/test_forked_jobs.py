"""Forked jobs where no copy can be made, or not be watched: the caller is told, and the next has its turn."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.clock import SystemClock
from sublet.node.forked_jobs import FORKED_JOBS_MAX, ForkedJobs
from sublet.node.loop import Loop
from tests.left_open import left_of, open_now

PATIENCE_S = 60.0


class Stage:
    def __init__(self) -> None:
        self.loop = Loop(SystemClock())
        self.lives: list[tuple[int, bool]] = []
        self.told: list[str | None] = []
        self.jobs = ForkedJobs(self.loop, lambda pid, lives: self.lives.append((pid, lives)))

    def until(self, count: int) -> None:
        """Run the loop until so many were told."""
        limit = self.loop.after(PATIENCE_S, self.loop.stop)
        self._look(count)
        self.loop.run()
        limit.cancel()
        assert len(self.told) >= count

    def _look(self, count: int) -> None:
        if len(self.told) >= count:
            self.loop.stop()
        else:
            self.loop.after(0.005, lambda: self._look(count))


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.jobs.close()
    made.loop.close()


def no_room(*_: object) -> Any:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_jobs_that_could_not_be_forked_leave_their_places_to_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places that stayed taken would keep every later job of the supervisor waiting for ever."""
    before = open_now()
    with monkeypatch.context() as short:
        short.setattr(os, "fork", no_room)
        for _ in range(2 * FORKED_JOBS_MAX):
            stage.jobs.run(lambda: "never", stage.told.append)
        stage.until(2 * FORKED_JOBS_MAX)
    assert stage.told == [None] * (2 * FORKED_JOBS_MAX)
    assert "no process could be started" in stage.jobs.why_failed
    assert not left_of(open_now, before)
    stage.told.clear()
    stage.jobs.run(lambda: "done", stage.told.append)
    stage.until(1)
    assert stage.told == ["done"]
    ((pid, _), _) = stage.lives
    os.waitpid(pid, 0)


def test_a_copy_that_cannot_be_watched_is_ended_and_is_no_process_of_ours_any_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts as one is spared when a guest's hardware is verified, and its number may be a stranger's by then."""

    def never() -> str:
        signal.pause()
        return "never"

    before = open_now()
    with monkeypatch.context() as short:
        short.setattr(stage.loop, "_watch", no_room)
        stage.jobs.run(never, stage.told.append)
        stage.until(1)
    assert stage.told == [None]
    ((pid, _), *_) = stage.lives
    assert stage.lives == [(pid, True), (pid, False)]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not left_of(open_now, before)
