"""Checks a launch's arguments against the kernel's signature before anything is launched.

A Warp kernel knows its parameters by name and type. A CUDA kernel knows only how many bytes each has (and old drivers
not even that), so there a number must name its own type.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.wire.scalars import ArgKind


class Takes(enum.StrEnum):
    """What a parameter takes."""

    BUFFER = "buffer"
    BOOL = "bool"
    I8 = "i8"
    U8 = "u8"
    I16 = "i16"
    U16 = "u16"
    I32 = "i32"
    U32 = "u32"
    I64 = "i64"
    U64 = "u64"
    F32 = "f32"
    F64 = "f64"
    BYTES = "bytes"
    """So many bytes, whatever they mean: a CUDA kernel."""
    NOTHING = "nothing"
    """Something that a session cannot pass."""


_WHOLE: Final[dict[Takes, tuple[int, int]]] = {
    Takes.BOOL: (0, 1),
    **{Takes(f"u{bits}"): (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
    **{Takes(f"i{bits}"): (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)},
}
_TYPED_KINDS: Final = frozenset(kind.value for kind in ArgKind if not kind.is_bare)
_FRACTIONS: Final = (Takes.F32, Takes.F64)
_F32_MAX: Final = 3.4028235677973366e38
"""The first that no longer rounds to a fraction of 32 bits."""
_BYTES: Final = {
    ArgKind.U32: 4,
    ArgKind.I32: 4,
    ArgKind.F32: 4,
    ArgKind.U64: 8,
    ArgKind.I64: 8,
    ArgKind.F64: 8,
    ArgKind.BUFFER: 8,
}

Adapt = Callable[[int | float], int | float]
"""Makes of a bare number what the parameter takes, or refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a kernel."""

    name: str = ""
    takes: Takes
    shown: str
    """Its type, as the author of the kernel wrote it."""
    bytes: int = 0
    """Of one element (of a buffer), or of the whole (``Takes.BYTES``)."""

    def __str__(self) -> str:
        return f"{self.name}: {self.shown}" if self.name else self.shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A kernel's name and parameters."""

    kernel: str
    parameters: tuple[Parameter, ...] | None = None
    """None: the driver cannot tell."""

    def __str__(self) -> str:
        if self.parameters is None:
            return f"{self.kernel}(…)"
        return f"{self.kernel}({', '.join(map(str, self.parameters))})"


def check_kinds(signature: Signature, given: Sequence[ArgKind]) -> dict[int, Adapt]:
    """Refuse arguments of the wrong number or type; for the bare ones, by index, how each becomes what it must be."""
    parameters = signature.parameters
    if parameters is None:
        for index, kind in enumerate(given):
            if kind.is_bare:
                raise _wrong(signature, index, None, "a bare number has no type here", _TYPED)
        return {}
    if len(given) != len(parameters):
        raise InvalidRequest(
            f"launch: {signature} takes {len(parameters)} arguments, and {len(given)} were given "
            f"({', '.join(given) or 'none'})",
            do="Give one argument for each parameter.",
        )
    adapts = {}
    for index, (parameter, kind) in enumerate(zip(parameters, given, strict=True)):
        adapt = _match(signature, index, parameter, kind)
        if adapt is not None:
            adapts[index] = adapt
    return adapts


_TYPED: Final = "Say which it is: sublet.u32(…), u64, i32, i64, f32 or f64."


def _match(signature: Signature, index: int, parameter: Parameter, kind: ArgKind) -> Adapt | None:
    takes = parameter.takes
    if takes is Takes.NOTHING:
        raise _wrong(
            signature, index, parameter, "a session cannot pass that", "Pass numbers, and arrays of one dimension."
        )
    if takes is Takes.BYTES:
        if kind.is_bare:
            raise _wrong(signature, index, parameter, "a bare number has no type here", _TYPED)
        if _BYTES[kind] != parameter.bytes:
            raise _wrong(signature, index, parameter, f"{kind} has {_BYTES[kind]} bytes", _TYPED)
        return None
    if kind.is_bare:
        return _adapt(signature, index, parameter, kind)
    if kind.value != takes.value:
        raise _wrong(signature, index, parameter, f"{kind} was given", f"Give {_wanted(takes)}.")
    return None


def _adapt(signature: Signature, index: int, parameter: Parameter, kind: ArgKind) -> Adapt:
    takes = parameter.takes
    if takes in _FRACTIONS:
        if takes is Takes.F64:
            return float

        def fraction(value: int | float) -> float:
            if _F32_MAX <= abs(value) < float("inf"):
                raise _wrong(signature, index, parameter, f"{value} is too large", "Give one that fits.")
            return float(value)

        return fraction
    if kind is ArgKind.FLOAT or takes not in _WHOLE:
        raise _wrong(signature, index, parameter, f"a bare {kind} was given", f"Give {_wanted(takes)}.")
    low, high = _WHOLE[takes]

    def whole(value: int | float) -> int | float:
        if not low <= value <= high:
            raise _wrong(signature, index, parameter, f"{value} is outside {low} to {high}", "Give one that fits.")
        return value

    return whole


def _wanted(takes: Takes) -> str:
    if takes is Takes.BUFFER:
        return "a buffer"
    if takes.value in _TYPED_KINDS:
        return f"sublet.{takes}(…) or a bare number"
    return "a bare number"


def _wrong(signature: Signature, index: int, parameter: Parameter | None, why: str, do: str) -> InvalidRequest:
    which = f"argument {index + 1}" + (f" ({parameter})" if parameter is not None else "")
    return InvalidRequest(f"launch: {which} of {signature}: {why}", do=do)
