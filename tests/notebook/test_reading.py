"""What a cell reads and binds."""

from __future__ import annotations

import ast
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.notebook.reading import Reading, names_of, read_cell
from tests.examples import examples

READS = [
    ("x", "x", ""),
    ("x = 1\nx", "", "x"),
    ("x += 1", "x", "x"),
    ("x: int = y", "int y", "x"),
    ("x: int", "int", ""),
    ("del x", "", "x"),
    ("x = 1\ndel x", "", "x"),
    ("x = 1\ndel x\nx", "x", "x"),
    ("a.b = c", "a c", ""),
    ("a[i] = 1", "a i", ""),
    ("if a:\n    x = 1\nx", "a x", "x"),
    ("if a:\n    x = 1\nelse:\n    x = 2\nx", "a", "x"),
    ("for i in xs:\n    y = i\ni", "xs i", "i y"),
    ("while a:\n    b = 1\nb", "a b", "b"),
    ("try:\n    x = f()\nexcept E as e:\n    x = 2\nx", "f E x", "x e"),
    ("try:\n    x = f()\nexcept E as e:\n    x = e\ne", "f E e", "x e"),
    ("try:\n    pass\nfinally:\n    x = 1\nx", "", "x"),
    ("with open(p) as f:\n    d = f.read()\nd", "open p d", "f d"),
    ("import a.b as c, d.e\nc, d", "", "c d"),
    ("from m import n as o\no", "", "o"),
    ("def f(a, b=c, *, d: T = 1) -> R:\n    return a + g + k", "c T R g k", "f"),
    ("def f():\n    f()", "f", "f"),
    ("f = lambda x, y=z: x + y + w", "z w", "f"),
    ("def f():\n    global n\n    n = 1", "n", "f n"),
    ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = h\n    return g", "h", "f"),
    ("[x for x in xs if p(x)]", "xs p", ""),
    ("{k: v for k, v in d.items() for w in v}", "d", ""),
    ("any((last := x) for x in xs)\n", "any xs", "last"),
    ("[y for x in xs for y in x(z)]", "xs z", ""),
    ("class C(B, metaclass=M):\n    a = v\n    def m(self):\n        return a + u", "B M v a u", "C"),
    ("class C:\n    x = x", "x", "C"),
    ("def f():\n    class D:\n        y = q\n        def m(self): return r\n    return D", "q r", "f"),
    (
        "match v:\n  case {'k': a, **rest}: pass\n  case [b, *c]: pass\n  case K(d) as e: pass",
        "v K",
        "a rest b c d e",
    ),
    ("await f(x)", "f x", ""),
    ("(y := g(x)) and y", "g x", "y"),
    ("a and (b := 1)\nb", "a b", "b"),
    ("print(f'{x!r:>{w}}')", "print x w", ""),
    ("x = y = z", "z", "x y"),
    ("(a, [b, *c]) = d", "d", "a b c"),
    ("async def f():\n    async with a as b:\n        async for c in d:\n            yield e", "a d e", "f"),
    ("@deco(k)\ndef f(): pass", "deco k", "f"),
    ("lambda: (lambda: z)", "z", ""),
    ("def f(x):\n    return [x + y for y in g]", "g", "f"),
    ("def f():\n    try: pass\n    except E as e: return e", "E", "f"),
    ("get_ipython().system('ls {folder} $HOME')", "get_ipython folder HOME", ""),
    ("get_ipython().run_cell_magic('bash', '--out {a}', 'echo $x')", "get_ipython a", ""),
    ("get_ipython().run_line_magic('time', 'f(x)')", "get_ipython f x", ""),
    ("get_ipython().run_cell_magic('time', '', 'y = f(x)\\ny\\n')", "get_ipython f x", "y"),
    ("get_ipython().run_line_magic('pinfo', 'f.x')", "get_ipython f", ""),
    ("get_ipython().run_line_magic('timeit', '-n 1 -r 1 f(x)')", "get_ipython f x r", None),
]


@pytest.mark.parametrize(("source", "reads", "binds"), READS, ids=[one[0] for one in READS])
def test_what_a_cell_reads_and_binds(source: str, reads: str, binds: str | None) -> None:
    reading = read_cell(source)
    if binds is not None:
        assert (set(reading.reads), set(reading.binds)) == (set(reads.split()), set(binds.split()))
        assert not reading.opaque


@pytest.mark.parametrize(
    "source",
    [
        "exec(t)",
        "y = eval(t)",
        "globals()['x']",
        "locals()",
        "vars()",
        "dir()",
        "def f():\n    return globals()",
        "get_ipython().run_line_magic('run', 'other.py')",
        "get_ipython().run_cell_magic('mine', '', 'x')",
        "get_ipython().run_line_magic('who', '')",
        "get_ipython().run_line_magic('psearch', 'f*')",
        "f = lambda: eval(t)",
        "[eval(x) for x in xs]",
    ],
)
def test_what_reaches_any_name_is_said_with_its_line(source: str) -> None:
    reading = read_cell("a = 1\n" + source)
    assert reading.opaque
    assert all(one.line >= 2 for one in reading.opaque)


