"""Two namespaces that follow each other: a cell on the device leaves what it would have left here."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.errors import Unpicklable
from sublet.state.checkpoints import object_groups
from tests.notebook.sides import Notebook, Other


def test_only_what_a_cell_reads_travels_and_only_what_it_changed_comes_back(nb: Notebook) -> None:
    nb.here("import numpy as np\na = [1]; b = [2]; big = np.zeros(1_000_000); unread = object()")
    nb.there("a.append(b[0]); c = len(big)")
    assert {name for one in nb.sent.parcels for name in one.names} == {"a", "b", "big"}
    assert {name for one in nb.came.parcels for name in one.names} >= {"a", "c"}
    assert "big" not in {name for one in nb.came.parcels for name in one.names}
    assert (nb.names["a"], nb.names["c"]) == ([1, 2], 1_000_000)


def test_what_is_unchanged_is_not_sent_again(nb: Notebook) -> None:
    nb.here("import numpy as np\nbig = np.zeros(1_000_000); other = np.ones(500_000)")
    nb.there("s = big.sum() + other.sum()")
    nb.there("t = big.sum() + other.sum()")
    assert nb.sent.parcels == []
    nb.here("big[7] = 1.0")
    nb.there("t = big.sum() + other.sum()")
    assert [one.names for one in nb.sent.parcels] == [("big",)]
    assert nb.names["t"] == 500_001


def test_a_cell_that_is_given_up_before_it_began_takes_nothing_away(nb: Notebook, other: Other) -> None:
    """What it would have bound was set aside for it, and the notebook counts on its being there."""
    assert nb.there("kept = [1]; anew = 1") is None
    for _ in range(2):
        assert nb.there("len(kept)") is None
    assert nb.sent.parcels == []
    for _ in range(2):
        other.ask("place", [], (), frozenset(), frozenset({"kept", "anew"}))
    assert nb.there("anew = 2; size = len(kept)") is None
    assert (nb.names["kept"], nb.names["anew"], nb.names["size"]) == ([1], 2, 1)
    nb.here("del kept")
    assert nb.there("anew = 3") is None
    assert nb.there("kept_still = 'kept' in dir()") is None
    assert "kept" not in nb.names


def test_what_a_cell_has_bound_that_was_given_up_is_nobodys_news(nb: Notebook, other: Other) -> None:
    """It was never collected: the notebook goes on without, and so does the next cell."""
    assert nb.there("a = 1") is None
    other.ask("place", [], (), frozenset(), frozenset({"b"}))
    assert other.ask("run", "a = 2; b = 3; c = [4]") is None
    assert nb.there("d = 5") is None
    assert [nb.names.get(name) for name in "abcd"] == [1, None, None, 5]
    assert nb.there("a = 6; c = [7]") is None
    assert [nb.names.get(name) for name in "abcd"] == [6, None, [7], 5]


def test_deleting_a_name_sends_nothing_and_deletes_it_on_both_sides(nb: Notebook) -> None:
    nb.here("import numpy as np\nbig = np.zeros(1_000_000); other = object(); there_too = [1]; kept = [2]")
    nb.there("len(there_too)")
    assert nb.there("del big, other, there_too\nif not here: del kept\n", None) == "NameError"
    assert (nb.sent.parcels, nb.came.parcels) == ([], [])
    assert [name for name in ("big", "other", "there_too", "kept") if name in nb.names] == ["kept"]
    assert nb.there("del kept\nkept") == "NameError"
    assert nb.there("is_there = 'kept' in globals()") is None
    assert (nb.names["is_there"], "kept" in nb.names) == (False, False)
    assert nb.there("del kept") == "NameError"


def test_the_name_of_an_exception_that_was_handled_is_gone_on_both_sides(nb: Notebook) -> None:
    """As after any `except ... as e`, whatever `e` was before."""
    nb.here("from math import e, pi")
    nb.there("try: 1 / 0\nexcept ZeroDivisionError as e: kept = e")
    assert "e" not in nb.names
    assert nb.names["pi"] > 3
    nb.there("is_there = 'e' in globals()")
    assert nb.names["is_there"] is False


def test_a_name_that_was_not_deleted_after_all_is_what_it_was(nb: Notebook) -> None:
    nb.here("a = [1]; b = [2]")
    nb.there("len(b)")
    nb.here("b.append(3)")
    assert nb.there("if len('x') > 1:\n    del a, b") is None
    assert nb.there("c = [*a, *b]") is None
    assert nb.names["c"] == [1, 2, 3]
    assert nb.there("del a\na = [4]") is None
    assert nb.names["a"] == [4]


def test_what_came_back_is_not_sent_again_either(nb: Notebook) -> None:
    nb.here("import numpy as np\nbig = np.zeros(1_000_000)")
    before = nb.names["big"]
    nb.there("big += 1")
    assert nb.names["big"] is before
    assert before[0] == 1.0
    nb.there("s = big[0]")
    assert nb.sent.parcels == []


def test_who_holds_the_object_elsewhere_sees_the_change(nb: Notebook) -> None:
    nb.here("a = [1]\nholder = {'mine': a}\nb = a")
    nb.there("a.append(2)")
    assert nb.names["holder"]["mine"] is nb.names["a"] is nb.names["b"]
    assert nb.names["holder"] == {"mine": [1, 2]}


def test_an_object_that_cannot_take_over_is_rebound_under_all_its_names(nb: Notebook) -> None:
    nb.here("import numpy as np\na = np.zeros(3)\nb = a")
    nb.there("a.shape = (1, 3)")
    assert nb.names["a"] is nb.names["b"]
    assert nb.names["a"].shape == (1, 3)
    assert nb.taken.rebound == ("a", "b")


def test_what_is_bound_anew_leaves_the_old_object_alone(nb: Notebook) -> None:
    nb.here("import numpy as np\na = [1]; b = {'k': a}; c = np.zeros(3); d = c")
    nb.there("a = [1]\na.append(2)\nc = c + 1")
    assert (nb.names["a"], nb.names["b"]) == ([1, 2], {"k": [1]})
    assert (nb.names["c"].tolist(), nb.names["d"].tolist()) == ([1.0] * 3, [0.0] * 3)


def test_aliases_made_there_are_aliases_here(nb: Notebook) -> None:
    nb.here("a = [1]; b = [2]")
    nb.there("b = a\nc = {'a': a}")
    assert nb.names["a"] is nb.names["b"] is nb.names["c"]["a"]


def test_functions_see_the_namespace_they_are_in(nb: Notebook) -> None:
    """So a counter that two of them share is one counter, here and there."""
    nb.here("count = 0\ndef up():\n    global count\n    count += 1\ndef twice():\n    up(); up()\n    return count")
    nb.there("got = twice()")
    assert (nb.names["got"], nb.names["count"]) == (2, 2)
    nb.here("up()")
    assert nb.names["count"] == 3
    nb.there("got = twice()")
    assert (nb.names["got"], nb.names["count"]) == (5, 5)


def test_functions_and_classes_defined_there_work_here(nb: Notebook) -> None:
    nb.there(
        "factor = 3\ndef scaled(x):\n    return factor * x\nclass Point:\n    def __init__(self, x): self.x = scaled(x)"
    )
    nb.here("p = Point(2)\nfactor = 10\nq = scaled(1)")
    assert (nb.names["p"].x, nb.names["q"]) == (6, 10)
    nb.there("r = isinstance(p, Point), scaled(1)")
    assert nb.names["r"] == (True, 10)


def test_an_instance_comes_back_as_itself(nb: Notebook) -> None:
    nb.here(
        "class Model:\n    def __init__(self): self.w = [0]\n    def step(self): self.w[0] += 1\nm = Model()\nw = m.w"
    )
    before = nb.names["m"]
    nb.there("m.step()")
    assert nb.names["m"] is before
    assert nb.names["w"] == [1]
    assert type(before) is nb.names["Model"]


def test_what_a_cell_did_not_come_to_bind_stays_as_it_is(nb: Notebook) -> None:
    """Though the other side still has what an earlier cell had bound."""
    nb.there("b = []")
    nb.here("b = 5")
    assert nb.there("1 / 0\nb = 6") == "ZeroDivisionError"
    assert nb.names["b"] == 5


def test_what_was_changed_and_let_go_of_is_changed_where_others_hold_it(nb: Notebook) -> None:
    nb.here("import numpy as np\na = [1]; b = {'k': a}; c = np.zeros(300_000); d = c; e = {'deep': [5]}; f = e['deep']")
    nb.there("a[0] = 7\na = []\nc[0] = 1\nc = None\ne['deep'][0] = 6\ne['deep'] = 0")
    assert nb.names["b"] == {"k": [7]}
    assert nb.names["d"][0] == 1.0
    assert (nb.names["f"], nb.names["e"]) == ([6], {"deep": 0})


def test_what_was_let_go_of_unchanged_does_not_travel(nb: Notebook) -> None:
    nb.here("import numpy as np\nbig = np.zeros(1_000_000)")
    nb.there("big = len(big)")
    assert nb.names["big"] == 1_000_000
    assert nb.came.nbytes < 10_000


def test_a_name_that_is_bound_to_what_it_had_there_is_bound_here(nb: Notebook) -> None:
    nb.here("b = [1]")
    nb.there("a = b")
    nb.here("a = 0")
    nb.there("a = b")
    assert nb.names["a"] is nb.names["b"]


def test_what_is_as_it_once_was_is_sent_if_it_was_another_meanwhile(nb: Notebook) -> None:
    """Though what was agreed on last was said of it together with others."""
    nb.here("a = []")
    nb.there("a.append(1)\nimport sys")
    nb.here("a = []")
    nb.there("a.append(1)")
    assert nb.names["a"] == [1]
    nb.there("b = [2]\nimport os")
    nb.here("a = []; b = [2]; c = b")
    nb.there("a.append(len(b))")
    assert nb.names["a"] == [1]


def test_only_what_is_asked_for_comes_back(nb: Notebook) -> None:
    """And what a cell changed besides is undone there before it is read again."""
    nb.here("a = [1]; b = [2]")
    nb.there("a.append(2); b.append(3); c = len(a)", frozenset({"b", "c"}))
    assert (nb.names["a"], nb.names["b"], nb.names["c"]) == ([1], [2, 3], 2)
    nb.there("d = len(a)")
    assert nb.names["d"] == 1


def test_names_that_are_deleted_go(nb: Notebook) -> None:
    nb.here("a = 1; b = 2")
    nb.there("c = a + b\ndel a")
    assert "a" not in nb.names
    nb.here("del b")
    assert nb.there("b") is None or True
    assert nb.there("c + b") == "NameError"


def test_a_cell_that_raises_brings_its_changes_back(nb: Notebook) -> None:
    nb.here("a = [1]")
    assert nb.there("a.append(2)\nnew = 5\n1 / 0\na.append(3)") == "ZeroDivisionError"
    assert (nb.names["a"], nb.names["new"]) == ([1, 2], 5)


def test_what_cannot_travel_is_named_before_the_cell_runs(nb: Notebook) -> None:
    nb.here(
        "import threading\nlock = threading.Lock()\nlock.acquire()\nd = {'a': [lock]}\ndef f(): return lock\nfine = 1"
    )
    for cell, name in (("lock", "lock"), ("d", "d"), ("f()", "lock")):
        with pytest.raises(Unpicklable) as caught:
            nb.there(cell)
        assert caught.value.path.startswith(name)
        assert "lock" in str(caught.value)
    assert nb.there("ok = fine") is None


def test_what_cannot_be_sent_costs_two_encodings_the_first_time_and_one_later(
    nb: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a cell that can use any name: all that cannot be sent is found at once, and asked by itself the next time."""
    nb.here("a, b, c = ([(n for n in ())] for _ in range(3)); fine = [1]")
    encoded = []

    def count(*roots: Any, **named: Any) -> Any:
        encoded.append(roots)
        return object_groups.encode_roots(*roots, **named)

    monkeypatch.setattr("sublet.notebook.namespace_sync.encode_roots", count)
    with nb.at_home():
        first = nb.space.outgoing(nb.space.visible())
        assert first.stays == dict.fromkeys("abc", "a generator")
        assert len(encoded) == 2
        assert nb.space.outgoing(nb.space.visible()).stays == first.stays
        assert len(encoded) == 3
        nb.names["a"][0] = "can be sent now"
        nb.names["b"] = 5
        later = nb.space.outgoing(nb.space.visible())
        assert (later.stays, len(encoded)) == ({"c": "a generator"}, 4)
        assert later.names == {"a", "b", "fine"}


