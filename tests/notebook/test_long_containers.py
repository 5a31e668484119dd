"""Containers of many atoms: each is encoded once, is not encoded where it arrives, and never keeps an old value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.notebook.namespace_sync import Space
from sublet.state.checkpoints import object_groups
from tests.notebook.crossing import Sides
from tests.notebook.sides import Notebook, Other

MANY = 12_000
MAKE = {
    "list": f"a = list(map(str, range({MANY})))",
    "set": f"a = set(map(str, range({MANY})))",
    "dict": f"a = {{str(n): n for n in range({MANY})}}",
    "tuple": f"a = tuple(map(str, range({MANY})))",
}
CHANGE = {
    "list": ("a.append('x')", "a[5] = a[7]", "a.pop()", "a.reverse()"),
    "set": ("a.add('x')", "a.discard('5')", "a.add(str(len(a)))"),
    "dict": ("a['x'] = 1", "a['5'] = 6", "a.pop('7', None)", "a['5'] = 7"),
    "tuple": ("a = a[1:]", "a = (*a[:5], 'x', *a[6:])"),
}
AROUND = (
    "b = a",
    "b = list(a)",
    "b = 1",
    "def f(x=a):\n    return x",
    "def f(x=1):\n    return x",
    "held = [a, 1]",
    "held = None",
    "a = type(a)(a)",
    "spare = 3",
)
LOOK = (
    "import zlib\n"
    "def crc(x):\n    return zlib.crc32(repr(sorted(map(str, x.items() if type(x) is dict else x))).encode())\n"
    "def same(x):\n    return x == a if type(a) is tuple else x is a\n"
    "seen = (len(a), crc(a), same(b), b == a, same(f()), held is not None and same(held[0]))"
)
"""Of a tuple no program should ask whether it is the same object, and it may be two on the other side."""


@pytest.mark.parametrize("kind", MAKE)
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_a_long_container_is_never_seen_as_it_was(other: Other, kind: str, data: st.DataObject) -> None:
    """Whichever side changes it, through whichever of its names, and whoever holds it besides."""
    split, plain = Notebook(other), Notebook(other)
    for one in (split, plain):
        one.here(f"{MAKE[kind]}\nb = f = held = None\ndef f(x=None):\n    return x")
    step = st.tuples(st.sampled_from((*CHANGE[kind] * 2, *AROUND)), st.booleans(), st.booleans())
    for source, is_there, looks_there in data.draw(st.lists(step, min_size=3, max_size=7)):
        plain.here(source)
        got = split.there(source) if is_there else split.here(source)
        assert got is None
        plain.here(LOOK)
        got = split.there(LOOK) if looks_there else split.here(LOOK)
        assert got is None
        assert split.names["seen"] == plain.names["seen"], source


def bundles_with(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Names that are encoded in the notebook's process from here on, where ``name`` is among them."""
    found: list[tuple[str, ...]] = []
    made = object_groups._Bundle.__init__

    def noted(bundle: object_groups._Bundle, names: tuple[str, ...], *args: Any) -> None:
        if name in names:
            found.append(names)
        made(bundle, names, *args)

    monkeypatch.setattr(object_groups._Bundle, "__init__", noted)
    return found


