"""Functions, classes and plain objects are told to be unchanged without being encoded; the encoding is asked, too."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.notebook import object_graphs
from sublet.notebook.home import HomeRules
from sublet.notebook.object_graphs import graphs_of
from sublet.state.checkpoints.object_groups import encode_roots
from sublet.state.transfer import codec
from tests.notebook.sides import Notebook, Other, note_encoded

SOURCE = """
import abc, collections, dataclasses, decimal, enum, functools, math, os.path, types, typing

LIMIT = 3

class Base(abc.ABC):
    shared = [1]
    count: int = 0

    def area(self, by=[1]):
        return self.side * LIMIT

    @property
    def side(self):
        return 1

    @staticmethod
    def make():
        return Base

    @classmethod
    def of(cls, n):
        return cls()

    @functools.cached_property
    def late(self):
        return LIMIT

class Other(Base):
    pass

class Square(Base):
    def __init__(self, n):
        self.n = n
        self.notes = {}

    def __add__(self, other: "Square"):
        return Square(self.n + other.n)

@dataclasses.dataclass
class Record:
    n: int
    items: list[Square] = dataclasses.field(default_factory=list)

class Slim:
    __slots__ = ("a", "b", "__weakref__")

class Color(enum.Enum):
    RED = 1
    GREEN = 2

    def shown(self):
        return self.name.lower()

class Stage(enum.IntFlag):
    ONE = 1
    TWO = 2

Pair = collections.namedtuple("Pair", "a b")

def counter(start, step=[1], *, scale={"by": 1}):
    total = [start]
    def up(by: int = 1) -> int:
        nonlocal start
        start += by * LIMIT
        return start
    def look():
        return start, total
    return up, look

def traced(function):
    @functools.wraps(function)
    def inner(*args, **named):
        traced.calls += 1
        return function(*args, **named)
    return inner
traced.calls = 0

def joins(*names):
    return os.path.join(*names)

@traced
def dist(a: "Pair", b) -> typing.Optional[float]:
    "Of two."
    return math.dist(a, b) if eval("LIMIT") else None

@functools.lru_cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

