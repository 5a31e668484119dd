"""A card that is taken back: what was on it leaves and comes back, and in between it is clean and somebody else's.

This process never begins to use the card itself: who has once used CUDA keeps a piece of it, and then no card is at
rest. So everything here is done by other processes, as it is under an office, and this file comes first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.errors import GpuSessionEnded
from sublet.node.agent.clean_card import read_settings
from sublet.node.agent.nvml import Nvml, survey
from sublet.values import MIB
from sublet.wire.cards import CardFound
from sublet.wire.codec import loads
from tests.gpu.far_end import FarEnd
from tests.gpu.gpus import FILL, LARGE, first_gpu
from tests.gpu.resident import Helper, Resident

ROUNDS = 10
LONG_S = 300


def clean(uuid: str, settings: str) -> CardFound:
    """What a supervisor has done between two leases, by the same program."""
    words = [sys.executable, "-m", "sublet.node.agent.clean_card", uuid, "--scrub", "--settings", settings]
    done = subprocess.run(words, capture_output=True, timeout=LONG_S, check=True)
    return loads(CardFound, done.stdout)


def until_clean(uuid: str, settings: str) -> CardFound:
    """A card comes to rest a moment after who was on it is gone."""
    end = time.monotonic() + 30
    while (found := clean(uuid, settings)).left and time.monotonic() < end:
        time.sleep(0.2)
    return found


def use_it(folder: Path, uuid: str) -> None:
    """Somebody else's session."""
    folder.mkdir()
    with FarEnd(folder, uuid, cap_bytes=8 * LARGE) as other, other.session() as gpu:
        module = gpu.module_load(FILL, kind="cuda")
        y = gpu.mem_alloc(8)
        gpu.launch(module, "first_word", 1, 1, [y])
        assert gpu.mem_read(y) == (7).to_bytes(8, "little")


@pytest.fixture
def helper() -> Iterator[Helper]:
    with Helper() as made:
        yield made


@pytest.mark.gpu
def test_the_driver_tells_of_the_card_and_of_who_is_on_it() -> None:
    uuid = first_gpu()
    assert uuid in [card.uuid for card in survey().cards]
    nvml = Nvml.open()
    try:
        before = nvml.read(uuid)
        assert before.failed is None
        assert before.used is not None
        with Resident(2 * LARGE) as resident:
            now = nvml.read(uuid)
            assert now.used is not None
            assert now.used - before.used >= 2 * LARGE
            by_pid = {process.pid: process.bytes for process in now.processes}
            if resident.pid in by_pid and by_pid[resident.pid] is not None:  # not where pids are another namespace's
                assert (by_pid[resident.pid] or 0) >= 2 * LARGE
    finally:
        nvml.close()


@pytest.mark.gpu
def test_a_guest_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """What stands between two leases: nobody on the card, memory at rest, all of it overwritten."""
    uuid = first_gpu()
    settings = read_settings(uuid).settings
    with FarEnd(tmp_path, uuid, cap_bytes=2 * LARGE) as far:
        gpu = far.session()
        x = gpu.mem_alloc(LARGE)
        gpu.mem_fill(x, 0, LARGE, 0xA5)
        gpu.sync()
        busy = clean(uuid, settings)
        assert busy.left, "with memory in use a card is not clean"
        assert not busy.scrubbed_bytes
        far.kill()
        with pytest.raises(GpuSessionEnded):
            gpu.sync()
        gpu.close()
    found = until_clean(uuid, settings)
    assert (found.left, found.failed) == ("", "")
    assert found.scrubbed_bytes > LARGE
    use_it(tmp_path / "again", uuid)


