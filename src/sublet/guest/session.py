"""Executes a ``GpuSession``'s batches of operations on a device while the lease is live.

Before every operation the guest's page is asked whether (lease, epoch) may still act; that costs less than a
microsecond while the page says what it said before. A session whose lease is over frees everything it has, at once, and
answers everything after with ``GpuSessionEnded``.

Operations are carried out in order. The first that fails ends the batch, with its place and its call; what was read
before it is handed back. Whether what was *launched* before it has also run to its end is known after a ``sync``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final

from sublet.devices.interface import Device, Launchable, ModuleHandle, Sources
from sublet.devices.memory import BufferHandle
from sublet.errors import GpuError, GpuSessionEnded, InvalidRequest, LeaseEnded, NotFound, StaleEpoch, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.values import Epoch, LeaseId
from sublet.wire.device import (
    OP_CALLS,
    OPS_MAX,
    SHAPES_MAX,
    Alloc,
    Batch,
    BatchDone,
    Copy,
    Fill,
    Free,
    KernelView,
    Launch,
    LaunchShape,
    Load,
    Loaded,
    Op,
    OpFailed,
    Read,
    SessionClosed,
    Source,
    Sync,
    Unload,
    Write,
    WriteShared,
)
from sublet.wire.refusals import refusal_of
from sublet.wire.scalars import packing

PLANS_MAX: Final = 1024
"""Launch shapes that a session keeps checked. With one more it begins anew."""
_NOTHING: Final = memoryview(b"")

_numbers = itertools.count(int.from_bytes(os.urandom(4), "big") << 16)
"""Of sessions. Not from 1, so that a holder who mistakes one guest for another is told so."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A launch shape of this session."""

    plan: Launchable
    packing: Struct
    buffers: tuple[int, ...]
    module: int


