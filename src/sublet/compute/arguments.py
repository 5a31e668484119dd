"""What a launch passes: typed numbers and buffers.

A kernel in CUDA, PTX or as a cubin takes exactly the bytes it was compiled for, which do not tell what they
mean. So a number says what it is: ``sublet.u32(n)``. A bare one is taken where the kernel knows its types (Warp), and a
numpy scalar says by itself what it is, except for those two that plain arithmetic makes of everything (``float64``,
``int64``): they count as bare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sublet.compute.buffers import Buffer, Module
from sublet.errors import InvalidRequest
from sublet.wire.device import ModuleKind
from sublet.wire.scalars import ARGUMENTS_MAX, ArgKind, Scalar, f32, f64, i32, i64, u32, u64

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Argument", "f32", "f64", "i32", "i64", "kinds_and_values", "u32", "u64"]

Argument: TypeAlias = "Scalar | Buffer | int | float | np.generic"

_I64_MIN: Final = -(1 << 63)
_I64_MAX: Final = (1 << 63) - 1
_OF_NUMPY: Final[dict[str, Callable[[Any], Scalar]]] = {
    "float32": f32,
    "int32": i32,
    "uint32": u32,
    "uint64": u64,
}


def kinds_and_values(
    owner: object, module: Module, shown: str, args: Sequence[Argument]
) -> tuple[tuple[ArgKind, ...], list[int | float]]:
    """What the arguments say they are, and their values. ``shown``: the kernel with its parameters, for people."""
    kinds: list[ArgKind] = []
    values: list[int | float] = []
    for index, arg in enumerate(args):
        if isinstance(arg, Buffer):
            arg.check(owner, "launch")
            kinds.append(ArgKind.BUFFER)
            values.append(arg.number)
            continue
        made = arg if isinstance(arg, Scalar) else _other(module, shown, index, arg)
        kinds.append(made.kind)
        values.append(made.value)
    if len(kinds) > ARGUMENTS_MAX:
        raise InvalidRequest(f"launch: {len(kinds)} arguments", do=f"Give at most {ARGUMENTS_MAX}.")
    return tuple(kinds), values


def _other(module: Module, shown: str, index: int, arg: object) -> Scalar:
    """A bare number, or one of numpy's."""
    name = getattr(getattr(arg, "dtype", None), "name", "")
    if name in _OF_NUMPY and getattr(arg, "shape", None) == ():
        return _OF_NUMPY[name](arg.item())  # type: ignore[attr-defined]
    if name in ("float64", "int64", "bool") and getattr(arg, "shape", None) == ():
        arg = arg.item()  # type: ignore[attr-defined]
    which = f"launch: argument {index + 1} of {shown}"
    if not isinstance(arg, int | float):
        raise InvalidRequest(f"{which}: a {type(arg).__name__} cannot be passed", do="Pass numbers and buffers.")
    if module.kind is not ModuleKind.WARP:
        raise InvalidRequest(
            f"{which}: {arg!r} is a bare number, and a {module.kind} kernel cannot say what it should be",
            do="Say which it is: sublet.u32(…), u64, i32, i64, f32 or f64.",
        )
    if isinstance(arg, float):
        return Scalar(ArgKind.FLOAT, arg)
    if not _I64_MIN <= arg <= _I64_MAX:
        raise InvalidRequest(f"{which}: {arg} does not fit 64 bits with a sign", do="Use sublet.u64(…), if it fits.")
    return Scalar(ArgKind.INT, int(arg))
