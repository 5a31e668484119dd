"""Random troubles of the driver's entry points, from a seed: no card is called clean with bytes of others on it."""

from __future__ import annotations

import json
import os
from typing import Final

import pytest

from sublet.values import MIB
from tests.rig.personalities import FOUR_H100
from tests.rig.rig import NewRig
from tests.rig.test_interface import SOURCES, exported, run_on

pytestmark = pytest.mark.needs("gcc")

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
        if name[:2] in ("cu", "nv") and not name.startswith(("cuGetErrorString", "cuGetProcAddress", "nvmlErrorString"))
    )
    met = run_on(
        rig, PLAYS, str(SOURCES.parents[1]), str(rig.folder), json.dumps(calls), str(SEEDS), limit_s=60.0 + SEEDS
    )
    assert min(met.values()) > 0, f"each kind of outcome is met: {met}"
    assert sum(met[kind] for kind in ("clean", "left", "hard")) == SEEDS
