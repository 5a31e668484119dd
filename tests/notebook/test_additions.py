"""What the notebook has added to the shell, to pandas and to Python's modules is named before a cell runs there."""

from __future__ import annotations

import logging
import logging.handlers
import sys
import types
from collections.abc import Iterator

import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter

from sublet.notebook.additions import Additions
from tests.notebook.sides import Notebook, Other


class Shell:
    """As much of IPython's as shows objects."""

    def __init__(self) -> None:
        self.display_formatter = DisplayFormatter()
        self.magics_manager = types.SimpleNamespace(magics={"line": {"time": print}, "cell": {}})


class Rig:
    """A notebook whose cells are run here."""

    def __init__(self, main: types.ModuleType) -> None:
        self.main = main
        self.shell = Shell()
        vars(main)["formatters"] = self.shell.display_formatter.formatters
        vars(main)["magics"] = self.shell.magics_manager.magics
        self.additions = Additions(self.shell)

    def here(self, source: str) -> None:
        exec(compile(source, "<cell>", "exec"), vars(self.main))  # noqa: S102

    def news(self, cell: str = "pass") -> list[str]:
        """Told before a cell that runs there."""
        return self.additions.news(cell)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    modules = set(sys.modules)
    yield Rig(main)
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    for kind in (pd.DataFrame, pd.Series):
        for name in ("geo_",):
            if name in vars(kind):
                delattr(kind, name)
            kind._accessors.discard(name)
    logging.getLogger("added_").handlers.clear()


POINT = "class Point: pass\ndef show(point): return 'a point'\n"
LOGGER = "import logging\nlogger = logging.getLogger('added_')\n"
HANDLER = LOGGER + "class Records(logging.Handler):\n    def emit(self, record): pass\nlogger.addHandler(Records())"
MODULE = "import types, sys\nhelpers = types.ModuleType('helpers_')\nhelpers.f = lambda: 1\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (POINT + "magics['cell']['shown'] = show", "%%shown was defined in the notebook"),
        (POINT + "class M:\n    def f(self, line): pass\nmagics['line']['shout'] = M().f", "%shout was defined"),
        (POINT + "formatters['text/html'].for_type(Point, show)", "the text/html printer of Point was added"),
        (POINT + "formatters['text/plain'].for_type(dict, show)", "the text/plain printer of dict was added"),
        (POINT + "formatters['text/html'].for_type(Point, repr)", "the text/html printer of Point was added"),
        (
            POINT + "import functools\nformatters['image/png'].for_type(int, functools.partial(show))",
            "the image/png printer of int was added",
        ),
        (
            POINT + "formatters['text/html'].for_type_by_name('lib', 'Thing', show)",
            "the text/html printer of Thing was added",
        ),
        (
            "import pandas as pd\n@pd.api.extensions.register_series_accessor('geo_')\nclass Geo: pass\ndel Geo",
            "Series.geo_ was added to pandas",
        ),
        (MODULE + "sys.modules['helpers_'] = helpers", "helpers_ was put into sys.modules"),
        (
            MODULE + "sys.modules['helpers_'] = types.ModuleType('helpers_'); "
            "sys.modules['helpers_'].f = helpers.f; del helpers",
            "helpers_ was put into sys.modules",
        ),
        (HANDLER, "the Records of logger added_ was added in the notebook"),
        (LOGGER + "logger.addHandler(logging.handlers.MemoryHandler(9))", "the MemoryHandler of logger added_ was"),
        (
            LOGGER + "import io\nout = io.StringIO()\nlogger.addHandler(logging.StreamHandler(out))",
            "the StreamHandler of",
        ),
        (
            LOGGER + "class Short(logging.Formatter): pass\nhandler = logging.StreamHandler()\n"
            "handler.setFormatter(Short()); logger.addHandler(handler); del handler",
            "the StreamHandler of logger added_",
        ),
    ],
)
def test_what_is_added_is_named_with_the_way_out(rig: Rig, source: str, said: str) -> None:
    """Once for each device."""
    assert rig.news() == []
    rig.here(source)
    (one,) = rig.news()
    assert one.startswith(said)
    assert one.endswith("in a %%gpu cell, too")
    assert rig.news() == []
    rig.additions.begin()
    assert rig.news() == [one]


def test_many_are_named_in_one_sentence(rig: Rig) -> None:
    rig.here(POINT + "for n in range(8):\n    formatters['text/html'].for_type(type(f'K{n}', (), {}), show)")
    (one,) = rig.news()
    assert "printer of K4 and 3 more were added" in one
    assert one.endswith("does not use them: add them in a %%gpu cell, too")


@pytest.mark.parametrize(
    "source",
    [
        "import json, types\nm = types.ModuleType('nowhere_')",
        "formatters['text/html'].for_type(int, repr)",
        "import pandas as pd\nframe = pd.DataFrame({'a': [1]})\nframe.plot",
        "import pandas as pd\n@pd.api.extensions.register_series_accessor('geo_')\nclass Geo: pass",
        LOGGER + "logger.addHandler(logging.StreamHandler())",
        LOGGER + "logger.addHandler(logging.NullHandler())",
    ],
)
def test_what_libraries_add_and_what_is_only_an_object_is_not_named(rig: Rig, source: str) -> None:
    rig.here(source)
    assert rig.news() == []


