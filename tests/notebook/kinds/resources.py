"""What belongs to a process: files, locks, threads, sockets, and what is nobody's to give."""

from __future__ import annotations

from tests.notebook.kinds.kind import Kind, anew, by_name, refused, travels

__all__ = ["LIBRARIES", "RESOURCES"]

RESOURCES: list[Kind] = [
    refused("an open file", "x = open('/etc/passwd')", "an open file", "len(x.readline()) > 0", close="x.close()"),
    refused("an open file of bytes", "x = open('/etc/passwd', 'rb', buffering=0)", "an open file", close="x.close()"),
    refused(
        "an open file deep in an object",
        "class C: pass\nx = C(); x.log = {'f': open('/dev/null', 'w')}",
        "an open file",
        close="x.log['f'].close()",
    ),
    refused(
        "a temporary file", "import tempfile\nx = tempfile.NamedTemporaryFile()", "an open file", close="x.close()"
    ),
    travels("a lock that no thread holds", "import threading\nx = threading.Lock()", "not x.locked()"),
    refused(
        "a lock that a thread holds",
        "import threading\nx = threading.Lock(); x.acquire()",
        "a thread lock that is held",
        "x.locked()",
        close="x.release()",
    ),
    travels(
        "a lock that can be taken twice",
        "import threading\nx = threading.RLock()",
        "x.acquire() and x.acquire() and x.release() is x.release() is None",
    ),
    refused(
        "a lock that can be taken twice, and that a thread holds",
        "import threading\nx = threading.RLock(); x.acquire()",
        "a thread lock that is held",
        close="x.release()",
    ),
    travels(
        "an object with a lock",
        "import threading\nclass C:\n    def __init__(self):\n        self.lock, self.n = threading.Lock(), 0\n"
        "    def add(self):\n        with self.lock:\n            self.n += 1\nx = C(); y = x.lock",
        "x.lock is y and not y.locked()",
        "x.add()",
        "x.n == 1 and x.lock is y",
    ),
    travels("an event", "import threading\nx = threading.Event()", "type(x.is_set()) is bool", "x.set()", "x.is_set()"),
    travels(
        "a queue of threads",
        "import queue\nx = queue.Queue(3); x.put('a')",
        "x.queue[0] == 'a' and x.maxsize == 3",
        "x.put('b')",
        "list(x.queue) == ['a', 'b'] and x.unfinished_tasks == 2",
    ),
    travels(
        "a thread that was not started",
        "import threading\nx = threading.Thread(target=abs, args=(1,), name='n')",
        "x.name == 'n' and not x.is_alive()",
        "x.start(); x.join()",
        "not x.is_alive() and x.ident",
    ),
    travels(
        "a thread that has ended",
        "import threading\nclass T(threading.Thread):\n    def run(self): self.found = [1]\n"
        "x = T(daemon=True); x.start(); x.join()",
        "x.found[0] == 1 and x.daemon and x.ident and x.join() is None",
        "x.found.append(2)",
        "x.found == [1, 2] and not x.is_alive()",
    ),
    refused(
        "a thread that runs",
        "import threading\ny = threading.Event(); x = threading.Thread(target=y.wait, daemon=True); x.start()",
        "a running thread",
        "x.is_alive()",
        close="y.set(); x.join()",
    ),
    refused("thread-local data", "import threading\nx = threading.local()", "thread-local data"),
    refused(
        "a pool of threads",
        "import concurrent.futures as c\nx = c.ThreadPoolExecutor(1)",
        "a _queue.SimpleQueue",
        close="x.shutdown()",
    ),
    refused("a future", "import concurrent.futures as c\nx = c.Future()", "a future that is not done"),
    travels(
        "a future that is done",
        "import concurrent.futures as c\nx = c.Future(); x.set_result([1])",
        "x.done() and x.result()[0] == 1",
        "x.result().append(2)",
        "x.result() == [1, 2]",
    ),
    refused("a socket", "import socket\nx = socket.socket()", "a socket", close="x.close()"),
    travels(
        "a process that has ended",
        "import subprocess, sys\nx = subprocess.Popen([sys.executable, '-c', '']); _ = x.wait()",
        "x.returncode == x.poll() == x.wait() == 0",
    ),
    refused(
        "a process that runs",
        "import subprocess\nx = subprocess.Popen(['cat'], stdin=subprocess.PIPE)",
        "a running process",
        "x.returncode is None",
        close="x.stdin.close(); _ = x.wait()",
    ),
    refused("a handler of logging", "import logging\nx = logging.NullHandler()", "a handler of logging"),
    refused(
        "a pipe of multiprocessing",
        "import multiprocessing as m\nx = m.Pipe()[0]",
        "an end of a pipe",
        close="x.close()",
    ),
    refused(
        "a widget",
        "import ipywidgets\nx = ipywidgets.IntSlider(3)",
        "a widget's connection to the front end",
        "x.value == 3",
    ),
    refused("a TLS context", "import ssl\nx = ssl.create_default_context()", "a TLS context"),
    refused(
        "a database connection",
        "import sqlite3\nx = sqlite3.connect(':memory:')",
        "a database connection",
        close="x.close()",
    ),
    refused("a map of a file", "import mmap\nx = mmap.mmap(-1, 4096)", "a memory map", close="x.close()"),
    refused(
        "an itertools.groupby within a group",
        "import itertools\nx = itertools.groupby('aabb'); y = next(x)[1]; next(y)",
        "an itertools.groupby that is within a group",
    ),
    refused("a running hash", "import hashlib\nx = hashlib.sha256(b'a')", "a running hash"),
    refused("a running compressor", "import zlib\nx = zlib.compressobj()", "a running compressor"),
    refused(
        "a weak reference", "import weakref\nclass C: pass\ny = C(); x = weakref.ref(y)", "a weak reference", "x() is y"
    ),
    refused(
        "a proxy of weakref",
        "import weakref\nclass C: pass\ny = C(); x = weakref.proxy(y)",
        "a weak reference",
        "x.__repr__.__self__ is y",
    ),
    refused(
        "a dict of weak references",
        "import weakref\nclass C: pass\ny = C(); x = weakref.WeakValueDictionary(a=y)",
        "a weak reference",
        "x['a'] is y",
    ),
    refused(
        "a finalizer",
        "import weakref\nclass C: pass\ny = C(); x = weakref.finalize(y, print)",
        "a finalizer of weakref",
        "x.alive",
        close="x.detach()",
    ),
    refused(
        "a set of weak references",
        "import weakref\nclass C: pass\ny = C(); x = weakref.WeakSet([y])",
        "a set of weak references",
        "y in x",
    ),
    refused("a context variable", "import contextvars\nx = contextvars.ContextVar('v')", "ContextVar"),
    refused("a context", "import contextvars\nx = contextvars.copy_context()", "Context"),
    refused("a frame of a function that runs", "import sys\nx = sys._getframe()", "a frame of a running function"),
    refused("a traceback", "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    x = e.__traceback__", "a traceback"),
    refused("an epoll object", "import select\nx = select.epoll()", "an epoll object", close="x.close()"),
    refused(
        "a list of a directory that is open", "import os\nx = os.scandir('/')", "ScandirIterator", close="x.close()"
    ),
    refused(
        "a closure that holds a file",
        "def make():\n    f = open('/dev/null')\n    return lambda: f\nx = make()",
        "an open file",
        close="x().close()",
    ),
    travels(
        "a bound method of a lock",
        "import threading\ny = threading.Lock(); x = y.locked",
        "x.__self__ is y and not x()",
    ),
    by_name("standard output", "import sys\nx = sys", "x.stdout is not None"),
    by_name(
        "an object that its library has under a name",
        "import dataclasses, matplotlib\nx, y = matplotlib.rcParams, dataclasses.KW_ONLY",
        "x is matplotlib.rcParams and y is dataclasses.KW_ONLY",
    ),
    by_name(
        "a function that draws from a library's own generator",
        "import numpy, random\nx = [random.random, numpy.random.rand]",
        "x[0].__self__ is random._inst and x[1].__self__ is numpy.random.mtrand._rand",
    ),
    by_name("the environment", "import os\nx = os", "x.environ['PATH']", note="a change of it stays on its side"),
]

