"""A transfer writes nothing but the notebook's own objects, and all of them or none."""

from __future__ import annotations

import builtins
import collections
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.errors import Unpicklable
from sublet.notebook.in_place import merge
from sublet.notebook.untouchable import Untouchable, module_names
from tests.notebook import library
from tests.notebook.module_digest import changed, digest
from tests.notebook.sides import Notebook, Other

pytestmark = pytest.mark.filterwarnings("ignore")

PIECES: dict[str, tuple[str, str]] = {
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\n{n} = P(1, [2])",
        "{n}.y.append(3)",
    ),
    "typed named tuple": (
        "from typing import NamedTuple\nclass Q(NamedTuple):\n    x: list\n{n} = Q([1])",
        "{n}.x.append(3)",
    ),
    "closures of a library": (
        "from tests.notebook.library import Value\n{n} = Value(1.0) + Value(2.0)",
        "{n}.grad = 1.0; {n}._backward()",
    ),
    "decorated by a library": (
        "from tests.notebook.library import counted\n@counted\ndef {n}(x):\n    return x\n{n}(1)",
        "{n}(2)",
    ),
    "accessor": ("from tests.notebook.library import Accessor\n{n} = Accessor([1])", "{n}.memo['k'] = {n}.owner"),
    "enum": ("import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\n{n} = {{E.A: [E.B]}}", "{n}[E.A].append(E.A)"),
    "flag": ("import enum\nclass F(enum.Flag):\n    A = 1\n    B = 2\n{n} = [F.A | F.B]", "{n}.append(F.A)"),
    "data class": (
        "from dataclasses import dataclass\n@dataclass\nclass D:\n    x: list\n{n} = D([1])",
        "{n}.x.append({n})",
    ),
    "frozen data class": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True)\nclass Z:\n    x: tuple\n{n} = Z(([1],))",
        "{n}.x[0].append(2)",
    ),
    "own setattr": (
        (
            "class S:\n    def __setattr__(self, name, value):\n        raise AttributeError(name)\n{n} = S()\n"
            "{n}.__dict__['x'] = [1]"
        ),
        "{n}.__dict__['x'].append(2); {n}.__dict__['y'] = 1",
    ),
    "abstract class": (
        "import abc\nclass A(abc.ABC):\n    pass\nclass B:\n    pass\nA.register(B)\n{n} = [A, B()]",
        "{n}[1].x = 1; A.extra = [1]",
    ),
    "generic": (
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass G(Generic[T]):\n    pass\n{n} = [G[int](), G]",
        "{n}[0].x = 1",
    ),
    "mock": ("from unittest import mock\n{n} = mock.MagicMock(return_value=3)", "{n}.note = [{n}]"),
    "partial": ("import functools\n{n} = functools.partial(sorted, key=len)", "{n}.note = [1]"),
    "cache": ("import functools\n@functools.lru_cache\ndef {n}(x):\n    return [x]\n{n}(1)", "{n}(2); {n}.note = 1"),
    "cached property": (
        "import functools\nclass CP:\n    @functools.cached_property\n    def x(self):\n        return [1]\n{n} = CP()",
        "{n}.x.append(2)",
    ),
    "ordering": (
        (
            "import functools\n@functools.total_ordering\nclass O:\n    def __init__(self):\n        self.x = 1\n"
            "    def __lt__(self, other):\n        return self.x < other.x\n{n} = O()"
        ),
        "{n}.x = 2",
    ),
    "own namespace": (
        "ns = {{}}\nexec('n = [0]\\ndef f():\\n    n.append(1)\\n    return len(n)', ns)\n{n} = ns['f']",
        "{n}()",
    ),
    "search path": ("{n} = sys.path", "{n}.append('/nowhere')"),
    "arguments": ("{n} = {{'argv': sys.argv}}", "{n}['argv'].append('x')"),
    "names of a module": ("import math\n{n} = [vars(math)]", "{n}[0]['tau'] = 7"),
    "module by hand": ("import types\n{n} = types.ModuleType('by_hand')\n{n}.x = [1]", "{n}.x.append(2)"),
    "logger": ("import logging\n{n} = [logging.getLogger('some.name')]", "{n}.append({n}[0])"),
    "class by a function": ("{n} = type('Made', (dict,), {{'x': [1]}})", "{n}.x.append(1); {n}.y = 2"),
    "exception": ("{n} = ValueError([1])", "{n}.args[0].append(2)"),
    "array of objects": ("import numpy as np\n{n} = np.array([[1], 'a'], object)", "{n}[0] = {n}[1]"),
    "frame": ("import pandas as pd\n{n} = pd.DataFrame({{'a': [1]}})", "{n}['b'] = 2"),
}


