"""How long a person waits for `sublet status`, with an office running.

The peer is `python -c pass`, which no Python command can beat; it is there to say how much of the time is ours.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import DISTRIBUTIONS, Office, sublet_command
from benchmarks.procs import time_command

PAIRS: Final = 40
STATUS: Final = "sublet status"
STATUS_JSON: Final = "sublet status --json"


def measure(bench: Bench) -> list[Figure]:
    figures = []
    with Office(bench.folder) as office:
        for name, words in ((STATUS, ["status"]), (STATUS_JSON, ["status", "--json"])):
            command = [*sublet_command(), *words]
            ours, peer = bench.pairs(
                name,
                functools.partial(_once_ms, command, office.env),
                functools.partial(_once_ms, [sys.executable, "-c", "pass"], office.env),
                pairs=bench.either(PAIRS, 3),
                show=lambda a, b: f"{a:.1f} ms, `pass` {b:.1f} ms",
            )
            figures.append(figure(name, "ms", ours, peer, peer_name="python -c pass"))
    return figures


def _once_ms(command: Sequence[str], env: Mapping[str, str]) -> float:
    return time_command(command, env) * 1e3


ROW: Final = Row(
    name="cli_status",
    title="`sublet status` answers before one notices waiting",
    goals=[Goal(figure=STATUS, at_most=100), Goal(figure=STATUS_JSON, at_most=100)],
    measure=measure,
    limit_s=300,
    distributions=DISTRIBUTIONS,
)
