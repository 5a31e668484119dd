"""Library attributes that the notebook has replaced are named before a cell runs on a device."""

from __future__ import annotations

import types
from typing import Any

import pytest

from sublet.notebook.monkeypatches import ReplacedAttributes, assigned_attributes

LIBRARY = """
class Thing:
    def method(self): return "library's"
    @property
    def size(self): return 1
def function(): return "library's"
level = 1
"""


@pytest.fixture
def names() -> dict[str, Any]:
    """A notebook that has imported a library, with a function of its own."""
    library: Any = types.ModuleType("lib")
    exec(LIBRARY, vars(library))  # noqa: S102
    found: dict[str, Any] = {"__name__": "__main__", "lib": library, "Thing": library.Thing}
    exec("def mine(*a): return 'mine'\nclass Own: pass", found)  # noqa: S102
    return found


def said(names: dict[str, Any], *cells: str, cell: str = "", carried: tuple[str, ...] = ()) -> list[str]:
    for one in cells:
        exec(one, names)  # noqa: S102
    return [one.name for one in ReplacedAttributes(names, carried).news(list(cells), cell)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("lib.function = mine", ["lib.function"]),
        ("lib.function = lambda: 1", ["lib.function"]),
        ("Thing.method = mine", ["Thing.method"]),
        ("lib.Thing.method = staticmethod(mine)", ["lib.Thing.method"]),
        ("lib.Thing.size = property(mine)", ["lib.Thing.size"]),
        ("setattr(lib, 'function', mine)", ["lib.function"]),
        ("import functools\nlib.function = functools.partial(mine, 1)", ["lib.function"]),
        ("def patch():\n    lib.function = mine\npatch()", ["lib.function"]),
        ("lib.function, x = mine, 1", ["lib.function"]),
        ("lib.Thing = Own", ["lib.Thing"]),
        ("lib.level = 5", ["lib.level"]),
        ("lib.level += 5", ["lib.level"]),
        ("thing = Thing()\nthing.size2 = mine", []),
        ("Own.method = mine", []),
        ("mine.note = 1", []),
        ("lib.function = len", []),
        ("before = lib.function\nlib.function = mine\nlib.function = before", []),
        ("nowhere = None\nif nowhere: nowhere.x = 1", []),
    ],
)
def test_what_is_named(names: dict[str, Any], source: str, expected: list[str]) -> None:
    assert said(names, source) == expected


def test_what_the_cell_sets_itself_and_what_the_table_carries_is_not_named(names: dict[str, Any]) -> None:
    assert said(names, "lib.function = mine", cell="lib.function = mine") == []
    assert said(names, "lib.level = 5", carried=("lib:level",)) == []


def test_it_is_named_once_and_again_when_it_is_replaced_again(names: dict[str, Any]) -> None:
    replaced, cells = ReplacedAttributes(names), ["lib.function = mine"]
    exec(cells[0], names)  # noqa: S102
    [one] = replaced.news(cells, "")
    assert str(one) == (
        "lib.function was set in the notebook (mine of the notebook); "
        "that does not hold on the device: set it in the cell"
    )
    assert replaced.news(cells, "") == []
    cells.append("lib.function = lambda: 2")
    exec(cells[1], names)  # noqa: S102
    assert len(replaced.news(cells, "")) == 1


def test_what_a_cell_has_set_on_a_device_holds_there_until_the_next_device(names: dict[str, Any]) -> None:
    replaced, cells = ReplacedAttributes(names), ["lib.function = mine"]
    exec(cells[0], names)  # noqa: S102
    assert replaced.news(cells, "lib.function = mine") == []
    assert replaced.news(cells, "lib.function()") == []
    replaced.begin()
    assert len(replaced.news(cells, "lib.function()")) == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("lib.level = 5", ["lib.level"]),
        ("lib.function = mine; Thing.method = mine", ["Thing.method", "lib.function"]),
        ("Own.method = mine; mine.note = 1; nowhere.x = 1", []),
        ("print(lib.level)", []),
    ],
)
def test_what_a_cell_has_set_on_a_device_is_said_not_to_hold_here(
    names: dict[str, Any], source: str, expected: list[str]
) -> None:
    """Once."""
    replaced = ReplacedAttributes(names)
    assert replaced.unreported(source) == expected
    assert replaced.unreported(source) == []
    assert ReplacedAttributes(names, ("lib:level", "lib:function", "lib:method")).unreported(source) == []


@pytest.mark.parametrize("source", ["x = 1", "print(a.b)", "f(a.b == 1)", "not python ((", "'a.b = 1'", "%matplotlib"])
def test_other_cells_assign_nothing(source: str) -> None:
    assert assigned_attributes(source) == frozenset()
