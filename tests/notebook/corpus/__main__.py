"""``python -m tests.notebook.corpus``: run notebooks plain and leased, and print what differs.

python -m tests.notebook.corpus --notebooks karpathy_mm1,closures --modes all,half --seed 3
"""

from __future__ import annotations

import argparse
import collections
import signal
import sys
import tempfile
from pathlib import Path

from tests.notebook.corpus.compare import compare
from tests.notebook.corpus.notebooks import ALL, find
from tests.notebook.corpus.run import Run, office_on, run_notebook


def print_trace(name: str, plain: Run, leased: Run) -> None:
    """Where the parts of this name's value first begin to differ."""
    for number, (one, two) in enumerate(zip(plain.cells, leased.cells, strict=False)):
        if one.trace != two.trace:
            pairs = enumerate(zip(one.trace, two.trace, strict=False))
            at = next((n for n, (a, b) in pairs if a != b), min(len(one.trace), len(two.trace)))
            print(f"    {name} after cell {number}, part {at}: {one.trace[max(0, at - 12) : at + 3]}")
            print(f"      leased: {two.trace[max(0, at - 3) : at + 3]}")
            return


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.notebook.corpus")
    parser.add_argument("--notebooks", default=",".join(ALL), help="comma-separated (default: all)")
    parser.add_argument("--modes", default="all,half,rest", help="comma-separated (default: all,half,rest)")
    parser.add_argument("--seed", type=int, default=1, help="of the halves (default: 1)")
    parser.add_argument("--once", action="store_true", help="one plain run instead of two")
    parser.add_argument("--reasons", action="store_true", help="also print differences that have a named reason")
    parser.add_argument("--trace", default="", help="a name: show where the parts of its value begin to differ")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # kernels and office end with it
    failures = 0
    with tempfile.TemporaryDirectory(prefix="corpus-") as place, office_on(Path(place) / "home") as env:
        for name in asked.notebooks.split(","):
            notebook = find(name)
            if notebook is None:
                print(f"{name}: left out, SUBLET_MATERIAL does not name a folder that has it")
                continue
            plain = run_notebook(notebook, "plain", Path(place) / "plain", env, trace=asked.trace)
            again = None if asked.once else run_notebook(notebook, "plain", Path(place) / "again", env)
            print(f"{name}: {len(notebook.cells)} cells, plain {plain.took_s:.1f} s", flush=True)
            for mode in asked.modes.split(","):
                run = run_notebook(
                    notebook,
                    mode,
                    Path(place) / mode,
                    env,
                    seed=asked.seed,
                    load=tuple(plain.loaded),
                    trace=asked.trace,
                )
                found = compare(plain, again, run)
                counted = collections.Counter(one.reason.name for one in found if one.reason)
                print(f"  {mode}: {run.took_s:.1f} s, named: {dict(counted)}", flush=True)
                more_s = [two.took_s - one.took_s for one, two in zip(plain.cells, run.cells, strict=False)]
                at = max(range(len(more_s)), key=more_s.__getitem__)
                print(f"    most more in cell {at}: {run.cells[at].took_s:.2f} s, plain {plain.cells[at].took_s:.2f} s")
                print_trace(asked.trace, plain, run)
                seen = set()
                for one in found:
                    if one.reason is None or asked.reasons:
                        what = (one.facet, one.key, one.leased)
                        if one.facet in ("name", "setting") and what in seen:
                            continue
                        seen.add(what)
                        failures += one.reason is None
                        print(f"  {one}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
