"""The interface of a device to a session: memory, modules, launches.

Launches and writes are taken in order; a device may carry them out later, and ``sync`` waits. What is refused before
anything happened is ``InvalidRequest``, ``NotFound``, ``CapacityExceeded``, ``OutOfMemory`` or ``Unsupported``, and
nothing changed. What the device itself reports is ``GpuError``, with the call that was told so: on a GPU that may be
a later one than the one to blame. Messages begin with the name of the call (``mem_alloc``, ``launch``, …).

One thread uses a device. Its opener closes it, which frees everything that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from sublet.devices.account import MemoryAccount
from sublet.devices.memory import BufferHandle
from sublet.devices.signature import Signature
from sublet.lazy_dataclass import dataclass
from sublet.wire.device import ModuleKind
from sublet.wire.scalars import ArgKind

Bytes: TypeAlias = "bytes | bytearray | memoryview"
Sources: TypeAlias = Mapping[ModuleKind, bytes]
"""One module in one kind or several; the device picks."""
Value: TypeAlias = "int | float | BufferHandle"


class ModuleHandle(NamedTuple):
    """A module that is loaded, as its holder names it."""

    generation: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """Which device it is, for people and for the page."""

    id: str
    """The name of the resource, as leases have it."""
    label: str
    """The model; of a host device always "host device, no GPU"."""
    is_host: bool
    limits: tuple[str, ...] = ()
    """What cannot run on it, a sentence each, with what that needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModule:
    """What came of loading a module."""

    handle: ModuleHandle
    kind: ModuleKind
    """The one that was picked."""
    kernels: tuple[Signature, ...]


class Launchable(Protocol):
    """A launch that was checked: kernel, grid, block and the types of its arguments. It may be run many times, with
    other values each time, as long as its module is loaded."""

    @property
    def signature(self) -> Signature: ...

    @property
    def kinds(self) -> tuple[ArgKind, ...]: ...


class Device(Protocol):
    """One device, open for one session. ``sublet.testing.DeviceConformance`` tests it."""

    @property
    def identity(self) -> DeviceIdentity: ...

    @property
    def account(self) -> MemoryAccount: ...

    # ---- memory ----

    def alloc(self, size: int) -> BufferHandle:
        """So many bytes, all zero, at an address that is a multiple of 256."""

    def free(self, handle: BufferHandle) -> None:
        """The memory goes back, once what was launched before is done with it."""

    def write(self, handle: BufferHandle, offset: int, data: Bytes) -> None:
        """Bytes of the caller into the buffer. They are the caller's again when this returns."""

    def read_into(self, handle: BufferHandle, offset: int, out: Bytes) -> None:
        """Fill ``out`` with what everything before it left in the buffer."""

    def read(self, handle: BufferHandle, offset: int, length: int) -> bytes:
        """The same, as new bytes."""

    def copy(self, target: BufferHandle, at: int, source: BufferHandle, offset: int, length: int) -> None:
        """Bytes of one buffer into another, or into another place of the same one; the two may not overlap."""

    def fill(self, handle: BufferHandle, offset: int, length: int, pattern: bytes) -> None:
        """A pattern of one, two or four bytes, over and over. Offset and length are multiples of its size."""

    # ---- modules and launches ----

    def load(self, sources: Sources) -> LoadedModule:
        """Compile or check, and load."""

    def unload(self, module: ModuleHandle) -> None:
        """What was launched before runs to its end."""

    def plan(
        self,
        module: ModuleHandle,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        kinds: tuple[ArgKind, ...],
    ) -> Launchable:
        """Check everything about a launch but the values."""

    def launch(self, plan: Launchable, values: Sequence[Value]) -> None:
        """Run it after everything before it."""

    def sync(self) -> None:
        """Wait until everything is done; raises what went wrong since the last time."""

    def close(self) -> None:
        """Free everything. Harmless twice, and on a device that has failed."""
