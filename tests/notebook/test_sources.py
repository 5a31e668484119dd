"""Texts of cells cross with functions; a remote value says what it is; tracebacks have the cell's own lines."""

from __future__ import annotations

import inspect
import linecache
import operator
from collections.abc import Callable
from typing import Any

import pytest

from sublet.notebook.checkpoint import About
from sublet.notebook.namespace_sync import NOTEBOOK, Space
from sublet.notebook.output import failed_cell
from sublet.notebook.remote_value import RemoteValue
from sublet.notebook.sources import CellSource, keep_sources, sources_of


class Keeper:
    """Has everything."""

    def fetch(self, handle: RemoteValue) -> Any:
        return handle

    def is_live(self, kernel: Any) -> bool:
        return True

    def is_parked(self, kernel: Any) -> bool:
        return False


def remote(lost: str = "") -> Any:
    about = About(name="gen", what="generator", nbytes=0, why="a generator", cell=1)
    return RemoteValue(about, object(), Keeper(), lost=lost)


def used_in_with(value: Any) -> None:
    with value:
        pass


@pytest.mark.parametrize(
    "use",
    [
        *(next, iter, len, bool, int, float, list, round, operator.neg, used_in_with),
        *(lambda v: v(), lambda v: v[0], lambda v: v + 1, lambda v: 1 - v, lambda v: v < 1, lambda v: 1 in v),
        lambda v: operator.setitem(v, 0, 1),
    ],
)
def test_a_remote_value_says_what_it_is_and_what_to_do(use: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError) as caught:
        use(remote("a generator"))
    assert str(caught.value) == "gen (generator) is on the device and cannot be used here; use it in a %%gpu cell"
    with pytest.raises(TypeError, match=r"cell, or gen\.fetch\(\) for a copy"):
        use(remote())


def test_its_class_is_named_for_people() -> None:
    assert type(remote()).__name__ == "RemoteValue"
    assert remote() != remote()


def test_a_function_has_its_source_where_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    text, name = "def f(x):\n    return x\n", "/tmp/no-such-folder/1234.py"
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), here)  # noqa: S102
    monkeypatch.setattr("sys.modules", {**__import__("sys").modules, "__main__": type("M", (), here)})
    assert sources_of([name, "/etc/hostname"]) == {name: CellSource(text, None)}
    monkeypatch.delitem(linecache.cache, name)
    assert sources_of([name]) == {}
    keep_sources({name: CellSource(text, 3)})
    assert inspect.getsource(here["f"]) == text


def test_the_text_of_a_cell_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    text, name = "def f(x):\n    return x\n", "/tmp/no-such-folder/5678.py"
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, name, "exec"), vars(main))  # noqa: S102
    space = Space(vars(main), NOTEBOOK)
    assert list(space.outgoing(["f"]).sources) == [name]
    assert not space.outgoing(["f"]).sources
    space.forget()
    assert list(space.outgoing(["f"]).sources) == [name]


def test_a_traceback_does_not_show_the_line_of_the_magic() -> None:
    shown = (
        "Cell In[3], line 3\n\x1b[32m      1\x1b[39m \x1b[38;5;66;03m# %%gpu\x1b[39;00m\n"
        "\x1b[32m      2\x1b[39m a\n----> 3 b"
    )
    plain = "Cell In[3], line 2\n      1 # %%gpu\n----> 2 b"
    for one in (shown, plain):
        (text,) = failed_cell({"ename": "E", "evalue": "", "traceback": [one]}).traceback
        assert "%%gpu" not in text
        assert text.endswith("b")
        assert text.startswith("Cell In[3], line ")
        assert text.count("\n") == one.count("\n") - 1
