"""Guests of a trial run where guests of leases do: in a control group with the limits of a lease. Nothing is left."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from sublet.node.processes.cgroups import Groups
from sublet.node.processes.lease_limits import PIDS_MAX
from sublet.node.sandbox import trial
from sublet.wire.caps import LeaseCaps
from sublet.wire.cards import GuestTrial
from sublet.wire.codec import dumps
from tests.commands import run_program
from tests.traces import plain_env, until

CARD: Final = "GPU-00000000-0000-0000-0000-000000000001"
STAYS: Final = "import os, sys; print('there', os.getuid(), sys.argv[1:], flush=True); sys.stdin.read()"
CAPS: Final = LeaseCaps(processes_per_core=40, cores_per_gpu=3)
"""Others than an operator gets who sets none."""
PROCESSES: Final = {"local": PIDS_MAX, "tenant": CAPS.processes_per_core * CAPS.cores_per_gpu}
STARTS: Final = """
import sys
from sublet.node.sandbox import trial
trial.Walls.nodes = lambda walls, tenancy: ("/dev/null",)
trial.main(sys.argv[1:])
"""
"""The program, on a machine that has the device file of a card: it is /dev/null."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="others may not make control groups everywhere")


class Guest(NamedTuple):
    """Our ends of what a guest was given."""

    pid: int
    """Of the process that started it."""
    gives: FileIO
    reads: FileIO
    status: FileIO

    def said(self) -> bytes:
        return self.reads.read(4096)

    def left(self) -> list[str]:
        """The folders of its groups, and that of its lease."""
        looks = Groups.probe("looks")
        groups = [folder for base in looks.bases() if os.path.exists(folder := f"{base}/sublet-trial-{self.pid}")]
        looks.remove()
        return [*groups, *glob.glob(f"/tmp/sublet-trial-{self.pid}-*")]


class Starter:
    """The program that starts guests."""

    def __init__(self, asks: socket.socket, program: subprocess.Popen[bytes]) -> None:
        self.asks = asks
        self.program = program
        self._children = Path(f"/proc/{program.pid}/task/{program.pid}/children")

    @contextlib.contextmanager
    def guest(self, profile: str, code: str = STAYS, caps: LeaseCaps = CAPS) -> Iterator[Guest]:
        before = self._children.read_text().split()
        ours, theirs = zip(os.pipe()[::-1], os.pipe(), os.pipe(), strict=True)
        asked = GuestTrial(profile=profile, card=CARD, nodes=("null",), code=code, words=("a word",), caps=caps)
        socket.send_fds(self.asks, [dumps(asked)], theirs)
        for fd in theirs:
            os.close(fd)
        until("a process that starts it", lambda: {*self._children.read_text().split()} - {*before})
        (pid,) = {*self._children.read_text().split()} - {*before}
        with FileIO(ours[0], "w") as gives, FileIO(ours[1]) as reads, FileIO(ours[2]) as status:
            yield Guest(int(pid), gives, reads, status)


@pytest.fixture
def starter() -> Iterator[Starter]:
    asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = (sys.executable, "-c", STARTS, trial.SERVE)
    with subprocess.Popen(argv, env=plain_env(), stdin=theirs.fileno(), stdout=subprocess.PIPE) as program:
        theirs.close()
        assert program.stdout is not None
        assert program.stdout.read(1) == trial.READY
        with asks:
            yield Starter(asks, program)
        assert program.wait() == 0, "nobody asks any more"


@pytest.mark.parametrize("profile", ["local", "tenant"])
def test_a_guest_that_is_tried_is_limited_as_one_of_a_lease(starter: Starter, profile: str) -> None:
    """That of tenant local ran outside of any group, where a limit that is too low for a driver was not met."""
    with starter.guest(profile) as guest:
        user = 0 if profile == "local" else trial.UNPRIVILEGED
        assert guest.said().decode() == f"there {user} ['a word']\n"
        limits = {int(path.read_text()) for folder in guest.left() for path in Path(folder).glob("*/pids.max")}
        (group,) = Groups.probe(f"trial-{guest.pid}").leases()
        in_it = {Path(f"/proc/{pid}/comm").read_text() for pid in group.pids()}
        guest.gives.close()
        assert guest.status.read(9) == b"0"
        assert PROCESSES[profile] in limits
        assert in_it == {Path("/proc/self/comm").read_text()}
        assert guest.left() == []


@pytest.mark.parametrize("profile", ["local", "tenant"])
def test_a_guest_that_is_tried_ends_when_nobody_wants_it_any_more(starter: Starter, profile: str) -> None:
    with starter.guest(profile) as guest, starter.guest("local") as other:
        assert guest.said().startswith(b"there")
        assert other.said().startswith(b"there")
        guest.status.close()
        assert guest.said() == b"", "it would have stayed until its input ends"
        until("nothing to be left", lambda: guest.left() == [])
        other.gives.close()
        assert other.status.read(9) == b"0", "the other one's end is its own"


def test_the_end_of_a_guest_is_told(starter: Starter) -> None:
    with starter.guest("local", "import sys; print('so', flush=True); sys.exit(3)") as guest:
        assert (guest.said(), guest.status.read(9)) == (b"so\n", b"3")
    with starter.guest("local", "import os; os.kill(os.getpid(), 9)") as guest:
        assert (guest.said(), guest.status.read(9)) == (b"it ended with signal 9\n", b"1")


BEGINS: Final = """
import sys
from sublet.node.agent import rehearsal
from sublet.wire.caps import LeaseCaps
from sublet.wire.cards import GuestTrial
rehearsal.scope_prefix = lambda env: sys.argv[1:]
code = "import sys; print('there 7', flush=True); sys.stdin.read()"
asked = GuestTrial(profile="local", card="GPU-1", nodes=(), code=code, words=())
print(rehearsal.GuestStarter(LeaseCaps()).run(asked, lambda pid: print(pid)))
"""


@pytest.mark.parametrize("scope", [(), ("/usr/bin/env",), ("/bin/false",)], ids=["none", "a scope", "none to be had"])
def test_what_starts_guests_is_begun_in_a_scope_where_there_is_one(scope: tuple[str, ...]) -> None:
    """As a supervisor is: where control groups are of the second version, guests have limits only so."""
    done = run_program(BEGINS, *scope, env=plain_env())
    assert (done.out, done.err) == (b"7\n(0, 'there 7')\n", b"")
