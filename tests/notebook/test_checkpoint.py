"""One volume that two sides save in: what each leaves alone, and what it replaces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sublet.errors import CheckpointFailed
from sublet.notebook import guest_persistence
from sublet.notebook.checkpoint import About, NotebookCheckpoint, SavedPart, key_of
from sublet.state.checkpoints.store import FolderStore, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "volume"


def shelf(folder: Path) -> NotebookCheckpoint:
    return NotebookCheckpoint(FolderStore(folder))


def device(**values: object) -> tuple[dict[str, object], dict[str, About]]:
    return part(SavedPart.DEVICE, **values)


def part(which: SavedPart, **values: object) -> tuple[dict[str, object], dict[str, About]]:
    keyed = {key_of(which, name): value for name, value in values.items()}
    return keyed, {key_of(which, name): About(name=name, cell=1) for name in values}


def test_each_side_keeps_what_the_other_saved(folder: Path) -> None:
    guest, notebook = shelf(folder), shelf(folder)
    guest.save(*device(w=np.arange(1 << 17)))
    notebook.save(*part(SavedPart.NOTEBOOK, x=[1], y=2))
    guest.save(*device(w=np.arange(1 << 17) + 1))
    found = shelf(folder)
    assert sorted(found.found()) == ["device:w", "notebook:x", "notebook:y"]
    assert found.load(["device:w"])["device:w"][0] == 1
    assert found.load(["notebook:x"])["notebook:x"] == [1]
    assert all(one.wall_ns for one in found.found().values())
    assert verify(folder).ok


def test_what_is_not_touched_is_neither_read_nor_written_again(folder: Path) -> None:
    one = shelf(folder)
    rng = np.random.default_rng(1)
    one.save(*device(large=rng.bytes(4 << 20)))
    assert one.save(*device(small=1)).written_bytes < 64 << 10
    assert sorted(one.found()) == ["device:large", "device:small"]


def test_who_was_saved_with_one_that_is_replaced_is_kept(folder: Path) -> None:
    """They stand in one record, which goes as a whole."""
    one, shared = shelf(folder), [0]
    one.save(*device(a=shared, b=shared, c=3))
    shelf(folder).save(*device(a="other"))
    again = shelf(folder)
    values = again.load(["device:a", "device:b", "device:c"])
    assert (values["device:a"], values["device:b"], values["device:c"]) == ("other", [0], 3)
    assert sorted(again.found()) == ["device:a", "device:b", "device:c"]


def test_aliases_come_back_as_aliases(folder: Path) -> None:
    shared = np.ones(1 << 16)
    shelf(folder).save(*device(a=shared, b=shared[:10]))
    values = shelf(folder).load(["device:b"])
    values["device:a"][0] = 7
    assert values["device:b"][0] == 7


def test_what_is_dropped_is_gone(folder: Path) -> None:
    one = shelf(folder)
    one.save(*device(a=[1], b=[2]))
    one.save({}, {}, drop=lambda key: key == "device:a")
    assert sorted(one.found()) == ["device:b"]
    assert one.load(["device:b"])["device:b"] == [2]


def test_parts_are_never_loaded_with_each_other(folder: Path) -> None:
    """The notebook must not load what is for a device, however small."""
    values, about = device(a=1)
    more, told = part(SavedPart.CELL, a=2, b=3)
    shelf(folder).save(values | more, about | told)
    assert shelf(folder).load(["cell:b"]).keys() == {"cell:a", "cell:b"}
    assert shelf(folder).load(["device:a"]).keys() == {"device:a"}


def test_a_save_that_fails_leaves_what_was_there(folder: Path) -> None:
    one = shelf(folder)
    one.save(*device(a=[1]))
    staging = folder / "staging"
    staging.rename(folder / "aside")
    staging.write_text("in the way")
    with pytest.raises(CheckpointFailed):
        one.save(*device(a=np.random.default_rng(1).random(1 << 16)))
    staging.unlink()
    (folder / "aside").rename(staging)
    assert shelf(folder).load(["device:a"])["device:a"] == [1]
    one.save(*device(a=[2]))
    assert shelf(folder).load(["device:a"])["device:a"] == [2]


def test_what_cannot_be_saved_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointFailed, match="loader cannot be saved: a generator"):
        shelf(folder).save(*device(loader=(n for n in range(3))))


def test_what_an_ended_cell_saved_is_given_up_unless_it_had_asked(folder: Path) -> None:
    one, notebook = shelf(folder), shelf(folder)
    finished = one.save(*device(a=[1], b=np.arange(1 << 16)), note="cell 1").number
    one.save(*device(a=[2], c=3), note="cell 2")
    assert notebook.roll_back_to(finished) == 3
    assert sorted(shelf(folder).found()) == ["device:a", "device:b"]
    assert shelf(folder).load(["device:a"])["device:a"] == [1]
    assert notebook.roll_back_to(3) == 3
    asked = one.save(*device(a=[3]), note="within cell 3").number
    one.save(*device(a=[4]), note="cell 3")
    assert notebook.roll_back_to(3) == 6
    assert shelf(folder).load(["device:a"])["device:a"] == [3]
    assert asked == 4
    assert verify(folder).ok


def test_what_came_after_it_was_looked_for_counts_no_more(folder: Path) -> None:
    """A cell that was ended had asked for it, and its notebook went on without."""
    one, notebook = shelf(folder), shelf(folder)
    finished = one.save(*device(a=[1]), note="cell 1").number
    one.save(*device(a=[2]), note="within cell 2")
    assert notebook.roll_back_to(finished, is_final=True) == 3
    assert shelf(folder).load(["device:a"])["device:a"] == [1]


def test_of_a_volume_whose_first_cell_was_ended_nothing_is_left(folder: Path) -> None:
    shelf(folder).save(*device(a=[1]), note="cell 1")
    assert shelf(folder).roll_back_to(0) == 2
    assert shelf(folder).found() == {}
    shelf(folder).save(*device(a=[2]), note="cell 1")
    assert shelf(folder).load(["device:a"])["device:a"] == [2]


def test_what_has_not_changed_is_no_new_checkpoint(folder: Path) -> None:
    one, weights = shelf(folder), np.arange(1 << 18)
    first = one.save(*device(w=weights, s=[1]))
    again = one.save(*device(w=weights, s=[1]))
    assert (again.number, again.wall_ns, again.written_bytes) == (first.number, first.wall_ns, 0)
    weights[5] = 0
    assert one.save(*device(w=weights, s=[1])).number == first.number + 1
    assert one.save(*device(s=[1])).number == first.number + 1
    assert one.save(*device(s=[2])).number == first.number + 2
    assert one.save({}, {}, drop=lambda key: key == "device:s").number == first.number + 3


def test_what_is_on_a_device_that_was_taken_is_named_and_the_rest_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when the parking lease of a notebook's guest ends: its card cannot be read any more."""
    state = guest_persistence._State()
    state.place, state.held = str(tmp_path), {name: About(name=name, cell=1) for name in ("weights", "table")}
    state.dirty, state.elsewhere = set(state.held), {"weights": True, "table": False}
    monkeypatch.setattr(guest_persistence, "_state", state)
    monkeypatch.setattr(guest_persistence, "devices_are_away", lambda: True)
    news = guest_persistence._save({"weights": object(), "table": [1, 2]}, everything=False, note="notice")
    assert not news.failed
    assert set(shelf(tmp_path).found()) == {"device:table"}
    assert "not saved, for its device was taken: weights" in capsys.readouterr().err
    assert state.dirty == {"weights"}