def test_what_cannot_come_back_stays_and_is_named(nb: Notebook) -> None:
    assert nb.there("g = (n for n in range(3))\nh = 1") is None
    assert nb.names["h"] == 1
    assert "g" not in nb.names
    assert nb.came.stays == {"g": "a generator"}
    assert nb.there("i = next(g)") is None
    assert nb.names["i"] == 0


def test_a_cell_that_can_reach_any_name_gets_all_of_them(nb: Notebook) -> None:
    nb.here("a = 1; b = [2]")
    nb.there("c = eval('a + b[0]')")
    assert nb.names["c"] == 3


def test_a_part_of_what_crossed_together_is_bound_again_to_what_it_was(nb: Notebook) -> None:
    nb.here("import numpy as np")
    assert nb.there("a = [np.zeros(100_000)]; t = a[0]; b = [a]") is None
    assert nb.there("n = len(a); t = a[0]") is None
    assert nb.names["t"] is nb.names["a"][0]
    assert nb.names["b"][0] is nb.names["a"]


def test_modules_travel_by_name(nb: Notebook) -> None:
    nb.here("import math, numpy as np, os.path as p")
    nb.there("x = math.pi + float(np.float64(1)); y = p.join('a', 'b')\nimport json")
    assert nb.names["y"] == "a/b"
    assert nb.names["json"].dumps(1) == "1"


