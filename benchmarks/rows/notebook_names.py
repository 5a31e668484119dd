"""Ten thousand names, one of them changed: what a cell that reads one of them, or all, waits for before it begins.

The peer is what tools do that send a namespace whole for every cell: `dill.dumps` of it, in an environment of its own.
Ours is `send`, with the change found and taken in on the other side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.notebooks import DISTRIBUTIONS, shell_in
from benchmarks.ours import Office
from benchmarks.peers.venv import python_with, version_in
from benchmarks.procs import Child

NAMES: Final = 10_000
ONE: Final = "a cell that reads one name of 10,000"
ALL: Final = "a cell that reads all of 10,000 names"
GPU: Final = "%%gpu --vram 64MiB --ttl 10m\n"
MAKE: Final = "globals().update({f'v{n}': {'n': n, 'text': str(n), 'half': n * 0.5} for n in range(%d)})"
_DILL: Final = """
import sys, time, dill
space = {f"v{n}": {"n": n, "text": str(n), "half": n * 0.5} for n in range(int(sys.argv[1]))}
print("up", flush=True)
for number, line in enumerate(sys.stdin):
    space["v7"]["n"] = number
    began = time.perf_counter()
    dill.dumps(space)
    print((time.perf_counter() - began) * 1e3, flush=True)
"""


def measure(bench: Bench) -> list[Figure]:
    names = bench.either(NAMES, NAMES // 4)
    with (
        Office(bench.folder) as office,
        shell_in(office.env["SUBLET_HOME"]) as shell,
        _dill(bench, names) as dill_ms,
    ):
        shell.run(MAKE % names)
        shell.run(f"every = [f'v{{n}}' for n in range({names})]")
        reads_all = GPU + "total = sum(v['n'] for k, v in globals().items() if k[0] == 'v' and k[1:].isdigit())"
        shell.run(reads_all)
        number = 0

        def change() -> None:
            nonlocal number
            number += 1
            shell.run(f"v7['n'] = {number}")

        def one() -> float:
            change()
            shell.run(GPU + "s = v7['n']")
            return shell.send_ms

        def every() -> float:
            change()
            shell.run(reads_all)
            return shell.send_ms

        figures = []
        for name, ours in ((ONE, one), (ALL, every)):
            a, b = bench.pairs(
                name, ours, dill_ms, pairs=bench.either(20, 3), show=lambda a, b: f"{a:.2f} ms, dill {b:.1f} ms"
            )
            figures.append(figure(name, "ms", a, b, peer_name="dill of all"))
    return figures


@contextlib.contextmanager
def _dill(bench: Bench, names: int) -> Iterator[Callable[[], float]]:
    python: Path = python_with("dill", bench.folder)
    bench.versions["dill"] = version_in(python, "dill")
    child = Child([str(python), "-c", _DILL, str(names)], name="dill", pipes=True)
    try:
        if child.answer().strip() != "up":
            raise RuntimeError(f"dill did not start: {child.complaint()}")
        yield lambda: float(child.ask("again"))
    finally:
        child.end()


ROW: Final = Row(
    name="notebook_names",
    title="of 10,000 names a cell waits for those it reads: 50 times faster than dill of all for one, 5 for all",
    goals=[Goal(figure=ONE, of="ratio", at_least=50), Goal(figure=ALL, of="ratio", at_least=5)],
    measure=measure,
    limit_s=900,
    distributions=DISTRIBUTIONS,
)
