"""Kill a folder replica, or fail it, at every system call that writes; then look at what the next program finds.

After each point what was answered is there, and of the request that was under way all or nothing; or the replica says
that it is faulty, which only a failed sync may bring about. A second program that had it open sees the same. Nothing
half made is left that the next writer does not clear away.

A sample runs with the suite; ``SUBLET_CRASH_ALL=1`` runs every point, ``SUBLET_CRASH_SEED`` draws another sample.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.replicated.ballot import Stamp
from sublet.replicated.cell import Accept, Accepted, Cell, Took
from sublet.replicated.replica import ReplicaFaulty
from tests.crash import replica_program as program
from tests.crash.journal_program import REFUSED, Diary
from tests.crash.points import Point, Zygote, zygote

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.needs("strace")]

ALL: Final = os.environ.get("SUBLET_CRASH_ALL") == "1"
SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20262"))
SAMPLE: Final = {"begin": 60, "put": 120, "fill": 80}
SHORT: Final = "retval=1"


@pytest.fixture(scope="module")
def runner() -> Iterator[Zygote]:
    with zygote("tests.crash.replica_program") as running:
        yield running


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "place"


def set_out(name: str, place: Path) -> None:
    """The folder as it is before a story. A copy would not vote, so each run makes it anew."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if name != "begin":
        program.begin(place / "home", lambda _: None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", program.STORIES)
def test_after_any_kill_or_failed_write_what_was_answered_is_there(name: str, runner: Zygote, place: Path) -> None:
    """One run per point."""
    set_out(name, place)
    points = [p for p in runner.points(name, place) if p.call not in ("mkdir", "mkdirat")]
    told = cells_in(place)
    chosen = points if ALL else sorted(random.Random(SEED).sample(points, min(SAMPLE[name], len(points))))
    for point in chosen:
        set_out(name, place)
        status = runner.run_point(point, place)
        try:
            judge(point, status, told, place)
        except AssertionError as error:
            raise AssertionError(f"{point} (SUBLET_CRASH_SEED={SEED}): {error}") from error
    print(f"{name}: {len(chosen)} of {len(points)} points")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["put", "fill"])
def test_a_write_that_is_cut_short_is_finished(name: str, runner: Zygote, place: Path) -> None:
    """The system may take a part and say so; strace lets it take nothing and say that it took one byte, so what is
    written is wrong, and must be noticed, or was written again whole."""
    set_out(name, place)
    count = sum(p.call == "pwrite64" for p in runner.points(name, place, faults=("kill",)))
    told = cells_in(place)
    for n in range(1, count + 1):
        set_out(name, place)
        status = runner.run(name, place, trace="pwrite64", inject=("-e", f"inject=pwrite64:{SHORT}:when={n}"))
        assert status in (0, REFUSED, 1)
        try:
            replica = program.opened(place / "home")
        except ReplicaFaulty:
            continue
        found = {key: program.cell_of(replica, key) for key in program.KEYS}
        replica.close()
        assert found in told, f"the {n}th write"


def cells_in(place: Path) -> list[dict[str, Cell]]:
    """What was answered, in order."""
    return [
        {key: Cell.unpack(bytes.fromhex(str(text))) for key, text in note.items()}
        for note in Diary.read(place / "diary")
    ]


def judge(point: Point, status: int, told: list[dict[str, Cell]], place: Path) -> None:
    answered = len(cells_in(place))
    home = place / "home"
    try:
        replica = program.opened(home)
    except ReplicaFaulty:
        assert point.fault != "kill"
        assert point.call in ("fdatasync", "fsync"), "only a failed sync makes it faulty"
        return
    allowed = told[max(answered - 1, 0) : answered + 1]
    found = {key: program.cell_of(replica, key) for key in program.KEYS}
    assert found in allowed or (status == 0 and found == told[-1]), f"{answered} answered, found {found}"
    assert replica.verify() == []
    # And it goes on: the next writer is not disturbed by what is left.
    last = Accepted(Stamp(program.ballot(99), 0), b"after")
    assert replica.ask([("a", Accept(1, last))]) == [Took()]
    replica.close()
    again = program.opened(home)
    assert program.cell_of(again, "a").accepted == last
    again.close()
    left = [p.name for p in home.glob("*") if p.name not in ("log", "lock", "packs")]
    assert left in ([], ["log.new"]), left
