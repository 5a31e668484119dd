"""The host device keeps the contract of devices, and says what it is."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.devices import nvrtc
from sublet.devices.account import MemoryAccount
from sublet.devices.host import HOST_LABEL, HostDevice
from sublet.devices.interface import Device
from sublet.devices.memory import ALIGNMENT
from sublet.devices.warp_modules import make_private
from sublet.errors import GpuError, InvalidRequest, OutOfMemory, Unsupported
from sublet.testing import DeviceConformance
from sublet.testing.device_conformance import CUDA_KERNELS
from sublet.values import MIB
from sublet.wire.device import ModuleKind
from sublet.wire.scalars import ArgKind

WARP: Final = ModuleKind.WARP


class TestHostDevice(DeviceConformance):
    """All of it."""

    @pytest.fixture(autouse=True)
    def _at(self, kernel_cache: str) -> None:
        self._cache = kernel_cache

    def open_device(self, account: MemoryAccount) -> Device:
        return HostDevice("host-0", account, cache=self._cache)


@pytest.fixture
def device(kernel_cache: str) -> HostDevice:
    return HostDevice("host-0", MemoryAccount(16 * MIB), cache=kernel_cache)


# ------------------------------------------------------------------------------------------------------------- memory


def test_it_says_that_it_is_no_gpu(device: HostDevice) -> None:
    assert (device.identity.label, device.identity.is_host) == ("host device, no GPU", True)
    assert HOST_LABEL in str(device.identity)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_that_nobody_wrote_to_costs_nothing_and_freed_memory_goes_back(kernel_cache: str) -> None:
    size = 256 * MIB
    device = HostDevice("host-0", MemoryAccount(size), cache=kernel_cache)
    before = resident_bytes()
    x = device.alloc(size)
    assert resident_bytes() - before < 32 * MIB
    device.fill(x, 0, size // 2, b"x")
    assert resident_bytes() - before > 100 * MIB
    device.free(x)
    assert resident_bytes() - before < 32 * MIB


def test_buffers_are_aligned_for_the_widest_loads(device: HostDevice) -> None:
    for size in (1, 3, 255, 257, 5000):
        assert device._memory.get(device.alloc(size), "test").address % ALIGNMENT == 0


def test_what_the_machine_does_not_have_is_out_of_memory_and_changes_nothing(kernel_cache: str) -> None:
    account = MemoryAccount(1 << 62)
    device = HostDevice("host-0", account, cache=kernel_cache)
    with pytest.raises(OutOfMemory, match="this machine has no"):
        device.alloc(1 << 60)
    assert account.used_bytes == 0


# ------------------------------------------------------------------------------------------------------------ modules


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"x = 1", "no kernel"),
        (b"\xff\xfe", "not text"),
        (b"zero \0 byte", "not Python source"),
        (b"def f(:", r"not Python source.*line 1"),
        (b"import sys; sys.exit(3)", r"failed while it was imported: SystemExit: 3"),
        (b"1 / 0", r"failed while it was imported: ZeroDivisionError"),
        (b"import warp as wp\n@wp.kernel\ndef f(x):\n    x[0] = 1.0\n", "failed while it was imported"),
    ],
)
def test_a_source_that_is_no_module_says_why(device: HostDevice, source: bytes, words: str) -> None:
    before = set(sys.modules)
    with pytest.raises(InvalidRequest, match=words):
        device.load({WARP: source})
    assert not {name for name in set(sys.modules) - before if name.startswith("sublet_kernels_")}


def kernel(parameters: str, body: str, extra: str = "") -> bytes:
    return f"import warp as wp\n{extra}\n@wp.kernel\ndef f({parameters}):\n    {body}\n".encode()


def test_a_kernel_that_does_not_compile_is_named_with_its_line_at_the_load(device: HostDevice) -> None:
    source = kernel("x: wp.array(dtype=float)", "x[0] = nonsense(3)")
    for _ in range(2):  # a second time too: nothing half-made is left
        with pytest.raises(GpuError, match=r'(?s)module_load: .*function "f".*nonsense') as caught:
            device.load({WARP: source})
        assert caught.value.call == "module_load"


def test_the_same_source_is_compiled_once_and_forgotten_with_its_last_user(device: HostDevice) -> None:
    source = kernel("x: wp.array(dtype=float)", "x[0] = 42.0")
    first, second = device.load({WARP: source}), device.load({WARP: source})
    names = {name for name in sys.modules if name.startswith("sublet_kernels_")}
    device.unload(first.handle)
    assert {name for name in sys.modules if name.startswith("sublet_kernels_")} == names
    device.unload(second.handle)
    assert len({name for name in sys.modules if name.startswith("sublet_kernels_")}) == len(names) - 1
    x = device.alloc(4)
    third = device.load({WARP: source})
    device.launch(device.plan(third.handle, "f", 1, 1, (ArgKind.BUFFER,)), (x,))
    assert struct.unpack("<f", device.read(x, 0, 4)) == (42.0,)


@pytest.mark.parametrize("compiler", [True, False])
def test_a_module_for_gpus_only_is_checked_and_then_refused_with_what_would_work(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, compiler: bool
) -> None:
    if not compiler:
        monkeypatch.setattr(nvrtc, "_library", lambda: None)
    said = r"compiles for sm_90" if compiler else r"not checked: .*sublet\[gpu\]"
    with pytest.raises(Unsupported, match=rf'host device, no GPU.*{said}.*kind="warp"'):
        device.load({ModuleKind.CUDA: CUDA_KERNELS})


def test_cuda_source_that_does_not_compile_says_so_without_a_gpu(device: HostDevice) -> None:
    with pytest.raises(GpuError, match=r"(?s)does not compile.*error"):
        device.load({ModuleKind.CUDA: b"garbage("})


def test_the_kernels_devices_are_tested_with_compile_for_a_gpu() -> None:
    assert nvrtc.compile_cuda(CUDA_KERNELS, 90).startswith(b"\x7fELF")
    assert b".target sm_90" in nvrtc.compile_cuda(CUDA_KERNELS, 90, ptx=True)


@pytest.mark.parametrize(
    ("kind", "data", "wanted", "words"),
    [
        (ModuleKind.PTX, b"nonsense", InvalidRequest, "no PTX"),
        (ModuleKind.PTX, b".version 8.0\n.target sm_90\n", Unsupported, "ptx runs on GPUs only"),
        (ModuleKind.CUBIN, b"nonsense", InvalidRequest, "no cubin"),
        (ModuleKind.CUBIN, nvrtc.compile_cuda, Unsupported, "cubin runs on GPUs only"),
    ],
)
def test_objects_for_gpus_are_looked_at(
    device: HostDevice, kind: ModuleKind, data: Any, wanted: type[Exception], words: str
) -> None:
    made = data if isinstance(data, bytes) else data(CUDA_KERNELS, 90)
    with pytest.raises(wanted, match=words):
        device.load({kind: made})


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("parameter", "kind", "value", "read"),
    [
        ("wp.int8", ArgKind.INT, -128, -128),
        ("wp.uint8", ArgKind.INT, 255, 255),
        ("wp.int16", ArgKind.INT, -32768, -32768),
        ("wp.uint16", ArgKind.INT, 65535, 65535),
        ("int", ArgKind.INT, -(2**31), -(2**31)),
        ("wp.uint32", ArgKind.INT, 2**32 - 1, 2**32 - 1),
        ("wp.int64", ArgKind.INT, -(2**63), -(2**63)),
        ("wp.uint64", ArgKind.INT, 2**63 - 1, 2**63 - 1),
        ("float", ArgKind.FLOAT, 0.5, 0),
        ("float", ArgKind.INT, 3, 3),
        ("wp.float64", ArgKind.FLOAT, 2.5, 2),
        ("bool", ArgKind.INT, 1, 1),
        ("bool", ArgKind.INT, 0, 0),
    ],
)
def test_a_bare_number_becomes_what_the_kernel_takes(
    device: HostDevice, parameter: str, kind: ArgKind, value: int | float, read: int
) -> None:
    body = "out[0] = wp.int64(v)" if parameter != "bool" else "\n    if v:\n        out[0] = wp.int64(1)"
    loaded = device.load({WARP: kernel(f"v: {parameter}, out: wp.array(dtype=wp.int64)", body)})
    out = device.alloc(8)
    plan = device.plan(loaded.handle, "f", 1, 1, (kind, ArgKind.BUFFER))
    device.launch(plan, (value, out))
    assert struct.unpack("<q", device.read(out, 0, 8)) == (read,)


@pytest.mark.parametrize(
    ("parameter", "kind", "value", "words"),
    [
        ("wp.int8", ArgKind.INT, 128, "outside -128 to 127"),
        ("wp.uint32", ArgKind.INT, -1, "outside 0 to"),
        ("bool", ArgKind.INT, 2, "outside 0 to 1"),
        ("float", ArgKind.FLOAT, 1e39, "too large"),
    ],
)
def test_a_bare_number_that_does_not_fit_is_refused_with_the_signature(
    device: HostDevice, parameter: str, kind: ArgKind, value: int | float, words: str
) -> None:
    loaded = device.load({WARP: kernel(f"v: {parameter}", "pass")})
    plan = device.plan(loaded.handle, "f", 1, 1, (kind,))
    with pytest.raises(InvalidRequest, match=rf"launch: argument 1 \(v: .*\) of f\(v: .*\).*{words}"):
        device.launch(plan, (value,))


@pytest.mark.parametrize(
    ("parameter", "kind", "words"),
    [
        ("v: wp.vec3", ArgKind.BUFFER, "cannot pass that"),
        ("v: wp.array(dtype=float, ndim=2)", ArgKind.BUFFER, "cannot pass that"),
        ("v: wp.float16", ArgKind.FLOAT, "cannot pass that"),
        ("v: int", ArgKind.FLOAT, "bare float"),
        ("v: wp.array(dtype=float)", ArgKind.INT, "bare int"),
        ("v: wp.uint64", ArgKind.I64, "i64 was given"),
        ("v: float", ArgKind.F64, "f64 was given"),
        ("v: wp.int8", ArgKind.I32, "i32 was given"),
    ],
)
def test_a_type_that_does_not_fit_is_refused_with_the_signature(
    device: HostDevice, parameter: str, kind: ArgKind, words: str
) -> None:
    loaded = device.load({WARP: kernel(parameter, "pass")})
    with pytest.raises(InvalidRequest, match=rf"launch: argument 1 \(v: .*\) of f\(.*{words}"):
        device.plan(loaded.handle, "f", 1, 1, (kind,))


def test_a_buffer_becomes_an_array_of_the_parameters_type(device: HostDevice) -> None:
    """Seen by the kernel as so many elements, each of the parameter's size."""
    source = kernel("v: wp.array(dtype=wp.vec3), n: wp.array(dtype=int)", "n[0] = v.shape[0]")
    loaded = device.load({WARP: source})
    plan = device.plan(loaded.handle, "f", 1, 1, (ArgKind.BUFFER, ArgKind.BUFFER))
    v, n = device.alloc(36), device.alloc(4)
    device.launch(plan, (v, n))
    assert struct.unpack("<i", device.read(n, 0, 4)) == (3,)
    with pytest.raises(InvalidRequest, match=r"elements of 12 bytes, and the buffer has 37"):
        device.launch(plan, (device.alloc(37), n))


