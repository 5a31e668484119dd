"""``GpuSession``: memory, modules and kernels on a leased device, from the program that holds the lease.

    with sublet.GpuSession(lease) as gpu:
        x = gpu.mem_alloc(4 * n)
        gpu.mem_write(x, 0, data)
        module = gpu.module_load(source, kind="warp")
        gpu.launch(module, "step", grid, block, [sublet.u32(n), x])
        out = gpu.mem_read(x, 0, 4 * n)

Operations that no caller waits for are queued and sent in batches (``session_engine``): when a caller waits, when a
batch is full, and otherwise a moment later. So an error comes with the next call that waits (``sync``, ``mem_read``,
``module_load``, ``close``), names the operation that failed, and nothing that stood behind it has happened.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from sublet.compute.arguments import Argument, kinds_and_values
from sublet.compute.buffers import Buffer, Module
from sublet.compute.session_data import Buffery, KindText, Sources, SourceText, bytes_of, sources_of, whole, writable
from sublet.compute.session_engine import Engine
from sublet.devices.grids import whole_extent
from sublet.errors import InvalidRequest, OutOfMemory, SubletError
from sublet.values import MIB, format_size, shown
from sublet.wire.device import (
    Alloc,
    Copy,
    Fill,
    Free,
    LaunchShape,
    Load,
    ModuleKind,
    Read,
    SessionClosed,
    SharedSource,
    Source,
    Unload,
    Write,
    WriteShared,
)
from sublet.wire.scalars import packing

if TYPE_CHECKING:
    from sublet.client.lease import Lease

INLINE_MAX: Final = 64 * 1024
"""Bytes of a write, or of a module, that lie in the message itself. What is more goes through shared memory."""
CHUNK: Final = 64 * MIB
"""Bytes that cross at a time: while one piece is copied on the other side the next is being filled."""
SHAPES_KEPT: Final = 4096
DEVICES_MAX: Final = 1024

Extent: TypeAlias = int | Sequence[int]
Shape: TypeAlias = tuple[LaunchShape, Callable[..., bytes]]
"""What launches have in common, and how their values are packed."""


class GpuSession:
    """A session on one device of a lease; safe to use from several threads, whose calls then take turns.

    Everything it has is freed when it is closed, and when its lease ends, whichever comes first.
    """

    def __init__(self, lease: Lease, device: int = 0) -> None:
        """``device``: by its place in the lease. Raises ``LeaseEnded`` if the lease is over."""
        _check_place(lease, device)
        self._engine = Engine.open(lease, device)
        self._begin()

    def _begin(self) -> None:
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        self._buffers: dict[int, Buffer] = {}
        self._modules: dict[int, Module] = {}
        self._last_buffer = self._last_module = 0
        self._taken = 0
        myself = weakref.ref(self)  # or the engine's thread would keep it for ever

        def never_made(numbers: Sequence[int], why: str) -> None:
            session = myself()
            if session is not None:
                session._never_made(numbers, why)

        self._engine.on_never_made = never_made
        for limit in self.limits:
            warnings.warn(limit, RuntimeWarning, stacklevel=3)

    @classmethod
    def _over(cls, engine: Engine) -> Self:
        """For tests: a session over a connection that is there."""
        made = cls.__new__(cls)
        made._engine = engine
        made._begin()
        return made

    # ---- what it is on ----

    @property
    def device(self) -> str:
        """The name of the device, as the lease has it."""
        return self._engine.opened.device

    @property
    def label(self) -> str:
        """Its model; of a host device always "host device, no GPU"."""
        return self._engine.opened.label

    @property
    def is_host(self) -> bool:
        """Whether it is a CPU in place of a GPU."""
        return self._engine.opened.is_host

    @property
    def memory_bytes(self) -> int:
        """What the lease may have on this device, by all its sessions together."""
        return self._engine.opened.memory_bytes

    @property
    def limits(self) -> tuple[str, ...]:
        """What cannot run on this device, a sentence each, with what that needs: CUDA C++ and Warp with a driver that
        is older than their compiler. Each is also a ``RuntimeWarning`` when the session opens."""
        return self._engine.opened.limits

    @property
    def is_open(self) -> bool:
        """Whether it can be used, as far as is known here."""
        return self._engine.over is None

    @property
    def totals(self) -> SessionClosed | None:
        """Launches, failures, bytes moved, most memory at once: exact, once it was closed in peace."""
        return self._engine.closed

    def __repr__(self) -> str:
        count = len(self._buffers)
        buffers = f"{count} buffer{'s' * (count != 1)} of {format_size(self._taken)}"
        state = "; ".join((buffers, *self.limits)) if self.is_open else "closed"
        return f"<GpuSession on {self.device} ({self.label}): {state}>"

    # ---- memory ----

    def mem_alloc(self, size: int) -> Buffer:
        """So many bytes of the device, all zero."""
        size = whole(size, "mem_alloc", "size")
        if size <= 0:
            raise InvalidRequest(f"mem_alloc: a buffer cannot have {size} bytes", do="Ask for at least one.")
        with self._engine.lock:
            if self._taken + size > self.memory_bytes:
                raise OutOfMemory(
                    f"mem_alloc: {format_size(size)} ({size} bytes) asked, and {self.memory_bytes - self._taken} bytes "
                    f"of the {format_size(self.memory_bytes)} under this lease are free",
                    do="Free something, or lease more (min_vram=).",
                )
            self._last_buffer += 1
            made = self._buffers[self._last_buffer] = Buffer(self, self._last_buffer, size)
            self._taken += size
            self._engine.put(Alloc(buffer=made.number, size=size))
            return made

    def mem_free(self, buffer: Buffer) -> None:
        """Give it back, once what was launched before is done with it."""
        _a_buffer(buffer, "mem_free")
        with self._engine.lock:
            buffer.check(self, "mem_free")
            self._engine.put(Free(buffer=buffer.number))
            self._forget(buffer)

    def mem_write(self, buffer: Buffer, offset: int, data: Buffery) -> None:
        """Bytes of this program into the buffer: of ``bytes``, numpy arrays, whatever has any. They may be changed
        again at once."""
        _a_buffer(buffer, "mem_write")
        offset = whole(offset, "mem_write", "offset")
        with bytes_of(data, "mem_write") as view, self._engine.lock:
            buffer.span(self, offset, len(view), "mem_write")
            if len(view) > INLINE_MAX:
                self._write_shared(buffer, offset, view)
            elif len(view):
                self._engine.put(Write(buffer=buffer.number, offset=offset, data=bytes(view)))

    def mem_read(self, buffer: Buffer, offset: int = 0, length: int | None = None) -> bytes:
        """What everything before it left in the buffer (to its end, if no length is given). Waits for it."""
        offset, length = _part(buffer, offset, length, "mem_read")
        with self._engine.lock:
            buffer.span(self, offset, length, "mem_read")
            pieces = []
            for start in range(0, length, CHUNK):
                count = min(CHUNK, length - start)
                self._engine.put(Read(buffer=buffer.number, offset=offset + start, length=count))
                pieces.append(self._engine.read(count))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def mem_read_into(self, buffer: Buffer, offset: int, target: Any) -> None:
        """The same into memory that is there: a numpy array, a ``bytearray``; as much as fits into it."""
        with writable(target) as into, self._engine.lock:
            buffer.span(self, whole(offset, "mem_read", "offset"), len(into), "mem_read")
            for start in range(0, len(into), CHUNK):
                with into[start : start + CHUNK] as piece:
                    self._engine.put(Read(buffer=buffer.number, offset=offset + start, length=len(piece)))
                    self._engine.read_into(piece)

    def mem_copy(
        self, target: Buffer, target_offset: int, source: Buffer, source_offset: int = 0, length: int | None = None
    ) -> None:
        """Bytes of one buffer into another, or into another place of the same one. They may not overlap."""
        length = source.size - source_offset if length is None else length
        with self._engine.lock:
            target.span(self, whole(target_offset, "mem_copy", "offset"), length, "mem_copy")
            source.span(self, whole(source_offset, "mem_copy", "offset"), length, "mem_copy")
            self._engine.put(
                Copy(target=target.number, at=target_offset, source=source.number, offset=source_offset, length=length)
            )

    def mem_fill(self, buffer: Buffer, offset: int = 0, length: int | None = None, pattern: int | bytes = 0) -> None:
        """A byte, or a pattern of one, two or four, over and over."""
        offset, length = _part(buffer, offset, length, "mem_fill")
        if isinstance(pattern, int):
            if not 0 <= pattern <= 255:
                raise InvalidRequest(f"mem_fill: {shown(pattern)} is no byte", do="Give 0 to 255, or bytes.")
            pattern = bytes((pattern,))
        if not isinstance(pattern, bytes | bytearray):
            raise InvalidRequest(f"mem_fill: {shown(pattern)} is no pattern", do="Give 0 to 255, or bytes.")
        if len(pattern) not in (1, 2, 4):
            raise InvalidRequest(f"mem_fill: a pattern of {len(pattern)} bytes", do="Give one, two or four.")
        with self._engine.lock:
            buffer.span(self, offset, length, "mem_fill")
            self._engine.put(Fill(buffer=buffer.number, offset=offset, length=length, pattern=bytes(pattern)))

    # ---- modules and launches ----

    def module_load(self, source: SourceText | Sources, kind: KindText | None = None) -> Module:
        """Load kernels: Warp source, CUDA C++, PTX or a cubin; or ``{kind: source}``, of which the device takes what
        suits it best. Waits, so what is wrong with the module is raised here."""
        sources = sources_of(source, kind)
        with self._engine.lock:
            number = self._last_module + 1
            if sum(len(data) for data in sources.values()) <= INLINE_MAX:
                listed = tuple(Source(kind=one, data=data) for one, data in sources.items())
                self._engine.put(Load(module=number, sources=listed))
            else:
                pieces = [memoryview(data) for data in sources.values()]
                self._engine.put_shared(pieces, lambda starts: _load_shared(number, sources, starts))
            self._last_module = number
            done = self._engine.wait()
            loaded = next(one for one in done.loaded if one.module == number)
            kernels = {one.name: one.shown for one in loaded.kernels}
            made = self._modules[number] = Module(self, number, loaded.kind, kernels)
            return made

    def module_unload(self, module: Module) -> None:
        """What was launched before runs to its end."""
        _a_module(module, "module_unload")
        with self._engine.lock:
            module.check(self, "module_unload")
            self._engine.put(Unload(module=module.number))
            module.end()
            self._modules.pop(module.number, None)
            self._shapes = {key: shape for key, shape in self._shapes.items() if key[0] != module.number}

    def launch(self, module: Module, kernel: str, grid: Extent, block: Extent, args: Sequence[Argument] = ()) -> None:
        """Run a kernel after everything before it. Waits for nothing."""
        if type(module) is not Module or type(kernel) is not str or type(args) is not list:
            _check_launch(module, kernel, args)
        with self._engine.lock:
            shown = module.kernel(self, kernel)
            kinds, values = kinds_and_values(self, module, shown, args)
            key = (module.number, kernel, _hashable(grid), _hashable(block), kinds)
            found = self._shapes.get(key)
            if found is None:
                found = self._shape(key)
            self._engine.launch(found[0], found[1](*values))

    def sync(self) -> None:
        """Wait until everything is done; raises what went wrong since the last time."""
        with self._engine.lock:
            self._engine.sync()

    # ---- its end ----

    def close(self) -> None:
        """Do what was still written down, then free everything. Harmless twice, and after the end of the lease."""
        try:
            self._engine.close()
        finally:
            self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """What the body raised goes on as it is; what was written down behind it is not done any more."""
        if error is None:
            self.close()
            return
        try:
            self._engine.abandon()
        except SubletError as failed:
            error.add_note(f"the GPU session could not be closed: {failed}")
        finally:
            self._ended()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None and engine.over is None:
            warnings.warn(f"{self!r} was dropped without being closed", ResourceWarning, stacklevel=1, source=self)
            engine.drop()

    # ---- within ----

    def _write_shared(self, buffer: Buffer, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK):
            with view[start : start + CHUNK] as piece:
                op = WriteShared(buffer=buffer.number, offset=offset + start, start=0, length=len(piece))
                self._engine.put_shared([piece], lambda _, op=op: op)  # type: ignore[misc]

    def _shape(self, key: tuple[Any, ...]) -> Shape:
        """What such launches have in common, checked, and how their values are packed."""
        module, kernel, grid, block, kinds = key
        shape = LaunchShape(
            module=module,
            kernel=kernel,
            grid=whole_extent(grid, "grid"),
            block=whole_extent(block, "block"),
            kinds=kinds,
        )
        if len(self._shapes) >= SHAPES_KEPT:
            self._shapes.clear()
        found = self._shapes[key] = (shape, packing(kinds).pack)
        return found

    def _never_made(self, numbers: Sequence[int], why: str) -> None:
        """Buffers whose allocation did not happen."""
        for number in numbers:
            buffer = self._buffers.get(number)
            if buffer is not None:
                self._forget(buffer, why)

    def _forget(self, buffer: Buffer, why: str = "freed") -> None:
        buffer.end(why)
        if self._buffers.pop(buffer.number, None) is not None:
            self._taken -= buffer.size

    def _ended(self) -> None:
        for buffer in self._buffers.values():
            buffer.end("its session was closed")
        for module in self._modules.values():
            module.end("gone with its session")
        self._buffers.clear()
        self._modules.clear()
        self._taken = 0


def _a_buffer(buffer: object, call: str) -> None:
    if not isinstance(buffer, Buffer):
        raise InvalidRequest(f"{call}: {shown(buffer)} is no buffer", do="Give what mem_alloc returned.")


def _a_module(module: object, call: str) -> None:
    if not isinstance(module, Module):
        raise InvalidRequest(f"{call}: {shown(module)} is no module", do="Give what module_load returned.")


def _part(buffer: Buffer, offset: int, length: int | None, call: str) -> tuple[int, int]:
    _a_buffer(buffer, call)
    offset = whole(offset, call, "offset")
    return offset, buffer.size - offset if length is None else whole(length, call, "length")


def _check_place(lease: object, device: object) -> None:
    if not hasattr(lease, "_held"):
        raise InvalidRequest(f"GpuSession: {shown(lease)} is no lease", do="Give what fabric.gpu(...) returns.")
    if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < DEVICES_MAX:
        raise InvalidRequest(f"GpuSession: device={shown(device)} is no place in a lease", do="Give 0, 1, …")


def _check_launch(module: object, kernel: object, args: object) -> None:
    _a_module(module, "launch")
    if not isinstance(kernel, str):
        raise InvalidRequest(f"launch: {shown(kernel)} is no name of a kernel", do="Give its name as a text.")
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise InvalidRequest(f"launch: {shown(args)} are no arguments", do="Give a list: [sublet.u32(n), x].")


def _load_shared(number: int, sources: Mapping[ModuleKind, bytes], starts: Sequence[int]) -> Load:
    shared = tuple(
        SharedSource(kind=kind, start=start, length=len(data))
        for (kind, data), start in zip(sources.items(), starts, strict=True)
    )
    return Load(module=number, sources=shared)


def _hashable(extent: Extent) -> int | tuple[int, ...]:
    if type(extent) is int:
        return extent
    try:
        return tuple(map(index, extent)) if isinstance(extent, Sequence) else index(extent)
    except TypeError:
        raise InvalidRequest(
            f"launch: {shown(extent)} is not one to three whole numbers", do="Give grid and block as (x, y, z)."
        ) from None
