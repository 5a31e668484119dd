"""What a guest keeps: an array that was changed in place is never taken for what it was."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from sublet.compute import buffer_cache as kept_module
from sublet.compute.buffer_cache import BufferCache
from sublet.state.transfer.pages import Pages
from sublet.wire.sealed_memory import write_shared


class Blind(Pages):
    """A kernel that tells nothing."""

    def written_since(self, address: int, length: int, since: int) -> tuple[int, list[tuple[int, int]] | None]:
        return 0, None


def view(array: np.ndarray) -> memoryview:
    return array.data.cast("B")


def send(kept: BufferCache, array: np.ndarray) -> tuple[int, bool]:
    """The number it has there, and whether it had to be sent."""
    number = kept.find(view(array))
    if number:
        return number, False
    fd, _ = write_shared((view(array),))
    number = kept.took(view(array), fd)
    os.close(fd)
    return number, True


@pytest.fixture(params=["asked", "blind"])
def kept(request: pytest.FixtureRequest) -> BufferCache:
    return BufferCache(1 << 30, None if request.param == "asked" else Blind())


@pytest.mark.parametrize("size", [1 << 13, 1 << 18])
def test_unchanged_is_known_and_changed_is_sent(kept: BufferCache, size: int) -> None:
    array = np.zeros(size)
    number, sent = send(kept, array)
    assert sent
    for _ in range(4):
        assert send(kept, array) == (number, False)
    array[-1] = 1
    other, sent = send(kept, array)
    assert sent
    assert other != number
    assert kept.to_forget() == [number]
    assert send(kept, array) == (other, False)


def test_what_was_written_and_is_the_same_again_is_unchanged(kept: BufferCache) -> None:
    array = np.zeros(1 << 18)
    number, _ = send(kept, array)
    send(kept, array)
    array[5] = 3
    array[5] = 0
    assert send(kept, array) == (number, False)


def test_equal_bytes_elsewhere_are_known_too(kept: BufferCache) -> None:
    array = np.random.default_rng(1).random(1 << 18)
    number, _ = send(kept, array)
    copy = array.copy()
    assert send(kept, copy) == (number, False)
    copy[0] += 1
    assert send(kept, copy)[1]


def test_two_hundred_rounds_of_random_changes_are_all_found(kept: BufferCache) -> None:
    """The other side is pretended to by a copy of what was last sent under each number."""
    chance = random.Random(7)
    array = np.zeros(1 << 18, dtype=np.uint8).repeat(8)
    there: dict[int, bytes] = {}
    for _ in range(200):
        for _ in range(chance.choice([0, 0, 1, 5])):
            array[chance.randrange(len(array))] = chance.randrange(256)
        number, sent = send(kept, array)
        if sent:
            there[number] = array.tobytes()
        assert there[number] == array.tobytes()
        for gone in kept.to_forget():
            del there[gone]


def test_there_is_a_bound_in_bytes_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = BufferCache(1 << 20, Blind())
    arrays = [np.full(1 << 15, float(n)) for n in range(8)]
    numbers = [send(kept, array)[0] for array in arrays]
    assert kept.kept_bytes <= 1 << 20
    assert kept.to_forget() == numbers[:4]
    assert send(kept, np.zeros(1 << 18))[0] == 0, "larger than all that may be kept"
    monkeypatch.setattr(kept_module, "KEPT_MAX", 2)
    other = np.full(1 << 14, 1.5)
    send(kept, other)
    assert len(kept.to_forget()) == 3


def test_what_is_not_used_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = BufferCache(1 << 30, Blind())
    number, _ = send(kept, np.zeros(1 << 15))
    assert kept.to_forget() == []
    monkeypatch.setattr(kept_module, "KEPT_FOR_S", -1.0)
    assert kept.to_forget() == [number]
    assert kept.kept_bytes == 0
    kept.clear()
