"""Random troubles of the driver's entry points, from a seed: no card is called clean with bytes of others on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Final

import pytest

from sublet.devices.plain_cuda import CALLS
from sublet.values import MIB
from tests.rig.personalities import FOUR_H100, PARTS, Personality
from tests.rig.rig import NewRig
from tests.rig.test_interface import SOURCES, exported, named_in_sources, run_on, symbols_of_nvml

pytestmark = pytest.mark.needs("gcc")

ROUNDS: Final = max(1, int(os.environ.get("SUBLET_RIG_SEEDS", "100")) // 100)
AS_IT_IS: Final = ("cuGetErrorString", "cuGetProcAddress", "nvmlErrorString")
SEEDS: Final = int(os.environ.get("SUBLET_RIG_SEEDS", "100"))
"""Of the schedules; the soak has 20,000."""

PLAYS: Final = """
import json, random, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from sublet.devices.cuda_driver import find_device
from sublet.devices.plain_cuda import open_plain_driver
from sublet.errors import SubletError
from sublet.node.agent.clean_card import clean
from sublet.node.agent.foreign import Own
from sublet.node.agent.health import CardWatch
from sublet.node.agent.inventory import machine_inventory
from sublet.node.agent.nvml import CARD_BROKEN, Nvml
from sublet.wire.orders import Fault
from tests.rig.personalities import FOUR_H100
from tests.rig.rig import Rig, clear

rig = Rig(Path(sys.argv[2]), FOUR_H100)
calls = json.loads(sys.argv[3])
CODES = {"cu": (1, 2, 3, 46, 100, 101, 201, 700, 719, 802, 999, 12_345),
         "nv": (1, 2, 3, 4, 9, 10, 15, 16, 19, 21, 25, 26, 29, 999, 12_345)}
