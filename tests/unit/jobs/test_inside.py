"""One chunk in a worker: what becomes of what its function returns, raises or leaves behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sublet.errors import LeaseInterrupt, RemoteError, Unpicklable
from sublet.jobs import inside
from sublet.jobs.inside import Raised, Task, error_of, load_result
from sublet.lease_end import EndReason, LeaseEnd


class TwoWords(Exception):
    """One that cannot be made of what it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def counts(item: int) -> Iterator[int]:
    yield item


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LeaseInterrupt(LeaseEnd(reason=EndReason.PREEMPTED, at=""))])
def test_an_interrupt_is_no_outcome_of_a_chunk(error: BaseException) -> None:
    """It is meant for the worker, which tells how many chunks it has begun."""

    def interrupts(item: int) -> None:
        raise error

    with pytest.raises(type(error)):
        Task(interrupts)(1)


def test_an_exit_is_an_outcome_of_its_chunk() -> None:
    said = Task(sys.exit)(3)
    assert isinstance(said, Raised)
    assert isinstance(error_of(said), SystemExit)


def test_an_error_that_cannot_be_read_travels_as_its_text() -> None:
    """Where it is raised again its class would have to be made anew."""

    def fails(item: int) -> None:
        raise TwoWords("no", "luck")

    said = Task(fails)(1)
    assert isinstance(said, Raised)
    assert said.pickled is None
    error = error_of(said)
    assert isinstance(error, RemoteError)
    assert "TwoWords: no luck" in str(error)
    assert "In the worker" in error.__notes__[0]


def test_a_generator_is_no_result() -> None:
    said = Task(counts)(1)
    assert isinstance(said, Raised)
    error = error_of(said)
    assert isinstance(error, Unpicklable)
    assert "a generator cannot be the result of a chunk" in str(error)


def test_a_result_of_a_class_of_the_main_program_travels_with_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's main program is another one."""
    thing = type("Thing", (), {"__module__": "__main__", "value": 7})
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "Thing", thing, raising=False)
        said = Task(lambda item: thing())(1)
    assert isinstance(said, bytes)
    assert load_result(said).value == 7


@pytest.mark.parametrize("raises", [True, False])
def test_a_chunk_that_has_changed_the_folder_leaves_the_next_one_where_it_was(
    raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it raised. The worker is told by a hook when the folder is changed."""
    monkeypatch.chdir(tmp_path)
    here = os.open(".", os.O_RDONLY)
    left: set[str] = set()
    monkeypatch.setattr(inside, "_folder", [here])
    monkeypatch.setattr(inside, "_left", left)

    def goes(item: int) -> None:
        os.chdir("/")
        left.add("folder")
        if raises:
            raise ValueError(item)

    try:
        said = Task(goes)(1)
    finally:
        os.close(here)
    assert isinstance(said, Raised) is raises
    assert Path.cwd() == tmp_path
    assert not left


def test_a_result_is_a_pickle_of_what_was_returned() -> None:
    said = Task(lambda first, second: SimpleNamespace(sum=first + second), spread=True)((1, 2))
    assert isinstance(said, bytes)
    assert load_result(said).sum == 3
