"""What needs a real GPU is at least sound: it is imported, its kernels compile for sm_90, and its harness works.

NVIDIA's compiler needs no driver, and the far end of sessions takes a host device as well.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import benchmarks.gpu
import tests.gpu
from benchmarks.gpu.kernels import SOURCES as BENCHMARKED
from sublet.devices import nvrtc
from sublet.devices.objects import check_cubin
from sublet.testing.device_conformance import CUDA_KERNELS
from sublet.values import MIB
from tests.gpu.far_end import FarEnd
from tests.gpu.gpus import SOURCES
from tests.gpu.resident import Helper, Resident
from tests.session_programs import run_session_program

ROOT = Path(__file__).resolve().parents[3]
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


def test_every_call_of_the_driver_that_is_named_is_one() -> None:
    """A name that the bindings do not have would be found out only where there is a GPU."""
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed")
    texts = [
        file.read_text()
        for folder in ("src/sublet", "tests/gpu", "benchmarks/gpu")
        for file in (ROOT / folder).rglob("*.py")
    ]
    named = {name for text in texts for name in re.findall(r'"(cu[A-Z]\w+|CU[a-z]\w+)"', text)}
    assert len(named) > 40
    # What is called in the library itself is named as it is there; the bindings leave the version out.
    assert [name for name in sorted(named) if not hasattr(bindings, name.removesuffix("_v2"))] == []


@pytest.mark.parametrize("begin", [Helper, lambda: Resident(1)], ids=["helper", "resident"])
def test_where_no_gpu_can_be_seen_they_say_so(begin: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits for them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match=r"nothing can be suspended|could not be had"):
        begin()


def test_the_parts_need_no_more_than_a_bare_machine_has() -> None:
    """A driver, Python, torch, cuda-core and numpy; pytest and nvidia-ml-py are small, pure, and carried along."""
    names = [
        f"{package}.{found.name}"
        for package, where in (("tests.gpu", tests.gpu), ("benchmarks.gpu", benchmarks.gpu))
        for found in pkgutil.iter_modules(where.__path__)
    ]
    program = f"""
import importlib, sys
ours = {{"sublet", "tests", "benchmarks"}}
carried = {{"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "pynvml", "numpy"}}
standard = set(sys.stdlib_module_names)
class Bare:
    finders = list(sys.meta_path)
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ours | carried | standard:
            return next(filter(None, (one.find_spec(name, path, target) for one in self.finders)), None)
sys.meta_path[:] = [Bare()]
for name in {names!r} + ["tests.conftest"]:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
