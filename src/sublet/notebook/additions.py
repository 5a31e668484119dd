"""Names what was added to the shell, pandas, loggers or Python's modules on one side and the other lacks.

``formatters["text/html"].for_type(Point, show)`` tells the shell of this process how to show a ``Point``;
``sys.modules["helpers"] = module`` is known to this interpreter alone, and a magic to its shell. A transfer writes into
none of these, so the person is told before a cell runs on a device, once for each device.

Only what the notebook itself has made is looked at: what libraries add at their import they add on the device, too.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from functools import partial
from importlib.machinery import BuiltinImporter, ExtensionFileLoader
from operator import is_, itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from sublet.notebook.settings.process import stream_handler
from sublet.state.transfer.names import MAINS

MAIN: Final = "__main__"
PANDAS: Final = ("DataFrame", "Series", "Index")
OF_LIBRARIES: Final = (logging.StreamHandler, logging.NullHandler)
NAMED_MAX: Final = 5
"""Of one sort; more are counted."""


class Addition(NamedTuple):
    """One thing that only the notebook's process knows."""

    sort: str
    name: str
    holder: object
    """What was added: another object under the same name is reported again."""


_SAYS: Final = {
    "printer": (
        re.compile(r"\bfor_type(_by_name)?\b"),
        "{} added in the notebook; a cell on the device does not use {}: add {} in a %%gpu cell, too",
    ),
    "accessor": (
        re.compile(r"\bregister_\w+_accessor\b"),
        "{} added to pandas in the notebook; that does not hold on the device: run what adds {} in a %%gpu cell, too",
    ),
    "magic": (
        re.compile(r"\bregister_(line_cell_|line_|cell_)?magics?\b|\bregister_magic_function\b"),
        "{} defined in the notebook; a cell on the device does not know {}: define {} in a %%gpu cell, too",
    ),
    "module": (
        re.compile(r"\bmodules\s*\["),
        "{} put into sys.modules in the notebook; the device cannot import {}: put {} there in a %%gpu cell, too",
    ),
    "handler": (
        re.compile(r"\b(addHandler|basicConfig|dictConfig|fileConfig)\b"),
        "{} added in the notebook; what a cell on the device logs does not reach {}: add {} in a %%gpu cell, too",
    ),
}
"""By sort: the words of a cell that adds it itself, and what is said."""
_BEFORE: Final = {sort: text for sort, (_, text) in _SAYS.items()}
_SAYS_AFTER: Final = {
    "printer": "{} added on the device; the notebook does not use {}: add {} in a cell without %%gpu, too",
    "accessor": "{} added to pandas on the device, and not in the notebook: run what adds {} without %%gpu, too",
    "magic": "{} defined on the device; the notebook does not know {}: define {} in a cell without %%gpu, too",
    "module": "{} put into sys.modules on the device; the notebook cannot import {}: put {} there without %%gpu, too",
    "handler": "{} added on the device; what the notebook logs does not reach {}: add {} without %%gpu, too",
}
"""The same of what a cell on the device has added."""


