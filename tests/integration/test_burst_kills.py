"""The program of a burst and its office are killed; the same call from another process goes on where it stopped."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.jobs.leases import job_leases

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
CHUNKS = 150
KILLS = int(os.environ.get("SUBLET_BURST_KILLS", "3"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    ensure_office(folder, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    yield folder
    with sublet.connect(home=folder) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(folder.resolve()), ignore_errors=True)


def program(home: Path, log: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.integration.burst_program",
        str(home),
        "killed-burst",
        str(log),
        str(CHUNKS),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(log: Path) -> int:
    return len(log.read_text().splitlines())


def until_grown(log: Path, by: int, running: subprocess.Popen[str]) -> None:
    end_s, before = time.monotonic() + PATIENCE_S, lines(log)
    while lines(log) < before + by and running.poll() is None:
        assert time.monotonic() < end_s, "the burst does not go on"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_burst_goes_on_after_its_program_and_its_office_were_killed(home: Path, tmp_path: Path) -> None:
    """Chunks whose results were published are never executed again; the others at most once more for each kill."""
    seed = int(os.environ.get("SUBLET_SEED", "17"))
    print("seed", seed)
    chance = random.Random(seed)
    log = tmp_path / "log"
    log.touch()
    for kill in range(KILLS):
        running = program(home, log)
        try:
            until_grown(log, chance.randrange(10, 30), running)
            with sublet.connect(home=home) as fabric:
                office = fabric.status().pid
            running.kill()
            if kill % 2:
                os.kill(office, signal.SIGKILL)
        finally:
            running.kill()
            running.communicate()
    last = program(home, log)
    said, wrong = last.communicate(timeout=PATIENCE_S)
    assert last.returncode == 0, wrong
    done, succeeded, skipped, left = said.split()
    assert (done, int(succeeded) + int(skipped), left) == ("done", CHUNKS, "0")
    assert int(skipped) > 0
    ran = Counter(int(line.split()[0]) for line in log.read_text().splitlines())
    assert set(ran) == set(range(CHUNKS))
    assert max(ran.values()) <= KILLS + 1
    with sublet.connect(home=home) as fabric:
        assert job_leases(fabric, "killed-burst") == []
