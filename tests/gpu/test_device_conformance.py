"""The CUDA device on a real GPU: the contract of devices, random programs, faults.

It needs an NVIDIA driver, cuda-bindings and NVRTC, and for the tests with Warp that, too.

make test-gpu
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sublet.devices.account import MemoryAccount
from sublet.devices.interface import Device
from sublet.guest.session import GuestSession
from sublet.testing.device_conformance import CUDA_KERNELS, WARP_KERNELS, DeviceConformance
from sublet.values import Epoch, LeaseId
from sublet.wire.device import ModuleKind
from sublet.wire.scalars import ArgKind
from tests.device_programs import CAP_BYTES, run_program
from tests.gpu.gpus import PROGRAMS, open_first

CUDA_ONLY = {ModuleKind.CUDA: CUDA_KERNELS}
WARP_ONLY = {ModuleKind.WARP: WARP_KERNELS}


@pytest.mark.gpu
class TestCudaDevice(DeviceConformance):
    """With CUDA C++, compiled here for the GPU that is here."""

    sources = CUDA_ONLY

    @pytest.fixture(autouse=True)
    def _at(self, tmp_path: Path) -> None:
        self._cache = str(tmp_path / "cache")

    def open_device(self, account: MemoryAccount) -> Device:
        return open_first(account, self._cache)


@pytest.mark.gpu
@pytest.mark.needs("warp")
class TestCudaDeviceWithWarp(DeviceConformance):
    """With the very source that host devices run."""

    sources = WARP_ONLY

    @pytest.fixture(autouse=True)
    def _at(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._cache = str(tmp_path_factory.getbasetemp() / "warp-kernels")

    def open_device(self, account: MemoryAccount) -> Device:
        return open_first(account, self._cache)


@pytest.mark.gpu
def test_random_programs_do_what_the_model_says(tmp_path: Path) -> None:
    """The same programs that host devices are put through."""
    account = MemoryAccount(CAP_BYTES)
    for seed in range(PROGRAMS):
        device = open_first(account, str(tmp_path / "cache"))
        session = GuestSession(device, LeaseId("l-7"), Epoch(1, 42), lambda: None)
        try:
            run_program(session, seed, sources=CUDA_ONLY)
        finally:
            session.close()
        assert account.used_bytes == 0, f"seed {seed} left something"


FAULTS = """
import sys
from sublet.devices.account import MemoryAccount
from sublet.errors import GpuError
from sublet.wire.device import ModuleKind
from sublet.wire.scalars import ArgKind
from tests.gpu.gpus import FAULT, open_first

device = open_first(MemoryAccount(1 << 20), sys.argv[1])
loaded = device.load({ModuleKind.CUDA: FAULT})
x = device.alloc(64)
device.launch(device.plan(loaded.handle, "fault", 1, 1, (ArgKind.U64,)), (8,))
for call in (device.sync, lambda: device.write(x, 0, b"x")):
    try:
        call()
    except GpuError as error:
        print(f"{error.call}|{error}")
device.close()
print(device.account.used_bytes)
"""


@pytest.mark.gpu
def test_a_kernel_that_faults_ends_its_guest_and_nobody_elses_session(tmp_path: Path) -> None:
    """Another session, in another process, goes on beside it."""
    account = MemoryAccount(1 << 20)
    device = open_first(account, str(tmp_path / "cache"))
    loaded = device.load({ModuleKind.CUDA: CUDA_KERNELS})
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, str(tmp_path / "other")], capture_output=True, text=True, timeout=120
    )
    first, second, used = done.stdout.splitlines()
    assert (done.returncode, used) == (0, "0"), done.stderr
    assert first.startswith("sync|sync: ")
    assert "ILLEGAL_ADDRESS" in first
    assert second.startswith("mem_write|mem_write: the device failed before")
    x = device.alloc(8)
    device.launch(device.plan(loaded.handle, "step", 1, 2, (ArgKind.BUFFER, ArgKind.U32, ArgKind.U32)), (x, 2, 1))
    assert struct.unpack("<2I", device.read(x, 0, 8)) == (0, 1)
    device.close()


@pytest.mark.gpu
def test_a_cubin_made_ahead_is_loaded_as_it_is(tmp_path: Path) -> None:
    """And one for another GPU gives way to the source beside it."""
    from sublet.devices import nvrtc

    device = open_first(MemoryAccount(1 << 20), str(tmp_path / "cache"))
    own = nvrtc.compile_cuda(CUDA_KERNELS, device._arch)
    assert device.load({ModuleKind.CUBIN: own}).kind is ModuleKind.CUBIN
    other = nvrtc.compile_cuda(CUDA_KERNELS, 80 if device._arch >= 90 else 90)
    found = device.load({ModuleKind.CUBIN: other, ModuleKind.CUDA: CUDA_KERNELS})
    assert found.kind is ModuleKind.CUDA
    device.close()