# ---- random notebooks: the same as plain execution in one place

values = st.sampled_from(["[]", "[1]", "{'k': 0}", "set()", "np.arange(3)", "np.zeros((2, 2))", "'t'", "1.5", "Box()"])
names = st.sampled_from("abcd")
steps = st.one_of(
    st.builds("{} = {}".format, names, values),
    st.builds("{} = {}".format, names, names),
    st.builds("{}.append({})".format, names, names),
    st.builds("{} = [{}, {}]".format, names, names, names),
    st.builds("{}['k'] = {}".format, names, names),
    st.builds("{} += 1".format, names),
    st.builds("{}[0] = 7".format, names),
    st.builds("{} = {}[1:]".format, names, names),
    st.builds("{}.v = {}".format, names, names),
    st.builds("{} = bump({})".format, names, names),
    st.builds("def bump(x, n={}):\n    global total\n    total += 1\n    return [x, n]".format, names),
    st.builds("{} = Box()".format, names),
    st.builds("del {}".format, names),
    st.builds("{}['k'][0] = 9; {}['k'] = 0".format, names, names),
    st.builds("{}['k'].append(5); del {}['k']".format, names, names),
    st.builds("{}['z'] = np.zeros(2)".format, names),
    st.builds("{} = {}['k']".format, names, names),
    st.builds("{}, {}".format, names, names),
    st.builds("{} = tuple([{}, {}])".format, names, names, names),
    st.builds("{} = eval('[{}, total]')".format, names, names),
    st.builds("exec('{}.append(5)')".format, names),
    st.builds("import __main__\n{} = __main__.{}".format, names, names),
    st.builds("{} = look()".format, names),
    st.builds("def look():\n    return eval('{}')".format, names),
    st.builds("t = threading.Thread(target=note, args=({},)); t.start(); t.join(); del t".format, names),
)
cells = st.lists(st.tuples(st.booleans(), st.lists(steps, min_size=1, max_size=3)), min_size=1, max_size=6)
BEGIN = (
    "import numpy as np, threading\ntotal, noted = 0, []\n"
    "def note(x):\n    global total\n    total += 1\n    noted.append(x)\n"
    "def look():\n    return eval('a')\n"
    "def bump(x):\n    global total\n    total += 1\n    return [x]\n"
    "class Box:\n    v = None\n"
    "a = [0]; b = {'k': a}; c = np.arange(4); d = Box()"
)


