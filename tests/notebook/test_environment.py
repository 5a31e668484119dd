"""Two sides with settings of their own, exchanged around cells, against one process that runs all of them."""

from __future__ import annotations

import contextvars
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.notebook import environment
from sublet.notebook.environment import CellEnvironment, Changes
from sublet.notebook.settings import Setting, SettingKind
from tests.notebook.crossing import crossed

MODULES = {"always": "", "early": "early_library", "late": "late_library", "generator": "late_library"}


class World:
    """Settings of one process, by row and entry; a row is there once its library is imported."""

    def __init__(self, rows: dict[str, str]) -> None:
        self.values: dict[str, dict[str, Any]] = {key: {"a": 0} for key in rows}
        self.imported = {"", "early_library"}
        self.refuses: Any = object()
        self.rows = tuple(self._row(key, module) for key, module in rows.items())

    def _row(self, key: str, module: str) -> Setting:
        def write(values: Any, gone: tuple[str, ...]) -> None:
            if self.refuses in values.values():
                raise ValueError("not here")
            self.values[key].update(values)
            for name in gone:
                self.values[key].pop(name, None)

        kind = SettingKind.GENERATOR if key == "generator" else SettingKind.GLOBAL
        return Setting(key=key, about="", read=lambda: dict(self.values[key]), write=write, module=module, kind=kind)


class Sides:
    """A notebook and its device, each with a world."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: dict[str, str] | None = None) -> None:
        self.rows = MODULES if rows is None else rows
        self.here, self.there = World(self.rows), World(self.rows)
        self.looked_at = self.here
        monkeypatch.setattr(environment, "is_imported", lambda name: name in self.looked_at.imported)
        self.notebook = self._side(self.here, is_notebook=True)
        self.device: CellEnvironment
        self.new_device()

    def _side(self, world: World, *, is_notebook: bool) -> CellEnvironment:
        self.looked_at = world
        made = CellEnvironment(is_notebook=is_notebook, rows=world.rows)
        made.close()
        return made

    def new_device(self) -> None:
        self.there = World(self.rows)
        self.device = self._side(self.there, is_notebook=False)
        self.looked_at = self.here
        self.notebook.begin(sees_files=True)

    def library(self, world: World, name: str) -> None:
        """It is imported there."""
        world.imported.add(name)
        (self.notebook if world is self.here else self.device)._imported(name)

    @contextmanager
    def cell(self, *, is_lost: bool = False) -> Iterator[World]:
        self._exchange(self.notebook, self.here, self.device, self.there)
        yield self.there
        if is_lost:
            self.looked_at = self.there
            self.device.changes()
            self.notebook.send_all_next()
        else:
            self._exchange(self.device, self.there, self.notebook, self.here)

    def _exchange(self, source: CellEnvironment, source_world: World, to: CellEnvironment, world: World) -> None:
        self.looked_at = source_world
        changes: Changes | None = crossed(source.changes())
        self.looked_at = world
        if changes is not None:
            to.apply(changes, files=True)
            to.apply(changes, files=False)
        self.problems = {} if changes is None else changes.problems


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Sides:
    return Sides(monkeypatch)


def test_only_what_changed_crosses_and_the_side_of_the_last_cell_wins(sides: Sides) -> None:
    with sides.cell():
        pass
    assert sides.notebook.changes() is None
    sides.here.values["always"] |= {"a": 1, "b": 2}
    with sides.cell() as there:
        assert there.values["always"] == {"a": 1, "b": 2}
        there.values["always"]["a"] = 3
        del there.values["always"]["b"]
    assert sides.here.values["always"] == {"a": 3}
    assert sides.notebook.changes() is None


def test_what_a_side_had_at_first_is_no_change(sides: Sides) -> None:
    sides.there.values["early"]["side"] = "of the device"
    sides.new_device()
    sides.there.values["always"] = {"a": "its own"}
    sides.device = sides._side(sides.there, is_notebook=False)
    sides.looked_at = sides.here
    with sides.cell() as there:
        assert there.values["always"] == {"a": "its own"}
    assert sides.here.values["always"] == {"a": 0}


def test_a_library_that_is_not_imported_gets_its_settings_at_the_end_of_its_import(sides: Sides) -> None:
    sides.library(sides.here, "late_library")
    sides.here.values["late"]["a"] = 7
    with sides.cell() as there:
        assert there.values["late"] == {"a": 0}
        sides.library(there, "late_library")
        assert there.values["late"] == {"a": 7}


def test_what_the_device_set_waits_in_the_notebook_and_goes_to_the_next_device(sides: Sides) -> None:
    with sides.cell() as there:
        sides.library(there, "late_library")
        there.values["late"]["a"] = 8
    assert sides.here.values["late"] == {"a": 0}
    sides.new_device()
    with sides.cell() as there:
        sides.library(there, "late_library")
        assert there.values["late"] == {"a": 8}
    sides.library(sides.here, "late_library")
    assert sides.here.values["late"] == {"a": 8}


def test_a_setting_of_a_thread_waits_for_the_main_thread(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is imported on another thread: what belongs to the main thread is set when the cell is over."""
    for world in (sides.here, sides.there):
        world.rows = tuple(replace(one, kind=SettingKind.LOCAL) for one in world.rows)
    sides.notebook = sides._side(sides.here, is_notebook=True)
    sides.new_device()
    with sides.cell() as there:
        sides.library(there, "late_library")
        there.values["late"]["a"] = 5
    importing = threading.Thread(target=sides.library, args=(sides.here, "late_library"))
    importing.start()
    importing.join()
    assert sides.here.values["late"] == {"a": 0}
    sides.notebook.apply_deferred()
    assert sides.here.values["late"] == {"a": 5}


