"""Each machine × what an office does first on it: the cards are tried out, looked at, used, and overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any, Final, NamedTuple

import pytest

from sublet.values import GIB, MIB
from tests.rig.personalities import (
    ALL_IN_CONTAINER,
    DRIVER_570,
    DRIVER_575,
    EIGHT_H100,
    EXCLUSIVE,
    FOUR_H100,
    H100,
    JETSON,
    LAPTOP,
    MPS,
    NEWER,
    NO_FABRIC,
    NO_UVM,
    OLD_DRIVER,
    PARTS,
    PERSONALITIES,
    RTX,
    SOME_IN_CONTAINER,
    WORKSTATION,
    Personality,
)
from tests.rig.rig import NewRig, Rig, clear
from tests.rig.test_faults import Program
from tests.rig.test_interface import lendable, run_on
from tests.rig.test_machines import MACHINES, row_of

pytestmark = pytest.mark.needs("gcc")


class Outcome(NamedTuple):
    """What is to come of it, by what the personality's sources say."""

    failed: str = ""
    do: str = ""
    shows_pids: bool = True
    suspend: str = "same_type"
    """CUDA 12.8 brought suspending, 13.0 another card, for which there has to be one of the model."""


EXPECTED: Final[dict[str, Outcome]] = {
    FOUR_H100.name: Outcome(),
    SOME_IN_CONTAINER.name: Outcome(suspend="same_device"),
    PARTS.name: Outcome(suspend="same_device"),
    WORKSTATION.name: Outcome(suspend="same_device"),
    LAPTOP.name: Outcome(shows_pids=False, suspend="same_device"),
    OLD_DRIVER.name: Outcome(suspend="none"),
    NO_FABRIC.name: Outcome("system not yet initialized", "fabricmanager", suspend="none"),
    NO_UVM.name: Outcome("unknown error", "nvidia-uvm", suspend="none"),
    EXCLUSIVE.name: Outcome(),
    EIGHT_H100.name: Outcome(),
    DRIVER_570.name: Outcome(suspend="same_device"),
    DRIVER_575.name: Outcome(suspend="same_device"),
    ALL_IN_CONTAINER.name: Outcome(suspend="same_device"),
    MPS.name: Outcome(suspend="none"),
    NEWER.name: Outcome(),
    JETSON.name: Outcome(suspend="none"),
}

STEPS: Final = ["NVML", "CUDA", "cleaning", "guest"]
"""Where no device file is found, no guest of a tenant other than local is offered a card, and none is tried."""

FIRST_DAY: Final = """
import asyncio, dataclasses, json, sys
from pathlib import Path
from sublet.node.agent.clean_card import clean
from sublet.node.agent.foreign import Own, foreign_use
from sublet.node.agent.nvml import Nvml, survey, who_is
from sublet.node.agent.rehearsal import rehearse_all
from sublet.wire.caps import LeaseCaps
from sublet.node.agent.inventory import card_of, machine_inventory
from sublet.node.agent.suspend_probe import probe_cards
found = survey()
nvml, others = Nvml.open(), []
for card in found.cards:
    use = foreign_use(nvml.read(card.uuid), Own(), node="n", resource="n/" + card.uuid, capacity=card.capacity,
                      name_of=who_is)
    others.append([use.amount, use.blocks, use.detail])
nvml.close()
tried = suspend = None
if "--try" in sys.argv:
    files = {card.uuid: card.nodes for card in found.cards}
    tried = [dataclasses.asdict(one) for one in asyncio.run(rehearse_all(files, LeaseCaps()))]
if "--suspend" in sys.argv:
    probed = asyncio.run(probe_cards(machine_inventory(Path("/tmp"), None, found=found)))
    suspend = {card_of(device): device.suspend.value for device in probed.devices if card_of(device)}
cards = [card.uuid for card in found.cards]
print(json.dumps([tried, suspend, others, found.driver, [str(trouble) for trouble in found.troubles], cards]))
"""

HAS_BEEN_THERE: Final = """
from sublet.devices.cuda_driver import open_driver
driver = open_driver()
for ordinal in range(driver("test", "cuDeviceGetCount")):
    driver("test", "cuDevicePrimaryCtxRetain", driver("test", "cuDeviceGet", ordinal))
print("null")
"""

