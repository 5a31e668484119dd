"""What a `%%gpu` cell costs: an empty one that is warm, the first one with torch, and one that finds nothing warm.

Both sides are cells in an ipykernel, driven by jupyter_client as a front end does it. The peer of the empty cell is the
same cell in a plain kernel; the peer of the others is what one would do without an office: start a fresh kernel and
import torch in it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.notebooks import DISTRIBUTIONS, Kernel
from benchmarks.ours import Office, sublet_command
from benchmarks.stats import percentile

EMPTY: Final = "an empty warm cell"
FIRST: Final = "the first cell with torch, office and warm interpreter there"
COLD: Final = "the first cell with torch, nothing there"
GPU: Final = "%%gpu --vram 64MiB --ttl 5m\n"
TORCH: Final = "import torch\nassert torch.zeros(2).sum() == 0"
SETTLE_S: Final = 3.0
"""For what is warmed in the background after a guest was taken."""


def measure(bench: Bench) -> list[Figure]:
    figures = []
    with Office(bench.folder) as office, Kernel(bench.folder / "ours", office.env) as ours:
        ours.run("%load_ext sublet")
        ours.run(GPU + TORCH)
        with Kernel(bench.folder / "plain", office.env) as plain:
            a, b = bench.pairs(
                EMPTY,
                lambda: ours.timed_ms(GPU + "pass"),
                lambda: plain.timed_ms("pass"),
                pairs=bench.either(100, 5),
                show=lambda a, b: f"{a:.1f} ms, plain {b:.1f} ms",
            )
        figures.append(figure(EMPTY, "ms", a, b, peer_name="plain ipykernel", operations=a, peer_operations=b))
        bench.note(f"{EMPTY}: p95 {percentile(a, 95):.1f} ms, of the plain one {percentile(b, 95):.1f} ms.")

        def fresh() -> float:
            began = time.perf_counter()
            with Kernel(bench.folder / "fresh", office.env) as kernel:
                kernel.run(TORCH)
                return (time.perf_counter() - began) * 1e3

        def first() -> float:
            ours.run("%gpu release")
            time.sleep(SETTLE_S)
            return ours.timed_ms(GPU + TORCH)

        figures.append(_against_fresh(bench, FIRST, first, fresh, bench.either(15, 2)))

        def cold() -> float:
            ours.run("%gpu release")
            subprocess.run([*sublet_command(), "down", "--now"], env=office.env, capture_output=True, check=False)
            with Kernel(bench.folder / "cold", office.env) as kernel:
                kernel.run("import sublet")
                return kernel.timed_ms("%load_ext sublet") + kernel.timed_ms(GPU + TORCH)

        figures.append(_against_fresh(bench, COLD, cold, fresh, bench.either(10, 1)))
        subprocess.run([*sublet_command(), "down", "--now"], env=office.env, capture_output=True, check=False)
    return figures


def _against_fresh(
    bench: Bench, name: str, ours: Callable[[], float], fresh: Callable[[], float], pairs: int
) -> Figure:
    a, b = bench.pairs(name, ours, fresh, pairs=pairs, show=lambda a, b: f"{a:.0f} ms, a fresh kernel {b:.0f} ms")
    return figure(name, "ms", a, b, peer_name="fresh kernel and import torch")


ROW: Final = Row(
    name="notebook_cells",
    title="a %%gpu cell costs 10 ms more than a plain one, and its first one a quarter of a fresh kernel with torch",
    goals=[
        Goal(figure=EMPTY, of="difference", at_most=10),
        Goal(figure=FIRST, of="ratio", at_least=4),
        Goal(figure=COLD, of="ratio", at_least=1 / 1.15),
    ],
    measure=measure,
    limit_s=900,
    distributions=DISTRIBUTIONS,
)
