"""What an office costs that nobody uses: memory, and processor time.

Beside it, in the same windows, an etcd that nobody uses: both are there for the whole run, so a window measures both at
once instead of one after the other. No goal is set against it.
"""

from __future__ import annotations

import time
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.etcd import Etcd
from benchmarks.procs import cpu_seconds, memory_of, tree

SETTLE_S: Final = 5
WINDOW_S: Final = 20
WINDOWS: Final = 3
RESIDENT: Final = "resident memory of the office, idle"
TOGETHER: Final = "resident memory with its supervisor"
OWN: Final = "of that shared with nobody"
CPU: Final = "processor, idle"


def measure(bench: Bench) -> list[Figure]:
    window_s, windows = bench.either(WINDOW_S, 2), bench.either(WINDOWS, 1)
    bench.versions["etcd"] = Etcd.version()
    rss: list[float] = []
    together: list[float] = []
    own: list[float] = []
    cpu: list[float] = []
    etcd_rss: list[float] = []
    etcd_own: list[float] = []
    etcd_cpu: list[float] = []
    with Office(bench.folder) as office, Etcd(bench.folder) as etcd:
        bench.say(f"both settle for {SETTLE_S} s")
        time.sleep(SETTLE_S)
        processes = len(tree(office.pid))
        for number in range(windows):
            before, etcd_before, began = _cpu(office.pid), _cpu(etcd.child.pid), time.monotonic()
            time.sleep(window_s)
            took = time.monotonic() - began
            cpu.append((_cpu(office.pid) - before) / took * 100)
            etcd_cpu.append((_cpu(etcd.child.pid) - etcd_before) / took * 100)
            for pid, all_of_it, not_shared in ((office.pid, together, own), (etcd.child.pid, etcd_rss, etcd_own)):
                found = [memory_of(one) for one in tree(pid)]
                all_of_it.append(sum(one.rss for one in found) / 1e6)
                not_shared.append(sum(one.own for one in found) / 1e6)
            rss.append(memory_of(office.pid).rss / 1e6)
            bench.say(
                f"window {number + 1} of {windows}: office {rss[-1]:.1f} MB, with its supervisor {together[-1]:.1f} MB "
                f"and {cpu[-1]:.2f} % of a core, "
                f"etcd {etcd_rss[-1]:.1f} MB and {etcd_cpu[-1]:.2f} %"
            )
    bench.note(
        f"The office, broker and agent, is one process; with its supervisor {processes} processes run, and processor "
        f"time is theirs together. "
        f"Windows of {window_s} s after {SETTLE_S} s of rest; MB are 10⁶ bytes."
    )
    bench.note("The office had no lease and no client; etcd had no key. Both were measured in the same windows.")
    return [
        figure(RESIDENT, "MB", rss, etcd_rss, peer_name="etcd"),
        figure(TOGETHER, "MB", together, etcd_rss, peer_name="etcd"),
        figure(OWN, "MB", own, etcd_own, peer_name="etcd"),
        figure(CPU, "% of a core", cpu, etcd_cpu, peer_name="etcd"),
    ]


def _cpu(pid: int) -> float:
    return sum(cpu_seconds(one) for one in tree(pid))


ROW: Final = Row(
    name="idle_office",
    title="an office that nobody uses costs next to nothing",
    goals=[Goal(figure=RESIDENT, at_most=50), Goal(figure=CPU, at_most=0.5)],
    measure=measure,
    limit_s=180,
    distributions=DISTRIBUTIONS,
)
