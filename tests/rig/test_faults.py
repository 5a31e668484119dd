"""What went wrong on machines with cards, each on pretended ones: named after what a person would have met."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

import pytest

from sublet.clock import SystemClock
from sublet.node.loop import Loop
from sublet.node.supervisor.suspending import Suspending
from tests.commands import start_piped
from tests.rig.device_files import DEVICES
from tests.rig.rig import Rig, clear
from tests.rig.test_interface import SOURCES, run_on
from tests.traces import plain_env, until

pytestmark = pytest.mark.needs("gcc")

WAIT_S: Final = 60.0
ONLY_ROOT: Final = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device files")
OPTIONAL: Final = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetRemappedRows",
)
CANNOT_TELL: Final = (2, 3, 4, 19, 21, 25, 26, 29, 999, 12_345)
"""Answers that say nothing of a card; the last one is newer than anybody knows."""
BROKEN: Final = (1, 9, 10, 15, 16)


class Program:
    """A program on the machine that answers a line with a line of JSON."""

    def __init__(self, rig: Rig, code: str, *arguments: str) -> None:
        env = plain_env() | rig.env | {"PYTHONPATH": str(SOURCES.parent)}
        self.process = start_piped([sys.executable, "-c", code, *arguments], env, stdin=subprocess.PIPE, stderr=None)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def said(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it has ended"
        return json.loads(line)

    def asked(self) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self.said()


LOOKS: Final = """
import json, sys
from sublet.node.agent.nvml import Nvml
nvml = Nvml.open()
for _ in sys.stdin:
    reading = nvml.read(sys.argv[1])
    print(json.dumps(reading.failed and reading.failed.message), flush=True)
"""


def test_an_unknown_answer_to_an_optional_question_makes_no_card_faulty(rig: Rig) -> None:
    """WSL answers 999 to some questions, parts of cards answer 2 to others; both were faults after three looks."""
    with Program(rig, LOOKS, rig.card(0).name) as program:
        assert program.asked() is None
        met = 0
        for question in OPTIONAL:
            for code in CANNOT_TELL:
                row = rig.trouble(question, code=code)
                assert program.asked() is None, (question, code)
                met += row.met
                clear(row)
        assert met > len(CANNOT_TELL) * (len(OPTIONAL) - 2), "all but name and MIG mode are asked in each look"
        for code in BROKEN:
            row = rig.trouble("nvmlDeviceGetUtilizationRates", code=code)
            assert program.asked(), code
            clear(row)
        row = rig.trouble("nvmlDeviceGetMemoryInfo_v2", code=999)
        both = rig.trouble("nvmlDeviceGetMemoryInfo", code=999)
        assert "does not answer" in program.asked(), "that a card answers this tells one that works"
        clear(row)
        clear(both)


HOLDER: Final = """
import ctypes, json, os, types
from sublet.compute.posting import check_holder
from sublet.errors import InvalidRequest
from sublet.values import Kind
lease = types.SimpleNamespace(devices=[types.SimpleNamespace(kind=Kind.GPU, host=False)])
def refused():
    try:
        check_holder(lease)
    except InvalidRequest as error:
        return error.message
    return ""
said = [refused()]
cuda = ctypes.CDLL("libcuda.so.1")
said.append(refused())
assert cuda.cuInit(0) == 0
said.append(refused())
said.append([os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")])
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 1) == 0
said.append(refused())
print(json.dumps(said))
"""


@pytest.mark.parametrize("with_files", [False, pytest.param(True, marks=ONLY_ROOT)])
def test_a_notebook_that_asked_whether_there_is_a_gpu_may_hold_a_lease(rig: Rig, with_files: bool) -> None:
    """``torch.cuda.is_available()`` begins CUDA and makes no context; every ``@sublet.gpu`` call was then refused. The
    device files of the cards are open from that moment on, which was taken for a use of them."""
    rig.state.nodes = with_files
    for index in range(4):
        rig.card(index).node = 10 + index
    before, loaded, begun, files, with_context = run_on(rig, DEVICES * with_files + HOLDER)
    assert ("/dev/nvidiactl" in files and "/dev/nvidia11" in files) == with_files
    assert (before, loaded, begun) == ("", "", "")
    assert "has a CUDA context on a card" in with_context


IMPORTED: Final = """
import ctypes, json, types
from sublet.guest.serving import free_caches
cuda = ctypes.CDLL("libcuda.so.1")
def pool():
    assert cuda.cuInit(0) == 0  # as it asks which device is the current one
    return types.SimpleNamespace(free_all_blocks=lambda: None)
cupy = types.SimpleNamespace(get_default_memory_pool=pool, get_default_pinned_memory_pool=pool)
def has_begun():
    return cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0
said = [free_caches({"cupy": cupy}), has_begun()]
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0) == 0
print(json.dumps([*said, free_caches({"cupy": cupy})]))
"""


def test_a_cupy_that_was_only_imported_is_asked_for_nothing(rig: Rig) -> None:
    """It was asked for its pool, and so began CUDA in a guest that used none: one that is then never suspended."""
    assert run_on(rig, IMPORTED) == [[], False, ["cupy"]]


NAME: Final = """
import json, sys
from sublet.devices.account import MemoryAccount
from sublet.devices.cuda import CudaDevice
device = CudaDevice("n/gpu", sys.argv[1], MemoryAccount(1 << 30), cache="/nonexistent")
print(json.dumps(device.identity.label))
device.close()
"""


def test_the_name_of_a_device_is_its_name(rig: Rig) -> None:
    """It was 230 blanks long, with a NUL in it."""
    assert run_on(rig, NAME, rig.card(3).name) == "NVIDIA H100 80GB HBM3"


COMPUTES: Final = """
import json, os, sys
from sublet.devices.cuda_driver import open_driver
driver = open_driver()
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
memory = driver("t", "cuMemAlloc", 4096)
driver("t", "cuMemsetD8", memory, 7, 4096)
print(json.dumps(os.getpid()), flush=True)
for _ in sys.stdin:
    back = bytearray(4096)
    driver("t", "cuMemcpyDtoH", back, memory, 4096)
    print(json.dumps(back == bytes([7]) * 4096), flush=True)
