"""What the notebook imports beside a cell."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from sublet.notebook import import_hook
from sublet.notebook.environment import CellEnvironment
from sublet.notebook.in_place import can_change
from sublet.notebook.in_use import in_use
from sublet.state.transfer.reducers import loaded
from tests.left_open import threads_now
from tests.notebook.crossing import Sides


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("import torch", {"torch": set()}),
        ("import torch.nn as nn, numpy", {"torch.nn": set(), "numpy": set()}),
        ("from torch.nn import Linear as L\nawait x", {"torch.nn": {"Linear"}}),
        ("from sklearn import tree\nfrom sklearn import svm, base", {"sklearn": {"tree", "svm", "base"}}),
        ("from numpy import *", {"numpy": set()}),
        ("def f():\n    import torch", {}),
        ("from . import torch", {}),
        ("torch = 1", {}),
    ],
)
def test_what_the_statements_of_a_cell_import(cell: str, found: dict[str, set[str]]) -> None:
    assert import_hook.imported_by(cell) == found


@pytest.fixture
def slow_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "slow_one"
    package.mkdir()
    (package / "__init__.py").write_text(
        "value = 1\ndef __getattr__(name):\n    import warnings; warnings.warn(name, FutureWarning)\n    return 2\n"
    )
    for name in ("part", "other", "third"):
        (package / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(import_hook, "SLOW", ("slow_one",))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "slow_one"]:
        del sys.modules[name]


@pytest.mark.usefixtures("slow_package")
@pytest.mark.parametrize(
    ("cells", "loaded"),
    [
        (["import slow_one.part"], {"part"}),
        (["import slow_one", "import slow_one.part as p"], {"part"}),
        (["import slow_one", "from slow_one import part, value"], {"part"}),
        (["from slow_one import value", "from slow_one.other import x", "import slow_one.third"], {"other", "third"}),
        (["import slow_one", "slow_one.part"], set()),
        (["from slow_one import old, part"], {"part"}),
    ],
)
def test_the_modules_that_a_cell_names_are_imported_also_of_a_package_that_is_there(
    cells: list[str], loaded: set[str], recwarn: pytest.WarningsRecorder
) -> None:
    one = import_hook.PreImports(contextlib.nullcontext)
    for cell in cells:
        one.start_for(cell, gives=True)
        one.begin(is_sent=True)
        one.wait()
    assert {name for name in ("part", "other", "third") if f"slow_one.{name}" in sys.modules} == loaded
    assert not recwarn.list


@pytest.mark.usefixtures("slow_package")
def test_what_values_are_looked_up_in_is_not_half_imported_while_they_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = import_hook.PreImports(contextlib.nullcontext)
    one.start_for("import slow_one.part", gives=True)
    one.begin(is_sent=False)
    one.wait()
    assert "slow_one" not in sys.modules
    one.begin(is_sent=True)
    one.wait()
    assert "slow_one.part" in sys.modules
    monkeypatch.setattr(import_hook, "EARLY", ("slow_one",))
    one.start_for("import slow_one.third", gives=True)
    one.begin(is_sent=False)
    one.wait()
    assert "slow_one.third" in sys.modules


@pytest.mark.usefixtures("slow_package")
def test_an_import_beside_a_cell_draws_no_number(tmp_path: Path) -> None:
    """``sklearn.ensemble`` does, on the device as well, whose state comes back, unless it had imported it before."""
    (tmp_path / "slow_one" / "part.py").write_text("import random\ndrawn = random.random()\n")
    surroundings = CellEnvironment(is_notebook=True)
    try:
        before = random.getstate()
        one = import_hook.PreImports(surroundings.undrawn)
        one.start_for("import slow_one.part", gives=True)
        one.begin(is_sent=True)
        one.wait()
        assert sys.modules["slow_one.part"].drawn
        assert random.getstate() == before
    finally:
        surroundings.close()


@pytest.mark.usefixtures("slow_package")
def test_what_is_there_starts_no_thread() -> None:
    one = import_hook.PreImports(contextlib.nullcontext)
    for expected in (1, 0):
        before = threads_now("sublet-import")
        one.start_for("from slow_one import value\nfrom slow_one import part", gives=True)
        one.begin(is_sent=True)
        assert len(one._threads) == expected
        one.wait()
        assert not threads_now("sublet-import") - before


def test_a_slow_module_is_imported_meanwhile_and_is_not_seen_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_one.py").write_text("import slow_gate\nslow_gate.begun.set()\nslow_gate.go.wait(30)\nvalue = 1\n")
    (tmp_path / "slow_gate.py").write_text("import threading\nbegun, go = threading.Event(), threading.Event()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(import_hook, "SLOW", ("slow_one",))
    import slow_gate  # type: ignore[import-not-found]

    try:
        one = import_hook.PreImports(contextlib.nullcontext)
        one.start_for("slow_one = 1", gives=True)
        one.begin(is_sent=True)
        one.start_for("import slow_one", gives=False)
        one.begin(is_sent=True)
        one.start_for("import slow_one", gives=True)
        assert "slow_one" not in sys.modules
        one.begin(is_sent=True)
        assert slow_gate.begun.wait(30)
        assert "slow_one" in sys.modules
        assert loaded("slow_one") is None
        slow_gate.go.set()
        one.wait()
        assert loaded("slow_one").value == 1
        one.wait()
    finally:
        slow_gate.go.set()
        for name in ("slow_one", "slow_gate"):
            sys.modules.pop(name, None)


def test_what_cannot_be_imported_is_nobodys_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_hook, "SLOW", ("no_such_module",))
    before = threads_now("sublet-import")
    one = import_hook.PreImports(contextlib.nullcontext)
    one.start_for("import no_such_module", gives=True)
    one.begin(is_sent=True)
    one.wait()
    assert not threads_now("sublet-import") - before


@pytest.mark.parametrize("name", ["torch", "pandas"])
def test_values_cross_while_a_library_is_half_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a first cell that imports it, what the cell reads is sent."""
    half = types.ModuleType(name)
    half.__spec__ = ModuleSpec(name, None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, half)
    sides = Sides()
    sides.here["a"] = [[1], {"k": np.arange(3)}]
    sides.go("a")
    sides.there["a"].append(sides.there["a"][0])
    sides.back("a")
    assert sides.here["a"][2] is sides.here["a"][0]
    assert in_use(sides.here, can_change).names == {}
