"""The base of all devices: every call is checked against the tables before it reaches the device.

A device derives from ``TabledDevice`` and says how memory is taken, moved and given back, and what a module is
(``_…`` below). It is handed only what was checked: addresses of pieces that are there, spans that lie within them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Final

from sublet.devices.account import MemoryAccount
from sublet.devices.grids import Extent, whole_extent
from sublet.devices.interface import (
    Bytes,
    DeviceIdentity,
    Launchable,
    LoadedModule,
    ModuleHandle,
    Sources,
    Value,
)
from sublet.devices.memory import BufferHandle, MemoryPiece, MemoryTable
from sublet.devices.signature import Adapt, Signature, check_kinds
from sublet.errors import CapacityExceeded, GpuError, InvalidRequest, NotFound, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.values import MIB
from sublet.wire.device import ModuleKind
from sublet.wire.scalars import ARGUMENTS_MAX, ArgKind

MODULES_MAX: Final = 256
"""Modules of one session."""
MODULE_BYTES_MAX: Final = 64 * MIB
"""Bytes of one module in one kind."""

_generations = itertools.count(1)
"""Within this process. A handle of a session before never fits a later one."""


@dataclass(slots=True, eq=False, kw_only=True)
class NativeModule:
    """A loaded module, as the device knows it."""

    kind: ModuleKind
    kernels: dict[str, tuple[Signature, Any]]
    """By name: what it takes, and what the device calls it."""
    thing: Any
    """What ``_drop_module`` is handed."""


@dataclass(slots=True, eq=False, kw_only=True)
class LaunchPlan:
    """A launch that was checked."""

    signature: Signature
    kinds: tuple[ArgKind, ...]
    module: ModuleHandle
    grid: Extent
    block: Extent
    native: Any = None
    """What the device made of it."""
    buffers: tuple[int, ...] = ()
    """Which arguments are buffers."""
    adapts: dict[int, Adapt] = field(default_factory=dict)


class TabledDevice(ABC):
    """The half of a device that decides."""

    failure: GpuError | None = None
    """What made the device unusable, perhaps while it was opened: after it nothing but ``close`` does anything."""

    def __init__(self, identity: DeviceIdentity, account: MemoryAccount) -> None:
        self.identity = identity
        self.account = account
        self.is_closed = False
        generation = next(_generations)
        self._memory = MemoryTable(generation)
        self._modules: dict[int, NativeModule] = {}
        self._next_module = 1

    # ------------------------------------------------------------------------------------------------------ memory

    def alloc(self, size: int) -> BufferHandle:
        self._usable("mem_alloc")
        self._memory.admit(size, "mem_alloc")
        self.account.take(size, "mem_alloc")
        try:
            address, owner = self._take_memory(size)
        except BaseException:
            self.account.give(size)
            raise
        return self._memory.add(size, address, owner)

    def free(self, handle: BufferHandle) -> None:
        self._usable("mem_free")
        self._release(self._memory.remove(handle, "mem_free"))

    def write(self, handle: BufferHandle, offset: int, data: Bytes) -> None:
        self._usable("mem_write")
        with _flat(data, "mem_write") as view:
            piece = self._memory.span(handle, offset, len(view), "mem_write")
            if view:
                self._write(piece, offset, view)

    def read_into(self, handle: BufferHandle, offset: int, out: Bytes) -> None:
        self._usable("mem_read")
        with _flat(out, "mem_read") as view:
            if view.readonly:
                raise InvalidRequest("mem_read: the place to read into cannot be written", do="Give a bytearray.")
            piece = self._memory.span(handle, offset, len(view), "mem_read")
            if view:
                self._read(piece, offset, view)

    def read(self, handle: BufferHandle, offset: int, length: int) -> bytes:
        self._usable("mem_read")
        self._memory.span(handle, offset, length, "mem_read")  # before so many bytes are taken for it
        out = bytearray(length)
        self.read_into(handle, offset, out)
        return bytes(out)

    def copy(self, target: BufferHandle, at: int, source: BufferHandle, offset: int, length: int) -> None:
        self._usable("mem_copy")
        into = self._memory.span(target, at, length, "mem_copy")
        out_of = self._memory.span(source, offset, length, "mem_copy")
        if into is out_of and at < offset + length and offset < at + length and length:
            raise InvalidRequest(
                f"mem_copy: {length} bytes from {offset} to {at} of the same buffer overlap",
                do="Copy through another buffer.",
            )
        if length:
            self._copy(into, at, out_of, offset, length)

    def fill(self, handle: BufferHandle, offset: int, length: int, pattern: bytes) -> None:
        self._usable("mem_fill")
        piece = self._memory.span(handle, offset, length, "mem_fill")
        width = len(pattern)
        if width not in (1, 2, 4):
            raise InvalidRequest(f"mem_fill: a pattern of {width} bytes", do="Give one, two or four.")
        if offset % width or length % width:
            raise InvalidRequest(
                f"mem_fill: {length} bytes from {offset} on do not go into steps of {width}",
                do="Give multiples of the pattern's size.",
            )
        if length:
            self._fill(piece, offset, length, bytes(pattern))

    # -------------------------------------------------------------------------------------------- modules, launches

    def load(self, sources: Sources) -> LoadedModule:
        self._usable("module_load")
        if len(self._modules) >= MODULES_MAX:
            raise CapacityExceeded(f"module_load: {MODULES_MAX} modules are loaded", do="Unload some first.")
        if not sources:
            raise InvalidRequest("module_load: no module was given", do="Give its source or object.")
        for kind, data in sources.items():
            if not data or len(data) > MODULE_BYTES_MAX:
                raise InvalidRequest(
                    f"module_load: a {kind} module of {len(data)} bytes",
                    do=f"Give 1 to {MODULE_BYTES_MAX} bytes.",
                )
        native = self._load_module(sources)
        handle = ModuleHandle(self._memory.generation, self._next_module)
        self._next_module += 1
        self._modules[handle.number] = native
        return LoadedModule(
            handle=handle, kind=native.kind, kernels=tuple(signature for signature, _ in native.kernels.values())
        )

    def unload(self, module: ModuleHandle) -> None:
        self._usable("module_unload")
        native = self._module(module, "module_unload")
        del self._modules[module.number]
        self._drop_module(native)

    def plan(
        self,
        module: ModuleHandle,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        kinds: tuple[ArgKind, ...],
    ) -> LaunchPlan:
        self._usable("launch")
        native = self._module(module, "launch")
        found = native.kernels.get(kernel)
        if found is None:
            names = ", ".join(sorted(native.kernels)) or "none"
            raise NotFound(f"launch: this module has no kernel {kernel!r}", do=f"It has: {names}.")
        if len(kinds) > ARGUMENTS_MAX:
            raise InvalidRequest(f"launch: {len(kinds)} arguments", do=f"Give at most {ARGUMENTS_MAX}.")
        signature, function = found
        made = LaunchPlan(
            signature=signature,
            kinds=kinds,
            module=module,
            grid=whole_extent(grid, "grid"),
            block=whole_extent(block, "block"),
            buffers=tuple(index for index, kind in enumerate(kinds) if kind is ArgKind.BUFFER),
            adapts=check_kinds(signature, kinds),
        )
        made.native = self._plan(native, function, made)
        return made

    def launch(self, plan: Launchable, values: Sequence[Value]) -> None:
        assert isinstance(plan, LaunchPlan)
        self._usable("launch")
        self._module(plan.module, "launch")
        if len(values) != len(plan.kinds):
            raise InvalidRequest(
                f"launch: {plan.signature} was planned with {len(plan.kinds)} values, and {len(values)} were given",
                do="Give one value for each argument.",
            )
        ready: list[Any] = list(values)
        for index in plan.buffers:
            ready[index] = self._memory.get(ready[index], "launch")
        for index, adapt in plan.adapts.items():
            ready[index] = adapt(ready[index])
        self._launch(plan, ready)

    def sync(self) -> None:
        self._usable("sync")
        self._sync()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self.failure is None:
            with contextlib.suppress(SubletError):  # it goes anyway; what failed was said where it was waited for
                self._sync()
        modules, self._modules = list(self._modules.values()), {}
        steps: list[Callable[[], None]] = [
            *(functools.partial(self._drop_module, native) for native in modules),
            *(functools.partial(self._release, piece) for piece in self._memory.clear()),
            self._shut,
        ]
        errors = [error for step in steps if (error := _error_of(step)) is not None]
        if errors and self.failure is None:
            raise errors[0]

    # ---------------------------------------------------------------------------------------------- what is looked at

    def _usable(self, call: str) -> None:
        if self.is_closed:
            raise NotFound(f"{call}: this session is closed", do="Open a new one.")
        if self.failure is not None:
            raise GpuError(
                f"{call}: the device failed before ({self.failure.message})", call=call, do=self.failure.do
            ) from self.failure

    def _module(self, module: ModuleHandle, call: str) -> NativeModule:
        generation, number = module
        if generation != self._memory.generation:
            raise NotFound(f"{call}: this module belongs to another session", do="Load it in this one.")
        found = self._modules.get(number)
        if found is None:
            if 0 < number < self._next_module:
                raise NotFound(f"{call}: module {number} was unloaded before", do="Load it again.")
            raise NotFound(f"{call}: there is no module {number}", do="Use what module_load gave out.")
        return found

    def _release(self, piece: MemoryPiece) -> None:
        try:
            self._give_memory(piece)
        finally:
            self.account.give(piece.size)

    # -------------------------------------------------------------------------------------------- what a device does

    @abstractmethod
    def _take_memory(self, size: int) -> tuple[int, Any]:
        """Memory of zeros: its address, and what keeps it."""

    @abstractmethod
    def _give_memory(self, piece: MemoryPiece) -> None: ...

    @abstractmethod
    def _write(self, piece: MemoryPiece, offset: int, data: memoryview) -> None: ...

    @abstractmethod
    def _read(self, piece: MemoryPiece, offset: int, out: memoryview) -> None: ...

    @abstractmethod
    def _copy(self, target: MemoryPiece, at: int, source: MemoryPiece, offset: int, length: int) -> None: ...

    @abstractmethod
    def _fill(self, piece: MemoryPiece, offset: int, length: int, pattern: bytes) -> None: ...

    @abstractmethod
    def _load_module(self, sources: Sources) -> NativeModule: ...

    @abstractmethod
    def _drop_module(self, native: NativeModule) -> None: ...

    @abstractmethod
    def _plan(self, native: NativeModule, function: Any, plan: LaunchPlan) -> Any:
        """What ``_launch`` will use of it."""

    @abstractmethod
    def _launch(self, plan: LaunchPlan, values: list[Any]) -> None:
        """``values``: a ``MemoryPiece`` for each buffer, numbers that fit for the rest."""

    @abstractmethod
    def _sync(self) -> None: ...

    @abstractmethod
    def _shut(self) -> None:
        """The last thing that happens."""


def _error_of(step: Callable[[], None]) -> SubletError | None:
    try:
        step()
    except SubletError as error:
        return error
    return None


def _flat(data: Bytes, call: str) -> memoryview:
    """The bytes of whatever has bytes, without copying."""
    try:
        return memoryview(data).cast("B")
    except TypeError:
        raise InvalidRequest(
            f"{call}: {type(data).__name__} has no bytes in one piece", do="Give bytes, or a contiguous array."
        ) from None
