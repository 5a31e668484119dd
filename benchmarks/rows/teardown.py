"""From giving a lease back to the news that nothing of it is left: told, left, looked at, durable, said.

A guest that leaves on SIGTERM, one at a time and 64 at once; and one that ignores it, of which the time beyond its
grace is what counts. Beside the first the least that could be: a process that is sent SIGTERM by its parent, which
waits for it.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.holding import Holder, Lease, News, ended_within
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.stats import percentile

PAIRS: Final = 200
DEAF_ROUNDS: Final = 12
MANY: Final = 64
MANY_ROUNDS: Final = 8
ONE: Final = "confirmed after release, one guest"
CROWD: Final = f"confirmed after release, {MANY} guests at once"
DEAF: Final = "confirmed after the grace, one guest that ignores SIGTERM"
DEAF_CROWD: Final = f"confirmed after the grace, {MANY} guests that ignore SIGTERM"
TTL_S: Final = 20.0
GRACE_S: Final = TTL_S / 10
_WANT: Final = {"kind": "memory", "amount": 32 << 20}
_LISTENS: Final = ("/bin/sleep", "1000")
_IGNORES: Final = ("/bin/sh", "-c", "trap '' TERM; echo deaf; exec sleep 1000")


def measure(bench: Bench) -> list[Figure]:
    with Office(bench.folder) as office, Holder(office) as holder, ended_within(office) as news:
        one, peer = bench.pairs(
            ONE,
            lambda: _release(office, news, _guests(holder, 1, _LISTENS))[0],
            _kill_and_wait_ms,
            pairs=bench.either(PAIRS, 20),
            show=lambda a, b: f"{a:.1f} ms, a parent that waits {b:.1f} ms",
        )
        figures = [figure(ONE, "ms", one, peer, peer_name="kill and wait", operations=one, peer_operations=peer)]
        for name, argv, many, rounds in (
            (CROWD, _LISTENS, MANY, bench.either(MANY_ROUNDS, 2)),
            (DEAF, _IGNORES, 1, bench.either(DEAF_ROUNDS, 2)),
            (DEAF_CROWD, _IGNORES, MANY, bench.either(2, 1)),
        ):
            found: list[float] = []
            medians: list[float] = []
            grace_ms = GRACE_S * 1e3 if argv is _IGNORES else 0.0
            for number in range(rounds):
                bench.await_quiet()
                took = [ms - grace_ms for ms in _release(office, news, _guests(holder, many, argv))]
                if min(took) < 0:
                    raise RuntimeError(f"a guest that ignores SIGTERM was gone {-min(took):.0f} ms before its time.")
                found += took
                medians.append(percentile(took, 50))
                bench.say(f"{name}, {number + 1} of {rounds}: median {medians[-1]:.1f} ms, most {max(took):.1f} ms")
            figures.append(figure(name, "ms", medians, operations=found))
    bench.note(
        "From sending the release to reading the news of the lease's end, which is durable by then. Each guest has a "
        "lease of its own; all releases of a crowd are sent before any answer is read."
    )
    bench.note(f"The grace is {GRACE_S:g} s: a tenth of the time to live. What is timed of the deaf begins after it.")
    return figures


def _guests(holder: Holder, many: int, argv: Sequence[str]) -> list[Lease]:
    """So many leases, each with a guest that runs."""
    leases = []
    for _ in range(many):
        lease = holder.take(_WANT, ttl_s=TTL_S)
        guest = lease.start(*argv)
        if argv is _IGNORES:
            guest.first_line()
        leases.append(lease)
    return leases


def _release(office: Office, news: News, leases: Sequence[Lease]) -> list[float]:
    """Milliseconds until each was over."""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(Holder(office)) for _ in leases]
        began = {}
        for holder in holders:  # as programs that have been there for a while
            holder.ask("GET", "/v1/status", {})
        for lease, holder in zip(leases, holders, strict=True):
            began[lease.id] = time.perf_counter()
            lease.begin_release(holder)
        ended = news.ended([lease.id for lease in leases])
        for lease, holder in zip(leases, holders, strict=True):
            holder.answer()
            lease.close()
    return [(ended[lease.id] - began[lease.id]) * 1e3 for lease in leases]


def _kill_and_wait_ms() -> float:
    with subprocess.Popen(_LISTENS, stdin=subprocess.DEVNULL) as process:
        began = time.perf_counter()
        process.terminate()
        process.wait()
        return (time.perf_counter() - began) * 1e3


ROW: Final = Row(
    name="teardown",
    title="what ran under a lease is gone, and was seen to be, a moment after its end",
    goals=[
        Goal(figure=ONE, at_most=50),
        Goal(figure=CROWD, at_most=50),
        Goal(figure=DEAF, at_most=100),
        Goal(figure=DEAF_CROWD, at_most=100),
    ],
    measure=measure,
    limit_s=600,
    distributions=DISTRIBUTIONS,
)
