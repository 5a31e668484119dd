"""A digest of what a process has loaded: Python's builtins, ``sys``, and the names of every module."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["EXCLUDED", "changed", "digest"]

EXCLUDED: set[tuple[str, str]] = {
    ("sys", "last_exc"),
    ("sys", "last_type"),
    ("sys", "last_value"),
    ("sys", "last_traceback"),
    ("sys", "path_importer_cache"),
    ("sys", "modules"),
    ("threading", "_active"),
    ("threading", "_limbo"),
    ("threading", "_shutdown_locks"),
    ("subprocess", "_active"),
    ("multiprocessing.process", "_children"),
}
"""Module and name of what a crossing may change, and of what changes when a thread or a child of an earlier test ends.
Settings that cross on purpose are added by the test of these."""
OWN: Final = (
    "sublet",
    "tests.notebook.sides",
    "tests.notebook.test_",
    "cloudpickle",
    "hypothesis",
    "_pytest",
    "pytest",
)
"""Modules of the test and of the transfer itself."""
CACHES: Final = ("re", "linecache", "warnings", "importlib", "abc", "_abc", "copyreg", "tracemalloc", "weakref")
CONTAINERS: Final = (dict, list, set, types.MappingProxyType)
Digest = dict[tuple[str, str], Any]


def digest(excluded: Iterable[tuple[str, str]] = ()) -> Digest:
    """By module and name: which object it is, and where it is a container or a class of that module, which it holds."""
    left_out = EXCLUDED.union(excluded)
    found: Digest = {}
    for name, module in sorted(sys.modules.items()):
        if name in ("__main__", "__mp_main__") or name.startswith(OWN) or name.partition(".")[0] in CACHES:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if (name, key) not in left_out and key not in ("__warningregistry__", "__builtins__"):
                found[name, key] = (id(value), _held(value, name))
    return found


def _held(value: Any, module: str) -> Any:
    if type(value) in (list, set):
        return tuple(map(id, list(value)))
    if type(value) is dict:
        return tuple((id(key), id(one)) for key, one in list(value.items()))
    if type(value) is type and value.__module__ == module:
        return tuple((key, id(one)) for key, one in list(vars(value).items()) if not key.startswith("_abc"))
    return None


def changed(before: Digest, after: Digest) -> list[str]:
    """What was there before and is another now, or gone. That a module was imported meanwhile is no change."""
    return [".".join(key) for key, value in before.items() if after.get(key) != value]
