"""What large values cost a `%%gpu` cell: half a million strings, a figure with 100 subplots, one that is deleted.

The peer is the same cell in a plain kernel. Both show the figure below the cell, as a notebook does unless it is told
otherwise. (Another backend, such as `%matplotlib agg`, stays on the side that chose it: the notebook then draws the
figure once more, to show it.) The set holds values that are equal or have the same hash beside its
strings (-1 and -2; `True`, which is all that a set keeps of 1, 1.0 and True), and each cell says which of them it has.
"""

from __future__ import annotations

from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.notebooks import DISTRIBUTIONS, Kernel
from benchmarks.ours import Office

STRINGS: Final = "a set of 500,000 strings, read and unchanged"
SUBPLOTS: Final = "100 subplots, made by a cell and left under their names"
DELETED: Final = "a figure with 100 subplots, deleted"
GPU: Final = "%%gpu --vram 64MiB --ttl 5m\n"
MAKE: Final = "words = {{str(n) for n in range({count})}} | {{-1, -2, True, 'True', '1'}}"
READ: Final = "assert len(words) == {size} and -1 in words and -2 in words and [w for w in words if w == 1] == [True]"
DRAW: Final = "fig, axes = plt.subplots({side}, {side})"
WARM: Final = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nplt.close('all')\ndel fig, ax"


def measure(bench: Bench) -> list[Figure]:
    count, side = bench.either(500_000, 20_000), bench.either(10, 3)
    figures = []
    with (
        Office(bench.folder) as office,
        Kernel(bench.folder / "ours", office.env) as ours,
        Kernel(bench.folder / "plain", office.env) as plain,
    ):
        ours.run("%load_ext sublet")
        read = READ.format(size=count + 4)  # '1' is one of the numbers
        both = ((ours, GPU), (plain, ""))
        for kernel, line in both:
            kernel.run(MAKE.format(count=count))
            kernel.run(line + read)
        a, b = bench.pairs(
            STRINGS,
            lambda: ours.timed_ms(GPU + read),
            lambda: plain.timed_ms(read),
            pairs=bench.either(20, 2),
            show=lambda a, b: f"{a:.0f} ms, plain {b:.0f} ms",
        )
        figures.append(figure(STRINGS, "ms", a, b, peer_name="plain ipykernel"))
        for kernel, line in both:
            kernel.run(f"{line}%matplotlib inline\n{WARM}")

        deleted: tuple[list[float], list[float]] = [], []

        def drawn(kernel: Kernel, line: str, into: list[float]) -> float:
            took_ms = kernel.timed_ms(line + DRAW.format(side=side))
            kernel.run(f"{line}plt.close('all')")
            into.append(kernel.timed_ms(f"{line}del fig, axes"))
            return took_ms

        a, b = bench.pairs(
            SUBPLOTS,
            lambda: drawn(ours, GPU, deleted[0]),
            lambda: drawn(plain, "", deleted[1]),
            pairs=bench.either(7, 1),
            show=lambda a, b: f"{a:.0f} ms, plain {b:.0f} ms",
        )
        figures.append(figure(SUBPLOTS, "ms", a, b, peer_name="plain ipykernel"))
        figures.append(figure(DELETED, "ms", deleted[0][1:], deleted[1][1:], peer_name="plain ipykernel"))
    return figures


ROW: Final = Row(
    name="notebook_large",
    title="500,000 strings are read in 50 ms more than in a plain kernel, 100 subplots left in 1 s, deleted in 50 ms",
    goals=[
        Goal(figure=STRINGS, of="difference", at_most=50),
        Goal(figure=SUBPLOTS, of="difference", at_most=1000),
        Goal(figure=DELETED, of="difference", at_most=50),
    ],
    measure=measure,
    limit_s=600,
    distributions=(*DISTRIBUTIONS, "matplotlib"),
)
