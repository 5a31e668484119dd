"""Ten thousand live leases with a TTL of 30 s, each renewed at about 0.70 of it: what that costs the office.

Two ways: a hundred programs with a hundred leases each, which renew theirs in one message; and ten thousand programs
with one lease each, the most messages there can be. Every renewal is durable and confirmed before its answer, as
always. The goal is set for both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.load.http1 import Request, ask
from benchmarks.load.paced import Due, PacedSample
from benchmarks.load.remote import ClosedGenerator, PacedGenerator
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.procs import cpu_seconds, memory_of, tree

LEASES: Final = 10_000
TOGETHER: Final = 100
TTL_S: Final = 30.0
RENEW_AT: Final = 0.70
JITTER: Final = 0.10
WINDOWS: Final = 3
WINDOW_S: Final = 24.0
"""The longest time between two renewals of a lease, so that every window has each lease at least once."""
FILL_CLIENTS: Final = 16
CONNECTIONS: Final = 32

BY_HUNDREDS: Final = "processor, 100 programs with 100 leases each"
ONE_BY_ONE: Final = "processor, 10,000 programs with one lease each"


def measure(bench: Bench) -> list[Figure]:
    leases = bench.either(LEASES, 1000)
    figures = []
    for name, size in ((BY_HUNDREDS, TOGETHER), (ONE_BY_ONE, 1)):
        with Office(bench.folder / f"by-{size}") as office:
            figures.extend(_one_way(bench, office, name, leases=leases, size=size))
    bench.note(
        f"Each renewal comes {RENEW_AT - JITTER:.2f} to {RENEW_AT + JITTER:.2f} of the TTL after the one before, "
        f"spread evenly; {WINDOWS} windows of {WINDOW_S:.0f} s, processor time of the whole office, all threads."
    )
    return figures


def _one_way(bench: Bench, office: Office, name: str, *, leases: int, size: int) -> list[Figure]:
    idle_rss = _rss_mb(office.pid)
    with ClosedGenerator(office.address, [office.acquire(ttl_s=TTL_S)], [{}] * FILL_CLIENTS) as filling:
        filled = filling.run(TTL_S / 2, cycles_max=leases, keep_taken=True)
    if len(filled.taken) != leases:
        raise RuntimeError(f"only {len(filled.taken)} of {leases} leases were granted within half of their TTL.")
    bench.say(f"{leases:,} leases in {filled.wall_s:.1f} s")
    schedule = _schedule(office, filled.taken, size)
    cpu: list[float] = []
    rss: list[float] = []
    samples: list[PacedSample] = []
    with PacedGenerator(office.address, schedule, connections=CONNECTIONS) as paced:
        for number in range(bench.either(WINDOWS, 1)):
            before = _cpu(office.pid)
            sample = paced.run(WINDOW_S)
            cpu.append((_cpu(office.pid) - before) / sample.wall_s * 100)
            rss.append(_rss_mb(office.pid) - idle_rss)
            samples.append(sample)
            bench.say(
                f"{name}, window {number + 1}: {cpu[-1]:.1f} % of a core for "
                f"{sample.requests * size / sample.wall_s:,.0f} renewals/s"
            )
        live = _live(office)
    if live != leases:
        raise RuntimeError(f"{live} of {leases} leases were alive at the end: the renewals did not do their work.")
    rate = sum(sample.requests for sample in samples) * size / sum(sample.wall_s for sample in samples)
    late = max(sample.late_ns_max for sample in samples) / 1e6
    answers = [[one / 1e6 for one in sample.answer_ns] for sample in samples]
    bench.note(
        f"{name.partition(', ')[2]}: {rate:,.0f} renewals/s, all {leases:,} leases alive at the end; the generator was "
        f"at most {late:.1f} ms behind its schedule."
    )
    return [
        figure(name, "% of a core", cpu),
        figure(
            f"time of an answer, {name.partition(', ')[2]}",
            "ms",
            [sorted(one)[len(one) // 2] for one in answers],
            operations=[one for window in answers for one in window],
        ),
        figure(f"memory for {leases:,} leases, {name.partition(', ')[2]}", "MB", rss),
    ]


def _schedule(office: Office, taken: Sequence[dict[str, str]], size: int) -> list[Due]:
    """Programs in the order in which they got their leases, so that the first renewals come in time as well."""
    programs = [taken[start : start + size] for start in range(0, len(taken), size)]
    middle = RENEW_AT * TTL_S
    schedule = []
    for number, program in enumerate(programs):
        place = number / len(programs)
        wobble = (number * 0.618_034) % 1 * 2 - 1  # evenly spread, and the same in every run
        schedule.append(
            Due(
                at_s=place * middle,
                period_s=(RENEW_AT + wobble * JITTER) * TTL_S,
                request=office.renewal(program),
                expect='"deadline":',
                expect_count=len(program),
            )
        )
    return schedule


def _live(office: Office) -> int:
    status: dict[str, Any] = json.loads(ask(office.address, Request(method="GET", path="/v1/status", body="")).body)
    live: int = status["live"]
    return live


def _cpu(pid: int) -> float:
    return sum(cpu_seconds(one) for one in tree(pid))


def _rss_mb(pid: int) -> float:
    return sum(memory_of(one).rss for one in tree(pid)) / 1e6


ROW: Final = Row(
    name="renew_10k",
    title="10,000 leases renewed at a TTL of 30 s",
    goals=[Goal(figure=BY_HUNDREDS, at_most=10), Goal(figure=ONE_BY_ONE, at_most=10)],
    measure=measure,
    limit_s=400,
    distributions=DISTRIBUTIONS,
)
