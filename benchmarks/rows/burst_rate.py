"""100,000 chunks that do nothing: what the coordinator, the line to the workers and the store cost for one.

Ours is `sublet.jobs.map` as any program calls it: each item gets an id from its content and position, is looked up in
the store, goes through the coordinator, and its result is stored and handed out. From the call to the last result, so
acquiring the leases and starting the workers is in it; the peers are warm. Where theirs take minutes they run fewer,
which costs them nothing for each. The million runs in a program of its own, so that its memory is counted from nothing.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Final

import sublet
import sublet.jobs
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.machine import usable_cores
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.bursts import BurstPeer
from benchmarks.procs import Child

CHUNKS: Final = 100_000
MANY: Final = 1_000_000
PAIRS: Final = 5
OF_PEER: Final = {"ProcessPoolExecutor": 50_000, "joblib": 100_000, "ray": 20_000, "dask": 10_000}
CORES: Final = len(usable_cores())
RATE: Final = "one of 100,000 chunks, ids and MemoryOutputStore"
HOLDER: Final = "of that, the holder's processor"
VOLUME: Final = "one of 100,000 chunks, VolumeOutputStore"
MEMORY: Final = "the holder's memory at a million chunks over that at 100,000"
_MANY: Final = """
import json, sys, resource
import sublet, sublet.jobs
from benchmarks.rows.burst_rate import nothing
with sublet.connect(home=sys.argv[1], start=False) as fabric:
    for line in sys.stdin:
        count = 0
        for _ in sublet.jobs.map(nothing, range(int(line)), want=int(sys.argv[2]), fabric=fabric):
            count += 1
        assert count == int(line)
        print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), flush=True)
"""


def peer_name(name: str) -> str:
    return f"{RATE}, against {name}"


def nothing(item: int) -> None:
    """What is called."""


def measure(bench: Bench) -> list[Figure]:
    chunks, pairs = bench.either(CHUNKS, 20_000), bench.either(PAIRS, 1)
    figures: list[Figure] = []
    with Office(bench.folder) as office, sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric:
        numbers = iter(range(1 << 30))
        holder: list[float] = []

        def ours() -> float:
            store = sublet.jobs.MemoryOutputStore()
            busy, began = time.process_time(), time.perf_counter()
            results = sublet.jobs.map(
                nothing, range(chunks), want=CORES, store=store, name=f"rate-{next(numbers)}", fabric=fabric
            )
            took = _all_s(results, chunks, began)
            holder.append((time.process_time() - busy) / chunks * 1e6)
            assert len(store) == chunks
            return took / chunks * 1e6

        def stored() -> float:
            number = next(numbers)
            with fabric.block("256MiB", name=f"rate-{number}", ttl="5m") as lease:
                store = sublet.jobs.VolumeOutputStore(lease)
                began = time.perf_counter()
                results = sublet.jobs.map(
                    nothing, range(chunks), want=CORES, store=store, name=f"stored-{number}", fabric=fabric
                )
                took = _all_s(results, chunks, began)
                store.close()
            return took / chunks * 1e6

        ours()
        for name, of_peer in OF_PEER.items():
            of_peer = of_peer if not bench.quick else of_peer // 10
            figures += _against(bench, name, of_peer, ours, pairs)
        own = [ours() for _ in range(pairs)]
        figures.insert(0, figure(RATE, "µs", own))
        figures.insert(1, figure(HOLDER, "µs", holder[-pairs:]))
        figures.insert(2, figure(VOLUME, "µs", [stored() for _ in range(pairs)]))
        figures.append(_memory(bench, office))
    bench.note(f"{CORES} workers on each side; ours began with none, and gives its leases back at the end.")
    return figures


def _all_s(results: sublet.jobs.MapIterator[None], count: int, began: float) -> float:
    """Until the last result; giving the leases back is another row's."""
    for _ in itertools.islice(results, count):
        pass
    took = time.perf_counter() - began
    results.close()
    return took


def _against(bench: Bench, name: str, of_peer: int, ours: Callable[[], float], pairs: int) -> list[Figure]:
    try:
        with BurstPeer.running(name, bench.folder, CORES) as peer:
            if peer.version:
                bench.versions[name] = peer.version
            a, b = bench.pairs(
                name,
                ours,
                lambda: peer.nothing_s(of_peer) / of_peer * 1e6,
                pairs=pairs,
                show=lambda a, b: f"{a:.1f} µs, {name} {b:.1f} µs",
            )
    except RuntimeError as error:
        bench.note(f"{name} was not run ({error}).")
        return []
    return [figure(peer_name(name), "µs", a, b, peer_name=name)]


def _memory(bench: Bench, office: Office) -> Figure:
    """Peak memory of a program before and after it has had a million chunks; results are dropped as they come."""
    child = Child(
        [sys.executable, "-c", _MANY, office.env["SUBLET_HOME"], str(CORES)], name="a million chunks", pipes=True
    )
    try:
        at_first = [child.ask(str(bench.either(CHUNKS, 50_000)))]
        at_last = [child.ask(str(bench.either(MANY, 200_000)))]
        if not at_last[0]:
            raise RuntimeError(f"the million did not run: {child.complaint()}")
    finally:
        child.end()
    first, last = json.loads(at_first[0]), json.loads(at_last[0])
    bench.note(f"Peak resident memory of the holder: {first:.0f} MiB, {last:.0f} MiB after the million.")
    return figure(MEMORY, "MiB", [last - first])


ROW: Final = Row(
    name="burst_rate",
    title="a chunk that does nothing costs 5 µs, and a fifth of what it costs with Ray or Dask",
    goals=[
        Goal(figure=RATE, at_most=5),
        Goal(figure=peer_name("ray"), of="ratio", at_least=5),
        Goal(figure=peer_name("dask"), of="ratio", at_least=5),
        Goal(figure=peer_name("ProcessPoolExecutor"), of="ratio", at_least=1),
        Goal(figure=MEMORY, at_most=32),
    ],
    measure=measure,
    limit_s=900,
    distributions=DISTRIBUTIONS,
)
