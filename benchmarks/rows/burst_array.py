"""An array of 1 GiB as input of 100 chunks: how long, and how often its bytes lie in memory.

Ours is a function with the array bound to it (`functools.partial`), as one writes it: the array goes to each worker
once, in shared memory. The peers are Ray's object store (`ray.put`, then tasks) and joblib's memory mapping. A call of
theirs copies the array once as well, so every sample begins with one that is new. The copies are what holder and
workers have in memory more than before, what they share counted once, in arrays.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any, Final

import sublet
import sublet.jobs
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.bursts import BurstPeer
from benchmarks.procs import memory_of

SIZE: Final = 1 << 30
CHUNKS: Final = 100
PAIRS: Final = 5
CORES: Final = os.cpu_count() or 1
PEERS: Final = ("ray", "joblib")
TIME: Final = "100 chunks over an array of 1 GiB"
COPIES: Final = "arrays in memory beside the program's own"


def peer_name(name: str) -> str:
    return f"{TIME}, against {name}"


def part(array: Any, index: int) -> float:
    """Reads a part of it."""
    return float(array[index * 1000 : index * 1000 + 1000].sum())


def measure(bench: Bench) -> list[Figure]:
    import numpy as np

    size, pairs = bench.either(SIZE, SIZE // 8), bench.either(PAIRS, 1)
    figures: list[Figure] = []
    copies: list[float] = []
    with Office(bench.folder) as office, sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric:

        def ours() -> float:
            array = np.ones(size // 8)
            before = _memory_with_workers()
            began = time.perf_counter()
            results = sublet.jobs.map(functools.partial(part, array), range(CHUNKS), want=CORES, fabric=fabric)
            found = [next(results) for _ in range(CHUNKS)]
            took = time.perf_counter() - began
            copies.append((_memory_with_workers() - before) / size)
            results.close()
            assert sum(found) == 1000 * CHUNKS
            return took * 1e3

        ours()
        for name in PEERS:
            figures += _against(bench, name, size, ours, pairs)
    figures.append(figure(COPIES, "", copies))
    bench.note("Ours begins without leases and workers, and acquires them; the peers' workers are there.")
    return figures


def _memory_with_workers() -> int:
    """Of this program, and of whatever is mapped with it: shared memory counts in parts, which add up."""
    return sum(memory_of(pid).share for pid in _sharing())


def _sharing() -> list[int]:
    """This process and all workers: they descend from the supervisor, which is nobody's child here."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    environ = file.read()
            except OSError:
                continue
            if b"SUBLET_LEASE=" in environ:
                found.append(int(name))
    return [os.getpid(), *found]


def _against(bench: Bench, name: str, size: int, ours: Callable[[], float], pairs: int) -> list[Figure]:
    try:
        with BurstPeer.running(name, bench.folder, CORES) as peer:
            bench.versions[name] = peer.version

            def theirs() -> float:
                peer.make_array(size)
                return peer.array_s(CHUNKS) * 1e3

            a, b = bench.pairs(name, ours, theirs, pairs=pairs, show=lambda a, b: f"{a:.0f} ms, {name} {b:.0f} ms")
            bench.note(f"{name} and its workers had {peer.memory() / size:.2f} arrays in memory, its own included.")
    except RuntimeError as error:
        bench.note(f"{name} was not run ({error}).")
        return []
    return [figure(peer_name(name), "ms", a, b, peer_name=name)]


ROW: Final = Row(
    name="burst_array",
    title="an array of 1 GiB reaches the workers of a burst as soon as those of Ray or joblib",
    goals=[Goal(figure=peer_name(name), of="ratio", at_least=1 / 1.2) for name in PEERS],
    measure=measure,
    limit_s=600,
    distributions=(*DISTRIBUTIONS, "numpy"),
)
