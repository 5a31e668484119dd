"""Calls back when a module has been imported, before the importing code continues.

A library that only the notebook has imported gets its settings on the device at the end of its import there. The hook
costs one look into a dictionary for each new module. It changes neither the module nor its spec.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from sublet.background import start_thread

LAZY: Final = "_LazyModule"
"""The type that ``importlib.util.LazyLoader`` gives a module until something of it is used."""
Callback = Callable[[str], object]


class ImportHook:
    """A finder that finds nothing by itself. It stands first in ``sys.meta_path`` from ``install`` to ``remove``."""

    def __init__(self, called: Callback, quietly: Callable[[], AbstractContextManager[object]] | None = None) -> None:
        """``called`` and ``quietly`` are methods, and the hook does not keep their object alive. ``quietly``: what runs
        around the import of a module that the other side has imported (``elsewhere``)."""
        self._quietly = None if quietly is None else weakref.WeakMethod(quietly)
        self._within = threading.local()
        self.elsewhere: set[str] = set()
        self._called = weakref.WeakMethod(called)
        self._watched: set[str] = set()
        self._asking: set[tuple[int, str]] = set()

    def install(self) -> None:
        """From now on."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """No longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def watch(self, module: str) -> None:
        """Call back when this is imported."""
        self._watched.add(module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib calls it."""
        is_elsewhere = name in self.elsewhere and not getattr(self._within, "an_import", False)
        if name not in self._watched and not is_elsewhere:
            return None
        if self._called() is None:
            self.remove()
            return None
        found = self._found_by_others(name, path, target)
        if found is not None:
            self._call_back_after(found, is_elsewhere=is_elsewhere)
        return found

    def _found_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Another finder of this kind asks all others as well: it is answered "nothing" then."""
        asking = threading.get_ident(), name
        if asking in self._asking:
            return None
        self._asking.add(asking)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
                if spec is not None:
                    return spec
            return None
        finally:
            self._asking.discard(asking)

    def _call_back_after(self, spec: ModuleSpec, *, is_elsewhere: bool) -> None:
        """Its loader is told to call back after this one run, by an attribute that the run itself takes away."""
        loader: Any = spec.loader
        run = getattr(loader, "exec_module", None)
        if run is None or isinstance(loader, type) or getattr(loader, "name", spec.name) != spec.name:
            return  # a loader of many modules, such as that of built-in ones: the next crossing sees that it is there

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            quietly = None if self._quietly is None or not is_elsewhere else self._quietly()
            if quietly is None:
                run(module)
            else:
                self._within.an_import = True
                try:
                    with quietly():
                        run(module)
                finally:
                    self._within.an_import = False
            called = self._called()
            if called is not None and spec.name in self._watched:
                called(spec.name)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader without attributes: the next crossing sees that the module is there
            return


def is_imported(name: str) -> bool:
    """Whether it is there and whole: one that is just being imported is not, nor one that is loaded when it is used,
    nor what a program has put in a module's place."""
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType) or type(module).__name__ == LAZY:
        return False
    return not getattr(module.__spec__, "_initializing", False)


# ---------------------------------------------------------------------------------------------------------------- ahead
#
# Imports in the notebook, meanwhile, what a cell imports on the device, since it comes back by name.
#
# Only modules of a few libraries that take long, where the notebook has not got them yet, and not before the cell has
# its lease: until then an office may be starting, which the cell waits for. A failure is not reported: code that needs
# the module will raise it.


EARLY: Final = ("numpy", "torch", "warp")
"""What may be half imported while values are sent: it is imported from when the cell has its lease."""
SLOW: Final = (*EARLY, "pandas", "matplotlib", "scipy", "sklearn", "seaborn", "sympy")
"""Libraries whose imports take long, and do nothing but define names."""
SLOWEST: Final = ("torch", "warp")
"""What takes longer than to start a kernel."""
Imports = Mapping[str, Set[str]]
"""Modules, and the names taken from each: some of these may be modules of it."""


class PreImports:
    """Of one notebook."""

    def __init__(self, quietly: Callable[[], AbstractContextManager[object]]) -> None:
        """``quietly``: what runs around the imports. Some draw a random number, and the one that counts is the
        device's, which comes back."""
        self._quietly = quietly
        self.is_slow = False
        """Whether the cell will have one of the slowest imported where it runs."""
        self._threads: list[threading.Thread] = []
        self._wanted: Imports = {}

    def start_for(self, python: str, *, gives: bool) -> None:
        """A cell is to run. ``python`` is its text; ``gives``: whatever it binds comes back."""
        self.is_slow = any(name in python or name in sys.modules for name in SLOWEST)
        is_any = gives and "import" in python and any(name in python for name in SLOW)
        self._wanted = _missing(imported_by(python)) if is_any else {}

    def begin(self, *, is_sent: bool) -> None:
        """Import beside the cell what it imports. ``is_sent``: what the cell needs was sent, so no value is looked at
        until ``wait``."""
        now = {module: names for module, names in self._wanted.items() if is_sent or _package(module) in EARLY}
        self._wanted = {module: names for module, names in self._wanted.items() if module not in now}
        if now:
            before = [*self._threads]
            self._threads.append(start_thread("import", lambda: _import(now, before, self._quietly)))

    def wait(self) -> None:
        """Before anything of these libraries arrives here."""
        while self._threads:
            self._threads[0].join()
            self._threads.pop(0)


def imported_by(python: str) -> Imports:
    """What the statements of a cell import, whatever way it takes."""
    found: dict[str, set[str]] = {}
    for statement in ast.parse(python).body:
        match statement:
            case ast.Import(names=names):
                for alias in names:
                    found.setdefault(alias.name, set())
            case ast.ImportFrom(module=str(module), level=0, names=names):
                found.setdefault(module, set()).update(alias.name for alias in names if alias.name != "*")
            case _:
                pass
    return found


def _missing(imports: Imports) -> Imports:
    """Of these what is of a slow library and may not be here yet."""
    slow = {module: names for module, names in imports.items() if _package(module) in SLOW}
    return {module: names for module, names in slow.items() if any(_is_missing(module, name) for name in ("", *names))}


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_missing(module: str, name: str) -> bool:
    """``name``: one that is taken from the module; empty: the module itself."""
    loaded = sys.modules.get(module)
    if not name or loaded is None:
        return loaded is None
    return name not in getattr(loaded, "__dict__", ()) and f"{module}.{name}" not in sys.modules


def _import(
    wanted: Imports, before: Sequence[threading.Thread], quietly: Callable[[], AbstractContextManager[object]]
) -> None:
    """Imports make many objects and hardly any garbage: to look for it again and again would take a fifth of the time.
    So collection is off meanwhile, and afterwards all of it counts as old. ``before``: threads that go first."""
    for thread in before:
        thread.join()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with quietly():
            for module, names in wanted.items():
                for name in ("", *sorted(names)):
                    with contextlib.suppress(Exception):
                        if _is_missing(module, name):  # to ask the module for a name may warn of it
                            importlib.import_module(f"{module}.{name}".rstrip("."))
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