SEEDS = (0, 2, 3, 5, 7)
"""Graphs of these have every piece in them."""


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    """A process of this file alone: each test looks at all modules of it, so it should have few."""
    made = Other()
    yield made
    made.close()


def choose_pieces(rng: random.Random) -> list[str]:
    return rng.sample(sorted(PIECES), 9)


def graph(seed: int) -> tuple[str, str]:
    """Statements that make some objects which hold one another, and statements that change them."""
    rng = random.Random(seed)
    chosen = choose_pieces(rng)
    names = [f"o{n}" for n in range(len(chosen))]
    makes = [
        "import sys, collections",
        *(PIECES[kind][0].format(n=name) for kind, name in zip(chosen, names, strict=True)),
    ]
    makes += [f"held = [{', '.join(names)}]", f"held += [held, {{'first': {names[0]}}}, ({names[-1]},)]"]
    changes = [PIECES[kind][1].format(n=name) for kind, name in zip(chosen, names, strict=True)]
    rng.shuffle(changes)
    if rng.random() < 0.5:
        changes.append("held.append(lambda: held)")
    return "\n".join(makes), "\n".join(changes)


def test_every_piece_is_in_a_graph() -> None:
    assert {piece for seed in SEEDS for piece in choose_pieces(random.Random(seed))} == PIECES.keys()


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(n, marks=pytest.mark.soak) for n in range(100) if n not in SEEDS)]
)
def test_nothing_of_the_process_changes_where_a_cell_did_not_run(other: Other, seed: int) -> None:
    make, change = graph(seed)
    nb = Notebook(other)
    assert nb.here(make) is None
    nb.there("len(held)")
    before = digest()
    assert nb.there(change) is None
    assert changed(before, digest()) == []
    there = other.ask("digest")
    assert nb.here(change) is None
    there = other.ask("digest")
    nb.there("pass\nlen(held)")
    assert changed(there, other.ask("digest")) == []


