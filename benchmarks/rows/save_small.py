"""10,000 small objects saved durably, and saved again after one of them changed.

Ours are 10,000 named roots, each of which can be restored by itself; the peers write one file with all of them, and
sync it. cloudpickle, dill and joblib run in a process of their own.
"""

from __future__ import annotations

import itertools
import shutil
import time
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.peers.savers import Savers
from sublet.state.checkpoints.store import FolderStore
from sublet.state.checkpoints.writer import Saver

PAIRS: Final = 15
WAYS: Final = ("cloudpickle", "dill", "joblib")
FIRST: Final = "first save of 10,000 small objects"
SECOND: Final = "second save, one of them changed"
BYTES: Final = "bytes of the second save, against the first"


def measure(bench: Bench) -> list[Figure]:
    numbers = itertools.count()
    with Savers.running(bench.folder, 1 << 20) as savers:
        bench.versions.update(savers.versions)
        found, theirs = bench.pairs(
            "both saves",
            lambda: _ours(bench, next(numbers)),
            lambda: {way: savers.save(f"small {way}") for way in WAYS},
            pairs=bench.either(PAIRS, 3),
            show=lambda ours, _: (
                f"{ours[0][0]:.1f} ms and {ours[1][0]:.1f} ms; {ours[0][1]:.0f} and {ours[1][1]:.0f} kB"
            ),
        )
    sizes = ", ".join(f"{way} {size / 1e3:.0f} kB" for way, (_, size) in theirs[0].items())
    bench.note(f"On disk: {sizes}, every time.")
    firsts, seconds = [one for one, _ in found], [two for _, two in found]
    times = [one[0] for one in firsts]
    return [
        *(
            figure(f"{FIRST}, against {way}", "ms", times, [one[way][0] * 1e3 for one in theirs], peer_name=way)
            for way in WAYS
        ),
        figure(FIRST, "ms", times),
        figure(SECOND, "ms", [two[0] for two in seconds]),
        figure(BYTES, "kB", [two[1] for two in seconds], [one[1] for one in firsts], peer_name="the first"),
    ]


def _ours(bench: Bench, number: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Milliseconds and kB of the first save in a fresh folder, and of the second."""
    roots: dict[str, Any] = {f"v{n}": {"n": n, "text": str(n), "half": n * 0.5} for n in range(10_000)}
    folder = bench.folder / f"ours-{number}"
    store, saver = FolderStore(folder), Saver()
    base = store.base()
    found = []
    for _ in range(2):
        began = time.perf_counter()
        staged = saver.save(roots, staging=store.stage(), base=base, author=store.author, wall_ns=0)
        store.publish(staged)
        found.append(((time.perf_counter() - began) * 1e3, staged.report.written_bytes / 1e3))
        base = staged.base
        roots["v5000"]["n"] = -1
    shutil.rmtree(folder)
    return found[0], found[1]


ROW: Final = Row(
    name="save_small",
    title="10,000 small objects saved, and saved again",
    goals=[
        Goal(figure=FIRST, at_most=15),
        Goal(figure=BYTES, of="ratio", at_least=10),
    ],
    measure=measure,
    limit_s=300,
    distributions=("sublet", "blake3", "zstandard"),
)