@settings(max_examples=max(150, settings().max_examples), deadline=None)  # 10,000 in the soak
@given(cells)
def test_any_notebook_ends_as_if_it_had_run_in_one_place(other: Other, cells: list[tuple[bool, list[str]]]) -> None:
    split, plain = Notebook(other), Notebook(other)
    for one in (split, plain):
        one.here(BEGIN)
    for is_there, lines in cells:
        source = "\n".join(lines)
        got = split.there(source) if is_there else split.here(source)
        assert got == plain.here(source)
        assert _picture(split.names) == _picture(plain.names)


def _picture(space: dict[str, Any]) -> Any:
    """Everything that can be told of the names: values, and which of them are the same object."""
    numbers: dict[int, int] = {}
    keep: list[Any] = []

    def draw(value: Any) -> Any:
        if isinstance(value, int | float | str | type(None)):
            return value
        keep.append(value)
        if id(value) in numbers:
            return ("again", numbers[id(value)])
        numbers[id(value)] = len(numbers)
        if isinstance(value, np.ndarray | np.generic):
            return ("array", value.tolist(), str(value.dtype))
        if isinstance(value, list | tuple):
            return (type(value).__name__, [draw(item) for item in value])
        if isinstance(value, dict):
            return ("dict", [(key, draw(item)) for key, item in value.items()])
        if type(value).__name__ == "Box":
            return ("Box", draw(dict(value.__dict__)))
        return type(value).__name__

    return {name: draw(space[name]) for name in ("a", "b", "c", "d", "total", "noted") if name in space}


