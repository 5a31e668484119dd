"""The coordinator's core: who runs next, who is charged, what is final."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.errors import InvalidRequest, LeaseRevoked, WorkerLost
from sublet.jobs import RetryPolicy
from sublet.jobs.chunks import Needs
from sublet.jobs.core import ChunkBatch, Coordinator, RunFailed, Works
from sublet.jobs.identity import ChunkId
from sublet.jobs.states import Cause, ChunkState, FailReason

ONE = Needs()
S = 1_000_000_000
KILLED = RunFailed(Cause.WORKER_LOST, WorkerLost("killed"))
TAKEN = RunFailed(Cause.LEASE_LOST, LeaseRevoked("taken"))


def call() -> None:
    """Stands for the task that all chunks share."""


def works(count: int, needs: Needs = ONE, first: int = 0) -> Works:
    every = list(range(first, first + count))
    return Works([ChunkId(n.to_bytes(16, "big")) for n in every], every, list(every), call, needs)


def coordinator(count: int = 0, policy: RetryPolicy | None = None, *, collect: bool = True) -> Coordinator:
    made = Coordinator(policy or RetryPolicy(jitter=0.0), collect=collect)
    made.add(works(count))
    return made


def take(core: Coordinator, most: int = 1, now_ns: int = 0, lease: str = "lease") -> ChunkBatch:
    batch = core.take(lease, ONE, most, now_ns)
    assert batch is not None
    core.check()
    return batch


def indexes(batch: ChunkBatch) -> list[int]:
    return batch.works.indexes


def finish(core: Coordinator, batch: ChunkBatch, now_ns: int = 0) -> None:
    fresh = core.results(batch, [b"done"] * len(batch.rest), now_ns)
    core.published([made for made, _ in fresh], now_ns)
    core.check()


def charges(core: Coordinator, batch: ChunkBatch) -> list[int]:
    return [core.charges(key) for key in batch.works.keys]


def test_chunks_go_out_in_order_and_are_finished_when_they_are_published() -> None:
    core = coordinator(5)
    first, second = take(core, 2), take(core, 9)
    assert (indexes(first), indexes(second)) == ([0, 1], [2, 3, 4])
    fresh = core.results(first, [b"a", b"b"], 1)
    ((made, results),) = fresh
    assert (made.indexes, results) == ([0, 1], [b"a", b"b"])
    assert core.counts.succeeded == 0
    core.published([made], 2)
    assert core.counts.succeeded == 2
    assert made.state is ChunkState.STORED
    core.complete()
    assert not core.is_over
    finish(core, second)
    assert core.is_over


def test_what_its_worker_will_not_begin_goes_to_others_and_no_retry_is_charged() -> None:
    core = coordinator(6)
    batch, behind = take(core, 4), take(core, 2)
    core.results(batch, [b"a"], 1)
    core.check()
    core.take_back(behind, 0, 2)
    core.take_back(batch, 2, 2)
    core.check()
    assert (indexes(batch), batch.is_open, behind.is_open) == ([0, 1], True, False)
    core.take_back(batch, 2, 3)  # twice is once
    assert indexes(take(core, 9)) == [2, 3, 4, 5]
    core.lost(batch, KILLED, begun=True, now_ns=4)
    core.check()
    assert core.charges(ChunkId((1).to_bytes(16, "big"))) == 1


def test_a_chunk_whose_result_waits_for_its_publication_needs_no_lease() -> None:
    """Else leases without work are kept, and as many more are asked for, until a slow store has published."""
    core = coordinator(3)
    batch, other = take(core, 2), take(core, 1)
    fresh = core.results(batch, [b"a", b"b"], 0)
    core.check()
    assert core.wanted() == {ONE: 1}
    core.lost(other, KILLED, begun=True, now_ns=0)
    core.published([works for works, _ in fresh], 0)
    core.check()
    assert core.wanted() == {ONE: 1}


def test_what_has_a_result_is_not_taken_back() -> None:
    """What is known of how far its worker was may be older than the results that came."""
    core = coordinator(3)
    batch = take(core, 3)
    core.results(batch, [b"a", b"b"], 1)
    core.take_back(batch, 1, 2)
    core.check()
    assert (indexes(batch), batch.is_open) == ([0, 1], False)
    assert indexes(take(core, 9)) == [2]


def test_a_job_that_does_not_wait_keeps_the_results_that_came() -> None:
    core = coordinator(3)
    batch = take(core, 3)
    fresh = core.results(batch, [b"a"], 1)
    core.stop(FailReason.CANCELLED)
    core.abandon(2)
    core.published([made for made, _ in fresh], 3)
    core.check()
    assert (core.counts.succeeded, core.counts.failed) == (1, 2)
    assert core.is_over


def test_chunks_that_are_not_wanted_any_more_are_told_apart_from_those_that_failed() -> None:
    for reason, what in ((FailReason.CANCELLED, "cancelled"), (FailReason.DEADLINE, "failed")):
        core = coordinator(3)
        take(core, 1)
        core.stop(reason)
        core.abandon(1)
        assert [(event.what, event.count) for event in core.events] == [(what, 2), (what, 1)]


def test_only_the_chunk_that_was_executing_is_charged_for_a_lost_worker() -> None:
    """distributed#5234: chunks that stood behind it are innocent."""
    core = coordinator(6)
    batch = take(core, 4)
    core.results(batch, [b"a"], 0)
    core.lost(batch, KILLED, begun=True, now_ns=0)
    core.check()
    assert charges(core, batch) == [0, 1, 0, 0]
    assert indexes(take(core, 9)) == [2, 3, 4, 5]
    assert indexes(take(core, 9, now_ns=2 * S)) == [1]
    assert core.counts.retries == 1


