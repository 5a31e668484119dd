"""A person is shown an office on pretended cards: ``make demo RIG=...``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sublet.node.supervisor.locks import ROOTS, lock_folder
from tests.commands import run_sublet
from tests.rig.personalities import SHOWN
from tests.rig.rig import forking_rig, remove_locks
from tests.rig.show import Show, play
from tests.rig.test_interface import SOURCES
from tests.rig.test_office import WAIT_S

pytestmark = [pytest.mark.needs("gcc"), pytest.mark.xdist_group("tests/rig/show")]


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("4xH100", ("rank 1: 256 MiB written", "nothing but zeros is left", "fell off its bus (Xid 79)")),
        ("no-uvm", ("0 × GPU", "Not lent: ", "nvidia-modprobe", "none is lent")),
        ("mig", ("lent as a part of a card", "nothing but zeros is left", "neither of its 2 parts is lent any more")),
    ],
)
def test_what_is_shown_on_a_machine_is_checked(
    machine: str, said: tuple[str, ...], rig_place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the commands forked; ``main`` as a person begins it is the next test's."""

    def run(words: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
        program, *more = words
        assert program == "sublet"
        done = run_sublet(*more, env=env)
        return done.status, (done.out + done.err).decode()

    with forking_rig(rig_place, SHOWN[machine]) as rig:
        show = Show(rig, tmp_path, run)
        try:
            play(show)
        finally:
            show.end()
            remove_locks()
    shown = capsys.readouterr().out
    for words in said:
        assert words in shown, words
    assert len(cards_in(shown)) == len(SHOWN[machine].cards)
    assert left_locked(shown) == []


@pytest.mark.parametrize(
    ("machine", "status", "said"),
    [
        ("jetson", 0, ("0 × GPU", "Such a GPU cannot be lent", "none is lent")),
        ("8xCray", 2, ("There is no machine 8xCray", "make demo RIG=4xH100|")),
    ],
)
def test_a_person_is_shown_an_office_on_pretended_cards(machine: str, status: int, said: tuple[str, ...]) -> None:
    """`make demo RIG=...`. It checks what it shows, and says that nothing of it is real."""
    done = shown(machine)
    assert done.returncode == status, done
    for words in said:
        assert words in done.stdout + done.stderr, words
    assert status or done.stdout.count("PRETENDED CARDS") == 2


if os.environ.get("SUBLET_MACHINES") == "all":  # a quarter of a minute for each machine

    @pytest.mark.parametrize("machine", SHOWN)
    def test_each_machine_can_be_shown(machine: str) -> None:
        done = shown(machine)
        assert done.returncode == 0, done
        assert done.stdout.count("PRETENDED CARDS") == 2
        assert left_locked(done.stdout) == []


def cards_in(text: str) -> set[str]:
    """The beginnings of their names."""
    return set(re.findall(r"(?:GPU|MIG)-[0-9a-f]{8}", text))


def left_locked(text: str) -> list[str]:
    """What is left of what locked the cards in this text."""
    locks = [name for folder in (lock_folder(), ROOTS) if os.path.isdir(folder) for name in os.listdir(folder)]
    return [name for name in locks if any(card in name for card in cards_in(text))]


def shown(machine: str) -> subprocess.CompletedProcess[str]:
    """As `make demo RIG=...` runs it."""
    command = [sys.executable, "-m", "tests.rig.show", machine]
    return subprocess.run(command, cwd=SOURCES.parents[1], capture_output=True, text=True, timeout=WAIT_S, check=False)
