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
from collections.abc import Callable, Sequence
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
        found = self._asked_of_others(name, path, target)
        if found is not None:
            self._follow(found, is_elsewhere=is_elsewhere)
        return found

    def _asked_of_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
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

    def _follow(self, spec: ModuleSpec, *, is_elsewhere: bool) -> None:
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
# Only of a few libraries that take seconds, where the notebook has not got them yet, and not before the cell has its
# lease: until then an office may be starting, which the cell waits for. A failure is not reported: code that needs
# the module will raise it.


SLOW: Final = ("numpy", "torch", "warp")
SLOWEST: Final = ("torch", "warp")
"""What takes longer than to start a kernel."""


class Ahead:
    """Of one notebook."""

    def __init__(self) -> None:
        self.is_slow = False
        """Whether the cell will have one of the slowest imported where it runs."""
        self._thread: threading.Thread | None = None
        self._wanted: list[str] = []

    def look(self, python: str, *, gives: bool) -> None:
        """A cell is to run. ``python`` is its text; ``gives``: whatever it binds comes back."""
        self.is_slow = any(name in python or name in sys.modules for name in SLOWEST)
        wanted = [name for name in SLOW if gives and name in python and name not in sys.modules]
        found = imported_by(python) if wanted else frozenset()
        self._wanted = [name for name in wanted if name in found]

    def begin(self) -> None:
        """Import beside the cell what it imports."""
        if self._wanted and self._thread is None:
            self._thread = start_thread("import", lambda: _import(self._wanted))

    def settle(self) -> None:
        """Before anything of these libraries arrives here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def imported_by(python: str) -> frozenset[str]:
    """The packages whose modules, or parts of them, the statements of a cell bind, whatever way it takes."""
    found = set()
    for statement in ast.parse(python).body:
        match statement:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
            case _:
                pass
    return frozenset(found)


def _import(names: list[str]) -> None:
    """Imports make many objects and hardly any garbage: to look for it again and again would take a fifth of the time.
    So collection is off meanwhile, and afterwards all of it counts as old."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