def test_an_unchanged_frame_with_text_is_not_sent_again(nb: Notebook) -> None:
    """Its text is copied anew for each pickle, and parts of it were made only to load it."""
    nb.here("import pandas as pd\nn = 50_000\ndf = pd.DataFrame({'a': range(n)})")
    nb.here(
        "df['t'] = [f'row {i}' for i in range(n)]\ndf['o'] = pd.Series([f'x{i % 9}' for i in range(n)], dtype=object)"
    )
    for turn in range(3):
        assert nb.there(f"k = len(df) + {turn}") is None
        assert [one.names for one in nb.came.parcels] == [("k",)]
        assert not (turn and nb.sent.parcels)
    nb.here("df.loc[3, 't'] = 'new'")
    assert nb.there("seen = df.t[3]") is None
    nb.here("df.loc[4, 'o'] = 'too'")
    assert nb.there("seen = seen, df.o[4]") is None
    assert nb.names["seen"] == ("new", "too")
    assert nb.there("df.loc[5, 't'] = df.loc[5, 'o'] = 'there'") is None
    assert nb.names["df"].loc[5, ["t", "o"]].tolist() == ["there", "there"]


def test_frames_are_sent_each_by_itself_whichever_of_them_cells_read(nb: Notebook) -> None:
    """All frames of pandas hold some objects of its classes; those that were made of one another hold its labels."""
    nb.here(
        "import pandas as pd\ndef frame(n):\n    return pd.DataFrame({'a': range(n), 't': [str(i) for i in range(n)]})"
    )
    nb.here("f, g, h = frame(30), frame(40), frame(50)")
    assert nb.there("k = len(f) + len(g)") is None
    assert nb.there("k = len(g) + len(h)") is None
    assert [one.names for one in nb.sent.parcels] == [("h",)]
    assert nb.there("part = g[g.a > 3]") is None
    assert [one.names for one in nb.came.parcels] == [("part",)]
    for reads in ("f, h", "g, h", "f, g, part"):
        assert nb.there(f"k = len([{reads}])") is None
        assert [one.names for one in nb.came.parcels] == [("k",)]
        assert not nb.sent.parcels
    assert nb.there("g.loc[3, 't'] = 'there'\nk = len(f) + len(part)") is None
    assert [one.names for one in nb.came.parcels] == [("g",), ("k",)]
    assert nb.names["g"].t[3] == "there"


SCALED = """
scale = 3
def scaled(n):
    return n * scale
class Kept:
    def __init__(self, n):
        self.n = n
    def __getstate__(self):
        return self.n
    def __setstate__(self, n):
        self.n, self.times = n, scaled(n)
class Made:
    def __init__(self, n):
        self.n = n
    def __reduce__(self):
        return made, (self.n,)
def made(n):
    found = Made(n)
    found.times = scaled(n)
    return found
class Key:
    def __init__(self, n):
        self.n = n
    def __hash__(self):
        return hash((self.n, scale))
    def __eq__(self, other):
        return type(other) is Key and self.n == other.n
"""


@pytest.mark.parametrize("make", ["Kept(2)", "Made(2)", "[{'in': Kept(2)}][0]['in']"])
def test_code_that_loads_an_object_reads_names_that_cross_with_it(nb: Notebook, make: str) -> None:
    nb.here(f"{SCALED}\na = {make}")
    assert nb.there("seen = a.times, scale") is None
    assert nb.names["seen"] == (6, 3)
    nb.here("scale = 5; a.n = 4")  # both cross again: not with the scale of before
    assert nb.there("seen = a.times, scale") is None
    assert nb.names["seen"] == (20, 5)
    assert nb.there("scale = 7; b = Kept(1); c = Made(1); b.n = c.n = 2") is None
    assert (nb.names["b"].times, nb.names["c"].times) == (14, 14)
    for _ in range(2):
        assert nb.there("scale, a, b, c") is None
    assert nb.sent.parcels == []
    assert nb.came.parcels == []


