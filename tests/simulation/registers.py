"""``python -m tests.simulation.registers``: the replicated register, from seeds."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.once import swept_afterwards
from tests.simulation.register_mutants import MUTANTS, switched_on
from tests.simulation.register_world import RULES, Broken, RegisterWorld

CHUNK: Final = 10


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed in which a rule was broken."""

    seed: int
    rule: str
    text: str
    mutant: str | None = None

    def __str__(self) -> str:
        mutant = f" --mutant {self.mutant}" if self.mutant else ""
        return (
            f"seed {self.seed}: {self.rule}: {self.text}\n  rule:  {RULES[self.rule]}\n"
            f"  again: python -m tests.simulation.registers --from {self.seed} --seeds 1{mutant}"
        )


@dataclass(slots=True)
class Tally:
    """What seeds came to."""

    seeds: int = 0
    steps: int = 0
    simulated_s: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Take another's seeds in."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.simulated_s += other.simulated_s
        self.failures += other.failures
        self.seen += other.seen


def run_seed(seed: int, mutant: str | None = None) -> Tally:
    """One seed, to its end or to the first broken rule."""
    tally = Tally(seeds=1)
    with switched_on(mutant), swept_afterwards():
        world = RegisterWorld(seed)
        try:
            world.run()
        except Broken as broken:
            tally.failures.append(Failure(seed, broken.rule, broken.text, mutant))
        except Exception as error:
            tally.failures.append(Failure(seed, "error", f"{type(error).__name__}: {error}", mutant))
    tally.steps, tally.simulated_s = world.moments.steps, world.moments.now
    tally.seen = world.seen + world.net.seen
    return tally


def run_many(seeds: Iterable[int], *, processes: int | None = None, mutant: str | None = None) -> Tally:
    """All these seeds, on so many cores."""
    total, work = Tally(), [(seed, mutant) for seed in seeds]
    if processes == 1 or len(work) <= CHUNK:
        for item in work:
            total.add(run_seed(*item))
        return total
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for tally in pool.imap_unordered(_one, work, chunksize=CHUNK):
            total.add(tally)
    return total


def hunt(name: str, seeds: int) -> tuple[int, Failure | None]:
    """One seed after the other until the mutant is caught: how many it took, and by what."""
    for seed in range(seeds):
        failures = run_seed(seed, name).failures
        if failures:
            return seed + 1, failures[0]
    return seeds, None


def _one(item: tuple[int, str | None]) -> Tally:
    return run_seed(*item)


def main(arguments: list[str] | None = None) -> int:
    """0 if every rule held (or every mutant was caught), else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.registers", description="Simulate registers.")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="start", metavar="N")
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--mutants", action="store_true", help="try every mutant until it is caught")
    parser.add_argument("--processes", type=int, default=None, metavar="N")
    asked = parser.parse_args(arguments)
    if asked.mutants:
        missed = 0
        for name, mutant in MUTANTS.items():
            count, failure = hunt(name, asked.seeds)
            missed += failure is None
            caught = "NOT CAUGHT" if failure is None else f"{failure.rule}: {failure.text}"
            _say(f"{name:<4} {mutant.breaks:<62} {count:>4}  {caught[:80]}")
        return 1 if missed else 0
    began = time.monotonic()
    tally = run_many(range(asked.start, asked.start + asked.seeds), processes=asked.processes, mutant=asked.mutant)
    wall = time.monotonic() - began
    _say(f"{tally.seeds} seeds, {tally.steps:,} steps, {tally.simulated_s / 3600:.1f} simulated hours in {wall:.1f} s")
    _say(", ".join(f"{what}: {count}" for what, count in sorted(tally.seen.items())))
    for failure in sorted(tally.failures, key=lambda failure: failure.seed)[:20]:
        _say(str(failure))
    _say(f"{len(tally.failures)} seeds broke a rule" if tally.failures else "every rule held")
    return 1 if tally.failures else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