# ------------------------------------------------------------------------------------------------- what others notice


def test_warp_is_loaded_late_and_says_and_leaves_nothing(tmp_path: Path) -> None:
    """A device that only moves memory never imports it; nothing is printed, at the exit neither; and there is no
    temporary folder when the process is killed, as guests are."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    script = f"""
import os, signal, sys
from sublet.devices.account import MemoryAccount
from sublet.devices.host import HostDevice
from sublet.wire.device import ModuleKind
device = HostDevice("host-0", MemoryAccount(1000), cache={str(tmp_path / "cache")!r})
device.write(device.alloc(10), 0, b"0123456789")
assert not any(name in sys.modules for name in ("warp", "numpy", "cuda"))
source = b"import warp as wp\\n@wp.kernel\\ndef f(x: wp.array(dtype=float)):\\n    x[0] = 1.0\\n"
device.load({{ModuleKind.WARP: source}})
assert "warp" in sys.modules
if (pid := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGTERM)
assert os.waitpid(pid, 0)[1] == signal.SIGTERM
assert os.listdir(os.environ["TMPDIR"]) == [], "what Python removes at its exit would have stayed"
device.close()
"""
    env = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert any((tmp_path / "cache").iterdir()), "compiled kernels are kept where it was said"


def test_what_else_is_said_while_warp_begins_is_not_lost() -> None:
    script = """
import os
from sublet.devices import warp_modules
with warp_modules._without_the_driver_line():
    os.write(2, b"one\\n" + b"Warp: " + warp_modules._NO_DRIVER + b" here\\n" + b"two\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == "one\ntwo\n"


def test_without_warp_it_says_what_to_install(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from sublet.devices import warp_modules

    monkeypatch.setattr(warp_modules, "_is_ready", False)
    monkeypatch.setattr(warp_modules, "has_warp", lambda: False)
    with pytest.raises(Unsupported, match=r"Install it: .* install .*\[kernels\]"):
        device.load({WARP: b"x"})


def test_compiled_code_is_kept_only_where_nobody_else_can_write(tmp_path: Path) -> None:
    make_private(str(tmp_path / "mine" / "deeper"))
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for bad in (loose, tmp_path / "link"):
        with pytest.raises(Unsupported, match="only this user can write"):
            make_private(str(bad))


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Unsupported, match="only this user can write"):
        make_private(str(tmp_path / "theirs"))
