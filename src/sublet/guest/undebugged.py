"""Replaces ipykernel's debugger: a front end debugs the notebook's own kernel, never the guest's.

debugpy takes a third of the time of all that a kernel imports, and ipykernel makes do where it is not installed. So for
the one moment in which ipykernel looks for it, it is not. A program that imports it gets it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any, Final

__all__: list[str] = []

_NAME: Final = "debugpy"

if _NAME not in sys.modules and "ipykernel.debugger" not in sys.modules:
    modules: dict[str, Any] = sys.modules  # None says that there is no such module
    modules[_NAME] = None
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("ipykernel.debugger")
    finally:
        del modules[_NAME]
