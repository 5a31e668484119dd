"""Prepares a notebook: reads and checks it, and inserts its parameters."""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sublet.errors import InvalidRequest
from sublet.notebook.batch.job_options import gpu_line, nearest

PARAMETERS: Final = "parameters"
"""The tag of the cell with the defaults, as papermill has it."""
INJECTED: Final = "injected-parameters"
"""The tag of the cell that was put in."""
NOTEBOOK_MAX: Final = 256 << 20
"""Bytes of a notebook's file; one that is larger holds pictures by the thousand, and its user should know."""

GRAMMAR: Final = "rfc3987_syntax"
"""A package that jsonschema loads where it is installed, as it is with JupyterLab."""

_WORDS: Final = re.compile(r"[^\W\d]\w*")
"""Everything that could be a name."""

Notebook = Any
"""``nbformat.NotebookNode``: a dict with attributes."""


def _load_lightly() -> None:
    """``nbformat`` loads all that can check a schema, and with that, where it is installed, a grammar of addresses in
    every alphabet, whose parsers take over a second to make. No notebook has such an address to be checked, and only
    processes that run nothing but jobs and commands come here."""
    if GRAMMAR not in sys.modules:
        sys.modules[GRAMMAR] = None  # type: ignore[assignment] # as if it was not installed


def read_notebook(path: Path) -> Notebook:
    """Raises ``InvalidRequest`` where there is none, or what there is cannot be read as one."""
    _load_lightly()
    import nbformat

    try:
        if path.stat().st_size > NOTEBOOK_MAX:
            raise InvalidRequest(
                f"{path} is larger than {NOTEBOOK_MAX >> 20} MiB", do="Clear its outputs, and save it."
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidRequest(f"{path} cannot be read: {reason}", do="Name a notebook (.ipynb).") from None
    try:
        notebook = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
        nbformat.validate(notebook)
    except Exception as error:  # noqa: BLE001 - nbformat raises what it likes
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidRequest(f"{path} is not a notebook: {first[:200]}", do="Name a notebook (.ipynb).") from None
    if not code_cells(notebook):
        raise InvalidRequest(f"{path} has no code cell to run", do="Name another notebook.")
    return notebook


def code_cells(notebook: Notebook) -> list[int]:
    """Where in the notebook those are that run, in order."""
    return [n for n, cell in enumerate(notebook.cells) if cell.cell_type == "code" and cell.source.strip()]


def has_gpu_cells(notebook: Notebook) -> bool:
    """Whether any cell asks for a device itself."""
    return any(gpu_line(notebook.cells[n].source) is not None for n in code_cells(notebook))


def with_parameters(notebook: Notebook, texts: Sequence[str]) -> Notebook:
    """A copy in which ``name=value`` texts hold: in a cell of their own, behind the one tagged ``parameters``.

    Where a cell is tagged, only names that it gives a default can be set: a misspelt one would silently
    change nothing. Where none is tagged they go first, or behind a cell that gives them a value and does nothing
    else. A value is a Python literal, and where it is none, a text.
    """
    found = copy.deepcopy(notebook)
    values = _parsed(texts)
    if not values:
        return found
    tagged = next((n for n in code_cells(found) if PARAMETERS in found.cells[n].metadata.get("tags", [])), None)
    if tagged is not None:
        _check(values, found.cells[tagged].source)
        at = tagged + 1
    else:
        at = _place_for(values, found)
    injected = [n for n, cell in enumerate(found.cells) if INJECTED in cell.metadata.get("tags", [])]
    for n in reversed(injected):  # of an earlier run
        del found.cells[n]
        at -= n < at
    found.cells.insert(at, _cell(values))
    return found


def unknown_parameters(notebook: Notebook, texts: Sequence[str]) -> list[str]:
    """What to say of parameters that no cell has a word of. They need not be wrong: names can be made up."""
    cells = [notebook.cells[n] for n in code_cells(notebook)]
    used = {
        word for one in cells if INJECTED not in one.metadata.get("tags", []) for word in _WORDS.findall(one.source)
    }
    return [
        f"no cell of the notebook uses the parameter {name}{nearest(name, sorted(used))}"
        for name in _parsed(texts)
        if name not in used
    ]


def _cell(values: Mapping[str, object]) -> Any:
    import nbformat

    source = "# Parameters\n" + "\n".join(f"{name} = {value!r}" for name, value in values.items())
    return nbformat.v4.new_code_cell(source, metadata={"tags": [INJECTED]})  # type: ignore[no-untyped-call]


def _parsed(texts: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidRequest(f"{text!r} is not a parameter", do="Write it as NAME=VALUE, such as lr=0.1.")
        if name in found:
            raise InvalidRequest(f"the parameter {name} is given twice", do="Give it once.")
        found[name] = _value(value)
    return found


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {"true": True, "false": False, "null": None}.get(text, text)


def _check(values: Mapping[str, object], source: str) -> None:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return  # magics in it: the names cannot be checked
    known = sorted({n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)})
    wrong = next((name for name in values if name not in known), None)
    if wrong is not None:
        raise InvalidRequest(
            f"the notebook has no parameter {wrong}{nearest(wrong, known)}",
            do=f"Its cell tagged {PARAMETERS!r} has: {', '.join(known) or 'none'}.",
        )


def _place_for(values: Mapping[str, object], notebook: Notebook) -> int:
    """Where no cell is tagged: before whatever uses them, and not before what would undo them."""
    cells = [n for n in code_cells(notebook) if INJECTED not in notebook.cells[n].metadata.get("tags", [])]
    first = cells[0] if cells else 0
    place = first + 1 if cells and _only_comments(notebook.cells[first].source) else first
    is_used, is_given = False, False
    for n in cells:
        given, does_more = _given(notebook.cells[n].source)
        found = next((name for name in values if name in given), None)
        if found is not None and (does_more or is_used):
            raise InvalidRequest(
                f"cell {code_cells(notebook).index(n) + 1} assigns {found} itself, and then uses it",
                do=f"Set such names in one cell of their own; or tag it {PARAMETERS!r}, and parameters go behind it.",
            )
        if found is not None:
            is_given, place = True, n + 1
        is_used |= is_given and does_more
    return place


def _given(source: str) -> tuple[set[str], bool]:
    """Names to which a cell gives a value outside of anything, and whether it does more than that."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # magics in it
        return set(), True
    names: set[str] = set()
    does_more = False
    for one in body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        value = getattr(one, "value", None)
        does_more |= not isinstance(one, ast.Import | ast.ImportFrom) and not (targets and _is_literal(value))
    return names, does_more


def _is_literal(value: ast.expr | None) -> bool:
    try:
        return value is None or bool([ast.literal_eval(value)])
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def _only_comments(source: str) -> bool:
    return all(not line.strip() or line.lstrip().startswith("#") for line in source.splitlines())