class GuestSession:
    """One session of a holder on one device. One thread uses it."""

    def __init__(self, device: Device, lease: LeaseId, epoch: Epoch, check: Callable[[], object]) -> None:
        """``check`` raises once (lease, epoch) may not act any more. The session owns the device and closes it."""
        self.number = next(_numbers)
        self.lease = lease
        self.epoch = epoch
        self.device = device
        self.launches = 0
        self.failures = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self._check = check
        self._over: SubletError | None = None
        self._buffers: dict[int, BufferHandle] = {}
        self._modules: dict[int, ModuleHandle] = {}
        self._highest = {"buffer": 0, "module": 0}
        self._plans: dict[LaunchShape, _Prepared] = {}
        self._do: dict[type, Callable[[Any, _Run], None]] = {
            Alloc: self._alloc,
            Free: self._free,
            Write: self._write,
            WriteShared: self._write_shared,
            Read: self._read,
            Copy: self._copy,
            Fill: self._fill,
            Load: self._load,
            Unload: self._unload,
            Launch: self._launch,
            Sync: self._sync,
        }

    def run(self, batch: Batch, shared: memoryview = _NOTHING, out: memoryview | None = None) -> BatchDone:
        """Carry out a batch. ``shared`` is the shared memory that came beside it; what is read goes into ``out``, if
        there is one, else into the answer. Raises what concerns the batch as a whole; then nothing of it happened."""
        self._admit(batch)
        run = _Run(batch.shapes, shared, out)
        index = 0
        try:
            for op in batch.ops:
                self._allowed()
                self._do[type(op)](op, run)
                index += 1
        except SubletError as error:
            self.failures += 1
            return run.done(index, self._failed(index, batch.ops[index], error))
        return run.done(index, None)

    def close(self) -> SessionClosed:
        """Free everything. Harmless twice."""
        if self._over is None:
            self._over = GpuSessionEnded("this session is closed", do="Open a new one.")
        self._buffers.clear()
        self._modules.clear()
        self._plans.clear()
        self.device.close()
        return SessionClosed(
            launches=self.launches,
            failures=self.failures,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            peak_bytes=self.device.account.peak_bytes,
        )

    # ---- whether it may ----

    def _admit(self, batch: Batch) -> None:
        if batch.session != self.number:
            raise NotFound(f"there is no session {batch.session} here", do="Open one.")
        if (batch.lease, batch.epoch) != (self.lease, self.epoch):
            raise StaleEpoch(f"({batch.lease}, {batch.epoch}) did not open this session")
        if len(batch.ops) > OPS_MAX or len(batch.shapes) > SHAPES_MAX:
            raise InvalidRequest(
                f"a batch of {len(batch.ops)} operations and {len(batch.shapes)} launch shapes",
                do=f"Send at most {OPS_MAX} and {SHAPES_MAX}.",
            )
        self._allowed()

    def _allowed(self) -> None:
        if self._over is not None:
            raise self._over
        try:
            self._check()
        except LeaseEnded as error:
            self._end(GpuSessionEnded(f"the GPU session went with its lease: {error.message}", end=error.end), error)
        except StaleEpoch as error:
            self._end(error, error)

    def _end(self, over: SubletError, cause: SubletError) -> None:
        self._over = over
        try:
            self.close()
        except SubletError as error:
            over.add_note(f"While it was freed: {error.message}")  # the guest goes anyway, and the device is verified
        if over is cause:
            raise over
        raise over from cause

    def _failed(self, index: int, op: Op, error: SubletError) -> OpFailed:
        call = error.call if isinstance(error, GpuError) and error.call else OP_CALLS[type(op)]
        return OpFailed(index=index, call=call, refusal=refusal_of(error))

    # ---- one operation each ----

    def _alloc(self, op: Alloc, run: _Run) -> None:
        self._new("buffer", op.buffer, "mem_alloc")
        self._buffers[op.buffer] = self.device.alloc(op.size)
        self._highest["buffer"] = op.buffer

    def _free(self, op: Free, run: _Run) -> None:
        self.device.free(self._buffer(op.buffer, "mem_free"))
        del self._buffers[op.buffer]

    def _write(self, op: Write, run: _Run) -> None:
        self.device.write(self._buffer(op.buffer, "mem_write"), op.offset, op.data)
        self.bytes_in += len(op.data)

    def _write_shared(self, op: WriteShared, run: _Run) -> None:
        data = run.piece(op.start, op.length, "mem_write")
        self.device.write(self._buffer(op.buffer, "mem_write"), op.offset, data)
        self.bytes_in += op.length

    def _read(self, op: Read, run: _Run) -> None:
        handle = self._buffer(op.buffer, "mem_read")
        if run.out is None or not 0 <= op.length <= self.device.account.cap_bytes:  # no room was made for nonsense
            run.data += self.device.read(handle, op.offset, op.length)
        else:
            with run.room(op.length) as view:
                self.device.read_into(handle, op.offset, view)
        self.bytes_out += op.length

    def _copy(self, op: Copy, run: _Run) -> None:
        source, target = self._buffer(op.source, "mem_copy"), self._buffer(op.target, "mem_copy")
        self.device.copy(target, op.at, source, op.offset, op.length)

    def _fill(self, op: Fill, run: _Run) -> None:
        self.device.fill(self._buffer(op.buffer, "mem_fill"), op.offset, op.length, op.pattern)

    def _load(self, op: Load, run: _Run) -> None:
        self._new("module", op.module, "module_load")
        made = self.device.load(_sources(op, run))
        self._modules[op.module] = made.handle
        self._highest["module"] = op.module
        kernels = tuple(KernelView(name=one.kernel, shown=str(one)) for one in made.kernels)
        run.loaded.append(Loaded(module=op.module, kind=made.kind, kernels=kernels))

    def _unload(self, op: Unload, run: _Run) -> None:
        self.device.unload(self._module(op.module, "module_unload"))
        del self._modules[op.module]
        self._plans = {shape: one for shape, one in self._plans.items() if one.module != op.module}

    def _launch(self, op: Launch, run: _Run) -> None:
        prepared = run.prepared.get(op.shape) or self._prepare(op.shape, run)
        if len(op.values) != prepared.packing.size:
            raise InvalidRequest(
                f"launch: {len(op.values)} bytes of values, and {prepared.packing.size} make up these arguments",
                do="Pack them as their kinds say.",
            )
        values: list[Any] = list(prepared.packing.unpack(op.values))
        for index in prepared.buffers:
            values[index] = self._buffer(values[index], "launch")
        self.device.launch(prepared.plan, values)
        self.launches += 1

    def _sync(self, op: Sync, run: _Run) -> None:
        self.device.sync()

    # ---- names ----

    def _prepare(self, number: int, run: _Run) -> _Prepared:
        if not 0 <= number < len(run.shapes):
            raise InvalidRequest(f"launch: there is no launch shape {number} in this batch", do="Send it along.")
        shape = run.shapes[number]
        found = self._plans.get(shape)
        if found is None:
            module = self._module(shape.module, "launch")
            plan = self.device.plan(module, shape.kernel, shape.grid, shape.block, shape.kinds)
            buffers = tuple(index for index, kind in enumerate(shape.kinds) if kind == "buffer")
            found = _Prepared(plan, packing(shape.kinds), buffers, shape.module)
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            self._plans[shape] = found
        run.prepared[number] = found
        return found

    def _buffer(self, number: int, call: str) -> BufferHandle:
        found = self._buffers.get(number)
        if found is None:
            raise self._missing("buffer", number, call, "freed")
        return found

    def _module(self, number: int, call: str) -> ModuleHandle:
        found = self._modules.get(number)
        if found is None:
            raise self._missing("module", number, call, "unloaded")
        return found

    def _new(self, what: str, number: int, call: str) -> None:
        if number <= self._highest[what]:
            raise InvalidRequest(
                f"{call}: {what} {number} was named before, or after a higher one", do="Number upwards, never twice."
            )

    def _missing(self, what: str, number: int, call: str, gone: str) -> NotFound:
        if 0 < number <= self._highest[what]:
            return NotFound(f"{call}: {what} {number} was {gone} before", do=f"Use a {what} only until it is {gone}.")
        return NotFound(f"{call}: there is no {what} {number} in this session", do="Use what this session gave out.")