def test_what_belongs_to_the_context_of_cells_is_set_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is told outside of cells; each cell begins with what is agreed, whatever its context has."""
    value: contextvars.ContextVar[int] = contextvars.ContextVar("value", default=0)
    setting = Setting(
        key="local",
        about="",
        read=lambda: {"": value.get()},
        write=lambda new, gone: value.set(new[""]),
        kind=SettingKind.LOCAL,
    )
    here = CellEnvironment(is_notebook=True, rows=(setting,))
    there = CellEnvironment(is_notebook=False, rows=(setting,), in_cells=True)
    cells, between = contextvars.copy_context(), contextvars.copy_context()

    def cell(context: contextvars.Context, sets: int | None = None) -> int:
        context.run(there.enter)
        found = context.run(value.get)
        if sets is not None:
            context.run(value.set, sets)
        return found

    try:
        here.begin(sees_files=True)
        value.set(3)
        changes = crossed(here.changes())
        between.run(there.apply, changes, files=False)
        assert cells.run(value.get) == 0
        assert cell(cells) == 3
        cells.run(there.end_cell)
        assert between.run(there.changes) is None
        assert cell(cells, sets=4) == 3
        cells.run(there.end_cell)
        back = crossed(between.run(there.changes))
        here.apply(back, files=False)
        assert value.get() == 4
        assert cell(cells.copy(), sets=5) == 4  # a cell with await has a copy, and is over outside of it
        cells.run(there.end_cell)
        assert between.run(there.changes) is None
        assert cell(cells) == 4
    finally:
        here.close()
        there.close()


def test_after_an_exchange_that_failed_both_sides_have_what_the_notebook_has(sides: Sides) -> None:
    with sides.cell():
        pass
    with sides.cell(is_lost=True) as there:
        there.values["always"]["a"] = "lost"
    sides.here.values["early"]["a"] = 1
    with sides.cell() as there:
        assert there.values["early"] == {"a": 1}
    assert sides.here.values["always"] == {"a": "lost"}, "it was never touched here, so what is there comes back"
    with sides.cell(is_lost=True) as there:
        there.values["always"]["a"] = "lost again"
    with sides.cell() as there:
        assert there.values["always"] == {"a": "lost"}


def test_a_value_that_cannot_be_sent_or_set_is_named_and_the_rest_crosses(sides: Sides) -> None:
    sides.here.values["always"] |= {"lock": threading.Lock(), "fine": 1}
    sides.here.values["early"] |= {"bad": "unwanted", "fine": 2}
    sides.there.refuses = "unwanted"
    with sides.cell() as there:
        assert sides.problems == {"always lock": "it holds a thread lock"}
        assert there.values["always"] == {"a": 0, "fine": 1}
        assert there.values["early"] == {"a": 0, "fine": 2}
    assert sides.problems == {"early bad": "ValueError: not here"}
    with sides.cell():
        assert sides.problems == {}, "it is said once"


def test_a_function_of_the_notebook_is_a_value_like_any_other(sides: Sides) -> None:
    sides.here.values["always"]["format"] = lambda number: f"<{number}>"
    with sides.cell() as there:
        assert there.values["always"]["format"](1) == "<1>"
    assert sides.notebook.changes() is None


def test_what_was_kept_is_set_in_a_fresh_process(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    with sides.cell() as there:
        there.values["always"]["a"] = 4
    kept = crossed(sides.notebook.whole())
    fresh = Sides(monkeypatch)
    fresh.notebook.restore(kept)
    assert fresh.here.values["always"] == {"a": 4}
    with fresh.cell() as there:
        assert there.values["always"] == {"a": 4}


STEP = st.tuples(
    st.sampled_from(["here", "there", "there", "lose"]),
    st.lists(
        st.tuples(st.sampled_from(sorted(MODULES)), st.sampled_from("abc"), st.none() | st.integers(0, 3)), max_size=4
    ),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=12))
def test_two_sides_are_as_one_process(steps: list[Any]) -> None:
    """Cells that set, remove and import, here and there, and devices that are lost between them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        sides = Sides(monkeypatch)
        model = {key: {"a": 0} for key in MODULES}

        def act(world: World, actions: list[Any], imports: bool) -> None:
            if imports:
                sides.library(world, "late_library")
            for key, name, value in actions:
                if MODULES[key] not in world.imported:
                    continue
                if value is None and key != "generator":
                    world.values[key].pop(name, None)
                    model[key].pop(name, None)
                else:
                    world.values[key][name] = model[key][name] = value

        for where, actions, imports in steps:
            if where == "lose":
                sides.new_device()
            elif where == "here":
                act(sides.here, actions, imports)
            else:
                with sides.cell() as there:
                    act(there, actions, imports)
            for key, module in MODULES.items():
                if module in sides.here.imported:
                    assert sides.here.values[key] == model[key], (key, where)
        if steps:
            with sides.cell() as there:
                sides.library(there, "late_library")
                assert there.values == model


