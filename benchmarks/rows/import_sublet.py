"""What `import sublet` costs a script that uses nothing of it, and what the first use of the client adds.

The peer is `python -c pass`: the same interpreter, the same environment, started the same way. The package fetches its
names lazily, so the import alone says little; the second figure has the names that a program fetches first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.procs import time_command

PAIRS: Final = 40
IMPORT: Final = "import sublet"
FIRST_USE: Final = "sublet.connect and the errors fetched"


def measure(bench: Bench) -> list[Figure]:
    programs = {
        IMPORT: "import sublet",
        FIRST_USE: "import sublet; sublet.connect; sublet.SubletError; sublet.LeaseEnded",
    }
    figures = []
    for name, program in programs.items():
        ours, peer = bench.pairs(
            name,
            _timed(program),
            _timed("pass"),
            pairs=bench.either(PAIRS, 3),
            show=lambda a, b: f"{a:.1f} ms, `pass` {b:.1f} ms",
        )
        figures.append(figure(name, "ms", ours, peer, peer_name="python -c pass"))
    bench.note("Compiled files are warm: the first pair of each figure is left out.")
    return figures


def _timed(program: str) -> Callable[[], float]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", program]

    return lambda: time_command(command, env) * 1e3


ROW: Final = Row(
    name="import_sublet",
    title="a script that imports sublet starts as fast as one that does not",
    goals=[Goal(figure=IMPORT, of="difference", at_most=60)],
    measure=measure,
    limit_s=300,
    distributions=("sublet",),
)