def test_a_key_whose_hash_reads_a_name_that_crosses_with_it(nb: Notebook) -> None:
    nb.here(f"{SCALED}\ntable = {{Key(1): 'one', Key(2): 'two'}}")
    assert nb.there("found = table[Key(2)]; table[Key(3)] = 'three'") is None
    assert nb.names["found"] == "two"
    assert nb.names["table"][nb.names["Key"](3)] == "three"


@pytest.mark.parametrize("before", ["", "class P:\n    salt, all = 0, ()\n"])
def test_methods_that_run_while_a_class_is_loaded_find_the_class(nb: Notebook, before: str) -> None:
    """Not an older one that has its name, which the other side may have."""
    if before:
        nb.here(before)
        nb.there("P")
    nb.here(
        "class P:\n    salt, all = 3, set()\n    def __init__(self, n): self.n = n; P.all.add(self)\n"
        "    def __hash__(self): return hash(P.salt)\n"
        "    def __eq__(self, o): return isinstance(o, P) and o.n == self.n\na, b = P(1), P(2)"
    )
    assert nb.there("found = P(2) in P.all, len(P.all), a in P.all") is None
    assert nb.names["found"] == (True, 2, True)


def test_a_class_without_a_name_gets_none_where_it_is_loaded(nb: Notebook) -> None:
    nb.here("class P:\n    all = set()\n    def __hash__(self): return 1\na = P(); P.all.add(a); del P")
    assert nb.there("said = 'P' in globals(), a in type(a).all") is None
    assert nb.names["said"] == (False, True)
    assert "P" not in nb.names


def test_what_a_class_holds_that_comes_with_an_instance_is_what_others_hold(nb: Notebook) -> None:
    """The cell does not name the class."""
    nb.here("class P: pass\nclass Base: pass\nclass S(Base): pass\na, s = P(), S()\nS.extra = Base.more = a")
    assert nb.there("P.first = a") is None
    assert nb.there("said = type(s).extra is P.first is s.more") is None
    assert nb.names["said"] is True
    assert nb.there("P.first = 5; s") is None
    assert nb.names["S"].extra is nb.names["a"] is nb.names["Base"].more


def test_a_class_that_is_given_other_bases_has_them_on_both_sides(nb: Notebook) -> None:
    nb.here("class A: pass\nclass M:\n    def m(self): return 1\nclass B(A): pass\nb = B()")
    assert nb.there("b") is None
    assert nb.there("B.__bases__ = (A, M)") is None
    assert nb.here("said = b.m(), B.__bases__ == (A, M)") is None
    assert nb.names["said"] == (1, True)
    nb.here("B.__bases__ = (M,)")
    assert nb.there("said = isinstance(b, A), b.m()") is None
    assert nb.names["said"] == (False, 1)


@pytest.mark.parametrize("changed_there", [True, False])
@pytest.mark.parametrize(
    ("made", "name", "change", "back", "seen"),
    [
        ("x = [1]; y = [x]", "x", "x.append(2)", "x.pop()", "len(y[0]) == 1"),
        ("x = [0] * 2000; y = [x]", "x", "x[5] = 2", "x[5] = 0", "y[0][5] == 0"),
        ("class B: v = 1\ny = B()", "B", "B.v = 2", "B.v = 1", "y.v == 1"),
        (
            "class B:\n    def __init__(self): self.v = 1\nx = B(); y = {x: 0}",
            "x",
            "x.v = 2",
            "x.v = 1",
            "[*y][0].v == 1",
        ),
        ("import numpy as np\nx = np.zeros(2); y = [x]", "x", "x[0] = 2", "x[0] = 0", "y[0][0] == 0"),
        ("import numpy as np\nx = np.zeros(100_000); y = [x]", "x", "x[0] = 2", "x[0] = 0", "y[0][0] == 0"),
        (
            "import pandas as pd\nx = pd.DataFrame({'a': [1]}); y = [x]",
            "x",
            "x['a'] = 2",
            "x['a'] = 1",
            "y[0].a[0] == 1",
        ),
        (
            "import numpy as np\nx = np.zeros(1); y = [x, [1]]; z = y[1]",
            "z",
            "z.append(2)",
            "z.pop()",
            "len(y[1]) == 1",
        ),
    ],
)
def test_what_was_changed_under_one_name_and_changed_back_is_seen_under_another(
    nb: Notebook, made: str, name: str, change: str, back: str, seen: str, changed_there: bool
) -> None:
    """The other name crossed before the change, and is now as it was then; the device has it with the change."""
    nb.here(made)
    assert nb.there("y") is None
    if not changed_there:
        nb.here(change)
    assert nb.there(change if changed_there else name) is None
    nb.here(back)
    assert nb.there(f"said = bool({seen})") is None
    assert nb.names["said"] is True
    assert nb.there("y") is None
    assert nb.sent.parcels == []


