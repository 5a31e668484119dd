"""The CUDA device, as far as it can be tried without one: over a pretended driver, and against the real bindings.

A real GPU is asked in ``tests/gpu``.
"""

from __future__ import annotations

import importlib
import random
import re
import struct
from types import SimpleNamespace
from typing import Any, Final

import pytest

from sublet.devices import cuda_driver, nvrtc
from sublet.devices.account import MemoryAccount
from sublet.devices.cuda import CudaDevice
from sublet.devices.cuda_driver import CUDA_OLDEST, CudaDriver, open_driver
from sublet.devices.interface import Device
from sublet.devices.objects import check_cubin, check_ptx
from sublet.devices.plain_cuda import PlainCuda
from sublet.errors import GpuError, InvalidRequest, NotFound, OutOfMemory, Unsupported
from sublet.testing import DeviceConformance
from sublet.testing.device_conformance import CUDA_KERNELS, KERNELS, WARP_KERNELS
from sublet.values import MIB
from sublet.wire.device import ModuleKind
from sublet.wire.refusals import refusal_of
from sublet.wire.scalars import ArgKind
from tests.unit.devices.fake_cuda import NAME, Code, FakeCuda

KINDS: Final = (ArgKind.BUFFER, ArgKind.U32, ArgKind.U32)


class TestCudaDeviceOverAPretendedDriver(DeviceConformance):
    """The whole contract, and that nothing of the driver's is left."""

    @pytest.fixture(autouse=True)
    def _over(self, kernel_cache: str) -> Any:
        self._cache = kernel_cache
        self._fakes: list[FakeCuda] = []
        yield
        for fake in self._fakes:
            assert (fake.memory, fake.modules, fake.streams, fake.contexts) == ({}, {}, set(), 0)

    def open_device(self, account: MemoryAccount) -> Device:
        self._fakes.append(FakeCuda())
        return CudaDevice("gpu-0", NAME, account, cache=self._cache, driver=CudaDriver(self._fakes[-1]))


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(fake: FakeCuda, kernel_cache: str) -> CudaDevice:
    return CudaDevice("gpu-0", NAME, MemoryAccount(16 * MIB), cache=kernel_cache, driver=CudaDriver(fake))


# -------------------------------------------------------------------------------------------------- which device it is


def test_it_is_the_one_with_that_uuid(device: CudaDevice) -> None:
    assert (device.identity.label, device.identity.is_host) == ("Pretended H200", False)


def test_a_uuid_that_the_driver_does_not_show_is_said(fake: FakeCuda, kernel_cache: str) -> None:
    with pytest.raises(NotFound, match="no GPU GPU-ffff"):
        CudaDevice("gpu-0", "GPU-ffff", MemoryAccount(1), cache=kernel_cache, driver=CudaDriver(fake))


def test_what_was_begun_is_undone_when_a_device_cannot_be_opened(fake: FakeCuda, kernel_cache: str) -> None:
    fake.fail["cuStreamCreate"] = Code.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfMemory):
        CudaDevice("gpu-0", NAME, MemoryAccount(1), cache=kernel_cache, driver=CudaDriver(fake))
    assert fake.contexts == 0


@pytest.mark.parametrize("call", ["cuDeviceGetName", "cuDeviceGetAttribute"])
def test_a_driver_that_fails_while_a_device_is_opened_is_an_error_of_ours(
    call: str, fake: FakeCuda, kernel_cache: str
) -> None:
    """It was an AttributeError, and the guest's thread ended by it."""
    fake.fail[call] = Code.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(GpuError, match=f"open: illegal address.*{call}"):
        CudaDevice("gpu-0", NAME, MemoryAccount(1), cache=kernel_cache, driver=CudaDriver(fake))


def test_two_devices_on_one_thread_are_not_mistaken_for_each_other(kernel_cache: str) -> None:
    """The driver takes memory from the device whose context is the thread's current one."""
    fakes = FakeCuda(), FakeCuda()
    one, two = (
        CudaDevice("gpu", NAME, MemoryAccount(MIB), cache=kernel_cache, driver=CudaDriver(fake)) for fake in fakes
    )

    def entered() -> list[int]:
        return [sum(name == "cuCtxSetCurrent" for name, _ in fake.calls) for fake in fakes]

    assert entered() == [1, 1]
    x = one.alloc(64)
    one.write(x, 0, b"x")
    assert entered() == [2, 1]
    two.alloc(64)
    assert entered() == [2, 2]
    one.close()
    assert entered() == [3, 2]
    two.close()
    assert entered() == [3, 3]