# ------------------------------------------------------------------------------------------ with real libraries

PROCESS = """
import sys, pickle
sys.path[:0] = [{root!r}]
from tests.notebook.settings_actions import serve
serve({is_notebook})
"""


class Process:
    """One interpreter, with a side or without."""

    def __init__(self, is_notebook: bool | None, folder: Path) -> None:
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS.format(root=root, is_notebook=is_notebook)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
        )

    def ask(self, what: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((what, args), self._process.stdin)
        self._process.stdin.flush()
        is_fine, answer = pickle.load(self._process.stdout)  # noqa: S301
        assert is_fine, answer
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.mark.slow
@pytest.mark.needs("torch")
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 12))])
def test_cells_with_real_libraries_are_as_in_one_process(seed: int, tmp_path: Path) -> None:
    """Random actions of the table on random sides. Each step draws numbers, and all of them are the same."""
    pytest.importorskip("numpy")
    chance = random.Random(seed)
    (tmp_path / "sub").mkdir()
    processes = {name: Process(kind, tmp_path) for name, kind in (("here", True), ("there", False), ("one", None))}
    here, there, one = processes.values()
    try:
        actions = one.ask("actions")
        seen: set[str] = set()
        here.ask("begin")
        steps = [("seed", 0, False), ("seed numpy", 0, False), ("seed torch", 0, True)]
        steps += [(chance.choice(actions), chance.randrange(4), chance.random() < 0.5) for _ in range(150)]
        for number, (action, argument, is_there) in enumerate(steps):
            seen.add(action)
            if is_there:
                there.ask("apply", here.ask("changes"))
            got = (there if is_there else here).ask("act", action, argument)
            assert got == one.ask("act", action, argument), (number, action, argument, is_there)
            if is_there:
                here.ask("apply", there.ask("changes"))
                expected = one.ask("state")
                assert there.ask("state") == expected, (number, action, argument)
                assert here.ask("state") == expected, (number, action, argument)
        assert len(seen) > len(actions) * 0.8
        assert here.ask("problems") == there.ask("problems") == {}
    finally:
        for process in processes.values():
            process.close()
