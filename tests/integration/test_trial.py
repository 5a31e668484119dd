"""Guests of a trial run where guests of leases do: in a control group with the limits of a lease. Nothing is left."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from sublet.node.processes.cgroups import Groups
from sublet.node.processes.lease_limits import PIDS_MAX
from sublet.node.sandbox import trial
from sublet.wire.caps import LeaseCaps
from sublet.wire.zygote import python_argv
from tests.traces import plain_env

CARD: Final = "GPU-00000000-0000-0000-0000-000000000001"
STAYS: Final = "import os, sys; print('there', os.getuid(), sys.argv[1:], flush=True); sys.stdin.read()"
PROCESSES: Final = {
    "local": PIDS_MAX,
    "tenant": LeaseCaps().processes_per_core * LeaseCaps().cores_per_gpu,
}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="others may not make control groups everywhere")


def begun(profile: str, code: str = STAYS, *, parent: int = 0) -> subprocess.Popen[bytes]:
    """The trial of a guest that may use a card whose device file is /dev/null."""
    words = (trial.GUEST, profile, str(parent or os.getpid()), CARD, "null", code, "a word")
    argv: tuple[str, ...] = (sys.executable, "-c", ALWAYS_THERE, *words)
    if profile == "local":
        argv = python_argv(sys.executable, trial.__name__, *words, options=("-I", "-S"))
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env=plain_env(), stdin=pipe, stdout=pipe)


ALWAYS_THERE: Final = """
import sys
from sublet.node.sandbox import trial
trial.Walls.nodes = lambda walls, tenancy: ("/dev/null",)
trial.main(sys.argv[1:])
"""
"""What only a machine with cards has among its device files."""


def left_of(pid: int) -> list[str]:
    """The folders of a trial: those of its groups, and that of its lease."""
    looks = Groups.probe("looks")
    groups = [folder for base in looks.bases() if os.path.exists(folder := f"{base}/sublet-trial-{pid}")]
    looks.remove()
    return [*groups, *glob.glob(f"/tmp/sublet-trial-{pid}-*")]


@pytest.mark.parametrize("profile", ["local", "tenant"])
def test_a_guest_that_is_tried_is_limited_as_one_of_a_lease(profile: str) -> None:
    """That of tenant local ran outside of any group, where a limit that is too low for a driver was not met."""
    with begun(profile) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        user = 0 if profile == "local" else trial.UNPRIVILEGED
        assert program.stdout.readline().decode() == f"there {user} ['a word']\n"
        there = left_of(program.pid)
        limits = {int(path.read_text()) for folder in there for path in Path(folder).glob("*/pids.max")}
        (group,) = Groups.probe(f"trial-{program.pid}").leases()
        in_it = {Path(f"/proc/{pid}/comm").read_text() for pid in group.pids()}
        program.stdin.close()
        assert program.wait() == 0
    assert PROCESSES[profile] in limits
    assert in_it == {Path("/proc/self/comm").read_text()}
    assert left_of(program.pid) == []


@pytest.mark.parametrize("profile", ["local", "tenant"])
def test_a_guest_that_is_tried_ends_with_the_program_that_wanted_it(profile: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as wants:
        wants.kill()
        wants.wait()
        with begun(profile, parent=wants.pid) as program:
            assert program.wait() == 1, "it was gone already"
    with begun(profile) as program:
        assert program.stdout is not None
        assert program.stdout.readline().startswith(b"there")
        program.send_signal(signal.SIGTERM)  # as the kernel does when its parent ends
        assert program.wait() == 1
    assert left_of(program.pid) == []


def test_the_end_of_a_guest_is_that_of_its_trial() -> None:
    with begun("local", "import sys; print('so'); sys.exit(3)") as program:
        assert program.communicate()[0] == b"so\n"
        assert program.returncode == 3
    with begun("local", "import os; os.kill(os.getpid(), 9)") as program:
        assert program.communicate()[0] == b"it ended with signal 9\n"
        assert program.returncode == 1
