"""What the exit of one process means for those that were started with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.guest.ranks import describe_exit, rank_environment, shared_environment
from sublet.lease.ranks import TABLE, Do, RankExit, Ranks, RanksPhase, RankState

STATUSES = st.sampled_from([0, 1, 7, 76, 130, 137, 143])
TOLD = -1


@given(st.integers(1, 6), st.data())
def test_all_end_with_the_status_of_the_first_that_did_not_do_well(count: int, data: st.DataObject) -> None:
    ranks, seen = Ranks(count), list[int]()
    while ranks.running:
        if data.draw(st.booleans()):
            ranks.mark_stopping()
        rank, status = data.draw(st.sampled_from(ranks.running)), data.draw(STATUSES)
        phase = ranks.phase
        does = ranks.exited(rank, status)
        seen.append(status)
        ranks.check()
        assert (does is Do.END) == (phase is RanksPhase.GOING and status not in (0, 76) and bool(ranks.running))
        assert ranks.status == next((one for one in seen if one), 0)
        with pytest.raises(KeyError, match=f"rank {rank} has ended before"):
            ranks.exited(rank, status)
        ranks.check()


def test_every_exit_in_every_phase_is_in_the_table() -> None:
    assert set(TABLE) == {(phase, of) for phase in RanksPhase for of in RankExit}


@pytest.mark.parametrize(
    ("count", "exits", "states", "said"),
    [
        (2, [(0, 0), (1, 0)], "done done", ""),
        (2, [(1, 7), (0, 143)], "ended failed", "rank 1 of 2 ended with exit code 7, and rank 0 was ended with it"),
        (2, [(1, 0), (0, 7)], "failed done", "rank 0 of 2 ended with exit code 7"),
        (1, [(0, 7)], "failed", "rank 0 of 1 ended with exit code 7"),
        (
            4,
            [(2, 139), (0, 0), (1, 143), (3, 137)],
            "ended ended failed ended",
            "rank 2 of 4 ended by SIGSEGV, and ranks 0, 1 and 3 were ended with it",
        ),
        (2, [(0, 76), (1, 1)], "left left", ""),
        (2, [(TOLD, 0), (1, 143), (0, 130)], "left left", ""),
        (2, [(TOLD, 0), (1, 0), (0, 0)], "done done", ""),
    ],
)
def test_one_that_failed_is_named_and_those_that_were_told_to_leave_are_not(
    count: int, exits: list[tuple[int, int]], states: str, said: str
) -> None:
    ranks = Ranks(count)
    for rank, status in exits:
        if rank == TOLD:
            ranks.mark_stopping()
        else:
            ranks.exited(rank, status)
    assert ranks.states == [RankState(state) for state in states.split()]
    assert ranks.sentence(describe_exit(ranks.status)) == said


def test_each_finds_what_torchrun_would_give_it_whatever_the_holder_had() -> None:
    given_ = {"RANK": "9", "WORLD_SIZE": "12", "LOCAL_RANK": "3", "MASTER_PORT": "1", "OMP_NUM_THREADS": "4", "A": "b"}
    found = shared_environment(given_, 2, 4711, "lease-1") | rank_environment(1)
    torchruns = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711", "GLOO_SOCKET_IFNAME": "lo"}
    expected = torchruns | rendezvous | {"OMP_NUM_THREADS": "4", "A": "b", "SUBLET_DEVICE": "1"}
    assert {name: found.get(name) for name in expected} == expected
