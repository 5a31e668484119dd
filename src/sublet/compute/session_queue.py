"""A session's unsent and unanswered operations. Pure, without a connection.

Operations wait here until they go off together as one batch. Of batches only one is on its way at a time: the first
operation that fails must be the last that happened, whatever was written behind it. What stood behind it is dropped
then, and told to the handles it made; only what gives something back is done all the same, so that nothing leaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sublet.errors import GpuError, SubletError
from sublet.wire.device import (
    OP_CALLS,
    OPS_MAX,
    SHAPES_MAX,
    Alloc,
    Copy,
    Fill,
    Free,
    Launch,
    LaunchShape,
    Load,
    Op,
    OpFailed,
    Read,
    Source,
    Unload,
    Write,
    WriteShared,
)
from sublet.wire.refusals import error_of

COST_MAX: Final = 640 * 1024
"""Bytes of one message, about: it may have a megabyte."""
_OP_COST: Final = 96
_SHAPE_COST: Final = 512
_IN_BASE64: Final = 1.4


class Sent:
    """One batch that is on its way, or about to be."""

    def __init__(self, ops: tuple[Op, ...], shapes: tuple[LaunchShape, ...], first: int) -> None:
        self.ops = ops
        self.shapes = shapes
        self.first = first
        """How many operations of the session came before it since a caller last waited."""

    def given_back(self, start: int) -> list[Op]:
        """What of it still has to be done although operations before it failed."""
        made = {op.buffer for op in self.ops[start:] if isinstance(op, Alloc)}
        return [
            op for op in self.ops[start:] if isinstance(op, Unload) or (isinstance(op, Free) and op.buffer not in made)
        ]

    def never_made(self, start: int) -> list[int]:
        """The buffers that were to be made by what did not happen."""
        return [op.buffer for op in self.ops[start:] if isinstance(op, Alloc)]


class SessionQueue:
    """What waits to be sent."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.sent = 0
        """Operations that were sent since a caller last waited."""
        self._shapes: dict[LaunchShape, int] = {}
        self._cost = 0.0

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def is_full(self) -> bool:
        """Whether one more might be too much for one message."""
        return self._cost >= COST_MAX or len(self.ops) >= OPS_MAX or len(self._shapes) >= SHAPES_MAX

    def put(self, op: Op) -> None:
        """One more, at the end."""
        self.ops.append(op)
        self._cost += _OP_COST + _weight(op)

    def launch(self, shape: LaunchShape, values: bytes) -> None:
        """One more launch. What it has in common with others is sent once."""
        number = self._shapes.get(shape)
        if number is None:
            number = self._shapes[shape] = len(self._shapes)
            self._cost += _SHAPE_COST + 16 * len(shape.kinds) + len(shape.kernel)
        self.ops.append(Launch(shape=number, values=values))
        self._cost += _OP_COST + _IN_BASE64 * len(values)

    def take(self) -> Sent:
        """All of it, as one batch."""
        made = Sent(tuple(self.ops), tuple(self._shapes), self.sent)
        self.sent += len(made.ops)
        self.clear()
        return made

    def clear(self) -> None:
        """Nothing waits."""
        self.ops = []
        self._shapes = {}
        self._cost = 0.0


def failure_of(sent: Sent, failed: OpFailed) -> SubletError:
    """The error for the program: the guest's own words, and which of its operations that was."""
    error = error_of(failed.refusal)
    if isinstance(error, GpuError):
        error.call = failed.call
    place = sent.first + failed.index + 1
    error.message += f" (operation {place} since the last wait: {_described(sent.ops[failed.index], sent.shapes)})"
    error.args = (error.message,)
    return error


def _described(op: Op, shapes: Sequence[LaunchShape]) -> str:
    call = OP_CALLS[type(op)]
    match op:
        case Launch(shape=number) if number < len(shapes):
            shape = shapes[number]
            return f"{call} {shape.kernel!r}, grid {_extent(shape.grid)}, block {_extent(shape.block)}"
        case Alloc(buffer=number, size=size):
            return f"{call} of {size} bytes, buffer {number}"
        case Free(buffer=number):
            return f"{call} of buffer {number}"
        case Write(buffer=number, offset=offset, data=data):
            return f"{call} of {len(data)} bytes at {offset} of buffer {number}"
        case (
            WriteShared(buffer=number, offset=offset, length=length) | Read(buffer=number, offset=offset, length=length)
        ):
            return f"{call} of {length} bytes at {offset} of buffer {number}"
        case Fill(buffer=number, offset=offset, length=length):
            return f"{call} of {length} bytes at {offset} of buffer {number}"
        case Copy(target=target, source=source, length=length):
            return f"{call} of {length} bytes from buffer {source} to buffer {target}"
        case Load(module=number) | Unload(module=number):
            return f"{call} of module {number}"
        case _:
            return call


def _extent(extent: Sequence[int]) -> str:
    return "×".join(map(str, extent))


def _weight(op: Op) -> float:
    match op:
        case Write(data=data):
            return _IN_BASE64 * len(data)
        case Load(sources=sources):
            return sum(_IN_BASE64 * len(one.data) if isinstance(one, Source) else _OP_COST for one in sources)
        case _:
            return 0.0
