"""``GpuSession`` as a program uses it, against the same launches made by Warp in that program.

Ours is the whole way: handles, batches, the socket, another process that checks and launches, and back. The kernel does
next to nothing, so what is timed is the way to it. And memory: written and read, against a copy within one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import Office
from benchmarks.rows.session_launches import SOURCE, THREADS, _peer

PAIRS: Final = 40
BATCH: Final = 1000
SINGLES: Final = 300
MANY: Final = "1,000 launches and a sync"
SINGLE: Final = "one launch and a sync"
MOVED: Final = 256 << 20
WRITTEN: Final = "256 MiB written"
READ: Final = "256 MiB read"


def measure(bench: Bench) -> list[Figure]:
    import numpy as np

    import sublet

    with (
        Office(bench.folder),
        sublet.connect(home=bench.folder / "office") as fabric,
        fabric.gpu(min_vram="1GiB", ttl="10m") as lease,
        sublet.GpuSession(lease) as gpu,
    ):
        module = gpu.module_load(SOURCE, kind="warp")
        x, y, large = gpu.mem_alloc(4 * THREADS), gpu.mem_alloc(4 * THREADS), gpu.mem_alloc(MOVED)
        count, half = sublet.u32(THREADS), sublet.f32(0.5)

        def ours(launches: int) -> None:
            for step in range(launches):
                gpu.launch(module, "saxpy", 1, THREADS, [x, y, half, count, sublet.u64(step)])
            gpu.sync()

        def write() -> None:
            gpu.mem_write(large, 0, data)
            gpu.sync()

        peer = _peer(bench.folder)
        figures = []
        for name, launches, repeats in ((MANY, BATCH, 1), (SINGLE, 1, SINGLES)):
            a, b = bench.pairs(
                name,
                _timed(ours, launches, repeats),
                _timed(peer, launches, repeats),
                pairs=bench.either(PAIRS, 5),
                show=lambda a, b: f"{a:.0f} µs, Warp {b:.0f} µs",
            )
            figures.append(figure(name, "µs", a, b, peer_name="wp.launch"))
        data, into, beside = (np.full(MOVED, value, np.uint8) for value in (1, 2, 3))
        for name, move in (
            (WRITTEN, write),
            (READ, lambda: gpu.mem_read_into(large, 0, into)),
        ):
            a, b = bench.pairs(
                name,
                _ms(move),
                _ms(lambda: beside.__setitem__(slice(None), data)),
                pairs=bench.either(10, 2),
                show=lambda a, b: f"{a:.0f} ms, a copy {b:.0f} ms",
            )
            figures.append(figure(name, "ms", a, b, peer_name="one copy"))
    bench.note("One guest, one host device (the CPU). The peer launches in the program itself, without a guest.")
    return figures


def _timed(launches: Callable[[int], None], count: int, repeats: int) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            launches(count)
        return (time.perf_counter() - began) / repeats * 1e6

    return timed


def _ms(move: Callable[[], Any]) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        move()
        return (time.perf_counter() - began) * 1e3

    return timed


ROW: Final = Row(
    name="gpu_session",
    title="1,000 launches of a GpuSession cost at most half as much again as Warp's own in the same program",
    goals=[Goal(figure=MANY, of="ratio", at_least=1 / 1.5)],
    measure=measure,
    limit_s=300,
    distributions=("sublet", "warp-lang", "numpy"),
)
