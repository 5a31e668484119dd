"""What 200 guests cost that do nothing: memory and processor time of the supervisor and of the office, and whether
either grows with them or with time.

Each guest has a lease of its own. The supervisor stays when everything else goes, so it has to be small.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.holding import Holder, Lease, News, ended_within, supervisor_pid
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.procs import cpu_seconds, memory_of

GUESTS: Final = 200
ENDED_AT_ONCE: Final = 50
WINDOW_S: Final = 20.0
WINDOWS: Final = 4
SETTLE_S: Final = 3.0
SUPERVISOR: Final = f"supervisor, resident with {GUESTS} guests"
AGAIN: Final = "supervisor, more descriptors after all have ended than before"
_WANT: Final = {"kind": "memory", "amount": 16 << 20}
TTL_S: Final = 3600.0


def measure(bench: Bench) -> list[Figure]:
    window_s, windows = bench.either(WINDOW_S, 3.0), bench.either(WINDOWS, 2)
    with Office(bench.folder) as office, Holder(office) as holder, ended_within(office) as news:
        supervisor = supervisor_pid(office)
        _first_of_all(holder, news)
        time.sleep(SETTLE_S)
        empty = _Look(office.pid), _Look(supervisor)
        began = time.perf_counter()
        leases = _start(holder)
        started_s = time.perf_counter() - began
        bench.say(f"{GUESTS} guests run after {started_s:.1f} s")
        try:
            time.sleep(SETTLE_S)
            full = _windows(bench, office.pid, supervisor, window_s, windows)
        finally:
            with ended_within(office) as fresh:
                _end(leases, fresh)
        time.sleep(SETTLE_S)
        after = _Look(office.pid), _Look(supervisor)
    bench.note(f"Guests are `sleep`, each under a lease of its own; starting {GUESTS} took {started_s:.1f} s.")
    bench.note("MB are 10⁶ bytes. Proportional memory counts what is shared by its share. Before: after one guest.")
    return _figures(empty, full, after)


class _Look:
    """One process at one moment."""

    def __init__(self, pid: int) -> None:
        self.at = time.monotonic()
        self.rss = memory_of(pid).rss / 1e6
        self.pss = _pss(pid) / 1e6
        self.cpu_s = cpu_seconds(pid)
        self.fds = len(os.listdir(f"/proc/{pid}/fd"))


def _first_of_all(holder: Holder, news: News) -> None:
    """What is loaded for the first guest is not growth."""
    lease = holder.take(_WANT, ttl_s=TTL_S)
    lease.start("/bin/sleep", "1000")
    lease.release()
    news.ended([lease.id])


def _end(leases: list[Lease], news: News) -> None:
    """Not all at once: the office tells no more than so many things to who does not read meanwhile."""
    for first in range(0, len(leases), ENDED_AT_ONCE):
        some = leases[first : first + ENDED_AT_ONCE]
        for lease in some:
            lease.release()
        news.ended([lease.id for lease in some])


def _start(holder: Holder) -> list[Lease]:
    leases = []
    for _ in range(GUESTS):
        leases.append(lease := holder.take(_WANT, ttl_s=TTL_S))
        lease.start("/bin/sleep", "100000")
    return leases


def _windows(bench: Bench, office: int, supervisor: int, window_s: float, windows: int) -> list[tuple[_Look, _Look]]:
    looks = [(_Look(office), _Look(supervisor))]
    for number in range(windows):
        time.sleep(window_s)
        looks.append((_Look(office), _Look(supervisor)))
        both = " and ".join(
            f"{name} {look.rss:.1f} MB, {(look.cpu_s - before.cpu_s) / (look.at - before.at) * 100:.2f} % of a core"
            for name, look, before in zip(("office", "supervisor"), looks[-1], looks[-2], strict=True)
        )
        bench.say(f"window {number + 1} of {windows}: {both}")
    return looks


def _figures(empty: tuple[_Look, _Look], full: list[tuple[_Look, _Look]], after: tuple[_Look, _Look]) -> list[Figure]:
    figures = []
    for place, name in ((1, "supervisor"), (0, "office")):
        looks = [both[place] for both in full]
        pairs = list(itertools.pairwise(looks))
        figures += [
            figure(f"{name}, resident with {GUESTS} guests", "MB", [look.rss for look in looks]),
            figure(f"{name}, proportional with {GUESTS} guests", "MB", [look.pss for look in looks]),
            figure(f"{name}, for each guest", "KB", [(look.rss - empty[place].rss) / GUESTS * 1e3 for look in looks]),
            figure(
                f"{name}, processor with {GUESTS} guests",
                "% of a core",
                [(b.cpu_s - a.cpu_s) / (b.at - a.at) * 100 for a, b in pairs],
            ),
            figure(
                f"{name}, growth in an hour of rest",
                "MB",
                [(looks[-1].rss - looks[0].rss) / (looks[-1].at - looks[0].at) * 3600],
            ),
            figure(f"{name}, resident before", "MB", [empty[place].rss]),
            figure(f"{name}, resident after all have ended", "MB", [after[place].rss]),
            figure(
                f"{name}, more descriptors after all have ended than before",
                "descriptors",
                [after[place].fds - empty[place].fds],
            ),
        ]
    return figures


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say how much memory is shared by how many.")


ROW: Final = Row(
    name="guests_200",
    title="two hundred guests at rest cost next to nothing, and the supervisor stays small",
    goals=[
        Goal(figure=SUPERVISOR, at_most=28),
        Goal(figure=AGAIN, at_most=0),
    ],
    measure=measure,
    limit_s=400,
    distributions=DISTRIBUTIONS,
)
