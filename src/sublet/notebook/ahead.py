"""What a cell imports on the device comes back by its name, so the notebook must import it too: meanwhile, not after.

Only of a few libraries that take seconds, where the notebook has not got them yet. Nobody is told if that fails: who
needs the module will be.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
import threading
from typing import Final

__all__ = ["Ahead", "imported_by"]

SLOW: Final = ("numpy", "torch", "warp")


class Ahead:
    """Of one notebook."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, python: str) -> None:
        """A cell is to run: import beside it what it imports. ``python`` is its text."""
        wanted = [name for name in SLOW if name in python and name not in sys.modules]
        found = imported_by(python) if wanted else frozenset()
        wanted = [name for name in wanted if name in found]
        if wanted and self._thread is None:
            self._thread = threading.Thread(target=_import, args=(wanted,), name="sublet-import", daemon=True)
            self._thread.start()

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
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
