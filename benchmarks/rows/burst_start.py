"""How soon a burst begins, and how soon nothing of it is left.

To its first result: with an office that runs, and with none (it is started, and ends with the sample), against
`ray.init` and a task, and a Dask `LocalCluster`, `Client` and a task; no side's imports are counted. To all leases
active: as many as there are cores, from the call to the event that says so. To none: from the last result to the answer
of the office that no lease of this job is left. What the command line needs to find that all is stored already is shown
beside it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import sublet
import sublet.jobs
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.machine import usable_cores
from benchmarks.ours import DISTRIBUTIONS, Office, sublet_command
from benchmarks.peers.bursts import BurstPeer
from benchmarks.procs import time_command

PAIRS: Final = 9
PEER_PAIRS: Final = 3
CORES: Final = len(usable_cores())
FIRST: Final = "call to first result, office running"
COLD: Final = "call to first result, no office"
ACTIVE: Final = "call to all leases active"
NONE: Final = "last result to no lease left"
STORED: Final = "sublet burst of 1,000 chunks that are all stored"


def same(item: int) -> int:
    """What is called."""
    return item


def measure(bench: Bench) -> list[Figure]:
    pairs = bench.either(PAIRS, 3)
    figures: list[Figure] = []
    with Office(bench.folder) as office, sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric:

        def first() -> float:
            began = time.perf_counter()
            results = sublet.jobs.map(same, range(1), want=CORES, fabric=fabric)
            assert next(results) == 0
            took = time.perf_counter() - began
            results.close()
            return took * 1e3

        first()
        ramps = [_ramp(fabric) for _ in range(pairs)]
        figures.append(figure(ACTIVE, "ms", [up for up, _ in ramps]))
        figures.append(figure(NONE, "ms", [down for _, down in ramps]))
        figures.append(_stored(bench, office, pairs))
        numbers = iter(range(1 << 20))
        for peer in ("ray", "dask"):
            figures += _against(bench, peer, lambda: (first(), _cold(bench.folder / f"cold-{next(numbers)}")))
    return figures


def _ramp(fabric: sublet.Fabric) -> tuple[float, float]:
    """Milliseconds to all leases, and from the last result to none."""
    all_active: list[float] = []

    def heard(event: sublet.jobs.JobEvent) -> None:
        if event.what == "leases" and event.count == CORES and not all_active:
            all_active.append(time.perf_counter())

    count = 100 * CORES
    began = time.perf_counter()
    results = sublet.jobs.map(_nap, range(count), want=CORES, fabric=fabric, on_event=heard)
    for _ in range(count):
        next(results)
    last = time.perf_counter()
    assert next(results, None) is None
    gone = time.perf_counter()
    assert results.result is not None
    assert results.result.leases_after == 0
    if not all_active:
        raise RuntimeError(f"only {results.result.leases_most} leases were active at once.")
    return (all_active[0] - began) * 1e3, (gone - last) * 1e3


def _nap(item: int) -> None:
    time.sleep(0.005)


def _cold(home: Path) -> float:
    began = time.perf_counter()
    with sublet.connect(home=home) as fabric:
        results = sublet.jobs.map(same, range(1), want=CORES, fabric=fabric)
        assert next(results) == 0
        took = time.perf_counter() - began
        results.close()
    env = {**os.environ, "SUBLET_HOME": str(home)}
    subprocess.run([*sublet_command(), "down", "--now"], env=env, capture_output=True, timeout=30, check=False)
    shutil.rmtree(home, ignore_errors=True)
    return took * 1e3


def _stored(bench: Bench, office: Office, pairs: int) -> Figure:
    script = bench.folder / "stored.py"
    script.write_text("def same(item):\n    return item\n")
    env = {name: value for name, value in office.env.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [*sublet_command(), "burst", f"{script}::same", "--over", "range(1000)", "--name", "stored"]
    time_command(command, env)
    return figure(STORED, "ms", [time_command(command, env) * 1e3 for _ in range(pairs)])


def _against(bench: Bench, peer: str, ours: Callable[[], tuple[float, float]]) -> list[Figure]:
    try:
        a, b = bench.pairs(
            f"call to first result, {peer}",
            ours,
            functools.partial(_first_ms, bench, peer),
            pairs=bench.either(PEER_PAIRS, 1),
            show=lambda a, b: f"{a[0]:.0f} ms, with no office {a[1]:.0f} ms, the peer {b:.0f} ms",
        )
    except RuntimeError as error:
        bench.note(f"{peer} was not run ({error}).")
        return []
    return [
        figure(f"{name}, against {peer}", "ms", [one[place] for one in a], b, peer_name=peer)
        for place, name in enumerate((FIRST, COLD))
    ]


def _first_ms(bench: Bench, name: str) -> float:
    with BurstPeer.running(name, bench.folder, CORES) as peer:
        bench.versions[name] = peer.version
        return peer.first_s * 1e3


ROW: Final = Row(
    name="burst_start",
    title="a burst has all cores, and has given them back, within 0.1 s",
    goals=[Goal(figure=ACTIVE, at_most=100), Goal(figure=NONE, at_most=100)],
    measure=measure,
    limit_s=600,
    distributions=DISTRIBUTIONS,
)
