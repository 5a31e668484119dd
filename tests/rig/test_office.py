"""A whole office on pretended cards: up, lease, command, teardown, scrub, quarantine, doctor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.client.home import runtime_dir, socket_path
from tests.commands import run_program, start_piped
from tests.crash.office_process import Call, Line, release_all
from tests.integration.test_run import Shell, finished, first_line, until
from tests.rig.personalities import FOUR_H100
from tests.rig.quick_office import quick_office
from tests.rig.rig import SOON_MS, Rig, clear, forking_rig
from tests.rig.test_interface import run_on
from tests.traces import supervisor_of

pytestmark = [pytest.mark.needs("gcc"), pytest.mark.xdist_group("tests/rig/test_office.py")]

SECOND: Final = pytest.mark.xdist_group("tests/rig/test_office.py, second office")
"""For half of the tests, by the time that they take: these have a machine and an office of their own."""
WAIT_S: Final = 120.0
NO_PERMISSION: Final = 4
"""What NVML answers."""
Cells = Callable[[Sequence[str]], Any]

USES_A_CARD: Final = """
import json, os, sys
from sublet.devices.cuda_driver import open_driver
driver = open_driver()
device = driver("t", "cuDeviceGet", 0)
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
memory = driver("t", "cuMemAlloc", 64 << 20)
driver("t", "cuMemsetD8", memory, 0x5A, 64 << 20)
uuid = bytes(driver("t", "cuDeviceGetUuid", device).bytes).hex()
import sublet
here = sublet.current()
print(json.dumps({"uuid": uuid, "device": sublet.device(), "leased": here.devices, "pid": os.getpid(),
                  "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}), flush=True)
sys.stdin.readline()
"""
"""Writes to the first card that CUDA shows it, says which that is, and stays until it is told to go."""

USES_ITS_OWN_CARD: Final = """
import json, os
from sublet.devices.cuda_driver import open_driver
driver = open_driver()
device = driver("t", "cuDeviceGet", int(os.environ["LOCAL_RANK"]))
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
driver("t", "cuMemAlloc", 256 << 20)
uuid = bytes(driver("t", "cuDeviceGetUuid", device).bytes).hex()
import sublet
said = {"rank": int(os.environ["RANK"]), "uuid": uuid, "device": sublet.device(),
        "leased": sublet.current().devices, "visible": os.environ["CUDA_VISIBLE_DEVICES"]}
os.write(1, json.dumps(said).encode() + b"\\n")
"""
"""As a program for torchrun does."""

MAPS: Final = """
import json, os, sys, tempfile, time
import sublet
def mine(folder, me, other):
    open(os.path.join(folder, str(me)), "w").close()
    while not os.path.exists(os.path.join(folder, str(other))):
        time.sleep(0.02)
    from sublet.devices.cuda_driver import open_driver
    driver = open_driver()
    device = driver("t", "cuDeviceGet", 0)
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
    driver("t", "cuMemAlloc", 256 << 20)
    return bytes(driver("t", "cuDeviceGetUuid", device).bytes).hex(), sublet.device()
with tempfile.TemporaryDirectory() as folder, sublet.connect() as fabric, fabric.gpu(min_vram="60GiB", count=2) as both:
    found = list(both.map(mine, [folder] * 2, (0, 1), (1, 0)))
    print(json.dumps([found, [one.id for one in both.devices]]))
"""

COMPILES: Final = """
import ctypes, json, os, sys
import sublet
SOURCE = "extern \\"C\\" __global__ void nothing() {}"
def maps_of(pid):
    with open(f"/proc/{pid}/maps") as file:
        return "libcuda.so" in file.read()
with sublet.connect() as fabric, fabric.gpu(min_vram="1GiB") as lease:
    with sublet.GpuSession(lease) as gpu:
        gpu.module_unload(gpu.module_load(SOURCE, kind="cuda"))
    found = [maps_of("self"), maps_of(sys.argv[1]), maps_of(sys.argv[2])]
    ctypes.CDLL("libcuda.so.1")
    print(json.dumps([*found, maps_of("self")]))
"""


NOTEBOOK: Final = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("%load_ext sublet").raise_error()
for line in sys.stdin:
    for cell in json.loads(line):
        shell.run_cell(cell).raise_error()
    print("\\n" + json.dumps([shell.user_ns["said"]]), flush=True)
"""
"""Runs the cells of a line, and prints what they say."""

CELLS: Final = (
    "x = 3",
    """%%gpu --vram 60GiB
from sublet.devices.cuda_driver import open_driver
driver = open_driver()
device = driver("t", "cuDeviceGet", 0)
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
driver("t", "cuMemsetD8", driver("t", "cuMemAlloc", 64 << 20), x, 64 << 20)
uuid = bytes(driver("t", "cuDeviceGetUuid", device).bytes).hex()
import sublet
said = [uuid, sublet.device(), sublet.current().devices[0], x + 1]
""",
)

LAUNCH: Final = """
def launch(count):
    import ctypes
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, module, function = ctypes.c_int(), *(ctypes.c_void_p() for _ in range(3))
    codes = [
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
        cuda.cuModuleLoadData(ctypes.byref(module), b".version 8.0 .target sm_90 .entry nothing() {}"),
        cuda.cuModuleGetFunction(ctypes.byref(function), module, b"nothing"),
    ]
    codes += (cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None) for _ in range(count))
    assert not any(codes), codes
"""
"""As a framework does: not through a session."""

LAUNCHES_IN_A_WORKER: Final = f"""
import json
import sublet
from sublet.testing.device_conformance import CUDA_KERNELS
{LAUNCH}
with sublet.connect() as fabric, fabric.gpu(min_vram="1GiB") as lease:
    lease.run(launch, 6000)
    lease.run(launch, 7)
    with sublet.GpuSession(lease) as gpu:
        module = gpu.module_load(CUDA_KERNELS, kind="cuda")
        gpu.launch(module, "step", 1, 1, [gpu.mem_alloc(4), sublet.u32(1), sublet.u32(1)])
        gpu.sync()
    print(json.dumps(lease.id))
"""
"""More than fit one buffer of CUPTI's, a few, and one of a session."""

LAUNCHES_IN_A_CELL: Final = (
    f"""%%gpu --vram 1GiB
{LAUNCH}
launch(5)
import sublet
said = str(sublet.current().lease)
""",
)

TRAINS: Final = """
import array, json, os, sys, time
import sublet
from sublet import training
SOURCE = '''
extern "C" __global__ void train_step(unsigned long long step, unsigned int length, float* x) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x, n = length / 4;
    if (i < n) x[i] = __fmul_rn(__fadd_rn(x[i], x[n + i]), 0.5f);
}
'''
KERNEL = training.Launch("train_step", grid=1, block=64)
folders = [os.path.join(sys.argv[1], str(n)) for n in range(3)]
for folder in folders:
    os.mkdir(folder)
def floats(value):
    return array.array("f", [value] * 64).tobytes()
def life(fabric, steps):
    said = []
    with fabric.gpu(min_vram="60GiB", ttl="60s", renew="always") as lease:
        checkpoint, idempotency = training.training_records("runs", folders, lease, fabric=fabric)
        for step in steps:
            batch = training.TrainingBatch(
                job_id="job", step=step, input=floats(step), output_len=256, initial=floats(0.0))
            done = training.run_training_step(lease, checkpoint, idempotency, batch, SOURCE, KERNEL, kind="cuda")
            value = list(array.array("f", done.state)) if isinstance(done, training.Completed) else []
            said.append([type(done).__name__, value[0] if len({*value}) == 1 else value])
        fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
        while lease.end is None:  # the news of it comes on a connection of its own
            time.sleep(0.02)
        try:
            training.run_training_step(lease, checkpoint, idempotency, batch, SOURCE, KERNEL, kind="cuda")
        except sublet.SubletError as error:
            said.append(type(error).__name__)
        checkpoint.close()
    return [*said, lease.devices[0].id]
with sublet.connect() as fabric:
    print(json.dumps([life(fabric, (1, 2)), life(fabric, (2, 3, 4))]))
"""

COMPUTES: Final = """
import array, json
import sublet
from sublet.testing.device_conformance import CUDA_KERNELS
with sublet.connect() as fabric, fabric.gpu(min_vram="60GiB") as lease, sublet.GpuSession(lease) as gpu:
    x, y = gpu.mem_alloc(400), gpu.mem_alloc(400)
    gpu.mem_write(x, 0, array.array("f", range(100)).tobytes())
    gpu.mem_fill(y, 0, 400, 0)
    module = gpu.module_load(CUDA_KERNELS, kind="cuda")
    gpu.launch(module, "axpy", 1, 128, [sublet.f32(2.0), x, y, sublet.u32(100)])
    gpu.sync()
    print(json.dumps([list(array.array("f", bytes(gpu.mem_read(y, 0, 400)))), lease.devices[0].id]))
"""

GOES_ON: Final = """
import builtins, json, os, time
import sublet
SIZE = 64 << 20
def begun():
    from sublet.devices.cuda_driver import open_driver
    driver = open_driver()
    device = driver("t", "cuDeviceGet", 0)
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
    memory = driver("t", "cuMemAlloc", SIZE)
    driver("t", "cuMemsetD8", memory, 0x5A, SIZE)
    builtins.kept = driver, device, memory
    return seen()
def seen():
    driver, device, memory = builtins.kept
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
    back = bytearray(SIZE)
    driver("t", "cuMemcpyDtoH", back, memory, SIZE)
    uuid = bytes(driver("t", "cuDeviceGetUuid", device).bytes).hex()
    return os.getpid(), back == bytes([0x5A]) * SIZE, uuid, sublet.device()
def taken(lease, count):
    other = fabric.gpu(min_vram="60GiB", count=count, ttl="60s", wait="60s", renew="always")
    while lease.end is None:  # the news of it comes on a connection of its own
        time.sleep(0.02)
    return other
said = []
with sublet.connect() as fabric:
    lease = fabric.gpu(min_vram="60GiB", ttl="60s", spot=True, renew="always")
    said.append([lease.devices[0].id, lease.run(begun)])
    taken(lease, 4).release()
    said.append(str(lease.end.way))
    again = fabric.gpu(resume=lease, ttl="60s", wait="60s", renew="always")
    said.append([again.devices[0].id, again.run(seen)])
    other = taken(again, 4)
    said.append(str(again.end.way))
    other.release()
    kept = []
    while not kept or kept[-1].devices[0].id != again.devices[0].id:  # the card it came from is not to be had
        kept.append(fabric.gpu(min_vram="60GiB", ttl="60s", wait="60s", renew="always"))
    for one in kept[:-1]:
        one.release()
    moved = fabric.gpu(resume=again, ttl="60s", wait="60s", renew="always")
    said.append([moved.devices[0].id, moved.run(seen)])
    moved.release()
    kept[-1].release()
print(json.dumps(said))
"""

SETS_A_LIMIT: Final = """
import sys
import pynvml
pynvml.nvmlInit()
pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1]), int(sys.argv[2]))
print("null")
"""
"""As `nvidia-smi -pl` does."""

PARKS: Final = """
import json, time
import sublet
def begun():
    from sublet.devices.cuda_driver import open_driver
    driver = open_driver()
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
with sublet.connect() as fabric:
    lease = fabric.gpu(min_vram="60GiB", ttl="60s", spot=True, renew="always")
    lease.run(begun)
    fabric.gpu(min_vram="60GiB", count=4, ttl="60s", wait="60s", renew="always").release()
    while lease.end is None:
        time.sleep(0.02)
    fabric.gpu(resume=lease, ttl="60s", wait="60s", renew="always").release()
    print(json.dumps(str(lease.end.way)))
"""

LOADS: Final = """
import json, sys, warnings
import sublet
SOURCE = "extern \\"C\\" __global__ void nothing() {}"
PTX = ".version 8.0 .target sm_70 .entry nothing() {}"
with sublet.connect() as fabric, fabric.gpu(min_vram="1GiB", ttl="60s", renew="always") as lease:
    for _ in sys.stdin:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            gpu = sublet.GpuSession(lease)
        with gpu:
            said = [[str(one.message) for one in warned]]
            assert list(gpu.limits) == said[0], gpu
            for kind, text in (("cuda", SOURCE), ("ptx", PTX)):
                try:
                    gpu.module_unload(gpu.module_load(text, kind=kind))
                    said.append("")
                except sublet.SubletError as error:
                    said.append(f"{type(error).__name__}: {error.message} {error.do}")
        print(json.dumps(said), flush=True)
"""
"""Says for each line of what it was warned at the beginning, and what became of CUDA C++ and of PTX of an older CUDA.
"""

SAVES: Final = """
import json, time
import sublet
def begun():
    from sublet.devices.cuda_driver import open_driver
    driver = open_driver()
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
    driver("t", "cuMemAlloc", 1 << 20)
    here, durable = sublet.current(), sublet.Durable
    @here.on_checkpoint
    def save():
        with durable("saved before", here.volume) as state:
            state.checkpoint()
with sublet.connect() as fabric:
    block = fabric.block("4MiB", name="before", renew="always")
    lease = fabric.gpu(min_vram="60GiB", ttl="60s", spot=True, renew="always")
    lease.options(volume=block).run(begun)
    fabric.gpu(min_vram="60GiB", count=4, ttl="60s", wait="60s", renew="always").release()
    while lease.end is None:
        time.sleep(0.02)
    print(json.dumps(sublet.Durable.restore(block).value))
    block.release()
"""

TAKES_MORE: Final = """
import time
from sublet.devices.cuda_driver import open_driver
driver = open_driver()
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
driver("t", "cuMemAlloc", 8 << 30)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def rig(rig_place: Path) -> Iterator[Rig]:
    with forking_rig(rig_place, FOUR_H100) as made:
        made.state.lingers_ms = SOON_MS
        yield made


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory, rig: Rig) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("office"))
    shell.env |= rig.env
    (shell.home / "policy.toml").write_text("[office]\ncount_launches = true\n")
    with quick_office(shell.home, rig.env):
        yield shell
        shell.end()


@pytest.fixture(scope="module")
def notebook(office: Shell) -> Iterator[Cells]:
    """One for all tests, as a person has it: what it imports takes longer than most of them."""
    with start_piped([sys.executable, "-c", NOTEBOOK], office.env, stdin=subprocess.PIPE, stderr=None) as process:

        def said(cells: Sequence[str]) -> Any:
            assert process.stdin is not None
            process.stdin.write(json.dumps(cells).encode() + b"\n")
            process.stdin.flush()
            while not (line := first_line(process)).startswith(b"["):  # and what the cells print
                assert line, "it has ended"
            return json.loads(line)[0]

        yield said
        process.kill()


@pytest.fixture
def sublet(office: Shell) -> Iterator[Shell]:
    yield office
    release_all(office.home)
    until(lambda: all(map(is_free, cards_of(office))), WAIT_S)


def is_free(card: dict[str, Any]) -> bool:
    """Whether anybody may have all of it: nothing is lent, torn down or quarantined there."""
    return bool(card["state"] == "free" and card["free"] == card["capacity"] and not card["leases"])


def answer_of(sublet: Shell, path: str) -> Any:
    """A command for each look would take longer than what is waited for."""
    line = Line(socket_path(sublet.home.resolve()))
    try:
        answer = line.ask(Call(method="GET", path=path))
    finally:
        line.close()
    assert answer is not None
    assert answer.status == 200, answer
    return answer.doc


def cards_of(sublet: Shell) -> list[dict[str, Any]]:
    return [device for device in answer_of(sublet, "/v1/status")["devices"] if device["kind"] == "gpu"]


def index_of(rig: Rig, name: str) -> int:
    """Which card of the machine this is, by a name of whatever form."""
    digits = name.rpartition("GPU-")[2].replace("-", "")
    return [bytes(card.uuid).hex() for card in rig.state.cards].index(digits)


def test_the_office_lends_the_cards_that_the_driver_shows(sublet: Shell, rig: Rig) -> None:
    assert sorted(index_of(rig, card["id"]) for card in cards_of(sublet)) == [0, 1, 2, 3]
    assert all("H100" in card["model"] for card in cards_of(sublet))


def test_top_shows_every_card_and_the_one_that_is_leased(sublet: Shell, rig: Rig) -> None:
    process, said = using_a_card(sublet)
    shown = sublet.json("top")
    finished(process)
    cards = {index_of(rig, one["id"]): one for one in shown["status"]["devices"] if one["kind"] == "gpu"}
    assert sorted(cards) == [0, 1, 2, 3]
    assert [index for index, card in cards.items() if card["leases"]] == [index_of(rig, said["uuid"])]


def test_two_cards_every_guest_uses_the_card_of_its_lease(sublet: Shell, rig: Rig) -> None:
    """All but workers used the first card of the machine, and were ended for it."""
    running = [using_a_card(sublet) for _ in range(2)]
    for _, said in running:
        assert index_of(rig, said["uuid"]) == index_of(rig, said["leased"][0])
        assert said["device"] == "cuda:0"
    assert len({said["uuid"] for _, said in running}) == 2
    for process, said in running:
        assert rig.dirty(index_of(rig, said["uuid"]))
        done = finished(process)
        assert done.status == 0, done


def test_one_process_for_each_card_and_its_own_is_number_local_rank(sublet: Shell, rig: Rig) -> None:
    """Whatever cards its holder was kept to: programs for torchrun take card LOCAL_RANK, and all number them alike."""
    kept = {"CUDA_VISIBLE_DEVICES": rig.card(3).name}
    words = ("run", "--gpus", "3", "--gpu", "60GiB", "--per-device", "--", sys.executable, "-c", USES_ITS_OWN_CARD)
    done = sublet(*words, env=sublet.env | kept)
    assert done.status == 0, done
    found = sorted((json.loads(line) for line in done.out.splitlines()), key=lambda one: one["rank"])
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert [one["device"] for one in found] == ["cuda:0", "cuda:1", "cuda:2"]
    assert len({one["visible"] for one in found}) == 1
    leased = [index_of(rig, name) for name in found[0]["leased"]]
    assert [index_of(rig, one["uuid"]) for one in found] == leased


def test_a_map_over_several_cards_has_a_worker_on_each(office: Shell, sublet: Shell, rig: Rig) -> None:
    """Each finds its own card first: functions write "cuda" and count no cards."""
    found, leased = printed(office, MAPS)
    assert [device for _, device in found] == ["cuda:0", "cuda:0"]
    assert [index_of(rig, uuid) for uuid, _ in found] == [index_of(rig, name) for name in leased]


def printed(office: Shell, program: str, *arguments: str) -> Any:
    """What a program of a user prints last, as JSON."""
    done = run_program(program, *arguments, env=office.env, timeout=WAIT_S)
    assert done.status == 0, done.err.decode()
    return json.loads(done.out.splitlines()[-1])


def test_a_session_computes_on_the_card_of_its_lease(office: Shell, sublet: Shell, rig: Rig) -> None:
    """Compiled by NVRTC, loaded and launched through the true bindings."""
    found, leased = printed(office, COMPUTES)
    assert found == [2.0 * i for i in range(100)]
    index = index_of(rig, leased)
    until(lambda: is_free(card_of(sublet, rig, index)), WAIT_S)
    assert not rig.dirty(index)


def test_training_goes_on_under_the_next_lease_with_the_state_of_the_last_step(
    office: Shell, sublet: Shell, rig: Rig, tmp_path: Path
) -> None:
    """Its kernel runs on the leased card; a step that was done is not done again."""
    (*first, card), (*second, other) = printed(office, TRAINS, str(tmp_path))
    assert first == [["Completed", 0.5], ["Completed", 1.25], "LeaseNotActive"]
    assert second == [["Duplicate", []], ["Completed", 2.125], ["Completed", 3.0625], "LeaseNotActive"]
    until(lambda: all(map(is_free, cards_of(sublet))), WAIT_S)
    assert not any(rig.dirty(index_of(rig, name)) for name in (card, other))


def test_a_cell_of_a_notebook_computes_on_the_card_of_its_lease(sublet: Shell, rig: Rig, notebook: Cells) -> None:
    uuid, device, leased, y = notebook(CELLS)
    assert (device, y) == ("cuda:0", 4)
    assert index_of(rig, uuid) == index_of(rig, leased)


def test_launches_of_frameworks_are_counted_where_the_operator_says_so(
    office: Shell, sublet: Shell, notebook: Cells
) -> None:
    """By CUPTI, each once, also one of a session in the same guest."""
    for lease, count in ((printed(office, LAUNCHES_IN_A_WORKER), 6008), (notebook(LAUNCHES_IN_A_CELL), 5)):
        line = billed(office, lease)
        assert (line["launches"], line["uncounted"]) == (count, 0), count


def test_launches_are_not_counted_where_cupti_traces_nothing(
    office: Shell, sublet: Shell, rig: Rig, notebook: Cells
) -> None:
    trouble = rig.trouble("cuptiActivityEnable", code=14)
    try:
        line = billed(office, notebook(LAUNCHES_IN_A_CELL))
    finally:
        clear(trouble)
    assert (line["launches"], line["uncounted"]) == (None, 1)


def billed(office: Shell, lease: str) -> Any:
    """What the bill says of a lease, once it has ended."""
    release_all(office.home)
    until(lambda: all(map(is_free, cards_of(office))), WAIT_S)
    (line,) = (line for line in office.json("bill") if line["key"] == lease)
    return line


@SECOND
def test_a_program_goes_on_with_its_memory_on_the_same_card_and_on_another(
    office: Shell, sublet: Shell, rig: Rig
) -> None:
    """Taken twice by a higher tier that wants every card: nobody else's bytes are ever on what it gives back."""
    first, way, again, second_way, moved = printed(office, GOES_ON)
    assert (way, second_way) == ("suspend", "suspend")
    pid = first[1][0]
    for leased, (now, is_same, uuid, device) in (first, again, moved):
        assert (now, is_same, device) == (pid, True, "cuda:0")
        assert index_of(rig, uuid) == index_of(rig, leased)
    assert moved[0] != again[0]


@SECOND
def test_a_guest_saves_before_the_driver_is_asked_to_suspend_it(office: Shell, sublet: Shell, rig: Rig) -> None:
    """NVIDIA promises nothing for a process in which that fails: what it had not saved by then was lost with it."""
    broken = [rig.trouble(f"cuCheckpointProcess{step}", code=999) for step in ("Checkpoint", "Unlock")]
    value = printed(office, SAVES)
    assert all(row.met for row in broken), "it was asked to, failed, and could not undo it: the guest is lost"
    for row in broken:
        clear(row)
    assert value == "saved before"


@SECOND
def test_a_guest_is_warned_once_before_it_is_ended_for_memory(sublet: Shell, rig: Rig) -> None:
    """XLA, TensorFlow and vLLM take most of a card at their first line, and were ended before anything was said."""
    done = sublet("run", "--gpu", "1GiB", "--shared", "--", sys.executable, "-c", TAKES_MORE)
    assert done.status != 0
    warned, ended = (line for line in done.err.splitlines() if "the lease has 1GiB" in line)
    assert "it is ended if it has not freed some" in warned
    assert ended.endswith("(out_of_memory)")


@SECOND
def test_a_card_is_free_again_when_nothing_of_anybody_is_left_on_it(sublet: Shell, rig: Rig) -> None:
    """Whether the guest ends by itself or is killed. What it had lingers for a moment, and is waited for."""
    rig.state.lingers_ms = rig.personality.machine["lingers_ms"]
    for end in (finished, killed):
        process, said = using_a_card(sublet)
        index = index_of(rig, said["uuid"])
        assert rig.dirty(index)
        end(process)
        release_all(sublet.home)
        until(lambda: is_free(card_of(sublet, rig, index)), WAIT_S)  # noqa: B023
        assert not rig.dirty(index)
    rig.state.lingers_ms = SOON_MS


@SECOND
def test_a_card_that_cannot_be_overwritten_is_lent_to_nobody_until_an_operator_vouches(sublet: Shell, rig: Rig) -> None:
    process, said = using_a_card(sublet)
    index = index_of(rig, said["uuid"])
    broken = rig.trouble("cuMemsetD8_v2", code=1)
    finished(process)
    release_all(sublet.home)
    (fence,) = until(lambda: [one for one in answer_of(sublet, "/v1/fences") if one["hard"]], WAIT_S)
    clear(broken)
    assert index_of(rig, fence["resource"]) == index
    assert "could not be overwritten" in fence["detail"]
    assert rig.dirty(index)
    refused = sublet("run", "--gpus", "4", "--gpu", "1GiB", "--no-wait", "--", "true")
    assert refused.status == 75, refused
    before, limit = rig.card(index).power_mw, 600_000
    rig.card(index).power_mw = limit
    vouched = sublet("fence", "clear", fence["resource"], "--vouch")
    assert vouched.status == 0, vouched
    done = sublet("run", "--gpus", "4", "--gpu", "1GiB", "--", "true")
    assert done.status == 0, done
    release_all(sublet.home)
    until(lambda: all(map(is_free, cards_of(sublet))), WAIT_S)
    assert rig.card(index).power_mw == limit, "what the operator set meanwhile is theirs"
    rig.card(index).power_mw = before


@SECOND
def test_a_fault_of_the_hardware_quarantines_and_a_fault_of_a_program_does_not(sublet: Shell, rig: Rig) -> None:
    """Any tenant can bring about those of programs."""
    await_the_watch(rig)
    for number in (13, 31, 109, 137, 154):
        rig.xid(0, number)
    rig.xid(1, 94)  # contained
    rig.card(1).uncorrected += 1
    rig.xid(2, 79)
    until(lambda: "Xid 79" in card_of(sublet, rig, 2)["detail"], WAIT_S)
    assert is_free(card_of(sublet, rig, 0))
    assert is_free(card_of(sublet, rig, 1))
    vouched = sublet("fence", "clear", card_of(sublet, rig, 2)["id"], "--vouch")
    assert vouched.status == 0, vouched


@SECOND
def test_a_power_limit_that_an_operator_sets_during_a_lease_quarantines_no_card(sublet: Shell, rig: Rig) -> None:
    """`nvidia-smi -pl`. Guests of root may have done it, so root's office sets it back, and notes that it could not.
    The next lease begins with the operator's limit, and ends with it: the first one ever seen was set again."""
    is_root = os.geteuid() == 0
    await_the_watch(rig)
    known = rig.trouble("nvmlShutdown")
    process, said = using_a_card(sublet)
    index = index_of(rig, said["uuid"])
    until(lambda: known.met or not is_root, WAIT_S)  # by what looked at the settings when it was lent
    clear(known)
    before, limit = rig.card(index).power_mw, 500_000
    run_on(rig, SETS_A_LIMIT, rig.card(index).name, str(limit))
    refused = rig.trouble("nvmlDeviceSetPowerManagementLimit", code=NO_PERMISSION)
    finished(process)
    release_all(sublet.home)
    until(lambda: is_free(card_of(sublet, rig, index)), WAIT_S)  # which no operator has vouched for
    clear(refused)
    note = f"its power limit was changed to {limit}, and does not go back to {before}"
    assert (note in (sublet.home / "supervisor.log").read_text()) == is_root
    done = sublet("run", "--gpus", "4", "--gpu", "1GiB", "--", "true")
    assert done.status == 0, done
    release_all(sublet.home)
    until(lambda: all(map(is_free, cards_of(sublet))), WAIT_S)
    assert rig.card(index).power_mw == limit
    rig.card(index).power_mw = before


@SECOND
def test_a_card_can_be_reset_under_an_office_that_quarantined_it_or_is_drained(
    office: Shell, sublet: Shell, rig: Rig
) -> None:
    """`nvidia-smi -r`, which `sublet` itself advises, said that the card is in use: by the watch over the cards, and by
    the helper that suspends guests."""
    assert printed(office, PARKS) == "suspend"  # so there is such a helper
    await_the_watch(rig)
    assert not rig.can_be_reset()
    rig.card(0).remap_failed = 1
    until(lambda: card_of(sublet, rig, 0)["state"] == "quarantined", WAIT_S)
    rig.card(0).remap_failed = 0  # as a new card has it: the next look is to find no fault
    until(rig.can_be_reset, WAIT_S)
    vouched = sublet("fence", "clear", card_of(sublet, rig, 0)["id"], "--vouch")
    assert vouched.status == 0, vouched
    await_the_watch(rig)
    assert not rig.can_be_reset()
    (node,) = sublet.json("status")["nodes"]
    drained = sublet("drain", node["id"])
    assert drained.status == 0, drained
    until(rig.can_be_reset, WAIT_S)
    undone = sublet("drain", node["id"], "--undo")
    assert undone.status == 0, undone


@SECOND
def test_a_look_that_began_before_the_end_of_a_teardown_makes_no_free_card_look_full(sublet: Shell, rig: Rig) -> None:
    """What it saw of the lease that has ended since counted as that of others, until the next look."""
    process, said = using_a_card(sublet)
    index = index_of(rig, said["uuid"])
    office = int(sublet.json("status")["pid"])
    # The last question of a look: of the second one from now, which begins when the memory is surely in use.
    looks = rig.trouble("nvmlEventSetWait_v2", pid=office, hangs=1, skip=1)
    until(lambda: looks.met == 2, WAIT_S)
    finished(process)
    release_all(sublet.home)
    until(lambda: is_free(card_of(sublet, rig, index)), WAIT_S)
    looks.hangs = 0

    def is_corrected() -> bool:
        assert is_free(card_of(sublet, rig, index)), card_of(sublet, rig, index)
        return bool(looks.met > 2)  # the next look is nearly over

    until(is_corrected, WAIT_S)
    clear(looks)


def test_compiling_begins_cuda_in_the_guest_and_nowhere_else(office: Shell, sublet: Shell) -> None:
    """NVRTC initializes CUDA where a driver is: a holder would be refused its next call, an office keep every card."""
    pid = str(sublet.json("status")["pid"])
    supervisor = str(supervisor_of(runtime_dir(sublet.home.resolve())))
    assert printed(office, COMPILES, pid, supervisor) == [False, False, False, True]


def test_drivers_570_and_575_are_told_which_driver_runs_what_a_session_compiles(sublet: Shell, rig: Rig) -> None:
    """When the session opens. The driver was asked to load it, and named the image. PTX of an older CUDA runs there. Of
    a card that the compiler does not know any more it was said to fix the source."""
    needs = r"the driver speaks CUDA {}, and {} compiled by CUDA 13\.\d+ needs a driver of CUDA 13\.0"
    capability, cuda = [(card.major, card.minor) for card in rig.state.cards], rig.state.cuda
    with start_piped([sys.executable, "-c", LOADS], sublet.env, stdin=subprocess.PIPE) as process:

        def said() -> Any:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            line = first_line(process)
            assert line, finished(process)
            return json.loads(line)

        try:
            for version, text in ((12_080, "12\\.8"), (12_090, "12\\.9")):
                rig.state.cuda = version
                (cuda_cpp, warp), source, ptx = said()
                assert re.match(needs.format(text, r"CUDA C\+\+"), cuda_cpp)
                assert re.match(needs.format(text, "Warp"), warp)
                assert source.startswith(f"Unsupported: module_load: {cuda_cpp}"), source
                assert ptx == ""
            rig.state.cuda = cuda
            for card in rig.state.cards:
                card.major, card.minor = 7, 0
            warned, source, _ = said()
            assert warned == []
        finally:
            rig.state.cuda = cuda
            for card, (major, minor) in zip(rig.state.cards, capability, strict=True):
                card.major, card.minor = major, minor
        assert "does not compile for compute capability 7.0 any more" in source
        assert "Fix the source" not in source
        assert said() == [[], "", ""]
        done = finished(process)
        assert done.status == 0, done


def test_doctor_says_which_cards_there_are(sublet: Shell) -> None:
    done = sublet("doctor")
    assert "driver 580.65.06: 4 × NVIDIA H100 80GB HBM3" in done.out.decode()


def using_a_card(sublet: Shell) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """A command on most of a card, and what it found there. It ends with its input."""
    words = ("run", "--gpu", "60GiB", "--", sys.executable, "-c", USES_A_CARD)
    process = sublet.start(*words, stdin=subprocess.PIPE)
    line = first_line(process)
    assert line, finished(process)
    return process, json.loads(line)


def killed(process: subprocess.Popen[bytes]) -> None:
    """Its holder, with no time to say anything."""
    process.kill()
    process.communicate()


def await_the_watch(rig: Rig) -> None:
    """Until the office keeps the driver open between two looks: while a card is quarantined it does not, and what is
    reported between them goes unseen."""
    looks, closed = rig.trouble("nvmlEventSetWait_v2"), rig.trouble("nvmlEventSetFree")

    def stays_open() -> bool:
        looked, was_closed = looks.met, closed.met
        until(lambda: looks.met >= looked + 2, WAIT_S)
        return bool(closed.met == was_closed)

    until(stays_open, WAIT_S)
    clear(looks)
    clear(closed)


def card_of(sublet: Shell, rig: Rig, index: int) -> dict[str, Any]:
    return next(card for card in cards_of(sublet) if index_of(rig, card["id"]) == index)


def test_doctor_tries_out_every_card(sublet: Shell, rig: Rig, tmp_path: Path) -> None:
    """With the time of each step, and what each card may do; all of it in a file for an issue."""
    report = tmp_path / "report.txt"
    secrets = {"HF_TOKEN": "hf_XvYzWq", "SUBLET_WARM_PASSWORD": "correct-horse", "NVIDIA_API_KEY": "nvapi-0123"}
    done = sublet("doctor", "--gpu", "--json", "--report", str(report), env=sublet.env | secrets)
    assert done.status == 0, done
    found = {one["subject"]: one for one in json.loads(done.out)}
    assert "driver 580.65.06 (CUDA 13.0)" in found["GPU versions"]["text"]
    assert "no MPS" in found["GPU surroundings"]["text"]
    assert found["GPUs of the office"]["text"] == "it has every card and part that is here"
    assert "nothing keeps it from opening others; one with memory there is warned" in found["GPU guests"]["text"]
    for index in range(4):
        card = found[f"card {index}"]
        assert card["state"] == "ok"
        assert rig.card(index).name in card["text"]
        for said in ("lent", "scrub: yes", "watch of VRAM: yes", "compute mode DEFAULT", "persistence on", "CUDA 0."):
            assert said in card["text"], said
    text = report.read_text()
    assert all(rig.card(index).name in text for index in range(4))
    assert str(Path.home()) + "/" not in text
    assert not any(secret in text for secret in secrets.values())
    again = sublet("doctor", "--gpu", "--report", str(report))
    assert again.status == 2, again
    assert report.read_text() == text, "a file that is there is not written over"


def test_a_card_that_came_after_the_office_is_one_that_doctor_knows(sublet: Shell, rig: Rig) -> None:
    """A part of one that was split, say: it was lent by none, and nothing said so."""
    new = rig.state.cards[4]
    new.uuid[:], new.model, new.memory, new.present = bytes(range(16)), rig.card(3).model, rig.card(3).memory, 1
    try:
        done = sublet("doctor", "--json")
    finally:
        new.present = 0
    found = {one["subject"]: one for one in json.loads(done.out)}["GPUs of the office"]
    assert found["state"] == "note"
    assert found["text"] == f"{new.name}: not among the devices of the office that runs"
    assert "`sublet down` and `sublet up`" in found["do"]


def test_doctor_says_what_helps_where_no_card_can_be_used(sublet: Shell, rig: Rig) -> None:
    rig.state.init_code = 802
    done = sublet("doctor", "--gpu", "--json")
    rig.state.init_code = 0
    assert done.status == 1
    found = {one["subject"]: one for one in json.loads(done.out)}
    assert found["card 0"]["state"] == "broken"
    assert "not lent" in found["card 0"]["text"]
    assert "fabricmanager" in found["card 0"]["do"]
