"""10,000 small objects saved durably, and saved again after one of them changed.

Ours are 10,000 named roots, each of which can be restored by itself; the peers write one file with all of them, and
sync it. cloudpickle, dill and joblib run in a process of their own.
"""

from __future__ import annotations

import shutil
import time
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.peers.savers import Savers
from sublet.durable.saving import Saver
from sublet.durable.store import FolderStore

PAIRS: Final = 15
FIRST: Final = "first save of 10,000 small objects"
SECOND: Final = "second save, one of them changed"
BYTES: Final = "bytes of the second save, against the first"


def measure(bench: Bench) -> list[Figure]:
    pairs = bench.either(PAIRS, 3)
    firsts: list[float] = []
    seconds: list[float] = []
    first_bytes: list[float] = []
    second_bytes: list[float] = []
    others: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    with Savers.running(bench.folder, 1 << 20) as savers:
        bench.versions.update(savers.versions)
        for number in range(pairs + 1):
            one, two = _ours(bench, number)
            for way in ("cloudpickle", "dill", "joblib"):
                took, sizes[way] = savers.save(f"small {way}")
                others.setdefault(way, []).append(took * 1e3)
            bench.say(f"{one[0]:.1f} ms and {two[0]:.1f} ms; {one[1]:.0f} and {two[1]:.0f} kB")
            if not number:
                others.clear()
                continue
            firsts.append(one[0])
            seconds.append(two[0])
            first_bytes.append(one[1])
            second_bytes.append(two[1])
    bench.note("On disk: " + ", ".join(f"{way} {size / 1e3:.0f} kB" for way, size in sizes.items()) + ", every time.")
    return [
        *(figure(f"{FIRST}, against {way}", "ms", firsts, took, peer_name=way) for way, took in others.items()),
        figure(FIRST, "ms", firsts),
        figure(SECOND, "ms", seconds),
        figure(BYTES, "kB", second_bytes, first_bytes, peer_name="the first"),
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
        staged = saver.save(roots, staging=store.stage(), base=base, who=store.who, wall_ns=0)
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
