"""Values and containers that come with Python."""

from __future__ import annotations

from tests.notebook.kinds.kind import Kind, anew, by_name, refused, travels

__all__ = ["CONTAINERS", "ITERATORS", "VALUES"]

VALUES: list[Kind] = [
    travels("None, True, Ellipsis", "x = (None, True, ...)", "x == (None, True, ...) and x[2] is ..."),
    travels("an integer of any size", "x = 7 ** 500", "x == 7 ** 500"),
    travels("a float, also nan and inf", "x = [1.5, float('nan'), float('-inf')]", "x[1] != x[1] and x[0] == 1.5"),
    travels("a complex number", "x = 1 - 2j", "x == 1 - 2j"),
    travels("a text, also with half a surrogate pair", "x = 'ä\\ud800' * 3", "x == 'ä\\ud800' * 3"),
    travels("bytes, long ones too", "x = b'abc' * 200_000", "x == b'abc' * 200_000"),
    travels("a range, a slice", "x = (range(9), slice(1, None, 2))", "list(x[0])[x[1]] == [1, 3, 5, 7]"),
    travels("a decimal", "from decimal import Decimal\nx = Decimal('1.10')", "str(x) == '1.10'"),
    travels("a fraction", "from fractions import Fraction\nx = Fraction(2, 6)", "x == Fraction(1, 3)"),
    travels(
        "a date and a time delta",
        "import datetime as dt\nx = (dt.date(2024, 2, 29), dt.timedelta(1))",
        "x[0] + x[1] == dt.date(2024, 3, 1)",
    ),
    travels(
        "a time with a zone",
        "import datetime as dt, zoneinfo\nx = dt.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo('UTC'))",
        "x.utcoffset() == dt.timedelta(0)",
    ),
    travels(
        "a time with a fixed offset",
        "import datetime as dt\nx = dt.datetime(2024, 7, 1, tzinfo=dt.timezone(dt.timedelta(hours=2), 'here'))",
        "x.tzname() == 'here'",
    ),
    travels("a UUID", "import uuid\nx = uuid.UUID(int=5)", "x.int == 5"),
    travels("a path", "import pathlib\nx = pathlib.Path('a') / 'b'", "x.name == 'b' and x == pathlib.Path('a/b')"),
    travels(
        "an address of a network",
        "import ipaddress\nx = ipaddress.ip_network('10.0.0.0/8')",
        "ipaddress.ip_address('10.1.2.3') in x",
    ),
    travels("a regular expression", "import re\nx = re.compile('a(b)', re.I)", "x.match('AB')[1] == 'B'"),
    travels(
        "a match of a regular expression",
        "import re\nx = re.search(r'(?<=b)(?P<n>\\d+)(z)?', 'ab12'); y = [re.fullmatch('a|ab', 'ab'), "
        "*re.finditer('a|', 'ab')]",
        "x['n'] == '12' and x.regs == ((2, 4), (2, 4), (-1, -1)) and x.string == 'ab12' and x.lastgroup == 'n' "
        "and [one.span() for one in y] == [(0, 2), (0, 1), (1, 1), (2, 2)]",
    ),
    travels("a named tuple of the standard library", "import time\nx = time.gmtime(0)", "x.tm_year == 1970"),
    travels("a status of a file", "import os\nx = os.stat('/')", "x.st_size == os.stat('/').st_size"),
    by_name("a function of a library", "import json\nx = json.dumps", "x is json.dumps"),
    by_name("a function written in C", "import math\nx = math.sqrt", "x is math.sqrt"),
    by_name("a class of a library", "import collections\nx = collections.OrderedDict", "x is collections.OrderedDict"),
    by_name(
        "a module",
        "import json\nx = json",
        "x.loads('1') == 1",
        note="what a cell changes in a module stays on the device",
    ),
    by_name("a part of a package", "import os.path as x", "x.basename('a/b') == 'b'"),
    by_name(
        "a logger",
        "import logging\nx = logging.getLogger('n.m')",
        "x is logging.getLogger('n.m')",
        note="its handlers are those of the other side",
    ),
    by_name("NotImplemented and classes of exceptions", "x = (NotImplemented, KeyError)", "x[1] is KeyError"),
    travels("a type with parameters", "x = list[int] | None", "x == list[int] | None"),
    travels(
        "types of typing",
        "import typing\nx = typing.Callable[[int], typing.Any]",
        "x == typing.Callable[[int], typing.Any]",
    ),
]

