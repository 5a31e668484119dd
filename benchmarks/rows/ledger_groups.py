"""What the order of groups costs: an acquire and a release while 10,000 requests of 1,000 tenants wait.

Two ledgers live side by side, each in a process of its own, and are asked in turn: in one the tenants are in 50 groups
of different weights, in the other there are no groups, so all of them are sorted by their own shares alone.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure, medians_us
from benchmarks.procs import Child

WAITING: Final = 10_000
TENANTS: Final = 1_000
GROUPS: Final = 50
ROUNDS: Final = 9
OPERATIONS: Final = 60
"""Of each kind, in one round."""
COST_MAX: Final = 1.5


def cost_name(operation: str) -> str:
    return f"{operation} with groups, per {operation} without"


def measure(bench: Bench) -> list[Figure]:
    waiting, tenants = bench.either((WAITING, TENANTS), (1_000, 100))
    rounds = bench.either(ROUNDS, 2)
    took: dict[tuple[str, int], list[list[int]]] = {}
    with contextlib.ExitStack() as stack:
        ledgers: dict[int, Child] = {}
        for groups in (GROUPS, 0):
            words = [sys.executable, "-m", "benchmarks.waiting_ledger"]
            ledgers[groups] = child = Child(words, name=f"ledger with {groups} groups", pipes=True)
            stack.callback(child.end)
            grown = child.ask_json({"waiting": waiting, "tenants": tenants, "groups": groups})
            bench.say(f"{grown['waiting']:,} requests wait, {groups} groups")
        for number in range(rounds + 1):
            for groups, child in ledgers.items():
                answer = child.ask_json({"most": OPERATIONS})
                if number:  # the first round warms up
                    for operation, ns in answer.items():
                        took.setdefault((operation, groups), []).append(ns)
    figures = []
    for operation in ("acquire", "release"):
        with_groups, without = (medians_us(took[operation, groups]) for groups in (GROUPS, 0))
        costs = [a / b for a, b in zip(with_groups, without, strict=True)]
        figures.append(figure(cost_name(operation), "×", costs))
        for name, medians, groups in (("with", with_groups, GROUPS), ("without", without, 0)):
            single = [ns / 1e3 for one in took[operation, groups] for ns in one]
            figures.append(figure(f"{operation} {name} groups", "µs", medians, operations=single))
    bench.note(
        f"{waiting:,} requests of {tenants:,} tenants wait for one of 64 devices. A release includes the report that "
        "its device is clear, the grant to the next request, and that one's claim; an acquire its place in the queue."
    )
    return figures


ROW: Final = Row(
    name="ledger_groups",
    title="a request and a release in a queue of 10,000, with 50 groups and with none",
    goals=[Goal(figure=cost_name(operation), at_most=COST_MAX) for operation in ("acquire", "release")],
    measure=measure,
    limit_s=600,
    distributions=("sublet", "msgspec"),
)
