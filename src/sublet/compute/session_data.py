"""What programs hand to a session, as bytes: arrays and buffers of all kinds, and modules in theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pickle import PickleBuffer
from typing import Any, Literal, TypeAlias

from sublet.errors import InvalidRequest
from sublet.wire.device import ModuleKind

__all__ = ["Buffery", "KindText", "SourceText", "bytes_of", "sources_of", "whole", "writable"]

KindText: TypeAlias = ModuleKind | Literal["warp", "cuda", "ptx", "cubin"]
SourceText: TypeAlias = str | bytes
Buffery: TypeAlias = Any
"""What has bytes: ``bytes``, ``bytearray``, a numpy array, an ``array.array``, a torch tensor on the CPU."""


def whole(value: int, call: str, what: str) -> int:
    try:
        return value.__index__()
    except AttributeError:
        raise InvalidRequest(f"{call}: {value!r} is no {what} in bytes", do="Give a whole number.") from None


def bytes_of(data: Buffery, call: str) -> memoryview:
    """The bytes of whatever has some, in the order in which it counts its elements; copied only if they lie apart."""
    try:
        view = memoryview(data)
    except TypeError:
        view = _array_of(data, call)
    if not view.nbytes:
        return memoryview(b"")
    return PickleBuffer(view).raw() if view.c_contiguous else memoryview(view.tobytes())


def _array_of(data: Any, call: str) -> memoryview:
    if hasattr(data, "__array__"):
        try:
            return memoryview(data.__array__())
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a device, or one that needs a gradient
            raise InvalidRequest(f"{call}: {error}", do="Give an array in this program's memory.") from error
    raise InvalidRequest(f"{call}: a {type(data).__name__} has no bytes", do="Give bytes or an array.")


def writable(target: Any) -> memoryview:
    try:
        view = memoryview(target)
    except TypeError:
        view = _array_of(target, "mem_read")
    if view.readonly or not view.c_contiguous:
        raise InvalidRequest(
            "mem_read: the place to read into cannot be written in one piece",
            do="Give a bytearray, or an array that is contiguous and may be written.",
        )
    return PickleBuffer(view).raw() if view.nbytes else memoryview(bytearray())


def sources_of(source: SourceText | Mapping[KindText, SourceText], kind: KindText | None) -> dict[ModuleKind, bytes]:
    if isinstance(source, Mapping):
        if kind is not None:
            raise InvalidRequest("module_load: the kind is given twice", do="Give {kind: source} alone.")
        return {_kind(one): _encoded(text) for one, text in source.items()}
    data = _encoded(source)
    return {_guessed(data) if kind is None else _kind(kind): data}


def _kind(kind: KindText) -> ModuleKind:
    try:
        return ModuleKind(kind)
    except ValueError:
        raise InvalidRequest(
            f"module_load: there is no kind {kind!r}", do=f"Give one of: {', '.join(ModuleKind)}."
        ) from None


def _encoded(source: SourceText) -> bytes:
    if isinstance(source, str):
        return source.encode()
    try:
        return bytes(memoryview(source))
    except TypeError:
        raise InvalidRequest(
            f"module_load: a {type(source).__name__} is no module", do="Give its source or its bytes."
        ) from None


def _guessed(data: bytes) -> ModuleKind:
    """What it must be, where nobody said it."""
    if data.startswith(b"\x7fELF"):
        return ModuleKind.CUBIN
    for kind, mark in (
        (ModuleKind.PTX, b".target sm_"),
        (ModuleKind.CUDA, b"__global__"),
        (ModuleKind.WARP, b"kernel"),
    ):
        if mark in data:
            return kind
    raise InvalidRequest("module_load: nobody can tell what kind of module this is", do='Say it: kind="warp".')
