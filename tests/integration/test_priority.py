"""The supervisor comes first while it ends something, and nothing that it starts ever does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.node.agent.starting import package_folder
from sublet.node.priority import FIRST
from sublet.values import Epoch, Exclusivity, Kind, LeaseId, ResourceId
from sublet.wire.guests import Admit, EndGuest, Front, GuestSpec, Profile, Start, Started
from sublet.wire.orders import Grant, Part
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION
from tests.integration.supervisor_stage import PATH, TENANT, HolderLine, SupervisorStage, supervisor_at
from tests.traces import now_ns, until

A, B = LeaseId("lease-a"), LeaseId("lease-b")
E5, E6 = Epoch(1, 5), Epoch(1, 6)
S = 1_000_000_000
OURS = 3
"""The nice value of the office in these tests."""
PART = Part(resource=ResourceId("bench/cpu"), kind=Kind.CPU, amount=0, millis=0, exclusivity=Exclusivity.SHARED)
DEAF = ("sh", "-c", "trap '' TERM; exec sleep 1000")
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root comes before others")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with supervisor_at(tmp_path, faults=f"import os; os.setpriority(os.PRIO_PROCESS, 0, {OURS})") as found:
        for lease, epoch in ((A, E5), (B, E6)):
            grant = Grant(
                lease=lease,
                epoch=epoch,
                number=1,
                tenant=TENANT,
                parts=(PART,),
                deadline_ns=now_ns() + 300 * S,
                ttl_ns=300 * S,
            )
            found.office_line.order(grant)
        yield found


def nice(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def walled(stage: SupervisorStage) -> HolderLine:
    mine, theirs = socket.socketpair()
    front = Front(tenant=TENANT, operator=False, profile=Profile.TENANT, lease=B, epoch=E6, operations=("run",))
    stage.office_line.ask(Admit(front=front, oldest=WIRE_OLDEST, newest=WIRE_VERSION), (theirs.detach(),))
    return HolderLine(mine)


@needs_root
def test_it_comes_first_while_it_ends_something_and_its_guests_never_do(stage: SupervisorStage) -> None:
    assert nice(stage.pid) == OURS
    started = stage.holder(A, E5).start(*DEAF)
    until("one that is deaf", lambda: Path(f"/proc/{started.pid}/comm").read_text() == "sleep\n")

    def comes_first() -> bool:  # it does for a second, and this process may be kept waiting for longer
        stage.holder(A, E5).ask(EndGuest(guest=started.guest, grace_ns=300 * S))
        return nice(stage.pid) == FIRST

    until("it comes first", comes_first)
    warm = GuestSpec(
        argv=(sys.executable, "-c", "import time; time.sleep(1000)"),
        imports=("json",),
        cwd="/",
        env={"PATH": PATH},
        patient=True,
    )
    forked = stage.holder(B, E6).ask(Start(spec=warm))
    assert isinstance(forked, Started)
    pids = [stage.holder(B, E6).start("sleep", "1000").pid, forked.pid]
    with contextlib.closing(walled(stage)) as holder:
        pids.append(holder.start("sleep", "1000").pid)
        for pid in pids:
            until("it has its own place", lambda pid=pid: nice(pid) == OURS)  # type: ignore[misc]
            until("and so has its group", lambda pid=pid: group_nice(pid) in (0, None))  # type: ignore[misc]
        assert all(nice(identity.pid) == OURS for identity in stage.marked())
    until("it is like everybody again", lambda: nice(stage.pid) == OURS and group_nice(stage.pid) in (0, None))
    until("it comes first again", comes_first)


def group_nice(pid: int) -> int | None:
    """Of the group of its session; None where sessions are none."""
    path = Path(f"/proc/{pid}/autogroup")
    return int(path.read_text().rpartition(" ")[2]) if path.exists() else None


LOOK = f"""
import os, sys
sys.path.insert(0, sys.argv[1])
from sublet.node import priority
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
os.nice(2)
found = priority.Priority()
found.first()
print(found.may, os.getpriority(os.PRIO_PROCESS, 0), found.finding)
found.beat(); found.beat()
os.nice(1)
priority.give_back()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_an_ordinary_user_waits_his_turn_and_is_told_so() -> None:
    """It may not come first, and it cannot take back what it gave away; nothing is made of either."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LOOK, package_folder()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, last = done.stdout.splitlines()
    ours = os.getpriority(os.PRIO_PROCESS, 0)  # the suite may run behind others itself
    assert first.startswith(f"False {ours + 2} no right to")
    assert last == f"{ours + 3}"
