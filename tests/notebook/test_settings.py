"""The rows of the table one by one: what they read, what they set, and what stays with its side."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import re
import site
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest

from sublet.notebook.environment import CellEnvironment, Changes
from sublet.notebook.import_hook import ImportHook, is_imported
from sublet.notebook.settings import Setting, SettingKind, documented, library_settings, process, table, written
from sublet.notebook.settings.table import ENTRY_POINTS
from tests.notebook.crossing import crossed

DOCS = Path(__file__).parents[2] / "docs"


def row(key: str, *, is_notebook: bool = True) -> Setting:
    return next(one for one in table(is_notebook=is_notebook) if one.key == key)


def test_the_docs_show_the_table() -> None:
    text = (DOCS / "notebook.md").read_text()
    assert documented(table(is_notebook=True)) in text, "put what settings.documented() gives into docs/notebook.md"


def test_rows_have_keys_of_their_own_and_what_they_change_is_known() -> None:
    rows = table(is_notebook=True)
    assert len({one.key for one in rows}) == len(rows)
    assert {"sys.path", "os.environ", "warnings.filters", "matplotlib.rcParams", "sys.meta_path"} <= written(rows)
    for name in written(rows):
        assert re.fullmatch(r"[A-Za-z_][\w.]*", name)


DETERMINISTIC = """
import sys
from sublet.notebook.environment import CellEnvironment, Changes, _pack
from sublet.notebook.settings.setting import ALL

rows = {"torch determinism": (True, True), "torch determinism of compiled code": True}
notebook = CellEnvironment(is_notebook=True)
import torch

came = Changes(rows={key: (_pack({ALL: one}, ()),) for key, one in rows.items()})
notebook.apply(came, files=False)
print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
print("torch._inductor.config" in sys.modules)
import torch._inductor.config as compiler