def test_a_batch_that_had_not_begun_returns_as_it_is() -> None:
    core = coordinator(3)
    core.lost(take(core, 2), TAKEN, begun=False, now_ns=0)
    batch = take(core, 9)
    assert indexes(batch) == [0, 1, 2]
    assert not any(charges(core, batch))


def test_a_late_result_changes_nothing() -> None:
    core = coordinator(1)
    first = take(core)
    core.lost(first, TAKEN, begun=False, now_ns=0)
    second = take(core)
    assert core.results(first, [b"late"], 1) == []
    fresh = core.results(second, [b"first"], 2)
    assert [results for _, results in fresh] == [[b"first"]]
    core.published([made for made, _ in fresh], 2)
    assert core.results(second, [b"again"], 3) == []
    core.published([made for made, _ in fresh], 3)
    core.check()
    assert core.counts.succeeded == 1


def test_a_permanent_error_is_not_retried_and_does_not_stop_a_collecting_job() -> None:
    core = coordinator(3)
    batch = take(core, 3)
    fresh = core.results(batch, [RunFailed(Cause.RAISED, ValueError("no")), b"b", b"c"], 0)
    core.published([made for made, _ in fresh], 0)
    core.complete()
    assert core.is_over
    assert core.counts.retries == 0
    assert [(one.index, one.reason) for one in core.failures] == [(0, FailReason.RAISED)]


def test_the_first_failure_stops_a_raising_job() -> None:
    core = coordinator(5, collect=False)
    batch = take(core, 2)
    fresh = core.results(batch, [RunFailed(Cause.RAISED, ValueError("no")), b"b"], 0)
    assert core.take("other", ONE, 9, 0) is None
    core.published([made for made, _ in fresh], 0)
    core.check()
    assert core.is_over
    assert [one.reason for one in core.failures] == [*[FailReason.CANCELLED] * 3, FailReason.RAISED] or (
        core.failures[0].reason is FailReason.RAISED
    )
    assert core.counts.succeeded == 1


def test_retries_end_with_the_policys_number() -> None:
    core = coordinator(1, RetryPolicy(2, "1s", "16s", 0.0))
    now_ns = 0
    for _ in range(2):
        core.lost(take(core, now_ns=now_ns), KILLED, begun=True, now_ns=now_ns)
        assert core.take("lease", ONE, 1, now_ns) is None
        due_ns = core.next_due_ns()
        assert due_ns is not None
        now_ns = due_ns
    core.lost(take(core, now_ns=now_ns), KILLED, begun=True, now_ns=now_ns)
    assert [one.reason for one in core.failures] == [FailReason.RETRIES]
    assert "failed 3 times" in str(core.failures[0])
    assert core.failures[0].retries == 2
    assert now_ns == 3 * S


