"""Names in strings are found, and what a cell does not name is not visible to it with an old value."""

from __future__ import annotations

from typing import Any

import pytest

from sublet.notebook.cells import explain
from sublet.notebook.end_messages import unnamed
from sublet.notebook.lookups import possible_lookups
from sublet.notebook.namespace_sync import NOTEBOOK, Space
from sublet.notebook.reading import read_cell
from tests.notebook.sides import Notebook

pytestmark = pytest.mark.filterwarnings("ignore")

HERE: dict[str, Any] = {"x": 1, "y": 2, "df": 3, "q": "a > @x", "n": 0}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('df.query("a > @x")', "x"),
        ("df.query(q)", "x"),
        ('df.query(f"a > @x and {n}")', "x"),
        ('pd.eval("x + y")', "x y"),
        ('ne.evaluate("y * 2")', "y"),
        ('duckdb.sql("select sum(a) from df")', "df"),
        ("con.execute('select * from df join y')", "df y"),
        ("import __main__\n__main__.y", "y"),
        ("import sys\nsys.modules['__main__'].y", "y"),
        ("getattr(__main__, 'x')", "x"),
        ("from __main__ import x", "x"),
        ("timeit.timeit('x + 1', setup='y')", "x y"),
        ("def f(a: 'df'): pass", "df"),
        ("print('x and y')", ""),
        ("df.sort('x')", ""),
    ],
)
def test_names_in_strings(source: str, names: str) -> None:
    reading = read_cell(source)
    assert possible_lookups(reading.lookups, reading.reads, HERE) - reading.reads == frozenset(names.split())


@pytest.mark.parametrize(
    ("source", "reads"),
    [("eval('x + 1')", "eval x"), ("exec('y = x')", "exec x"), ("def f():\n    return eval('x')", "eval x")],
)
def test_code_in_a_constant_is_read(source: str, reads: str) -> None:
    reading = read_cell(source)
    assert not reading.opaque
    assert reading.reads == frozenset(reads.split())


def test_explain_lists_names_found_in_strings() -> None:
    reading = read_cell('df.query("a > @x")')
    space = Space({"df": [1], "x": 2}, NOTEBOOK)
    from dataclasses import replace

    reading = replace(reading, maybe=possible_lookups(reading.lookups, reading.reads, space.names))
    assert "found in strings: x" in explain(space, reading, has_guest=False)


def test_a_name_in_a_string_has_todays_value(nb: Notebook) -> None:
    nb.here("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3]})\nx = 1\nq = 'a > @x'")
    assert nb.there("first = len(df.query('a > @x')), x") is None
    nb.here("x = 2")
    assert nb.there("second = len(df.query('a > @x'))") is None
    nb.here("x = 0")
    assert nb.there("third = len(df.query(q))") is None
    assert (nb.names["first"], nb.names["second"], nb.names["third"]) == ((2, 1), 1, 3)


def test_numexpr_finds_names_in_an_expression_with_todays_values(nb: Notebook) -> None:
    nb.here(
        "import numexpr as ne, numpy as np\nx = np.arange(4); by = 2\ndef scaled():\n    return ne.evaluate('x * by')"
    )
    assert nb.there("first = int(ne.evaluate('x * by').sum()), int(scaled().sum())") is None
    nb.here("x[0] = 10; by = 3; expression = 'x * by'")
    assert nb.there("second = int(ne.evaluate(expression).sum()), int(scaled().sum())") is None
    assert (nb.names["first"], nb.names["second"]) == ((12, 12), (48, 48))


def test_duckdb_finds_frames_in_a_query_with_todays_values(nb: Notebook) -> None:
    nb.here("import duckdb, pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3]}); other = pd.DataFrame({'a': [2, 3]})")
    nb.here("def asked():\n    return duckdb.sql('select count(*) from df').fetchall()")
    query = "select sum(df.a) from df join other on df.a = other.a"
    assert nb.there(f"first = duckdb.sql({query!r}).fetchall(), asked()") is None
    nb.here(f"df.loc[0, 'a'] = 3; query = {query!r}")
    assert nb.there("second = duckdb.sql(query).fetchall(), asked()") is None
    assert (nb.names["first"], nb.names["second"]) == (([(5,)], [(3,)]), ([(8,)], [(3,)]))


def test_a_name_that_is_not_read_is_not_there(nb: Notebook) -> None:
    nb.here("held = [1]\nnumber = 1\nimport math\nkey = 'held'")
    assert nb.there("held, number, math") is None
    nb.here("held.append(2)\nnumber = 2")
    assert nb.there("import sys\nseen = key in vars(sys.modules['__' + 'main' + '__'])") is None
    assert not nb.names["seen"]
    assert nb.there("seen = held, number") is None
    assert nb.names["seen"] == ([1, 2], 2)
    assert nb.names["held"] == [1, 2]


def test_a_function_that_looks_names_up_has_them(nb: Notebook) -> None:
    nb.here("limit = 1\ndef f():\n    return eval('limit')\ndef g(df):\n    return len(df.query('a > @limit'))")
    nb.there("f()")
    nb.here("limit = 2\nimport pandas as pd\ntable = pd.DataFrame({'a': [1, 2, 3]})")
    assert nb.there("found = f(), g(table)") is None
    assert nb.names["found"] == (2, 1)


def test_what_cannot_be_sent_and_stands_in_a_string_keeps_no_cell_from_running(nb: Notebook) -> None:
    nb.here("import pandas as pd, threading\na = threading.Lock(); a.acquire()\ndf = pd.DataFrame({'a': [1, 2]})")
    assert nb.there("found = len(df.query('a > 1'))") is None
    assert nb.names["found"] == 1


