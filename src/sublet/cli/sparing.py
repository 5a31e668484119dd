"""Shortens the start of an office, which the user's first command waits for.

It loads four hundred modules. A third of the time of that went into things that are never used.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from types import ModuleType
from typing import Any

from sublet.supervisor import lean_classes


def spare() -> None:
    """To be called before anything is loaded, in a process that is the office's alone."""
    gc.disable()  # what is loaded stays: it is looked through once, at the end of the start
    lean_classes.install()
    leave_unread("uvicorn")  # its protocol is used, and not its command line, its reloader and its processes


class Unread(ModuleType):
    """A package of which only some modules are used: its own ``__init__`` is run once an attribute of it is read."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if name.startswith("__") or spec is None or spec.loader is None:  # what the machinery of imports asks
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(self)
        return getattr(self, name)


def leave_unread(name: str) -> None:
    """Make it so, unless it is loaded already or not installed."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[name].__class__ = Unread
