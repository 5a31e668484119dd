"""Explains why a killed process still exists, for the operator of a quarantined resource."""

from __future__ import annotations

import signal
from typing import Final

from sublet.node.processes.cgroups_places import CgroupFiles, find_places
from sublet.node.processes.procs import ProcessInstance, Procs

_KILL_BIT: Final = 1 << (signal.SIGKILL - 1)


def why_alive(procs: Procs, identity: ProcessInstance, files: CgroupFiles | None = None) -> str:
    """What keeps it, as far as the kernel tells; empty if it is gone."""
    stat = procs.stat(identity.pid)
    if stat is None or stat.start_ticks != identity.start_ticks or stat.is_gone:
        return ""
    who = f"process {identity.pid} ({procs.text(identity.pid, 'comm').strip()})"
    if is_frozen(procs, identity.pid, files):
        group = _freezer_group(procs, identity.pid)
        return f"{who} is frozen in the control group {group} and can end only when it is thawed"
    if not _is_killed(procs, identity.pid):
        return f"{who} is running"
    if stat.state == ord("D"):
        return f"{who} was killed and waits inside the kernel, for a device or a file system that does not answer"
    return f"{who} was killed and has not ended yet"


def is_frozen(procs: Procs, pid: int, files: CgroupFiles | None = None) -> bool:
    """Whether a freezer of v1 holds it, in which not even SIGKILL ends it. (That of v2 lets a kill through.)"""
    files = files or CgroupFiles()
    group = _freezer_group(procs, pid)
    tops = [place.top for place in find_places(procs.root, files) if "freezer" in place.controllers and not place.is_v2]
    states = [files.read(f"{top}{group}/freezer.state") for top in tops if group not in ("", "/")]
    return any((state or "").strip() in ("FROZEN", "FREEZING") for state in states)


def _freezer_group(procs: Procs, pid: int) -> str:
    for line in procs.text(pid, "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if "freezer" in names.split(","):
            return path
    return ""


def _is_killed(procs: Procs, pid: int) -> bool:
    lines = procs.text(pid, "status").splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask & _KILL_BIT for mask in pending)
