"""What one operation of the pure ledger costs with a thousand, ten thousand, a hundred thousand, a million live leases.

No journal, no socket: the arithmetic alone, with an agent that confirms at once, on one node with one large resource.
Four ledgers live side by side, each in a process of its own, and are asked in turn, so that what else the machine does
falls on all of them.

"At most logarithmic" is taken at its word: log 10⁶ is twice log 10³, so an operation may cost at most twice as much at
a million leases as at a thousand, its share of the upkeep included. What a processor's caches do to a larger ledger
counts against us.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure, medians_us
from benchmarks.procs import Child

OPERATIONS: Final = ("acquire", "renew", "release")
UPKEEP: Final = "upkeep"
"""A tick and a look for unconfirmed orders, shared among the commands since the last one: part of every command's cost.
"""
SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
ROUNDS: Final = 7
OPERATIONS_MAX: Final = 300
SECONDS_MAX: Final = 2.0
"""An operation that is slow is measured for so long, and not to its full number."""
GROWTH_MAX: Final = 2.0


def growth_name(operation: str) -> str:
    return f"growth of {operation} from a thousand leases to a million"


def measure(bench: Bench) -> list[Figure]:
    sizes = bench.either(SIZES, (1_000, 10_000))
    rounds = bench.either(ROUNDS, 2)
    figures: list[Figure] = []
    with contextlib.ExitStack() as stack:
        ledgers: dict[int, Child] = {}
        per_lease: list[float] = []
        growing_us: list[float] = []
        for size in sizes:
            child = Child([sys.executable, "-m", "benchmarks.bare_ledger"], name=f"ledger of {size:,}", pipes=True)
            stack.callback(child.end)
            ledgers[size] = child
            grown = child.ask_json({"grow": size})
            per_lease.append(grown["bytes"] / size)
            growing_us.append(grown["took_s"] / size * 1e6)
            bench.say(f"{size:,} leases in {grown['took_s']:.1f} s, {per_lease[-1]:,.0f} bytes each")
        took: dict[tuple[str, int], list[list[int]]] = {
            (op, size): [] for op in (*OPERATIONS, UPKEEP) for size in sizes
        }
        for number in range(rounds + 1):
            for size, child in ledgers.items():
                for operation in (*OPERATIONS, UPKEEP):
                    asked = {"operation": operation, "seconds": SECONDS_MAX, "most": OPERATIONS_MAX}
                    ns = child.ask_json(asked)["ns"]
                    if number and ns:  # the first round warms up
                        took[operation, size].append(ns)
            bench.say(f"round {number} of {rounds}: " + _shown(took, sizes) if number else "warmed up")
    for operation in OPERATIONS:
        small, large = (_whole_us(took, operation, size) for size in (sizes[0], sizes[-1]))
        growth = [b / a for a, b in zip(small, large, strict=True)]
        figures.append(figure(growth_name(operation), "×", growth))
    for operation in (*OPERATIONS, UPKEEP):
        for size in sizes:
            rounds_ns = took[operation, size]
            single = [ns / 1e3 for one in rounds_ns for ns in one]
            figures.append(figure(f"{operation}, {size:,} leases", "µs", medians_us(rounds_ns), operations=single))
    for size, mean_us in zip(sizes, growing_us, strict=True):
        figures.append(figure(f"acquire while growing to {size:,} leases, mean", "µs", [mean_us]))
    figures.append(figure(f"memory per lease, {sizes[-1]:,} leases", "bytes", per_lease[-1:]))
    bench.note(
        "Operations include the agent's confirmation. Upkeep is a tick and a look for unconfirmed orders every 1,000 "
        "commands, per command."
    )
    bench.note("Python's collector runs as it is set by default; its pauses are in the means and not in the medians.")
    fewest = min(sum(len(one) for one in ns) for ns in took.values())
    bench.note(f"At least {fewest:,} single operations behind each median; {rounds} rounds.")
    return figures


def _whole_us(took: dict[tuple[str, int], list[list[int]]], operation: str, size: int) -> list[float]:
    """An operation with its share of the upkeep, round by round."""
    single, share = medians_us(took[operation, size]), medians_us(took[UPKEEP, size])
    return [a + b for a, b in zip(single, share, strict=True)]


def _shown(took: dict[tuple[str, int], list[list[int]]], sizes: tuple[int, ...]) -> str:
    latest = {key: medians_us(rounds[-1:])[0] for key, rounds in took.items()}
    return ", ".join(
        f"{op} {' '.join(f'{latest[op, size]:,.0f}' for size in sizes)} µs" for op in (*OPERATIONS, UPKEEP)
    )


ROW: Final = Row(
    name="ledger_scale",
    title="one operation of the ledger, from a thousand live leases to a million",
    goals=[Goal(figure=growth_name(operation), at_most=GROWTH_MAX) for operation in OPERATIONS],
    measure=measure,
    limit_s=900,
    distributions=("sublet", "msgspec"),
)
