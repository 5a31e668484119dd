"""A Monte-Carlo burst: as many cores as are free for as long as it takes, then no lease left.

Run it: ``python examples/burst_monte_carlo.py``
"""

from __future__ import annotations

import math
import random

from sublet import jobs

POINTS = 20_000


def inside(seed: int) -> int:
    """How many of the points of this seed lie in the quarter circle."""
    chance = random.Random(seed)
    return sum(chance.random() ** 2 + chance.random() ** 2 < 1.0 for _ in range(POINTS))


def main() -> None:
    """Seeds are the items, so each chunk is the same work wherever it runs."""
    seeds = range(40)
    results = jobs.map(inside, seeds, want=4, name="monte-carlo")
    estimate = 4 * sum(results) / (len(seeds) * POINTS)
    print(f"pi is about {estimate:.3f}, {abs(estimate - math.pi):.3f} off")
    done = results.result
    assert done is not None
    print(f"{done.chunks_succeeded} chunks on up to {done.leases_most} leases; {done.leases_after} leases left")


if __name__ == "__main__":
    main()