def test_without_the_guard_it_would(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(Untouchable, "has", lambda self, value: False)
    nb = Notebook(other)
    assert nb.here("import sys\npath = sys.path") is None
    was = list(sys.path)
    try:
        before = digest()
        assert nb.there("path.append('/nowhere')") is None
        assert "sys.path" in changed(before, digest())
    finally:
        sys.path[:] = was


def test_a_named_tuple_comes_back_and_builtins_stay(other: Other) -> None:
    """It emptied ``builtins`` in the notebook's own process, and killed it."""
    nb = Notebook(other)
    assert nb.here("from collections import namedtuple\nP = namedtuple('P', 'x y')") is None
    before = dict(vars(builtins))
    kind = nb.names["P"]
    assert nb.there("p = P(1, [2])") is None
    assert vars(builtins) == before
    assert nb.names["P"] is kind
    assert type(nb.names["p"]) is kind
    assert all("__builtins__" not in parcel.head.decode("latin-1") for parcel in nb.came.parcels)


def test_what_belongs_to_the_process_is_looked_into_by_no_plan() -> None:
    guard = Untouchable()
    for one in (builtins, vars(builtins), sys, vars(sys), sys.path, sys.modules, collections.Counter, vars(library)):
        assert guard.has(one), one
    for function in (collections.Counter.update, library.counted, library.Value.__add__):
        assert guard.has(function)
    assert not guard.has(library.Value(1.0)._backward)
    assert not guard.has([1])


# ---- a plan applies whole or not at all


class Refuses:
    """Can be a key until it is told otherwise."""

    def __init__(self, n: int, *, fails: bool = False) -> None:
        self.n, self.fails = n, fails

    def __hash__(self) -> int:
        if self.fails:
            raise RuntimeError("no hash today")
        return self.n

    def __eq__(self, other: object) -> bool:
        return self is other


def test_a_class_among_the_modules_makes_nothing_else_untouchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view of its names is made anew with each look, so its id is soon that of any object of the notebook."""

    class Part:
        """Stands in ``sys.modules``, as ``typing.io`` does in Python 3.11."""

    monkeypatch.setitem(sys.modules, "part.of.something", Part)
    dicts = {id(names) for one in sys.modules.values() if isinstance(names := getattr(one, "__dict__", None), dict)}
    assert module_names() <= dicts
    views = [types.MappingProxyType[str, int]({}) for _ in range(1_000)]
    guard = Untouchable()
    assert not any(guard.has(view) for view in views)


def test_a_write_that_fails_in_the_middle_is_undone_and_named() -> None:
    key = Refuses(1)
    table, line, thing = {key: 1}, [1], Refuses(5)
    came_key = Refuses(1)
    came_table, came_line, came_thing = {came_key: 2, "more": 3}, [1, 2], Refuses(6)
    came_key.fails = True  # so it came: the original cannot be a key any more once it says the same
    news: dict[str, Any] = {"line": came_line, "thing": came_thing, "table": came_table}
    originals = {id(came_key): key, id(came_table): table, id(came_line): line, id(came_thing): thing}
    with pytest.raises(Unpicklable, match=r"a dict could not take the new contents: RuntimeError: no hash today"):
        merge(news, originals)
    assert (line, thing.n, key.fails, list(table.values())) == ([1], 5, False, [1])
    assert next(iter(table)) is key


def test_a_plan_that_cannot_work_is_refused_before_its_first_write() -> None:
    import numpy as np

    numbers, line = np.zeros(3), [1]
    came_numbers, came_line = np.ones(3), [2]
    from sublet.notebook import operations

    def old(one: Any) -> Any:
        one.is_fresh = False
        return one

    def listed(target: Any, items: Any) -> Any:
        return old(operations.ListContents(target, items))

    made: list[Any] = [listed(line, came_line), old(operations.ArrayMemory(numbers, came_numbers))]
    numbers.flags.writeable = False
    with pytest.raises(Unpicklable, match="read-only"):
        operations.apply(made, Untouchable(), lambda one: one)
    assert line == [1]
    made = [listed(line, came_line), listed(sys.path, [])]
    with pytest.raises(Unpicklable, match="belongs to Python"):
        operations.apply(made, Untouchable(), lambda one: one)
    assert line == [1]


def test_a_logger_crosses_by_name_and_its_handlers_are_left_alone(other: Other) -> None:
    """They were rewritten with what they had held a moment before, and the notebook's output stopped."""
    nb = Notebook(other)
    source = "import logging, sys\nlogging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)\n"
    assert nb.there(source + "log = logging.getLogger('study')\nheld = [log, log.root.handlers]") is None
    import logging

    assert nb.names["log"] is logging.getLogger("study")
    live = library.Accessor([1])
    came = {"name": live, "copy": [2]}
    original = [1]

    class Changing(list):  # type: ignore[type-arg]
        """Another thread changes it while a transfer is planned."""

    live.memo["events"] = Changing([1])
    from sublet.notebook import in_place

    plan = in_place.merge
    assert plan({"it": came}, {id(came["copy"]): original})[0]["it"] is came
    assert came["copy"] is original
    assert live.memo["events"] == [1]


def test_what_cannot_be_written_here_stays_there_by_name(other: Other) -> None:
    nb = Notebook(other)
    assert (
        nb.here(
            "class K:\n    bad = False\n    def __hash__(self):\n        return 1 // (not self.bad)\n"
            "k = K()\nd = {k: [1]}\nfine = [1]"
        )
        is None
    )
    held = nb.names["d"]
    nb.there("d[k].append(2)\nk.bad = True\nfine.append(2)")
    assert nb.names["fine"] == [1, 2]
    assert list(held.values()) == [[1]]
    assert "d" in nb.came.stays


def test_modules_that_come_and_go_are_followed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = types.ModuleType("first"), types.ModuleType("second")
    monkeypatch.setitem(sys.modules, "of.a.test", first)
    assert Untouchable().has(first)
    assert Untouchable().has(vars(first))
    monkeypatch.setitem(sys.modules, "of.a.test", second)
    guard = Untouchable()
    assert guard.has(second)
    assert guard.has(vars(second))
    assert guard.has(sys)
    assert guard.has(vars(types))
    assert not guard.has(first)
    assert not guard.has(vars(first))
    monkeypatch.delitem(sys.modules, "of.a.test")
    assert not Untouchable().has(vars(second))


def test_a_chain_of_objects_may_be_long() -> None:
    class Node:
        def __init__(self, n: int, after: Node | None) -> None:
            self.n, self.after = n, after

    old: Any = None
    new: Any = None
    pairs: dict[int, Any] = {}
    keep = []
    for n in range(20_000):
        old, new = Node(n, old), Node(-n, new)
        pairs[id(new)] = old
        keep.append(new)
    got = merge({"it": new}, pairs)[0]["it"]
    assert got is old
    assert got.after.after.n == -19_997
    while old is not None:  # a chain this long would be let go of by as many calls
        old.__dict__, old = {}, old.after
    for one in keep:
        one.after = None
