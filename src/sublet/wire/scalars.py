"""Typed numbers for kernel launches, and their encoding.

A kernel takes exactly the bytes it was compiled for, and nothing in a cubin says whether four of them are a whole
number or a fraction. So a number names its type, and one that does not fit is refused where it is written, not on the
device::

    [u64(step), u32(count), f32(0.5)]

A bare number is possible where the kernel itself knows its types (Warp); it is checked against them before the launch.
"""

from __future__ import annotations

import enum
import struct
from operator import index
from typing import Final, NamedTuple

from sublet.errors import InvalidRequest
from sublet.values import shown

ARGUMENTS_MAX: Final = 256
"""Arguments of one launch."""


class ArgKind(enum.StrEnum):
    """What an argument says it is."""

    U32 = "u32"
    U64 = "u64"
    I32 = "i32"
    I64 = "i64"
    F32 = "f32"
    F64 = "f64"
    BUFFER = "buffer"
    """A piece of device memory; it travels as its number."""
    INT = "int"
    """A bare whole number: the kernel must know what it is."""
    FLOAT = "float"
    """A bare fraction: the same."""

    @property
    def is_bare(self) -> bool:
        """Whether it leaves its type to the kernel."""
        return self in (ArgKind.INT, ArgKind.FLOAT)


_CODES: Final = {
    ArgKind.U32: "I",
    ArgKind.U64: "Q",
    ArgKind.I32: "i",
    ArgKind.I64: "q",
    ArgKind.F32: "f",
    ArgKind.F64: "d",
    ArgKind.BUFFER: "Q",
    ArgKind.INT: "q",
    ArgKind.FLOAT: "d",
}
_RANGES: Final = {
    ArgKind.U32: (0, (1 << 32) - 1),
    ArgKind.U64: (0, (1 << 64) - 1),
    ArgKind.I32: (-(1 << 31), (1 << 31) - 1),
    ArgKind.I64: (-(1 << 63), (1 << 63) - 1),
}


def packing(kinds: tuple[ArgKind, ...]) -> struct.Struct:
    """How the values of such a list of arguments are packed: little-endian, without gaps."""
    return struct.Struct("<" + "".join(_CODES[kind] for kind in kinds))


class Scalar(NamedTuple):
    """A number with its type. Made by ``u32``, ``u64``, ``i32``, ``i64``, ``f32`` and ``f64``."""

    kind: ArgKind
    value: int | float


def u32(value: int) -> Scalar:
    """A whole number of 32 bits without sign."""
    return _whole(ArgKind.U32, value)


def u64(value: int) -> Scalar:
    """A whole number of 64 bits without sign."""
    return _whole(ArgKind.U64, value)


def i32(value: int) -> Scalar:
    """A whole number of 32 bits."""
    return _whole(ArgKind.I32, value)


def i64(value: int) -> Scalar:
    """A whole number of 64 bits."""
    return _whole(ArgKind.I64, value)


def f32(value: float) -> Scalar:
    """A fraction of 32 bits: the nearest one there is. What is too large for it is refused, infinity is not."""
    made = _fraction(ArgKind.F32, value)
    try:
        return Scalar(ArgKind.F32, struct.unpack("<f", struct.pack("<f", made))[0])
    except OverflowError:
        raise InvalidRequest(f"{value!r} is too large for f32", do="Use f64, in the kernel as well.") from None


def f64(value: float) -> Scalar:
    """A fraction of 64 bits."""
    return Scalar(ArgKind.F64, _fraction(ArgKind.F64, value))


def _whole(kind: ArgKind, value: object) -> Scalar:
    try:
        number = index(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise InvalidRequest(f"{kind}({shown(value)}): not a whole number", do=f"Give {kind} an int.")
    low, high = _RANGES[kind]
    if not low <= number <= high:
        raise InvalidRequest(
            f"{kind}({shown(number)}): outside {low} to {high}", do="Use a wider type, in the kernel as well."
        )
    return Scalar(kind, number)


def _fraction(kind: ArgKind, value: object) -> float:
    try:
        if isinstance(value, bool | str | bytes | bytearray):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{kind}({shown(value)}): not a number", do=f"Give {kind} a float.") from None
