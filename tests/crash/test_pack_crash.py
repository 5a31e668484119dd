"""Kill a save, or fail it, at every system call that writes; then look at what the next program finds.

After each point:

- what was answered is there: the newest checkpoint is the last that was saved, or the one after it;
- every checkpoint that can be found is exactly what its number says, never a mix, and ``verify`` finds nothing;
- an error was raised where a write failed, unless everything that was answered is there;
- the next program saves, collects and is whole again, and nothing stays that nobody needs.

One point of each kind runs with the suite, and a few pairs; ``SUBLET_CRASH_ALL=1`` runs every point and a thousand
pairs, ``SUBLET_CRASH_SEED`` draws others.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.state.checkpoints.store import FolderStore, collect, verify
from sublet.state.checkpoints.writer import PACKS_MAX
from tests.crash import pack_program as program
from tests.crash.journal_program import Diary
from tests.crash.points import ALL, Judged, Point, Zygote, each_kind, lay_out, zygote

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.needs("tracer")]

SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20262"))
SAMPLE_TWICE: Final = 20


@pytest.fixture(scope="module")
def runner() -> Iterator[Zygote]:
    with zygote("tests.crash.pack_program") as running:
        yield running


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """In memory if possible: a kill loses nothing that was written, so only the calls count."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "place"


@pytest.fixture(scope="module")
def starts(place: Path) -> dict[str, Path]:
    """Each story's folder as it is before it."""
    found = {}
    for name in program.STORIES:
        found[name] = place.parent / name
        found[name].mkdir()
        program.prepare(name, found[name] / "home")
    return found


@pytest.fixture(scope="module")
def points(runner: Zygote, starts: dict[str, Path], place: Path) -> dict[str, list[Point]]:
    found = {}
    for name in program.STORIES:
        lay_out(starts[name], place)
        found[name] = runner.points(name, place)
    return found


@pytest.mark.parametrize("name", program.STORIES)
def test_after_any_kill_or_failed_write_the_checkpoints_are_right(
    name: str, runner: Zygote, starts: dict[str, Path], points: dict[str, list[Point]], place: Path
) -> None:
    """One run per point, judged by everything in the head of this file."""
    before, judged = newest_at(starts[name]), Judged()
    for point in each_kind(points[name], SEED):
        lay_out(starts[name], place)
        status = runner.run_point(point, place)
        if judged.met(place, status):
            continue
        try:
            judge(place, before, status)
        except AssertionError as error:
            raise AssertionError(f"{point}: {error}") from error
    print(f"{name}: {judged}")


def test_a_second_kill_while_the_next_program_mends_changes_nothing(
    runner: Zygote, starts: dict[str, Path], points: dict[str, list[Point]], place: Path
) -> None:
    chance = random.Random(SEED)
    kills = {name: [point for point in points[name] if point.fault == "kill"] for name in program.STORIES}
    before = newest_at(starts["many"])
    for _ in range(1000 if ALL else SAMPLE_TWICE):
        first, second = chance.choice(kills["many"]), chance.choice(kills["after"])
        lay_out(starts["many"], place)
        runner.run_point(first, place)
        saved = answered(place, before)
        (place / "diary").unlink()
        status = runner.run("after", place, second.spoil()).status
        assert status in (0, -9)
        try:
            judge(place, saved, status, at_most_more=2)
        except AssertionError as error:
            raise AssertionError(f"{first}, then {second} (SUBLET_CRASH_SEED={SEED}): {error}") from error


def newest_at(start: Path) -> int:
    """The start is not changed by looking at it."""
    return FolderStore(start / "home", create=False).newest() if (start / "home").exists() else 0


def answered(place: Path, before: int) -> int:
    return max([before, *(int(str(note["saved"])) for note in Diary.read(place / "diary"))])


def judge(place: Path, before: int, status: int, *, at_most_more: int = 1) -> None:
    home = place / "home"
    saved = answered(place, before)
    store = FolderStore(home)
    newest = store.newest()
    more = 0 if status == 0 else at_most_more
    assert saved <= newest <= saved + more, f"checkpoint {saved} was answered, the newest is {newest}"
    look(store)
    program.save(home, lambda _: None, 2)
    assert store.newest() == newest + 2
    look(store)
    collect(store, keep=program.KEEP)
    needed = {ref.name.hex() + ".pack" for number in store.numbers() for ref in store.manifest(number).packs}
    assert set(os.listdir(store.packs)) == needed, "there are packs that nobody needs"
    assert os.listdir(store.staging) == []
    assert len(store.numbers()) <= program.KEEP
    assert len(store.manifest().packs) <= PACKS_MAX + 1


def look(store: FolderStore) -> None:
    """Everything that can be found is whole and is what it says."""
    if not store.numbers():
        return
    verdict = verify(store.folder)
    assert verdict.ok, verdict.problems
    for number in store.numbers():
        with store.open(number) as checkpoint:
            assert checkpoint.load("value") == program.state_at(number), f"checkpoint {number} is another state"
