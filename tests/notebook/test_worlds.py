"""Random notebooks over classes, containers, functions, exceptions, NumPy, pandas and PyTorch: the same steps in one
process and divided between notebook and device leave the same values, and the same objects and memory shared."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet.errors import SubletError
from tests.notebook.pictures import Picture
from tests.notebook.sides import Notebook, Other

pytestmark = pytest.mark.filterwarnings("ignore")  # what programs are warned of is theirs

FOLDER: Final = Path(__file__).parent / "worlds"
WORLDS: Final = sorted(one.stem for one in FOLDER.glob("*.txt"))
NAMES: Final = "abcd"
EXAMPLES: Final = max(20, settings().max_examples // 2)  # 5,000 in the soak
Cell = tuple[bool, list[str]]
"""Whether it runs on the device, and its lines."""


def read(world: str) -> tuple[str, list[str], list[str]]:
    """What its notebooks begin with, names that are compared beside those of the steps, and the steps: in these ``$x``,
    ``$y`` and ``$z`` stand for names, ``$k`` for a small number, and a backslash and an n for the end of a line."""
    begin, _, steps = (FOLDER / f"{world}.txt").read_text(encoding="utf-8").partition("# steps\n")
    seen = begin.splitlines()[0].removeprefix("# seen: ").split()
    return begin, seen, [one.replace("\\n", "\n") for one in steps.splitlines()]


def cells_of(steps: list[str]) -> st.SearchStrategy[list[Cell]]:
    name = st.sampled_from(NAMES)

    def filled(step: str, x: str, y: str, z: str, k: int) -> str:
        return string.Template(step).substitute(x=x, y=y, z=z, k=k)

    step = st.builds(filled, st.sampled_from(steps), name, name, name, st.integers(1, 3))
    cell = st.tuples(st.booleans(), st.lists(step, min_size=1, max_size=3))
    return st.lists(cell, min_size=2, max_size=7)


@pytest.mark.parametrize("world", WORLDS)
def test_any_notebook_ends_as_if_it_had_run_in_one_place(other: Other, world: str) -> None:
    begin, seen, steps = read(world)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cells_of(steps))
    def play(cells: list[Cell]) -> None:
        split, plain = Notebook(other), Notebook(other)
        for one in (split, plain):
            assert one.here(begin) is None
        for is_there, lines in cells:
            source = "\n".join(lines)
            try:
                got = split.there(source) if is_there else split.here(source)
            except SubletError:  # something cannot be sent, and the cell did not run
                continue
            assert got == plain.here(source), source
            if is_there and split.came.stays:
                return  # from here on the notebook has a handle for it
            pictures = [_picture(one, [*NAMES, *seen]) for one in (split, plain)]
            assert pictures[0] == pictures[1], source

    play()


def _picture(nb: Notebook, names: list[str]) -> object:
    with nb.at_home():
        return Picture(nb.names).of_names(names)
