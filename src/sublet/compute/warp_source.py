"""Extracts the source of Warp kernels that are objects of the holder's program, which is what is sent.

A kernel takes along what it uses by name: other functions under ``@wp.func``, structs, numbers, modules, and what it
captured. The program around it stays at home, so a script whose kernels are loaded is not run again where the device
is.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from sublet.errors import InvalidRequest

_DO = 'Give the source as text: module_load(source, kind="warp").'


def source_of_kernels(given: object) -> str | None:
    """The source of a kernel, of several, or of a module that has some; None where it is none of these."""
    wp = sys.modules.get("warp")
    if wp is None:
        return None
    if isinstance(given, ModuleType):
        kernels: Sequence[Any] = [one for one in vars(given).values() if isinstance(one, wp.Kernel)]
    else:
        kernels = given if isinstance(given, list | tuple) else [given]
    if not kernels or not all(isinstance(one, wp.Kernel) for one in kernels):
        return None
    text = _Text(wp)
    for kernel in kernels:
        text.add(kernel.func.__name__, kernel)
    return text.whole()


class _Text:
    """What was collected, each name once and after what it needs."""

    def __init__(self, wp: Any) -> None:
        self._wp = wp
        self._lines: dict[str, str] = {}
        self._values: dict[str, object] = {}

    def whole(self) -> str:
        return "\n\n".join(self._lines.values()) + "\n"

    def add(self, name: str, value: Any) -> None:
        if name in self._values:
            if self._values[name] is not value and self._values[name] != value:
                raise InvalidRequest(f"module_load: {name!r} is two different things in these kernels", do=_DO)
            return
        self._values[name] = value
        wp = self._wp
        if isinstance(value, wp.Kernel):
            self._of_functions(name, [value.adj])
        elif isinstance(value, wp.Function) and not value.is_builtin():
            self._of_functions(name, [one.adj for one in value.user_overloads.values()] or [value.adj])
        elif type(value).__name__ == "Struct" and type(value).__module__.startswith("warp."):
            self._of_struct(name, value.cls)
        else:
            self._lines[name] = self._plain(name, value)

    def _plain(self, name: str, value: Any) -> str:
        if isinstance(value, ModuleType):
            return f"import {value.__name__} as {name}"
        if type(value) in (int, float, bool, str):
            return f"{name} = {value!r}" if _is_read_back(value) else f'{name} = float("{value}")'
        own = getattr(value, "__name__", None) or getattr(value, "key", None)
        if isinstance(own, str) and getattr(self._wp, own, None) is value:
            return f"from warp import {own} as {name}"
        raise InvalidRequest(
            f"module_load: the kernel uses {name!r}, and a {type(value).__name__} cannot be written as source", do=_DO
        )

    def _of_functions(self, name: str, recorded: list[Any]) -> None:
        for one in recorded:
            self._needs(one.source, _names_of(one.func))
        self._lines[name] = "\n\n".join(one.source.rstrip() for one in recorded)

    def _of_struct(self, name: str, kind: type) -> None:
        source = textwrap.dedent(inspect.getsource(kind))
        self._needs(source, vars(sys.modules[kind.__module__]))
        self._lines[name] = source.rstrip()

    def _needs(self, source: str, names: Mapping[str, Any]) -> None:
        for name in _used(source):
            if name in names:
                self.add(name, names[name])


def _is_read_back(value: object) -> bool:
    """Whether what it is written as means the same."""
    return not isinstance(value, float) or math.isfinite(value)


def _names_of(function: FunctionType) -> dict[str, Any]:
    """What its names mean: what it captured, before what is there for its whole module."""
    found = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        found[name] = cell.cell_contents
    return found


def _used(source: str) -> Iterator[str]:
    """Names that it reads and does not set, in order; annotations and decorators included."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.id for node in nodes if not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name in dict.fromkeys(node.id for node in nodes):
        if name not in own and not hasattr(builtins, name):
            yield name
