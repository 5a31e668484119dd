"""Several seeds are replayed at a time, and come to the same as one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

FIND = """
import os, sys
from sublet.simulate import find
find.processes_of = lambda seeds: int(sys.argv[1])
from sublet.cli import main
sys.exit(main([
    "simulate", "--sessions", "6", "--days", "1", "--gpus", "12", "--seeds", "3", "--find", "gpus",
    "--such-that", "start_within(1m) >= 0.8", "--json",
]))
"""
MANY = """
import os, sys, time
from sublet.errors import InvalidRequest
from sublet.simulate.results import Result
from sublet.simulate.find import SeedProcesses, processes_of

def run(gpus, seed, progress):
    progress(0.5)
    if gpus == 1 and seed == 2:
        time.sleep(600)  # of no use once another number is asked for
    if gpus == 2 and seed == 1:
        raise InvalidRequest("that is wrong")
    if gpus == 3:
        os._exit(7)
    return Result(gpus=gpus, cells=seed)

shown = []
seeds = SeedProcesses(run, [1, 2], lambda *what: shown.append(what), processes=2)
assert seeds.result(1, 1).cells == 1
late = [process.pid for _, process in seeds._running.values()]
for gpus, error in ((2, InvalidRequest), (3, RuntimeError)):
    try:
        seeds.result(gpus, 1)
    except error as said:
        print(said)
assert [seeds.result(4, seed).cells for seed in (1, 2)] == [1, 2]
assert shown[-1] == (4, 2, 1.0), shown
assert len(late) == 1 and not os.path.exists(f"/proc/{late[0]}")
seeds.close()
assert processes_of([1, 2]) == min(2, len(os.sched_getaffinity(0))) and processes_of([1]) == 1
"""


def ran(program: str, *words: str) -> str:
    """In a process of its own: this one has threads, and does not fork."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, *words], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_number_is_found_with_several_processes_as_with_one() -> None:
    found: list[dict[str, Any]] = [json.loads(ran(FIND, processes))["find"] for processes in ("1", "3")]
    assert found[0] == found[1]
    assert len(found[0]["points"]) > 3


@pytest.mark.slow
def test_replays_of_another_number_are_killed_and_errors_are_raised() -> None:
    assert ran(MANY) == "that is wrong\nthe replay of seed 1 ended with code 7\n"
