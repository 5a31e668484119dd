"""Every kind of object travels, stays or is refused by name, and nothing is silently something else afterwards.

The table is ``tests/notebook/kinds``; docs/notebook-objects.md is made of it.
"""

from __future__ import annotations

import pytest

from sublet.errors import Unpicklable
from tests.notebook.kinds.kind import Kind
from tests.notebook.kinds.table import KINDS
from tests.notebook.sides import Notebook
from tools.objects_docs import DOCUMENT, document

pytestmark = pytest.mark.filterwarnings("ignore")  # what objects warn of is theirs

TRAVELLING = [kind for kind in KINDS if not kind.why]
CHANGING = [kind for kind in TRAVELLING if kind.change]
REFUSED = [kind for kind in KINDS if kind.why]


def named(kind: Kind) -> str:
    return kind.name.replace(" ", "-")


def holds(nb: Notebook, truth: str) -> bool:
    """Here."""
    assert nb.here(f"_ok = bool({truth})") is None, truth
    return bool(nb.names.pop("_ok"))


def holds_there(nb: Notebook, truth: str) -> bool:
    assert nb.there(f"ok_ = bool({truth})") is None, truth
    return bool(nb.names["ok_"])


def hold_on(nb: Notebook) -> None:
    """Somebody else has the object: no cell on the device reads that."""
    with nb.at_home():
        nb.names["holder_"] = {"it": nb.names["x"]}


def is_held(nb: Notebook) -> bool:
    return nb.names["holder_"]["it"] is nb.names["x"]


def test_there_are_enough_of_them() -> None:
    assert len(KINDS) >= 150
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", TRAVELLING, ids=named)
def test_it_is_read_there_and_is_what_it_was_here(nb: Notebook, kind: Kind) -> None:
    assert nb.here(kind.make) is None
    hold_on(nb)
    assert holds_there(nb, kind.same)
    assert holds(nb, kind.same)
    assert is_held(nb) or not kind.change


@pytest.mark.parametrize("kind", CHANGING, ids=named)
def test_it_is_changed_there(nb: Notebook, kind: Kind) -> None:
    nb.here(kind.make)
    hold_on(nb)
    assert nb.there(kind.change) is None
    assert is_held(nb) != kind.anew
    assert holds(nb, kind.after)


@pytest.mark.parametrize("kind", CHANGING, ids=named)
def test_a_second_cell_there_sees_what_the_first_did(nb: Notebook, kind: Kind) -> None:
    nb.here(kind.make)
    assert nb.there(kind.change) is None
    assert holds_there(nb, kind.after)


@pytest.mark.parametrize("kind", CHANGING, ids=named)
def test_it_is_changed_here_after_it_was_there(nb: Notebook, kind: Kind) -> None:
    nb.here(kind.make)
    assert holds_there(nb, kind.same)
    assert nb.here(kind.change) is None
    assert holds_there(nb, kind.after)


@pytest.mark.parametrize("kind", [kind for kind in CHANGING if not kind.anew], ids=named)
def test_a_name_that_is_bound_anew_leaves_the_object_as_the_cell_left_it(nb: Notebook, kind: Kind) -> None:
    nb.here(kind.make)
    hold_on(nb)
    assert nb.there(f"{kind.change}\nx = 0") is None
    assert nb.names["x"] == 0
    with nb.at_home():
        nb.names["x"] = nb.names["holder_"]["it"]
    assert holds(nb, kind.after)


@pytest.mark.parametrize("kind", TRAVELLING, ids=named)
def test_it_is_made_there(nb: Notebook, kind: Kind) -> None:
    assert nb.there(kind.make) is None
    assert "x" not in nb.came.stays
    assert holds(nb, kind.same)
    assert holds_there(nb, kind.same)


@pytest.mark.parametrize("kind", TRAVELLING, ids=named)
def test_it_is_held_by_something_that_travels(nb: Notebook, kind: Kind) -> None:
    nb.here(f"{kind.make}\nbox_ = [x, {{'k': x}}]")
    one = "box_[0] is box_[1]['k']" if kind.change else "True"
    assert holds_there(nb, one)
    assert nb.there(f"x = box_[0]\n{kind.change}") is None
    assert holds(nb, f"{one} and ({kind.after or kind.same})")


@pytest.mark.parametrize("kind", REFUSED, ids=named)
def test_it_is_refused_by_name_and_other_cells_run(nb: Notebook, kind: Kind) -> None:
    assert nb.here(f"{kind.make}\nfine = [1]") is None
    with pytest.raises(Unpicklable) as caught:
        nb.there("ran = fine\nx")
    assert (caught.value.path or "").startswith("x"), caught.value
    assert kind.why in str(caught.value)
    assert nb.there("ran = len(fine)") is None
    assert nb.names["ran"] == 1
    assert holds(nb, kind.same)
    assert nb.here(kind.close) is None


@pytest.mark.parametrize("kind", REFUSED, ids=named)
def test_it_stays_there_under_its_name(nb: Notebook, kind: Kind) -> None:
    assert nb.there(f"{kind.make}\nfine = [1]") is None
    assert kind.why in nb.came.stays["x"], nb.came.stays
    assert "x" not in nb.names
    assert nb.names["fine"] == [1]
    assert holds_there(nb, kind.same)


def test_the_page_is_made_of_the_table() -> None:
    """If this fails: `.venv/bin/python -m tools.objects_docs`, and look at what changed."""
    assert DOCUMENT.read_text(encoding="utf-8") == document(DOCUMENT.read_text(encoding="utf-8"))
