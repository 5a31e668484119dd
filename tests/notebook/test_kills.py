"""SIGKILL of guest, office, supervisor and the notebook's own process at random moments of cells.

Afterwards the notebook's state is what the last finished cell left, in the objects that were there, and nothing is left
on the machine. Everything is drawn from a seed, which a failure prints. ``SUBLET_NOTEBOOK_KILLS`` says how many cells
(24), ``SUBLET_KILL_SEED`` with which seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.office_stage import OfficeStage
from tests.notebook.shell_stage import Shell, shell_on, stage_on
from tests.traces import until

CELLS: Final = int(os.environ.get("SUBLET_NOTEBOOK_KILLS", "24"))
SEED: Final = int(os.environ.get("SUBLET_KILL_SEED", "1"))
KILLED_SHARE: Final = 0.15
"""A new kernel takes its time; most cells run as they would, between those that are killed."""
SHELL_SHARE: Final = 0.1
GPU: Final = "%%gpu --vram 64MiB --ttl 4s\n"
BEGIN: Final = """
import numpy as np
x = []; a = np.zeros(300_000); y = {'k': x, 'a': a}
def step():
    a.__iadd__(1)
    x.append(len(x))
"""
HERE: Final = "step()"
CELL: Final = GPU + "step()\nlast = x[-1]\nimport time; time.sleep(0.005)"
TOLD: Final = ("GpuSessionEnded", "WorkerLost", "Disconnected", "LeaseEnded", "SubletError", "OfficeUnreachable")


class Story:
    """One notebook, and what may happen to it."""

    def __init__(self, stage: OfficeStage, place: Path, seed: int) -> None:
        self.stage = stage
        self.chance = random.Random(seed)
        self.done = 0
        """Cells that finished."""
        self._place = place
        self._context = contextlib.ExitStack()
        self.shell = self._begin()

    def _begin(self) -> Shell:
        shell = self._context.enter_context(shell_on(self.stage, self._place))
        assert not shell.run(BEGIN)["error"]
        self.done = 0
        return shell

    def close(self) -> None:
        self._context.close()

    def cell(self, victim: str) -> None:
        """Run one, and perhaps kill somebody meanwhile."""
        self.shell.ask(CELL)
        if not victim:
            self.judge(self.shell.answer())
            return
        delay_s = self.chance.choice((0, 0.002, 0.01, 0.03, 0.1, 0.5, 1.5))
        killer = threading.Timer(delay_s, self._kill, [victim])
        killer.start()
        try:
            answer = self.shell.answer()
        except EOFError:
            answer = None
        killer.join()
        self._come_back()
        if victim == "shell":
            self._context.close()
            self.shell = self._begin()
        elif answer is not None:
            self.judge(answer)

    def judge(self, answer: dict[str, Any]) -> None:
        """Done, or told; and the state says the same."""
        if answer["error"]:
            assert answer["error"] in TOLD, answer
        else:
            self.done += 1
        found = self.shell.value("[len(x), float(a[0]), float(a[-1]), y['k'] is x and y['a'] is a]")
        assert found == [self.done, float(self.done), float(self.done), True], (found, answer)
        if self.chance.random() < 0.3:
            assert not self.shell.run(HERE)["error"]
            self.done += 1

    def _kill(self, victim: str) -> None:
        match victim:
            case "shell":
                self.shell.kill()
            case "office":
                self.stage.kill_office()
            case "supervisor":
                with contextlib.suppress(ProcessLookupError):
                    if (pid := self.stage.find_supervisor()) is not None:
                        os.kill(pid, signal.SIGKILL)
            case _:
                assert self.stage.traces is not None
                if marked := self.stage.traces.marked():
                    self.stage.procs.send(self.chance.choice(marked), signal.SIGKILL)

    def _come_back(self) -> None:
        """The office: ours, or the one that the notebook was quicker to start."""
        until("an office", lambda: self.stage.find_office() is not None or self.stage.office.start())
        until("a supervisor", self.stage.find_supervisor)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    with stage_on(tmp_path / "office", "2x1GiB") as stage:
        made = Story(stage, tmp_path / "folder", SEED)
        try:
            yield made
        finally:
            made.close()


def test_after_any_kill_the_state_is_what_the_last_finished_cell_left(story: Story) -> None:
    print(f"SUBLET_KILL_SEED={SEED}")
    began_s = time.monotonic()
    for number in range(CELLS):
        victim = ""
        if story.chance.random() < KILLED_SHARE or number < 4:
            victim = (
                ("guest", "office", "supervisor", "shell")[number]
                if number < 4
                else story.chance.choice(("guest", "guest", "office", "supervisor", "shell"))
            )
        print(f"cell {number}: {victim or 'nobody'} is killed, after {time.monotonic() - began_s:.1f} s")
        story.cell(victim)
    story.shell.run("%gpu release")
    until("no residue", lambda: not story.stage.residue)
