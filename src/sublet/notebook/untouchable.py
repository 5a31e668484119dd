"""What a transfer never reads into or writes to: Python's, libraries' and the shell's own objects.

Told by identity, so that it does not matter under which name, or through which other object, it is reached.
"""

from __future__ import annotations

import os
import sys
import types
from operator import is_
from typing import Any, Final, NamedTuple

from sublet.state.transfer.names import MAINS

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, types.BuiltinFunctionType)


class Untouchable:
    """As this process is now: made for one transfer."""

    def __init__(self) -> None:
        self._modules = _modules_now()
        self._ids = set[int]()
        for owner in (vars(sys), vars(os.environ), *_shells()):
            self._ids.add(id(owner))
            self._ids.update(id(one) for one in list(owner.values()) if not isinstance(one, _PLAIN))
        self._ids.add(id(os.environ))

    def has(self, value: Any) -> bool:
        """Whether it is one of these: a module or its names, ``sys`` and what it holds, the shell and its parts, a
        class or function that stands in a library."""
        if id(value) in self._modules.ids or id(value) in self._ids:
            return True
        if isinstance(value, type):
            return value.__module__ not in MAINS
        return (
            type(value) is types.FunctionType
            and id(value.__globals__) in self._modules.names
            and _stands_in_library(value)
        )


def module_names() -> frozenset[int]:
    """The ids of the namespaces of all modules."""
    return _modules_now().names


class _Modules(NamedTuple):
    """All modules, as they were when they were last looked at."""

    modules: list[Any]
    namespaces: dict[int, int | None]
    """By the id of each module, that of its namespace. No other object has them while the list holds the modules."""
    names: frozenset[int]
    """Ids of their namespaces."""
    ids: frozenset[int]
    """These, and the ids of the modules."""


def _modules_now() -> _Modules:
    """There are thousands, and mostly they are those of the last time, which two lists tell without a look at any. Of
    others only those that are new are looked at."""
    global _known
    now = list(sys.modules.values())
    if len(now) != len(_known.modules) or not all(map(is_, now, _known.modules)):
        known = _known.namespaces
        namespaces = {id(one): known[id(one)] if id(one) in known else _namespace_of(one) for one in now}
        names = frozenset(one for one in namespaces.values() if one is not None)
        _known = _Modules(now, namespaces, names, names.union(namespaces))
    return _known


_known = _Modules([], {}, frozenset(), frozenset())


def _namespace_of(module: Any) -> int | None:
    """The id of a module's names."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except (AttributeError, TypeError):  # some put other things where modules are
        return None
    # Of a class it is a view that is made anew each time, so its id is soon another's.
    return id(names) if isinstance(names, dict) else None


def _shells() -> list[dict[str, Any]]:
    """The namespaces of the shell that runs here and of its settings."""
    ipython = sys.modules.get("IPython")
    get_shell = getattr(ipython, "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    if shell is None:
        return []
    return [{"shell": shell}, vars(shell), vars(shell).get("_trait_values", {})]


def _stands_in_library(function: types.FunctionType) -> bool:
    """Whether its module or a class of it has the very function, also as a method of any sort."""
    found: Any = sys.modules.get(function.__module__)
    if found is None or function.__module__ in MAINS:
        return False
    for part in function.__qualname__.split("."):
        names = getattr(found, "__dict__", None)
        if names is None or part not in names:
            return False
        found = names[part]
    of = (found, getattr(found, "__func__", None), *(getattr(found, part, None) for part in ("fget", "fset", "fdel")))
    return any(one is function for one in of)


def is_own_namespace(function: types.FunctionType) -> bool:
    """Whether the globals of a function are no module's: made for it by ``exec``, say, or by ``namedtuple``."""
    names = function.__globals__
    module = sys.modules.get(names.get("__name__", ""))
    if module is not None and getattr(module, "__dict__", None) is names:
        return False
    return names is not vars(sys.modules["__main__"])


def is_class_dict(held: Any) -> bool:
    """Whether what a mapping proxy shows is the namespace of a class: every class has these two in it, or the first
    where it is written in C."""
    return isinstance(held, dict) and "__doc__" in held
