"""Kill the studio's databases, or fail them, at every system call that writes; then look at what the next one finds.

After each point what was answered is there, and of the step that was under way all or nothing; the next studio goes on;
an upgrade is whole or not begun; and a failure leaves no half-made file.

A sample with each fault of each call runs with the suite; ``SUBLET_CRASH_ALL=1`` runs every point,
``SUBLET_CRASH_SEED`` draws another sample.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from sublet.errors import SubletError
from tests.crash import studio_program as program
from tests.crash.journal_program import Diary
from tests.crash.points import ALL, KILLS, Point, Zygote, lay_out, zygote

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.needs("tracer")]

SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20262"))
PROGRESS_POINTS: Final = 100
"""It is said after each so many points; `pytest -s` shows it while it runs."""
SAMPLE: Final = {"begin": 30, "sessions": 30, "persons": 30, "upgrade": 30}
"""At least so many points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Where a story starts, and what it makes of it when nothing goes wrong."""

    start: Path
    books: list[str]
    """Before it and after each step."""
    points: list[Point]


@pytest.fixture(scope="module")
def runner() -> Iterator[Zygote]:
    with zygote("tests.crash.studio_program") as running:
        yield running


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "place"


@pytest.fixture(scope="module")
def stories(runner: Zygote, place: Path) -> dict[str, Story]:
    """Each story, with every one of its crash points."""
    found: dict[str, Story] = {}
    home = place / "home"
    for name, story in program.STORIES.items():
        start = place.parent / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700)
        if name != "begin":
            program.begin(home, lambda _: None)
        if name == "upgrade":
            program.before_upgrade(home)
        shutil.copytree(place, start)
        books = [] if name == "upgrade" else [program.books(home)]
        story(home, lambda _, books=books: books.append(program.books(home)))  # type: ignore[misc]
        lay_out(start, place)
        if name == "upgrade":  # what people see of a database does not change with it
            books.insert(0, program.books(home))
            lay_out(start, place)
        found[name] = Story(start=start, books=books, points=runner.points(name, place))
    return found


@pytest.mark.timeout(7200 if ALL else 600)
@pytest.mark.parametrize("name", SAMPLE)
def test_after_any_kill_or_failed_write_what_was_answered_is_there(
    name: str, runner: Zygote, stories: dict[str, Story], place: Path
) -> None:
    story = stories[name]
    chosen = story.points if ALL else sample(story.points, SAMPLE[name])
    for number, point in enumerate(sorted(chosen)):
        if number and not number % PROGRESS_POINTS:
            print(f"{name}: {number} of {len(chosen)} points")
        lay_out(story.start, place)
        status = runner.run_point(point, place)
        try:
            judge(story, point, status, place)
        except (AssertionError, SubletError) as error:
            raise AssertionError(f"{point} (SUBLET_CRASH_SEED={SEED}): {error}") from error
    print(f"{name}: {len(chosen)} of {len(story.points)} points")


def sample(points: list[Point], least: int) -> list[Point]:
    """One of each fault of each system call, and so many at least."""
    drawn = random.Random(SEED).sample(points, len(points))
    of_each = {(point.call, point.fault): point for point in reversed(drawn)}
    return list(dict.fromkeys((*of_each.values(), *drawn)))[: max(least, len(of_each))]


def judge(story: Story, point: Point, status: int, place: Path) -> None:
    home = place / "home"
    answered = len(Diary.read(place / "diary"))
    if point.fault not in KILLS and point.call != "unlink":
        assert not [path.name for path in home.rglob("*~*")], "a failure leaves nothing half-made"
    home.mkdir(mode=0o700, exist_ok=True)
    books = program.books(home)
    allowed = story.books[answered : answered + 2] if status else story.books[-1:]
    assert books in allowed, f"after {answered} answered steps the books are those of none of {len(allowed)}"
    assert all(path.stat().st_mode & 0o077 == 0 for path in home.rglob("*")), "they are its owner's alone"
    go_on(home)


def go_on(home: Path) -> None:
    """The next studio writes, and what it wrote is there."""
    noted: list[object] = []
    days = program.Days(home, noted.append, "next")
    token = days.person("last")
    again = program.Days(home, noted.append, "next")
    assert again.people.of_token(token).person.name == "last"
    assert again.store.read(0) == days.store.read(0)