up, look = counter(0)
square, record, slim = Square(2), Record(1), Slim()
chain = [square, {"up": joins}, (record, [slim]), Square(3)]
method = square.area
part = functools.partial(dist, Pair(1, 2), b=[1])
counted, ordered = collections.Counter("abc"), collections.OrderedDict(a=1, b=[2])
default, queue = collections.defaultdict(list, a=[1]), collections.deque([1, [2]], maxlen=5)
space = types.SimpleNamespace(x=[1])
some, frozen = {1, "a"}, frozenset({1, (2, 3)})
text, number, exact = "text", 1.5, decimal.Decimal("1.5")
"""
"""Every name here can be told to be unchanged."""

CHANGES = """
up(2)
look.__closure__[1].cell_contents.append(1)
up.__closure__[0].cell_contents = 7
up.__defaults__ = (5,)
up.__annotations__["by"] = float
up.__annotations__ = {}
up.note = [1]
up.__doc__ = "Counts."
up.__name__ = "other"
up.__qualname__ = "other"
up.__module__ = "elsewhere"
up.__kwdefaults__ = {"by": 1}
counter.__defaults__[0].append(2)
counter.__kwdefaults__["scale"]["by"] = 2
counter.__kwdefaults__ = None
counter.__code__ = joins.__code__
counter.__defaults__ = None
traced.calls += 1000
dist.__wrapped__.__defaults__ = (1,)
fib.__wrapped__.__code__ = (lambda n: n).__code__
Base.shared.append(2)
Base.count = 5
Base.__annotations__["count"] = float
Base.area = lambda self: 2
Base.area.__defaults__[0].append(2)
Base.side = property(lambda self: 7)
Base.side.fget.__defaults__ = (1,)
Base.make = staticmethod(counter)
Base.make.__defaults__ = (1,)
Base.of.__func__.__doc__ = "One."
del Base.of
Base.late.func.__doc__ = "Late."
Base.more = counter
Base.register(int)
Base.__abstractmethods__ = frozenset({"area"})
Square.__qualname__ = "Sq"
Square.__name__ = "Sq"
Square.__doc__ = "A square."
Square.__bases__ = (Other,)
Square.__add__.__annotations__["other"] = int
Square.__init__ = lambda self, n=1: None
square.n = 3000
square.notes["a"] = square
square.__dict__ = {"n": 2, "notes": {}}
square.more = [1]
del square.n
square.__class__ = Other
record.items.append(square)
record.n = [1]
Record.__dataclass_fields__["items"].default_factory = set
Record.__init__.__defaults__ = (1,)
Record.n = 5
slim.a = 1
slim.b = [1]
del slim.a
Slim.more = 1
Color.RED.note = 1
Color.shown = lambda self: ""
Color.RED._value_ = [1]
Stage.TWO.note = 1
Pair.__doc__ = "Two."
Pair.a.__doc__ = "One."
Pair.__new__.__defaults__ = (1,)
Pair.more = 1
chain[1]["up"] = look
chain[2][1].append(1)
chain.reverse()
chain[2][0].items.append(1)
part.keywords["b"].append(2)
part.more = 1
counted["a"] += 1
ordered.move_to_end("a")
ordered["b"].append(1)
default["b"]
default["a"].append(2)
default.default_factory = set
queue.rotate(1)
queue[1].append(1)
space.x.append(1)
space.y = 1
some.add(2)
some.discard("a")
"""
"""Each changes some of the values."""
IDLE = """
square.area()
Square(5) + Square(6)
record == Record(2)
list(map(Pair._make, [(1, 2)]))
fib(20)
isinstance(3, Base)
(up.__annotations__, up.__dict__, square.__dict__, Square.__mro__, Color("RED" and 1))
look()
typing.get_type_hints(Base)
repr((record, Pair(1, 2), square.late if 0 else 0))
"""
"""None of them changes any."""
LINES = CHANGES.strip().splitlines()


class Program:
    """A namespace that counts as that of ``__main__``."""

    def __init__(self) -> None:
        self.main = types.ModuleType("__main__")
        self.names = vars(self.main)
        sys.modules["__main__"] = self.main
        self.run(SOURCE)
        self.own = [name for name in self.names if not name.startswith("__")]

    def run(self, source: str) -> bool:
        """Whether it did not fail."""
        try:
            exec(compile(source, "<cell>", "exec", dont_inherit=True), self.names)  # noqa: S102
        except Exception:
            return False
        return True

    @property
    def values(self) -> dict[str, Any]:
        return {name: self.names[name] for name in self.own if name in self.names}

    def heads(self) -> dict[str, bytes]:
        """As they are encoded; empty where something in a value cannot be."""
        found = {}
        for name, value in self.values.items():
            try:
                found[name] = encode_roots({name: value}, rules=HomeRules())[0].encoded.head
            except Exception:
                found[name] = b""
        return found


@pytest.fixture(autouse=True)
def main() -> Iterator[None]:
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


def test_everything_here_is_told_to_be_unchanged_as_long_as_it_is() -> None:
    program = Program()
    program.heads()  # classes note how their instances are pickled
    graphs = graphs_of(program.values)
    assert graphs.keys() == set(program.own)
    for line in IDLE.strip().splitlines():
        assert program.run(line), line
        assert [name for name, graph in graphs.items() if not graph.is_same()] == [], line


@pytest.mark.parametrize("line", LINES)
def test_each_change_is_seen(line: str) -> None:
    program = Program()
    if line.startswith("del slim"):
        program.run("slim.a = 1")
    program.heads()
    graphs, before = graphs_of(program.values), program.heads()
    assert program.run(line)
    after = program.heads()
    changed = {name for name, head in before.items() if after[name] != head}
    same = {name for name, graph in graphs.items() if graph.is_same()}
    assert not changed & same
    assert same < graphs.keys()


@given(st.lists(st.sampled_from([*LINES, *IDLE.strip().splitlines()]), min_size=2, max_size=5))
@settings(max_examples=12, deadline=None)
def test_no_change_that_the_encoding_sees_is_missed(lines: list[str]) -> None:
    program = Program()
    for line in lines:
        program.heads()  # a class notes how its instances are pickled
        graphs, before = graphs_of(program.values), program.heads()
        program.run(line)
        after = program.heads()
        for name, graph in graphs.items():
            assert not graph.is_same() or after[name] == before[name], (name, line)


def test_what_is_read_is_what_the_encoding_reads() -> None:
    program = Program()
    for name, graph in graphs_of(program.values).items():
        rules = HomeRules()
        encode_roots({name: program.names[name]}, rules=rules)
        assert graph.part(frozenset({name})).reads == rules.reads, name


def test_names_that_share_objects_have_one_graph_and_others_have_not() -> None:
    program = Program()
    graphs = graphs_of(program.values)
    assert graphs["square"] is graphs["Square"] is graphs["Base"] is graphs["chain"] is graphs["record"]
    assert graphs["up"] is graphs["look"]
    assert len({graphs[name] for name in ("fib", "counted", "space", "Color", "square")}) == 5


@pytest.mark.parametrize(
    "value",
    [
        "__import__('random').Random(1)",
        "__import__('itertools').count()",
        "bytearray(b'a')",
        "__import__('array').array('i', [1])",
        "__import__('threading').Lock()",
        "__import__('io').BytesIO(b'a')",
        "__import__('types').ModuleType('made')",
        "__import__('re').match('a', 'a')",
        "iter([1])",
        "type('Own', (), {'__reduce__': lambda self: (dict, ())})()",
        "type('Own', (), {'__getstate__': lambda self: 1})()",
        "type('Own', (list,), {})()",
        "type('Own', (Exception,), {})()",
    ],
)
def test_what_may_change_unseen_is_left_to_the_encoding(value: str) -> None:
    program = Program()
    assert program.run(f"unseen = {value}")
    held = {"unseen": program.names["unseen"], "holder": [program.names["unseen"]], "square": program.names["square"]}
    assert graphs_of(held).keys() == {"square"}


def test_a_value_of_many_objects_is_left_to_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"few": [[1], [2]], "many": [[n] for n in range(4)], "more": [[3], [4]]}
    monkeypatch.setattr(object_graphs, "OBJECTS_MAX", 3)
    assert graphs_of(values).keys() == {"few", "more"}
    monkeypatch.setattr(object_graphs, "SURVEY_MAX", 3)
    assert graphs_of(values).keys() == {"few"}


@pytest.fixture
def encoded(nb: Notebook, other: Other, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """Names that are encoded, on both sides, around a cell on the device."""
    monkeypatch.setattr(codec.Encoding, "run", codec.Encoding.run)  # as it is now it will be again
    here = note_encoded()

    def around(cell: str) -> set[str]:
        here.clear()
        other.ask("encoded")
        assert nb.there(cell) is None
        return {name for name in here | other.ask("encoded") if name.isidentifier()}

    return around


ALL: Final = "(Square, square, chain, record, Color, Pair, part, dist, fib, up, look, counted, space, number)"


def test_what_is_unchanged_is_not_encoded(nb: Notebook, encoded: Callable[[str], set[str]]) -> None:
    assert nb.here(SOURCE) is None
    encoded(f"ran = {ALL}\nran = 1")
    assert encoded(f"ran = {ALL}\nran = 3") == {"ran"}
    assert nb.sent.parcels == []
    assert [one.names for one in nb.came.parcels] == [("ran",)]


def test_a_change_is_sent_and_nothing_beside_it(nb: Notebook, encoded: Callable[[str], set[str]]) -> None:
    nb.here(SOURCE)
    encoded(f"{ALL}")
    nb.here("space.x.append(5)")
    assert encoded(f"assert space.x == [1, 5]; {ALL}") == {"space"}
    assert encoded(f"space.x.append(6); {ALL}") == {"space"}
    assert nb.names["space"].x == [1, 5, 6]
    nb.here("up(2)")
    assert encoded(f"assert look()[0] == 6; up(1); {ALL}") == {"up", "look"}
    assert nb.names["look"]()[0] == 9
    assert encoded(f"Color.shown = lambda self: 'new'; {ALL}") == {"Color"}
    assert nb.names["Color"].RED.shown() == "new"
    nb.here("Square.__add__ = lambda self, other: 5")
    assert {"Square", "square", "chain"} <= encoded(f"assert square + square == 5; {ALL}")


def test_a_part_of_what_is_joined_is_not_encoded_either(nb: Notebook, encoded: Callable[[str], set[str]]) -> None:
    nb.here(SOURCE + "value = 7\ndef reads(): return value\nchain.append(reads)")
    encoded(f"{ALL}, value")
    assert encoded("square.n") == set()
    assert "value" not in nb.sent.names  # what another name of the group reads
    assert encoded("chain[-1]()") == set()
    assert "value" in nb.sent.names
    assert encoded("square.n = 5") >= {"square"}
    assert nb.names["chain"][0].n == 5


def test_a_new_holder_of_what_is_unchanged_shares_it(nb: Notebook, encoded: Callable[[str], set[str]]) -> None:
    nb.here(SOURCE)
    encoded("square")
    encoded("more = [square, Square]")
    assert nb.names["more"][0] is nb.names["square"]
    nb.here("again = [more[0]]")
    encoded("again[0].n = 11; assert more[0].n == 11 and square.n == 11")
    assert nb.names["square"].n == 11
    assert nb.names["again"][0] is nb.names["more"][0] is nb.names["square"]


def test_what_the_other_side_may_have_changed_is_encoded_again(
    nb: Notebook, encoded: Callable[[str], set[str]]
) -> None:
    nb.here(SOURCE)
    encoded("Square, fib")
    nb.space.invalidate({"Square"})
    assert encoded("Square, fib") == {"Square", "Base"}  # which it shares
    assert encoded("Square, fib") == set()
