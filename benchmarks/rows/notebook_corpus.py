"""Whole notebooks with `%%gpu` on every cell, beside the same notebooks in a plain kernel.

The notebooks are those of the corpus that the tests compare cell by cell: the project's own, and other people's where
`SUBLET_MATERIAL` names a folder that has them. A sample is the time of all cells of all notebooks, as the front end
sees it; the first cell of each waits for its process on the device. Kernels start outside of the measured time.
"""

from __future__ import annotations

from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.notebooks import DISTRIBUTIONS
from benchmarks.ours import Office
from benchmarks.stats import percentile
from tests.notebook.corpus.notebooks import ALL, Mode, Notebook, find
from tests.notebook.corpus.run import run_notebook

TOTAL: Final = "all notebooks"
FURTHEST: Final = "the notebook that is furthest above twice plain plus 2 s"
FEW: Final = ("byte_pairs", "frames")
TTL: Final = "--ttl 5m"


def measure(bench: Bench) -> list[Figure]:
    names = bench.either(ALL, FEW)
    notebooks = [found for name in names if (found := find(name)) is not None]
    missing = sorted(set(names) - {one.name for one in notebooks})
    if missing:
        bench.note(f"Left out, since SUBLET_MATERIAL names no folder that has them: {', '.join(missing)}.")
    plain_s: dict[str, list[float]] = {one.name: [] for one in notebooks}
    leased_s: dict[str, list[float]] = {one.name: [] for one in notebooks}
    with Office(bench.folder) as office:

        def took(notebook: Notebook, mode: Mode) -> float:
            run = run_notebook(notebook, mode, bench.folder / "run", office.env, options=TTL, looks=False)
            if run.died_in is not None:
                raise RuntimeError(f"the kernel of {notebook.name} died in cell {run.died_in}")
            return run.took_s

        def every(mode: Mode, into: dict[str, list[float]]) -> float:
            total = 0.0
            for notebook in notebooks:
                spent = took(notebook, mode)
                into[notebook.name].append(spent)
                total += spent
            return total

        a, b = bench.pairs(
            TOTAL,
            lambda: every("all", leased_s),
            lambda: every("plain", plain_s),
            pairs=bench.either(5, 1),
            show=lambda a, b: f"{a:.1f} s, plain {b:.1f} s, {a / b:.2f} times",
        )
    middle = {name: (percentile(leased_s[name], 50), percentile(plain_s[name], 50)) for name in plain_s}
    above = {name: leased - (2 * plain + 2) for name, (leased, plain) in middle.items()}
    furthest = max(above, key=above.__getitem__)
    bench.note(f"Furthest above twice plain plus 2 s: {furthest}, {above[furthest]:+.1f} s.")
    for name, (leased, plain) in middle.items():
        spread = " to ".join(f"{percentile(leased_s[name], place):.1f}" for place in (10, 90))
        bench.note(f"{name}: {leased:.1f} s ({spread}), plain {plain:.1f} s, {leased / plain:.2f} times.")
    return [
        figure(TOTAL, "s", a, b, peer_name="plain ipykernel"),
        figure(FURTHEST, "s", [above[furthest]]),
    ]


ROW: Final = Row(
    name="notebook_corpus",
    title="whole notebooks with %%gpu on every cell take at most 1.3 times as long as plain ones",
    goals=[
        Goal(figure=TOTAL, of="ratio", at_least=1 / 1.3),
        Goal(figure=FURTHEST, of="ours", at_most=0.0),
    ],
    measure=measure,
    limit_s=7200,
    distributions=(*DISTRIBUTIONS, "pandas", "matplotlib", "scikit-learn"),
)
