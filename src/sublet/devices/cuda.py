"""A CUDA device: the driver's primary context, plain allocations, and one ordered stream.

The primary context is the one that torch, Warp and the runtime use as well, so all of them mean the same memory. The
account counts what a session allocates; the context itself, and what libraries allocate, it does not see.

Bytes are copied before ``write`` returns. Copies from pageable memory would not always need that wait; but whether
memory is pageable is nothing that a session can promise.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any, Final

from sublet.devices import nvrtc
from sublet.devices.account import MemoryAccount
from sublet.devices.cuda_driver import ContextLost, CudaDriver, dotted, find_device, open_driver
from sublet.devices.interface import DeviceIdentity, Sources
from sublet.devices.memory import MemoryPiece
from sublet.devices.objects import check_cubin, check_ptx
from sublet.devices.signature import Parameter, Signature, Takes
from sublet.devices.tabled import LaunchPlan, NativeModule, TabledDevice
from sublet.devices.warp_launches import WarpLaunch
from sublet.devices.warp_modules import drop_warp, has_warp, load_warp, warp
from sublet.errors import GpuError, NotFound, OutOfMemory, SubletError, Unsupported
from sublet.wire.device import ModuleKind
from sublet.wire.scalars import ARGUMENTS_MAX, ArgKind

_ORDER: Final = (ModuleKind.CUBIN, ModuleKind.PTX, ModuleKind.CUDA, ModuleKind.WARP)
"""What is nearest to the device first: of several kinds the first one that it takes is used."""
_NON_BLOCKING: Final = 1
_MAJOR, _MINOR = 75, 76
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`` and ``_MINOR``."""
_NAME_MAX: Final = 256
_FILLS: Final = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}
_C_TYPES: Final = {
    ArgKind.U32: ctypes.c_uint32,
    ArgKind.U64: ctypes.c_uint64,
    ArgKind.I32: ctypes.c_int32,
    ArgKind.I64: ctypes.c_int64,
    ArgKind.F32: ctypes.c_float,
    ArgKind.F64: ctypes.c_double,
    ArgKind.BUFFER: ctypes.c_void_p,
}


_local = threading.local()
"""``device``: whose context is current on this thread, as far as devices of ours made it so."""


