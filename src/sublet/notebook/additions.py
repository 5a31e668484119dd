"""Names what the notebook has added to the shell, to pandas and to Python's modules, which does not hold on the device.

``formatters["text/html"].for_type(Point, show)`` tells the shell of this process how to show a ``Point``;
``sys.modules["helpers"] = module`` is known to this interpreter alone. A transfer writes into none of these, so the
person is told before a cell runs on a device, once for each device.

Only what the notebook itself has made is looked at: what libraries add at their import they add on the device, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from sublet.durable.rules import MAINS

__all__ = ["Addition", "Additions"]

MAIN: Final = "__main__"
PANDAS: Final = ("DataFrame", "Series", "Index")
NAMED_MAX: Final = 5
"""Of one sort; more are counted."""


class Addition(NamedTuple):
    """One thing that only the notebook's process knows."""

    sort: str
    name: str
    holder: object
    """What was added: something else under the same name is said anew."""


_SAYS: Final = {
    "printer": (
        re.compile(r"\bfor_type(_by_name)?\b"),
        "{} added in the notebook; a cell on the device does not use {}: add {} in a %%gpu cell, too",
    ),
    "accessor": (
        re.compile(r"\bregister_\w+_accessor\b"),
        "{} added to pandas in the notebook; that does not hold on the device: run what adds {} in a %%gpu cell, too",
    ),
    "module": (
        re.compile(r"\bmodules\s*\["),
        "{} put into sys.modules in the notebook; the device cannot import {}: put {} there in a %%gpu cell, too",
    ),
}
"""By sort: the words of a cell that adds it itself, and what is said."""


class Additions:
    """Of one notebook."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._told: set[tuple[str, str, int]] = set()
        self._there: set[str] = set()
        """Sorts that cells have added on the present device, which nothing here can look into."""

    def begin(self) -> None:
        """There is another device."""
        self._there.clear()
        self._told.clear()

    def news(self, cell: str) -> list[str]:
        """What is to be said before ``cell`` runs on a device."""
        self._there |= {sort for sort, (words, _) in _SAYS.items() if words.search(cell)}
        by_sort: dict[str, list[str]] = {}
        for one in self._found():
            key = one.sort, one.name, id(one.holder)
            if one.sort not in self._there and key not in self._told:
                self._told.add(key)
                by_sort.setdefault(one.sort, []).append(one.name)
        return [_said(sort, names) for sort, names in by_sort.items()]

    def _found(self) -> Iterator[Addition]:
        yield from self._printers()
        yield from _accessors()
        yield from _modules()

    def _printers(self) -> Iterator[Addition]:
        formatters = getattr(getattr(self._shell, "display_formatter", None), "formatters", None) or {}
        for format_, formatter in list(formatters.items()):
            for kind, printer in list(formatter.type_printers.items()):
                if _is_own(printer) or _is_own(kind):
                    name = getattr(kind, "__qualname__", None) or str(kind)
                    yield Addition("printer", f"the {format_} printer of {name}", printer)
            for (module, name), printer in list(formatter.deferred_printers.items()):
                if _is_own(printer) or module == MAIN:
                    yield Addition("printer", f"the {format_} printer of {name}", printer)


def _accessors() -> Iterator[Addition]:
    """Those that are no name's: others are added on the device as well (``settings``)."""
    pandas = sys.modules.get("pandas")
    for kind in PANDAS:
        owner = getattr(pandas, kind, None)
        for name in sorted(getattr(owner, "_accessors", ())):
            accessor = getattr(vars(owner).get(name), "_accessor", None)
            if _is_own(accessor) and vars(sys.modules[MAIN]).get(getattr(accessor, "__name__", "")) is not accessor:
                yield Addition("accessor", f"{kind}.{name}", accessor)


def _modules() -> Iterator[Addition]:
    """Modules that no import has made, and that the notebook has under a name, or that have something of its own."""
    bound = {id(value) for value in list(vars(sys.modules[MAIN]).values()) if isinstance(value, ModuleType)}
    for name, module in list(sys.modules.items()):
        if type(module) is not ModuleType or name in MAINS or getattr(module, "__spec__", None) is not None:
            continue
        names = vars(module)
        is_imported = "__file__" in names or names.get("__loader__") is not None
        if not is_imported and (id(module) in bound or any(map(_is_own, list(names.values())))):
            yield Addition("module", name, module)


def _is_own(value: Any) -> bool:
    """Whether it is a function or class that a cell has made."""
    made = value.func if isinstance(value, partial) else value
    return getattr(made, "__module__", None) == MAIN and isinstance(made, FunctionType | MethodType | type)


def _said(sort: str, names: list[str]) -> str:
    shown = names[:NAMED_MAX]
    more = len(names) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more" if more else "")
    is_one = len(names) == 1
    what = f"{listed} {'was' if is_one else 'were'}"
    them = "it" if is_one else "them"
    return _SAYS[sort][1].format(what, them, them)
