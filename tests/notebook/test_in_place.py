"""What came back is written into the objects that were there."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.errors import Unpicklable
from sublet.notebook.in_place import merge
from tests.examples import examples


@dataclass
class Point:
    x: Any
    y: Any = field(default_factory=list)


class Careful:
    """It has an idea of its own of what its state is."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getstate__(self) -> int:
        return self.n

    def __setstate__(self, state: int) -> None:
        self.n = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Careful) and other.n == self.n

    def __hash__(self) -> int:
        return 0


def paired(old: Any, new: Any, into: dict[int, Any] | None = None) -> dict[int, Any]:
    """Whose copy each object is, where what came looks like what was there."""
    found = {} if into is None else into
    if id(new) in found or type(old) is not type(new):
        return found
    found[id(new)] = old
    if isinstance(new, dict):
        for key in new.keys() & old.keys():
            paired(old[key], new[key], found)
    elif isinstance(new, list | tuple | deque):
        for one, other in zip(old, new, strict=False):
            paired(one, other, found)
    elif hasattr(new, "__dict__"):
        paired(old.__dict__, new.__dict__, found)
    return found


def merged(old: Any, new: Any) -> Any:
    return merge({"it": new}, paired(old, new))[0]["it"]


def merged_all(olds: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    return merge(news, paired(olds, news))[0]


def back(value: Any) -> Any:
    """As it comes back: a copy, with the aliases within kept."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301


CHANGED: list[tuple[Any, Any]] = [
    ([1, 2], [3]),
    ([1], [1, 2, [3]]),
    ({"a": 1}, {"b": 2, "a": [1]}),
    ({1, 2}, {2, 3}),
    (deque([1, 2], 5), deque([7], 5)),
    (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    (defaultdict(list, a=[1]), defaultdict(list, a=[1], b=[2])),
    (bytearray(b"abc"), bytearray(b"longer than before")),
    (Point(1, [2]), Point(5, [2, 3])),
    (Careful(1), Careful(2)),
    (np.arange(6).reshape(2, 3), np.ones((2, 3), dtype=np.int64)),
    ([np.zeros(3), {"w": np.ones(2)}], [np.ones(3), {"w": np.zeros(2)}]),
]


@pytest.mark.parametrize(("old", "new"), CHANGED, ids=[type(old).__name__ for old, _ in CHANGED])
def test_an_original_takes_over_and_stays_itself(old: Any, new: Any) -> None:
    old, expected = copy.deepcopy(old), copy.deepcopy(new)
    assert merged(old, back(new)) is old
    np.testing.assert_equal(old, expected)
    if isinstance(old, OrderedDict | dict):
        assert list(old) == list(expected)


KEPT_APART: list[tuple[Any, Any]] = [
    ([1], (1,)),
    (np.zeros(3), np.zeros(4)),
    (np.zeros(3), np.zeros(3, dtype=np.float32)),
    (np.broadcast_to(np.zeros(1), (3,)), np.ones(3)),
    (deque([1], 2), deque([1], 3)),
    (1, 2),
    ("a", "b"),
    (None, []),
    (OSError(1, "a"), OSError(2, "b")),
]


@pytest.mark.parametrize(
    ("old", "new"), KEPT_APART, ids=[f"{type(a).__name__}-{n}" for n, (a, _) in enumerate(KEPT_APART)]
)
def test_where_it_cannot_the_new_one_takes_its_place(old: Any, new: Any) -> None:
    assert merged(old, new) is new


class Small:
    def __init__(self, n: int) -> None:
        self.n = n


class Large(Small):
    pass


class Closing(Small):
    closed = 0

    def __del__(self) -> None:
        Closing.closed += 1


class Slotted:
    __slots__ = ("__dict__", "n")


def test_an_object_whose_class_was_changed_stays_itself() -> None:
    old = Small(1)
    assert merge({"it": (new := Large(2))}, {id(new): old})[0]["it"] is old
    assert (type(old), old.n) == (Large, 2)


@pytest.mark.parametrize("kind", [Slotted, Closing, Point, list])
def test_a_class_that_the_original_cannot_have_or_that_runs_code_at_its_end_is_that_of_the_copy(kind: Any) -> None:
    old, closed = Small(1), Closing.closed
    new = kind.__new__(kind)
    got = merge({"it": new}, {id(new): old})[0]["it"]
    if kind is Point:  # laid out alike
        assert got is old
        assert type(old) is Point
    else:
        assert got is new
        assert (type(old), old.n) == (Small, 1)
    assert Closing.closed == closed


def test_what_fails_later_gives_an_object_its_class_back() -> None:
    old, failing = Small(1), {Careful(1): 1}
    new, came = Large(2), {Careful(1): 2, Failing(): 3}
    with pytest.raises(Unpicklable):
        merge({"it": new, "keys": came}, {id(new): old, id(came): failing})
    assert (type(old), old.n, failing) == (Small, 1, {Careful(1): 1})


class Failing:
    """As a key of a dict that is written anew: it can be hashed once, when the dict is made."""

    hashed = 0

    def __hash__(self) -> int:
        self.hashed += 1
        if self.hashed > 1:
            raise ValueError("hashed again")
        return 0

    def __eq__(self, other: object) -> bool:
        return self is other


def test_what_is_held_elsewhere_sees_the_change() -> None:
    inner = [1]
    whole: dict[str, Any] = {"inner": inner, "other": Point(1)}
    callbacks: list[Any] = [whole["other"], inner]
    came = back(whole)
    came["inner"].append(2)
    came["other"].x = 9
    merged(whole, came)
    assert whole["inner"] is inner is callbacks[1]
    assert (inner, callbacks[0].x) == ([1, 2], 9)


def test_aliases_are_those_of_what_came() -> None:
    """One object twice stays one; two that were one become two."""
    shared = [0]
    old = {"a": shared, "b": shared, "c": [5]}
    came = back({"a": [1], "b": [2], "c": None})
    came["c"] = came["a"]
    got = merged(old, came)
    assert got is old
    assert (got["a"], got["b"], got["c"]) == ([1], [2], [1])
    assert got["a"] is got["c"]
    assert got["a"] is not got["b"]


def test_what_is_new_holds_the_originals_of_what_it_shares() -> None:
    shared = [1]
    came = back({"a": [1, 2], "b": None})
    came["b"] = {"deep": (came["a"], Point(came["a"]))}
    got = merged_all({"a": shared}, came)
    assert got["a"] is shared is got["b"]["deep"][0] is got["b"]["deep"][1].x


class Slots:
    __slots__ = ("a", "b")

    a: Any
    b: Any


def test_slots_take_over() -> None:
    old, came = Slots(), Slots()
    old.a, old.b = [1], 2
    came.a = [3]
    assert merge({"it": came}, {id(came): old})[0]["it"] is old
    assert old.a == [3]
    assert not hasattr(old, "b")


def test_functions_methods_and_partials_hold_the_originals() -> None:
    shared, thing = [1], Point(1)
    came, came_thing = [1, 2], Point(2)

    def function(x: Any = came) -> Any:
        return x, came_thing

    news = {"f": function, "m": came_thing.__repr__, "p": functools.partial(max, came, key=came_thing.__eq__)}
    got = merge(news, {id(came): shared, id(came_thing): thing})[0]
    assert got["f"]()[0] is shared
    assert got["f"]()[1] is thing
    assert got["m"].__self__ is thing
    assert got["p"].args[0] is shared
    assert got["p"].keywords["key"].__self__ is thing
    assert (shared, thing.x) == ([1, 2], 2)


def test_numbers_are_those_that_came() -> None:
    old = [0.0, 1, True, range(0)]
    merged(old, [-0.0, True, 1, range(1, 1)])
    assert repr(old) == "[-0.0, True, 1, range(1, 1)]"


def test_cycles_end() -> None:
    old: list[Any] = [1]
    old.append(old)
    came = back(old)
    came[0] = 2
    assert merged(old, came) is old
    assert old[0] == 2
    assert old[1] is old


def test_what_is_too_deep_is_taken_as_it_is() -> None:
    old: list[Any] = []
    new: list[Any] = []
    pairs = {id(new): old}
    keep = [new]
    for _ in range(5000):
        old, new = [old], [new]
        keep.append(new)
        pairs[id(new)] = old
    assert merge({"it": new}, pairs)[0]["it"] is old


def test_what_is_new_is_written_into_nothing() -> None:
    """``a = []`` leaves alone the list that ``a`` was."""
    old = [1]
    came: list[int] = []
    assert merge({"a": came}, {})[0]["a"] is came
    assert old == [1]


def test_frames_take_over() -> None:
    import pandas as pd

    frame = pd.DataFrame({"x": [1, 2]})
    held = [frame]
    came = pd.DataFrame({"x": [3, 4], "y": ["a", "b"]})
    assert merge({"f": came}, {id(came): frame})[0]["f"] is frame
    pd.testing.assert_frame_equal(held[0], pd.DataFrame({"x": [3, 4], "y": ["a", "b"]}))
    frame.loc[0, "x"] = 9
    assert frame["x"].tolist() == [9, 4]
    series = frame["y"].copy()
    came_series = pd.Series(["q"], name="n")
    assert merge({"s": came_series}, {id(came_series): series})[0]["s"] is series
    assert series.tolist() == ["q"]


def test_several_names_of_one_object_are_merged_together() -> None:
    array = np.zeros(4)
    space = {"whole": array, "view": array[1:3]}
    came = np.arange(4.0)
    got = merged_all(space, {"whole": came, "view": came[1:3]})
    assert got["whole"] is array
    assert got["view"] is space["view"]
    array[1] = 7
    assert space["view"][0] == 7


def test_arrays_that_overlap_otherwise_than_before_are_taken_as_they_came() -> None:
    """Written one after the other, the second would change what the first says."""
    array = np.zeros(4)
    got = merged_all({"a": array, "b": array[:]}, {"a": np.ones(4), "b": np.full(4, 2.0)})
    assert (got["a"].tolist(), got["b"].tolist()) == ([1.0] * 4, [2.0] * 4)
    came = np.arange(4.0)
    got = merged_all({"a": np.zeros(4), "b": np.zeros(2)}, {"a": came, "b": came[:2]})
    got["a"][0] = 9
    assert got["b"][0] == 9
    nested: dict[str, Any] = {"deep": [np.zeros(4)], "other": Point(np.zeros(2))}
    got = merged_all(nested, {"deep": [came], "other": Point(came[2:])})
    assert got["deep"] is nested["deep"]
    got["deep"][0][3] = 5
    assert got["other"].x.tolist() == [2.0, 5.0]


def test_a_new_view_of_an_original_is_a_view_of_it() -> None:
    array = np.zeros((3, 4), dtype=[("a", "i4"), ("b", "f4")])
    held = (array,)
    came = np.ones((3, 4), dtype=array.dtype)
    got = merge({"c": came, "v": came[1:, ::2]["b"], "t": ([came[2]],)}, {id(came): array})[0]
    assert got["c"] is array is held[0]
    got["v"][0, 1] = 5
    assert array["b"][1, 2] == 5
    got["t"][0][0]["a"] = 8
    assert array["a"][2].tolist() == [8] * 4
    del array, held, got["c"]
    assert got["v"][0, 1] == 5


@pytest.mark.needs("torch")
def test_a_new_view_of_a_tensor_too() -> None:
    import torch

    tensor, came = torch.zeros(4, 2), torch.ones(4, 2)
    got = merge({"t": came, "v": came[1:3, 1]}, {id(came): tensor})[0]
    got["v"][0] = 7
    assert tensor[1, 1] == 7


@pytest.mark.needs("torch")
def test_tensors_too() -> None:
    import torch

    whole = torch.zeros(4)
    got = merged_all({"a": whole, "b": whole[:2]}, {"a": torch.ones(4), "b": torch.full((2,), 2.0)})
    assert (got["a"].tolist(), got["b"].tolist()) == ([1.0] * 4, [2.0] * 2)


def test_a_view_that_somebody_looks_at_keeps_its_memory() -> None:
    held = bytearray(b"abc")
    with memoryview(held):
        assert merged(held, bytearray(b"abcd")) is not held
        assert merged(held, bytearray(b"xyz")) is held
    assert held == b"xyz"


@pytest.mark.needs("torch")
def test_tensors_take_over_and_keep_who_optimises_them() -> None:
    import torch

    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    came = back(layer)
    with torch.no_grad():
        came.weight.fill_(3.0)
    weight = layer.weight
    assert merged(layer.weight, came.weight) is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert float(weight.detach().sum()) == 12.0
    assert merged(torch.zeros(2), torch.zeros(3)).shape == (3,)


values = st.recursive(
    st.one_of(
        st.none(), st.integers(0, 3), st.text(max_size=2), st.builds(lambda n: np.arange(float(n)), st.integers(0, 3))
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
    ),
    max_leaves=10,
)


def test_whatever_was_there_it_says_what_came() -> None:
    """And what it says it shares within itself just as what came does."""
    met: set[tuple[type, type]] = set()

    @settings(max_examples=examples(80), deadline=None)
    @given(values, values)
    def holds(old: Any, new: Any) -> None:
        met.add((type(old), type(new)))
        _says_what_came(old, new)

    holds()
    assert {one for pair in met for one in pair} == {list, dict, tuple, Point, np.ndarray, int, str, type(None)}
    assert {old for old, new in met if old is new} >= {list, dict, tuple, Point}, "what can be taken over"


def _says_what_came(old: Any, new: Any) -> None:
    expected = back(new)
    got = merged(old, new)
    np.testing.assert_equal(_plain(got), _plain(expected))
    assert pickle.dumps(_shape(got)) == pickle.dumps(_shape(expected))


def _plain(value: Any) -> Any:
    if isinstance(value, Point):
        return ("Point", _plain(value.x), _plain(value.y))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain, value)]
    return value


def _shape(value: Any) -> list[int]:
    """Which objects stand where, by the order in which they are met."""
    seen: dict[int, int] = {}
    order: list[int] = []

    def walk(one: Any) -> None:
        if isinstance(one, list | dict | Point | np.ndarray):
            order.append(seen.setdefault(id(one), len(seen)))
        if isinstance(one, Point):
            walk(one.x)
            walk(one.y)
        elif isinstance(one, dict):
            for key in sorted(one):
                walk(one[key])
        elif isinstance(one, list | tuple):
            for item in one:
                walk(item)

    walk(value)
    return order
