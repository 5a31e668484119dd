"""Messages between ``GpuSession`` and the guest that owns the device: many operations in one message.

The holder numbers its buffers and modules itself, upwards and never twice; so a buffer can be made, filled, used and
read within one message. A launch comes in two parts. What many launches have in common, kernel, grid, block and the
types of the arguments, is a ``LaunchShape``, named by its place in the list; a launch is that number and the packed
values. A thousand launches of one kernel are checked once, then a thousand short lines.

Bytes of up to ``INLINE_MAX`` lie in the message; larger ones in one piece of shared memory beside it
(``wire.sealed_memory``), and the operation says where. What is read comes back in the order of the reads, all in the
answer or all in one piece.

Operations are carried out in order. The first that fails ends the batch: what stands before it has happened, what
stands behind it has not, and ``OpFailed`` says which one it was.
"""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

from sublet.lazy_dataclass import dataclass
from sublet.values import Epoch, LeaseId
from sublet.wire.compat import later
from sublet.wire.refusals import Refusal
from sublet.wire.scalars import ArgKind

INLINE_MAX: Final = 256 * 1024
"""Bytes that the reads of one batch may have in the answer itself; so base64 and all the rest fit one message."""
OPS_MAX: Final = 16_384
"""Operations of one batch."""
SHAPES_MAX: Final = 1024
"""Launch shapes of one batch."""


class ModuleKind(enum.StrEnum):
    """In what form a module is given."""

    WARP = "warp"
    """Python source with ``@wp.kernel`` functions: runs on host devices and GPUs."""
    CUDA = "cuda"
    """CUDA C++ source, compiled on the device's machine. Kernels are ``extern "C"``."""
    PTX = "ptx"
    CUBIN = "cubin"


# ---- a session ----


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A session on one of the lease's devices."""

    lease: LeaseId
    epoch: Epoch
    device: int = 0
    """By its place in the lease."""
    takes_limits: bool = later(False)
    """Whether ``SessionOpened.limits`` is understood. A guest that refuses this is older, and is asked without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """It is open."""

    session: int
    """Its number, which no other session has."""
    device: str
    label: str
    is_host: bool
    memory_bytes: int
    """What the lease may take on this device, by all its sessions together."""
    limits: tuple[str, ...] = later(())
    """What cannot run on it, a sentence each. Only for a holder that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """Free everything it has."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """Nothing of it is left. What was exact about it is said here."""

    launches: int
    failures: int
    bytes_in: int
    bytes_out: int
    peak_bytes: int


# ---- operations ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Alloc:
    """``mem_alloc``"""

    buffer: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """``mem_free``"""

    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """``mem_write``, with the bytes"""

    buffer: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShared:
    """``mem_write``, from the shared memory beside the message"""

    buffer: int
    offset: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """``mem_read``"""

    buffer: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """``mem_copy``"""

    target: int
    at: int
    source: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """``mem_fill``: a pattern of one, two or four bytes"""

    buffer: int
    offset: int
    length: int
    pattern: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A module in one kind."""

    kind: ModuleKind
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSource:
    """The same, in the shared memory beside the message."""

    kind: ModuleKind
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``module_load``: one module, in every kind the holder has."""

    module: int
    sources: tuple[Source | SharedSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """``module_unload``"""

    module: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """What launches have in common."""

    module: int
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    kinds: tuple[ArgKind, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """``launch``: a shape of this batch, by its place, and the values, packed as ``scalars.packing`` says."""

    shape: int
    values: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """``sync``"""


Op: TypeAlias = Alloc | Free | Write | WriteShared | Read | Copy | Fill | Load | Unload | Launch | Sync

OP_CALLS: Final[dict[type, str]] = {
    Alloc: "mem_alloc",
    Free: "mem_free",
    Write: "mem_write",
    WriteShared: "mem_write",
    Read: "mem_read",
    Copy: "mem_copy",
    Fill: "mem_fill",
    Load: "module_load",
    Unload: "module_unload",
    Launch: "launch",
    Sync: "sync",
}
"""What the holder called to get such an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Operations of one session, in order."""

    session: int
    lease: LeaseId
    epoch: Epoch
    ops: tuple[Op, ...]
    shapes: tuple[LaunchShape, ...] = ()


# ---- answers ----


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelView:
    """A kernel of a module."""

    name: str
    shown: str
    """With its parameters, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A module is loaded."""

    module: int
    kind: ModuleKind
    kernels: tuple[KernelView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFailed:
    """The operation that ended the batch."""

    index: int
    call: str
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDone:
    """How far it went: operations 0 to ``done`` - 1 have happened."""

    done: int
    data: bytes = b""
    """What was read, one after the other; empty where it lies in shared memory beside the answer."""
    loaded: tuple[Loaded, ...] = ()
    failed: OpFailed | None = None


DeviceCall: TypeAlias = OpenSession | CloseSession | Batch
DeviceReply: TypeAlias = SessionOpened | SessionClosed | BatchDone
