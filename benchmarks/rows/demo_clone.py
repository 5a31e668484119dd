"""`make demo` from a fresh clone to its last line, as a newcomer runs it: an environment is made, packages are
installed from a warm cache, the demo runs.

The clone is of the commit that is checked out. A first run, which is not counted, warms pip's own cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure

WHOLE: Final = "from the fresh clone to the last line"
DEMO: Final = "of that, the demo"
ROOT: Final = Path(__file__).parents[2]
LEFT_OUT: Final = ("SUBLET_HOME", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")


def measure(bench: Bench) -> list[Figure]:
    env = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    whole: list[float] = []
    demo: list[float] = []
    for number in range(1 + bench.either(3, 1)):
        bench.await_quiet()
        clone = bench.folder / f"clone{number}"
        began = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["make", "-C", str(clone), ".venv/.demo"], check=True, capture_output=True, env=env)
        ready = time.perf_counter()
        subprocess.run(["make", "-C", str(clone), "demo"], check=True, capture_output=True, env=env)
        ended = time.perf_counter()
        bench.say(f"run {number}: {ended - began:.1f} s, of which the demo {ended - ready:.1f} s")
        shutil.rmtree(clone)
        if number:
            whole.append(ended - began)
            demo.append(ended - ready)
    return [figure(WHOLE, "s", whole), figure(DEMO, "s", demo)]


ROW: Final = Row(
    name="demo_clone",
    title="`make demo` from a fresh clone to its last line in 90 s, with a warm package cache",
    goals=[Goal(figure=WHOLE, at_most=90)],
    measure=measure,
    limit_s=900,
    distributions=("sublet",),
)
