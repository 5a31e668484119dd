"""What a round of questions concludes from odd answers."""

from __future__ import annotations

import pytest

from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import AcceptedWrite, BallotRefused, Took
from sublet.state.replicated.phases import Writing
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.values import Epoch

OURS, HIGHER = (Ballot(1, "o", Epoch(1, n), 0, b"12345678") for n in (1, 2))
SET = ReplicaSet(1, Seats(("a", "b", "c"), 2, 2))


@pytest.mark.parametrize(
    ("taken", "nowhere"),
    [(None, True), (WriteStamp(OURS, 0), True), (WriteStamp(OURS, 2), False), (WriteStamp(HIGHER, 0), False)],
)
def test_a_refusal_says_never_only_below_the_write(taken: WriteStamp | None, nowhere: bool) -> None:
    """Messages come twice: the one that was refused may have followed one that was taken, and was written over."""
    phase = Writing(SET, AcceptedWrite(WriteStamp(OURS, 1), b""))
    phase.heard("a", BallotRefused(HIGHER, None))
    phase.heard("b", BallotRefused(HIGHER, taken))
    if nowhere:
        assert not phase.over, "the last one is waited for"
    phase.heard("c", BallotRefused(HIGHER, None))
    assert phase.over
    assert not phase.done
    assert phase.nowhere is nowhere


def test_silence_is_doubt() -> None:
    """And so is one that took it."""
    silent, took = (Writing(SET, AcceptedWrite(WriteStamp(OURS, 1), b"")) for _ in range(2))
    silent.lost("a")
    took.heard("a", Took())
    for phase in (silent, took):
        phase.heard("b", BallotRefused(HIGHER, None))
        phase.heard("c", BallotRefused(HIGHER, None))
        assert phase.over
        assert not phase.nowhere
