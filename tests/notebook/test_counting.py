"""What has too many objects stays on the device, and neither is encoded to find that out nor to save it."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from sublet.notebook import counting, guest_persistence, namespace_sync, probing
from sublet.notebook.counting import TOO_MANY, has_too_many
from sublet.state.transfer import codec
from tests.notebook.crossing import Sides

MOST = 300


class Node:
    """As a library for automatic differentiation has them: each refers to a function that refers to it."""

    def __init__(self, *parents: Node) -> None:
        self.parents = parents

        def backward() -> tuple[Node, ...]:
            return (self, *parents)

        self.backward = backward


def chain(length: int) -> Node:
    node = Node()
    for _ in range(length):
        node = Node(node)
    return node


def closure() -> Callable[[], Any]:
    held = list(range(10))
    return lambda: (held, sys.modules, gc)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (1, 0),
        (list(range(1000)), 0),
        ([{"a": [n]} for n in range(1000)], 0),
        ([types.SimpleNamespace(n=n) for n in range(50)], 50),
        ([types.SimpleNamespace()] * 50, 1),
        (chain(0), 4),  # itself, its function, and the two variables around that
        ({"all": [chain(9) for _ in range(2)]}, 80),
        (closure(), 2),
        ([pytest, types, Node, print, sys], 0),
    ],
    ids=["a number", "numbers", "records", "instances", "one instance", "a node", "nodes", "a function", "modules"],
)
def test_what_is_counted(value: Any, count: int) -> None:
    assert not has_too_many(value, count)
    assert count == 0 or has_too_many(value, count - 1)


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(value: Any, most: int = MOST) -> bool:
        return has_too_many(value, most)

    monkeypatch.setattr(namespace_sync, "has_too_many", few)
    monkeypatch.setattr(probing, "has_too_many", few)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every value that is encoded."""
    found: list[Any] = []
    run = codec.Encoding.run

    def watched(self: codec.Encoding, value: object) -> Any:
        found.extend(value.values() if isinstance(value, dict) else [value])
        return run(self, value)

    monkeypatch.setattr(codec.Encoding, "run", watched)
    return found


@pytest.mark.usefixtures("bounded")
def test_a_variable_that_a_cell_binds_stays(encoded: list[Any]) -> None:
    sides = Sides()
    few, many = chain(MOST // 4 - 10), chain(MOST // 4 + 10)
    sides.there.update(few=few, many=many, x=1)
    found = sides.spaces[1].outgoing(["few", "many", "x"], new=["few", "many", "x"], room=1 << 30)
    assert found.stays == {"many": TOO_MANY}
    assert {name for parcel in found.parcels for name in parcel.names} == {"few", "x"}
    assert any(one is few for one in encoded)
    assert not any(one is many for one in encoded)


@pytest.mark.usefixtures("bounded")
def test_what_the_notebook_has_comes_back_to_it() -> None:
    sides = Sides()
    sides.here["many"] = [types.SimpleNamespace(n=n) for n in range(MOST + 1)]
    sides.go("many")
    sides.there["many"][7].n = -1
    found = sides.spaces[1].outgoing(["many"], room=1 << 30)
    assert not found.stays
    assert found.parcels


@pytest.mark.usefixtures("bounded")
def test_what_stayed_stays_when_it_is_read_again() -> None:
    sides = Sides()
    sides.here["many"] = 1
    sides.go("many")
    sides.there["many"] = chain(MOST)
    found = sides.spaces[1].outgoing(["many"], room=1 << 30, held=["many"])
    assert found.stays == {"many": TOO_MANY}


def test_what_a_name_had_before_is_sent_once_more_and_no_oftener() -> None:
    """Names that share something cross together; what one of them had goes with the others once more."""
    sides = Sides()
    shared = [0]
    sides.here.update(shared=shared, nodes=[])
    sizes = []
    for n in range(6):
        sides.go("shared")
        sides.there["nodes"] = [[sides.there["shared"], n, chain(2)] for _ in range(30)]
        sides.back("shared", "nodes", new=("nodes",))
        sizes.append(sides.came)
    assert max(sizes) < 2.5 * sizes[0]


def test_what_stays_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting 200,000 objects takes a third of a second: what stays is known when it is noted what a save would do."""
    counted: list[Any] = []

    def few(value: Any) -> bool:
        counted.append(value)
        return has_too_many(value, MOST)

    monkeypatch.setattr(namespace_sync, "has_too_many", few)
    monkeypatch.setattr(probing, "has_too_many", few)
    state = guest_persistence._State()
    monkeypatch.setattr(guest_persistence, "_state", state)
    sides = Sides()
    many = sides.there["many"] = chain(MOST)
    found = sides.spaces[1].outgoing(["many"], new=["many"], room=1 << 30)
    guest_persistence.finish(sides.spaces[1], found.stays, found.names)
    assert counted == [many]
    assert state.held["many"].why == state.lost["many"] == TOO_MANY
    assert not state.dirty


@pytest.mark.usefixtures("bounded")
def test_it_is_not_encoded_to_save_it(encoded: list[Any]) -> None:
    assert probing.probe("many", chain(MOST), is_bounded=True).refused == TOO_MANY
    assert not encoded
    assert not probing.probe("many", chain(MOST)).refused  # somebody asked for it


def test_the_bound_is_as_documented() -> None:
    assert counting.OBJECTS_MAX == 200_000