class _Run:
    """What one batch gathers."""

    __slots__ = ("_at", "_shared", "data", "loaded", "out", "prepared", "shapes")

    def __init__(self, shapes: Sequence[LaunchShape], shared: memoryview, out: memoryview | None) -> None:
        self.shapes = shapes
        self.prepared: dict[int, _Prepared] = {}
        self.out = out
        self.data = bytearray()
        self.loaded: list[Loaded] = []
        self._shared = shared
        self._at = 0

    def piece(self, start: int, length: int, call: str) -> memoryview:
        """A part of the shared memory that came along."""
        if start < 0 or length < 0 or start + length > len(self._shared):
            raise InvalidRequest(
                f"{call}: {length} bytes from {start} on are not within the {len(self._shared)} bytes that came along",
                do="Fix start and length.",
            )
        return self._shared[start : start + length]

    def room(self, length: int) -> memoryview:
        """Where the next read goes."""
        assert self.out is not None
        self._at += length
        assert self._at <= len(self.out)
        return self.out[self._at - length : self._at]

    def done(self, count: int, failed: OpFailed | None) -> BatchDone:
        return BatchDone(done=count, data=bytes(self.data), loaded=tuple(self.loaded), failed=failed)


def _sources(op: Load, run: _Run) -> Sources:
    made = {
        one.kind: one.data if isinstance(one, Source) else bytes(run.piece(one.start, one.length, "module_load"))
        for one in op.sources
    }
    if len(made) != len(op.sources):
        raise InvalidRequest("module_load: the module is given twice in one kind", do="Give each kind once.")
    return made
