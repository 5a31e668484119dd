"""How many checkpoints of a notebook are kept where there is little room; and never the last good one less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import CheckpointFailed
from sublet.notebook.checkpoint import KEEP, SPARE, WITHIN, NotebookCheckpoint, SavedPart, how_many, make_room
from sublet.state.checkpoints.store import FolderStore, verify
from sublet.values import MIB
from tests.notebook.test_checkpoint import part


@pytest.mark.parametrize(
    ("needed", "room", "freed", "least", "keep"),
    [
        (5, 10, {}, 1, 3),
        (10, 10, {}, 1, 3),
        (11, 10, {2: 1, 1: 9}, 1, 2),
        (12, 10, {2: 1, 1: 9}, 1, 1),
        (12, 10, {2: 1, 1: 9}, 2, 0),
        (20, 10, {2: 1, 1: 9}, 1, 0),
        (20, 0, {2: 20, 1: 20}, 1, 2),
    ],
)
def test_as_many_stay_as_there_is_room_for(
    needed: int, room: int, freed: dict[int, int], least: int, keep: int
) -> None:
    assert how_many(needed, room, lambda keep: freed.get(keep, 0), most=3, least=least) == keep


class Volume:
    """So many bytes, and checkpoints of their own packs."""

    def __init__(self, size: int, packs: dict[int, int]) -> None:
        self.size = size
        self.packs = packs

    @property
    def room(self) -> int:
        return self.size - sum(self.packs.values())

    def numbers(self) -> list[int]:
        return sorted(self.packs)

    def freed_by(self, keep: int) -> int:
        return sum(self.packs[number] for number in self.numbers()[:-keep])

    def collect_once(self, keep: int) -> None:
        self.packs = {number: self.packs[number] for number in self.numbers()[-keep:]}


@given(st.data())
def test_whatever_is_saved_the_last_good_one_stays_and_nothing_goes_in_vain(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 100)) * MIB
    volume, good = Volume(size, {}), 0
    for number in range(1, 9):
        needed = data.draw(st.integers(1, 60)) * MIB
        before = dict(volume.packs)
        try:
            gone = make_room(volume, needed, most=KEEP, good=good)
        except CheckpointFailed:
            assert volume.packs == before
            assert needed + SPARE + sum(of for n, of in before.items() if n >= (good or max(before, default=0))) > size
            continue
        assert needed + SPARE <= volume.room
        assert len(before) - len(volume.packs) == gone
        assert {n for n in before if n >= good and good} <= volume.packs.keys()
        assert not before or max(before) in volume.packs
        if gone:  # with one more it would not have fitted
            more = sorted(before)[-len(volume.packs) - 1]
            assert volume.room - before[more] < needed + SPARE
        volume.packs[number] = needed
        volume.collect_once(KEEP)
        if data.draw(st.booleans()):
            good = number  # its results were taken
        good = good if good in volume.packs else max(volume.packs)


class Small(FolderStore):
    """A folder that is kept to a size, as a volume is."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__(folder)
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    @property
    def room(self) -> int:
        return self._size - sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def state(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return part(SavedPart.DEVICE, w=np.frombuffer(np.random.default_rng(seed).bytes(MIB), np.uint8))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Small]:
    made = Small(tmp_path, 5 * MIB // 2)
    yield made
    assert verify(tmp_path).ok


def test_a_state_that_changes_wholly_is_saved_again_and_again(store: Small) -> None:
    shelf = NotebookCheckpoint(store)
    gone = [shelf.save(*state(seed)).let_go for seed in range(6)]
    assert gone == [0, 0, 1, 1, 1, 1]
    assert store.numbers() == [5, 6]
    assert shelf.load(["device:w"])["device:w"][0] == state(5)[0]["device:w"][0]


def test_what_does_not_fit_twice_is_refused_and_nothing_went_for_it(store: Small) -> None:
    shelf = NotebookCheckpoint(store)
    shelf.save(*state(1))
    shelf.save(*part(SavedPart.NOTEBOOK, x=1))
    large = np.frombuffer(np.random.default_rng(2).bytes(2 * MIB), np.uint8)
    before = sorted(store.folder.rglob("*"))
    with pytest.raises(CheckpointFailed, match=r"beside what was saved last.* it takes 16MiB") as caught:
        shelf.save(*part(SavedPart.DEVICE, large=large))
    assert "%gpu name X 16MiB" in caught.value.do
    assert sorted(store.folder.rglob("*")) == before
    assert sorted(shelf.found()) == ["device:w", "notebook:x"]


def test_until_its_results_are_taken_the_checkpoint_before_it_stays_to_go_back_to(store: Small) -> None:
    shelf = NotebookCheckpoint(store)
    good = shelf.save(*state(1)).number
    shelf.save(*state(2), good=good)
    with pytest.raises(CheckpointFailed, match="beside"):
        shelf.save(*state(3), good=good)
    assert shelf.roll_back_to(good) == 3
    assert np.array_equal(shelf.load(["device:w"])["device:w"], state(1)[0]["device:w"])
    assert shelf.save(*state(3)).let_go


def test_a_long_cell_saves_itself_as_often_as_it_likes(store: Small) -> None:
    shelf = NotebookCheckpoint(store)
    shelf.save(*state(0))
    for seed in range(1, 5):
        shelf.save(*state(seed), note=f"{WITHIN}cell 2")
    assert shelf.roll_back_to(1) == 5
    assert np.array_equal(shelf.load(["device:w"])["device:w"], state(4)[0]["device:w"])
