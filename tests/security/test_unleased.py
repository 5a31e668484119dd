"""What a lease does not have is not unlimited: its guests have a little of it, and the office's guests all together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

import sublet
from sublet.node.agent.limits import usable_cores
from sublet.node.processes.cgroups import Groups
from sublet.values import MIB
from tests.security.conftest import Place

UNIT: Final = 512 * MIB
KINDS: Final[dict[str, tuple[Callable[[sublet.Fabric], sublet.Lease], int, int]]] = {
    "a byte of disk": (lambda fabric: fabric.block("1B"), 1, UNIT),
    "a core": (lambda fabric: fabric.cpu(1), 1, UNIT),
    "memory": (lambda fabric: fabric.memory("96MiB"), 1, 96 * MIB),
    "two cores": (lambda fabric: fabric.cpu(2), 2, 2 * UNIT),
    "a device": (lambda fabric: fabric.gpu(min_vram="64MiB"), 4, 1024 * MIB + UNIT),
}
"""How it is asked for, and the cores and bytes of memory that its guests may use."""
HOG: Final = "import time; kept = b'x' * (900 << 20); time.sleep(100)"
"""It keeps what it has for longer than from one measurement to the next, however fast it came by it."""
READS: Final = {
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
}


def has(*controllers: str) -> bool:
    """Whether a supervisor of this user's could hold these here."""
    groups = Groups.probe("probe")
    found = all(map(groups.has, controllers))
    groups.remove()
    return found


def group_of(pid: int, controller: str) -> Path:
    """The folder of the control group that holds this process."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return Path(f"/sys/fs/cgroup/{controller}{path}")
    path = next(line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
    return Path(f"/sys/fs/cgroup{path.removeprefix('0::')}")


def cap_of(folder: Path, controller: str) -> int:
    """What this group, or one between it and the office's, allows; 0: anything."""
    least = 0
    while "sublet-" in str(folder):
        for name in READS[controller]:
            file = folder / name
            text = file.read_text().split()[0] if file.exists() else "max"
            value = int(text) if text.lstrip("-").isdigit() else -1
            if 0 < value < 1 << 60:
                least = min(least or value, value)
        if folder.name.startswith("sublet-"):
            break
        folder = folder.parent
    return least


@pytest.mark.skipif(not has(*READS), reason="no control groups for this user here")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two cores" or usable_cores() > 1])
def test_each_kind_of_lease_has_caps(place: Place, kind: str) -> None:
    ask, cores, memory = KINDS[kind]
    with ask(place.ben) as lease:
        guest = lease.start(["sleep", "60"], cwd="/")
        found = {name: cap_of(group_of(guest.pid, name), name) for name in READS}
        assert found == {"memory": memory, "pids": 256 * cores, "cpu": 100_000 * cores}


@pytest.mark.skipif(not has(*READS), reason="no control groups for this user here")
def test_all_guests_of_the_office_together_have_caps(place: Place) -> None:
    """The owner's own as well, which have none by themselves."""
    with place.owner.block("1B") as lease:
        guest = lease.start(["sleep", "60"], cwd="/")
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < cap_of(group_of(guest.pid, "memory"), "memory") < machine
        numbers = int(Path("/proc/sys/kernel/pid_max").read_text())
        office = next(path for path in group_of(guest.pid, "pids").parents if path.name.startswith("sublet-"))
        assert int((office / "pids.max").read_text()) == numbers // 2


def test_a_lease_of_one_byte_of_disk_does_not_give_the_machines_memory(place: Place) -> None:
    """Held by a control group, or measured once a second."""
    with place.ben.block("1B") as lease:
        hog = lease.start(["/usr/bin/python3", "-I", "-c", HOG], cwd="/")
        assert hog.wait(timeout=90) != 0
        said = b"".join(piece.data for piece in hog.output()).decode()
        assert "512MiB" in said


def test_a_lease_without_cores_does_not_give_the_machines_process_numbers(place: Place) -> None:
    with place.ben.block("1B") as lease:
        bomb = lease.start(["sh", "-c", "for i in $(seq 600); do sleep 30 & done; echo all"], cwd="/")
        assert bomb.wait(timeout=60) != 0
        assert b"all" not in b"".join(piece.data for piece in bomb.output())
