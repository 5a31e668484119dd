"""The middle of samples, their spread, and ratios of pairs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Comparison", "Summary", "compare", "percentile", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One side's samples, in the unit of its figure."""

    n: int
    median: float
    p10: float
    p90: float
    p99: float | None = None
    """Over single operations, where they were timed one by one. Reported, never promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many times better the first side is: above 1 is better, whatever the unit."""

    ratio: float
    """Of the two medians."""
    p10: float
    """Of the ratios pair by pair: what was measured a moment apart."""
    p90: float


def percentile(samples: Sequence[float], percent: float) -> float:
    """Between the two nearest samples, linearly."""
    if not samples:
        raise ValueError("there are no samples")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(samples: Sequence[float], *, operations: Sequence[float] = ()) -> Summary:
    """The middle and the spread; ``operations`` are the single timings that p99 is taken from."""
    return Summary(
        n=len(samples),
        median=percentile(samples, 50),
        p10=percentile(samples, 10),
        p90=percentile(samples, 90),
        p99=percentile(operations, 99) if operations else None,
    )


def compare(ours: Sequence[float], peer: Sequence[float], *, higher_is_better: bool) -> Comparison:
    """Ratio of medians, with the spread of the pairs' ratios."""
    if len(ours) != len(peer):
        raise ValueError(f"{len(ours)} samples of ours against {len(peer)}: they are not pairs")

    def better(a: float, b: float) -> float:
        above, below = (a, b) if higher_is_better else (b, a)
        return above / below if below else math.inf

    ratios = [better(a, b) for a, b in zip(ours, peer, strict=True)]
    return Comparison(
        ratio=better(percentile(ours, 50), percentile(peer, 50)),
        p10=percentile(ratios, 10),
        p90=percentile(ratios, 90),
    )
