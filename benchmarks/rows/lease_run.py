"""A call of a Python function that does nothing, there and back, in a worker that is warm.

A sample is the median of many calls, one after the other, as a loop makes them. Ours asks the lease whether a call may
begin, counts it as use, and goes through the guest's fence; the peers are a `ProcessPoolExecutor` of one process, which
does none of that, and the call of a Ray actor. The same with futures: how long each of many takes that are submitted at
once.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import sublet
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.ray import Ray

PAIRS: Final = 40
RAY_PAIRS: Final = 12
CALLS: Final = 500
WARM: Final = "lease.run of nothing"
ACTOR: Final = "lease.run of nothing, against an actor of ray"
MANY: Final = "one of 500 futures"
MAPPED: Final = "one item of a map of 20,000"
ITEMS: Final = 20_000


def nothing() -> None:
    """What is called."""


def same(item: int) -> int:
    """What is mapped."""
    return item


def measure(bench: Bench) -> list[Figure]:
    calls = bench.either(CALLS, 50)
    found = []
    with (
        Office(bench.folder) as office,
        sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric,
        fabric.memory("256MiB", ttl="5m") as lease,
        concurrent.futures.ProcessPoolExecutor(1) as pool,
    ):
        lease.run(nothing)
        pool.submit(nothing).result()
        rows: list[tuple[str, Callable[[], float], Callable[[], float]]] = [
            (WARM, lambda: _median_us(lambda: lease.run(nothing), calls), lambda: _median_us(_waited(pool), calls)),
            (MANY, lambda: _each_us(lease.submit, calls), lambda: _each_us(pool.submit, calls)),
            (MAPPED, lambda: _mapped_us(lambda items: lease.map(same, items)), lambda: _mapped_us(_pool_map(pool))),
        ]
        for name, ours, peer in rows:
            a, b = bench.pairs(
                name, ours, peer, pairs=bench.either(PAIRS, 3), show=lambda a, b: f"{a:.0f} µs, pool {b:.0f} µs"
            )
            found.append(figure(name, "µs", a, b, peer_name="ProcessPoolExecutor"))
        found += _against_ray(bench, lease, calls)
    return found


def _waited(pool: concurrent.futures.ProcessPoolExecutor) -> Callable[[], object]:
    return lambda: pool.submit(nothing).result()


def _pool_map(pool: concurrent.futures.ProcessPoolExecutor) -> Callable[[range], Any]:
    return lambda items: pool.map(same, items, chunksize=256)


def _median_us(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)[count // 2] * 1e6


def _each_us(submit: Callable[..., concurrent.futures.Future[None]], count: int) -> float:
    began = time.perf_counter()
    for future in [submit(nothing) for _ in range(count)]:
        future.result()
    return (time.perf_counter() - began) / count * 1e6


def _mapped_us(mapped: Callable[[range], Any]) -> float:
    began = time.perf_counter()
    assert sum(1 for _ in mapped(range(ITEMS))) == ITEMS
    return (time.perf_counter() - began) / ITEMS * 1e6


def _against_ray(bench: Bench, lease: sublet.Lease, calls: int) -> list[Figure]:
    try:
        with Ray.running(Path(bench.folder)) as ray:
            bench.versions["ray"] = ray.version
            a, b = bench.pairs(
                ACTOR,
                lambda: _median_us(lambda: lease.run(nothing), calls),
                lambda: ray.call_s(calls) * 1e6,
                pairs=bench.either(RAY_PAIRS, 2),
                show=lambda a, b: f"{a:.0f} µs, actor {b:.0f} µs",
            )
    except RuntimeError as error:
        bench.note(f"Ray was not run ({error}).")
        return []
    return [figure(ACTOR, "µs", a, b, peer_name="ray actor")]


ROW: Final = Row(
    name="lease_run",
    title="a call of a function in a warm worker comes back within 300 µs",
    goals=[Goal(figure=WARM, of="ours", at_most=300)],
    measure=measure,
    limit_s=900,
    distributions=DISTRIBUTIONS,
)