print(compiler.deterministic, notebook.problems())
"""


def test_determinism_of_torch_is_set_here_without_its_compiler_which_learns_of_it_on_import() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", DETERMINISTIC], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["True True", "False", "True {}"], done.stderr


# ------------------------------------------------------------------------------------------------- files


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return sys.path


def test_the_search_path_keeps_each_sides_own_installation(path: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = row("sys.path")
    library = os.path.dirname(os.__file__)
    path[:] = ["/mine", library, os.path.join(library, "lib-dynload"), "", *site.getsitepackages(), "/last"]
    value = here.read()
    assert value == {"": ("/mine", process.STDLIB, "", process.SITE, "/last")}
    monkeypatch.setattr(sys, "path", [library, "", "/device/site", "/last"])
    there = row("sys.path", is_notebook=False)
    assert there.read() == {"": (process.STDLIB, process.SITE)}
    there.write(value, ())
    assert sys.path == ["/mine", library, "", "/device/site", "/last"]
    assert there.read() == value
    there.write({"": ("", process.STDLIB)}, ())
    assert sys.path == ["", library, "/device/site"], "what is installed here stays, marked or not"


def test_a_folder_given_to_one_side_stays_there(path: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    there = row("sys.path", is_notebook=False)
    before = there.read()
    monkeypatch.setattr(process, "own_paths", {"/given"})
    path.insert(0, "/given")
    assert there.read() == before
    there.write({"": ("/mine", process.STDLIB, process.SITE)}, ())
    assert path[:2] == ["/given", "/mine"]


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SUBLET_LEASE", "MPLBACKEND"])
def test_what_the_lease_says_crosses_in_neither_direction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = row("environment")
    monkeypatch.setenv(name, "9")
    assert name not in environment.read()
    environment.write({name: "8"}, (name,))
    assert os.environ[name] == "9"


def test_the_environment_is_compared_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = row("environment")
    monkeypatch.setenv("TEST_A", "1")
    monkeypatch.delenv("TEST_B", raising=False)
    first = environment.read()
    assert environment.read() is first
    environment.write({"TEST_B": "2"}, ("TEST_A", "TEST_NONE"))
    now = environment.read()
    assert ("TEST_A" in now, now["TEST_B"]) == (False, "2")
    monkeypatch.delenv("TEST_B")


class Two:
    """Both sides in this process, which is enough for what one of them reads and the other sets."""

    def __init__(self, rows: tuple[Setting, ...], *, sees_files: bool = True) -> None:
        self.here = CellEnvironment(is_notebook=True, rows=rows)
        self.there = CellEnvironment(is_notebook=False, rows=rows)
        self.here.begin(sees_files=sees_files)

    def send(self) -> None:
        changes = crossed(self.here.changes())
        self.there.apply(changes, files=True)
        self.there.apply(changes, files=False)

    def close(self) -> None:
        self.here.close()
        self.there.close()


def test_a_tenants_guest_keeps_its_files_and_gets_the_rest() -> None:
    values = {"folder": "/mine", "precision": 3}
    got: dict[str, Any] = {}

    def of(key: str, kind: str) -> Setting:
        return Setting(
            key=key,
            about="",
            read=lambda: {"": values[key]},
            write=lambda new, gone: got.update({key: new[""]}),
            default=lambda: {"": None},
            kind=kind,
        )

    two = Two((of("folder", SettingKind.FILES), of("precision", SettingKind.GLOBAL)), sees_files=False)
    try:
        two.send()
        assert got == {"precision": 3}
        values["folder"] = "/other"
        back = two.there.changes()
        assert back is None
    finally:
        two.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    side = CellEnvironment(is_notebook=False, rows=(row("working folder", is_notebook=False),))
    other = CellEnvironment(is_notebook=True, rows=(row("working folder"),))
    try:
        (tmp_path / "gone").mkdir()
        other.begin(sees_files=True)
        monkeypatch.chdir(tmp_path / "gone")
        changes = other.changes()
        monkeypatch.chdir(tmp_path)
        (tmp_path / "gone").rmdir()
        assert changes is not None
        side.apply(changes, files=True)
        assert "FileNotFoundError" in side.problems()["working folder"]
        assert os.getcwd() == str(tmp_path)
        assert side.changes() is None, "it is not sent back"
    finally:
        side.close()
        other.close()


# ---------------------------------------------------------------------------------------------- warnings, logging


@pytest.fixture
def filters() -> Iterator[None]:
    with warnings.catch_warnings():
        yield


def told(message: str, category: type[Warning] = UserWarning) -> bool:
    """Whether it would be shown; asked without a memory of what was shown."""
    with warnings.catch_warnings(record=True) as found:
        warnings.warn_explicit(message, category, "file.py", 1, registry={})
    return bool(found)


@pytest.mark.usefixtures("filters")
def test_filters_cross_and_those_that_only_the_other_side_has_stay() -> None:
    warnings.resetwarnings()
    here = row("warnings")
    warnings.filterwarnings("ignore", message="of the notebook")
    value = here.read()
    assert here.read()[""] is value[""]
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", message="of the device")
    there = row("warnings", is_notebook=False)
    there.read()
    there.write(value, ())
    assert not told("of the notebook")
    assert not told("of the device")
    assert told("of nobody")
    there.write({"": ()}, ())
    assert told("of the notebook"), "it was taken away"
    assert not told("of the device")


@pytest.mark.usefixtures("filters")
def test_filters_of_the_notebook_that_a_cell_has_taken_away_are_gone_there_too() -> None:
    """As ``warnings.resetwarnings()`` does it, in the first cell on a device: the notebook has told it all it has."""
    warnings.resetwarnings()
    here = row("warnings")
    warnings.filterwarnings("ignore", message="of the notebook")
    here.read()
    here.write({"": ()}, ())
    assert told("of the notebook")


@pytest.mark.usefixtures("filters")
def test_a_filter_for_a_category_that_is_not_imported_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("test_late_category")
    module.Late = type("Late", (UserWarning,), {"__module__": "test_late_category"})  # type: ignore[attr-defined]
    warnings.resetwarnings()
    there = row("warnings", is_notebook=False)
    value = {"": (("ignore", None, ("test_late_category", "Late"), None, 0),)}
    there.write(value, ())
    assert there.read() == value
    monkeypatch.setitem(sys.modules, "test_late_category", module)
    assert there.read() == value
    assert not told("x", module.Late)
    assert told("x", UserWarning)


def test_levels_of_loggers() -> None:
    levels = row("logging")
    logger = logging.getLogger("test.settings.level")
    try:
        logger.setLevel(logging.DEBUG)
        assert levels.read()[logger.name] == logging.DEBUG
        levels.write({logger.name: logging.ERROR, "\0disabled": 5}, ())
        assert (logger.level, logging.root.manager.disable) == (logging.ERROR, 5)
        levels.write({}, (logger.name, "\0disabled"))
        assert (logger.level, logging.root.manager.disable) == (0, 0)
    finally:
        logger.setLevel(0)
        logging.disable(0)


def test_what_the_root_logger_writes_to_a_stream_is_the_same_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    output = row("logging output")
    logging.basicConfig(stream=sys.stderr, format="{message}!", style="{", datefmt="%H")
    other = logging.Handler()
    logging.root.addHandler(other)
    value = output.read()
    assert value["root"] == (True, (("stderr", 0, ("{message}!", "%H", "{")),))
    monkeypatch.setattr(logging.root, "handlers", [other, logging.StreamHandler(sys.stdout)])
    output.write(value, ())
    assert output.read() == value
    assert len(logging.root.handlers) == 2
    assert logging.root.handlers[0] is other, "one that is no plain text stream stays"
    record = logging.LogRecord("x", 20, "f", 1, "text", (), None)
    assert logging.root.handlers[1].format(record) == "text!"
    output.write({}, ("root",))
    assert logging.root.handlers == [other]


def test_handlers_of_a_named_logger_cross_with_whether_it_hands_records_on(capsys: pytest.CaptureFixture[str]) -> None:
    output, logger = row("logging output"), logging.getLogger("test.output")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("here: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    value = {"test.output": output.read()["test.output"]}
    logger.removeHandler(handler)
    logger.propagate = True
    try:
        assert "test.output" not in output.read()
        output.write(value, ())
        assert output.read()["test.output"] == value["test.output"]
        logger.warning("text")
        assert capsys.readouterr().out == "here: text\n"
        output.write({}, ("test.output",))
        assert (logger.handlers, logger.propagate) == ([], True)
    finally:
        logger.handlers, logger.propagate = [], True


def test_the_time_zone_goes_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = row("environment")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        environment.write({"TZ": "Asia/Tokyo"}, ())
        assert time.strftime("%Z", time.localtime(0)) == "JST"
        environment.write({}, ("TZ",))
        assert "TZ" not in os.environ
    finally:
        monkeypatch.undo()
        time.tzset()


# ------------------------------------------------------------------------------------- what is added to pandas


ACCESSOR = """
class Twice:
    def __init__(self, data):
        self.data = data
    def go(self):
        return [FACTOR * one for one in self.data]
    @staticmethod
    def about():
        return "twice"
