"""Large containers of atoms are told to be unchanged without being pickled, and the cost of a crossing is linear."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.notebook import groups, namespace_sync, object_graphs
from sublet.notebook.groups import snapshot
from sublet.state.checkpoints import object_groups
from sublet.state.transfer import codec
from tests.notebook.crossing import Sides
from tests.notebook.many_objects import KINDS, LIBRARIES, Steps, change
from tests.notebook.sides import Notebook, Other

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


def filled(kind: type, count: int = object_groups.LONG) -> Any:
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
        patched.setattr(groups, "_is_known", is_known)
        patched.setattr(object_groups, "LONG", 20)
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
    assert groups._is_known


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


def work(n: int, kind: str) -> tuple[int, int]:
    """Function calls, of Python and C, and bytes pickled, with which a value crosses: for the first time, unchanged,
    changed, and beside one that was made on the other side."""
    count = pickled = 0
    run = codec.Encoding.run

    def noted(self: codec.Encoding, value: object) -> Any:
        nonlocal pickled
        found = run(self, value)
        pickled += self.nbytes
        return found

    def profiled(step: Callable[[], None]) -> float:
        nonlocal count
        with cProfile.Profile() as profile:
            step()
        count += sum(one.callcount for one in profile.getstats())
        return 0.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(codec.Encoding, "run", noted)
        patched.setattr(object_graphs, "OBJECTS_MAX", 10)  # so that both sizes are encoded
        Steps(Sides()).all(KINDS[kind], n, profiled)
    return count, pickled


@pytest.mark.parametrize("kind", KINDS)
def test_twice_the_objects_are_at_most_so_much_more_work(kind: str) -> None:
    if kind in LIBRARIES:
        pytest.importorskip(LIBRARIES[kind])
    work(10, kind)
    n = {"small tensors": 50, "module": 60, "figure": 400, "linked list": 1500, "graph": 1500}.get(kind, 300)
    once, twice = work(n, kind), work(2 * n, kind)
    assert twice[0] <= 2.2 * once[0]
    assert twice[1] <= 2.5 * once[1]  # numbers from 256 on have one more byte


def test_a_large_group_that_is_unchanged_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only its encoding tells to be unchanged."""
    monkeypatch.setattr(namespace_sync, "graphs_of", lambda values: {})
    monkeypatch.setattr(object_groups, "LARGE_BYTES", 1000)
    monkeypatch.setattr(namespace_sync, "LARGE_BYTES", 1000)
    sides = Sides()
    sides.here.update(one=KINDS["instances"](200))
    sides.here.update(two=[sides.here["one"][7]])
    sides.go("one", "two")
    sides.back("one", "two")
    pickled: list[set[str]] = []
    run = codec.Encoding.run

    def noted(self: codec.Encoding, value: Any) -> Any:
        pickled.append(set(value))
        return run(self, value)

    monkeypatch.setattr(codec.Encoding, "run", noted)
    sides.go("one", "two")
    assert pickled == [{"one", "two"}]
    sides.there["two"] = [1]
    sides.back("one", "two", new=("two",))
    pickled.clear()
    sides.go("one", "two")
    assert pickled == [{"one"}, {"two"}]