# ------------------------------------------------------------------------------------------------------------- errors


def test_memory_that_the_card_does_not_have_changes_nothing(device: CudaDevice, fake: FakeCuda) -> None:
    """Others are on it, or the driver keeps some: the lease's account is not all there is."""
    fake.fail["cuMemAlloc"] = Code.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfMemory, match=r"mem_alloc: out of memory \(cuMemAlloc said"):
        device.alloc(1000)
    fake.fail["cuMemsetD8Async"] = Code.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(GpuError, match="mem_alloc"):
        device.alloc(1000)
    assert (device.account.used_bytes, fake.memory) == (0, {})
    device.alloc(1000)


def test_a_fault_is_said_once_with_its_call_and_then_the_device_is_of_no_use(
    device: CudaDevice, fake: FakeCuda
) -> None:
    """The driver answers every later call with the same error; it is not the later call's."""
    x = device.alloc(64)
    fake.fail["cuStreamSynchronize"] = Code.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(GpuError, match="sync: illegal address") as caught:
        device.sync()
    assert caught.value.call == "sync"
    assert refusal_of(caught.value).kind == "GpuError"
    with pytest.raises(
        GpuError, match=r"mem_write: the device failed before \(sync: illegal address.*new guest"
    ) as late:
        device.write(x, 0, b"x")
    assert late.value.call == "mem_write"
    device.close()
    assert device.account.used_bytes == 0
    device.close()


def test_an_error_that_is_no_fault_leaves_the_device_as_it_was(device: CudaDevice, fake: FakeCuda) -> None:
    x = device.alloc(64)
    fake.fail["cuMemcpyHtoDAsync"] = Code.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(GpuError, match="mem_write: invalid value"):
        device.write(x, 0, b"x")
    device.write(x, 0, b"y")
    assert device.read(x, 0, 1) == b"y"


# ------------------------------------------------------------------------------------------------------------ modules


def test_of_several_kinds_the_nearest_is_taken_and_the_next_if_it_does_not_suit(
    device: CudaDevice, fake: FakeCuda
) -> None:
    ptx = nvrtc.compile_cuda(CUDA_KERNELS, 90, ptx=True)
    cubin = nvrtc.compile_cuda(CUDA_KERNELS, 90)
    every = {**KERNELS, ModuleKind.PTX: ptx, ModuleKind.CUBIN: cubin}
    assert device.load(every).kind is ModuleKind.CUBIN
    fake.fail["cuModuleLoadData"] = Code.CUDA_ERROR_NO_BINARY_FOR_GPU
    assert device.load(every).kind is ModuleKind.PTX
    assert device.load({ModuleKind.CUBIN: b"nonsense", ModuleKind.CUDA: CUDA_KERNELS}).kind is ModuleKind.CUDA
    fake.fail["cuModuleLoadData"] = Code.CUDA_ERROR_INVALID_PTX
    with pytest.raises(GpuError, match="module_load: invalid ptx"):
        device.load({ModuleKind.PTX: ptx})
    assert fake.calls[-2][1][0].endswith(b"\0"), "PTX is text with a zero behind it"


def test_a_module_without_kernels_is_none(device: CudaDevice, fake: FakeCuda) -> None:
    with pytest.raises(GpuError, match="no kernel in this module"):
        device.load({ModuleKind.CUDA: b'extern "C" __device__ int f() { return 1; }'})
    assert fake.modules == {}


def test_a_warp_module_alone_needs_a_gpu_that_warp_sees(device: CudaDevice) -> None:
    with pytest.raises(NotFound, match=f"Warp does not see the GPU {NAME}"):
        device.load({ModuleKind.WARP: WARP_KERNELS})


