"""What a program is made of: functions, classes, their instances, and what is related through them."""

from __future__ import annotations

from tests.notebook.kinds.kind import Kind, anew, travels

__all__ = ["FUNCTIONS", "RELATIONS"]

FUNCTIONS: list[Kind] = [
    travels(
        "a function of the notebook",
        "k = 2\ndef x(n, *, m=1): return n * k + m",
        "x(3) == 7 and x(3, m=0) == 6",
        "x.calls = 1; k = 10",
        "x(3) == 31 and x.calls == 1",
    ),
    travels("a lambda", "x = lambda n: n + 1", "x(1) == 2"),
    travels("a function that calls itself", "def x(n): return 1 if n < 2 else n * x(n - 1)", "x(5) == 120"),
    travels(
        "two functions that call each other",
        "def x(n): return n == 0 or y(n - 1)\ndef y(n): return n != 0 and x(n - 1)",
        "x(4) and not x(3)",
    ),
    travels(
        "a default that is kept between calls",
        "def x(n, seen=[]):\n    seen.append(n)\n    return len(seen)",
        "x.__name__ == 'x'",
        "x(1); x(2)",
        "x.__defaults__[0] == [1, 2]",
    ),
    travels(
        "a closure",
        "def make():\n    n = [0]\n    def up(): n[0] += 1; return n[0]\n    return up\nx = make()",
        "x.__closure__[0].cell_contents == [0]",
        "x(); x()",
        "x.__closure__[0].cell_contents == [2]",
    ),
    travels(
        "two closures over one variable",
        "def make():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
        "    def get(): return n\n    return up, get\nx, y = make()",
        "y() == 0",
        "x(); x()",
        "y() == 2 and not x() and y() == 3",
    ),
    travels(
        "a closure that another list holds",
        "def make(n):\n    def set_(v):\n        nonlocal n\n        n = v\n"
        "    return set_, lambda: n\nx, get = make(1); callbacks = [get]",
        "get() == 1",
        "x(5)",
        "callbacks[0]() == 5",
    ),
    travels(
        "a function with attributes",
        "def x(): return x.n\nx.n = y = [1]",
        "x() is y",
        "y.append(2)",
        "x() is y and y == [1, 2]",
    ),
    travels(
        "a function with annotations and a docstring",
        "def x(a: int) -> str:\n    'says'\n",
        "x.__doc__ == 'says' and x.__annotations__ == {'a': int, 'return': str}",
    ),
    travels(
        "a function whose annotations, docstring and name change",
        "def x(a: int) -> str:\n    'says'\ny = x.__annotations__; kept = [x]",
        "x.__annotations__ is y and list(y) == ['a', 'return']",
        "x.__annotations__['b'] = list; x.__doc__ = 'more'; x.__name__ = x.__qualname__ = 'z'",
        "x.__annotations__ is y and y['b'] is list and x is kept[0] "
        "and (x.__doc__, x.__name__, x.__qualname__) == ('more', 'z', 'z')",
    ),
    travels(
        "a function that gets and loses its annotations",
        "def x(a): return a\ndef y(a: int): return a",
        "not x.__annotations__ and y.__annotations__ == {'a': int}",
        "x.__annotations__['a'] = str; y.__annotations__.clear()",
        "x.__annotations__ == {'a': str} and not y.__annotations__",
    ),
    travels(
        "a class whose annotations change",
        "class x:\n    a: int = 1",
        "x.__annotations__ == {'a': int}",
        "x.__annotations__['b'] = str",
        "x.__annotations__ == {'a': int, 'b': str}",
    ),
    travels(
        "a decorated function",
        "import functools\nlog = []\ndef logged(f):\n    @functools.wraps(f)\n"
        "    def g(*a): log.append(a); return f(*a)\n    return g\n@logged\ndef x(n): return n",
        "x.__name__ == 'x'",
        "x(4)",
        "log == [(4,)]",
    ),
    travels(
        "a function that remembers",
        "import functools\n@functools.lru_cache(maxsize=5)\ndef x(n): return [n]",
        "x(1) == [1] and x.cache_parameters()['maxsize'] == 5",
        note="what it remembers stays where it is",
    ),
    travels(
        "a function that remembers and has attributes",
        "import functools\ndef y(n): return n\ny.w = [0]; x = functools.cache(y); x.calls = [1]; del x.w",
        "x.calls == [1] and x.__wrapped__.w == [0] and not hasattr(x, 'w')",
        "x.calls.append(2); x.n = x.__wrapped__.w",
        "x.calls == [1, 2] and x.n is x.__wrapped__.w and not hasattr(x, 'w')",
    ),
    travels(
        "functools.cache over a method",
        "import functools\nclass C:\n    @functools.cache\n    def f(self): return 5\nx = C()",
        "x.f() == 5",
    ),
    travels(
        "a cached property",
        "import functools\nclass C:\n    @functools.cached_property\n    def f(self): return [1]\nx = C()",
        "isinstance(x, C)",
        "x.f.append(2)",
        "x.f == [1, 2]",
    ),
    travels(
        "a function of many kinds",
        "import functools\n@functools.singledispatch\ndef x(v): return 'any'\n@x.register\ndef _(v: int): return 'int'",
        "x(1) == 'int' and x('a') == 'any'",
    ),
    travels(
        "an object of a library that holds a closure",
        "from tests.notebook.library import Value\nx = Value(1.0) + Value(2.0)",
        "x.data == 3.0 and len(x.children) == 2",
        "x.grad = 1.0; x._backward()",
        "x.grad == 1.0 and all(one.grad == 1.0 for one in x.children)",
    ),
    travels(
        "a function with a namespace of its own",
        "space_ = {}\nexec('n = [0]\\ndef f():\\n    n.append(1)\\n    return len(n)', space_)\n"
        "x = space_['f']\ndel space_",
        "x.__globals__['n'][0] == 0",
        "x()",
        "len(x.__globals__['n']) == 2",
    ),
    travels(
        "an object that refuses to be set",
        "class S:\n    def __setattr__(self, name, value):\n        raise AttributeError(name)\nx = S()\n"
        "x.__dict__['a'] = [1]",
        "x.a[0] == 1",
        "x.__dict__['a'].append(2); x.__dict__['b'] = 3",
        "x.a == [1, 2] and x.b == 3",
    ),
    anew(
        "an object of a library that frees memory at its end",
        "from tests.notebook.library import Native\nx = Native([1, 2])",
        "x.numbers == [1, 2]",
        "x.numbers.append(3)",
        "x.numbers == [1, 2, 3] and __import__('gc').collect() >= 0 and x.numbers == [1, 2, 3]",
    ),
    travels(
        "an accessor of a library",
        "from tests.notebook.library import Accessor\ny = [1]; x = Accessor(y)",
        "x.owner is y",
        "x.memo['k'] = x.owner",
        "x.memo['k'] is y",
    ),
    travels(
        "a mock and its calls",
        "from unittest import mock\nx = mock.MagicMock(return_value=3); x.a.b(1, k=2)",
        "x() == 3 and x.a.b.call_args == mock.call(1, k=2)",
    ),
    travels(
        "a class with an attribute that equals its base's",
        "class B:\n    n = 1\nclass C(B):\n    n = 1\nx = C",
        "'n' in vars(x)",
        "B.n = 5",
        "x.n == 1",
    ),
    travels(
        "a class that registers subclasses",
        "made = []\nclass B:\n    def __init_subclass__(cls):\n        made.append(cls)\nclass x(B):\n    pass",
        "made == [x] and issubclass(x, B)",
    ),
    travels(
        "a class of a class that registers",
        "made = []\nclass M(type):\n    def __new__(m, *a, **k):\n        made.append(a[0])\n"
        "        return super().__new__(m, *a, **k)\nclass x(metaclass=M):\n    pass",
        "made == ['x'] and type(x) is M",
    ),
    travels(
        "a type variable",
        "import typing\nx = typing.TypeVar('x')",
        "x.__module__ == '__main__'",
    ),
    travels(
        "a partial function",
        "import functools\ny = []; x = functools.partial(lambda a, b: a.append(b), y)",
        "x.args[0] is y",
        "x(1)",
        "y == [1] and x.args[0] is y",
    ),
    travels(
        "a bound method",
        "class C:\n    n = 0\n    def up(self): self.n += 1\ny = C(); x = y.up",
        "x.__self__ is y",
        "x()",
        "y.n == 1 and x.__self__ is y",
    ),
    travels(
        "a method of a list", "y = [1]; x = y.append", "x.__self__ is y", "x(2)", "y == [1, 2] and x.__self__ is y"
    ),
    travels(
        "class methods and static methods",
        "class C:\n    @classmethod\n    def c(cls): return cls\n    @staticmethod\n"
        "    def s(): return 5\nx = (C.c, C.s)",
        "x[0]() is C and x[1]() == 5",
    ),
    travels(
        "a function with await",
        "async def f(): return 3\nimport asyncio\nx = f",
        "asyncio.iscoroutinefunction(x) or True",
    ),
    travels("a generator function", "def x(n):\n    while n:\n        yield n\n        n -= 1", "list(x(2)) == [2, 1]"),
    travels("code", "x = compile('1 + 1', 'c', 'eval')", "eval(x) == 2"),
    travels(
        "functions in a dict",
        "x = {'f': lambda n: n * 2, 'g': max}",
        "x['f'](2) == 4 and x['g'](1, 2) == 2",
        "x['h'] = x['f']",
        "x['h'] is x['f'] and x['h'](1) == 2",
    ),
    travels(
        "a context manager's function",
        "import contextlib\nlog = []\n@contextlib.contextmanager\ndef x():\n    log.append(1)\n"
        "    yield 5\n    log.append(2)",
        "callable(x)",
        "with x() as got: pass",
        "log == [1, 2]",
    ),
]