def test_an_attribute_alone_makes_a_counter_another(nb: Notebook) -> None:
    nb.here("from collections import Counter\nd = Counter('ab')")
    assert nb.there("d") is None
    assert nb.there("d.of = 1") is None
    assert nb.names["d"].of == 1
    nb.here("d.of = 2")
    assert nb.there("said = d.of") is None
    assert nb.names["said"] == 2


def test_objects_known_to_share_are_not_told_apart_again_for_each_cell(
    nb: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find out which names share takes three encodings, and so does each step from function to function."""
    nb.there(
        "def scale(x):\n    return x * FACTOR\n"
        "FACTOR = 2\n"
        "class Layer:\n    def __call__(self, x):\n        return scale(x)\n"
        "class Model:\n    def __init__(self):\n        self.layers = [Layer(), Layer()]\n"
        "    def __call__(self, x):\n        return sum(one(x) for one in self.layers)\n"
        "model = Model()"
    )
    nb.there("y = model(3)")
    encoded: list[tuple[str, ...]] = []
    made = object_groups._Bundle.__init__

    def noted(bundle: object_groups._Bundle, names: tuple[str, ...], *args: Any) -> None:
        encoded.append(names)
        made(bundle, names, *args)

    monkeypatch.setattr(object_groups._Bundle, "__init__", noted)
    nb.there("y = model(4)")
    assert nb.names["y"] == 16
    assert sum("model" in names for names in encoded) <= 2, encoded  # alone, and with the class it came with


def test_a_name_that_a_function_does_not_read_any_more_is_not_sent_with_it(nb: Notebook) -> None:
    nb.there("a, b = 1, [2]\ndef f():\n    return a\nclass C:\n    def read(self):\n        return b\nc = C()")
    nb.there("x = c.read()")
    nb.here("C.read = lambda self: a\nb = [3]")
    nb.there("x = c.read()")
    assert nb.names["x"] == 1
    assert "b" not in nb.sent.names


@pytest.mark.parametrize(
    ("made", "changed", "expected"),
    [
        ("x = [1]; y = x", "x.append(2); x = [9]", [1, 2]),
        ("x = [1]; y = x", "x.append(2); del x", [1, 2]),
        ("import numpy as np\nx = np.zeros(2); y = x", "x += 1; x = 5", [1, 1]),
        ("x = [[1]]; y = x[0]", "x[0].append(2); x = [9]", [1, 2]),
        ("y = [1]; x = {'k': y}", "x['k'].append(2); del x['k']", [1, 2]),
        ("y = [1]; x = {'k': y}", "x['k'].append(2); del x['k']; x = 5", [1, 2]),
        ("y = [1]; x = {'k': y}; y.append(x); y.reverse()", "x['k'].reverse(); x['k'].pop(); del x['k']", [1]),
        ("import numpy as np\ny = [1]; x = {'k': y, 'z': np.zeros(2)}", "x['k'].append(2); del x['k']", [1, 2]),
        ("import numpy as np\ny = [1]; x = [np.zeros(2), y]", "x.pop().append(2); x = 5", [1, 2]),
        ("import numpy as np\ny = np.zeros(2); x = [y]", "x.pop()[:] = 3", [3, 3]),
    ],
)
def test_what_a_cell_changed_before_it_bound_its_name_anew_is_changed_for_other_names(
    nb: Notebook, made: str, changed: str, expected: list[int]
) -> None:
    """Also where all of it was made there, and the cell does not read the other name."""
    assert nb.there(made) is None
    assert nb.there(changed) is None
    assert list(nb.names["y"]) == expected
    assert nb.there("said = list(y)") is None
    assert nb.names["said"] == expected


@pytest.mark.parametrize("beside", ["0", "np.zeros(2)"])
def test_what_a_name_never_led_to_is_not_sent_with_what_it_let_go_of(nb: Notebook, beside: str) -> None:
    """The notebook has changed it meanwhile, and the cell does not read it: what the device has of it is old."""
    assert nb.there(f"import numpy as np\ny = [1]; w = [0]; x = {{'k': y, 'z': {beside}}}; both = [y, w]") is None
    nb.here("w.append(5)")
    assert nb.there("x['k'].append(2); del x['k']") is None
    assert (nb.names["y"], nb.names["w"]) == ([1, 2], [0, 5])
    assert nb.names["both"][1] is nb.names["w"]


def test_what_is_made_anew_under_a_name_that_a_cell_deleted_is_sent(nb: Notebook) -> None:
    """Also if it is just as what the cell deleted."""
    nb.here("class Box:\n    v = None\nd = Box()")
    nb.there("d")
    nb.there("del d")
    nb.here("d = Box()")
    assert nb.there("a = d") is None
    assert nb.names["a"] is nb.names["d"]


@pytest.mark.parametrize(
    ("made", "again", "changed", "expected"),
    [
        ("a = [1]", "a = [1]; c = a", "a.append(2)", "[1, 2]"),
        ("a = {'k': 1}", "a = {'k': 1}; c = a", "a['k'] = 2", "{'k': 2}"),
        ("a = [[1]]", "a[0] = [1]; c = a[0]", "a[0].append(2)", "[1, 2]"),
        ("c = [1]; a = {'k': c}", "c = [1]; a = {'k': c}", "a['k'].append(2)", "[1, 2]"),
        ("import numpy as np\na = np.zeros(2)", "a = np.zeros(2); c = a", "a[0] = 2", "np.array([2.0, 0.0])"),
        ("class Box:\n    v = [1]\na = Box()", "a = Box(); c = a", "a.v = [1, 2]", "a"),
    ],
)
def test_a_cell_run_again_here_makes_objects_just_like_the_old_ones_and_they_are_others(
    nb: Notebook, made: str, again: str, changed: str, expected: str
) -> None:
    """What the device then does to them is seen under the notebook's other names for them."""
    nb.here(made)
    nb.there("a")
    nb.here(again)
    assert nb.there(changed) is None
    assert nb.here(f"said = repr(c) == repr({expected})") is None
    assert nb.names["said"] is True


@pytest.mark.parametrize(
    ("change", "seen"),
    [("P.made = 7", "P.made"), ("P.log.append(7)", "P.log[-1]"), ("class P:\n    made = 7", "P.made")],
)
@pytest.mark.parametrize("anew", ["a = 5", "a = [5]", "a = S()"])
def test_binding_a_name_anew_leaves_alone_what_its_old_value_read(
    nb: Notebook, change: str, seen: str, anew: str
) -> None:
    """The class of the old value reads itself. What the device has of it is old, and the cell does not use it."""
    nb.here("class P:\n    made, log = 0, []\n    def __init__(self): P.made += 1\nclass S: pass")
    nb.there("a = P()")
    nb.here(change)
    assert nb.there(anew) is None
    assert nb.here(f"said = {seen}") is None
    assert nb.names["said"] == 7
    assert [one.names for one in nb.came.parcels] == [("a",)]


def test_what_only_another_name_holds_is_not_sent_with_every_cell(nb: Notebook) -> None:
    assert nb.there("x = [1]; y = [x, 'z' * 100_000]") is None
    assert nb.there("x.append(2)") is None
    assert sum(one.nbytes for one in nb.came.parcels) < 10_000
    assert nb.names["y"][0] == [1, 2]


def test_a_function_of_a_library_is_taken_apart_without_going_through_all_modules(
    nb: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decorator's function has the library's namespace; its default values and attributes go with it all the same."""
    nb.here("import contextlib\n@contextlib.contextmanager\ndef doubled(x, kept=[1]):\n    yield [2 * x, *kept]")
    searched: list[object] = []

    def noted(*args: object) -> list[object]:
        searched.append(args)
        return []

    monkeypatch.setattr(cloudpickle.cloudpickle, "_find_imported_submodules", noted)
    nb.there("with doubled(4) as found:\n    pass\ndoubled.calls = [1]")
    nb.there("doubled.calls.append(2)\nwith doubled(5) as found:\n    pass")
    assert (nb.names["found"], nb.names["doubled"].calls) == ([10, 1], [1, 2])
    assert searched == []