PRINTER = ("printer", "the text/html printer of Point")
ADDS_PRINTER = "get_ipython().display_formatter.formatters['text/html'].for_type(Point, show)"


def test_a_part_of_an_extension_module_comes_with_its_import(rig: Rig) -> None:
    """What the notebook puts into one, or beside it, does not."""
    assert rig.news() == []
    rig.here("from xml.parsers.expat import errors, model")
    assert rig.news() == []
    rig.here("errors.f_ = lambda: 1")
    try:
        (said,) = rig.news()
        assert "pyexpat.errors" in said
    finally:
        rig.here("del errors.f_")
    rig.here("import types, sys, pyexpat\nmine = sys.modules['pyexpat.mine_'] = types.ModuleType('mine_')")
    (said,) = rig.news()
    assert said.startswith("pyexpat.mine_ was put into sys.modules")


def test_what_a_cell_adds_on_the_device_holds_there_until_the_next_device(rig: Rig) -> None:
    rig.here(POINT + "formatters['text/html'].for_type(Point, show)")
    assert rig.news(ADDS_PRINTER) == []
    assert rig.additions.sentences_after([PRINTER]) == []
    assert rig.news() == []
    rig.additions.begin()
    assert len(rig.news()) == 1


def test_what_a_cell_seemed_to_add_on_the_device_and_did_not_is_named_before_the_next(rig: Rig) -> None:
    rig.here(POINT + "formatters['text/html'].for_type(Point, show)")
    assert rig.news(f"if False: {ADDS_PRINTER}") == []
    assert rig.additions.sentences_after([]) == []
    (said,) = rig.news()
    assert said.startswith(PRINTER[1])
    assert rig.news() == []


def test_one_addition_on_the_device_hides_no_other_of_its_sort(rig: Rig) -> None:
    assert rig.news(ADDS_PRINTER) == []
    assert len(rig.additions.sentences_after([PRINTER])) == 1
    rig.here(POINT + "formatters['text/html'].for_type(Point, show)")
    assert rig.news() == [], "both sides have it now"
    rig.here("formatters['text/html'].for_type(int, show)")
    (said,) = rig.news()
    assert said.startswith("the text/html printer of int was added in the notebook")
    rig.here("formatters['text/html'].for_type(Point, lambda point: 'another')")
    assert len(rig.news()) == 1


def test_another_printer_for_the_same_type_is_named_again(rig: Rig) -> None:
    rig.here(POINT + "formatters['text/html'].for_type(Point, show)")
    assert len(rig.news()) == 1
    rig.here("formatters['text/html'].for_type(Point, lambda point: 'another')")
    assert len(rig.news()) == 1


def test_a_shell_without_a_display_is_no_difficulty() -> None:
    assert isinstance(Additions(types.SimpleNamespace()).news("pass"), list)


def test_the_notebooks_own_module_under_the_name_that_multiprocessing_gives_it_is_none(rig: Rig) -> None:
    rig.here(POINT)
    sys.modules["__mp_main__"] = rig.main
    assert rig.news() == []


def test_what_is_changed_in_place_between_two_cells_is_seen(rig: Rig) -> None:
    """Not everything is looked at before every cell: only what is not what it was."""
    rig.here("import types, sys\nhelpers = sys.modules['helpers_'] = types.ModuleType('helpers_')\ndel helpers")
    assert rig.news() == rig.news() == []
    rig.here("import sys\nsys.modules['helpers_'].f = lambda: 1")
    (said,) = rig.news()
    assert "helpers_ was put into sys.modules" in said
    rig.here("formatters['text/html'].for_type(int, lambda n: '<b>')")
    (said,) = rig.news()
    assert "the text/html printer of int" in said
    rig.here("formatters['text/html'].for_type(int, lambda n: '<i>')")
    (said,) = rig.news()
    assert "the text/html printer of int" in said
    assert rig.news() == []


@pytest.mark.parametrize("source", [HANDLER, MODULE + "sys.modules['helpers_'] = helpers"])
def test_what_a_cell_on_the_device_has_added_is_named_after_it_unless_the_notebook_has_it(
    rig: Rig, other: Other, source: str
) -> None:
    notebook = Notebook(other)
    assert notebook.there("x = 1") is None
    assert notebook.came.added == ()
    assert notebook.there(source) is None
    (one,) = rig.additions.sentences_after(notebook.came.added)
    assert "on the device" in one
    assert one.endswith("without %%gpu, too")
    added = notebook.came.added
    assert notebook.there("x = 2") is None
    assert notebook.came.added == ()
    rig.here(source)
    assert rig.additions.sentences_after(added) == []