RELATIONS: list[Kind] = [
    travels("two names of one object", "x = []; y = x", "x is y", "y.append(1)", "x is y and x == [1]"),
    travels(
        "an object in two others",
        "z = [0]; x = {'k': z}; y = [z]",
        "x['k'] is y[0]",
        "x['k'].append(1)",
        "y[0] is z and z == [0, 1]",
    ),
    travels("a list that holds itself", "x = [1]; x.append(x)", "x[1] is x", "x.append(2)", "x[1] is x and x[2] == 2"),
    travels(
        "a cycle through a tuple",
        "y = []; x = (y,); y.append(x)",
        "x[0][0] is x",
        "y.append(1)",
        "x[0][0] is x and y[1] == 1",
    ),
    travels(
        "a dict that holds itself", "x = {}; x['me'] = x", "x['me'] is x", "x['v'] = 1", "x['me'] is x and x['v'] == 1"
    ),
    travels(
        "a callback that holds a list",
        "x = [1]; f = lambda: x[0]; g = (lambda v: lambda: v[0])(x)",
        "f() == g() == 1",
        "x[0] = 5",
        "f() == g() == 5",
    ),
    travels(
        "a callback in a dict that no cell reads",
        "x = {'n': 1}\nclass Button: pass\nb = Button(); b.clicked = lambda d=x: d['n']",
        "x['n'] == 1",
        "x['n'] = 2",
        "b.clicked() == 2",
    ),
    travels(
        "a key that is an object",
        "class K: pass\ny = K(); x = {y: 1}",
        "x[y] == 1",
        "x[y] = 2; y.a = 1",
        "x[y] == 2 and next(iter(x)) is y",
    ),
    travels(
        "an object in a frozen set",
        "class K: pass\ny = K(); x = frozenset([y])",
        "y in x",
        "y.a = 1",
        "y in x and next(iter(x)).a == 1",
    ),
    travels(
        "an observer and what it observes",
        "class S:\n    def __init__(self): self.seen = []; self.on = []\n"
        "    def fire(self, v):\n        for f in self.on: f(v)\nx = S(); x.on.append(x.seen.append)",
        "x.on[0].__self__ is x.seen",
        "x.fire(1)",
        "x.seen == [1] and x.on[0].__self__ is x.seen",
    ),
    travels(
        "a tree with parents",
        "class N:\n    def __init__(self, p=None):\n        self.p = p; self.c = []\n        if p: p.c.append(self)\n"
        "x = N(); y = N(x); z = N(y)",
        "z.p.p is x",
        "N(z)",
        "x.c[0] is y and y.c[0].c[0].p is z",
    ),
    travels(
        "a graph in a dict",
        "a, b = {}, {}\na['b'] = b; b['a'] = a; x = {'a': a, 'b': b}",
        "x['a']['b']['a'] is a",
        "x['c'] = x['a']",
        "x['c'] is a and a['b'] is b",
    ),
    anew("a large text that is built up", "x = ['a' * 300_000]", "len(x[0]) == 300_000"),
    travels(
        "a slice of a list is a list of its own",
        "y = [[0], 1]; x = y[:1]",
        "x[0] is y[0] and x is not y",
        "x.append(5); x[0].append(1)",
        "y == [[0, 1], 1] and x == [[0, 1], 5] and x[0] is y[0]",
    ),
    travels("the same text in many places", "x = ['ab' * 10] * 3", "x[0] == x[2]"),
]
