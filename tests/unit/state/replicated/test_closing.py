"""What a program opened ends with it: closed by whoever opened it, or when nobody has it any more."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sublet.replicated import MemoryReplica, New, ReplicaGroup, ReplicatedCheckpoint, ReplicatedIdempotencyStore
from sublet.training import training_records
from sublet.values import Epoch
from tests.left_open import left_of, nothing_left_open
from tests.unit.training.stage import HeldLease

EPOCH = Epoch(1, 1)


def threads() -> frozenset[threading.Thread]:
    return frozenset(thread for thread in threading.enumerate() if thread.name.startswith("replica-"))


def checkpoint(of: Any) -> ReplicatedCheckpoint:
    return ReplicatedCheckpoint("runs", schema="w.v1", replicas=of, epoch=EPOCH)


def effects(of: Any) -> ReplicatedIdempotencyStore:
    return ReplicatedIdempotencyStore("runs", replicas=of, epoch=EPOCH)


def folders(here: Path) -> list[Path]:
    return [here / name for name in "abc"]


def test_a_group_that_nobody_has_any_more_ends_its_threads_and_leaves_the_replicas() -> None:
    replicas = [MemoryReplica() for _ in range(3)]
    before = threads()
    idle, busy = ReplicaGroup(replicas), checkpoint(replicas)
    busy.save_bytes("job", b"weights")
    assert len(threads() - before) == 6
    del idle, busy
    gc.collect()
    assert not left_of(threads, before)
    with checkpoint(ReplicaGroup(replicas)).group as group:
        found = checkpoint(group).load("job")
        assert found is not None
        assert found.data == b"weights"


def test_a_replica_that_breaks_its_contract_is_faulty_and_its_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: object) -> None:
        raise KeyError("a mistake of its own")

    with ReplicaGroup([MemoryReplica() for _ in range(3)]) as group:
        odd = group.replicas()[0]
        worker = group._workers[odd.identity]
        one = checkpoint(group)
        with monkeypatch.context() as broken:
            broken.setattr(odd, "ask", breaks)
            one.save_bytes("job", b"weights")
            assert not left_of(lambda: frozenset() if "KeyError" in worker.detail else frozenset({1}), frozenset())
        one.save_bytes("job", b"more")
        assert not left_of(lambda: frozenset({worker.detail} - {""}), frozenset())


def test_folders_that_nobody_has_any_more_are_closed(tmp_path: Path) -> None:
    with nothing_left_open():
        one = checkpoint(folders(tmp_path))
        one.save_bytes("job", b"weights")
        del one
        gc.collect()


@pytest.mark.parametrize("store", [checkpoint, effects])
def test_a_store_closes_the_replicas_it_opened(store: Callable[[Any], Any], tmp_path: Path) -> None:
    before = threads()
    with nothing_left_open():
        with store(folders(tmp_path)) as one:
            assert len(threads() - before) == 3
        one.close()
    assert not left_of(threads, before)


@pytest.mark.parametrize("store", [checkpoint, effects])
def test_a_store_leaves_a_group_open_that_it_was_given(store: Callable[[Any], Any]) -> None:
    with ReplicaGroup([MemoryReplica()]) as group:
        with store(group):
            pass
        assert effects(group).reserve("key", "print") == New("key")


def test_the_records_of_a_job_close_what_they_opened(tmp_path: Path) -> None:
    before = threads()
    with nothing_left_open(), training_records("runs", folders(tmp_path), HeldLease(1)) as (saves, reservations):
        saves.save_bytes("job", b"weights")
        assert reservations.reserve("key", "print") == New("key")
    assert not left_of(threads, before)
