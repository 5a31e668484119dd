"""How long until a worker with torch has answered its first call, against a fresh interpreter's import of torch.

Ours is everything between the wish and the first result: a guest forked from a warm interpreter, a connection to it
through the supervisor, the function sent, called, and its result read. The lease is held already. One peer is
`python -c "import torch"`, which only imports; the other an actor of Ray that imports torch, to its first answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import sublet
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.ray import Ray
from benchmarks.procs import wait_until

PAIRS: Final = 20
WARM: Final = "worker with torch, first answer"
ACTOR: Final = "worker with torch, against an actor of ray"
RAY_PAIRS: Final = 8


def has_torch() -> tuple[int, bool]:
    """Where it is, and whether torch is there already."""
    return os.getpid(), "torch" in sys.modules


def measure(bench: Bench) -> list[Figure]:
    with (
        Office(bench.folder) as office,
        sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric,
        fabric.memory("1GiB", ttl="5m", renew="always") as lease,
    ):
        number = 0

        def first_ms() -> float:
            nonlocal number
            number += 1
            calls = lease.options(env={**os.environ, "BENCH_WORKER": str(number)})
            began = time.perf_counter()
            pid, is_warm = calls.run(has_torch)
            took = time.perf_counter() - began
            os.kill(pid, 9)
            if not is_warm:
                raise RuntimeError("a worker was to come from a warm interpreter with torch, and did not.")
            return took * 1e3

        def is_warm() -> bool:
            nonlocal number
            number += 1
            pid, warm = lease.options(env={**os.environ, "BENCH_WORKER": str(number)}).run(has_torch)
            os.kill(pid, 9)
            return warm

        wait_until(is_warm, within_s=120, what="no warm interpreter with torch")
        a, b = bench.pairs(
            WARM,
            first_ms,
            _import_ms,
            pairs=bench.either(PAIRS, 2),
            show=lambda a, b: f"{a:.1f} ms, a fresh interpreter {b:.0f} ms",
        )
        figures = [figure(WARM, "ms", a, b, peer_name='python -c "import torch"', operations=a, peer_operations=b)]
        return figures + _against_ray(bench, first_ms)


def _against_ray(bench: Bench, first_ms: Callable[[], float]) -> list[Figure]:
    try:
        with Ray.running(bench.folder, "torch") as ray:
            bench.versions["ray"] = ray.version
            a, b = bench.pairs(
                ACTOR,
                first_ms,
                lambda: ray.actor_s() * 1e3,
                pairs=bench.either(RAY_PAIRS, 2),
                show=lambda a, b: f"{a:.1f} ms, ray {b:.0f} ms",
            )
    except RuntimeError as error:
        bench.note(f"Ray was not run ({error}).")
        return []
    return [figure(ACTOR, "ms", a, b, peer_name="ray actor", operations=a, peer_operations=b)]


def _import_ms() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return (time.perf_counter() - began) * 1e3


ROW: Final = Row(
    name="worker_start",
    title="a worker with torch has answered twenty times sooner than an interpreter imports it",
    goals=[Goal(figure=WARM, of="ratio", at_least=20), Goal(figure=ACTOR, of="ratio", at_least=5)],
    measure=measure,
    limit_s=900,
    distributions=(*DISTRIBUTIONS, "torch"),
)
