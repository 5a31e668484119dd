"""Converts what programs hand to a session into bytes: arrays and buffers of all kinds, and modules."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from pickle import PickleBuffer
from types import FunctionType, ModuleType
from typing import Any, Final, Literal, TypeAlias

from sublet.errors import InvalidRequest
from sublet.values import shown, valid_text
from sublet.wire.device import ModuleKind

SOURCE_MAX: Final = 64 << 20
KindText: TypeAlias = ModuleKind | Literal["warp", "cuda", "ptx", "cubin"]
SourceText: TypeAlias = str | bytes | Any
"""Text or bytes; for Warp also a kernel of this program, a list of them, or a module that has some."""
Sources: TypeAlias = Mapping[Any, SourceText]
"""One module in several kinds, each by its name or as ``ModuleKind``."""
Buffery: TypeAlias = Any
"""What has bytes: ``bytes``, ``bytearray``, a numpy array, an ``array.array``, a torch tensor on the CPU."""


def whole(value: int, call: str, what: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise InvalidRequest(f"{call}: {shown(value)} is no {what} in bytes", do="Give a whole number.") from None


@contextlib.contextmanager
def bytes_of(data: Buffery, call: str) -> Iterator[memoryview]:
    """The bytes of whatever has some, in the order in which it counts its elements; copied only if they lie apart. The
    view is for the block alone: an error's traceback must keep no caller's memory alive."""
    with _view_of(data, call) as view:
        if view.format.endswith("O"):
            raise InvalidRequest(
                f"{call}: an array of Python objects has addresses in it, and no values", do="Give one of numbers."
            )
        if not view.nbytes:
            yield memoryview(b"")
        elif view.c_contiguous:
            with _flat(data if isinstance(data, memoryview) else view.obj, view) as flat:
                yield flat
        else:
            yield memoryview(view.tobytes())


@contextlib.contextmanager
def writable(target: Any) -> Iterator[memoryview]:
    """The bytes of a place to read into, to be written."""
    with _view_of(target, "mem_read") as view:
        if view.readonly or not view.c_contiguous:
            raise InvalidRequest(
                "mem_read: the place to read into cannot be written in one piece",
                do="Give a bytearray, or an array that is contiguous and may be written.",
            )
        if not view.nbytes:
            yield memoryview(bytearray())
            return
        with _flat(target if isinstance(target, memoryview) else view.obj, view) as flat:
            yield flat


def _view_of(data: Any, call: str) -> memoryview:
    try:
        return memoryview(data)
    except TypeError:
        pass
    if not hasattr(data, "__array__"):
        raise InvalidRequest(f"{call}: a {type(data).__name__} has no bytes", do="Give bytes or an array.")
    try:
        return memoryview(data.__array__())
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a device, or one that needs a gradient
        raise InvalidRequest(f"{call}: {error}", do="Give an array in this program's memory.") from error


def _flat(owner: Any, view: memoryview) -> memoryview:
    """The same bytes without shape and type. Of formats that a view cannot be cast from (big-endian, records) the owner
    is asked: a view of a view must not be collected in a cycle (it ends CPython 3.11)."""
    try:
        return view.cast("B")
    except (TypeError, ValueError):
        return PickleBuffer(owner).raw()


def sources_of(source: SourceText | Sources, kind: KindText | None) -> dict[ModuleKind, bytes]:
    if isinstance(source, Mapping):
        if kind is not None:
            raise InvalidRequest("module_load: the kind is given twice", do="Give {kind: source} alone.")
        return {_kind(one): _encoded(_written(given) or given) for one, given in source.items()}
    written = _written(source)
    if written is not None and kind is None:
        kind = ModuleKind.WARP
    data = _encoded(source if written is None else written)
    return {_guessed(data) if kind is None else _kind(kind): data}


def _kind(kind: str) -> ModuleKind:
    try:
        return ModuleKind(kind)
    except ValueError:
        raise InvalidRequest(
            f"module_load: there is no kind {shown(kind)}", do=f"Give one of: {', '.join(ModuleKind)}."
        ) from None


def _written(source: object) -> str | None:
    """Warp kernels that are objects of this program, as source."""
    if isinstance(source, str | bytes | bytearray | memoryview):
        return None

    return source_of_kernels(source)


def _encoded(source: SourceText) -> bytes:
    if isinstance(source, str):
        return valid_text(source, "module_load: the source", most=SOURCE_MAX).encode()
    try:
        return bytes(memoryview(source))
    except TypeError:
        raise InvalidRequest(
            f"module_load: a {type(source).__name__} is no module", do="Give its source or its bytes, or Warp kernels."
        ) from None


def _guessed(data: bytes) -> ModuleKind:
    """The kind told from the bytes, where the caller gave none."""
    if data.startswith(b"\x7fELF"):
        return ModuleKind.CUBIN
    for kind, mark in (
        (ModuleKind.PTX, b".target sm_"),
        (ModuleKind.CUDA, b"__global__"),
        (ModuleKind.WARP, b"kernel"),
    ):
        if mark in data:
            return kind
    raise InvalidRequest("module_load: the kind of this module cannot be recognised", do='Say it: kind="warp".')


# ---------------------------------------------------------------------------------------------------------- warp source
#
# Extracts the source of Warp kernels that are objects of the holder's program, which is what is sent.
#
# A kernel takes along what it uses by name: other functions under ``@wp.func``, structs, numbers, modules, and what it
# captured. The program around it stays at home, so a script whose kernels are loaded is not run again where the device
# is.


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
