"""Bursts on a real office with real workers, which are killed."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sublet
from sublet import jobs
from sublet.compute.buffer_cache import LENT_MIN, LentMemory
from sublet.errors import CheckpointFailed, InvalidRequest, JobFailed, LeaseEnded, Unpicklable
from sublet.jobs.leases import LABEL, PROGRAM, leases_left
from sublet.jobs.states import FailReason
from tests.integration import burst_functions as functions
from tests.traces import PATIENCE_S, until

AT_ONCE = jobs.RetryPolicy(20, "10ms", "50ms")


@pytest.fixture(scope="module")
def fabric(one_device: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=one_device) as made:
        yield made


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to tear a lease down."""
    monkeypatch.setattr("sublet.jobs.leases.CLOSE_S", PATIENCE_S)


def test_a_map_runs_on_leases_and_leaves_none(fabric: sublet.Fabric) -> None:
    results = jobs.map(functions.square, range(3000), fabric=fabric, want=3, name="squares")
    assert list(results) == [x * x for x in range(3000)]
    result = results.result
    assert result is not None
    assert (result.chunks_succeeded, result.chunks_failed, result.retries) == (3000, 0, 0)
    assert (result.leases_before, result.leases_after) == (0, 0)
    assert 1 <= result.leases_most <= 3
    assert result.bill is not None
    assert leases_left(fabric, "squares", wait=0) == 0


def test_a_burst_of_an_operator_is_not_that_of_a_tenant_with_the_same_name(fabric: sublet.Fabric) -> None:
    """Neither in the count of its leases nor on its bill."""
    token = fabric.request("POST", "/v1/tenants", {"id": "ann"}, shape=dict)["token"]
    labels = {**PROGRAM, LABEL: "namesake"}
    home = str(fabric.address.home)
    with sublet.connect(home=home, token=token, as_tenant=True) as hers, hers.memory("1MiB", labels=labels):
        results = jobs.map(functions.square, range(3), fabric=fabric, want=1, name="namesake")
        assert list(results) == [0, 1, 4]
        result = results.result
        assert result is not None
        assert (result.leases_before, result.leases_after) == (0, 0)
        assert result.bill is not None
        assert result.bill.leases == 1
        assert fabric.wait_ended(labels, timeout=0, all=True) == 1
        assert [view.tenant for view in fabric.leases() if view.labels == labels] == ["ann"]
        assert hers.wait_ended(labels, timeout=0) == 1
    assert fabric.wait_ended(labels, all=True) == 0


def test_closures_and_lambdas_run_and_prints_appear(fabric: sublet.Fabric) -> None:
    by = 3
    assert list(jobs.map(lambda x: x * by, range(10), fabric=fabric, want=2)) == list(range(0, 30, 3))


def test_a_chunk_that_moves_forks_or_exits_harms_no_other(fabric: sublet.Fabric) -> None:
    folders = set(jobs.map(functions.moves, range(20), fabric=fabric, want=1))
    assert folders == {os.getcwd()}
    assert list(jobs.map(functions.forks, range(20), fabric=fabric, want=1)) == list(range(20))
    with pytest.raises(SystemExit):
        list(jobs.map(functions.exits, [1], fabric=fabric, want=1))


def test_a_burst_inside_a_burst_is_refused_and_waits_for_no_lease(fabric: sublet.Fabric) -> None:
    """Its leases might be those that the outer one has."""
    with pytest.raises(InvalidRequest, match="already runs under a lease"):
        list(jobs.map(functions.nests, [3], fabric=fabric, want=1, cores=len(os.sched_getaffinity(0))))


def test_a_chunk_that_ends_its_process_again_and_again_fails_with_that(fabric: sublet.Fabric) -> None:
    policy = jobs.RetryPolicy(1, "10ms", "10ms")
    with pytest.raises(JobFailed, match=r"it failed 2 times, the last time .*WorkerLost"):
        list(jobs.map(functions.dies, [1], fabric=fabric, want=1, policy=policy))


def test_workers_that_die_cost_no_other_chunk(fabric: sublet.Fabric, tmp_path: Path) -> None:
    work = functools.partial(functions.dies_once, str(tmp_path))
    results = jobs.map(work, range(60), fabric=fabric, want=2, policy=AT_ONCE)
    assert list(results) == list(range(60))
    assert results.result is not None
    assert results.result.retries == 6
    assert results.result.leases_after == 0


def test_results_in_a_volume_outlive_the_job(fabric: sublet.Fabric) -> None:
    chunks = [jobs.Chunk(functions.square, (n,)) for n in range(50)]
    for skipped in (0, 50):
        with fabric.block("64MiB", name="burst-results", retain="1h") as block:
            store = jobs.VolumeOutputStore(block)
            result = jobs.JobCoordinator(fabric=fabric, want=2, name="stored").run(chunks, store, None, len)
            assert (result.aggregate, result.chunks_skipped) == (50, skipped)
            assert [jobs.load_result(store.get(chunk.chunk_id())) for chunk in chunks] == [n * n for n in range(50)]
            store.close()


def test_a_store_that_is_full_or_without_its_lease_says_which_and_keeps_what_it_has(fabric: sublet.Fabric) -> None:
    with fabric.block("64MiB", name="too-small") as block:
        store = jobs.VolumeOutputStore(block, publish_after=0)
        with pytest.raises(CheckpointFailed, match=r"the store of job 'large' is full: .* more results need"):
            list(jobs.map(functions.large, range(40), fabric=fabric, want=1, name="large", store=store))
        had = len(store)
        assert had > 1  # all but the batch that did not fit
    end = "the lease of the store has ended, so results are not stored any more"
    with pytest.raises(LeaseEnded, match=end):
        list(jobs.map(functions.square, range(3), fabric=fabric, want=1, name="large", store=store))
    store.close()
    assert leases_left(fabric, "large", wait=0) == 0
    with fabric.block(name="too-small") as block:
        assert len(jobs.VolumeOutputStore(block)) == had
        with pytest.raises(InvalidRequest, match="has the results of job 'large', not of 'other'"):
            list(jobs.map(functions.square, [1], name="other", store=jobs.VolumeOutputStore(block), fabric=fabric))


