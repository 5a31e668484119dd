"""How long `sublet run -- true` takes with an office running: a lease, a guest, its end, and nothing left.

The peer is `srun true` on a Slurm of this machine, which does the same and keeps its state on disk as well. Plain
`true` says what of it is the shell's part. What Sublet writes durably for it: the grant and the end of the lease.
"""

from __future__ import annotations

import functools
import os
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure, is_first_in_line
from benchmarks.ours import DISTRIBUTIONS, Office, sublet_command
from benchmarks.peers.slurm import Slurm
from benchmarks.procs import time_command

PAIRS: Final = 60
RUN: Final = "sublet run -- true"
PLAIN: Final = "sublet run -- true, against plain true"
PUBLISHED_MS: Final = 27.0
"""What `srun true` is said to take."""


def measure(bench: Bench) -> list[Figure]:
    pairs = bench.either(PAIRS, 5)
    figures = []
    with Office(bench.folder) as office:
        ours = functools.partial(_once_ms, [*sublet_command(), "run", *_wants(bench), "--", "true"], office.env)
        plain = functools.partial(_once_ms, ["true"], dict(os.environ))
        try:
            with Slurm(bench.folder) as slurm:
                bench.versions["slurm"] = slurm.version
                peer = functools.partial(_once_ms, slurm.command("true"), slurm.env)
                mine, theirs = bench.pairs(
                    RUN, ours, peer, pairs=pairs, show=lambda a, b: f"{a:.1f} ms, srun {b:.1f} ms"
                )
            figures.append(
                figure(RUN, "ms", mine, theirs, peer_name="srun true", operations=mine, peer_operations=theirs)
            )
        except RuntimeError as error:
            bench.note(f"Slurm was not run ({error}). The published figure for `srun true`: {PUBLISHED_MS:g} ms.")
        mine, theirs = bench.pairs(PLAIN, ours, plain, pairs=pairs, show=lambda a, b: f"{a:.1f} ms, true {b:.1f} ms")
        figures.append(figure(PLAIN, "ms", mine, theirs, peer_name="true"))
    bench.note("The office is up, and so are slurm's daemons; both have run a command before.")
    return figures


def _wants(bench: Bench) -> list[str]:
    """A core, as `sublet run` takes one by itself; unless we run at real-time priority, which a group of the cpu
    controller (v1) has no time for unless it is given some."""
    if not is_first_in_line():
        return []
    bench.note("At real-time priority the lease is one of memory: the cpu controller refuses such processes.")
    return ["--memory", "64MiB"]


def _once_ms(command: list[str], env: dict[str, str]) -> float:
    return time_command(command, env) * 1e3


ROW: Final = Row(
    name="run_true",
    title="a command under a lease takes at most twice as long as one under Slurm",
    goals=[Goal(figure=RUN, of="ratio", at_least=0.5)],
    measure=measure,
    limit_s=400,
    distributions=DISTRIBUTIONS,
)
