"""Durable[T]: what a person writes, and every way in which a save may fail them without their knowing, shut."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sublet
from sublet.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    StaleEpoch,
    Unpicklable,
)
from sublet.state.checkpoints import reader
from sublet.state.checkpoints.durable import Durable, store_of
from sublet.state.checkpoints.store import FolderStore, verify
from sublet.state.checkpoints.writer import Staged
from sublet.state.transfer import memory
from sublet.values import Epoch, LeaseId
from tests.traces import until

PATIENCE_S = 60.0


def wait_until(true: Callable[[], bool]) -> None:
    until("what the writing thread is to do", true, PATIENCE_S)


@dataclass
class Block:
    """What a block lease is to Durable."""

    folder: Path
    id: LeaseId = LeaseId("lease-1")  # noqa: RUF009
    epoch: Epoch = Epoch(1, 1)  # noqa: RUF009


class Moody(FolderStore):
    """A store that fails when told to."""

    fails = False
    hold: threading.Event | None = None

    def publish(self, staged: Staged) -> None:
        if self.hold is not None:
            assert self.hold.wait(PATIENCE_S)
        if self.fails:
            raise CheckpointFailed("the disk is in a mood")
        super().publish(staged)


def step(state: dict[str, Any]) -> int:
    state["step"] += 1
    state["weights"][state["step"]] = state["step"]
    return int(state["step"])


def fresh() -> dict[str, Any]:
    return {"step": 0, "weights": np.zeros(100_000)}


def test_a_value_is_saved_and_restored(tmp_path: Path) -> None:
    state = sublet.Durable(fresh(), Block(tmp_path), schema="mine/1")
    assert state.mutate(step) == 1
    report = state.checkpoint(note="after one")
    assert report is not None
    assert report.number == 1
    state.mutate(step)
    state.close(save=False)
    back = sublet.Durable.restore(Block(tmp_path), schema="mine/1")
    assert back.value["step"] == 1
    assert back.value["weights"][1] == 1
    back.mutate(step)
    assert back.into_block_lease() == Block(tmp_path)
    assert Durable.restore(tmp_path, schema="mine/1").value["step"] == 2
    manifest = FolderStore(tmp_path).manifest(1)
    assert (manifest.note, manifest.schema, manifest.lease) == ("after one", "mine/1", "lease-1")


def test_leaving_the_block_saves_and_leaving_it_in_error_does_not(tmp_path: Path) -> None:
    with Durable(fresh(), tmp_path) as state:
        state.mutate(step)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117 - it is the way out of the block that is looked at
        with Durable.restore(tmp_path) as state:
            state.mutate(step)
            _ = 1 / 0
    assert Durable.restore(tmp_path).value["step"] == 1


def test_a_value_that_never_was_saved_is_saved_at_the_end_and_one_that_was_restored_is_not(tmp_path: Path) -> None:
    with Durable(fresh(), tmp_path) as state:
        state.value["step"] = 7
    with Durable.restore(tmp_path) as state:
        assert state.value["step"] == 7
    assert FolderStore(tmp_path).numbers() == [1]
    assert Durable({"step": 8}, tmp_path).into_block_lease() == tmp_path
    assert Durable.restore(tmp_path).value == {"step": 8}
    hopeless = Durable({"lock": threading.Lock()}, tmp_path)
    for what in (hopeless.checkpoint, hopeless.close):  # to be told once does not make it saved
        with pytest.raises(Unpicklable):
            what()


@pytest.mark.parametrize("which", ["manifest", "pack"])
def test_an_older_one_is_restored_where_the_newest_is_damaged_and_that_is_not_saved_over(
    tmp_path: Path, which: str
) -> None:
    with Durable(fresh(), tmp_path / "here") as state:
        state.mutate(step)
        state.checkpoint()
        packs = set(FolderStore(tmp_path / "here").packs.iterdir())
        state.mutate(step)
        state.mutate(lambda value: value.update(weights=np.random.default_rng(1).random(100_000)))
    store = FolderStore(tmp_path / "here")
    (pack,) = set(store.packs.iterdir()) - packs
    damaged = pack if which == "pack" else store.manifest_path(2)
    damaged.chmod(0o600)
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(CheckpointDamaged):
        Durable.restore(store.folder)
    with pytest.raises(CheckpointDamaged):
        Durable({"step": 0}, store.folder)
    with Durable.restore(store.folder, number=1) as older:
        assert older.value["step"] == 1
        with Durable(older.value, tmp_path / "elsewhere") as moved:
            moved.mutate(step)
        with pytest.raises(CheckpointFailed, match="not saved over"):
            older.checkpoint()
        older.close(save=False)
    assert store.numbers() == [1, 2]
    store.manifest_path(2).unlink()
    with Durable.restore(store.folder) as older:
        older.mutate(step)
    assert Durable.restore(store.folder).value["step"] == 2
    assert Durable.restore(tmp_path / "elsewhere").value["step"] == 2


def test_every_so_many_mutations_it_is_saved_in_the_background(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with Durable(fresh(), store, auto_checkpoint=3, keep=2) as state:
        for n in range(1, 11):
            assert state.mutate(step) == n
        state.flush()
        assert store.open().load("value")["step"] == 9
        assert state.last is not None
        assert state.last.number == 3
    assert store.open().load("value")["step"] == 10
    assert store.numbers() == [3, 4]
    assert verify(tmp_path).ok


def test_so_long_after_a_mutation_it_is_saved(tmp_path: Path) -> None:
    with Durable(fresh(), tmp_path, auto_checkpoint="20ms") as state:
        state.mutate(step)
        wait_until(lambda: state.last is not None)
        state.mutate(step)
        wait_until(lambda: state.last is not None and state.last.number == 2)
        assert FolderStore(tmp_path).open().load("value")["step"] == 2


def test_what_is_saved_in_the_background_is_the_value_as_it_was(tmp_path: Path) -> None:
    """The program goes on at once; what it changes meanwhile belongs to the next save."""
    store = Moody(tmp_path)
    store.hold = threading.Event()
    value: dict[str, Any] = {"a": np.zeros(3 << 20, dtype="u1"), "b": bytearray(2 << 20)}
    state = Durable(value, store)
    assert state.checkpoint(wait=False) is None
    value["a"][:] = 7
    value["b"] += b"longer"  # a bytearray whose size nobody holds
    store.hold.set()
    state.flush()
    saved = store.open().load("value")
    assert not saved["a"].any()
    assert len(saved["b"]) == 2 << 20
    state.checkpoint()
    assert store.open().load("value")["a"].all()
    state.close()


def test_a_second_save_waits_for_the_first_and_memory_stays_bounded(tmp_path: Path) -> None:
    store = Moody(tmp_path)
    store.hold = threading.Event()
    state = Durable(fresh(), store)
    state.checkpoint(wait=False)
    second = threading.Thread(target=lambda: state.checkpoint(wait=False))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    store.hold.set()
    second.join(PATIENCE_S)
    state.flush()
    assert store.newest() == 2
    state.close()


@pytest.mark.parametrize(
    "touch",
    [
        lambda state: state.value,
        lambda state: state.mutate(step),
        lambda state: state.checkpoint(),
        lambda state: state.flush(),
    ],
)
def test_a_save_that_failed_in_the_background_is_raised_at_the_next_touch(
    touch: Callable[[Durable[Any]], object], tmp_path: Path
) -> None:
    store = Moody(tmp_path)
    state = Durable(fresh(), store)
    state.mutate(step)
    state.checkpoint()
    store.fails = True
    state.mutate(step)
    state.checkpoint(wait=False)
    wait_until(lambda: state._queue.failure is not None)
    with pytest.raises(CheckpointFailed, match="in a mood"):
        touch(state)
    assert store.open().load("value")["step"] == 1
    store.fails = False
    state.close()  # what did not get saved then is saved now
    assert store.open().load("value")["step"] >= 2


def test_close_raises_when_nothing_could_be_saved(tmp_path: Path) -> None:
    store = Moody(tmp_path)
    state = Durable(fresh(), store, auto_checkpoint=1)
    store.fails = True
    state.mutate(step)
    with pytest.raises(CheckpointFailed, match="in a mood"):
        state.close()
    state.close()
    with pytest.raises(InvalidRequest, match="closed"):
        _ = state.value


def test_the_error_of_the_body_is_not_masked_by_a_failed_save(tmp_path: Path) -> None:
    store = Moody(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: PT012, SIM117 - the same
        with Durable(fresh(), store, auto_checkpoint=1) as state:
            store.fails = True
            state.mutate(step)
            wait_until(lambda: state._queue.failure is not None)
            _ = 1 / 0
    assert "in a mood" in caught.value.__notes__[0]


def test_a_value_that_cannot_be_saved_is_said_at_once_and_what_was_saved_stays(tmp_path: Path) -> None:
    value: dict[str, Any] = {"x": 1}
    state = Durable(value, tmp_path)
    state.checkpoint()
    state.mutate(lambda value: value.update(lock=threading.Lock()))
    with pytest.raises(Unpicklable, match="lock"):
        state.checkpoint()
    state.close(save=False)
    assert Durable.restore(tmp_path).value == {"x": 1}


def test_a_timer_that_cannot_save_says_so_at_the_next_touch(tmp_path: Path) -> None:
    value: dict[str, Any] = {"x": 1}
    state = Durable(value, tmp_path, auto_checkpoint="10ms")
    state.mutate(lambda value: value.update(lock=threading.Lock()))
    wait_until(lambda: state._queue.failure is not None)
    with pytest.raises(Unpicklable, match="lock"):
        state.flush()
    state.close(save=False)


def test_a_program_that_just_ends_finishes_what_it_began(tmp_path: Path) -> None:
    code = (
        "import sys; from sublet.state.checkpoints.durable import Durable;"
        "Durable({'x': bytes(30_000_000)}, sys.argv[1]).checkpoint(wait=False)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert len(Durable.restore(tmp_path).value["x"]) == 30_000_000


def test_a_mutation_that_raises_hands_its_error_through(tmp_path: Path) -> None:
    state = Durable({"x": 1}, tmp_path)
    with pytest.raises(KeyError):
        state.mutate(lambda value: value["nothing"])
    state.close()


def test_a_value_that_cannot_change_is_set_anew(tmp_path: Path) -> None:
    with Durable(5, tmp_path) as state:
        state.value = 6
    assert Durable.restore(tmp_path).value == 6


def test_another_schema_or_nothing_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        Durable.restore(tmp_path)
    Durable(1, tmp_path, schema="a").checkpoint()
    with pytest.raises(InvalidRequest, match="of schema 'a', not 'b'"):
        Durable.restore(tmp_path, schema="b")
    assert Durable.restore(tmp_path, schema="a", number=1).value == 1


def test_a_newer_holder_fences_the_older_one(tmp_path: Path) -> None:
    old = Durable({"x": 1}, Block(tmp_path))
    new = Durable.restore(Block(tmp_path, epoch=Epoch(1, 2))) if FolderStore(tmp_path).newest() else None
    assert new is None
    new = Durable({"x": 2}, Block(tmp_path, epoch=Epoch(1, 2)))
    new.checkpoint()
    late = Durable.restore(Block(tmp_path))
    with pytest.raises(StaleEpoch):
        late.checkpoint()
    with pytest.raises(sublet.SubletError):
        old.checkpoint()
    assert FolderStore(tmp_path).open().load("value") == {"x": 2}


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "soon", "0s"])
def test_a_wrong_auto_checkpoint_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        Durable(1, tmp_path, auto_checkpoint=wrong)


def test_what_holds_no_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot hold checkpoints"):
        store_of(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="at least the newest"):
        Durable(1, tmp_path, keep=0)
    assert os.listdir(tmp_path) == []


def test_a_state_for_which_there_is_no_memory_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the background, where it is copied; what was saved is whole, and can be restored where there is more."""

    def none(length: int) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    state = Durable({"array": np.arange(1 << 18)}, tmp_path)
    state.checkpoint()
    state.mutate(lambda it: it["array"].__iadd__(1))
    with monkeypatch.context() as patched:
        patched.setattr(memory, "fresh_memory", none)
        with pytest.raises(CheckpointFailed, match="not enough memory") as failed:
            state.checkpoint(wait=False)
        assert "wait=True" in failed.value.do
        patched.setattr(reader, "fresh_memory", none)
        with pytest.raises(OutOfMemory, match="there is no memory for"):
            Durable.restore(tmp_path)
    state.checkpoint()
    assert Durable.restore(tmp_path).value["array"][0] == 1
