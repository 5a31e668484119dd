"""1,000 chunks that keep a core for 10 ms each: how much of the cores' time they get.

The ideal is chunks × 10 ms ÷ cores; ours is measured from the call to the last result, so leases and workers are
acquired and started in it, and the peers are warm. A chunk looks at the clock until its 10 ms are over. The same with
a worker killed every second: each chunk notes its execution in a file, so what was executed twice is counted.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import sublet
import sublet.jobs
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.machine import usable_cores
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.bursts import NAMES, BurstPeer

CHUNKS: Final = 1000
KILLED_CHUNKS: Final = 4000
EACH_S: Final = 0.01
PAIRS: Final = 3
CORES: Final = len(usable_cores())
IDEAL: Final = "ideal time of the measured"
KILLED: Final = "the same, a worker killed every second"
AGAIN: Final = "chunks executed again for each kill"


def peer_name(name: str) -> str:
    return f"{IDEAL}, against {name}"


def spin(seconds: float) -> None:
    """Keep a core for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def spin_noted(path: str) -> int:
    """The same, and a byte in a file for each execution; the worker's pid."""
    spin(EACH_S)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, b".")
    os.close(fd)
    return os.getpid()


def measure(bench: Bench) -> list[Figure]:
    chunks, pairs = bench.either(CHUNKS, 400), bench.either(PAIRS, 1)
    ideal_s = chunks * EACH_S / CORES
    figures: list[Figure] = []
    with Office(bench.folder) as office, sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric:

        def ours() -> float:
            began = time.perf_counter()
            results = sublet.jobs.map(spin, [EACH_S] * chunks, want=CORES, ordered=False, fabric=fabric)
            for _ in range(chunks):
                next(results)
            took = time.perf_counter() - began
            results.close()
            return 100 * ideal_s / took

        ours()
        for name in NAMES:
            figures += _against(bench, name, chunks, ours, pairs)
        figures.insert(0, figure(IDEAL, "%", [ours() for _ in range(pairs)], higher_is_better=True))
        shares, again = [], []
        for number in range(bench.either(3, 1)):
            share, per_kill = _killed(
                fabric, bench.folder / f"executed-{number}", bench.either(KILLED_CHUNKS, 1000), bench
            )
            shares.append(share)
            again.append(per_kill)
        figures += [figure(KILLED, "%", shares, higher_is_better=True), figure(AGAIN, "", again)]
    bench.note("With kills: RetryPolicy(initial_backoff='50ms'). A pool and loky break when a worker is killed.")
    return figures


def _killed(fabric: sublet.Fabric, noted: Path, chunks: int, bench: Bench) -> tuple[float, float]:
    """Ideal of measured in percent, and how many chunks were executed again for each kill."""
    newest = [0]
    kills = [0]
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(1.0):
            if newest[0]:
                os.kill(newest[0], signal.SIGKILL)
                newest[0] = 0
                kills[0] += 1

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        began = time.perf_counter()
        policy = sublet.jobs.RetryPolicy(initial_backoff="50ms")
        results = sublet.jobs.map(
            spin_noted, [str(noted)] * chunks, want=CORES, ordered=False, policy=policy, fabric=fabric
        )
        for _ in range(chunks):
            newest[0] = next(results)
        took = time.perf_counter() - began
    finally:
        is_over.set()
        killer.join()
    results.close()
    executed = noted.stat().st_size
    bench.say(f"{kills[0]} kills, {executed - chunks} chunks executed to their end again, {took:.2f} s")
    return 100 * chunks * EACH_S / CORES / took, (executed - chunks) / max(1, kills[0])


def _against(bench: Bench, name: str, chunks: int, ours: Callable[[], float], pairs: int) -> list[Figure]:
    try:
        with BurstPeer.running(name, bench.folder, CORES) as peer:
            if peer.version:
                bench.versions[name] = peer.version
            a, b = bench.pairs(
                name,
                ours,
                lambda: 100 * chunks * EACH_S / CORES / peer.spin_s(chunks, EACH_S),
                pairs=pairs,
                show=lambda a, b: f"{a:.1f} %, {name} {b:.1f} %",
            )
    except RuntimeError as error:
        bench.note(f"{name} was not run ({error}).")
        return []
    return [figure(peer_name(name), "%", a, b, peer_name=name, higher_is_better=True)]


ROW: Final = Row(
    name="burst_chunks",
    title="chunks of 10 ms have the cores for 95 % of the time",
    goals=[Goal(figure=IDEAL, at_least=95), Goal(figure=AGAIN, at_most=1)],
    measure=measure,
    limit_s=600,
    distributions=DISTRIBUTIONS,
)
