"""The proof: the real ledger, agent, fence and renewal in a pretended world that breaks by a seed.

::

    python -m tests.simulation --seeds 1000            # both modes, the counters, and the seeds that failed
    python -m tests.simulation --from 4711 --seeds 1   # one seed again
    python -m tests.simulation --mutants               # known bugs of other systems, each caught or not

A ``World`` is a queue of moments. Around it stand processes with clocks of their own (``process``), a network that
loses, doubles, delays and cuts (``net``), and a disk that forgets what was not synced (``disk``). The processes run the
code of the product: ``office`` drives the ``OfficeCore`` as the driver does, ``agent`` and ``supervisor`` the cores of
these, ``node`` a ``MemoryAgent``, ``holder`` a ``RenewalManager``. ``watch`` looks on and compares what agents and
holders *saw* with what was promised.

``scenario`` draws from the seed what there is and what goes wrong; ``faults`` makes it happen; ``coverage`` counts
which fault met a lease in which state.
"""

from __future__ import annotations

import argparse
import sys

from tests.simulation import coverage
from tests.simulation.mutants import MUTANTS
from tests.simulation.run import MODES, Tally, hunt, run_many

COVERED_BY: int = 500
"""From so many seeds on, every fault must have met every state."""


def main(arguments: list[str] | None = None) -> int:
    """0 if every rule held (or every mutant was caught), else 1."""
    asked = _parser().parse_args(arguments)
    if asked.mutants:
        return _mutants(asked.seeds, asked.processes)
    modes = MODES if asked.mode == "both" else (asked.mode,)
    tally = run_many(
        range(asked.start, asked.start + asked.seeds), modes, processes=asked.processes, mutant=asked.mutant
    )
    _say(_report(tally, seeds_asked=asked.seeds))
    missing = coverage.missing(tally.met) if asked.seeds >= COVERED_BY and asked.mode == "both" else []
    if missing:
        _say("never met: " + ", ".join(missing))
    return 1 if tally.failures or missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulate leases from seeds.")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds (with --mutants: at most, for each)")
    parser.add_argument("--from", type=int, default=0, dest="start", metavar="N", help="the first seed")
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both", help="with both, they take turns")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="switch a known bug on")
    parser.add_argument("--mutants", action="store_true", help="try every mutant until it is caught")
    parser.add_argument(
        "--processes", type=int, default=None, metavar="N", help="as many as there are cores by default"
    )
    return parser


def _report(tally: Tally, *, seeds_asked: int) -> str:
    speed = tally.seeds / tally.wall_s if tally.wall_s else 0.0
    lines = [
        (
            f"{tally.seeds} seeds, {tally.simulated_s / 3600:.1f} simulated hours, {tally.steps:,} steps "
            f"in {tally.wall_s:.1f} s ({speed:.1f} seeds/s)"
        ),
        coverage.table(tally.met),
        ", ".join(f"{what}: {count}" for what, count in sorted(tally.seen.items())),
        *map(str, sorted(tally.failures, key=lambda failure: failure.seed)[:20]),
        f"{len(tally.failures)} seeds broke a rule" if tally.failures else "every rule held",
    ]
    return "\n".join(lines)


def _mutants(seeds: int, processes: int | None) -> int:
    found = hunt(seeds, processes=processes)
    width = max(len(MUTANTS[name].breaks) for name in MUTANTS)
    _say(f"{'':<4} {'what it breaks':<{width}}  seeds  caught by")
    for name, catch in found.items():
        caught = "NOT CAUGHT" if catch.failure is None else f"{catch.failure.rule}: {catch.failure.text}"
        _say(f"{name:<4} {MUTANTS[name].breaks:<{width}}  {catch.seeds:>5}  {caught[:110]}")
    return 1 if any(catch.failure is None for catch in found.values()) else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
