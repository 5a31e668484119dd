"""The doctor's checks of what holds guests: how they are ended, what can be capped, which walls a tenant's guest has,
whether the sizes of folders and segments hold.

Each part is tried for real, in short-lived processes and groups that are gone again afterwards.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from functools import partial

__all__ = ["Check", "check_logout", "guest_checks"]

PATH_SHOWN = 44
"""Characters of a path, so that a line fits into a terminal."""

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
    from sublet.agent.scope import scope_prefix

    booted = os.path.join(root, "run/systemd/system")
    if not os.path.isdir(booted):
        return "ok", "they go on: the supervisor has a session of its own, and no systemd is here that could end it"
    if scope_prefix(os.environ, booted=booted):
        return "ok", "they go on: the supervisor asks systemd for a scope of its own"
    if os.geteuid() == 0 or os.path.exists(os.path.join(root, "var/lib/systemd/linger", _user())):
        return "ok", "they go on: the supervisor has a session of its own (no scope of systemd), and yours may linger"
    return (
        "note",
        "no scope of systemd can be had, and where KillUserProcesses=yes it ends the supervisor with your last login",
        "Have what you start stay: loginctl enable-linger.",
    )


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a number without a name
        return str(os.geteuid())


def _check_priority() -> tuple[str, str] | tuple[str, str, str]:
    from sublet.supervisor.priority import Priority

    found = Priority()
    if found.may:
        return "ok", found.said
    return "note", found.said, "Run the office as root, or with CAP_SYS_NICE, to have it."


def _group_checks() -> dict[str, Check]:
    from sublet.supervisor.cgroups import Groups

    groups = Groups.probe(f"doctor-{secrets.token_hex(4)}")
    try:
        return {
            f"guests: {said.part}": partial(_said, said.is_active, said.text + _INSTEAD.get(said.part, ""))
            if not said.is_active
            else partial(_said, True, _shortened(said.text))
            for said in groups.describe()
        }
    finally:
        groups.remove()


_INSTEAD = {
    "memory": "; it is measured once a second instead, and who has more than leased is ended",
    "cpu": "; guests are kept on so many cores instead, which a program may undo",
}


def _shortened(text: str) -> str:
    """Where a folder of control groups lies is told by its beginning; services and containers put it deep down."""
    return " ".join(
        f"{word[:PATH_SHOWN]}…{')' * word.endswith(')')}" if len(word) > PATH_SHOWN + 2 else word
        for word in text.split(" ")
    )


def _store_checks() -> dict[str, Check]:
    """Made and taken away again, in a folder of their own: an image with a file system, a file system in memory."""
    from sublet.supervisor.project_quota import why_not
    from sublet.supervisor.stores_work import probe

    with tempfile.TemporaryDirectory(prefix="sublet-doctor-") as folder:
        block, memory = probe(folder)
        quota = why_not(folder)
    return {
        "leases: size of folders": partial(
            _stored,
            _how_folders(block, quota),
            bool(block),
        ),
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
    from sublet.supervisor.isolation import Abilities, Part

    found = Abilities.probe()
    lines = dict(zip(Part, found.lines(), strict=True))
    return {f"tenants: {part.value}": partial(_wall, found.has(part), lines[part].partition("): ")[2]) for part in Part}


def _said(is_active: bool, text: str) -> tuple[str, str] | tuple[str, str, str]:
    if is_active:
        return "ok", text
    return "note", text, "Run the office as root, or in a group that is delegated to you, to have it."


def _wall(is_active: bool, line: str) -> tuple[str, str] | tuple[str, str, str]:
    what, _, mends = line.partition(". To mend: ")
    return ("ok", what) if is_active else ("note", what, f"To mend: {mends}.")