"""


class Supervisor:
    """As much of one as suspends processes, with the true helper on the machine."""

    def __init__(self, **limits: float) -> None:
        self.loop = Loop(SystemClock())
        self.lives: list[tuple[int, bool]] = []
        self.suspending = Suspending(self.loop, lambda pid, lives: self.lives.append((pid, lives)), None, **limits)
        self.told: list[Mapping[str, Any]] = []

    def until(self, count: int) -> None:
        def look() -> None:
            if len(self.told) >= count:
                self.loop.stop()
            else:
                self.loop.after(0.01, look)

        late = self.loop.after(WAIT_S, self.loop.stop)
        look()
        self.loop.run()
        late.cancel()
        assert len(self.told) >= count, "it waits for ever"

    def close(self) -> None:
        self.suspending.close()
        for pid, lives in self.lives:
            if lives:
                os.waitpid(pid, 0)


@pytest.fixture
def on_the_machine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """What this process starts is on it; this process itself loads nothing of it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(rig.folder))
    monkeypatch.setenv("PYTHONPATH", str(SOURCES.parent))
    return rig


@pytest.mark.parametrize("call", ["cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"])
def test_one_hung_driver_call_blocks_no_other_suspend(on_the_machine: Rig, call: str) -> None:
    """Nobody was parked or brought back any more. And the guest of that call goes on."""
    rig = on_the_machine
    supervisor = Supervisor(grace_s=3.0)
    with Program(rig, COMPUTES) as first, Program(rig, COMPUTES) as second:
        pids = [first.said(), second.said()]
        row = rig.trouble(call, hangs=1)

        def given_up(answer: Mapping[str, Any]) -> None:
            supervisor.told.append(answer)
            clear(row)  # before the next question is asked, which else would hang as well

        supervisor.suspending.suspend([pids[0]], 1, given_up)
        supervisor.suspending.suspend([pids[1]], 20_000, supervisor.told.append)
        supervisor.until(2)
        assert "did not answer" in supervisor.told[0]["failed"]
        assert "stuck" not in supervisor.told[0]
        assert supervisor.told[1]["done"] == [pids[1]]
        assert first.asked() is True, "its calls do not wait, and its memory is as it was"
        supervisor.suspending.resume([pids[1]], (), supervisor.told.append)
        supervisor.until(3)
        assert supervisor.told[2]["done"] == [pids[1]]
        assert second.asked() is True
    supervisor.close()


@pytest.mark.parametrize("signal", [9, 11])
def test_a_helper_that_dies_between_lock_and_copy_leaves_nobody_locked(on_the_machine: Rig, signal: int) -> None:
    rig = on_the_machine
    supervisor = Supervisor()
    with Program(rig, COMPUTES) as program:
        pid = program.said()
        row = rig.trouble("cuCheckpointProcessCheckpoint", kills=signal, times=1)
        supervisor.suspending.suspend([pid], 20_000, supervisor.told.append)
        supervisor.until(1)
        assert supervisor.told[0]["failed"] == "its helper ended"
        clear(row)
        assert program.asked() is True
    supervisor.close()


ANSWERS: Final = """
import json
from sublet.devices.cuda_driver import open_driver
from sublet.errors import SubletError
driver = open_driver()
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
said = []
for _ in range(2):
    try:
        said.append(int(driver("alloc", "cuMemAlloc", 4096)) > 0)
    except SubletError as error:
        said.append([type(error).__name__, error.message, error.do])
print(json.dumps([*said, driver.call_or_none("cuMemGetInfo")]))
"""


def test_an_error_newer_than_the_bindings_is_an_error_and_no_crash(rig: Rig) -> None:
    """The bindings raise ValueError for a code that they do not know; the thread of the guest ended by it."""
    rig.trouble("cuMemAlloc_v2", code=12_345, times=1)
    rig.trouble("cuMemGetInfo_v2", code=12_345)
    first, second, nothing = run_on(rig, ANSWERS)
    assert first[0] == "GpuError"
    assert "alloc: the driver answered cuMemAlloc with an error that these bindings" in first[1]
    assert second is True
    assert nothing is None


PROBES: Final = "import sys; from sublet.devices.suspend import main; main(['--probe', sys.argv[1]])"


def test_a_trial_that_is_ended_leaves_no_process_on_the_card(rig: Rig) -> None:
    """Its small process stayed behind, locked, with half a gigabyte of the first card, and blocked it for ever."""
    row = rig.trouble("cuCheckpointProcessCheckpoint", hangs=1)
    with Program(rig, PROBES, rig.card(0).name) as trial, Program(rig, LOOKS_AT_ALL) as program:
        until("the card in use", lambda: row.met and program.asked(), WAIT_S)
        (pid,) = program.asked()
        # A call that waits for the driver sees no end of input; so does a process that stands still.
        os.kill(pid, signal.SIGSTOP)
        try:
            trial.process.kill()
            trial.process.wait()
            clear(row)
            until("nobody on a card", lambda: program.asked() == [], WAIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


LOOKS_AT_ALL: Final = """
import json, sys
from sublet.node.agent.nvml import Nvml, survey
cards = [card.uuid for card in survey().cards]
nvml = Nvml.open()
for _ in sys.stdin:
    print(json.dumps([use.pid for card in cards for use in nvml.read(card).processes]), flush=True)
"""
