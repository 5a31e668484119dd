"""Fetches names from the notebook that a running cell looks up in ``__main__``.

A cell gets the names that its text reads. What a library looks up, as ``getattr(sys.modules["__main__"], name)`` or by
unpickling, stands in no text. So while a cell runs, ``__main__`` on the device asks the notebook for an attribute that
it does not have. A lookup in its dict, as by a function's global name, cannot be seen: that stays a ``NameError``.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Final

from sublet.compute.behind import answer_calls
from sublet.notebook.namespace import HIDDEN

MESSAGE: Final = "sublet_fetch"
"""Type of the message by which the notebook is asked."""


class _Asking:
    """What is asked for now. There is one of these."""

    def __init__(self) -> None:
        self.may_ask: Callable[[str], bool] = lambda _: False
        self.bound: Callable[[], list[str]] = list
        self.brought: set[str] = set()
        """What was asked for by name."""
        self.is_open = False
        """A name is being fetched. Loading it may look for others, which are not there then."""
        self.is_answered = False
        self.why = ""
        """Why there is none."""


_asking = _Asking()


class _Main(types.ModuleType):
    """Class of ``__main__`` while a cell runs."""

    def __getattr__(self, name: str) -> Any:
        why = _fetched(name) if self is sys.modules.get("__main__") else ""
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{why}", name=name, obj=self)


def begin(may_ask: Callable[[str], bool], bound: Callable[[], list[str]]) -> None:
    """A cell is to run. ``may_ask``: whether a name that is not here may be in the notebook; ``bound``: names that the
    cell has bound so far, which the notebook must not send."""
    main = sys.modules["__main__"]
    if type(main) is types.ModuleType:
        main.__class__ = _Main
        _asking.may_ask, _asking.bound = may_ask, bound
        _asking.brought.clear()


def end() -> None:
    """It is over."""
    main = sys.modules["__main__"]
    if type(main) is _Main:
        main.__class__ = types.ModuleType  # type: ignore[assignment]  # a class may be changed to its base


def bring(name: str) -> None:
    """While a cell runs: fetch a name that may be here with what an earlier cell used, once. Functions and classes stay
    here between cells, and what they read does not."""
    is_cell = type(sys.modules["__main__"]) is _Main
    if is_cell and name not in _asking.brought and name not in _asking.bound():
        _asking.brought.add(name)
        _fetched(name)


def answer(why: str = "") -> None:
    """The notebook has sent what was asked for, or has not, and why."""
    _asking.is_answered, _asking.why = True, why


def _fetched(name: str) -> str:
    """Ask for it, and wait until it is here; why it did not come."""
    if (name.startswith("__") and name.endswith("__")) or name in HIDDEN or _asking.is_open:
        return ""
    if threading.current_thread() is not threading.main_thread() or not _asking.may_ask(name):
        return ""
    interpreter = sys.modules.get("IPython")
    kernel = getattr(None if interpreter is None else interpreter.get_ipython(), "kernel", None)
    if kernel is None:
        return ""
    _asking.is_open, _asking.is_answered, _asking.why = True, False, ""
    try:
        request = {"name": name, "bound": _asking.bound()}
        parent = kernel.get_parent()
        send = functools.partial(kernel.session.send, kernel.iopub_socket, MESSAGE, request, parent, MESSAGE.encode())
        answer_calls(send, lambda: _asking.is_answered)
    finally:
        _asking.is_open = False
    return f": {_asking.why}" if _asking.why else ""
