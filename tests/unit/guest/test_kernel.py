"""What a cell's second process leaves with, and that it waits on nothing of the first."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.guest.kernel import end_with_the_cell, status_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (ValueError("it"), 1),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit(259), 3),
        (SystemExit("a word"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_it_leaves_with_how_its_cell_ended(error: BaseException | None, status: int) -> None:
    assert status_of(SimpleNamespace(error_in_exec=error, error_before_exec=None)) == status


def test_a_cell_that_could_not_begin_or_has_no_result_went_wrong() -> None:
    assert status_of(SimpleNamespace(error_in_exec=None, error_before_exec=SyntaxError())) == 1
    assert status_of(None) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_waking_is_for_the_first_alone() -> None:
    """The second's loop runs, and leaves what wakes the first where it is."""
    if not (child := os.fork()):  # so that what is registered for forks is gone with it
        os._exit(_first())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0


def _first() -> int:
    loop, told = asyncio.new_event_loop(), dict[str, Any]()
    shell = SimpleNamespace(events=SimpleNamespace(register=told.__setitem__))
    end_with_the_cell(shell, loop)
    told["post_run_cell"](None)  # here nothing ends
    loop.call_soon_threadsafe(lambda: None)  # from now on there is a byte to be read
    if not (child := os.fork()):
        loop.run_until_complete(asyncio.sleep(0))
        told["post_run_cell"](SimpleNamespace(error_in_exec=SystemExit(7), error_before_exec=None))
        os._exit(8)
    left = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return int(left != 7) + 2 * int(not loop._selector.select(0))  # type: ignore[attr-defined]