SERVES: Final = """
import sys
with open("/proc/self/comm", "w") as file:
    file.write("nvidia-cuda-mps-server")
print(flush=True)
sys.stdin.read()
"""

CLEAN: Final = """
import json, os, sys
from sublet.node.agent import clean_card
sys.exit(clean_card.main([sys.argv[1], "--scrub", *sys.argv[2:]]))
"""


LOOK: Final = """
import json, sys
from sublet.node.agent.clean_card import read_settings
print(json.dumps(json.loads(read_settings(sys.argv[1]).settings)))
"""


def cleaned(rig: Rig, card: str, *arguments: str) -> Any:
    """What the supervisor is told when a lease of the card is over, and what lingered has gone."""
    found = run_on(rig, CLEAN, card, *arguments)
    for _ in range(200):
        if "no process is seen" not in found["left"] and "becoming less" not in found["left"]:
            break
        found = run_on(rig, CLEAN, card, *arguments)
    return found


def test_every_personality_has_an_outcome() -> None:
    assert EXPECTED.keys() == {personality.name for personality in PERSONALITIES}


@pytest.mark.parametrize("personality", PERSONALITIES, ids=lambda one: one.name)
def test_a_card_is_tried_out_before_it_is_lent(new_rig: NewRig, personality: Personality) -> None:
    """What could not clean a card was found out when its first lease ended: the card was then quarantined for good.

    Machines whose cards a whole office lends in ``test_machines`` are not tried out once more: what that came to is the
    first and the last cell of their row there."""
    rig, expected, row = new_rig(personality), EXPECTED[personality.name], row_of(personality)
    is_tried_there = personality in MACHINES and bool(row.start)
    words = () if is_tried_there else ("--try", "--suspend")
    tried, suspend, others, driver, troubles, cards = run_on(
        rig, FIRST_DAY, *words, CUDA_VISIBLE_DEVICES=""
    )  # what a person set is not the machine's
    assert driver == rig.state.driver.decode()
    assert all(rig.personality.not_lent in trouble for trouble in troubles)
    assert len(troubles) == (len(rig.personality.cards) if rig.personality.not_lent else 0)
    assert cards == lendable(rig)
    assert row.start.get("session", "none") == expected.suspend
    assert not any(blocks for _, blocks, _ in others), "a card on which nobody computes can be had for oneself"
    if is_tried_there:
        assert (expected.failed, expected.do, expected.shows_pids) == ("", "", "watched" in row.doctor)
        return
    assert [one["card"] for one in tried] == cards
    for one in tried:
        assert expected.failed in one["failed"] if expected.failed else one["failed"] == "", one
        assert expected.do in one["do"], one
        assert one["shows_pids"] is (expected.shows_pids and not expected.failed)
        names = [step["name"] for step in one["steps"]]
        assert names == STEPS[: 1 if expected.failed else None]
    whole = {card.name for card in rig.state.cards if card.present and not card.parent}
    assert suspend == {card: expected.suspend if card in whole else "none" for card in cards}


def test_a_program_that_the_driver_ends_is_told_from_one_that_it_keeps_waiting(new_rig: NewRig) -> None:
    rig = new_rig(WORKSTATION)
    row = rig.trouble("cuInit", kills=11)
    tried, *_ = run_on(rig, FIRST_DAY, "--try")
    assert [one["failed"] for one in tried] == ["the program that tried it out ended with signal 11"] * 2
    clear(row)


def test_a_card_that_others_have_to_themselves_is_no_broken_one(new_rig: NewRig) -> None:
    """In EXCLUSIVE_PROCESS a job of somebody else keeps everybody out; the card is well."""
    rig = new_rig(EXCLUSIVE)
    row = rig.draws(1, GIB, os.getpid())
    row.list = 0  # it computes
    tried, _, others, *_ = run_on(rig, FIRST_DAY, "--try")
    assert [(one["failed"], bool(one["busy"])) for one in tried] == [("", False), ("", True)]
    assert [blocks for _, blocks, _ in others] == [False, True]