def test_what_a_newer_compiler_makes_is_not_tried_on_an_older_driver(device: CudaDevice, fake: FakeCuda) -> None:
    """It was, and the answer named the image; of Warp it was said to give CUDA C++, which fails as well."""
    fake.version = 12_080
    said = r"the driver speaks CUDA 12\.8, and CUDA C\+\+ compiled by CUDA 13\.\d+ needs a driver of CUDA 13\.0"
    with pytest.raises(Unsupported, match=said):
        device.load({ModuleKind.CUDA: CUDA_KERNELS})
    with pytest.raises(Unsupported, match="and Warp compiled by CUDA 13"):
        device.load({ModuleKind.WARP: WARP_KERNELS})
    ptx = nvrtc.compile_cuda(CUDA_KERNELS, 90, ptx=True)
    assert device.load({ModuleKind.CUDA: CUDA_KERNELS, ModuleKind.PTX: ptx}).kind is ModuleKind.PTX


def test_what_an_older_driver_cannot_run_is_known_when_the_device_is_opened(
    device: CudaDevice, fake: FakeCuda, kernel_cache: str
) -> None:
    """It was said when a module was loaded, which may be long after a lease began."""
    assert device.identity.limits == ()
    fake.version = 12_080
    older = CudaDevice("gpu-0", NAME, MemoryAccount(16 * MIB), cache=kernel_cache, driver=CudaDriver(fake))
    cuda, warp = older.identity.limits
    said = r"the driver speaks CUDA 12\.8, and {} compiled by CUDA 13\.\d+ needs a driver of CUDA 13\.0 or later"
    assert re.fullmatch(said.format(r"CUDA C\+\+"), cuda)
    assert re.fullmatch(said.format("Warp"), warp)
    with pytest.raises(Unsupported, match=re.escape(cuda)):
        older.load({ModuleKind.CUDA: CUDA_KERNELS})


def test_an_architecture_that_the_compiler_does_not_know_is_no_error_of_the_source() -> None:
    """Of an old card it was said to fix the source. A newer card is given PTX of the nearest architecture."""
    with pytest.raises(GpuError, match=r"does not compile for compute capability 3\.5 any more"):
        nvrtc.compile_cuda(CUDA_KERNELS, 35)
    assert re.search(rb"\.target sm_\d+", nvrtc.compile_cuda(CUDA_KERNELS, 999))


def test_a_cubin_is_looked_at_before_the_driver_sees_it() -> None:
    """The driver gets an address and no length: what is cut short must never get there."""
    cubin = nvrtc.compile_cuda(CUDA_KERNELS, 90)
    check_cubin(cubin)
    chance = random.Random(5)
    for length in {0, 1, 63, 64, len(cubin) - 1, *(chance.randrange(len(cubin)) for _ in range(200))}:
        with pytest.raises(InvalidRequest, match="no cubin"):
            check_cubin(cubin[:length])
    with pytest.raises(InvalidRequest, match="not made for a GPU"):
        check_cubin(cubin[:18] + struct.pack("<H", 62) + cubin[20:])


def test_ptx_is_looked_at_before_the_driver_sees_it() -> None:
    ptx = nvrtc.compile_cuda(CUDA_KERNELS, 90, ptx=True)
    check_ptx(ptx)
    for bad in (b"", b"nonsense", ptx[:20] + b"\0" + ptx[20:], ptx.replace(b".target", b".tarmac")):
        with pytest.raises(InvalidRequest, match="no PTX"):
            check_ptx(bad)


# ------------------------------------------------------------------------------------------------ the real bindings