def test_an_item_that_cannot_travel_is_named_with_the_path_to_it(fabric: sublet.Fabric) -> None:
    with pytest.raises(Unpicklable, match=r"^an item\['a'\]\[1\] cannot travel") as caught:
        list(jobs.map(functions.square, [1, {"a": [0, threading.Lock()]}], fabric=fabric, want=1))
    assert any("This was chunk 1" in note for note in caught.value.__notes__)


def test_a_function_that_cannot_travel_is_named_with_the_path_to_it(fabric: sublet.Fabric) -> None:
    held = {"locks": [1, threading.Lock()]}
    with pytest.raises(Unpicklable, match=r"^the function .*lambda>'s captured variable 'held'\['locks'\]\[1\] cannot"):
        list(jobs.map(lambda x: (x, held), range(2), fabric=fabric, want=1))


def test_a_chunk_that_prints_without_end_can_be_stopped(fabric: sublet.Fabric, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    results = jobs.map(functools.partial(functions.prints, str(begun)), [1], fabric=fabric, want=1, name="prints")

    def stop() -> None:
        until("the chunk to begin", begun.exists)
        results.stop_soon()

    stopper = threading.Thread(target=stop)
    stopper.start()
    assert list(results) == []
    stopper.join()
    assert leases_left(fabric, "prints", wait=0) == 0
    assert list(jobs.map(functions.square, [3], fabric=fabric, want=1)) == [9]


@pytest.mark.parametrize("needs", [{"cores": 4000}, {"memory": "4000TiB"}])
def test_more_than_any_machine_has_is_refused_at_once(fabric: sublet.Fabric, needs: dict[str, Any]) -> None:
    with pytest.raises(sublet.CapacityExceeded):
        list(jobs.map(functions.square, range(3), fabric=fabric, **needs))


def hungry(mebibytes: int) -> int:
    return len(bytearray(mebibytes << 20))


def test_a_chunk_out_of_memory_is_tried_again_on_a_larger_lease(fabric: sublet.Fabric) -> None:
    results = jobs.map(hungry, [1, 200], fabric=fabric, want=1, memory="128MiB", policy=AT_ONCE)
    assert list(results) == [1 << 20, 200 << 20]
    assert results.result is not None
    assert results.result.retries >= 1


def test_an_executor_on_real_leases(fabric: sublet.Fabric) -> None:
    with jobs.Executor(2, fabric=fabric) as executor:
        assert list(executor.map(functions.square, range(100))) == [x * x for x in range(100)]
        assert executor.submit(pow, 2, 10).result(60) == 1024
    assert executor.result is not None
    assert executor.result.leases_after == 0


def test_a_short_call_does_not_wait_behind_a_long_one_while_a_lease_is_free(
    fabric: sublet.Fabric, tmp_path: Path
) -> None:
    """What its worker had not begun is taken back, and nothing of it is executed twice."""
    gate, log = tmp_path / "gate", tmp_path / "log"
    with jobs.Executor(2, fabric=fabric) as executor:
        assert list(executor.map(functions.square, range(2000))) == [x * x for x in range(2000)]
        long = executor.submit(functions.waits_for, str(gate))
        short = [executor.submit(functions.noted, str(log), n) for n in range(100)]
        assert [future.result(60) for future in short] == list(range(100))
        assert not long.done()
        gate.touch()
        assert long.result(60) == "done"
    assert sorted(int(line.split()[0]) for line in log.read_text().splitlines()) == list(range(100))
    assert executor.result is not None
    assert (executor.result.retries, executor.result.leases_after) == (0, 0)


class Row:
    """A chunk that names a row of a table that all of them read."""

    def __init__(self, number: int) -> None:
        self.number = number

    def chunk_id(self) -> bytes:
        return b"row %012d" % self.number

    def to_bytes(self) -> bytes:
        return b"%d" % self.number

    @classmethod
    def from_bytes(cls, data: bytes) -> Row:
        return cls(int(data))


@pytest.mark.parametrize("way", ["map", "chunks", "exec_fn"])
def test_memory_of_a_large_array_is_kept_for_the_next_job(
    fabric: sublet.Fabric, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    memory, table = LentMemory(), np.arange(LENT_MIN // 8)
    monkeypatch.setattr("sublet.compute.functions.lent_memory", memory)
    coordinator, store = jobs.JobCoordinator(fabric=fabric, want=2), jobs.MemoryOutputStore()
    row_of = functools.partial(functions.row_of, table)
    if way == "map":
        found = list(jobs.map(row_of, range(3), fabric=fabric, want=2))
    elif way == "chunks":
        chunks = [jobs.Chunk(row_of, (n,)) for n in range(3)]
        found = coordinator.run(chunks, store, None, lambda outputs: list(map(jobs.load_result, outputs))).aggregate
    else:
        of_bytes = functools.partial(functions.row_of_bytes, table)
        found = coordinator.run([Row(n) for n in range(3)], store, of_bytes, lambda o: list(map(int, o))).aggregate
    assert found == [0, 1, 2]
    assert memory.kept_bytes == table.nbytes


def test_failures_are_collected_with_their_reasons(fabric: sublet.Fabric) -> None:
    found: list[Any] = list(jobs.map(functions.exits, range(3), fabric=fabric, want=1, errors="collect"))
    assert [one.reason for one in found] == [FailReason.RAISED] * 3
