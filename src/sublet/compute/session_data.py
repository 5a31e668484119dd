"""Converts what programs hand to a session into bytes: arrays and buffers of all kinds, and modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from operator import index
from pickle import PickleBuffer
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
    from sublet.compute.warp_source import source_of_kernels

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