def bindings() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def test_the_real_bindings_take_every_call_as_it_is_made(device: CudaDevice, fake: FakeCuda) -> None:
    """Each call that a device makes is made again on NVIDIA's own bindings. Without a driver they convert the
    arguments, refuse those of a wrong number or type, and only then miss the driver."""
    real = bindings()
    try:
        real.cuInit(0)
    except RuntimeError as error:
        missing = type(error)
    else:
        return  # a driver is here, and would carry out what is only meant to be looked at; tests/gpu asks it properly
    x, y = device.alloc(64), device.alloc(64)
    device.write(x, 0, b"12345678")
    device.read(x, 0, 8)
    device.copy(y, 0, x, 0, 8)
    for width in (1, 2, 4):
        device.fill(x, 0, 8, b"a" * width)
    loaded = device.load({ModuleKind.CUDA: CUDA_KERNELS})
    device.launch(device.plan(loaded.handle, "step", 2, (2, 2), KINDS), (x, 4, 5))
    numbers = (*(kind for kind in ArgKind if not kind.is_bare and kind is not ArgKind.BUFFER),)
    order = tuple(ArgKind(name) for name in ("u32", "u64", "i32", "i64", "f32", "f64"))
    assert set(numbers) == set(order)
    plan = device.plan(loaded.handle, "numbers", 1, 1, (*order, ArgKind.BUFFER, ArgKind.BUFFER))
    device.launch(plan, (2**32 - 1, 2**64 - 1, -(2**31), -(2**63), 0.5, -0.25, x, y))
    fake.fail["cuMemAlloc"] = Code.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(GpuError):
        device.alloc(8)
    device.unload(loaded.handle)
    device.close()
    open_over(fake)

    tried = set()
    for name, args in fake.calls:
        with pytest.raises(missing):
            getattr(real, name)(*(as_real(real, name, arg) for arg in args))
        tried.add(name)
    assert tried == {name for name in vars(FakeCuda) if name.startswith("cu")}


def as_real(real: Any, name: str, arg: Any) -> Any:
    """The same, where only the pretended driver has such handles and words, or where a view has been let go of."""
    if isinstance(arg, memoryview):
        return memoryview(b"12345678" if name == "cuMemcpyHtoDAsync" else bytearray(8))
    if isinstance(arg, Code):
        return real.CUresult(int(arg))
    if type(arg).__name__ == "Attribute":
        return real.CUdevice_attribute(int(arg))
    if type(arg) is tuple and name.startswith(("cuFunc", "cuLaunch")) and type(arg[1]) is str:
        return real.CUfunction(arg[0])
    return arg


def test_the_attributes_asked_for_are_those_of_the_real_bindings() -> None:
    attribute = bindings().CUdevice_attribute
    assert attribute(75) is attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert attribute(76) is attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    assert int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING) == 1


def test_the_errors_that_end_a_context_are_names_the_real_bindings_know() -> None:
    known = {one.name: int(one) for one in bindings().CUresult}
    assert known.keys() >= cuda_driver._LOST
    assert {one.name: int(one) for one in Code}.items() <= known.items()


# ---------------------------------------------------------------------------------------------- where there is none


def open_over(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch | None = None) -> CudaDriver:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "importlib", SimpleNamespace(import_module=lambda name: fake))
        return open_driver()


def test_without_the_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(cuda_driver, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(Unsupported, match=r"Install them: .* install .*\[gpu\]"):
        open_driver()


def test_without_a_driver_it_says_so(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError("libcuda.so was not found")

    monkeypatch.setattr(fake, "cuInit", no_library, raising=False)
    with pytest.raises(Unsupported, match=r"no NVIDIA driver on this machine \(libcuda"):
        open_over(fake)


def test_a_library_that_lacks_a_call_is_said_to_be_too_old() -> None:
    """A toolkit's stub, or a driver of another time. It was an AttributeError, in the supervisor's log alone."""
    driver = CudaDriver(PlainCuda(SimpleNamespace(cuInit=lambda flags: 0)))
    driver("open", "cuInit", 0)
    with pytest.raises(Unsupported, match=r"libcuda\.so\.1 has no cuDeviceGetCount: it is far too old"):
        driver("open", "cuDeviceGetCount")
    stub = CudaDriver(PlainCuda(SimpleNamespace(cuInit=lambda flags: 34)))
    with pytest.raises(GpuError, match="cuInit said 34") as caught:
        stub("open", "cuInit", 0)
    assert "stub of libcuda.so.1" in (caught.value.do or "")


def test_an_old_driver_is_told_apart(fake: FakeCuda) -> None:
    open_over(fake)
    fake.version = CUDA_OLDEST - 10
    with pytest.raises(Unsupported, match=r"speaks CUDA 12\.3, and sessions need 12\.4"):
        open_over(fake)
