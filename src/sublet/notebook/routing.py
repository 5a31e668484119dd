"""Kernel mode: which cells run on a device, and which in the notebook.

A cell runs on a device unless it says ``%%cpu``, or is only about the lease itself (``%gpu bill``), or has nothing in
it that runs. Text in, text out; nothing here knows IPython.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

HERE: Final = "%%cpu"
"""The first line of a cell that stays where the notebook is."""
MAGIC: Final = "sublet_cell"
"""The cell magic, not for people, that a cell for the device is handed to."""
_OURS: Final = re.compile(r"\s*%(gpu|load_ext\s+sublet|reload_ext\s+sublet|unload_ext\s+sublet)(\s|$)")


_SHELL: Final = re.compile(
    r"\s*%(reset|reset_selective|xdel|history|hist|recall|rep|rerun|macro|save|edit|notebook|log(start|stop|on|off|state))(\s|$)"
)
"""Magics about the notebook's own shell: its names as a whole, and its history, which the device does not have."""


def is_about_shell(lines: Iterable[str]) -> bool:
    """Whether all that these lines do is to ask the notebook's shell something: that can be done there alone."""
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return bool(code) and all(_SHELL.match(line) for line in code)


def stays_here(cell: str) -> bool:
    """Whether a cell is not for the device as a whole. One with ``%%gpu`` goes there by itself."""
    lines = [line for line in cell.splitlines() if line.strip()]
    if lines and _split_words(lines[0])[:1] in (["%%gpu"], [HERE]):
        return True
    return is_about_shell(lines) or all(line.lstrip().startswith("#") or _OURS.match(line) for line in lines)


def routed(lines: Sequence[str]) -> list[str]:
    """The lines of a cell as IPython is to read them. Lines keep their numbers, so that tracebacks name the right
    ones."""
    cell = "".join(lines)
    if not stays_here(cell):
        return [f"get_ipython().run_cell_magic({MAGIC!r}, '', {cell!r})\n"]
    first = next((at for at, line in enumerate(lines) if line.strip()), None)
    if first is None or _split_words(lines[first])[:1] != [HERE]:
        return list(lines)
    rest = list(lines[first + 1 :])
    if next((line for line in rest if line.strip()), "").startswith("%%"):
        return rest  # a magic of its own must stand first
    return [*lines[:first], f"# {lines[first]}", *rest]


def _split_words(line: str) -> list[str]:
    return line.split() if line.startswith("%%") else []
