"""What is here and a copy of what another kernel saved, put together: nothing that is here is lost to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import NotFound
from sublet.notebook.checkpoint import WITHIN, JoinedNames, Key, NotebookCheckpoint, SavedPart, join
from sublet.state.checkpoints.store import FolderStore, verify
from tests.notebook.test_checkpoint import part


@pytest.mark.parametrize(
    ("here", "there", "may_go", "expected"),
    [
        ([], ["a", "bc"], "", (["a", "bc"], [], "")),
        (["a"], [], "a", ([], ["a"], "")),
        (["a"], ["a"], "a", (["a"], [], "")),
        (["a"], ["a", "b"], "", (["b"], ["a"], "")),
        (["ab"], ["a", "b"], "a", ([], ["ab"], "")),
        (["ab"], ["a", "b"], "ab", (["a", "b"], [], "")),
        (["a"], ["ab"], "", ([], ["a"], "b")),
        (["a", "b"], ["abc"], "b", ([], ["a", "b"], "c")),
        (["ab"], ["b"], "ab", (["b"], [], "a")),
    ],
)
def test_records_go_or_come_as_a_whole(
    here: list[str], there: list[str], may_go: str, expected: tuple[list[str], list[str], str]
) -> None:
    found = join(map(tuple, here), map(tuple, there), may_go.__contains__)
    taken, kept, left = expected
    assert found == JoinedNames(tuple(map(tuple, kept)), tuple(map(tuple, taken)), tuple(left))


@st.composite
def records(draw: st.DrawFn) -> list[tuple[str, ...]]:
    names = draw(st.permutations("abcdef"))[: draw(st.integers(0, 6))]
    cuts = sorted(draw(st.sets(st.integers(1, 6))))
    found = [tuple(names[low:high]) for low, high in zip([0, *cuts], [*cuts, 6], strict=True)]
    return [one for one in found if one]


@given(records(), records(), st.sets(st.sampled_from("abcdef")))
def test_what_may_not_go_stays_and_no_name_is_there_twice(
    here: list[tuple[str, ...]], there: list[tuple[str, ...]], may_go: set[str]
) -> None:
    found = join(here, there, may_go.__contains__)
    names = [name for record in (*found.kept, *found.taken) for name in record]
    assert len(names) == len(set(names))
    firm = {name for record in here for name in record} - may_go
    assert firm <= {name for record in found.kept for name in record}
    assert {*names, *found.left} == {name for record in (*here, *there) for name in record}
    assert set(found.kept) <= set(here)
    assert set(found.taken) <= set(there)


def never(_: Key) -> bool:
    return False


def large(value: int) -> np.ndarray:
    return np.full(1 << 17, value)


def test_a_copy_comes_into_what_is_here_as_one_save(tmp_path: Path) -> None:
    first, second = NotebookCheckpoint(FolderStore(tmp_path / "1")), NotebookCheckpoint(FolderStore(tmp_path / "2"))
    shared = [0]
    first.save(*part(SavedPart.DEVICE, w=large(1), own=large(2), a=shared, b=shared))
    first.save(*part(SavedPart.NOTEBOOK, x=3))
    first.save(*part(SavedPart.CELL, half=4), note=f"{WITHIN}cell 9")  # of a cell that runs: it has not finished
    second.save(*part(SavedPart.DEVICE, own=large(5), mine=6))
    assert second.inspect(str(tmp_path / "1")).number == 2
    left = second.import_from(str(tmp_path / "1"), lambda key: key == "device:own")
    assert not left
    assert second.newest == 2
    values = second.load(second.found())
    assert sorted(values) == [f"device:{name}" for name in ("a", "b", "mine", "own", "w")] + ["notebook:x"]
    assert (values["device:w"][0], values["device:own"][0], values["device:mine"]) == (1, 5, 6)
    assert values["device:a"] is values["device:b"]
    first.save(*part(SavedPart.DEVICE, w=large(8)))
    second.import_from(str(tmp_path / "1"), never)
    assert second.load(["device:w"])["device:w"][0] == 8
    assert second.load(["device:own"])["device:own"][0] == 5  # newer than what the other has
    second.save(*part(SavedPart.DEVICE, w=large(9)))
    assert first.load(["device:w"])["device:w"][0] == 8
    assert verify(tmp_path / "1").ok
    assert verify(tmp_path / "2").ok
    assert not list((tmp_path / "2" / "staging").iterdir())


def test_from_nothing_comes_nothing(tmp_path: Path) -> None:
    second = NotebookCheckpoint(FolderStore(tmp_path / "2"))
    with pytest.raises(NotFound):
        second.import_from(str(tmp_path / "1"), never)
    FolderStore(tmp_path / "1")
    assert second.import_from(str(tmp_path / "1"), never) == ()
    assert second.newest == 0
