"""What always holds, whatever anybody does: S1, S2, S4, S7, S9, S10, L2, L5, L8, L12, L15, A1 on generated lives."""

from __future__ import annotations

import os
from collections import Counter

from sublet.lease_end import EndReason
from sublet.office.ledger.answers import Granted, Offer, Place, Refusal
from sublet.office.ledger.events import EVENT_TYPES
from tests.unit.office.ledger.chaos import Chaos

ENDS = (
    EndReason.RELEASED,
    EndReason.EXPIRED,
    EndReason.IDLE,
    EndReason.PREEMPTED,
    EndReason.DRAINED,
    EndReason.OPERATOR,
    EndReason.NODE_LOST,
    EndReason.HOLDER_GONE,
)

SEEDS = int(os.environ.get("SUBLET_SEQUENCES", "20"))
STEPS = 120
FOUND = (35, 1259, 1_000_919, 9_000_009, 9_000_017, 9_000_032, 9_000_150, 9_000_215, 9_000_226)
"""Lives that found something once."""


def test_what_was_found_once_holds() -> None:
    for seed in FOUND:
        try:
            Chaos(seed).run(STEPS)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_nothing_breaks() -> None:
    """And these lives met every kind of event: what never happens proves nothing."""
    met: Counter[str] = Counter()
    for seed in range(SEEDS):
        chaos = Chaos(seed)
        try:
            chaos.run(STEPS)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met.update(chaos.watch.met)
    rare = {"NodeJoined", "Parked", "Resumed"}  # the last two take many steps in a row: see test_parking, and the seeds
    missing = {event.__name__ for event in EVENT_TYPES.values()} - met.keys() - rare
    assert not missing, f"never met: {missing}"
    assert met.keys() >= {f"answer {kind.__name__}" for kind in (Granted, Place, Offer, Refusal)}
    assert met.keys() >= {f"end {reason}" for reason in ENDS}
    assert met["granted beside strangers"] > 0