LIBRARIES: list[Kind] = [
    travels(
        "a figure and its axes",
        "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\nx, ax = plt.subplots()",
        "ax.figure is x",
        "ax.plot([1, 2], [3, 4]); ax.set_title('t')",
        "len(ax.lines) == 1 and ax.figure is x and x.axes[0] is ax and ax.get_title() == 't'",
    ),
    travels(
        "a figure that is drawn",
        "import matplotlib\nmatplotlib.use('agg')\nfrom matplotlib.figure import Figure\n"
        "x = Figure(); a = x.subplots()",
        "x.axes[0] is a",
        "a.bar([1], [2]); x.canvas.draw()",
        "x.axes[0] is a and len(a.patches) == 1",
    ),
    travels(
        "a progress bar that is done",
        "import io, tqdm\nx = list(tqdm.tqdm(range(3), file=io.StringIO()))",
        "x == [0, 1, 2]",
    ),
    travels("a symbol of sympy", "import sympy\nx = sympy.Symbol('a') ** 2", "x.diff() == 2 * sympy.Symbol('a')"),
    travels(
        "a function of sympy, whose class has no module",
        "import matplotlib.figure, sympy\nf = sympy.Function('f'); y = f(sympy.Symbol('a')); x = [f, y]",
        "x[0] == f == type(y) and x[1] == y and f.__module__ is None",
    ),
    travels(
        "a graph of networkx",
        "import networkx as nx\nx = nx.path_graph(3)",
        "list(x.edges) == [(0, 1), (1, 2)]",
        "x.add_edge(2, 0, w=[1])",
        "x[0][2]['w'] == [1]",
    ),
    travels(
        "a picture of Pillow",
        "from PIL import Image\nx = Image.new('L', (2, 2))",
        "x.getpixel((0, 0)) == 0",
        "x.putpixel((0, 0), 9)",
        "x.getpixel((0, 0)) == 9",
    ),
    travels(
        "a model of pydantic",
        "from pydantic import BaseModel\nclass M(BaseModel):\n    a: int = 1\nx = M()",
        "x.a == 1",
        "x.a = 5",
        "x.a == 5 and type(x) is M",
    ),
    travels(
        "a class of attrs",
        "import attrs\n@attrs.define\nclass C:\n    a: list\ny = []; x = C(y)",
        "x.a is y",
        "x.a.append(1)",
        "x.a is y and y == [1]",
    ),
    travels("a date of arrow", "import arrow\nx = arrow.get('2024-02-03')", "x.year == 2024"),
    anew(
        "a tree of XML",
        "import xml.etree.ElementTree as E\nx = E.fromstring('<a><b/></a>')",
        "x[0].tag == 'b'",
        "x[0].set('k', 'v')",
        "x[0].get('k') == 'v'",
    ),
    travels(
        "a template",
        "import jinja2\nx = jinja2.DictLoader({'a': '1'})",
        "x.mapping == {'a': '1'}",
        "x.mapping['b'] = '2'",
        "x.mapping['b'] == '2'",
    ),
    travels(
        "a model of pydantic that is generic",
        "from typing import Generic, TypeVar\nfrom pydantic import BaseModel\nT = TypeVar('T')\n"
        "class M(BaseModel, Generic[T]):\n    a: list[T]\nx = M[int](a=[1])",
        "isinstance(x, M[int]) and type(x) is M[int] and isinstance(x, M) and not isinstance(x, M[str])",
        "x.a.append(2)",
        "x.a == [1, 2] and type(x) is M[int] and type(M[int](a=[])) is type(x)",
    ),
]
