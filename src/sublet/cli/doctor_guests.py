"""The doctor's checks of guests: how they are ended, which limits and isolation hold, and whether sizes are enforced.

Each part is tried for real, in short-lived processes and groups that are gone again afterwards. What control groups
allow is tried where the supervisor will be: in a scope of systemd, if one is given.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sublet.node.processes.cgroups import CgroupFinding

PATH_SHOWN = 44
"""Characters of a path, so that a line fits into a terminal."""

SCOPE_S = 20
"""A manager that has not given a scope by then gives none to the supervisor either."""

_IN_SCOPE = """
import sys
sys.path.insert(0, sys.argv[1])
import json
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.cgroups_places import enter_child_group
enter_child_group()
groups = Groups.probe(sys.argv[2])
print(json.dumps(groups.describe()))
groups.remove()
"""

Check = Callable[[], tuple[str, str] | tuple[str, str, str]]


def guest_checks() -> dict[str, Check]:
    """One for each part; none where guests cannot run at all."""
    if sys.platform != "linux":
        return {}
    return {
        "guests: after a logout": check_logout,
        "guests: ends come first": _check_priority,
        **_group_checks(),
        **_store_checks(),
        **_wall_checks(),
    }


def check_logout(root: str = "/") -> tuple[str, str] | tuple[str, str, str]:
    """Whether what runs outlives the login from which the office was started."""
    booted = os.path.join(root, "run/systemd/system")
    if not os.path.isdir(booted):
        return "ok", "they go on: the supervisor has a session of its own, and no systemd is here that could end it"
    has_scope = _in_scope(booted) is not None
    if os.geteuid() == 0 or os.path.exists(os.path.join(root, "var/lib/systemd/linger", _user())):
        if has_scope:
            return "ok", "they go on: systemd gives the supervisor a scope of its own"
        return "ok", "they go on: the supervisor has a session of its own (no scope of systemd), and yours may linger"
    what = (
        "they go on while the office does (the scope is your own manager's); where KillUserProcesses=yes both end"
        if has_scope
        else "no scope of systemd can be had, and where KillUserProcesses=yes it ends the supervisor"
    )
    return "note", f"{what} with your last login", "Have what you start stay: loginctl enable-linger."


def _in_scope(booted: str) -> list[CgroupFinding] | None:
    """What control groups allow in a scope as the supervisor has one; None where none is given. Tried for real."""
    from sublet.node.agent.scope import scope_prefix
    from sublet.node.agent.starting import package_folder
    from sublet.node.processes.cgroups import CgroupFinding

    prefix = scope_prefix(os.environ, booted=booted)
    if not prefix:
        return None
    argv = [*prefix, sys.executable, "-I", "-S", "-c", _IN_SCOPE, package_folder(), _name()]
    try:
        output = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=SCOPE_S, check=True).stdout
        return [CgroupFinding(*fields) for fields in json.loads(output)]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):  # refused, or something else was run
        return None


def _name() -> str:
    """A name that no office has."""
    return f"doctor-{secrets.token_hex(4)}"


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a number without a name
        return str(os.geteuid())


def _check_priority() -> tuple[str, str] | tuple[str, str, str]:
    from sublet.node.priority import Priority

    found = Priority()
    if found.may:
        return "ok", found.finding
    return "note", found.finding, "Run the office as root, or with CAP_SYS_NICE, to have it."


def _group_checks() -> dict[str, Check]:
    from sublet.node.agent.scope import BOOTED

    return {
        f"guests: {finding.part}": partial(_check_result, finding) for finding in _in_scope(BOOTED) or _own_findings()
    }


def _own_findings() -> list[CgroupFinding]:
    """The same where this process is: a supervisor without a scope is below it."""
    from sublet.node.processes.cgroups import Groups

    groups = Groups.probe(_name())
    try:
        return groups.describe()
    finally:
        groups.remove()


_INSTEAD = {
    "memory": "; it is measured once a second instead, and a guest that uses more than leased is ended",
    "pids": "; of a tenant's processes the kernel counts those of its user instead",
    "cpu": "; guests are kept on so many cores instead, which a program may undo",
    "devices": "; tenants' guests find their own devices and no other where they have a file system of their own",
}


def _shortened(text: str) -> str:
    """Where a folder of control groups lies is told by its beginning; services and containers put it deep down."""
    return " ".join(
        f"{word[:PATH_SHOWN]}…{')' * word.endswith(')')}" if len(word) > PATH_SHOWN + 2 else word
        for word in text.split(" ")
    )


def _store_checks() -> dict[str, Check]:
    """Made and taken away again, in a folder of their own: an image with a file system, a file system in memory."""
    from sublet.node.storage.project_quota import why_not
    from sublet.node.storage.stores_work import probe

    with tempfile.TemporaryDirectory(prefix="sublet-doctor-") as folder:
        block, memory = probe(folder)
        quota = why_not(folder)
    return {
        "leases: size of folders": partial(_stored, _how_folders(block, quota), bool(block)),
        "leases: size of memory segments": partial(
            _stored,
            f"a sealed file for guests of profile local, none for tenants' guests: {memory}"
            if memory
            else "enforced: a sealed file, and for tenants' guests a file system in memory",
            bool(memory),
        ),
    }


def _how_folders(block: str, quota: str) -> str:
    if not block:
        return "enforced, by an image with ext4 in it"
    if not quota:
        return f"enforced for tenants' guests, by quotas of projects; counted and said for others: {block}"
    return f"counted and said, not enforced: {block}; {quota}"


def _stored(text: str, is_less: bool) -> tuple[str, str] | tuple[str, str, str]:
    return ("note", text, "Run the office as root, with e2fsprogs and loop devices.") if is_less else ("ok", text)


def _wall_checks() -> dict[str, Check]:
    from sublet.node.sandbox import SandboxPart
    from sublet.node.sandbox.probe import probe_abilities

    found = probe_abilities()
    lines = dict(zip(SandboxPart, found.lines(), strict=True))
    return {
        f"tenants: {part.value}": partial(_wall, found.has(part), lines[part].partition("): ")[2])
        for part in SandboxPart
    }


def _check_result(finding: CgroupFinding) -> tuple[str, str] | tuple[str, str, str]:
    text = _shortened(finding.text)
    if finding.is_active:
        return "ok", text
    text += _INSTEAD.get(finding.part, "")
    if "Sublet does not load" in text:  # no process can have it there
        return "note", text
    if os.geteuid() == 0 and "no hierarchy" in text:
        return "note", text, f"Mount them: {mount_groups()}"
    return "note", text, "Run the office as root, or in a group that is delegated to you, to have it."


def mount_groups(root: str = "/") -> str:
    """The command with which control groups are mounted: those of version 1 where the kernel has given controllers to
    such hierarchies, since no other can have them then."""
    with open(os.path.join(root, "proc/cgroups")) as file:
        rows = [line.split() for line in file if not line.startswith("#")]
    old: dict[str, list[str]] = {}
    for name, hierarchy, *_ in rows:
        if hierarchy != "0":
            old.setdefault(hierarchy, []).append(name)
    if not old:
        return "mount -t cgroup2 cgroup2 /sys/fs/cgroup"
    names = " ".join(",".join(together) for together in old.values())
    each = "mkdir $g && mount -t cgroup -o $g $g $g"
    return f"mount -t tmpfs -o mode=755 groups /sys/fs/cgroup && cd /sys/fs/cgroup && for g in {names}; do {each}; done"


def _wall(is_active: bool, line: str) -> tuple[str, str] | tuple[str, str, str]:
    what, _, mends = line.partition(". To fix: ")
    return ("ok", what) if is_active else ("note", what, f"To fix: {mends}.")
