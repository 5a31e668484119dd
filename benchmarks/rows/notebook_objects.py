"""What values of many objects cost to cross, by kind and by size: twice the objects, at most 2.5 times the time.

Both sides are in one process, so a figure is the processor time of both. Steps: a value is sent for the first time; is
brought back and sent again unchanged; is sent with one part of it changed; another one is made on the device beside it.
`SUBLET_BENCH_KINDS` names kinds, separated by commas; `SUBLET_BENCH_OBJECTS` is the largest size.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.notebooks import DISTRIBUTIONS
from tests.notebook.many_objects import KINDS, LARGEST, SHORT_MS, STEPS

WORST: Final = "the most that twice the objects take longer"
STILL: Final = "a set of 512,000 strings, brought back and sent again unchanged"
SET: Final = "set of strings"


def measure(bench: Bench) -> list[Figure]:
    asked = os.environ.get("SUBLET_BENCH_KINDS", "")
    largest = bench.either(int(os.environ.get("SUBLET_BENCH_OBJECTS", LARGEST)), 16_000)
    ratios: list[float] = []
    found = []
    for kind in asked.split(",") if asked else bench.either(list(KINDS), ["list of dicts", SET]):
        bench.say(kind)
        command = [sys.executable, "-m", "tests.notebook.many_objects", kind, str(largest)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        sizes: list[list[float]] = [json.loads(line) for line in lines]
        for place, step in enumerate(STEPS, 1):
            pairs = itertools.pairwise(sizes)
            of_step = [(two[place] / one[place], two[0]) for one, two in pairs if two[place] >= SHORT_MS]
            ratio, at = max(of_step, default=(0.0, 0))
            ratios.append(ratio)
            shown = ", ".join(f"{one[0]:,.0f}: {one[place]:.1f}" for one in sizes)
            bench.note(f"{kind}, {step}: at most {ratio:.2f} times, at {at:,.0f}. Milliseconds: {shown}.")
        if kind == SET:
            found = [figure(STILL, "ms", [one[2] for one in sizes if one[0] == 512_000])] if largest >= 512_000 else []
    return [figure(WORST, "times", [max(ratios)]), *found]


ROW: Final = Row(
    name="notebook_objects",
    title="twice the objects take at most 2.5 times as long to cross, whatever their kind",
    goals=[Goal(figure=WORST, at_most=2.5), Goal(figure=STILL, at_most=50)],
    measure=measure,
    limit_s=7200,
    distributions=(*DISTRIBUTIONS, "pandas", "matplotlib"),
)
