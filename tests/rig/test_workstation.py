"""A whole office on a workstation: Xorg and a compositor draw on one card, and the other one lets no program in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet import connect
from sublet.client.home import runtime_dir
from sublet.errors import CapacityExceeded
from sublet.values import MIB
from tests.crash.office_process import release_all
from tests.integration.test_run import Shell, finished, first_line, until
from tests.rig.personalities import WORKSTATION
from tests.rig.quick_office import quick_office
from tests.rig.rig import SOON_MS, Rig, clear, forking_rig
from tests.rig.test_office import USES_A_CARD, WAIT_S, card_of, cards_of, index_of, is_free
from tests.traces import supervisor_of

pytestmark = [pytest.mark.needs("gcc"), pytest.mark.xdist_group("tests/rig/test_workstation.py")]

DESKTOP: Final = sum(line.value for line in WORKSTATION.desktop)
PROHIBITED: Final = 2
COMPUTES: Final = 0
"""The list of NVML that such a process is in."""
NAMES_PROCESSES: Final = "nvmlDeviceGetComputeRunningProcesses_v3"
SLOW_MS: Final = 500
"""A driver that takes so long to name them: longer than a client needs to ask for a lease."""


@pytest.fixture(scope="module")
def rig(rig_place: Path) -> Iterator[Rig]:
    with forking_rig(rig_place, WORKSTATION) as made:
        made.card(1).compute_mode = PROHIBITED
        made.state.lingers_ms = SOON_MS
        yield made


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, rig: Rig) -> Iterator[tuple[Shell, str]]:
    """The office, and what it answered to the first request, while a stranger computed on its card."""
    shell = Shell(tmp_path_factory.mktemp("office"))
    shell.env |= rig.env
    stranger, slow = rig.draws(0, MIB, os.getpid()), rig.trouble(NAMES_PROCESSES, delay_ms=SLOW_MS)
    stranger.list = COMPUTES
    with quick_office(shell.home, rig.env):
        with connect(home=shell.home) as fabric:
            try:
                fabric.gpu(min_vram="1GiB", wait=0).release()
                said = "lent"
            except CapacityExceeded as error:
                said = str(error)
        stranger.taken = 0
        clear(slow)
        yield shell, said
        shell.end()


@pytest.fixture(scope="module")
def sublet(begun: tuple[Shell, str]) -> Shell:
    return begun[0]


def using_the_card(sublet: Shell) -> subprocess.Popen[bytes]:
    """A command that has the card to itself, as far as anybody can beside a desktop."""
    process = sublet.start("run", "--gpu", "20GiB", "--", sys.executable, "-c", USES_A_CARD, stdin=subprocess.PIPE)
    line = first_line(process)
    assert line, finished(process)
    return process


def test_no_card_is_lent_before_it_is_known_who_computes_on_it(begun: tuple[Shell, str]) -> None:
    """The first request was granted, beside the stranger: the office answered before its first look at the card."""
    _, said = begun
    assert f"process {os.getpid()} (" in said.partition(" is used by ")[2]  # before the desktop, or after it


def test_a_card_that_lets_no_program_in_is_not_lent_and_it_is_said_why(sublet: Shell, rig: Rig) -> None:
    """It was lent, and quarantined when its first lease ended."""
    assert [index_of(rig, card["id"]) for card in cards_of(sublet)] == [0]
    (node,) = sublet.json("status")["nodes"]
    assert rig.card(1).name in node["labels"]["gpu-trouble"]
    assert "busy or unavailable" in node["labels"]["gpu-trouble"]


def test_the_card_with_the_desktop_is_lent_and_comes_clean(sublet: Shell, rig: Rig) -> None:
    for _ in range(2):
        process = using_the_card(sublet)
        assert rig.dirty(0)
        done = finished(process)
        assert done.status == 0, done
        release_all(sublet.home)
        until(lambda: is_lendable(sublet, rig), WAIT_S)
        assert not rig.dirty(0)


def test_a_desktop_is_none_of_what_a_supervisor_that_died_had_left(sublet: Shell, rig: Rig) -> None:
    """The next one did not know since when the card was lent: the desktop was waited for, and the card quarantined."""
    process = using_the_card(sublet)
    supervisor = supervisor_of(runtime_dir(sublet.home.resolve()))
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    finished(process)
    until(lambda: is_lendable(sublet, rig), WAIT_S)
    assert not rig.dirty(0)
    process = using_the_card(sublet)
    finished(process)
    release_all(sublet.home)
    until(lambda: is_lendable(sublet, rig), WAIT_S)


def is_lendable(sublet: Shell, rig: Rig) -> bool:
    """Whether all but what the desktop has is free."""
    card = card_of(sublet, rig, 0)
    return is_free(card | {"free": card["capacity"]}) and card["free"] >= card["capacity"] - 2 * DESKTOP