def part(value: Any) -> Any:
    """That which ``change`` changes."""
    found = value[len(value) // 2] if type(value) is list else value.next
    return found if type(found) in (str, dict) else found.text if hasattr(found, "text") else found.value


@pytest.mark.parametrize("kind", ["instances", "list of dicts", "list of strings", "linked list"])
def test_what_a_name_had_before_crosses_only_if_it_was_changed(kind: str) -> None:
    sides = Sides()
    before = sides.here["value"] = KINDS[kind](3000)
    sides.go("value")
    sides.there["value"] = [1]
    sides.back("value", new=("value",))
    assert sides.came < 1000
    assert sides.here["value"] == [1]
    sides.here["value"] = before
    sides.go("value")
    change(sides.there["value"])
    sides.there["value"] = [2]
    sides.back("value", new=("value",))
    expected = KINDS[kind](3000)
    change(expected)
    assert part(before) == part(expected)


@pytest.mark.parametrize("name", ["value", "next", "n"])
def test_a_chain_of_objects_under_the_name_of_an_attribute_is_unchanged(name: str) -> None:
    sides = Sides()
    sides.here[name] = KINDS["linked list"](1200)
    sides.go(name)
    sides.back(name)
    sides.go(name)
    assert (sides.sent, sides.came) == (0, 0)


def test_names_of_changed_gradients_are_found_without_a_look_at_each_name() -> None:
    sides = Sides()
    sides.here.update({f"v{n}": [n] for n in range(1000)})
    sides.go(*sides.here)
    with cProfile.Profile() as profile:
        assert sides.spaces[1].names_with_new_gradients() == set()
    assert sum(one.callcount for one in profile.getstats()) < 100


def test_a_figure_that_is_unchanged_does_not_come_back() -> None:
    """Also where nothing of pyplot holds it."""
    pytest.importorskip("matplotlib")
    sides = Sides()
    sides.here["drawn"] = KINDS["figure"](100)
    sides.go("drawn")
    sides.back("drawn")
    assert sides.came == 0


TEXT = """
import pandas as pd, pyarrow as pa
def column(word, n): return pd.Series(pa.array([word * 20] * n), dtype="str")
"""


def test_a_large_column_of_text_is_sent_once_and_again_when_it_is_another(nb: Notebook, other: Other) -> None:
    """More than is hashed at each look. pandas would copy it for each pickle, and it would lie elsewhere."""
    with other.hashing_columns_up_to(1 << 20):
        nb.here(TEXT + "frame = pd.DataFrame({'t': column('a', 60_000)})")
        for sent in (True, False, False):
            assert nb.there("n = len(frame)") is None
            assert bool(nb.sent.parcels) is sent
            assert [one.names for one in nb.came.parcels] == [("n",)]
        nb.here("frame['t'] = column('b', 60_000)")
        assert nb.there("first = frame.t.iloc[0]") is None
        assert nb.names["first"] == "b" * 20
        assert nb.there("frame.loc[7, 't'] = 'changed'") is None
        assert nb.names["frame"].t.iloc[7] == "changed"


def test_a_slice_of_a_column_of_text_brings_no_more_than_it_shows(nb: Notebook) -> None:
    nb.here(TEXT + "whole = column('a', 500_000)\npart = whole.iloc[100:200]\nmany = pd.concat([part, part])")
    assert nb.there("shown = part.tolist(), many.tolist()") is None
    assert sum(one.nbytes for one in nb.sent.parcels) < 100_000
    assert nb.names["shown"] == (["a" * 20] * 100, ["a" * 20] * 200)


READING = """
class Kind:
    made = []
    def step(self):
        return follow(self)
def follow(one):
    return last(one), words
def last(one):
    return one.made
words = ["a", "b"]
one = Kind()
Kind.made.append(one)
other = [one, words]
"""


def test_no_names_are_encoded_twice_in_one_look(nb: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that functions read are found step by step, and the groups by comparing names one by one."""
    nb.here(READING)
    encoded: list[tuple[str, ...]] = []
    run = codec.Encoding.run

    def noted(self: codec.Encoding, value: Any) -> Any:
        encoded.append(tuple(value))
        return run(self, value)

    monkeypatch.setattr(codec.Encoding, "run", noted)
    with nb.at_home():
        found = nb.space.outgoing(["other"], must=True, maybe=frozenset())
    assert found.names == {"other", "follow", "last", "words"}
    assert len(encoded) == len(set(encoded)), encoded


def test_what_is_encoded_in_one_look_is_not_used_in_the_next(nb: Notebook) -> None:
    nb.here(READING)
    assert nb.there("before = other[0].step()") is None
    nb.here("words.append('c'); one.late = 1")
    assert nb.there("after = other[0].step()[1], other[0].late") is None
    assert nb.names["after"] == (["a", "b", "c"], 1)


@pytest.mark.parametrize("kind", ["list", "set", "dict.fromkeys", "tuple"])
def test_a_long_container_that_a_function_holds_as_well_is_not_encoded_again(
    nb: Notebook, other: Other, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nb.here(f"many = {kind}(map(str, range(20_000)))\ndef held(key, among=many):\n    return key in among")
    for _ in range(3):
        assert nb.there("found = held('7'), len(many)") is None
    other.ask("encoded")
    encoded: list[Any] = []
    run = codec.Encoding.run

    def noted(self: codec.Encoding, value: Any) -> Any:
        encoded.append(value)
        return run(self, value)

    with monkeypatch.context() as patched:
        patched.setattr(codec.Encoding, "run", noted)
        assert nb.there("found = held('8'), len(many)") is None
    assert not [one for one in encoded if "many" in one]
    assert "many" not in other.ask("encoded")
    if kind == "tuple":
        return
    add = {"list": "append('x')", "set": "add('x')", "dict.fromkeys": "setdefault('x')"}[kind]
    nb.here(f"many.{add}")
    assert nb.there(f"found = held('x')\nmany.{add.replace('x', 'y')}") is None
    assert nb.names["found"] is True
    nb.here("found = held('y')")
    assert nb.names["found"] is True


@pytest.mark.parametrize("kind", ["list", "set", "dict.fromkeys"])
def test_a_long_container_is_not_encoded_for_cells_that_read_some_of_its_holders(
    nb: Notebook, other: Other, kind: str
) -> None:
    """Each of these cells reads a part of what crossed together, and is asked whether all of that is unchanged."""
    nb.there(f"many = {kind}(map(str, range(20_000)))")
    nb.there("def held(key, among=many):\n    return key in among")
    other.ask("encoded")
    for reader in ("found = held('7')", "n = len(many)"):
        assert nb.there(reader) is None
        assert "many" not in other.ask("encoded"), reader
    add = {"list": "append('x')", "set": "add('x')", "dict.fromkeys": "setdefault('x')"}[kind]
    nb.there(f"held.__defaults__[0].{add}")
    nb.here(f"many.{add.replace('x', 'y')}\nfound = held('x')")
    assert bool(nb.names["found"])
    assert nb.there("found = held('x'), held('y'), 'z' in many, len(many)") is None
    assert nb.names["found"] == (True, True, False, 20_002)
    assert nb.there(f"many.{add.replace('x', 'z')}\nfound = held('z')") is None
    assert bool(nb.names["found"])
    assert nb.names["held"].__defaults__[0] is nb.names["many"]


def test_frames_that_share_no_more_than_types_are_not_encoded_for_one_another(nb: Notebook, other: Other) -> None:
    """Types of columns and functions of libraries are the same objects in all of them, and cannot change."""
    make = "pd.DataFrame({'n': [1, 2], 't': ['x', 'y'], 'c': pd.Categorical(['u', 'w'])})"
    assert nb.there(f"import pandas as pd\none = {make}\ntwo = {make}\nthree = {make}") is None
    assert nb.there("n = len(one) + len(two) + len(three)") is None
    other.ask("encoded")
    for cell in ("one.loc[0, 'n'] = 7", "four = one.groupby('t').n.sum()", "one = one.assign(m=3)"):
        assert nb.there(cell) is None
        assert other.ask("encoded").isdisjoint(("two", "three")), cell
