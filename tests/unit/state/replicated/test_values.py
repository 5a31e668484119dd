"""Python values on replicas: they come back as they were, and what is not one is said to be none."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from sublet.errors import CheckpointDamaged, InvalidRequest, SubletError, Unpicklable
from sublet.replicated import MemoryReplica, ReplicatedCheckpoint
from sublet.state.replicated.checkpoint import PAGE, dump_value, load_value
from sublet.values import Epoch


def store(*, schema: str = "v.v1") -> ReplicatedCheckpoint:
    return ReplicatedCheckpoint(
        "values", schema=schema, replicas=[MemoryReplica() for _ in range(3)], epoch=Epoch(1, 1)
    )


def test_a_value_comes_back_with_what_it_shares() -> None:
    weights = np.arange(100_000, dtype=np.float32)
    value = {"weights": weights, "last": weights[-10:], "step": 7, "names": ["a", "ü"], "nothing": b""}
    checkpoints = store()
    with checkpoints.group:
        save = checkpoints.save("job", value, expected=0, effect=("job/1", "print", 1))
        assert save.version == 1
        found = checkpoints.load("job")
        assert found is not None
        assert found.effect is not None
        again = found.value()
        assert {k: v for k, v in again.items() if k not in ("weights", "last")} == {
            "step": 7,
            "names": ["a", "ü"],
            "nothing": b"",
        }
        again["weights"][-1] = 5.0
        assert again["last"][-1] == 5.0
        assert weights[-1] == 99_999.0
        assert found.value()["weights"][-1] == 99_999.0, "each loading has memory of its own"


def test_bytes_are_no_value_and_say_so() -> None:
    checkpoints = store()
    with checkpoints.group:
        checkpoints.save_bytes("job", b"plain")
        found = checkpoints.load("job")
        assert found is not None
        with pytest.raises(InvalidRequest, match=r"saved as bytes.*\.data"):
            found.value()


def test_what_cannot_be_saved_is_named_and_changes_nothing() -> None:
    checkpoints = store()
    with checkpoints.group:
        checkpoints.save("job", 1)
        with pytest.raises(Unpicklable, match="generator"):
            checkpoints.save("job", {"fine": 1, "not": (n for n in range(3))})
        assert [save.version for save in checkpoints.versions("job")] == [1]


def test_a_head_that_grows_moves_nothing_behind_it() -> None:
    """So the packs of the array are the same, and are not sent again."""
    array = np.arange(1 << 16)
    first, second = (dump_value({"array": array, "note": "x" * n}) for n in (1, 500))
    assert len(first) == len(second)
    assert first[-array.nbytes :] == second[-array.nbytes :]
    assert len(first) % PAGE == 0


@pytest.mark.parametrize("keep", [0, 3, 4, 11, 15, 16, 23, 24, 4095, 4096, 5000, -1, -PAGE])
def test_what_is_cut_off_is_noticed(keep: int) -> None:
    data = dump_value({"array": np.arange(1000)})
    with pytest.raises(SubletError):
        load_value(data[:keep])


def test_every_bit_of_the_front_counts() -> None:
    data = dump_value([1, 2, 3])
    parts = struct.unpack_from("<I", data, 8)[0]
    for bit in range(8 * (16 + 8 * parts)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CheckpointDamaged, InvalidRequest)):
            load_value(bytes(wrong))
