"""A pretended CUDA driver: the calls of ``cuda.bindings.driver`` that a device makes, over ordinary memory.

It is as lazy and as strict as a driver may be. What is asynchronous happens only when somebody waits, and from the
caller's memory as it is *then*; memory is touched only where it was given out, and freed only when nothing is under
way. It runs the kernels that devices are tested with, as Python. What it cannot show: whether a real driver does the
same.
"""

from __future__ import annotations

import ctypes
import enum
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

U32_MAX: Final = (1 << 32) - 1
UUID: Final = bytes(range(16))
NAME: Final = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


class Code(enum.IntEnum):
    """Some of ``CUresult``."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_INVALID_PTX = 218
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Attribute(enum.IntEnum):
    """Some of ``CUdevice_attribute``."""

    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


SIZES: Final = {
    "axpy": (4, 8, 8, 4),
    "step": (8, 4, 4),
    "places": (8, 4),
    "numbers": (4, 8, 4, 8, 4, 8, 8, 8),
}


class FakeCuda:
    """The module."""

    CUdevice_attribute = Attribute

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fail: dict[str, Code] = {}
        """By call: what it answers the next time, instead of doing anything."""
        self.memory: dict[int, bytearray] = {}
        self.modules: dict[int, bytes] = {}
        self.contexts = 0
        self.streams: set[int] = set()
        self.version = 13_000
        self.CUDA_VERSION = 13_050  # of the bindings
        self._lost: Code | None = None
        self._queue: list[Callable[[], None]] = []
        self._next = 0x7F00_0000_0000

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, args))
            if self._lost is not None and name not in ("cuGetErrorString", "cuInit"):
                return (self._lost,)
            if name in self.fail:
                code = self.fail.pop(name)
                if code is Code.CUDA_ERROR_ILLEGAL_ADDRESS:
                    self._lost = code
                return (code,)
            answer = found(*args)
            return answer if type(answer) is tuple else (Code.CUDA_SUCCESS,) if answer is None else (Code(0), answer)

        return call

    # ---- the device ----

    def cuInit(self, flags: int) -> None:  # noqa: N802
        assert flags == 0

    def cuDriverGetVersion(self) -> int:  # noqa: N802
        return self.version

    def cuDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def cuDeviceGet(self, ordinal: int) -> int:  # noqa: N802
        return ordinal

    def cuDeviceGetUuid(self, device: int) -> Any:  # noqa: N802
        return SimpleNamespace(bytes=UUID if device == 1 else bytes(16))

    def cuDeviceGetName(self, length: int, device: int) -> bytes:  # noqa: N802
        return b"Pretended H200".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: Attribute, device: int) -> int:  # noqa: N802
        return 9 if attribute is Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR else 0

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:  # noqa: N802
        assert device == 1
        self.contexts += 1
        return 0xC0

    def cuDevicePrimaryCtxRelease(self, device: int) -> None:  # noqa: N802
        self.contexts -= 1

    def cuCtxSetCurrent(self, context: int) -> None:  # noqa: N802
        assert context == 0xC0

    def cuStreamCreate(self, flags: int) -> int:  # noqa: N802
        stream = 0x50 + len(self.streams)
        self.streams.add(stream)
        return stream

    def cuStreamDestroy(self, stream: int) -> None:  # noqa: N802
        self.streams.remove(stream)

    def cuStreamSynchronize(self, stream: int) -> None:  # noqa: N802
        assert stream in self.streams
        queue, self._queue = self._queue, []
        for step in queue:
            step()

    def cuGetErrorString(self, code: Code) -> bytes:  # noqa: N802
        return code.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    # ---- memory ----

    def _at(self, address: int, length: int) -> memoryview:
        for base, data in self.memory.items():
            if base <= address and address + length <= base + len(data):
                return memoryview(data)[address - base : address - base + length]
        raise AssertionError(f"{length} bytes at {address:#x} were never given out")

    def cuMemAlloc(self, size: int) -> Any:  # noqa: N802
        if size > 1 << 40:
            return (Code.CUDA_ERROR_OUT_OF_MEMORY,)
        base, self._next = self._next, self._next + size + -size % 512
        self.memory[base] = bytearray(b"\xee" * size)
        return base

    def cuMemFree(self, address: int) -> None:  # noqa: N802
        assert not self._queue, "freed while something is under way"
        del self.memory[address]

    def cuMemcpyHtoDAsync(self, target: int, source: Any, length: int, stream: int) -> None:  # noqa: N802
        kept = memoryview(source)
        assert len(kept) == length

        def copy() -> None:
            self._at(target, length)[:] = kept

        self._queue.append(copy)

    def cuMemcpyDtoHAsync(self, target: Any, source: int, length: int, stream: int) -> None:  # noqa: N802
        kept = memoryview(target)
        assert len(kept) == length

        def copy() -> None:
            kept[:] = self._at(source, length)

        self._queue.append(copy)

    def cuMemcpyDtoDAsync(self, target: int, source: int, length: int, stream: int) -> None:  # noqa: N802
        assert target + length <= source or source + length <= target

        def copy() -> None:
            self._at(target, length)[:] = self._at(source, length)

        self._queue.append(copy)

    def _fill(self, address: int, number: int, count: int, width: int) -> None:
        assert address % width == 0

        def fill() -> None:
            self._at(address, count * width)[:] = number.to_bytes(width, "little") * count

        self._queue.append(fill)

    def cuMemsetD8Async(self, address: int, number: int, count: int, stream: int) -> None:  # noqa: N802
        self._fill(address, number, count, 1)

    def cuMemsetD16Async(self, address: int, number: int, count: int, stream: int) -> None:  # noqa: N802
        self._fill(address, number, count, 2)

    def cuMemsetD32Async(self, address: int, number: int, count: int, stream: int) -> None:  # noqa: N802
        self._fill(address, number, count, 4)

    # ---- modules, launches ----

    def cuModuleLoadData(self, image: bytes) -> int:  # noqa: N802
        self._next += 512
        self.modules[self._next] = image
        return self._next

    def cuModuleUnload(self, module: int) -> None:  # noqa: N802
        assert not self._queue, "unloaded while something is under way"
        del self.modules[module]

    def _names(self, module: int) -> list[str]:
        return [name for name in SIZES if name.encode() in self.modules[module]]

    def cuModuleGetFunctionCount(self, module: int) -> int:  # noqa: N802
        return len(self._names(module))

    def cuModuleEnumerateFunctions(self, count: int, module: int) -> list[Any]:  # noqa: N802
        return [(module, name) for name in self._names(module)][:count]

    def cuFuncGetName(self, function: Any) -> bytes:  # noqa: N802
        name: str = function[1]
        return name.encode()

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[Any, ...]:  # noqa: N802
        sizes = SIZES[function[1]]
        if index >= len(sizes):
            return (Code.CUDA_ERROR_INVALID_VALUE,)
        return (Code.CUDA_SUCCESS, sum(sizes[:index]), sizes[index])

    def cuLaunchKernel(self, function: Any, *rest: Any) -> None:  # noqa: N802
        gx, gy, gz, bx, by, bz, shared, _, (values, types), extra = rest
        module, name = function
        assert module in self.modules
        assert (shared, extra) == (0, 0)
        assert [ctypes.sizeof(one) for one in types] == list(SIZES[name])
        passed = [one(value).value for one, value in zip(types, values, strict=True)]
        extent = (gx * bx, gy * by, gz * bz)
        self._queue.append(lambda: _KERNELS[name](self, extent, *passed))


def _axpy(fake: FakeCuda, extent: tuple[int, int, int], a: float, x: int, y: int, n: int) -> None:
    for i in range(min(extent[0], n)):
        [left] = struct.unpack("<f", fake._at(x + 4 * i, 4))
        [right] = struct.unpack("<f", fake._at(y + 4 * i, 4))
        fake._at(y + 4 * i, 4)[:] = struct.pack("<f", a * left + right)


def _step(fake: FakeCuda, extent: tuple[int, int, int], x: int, n: int, a: int) -> None:
    for i in range(min(extent[0], n)):
        [value] = struct.unpack("<I", fake._at(x + 4 * i, 4))
        fake._at(x + 4 * i, 4)[:] = struct.pack("<I", (value * a + i) & U32_MAX)


def _places(fake: FakeCuda, extent: tuple[int, int, int], hits: int, width: int) -> None:
    for i in range(extent[0]):
        for j in range(extent[1]):
            k = i * width + j
            [value] = struct.unpack("<I", fake._at(hits + 4 * k, 4))
            fake._at(hits + 4 * k, 4)[:] = struct.pack("<I", value + k)


def _numbers(
    fake: FakeCuda,
    extent: tuple[int, int, int],
    a: int,
    b: int,
    c: int,
    d: int,
    e: float,
    f: float,
    whole: int,
    parts: int,
) -> None:
    fake._at(whole, 32)[:] = struct.pack("<QQqq", a, b, c, d)
    fake._at(parts, 16)[:] = struct.pack("<dd", e, f)


_KERNELS: Final[dict[str, Callable[..., None]]] = {
    "axpy": _axpy,
    "step": _step,
    "places": _places,
    "numbers": _numbers,
}
