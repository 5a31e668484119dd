"""A large array as an argument: the first call, and the second when nothing in it has changed.

The first is held against one copy of the array into fresh shared memory, which somebody must make. The second copies
nothing; what it costs is to know that nothing has changed. It is held against a hash of the array, which is what it
takes where the kernel cannot tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import shared_memory
from typing import Any, Final

import numpy as np
from blake3 import blake3

import sublet
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import DISTRIBUTIONS, Office
from sublet.state.transfer.pages import process_pages

PAIRS: Final = 20
FIRST: Final = "first call with 1 GiB"
AGAIN: Final = "the call after it, nothing changed"
CHANGED: Final = "the call after one number was changed"


def length(array: Any) -> int:
    """What is called: it looks at nothing of the array."""
    return len(array)


def measure(bench: Bench) -> list[Figure]:
    size = bench.either(1 << 30, 1 << 26)
    pairs = bench.either(PAIRS, 3)
    found = []
    with (
        Office(bench.folder) as office,
        sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric,
        fabric.memory("256MiB", ttl="5m") as lease,
    ):
        lease.run(length, np.zeros(1))
        for name, ours, peer, what in (
            (FIRST, lambda: _first_ms(lease, size), lambda: _copy_ms(size), "one copy into fresh shared memory"),
            (AGAIN, _again(lease, size, change=False), _hash(size), "one blake3 pass on one thread"),
            (CHANGED, _again(lease, size, change=True), lambda: _copy_ms(size), "one copy into fresh shared memory"),
        ):
            a, b = bench.pairs(name, ours, peer, pairs=pairs, show=lambda a, b: f"{a:.2f} ms, peer {b:.2f} ms")
            found.append(figure(name, "ms", a, b, peer_name=what))
    if not process_pages().usable():
        bench.note("This kernel does not tell which pages were written to, so the array was compared byte by byte.")
    return found


def _first_ms(lease: sublet.Lease, size: int) -> float:
    array = np.full(size // 8, time.perf_counter())
    began = time.perf_counter()
    lease.run(length, array)
    return (time.perf_counter() - began) * 1e3


def _again(lease: sublet.Lease, size: int, *, change: bool) -> Callable[[], float]:
    array = np.full(size // 8, 1.5)

    def once() -> float:
        lease.run(length, array)
        lease.run(length, array)
        if change:
            array[len(array) // 2] += 1
        began = time.perf_counter()
        lease.run(length, array)
        return (time.perf_counter() - began) * 1e3

    return once


def _copy_ms(size: int) -> float:
    array = np.full(size // 8, time.perf_counter())
    began = time.perf_counter()
    shared = shared_memory.SharedMemory(create=True, size=size)
    there = np.ndarray(array.shape, array.dtype, shared.buf)
    there[:] = array
    took = time.perf_counter() - began
    del there
    shared.close()
    shared.unlink()
    return took * 1e3


def _hash(size: int) -> Callable[[], float]:
    array = np.full(size // 8, 1.5)

    def once() -> float:
        began = time.perf_counter()
        blake3(array.data.cast("B")).digest()
        return (time.perf_counter() - began) * 1e3

    return once


ROW: Final = Row(
    name="lease_run_arrays",
    title="an array of 1 GiB goes to a worker for the price of one copy, and not again while it is unchanged",
    goals=[
        Goal(figure=FIRST, of="ratio", at_least=1 / 1.7),
        Goal(figure=AGAIN, of="ours", at_most=1.0),
    ],
    measure=measure,
    limit_s=900,
    distributions=(*DISTRIBUTIONS, "numpy", "blake3"),
)
