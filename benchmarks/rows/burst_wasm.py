"""WebAssembly tasklets: how many a second, and what counting fuel costs on a loop, against plain wasmtime.

Both sides run in this process, on one thread: ours is `WasmTasklet` called as a worker calls it, with its limits, its
own memory and a fresh instance for each call. The peer compiles the same module once and makes a fresh instance for
each call too, without fuel, limits or checks. Fuel and the epoch are looked at once for each turn of a loop, so the
length of its body decides; floating-point results cost one comparison each, which makes their NaNs canonical.
The tasklets of a whole burst are shown beside it.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Final

import sublet
import sublet.jobs
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.machine import usable_cores
from benchmarks.ours import DISTRIBUTIONS, Office

PAIRS: Final = 9
SHORT_PAIRS: Final = 61
"""Of what takes microseconds: many short samples, since the machine's caches are shared with other things."""
CALLS: Final = 200
CORES: Final = len(usable_cores())
LOOP: Final = "an integer loop of 16 operations a turn, with fuel"
SHORT: Final = "one of four operations a turn, with fuel"
FLOATS: Final = "64 × 64 matrices multiplied, with fuel"
SMALL: Final = "one tasklet that does nothing"
BURST: Final = "one tasklet of a burst of 20,000"
_SMALL: Final = """(module (memory (export "memory") 1)
  (func (export "run") (param i32 i32) (result i32) i32.const 0))"""
_STEP: Final = """
      (local.set $x (i32.add (i32.mul (local.get $x) (i32.const 1664525)) (i32.const 1013904223)))
      (local.set $y (i32.xor (local.get $y) (i32.rotl (local.get $x) (i32.const 7))))"""
_FLOATS: Final = """(module (memory (export "memory") 2)
  (func (export "run") (param i32 i32) (result i32)
    (local $round i32) (local $i i32) (local $j i32) (local $k i32) (local $sum f64)
    (loop $again (local.set $i (i32.const 0))
      (loop $row (local.set $j (i32.const 0))
        (loop $column (local.set $k (i32.const 0)) (local.set $sum (f64.const 0))
          (loop $inner
            (local.set $sum (f64.add (local.get $sum) (f64.mul
              (f64.load (i32.add (i32.mul (local.get $i) (i32.const 512)) (i32.mul (local.get $k) (i32.const 8))))
              (f64.load offset=32768
                (i32.add (i32.mul (local.get $k) (i32.const 512)) (i32.mul (local.get $j) (i32.const 8)))))))
            (br_if $inner (i32.lt_u (local.tee $k (i32.add (local.get $k) (i32.const 1))) (i32.const 64))))
          (f64.store offset=65536
            (i32.add (i32.mul (local.get $i) (i32.const 512)) (i32.mul (local.get $j) (i32.const 8))) (local.get $sum))
          (br_if $column (i32.lt_u (local.tee $j (i32.add (local.get $j) (i32.const 1))) (i32.const 64))))
        (br_if $row (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 64))))
      (br_if $again (i32.lt_u (local.tee $round (i32.add (local.get $round) (i32.const 1))) (i32.const 50))))
    i32.const 0))"""


def _loop(steps: int, turns: int) -> str:
    return f"""(module (memory (export "memory") 1)
  (func (export "run") (param i32 i32) (result i32) (local $n i32) (local $x i32) (local $y i32)
    (local.set $n (i32.const {turns}))
    (loop $again {_STEP * steps}
      (br_if $again (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))
    (i32.store (i32.const 0) (local.get $y))
    i32.const 0))"""


def measure(bench: Bench) -> list[Figure]:
    few, many = bench.either(PAIRS, 3), bench.either(SHORT_PAIRS, 3)
    figures = []
    for name, text, count, pairs, unit, scale in (
        (LOOP, _loop(4, 10_000_000), 1, few, "ms", 1e3),
        (SHORT, _loop(1, 20_000_000), 1, few, "ms", 1e3),
        (FLOATS, _FLOATS, 1, few, "ms", 1e3),
        (SMALL, _SMALL, CALLS, many, "µs", 1e6),
    ):
        ours, theirs = sublet.jobs.WasmTasklet(text, fuel=10**12), _Plain(text)
        a, b = bench.pairs(
            name,
            functools.partial(_each, ours, count, scale),
            functools.partial(_each, theirs, count, scale),
            pairs=pairs,
            show=lambda a, b: f"{a:.1f}, wasmtime {b:.1f}",
        )
        figures.append(figure(name, unit, a, b, peer_name="wasmtime"))
    figures.append(_burst(bench, sublet.jobs.WasmTasklet(_SMALL), bench.either(20_000, 2_000), bench.either(3, 1)))
    return figures


def _each(call: Any, count: int, scale: float) -> float:
    """The processor's time of one call, in seconds times ``scale``."""
    began = time.thread_time()
    for _ in range(count):
        call(b"")
    return (time.thread_time() - began) / count * scale


class _Plain:
    """The same module in plain wasmtime: compiled once, an instance for each call."""

    def __init__(self, text: str) -> None:
        import wasmtime

        self._wasmtime: Any = wasmtime
        self._engine = wasmtime.Engine()
        self._module = wasmtime.Module(self._engine, text)

    def __call__(self, data: bytes) -> None:
        store = self._wasmtime.Store(self._engine)
        exports = self._wasmtime.Instance(store, self._module, []).exports(store)
        if exports["run"](store, 0, len(data)):
            raise RuntimeError("the module failed.")


def _burst(bench: Bench, tasklet: sublet.jobs.WasmTasklet, count: int, rounds: int) -> Figure:
    samples = []
    with Office(bench.folder) as office, sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric:
        for _ in range(rounds + 1):
            began = time.perf_counter()
            found = sum(1 for _ in sublet.jobs.map(tasklet, [b""] * count, want=CORES, fabric=fabric))
            assert found == count
            samples.append((time.perf_counter() - began) / count * 1e6)
    return figure(BURST, "µs", samples[1:])


ROW: Final = Row(
    name="burst_wasm",
    title="a WebAssembly tasklet and fuel on its loop cost at most a fifth, against plain wasmtime",
    goals=[Goal(figure=LOOP, of="ratio", at_least=1 / 1.2), Goal(figure=SMALL, of="ratio", at_least=1 / 1.2)],
    measure=measure,
    limit_s=300,
    distributions=(*DISTRIBUTIONS, "wasmtime"),
)
