"""An array of 1 GiB as input of 100 chunks: how long, and how often its bytes lie in memory.

Ours is a function with the array bound to it (`functools.partial`), as one writes it: the array goes to its workers
once, in memory that all of them share. The peers are Ray's object store (`ray.put`, then tasks) and joblib's memory
mapping. A call of theirs copies the array once as well, so every sample begins with one that is new. Ray keeps the
memory of its store, and we that of the last map, for a minute; the first sample pays for fresh memory. The copies are
counted in a run of their own: what holder and workers have in memory more than before, in arrays, what they share
counted once.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from typing import Any, Final

import sublet
import sublet.jobs
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.machine import usable_cores
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.bursts import BurstPeer
from benchmarks.procs import memory_of
from sublet.compute.buffer_cache import lent_memory

SIZE: Final = 1 << 30
CHUNKS: Final = 100
PAIRS: Final = 5
CORES: Final = len(usable_cores())
PEERS: Final = ("ray", "joblib")
START: Final = "100 chunks over an array of 800 kB: leases, workers, calls"
TIME: Final = "100 chunks over an array of 1 GiB"
COPIES: Final = "arrays in memory beside the program's own"


def peer_name(name: str) -> str:
    return f"{TIME}, against {name}"


def part(array: Any, index: int) -> float:
    """Reads a part of it."""
    return float(array[index * 1000 : index * 1000 + 1000].sum())


def weighed(array: Any, index: int) -> tuple[int, int]:
    """Reads all of it, and gives the others time to do so as well; which process this is, and its memory."""
    array.sum()
    time.sleep(0.5)
    return os.getpid(), memory_of(os.getpid()).share


def measure(bench: Bench) -> list[Figure]:
    import numpy as np

    size, pairs = bench.either(SIZE, SIZE // 8), bench.either(PAIRS, 1)
    figures: list[Figure] = []
    with Office(bench.folder) as office, sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric:

        def ours(size: int = size) -> float:
            array = np.ones(max(1000 * CHUNKS, size // 8))
            began = time.perf_counter()
            results = sublet.jobs.map(functools.partial(part, array), range(CHUNKS), want=CORES, fabric=fabric)
            found = [next(results) for _ in range(CHUNKS)]
            took = time.perf_counter() - began
            results.close()
            assert sum(found) == 1000 * CHUNKS
            return took * 1e3

        ours()
        figures.append(figure(START, "ms", [ours(0) for _ in range(pairs)]))
        for name in PEERS:
            figures += _against(bench, name, size, ours, pairs)
        figures.append(figure(COPIES, "", [_copies(fabric, np.ones(size // 8), size)]))
    bench.note("Ours begins without leases and workers, and acquires them; the peers' workers are there.")
    return figures


def _copies(fabric: sublet.Fabric, array: Any, size: int) -> float:
    small = dict(
        sublet.jobs.map(
            functools.partial(weighed, array[:1]), range(2 * CORES), want=CORES, fabric=fabric, ordered=False
        )
    )
    gc.collect()
    lent_memory.trim()  # what earlier samples had would be filled again, and not be counted
    before = memory_of(os.getpid()).share
    seen: dict[int, int] = {}
    during = 0
    results = sublet.jobs.map(
        functools.partial(weighed, array), range(4 * CORES), want=CORES, fabric=fabric, ordered=False
    )
    for pid, share in results:
        seen[pid] = share
        during = max(during, memory_of(os.getpid()).share)
    empty = sum(small.values()) / len(small)
    return (during - before + sum(share - empty for share in seen.values())) / size


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
