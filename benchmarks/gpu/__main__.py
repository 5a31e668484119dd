"""``python -m benchmarks.gpu``: measure every row on the first GPU of this machine, print a table, keep the figures.

``python -m benchmarks.gpu ROW …`` measures these alone, and keeps nothing.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from benchmarks.gpu.rows import IS_SHORT, ROWS, Measured
from sublet.errors import SubletError

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROW_S = 300
RAW = "--json"
"""Before the name of a row: it is measured here, and printed for the program that keeps it."""


def main(arguments: Sequence[str] = ()) -> int:
    """1 where a row gave no result; 0 also where there is no GPU, and then nothing is written."""
    from tests.gpu.gpus import first_gpu

    names = [name for name in arguments if name != RAW]
    if unknown := [name for name in names if name not in ROWS]:
        print(f"There is no row {', '.join(unknown)}; there are: {', '.join(ROWS)}.", file=sys.stderr)
        return 2
    try:
        uuid = first_gpu()
    except SubletError as error:
        print(f"There is no GPU to measure: {error}", file=sys.stderr)
        return 0
    if names != list(arguments):
        print(json.dumps(ROWS[names[0]](uuid)))
        return 0
    found: list[Measured] = []
    failed = 0
    for name in names or ROWS:
        measured = _measured(name)
        failed += not measured
        found += measured
        for one in measured:
            print(_line(one), flush=True)
    if found and not names and not IS_SHORT:
        (RESULTS / "gpu.json").write_text(json.dumps(_document(uuid, found), indent=1) + "\n")
        (RESULTS / "gpu.md").write_text(as_table(uuid, found))
    return 1 if failed else 0


def _measured(name: str) -> list[Measured]:
    """One row, in a process of its own; nothing where it gave no result, and then it was said why."""
    words = [sys.executable, "-m", "benchmarks.gpu", RAW, name]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=ROW_S, check=False)
        found = [Measured(*one) for one in json.loads(done.stdout.splitlines()[-1])]
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        print(f"{name}: no result ({type(error).__name__})", file=sys.stderr)
        return []
    if not found:
        print(f"{name}: no result", file=sys.stderr)
    return found


def as_table(uuid: str, found: Sequence[Measured]) -> str:
    """For people."""
    rows = "\n".join(_line(one) for one in found)
    return (
        "# On a GPU\n\n| what | ours | peer | ours to peer | spread of ours | goal |\n"
        f"| --- | --- | --- | --- | --- | --- |\n{rows}\n\n{_where(uuid)}\n"
    )


def _line(one: Measured) -> str:
    a, b = median(one.ours), median(one.theirs)
    low, *_, high = quantiles(one.ours, n=10)
    return (
        f"| {one.name}, {one.unit} | {a:.3g} | {b:.3g} ({one.peer}) | {a / b:.2f}× | {low:.3g} to {high:.3g} "
        f"| {one.goal or '-'} |"
    )


def _document(uuid: str, found: Sequence[Measured]) -> dict[str, object]:
    return {"where": _where(uuid), "rows": [one._asdict() for one in found]}


def _where(uuid: str) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}, {uuid[:12]}…, Python {platform.python_version()}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