FACTOR = 2
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of a notebook; what it adds to pandas goes with it."""
    pandas = pytest.importorskip("pandas")
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(ACCESSOR, vars(main))  # noqa: S102
    yield vars(main)
    pandas.Series._accessors.discard("twice_")
    if "twice_" in vars(pandas.Series):
        del pandas.Series.twice_


def test_an_accessor_is_registered_on_the_other_side_and_found_by_its_name(notebook: dict[str, Any]) -> None:
    import pandas as pd

    here, there = row("pandas accessors"), row("pandas accessors", is_notebook=False)
    pd.api.extensions.register_series_accessor("twice_")(notebook["Twice"])
    value = here.read()
    assert value == {"Series.twice_": ("Twice", 1)}
    there.write(value, ())
    series: Any = pd.Series([1, 2])
    assert (series.twice_.go(), pd.Series.twice_.about()) == ([2, 4], "twice")
    assert there.read() == value
    notebook["Twice"] = type("Twice", (), {"__init__": lambda self, data: None, "go": lambda self: "another"})
    assert series.twice_.go() == "another", "the class that the notebook has under the name now"
    del notebook["Twice"]
    with pytest.raises(RuntimeError, match="Twice of the notebook, which the cell does not have"):
        _ = pd.Series([1]).twice_.go
    there.write({}, ("Series.twice_",))
    assert not hasattr(pd.Series, "twice_")


def test_one_that_is_registered_again_is_another(notebook: dict[str, Any]) -> None:
    import pandas as pd

    here, register = row("pandas accessors"), pd.api.extensions.register_series_accessor("twice_")
    register(notebook["Twice"])
    before = here.read()
    exec(ACCESSOR, notebook)  # noqa: S102
    assert here.read() == {}, "what pandas has is no name's any more"
    with pytest.warns(UserWarning, match="overriding"):
        register(notebook["Twice"])
    assert here.read()["Series.twice_"] == ("Twice", before["Series.twice_"][1] + 1)


def test_the_progress_bars_of_pandas_are_those_of_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd
    from pandas.core.groupby import groupby
    from pandas.core.groupby.generic import DataFrameGroupBy, SeriesGroupBy

    tqdm = pytest.importorskip("tqdm")
    bars = row("tqdm of pandas")
    try:
        assert bars.read() == {}
        tqdm.tqdm.pandas(disable=True, desc="rows")
        value = bars.read()
        assert value == {"": ("tqdm.std", "tqdm", {"disable": True, "desc": "rows"})}
        first = vars(pd.DataFrame)["progress_apply"]
        bars.write(value, ())
        assert vars(pd.DataFrame)["progress_apply"] is not first
        assert bars.read() == value
        frame: Any = pd.Series([1, 2])
        assert frame.progress_apply(lambda x: x + 1).tolist() == [2, 3]
    finally:
        for kind in (pd.DataFrame, pd.Series, SeriesGroupBy, DataFrameGroupBy, groupby.GroupBy):
            for name in [name for name in vars(kind) if name.startswith("progress_")]:
                delattr(kind, name)


def test_a_module_of_ones_own_is_loaded_again_on_the_other_side(
    tmp_path: Path, path: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints was shown on the side that loaded it; one that is not loaded there stays so."""
    here, there = row("reloaded modules"), row("reloaded modules", is_notebook=False)
    path.insert(0, str(tmp_path))
    file = tmp_path / "mine_to_reload.py"
    file.write_text("VALUE = 1\n")
    mine: Any = importlib.import_module("mine_to_reload")
    try:
        assert (here.read(), there.read()) == ({}, {})
        file.write_text("VALUE = 1234\nprint('loaded')\n")
        importlib.reload(mine)
        value = here.read()
        assert value == {"mine_to_reload": 1}
        mine.VALUE = 1
        capsys.readouterr()
        there.write({**value, "never_loaded_": 3}, ())
        assert (mine.VALUE, capsys.readouterr().out) == (1234, "")
        assert "never_loaded_" not in sys.modules
    finally:
        del sys.modules["mine_to_reload"]