def test_a_card_that_a_process_keeps_for_a_moment_after_its_end_is_no_broken_one(new_rig: NewRig) -> None:
    """NVML lists nothing on it, and it lets no other process in: an office that was restarted then did not lend it."""
    rig = new_rig(EXCLUSIVE)
    rig.state.lingers_ms = 3_000
    run_on(rig, HAS_BEEN_THERE)
    tried, *_ = run_on(rig, FIRST_DAY, "--try")
    assert [one["failed"] or one["busy"] for one in tried] == ["", ""]


def test_a_card_that_a_process_keeps_for_a_moment_after_its_end_is_one_to_move_to(new_rig: NewRig) -> None:
    """The process that tried out the second card could linger there; guests were then never moved on this machine."""
    rig = new_rig(EXCLUSIVE)
    row = rig.draws(1, GIB, os.getpid())
    row.list = 0  # it computes
    goes = threading.Timer(2.0, setattr, [row, "taken", 0])
    goes.start()
    _, suspend, *_ = run_on(rig, FIRST_DAY, "--suspend")
    goes.join()
    assert set(suspend.values()) == {"same_type"}


def test_an_mps_server_is_no_stranger_on_its_card(new_rig: NewRig) -> None:
    """No lease could have a card for itself, and none came clean: the server stays as long as its control process."""
    rig = new_rig(MPS)
    with subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"\n"
        rig.draws(0, 30 * MIB, server.pid).list = 0  # NVML lists it among those that compute
        _, _, others, *_ = run_on(rig, FIRST_DAY)
        amount, blocks, detail = others[0]
        assert amount == 64 * MIB
        assert not blocks
        assert f"process {server.pid} (nvidia-cuda-mps)" in detail
        found = cleaned(rig, rig.card(0).name, "--since", str(2**62))
        assert (found["left"], found["failed"]) == ("", "")
        assert f"process {server.pid}" in cleaned(rig, rig.card(0).name, "--since", "1")["left"], "one of the lease's"
        server.kill()


def test_a_program_of_others_stays_on_its_card_where_the_operator_says_so(new_rig: NewRig) -> None:
    rig = new_rig(WORKSTATION)
    rig.draws(1, GIB, os.getpid()).list = 0  # it computes
    lent = ("--since", str(2**62))
    assert f"process {os.getpid()}" in cleaned(rig, rig.card(1).name, *lent)["left"]
    found = cleaned(rig, rig.card(1).name, *lent, "--beside", "1")
    assert (found["left"], found["failed"]) == ("", "")
    assert found["scrubbed_bytes"] > 22 * GIB


@pytest.mark.parametrize("is_told", [True, False], ids=["bytes told", "bytes not told"])
def test_a_desktop_keeps_nobody_from_its_card(new_rig: NewRig, is_told: bool) -> None:
    """Where the driver did not tell how much it has, the card could never be had, and never came clean."""
    rig = new_rig(WORKSTATION)
    for row in rig.desktop:
        row.untold = not is_told
    _, _, others, *_ = run_on(rig, FIRST_DAY)
    amount, blocks, detail = others[0]
    assert amount >= 576 * MIB
    assert not blocks
    assert f"process {rig.desktop[0].pid} (Xorg)" in detail
    found = cleaned(rig, rig.card(0).name, "--since", str(2**62))
    assert (found["left"], found["failed"]) == ("", "")
    assert found["scrubbed_bytes"] > 22 * GIB


def test_the_desktop_of_windows_keeps_nobody_from_the_card(new_rig: NewRig) -> None:
    """WSL lists no process and counts what Windows draws with: nobody was seen who used that memory."""
    rig = new_rig(LAPTOP)
    _, _, others, *_ = run_on(rig, FIRST_DAY)
    amount, blocks, detail = others[0]
    assert amount >= GIB
    assert not blocks
    assert "the driver does not tell by whom" in detail
    found = cleaned(rig, rig.card(0).name)
    assert (found["left"], found["failed"]) == ("", "")


PART: Final = """
import json, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
from sublet.devices.account import MemoryAccount
from sublet.devices.cuda import CudaDevice
device = CudaDevice("n/gpu", sys.argv[1], MemoryAccount(1 << 30), cache="/nonexistent")
print(json.dumps([device.identity.label, device._arch]))
device.close()
"""


