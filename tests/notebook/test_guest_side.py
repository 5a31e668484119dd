"""Around a cell, in the guest: what was put aside, and what comes a little later than the rest."""

from __future__ import annotations

from typing import Any

import pytest

from sublet.notebook import guest_side, holding
from sublet.notebook.namespace import Bound
from sublet.notebook.spaces import GUEST, NOTEBOOK, Space


class Guest:
    """Its namespace is not that of ``__main__``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[str, Any] = {}
        self.space = Space(self.names, GUEST)
        monkeypatch.setattr(guest_side, "seen", lambda: self.space)
        monkeypatch.setattr(guest_side, "_bound", Bound(self.names))
        monkeypatch.setattr(guest_side, "_before", guest_side._Before(frozenset(), {}))
        monkeypatch.setattr(holding, "_state", holding._State())


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
    assert [one.names for one in guest_side.collect().parcels] == [("a", "c")]
