"""What an operation on a register concludes when a round of it fails half way."""

from __future__ import annotations

import itertools

from sublet.state.replicated.ballot import Ballot
from sublet.state.replicated.cell import (
    Accept,
    AcceptedWrite,
    BallotPromised,
    BallotRefused,
    Here,
    Prepare,
    Query,
    Took,
)
from sublet.state.replicated.phases import SendToReplica
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.register import (
    CarryOperation,
    CasOperation,
    OpenOperation,
    OperationDone,
    RegisterOperation,
    Tenure,
    View,
)
from sublet.values import Epoch

SET = ReplicaSet(1, Seats(("a", "b", "c"), 2, 2))
NEWER = Ballot(1, "o", Epoch(1, 2), 0, b"newer---")


def opened() -> Tenure:
    """By a writer of epoch 1, on all replicas, with nothing written yet."""
    numbers = itertools.count()
    tenure = Tenure(office="o", epoch=Epoch(1, 1), nonce=lambda: b"nonce%03d" % next(numbers))
    opening = OpenOperation(View(SET), tenure)
    for _ in range(2):  # the ballot is claimed, and what was found is written anew
        turn = opening.turn
        for sent in opening.take():
            promise = BallotPromised(None) if isinstance(sent.request, Prepare) else Took()
            opening.on_answer(turn, sent.replica, promise)
    assert isinstance(opening.result, OperationDone)
    return tenure


def written(operation: RegisterOperation) -> tuple[list[SendToReplica], AcceptedWrite]:
    """What is sent, all of it one write."""
    out = operation.take()
    [write] = {sent.request.accepted for sent in out if isinstance(sent.request, Accept)}
    assert [sent.replica for sent in out] == ["a", "b", "c"]
    return out, write


def test_a_write_that_is_the_newest_on_a_quorum_was_done_though_its_writer_was_fenced_meanwhile() -> None:
    """A newer lease has opened the register and written nothing yet: a step that was saved is told as saved."""
    write = CasOperation(View(SET), opened(), expected=0, write=b"my-write", body=b"saved")
    _, mine = written(write)
    write.on_answer(write.turn, "a", Took())
    write.lost(write.turn, "b")
    write.on_answer(write.turn, "c", BallotRefused(NEWER, None))
    assert {type(sent.request) for sent in write.take()} == {Query}, "whether another took it is not known, so it looks"
    turn = write.turn
    for replica in ("a", "b"):
        write.on_answer(turn, replica, Here(mine, NEWER))
    assert isinstance(write.result, OperationDone)
    assert write.result.state.body == b"saved"


def test_a_record_is_carried_only_once_a_quorum_of_the_new_set_has_taken_it() -> None:
    """A write that found no quorum is made again after the rest; else the next set of replicas would lack it."""
    here = opened().accepted
    carry = CarryOperation(View(SET), lambda: b"carrying")
    for replica in ("a", "b"):
        carry.on_answer(1, replica, Here(here, NEWER))
    for took in (False, True):
        carry.resume()
        turn = carry.turn
        for sent in carry.take():
            assert isinstance(sent.request, Prepare)
            carry.on_answer(turn, sent.replica, BallotPromised(here))
        assert carry.result is None
        out, _ = written(carry)
        turn = carry.turn
        for sent in out:
            if took:
                carry.on_answer(turn, sent.replica, Took())
            else:
                carry.lost(turn, sent.replica)
    assert isinstance(carry.result, OperationDone)