class CudaDevice(TabledDevice):
    """One GPU, or one instance of a split one. See ``interface.Device``."""

    def __init__(
        self,
        id: str,  # noqa: A002  as leases call it
        uuid: str,
        account: MemoryAccount,
        *,
        cache: str,
        driver: CudaDriver | None = None,
    ) -> None:
        """``uuid`` as NVML and ``nvidia-smi`` write it. ``cache`` is a folder of this user alone, for compiled
        kernels."""
        self._driver = driver or open_driver()
        self._device = find_device(self._driver, uuid)
        name: bytes = self._call("open", "cuDeviceGetName", _NAME_MAX, self._device)
        label = name.split(b"\0", 1)[0].decode(errors="replace")  # the bindings pad with blanks behind the driver's NUL
        super().__init__(DeviceIdentity(id=id, label=label, is_host=False, limits=self._limits()), account)
        self._uuid = uuid
        self._cache = cache
        self._arch = 10 * self._attribute(_MAJOR) + self._attribute(_MINOR)
        self._warp_device: str | None = None
        self._warp_stream: Any = None
        self._context = self._call("open", "cuDevicePrimaryCtxRetain", self._device)
        try:
            self._enter("open")
            self._stream = self._call("open", "cuStreamCreate", _NON_BLOCKING)
        except BaseException:
            self._driver.call_or_none("cuDevicePrimaryCtxRelease", self._device)
            raise

    def close(self) -> None:
        if not self.is_closed:
            with contextlib.suppress(SubletError):  # what is wrong with the context is said by what needs it
                self._enter("close")
        super().close()

    def _usable(self, call: str) -> None:
        super()._usable(call)
        self._enter(call)

    def _enter(self, call: str) -> None:
        """A thread has one current context, and the driver means the device of that one: with two devices on one thread
        memory would come from the one that was opened last."""
        if getattr(_local, "device", None) is not self:
            self._call(call, "cuCtxSetCurrent", self._context)
            _local.device = self

    # ---- memory ----

    def _take_memory(self, size: int) -> tuple[int, Any]:
        pointer = self._call("mem_alloc", "cuMemAlloc", size)
        address = int(pointer)
        try:
            self._call("mem_alloc", "cuMemsetD8Async", address, 0, size, self._stream)
        except BaseException:
            self._driver.call_or_none("cuMemFree", address)
            raise
        return address, None

    def _give_memory(self, piece: MemoryPiece) -> None:
        piece.forms = None
        self._sync_for("mem_free")
        self._call("mem_free", "cuMemFree", piece.address)

    def _write(self, piece: MemoryPiece, offset: int, data: memoryview) -> None:
        self._call("mem_write", "cuMemcpyHtoDAsync", piece.address + offset, data, len(data), self._stream)
        self._sync_for("mem_write")

    def _read(self, piece: MemoryPiece, offset: int, out: memoryview) -> None:
        self._call("mem_read", "cuMemcpyDtoHAsync", out, piece.address + offset, len(out), self._stream)
        self._sync_for("mem_read")

    def _copy(self, target: MemoryPiece, at: int, source: MemoryPiece, offset: int, length: int) -> None:
        self._call("mem_copy", "cuMemcpyDtoDAsync", target.address + at, source.address + offset, length, self._stream)

    def _fill(self, piece: MemoryPiece, offset: int, length: int, pattern: bytes) -> None:
        width = len(pattern)
        number = int.from_bytes(pattern, "little")
        self._call("mem_fill", _FILLS[width], piece.address + offset, number, length // width, self._stream)

    # ---- modules ----

    def _load_module(self, sources: Sources) -> NativeModule:
        first: SubletError | None = None
        for kind in _ORDER:
            if kind not in sources:
                continue
            try:
                return self._load_kind(kind, sources[kind])
            except (ContextLost, OutOfMemory):
                raise
            except SubletError as error:  # this kind does not suit the device; another one may
                first = first or error
        assert first is not None
        raise first

    def _load_kind(self, kind: ModuleKind, data: bytes) -> NativeModule:
        if kind is ModuleKind.WARP:
            wp = warp(self._cache)
            module = load_warp(wp, data, self._warp_name(wp))
            return NativeModule(kind=kind, kernels=module.kernels, thing=module)
        loaded = self._call("module_load", "cuModuleLoadData", self._image(kind, data))
        try:
            return NativeModule(kind=kind, kernels=self._kernels_of(loaded), thing=loaded)
        except BaseException:
            self._driver.call_or_none("cuModuleUnload", loaded)
            raise

    def _image(self, kind: ModuleKind, data: bytes) -> bytes:
        if kind is ModuleKind.CUDA:
            self._check_compiler("CUDA C++")
            return nvrtc.compile_cuda(data, self._arch)
        if kind is ModuleKind.PTX:
            check_ptx(data)
            return data.rstrip(b"\0") + b"\0"
        check_cubin(data)
        return data

    def _limits(self) -> tuple[str, ...]:
        """Told when a session opens, as ``module_load`` tells it. The compiler's major version is that of the bindings,
        so that it need not be loaded where the driver is new enough."""
        if self._cuda("open") // 1000 >= self._driver.module.CUDA_VERSION // 1000:
            return ()
        compiled = ("CUDA C++", "Warp") if has_warp() else ("CUDA C++",)
        version = nvrtc.version()
        return tuple(filter(None, (self._too_old_for(what, version, "open") for what in compiled)))

    def _check_compiler(self, what: str) -> None:
        trouble = self._too_old_for(what, nvrtc.version(), "module_load")
        if trouble:
            raise Unsupported(
                f"module_load: {trouble}",
                do="Install a newer driver, or give the module as PTX or cubin of an older CUDA.",
            )

    def _too_old_for(self, what: str, made_by: tuple[int, int] | None, call: str) -> str:
        """What a compiler of one CUDA makes runs on drivers of the same major version, and later ones. Empty if this
        driver is new enough."""
        cuda = self._cuda(call)
        if made_by is None or cuda >= 1000 * made_by[0]:
            return ""
        return (
            f"the driver speaks CUDA {dotted(cuda)}, and {what} compiled by CUDA {'.'.join(map(str, made_by))} needs a "
            f"driver of CUDA {made_by[0]}.0 or later"
        )

    def _cuda(self, call: str) -> int:
        found: int = self._call(call, "cuDriverGetVersion")
        return found

    def _kernels_of(self, module: Any) -> dict[str, tuple[Signature, Any]]:
        count = self._call("module_load", "cuModuleGetFunctionCount", module)
        functions = self._call("module_load", "cuModuleEnumerateFunctions", count, module) if count else []
        made = {}
        for function in functions:
            name: bytes = self._call("module_load", "cuFuncGetName", function)
            made[name.decode()] = (Signature(kernel=name.decode(), parameters=self._parameters(function)), function)
        if not made:
            raise GpuError(
                "module_load: there is no kernel in this module",
                call="module_load",
                do='Give one with at least one extern "C" __global__ function.',
            )
        return made

    def _parameters(self, function: Any) -> tuple[Parameter, ...]:
        made = []
        for index in range(ARGUMENTS_MAX):
            found = self._driver.call_or_none("cuFuncGetParamInfo", function, index)
            if found is None:
                break
            _, size = found
            made.append(Parameter(takes=Takes.BYTES, shown=f"{size} bytes", bytes=size))
        return tuple(made)

    def _drop_module(self, native: NativeModule) -> None:
        self._sync_for("module_unload")
        if native.kind is ModuleKind.WARP:
            drop_warp(native.thing)
        else:
            self._call("module_unload", "cuModuleUnload", native.thing)

    # ---- launches ----

    def _plan(self, native: NativeModule, function: Any, plan: LaunchPlan) -> Any:
        if native.kind is ModuleKind.WARP:
            wp = warp(self._cache)
            return WarpLaunch(wp, function, plan, self._warp_name(wp), self._warp_stream)
        return _Kernel(function, tuple(_C_TYPES[kind] for kind in plan.kinds))

    def _launch(self, plan: LaunchPlan, values: list[Any]) -> None:
        if isinstance(plan.native, WarpLaunch):
            plan.native.run(values)
            return
        for index in plan.buffers:
            values[index] = values[index].address
        arguments = (tuple(values), plan.native.types) if values else 0
        self._call(
            "launch", "cuLaunchKernel", plan.native.function, *plan.grid, *plan.block, 0, self._stream, arguments, 0
        )

    def _sync(self) -> None:
        self._sync_for("sync")

    def _shut(self) -> None:
        self._warp_stream = None  # Warp forgets the stream while it is there
        _local.device = None
        self._driver.call_or_none("cuStreamDestroy", self._stream)
        self._driver.call_or_none("cuDevicePrimaryCtxRelease", self._device)

    # ---- the driver ----

    def _call(self, call: str, name: str, *args: Any) -> Any:
        try:
            return self._driver(call, name, *args)
        except ContextLost as error:
            self.failure = self.failure or error
            raise

    def _sync_for(self, call: str) -> None:
        self._call(call, "cuStreamSynchronize", self._stream)

    def _attribute(self, attribute: int) -> int:
        kinds = self._driver.module.CUdevice_attribute
        found: int = self._call("open", "cuDeviceGetAttribute", kinds(attribute), self._device)
        return found

    def _warp_name(self, wp: Any) -> str:
        """What Warp calls this device: it numbers them as the driver does here. By their UUID a part of a card is not
        found, which for Warp has that of its card."""
        if self._warp_device is None:
            for one in wp.get_cuda_devices():
                if one.ordinal == int(self._device):
                    self._warp_device = str(one)
                    self._warp_stream = wp.Stream(one, cuda_stream=int(self._stream))
                    break
            else:
                self._check_compiler("Warp")
                raise NotFound(f"module_load: Warp does not see the GPU {self._uuid}", do="Give the module as CUDA.")
        return self._warp_device


class _Kernel:
    """A function of a module, and how its arguments are passed."""

    __slots__ = ("function", "types")

    def __init__(self, function: Any, types: tuple[Any, ...]) -> None:
        self.function = function
        self.types = types
