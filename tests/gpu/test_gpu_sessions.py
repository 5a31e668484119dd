"""``GpuSession`` on a real GPU: random programs, many launches, faults in a guest of its own.

The guest's half runs as it does under an office, in another process where it may fault; there is no office here, so
that a bare machine will do (a driver, Python, torch, cuda-bindings, numpy).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sublet.compute.arguments import f32, u32, u64
from sublet.errors import GpuError, InvalidRequest, OutOfMemory
from sublet.testing.device_conformance import CUDA_KERNELS
from sublet.wire.device import ModuleKind
from tests.gpu.far_end import FarEnd
from tests.gpu.gpus import FAULT, LARGE, PROGRAMS, first_gpu
from tests.session_programs import run_session_program


@pytest.fixture
def far(tmp_path: Path) -> Iterator[FarEnd]:
    with FarEnd(tmp_path, first_gpu(), cap_bytes=2 * LARGE) as made:
        yield made


@pytest.mark.gpu
def test_programs_do_what_numpy_says(far: FarEnd) -> None:
    """The same as on host devices, with CUDA C++."""
    for seed in range(PROGRAMS // 4):
        with far.session() as gpu:
            run_session_program(gpu, seed)


@pytest.mark.gpu
def test_many_launches_in_one_batch_and_much_memory(far: FarEnd) -> None:
    with far.session() as gpu:
        assert not gpu.is_host
        module = gpu.module_load(CUDA_KERNELS, kind="cuda")
        x = gpu.mem_alloc(4 * 1024)
        for _ in range(10_000):
            gpu.launch(module, "step", 4, 256, [x, u32(1024), u32(1)])
        found = np.frombuffer(gpu.mem_read(x), np.uint32)
        assert (found == 10_000 * np.arange(1024, dtype=np.uint32)).all()
        data = np.random.default_rng(1).integers(0, 256, LARGE // 2, dtype=np.uint8)
        y = gpu.mem_alloc(data.nbytes)
        gpu.mem_write(y, 0, data)
        back = np.empty_like(data)
        gpu.mem_read_into(y, 0, back)
        assert (back == data).all()
        with pytest.raises(OutOfMemory):
            gpu.mem_alloc(2 * LARGE)


@pytest.mark.gpu
def test_arguments_are_checked_before_the_launch(far: FarEnd) -> None:
    """A driver of CUDA 12.4 or newer tells how many bytes each parameter has."""
    with far.session() as gpu:
        module = gpu.module_load(CUDA_KERNELS, kind="cuda")
        x = gpu.mem_alloc(64)
        with pytest.raises(InvalidRequest, match="bare number"):
            gpu.launch(module, "step", 1, 1, [x, 1, u32(1)])
        gpu.launch(module, "step", 1, 1, [x, u64(1), u32(1)])
        with pytest.raises(InvalidRequest, match="launch: argument 2"):
            gpu.sync()
        gpu.launch(module, "axpy", 1, 1, [f32(1), x, x, u32(1)])
        gpu.sync()


@pytest.mark.gpu
def test_a_kernel_that_faults_is_told_and_the_next_guest_has_a_clean_device(far: FarEnd, tmp_path: Path) -> None:
    gpu = far.session()
    gpu.launch(gpu.module_load(FAULT, kind="cuda"), "fault", 1, 1, [u64(8)])
    with pytest.raises(GpuError, match="ILLEGAL_ADDRESS") as caught:
        gpu.sync()
    assert caught.value.call == "sync"
    with pytest.raises(GpuError, match="the device failed before"):
        gpu.mem_read(gpu.mem_alloc(4))
    gpu._engine.drop()
    far.kill()
    (tmp_path / "again").mkdir()
    with FarEnd(tmp_path / "again", first_gpu(), cap_bytes=LARGE) as other, other.session() as gpu:
        assert gpu.mem_read(gpu.mem_alloc(64)) == bytes(64)


@pytest.mark.gpu
@pytest.mark.needs("torch")
def test_torch_refuses_more_than_the_leases_share() -> None:
    """And what is within it, it gives."""
    import subprocess
    import sys

    program = (
        "import torch\n"
        "from sublet.guest.caps import cap_torch\n"
        "assert cap_torch(('local/GPU-x',), (1 << 30,))\n"
        "torch.empty(256 << 20, dtype=torch.uint8, device='cuda')\n"
        "try:\n"
        "    torch.empty(2 << 30, dtype=torch.uint8, device='cuda')\n"
        "except torch.cuda.OutOfMemoryError:\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "refused\n", done.stderr


@pytest.mark.gpu
def test_a_module_made_ahead_of_time_is_taken_as_it_is(far: FarEnd) -> None:
    """For sm_90, as the ordinary tests compile it; another GPU takes the source beside it."""
    from sublet.devices import nvrtc

    cubin = nvrtc.compile_cuda(CUDA_KERNELS, nvrtc.CHECK_ARCH)
    with far.session() as gpu:
        module = gpu.module_load({"cubin": cubin, "cuda": CUDA_KERNELS})
        assert module.kind in (ModuleKind.CUBIN, ModuleKind.CUDA)
        assert set(module.kernels) == {"axpy", "step", "places", "numbers"}
