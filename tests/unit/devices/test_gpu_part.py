"""What needs a real GPU is at least sound: it is imported, its kernels compile for sm_90, and its harness works.

NVIDIA's compiler needs no driver, and the far end of sessions takes a host device as well.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import benchmarks.gpu
import tests.gpu
from benchmarks.gpu.kernels import SOURCES as BENCHMARKED
from sublet.devices import nvrtc
from sublet.devices.objects import check_cubin
from sublet.testing.device_kernels import CUDA_KERNELS
from sublet.testing.session_programs import run_session_program
from sublet.values import MIB
from tests.gpu.far_end import FarEnd
from tests.gpu.gpus import SOURCES

ALL = {"device_kernels": CUDA_KERNELS, **SOURCES, **BENCHMARKED}


@pytest.mark.parametrize("package", [tests.gpu, benchmarks.gpu], ids=lambda one: str(one.__name__))
def test_all_of_it_can_be_imported(package: object) -> None:
    """Without a GPU, and without its libraries being loaded."""
    assert list(pkgutil.iter_modules(package.__path__))  # type: ignore[attr-defined]
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):  # type: ignore[attr-defined]
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)


@pytest.mark.parametrize("name", sorted(ALL))
def test_its_kernels_compile_for_sm_90(name: str) -> None:
    if not nvrtc.has_nvrtc():
        pytest.skip("there is no NVRTC here; sublet[gpu] brings it")
    check_cubin(nvrtc.compile_cuda(ALL[name], 90))
    assert b".target sm_90" in nvrtc.compile_cuda(ALL[name], 90, ptx=True)


@pytest.mark.needs("warp")
def test_its_far_end_serves_sessions(tmp_path: Path, kernel_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, which may be killed in the middle."""
    from sublet.errors import GpuSessionEnded

    monkeypatch.setenv("SUBLET_KERNEL_CACHE", kernel_cache)
    with FarEnd(tmp_path, "gpu0", cap_bytes=16 * MIB) as far:
        for seed in range(2):
            with far.session() as gpu:
                assert gpu.is_host
                run_session_program(gpu, seed)
        gpu = far.session()
        gpu.mem_alloc(4)
        far.kill()
        with pytest.raises(GpuSessionEnded, match="far end is gone"):
            gpu.sync()
        gpu.close()
