"""GPU sessions through a real office, on host devices: what they compute, what ends them, what is billed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import sublet
from sublet.client.guests import start_spec
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.compute.session_line import device_guest
from sublet.errors import GpuSessionEnded, OutOfMemory
from sublet.lease_end import EndReason
from sublet.node.processes.cgroups import Groups
from sublet.testing.device_conformance import KERNELS, WARP_KERNELS
from sublet.values import MIB
from sublet.wire.guests import GuestSpec
from sublet.wire.zygote import COLD_VARIABLE
from tests.session_programs import run_session_program
from tests.traces import until

pytestmark = pytest.mark.warm

PATIENCE_S: Final = 60.0
IMPORT_S: Final = 200.0
"""Where the warm interpreter takes too long to import PyTorch, on a busy machine, ten guests do it side by side."""
PROGRAMS: Final = 30

FAULT: Final = """
import warp as wp

@wp.kernel
def fault(x: wp.array(dtype=wp.uint32)):
    x[wp.tid() + 1000000000] = wp.uint32(1)
"""


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sublet.Fabric]:
    """Its warm interpreters have what sessions use. PyTorch is imported where a test asks for it."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COLD_VARIABLE, "torch")
        ensure_office(home, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    with sublet.connect(home=home) as made:
        yield made
        made.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


@pytest.fixture
def lease(fabric: sublet.Fabric) -> Iterator[sublet.Lease]:
    with fabric.gpu(min_vram="64MiB", ttl="60s", exclusivity="shared") as lease:
        yield lease


def bill_of(fabric: sublet.Fabric, lease: sublet.Lease) -> dict[str, Any]:
    lines: list[dict[str, Any]] = fabric.request("GET", "/v1/bill?by=lease", shape=list)
    return next(line for line in lines if line["key"] == lease.id)


def is_free(fabric: sublet.Fabric, vram: str = "1GiB") -> bool:
    """Whether the whole device can be had: what was on it came back, verified."""
    try:
        fabric.gpu(min_vram=vram, wait=0).release()
    except sublet.CapacityExceeded:
        return False
    return True


def test_a_session_computes_and_the_bill_says_what(fabric: sublet.Fabric) -> None:
    """Launches and bytes are exact, and nothing else ran under the lease."""
    data = np.arange(1000, dtype=np.uint32)
    with fabric.gpu(min_vram="64MiB", ttl="60s", exclusivity="shared") as lease:
        with sublet.GpuSession(lease) as gpu:
            assert gpu.label == "host device, no GPU"
            assert gpu.memory_bytes == 64 * MIB
            x = gpu.mem_alloc(data.nbytes)
            gpu.mem_write(x, 0, data)
            module = gpu.module_load(WARP_KERNELS, kind="warp")
            for _ in range(3):
                gpu.launch(module, "step", 4, 256, [x, sublet.u32(1000), sublet.u32(1)])
            out = np.frombuffer(gpu.mem_read(x, 0, data.nbytes), np.uint32)
            with pytest.raises(OutOfMemory):
                gpu.mem_alloc(64 * MIB)
            gpu.launch(module, "step", 1, 1, [])
            with pytest.raises(sublet.InvalidRequest):
                gpu.sync()
            y = gpu.mem_alloc(32 * MIB)
            gpu.sync()
            time.sleep(0.1)
            gpu.mem_free(y)
        assert (out == data + 3 * np.arange(1000, dtype=np.uint32)).all()
        assert gpu.totals is not None
        assert (gpu.totals.launches, gpu.totals.failures) == (3, 1)
    until("a launch on the bill", lambda: bill_of(fabric, lease)["launches"], PATIENCE_S)
    found = bill_of(fabric, lease)
    assert (found["launches"], found["launch_errors"], found["uncounted"]) == (3, 1, 0)
    assert found["bytes_moved"] == 8000
    assert found["vram_byte_seconds"] >= 3 * MIB


def test_what_a_command_does_nobody_counts(fabric: sublet.Fabric) -> None:
    """And the bill says so, rather than guess."""
    with fabric.gpu(min_vram="64MiB", ttl="60s", exclusivity="shared") as lease:
        assert lease.start(["true"]).wait(PATIENCE_S) == 0
    until("a free device", lambda: is_free(fabric), PATIENCE_S)
    assert bill_of(fabric, lease)["uncounted"] == 1
    assert bill_of(fabric, lease)["launches"] is None


def test_programs_do_what_numpy_says(lease: sublet.Lease) -> None:
    with sublet.GpuSession(lease) as keeper:
        keeper.module_load(KERNELS)
        for seed in range(PROGRAMS):
            with sublet.GpuSession(lease) as gpu:
                run_session_program(gpu, seed)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to say how a process has ended."""
    monkeypatch.setattr("sublet.compute.session_line.END_REPORTED_S", PATIENCE_S)


def test_a_kernel_that_faults_ends_its_guest_and_nothing_else(fabric: sublet.Fabric, patient: None) -> None:
    """The error says how, the lease goes on with a new guest, and the device comes back verified."""
    with fabric.gpu(min_vram="64MiB", ttl="60s", exclusivity="shared") as lease:
        with sublet.GpuSession(lease) as gpu:
            x = gpu.mem_alloc(64)
            gpu.launch(gpu.module_load(FAULT, kind="warp"), "fault", 1, 1, [x])
            with pytest.raises(GpuSessionEnded, match="SIGSEGV"):
                gpu.sync()
            with pytest.raises(GpuSessionEnded, match="SIGSEGV"):
                gpu.mem_alloc(1)
        assert lease.end is None
        with sublet.GpuSession(lease) as gpu:
            assert gpu.mem_read(gpu.mem_alloc(4)) == bytes(4)
            assert gpu.memory_bytes == 64 * MIB
    until("a free device", lambda: is_free(fabric), PATIENCE_S)


def test_a_guest_that_is_killed_gives_its_memory_back(lease: sublet.Lease, patient: None) -> None:
    """What it had is counted no longer, though it never said so."""
    gpu = sublet.GpuSession(lease)
    gpu.mem_alloc(60 * MIB)
    gpu.sync()
    os.kill(device_guest(lease).pid, signal.SIGKILL)
    with pytest.raises(GpuSessionEnded, match="SIGKILL"):
        gpu.sync()
    gpu.close()
    with sublet.GpuSession(lease) as gpu:
        gpu.mem_alloc(60 * MIB)
        gpu.sync()


def test_the_end_of_the_lease_ends_the_session_and_says_why(fabric: sublet.Fabric) -> None:
    lease = fabric.gpu(min_vram="64MiB", ttl="60s", exclusivity="shared")
    gpu = sublet.GpuSession(lease)
    gpu.mem_alloc(4)
    gpu.sync()
    lease.release()
    with pytest.raises(GpuSessionEnded) as caught:
        gpu.sync()
    assert caught.value.end is not None
    assert caught.value.end.reason is EndReason.RELEASED
    gpu.close()
    with pytest.raises(sublet.LeaseEnded):
        sublet.GpuSession(lease)


def test_a_tenant_behind_walls_has_sessions_too(fabric: sublet.Fabric) -> None:
    """With a user of its own where that can be had; what it did is on its bill."""
    token = fabric.request("POST", "/v1/tenants", {"id": "ann"}, shape=dict)["token"]
    with sublet.connect(home=fabric_home(fabric), token=token, as_tenant=True) as anns:
        with (
            anns.gpu(min_vram="64MiB", ttl="60s", exclusivity="shared") as lease,
            sublet.GpuSession(lease) as gpu,
        ):
            x = gpu.mem_alloc(400)
            gpu.mem_write(x, 0, np.arange(100, dtype=np.uint32))
            module = gpu.module_load(WARP_KERNELS, kind="warp")
            gpu.launch(module, "step", 1, 128, [x, sublet.u32(100), sublet.u32(1)])
            assert np.frombuffer(gpu.mem_read(x), np.uint32).tolist() == [2 * i for i in range(100)]
        until("a launch on the bill", lambda: bill_of(anns, lease)["launches"] == 1, PATIENCE_S)
        assert bill_of(anns, lease)["uncounted"] == 0


def fabric_home(fabric: sublet.Fabric) -> Path:
    home: str = fabric.request("GET", "/v1/status", shape=dict)["home"]
    return Path(home)


def test_a_session_needs_a_device(fabric: sublet.Fabric) -> None:
    with fabric.cpu(1) as lease, pytest.raises(sublet.NotFound, match="0 devices"):
        sublet.GpuSession(lease)
    with fabric.gpu(min_vram="64MiB", exclusivity="shared") as lease, pytest.raises(sublet.NotFound, match="place 3"):
        sublet.GpuSession(lease, device=3)


GREEDY: Final = {
    "numpy": "import numpy, sys, time\nx = numpy.ones({bytes}, dtype=numpy.uint8)\n",
    "torch": "import torch, sys, time\nx = torch.ones({bytes}, dtype=torch.uint8)\n",
}
REST: Final = "open(sys.argv[1], 'w').close()\ntime.sleep(600)\n"


@pytest.mark.parametrize("library", [pytest.param("numpy"), pytest.param("torch", marks=pytest.mark.needs("torch"))])
def test_of_ten_guests_on_one_device_the_one_that_takes_too_much_is_ended(
    fabric: sublet.Fabric, tmp_path: Path, library: str
) -> None:
    """Its neighbours do not notice. It is told why, and so is whoever waits for it. All ten come out of one warm
    interpreter, as what is run on a device does."""
    if Groups.probe("caps").has("memory") is False:
        pytest.skip("memory is measured once a second here, not capped: tested below")
    leases = [fabric.gpu(min_vram="64MiB", ttl="120s", exclusivity="shared") for _ in range(10)]
    guests = []
    for number, lease in enumerate(leases):
        size = 64 * MIB + 700 * MIB if number == 4 else 16 * MIB
        program = GREEDY[library].format(bytes=size) + REST
        argv = (sys.executable, "-c", program, str(tmp_path / str(number)))
        spec = GuestSpec(argv=argv, imports=(library,), patient=True, cwd="/", env=dict(os.environ))
        guests.append(start_spec(lease, spec))
    greedy = guests.pop(4)
    assert greedy.wait(IMPORT_S) == 128 + signal.SIGKILL
    assert greedy.reason is EndReason.OUT_OF_MEMORY
    said = b"".join(piece.data for piece in greedy.output())
    assert b"out_of_memory" in said
    until(
        "nine guests at work",
        lambda: sum(os.path.exists(tmp_path / str(number)) for number in range(10)) == 9,
        IMPORT_S,
    )
    assert all(guest.exit_code is None for guest in guests)
    for guest in guests:
        guest.stop(grace=0)
        guest.close()
    greedy.close()
    for lease in leases:
        assert lease.end is None
        lease.release()
    until("a free device", lambda: is_free(fabric), PATIENCE_S)
