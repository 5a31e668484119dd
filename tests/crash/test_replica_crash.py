"""Kill a folder replica, or fail it, at every system call that writes; then look at what the next program finds.

After each point what was answered is there, and of the request that was under way all or nothing; or the replica says
that it is faulty, which only a failed sync may bring about. A second program that had it open sees the same. Nothing
half made is left that the next writer does not clear away.

A write that is cut short is finished. One that a kill tears ends between two sectors, as on a disk: the log's format
counts on that.

One point of each kind runs with the suite; ``SUBLET_CRASH_ALL=1`` runs every point, ``SUBLET_CRASH_SEED`` draws others.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.state.replicated.ballot import WriteStamp
from sublet.state.replicated.cell import Accept, AcceptedWrite, ReplicaCell, Took
from sublet.state.replicated.folder_format import SECTOR
from sublet.state.replicated.replica import ReplicaFaulty
from tests.crash import replica_program as program
from tests.crash.journal_program import Diary
from tests.crash.points import KILLS, Point, Zygote, each_kind, zygote

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.needs("tracer")]

SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20269"))


@pytest.fixture(scope="module")
def runner() -> Iterator[Zygote]:
    with zygote("tests.crash.replica_program", grain=SECTOR) as running:
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
    set_out(name, place)
    points = runner.points(name, place)
    told = cells_in(place)
    chosen = each_kind(points, SEED)
    for point in chosen:
        set_out(name, place)
        status = runner.run_point(point, place)
        try:
            judge(point, status, told, place)
        except AssertionError as error:
            raise AssertionError(f"{point}: {error}") from error
    print(f"{name}: {len(chosen)} of {len(points)} points")


def cells_in(place: Path) -> list[dict[str, ReplicaCell]]:
    """What was answered, in order."""
    return [
        {key: ReplicaCell.unpack(bytes.fromhex(str(text))) for key, text in note.items()}
        for note in Diary.read(place / "diary")
    ]


def judge(point: Point, status: int, told: list[dict[str, ReplicaCell]], place: Path) -> None:
    answered = len(cells_in(place))
    home = place / "home"
    try:
        replica = program.opened(home)
    except ReplicaFaulty:
        assert point.fault not in KILLS
        assert point.call in ("fdatasync", "fsync"), "only a failed sync makes it faulty"
        return
    allowed = told[max(answered - 1, 0) : answered + 1]
    found = {key: program.cell_of(replica, key) for key in program.KEYS}
    assert found in allowed or (status == 0 and found == told[-1]), f"{answered} answered, found {found}"
    assert replica.verify() == []
    # And it goes on: the next writer is not disturbed by what is left.
    last = AcceptedWrite(WriteStamp(program.ballot(99), 0), b"after")
    assert replica.ask([("a", Accept(1, last))]) == [Took()]
    replica.close()
    again = program.opened(home)
    assert program.cell_of(again, "a").accepted == last
    again.close()
    left = [p.name for p in home.glob("*") if p.name not in ("log", "lock", "packs")]
    assert left in ([], ["log.new"]), left
