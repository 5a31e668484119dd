"""Launches Warp kernels on a session's memory: recorded once, then only changed arguments are set."""

from __future__ import annotations

from typing import Any

from sublet.devices.grids import warp_dim
from sublet.devices.memory import MemoryPiece
from sublet.devices.signature import Parameter
from sublet.devices.tabled import LaunchPlan
from sublet.errors import GpuError, InvalidRequest
from sublet.wire.scalars import ArgKind


class WarpLaunch:
    """One kernel with its dimensions, to be run with these values and those."""

    def __init__(self, wp: Any, kernel: Any, plan: LaunchPlan, device: str, stream: Any = None) -> None:
        self._wp = wp
        self._kernel = kernel
        self._plan = plan
        self._device = device
        self._stream = stream
        self._dim = warp_dim(plan.grid, plan.block)
        self._command: Any = None
        self._last: list[Any] = []
        """What the command holds. Pieces are kept as objects, so that a new one is never taken for an old one."""

    def run(self, values: list[Any]) -> None:
        """Run it. A recorded command costs a fifth of a launch from nothing."""
        if self._command is None:
            self._record(values)
        else:
            self._set(values)
        try:
            self._command.launch(stream=self._stream)
        except Exception as error:  # Warp raises what its native half says as RuntimeError and others
            raise _failed(error) from error

    def _record(self, values: list[Any]) -> None:
        inputs = [self._native(index, value) for index, value in enumerate(values)]
        try:
            self._command = self._wp.launch(
                self._kernel,
                dim=self._dim,
                inputs=inputs,
                device=self._device,
                stream=self._stream,
                record_cmd=True,
            )
        except Exception as error:
            raise _failed(error) from error
        self._last = values

    def _set(self, values: list[Any]) -> None:
        for index, (value, last) in enumerate(zip(values, self._last, strict=True)):
            if value is not last and not (value == last and type(value) is int):  # 0.0 == -0.0, and they differ
                native = self._native(index, value)
                made = native.__ctype__() if isinstance(value, MemoryPiece) else native
                self._command.set_param_at_index_from_ctype(index, made)
        self._last = values

    def _native(self, index: int, value: Any) -> Any:
        """An array of the parameter's type over a piece; a number as it is."""
        if self._plan.kinds[index] is not ArgKind.BUFFER:
            return value
        piece: MemoryPiece = value
        dtype = self._kernel.adj.args[index].type.dtype
        forms = piece.forms
        if forms is None:
            forms = piece.forms = {}
        found = forms.get(dtype)
        if found is None:
            assert self._plan.signature.parameters is not None
            parameter = self._plan.signature.parameters[index]
            found = forms[dtype] = self._wp.array(
                ptr=piece.address,
                dtype=dtype,
                shape=(_count(piece, parameter),),
                capacity=piece.size,
                device=self._device,
            )
        return found


def _count(piece: MemoryPiece, parameter: Parameter) -> int:
    count, rest = divmod(piece.size, parameter.bytes)
    if rest:
        raise InvalidRequest(
            f"launch: {parameter} has elements of {parameter.bytes} bytes, and the buffer has {piece.size}",
            do="Make the buffer a whole number of elements.",
        )
    return count


def _failed(error: Exception) -> GpuError:
    return GpuError(f"launch: Warp could not launch: {error}", call="launch")