class Additions:
    """Of one notebook."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._reported: set[tuple[str, str, int]] = set()
        self._only_on_device: set[tuple[str, str]] = set()
        """Sort and name of what cells have added on the present device, and the notebook has not."""
        self._doubtful: list[tuple[str, str]] = []
        """What the notebook has and the present cell will add on the device, judging by its words."""
        self._modules: list[Any] = []
        """All modules, as they were looked at last."""
        self._looks = 0
        """How often they had changed."""
        self._made: list[tuple[str, ModuleType]] = []
        """Those of them that no import has made, less ``_parts``."""
        self._parts: list[tuple[str, ModuleType]] = []
        """Those that extension modules have made. Where torch is imported they have a thousand names: only how many
        each has is looked at, since one that is replaced is told as such (``monkeypatches``)."""
        self._seen: list[int] = []
        """Identities of everything that could have been an addition when all of it was looked at last."""

    def begin(self) -> None:
        """There is another device."""
        self._only_on_device.clear()
        self._doubtful.clear()
        self._reported.clear()
        self._seen.clear()

    def news(self, cell: str) -> list[str]:
        """Sentences for the user before ``cell`` runs on a device."""
        adds = {sort for sort, (words, _) in _SAYS.items() if words.search(cell)}
        fresh = self.fresh()
        known = self._only_on_device.intersection(fresh)
        self._only_on_device -= known
        found = [*self._doubtful, *(one for one in fresh if one not in known)]
        self._doubtful = [one for one in found if one[0] in adds]
        return _sentences(_BEFORE, [one for one in found if one[0] not in adds])

    def sentences_after(self, added: Collection[tuple[str, str]]) -> list[str]:
        """Sentences for the user after a cell on a device: ``added`` is what that process has now and did not have
        before."""
        if not added:
            return []
        self._scan_modules()
        in_notebook = {(one.sort, one.name) for one in self._found()}
        self._doubtful = [one for one in self._doubtful if one not in added]
        self._only_on_device.update(one for one in added if one not in in_notebook)
        return _sentences(_SAYS_AFTER, [one for one in added if one not in in_notebook])

    def fresh(self) -> list[tuple[str, str]]:
        """Sort and name of what was not here when this was last asked."""
        seen = self._identities()
        if seen == self._seen:
            return []
        self._seen = seen
        found = []
        for one in self._found():
            key = one.sort, one.name, id(one.holder)
            if key not in self._reported:
                self._reported.add(key)
                found.append((one.sort, one.name))
        return found

    def _identities(self) -> list[int]:
        """Of all that could be an addition. To look at each takes 3 ms where torch is imported; this takes a tenth."""
        self._scan_modules()
        found = list(map(id, _accessors().values()))
        for formatter in self._formatters().values():
            for printers in formatter.type_printers, formatter.deferred_printers:
                found += map(id, list(printers.values()))
        for named in self._magics_by_kind().values():
            found += map(id, list(named.values()))
        for _, module in self._made:
            found += map(id, list(vars(module).values()))
        found += [len(vars(module)) for _, module in self._parts]
        found += [id(handler) for _, handler in _handlers()]
        return [self._looks, *found, *(_bound_modules() if self._made else ())]

    def _scan_modules(self) -> None:
        modules = list(sys.modules.values())
        if len(modules) != len(self._modules) or not all(map(is_, modules, self._modules)):
            made = list(_made_modules())
            parts = _made_by_extensions(made)
            self._parts = [one for one in made if id(one[1]) in parts]
            self._made = [one for one in made if id(one[1]) not in parts]
            self._modules, self._looks = modules, self._looks + 1

    def _found(self) -> Iterator[Addition]:
        yield from self._printers()
        for name, accessor in _accessors().items():
            if _is_own(accessor):
                yield Addition("accessor", name, accessor)
        for name, function in self._magics().items():
            if _is_own(function):
                yield Addition("magic", name, function)
        bound = _bound_modules()
        bound.difference_update(id(module) for _, module in self._parts)
        for name, module in (*self._made, *self._parts):
            if id(module) in bound or any(map(_is_own, list(vars(module).values()))):
                yield Addition("module", name, module)
        named = {id(value) for value in list(vars(sys.modules[MAIN]).values())}
        for name, handler in _handlers():
            if _is_handler_of_notebook(handler, named):
                yield Addition("handler", f"the {type(handler).__name__} of logger {name}", handler)

    def _formatters(self) -> dict[str, Any]:
        return getattr(getattr(self._shell, "display_formatter", None), "formatters", None) or {}

    def _magics(self) -> dict[str, Any]:
        """As they are called."""
        signs = {"line": "%", "cell": "%%"}
        by_kind = self._magics_by_kind()
        return {signs[kind] + name: one for kind, named in by_kind.items() for name, one in list(named.items())}

    def _magics_by_kind(self) -> dict[str, dict[str, Any]]:
        return getattr(getattr(self._shell, "magics_manager", None), "magics", None) or {}

    def _printers(self) -> Iterator[Addition]:
        for format_, formatter in list(self._formatters().items()):
            for kind, printer in list(formatter.type_printers.items()):
                if _is_own(printer) or _is_own(kind):
                    name = getattr(kind, "__qualname__", None) or str(kind)
                    yield Addition("printer", f"the {format_} printer of {name}", printer)
            for (module, name), printer in list(formatter.deferred_printers.items()):
                if _is_own(printer) or module == MAIN:
                    yield Addition("printer", f"the {format_} printer of {name}", printer)


def _accessors() -> dict[str, Any]:
    """Those of pandas' classes. In place of one that has a name None: it is added on the device as well
    (``settings``)."""
    pandas, names = sys.modules.get("pandas"), vars(sys.modules[MAIN])
    found = {}
    for kind in PANDAS:
        owner = getattr(pandas, kind, None)
        for name in sorted(getattr(owner, "_accessors", ())):
            accessor = getattr(vars(owner).get(name), "_accessor", None)
            found[f"{kind}.{name}"] = None if names.get(getattr(accessor, "__name__", "")) is accessor else accessor
    return found


def _handlers() -> Iterator[tuple[str, logging.Handler]]:
    """Of all loggers."""
    loggers: dict[str, Any] = {"root": logging.root, **logging.root.manager.loggerDict}
    for name, logger in loggers.items():
        for handler in getattr(logger, "handlers", ()):
            yield name, handler


def _is_handler_of_notebook(handler: logging.Handler, named: Set[int]) -> bool:
    """Whether a cell has added it. Of Python's own classes libraries add none but those for a stream or for nothing
    when they are imported. ``named``: ids of what the notebook has under a name."""
    if stream_handler(handler) is not None:  # a setting, which crosses
        return False
    if any(map(_is_own, (type(handler), type(handler.formatter), *map(type, handler.filters), *handler.filters))):
        return True
    if type(handler).__module__ in ("logging", "logging.handlers") and type(handler) not in OF_LIBRARIES:
        return True
    stream = getattr(handler, "stream", None)
    return id(handler) in named or (stream is not None and id(stream) in named)


def _made_modules() -> Iterator[tuple[str, ModuleType]]:
    """Modules that no import has made."""
    for name, module in list(sys.modules.items()):
        if type(module) is not ModuleType or name in MAINS or getattr(module, "__spec__", None) is not None:
            continue
        names = vars(module)
        if "__file__" not in names and names.get("__loader__") is None:
            yield name, module


def _made_by_extensions(made: list[tuple[str, ModuleType]]) -> set[int]:
    """Ids of the modules that are parts of extension modules, such as ``pyexpat.errors``: the import that brings the
    extension brings them."""
    found: set[int] = set()
    for name, module in sorted(made, key=itemgetter(0)):
        above, _, last = name.rpartition(".")
        owner = sys.modules.get(above)
        loader = getattr(getattr(owner, "__spec__", None), "loader", None)
        is_extension = loader is BuiltinImporter or isinstance(loader, ExtensionFileLoader)
        if (is_extension or id(owner) in found) and getattr(owner, "__dict__", {}).get(last) is module:
            found.add(id(module))
    return found


def _bound_modules() -> set[int]:
    """Ids of the modules that the notebook has under a name."""
    return {id(value) for value in list(vars(sys.modules[MAIN]).values()) if isinstance(value, ModuleType)}


def _is_own(value: Any) -> bool:
    """Whether it is a function or class that a cell has made."""
    made = value.func if isinstance(value, partial) else value
    return getattr(made, "__module__", None) == MAIN and isinstance(made, FunctionType | MethodType | type)


def _sentences(says: Mapping[str, str], added: Iterable[tuple[str, str]]) -> list[str]:
    """One for each sort."""
    by_sort: dict[str, list[str]] = {}
    for sort, name in added:
        by_sort.setdefault(sort, []).append(name)
    return [_sentence(says[sort], names) for sort, names in by_sort.items()]


def _sentence(text: str, names: list[str]) -> str:
    shown = names[:NAMED_MAX]
    more = len(names) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more" if more else "")
    is_one = len(names) == 1
    what = f"{listed} {'was' if is_one else 'were'}"
    them = "it" if is_one else "them"
    return text.format(what, them, them)
