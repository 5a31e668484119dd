"""Around a cell, in the guest: what was put aside, and what comes a little later than the rest."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from sublet.errors import OutOfMemory
from sublet.notebook import guest_persistence, guest_side
from sublet.notebook.cell_io import Traffic
from sublet.notebook.lodging import Lodged
from sublet.notebook.namespace import BoundNames
from sublet.notebook.namespace_sync import GUEST, NOTEBOOK, Space
from sublet.notebook.options import CellOptions
from sublet.notebook.reading import Reading
from sublet.notebook.remote_values import RemoteValues
from tests.notebook.crossing import crossed


class Guest:
    """Its namespace is not that of ``__main__``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[str, Any] = {}
        self.space = Space(self.names, GUEST)
        monkeypatch.setattr(guest_side, "seen", lambda: self.space)
        monkeypatch.setattr(guest_side, "_bound", BoundNames(self.names))
        monkeypatch.setattr(guest_side, "_before", guest_side._Before(frozenset(), {}))
        monkeypatch.setattr(guest_persistence, "_state", guest_persistence._State())


class Asked:
    """Notes how often it was taken apart."""

    times = 0

    def __getstate__(self) -> dict[str, Any]:
        Asked.times += 1
        return {"a": 1}


def test_a_result_is_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To see whether it is small enough to go to the notebook, and to send it."""
    importlib.import_module("IPython")
    monkeypatch.setattr(Asked, "times", 0)
    guest = Guest(monkeypatch)
    guest_side.place([], (), frozenset(), frozenset(), 7)
    guest.names["_7"] = Asked()
    found = guest_side.collect(room=1 << 20)
    assert [one.names for one in found.parcels] == [("_7",)]
    assert Asked.times == 1


def test_what_is_changed_after_a_result_was_looked_at_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("IPython")
    guest = Guest(monkeypatch)
    for n in (7, 8):
        guest_side.place([], (), frozenset(), frozenset(), n)
        guest.names[f"_{n}"] = guest.names["one"] = [n]
        guest_side.collect(room=1 << 20)
        guest_side.place([], (), frozenset({"one"}), frozenset())
        guest.names["one"].append(0)
        assert any("one" in parcel.names for parcel in guest_side.collect().parcels)


@pytest.mark.parametrize("value", [[1, 2], (1, 2), {"n": 1}])
def test_a_name_that_was_put_aside_follows_what_comes_late(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    """It stands for the same object as one that the cell reads; and one that comes may not fit into that."""
    after = []
    for is_late in (False, True):
        guest, here = Guest(monkeypatch), {"a": value}
        space = Space(here, NOTEBOOK)
        found = space.outgoing(["a"])
        guest_side.place(found.parcels, (), frozenset("a"), frozenset())
        space.sent(found)
        guest.names["b"] = guest.names["a"]
        guest_side.collect()
        here["a"] = {"other": 3}
        parcels = space.outgoing(["a"]).parcels
        assert len(parcels) == 1
        guest_side.place([] if is_late else parcels, (), frozenset("a"), frozenset("b"))
        if is_late:
            assert guest.names == {"a": value}
            guest_side.place_late(parcels)
        assert guest.names == {"a": {"other": 3}}
        came = [one.names for one in guest_side.collect().parcels]
        after.append((guest.names, guest.names["b"] is guest.names["a"], came))
    assert after[0] == after[1]


def test_what_came_late_is_no_news_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = Guest(monkeypatch)
    here: dict[str, Any] = {"a": [1], "c": {"n": 1}}
    space = Space(here, NOTEBOOK)
    found = space.outgoing(["a", "c"])
    guest_side.place(found.parcels, (), frozenset("ac"), frozenset())
    space.sent(found)
    assert guest_side.collect().parcels == []
    here["c"]["n"] = 2
    held = guest.names["c"]
    found = space.outgoing(["a", "c"])
    guest_side.place([], (), frozenset("ac"), frozenset("x"))
    guest_side.place_late(found.parcels)
    assert guest.names["c"] is held
    assert held == {"n": 2}
    assert guest_side.collect().parcels == []
    guest.names["a"].append(3)
    assert [one.names for one in guest_side.collect().parcels] == [("a",)]


def test_a_cell_that_does_not_come_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    guest, here = Guest(monkeypatch), {"a": [1]}
    guest.names["b"] = 5
    found = Space(here, NOTEBOOK).outgoing(["a"])
    guest_side.place(found.parcels, (), frozenset("a"), frozenset("b"))
    assert guest.names == {"a": [1]}
    was_running = guest_persistence._state.is_running
    guest_side.given_up()
    assert guest.names == {"a": [1], "b": 5}
    assert (was_running, guest_persistence._state.is_running) == (True, False)
    assert guest_side.collect().parcels == []


class Kernel:
    """Has no room for what is lent to it."""

    is_lost = False

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.asked: list[str] = []

    def call(self, function: Any, *args: Any) -> Any:
        self.asked.append(function.__name__)
        if function is guest_side.keep:
            raise OutOfMemory("there is no memory")
        return function(*crossed(args))

    def begin(self, function: Any, *args: Any) -> Any:
        return self.call(function, *args)

    def result(self, pending: Any) -> Any:
        return pending


def test_what_cannot_come_late_is_no_cell_and_is_sent_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at an array finds a change when the guest was told already, and then the guest cannot take it."""
    np = pytest.importorskip("numpy")
    guest = Guest(monkeypatch)
    kernel: Any = Kernel(guest)
    here: dict[str, Any] = {"a": np.zeros(8), "b": 1}
    space = Space(here, NOTEBOOK)
    traffic = Traffic(space, RemoteValues(here))
    reading = Reading(reads=frozenset("a"), binds=frozenset("b"), requested=frozenset("a"))
    traffic.send(kernel, reading, CellOptions(), 0)
    guest_side.collect()
    guest.names["b"] = 7
    here["a"][1] = 1.0
    again = space.outgoing(["a"])
    again.lent = [Lodged(1, 8)]
    outgoing = space.outgoing

    def with_late(*args: Any, **named: Any) -> Any:
        found = outgoing(*args, **named)
        found.late = [None]  # type: ignore[list-item]  # that there is one is enough
        return found

    monkeypatch.setattr(space, "outgoing", with_late)
    monkeypatch.setattr(space, "changed_late", lambda what: [(None, ())])
    monkeypatch.setattr(space, "parcels_of", lambda changed: again)
    with pytest.raises(OutOfMemory):
        traffic.send(kernel, reading, CellOptions(), 0)
    assert kernel.asked[-2:] == ["keep", "given_up"]
    assert guest.names["b"] == 7
    monkeypatch.undo()
    assert [one.names for one in space.outgoing(["a"]).parcels] == [("a",)]


def test_where_nothing_has_to_be_sent_nothing_is_asked_before_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be said goes with the cell. If that does not come after all, the next one says it again."""
    guest = Guest(monkeypatch)
    kernel: Any = Kernel(guest)
    here: dict[str, Any] = {f"n{number}": [number] for number in range(100)}
    traffic = Traffic(Space(here, NOTEBOOK), RemoteValues(here))
    reads = frozenset(here)
    reading = Reading(reads=reads, binds=frozenset(), requested=reads)
    assert traffic.send(kernel, reading, CellOptions(), 0)[2] == ()
    assert kernel.asked == ["place"], "it may fail there, and that is told before the cell begins"
    guest_side.collect()
    fewer = Reading(reads=reads - {"n0"}, binds=frozenset(), requested=reads)
    assert traffic.send(kernel, fewer, CellOptions(), 0)[2]
    traffic.withdraw()
    placing = traffic.send(kernel, fewer, CellOptions(), 0)[2]
    assert kernel.asked == ["place"]
    guest_side.place(*crossed(placing))
    assert guest.names.keys() == reads - {"n0"}, "what this cell does not read is aside"
    guest_side.collect()
    assert guest.names.keys() == reads
