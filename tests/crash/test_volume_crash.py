"""Kill the supervisor's work on a volume, or fail it, at every system call that writes; then look at what the next
finds.

After each point:

- what was answered is there: the newest checkpoint is the last that was published, or the one after it;
- every checkpoint that can be found is exactly what its number says, and ``verify`` finds nothing;
- the next supervisor knows the folder as what it is (kept, in use, being removed), and the next holder takes it, saves,
  collects, and nothing stays that nobody needs;
- a volume whose removal began is never taken for one again, and goes.

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

from sublet.node.storage.stores_work import KEPT, NOTE, REMOVING, make_blocks, put_away
from sublet.node.storage.volume_folder import collect
from sublet.state.checkpoints.store import FolderStore, verify
from sublet.values import Epoch
from sublet.wire.volumes import Collect
from tests.crash import volume_program as program
from tests.crash.journal_program import Diary
from tests.crash.points import ALL, Judged, Point, Zygote, each_kind, lay_out, zygote

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.needs("tracer")]

SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20265"))
SAMPLE_TWICE: Final = 5


@pytest.fixture(scope="module")
def runner() -> Iterator[Zygote]:
    with zygote("tests.crash.volume_program") as running:
        yield running


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """In memory if possible: a kill loses nothing that was written, so only the calls count."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        program.prepare(Path(folder) / "start" / "home")
        yield Path(folder) / "place"


@pytest.fixture(scope="module")
def points(runner: Zygote, place: Path) -> dict[str, list[Point]]:
    found = {}
    for name in program.STORIES:
        set_out(place)
        found[name] = runner.points(name, place)
    return found


def set_out(place: Path) -> None:
    lay_out(place.parent / "start", place)


def open_up(home: Path) -> None:
    """What is kept is read-only."""
    if (home / "0").exists():
        (home / "0").chmod(0o700)


@pytest.mark.parametrize("name", ["saves", "copies"])
def test_after_any_kill_or_failed_write_the_checkpoints_are_right(
    name: str, runner: Zygote, points: dict[str, list[Point]], place: Path
) -> None:
    judged = Judged()
    for point in each_kind(points[name], SEED):
        set_out(place)
        status = runner.run_point(point, place)
        if judged.met(place, status):
            continue
        try:
            judge(place, 3, status)
        except AssertionError as error:
            raise AssertionError(f"{point}: {error}") from error
    print(f"{name}: {judged}")


def test_a_removal_goes_on_wherever_it_broke_off(runner: Zygote, points: dict[str, list[Point]], place: Path) -> None:
    """Kept and whole until it begins; from then on nothing that anybody is given."""
    judged = Judged()
    for point in each_kind(points["removes"], SEED):
        set_out(place)
        runner.run_point(point, place)
        home = place / "home"
        if judged.met(place):
            continue
        if (home / KEPT).exists():
            open_up(home)
            assert newest_of(home) == 3, str(point)
            look(home)
        elif home.exists() and os.listdir(home):
            assert (home / REMOVING).exists(), f"{point}: {os.listdir(home)}"
        assert put_away(str(home), keep=False) == "", str(point)
        assert not home.exists()
    print(f"removes: {judged}")


def test_a_second_kill_while_the_next_goes_on_changes_nothing(
    runner: Zygote, points: dict[str, list[Point]], place: Path
) -> None:
    chance = random.Random(SEED)
    kills = [point for point in points["saves"] if point.fault == "kill"]
    for _ in range(1000 if ALL else SAMPLE_TWICE):
        first, second = chance.choice(kills), chance.choice(kills)
        set_out(place)
        runner.run_point(first, place)
        saved = answered(place, 3)
        recover(place / "home")
        (place / "diary").unlink()
        status = runner.run("saves", place, second.spoil()).status
        assert status in (0, -9), f"{first}, then {second}"
        try:
            judge(place, saved, status, at_most_more=2)
        except AssertionError as error:
            raise AssertionError(f"{first}, then {second} (SUBLET_CRASH_SEED={SEED}): {error}") from error


def answered(place: Path, before: int) -> int:
    return max([before, *(int(str(note["saved"])) for note in Diary.read(place / "diary") if "saved" in note)])


def recover(home: Path) -> None:
    """What the next supervisor does with a folder that is not kept: it is put away."""
    assert (home / KEPT).exists() or (home / NOTE).exists()
    if not (home / KEPT).exists():
        assert put_away(str(home), keep=True) == ""
    assert (home / KEPT).exists()


def judge(place: Path, before: int, status: int, *, at_most_more: int = 1) -> None:
    home = place / "home"
    saved = answered(place, before)
    kept = any("kept" in note for note in Diary.read(place / "diary"))
    recover(home)
    if kept:
        assert not (home / "0").stat().st_mode & 0o222
    open_up(home)
    more = 0 if status == 0 else at_most_more
    assert saved <= newest_of(home) <= saved + more, f"checkpoint {saved} was answered, the newest is {newest_of(home)}"
    look(home)
    epoch = Epoch(1, 20)
    newest = newest_of(home)
    assert not make_blocks(str(home), program.note_of(epoch), None).refused
    program.save(home, lambda _: None, epoch, 1)
    assert newest_of(home) == newest + 1
    look(home)
    collect(program.place_of(home), Collect(lease=program.A, epoch=epoch, keep=program.KEEP))
    store = FolderStore(home / "0", create=False)
    needed = {ref.name.hex() + ".pack" for number in store.numbers() for ref in store.manifest(number).packs}
    assert set(os.listdir(store.packs)) == needed, "there are packs that nobody needs"
    assert {store.manifest_path(number).name for number in store.numbers()} == set(os.listdir(store.checkpoints))
    assert os.listdir(store.staging) == [str(epoch)], "what earlier epochs staged is there still"


def newest_of(home: Path) -> int:
    return FolderStore(home / "0", create=False).newest()


def look(home: Path) -> None:
    """Everything that can be found is whole and is what it says."""
    store = FolderStore(home / "0", create=False)
    verdict = verify(store.folder)
    assert verdict.ok, verdict.problems
    for number in store.numbers():
        with store.open(number) as checkpoint:
            assert checkpoint.load("value") == program.state_at(number), f"checkpoint {number} is another state"