@pytest.mark.gpu
def test_the_probe_sees_it_work() -> None:
    """With a driver that has the calls, on a whole card; to another one only where there is one of its model."""
    words = [sys.executable, "-m", "sublet.devices.suspend", "--probe", first_gpu()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG_S, check=True)
    models = {card.uuid: card.model for card in survey().cards}
    has_twin = list(models.values()).count(models[first_gpu()]) > 1
    with Helper() as helper:
        can = {"same_device", "same_type"} if helper.hello["can_move"] and has_twin else {"same_device"}
    assert json.loads(done.stdout)["suspend"] in can


@pytest.mark.gpu
def test_nothing_is_lost_while_somebody_else_has_the_card(helper: Helper, tmp_path: Path) -> None:
    """Suspended; the card is clean, all of it overwritten, and another's; then all is as it was."""
    uuid = first_gpu()
    settings = read_settings(uuid).settings
    with Resident(3 * LARGE + MIB) as resident:
        assert helper.suspend(resident.pid) == {"done": [resident.pid]}
        assert helper.suspend(resident.pid) == {"done": [resident.pid]}, "twice is once"
        found = until_clean(uuid, settings)
        assert (found.left, found.failed) == ("", "")
        assert found.scrubbed_bytes > 3 * LARGE
        use_it(tmp_path / "other", uuid)
        assert helper.resume(resident.pid) == {"done": [resident.pid]}
        assert helper.resume(resident.pid) == {"done": [resident.pid]}
        assert resident.ask("check") == "same"


@pytest.mark.gpu
def test_two_processes_of_one_guest_go_and_come_together(helper: Helper) -> None:
    """And whoever does not use CUDA is left alone."""
    with Resident(64 * MIB) as one, Resident(64 * MIB) as two, subprocess.Popen(["sleep", "600"]) as plain:
        try:
            both = [one.pid, two.pid]
            assert helper.suspend(*both, plain.pid) == {"done": both}
            assert helper.resume(*both) == {"done": both}
            assert [one.ask("check"), two.ask("check")] == ["same", "same"]
        finally:
            plain.kill()


@pytest.mark.gpu
def test_the_helper_may_die_in_between() -> None:
    """The next one goes on with what the driver knows."""
    with Resident(64 * MIB) as resident:
        with Helper() as first:
            assert "done" in first.suspend(resident.pid)
        with Helper() as second:
            assert "done" in second.resume(resident.pid)
        assert resident.ask("check") == "same"


@pytest.mark.gpu
def test_what_is_killed_while_it_is_suspended_leaves_nothing(helper: Helper) -> None:
    uuid = first_gpu()
    settings = read_settings(uuid).settings
    with Resident(LARGE) as resident:
        assert "done" in helper.suspend(resident.pid)
    found = until_clean(uuid, settings)
    assert (found.left, found.failed) == ("", "")


COMPUTES = """
import sys, time
import torch
x = torch.arange(1 << 20, dtype=torch.int64, device="cuda")
print("ready", flush=True)
for step in range(int(sys.argv[1])):
    x = (x * 1103515245 + step) % 2147483647
    if step % 100 == 0:
        time.sleep(0.001)
print(int(x.sum()), flush=True)
"""
STEPS = 40_000


@pytest.mark.gpu
@pytest.mark.needs("torch")
def test_a_computation_of_torch_does_not_notice(helper: Helper) -> None:
    """Suspended again and again at moments of chance; its result depends on every step."""

    def begin() -> subprocess.Popen[str]:
        made = subprocess.Popen([sys.executable, "-c", COMPUTES, str(STEPS)], stdout=subprocess.PIPE, text=True)
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        return made

    with begin() as undisturbed:
        wanted, _ = undisturbed.communicate(timeout=LONG_S)
    with begin() as disturbed:
        try:
            for round_ in range(ROUNDS):
                if disturbed.poll() is not None:
                    break
                assert "done" in helper.suspend(disturbed.pid)
                assert "done" in helper.resume(disturbed.pid)
                time.sleep(0.01 * (1 + round_ % 5))
            found, _ = disturbed.communicate(timeout=LONG_S)
        finally:
            disturbed.kill()
    assert found == wanted
