"""Random programs of session operations, and a plain model that says what each must do.

The model is a second implementation, as dumb as can be: a ``bytearray`` for each buffer, Python's own numbers for the
kernel. A program is batches of operations, right ones and wrong ones; after each batch the session's answer must be the
model's: the same bytes read, the same operation refused, for the same kind of reason; and at its end, when everything
is read back, nothing may differ. A failure names its seed, which repeats it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final, Protocol

from sublet.errors import InvalidRequest, NotFound, OutOfMemory, SubletError
from sublet.testing.device_conformance import KERNELS
from sublet.values import Epoch, LeaseId
from sublet.wire.device import (
    Alloc,
    Batch,
    BatchDone,
    Copy,
    Fill,
    Free,
    Launch,
    LaunchShape,
    Load,
    ModuleKind,
    Op,
    Read,
    Source,
    Sync,
    Unload,
    Write,
)
from sublet.wire.scalars import ArgKind, packing

BATCHES: Final = 6
OPS: Final = 14
SIZE_MAX: Final = 96
CAP_BYTES: Final = 400
"""So little that programs run out of it."""
KINDS: Final = (ArgKind.BUFFER, ArgKind.U32, ArgKind.U32)
PACKING: Final = packing(KINDS)
U32_MAX: Final = (1 << 32) - 1


class SessionUnderTest(Protocol):
    """A session with ``CAP_BYTES`` of memory, however it is reached."""

    @property
    def number(self) -> int: ...

    @property
    def lease(self) -> LeaseId: ...

    @property
    def epoch(self) -> Epoch: ...

    def run(self, batch: Batch) -> BatchDone: ...


class Model:
    """What a session is, in the plainest words."""

    def __init__(self, cap_bytes: int = CAP_BYTES, *, has_types: bool = True) -> None:
        """``has_types``: the kernel takes an array of 32-bit numbers, as Warp's does, and not any address."""
        self.cap_bytes = cap_bytes
        self.has_types = has_types
        self.buffers: dict[int, bytearray] = {}
        self.modules: set[int] = set()
        self.highest_buffer = 0
        self.highest_module = 0

    def do(self, op: Op, shapes: tuple[LaunchShape, ...]) -> bytes:
        """Carry it out; what it reads. Raises the class that a session must refuse it with."""
        match op:
            case Alloc(buffer=number, size=size):
                self._admit(number > self.highest_buffer and size > 0)
                if sum(map(len, self.buffers.values())) + size > self.cap_bytes:
                    raise OutOfMemory("model")
                self.buffers[number] = bytearray(size)
                self.highest_buffer = number
            case Free(buffer=number):
                self._buffer(number)
                del self.buffers[number]
            case Write(buffer=number, offset=offset, data=data):
                start, end = self._span(number, offset, len(data))
                self.buffers[number][start:end] = data
            case Read(buffer=number, offset=offset, length=length):
                start, end = self._span(number, offset, length)
                return bytes(self.buffers[number][start:end])
            case Fill(buffer=number, offset=offset, length=length, pattern=pattern):
                start, end = self._span(number, offset, length)
                width = len(pattern)
                self._admit(width in (1, 2, 4) and start % width == 0 and length % width == 0)
                self.buffers[number][start:end] = pattern * (length // width)
            case Copy(target=target, at=at, source=source, offset=offset, length=length):
                self._copy(target, at, source, offset, length)
            case Load(module=number):
                self._admit(number > self.highest_module)
                self.modules.add(number)
                self.highest_module = number
            case Unload(module=number):
                self._module(number)
                self.modules.remove(number)
            case Launch():
                self._launch(op, shapes)
            case _:
                pass
        return b""

    def _copy(self, target: int, at: int, source: int, offset: int, length: int) -> None:
        self._buffer(source)
        self._buffer(target)
        start, end = self._span(target, at, length)
        first, last = self._span(source, offset, length)
        self._admit(target != source or not length or end <= first or last <= start)
        self.buffers[target][start:end] = self.buffers[source][first:last]

    def _launch(self, op: Launch, shapes: tuple[LaunchShape, ...]) -> None:
        shape = shapes[op.shape]
        self._module(shape.module)
        if shape.kernel != "step":
            raise NotFound("model")
        threads = shape.grid[0] * shape.block[0]
        self._admit(threads > 0 and shape.kinds == KINDS)
        number, n, a = PACKING.unpack(op.values)
        buffer = self._buffer(number)
        self._admit(len(buffer) % 4 == 0 or not self.has_types)
        for i in range(min(threads, n)):
            (x,) = struct.unpack_from("<I", buffer, 4 * i)
            struct.pack_into("<I", buffer, 4 * i, (x * a + i) & U32_MAX)

    def _admit(self, fine: bool) -> None:
        if not fine:
            raise InvalidRequest("model")

    def _buffer(self, number: int) -> bytearray:
        if number not in self.buffers:
            raise NotFound("model")
        return self.buffers[number]

    def _module(self, number: int) -> None:
        if number not in self.modules:
            raise NotFound("model")

    def _span(self, number: int, offset: int, length: int) -> tuple[int, int]:
        size = len(self._buffer(number))
        self._admit(offset >= 0 and length >= 0 and offset + length <= size)
        return offset, offset + length


class _Author:
    """Writes programs, from a seed. It knows the model, so that most of what it writes makes sense."""

    def __init__(self, chance: random.Random, model: Model, sources: tuple[Source, ...]) -> None:
        self._chance = chance
        self._model = model
        self._sources = sources
        self._buffer = 0
        self._module = 0
        self.shapes: list[LaunchShape] = []
        self._writers: dict[str, tuple[int, Callable[[], Op]]] = {
            "alloc": (3, self._alloc),
            "free": (2, lambda: Free(buffer=self._some())),
            "write": (4, self._write),
            "read": (4, self._read),
            "copy": (3, self._copy),
            "fill": (3, self._fill),
            "load": (1, self._load),
            "unload": (1, lambda: Unload(module=self._some_module())),
            "launch": (6, self._launch),
            "sync": (1, Sync),
        }

    def op(self) -> Op:
        names = list(self._writers)
        [name] = self._chance.choices(names, [self._writers[name][0] for name in names])
        if not self._wrong():
            name = self._sensible(name)
        return self._writers[name][1]()

    def _sensible(self, name: str) -> str:
        """The same, or what must come first for it to have a chance."""
        if name == "alloc" and sum(map(len, self._model.buffers.values())) > CAP_BYTES - SIZE_MAX:
            return "free" if self._chance.random() < 0.7 else name
        if name == "launch" and not self._model.modules:
            return "load"
        if name == "unload" and not self._model.modules:
            return "sync"
        if name not in ("alloc", "load", "unload", "sync") and not self._model.buffers:
            return "alloc"
        return name

    def _wrong(self) -> bool:
        return self._chance.random() < 0.01

    def _alloc(self) -> Op:
        if not self._wrong():
            self._buffer += self._chance.choice((1, 1, 1, 5))
        size = self._chance.choice((0, -1)) if self._wrong() else self._chance.randint(1, SIZE_MAX)
        if self._chance.random() < 0.7:
            size = size + -size % 4
        return Alloc(buffer=self._buffer, size=size)

    def _some(self) -> int:
        there = list(self._model.buffers)
        if not there or self._wrong():
            return self._chance.randint(-1, self._buffer + 2)
        return self._chance.choice(there)

    def _some_module(self) -> int:
        there = sorted(self._model.modules)
        if not there or self._wrong():
            return self._chance.randint(-1, self._module + 2)
        return self._chance.choice(there)

    def _span(self, *numbers: int) -> tuple[int, ...]:
        """An offset into each buffer, and a length that fits all of them; now and then one that does not."""
        sizes = [len(self._model.buffers.get(number, b"")) for number in numbers]
        length = self._chance.randint(0, min(sizes))
        offsets = [self._chance.randint(0, size - length) for size in sizes]
        if self._wrong():
            return (*offsets, self._chance.choice((-1, max(sizes) + 1, 1 << 40)))
        if self._wrong():
            return (-1, *offsets[1:], length)
        if len(numbers) == 1 and self._chance.random() < 0.3:
            return (0, sizes[0])
        return (*offsets, length)

    def _write(self) -> Op:
        number = self._some()
        offset, length = self._span(number)
        return Write(buffer=number, offset=offset, data=self._chance.randbytes(min(max(length, 0), 2 * SIZE_MAX)))

    def _read(self) -> Op:
        number = self._some()
        offset, length = self._span(number)
        return Read(buffer=number, offset=offset, length=length)

    def _copy(self) -> Op:
        target, source = self._some(), self._some()
        at, offset, length = self._span(target, source)
        if target == source and at < offset + length and offset < at + length and not self._wrong():
            length = 0
        return Copy(target=target, at=at, source=source, offset=offset, length=length)

    def _fill(self) -> Op:
        number = self._some()
        offset, length = self._span(number)
        width = 3 if self._wrong() else self._chance.choice((1, 2, 4))
        if not self._wrong():
            offset, length = offset - offset % width, length - length % width
        return Fill(buffer=number, offset=offset, length=length, pattern=self._chance.randbytes(width))

    def _load(self) -> Op:
        if not self._wrong():
            self._module += 1
        return Load(module=self._module, sources=self._sources)

    def _launch(self) -> Op:
        whole = [number for number, one in self._model.buffers.items() if len(one) % 4 == 0]
        number = self._chance.choice(whole) if whole and not self._wrong() else self._some()
        size = len(self._model.buffers.get(number, b""))
        shape = LaunchShape(
            module=self._some_module(),
            kernel="stop" if self._wrong() else "step",
            grid=(0 if self._wrong() else self._chance.randint(1, 3),),
            block=(self._chance.choice((1, 8, 32)),),
            kinds=KINDS[:2] if self._wrong() else KINDS,
        )
        if shape not in self.shapes:
            self.shapes.append(shape)
        values = PACKING.pack(number % (1 << 64), self._chance.randint(0, size // 4), self._chance.randint(0, U32_MAX))
        if shape.kinds != KINDS:
            values = values[:12]
        return Launch(shape=self.shapes.index(shape), values=values)


def run_program(
    session: SessionUnderTest, seed: int, *, sources: dict[ModuleKind, bytes] | None = None, batches: int = BATCHES
) -> int:
    """One program on a fresh session; how many operations were carried out. Raises ``AssertionError`` with the seed
    where session and model part."""
    chance = random.Random(seed)
    model = Model(has_types=sources is None or ModuleKind.WARP in sources)
    given = tuple(Source(kind=kind, data=data) for kind, data in (KERNELS if sources is None else sources).items())
    author = _Author(chance, model, given)
    done = _compare(session, model, [Load(module=1, sources=given)], (), seed)
    author._module = 1
    for _ in range(batches):
        # What is written depends on what the model holds *now*, so a batch is written and modelled side by side.
        ahead = _ahead_of(model)
        author._model = ahead
        author.shapes = []
        ops: list[Op] = []
        for _ in range(chance.randint(1, OPS)):
            op = author.op()
            ops.append(op)
            try:
                ahead.do(op, tuple(author.shapes))
            except SubletError:
                break  # with what stands behind it now and then, which must not happen
        if chance.random() < 0.5:
            ops.append(Sync())
        done += _compare(session, model, ops, tuple(author.shapes), seed)
    everything: list[Op] = [Read(buffer=n, offset=0, length=len(one)) for n, one in model.buffers.items()]
    return done + _compare(session, model, everything, (), seed)


def _ahead_of(model: Model) -> Model:
    ahead = Model(model.cap_bytes, has_types=model.has_types)
    ahead.buffers = {number: bytearray(one) for number, one in model.buffers.items()}
    ahead.modules = set(model.modules)
    ahead.highest_buffer, ahead.highest_module = model.highest_buffer, model.highest_module
    return ahead


def _compare(session: SessionUnderTest, model: Model, ops: list[Op], shapes: tuple[LaunchShape, ...], seed: int) -> int:
    batch = Batch(session=session.number, lease=session.lease, epoch=session.epoch, ops=tuple(ops), shapes=shapes)
    answer = session.run(batch)
    data, count, refused = b"", 0, ""
    for op in ops:
        try:
            data += model.do(op, shapes)
        except SubletError as error:
            refused = error.kind
            break
        count += 1
    told = f"seed {seed}, operation {count} of {ops}"
    found = answer.failed.refusal if answer.failed is not None else None
    assert (found.kind if found else "") == refused, f"{told}: {found}, and the model says {refused or 'fine'}"
    assert answer.done == count, f"{told}: {answer.done} were done"
    assert answer.data == data, f"{told}: {answer.data.hex()} was read, and the model has {data.hex()}"
    return count
