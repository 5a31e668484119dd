"""When the machine is out of memory the kernel kills guests before the office, and the supervisor last of all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sublet.client.home import runtime_dir
from sublet.node.processes.memory_order import GUEST, SUPERVISOR
from sublet.wire import unix
from sublet.wire.sockets import peer_of
from tests.security.conftest import Place

CAP_SYS_RESOURCE: Final = 24


def own_score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


def score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def may_ask_for_less() -> bool:
    """Some containers leave root without ``CAP_SYS_RESOURCE``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) & 1 << CAP_SYS_RESOURCE)


def test_guests_before_the_office_and_the_supervisor_last(place: Place) -> None:
    with unix.connect(str(runtime_dir(place.home.resolve()) / "supervisor.sock"), timeout_s=5.0) as sock:
        supervisor = peer_of(sock).pid
    assert score_of(supervisor) == (SUPERVISOR if may_ask_for_less() else own_score())
    office = place.owner.request("GET", "/v1/status", shape=dict)["pid"]
    assert score_of(office) == own_score() < GUEST
    for fabric in (place.owner, place.ben):
        with fabric.cpu(1) as lease:
            command = lease.start(["cat", "/proc/self/oom_score_adj"], cwd="/")
            assert command.wait(timeout=60) == 0
            assert [int(piece.data) for piece in command.output()] == [GUEST]
            assert lease.run(own_score) == GUEST, "a guest from a warm interpreter"


def test_what_the_caller_was_given_is_not_lowered(tmp_path: Path) -> None:
    """Where an operator has the whole office killed early, its guests are not protected by us."""
    pid = os.fork()
    if pid == 0:
        from sublet.node.processes.memory_order import killed_first

        Path("/proc/self/oom_score_adj").write_text("900")
        killed_first()
        os._exit(own_score() != 900)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
