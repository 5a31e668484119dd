"""Programs that die, freeze, lose replicas and overlap, all from a seed: the weights stay those of an undisturbed run.

A life that is frozen is played by starting the next one in the middle of it: what is outside goes on as a zombie when
what is inside has ended. ``SUBLET_CRASH_ALL=1`` plays more; a failure names its seed.

Nobody else moves while a program rests from a conflict, so its rests are pretended: most of the time would go there.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Final

import pytest

import sublet.state.replicated.group
from sublet.errors import CheckpointFailed, LeaseEnded, StaleEpoch, VersionConflict
from sublet.replicated import MemoryReplica
from sublet.training import Act, Completed, Recovered
from tests.unit.training.stage import Killed, World, batch, uninterrupted

ALL: Final = os.environ.get("SUBLET_CRASH_ALL") == "1"
SEEDS: Final = 5
BLOCKS: Final = 80 if ALL else 1
LIVES: Final = 40 if ALL else 28
DEPTH: Final = 3
FAULTS: Final = ("silent", "deaf", "full")
EXPECTED: Final = (Killed, StaleEpoch, LeaseEnded, CheckpointFailed, VersionConflict)
"""How a life may end. Anything else is a failure of the test."""


class Story:
    """One world, from one seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World([MemoryReplica() for _ in range(3)])
        self.epoch = 0
        self.completed: Counter[int] = Counter()
        self.ends: Counter[str] = Counter()
        self.last = 0

    def life(self, depth: int = 1) -> None:
        """A program under a new lease: on from what is saved, to whatever ends it."""
        self.epoch += 1
        program = self.world.program(self.epoch, believes=self.chance.random() < 0.7, patience=0.1)

        def watch(act: Act) -> None:
            draw = self.chance.random()
            if draw < 0.02:
                raise Killed
            if draw < 0.05 and depth < DEPTH:
                self.world.end(program)
                self.life(depth + 1)
            elif draw < 0.08:
                self.fault()

        try:
            last = program.checkpoint.load(batch(0).checkpoint_name)
            done = 0 if last is None or last.effect is None else last.effect.step
            for step in range(max(done, 1), done + 4):
                outcome = program.step(step, watch=watch)
                self.ends[type(outcome).__name__] += 1
                self.completed[step] += type(outcome) is Completed
        except EXPECTED as end:
            self.ends[type(end).__name__] += 1
        finally:
            self.world.end(program)
            program.close()

    def fault(self) -> None:
        """One replica gets or loses a fault; now and then it is the second."""
        self.heal(self.chance.random() < 0.8)
        setattr(self.chance.choice(self.world.replicas), self.chance.choice(FAULTS), True)

    def heal(self, really: bool = True) -> None:
        for replica in self.world.replicas if really else ():
            for name in FAULTS:
                setattr(replica, name, False)

    def check(self) -> None:
        """Whole, never older, each step once."""
        self.heal()
        reader = self.world.program(1 << 30)
        found = reader.checkpoint.load(batch(0).checkpoint_name)
        reader.close()
        if found is None:
            assert self.last == 0
            return
        assert found.effect is not None
        assert found.version == found.effect.step >= self.last
        assert found.data == uninterrupted(found.version)
        assert max(self.completed.values(), default=0) <= 1, "a step was completed twice"
        self.last = found.version


class Rested:
    """A clock that whoever sleeps sets on."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        self._ahead_s += seconds


@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_is_interrupted_the_weights_are_those_of_an_undisturbed_run(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sublet.state.replicated.group, "time", Rested())
    ends: Counter[str] = Counter()
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        story = Story(seed)
        try:
            for _ in range(LIVES):
                story.life()
                story.check()
        except Exception as error:
            error.add_note(f"seed {seed}, epoch {story.epoch}")
            raise
        finally:
            story.world.close()
        ends += story.ends
    said = {kind.__name__ for kind in (Killed, StaleEpoch, CheckpointFailed, Completed, Recovered)} | {"Duplicate"}
    assert said <= set(ends), f"some ends were never seen: {ends}"
    assert "LeaseExpired" in ends
    assert ends["Killed"] > 2 * LIVES
