"""Large containers of atoms are told to be unchanged without being pickled, and the cost of a crossing is linear."""

from __future__ import annotations

import sys
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.durable import codec
from sublet.notebook import unchanged
from sublet.notebook.unchanged import LARGE, snapshot
from tests.notebook.crossing import Sides

LOOKALIKES = [-1, -2, 0, 0.0, -0.0, False, 1, 1.0, True, "1", b"1", None, (), 2**61 - 2, float("inf")]
"""Many of these have equal hashes, or are equal."""


class Word(str):
    """Equal to a str, and has the same hash."""

    __slots__ = ()


def plainly(container: Any) -> object:
    """A dumb description: each item with its type, in order where there is one."""
    pairs = [(type(item).__name__, repr(item)) for item in container]
    if isinstance(container, dict):
        pairs += [(type(item).__name__, repr(item)) for item in container.values()]
    return sorted(pairs) if isinstance(container, set) else pairs


def filled(kind: type, count: int = LARGE) -> Any:
    many = [f"word {n}" for n in range(count)]
    return dict.fromkeys(many, 1) if kind is dict else kind(many)


def changed(container: Any, item: Any, remove: bool) -> None:
    if isinstance(container, set):
        (container.discard if remove else container.add)(item)
    elif isinstance(container, dict):
        if remove:
            container.pop(item, None)
        else:
            container[item] = item
    elif remove and item in container:
        container.remove(item)
    else:
        container.append(item)


items = st.one_of(st.sampled_from([*LOOKALIKES, Word("word 1"), "word 1"]), st.integers(-3, 3))


@pytest.mark.parametrize("kind", [set, list, dict])
@pytest.mark.parametrize("is_known", [True, False], ids=["tables", "items"])
@given(st.lists(st.tuples(items, st.booleans()), max_size=6))
@settings(max_examples=25, deadline=None)
def test_a_change_is_never_missed(kind: type, is_known: bool, changes: list[tuple[Any, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unchanged, "_is_known", is_known)
        patched.setattr(unchanged, "LARGE", 20)
        container = filled(kind, 40)
        for item, remove in changes:
            taken = snapshot(container)
            assert taken is not None
            assert taken.is_of(container)
            before = plainly(container)
            changed(container, item, remove)
            if plainly(container) != before:
                assert not taken.is_of(container)


def test_the_tables_are_where_they_are_looked_for() -> None:
    assert unchanged._is_known


def test_a_large_set_that_is_unchanged_is_not_even_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides()
    sides.here.update(words=filled(set, 40_000), other=[1])
    sides.go("words", "other")
    sides.back("words", "other")
    pickled: list[Any] = []
    dump = codec.Encoding.dump

    def noted(self: codec.Encoding, value: Any, **how: Any) -> Any:
        pickled.append(value)
        return dump(self, value, **how)

    monkeypatch.setattr(codec.Encoding, "dump", noted)
    sides.go("words", "other")
    sides.back("words", "other")
    assert (sides.sent, sides.came) == (0, 0)
    assert not any("words" in value for value in pickled)
    sides.there["words"].remove("word 7")
    sides.there["words"].add(7)
    sides.back("words", "other")
    assert sides.here["words"] == sides.there["words"]
    assert sides.spaces[0].names["words"] is sides.here["words"]


def test_a_large_set_that_another_name_holds_as_well_is_one_set() -> None:
    sides = Sides()
    words = sides.here["words"] = filled(set, 40_000)
    sides.go("words")
    sides.back("words")
    sides.here["holder"] = {"mine": words}
    sides.go("words", "holder")
    assert sides.there["holder"]["mine"] is sides.there["words"]
    sides.there["words"].add("more")
    sides.back("words", "holder")
    assert sides.here["holder"]["mine"] is sides.here["words"] is words
    assert "more" in words


class Thing:
    def __init__(self, n: int) -> None:
        self.n = n
        self.text = str(n)


class Slim:
    __slots__ = ("n", "text")

    def __init__(self, n: int) -> None:
        self.n = n
        self.text = str(n)


def frame(n: int) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": [str(i) for i in range(n)], "b": range(n)})


def objects(n: int) -> Any:
    numpy = pytest.importorskip("numpy")
    made = numpy.empty(n, object)
    made[:] = [str(i) for i in range(n)]
    return made


KINDS: dict[str, Callable[[int], Any]] = {
    "ints": lambda n: list(range(n)),
    "strings": lambda n: [str(i) for i in range(n)],
    "tuples": lambda n: [(i, str(i)) for i in range(n)],
    "lists": lambda n: [[i, str(i)] for i in range(n)],
    "a tuple": lambda n: tuple(map(str, range(n))),
    "a set": lambda n: set(map(str, range(n))),
    "a set of tuples": lambda n: {(i, str(i)) for i in range(n)},
    "a frozenset": lambda n: frozenset(map(str, range(n))),
    "a deque": lambda n: deque(map(str, range(n))),
    "a dict": lambda n: {str(i): i for i in range(n)},
    "nested dicts": lambda n: {str(i): {"a": i} for i in range(n)},
    "a counter": lambda n: Counter(map(str, range(n))),
    "a defaultdict": lambda n: defaultdict(int, {str(i): i for i in range(n)}),
    "instances": lambda n: [Thing(i) for i in range(n)],
    "instances with slots": lambda n: [Slim(i) for i in range(n)],
    "an array of objects": objects,
    "a frame": frame,
}


def calls(n: int, make: Callable[[int], Any]) -> int:
    """Function calls, of Python and C, in which a value crosses, unchanged and changed."""
    sides = Sides()
    sides.here["value"] = make(n)
    count = 0

    def counted(frame: types.FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        sides.go("value")
        sides.back("value")
        sides.go("value")
        sides.there["value"] = [sides.there["value"]]
        sides.back("value", new=("value",))
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_twice_the_objects_are_at_most_so_much_more_work(kind: str) -> None:
    calls(10, KINDS[kind])
    once, twice = calls(400, KINDS[kind]), calls(800, KINDS[kind])
    assert twice <= 2.2 * once
