"""Classes, and what they make."""

from __future__ import annotations

from tests.notebook.kinds.kind import Kind, refused, travels

__all__ = ["CLASSES"]

CLASSES: list[Kind] = [
    travels(
        "an instance",
        "class C:\n    def __init__(self): self.v = []\nx = C(); y = x.v",
        "x.v is y",
        "x.v.append(1); x.w = y",
        "x.v is x.w is y and y == [1] and type(x) is C",
    ),
    travels(
        "an attribute that goes",
        "class C: pass\nx = C(); x.a = 1",
        "x.a == 1",
        "del x.a; x.b = 2",
        "vars(x) == {'b': 2}",
    ),
    travels(
        "a class with a counter",
        "class x:\n    made = 0\n    def __init__(self): x.made += 1",
        "x.made >= 0",
        "x(); x()",
        "x.made == 2",
    ),
    travels(
        "a class that loses an attribute",
        "class x:\n    a = 1; b = []",
        "x.a == 1",
        "del x.a; x.b.append(1); x.c = 3",
        "not hasattr(x, 'a') and x.b == [1] and x.c == 3",
    ),
    travels(
        "a class that gets a method", "class x: pass\ny = x()", "isinstance(y, x)", "x.f = lambda self: 5", "y.f() == 5"
    ),
    travels(
        "a class that shares a list",
        "y = []\nclass x:\n    v = y",
        "x.v is y",
        "x.v.append(1)",
        "x.v is y and y == [1]",
    ),
    travels(
        "classes that inherit",
        "class A:\n    def f(self): return 1\nclass B(A):\n    def f(self): return super().f() + 1\nx = B()",
        "x.f() == 2 and isinstance(x, A)",
    ),
    travels(
        "an abstract class",
        "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\nclass C(A):\n"
        "    def f(self): return 5\nx = C()",
        "x.f() == 5 and isinstance(x, A)",
    ),
    travels(
        "a class of another class",
        "class M(type):\n    def __len__(cls): return 7\nclass x(metaclass=M): pass",
        "len(x) == 7 and type(x) is M",
    ),
    travels(
        "a class with slots",
        "class C:\n    __slots__ = ('a', 'b')\nx = C(); x.a = y = []",
        "x.a is y and not hasattr(x, 'b')",
        "x.a.append(1); x.b = 2",
        "x.a is y and y == [1] and x.b == 2",
    ),
    travels(
        "a slot that is emptied",
        "class C:\n    __slots__ = ('a',)\nx = C(); x.a = 1",
        "x.a == 1",
        "del x.a",
        "not hasattr(x, 'a')",
    ),
    travels(
        "a data class",
        "from dataclasses import dataclass, field\n@dataclass\nclass C:\n    a: int = 1\n"
        "    b: list = field(default_factory=list)\nx = C()\nfrom dataclasses import asdict, replace",
        "asdict(x) == {'a': 1, 'b': []} and replace(x, a=2) == C(2) and len(dataclass(type('D', (C,), {}))().b) == 0",
        "x.b.append(1)",
        "x == C(b=[1]) and type(x) is C",
    ),
    travels(
        "a data class within a class, and a class within a function",
        "from dataclasses import dataclass\nclass C:\n    @dataclass\n    class D:\n        a: int\n"
        "def f():\n    class L:\n        __slots__ = ()\n    return L\nx = [C.D(1), f()]",
        "repr(x[0]) == 'C.D(a=1)' and x[1].__qualname__ == 'f.<locals>.L' and x[1].__name__ == 'L'",
        "x[0].a = 2",
        "repr(x[0]) == 'C.D(a=2)' and type(x[0]) is C.D",
    ),
    travels(
        "a frozen data class with slots",
        "from dataclasses import dataclass\n@dataclass(frozen=True, slots=True)\nclass C:\n"
        "    a: list\ny = []; x = C(y)",
        "x.a is y",
        "x.a.append(1)",
        "x.a is y and y == [1]",
    ),
    travels(
        "a frozen data class with slots, with objects of its own as attributes",
        "from dataclasses import dataclass\nfrom typing import ClassVar\n@dataclass(frozen=True, slots=True)\n"
        "class C:\n    a: int\n    zero: ClassVar['C']\n    def twice(self): return C(self.a * 2)\n"
        "C.zero = C(0); C.known = {C(1), C(2)}; x = C(3)",
        "C.zero == C(0) and C(2) in C.known and x.twice() == C(6) and type(C.zero) is C",
        "C.one = C(1)",
        "C.one in C.known and list(vars(C)).index('twice') < list(vars(C)).index('zero')",
    ),
    travels(
        "a class that keeps its objects in a set, with a hash of its own",
        "class C:\n    all = set()\n    def __init__(self, a): self.a = a; C.all.add(self)\n"
        "    def __hash__(self): return hash(self.a)\n    def __eq__(self, other): return self.a == other.a\n"
        "x = C(1); C(2)",
        "len(C.all) == 2 and x in C.all",
        "C(2); C(3)",
        "len(C.all) == 3 and x in C.all and C(2) in C.all",
    ),
    travels(
        "an enumeration",
        "import enum\nclass C(enum.Enum):\n    RED = 1\n    BLUE = 2\nx = C.RED",
        "x is C.RED and C(2) is C.BLUE",
    ),
    travels(
        "enumerations whose members have attributes, or contents that the program makes",
        "import dataclasses, enum\nclass P(enum.Enum):\n    EARTH = 6, 2\n"
        "    def __init__(self, mass, size): self.mass, self.size = mass, size\n"
        "class B(bytes, enum.Enum):\n    def __new__(cls, n, unit):\n"
        "        made = bytes.__new__(cls, [n]); made._value_, made.unit = n, unit; return made\n    X = 7, 'px'\n"
        "@dataclasses.dataclass\nclass D:\n    w: int\nclass E(D, enum.Enum):\n    S = 3\nx = [P.EARTH, B.X, E.S]",
        "x[0].mass == 6 and x[1] == b'\\7' and x[1] is B(7) and x[1].unit == 'px' and x[2] is E.S and E.S.w == 3",
        "x[0].mass += 1; x[0].tag = x; del x[1].unit",
        "P.EARTH.mass == 7 and P.EARTH.tag is x and not hasattr(B.X, 'unit') and x[2] is E.S",
    ),
    travels(
        "flags",
        "import enum\nclass C(enum.Flag):\n    A = enum.auto()\n    B = enum.auto()\nx = C.A | C.B",
        "C.A in x and x == C(3)",
    ),
    travels(
        "an enumeration and flags with second names",
        "import enum\nclass C(enum.Enum):\n    RED = 1\n    CRIMSON = 1\n    BLUE = 2\n"
        "class P(enum.Flag):\n    R = enum.auto()\n    W = enum.auto()\n    RW = R | W\nx = y = P.RW, C.CRIMSON",
        "list(C.__members__) == ['RED', 'CRIMSON', 'BLUE'] and C['CRIMSON'] is C.RED and x[1] is C.RED "
        "and x[0] is P.RW is P['RW'] and P.RW.name == 'RW' and len(C) == 2",
    ),
    travels(
        "a property",
        "class C:\n    @property\n    def a(self): return self._a\n    @a.setter\n    def a(self, v): self._a = v * 2\n"
        "x = C(); x.a = 1",
        "x.a == 2",
        "x.a = 5",
        "x.a == 10",
    ),
    travels(
        "a descriptor",
        "class D:\n    def __set_name__(self, o, n): self.n = '_' + n\n    def __get__(self, i, o): "
        "return getattr(i, self.n, 0)\n    def __set__(self, i, v): setattr(i, self.n, v + 1)\n"
        "class C:\n    a = D()\nx = C()",
        "x.a == 0",
        "x.a = 5",
        "x.a == 6",
    ),
    travels(
        "a class that says what its state is",
        "class C:\n    def __init__(self, n): self.n = n; self.cache = object()\n"
        "    def __getstate__(self): return self.n\n    def __setstate__(self, n): self.n = n; self.cache = None\n"
        "x = C(3)",
        "x.n == 3",
        "x.n = 4",
        "x.n == 4",
    ),
    travels(
        "a class that says how it is made",
        "class C:\n    def __init__(self, n): self.n = n\n    def __reduce__(self): return C, (self.n,)\nx = C(3)",
        "x.n == 3",
        "x.n = 4",
        "x.n == 4",
    ),
    travels(
        "equal to everything, hash of nothing",
        "class C:\n    __hash__ = None\n    def __eq__(self, o): return True\nx = C()",
        "x == 5 and type(x) is C",
        "x.a = 1",
        "x.a == 1",
    ),
    travels(
        "an object without a truth value",
        "class C:\n    v = 1\n    def __bool__(self): raise TypeError\n"
        "    def __len__(self): raise TypeError\n    def __eq__(self, o): raise TypeError\n"
        "    __hash__ = object.__hash__\nx = C()",
        "x.v == 1",
        "x.v = 2",
        "x.v == 2",
    ),
    travels(
        "an object that has every attribute",
        "class C:\n    def __getattr__(self, n):\n"
        "        if n.startswith('__'): raise AttributeError(n)\n        return n\nx = C()",
        "x.abc == 'abc'",
        "x.abc = 1",
        "x.abc == 1",
    ),
    travels(
        "objects with cycles",
        "class N: pass\nx = N(); x.me = x; x.other = y = N(); y.other = x",
        "x.me is x and x.other.other is x",
        "x.v = y.v = []",
        "x.me is x and x.other is y and y.other is x and x.v is y.v",
    ),
    travels(
        "a linked list of 200",
        "class N: pass\nx = N(); x.next = None; x.v = 0\nfor n in range(200):\n    y = N(); y.next = x; y.v = n; x = y"
        "\ndel y, n",
        "x.v == 199",
        "x.next.v = -1",
        "x.next.v == -1",
    ),
    travels(
        "a linked list of 3,000",
        "class N: pass\nx = N(); x.next = None; x.v = 0\nfor n in range(3000):\n    y = N(); y.next = x; y.v = n; x = y"
        "\ndel y, n",
        "x.v == 2999 and x.next.next.v == 2997",
        "x.next.v = -1",
        "x.next.v == -1",
    ),
    travels(
        "a generic class",
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass C(Generic[T]):\n"
        "    def __init__(self, v): self.v = v\nx = C[int](5)",
        "x.v == 5 and isinstance(x, C)",
        "x.v = 6",
        "x.v == 6",
    ),
    travels(
        "a protocol",
        "from typing import Protocol, runtime_checkable\n@runtime_checkable\nclass P(Protocol):\n    def f(self): ...\n"
        "class C:\n    def f(self): return 1\nx = C()",
        "isinstance(x, P)",
    ),
    travels(
        "a new type of typing",
        "from typing import NewType\nx = NewType('UserId', int)",
        "x(5) == 5 and x.__supertype__ is int",
    ),
    travels(
        "a typed dict",
        "from typing import TypedDict\nclass C(TypedDict):\n    a: int\nx = C(a=1)",
        "x == {'a': 1}",
        "x['a'] = 2",
        "x['a'] == 2",
    ),
    travels(
        "an exception",
        "x = ValueError('said', 1); x.y = y = [1]",
        "x.args == ('said', 1) and x.y is y",
        "y.append(2)",
        "x.y is y and y == [1, 2]",
    ),
    travels(
        "an exception with its cause",
        "try:\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n        raise KeyError('k') from e\n"
        "except KeyError as e:\n    x = e",
        "isinstance(x.__cause__, ZeroDivisionError) and x.args == ('k',)",
        note="its traceback stays where it was raised",
    ),
    travels(
        "an exception with notes",
        "x = ValueError('v'); x.add_note('n')",
        "x.__notes__ == ['n']",
        "x.add_note('m')",
        "x.__notes__ == ['n', 'm']",
    ),
    travels(
        "a group of exceptions",
        "x = ExceptionGroup('g', [ValueError('v'), OSError(2, 'n', 'f')])",
        "x.exceptions[1].filename == 'f' and x.message == 'g'",
    ),
    travels(
        "a group of exceptions that others hold",
        "y = KeyError(1); y.of = [2]; x = [ExceptionGroup('g', [y, OSError(2, 'no')]), y]",
        "x[0].exceptions[0] is x[1]",
        "x[0].exceptions[0].of.append(3); x[1].n = 4; x.append(ExceptionGroup('h', [x[1]]))",
        "x[0].exceptions[0] is x[1] is x[2].exceptions[0] and x[1].of == [2, 3] and x[1].n == 4",
    ),
    travels(
        "an exception of one's own",
        "class E(Exception):\n    def __init__(self, a, b=0):\n        super().__init__(a)\n        self.b = b\n"
        "x = E(1, b=2)",
        "x.args == (1,) and x.b == 2 and type(x) is E",
        "x.b = 3",
        "x.b == 3",
    ),
    travels(
        "an exception whose __init__ wants other arguments",
        "class E(Exception):\n    def __init__(self, a, b):\n        super().__init__(f'{a}{b}')\n        self.b = b\n"
        "x = E(1, 2); x.__cause__ = KeyError('k')",
        "str(x) == '12' and x.b == 2 and x.args == ('12',) and type(x.__cause__) is KeyError",
        "x.b = 3",
        "x.b == 3",
    ),
    refused(
        "an exception that cannot be put together",
        "class E(SystemExit):\n    def __init__(self, a, b): super().__init__(f'{a}{b}')\nx = E(1, 2)",
        "E.__init__() missing 1 required positional argument",
        "str(x) == '12'",
    ),
    refused(
        "an object whose state cannot be had",
        "class C:\n    def __reduce__(self): raise RuntimeError('no state')\nx = C()",
        "no state",
    ),
    refused(
        "an object that cannot be put together",
        "class C:\n    def __setstate__(self, s): raise RuntimeError('not that')\nx = C(); x.a = 1",
        "not that",
        "x.a == 1",
    ),
    travels(
        "a random generator",
        "import random\nx = random.Random(5); y = random.Random(5)",
        "x.getstate() == y.getstate()",
        "z = [x.random(), x.gauss()]",
        "z == [y.random(), y.gauss()] and x.getstate() == y.getstate()",
    ),
    travels(
        "a text in memory",
        "import io\nx = io.StringIO('ab'); _n = x.read(1)",
        "x.tell() == 1 and x.getvalue() == 'ab'",
        "x.seek(0, 2); x.write('c')",
        "x.getvalue() == 'abc' and x.tell() == 3",
    ),
    travels(
        "bytes in memory",
        "import io\nx = io.BytesIO(b'ab')",
        "x.getvalue() == b'ab'",
        "x.write(b'z')",
        "x.getvalue() == b'zb'",
    ),
    travels("a struct", "import struct\nx = struct.Struct('<i')", "x.size == 4 and x.unpack(x.pack(7)) == (7,)"),
    travels(
        "a parser of arguments",
        "import argparse\nx = argparse.ArgumentParser(); _a = x.add_argument('--n', type=int)",
        "x.parse_args(['--n', '5']).n == 5",
    ),
    travels(
        "a module made by hand",
        "import types\nx = types.ModuleType('by_hand'); x.v = [1]",
        "x.v == [1]",
        "x.v.append(2); x.w = 3",
        "x.v == [1, 2] and x.w == 3",
    ),
    travels(
        "an object that is given another class",
        "class A:\n    v = 1\nclass B(A):\n    v = 2\nx = A(); x.n = [1]; y = [x]",
        "y[0] is x and x.v in (1, 2)",
        "x.__class__ = B; x.m = 5",
        "y[0] is x and type(x) is B and x.v == 2 and (x.m, x.n) == (5, [1])",
    ),
    travels(
        "a number, a tuple, a set and a list of one's own that change what they are given",
        "import collections\nclass N(float):\n    def __new__(cls, n): return super().__new__(cls, 2 * n)\n"
        "class T(collections.namedtuple('T', 'a b')):\n"
        "    def __new__(cls, a, b): return super().__new__(cls, 2 * a, b)\n"
        "class F(frozenset):\n    def __new__(cls, *items): return super().__new__(cls, items)\n"
        "class S(set):\n    def __init__(self, *items): super().__init__(items)\n"
        "class L(list):\n    def extend(self, items):\n        for one in items: self.append(one * 2)\n"
        "x = [N(1), T(1, []), F(1, 2), S(1, 2), L([3])]; x[4].me = x[4]",
        "x[0] == x[1].a == 2 and x[2] == x[3] == {1, 2} and x[4] == [3] and x[4].me is x[4]",
        "x[1].b.append(N(2)); x[3].add(3); x[4].append(4); x[3].w = 1",
        "x[0] == 2 and x[1] == (2, [4]) and x[3] == {1, 2, 3} and x[4] == [3, 4] and x[3].w == 1",
    ),
    travels(
        "an object that there is only one of, and a class that keeps and counts its objects",
        "class C:\n    _one = None\n    def __new__(cls):\n        if C._one is None: C._one = super().__new__(cls)\n"
        "        return C._one\nclass K:\n    all = []\n    made = 0\n    def __new__(cls):\n        K.made += 1\n"
        "        K.all.append(super().__new__(cls))\n        return K.all[-1]\nx = [C(), K()]; x[0].n = 1",
        "x[0] is C() and K.all == [x[1]] and K.made == 1",
        "x[0].n += 1; x.append(K())",
        "x[0] is C() and x[0].n == 2 and K.all == x[1:] and K.made == 2",
    ),
    travels(
        "a named tuple with a default that holds others of it",
        "import collections, typing\nclass N(typing.NamedTuple):\n    n: int\n    kids: list = []\n"
        "P = collections.namedtuple('P', 'a'); x = [N(1), P(1)]; x[0].kids.append(N(2))",
        "x[0].kids[0].kids is N(3).kids is x[0].kids and not hasattr(x[1], '__dict__')",
        "x[0].kids.append(x[1])",
        "N(4).kids[1] is x[1] and len(x[0].kids) == 2",
    ),
    travels("a nested class", "class O:\n    class I:\n        v = 1\nx = O.I()", "x.v == 1 and type(x) is O.I"),
    travels(
        "a class made by a function",
        "def make(n):\n    class C:\n        v = n\n    return C\nx = make(5)()",
        "x.v == 5",
        "x.w = 1",
        "x.w == 1 and x.v == 5",
    ),
]