@pytest.mark.parametrize(
    "source",
    [
        "vars(x)",
        "dir(x)",
        "compile(x, '', 'exec')",
        "x.eval()",
        "get_ipython().run_cell_magic('bash', '--out said', 'echo $x')",
        "get_ipython().run_cell_magic('html', '', 'x')",
    ],
)
def test_what_only_looks_like_it_is_not(source: str) -> None:
    assert not read_cell(source).opaque


@pytest.mark.parametrize(
    ("source", "deletes"),
    [
        ("del x", "x"),
        ("x = 1\ndel x", "x"),
        ("del x, y", "x y"),
        ("x.plot()\ndel x", ""),
        ("del x\nx", ""),
        ("if y: del x", "x"),
        ("try: f()\nexcept E as x: pass", "x"),
        ("try: f()\nexcept E as x: pass\nx", ""),
        ("del x[0]", ""),
        ("get_ipython().run_line_magic('time', 'del x')", "x"),
        ("def f():\n    global x\n    del x", ""),
    ],
)
def test_what_is_only_deleted_is_not_read(source: str, deletes: str) -> None:
    assert read_cell(source).deletes == frozenset(deletes.split())


def test_a_cell_that_is_no_python_says_so() -> None:
    with pytest.raises(SyntaxError):
        read_cell("x = = 1")


def test_what_functions_read() -> None:
    space: dict[str, object] = {}
    exec("def f(a):\n    def g(): return deep + a.attribute\n    return g() + one\n", space)  # noqa: S102
    assert names_of(space["f"].__code__) == (frozenset({"deep", "one"}), False)  # type: ignore[attr-defined]
    exec("def h(): return globals()['x']", space)  # noqa: S102
    assert names_of(space["h"].__code__)[1]  # type: ignore[attr-defined]


class _Watched(dict[str, object]):
    """A namespace that notes which names were asked for before they were bound."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys("abcdef", 1))
        self.asked: set[str] = set()
        self.bound: set[str] = set()

    def __getitem__(self, name: str) -> object:
        if name not in self.bound:
            self.asked.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.bound.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)


names = st.sampled_from("abcdef")
atoms = st.one_of(names, st.sampled_from(["0", "1"]))
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "and", "or", "<"]), inner).map(" ".join).map("({})".format),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
        st.tuples(names, inner).map(lambda t: f"({t[0]} := {t[1]})"),
        st.tuples(inner, names, names).map(lambda t: f"[{t[0]} for {t[1]} in (1, 2) if {t[2]}]"),
    ),
    max_leaves=6,
)


@st.composite
def statements(draw: st.DrawFn, depth: int = 2) -> list[str]:
    def inner() -> list[str]:
        return ["    " + line for line in draw(statements(depth=depth - 1))]

    kind = draw(st.integers(0, 7 if depth else 2))
    match kind:
        case 0:
            return [f"{draw(names)} = {draw(expressions)}"]
        case 1:
            return [draw(expressions)]
        case 2:
            return [f"{draw(names)} += 1"]
        case 3:
            return [f"if {draw(expressions)}:", *inner(), "else:", *inner()]
        case 4:
            return [f"for {draw(names)} in range({draw(st.integers(0, 2))}):", *inner()]
        case 5:
            return ["try:", *inner(), "except Exception:", *inner(), "finally:", *inner()]
        case 6:
            return [f"class {draw(names)}:", *inner()]
        case _:
            return [*draw(statements(depth=depth - 1)), *draw(statements(depth=depth - 1))]


def test_nothing_is_read_that_was_not_told() -> None:
    met: set[str] = set()

    @settings(max_examples=examples(100), deadline=None)
    @given(statements(depth=3))
    def holds(lines: list[str]) -> None:
        source = "\n".join(lines)
        try:
            reading = read_cell(source)
        except SyntaxError:  # a walrus where none may be
            return
        met.update(type(node).__name__ for node in ast.walk(ast.parse(source)))
        _is_told(source, reading)

    holds()
    statement = {"Assign", "Expr", "AugAssign", "If", "For", "Try", "ClassDef"}
    assert met >= statement | {"BinOp", "BoolOp", "Compare", "IfExp", "NamedExpr", "ListComp"}


def _is_told(source: str, reading: Reading) -> None:
    space = _Watched()
    with contextlib.suppress(Exception):  # it may be nonsense; what it asked for until then counts all the same
        exec(compile(source, "<cell>", "exec"), {"range": range, "Exception": Exception}, space)  # noqa: S102
    builtin = {"range", "Exception"}
    assert space.asked - builtin - {name for name in space.asked if name.startswith("__")} <= reading.reads
    assert {name for name in space.bound if not name.startswith("__")} <= reading.binds


@pytest.mark.parametrize(
    ("source", "is_quiet"),
    [
        ("f(x);", True),
        ("f(x) ;  # drawn\n\n# that is all", True),
        ("if x:\n    f(x);\n", True),
        ("f(x); g(x)", False),
        ("f(';')", False),
        ("f(x)  # ;", False),
        ("'a;'", False),
        ("", False),
    ],
)
def test_a_semicolon_at_the_end_says_that_no_value_is_wanted(source: str, is_quiet: bool) -> None:
    assert read_cell(source).is_quiet is is_quiet