def test_a_chunk_that_needs_longer_than_any_lease_it_gets_says_so() -> None:
    core = coordinator(1, RetryPolicy(9, 0, 0, 0.0))
    for n in range(3):
        batch = take(core, now_ns=100 * n * S)
        core.lost(batch, TAKEN, begun=True, now_ns=(100 * n + 60 + n) * S)
    assert [one.reason for one in core.failures] == [FailReason.TOO_LONG]
    assert "needs longer than any lease it gets" in str(core.failures[0])


LOSSES = {
    "after different times": ((60, 10, 60, 30), False),
    "after the same time, but for the first": ((10, 60, 60, 60), True),
    "at once": ((0.01, 0.01, 0.01, 0.01), False),
    "not in a row": ((60, 60, None, 60), False),
}


@pytest.mark.parametrize("way", LOSSES)
def test_only_leases_that_end_in_a_row_after_about_the_same_time_say_that_a_chunk_is_too_long(way: str) -> None:
    """``None``: its worker died. What is lost as it begins says nothing of how long it takes. It is remembered over a
    restart of the job."""
    ran, is_too_long = LOSSES[way]
    policy = RetryPolicy(9, 0, 0, 0.0)
    core, failures = Coordinator(policy, collect=True), list[FailReason]()
    for n, ran_s in enumerate(ran):
        core = Coordinator(policy, collect=True, saved=core.snapshot())
        core.add(works(1))
        core.lost(
            take(core, now_ns=100 * n * S),
            KILLED if ran_s is None else TAKEN,
            begun=True,
            now_ns=100 * n * S + round((ran_s or 60) * S),
        )
        failures += [one.reason for one in core.failures]
    assert failures == [FailReason.TOO_LONG] * is_too_long


def test_a_chunk_out_of_memory_asks_for_twice_as_much_and_then_gives_up() -> None:
    core = Coordinator(RetryPolicy(9, 0, 0, 0.0, memory_max="4MiB"), collect=True)
    core.add(works(1, Needs(1, 1 << 20)))
    sizes = []
    for n in range(3):
        (needs,) = core.wanted()
        sizes.append(needs.memory >> 20)
        batch = core.take("lease", needs, 1, n)
        assert batch is not None
        core.lost(batch, RunFailed(Cause.OUT_OF_MEMORY), begun=True, now_ns=n)
        core.check()
    assert sizes == [1, 2, 4]
    assert [one.reason for one in core.failures] == [FailReason.OUT_OF_MEMORY]


def test_the_memory_that_a_chunk_was_given_is_remembered_over_a_restart_of_the_job() -> None:
    """And so is the bound, which goes by what it asked for at first."""
    saved, sizes = None, []
    while True:
        core = Coordinator(RetryPolicy(9, 0, 0, 0.0), collect=True, saved=saved)
        core.add(works(1, Needs(1, 1 << 20)))
        (needs,) = core.wanted()
        sizes.append(needs.memory >> 20)
        batch = core.take("lease", needs, 1, 0)
        assert batch is not None
        core.lost(batch, RunFailed(Cause.OUT_OF_MEMORY), begun=True, now_ns=0)
        core.check()
        if core.failures:
            break
        saved = core.snapshot()
    assert sizes == [1, 2, 4, 8, 16]


def test_a_deadline_fails_what_was_not_begun() -> None:
    core = Coordinator(RetryPolicy(), collect=True, deadline_ns=10)
    core.add(works(3))
    batch = core.take("lease", ONE, 1, 0)
    assert batch is not None
    assert core.next_due_ns() == 10
    assert core.take("lease", ONE, 1, 10) is None
    finish(core, batch)
    assert core.is_over
    assert {one.reason for one in core.failures} == {FailReason.DEADLINE}
    assert core.counts.succeeded == 1