LEAVES: Final = """
import os
from sublet.devices.plain_cuda import open_plain_driver
driver = open_plain_driver()
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
driver("t", "cuMemsetD8", driver("t", "cuMemAlloc", 16 << 20), 0x5A, 16 << 20)
os.write(1, b"null")
os._exit(0)
"""


def test_little_memory_that_an_ended_process_still_has_is_overwritten_too(new_rig: NewRig) -> None:
    """It passed for what an idle card has in use, the scrub could not have it, and the next lease could read it."""
    rig = new_rig(FOUR_H100)
    rig.card(0).context = 32 * MIB
    run_on(rig, LEAVES)
    assert rig.dirty(0)
    found = cleaned(rig, rig.card(0).name)
    assert (found["left"], found["failed"]) == ("", "")
    assert not rig.dirty(0)
    assert found["in_use"] == rig.card(0).idle


OF_WARP: Final = """
import json, os, sys
from types import SimpleNamespace
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
from sublet.devices.account import MemoryAccount
from sublet.devices.cuda import CudaDevice
class OfWarp(SimpleNamespace):
    def __str__(self):
        return f"cuda:{self.ordinal}"
device = CudaDevice("n/gpu", sys.argv[1], MemoryAccount(1 << 30), cache="/nonexistent")
shown = [OfWarp(ordinal=0, uuid=sys.argv[2])]
wp = SimpleNamespace(get_cuda_devices=lambda: shown, Stream=lambda one, cuda_stream: one)
print(json.dumps(device._warp_name(wp)))
device.close()
"""


def test_warp_is_told_the_part_of_a_card_that_it_has_by_another_name(new_rig: NewRig) -> None:
    """For Warp a part has the UUID of its card: it was said not to see the GPU."""
    rig = new_rig(PARTS)
    assert run_on(rig, OF_WARP, rig.card(3).name, rig.card(0).name) == "cuda:0"


WATCHES: Final = """
import json, sys
from pathlib import Path
from sublet.node.agent.foreign import Own
from sublet.node.agent.health import CardWatch
from sublet.node.agent.inventory import machine_inventory
from sublet.wire.orders import Fault
watch = CardWatch(machine_inventory(Path("/tmp"), None), own=lambda resource: Own(), sees_processes=True)
for now, _ in enumerate(sys.stdin):
    faults = [one for one in watch.judge(watch.read_cards(), now) if isinstance(one, Fault)]
    print(json.dumps([[one.resource, one.detail] for one in faults]), flush=True)
"""


def test_a_card_that_is_split_under_an_office_is_lent_no_more(new_rig: NewRig) -> None:
    """NVML goes on to answer for it, and CUDA shows it to no program: the next lease found no card."""
    rig = new_rig(FOUR_H100)
    with Program(rig, WATCHES) as watch:
        assert watch.asked() == []
        rig.card(2).split = 1
        ((resource, detail),) = watch.asked()
        assert resource.endswith(rig.card(2).name)
        assert "split into parts (MIG), which are lent after `sublet down`" in detail


def test_a_part_of_a_card_is_used_and_overwritten_alone(new_rig: NewRig) -> None:
    rig = new_rig(PARTS)
    first = rig.card(2)
    assert first.name.startswith("MIG-")
    assert run_on(rig, PART, first.name) == ["NVIDIA H100 80GB HBM3 MIG 3g.40gb", 90]
    settings = run_on(rig, LOOK, first.name)
    assert settings["power limit"] == rig.card(0).power_mw, "a part has no settings; its card has"
    found = cleaned(rig, first.name)
    assert (found["left"], found["failed"]) == ("", "")
    assert 38 * GIB < found["scrubbed_bytes"] < 40 * GIB


def test_each_model_is_tried_with_a_card_that_can_be_had(new_rig: NewRig) -> None:
    """The first card stood for all: where others had its memory, nothing was suspended on any."""
    mixed = Personality(name="3 × H100 and an RTX 4090", cards=(H100, H100, H100, RTX), lines=FOUR_H100.lines)
    rig = new_rig(mixed)
    first = rig.card(0)
    rig.draws(0, first.memory - first.reserved - first.idle, os.getpid()).list = 0  # it computes
    _, suspend, *_ = run_on(rig, FIRST_DAY, "--suspend")
    assert [suspend[rig.card(index).name] for index in range(4)] == [*["same_type"] * 3, "same_device"]
