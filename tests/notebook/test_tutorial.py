"""The tutorial tells the story of the example notebook, which the demo runs: what it shows is what runs there."""

from __future__ import annotations

import ast
import re
from importlib import resources
from pathlib import Path
from typing import Any

import nbformat

from sublet.notebook.batch.page import first_line
from sublet.notebook.example import png

ROOT = Path(__file__).parents[2]
CELL = re.compile(r"^```python cell\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def example() -> Any:
    text = resources.files("sublet.notebook").joinpath("five-minute-gpu.ipynb").read_text()
    return nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]


def test_every_cell_of_the_tutorial_is_one_of_the_notebook_that_the_demo_runs() -> None:
    shown = CELL.findall((ROOT / "docs" / "tutorial.md").read_text())
    cells = [cell.source for cell in example().cells if cell.cell_type == "code"]
    assert len(shown) >= 5
    at = -1
    for text in shown:
        assert text in cells, f"not in the notebook: {first_line(text)}"
        assert cells.index(text) > at, "in the order of the notebook"
        at = cells.index(text)


def test_the_example_is_handed_out_clean_and_says_no_more_than_it_needs() -> None:
    """Nobody's outputs, nobody's paths, and code that is whole."""
    notebook = example()
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        assert (cell.outputs, cell.execution_count) == ([], None)
        if not cell.source.startswith("%"):
            ast.parse(cell.source)
    assert "/home/" not in str(notebook)


def test_a_picture_is_a_png_of_its_size() -> None:
    data = png(bytes(range(6)), 3, 2).data
    assert data.startswith(b"\x89PNG")
    assert data[16:24] == (3).to_bytes(4, "big") + (2).to_bytes(4, "big")