def test_a_long_container_is_encoded_once_to_be_sent(nb: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    nb.here(f"{MAKE['list']}\nother = 1\nmore = [2]")
    encoded = bundles_with("a", monkeypatch)
    nb.there("n = len(a) + other + more[0]")
    assert nb.names["n"] == MANY + 3
    assert encoded == [("a",)]


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "set"])
def test_a_long_container_that_came_is_not_encoded_here(
    nb: Notebook, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = bundles_with("a", monkeypatch)
    nb.there(MAKE[kind])
    nb.there("n = len(a)")
    assert nb.names["n"] == MANY
    assert encoded == []
    assert "a" not in {name for one in nb.sent.parcels for name in one.names}
    assert nb.here(CHANGE[kind][0]) is None
    nb.there("n = len(a); last = 'x' in a")
    assert nb.names["n"] == len(nb.names["a"])
    assert nb.names["last"] == ("x" in nb.names["a"])


def test_what_a_function_has_of_a_library_is_not_looked_for_as_lost(
    nb: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function comes with what puts it together; that these are nowhere among the names is no news, and to look for
    them takes an encoding of all names that came together with the function."""
    nb.there("import math\ndef scale(x: int) -> int:\n    return x * math.ceil(1.5)")
    looked: list[set[str]] = []
    encoded = Space._encoded

    def noted(space: Space, names: set[str], *args: Any, **named: Any) -> Any:
        looked.append(set(names))
        return encoded(space, names, *args, **named)

    monkeypatch.setattr(Space, "_encoded", noted)
    with nb.at_home():
        assert nb.space._lost([], ("scale",)) == {}
    assert looked == []
    assert nb.here("scale.extra = [1]") is None
    nb.there("kept = scale.__annotations__['x'], scale.extra, scale(2)")
    assert nb.names["kept"] == (int, [1], 4)


def test_an_object_that_a_cell_changed_and_let_go_of_still_comes_back(nb: Notebook) -> None:
    """It is encoded beside groups that are known by then."""
    nb.here(f"{MAKE['list']}\npart = [1]\nwhole = {{'part': part}}\nheld = part")
    nb.there("part.append(2); n = len(a); part = None; whole = None")
    assert nb.names["held"] == [1, 2]
    nb.there("n = len(a); held.append(3)")
    assert nb.names["held"] == [1, 2, 3]


@pytest.mark.parametrize(
    "make",
    [
        "class Box:\n    v = None\nd = Box()",
        "class Base:\n    __slots__ = 'w'\nclass Box(Base):\n    v = None\nd = Box()",
        "class Box(list):\n    v = None\nd = Box()",
        "def d():\n    return 1",
    ],
)
def test_an_object_with_a_new_attribute_that_a_cell_let_go_of_comes_back_too(nb: Notebook, make: str) -> None:
    """Its attributes have changed, and it goes on referring to the same dict."""
    nb.here(f"{make}\nheld = []")
    nb.there("held.append(d)")
    assert nb.there("d.v = [1]\nd = None") is None
    assert nb.here("shown = held[0].v") is None
    assert nb.names["shown"] == [1]


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame({"n": [1, 2], "t": ["x", "y"]})


def model() -> Any:
    return pytest.importorskip("torch").nn.Linear(2, 1)


def tree() -> Any:
    return pytest.importorskip("sklearn.tree").DecisionTreeClassifier().fit([[0], [1]], [0, 1])


@pytest.mark.parametrize("make", [frame, model, tree])
def test_what_a_library_keeps_inside_an_object_is_not_looked_for_as_lost(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that came and that no encoding made here meets are no news with each cell that reads the object: the array
    below the values of a frame, the dict of a parameter's hooks, the fields of a tree's nodes."""
    sides = Sides()
    sides.here["a"] = make()
    sides.go("a")
    encoded: list[set[str]] = []
    encode = Space._encoded

    def noted(space: Space, names: set[str], *args: Any, **named: Any) -> Any:
        encoded.append(set(names))
        return encode(space, names, *args, **named)

    device = sides.spaces[1]
    device._remember_owed()
    monkeypatch.setattr(Space, "_encoded", noted)
    found = device.outgoing(("a",), lost_of=("a",))
    assert (encoded, found.parcels) == ([{"a"}], [])


def test_a_frame_that_was_changed_and_let_go_of_is_changed_where_others_hold_it(nb: Notebook) -> None:
    assert nb.here("import pandas as pd\na = pd.DataFrame({'n': [1, 2]})\nheld = a") is None
    nb.there("n = len(a)")
    assert nb.there("a.loc[0, 'n'] = 7\na = None") is None
    assert nb.here("shown = held.loc[0, 'n']") is None
    assert nb.names["shown"] == 7
