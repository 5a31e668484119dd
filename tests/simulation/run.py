"""Runs seeds, on as many cores as there are, and says what came of them."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from sublet.lease.states import LeaseStatus
from tests.simulation.mutants import MUTANTS, switched_on
from tests.simulation.once import swept_afterwards
from tests.simulation.rules import RULES
from tests.simulation.scenario import Mode
from tests.simulation.watch import Violation
from tests.simulation.world import World

MODES: Final[tuple[Mode, ...]] = ("safety", "liveness")
CHUNK: Final = 10
"""Seeds that one process takes at a time."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed in which a rule was broken."""

    seed: int
    mode: Mode
    rule: str
    text: str
    mutant: str | None = None

    @property
    def repeat(self) -> str:
        """The command that shows it again."""
        mutant = f" --mutant {self.mutant}" if self.mutant else ""
        return f"python -m tests.simulation --mode {self.mode} --from {self.seed} --seeds 1{mutant}"

    def __str__(self) -> str:
        return (
            f"seed {self.seed} ({self.mode}): {self.rule}: {self.text}\n"
            f"  rule:  {RULES[self.rule]}\n  again: {self.repeat}"
        )


@dataclass(slots=True)
class Tally:
    """What seeds came to."""

    seeds: int = 0
    steps: int = 0
    simulated_s: float = 0
    wall_s: float = 0
    failures: list[Failure] = field(default_factory=list)
    met: Counter[tuple[str, LeaseStatus]] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Take another's seeds in."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.simulated_s += other.simulated_s
        self.failures += other.failures
        self.met += other.met
        self.seen += other.seen


def run_seed(seed: int, mode: Mode, mutant: str | None = None) -> Tally:
    """One seed, to its end or to the first broken rule."""
    tally = Tally(seeds=1)
    with switched_on(mutant), swept_afterwards():
        world = World(seed, mode)
        try:
            world.run()
        except Violation as violation:
            tally.failures.append(Failure(seed, mode, violation.rule, violation.text, mutant))
        except Exception as error:
            text = f"{type(error).__name__}: {error} [at {world.now / 1e9:.3f} s]"
            tally.failures.append(Failure(seed, mode, "error", text, mutant))
    tally.steps = world.steps
    tally.simulated_s = world.now / 1e9
    tally.met, tally.seen = world.coverage.met, world.coverage.seen
    return tally


def run_many(
    seeds: Iterable[int], modes: Iterable[Mode] = MODES, *, processes: int | None = None, mutant: str | None = None
) -> Tally:
    """All these seeds; the modes take turns with their numbers."""
    began = time.monotonic()
    modes = tuple(modes)
    work = [(seed, modes[seed % len(modes)], mutant) for seed in seeds]
    total = Tally()
    for tally in _done(work, processes):
        total.add(tally)
    total.wall_s = time.monotonic() - began
    return total


def _done(work: list[tuple[int, Mode, str | None]], processes: int | None) -> Iterator[Tally]:
    if processes == 1 or len(work) <= CHUNK:
        yield from map(_one, work)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_one, work, chunksize=CHUNK)


def _one(item: tuple[int, Mode, str | None]) -> Tally:
    return run_seed(*item)


@dataclass(frozen=True, slots=True)
class Catch:
    """How a mutant fared."""

    seeds: int
    """Seeds it took, or that were tried in vain."""
    failure: Failure | None


def hunt(seeds: int, *, names: Iterable[str] = tuple(MUTANTS), processes: int | None = None) -> dict[str, Catch]:
    """Try each mutant on one seed after the other until a rule breaks, on so many seeds at most."""
    work = [(name, seeds) for name in names]
    if processes == 1:
        return dict(map(_hunt_one, work))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = dict(pool.imap_unordered(_hunt_one, work))
    return {name: found[name] for name, _ in work}


def _hunt_one(item: tuple[str, int]) -> tuple[str, Catch]:
    name, seeds = item
    for seed in range(seeds):
        failures = run_seed(seed, MODES[seed % len(MODES)], name).failures
        if failures:
            return name, Catch(seed + 1, failures[0])
    return name, Catch(seeds, None)
