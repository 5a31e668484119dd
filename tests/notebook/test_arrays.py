"""Arrays that cross as between two processes, in sealed files: what is believed, moved and not read is all true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.guest.cargo import encode, load, place_buffers
from sublet.notebook.namespace_sync import GUEST, NOTEBOOK, Outgoing, Space
from sublet.state.transfer import changes
from sublet.state.transfer.memory import address_of
from sublet.state.transfer.sealed import own_pages
from sublet.wire.frames import close_all
from sublet.wire.sealed_memory import map_shared

LENGTH = 3 * (1 << 17) + 5
"""Numbers of 8 bytes: 12 chunks and a bit."""


class Sides:
    """Both of them."""

    def __init__(self) -> None:
        self.here: dict[str, Any] = {}
        self.there: dict[str, Any] = {}
        self._spaces = Space(self.here, NOTEBOOK), Space(self.there, GUEST)
        self.sent = self.came = 0

    def go(self, *names: str) -> None:
        """As before a cell."""
        space, other = self._spaces
        found = space.outgoing(names, must=True)
        other.take(crossed(found), found.gone)
        space.sent(found)
        self.sent = found.nbytes

    def back(self, *names: str, new: tuple[str, ...] = ()) -> None:
        """As after it."""
        other, space = self._spaces
        found = space.outgoing(names, lost_of=names, new=new)
        space.sent(found)
        other.take(crossed(found), found.gone)
        self.came = found.nbytes


def crossed(found: Outgoing) -> list[Any]:
    parcels = []
    for parcel in found.parcels:
        cargo = encode(parcel, "it")
        placed = place_buffers(cargo)
        try:
            views = [
                map_shared(placed.fds[piece.fd], piece.offset, piece.length, writable=True)
                for piece in placed.pieces[1:]
            ]
            parcels.append(load(cargo.head, views))
        finally:
            close_all(placed.fds)
    return parcels


@pytest.fixture
def sides() -> Sides:
    return Sides()


def test_who_takes_an_array_does_not_read_it(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    sides.here["a"] = np.arange(LENGTH, dtype=np.float64)
    read: list[int] = []
    hashed = changes.each_hash

    def noting(look: changes.Look, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        read.extend(numbers)
        return hashed(look, numbers)

    monkeypatch.setattr(changes, "each_hash", noting)
    sides.go("a")
    if own_pages(address_of(sides.there["a"].data), 8 * LENGTH) is None:
        pytest.skip("this kernel does not tell which pages are a file's (it does from 6.7 on)")
    sides.back("a")
    assert sorted(read) == list(range(13))
    assert sides.came == 0
    sides.there["a"][5] = 1.5
    sides.back("a")
    assert sides.came > 8 * LENGTH
    assert sides.here["a"][5] == 1.5


def test_an_array_that_comes_again_takes_the_place_of_the_one_before(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    array, view = sides.there["a"], sides.there["a"][7:9]
    array[0] = 3.0
    start = address_of(array.data)
    sides.here["a"] += 1.0
    sides.go("a")
    assert sides.there["a"] is array
    assert address_of(array.data) == start
    assert (found := own_pages(start, array.nbytes)) is None or found[1] == []  # not written: its pages came
    assert array.tolist() == [1.0] * LENGTH
    assert view.tolist() == [1.0, 1.0]
    sides.back("a")
    assert sides.came == 0
    view[0] = 9.0
    sides.back("a")
    assert sides.here["a"][7] == 9.0


def test_what_came_new_is_not_sent_back_until_it_changes(sides: Sides) -> None:
    sides.there["b"] = np.ones(LENGTH)
    sides.back("b", new=("b",))
    sides.go("b")
    assert sides.sent == 0
    sides.here["b"][-1] = 4.0
    sides.go("b")
    assert sides.sent > 8 * LENGTH
    assert sides.there["b"][-1] == 4.0


def test_a_view_that_covers_all_of_it_and_its_array_stay_one(sides: Sides) -> None:
    whole = np.zeros(LENGTH)
    sides.here |= {"a": whole, "b": whole[:], "c": whole[10:]}
    sides.go("a", "b", "c")
    sides.here["b"][11] = 2.0
    sides.go("a", "b", "c")
    assert [float(sides.there[name][n]) for name, n in (("a", 11), ("b", 11), ("c", 1))] == [2.0] * 3
    sides.there["c"][2] = 5.0
    sides.back("a", "b", "c")
    assert (whole[12], sides.here["b"][12], sides.here["c"][2]) == (5.0, 5.0, 5.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["here", "there"]), st.sampled_from("ab"), st.integers(0, LENGTH - 1), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


@given(cells=st.lists(STEPS, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_after_every_cell_both_have_the_same_and_nothing_travels_for_nothing(cells: list[Any]) -> None:
    sides = Sides()
    sides.here |= {"a": np.zeros(LENGTH), "b": np.arange(LENGTH, dtype=np.int64)}
    arrays = dict(sides.here)
    for steps in cells:
        for where, name, at, value in steps:
            if where == "here":
                sides.here[name][at] = value
        sides.go("a", "b")
        before = {name: sides.there[name].copy() for name in "ab"}
        assert all(np.array_equal(before[name], sides.here[name]) for name in "ab")
        for where, name, at, value in steps:
            if where == "there":
                sides.there[name][at] = value
        is_changed = not all(np.array_equal(before[name], sides.there[name]) for name in "ab")
        sides.back("a", "b")
        assert (sides.came > 0) == is_changed
        assert all(sides.here[name] is arrays[name] for name in "ab")
        assert all(np.array_equal(sides.there[name], sides.here[name]) for name in "ab")
    sides.go("a", "b")
    assert sides.sent == 0