def test_a_module_of_ones_own_that_takes_the_place_of_an_installed_one_is_noticed(
    tmp_path: Path, path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, installed = row("reloaded modules"), types.ModuleType("mine_or_theirs")
    installed.__spec__ = ModuleSpec("mine_or_theirs", None, origin=importlib.__file__)
    monkeypatch.setitem(sys.modules, "mine_or_theirs", installed)
    assert here.read() == {}
    path.insert(0, str(tmp_path))
    (tmp_path / "mine_or_theirs.py").write_text("VALUE = 1\n")
    del sys.modules["mine_or_theirs"]
    mine = importlib.import_module("mine_or_theirs")
    monkeypatch.setitem(sys.modules, "one_more_", types.ModuleType("one_more_"))
    assert here.read() == {}
    importlib.reload(mine)
    assert here.read() == {"mine_or_theirs": 1}


def test_scikit_learn_is_read_and_set_by_its_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("sklearn")
    config: dict[str, Any] = {"transform_output": "default", "assume_finite": False}
    fake.get_config = lambda: dict(config)  # type: ignore[attr-defined]
    fake.set_config = lambda **new: config.update(new)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sklearn", fake)
    config["transform_output"] = "pandas"
    two = Two((row("scikit-learn"),))
    try:
        changes = two.here.changes()
        assert changes is not None
        assert [one.names for one in changes.rows["scikit-learn"]] == [("transform_output",)]
        config["transform_output"] = "default"
        two.there.apply(changes, files=False)
        assert config == {"transform_output": "pandas", "assume_finite": False}
    finally:
        two.close()


@pytest.mark.parametrize(
    ("key", "path", "name", "value"),
    [
        ("torch cudnn", "torch.backends.cudnn", "enabled", False),
        ("mpmath", "mpmath.mp", "prec", 170),
        ("Pillow size limit", "PIL.Image", "MAX_IMAGE_PIXELS", None),
        ("Pillow truncated images", "PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", True),
    ],
)
def test_an_attribute_of_a_library_that_a_program_sets(key: str, path: str, name: str, value: object) -> None:
    module, _, attribute = path.rpartition(".") if key == "mpmath" else (path, "", "")
    owner = pytest.importorskip(module)
    owner = getattr(owner, attribute) if attribute else owner
    here, before = row(key), getattr(owner, name)
    assert here.default is not None
    assert here.read() == here.default(), "what the library begins with"
    setattr(owner, name, value)
    try:
        said = here.read()
        assert said[name] == value
        setattr(owner, name, before)
        row(key, is_notebook=False).write({name: said[name]}, ())
        assert getattr(owner, name) == value
        assert f"{path.partition('.')[0]}:{name}" in here.assigned, "else it would be named as not carried"
    finally:
        setattr(owner, name, before)


def test_names_of_colors_that_a_program_has_set() -> None:
    """As ``seaborn.set_theme`` does with the short names."""
    colors = pytest.importorskip("matplotlib.colors")
    here, names = row("matplotlib colors"), colors.get_named_colors_mapping()
    assert here.read() == {}, "those that matplotlib comes with"
    before = names["b"]
    try:
        names["b"], names["house"] = (0.3, 0.4, 0.7), "#123456"
        said = here.read()
        assert said == {"b": (0.3, 0.4, 0.7), "house": "#123456"}
        assert here.read() is said
        here.write({}, ("b", "house"))
        assert (names["b"], "house" in names) == (before, False)
        assert colors.to_rgb("b") == before
        row("matplotlib colors", is_notebook=False).write(said, ())
        assert colors.to_hex("house") == "#123456"
        assert colors.to_rgb("b") == (0.3, 0.4, 0.7)
    finally:
        names["b"] = before
        names.pop("house", None)


PRINTING = """
import sympy
from IPython.core.interactiveshell import InteractiveShell
from sublet.notebook.settings import table

shell = InteractiveShell.instance()
row = next(one for one in table(is_notebook=True) if one.key == "SymPy printing")
x = sympy.Symbol("x")
values = [[x**2, 1 + x], x**2 / 3, (x + x**3 + 1)]
shown = lambda: [shell.display_formatter.format(one, exclude=("image/png",)) for one in values]
assert row.read() == {}, row.read()
fresh = shown()
for given in (
    {"use_latex": "mathjax"}, {"use_latex": False, "order": "rev-lex"}, {"pretty_print": False},
    {"use_latex": "mathjax", "fold_short_frac": True, "latex_mode": "equation", "print_builtin": False},
):
    sympy.printing.printer.Printer._global_settings.clear()
    sympy.init_printing(ip=shell, **given)
    expected, said = shown(), row.read()
    assert expected != fresh, given
    sympy.printing.printer.Printer._global_settings.clear()
    sympy.init_printing(ip=shell, use_latex="mathjax" if given.get("use_latex") is False else False)
    assert shown() != expected, given
    sympy.printing.printer.Printer._global_settings.clear()
    row.write(said, ())
    assert (shown(), row.read()) == (expected, said), given
sympy.init_printing(ip=shell, pretty_printer=lambda one, **_: "mine")
assert row.read() == {}, "it was given a function of the program"
"""


def test_how_sympy_prints_is_read_from_its_printers_and_set_by_its_own_function() -> None:
    pytest.importorskip("sympy")
    subprocess.run([sys.executable, "-c", PRINTING], check=True, timeout=300)


def library(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> Any:
    """Stands for a library that the tests do not install: what a row calls of it."""
    made = types.ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Template:
    def __init__(self, props: dict[str, Any]) -> None:
        self._props = props


class Templates(dict[str, Any]):
    default = "plotly"

    @property
    def _templates(self) -> dict[str, Any]:
        return self


def test_templates_of_plotly_cross_with_what_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of plotly's own that was not used yet is not read."""
    here = Templates(plotly=type("Lazy", (), {}), mine=Template({"layout": {"font": {"size": 3}}}))
    io = library(monkeypatch, "plotly.io", templates=here)
    library(monkeypatch, "plotly.graph_objects", layout=types.SimpleNamespace(Template=Template))
    here.default = "mine"
    read = row("plotly templates").read
    said = read()
    assert said == {"": "mine", "mine": {"layout": {"font": {"size": 3}}}}
    assert read() is said
    here["mine"]._props["layout"]["font"]["size"] = 4
    assert read()["mine"] == {"layout": {"font": {"size": 4}}}, "it was changed in place"
    io.templates = there = Templates(plotly=type("Lazy", (), {}))
    there_row = row("plotly templates", is_notebook=False)
    there_row.write(said, ())
    assert (there.default, there["mine"]._props) == ("mine", said["mine"])
    there_row.write({}, ("mine", "never"))
    assert list(there) == ["plotly"]


def test_settings_of_polars_altair_xarray_and_jax_go_through_their_own_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[Any] = []
    text = '{"environment": {}, "direct": {}}'
    config = types.SimpleNamespace(save=lambda: text, load=lambda given: called.append(("polars", given)))
    library(monkeypatch, "polars", Config=config)
    registry = types.SimpleNamespace(
        active="default", options={"max_rows": None}, enable=lambda name, **more: called.append((name, more))
    )
    library(monkeypatch, "altair", data_transformers=registry, renderers=registry)
    xarray = {"display_width": 80, "keep_attrs": True}
    library(monkeypatch, "xarray", get_options=lambda: xarray, set_options=lambda **new: called.append(new))
    jax = types.SimpleNamespace(jax_enable_x64=True, jax_platforms="cpu", update=lambda *one: called.append(one))
    library(monkeypatch, "jax", config=jax)
    expected = {
        "polars": {"": text},
        "altair": {"data_transformers": ("default", {"max_rows": None})},
        "xarray": xarray,
        "JAX": {"jax_enable_x64": True},
    }
    for key, values in expected.items():
        assert row(key).read() == values
        row(key, is_notebook=False).write(values, ())
    assert called == [("polars", text), ("default", {"max_rows": None}), xarray, ("jax_enable_x64", True)]


# ------------------------------------------------------------------------------------------------ libraries' own

LIBRARY = """
_precision, _state = 3, 10

def draw():
    global _state
    _state += 1
    return _state
"""
DECLARED = """
import rowlib

def _set_precision(value):
    rowlib._precision = value

def _set_state(value):
    rowlib._state = value

settings = {"precision": (lambda: rowlib._precision, _set_precision)}
generators = {"global": (lambda: rowlib._state, _set_state)}
"""


def test_a_library_declares_settings_and_generators(tmp_path: Path, path: list[str]) -> None:
    """The example of the docs. Nothing of the library is imported before the program does it."""
    (tmp_path / "rowlib").mkdir()
    (tmp_path / "rowlib" / "__init__.py").write_text(LIBRARY)
    (tmp_path / "rowlib" / "for_sublet.py").write_text(DECLARED)
    path.insert(0, str(tmp_path))
    declared = EntryPoint("rowlib", "rowlib.for_sublet", ENTRY_POINTS)
    two = Two(tuple(library_settings([declared])))
    try:
        assert "rowlib" not in sys.modules
        library: Any = importlib.import_module("rowlib")
        library._precision = 5
        library.draw()
        changes = crossed(two.here.changes())
        assert set(changes.rows) == {"rowlib settings", "rowlib generators"}
        library._precision, library._state = 0, 0
        two.there.apply(changes, files=False)
        assert (library._precision, library.draw()) == (5, 12)
    finally:
        two.close()
        for name in ("rowlib", "rowlib.for_sublet"):
            sys.modules.pop(name, None)


def test_entry_points_of_installed_packages_are_found(tmp_path: Path) -> None:
    package = tmp_path / "rowlib-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: rowlib\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[sublet.settings]\nrowlib = rowlib.for_sublet\n")
    asked = "from sublet.notebook.settings import library_settings; print([row.key for row in library_settings()])"
    said = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "['rowlib settings', 'rowlib generators']\n"


# ---------------------------------------------------------------------------------------------------- the hook


def test_what_stands_for_a_module_is_none() -> None:
    before = sys.modules.get("test_stand_in")
    assert before is None
    sys.modules["test_stand_in"] = object()  # type: ignore[assignment]
    try:
        assert not is_imported("test_stand_in")
    finally:
        del sys.modules["test_stand_in"]
    assert is_imported("os")
    assert not is_imported("no_such_module")


class Called:
    def __init__(self) -> None:
        self.names: list[tuple[str, object]] = []

    def imported(self, name: str) -> None:
        self.names.append((name, getattr(sys.modules[name], "done", None)))


def test_the_hook_is_called_at_the_end_of_an_import_and_leaves_no_trace(tmp_path: Path, path: list[str]) -> None:
    (tmp_path / "hooked.py").write_text("from __future__ import annotations\ndone = True\n")
    (tmp_path / "failing.py").write_text("1 / 0\n")
    path.insert(0, str(tmp_path))
    called = Called()
    hook = ImportHook(called.imported)
    for name in ("hooked", "failing", "nowhere"):
        hook.watch(name)
    hook.install()
    try:
        module = importlib.import_module("hooked")
        assert called.names == [("hooked", True)]
        loader: Any = module.__spec__.loader if module.__spec__ is not None else None
        assert type(loader).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(loader)
        importlib.reload(module)
        assert len(called.names) == 2
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("failing")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("nowhere")
        assert len(called.names) == 2
        del called
        sys.modules.pop("hooked")
        importlib.import_module("hooked")
        assert hook not in sys.meta_path, "whom it called is gone"
    finally:
        hook.remove()
        sys.modules.pop("hooked", None)


def test_the_hook_leaves_loaders_of_many_modules_alone() -> None:
    """Those of built-in and frozen modules are classes of the interpreter's own."""
    before = [dict(vars(one)) for one in (BuiltinImporter, FrozenImporter)]
    called = Called()
    hook = ImportHook(called.imported)
    for name in ("errno", "__phello__"):
        hook.elsewhere.add(name)
        spec = hook.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        assert loader in (BuiltinImporter, FrozenImporter)
        module = module_from_spec(spec)
        with contextlib.redirect_stdout(None):
            loader.exec_module(module)
    assert [dict(vars(one)) for one in (BuiltinImporter, FrozenImporter)] == before


def test_a_library_that_the_other_side_has_imported_draws_nothing_here(tmp_path: Path, path: list[str]) -> None:
    """It drew there when it was imported; one process imports it once."""
    for name in ("drawing", "drawing_alone"):
        (tmp_path / f"{name}.py").write_text("import random\nrandom.random()\n")
    path.insert(0, str(tmp_path))
    side = CellEnvironment(is_notebook=False, rows=(row("random"),))
    before = random.getstate()
    try:
        side.apply(Changes(modules=("drawing",)), files=True)
        importlib.import_module("drawing")
        assert random.getstate() == before
        importlib.import_module("drawing_alone")
        assert random.getstate() != before
    finally:
        random.setstate(before)
        side.close()
        sys.modules.pop("drawing", None)
        sys.modules.pop("drawing_alone", None)
