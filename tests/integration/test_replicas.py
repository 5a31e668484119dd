"""Real programs on real folders: several at once, killed at any moment, stopped and continued past their lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.replicated import FolderReplica, ReplicaGroup, ReplicatedCheckpoint
from sublet.state.replicated.results import UNKNOWN
from sublet.values import Epoch

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0

Program = subprocess.Popen[str]


@pytest.fixture
def started() -> Iterator[list[Program]]:
    running: list[Program] = []
    yield running
    for program in running:
        if program.poll() is None:
            os.kill(program.pid, signal.SIGCONT)
            program.kill()
        program.wait(PATIENCE_S)
        assert program.stdout is not None
        program.stdout.close()


def start(running: list[Program], folder: Path, epoch: str) -> Program:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-W", "error", "-m", "tests.integration.replica_writer", str(folder), epoch]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    running.append(program)
    assert line(program) == "ready"
    return program


def line(program: Program) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def make(folder: Path) -> None:
    """The set, so that programs which come at once do not both make one."""
    ReplicaGroup([FolderReplica(folder / f"replica-{n}", log_bytes=1 << 15) for n in range(3)]).close()


def count_in(folder: Path) -> tuple[int, int]:
    """The version and the count, as the next lease finds them. It opens first: a writer that was killed may have left a
    save on one replica and promises on the others, and only a writer can decide what becomes of it."""
    with ReplicaGroup([FolderReplica(folder / f"replica-{n}") for n in range(3)]) as group:
        store = ReplicatedCheckpoint("count", schema="n.v1", replicas=group, epoch=Epoch(1, 2))
        store.open("n")
        found = store.load("n")
        assert group.verify() == {replica.identity: [] for replica in group.replicas()}
        return (found.version, int(found.data)) if found is not None else (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_programs_of_one_lease_count_together_and_are_killed(tmp_path: Path, started: list[Program]) -> None:
    """No count is lost, none is answered twice, and what was answered is there."""
    make(tmp_path)
    programs = [start(started, tmp_path, "1.1") for _ in range(3)]
    answered: list[int] = []
    unknown = 0

    def told(text: str) -> None:
        nonlocal unknown
        if text == UNKNOWN:
            unknown += 1
        else:
            answered.append(int(text))

    def told_rest(program: Program) -> None:
        """Of a killed one; its last line may be cut off."""
        assert program.stdout is not None
        for text in program.stdout.read().splitlines(keepends=True):
            if text.endswith("\n"):
                told(text.strip())

    for round_ in range(3):
        for program in programs:
            until = len(answered) + 4
            while len(answered) < until:
                told(line(program))
        victim = programs[round_]
        victim.kill()
        told_rest(victim)
        victim.wait(PATIENCE_S)
        programs[round_] = start(started, tmp_path, "1.1")
    for program in programs:
        program.kill()
        told_rest(program)
        program.wait(PATIENCE_S)
    version, count = count_in(tmp_path)
    assert len(set(answered)) == len(answered), "a count was answered to two programs"
    assert version == count >= max(answered)
    assert count - len(answered) <= 6 + unknown, "each kill may hide one answer, no more"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_zombie_is_refused(tmp_path: Path, started: list[Program]) -> None:
    """Stopped past its lease, then continued: its next save is StaleEpoch, and nothing of it is there."""
    make(tmp_path)
    zombie = start(started, tmp_path, "1.1")
    line(zombie)
    os.kill(zombie.pid, signal.SIGSTOP)
    heir = start(started, tmp_path, "1.2")
    counted = [int(line(heir)) for _ in range(5)]
    os.kill(zombie.pid, signal.SIGCONT)
    ended = time.monotonic() + PATIENCE_S
    last = line(zombie)
    while (last.isdigit() or last == UNKNOWN) and time.monotonic() < ended:
        last = line(zombie)
    # Whether the one that it was in the middle of is there may not be known any more, after so many of its heir's.
    assert last in ("StaleEpoch not_saved", f"StaleEpoch {UNKNOWN}")
    counted += [int(line(heir)) for _ in range(5)]
    assert counted == list(range(counted[0], counted[0] + 10))
