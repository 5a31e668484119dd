"""A training loop of PyTorch's, killed at lines of Sublet's all over a step: the weights stay those of an undisturbed
run, to the last bit.

``SUBLET_CRASH_ALL=1`` kills a thousand times instead of fifteen; ``SUBLET_CRASH_SEED`` draws other lines.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.state.checkpoints.store import FolderStore

pytestmark = pytest.mark.needs("torch")

ROOT: Final = Path(__file__).parents[2]
ALL: Final = os.environ.get("SUBLET_CRASH_ALL") == "1"
SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "57"))
KILLS: Final = 100 if ALL else 15
BLOCKS: Final = 10 if ALL else 1
"""Each has its own lines, and begins anew."""
LIVES_MAX: Final = 20 * KILLS
FAR: Final = 1 << 30


@pytest.fixture(scope="module")
def live() -> Iterator[Callable[..., int]]:
    """Runs one life; its exit status."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.trainer_program"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        asks, says = process.stdin, process.stdout

        def once(**life: Any) -> int:
            asks.write(json.dumps(life) + "\n")
            asks.flush()
            return int(says.readline())

        yield once
        process.kill()  # it has nothing to tidy up, and would take seconds to do so


def steps_saved(place: Path) -> int:
    """Of the newest checkpoint, whose every byte is looked at."""
    store = FolderStore(place)
    if not store.newest():
        return 0
    with store.open() as checkpoint:
        return int(checkpoint.load("value")["account"]["steps"])


@pytest.mark.timeout(900 if ALL else 300)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_line_it_is_killed_at_the_weights_are_those_of_an_undisturbed_run(
    live: Callable[..., int], tmp_path: Path, block: int
) -> None:
    """What is saved is never older than it was, and whole; and it gets somewhere."""
    chance, before = random.Random(SEED + block), 0
    listing = tmp_path / "lines"
    assert live(place=str(tmp_path / "lines-of"), steps=5, seed=0, waits=True, list_lines=str(listing)) == 0
    count, *lines = listing.read_text().splitlines()
    assert len(lines) > 200, "a step consists of more than that"
    place = tmp_path / "killed"
    kills = 0
    for seed in range(LIVES_MAX):
        waits = chance.random() < 0.6
        at = chance.randrange(1, int(count) * (1 if waits else 3))  # what trains on meanwhile is quicker than the disk
        status = live(place=str(place), steps=FAR, seed=seed, waits=waits, kill_at=at)
        assert status == -signal.SIGKILL, f"life {seed}, line {at}, SUBLET_CRASH_SEED={SEED}"
        saved = steps_saved(place)
        assert saved >= before, f"life {seed}, line {at}, SUBLET_CRASH_SEED={SEED}"
        before, kills = saved, kills + 1
        if kills == KILLS:
            break
    assert before > KILLS // 5, "it never got anywhere"
    steps = before + 3
    assert live(place=str(place), steps=steps, seed=7) == 0
    assert live(place=str(tmp_path / "alone"), steps=steps, seed=3) == 0
    assert (place / "weights").read_text() == (tmp_path / "alone" / "weights").read_text()
