"""The tables of a job: every transition of a chunk, and what becomes of it after each kind of failure."""

from __future__ import annotations

import itertools

import pytest

from sublet import errors
from sublet.jobs import RetryPolicy
from sublet.jobs.policy import cause_of
from sublet.jobs.states import (
    CHUNK_TABLE,
    VERDICTS,
    Cause,
    ChunkEvent,
    ChunkState,
    ChunkTransitionError,
    RetryVerdict,
    When,
    next_chunk,
    verdict_of,
)

LAST = (ChunkState.STORED, ChunkState.FAILED)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(ChunkState, ChunkEvent)))
def test_an_event_leads_where_the_table_says_or_is_refused_by_name(state: ChunkState, event: ChunkEvent) -> None:
    if (state, event) in CHUNK_TABLE:
        assert next_chunk(state, event) is CHUNK_TABLE[state, event]
    else:
        with pytest.raises(ChunkTransitionError, match=f"chunk 7 is {state}: {event} is not possible"):
            next_chunk(state, event, "chunk 7")


def test_stored_and_failed_are_final_and_every_state_is_reached() -> None:
    assert not [pair for pair in CHUNK_TABLE if pair[0] in LAST]
    assert set(CHUNK_TABLE.values()) == set(ChunkState)


@pytest.mark.parametrize(
    ("error", "when", "verdict"),
    [
        (errors.CapacityExceeded("full"), When.ACQUIRING, RetryVerdict.PRESSURE),
        (errors.QuotaExceeded("yours"), When.ACQUIRING, RetryVerdict.PRESSURE),
        (errors.CapacityExceeded("full"), When.EXECUTING, RetryVerdict.FAIL),
        (errors.LeaseExpired("over"), When.NOT_BEGUN, RetryVerdict.RETURN),
        (errors.LeaseRevoked("taken"), When.EXECUTING, RetryVerdict.RETRY),
        (errors.Disconnected("away"), When.NOT_BEGUN, RetryVerdict.RETURN),
        (errors.Disconnected("away"), When.EXECUTING, RetryVerdict.RETRY),
        (errors.WorkerLost("killed"), When.NOT_BEGUN, RetryVerdict.RETURN),
        (errors.WorkerLost("killed"), When.EXECUTING, RetryVerdict.RETRY),
        (errors.OutOfMemory("more"), When.EXECUTING, RetryVerdict.RETRY_LARGER),
        (errors.OutOfMemory("more"), When.NOT_BEGUN, RetryVerdict.RETURN),
        (errors.Quarantined("unclean"), When.EXECUTING, RetryVerdict.FAIL),
        (errors.Unsupported("no"), When.NOT_BEGUN, RetryVerdict.FAIL),
        (errors.InvalidRequest("wrong"), When.EXECUTING, RetryVerdict.FAIL),
        (errors.Unpicklable("a lock"), When.EXECUTING, RetryVerdict.FAIL),
    ],
)
def test_phase_and_scope_decide_what_a_failure_costs(error: Exception, when: When, verdict: RetryVerdict) -> None:
    assert verdict_of(cause_of(error), when) is verdict


@pytest.mark.parametrize("error", [ValueError("no"), errors.CapacityExceeded("inside"), errors.Disconnected("inside")])
def test_what_the_chunks_own_function_raises_is_permanent_unless_declared_transient(error: Exception) -> None:
    assert verdict_of(cause_of(error, in_chunk=True), When.EXECUTING) is RetryVerdict.FAIL
    assert verdict_of(cause_of(error, (type(error),), in_chunk=True), When.EXECUTING) is RetryVerdict.RETRY


def test_a_pair_that_the_table_lacks_fails_closed() -> None:
    assert (Cause.RAISED, When.ACQUIRING) not in VERDICTS
    assert verdict_of(Cause.RAISED, When.ACQUIRING) is RetryVerdict.FAIL


def test_backoff_doubles_up_to_its_bound_and_varies_by_the_jitter() -> None:
    policy = RetryPolicy(initial_backoff="1s", max_backoff="4s", jitter=0.5)
    assert [policy.backoff_ns(n, 0.5) / 1e9 for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert policy.backoff_ns(1, 0.0) == 500_000_000
    assert policy.backoff_ns(1, 0.999999) == pytest.approx(1.5e9, rel=1e-3)


def test_memory_doubles_to_sixteen_times_or_to_the_stated_bound() -> None:
    assert RetryPolicy().larger(1 << 20, 1 << 20) == 2 << 20
    assert RetryPolicy().larger(16 << 20, 1 << 20) is None
    bounded = RetryPolicy(memory_max="3MiB")
    assert bounded.larger(2 << 20, 2 << 20) == 3 << 20
    assert bounded.larger(3 << 20, 2 << 20) is None


@pytest.mark.parametrize(
    "given",
    [
        {"max_retries": -1},
        {"max_retries": True},
        {"max_retries": 1.5},
        {"jitter": 1.0},
        {"jitter": "much"},
        {"initial_backoff": "20s"},
        {"initial_backoff": "soon"},
        {"transient": (3,)},
        {"memory_max": 8},
    ],
)
def test_a_policy_that_cannot_be_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidRequest):
        RetryPolicy(**given)  # type: ignore[arg-type]