BROKEN = {1, 9, 10, 15, 16, *CARD_BROKEN}
REQUIRED = {"nvmlInit_v2", "nvmlInitWithFlags", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"}
inventory = machine_inventory(Path("/tmp"), None)
driver = open_plain_driver()
counted = {"clean": 0, "left": 0, "hard": 0, "faults": 0, "met": 0}

def leave(card, rng):
    device = find_device(driver, card.name)
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
    driver("t", "cuMemsetD8", driver("t", "cuMemAlloc", 1 << 20), 1 + rng.randrange(255), 1 << 20)
    while driver.call_or_none("cuDevicePrimaryCtxRelease", device) is not None:
        pass

def play(seed):
    rng = random.Random(seed)
    index = rng.randrange(4)
    card = rig.card(index)
    leave(card, rng)
    assert rig.dirty(index)
    rows, may_be_faulty, may_be_hard = [], False, False
    for _ in range(rng.randint(1, 3)):
        call = rng.choice(calls)
        how = {"skip": rng.choice((0, 0, 1, 2, 5)), "times": rng.choice((0, 1, 2))}
        kind = rng.randrange(3)
        if kind < 2:
            how["code"] = rng.choice(CODES[call[:2]])
        else:
            how |= {"hangs": 1, "times": 1}
        row = rig.trouble(call, **how)
        rows.append(row)
        if kind < 2:
            may_be_hard |= call[:2] == "cu" or how["code"] in CARD_BROKEN
            may_be_faulty |= call[:2] == "nv" and (how["code"] in BROKEN or call in REQUIRED)
        else:
            threading.Timer(rng.uniform(0, 0.02), setattr, (row, "hangs", 0)).start()
    found = clean(card.name, sees_processes=True, node="", sleep=lambda _: None)
    if not found.left and not found.failed:
        assert not rig.dirty(index), "called clean"
        counted["clean"] += 1
    else:
        assert found.left or (found.is_hard and may_be_hard), found
        counted["left" if found.left else "hard"] += 1
    watch = CardWatch(inventory, own=lambda resource: Own(), sees_processes=True, name_of=lambda pid: ("", ""))
    faults = [one for look in range(3) for one in watch.judge(watch.read_cards(), look) if isinstance(one, Fault)]
    watch.close()
    assert not faults or may_be_faulty, faults
    counted["faults"] += bool(faults)
    for row in rows:
        counted["met"] += row.met > 0
        clear(row)
    device = find_device(driver, card.name)
    while driver.call_or_none("cuDevicePrimaryCtxRelease", device) is not None:
        pass
    again = clean(card.name, sees_processes=True, node="", sleep=lambda _: None)
    assert (again.left, again.failed) == ("", ""), again
    assert not rig.dirty(index)

for seed in range(int(sys.argv[4])):
    try:
        play(seed)
    except BaseException:
        sys.stderr.write(f"seed {seed}\\n")
        raise
print(json.dumps(counted))
"""


def test_whatever_the_driver_answers_no_card_with_bytes_of_others_is_called_clean(new_rig: NewRig) -> None:
    """Nor is a card at fault for an answer that says nothing of it; and when the driver is well, so is the card."""
    rig = new_rig(FOUR_H100)
    for index in range(4):  # small ones: where large pieces are refused, they are overwritten in many small ones
        card = rig.card(index)
        card.memory, card.reserved, card.context = 512 * MIB, 32 * MIB, 32 * MIB
    calls = sorted(
        name
        for library in ("libcuda.so.1", "libnvidia-ml.so.1")
        for name in exported(library)
        if name[:2] in ("cu", "nv") and not name.startswith(AS_IT_IS)
    )
    met = run_on(
        rig, PLAYS, str(SOURCES.parents[1]), str(rig.folder), json.dumps(calls), str(SEEDS), limit_s=60.0 + SEEDS
    )
    assert min(met.values()) > 0, f"each kind of outcome is met: {met}"
    assert sum(met[kind] for kind in ("clean", "left", "hard")) == SEEDS


# ---- sessions, suspends, looks: each entry point with each kind of fault ----

STORIES: Final = """
import array, ctypes, json, os, random, select, shutil, socket, sys, tempfile, threading, time, traceback
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import cuda.bindings.driver, cuda.bindings.nvrtc, pynvml, sublet.devices.cuda  # once, for all that is forked
cuda.bindings.nvrtc.nvrtcVersion()  # loads the compiler; CUDA begins only where it compiles
from sublet.compute.arguments import u32
from sublet.compute.session import GpuSession
from sublet.compute.session_engine import Engine
from sublet.compute.session_line import DeviceLine
from sublet.devices.cuda_driver import open_driver
from sublet.devices.plain_cuda import open_plain_driver
from sublet.devices.primary_contexts import contexts, loaded_driver
from sublet.devices.suspend import Suspender, answer
from sublet.errors import SubletError
from sublet.node.agent.clean_card import clean, read_settings
from sublet.node.agent.foreign import Own
from sublet.node.agent.health import CardWatch
from sublet.node.agent.inventory import machine_inventory
from sublet.node.agent.nvml import CARD_BROKEN, Nvml, survey
from sublet.node.agent.rehearsal import rehearse
from sublet.testing.device_conformance import CUDA_KERNELS
from sublet.values import MIB
from sublet.wire.conversation import Conversation
from sublet.wire.link import Link
from sublet.wire.orders import Fault
from tests.gpu import far_end
from tests.rig.personalities import FOUR_H100
from tests.rig.rig import Rig, clear

CODES = {"cu": (1, 2, 3, 46, 100, 101, 201, 700, 719, 802, 999, 12_345),
         "nv": (1, 2, 3, 4, 9, 10, 15, 16, 19, 21, 25, 26, 29, 999, 12_345)}
BROKEN = {1, 9, 10, 15, 16, *CARD_BROKEN}
REQUIRED = {"nvmlInit_v2", "nvmlInitWithFlags", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"}
KINDS = ("code", "delay", "hang")
LONGEST_S = 60.0
rig = Rig(Path(sys.argv[2]), FOUR_H100)
story, calls, rounds, cards = sys.argv[3], json.loads(sys.argv[4]), int(sys.argv[5]), sys.argv[6:]
kernels = tempfile.mkdtemp()
os.environ["SUBLET_KERNEL_CACHE"] = kernels
inventory = machine_inventory(Path("/tmp"), None)
met = {}

def begun(act, *arguments):
    # In a process of its own, which says what came of it.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, 9)  # else one that hangs would keep the output open
        try:
            said = act(*arguments)
        except BaseException:
            said = {"crash": traceback.format_exc()}
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    return pid, reading

def outcome(process, row=None):
    pid, reading = process
    until_s, said = time.monotonic() + LONGEST_S, b""
    while True:
        if row is not None and row.hangs and row.met:
            time.sleep(0.01)
            row.hangs = 0
        if select.select([reading], [], [], 0.005)[0]:
            piece = os.read(reading, 65_536)
            if not piece:
                break
            said += piece
        assert time.monotonic() < until_s, "it hangs"
    os.close(reading)
    os.waitpid(pid, 0)
    found = json.loads(said)
    assert not isinstance(found, dict) or "crash" not in found, found["crash"]
    return found

def serves(fd, folder):
    try:
        far_end.main(fd, folder, 64 * MIB)
    except BaseException:  # a guest would end by it
        os.write(2, traceback.format_exc().encode())
        os._exit(3)

def computes(card, folder):
    end = far_end.FarEnd(Path(folder), card, cap_bytes=64 * MIB)
    ours, theirs = socket.socketpair()
    service = threading.Thread(target=serves, args=(theirs.detach(), folder), daemon=True)
    service.start()
    talk = Conversation(ours, Link.connecting())
    try:
        talk.greet(60)
        engine = Engine(DeviceLine(talk), far_end.LEASE, far_end.EPOCH, explain=far_end._explained)
        with GpuSession._over(engine) as gpu:
            x, y = gpu.mem_alloc(4096), gpu.mem_alloc(4096)
            gpu.mem_write(x, 0, bytes(4096))
            gpu.mem_fill(y, 0, 4096, b"\\1\\0")
            gpu.mem_fill(x, 0, 2048, b"\\3\\0\\0\\0")
            gpu.mem_copy(y, 0, x, 0, 1024)
            module = gpu.module_load(CUDA_KERNELS, kind="cuda")
            gpu.launch(module, "step", 1, 256, [x, u32(256), u32(2)])
            gpu.sync()
            first = list(array.array("I", gpu.mem_read(x, 0, 1024)))
            rest = gpu.mem_read(y, 0, 4096)
            gpu.module_unload(module)
            gpu.mem_free(x)
            gpu.sync()
            is_right = first == [6 + i for i in range(256)]
            is_right &= rest == b"\\3\\0\\0\\0" * 256 + b"\\1\\0" * 1536
    except SubletError as error:
        return {"error": error.message or "?"}
    finally:
        talk.hang_up()
        service.join(LONGEST_S)
        if service.is_alive():
            raise AssertionError("the far end hangs")
    return {"error": "", "is_right": is_right}

def play_session(rng, row, may_fail):
    card = rng.choice(cards)
    folder = tempfile.mkdtemp(dir=kernels)
    found = outcome(begun(computes, card, folder), row)
    shutil.rmtree(folder)
    assert found["is_right"] if not found["error"] else may_fail, found
    return card

def stays(card, asked, tells):
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    driver = open_plain_driver()
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
    memory = driver("t", "cuMemAlloc", 1 << 16)
    driver("t", "cuMemsetD8", memory, 0x5A, 1 << 16)
    os.write(tells, b"r")
    back = ctypes.create_string_buffer(1 << 16)
    os.read(asked, 1)
    driver("t", "cuMemcpyDtoH", ctypes.addressof(back), memory, 1 << 16)
    return back.raw == bytes([0x5A]) * (1 << 16)

def suspends(pid, resume):
    suspender = Suspender(open_driver())
    said = [] if resume else [answer(suspender, json.dumps({"do": "suspend", "pids": [pid]}))]
    if resume or "failed" not in said[0]:
        said.append(answer(suspender, json.dumps({"do": "resume", "pids": [pid]})))
    return said

def play_suspend(rng, row, may_fail):
    card = rng.choice(cards)
    (asked, asks), (told, tells) = os.pipe(), os.pipe()
    guest = begun(stays, card, asked, tells)
    os.read(told, 1)
    row.pid = 0
    said = outcome(begun(suspends, guest[0], False), row)
    failed = [one["failed"] for one in said if "failed" in one]
    assert not failed or may_fail, said
    clear(row)
    if failed:  # when the driver is well again, whatever had gone wrong goes on
        said = outcome(begun(suspends, guest[0], True))
        assert said == [{"done": [guest[0]]}], (failed, said)
    os.write(asks, b"s")
    assert outcome(guest) is True, "its memory is not what it was"
    for fd in (asked, asks, told, tells):
        os.close(fd)
    return card

def looks(cards):
    found, failed = survey(), []
    try:
        nvml = Nvml.open()
        for card in cards:
            reading = nvml.read(card)
            failed += [reading.failed.message] if reading.failed is not None else []
            nvml.modes(card)
        nvml.close()
    except SubletError as error:
        failed.append(error.message)
    failed += [one.message for one in found.troubles]
    read_settings(cards[-1])
    settings = json.dumps({"persistence mode": 1, "compute mode": 0, "power limit": 700_000})
    clean(cards[-1], settings=settings, sees_processes=True, node="", sleep=lambda _: None)
    failed += [rehearse(cards[-1]).failed]
    assert all(isinstance(one, str) for one in failed)
    return [one for one in failed if one]

def play_look(rng, row, may_fail):
    card = rig.card(1)  # of which a guest has changed all settings
    card.power_mw, card.compute_mode, card.persistence = 600_000, 3, 0
    failed = outcome(begun(looks, cards), row)
    assert not failed or may_fail, failed
    return cards[-1]

def is_used_and_cleaned(index):
    card = rig.card(index).name
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    try:
        driver = open_plain_driver()
        device = driver("t", "cuDeviceGet", 0)
        driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
        memory, back = driver("t", "cuMemAlloc", 4096), ctypes.create_string_buffer(4096)
        driver("t", "cuMemsetD8", memory, 0x5A, 4096)
        driver("t", "cuMemcpyDtoH", ctypes.addressof(back), memory, 4096)
        assert back.raw == bytes([0x5A]) * 4096
        assert contexts(loaded_driver()) in (0, 1)
        while driver.call_or_none("cuDevicePrimaryCtxRelease", device) is not None:
            pass
    except SubletError as error:
        return error.message
    found = clean(card, sees_processes=True, node="", sleep=lambda _: None)
    assert found.left or found.failed or not rig.dirty(index), "called clean"
    return found.left or found.failed

def play_card(rng, row, may_fail):
    index = rng.randrange(4)
    failed = outcome(begun(is_used_and_cleaned, index), row)
    assert not failed or may_fail, failed
    return rig.card(index).name

def cleaned(card):
    found = clean(card, sees_processes=True, node="", sleep=lambda _: None)
    return [found.left, found.failed]

def judged():
    watch = CardWatch(inventory, own=lambda resource: Own(), sees_processes=True, name_of=lambda pid: ("", ""))
    found = [one.detail for look in range(3) for one in watch.judge(watch.read_cards(), look) if isinstance(one, Fault)]
    watch.close()
    return found

PLAYS = {"session": play_session, "suspend": play_suspend, "card": play_card, "look": play_look}

def play(number, index):
    rng = random.Random(f"{number} {index}")
    call, kind = calls[index], KINDS[(number + index) % 3]
    how = {"skip": 0 if number < 3 else rng.choice((0, 0, 1, 2, 5)), "times": rng.choice((0, 1, 2))}
    if kind == "code":
        how["code"] = rng.choice(CODES[call[:2]])
    elif kind == "delay":
        how["delay_ms"] = rng.choice((1, 5, 20))
    else:
        how |= {"hangs": 1, "times": 1}
    rows = [rig.trouble(call, **how)]
    if call == "nvmlDeviceGetMemoryInfo":  # older drivers are asked this
        rows.append(rig.trouble(call + "_v2", code=3))
    rows += [rig.trouble(rng.choice(calls), delay_ms=rng.choice((1, 2)), times=2) for _ in range(rng.randrange(3))]
    try:
        card = PLAYS[story](rng, rows[0], kind == "code")
        if story == "look":
            faults, may_be = outcome(begun(judged), rows[0]), how.get("code") in BROKEN or call in REQUIRED
            assert not faults or may_be, faults
    finally:
        met[call, kind] = met.get((call, kind), 0) + bool(rows[0].met > how["skip"])
        for row in rows:
            clear(row)
    left, failed, *faults = outcome(begun(lambda: cleaned(card) + judged()))
    assert (left, failed) == ("", "")
    assert not [i for i in range(4) if rig.card(i).name in cards and rig.dirty(i)]
    assert faults == [], "an application's fault, or the driver's, is none of the card's"

for number in range(rounds):
    for index in range(len(calls)):
        try:
            play(number, index)
        except BaseException:
            sys.stderr.write(f"round {number}, {calls[index]} ({KINDS[(number + index) % 3]})\\n")
            raise
shutil.rmtree(kernels)
print(json.dumps([[*key, count] for key, count in sorted(met.items())]))
"""
"""A session in a process of its own, a process that is suspended and resumed, or what looks at cards. In each round
every entry point goes wrong once, in the next round in another way: by an error, a delay, a hang."""


CHECKPOINT: Final = "cuCheckpointProcess"
OF_A_CARD_ALONE: Final = (
    "cuCtxSynchronize",
    "cuDevicePrimaryCtxGetState",
    "cuMemGetInfo",
    "cuMemcpyDtoH_v2",
    "cuMemsetD8_v2",
)
"""What cleans a card calls these, what asks whether a holder has a context, and small programs: no session does."""
STORIES_OF: Final[dict[str, tuple[Personality, Callable[[str], bool]]]] = {
    "session": (FOUR_H100, lambda name: name.startswith("cu") and not name.startswith((CHECKPOINT, *OF_A_CARD_ALONE))),
    "card": (FOUR_H100, lambda name: name.startswith(OF_A_CARD_ALONE)),
    "suspend": (FOUR_H100, lambda name: name.startswith(CHECKPOINT)),
    "look": (PARTS, lambda name: name.startswith("nvml")),
}
"""The machine of each, and which entry points it meets."""


def entry_points() -> set[str]:
    """Those that the product's own code calls, as the driver's libraries have them. What says an error in words, and
    finds the others, stays as it is."""
    cuda = named_in_sources(r"cu[A-Z]\w+", (SOURCES,)) | {name + version for name, (version, _, _) in CALLS.items()}
    nvml = {symbol for name in named_in_sources(r"nvml[A-Z]\w+", (SOURCES,)) for symbol in symbols_of_nvml(name)}
    there = exported("libcuda.so.1")
    called = {name if name in there else f"{name}_v2" for name in cuda} & there
    called |= nvml & exported("libnvidia-ml.so.1")
    return {name for name in called if not name.startswith(AS_IT_IS)}


@pytest.mark.parametrize("story", STORIES_OF)
def test_each_entry_point_goes_wrong_in_each_way(new_rig: NewRig, story: str) -> None:
    """Nothing hangs, a program is told what it asked for or an error of ours, its card comes clean, and none is at
    fault."""
    personality, chosen = STORIES_OF[story]
    rig = new_rig(personality)
    rig.state.lingers_ms = 0
    for card in rig.state.cards:
        card.memory, card.reserved, card.context = min(card.memory, 24 * MIB), 2 * MIB, 4 * MIB
    calls = sorted(name for name in entry_points() if chosen(name))
    cards = [rig.card(index).name for index in ((2, 1) if personality is PARTS else range(4))]
    words = (str(SOURCES.parents[1]), str(rig.folder), story, json.dumps(calls), str(ROUNDS), *cards)
    met = {(call, kind): count for call, kind, count in run_on(rig, STORIES, *words, limit_s=60.0 + 60 * ROUNDS)}
    assert [key for key, count in met.items() if not count] == []
    assert len(met) == len(calls) * min(ROUNDS, 3)
