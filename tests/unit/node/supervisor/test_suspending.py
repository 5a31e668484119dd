"""The program that asks the driver: questions in order, its end told, started again when it is needed."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from sublet.clock import SystemClock
from sublet.node.loop import Loop
from sublet.node.supervisor.suspending import Suspending
from tests.left_open import left_of, open_now

ECHO = """
import json, sys
print(json.dumps({"ready": 13000, "can_move": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["pids"] == [666]:
        sys.exit(1)
    if asked["pids"] == [7] and asked["do"] == "suspend" or asked["pids"] == [8]:
        import time
        time.sleep(600)
    done = {"done": asked["pids"], "asked": asked}
    print(json.dumps({"failed": "managed memory"} if asked["pids"] == [13] else done), flush=True)
"""


class Stage:
    def __init__(self, code: str = ECHO, program: str = sys.executable, **limits: float) -> None:
        self.loop = Loop(SystemClock())
        self.lives: list[tuple[int, bool]] = []
        self.suspending = Suspending(
            self.loop,
            lambda pid, lives: self.lives.append((pid, lives)),
            (program, "-c", code),
            **{"grace_s": 60.0} | limits,  # where nothing hangs, the helper may be slow
        )
        self.told: list[Mapping[str, Any]] = []

    def until(self, count: int) -> None:
        """Run the loop until so many answers are there."""
        limit = self.loop.after(120.0, self.loop.stop)
        self._look(lambda: len(self.told) >= count)
        self.loop.run()
        limit.cancel()
        assert len(self.told) >= count

    def _look(self, is_so: Callable[[], bool]) -> None:
        if is_so():
            self.loop.stop()
        else:
            self.loop.after(0.01, lambda: self._look(is_so))


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.suspending.close()
    reap(made)
    made.loop.close()


def reap(stage: Stage) -> None:
    for pid, lives in stage.lives:
        if lives:
            os.waitpid(pid, 0)


def test_questions_are_answered_in_order_by_one_program(stage: Stage) -> None:
    """Several at once wait for each other."""
    for pid in (1, 2, 13):
        stage.suspending.suspend([pid], 500, stage.told.append)
    stage.suspending.resume(
        [1], [("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-ff"), ("GPU-ab", "GPU-ab")], stage.told.append
    )
    stage.suspending.resume([1], [("GPU-ab", "GPU-ab")], stage.told.append)
    stage.until(5)
    assert [said.get("done") for said in stage.told] == [[1], [2], None, [1], [1]]
    assert stage.told[0]["asked"]["timeout_ms"] == 500
    assert stage.told[2]["failed"] == "managed memory"
    assert stage.told[3]["asked"]["pairs"] == [["000102030405060708090a0b0c0d0e0f", "ff"], ["ab", "ab"]]
    assert stage.told[4]["asked"]["pairs"] == [], "all of them are where they were"
    assert [lives for _, lives in stage.lives] == [True]


def test_when_it_ends_those_who_wait_are_told_and_the_next_starts_another(stage: Stage) -> None:
    """By itself, or by SIGKILL."""
    stage.suspending.suspend([666], 1, stage.told.append)
    stage.suspending.suspend([1], 1, stage.told.append)
    stage.until(2)
    assert stage.told[0] == {"failed": "its helper ended", "stuck": True}, "nor could it be put back"
    assert stage.told[1]["done"] == [1], "what waited for its turn is asked of the next"
    stage.suspending.suspend([2], 1, stage.told.append)
    stage.until(3)
    assert stage.told[2]["done"] == [2]
    os.kill(stage.lives[-1][0], signal.SIGKILL)
    stage.suspending.suspend([3], 1, stage.told.append)
    stage.until(4)
    assert "failed" in stage.told[3]
    assert [lives for _, lives in stage.lives] == [True, False, True, False, True, False, True]


def test_it_lets_go_of_the_driver_once_nothing_is_asked_of_it(stage: Stage) -> None:
    """It had every card open for as long as the supervisor lived. The next question starts another one."""
    stage.suspending.suspend([1], 1, stage.told.append)
    stage.suspending.end_if_idle()
    stage.until(1)
    assert stage.told[0]["done"] == [1]
    ((pid, _),) = stage.lives
    stage.suspending.end_if_idle()
    assert stage.lives[1:] == [(pid, False)]
    stage.suspending.suspend([2], 1, stage.told.append)
    stage.until(2)
    assert stage.told[1]["done"] == [2]


def test_an_end_that_is_read_and_met_by_a_write_in_one_turn_does_not_end_the_next(stage: Stage) -> None:
    stage.suspending.suspend([1], 1, stage.told.append)
    stage.until(1)
    pid, _ = stage.lives[-1]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    stage.suspending.suspend([2], 1, stage.told.append)
    stage.until(2)
    assert stage.told[1] == {"failed": "its helper ended"}
    stage.suspending.suspend([3], 1, stage.told.append)
    stage.until(3)
    assert stage.told[2]["done"] == [3]
    assert [lives for _, lives in stage.lives] == [True, False, True]


def test_one_hung_call_blocks_nobody_else_and_is_put_back() -> None:
    """The program is killed, and the next one resumes what the call may have left locked."""
    stage = Stage(grace_s=0.5)
    stage.suspending.suspend([7], 1, stage.told.append)
    stage.suspending.suspend([1], 20_000, stage.told.append)
    stage.until(2)
    assert "did not answer" in stage.told[0]["failed"]
    assert "stuck" not in stage.told[0], "it runs as before"
    assert stage.told[1]["done"] == [1]
    assert [lives for _, lives in stage.lives] == [True, False, True]
    stage.suspending.close()
    reap(stage)


@pytest.mark.parametrize("do", ["suspend", "resume"])
def test_what_cannot_be_put_back_either_is_of_no_use_any_more(do: str) -> None:
    stage = Stage(grace_s=0.5, resume_s=0.5)
    if do == "suspend":
        stage.suspending.suspend([8], 1, stage.told.append)
    else:
        stage.suspending.resume([8], (), stage.told.append)
    stage.suspending.suspend([1], 20_000, stage.told.append)
    stage.until(2)
    assert "did not answer" in stage.told[0]["failed"]
    assert stage.told[0].get("stuck", False) is (do == "suspend")
    assert stage.told[1]["done"] == [1]
    stage.suspending.close()
    reap(stage)


def test_one_that_cannot_do_it_says_why() -> None:
    """Each who asks hears it."""
    stage = Stage('print(\'{"failed": "the driver speaks CUDA 12.4"}\')')
    stage.suspending.suspend([1], 1, stage.told.append)
    stage.until(1)
    assert stage.told[0]["failed"] == "the driver speaks CUDA 12.4"
    stage.suspending.close()
    reap(stage)


def test_one_that_is_not_there() -> None:
    """It is said like any other failure, and not from inside the question."""
    stage = Stage(program="/no/such/program")
    stage.suspending.suspend([1], 1, stage.told.append)
    assert not stage.told
    stage.until(1)
    assert "could not be started" in stage.told[0]["failed"]


def test_a_helper_that_cannot_be_watched_is_ended_and_the_next_question_starts_another(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed for ever, unheard: whatever it was asked from then on had no answer, and no end of its time either."""
    watch, there = stage.loop.watch, iter([False])

    def not_at_first(*args: Any) -> None:
        if not next(there, True):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        watch(*args)

    monkeypatch.setattr(stage.loop, "watch", not_at_first)
    before = open_now()
    stage.suspending.suspend([1], 1, stage.told.append)
    stage.until(1)
    assert stage.told[0]["failed"] == "its helper could not be started (Cannot allocate memory)"
    assert not left_of(open_now, before)
    stage.suspending.suspend([2], 1, stage.told.append)
    stage.until(2)
    assert stage.told[1]["done"] == [2]


def test_a_helper_that_cannot_be_started_leaves_no_descriptor_behind(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shortage of them became worse with each attempt."""
    pipe, there = os.pipe2, iter([True, False])

    def one_pipe(flags: int) -> tuple[int, int]:
        if next(there):
            return pipe(flags)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = open_now()
    monkeypatch.setattr(os, "pipe2", one_pipe)
    stage.suspending.suspend([1], 1, stage.told.append)
    stage.until(1)
    assert stage.told[0]["failed"] == "its helper could not be started (Too many open files)"
    assert not left_of(open_now, before)