CONTAINERS: list[Kind] = [
    travels("a list", "x = [1, [2]]", "x == [1, [2]]", "x[1].append(3); x.append(4)", "x == [1, [2, 3], 4]"),
    travels(
        "a dict, in its order",
        "x = {'b': 1, 'a': 2}",
        "list(x) == ['b', 'a']",
        "del x['b']; x['b'] = 3",
        "list(x.items()) == [('a', 2), ('b', 3)]",
    ),
    travels(
        "a dict with tuples for keys",
        "x = {(1, 'a'): [0]}",
        "x == {(1, 'a'): [0]}",
        "x[(1, 'a')].append(1)",
        "x == {(1, 'a'): [0, 1]}",
    ),
    travels("a set", "x = {1, 'a', (2,)}", "x == {1, 'a', (2,)}", "x.discard(1)", "x == {'a', (2,)}"),
    travels("a frozen set", "x = frozenset('ab')", "x == frozenset('ab')"),
    travels(
        "a tuple that holds a list",
        "y = []; x = (y, y)",
        "x[0] is x[1] is y",
        "x[0].append(1)",
        "x == ([1], [1]) and x[0] is y",
    ),
    travels("a byte array", "x = bytearray(b'ab')", "x == b'ab'", "x.extend(b'c'); x[0] = 0", "x == b'\\0bc'"),
    travels(
        "a deque with a bound",
        "from collections import deque\nx = deque([1, 2], maxlen=2)",
        "list(x) == [1, 2] and x.maxlen == 2",
        "x.append(3)",
        "list(x) == [2, 3]",
    ),
    travels(
        "an ordered dict",
        "from collections import OrderedDict\nx = OrderedDict(a=1, b=2)",
        "list(x) == ['a', 'b']",
        "x.move_to_end('a')",
        "list(x) == ['b', 'a'] and x.popitem(last=False)[0] == 'b' "
        "and not x.update(b=2) and not x.move_to_end('b', last=False)",
    ),
    travels(
        "a dict with a lambda for what is missing",
        "from collections import defaultdict\nx = defaultdict(lambda: [7])",
        "x.default_factory() == [7]",
        "x['k'].append(8)",
        "x['k'] == [7, 8]",
    ),
    travels(
        "a counter",
        "from collections import Counter\nx = Counter('aab')",
        "x['a'] == 2 and x['z'] == 0",
        "x.update('b')",
        "x['b'] == 2 and x['z'] == 0",
    ),
    travels(
        "a chain of dicts",
        "from collections import ChainMap\ny = {}; x = ChainMap(y, {'a': 1})",
        "x['a'] == 1 and x.maps[0] is y",
        "x['b'] = 2",
        "y == {'b': 2} and x.maps[0] is y",
    ),
    travels(
        "a user dict", "from collections import UserDict\nx = UserDict(a=1)", "x['a'] == 1", "x['a'] = 2", "x['a'] == 2"
    ),
    travels(
        "a simple namespace",
        "import types\ny = [1]; x = types.SimpleNamespace(a=y)",
        "x.a is y",
        "x.a.append(2); x.b = y",
        "x.b is x.a is y and y == [1, 2]",
    ),
    travels(
        "an array of the array module",
        "import array\nx = array.array('d', [1, 2])",
        "x.tolist() == [1, 2]",
        "x[0] = 5; x.append(3)",
        "x.tolist() == [5, 2, 3]",
    ),
    travels(
        "a view of a dict that cannot be written",
        "import types\ny = {'a': [1]}; x = types.MappingProxyType(y)",
        "x['a'] == [1]",
        "y['a'].append(2)",
        "x['a'] is y['a'] and x['a'] == [1, 2]",
    ),
    travels("the items of a dict", "y = {'a': [1]}; x = y.items()", "list(x) == [('a', [1])]"),
    travels("a memory view of bytes", "x = memoryview(b'abcd')[1:3]", "bytes(x) == b'bc' and x.readonly"),
    travels(
        "a memory view of a byte array",
        "y = bytearray(b'abcd'); x = memoryview(y)[1:3]",
        "bytes(x) == b'bc'",
        "x[0] = 0",
        "y == b'a\\0cd' and x.obj is y and bytes(x) == b'\\0c'",
    ),
    refused(
        "a namespace that exec has run code in",
        "x = {}; exec('a = 1\\ndef f(): return a', x)",
        "the names of a module, or a namespace that exec has run code in",
        "x['f']() == 1",
    ),
    refused(
        "the dict of a module",
        "import colorsys; x = vars(colorsys)",
        "the names of a module, or a namespace that exec has run code in",
        "x is vars(colorsys)",
    ),
    travels(
        "an ordered dict and a counter with attributes",
        "from collections import Counter, OrderedDict\nx = OrderedDict(a=1); x.me = x; x.c = y = Counter('ab')",
        "x.me is x and x['a'] == x.c['b'] == 1",
        "x.n = [2]; x['b'] = x.n; x.c.of = x.n",
        "x.me is x and x.n is x['b'] is x.c.of and x.n == [2]",
    ),
    travels(
        "a counter, a dict with defaults and a deque of one's own, which want other arguments",
        "from collections import Counter, defaultdict, deque\nclass V(Counter):\n"
        "    def __init__(self, text): super().__init__(text.split()); self.text = text\n"
        "class G(defaultdict):\n    def __init__(self): super().__init__(list); self.n = 0\n"
        "class H(deque):\n    def __init__(self, n): super().__init__((), n); self.all = []\n"
        "x = [V('a b a'), G(), H(2)]; x[2].all.append(x)",
        "x[0]['a'] == 2 and x[0].text == 'a b a' and x[1].n == 0 and x[2].maxlen == 2 and x[2].all[0] is x",
        "x[0]['b'] += 4; x[1]['k'].append(x[0]); x[1].n += 1; x[2].extend([1, 2, x[1]]); x[2].w = 3",
        "x[0]['b'] == 5 and x[1]['k'][0] is x[0] and x[1].n == 1 and x[2][1] is x[1] and x[2].w == 3 == len(x)",
    ),
    travels(
        "an ordered dict of one's own, which wants arguments and keeps a limit",
        "from collections import OrderedDict\nclass C(OrderedDict):\n"
        "    def __init__(self, most): self.most = most; super().__init__()\n"
        "    def __setitem__(self, k, v):\n        super().__setitem__(k, v); self.move_to_end(k)\n"
        "        if len(self) > self.most: self.popitem(last=False)\n"
        "y = []; x = C(2); x['a'] = 1; x['b'] = y",
        "list(x) == ['a', 'b'] and x['b'] is y and x.most == 2",
        "x['c'] = 3; y.append(x)",
        "list(x) == ['b', 'c'] and x['b'] is y and y[0] is x and type(x) is C",
    ),
    travels(
        "a dict of one's own that counts what is set",
        "class C(dict):\n    def __init__(self, log): self.log = log\n"
        "    def __setitem__(self, k, v): self.log.append(k); super().__setitem__(k, v)\n"
        "y = []; x = C(y); x['a'] = 1",
        "x.log is y and y == ['a'] and x['a'] == 1",
        "x['b'] = 2",
        "y == ['a', 'b'] and x.log is y and dict(x) == {'a': 1, 'b': 2}",
    ),
    refused("a memory view with gaps", "x = memoryview(bytearray(8))[::2]", "a memoryview with gaps"),
    travels(
        "a list of one's own",
        "class L(list):\n    tag = None\nx = L([1]); x.tag = y = []; x.append(y)",
        "type(x) is L and x[1] is x.tag is y",
        "y.append(2); x.append(3)",
        "x == [1, [2], 3] and x.tag is y",
    ),
    travels(
        "a dict of one's own",
        "class D(dict):\n    def __getattr__(self, n): return self[n]\ny = []; x = D(a=y)",
        "x.a is y",
        "x.a.append(1); x['b'] = y",
        "y == [1] and x.b is y",
    ),
    travels(
        "a set of one's own",
        "class S(set): pass\nx = S([1]); x.y = y = []",
        "1 in x and x.y is y",
        "x.add(2); y.append(0)",
        "x == {1, 2} and x.y is y and y == [0]",
    ),
    travels(
        "a text and a number of one's own",
        "class T(str): pass\nclass N(int): pass\ny = []\nx = [T('a'), N(5)]; x[0].y = x[1].y = y",
        "x == ['a', 5] and x[0].y is y",
        "y.append(1)",
        "x[0].y is x[1].y is y and y == [1] and type(x[1]) is N",
    ),
    travels(
        "a named tuple",
        "from collections import namedtuple\nP = namedtuple('P', 'a b')\ny = []\nx = P(y, 1)",
        "x.a is y and type(x) is P",
        "x.a.append(1)",
        "x.a is y and y == [1]",
    ),
    travels(
        "a typed named tuple",
        "from typing import NamedTuple\nclass P(NamedTuple):\n    a: list\n    b: int = 2\ny = [0]; x = P(y)",
        "x == ([0], 2) and x.a is y",
        "y.append(1)",
        "x.a is y and y == [0, 1]",
    ),
    travels(
        "a tuple of one's own",
        "class P(tuple): pass\ny = []\nx = P([y]); x.z = y",
        "x[0] is x.z is y",
        "y.append(1)",
        "x[0] is x.z is y and y == [1]",
    ),
    travels(
        "a heap", "import heapq\nx = [3, 1, 2]; heapq.heapify(x)", "x[0] == 1", "heapq.heappush(x, 0)", "x[0] == 0"
    ),
    travels(
        "five thousand small objects",
        "x = {str(n): [n] for n in range(5000)}",
        "x['4999'] == [4999]",
        "x['5'].append(1)",
        "x['5'] == [5, 1] and len(x) == 5000",
    ),
    refused(
        "a list that is nested ten thousand deep", "x = []\nfor _ in range(10_000):\n    x = [x]", "nested too deeply"
    ),
    travels(
        "a list nested a hundred deep",
        "x = y = []\nfor _ in range(100):\n    y.append([]); y = y[0]\ndel y",
        "len(x) == 1",
    ),
]

