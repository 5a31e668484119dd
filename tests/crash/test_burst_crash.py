"""Kill a publication of results, or fail it, at every system call that writes; then look at what is found.

After each point: what was published is there, results and the coordinator's state are of one publication, no result is
another than was put, and the next program publishes on.

One point of each kind runs with the suite; ``SUBLET_CRASH_ALL=1`` runs every point, ``SUBLET_CRASH_SEED`` draws others.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.crash import burst_program as program
from tests.crash.journal_program import Diary
from tests.crash.points import Judged, Point, Zygote, each_kind, lay_out, zygote

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.needs("tracer")]

SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20268"))


@pytest.fixture(scope="module")
def runner() -> Iterator[Zygote]:
    with zygote("tests.crash.burst_program") as running:
        yield running


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """In memory if possible: a kill loses nothing that was written, so only the calls count."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "place"


@pytest.mark.parametrize("name", program.STORIES)
def test_after_any_kill_or_failed_write_the_results_are_right(name: str, runner: Zygote, place: Path) -> None:
    start = place.parent / name
    start.mkdir()
    program.prepare(name, start / "home")
    before = program.found_in(start / "home")[0] if name == "after" else 0
    lay_out(start, place)
    points: list[Point] = runner.points(name, place)
    judged = Judged()
    for point in each_kind(points, SEED):
        lay_out(start, place)
        status = runner.run_point(point, place)
        if judged.met(place, status):
            continue
        try:
            judge(place, before, status)
        except AssertionError as error:
            raise AssertionError(f"{point}: {error}") from error
    assert len(points) > 50
    print(f"{name}: {judged}")


def judge(place: Path, before: int, status: int) -> None:
    home = place / "home"
    answered = max([before, *(int(str(note["published"])) for note in Diary.read(place / "diary"))])
    number, results = program.found_in(home)
    assert answered <= number <= answered + (status != 0), f"{answered} was answered, {number} is there"
    assert results == everything(number), "results and state are of different publications"
    program.publish(home, lambda _: None, 1)
    assert program.found_in(home) == (number + 1, everything(number + 1))


def everything(number: int) -> dict[object, bytes]:
    return {chunk: data for n in range(1, number + 1) for chunk, data in program.results_of(n).items()}
