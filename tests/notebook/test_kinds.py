"""Every kind of object travels, stays or is refused by name, and nothing is silently something else afterwards.

The table is ``tests/notebook/kinds``; docs/notebook-objects.md is made of it. Each kind goes through a few stories that
meet it in both directions. Of two stories in which a cell on the device changes it each kind takes one, by its place in
the table: the change is seen here or by a second cell there, and a container holds it or its name is bound anew.
``SUBLET_CRASH_ALL=1``, as ``make soak`` sets it, takes all for each kind.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest

from sublet.errors import Unpicklable
from tests.notebook.kinds.kind import Kind
from tests.notebook.kinds.table import KINDS
from tests.notebook.sides import Notebook, Other
from tools.objects_docs import DOCUMENT, document

pytestmark = pytest.mark.filterwarnings("ignore")  # what objects warn of is theirs

WHOLE: Final = "SUBLET_CRASH_ALL" in os.environ


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


# ---- what travels


def read_there(nb: Notebook, kind: Kind) -> None:
    """It is there what it was here, and here afterwards."""
    assert nb.here(kind.make) is None
    hold_on(nb)
    assert holds_there(nb, kind.same)
    assert holds(nb, kind.same)
    assert is_held(nb) or not kind.change


def changed_there_and_seen_here(nb: Notebook, kind: Kind) -> None:
    read_there(nb, kind)
    assert nb.there(kind.change) is None
    assert is_held(nb) != kind.anew
    assert holds(nb, kind.after)


def changed_there_and_seen_there(nb: Notebook, kind: Kind) -> None:
    read_there(nb, kind)
    assert nb.there(kind.change) is None
    assert is_held(nb) != kind.anew
    assert holds_there(nb, kind.after)


def made_there_and_changed_here(nb: Notebook, kind: Kind) -> None:
    """It is made there. Then it is changed here, and a cell there sees that."""
    assert nb.there(kind.make) is None
    assert "x" not in nb.came.stays
    assert holds(nb, kind.same)
    if kind.change:
        assert nb.here(kind.change) is None
    assert holds_there(nb, kind.after or kind.same)


def held_by_something_that_travels(nb: Notebook, kind: Kind) -> None:
    """The first cell there changes it, inside of what holds it twice."""
    assert nb.here(f"{kind.make}\nbox_ = [x, {{'k': x}}]") is None
    one = "box_[0] is box_[1]['k']" if kind.change else "True"
    assert nb.there(f"ok_ = {one}\nx = box_[0]\n{kind.change}") is None
    assert nb.names["ok_"]
    assert holds(nb, f"{one} and ({kind.after or kind.same})")


def bound_anew_there(nb: Notebook, kind: Kind) -> None:
    """A name that is bound anew leaves the object as the cell left it."""
    assert nb.here(kind.make) is None
    hold_on(nb)
    assert nb.there(f"{kind.change}\nx = 0") is None
    assert nb.names["x"] == 0
    with nb.at_home():
        nb.names["x"] = nb.names["holder_"]["it"]
    assert holds(nb, kind.after)


# ---- what does not


def refused_by_name(nb: Notebook, kind: Kind) -> None:
    """The cell that wants it is told so; other cells run."""
    assert nb.here(f"{kind.make}\nfine = [1]") is None
    with pytest.raises(Unpicklable) as caught:
        nb.there("ran = fine\nx")
    assert (caught.value.path or "").startswith("x"), caught.value
    assert kind.why in str(caught.value)
    assert nb.there("ran = len(fine)") is None
    assert nb.names["ran"] == 1
    assert holds(nb, kind.same)
    assert nb.here(kind.close) is None


def stays_there_under_its_name(nb: Notebook, kind: Kind) -> None:
    assert nb.there(f"{kind.make}\nfine = [1]") is None
    assert kind.why in nb.came.stays["x"], nb.came.stays
    assert "x" not in nb.names
    assert nb.names["fine"] == [1]
    assert holds_there(nb, kind.same)


# ---- which kind goes through which

Told = Callable[[Notebook, Kind], None]


def stories_of(kind: Kind, place: int, *, whole: bool = WHOLE) -> list[Told]:
    """The stories of the kind at this place of the table."""
    if kind.why:
        return [refused_by_name, stays_there_under_its_name]
    first: list[Told] = [changed_there_and_seen_here, changed_there_and_seen_there] if kind.change else [read_there]
    last: list[Told] = [held_by_something_that_travels]
    if kind.change and not kind.anew:
        last.append(bound_anew_there)
    if not whole:
        first, last = [first[place % len(first)]], [last[place // 2 % len(last)]]
    return [*first, made_there_and_changed_here, *last]


@pytest.mark.parametrize(("place", "kind"), list(enumerate(KINDS)), ids=[named(kind) for kind in KINDS])
def test_it_goes_through_its_stories(other: Other, place: int, kind: Kind) -> None:
    for story in stories_of(kind, place):
        story(Notebook(other), kind)


def test_there_are_enough_of_them() -> None:
    assert len(KINDS) >= 150
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_each_kind_meets_both_directions_and_each_pair_of_stories_many_kinds() -> None:
    pairs = Counter[tuple[Told, Told]]()
    for place, kind in enumerate(KINDS):
        part, every = (stories_of(kind, place, whole=whole) for whole in (False, True))
        assert set(part) <= set(every)
        if kind.why:
            assert part == [refused_by_name, stays_there_under_its_name]
        else:
            first, made, last = part
            assert made is made_there_and_changed_here
            assert (first is read_there) != bool(kind.change)
            pairs[first, last] += 1
    firsts = changed_there_and_seen_here, changed_there_and_seen_there
    for pair in itertools.product(firsts, (held_by_something_that_travels, bound_anew_there)):
        assert pairs[pair] >= 30, (pair, pairs[pair])


def test_the_page_is_made_of_the_table() -> None:
    """If this fails: `.venv/bin/python -m tools.objects_docs`, and look at what changed."""
    assert DOCUMENT.read_text(encoding="utf-8") == document(DOCUMENT.read_text(encoding="utf-8"))