def test_the_same_chunk_twice_runs_once_and_one_id_with_two_contents_is_refused() -> None:
    core = Coordinator(RetryPolicy())
    core.add(works(2), [b"a", b"b"])
    core.add(works(2), [b"a", b"b"])
    assert core.counts.total == 2
    with pytest.raises(InvalidRequest, match="with another content"):
        core.add(works(3), [b"a", b"other", b"c"])
    assert core.counts.total == 2
    core.check()


def test_what_the_store_has_is_skipped_and_saved_charges_go_on() -> None:
    core = coordinator(1, RetryPolicy(2, 0, 0, 0.0))
    core.lost(take(core), KILLED, begun=True, now_ns=0)
    saved = core.snapshot()
    again = Coordinator(RetryPolicy(2, 0, 0, 0.0), collect=True, saved=saved)
    found = again.add(works(3), stored={works(3).keys[2]})
    assert found.indexes == [2]
    assert again.counts.skipped == 1
    assert charges(again, take(again)) == [1]


def test_chunks_of_different_needs_never_share_a_lease() -> None:
    core = Coordinator(RetryPolicy())
    core.add(works(2))
    core.add(works(1, Needs(4), first=2))
    assert core.wanted() == {ONE: 2, Needs(4): 1}
    large = core.take("large", Needs(4), 9, 0)
    assert large is not None
    assert indexes(large) == [2]
    assert core.take("larger", Needs(8), 9, 0) is None


def test_a_chunk_that_its_caller_cancelled_stops_nothing() -> None:
    core = coordinator(3, collect=False)
    batch = take(core, 3)
    core.drop(batch, [True, False, True], 0)
    core.check()
    assert indexes(batch) == [0, 2]
    finish(core, batch)
    assert core.stopped is None
    assert core.counts.succeeded == 2


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "done", "raise", "lose", "return", "publish", "tick", "late"]), st.integers(0, 7)
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(count=st.integers(1, 12), steps=STEPS, collect=st.booleans())
def test_the_books_hold_after_every_step_and_every_chunk_ends_once(
    count: int, steps: list[tuple[str, int]], collect: bool
) -> None:
    """Any order of events; afterwards the rest is run to its end, and each chunk is in one last state."""
    core = coordinator(count, RetryPolicy(2, "1s", "4s", 0.0), collect=collect)
    core.complete()
    open_: list[ChunkBatch] = []
    closed: list[ChunkBatch] = []
    put: list[Works] = []
    now_ns = 0
    for what, n in steps:
        if what == "take" and (batch := core.take(f"lease {n}", ONE, 1 + n, now_ns)):
            open_.append(batch)
        elif what == "publish":
            core.published(put, now_ns)
            put.clear()
        elif what == "tick":
            now_ns += n * S
            core.tick(now_ns)
        elif what == "late" and closed:
            assert core.results(closed[n % len(closed)], [b"late"], now_ns) == []
        elif open_ and what in ("done", "raise", "lose", "return"):
            batch = open_[n % len(open_)]
            if what in ("done", "raise"):
                outcome = b"x" if what == "done" else RunFailed(Cause.RAISED, ValueError())
                put += [made for made, _ in core.results(batch, [outcome], now_ns)]
            else:
                core.lost(batch, KILLED, begun=what == "lose", now_ns=now_ns)
            if not batch.is_open:
                open_.remove(batch)
                closed.append(batch)
        core.check()
    while not core.is_over:
        for batch in open_:
            put += [made for made, _ in core.results(batch, [b"x"] * len(batch.rest), now_ns)]
        open_.clear()
        core.published(put, now_ns)
        put.clear()
        now_ns = max(now_ns, core.next_due_ns() or 0)
        if batch := core.take("last", ONE, 3, now_ns):
            open_.append(batch)
        core.check()
    counts = core.counts
    assert counts.succeeded + counts.failed == count
    assert len({one.index for one in core.failures}) == counts.failed
    assert all(one.retries <= 2 for one in core.failures)
