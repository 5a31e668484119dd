"""From 500 to 5,000 sessions that arrive within ten minutes: what grows, and how. There is no goal.

As in ``studio_500``, with a studio and an office of their own for each size, and room for a connection of each page
and of each request (``studio.connections``). It takes an hour, so ``all`` leaves it out.
"""

from __future__ import annotations

import re
import resource
import statistics
from collections import Counter
from typing import Final

from benchmarks.harness import Bench, Figure, Row, figure
from benchmarks.ours import DISTRIBUTIONS
from benchmarks.rows.studio_500 import AFTER_S, UPDATE, WITHIN_S, arrivals
from benchmarks.stats import percentile

SIZES: Final = (500, 1000, 2000, 5000)
SETTINGS: Final = f"{UPDATE}waiting = 10000\nconnections = 12000\n"
"""The queue runs off in the second half of the time alone, and a studio lets a thousand requests wait by default."""
FILES: Final = 16_384
"""Descriptors of this program, which has a connection for each open page and each request."""

SAID_MAX: Final = 160


def measure(bench: Bench) -> list[Figure]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if hard == resource.RLIM_INFINITY else min(FILES, hard), hard))
    found: list[Figure] = []
    for people in bench.either(SIZES, (10, 20)):
        came = arrivals(bench, people, bench.either(WITHIN_S, 8.0), bench.either(AFTER_S, 4.0), SETTINGS)
        bench.note(
            f"{people} people: {len(came.admission)} sessions known to the office, {len(came.shown)} on a page, "
            f"{len(came.wrong)} requests failed{_mostly(came.wrong)}."
        )
        found += [
            figure(f"{people}: admission, p99", "ms", [percentile(came.admission, 99)], operations=came.admission),
            figure(f"{people}: admission, median", "ms", [statistics.median(came.admission)]),
            *([figure(f"{people}: on its page, p99", "ms", [percentile(came.shown, 99)])] if came.shown else []),
            figure(f"{people}: processor of studio and office", "% of a core", [cpu for cpu, _ in came.loads]),
            figure(f"{people}: memory of studio and office, the most", "MB", [max(one for _, one in came.loads)]),
        ]
    return found


def _mostly(wrong: list[str]) -> str:
    """What was said most often, without what is of one person alone."""
    said = Counter(re.sub(r"[\w-]*\d[\w-]*", "…", text)[:SAID_MAX] for text in wrong)
    return "".join(f", {count} of them: {text}" for text, count in said.most_common(1))


ROW: Final = Row(
    name="studio_curve",
    title="500 to 5,000 sessions arrive at the studio within 10 minutes",
    goals=[],
    measure=measure,
    limit_s=3600,
    distributions=DISTRIBUTIONS,
    is_in_all=False,
)