def test_doctests_find_the_notebooks_functions(nb: Notebook) -> None:
    nb.here("factor = 2\ndef double(n):\n    '''\n    >>> double(factor)\n    4\n    '''\n    return n * factor")
    assert nb.there("import doctest\nran = doctest.testmod()") is None
    assert tuple(nb.names["ran"]) == (0, 1)


def test_a_pickle_of_a_class_that_the_cell_does_not_name(nb: Notebook) -> None:
    nb.here("import pickle\nclass C:\n    n = 3\nblob = pickle.dumps(C())")
    assert nb.there("found = pickle.loads(blob).n") is None
    assert nb.names["found"] == 3


def test_type_hints_in_strings(nb: Notebook) -> None:
    nb.here("import typing\nclass Later:\n    pass\ndef f(x: 'Later'):\n    pass")
    assert nb.there("found = typing.get_type_hints(f)['x'] is not None") is None
    assert nb.names["found"] is True


FILL = (
    "import threading, time\nresults = []\ngo = threading.Event()\n"
    "def fill():\n    while not go.wait(0.01):\n        results.append(1)\n"
    "thread = threading.Thread(target=fill, daemon=True)\nthread.start()"
)


def test_what_a_thread_uses_stays_until_it_ends(nb: Notebook) -> None:
    nb.here("number = 1")
    assert nb.there(FILL) is None
    assert nb.came.stays["results"] == "in use by a running thread"
    assert "results" not in nb.names
    assert nb.there("while len(results) < 3: time.sleep(0.01)\nmany = len(results)") is None
    assert nb.names["many"] >= 3
    assert nb.there("go.set()\nthread.join()") is None
    assert nb.there("number") is None
    assert len(nb.names["results"]) >= 3


@pytest.mark.parametrize(
    ("bind", "look"),
    [
        ("box = [results]", "box[0]"),
        ("box = {'deep': ([], [results])}", "box['deep'][1][0]"),
        ("class Box:\n    pass\nbox = Box(); box.held = results", "box.held"),
        ("def closed(held):\n    return lambda: held\nbox = closed(results)", "box()"),
    ],
)
def test_what_holds_something_that_a_thread_uses_stays_with_it(nb: Notebook, bind: str, look: str) -> None:
    assert nb.there(FILL) is None
    assert nb.there(bind) is None
    assert nb.came.stays["box"] == "in use by a running thread"
    assert "box" not in nb.names
    assert nb.there(f"same = {look} is results\ngo.set()\nthread.join()") is None
    assert nb.names["same"] is True
    assert nb.there("pass") is None
    assert nb.names["box"] is not None
    nb.here(f"same = {look} is results")
    assert nb.names["same"] is True


def test_a_container_of_the_notebook_stays_as_well(nb: Notebook) -> None:
    """The thread's object has no name of its own."""
    nb.here("box = [[]]; other = [1]")
    assert nb.there(FILL.replace("results", "held").replace("held = []", "held = box[0]")) is None
    assert nb.came.stays["box"] == "in use by a running thread"
    assert nb.there("other.append(2); many = len(box[0])\ngo.set()\nthread.join()") is None
    assert nb.there("pass") is None
    assert len(nb.names["box"][0]) >= nb.names["many"]
    assert nb.names["other"] == [1, 2]


def test_a_view_of_an_array_that_a_thread_writes_stays(nb: Notebook) -> None:
    assert (
        nb.there(
            "import numpy as np\n"
            + FILL.replace("results = []", "results = np.zeros(4)").replace("results.append(1)", "results[0] += 1")
        )
        is None
    )
    assert nb.there("part = results[1:]; box = [results[:2]]") is None
    assert nb.came.stays.keys() >= {"part", "box"}
    assert nb.there("go.set()\nthread.join()") is None
    assert nb.there("pass") is None
    assert len(nb.names["part"]) == 3


def test_a_thread_sees_its_names_while_another_cell_runs(nb: Notebook) -> None:
    assert nb.there(FILL) is None
    assert nb.there("import time\ntime.sleep(0.1)") is None
    assert nb.there("alive = thread.is_alive()\ngo.set()\nthread.join()") is None
    assert nb.names["alive"] is True


def test_an_accessor_that_only_the_notebook_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd

    error = {"ename": "AttributeError", "evalue": "'DataFrame' object has no attribute 'geo_'"}
    assert unnamed(error, (), ()) == ""
    monkeypatch.setattr(pd.DataFrame, "geo_", 1, raising=False)
    assert unnamed(error, (), ()).startswith(
        "DataFrame.geo_ was added to pandas in the notebook only; run what adds it"
    )


def test_the_note_names_all_that_the_cell_needs() -> None:
    error = {"ename": "UndefinedVariableError", "evalue": "local variable 'x' is not defined"}
    said = unnamed(error, {"x", "df"}, {"df"})
    assert said == (
        "x is defined in the notebook but this cell does not name it; name it in the cell, or add --in df,x"
    )
    assert unnamed(error, {"df"}, {"df"}) == ""
    assert unnamed({"ename": "ValueError", "evalue": "'x'"}, {"x"}, ()) == ""


@pytest.mark.parametrize(
    ("evalue", "is_named"),
    [
        ("'Box' object has no attribute 'appendd'", False),
        ("type object 'Box' has no attribute 'made'", False),
        ("module '__main__' has no attribute 'Box'", True),
        ("Can't get attribute 'Box' on <module '__main__'>", True),
    ],
)
def test_the_class_of_an_object_without_an_attribute_is_no_name_that_was_looked_up(evalue: str, is_named: bool) -> None:
    said = unnamed({"ename": "AttributeError", "evalue": evalue}, {"Box"}, {"box"})
    assert said.startswith("Box is defined in the notebook") is is_named