ITERATORS: list[Kind] = [
    anew(
        "an iterator half-way",
        "y = [1, 2, 3]; x = iter(y); next(x)",
        "x.__length_hint__() == 2",
        "z = next(x)",
        "z == 2 and next(x) == 3",
    ),
    travels(
        "an iterator and its list",
        "y = [1, 2]; x = iter(y)",
        "x.__length_hint__() == 2",
        "y.append(3)",
        "x.__length_hint__() == 3",
    ),
    travels(
        "iterators over a deque and an array",
        "import array, collections\ny = [1]; x = [iter(collections.deque([y])), iter(array.array('i', [2]))]; x += y,",
        "x[0].__reduce__()[1][0][0] is x[2] and x[1].__reduce__()[1][0][0] == 2",
        "x[2].append(3)",
        "x[0].__reduce__()[1][0][0] is x[2] and x[2] == [1, 3]",
    ),
    anew(
        "enumerate, zip, map",
        "x = enumerate(zip('ab', map(str, [1, 2])))",
        "x is not None",
        "z = next(x)",
        "z == (0, ('a', '1')) and next(x) == (1, ('b', '2'))",
    ),
    anew(
        "an iterator over a range",
        "x = iter(range(5)); next(x)",
        "x.__length_hint__() == 4",
        "z = next(x)",
        "z == 1 and next(x) == 2",
    ),
    anew("a reversed list", "x = reversed([1, 2])", "x.__length_hint__() == 2", "z = next(x)", "next(x) == 1"),
    travels(
        "operators",
        "import operator as o\nx = [o.itemgetter(1), o.attrgetter('a'), o.methodcaller('upper')]",
        "x[0]('ab') == 'b' and x[2]('a') == 'A'",
    ),
    refused("a generator", "x = (n for n in range(3))", "a generator", "next(x) >= 0"),
    refused(
        "a generator half-way", "def g():\n    yield 1\n    yield 2\nx = g(); next(x)", "a generator", "next(x) == 2"
    ),
    refused("a generator deep in something", "x = {'k': [(n for n in 'ab')]}", "a generator", "next(x['k'][0]) == 'a'"),
    refused("a coroutine", "async def f(): return 1\nx = f()", "a coroutine", "x.close() is None"),
    refused("an asynchronous generator", "async def f():\n    yield 1\nx = f()", "an asynchronous generator"),
    refused(
        "a file's lines",
        "import itertools\ny = open('/etc/passwd'); x = itertools.islice(y, 2)",
        "an open file",
        close="y.close()",
    ),
]
