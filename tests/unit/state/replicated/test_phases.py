"""What a round of questions concludes from odd answers."""

from __future__ import annotations

import pytest

from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import AcceptedWrite, BallotRefused, MissingPacks, Outdated, Took
from sublet.state.replicated.phases import REPEATS_MAX, Preparing, Writing
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.values import Epoch

OURS, HIGHER = (Ballot(1, "o", Epoch(1, n), 0, b"12345678") for n in (1, 2))
NEWER_EPOCH, SAME_EPOCH = Ballot(1, "o", Epoch(1, 2), 0, b"x" * 8), Ballot(1, "o", Epoch(1, 1), 1, b"x" * 8)
SET, NEWER_SET = (ReplicaSet(generation, Seats(("a", "b", "c"), 2, 2)) for generation in (1, 2))


@pytest.mark.parametrize(
    ("taken", "nowhere"),
    [(None, True), (WriteStamp(OURS, 0), True), (WriteStamp(OURS, 2), False), (WriteStamp(HIGHER, 0), False)],
)
def test_a_refusal_says_never_only_below_the_write(taken: WriteStamp | None, nowhere: bool) -> None:
    """Messages come twice: the one that was refused may have followed one that was taken, and was written over."""
    phase = Writing(SET, AcceptedWrite(WriteStamp(OURS, 1), b""))
    phase.on_answer("a", BallotRefused(HIGHER, None))
    phase.on_answer("b", BallotRefused(HIGHER, taken))
    if nowhere:
        assert not phase.over, "the last one is waited for"
    phase.on_answer("c", BallotRefused(HIGHER, None))
    assert phase.over
    assert not phase.done
    assert phase.nowhere is nowhere


def test_silence_is_doubt() -> None:
    """And so is one that took it."""
    silent, took = (Writing(SET, AcceptedWrite(WriteStamp(OURS, 1), b"")) for _ in range(2))
    silent.lost("a")
    took.on_answer("a", Took())
    for phase in (silent, took):
        phase.on_answer("b", BallotRefused(HIGHER, None))
        phase.on_answer("c", BallotRefused(HIGHER, None))
        assert phase.over
        assert not phase.nowhere


def test_a_replica_that_knows_a_newer_set_may_have_taken_the_write_all_the_same() -> None:
    """It may look at the set after its put. So what all of them answer like that is not known to have failed."""
    phase = Writing(SET, AcceptedWrite(WriteStamp(OURS, 1), b""))
    for replica in SET.voters:
        phase.on_answer(replica, Outdated(NEWER_SET))
    assert phase.over
    assert phase.newer == NEWER_SET
    assert not phase.nowhere


def test_one_promise_to_a_newer_epoch_ends_an_opening() -> None:
    """Our lease is over then, however many replicas would still promise us: none is waited for."""
    phase = Preparing(SET, OURS)
    phase.on_answer("a", BallotRefused(NEWER_EPOCH, None))
    assert phase.over
    assert not phase.has_quorum
    of_our_epoch = Preparing(SET, OURS)
    of_our_epoch.on_answer("a", BallotRefused(SAME_EPOCH, None))
    assert not of_our_epoch.over, "two are still a quorum"


def test_a_replica_that_asks_again_and_again_is_given_up() -> None:
    """One whose packs do not stay would keep the round going without end."""
    phase = Writing(SET, AcceptedWrite(WriteStamp(OURS, 1), b""))
    for _ in range(REPEATS_MAX):
        phase.on_answer("a", MissingPacks(("p",)))
        assert "a" in phase.pending
    phase.on_answer("a", MissingPacks(("p",)))
    assert "a" not in phase.pending
    phase.on_answer("b", BallotRefused(HIGHER, None))
    phase.on_answer("c", BallotRefused(HIGHER, None))
    assert phase.over
    assert not phase.nowhere, "it may have taken it"


def test_a_second_answer_of_a_replica_changes_nothing() -> None:
    """Messages come twice, and one that was given up may answer after all."""
    phase = Writing(SET, AcceptedWrite(WriteStamp(OURS, 1), b""))
    phase.on_answer("a", Took())
    phase.on_answer("a", BallotRefused(HIGHER, WriteStamp(HIGHER, 0)))
    phase.lost("b")
    phase.on_answer("b", MissingPacks(("p",)))
    assert phase.promised is None
    assert [sent.replica for sent in phase.out] == ["a", "b", "c"], "and is asked nothing more"
