"""Imports in the notebook, meanwhile, what a cell imports on the device, since it comes back by name.

Only of a few libraries that take seconds, where the notebook has not got them yet, and not before the cell has its
lease: until then an office may be starting, which the cell waits for. A failure is not reported: code that needs
the module will raise it.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import sys
import threading
from typing import Final

from sublet.background import start_thread

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
    """Imports make much and hardly any rubbish: to look for it again and again would take a fifth of the time. So
    collection is off meanwhile, and afterwards all of it counts as old."""
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
