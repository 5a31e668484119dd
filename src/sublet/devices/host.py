"""A host device: ordinary memory and Warp's CPU compiler, with a "VRAM" account exact to the byte.

It is there so that every program, notebook and test runs anywhere. It is not fast, and it is always labelled.
Memory lies in private anonymous mappings, one for each buffer, so what is freed goes back at once; pages that were
never written to cost nothing. Launches have run when they return.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

from sublet.devices import nvrtc
from sublet.devices.account import MemoryAccount
from sublet.devices.interface import DeviceIdentity, Sources
from sublet.devices.memory import MemoryPiece
from sublet.devices.objects import check_cubin, check_ptx
from sublet.devices.tabled import LaunchPlan, NativeModule, TabledDevice
from sublet.devices.warp_launches import WarpLaunch
from sublet.devices.warp_modules import drop_warp, load_warp, warp
from sublet.errors import OutOfMemory, Unsupported
from sublet.values import MIB
from sublet.wire.device import ModuleKind

HOST_LABEL: Final = "host device, no GPU"
_STEP: Final = 1 * MIB
"""A pattern is laid out to this length at most, and then copied."""
_CPU: Final = "cpu"


class HostDevice(TabledDevice):
    """The CPU in place of a GPU. See ``interface.Device``."""

    def __init__(self, id: str, account: MemoryAccount, *, cache: str) -> None:  # noqa: A002  as leases call it
        """``cache`` is a folder of this user alone, for compiled kernels."""
        super().__init__(DeviceIdentity(id=id, label=HOST_LABEL, is_host=True), account)
        self._cache = cache

    # ---- memory ----

    def _take_memory(self, size: int) -> tuple[int, Any]:
        try:
            made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(
                f"mem_alloc: this machine has no {size} bytes for a host device ({error})",
                do="Free something, or ask for less.",
            ) from error
        return ctypes.addressof(ctypes.c_char.from_buffer(made)), made

    def _give_memory(self, piece: MemoryPiece) -> None:
        piece.forms = None
        piece.owner.close()

    def _write(self, piece: MemoryPiece, offset: int, data: memoryview) -> None:
        piece.owner[offset : offset + len(data)] = data

    def _read(self, piece: MemoryPiece, offset: int, out: memoryview) -> None:
        with memoryview(piece.owner) as view:
            out[:] = view[offset : offset + len(out)]

    def _copy(self, target: MemoryPiece, at: int, source: MemoryPiece, offset: int, length: int) -> None:
        with memoryview(target.owner) as into, memoryview(source.owner) as view:
            into[at : at + length] = view[offset : offset + length]

    def _fill(self, piece: MemoryPiece, offset: int, length: int, pattern: bytes) -> None:
        laid = pattern * (min(length, _STEP) // len(pattern))
        for at in range(offset, offset + length, len(laid)):
            count = min(len(laid), offset + length - at)
            piece.owner[at : at + count] = laid[:count]

    # ---- modules, launches ----

    def _load_module(self, sources: Sources) -> NativeModule:
        source = sources.get(ModuleKind.WARP)
        if source is None:
            raise _gpu_only(sources)
        module = load_warp(warp(self._cache), source, _CPU)
        return NativeModule(kind=ModuleKind.WARP, kernels=module.kernels, thing=module)

    def _drop_module(self, native: NativeModule) -> None:
        drop_warp(native.thing)

    def _plan(self, native: NativeModule, function: Any, plan: LaunchPlan) -> WarpLaunch:
        return WarpLaunch(warp(self._cache), function, plan, _CPU)

    def _launch(self, plan: LaunchPlan, values: list[Any]) -> None:
        plan.native.run(values)

    def _sync(self) -> None:
        """Everything has run."""

    def _shut(self) -> None:
        """There is nothing but the memory."""


def _gpu_only(sources: Sources) -> Unsupported:
    """The answer to modules for GPUs, after as much of a check as can be had here."""
    checked = [problem for kind, data in sources.items() if (problem := _check(kind, data))]
    return Unsupported(
        f"module_load: {' and '.join(sources)} {'runs' if len(sources) == 1 else 'run'} on GPUs only, and this is a "
        f"{HOST_LABEL}{''.join(f' ({problem})' for problem in checked)}",
        do='Give the module as kind="warp" as well, which runs on both, or lease a real GPU.',
    )


def _check(kind: ModuleKind, data: bytes) -> str:
    """What can be told about a module for GPUs without one; raises if it is none."""
    match kind:
        case ModuleKind.CUDA:
            if not nvrtc.has_nvrtc():
                return "not checked: there is no compiler for CUDA here; the extra sublet[gpu] has one"
            nvrtc.compile_cuda(data, nvrtc.CHECK_ARCH)
            return f"the CUDA source compiles for sm_{nvrtc.CHECK_ARCH}"
        case ModuleKind.PTX:
            check_ptx(data)
        case ModuleKind.CUBIN:
            check_cubin(data)
        case ModuleKind.WARP:
            pass
    return ""
