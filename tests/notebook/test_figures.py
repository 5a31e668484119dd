"""Figures of matplotlib cross as one unit, and look afterwards as if all cells had run in one process."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.notebook.groups import SMALL_BYTES
from tests.notebook.sides import Notebook, Other

BEGIN = """
import io
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
def picture(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
"""
SIMPLE = (
    "fig, ax = plt.subplots(figsize=(2, 2))\nax.plot([1, 2, 3])",
    "ax.plot([3, 2, 1]); drawn = picture(fig)",
    "ax.set_title('t'); ax.set_xlim(0, 5)",
    "ax.legend(['a', 'b']); drawn = picture(fig)",
    "ax.get_legend().set_title('both'); fig.set_size_inches(3, 2)",
)
MANY = (
    "fig, axes = plt.subplots(2, 2, sharex=True)\nplots = {'first': axes[0, 0]}\nline, = axes[0, 0].plot([1, 2, 3])",
    "other = axes[0, 1].twinx(); other.bar(['x', 'y'], [1, 2])\nimage = axes[1, 0].imshow(np.ones((3, 4)).cumsum(0))",
    "bar = fig.colorbar(image, ax=axes[1, 0]); line.set_linewidth(5); plots['first'].set_title('first')",
    "bar.set_label('heat'); axes[1, 1].hist([1, 2, 2]); axes[1, 1].yaxis.set_major_formatter(lambda x, n: f'{x:.0f}!')",
    "image.set_data(np.zeros((3, 4))); axes[0, 0].set_xlim(-3, 7); fig.tight_layout(); drawn = picture(fig)",
    "axes[0, 0].set_xlim(0, 2); line.set_ydata([3, 1, 2]); axes[1, 1].clear()",
)


@pytest.fixture
def nb(other: Other) -> Iterator[Notebook]:
    made = Notebook(other)
    made.here(BEGIN)
    yield made
    made.here("plt.close('all')")


@functools.cache
def plainly(cells: tuple[str, ...]) -> bytes:
    main = types.ModuleType("__main__")
    for cell in (BEGIN, *cells):
        exec(compile(cell, "<cell>", "exec"), vars(main))  # noqa: S102
    found: bytes = vars(main)["picture"](vars(main)["fig"])
    vars(main)["plt"].close("all")
    return found


@pytest.mark.parametrize("cells", [SIMPLE, MANY], ids=["simple", "many"])
@pytest.mark.parametrize("there", ["all", "even", "odd"])
def test_a_figure_looks_as_in_one_process(nb: Notebook, cells: tuple[str, ...], there: str) -> None:
    for n, cell in enumerate(cells):
        if there == "all" or n % 2 == (there == "odd"):
            assert nb.there(cell) is None
            assert not nb.came.stays
        else:
            assert nb.here(cell) is None
    assert nb.names["picture"](nb.names["fig"]) == plainly(cells)
    assert nb.there("last = picture(fig)") is None
    assert nb.names["last"] == plainly(cells)


def test_objects_of_a_figure_keep_their_identity(nb: Notebook) -> None:
    nb.here("fig, axes = plt.subplots(2)\nax = axes[0]\nline, = ax.plot([1, 2])\nheld = {'ax': ax, 'line': line}")
    before = {name: nb.names[name] for name in ("fig", "ax", "line")}
    assert nb.there("fig.suptitle('s'); fig.axes[0].plot([2, 1]); fig.axes[0].lines[0].set_color('red')") is None
    assert {name: nb.names[name] for name in before} == before
    assert (nb.names["held"]["ax"], nb.names["axes"][0]) == (before["ax"], before["ax"])
    assert (len(before["ax"].lines), before["line"].get_color(), before["ax"].figure) == (2, "red", before["fig"])
    assert nb.there("same = ax.figure is fig and held['line'] is ax.lines[0] and axes[0] is held['ax']") is None
    assert nb.names["same"] is True


def test_a_figure_that_is_unchanged_is_not_sent_again(nb: Notebook) -> None:
    """Nor after the first crossing, in which the device imports matplotlib. Small values are sent together, and again
    when one of them has changed; this one is none of them."""
    nb.here("fig, axes = plt.subplots(5, 5)")
    for _ in range(2):
        assert nb.there("n = len(fig.axes), axes.shape") is None
        assert not any({"fig", "axes"} & set(one.names) for one in nb.came.parcels)
        assert any(one.nbytes > 2 * SMALL_BYTES for one in nb.sent.parcels) or nb.sent.parcels == []
    assert nb.sent.parcels == []


def test_what_is_loaded_while_a_module_is_imported_is_not_sent_back(tmp_path: Path) -> None:
    """The module keeps the frame that imported it, as some do, and so all that was at work below it."""
    (tmp_path / "keeps_frames_.py").write_text(
        "import sys\nframe = sys._getframe()\nclass Kind:\n    def __init__(self): self.held = [1]\n"
    )
    other = Other()
    try:
        nb = Notebook(other)
        begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
        other.ask("run", begin)
        nb.here(f"{begin}\nimport numpy as np, keeps_frames_\nx = np.array([keeps_frames_.Kind()] * 200_000)")
        assert nb.there("n = len(x)") is None
        assert [one.names for one in nb.came.parcels] == [("n",)]
    finally:
        other.close()
        for name in [name for name in sys.modules if name == "keeps_frames_"]:
            del sys.modules[name]
        sys.path.remove(str(tmp_path))


def test_a_figure_and_what_it_holds_of_the_notebooks(nb: Notebook) -> None:
    """A function, a large array and an object that refers back to the figure are shared with the notebook."""
    nb.here(
        "class Note:\n    pass\nfig, ax = plt.subplots()\nnote = Note(); note.ax = ax; fig.note = note\n"
        "scale = 2\ndef label(x, n): return str(x * scale)\nax.xaxis.set_major_formatter(label)"
    )
    note = nb.names["note"]
    assert nb.there("note.seen = note.ax is ax and fig.note is note; scale = 3; ax.plot([1, 2])") is None
    assert (nb.names["fig"].note, note.seen, note.ax) == (note, True, nb.names["ax"])
    assert nb.names["ax"].xaxis.get_major_formatter()(2, 0) == "6"


def test_a_colour_bar_follows_its_image_on_both_sides(nb: Notebook) -> None:
    """The callback that joins them is not in matplotlib's own pickle."""
    nb.here("fig, ax = plt.subplots(); im = ax.imshow([[1, 2], [3, 4]]); bar = fig.colorbar(im)")
    assert nb.there("im.set_clim(0, 1); seen = float(bar.vmax)") is None
    assert (nb.names["seen"], float(nb.names["bar"].vmax)) == (1.0, 1.0)
    assert nb.here("im.set_clim(0, 5); im.set_cmap('hot')") is None
    assert (float(nb.names["bar"].vmax), nb.names["bar"].cmap.name) == (5.0, "hot")
    assert nb.there("seen = float(bar.vmax)") is None
    assert nb.names["seen"] == 5.0


@pytest.mark.parametrize("norm", ["LogNorm(1, 100)", "Normalize(1, 100)", "SymLogNorm(1, vmin=1, vmax=100)"])
def test_a_norm_that_has_a_name_is_that_of_the_figure(nb: Notebook, norm: str) -> None:
    """Its class may be one that matplotlib has made of a scale, which pickles its objects in a way of its own."""
    nb.here(f"from matplotlib import colors\nnorm = colors.{norm}")
    nb.here("fig, ax = plt.subplots(); im = ax.imshow(np.ones((3, 3)), norm=norm); bar = fig.colorbar(im)")
    assert nb.there("im.set_clim(2, 50); seen = float(norm.vmin), im.norm is norm, bar.norm is norm") is None
    assert nb.names["seen"] == (2, True, True)
    assert nb.names["im"].norm is nb.names["norm"]
    nb.here("norm.vmax = 70")
    assert nb.there("seen = round(bar.vmax), round(im.norm.vmax), im.norm is norm") is None
    assert nb.names["seen"] == (70, 70, True)


def test_a_figure_that_cannot_be_pickled_stays_and_is_named(nb: Notebook) -> None:
    assert nb.there("import threading\nfig = plt.figure(); fig.lock = threading.Lock(); fig.lock.acquire()") is None
    assert nb.came.stays["fig"] == "a thread lock that is held"


def test_a_figure_that_cannot_be_put_together_is_left_as_it_was(nb: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    nb.here("fig, ax = plt.subplots(); ax.set_title('old'); others = [1]")
    before = nb.names["picture"](nb.names["fig"])

    def fails(*more: Any) -> Any:
        raise RuntimeError("no canvas")

    with monkeypatch.context() as patched:
        patched.setattr("matplotlib.figure.Figure.set_canvas", fails)
        assert nb.there("ax.set_title('new'); others.append(ax)") is None
    assert "no canvas" in nb.came.stays["ax"]
    assert (nb.names["ax"].get_title(), nb.names["others"]) == ("old", [1])
    assert nb.names["picture"](nb.names["fig"]) == before


def test_deleting_figures_and_axes_sends_nothing(nb: Notebook) -> None:
    assert nb.there("fig, axes = plt.subplots(3, 3)") is None
    assert nb.there("del fig, axes") is None
    assert (nb.sent.parcels, nb.came.parcels) == ([], [])
    assert not {"fig", "axes"} & nb.names.keys()
