"""The source of cells and compiler flags on both sides: for tracebacks, ``inspect.getsource``, ``__future__``.

A function that crosses has the file name of its cell, which is only a name: the text is in the memory of the process
that ran the cell. So the text goes with the function, to where Python and IPython look for it.
"""

from __future__ import annotations
import __future__

import functools
import linecache
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

FLAGS: Final = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names), 0
)


class CellSource(NamedTuple):
    """One cell."""

    text: str
    number: int | None
    """Under which the shell shows it."""


def sources_of(files: Iterable[str]) -> dict[str, CellSource]:
    """Of these files those that are cells of this process or came from the other side."""
    numbers = _numbers()
    found = {}
    for name in files:
        entry = linecache.cache.get(name)
        if entry is not None and len(entry) == 4 and entry[1] is None:  # it has no time: it is no file of the disk
            found[name] = CellSource("".join(entry[2]), numbers.get(name))
    return found


def keep_sources(sources: Mapping[str, CellSource]) -> None:
    """The other side's."""
    numbers = _numbers()
    for name, (text, number) in sources.items():
        lines = text.splitlines(keepends=True)
        linecache.cache.setdefault(name, (len(text), None, lines, name))
        if number is not None:
            numbers.setdefault(name, number)


def compiler_flags() -> int:
    """Of the shell: what ``from __future__ import`` in an earlier cell has set."""
    shell = _shell()
    return 0 if shell is None else int(getattr(shell.compile, "flags", 0)) & FLAGS


def set_compiler_flags(flags: int) -> None:
    """Those of the other side hold here as well."""
    shell = _shell()
    if shell is not None and flags:
        shell.compile.flags |= flags & FLAGS


def _numbers() -> dict[str, int]:
    """The shell's table of cells, by file name."""
    shell = _shell()
    found: dict[str, int] | None = None if shell is None else getattr(shell.compile, "_filename_map", None)
    return {} if found is None else found


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    get_shell = getattr(ipython, "get_ipython", None)
    return None if get_shell is None else get_shell()
