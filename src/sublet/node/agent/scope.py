"""Starts the supervisor in a systemd scope of its own, where systemd manages control groups.

A session of its own is enough to outlive who started it by hand. It is not where systemd ends by control group: an
office that is a service would take its supervisor along whenever it is stopped or restarted, and with it all guests;
and a login session may be ended with all that was begun in it. In a scope of its own the supervisor belongs to neither.
``systemd-run --scope`` asks for one and then *becomes* the command, so nothing else changes, the process id included.

The scope is *delegated*: what is made below it is the supervisor's, with all controllers that there are, and systemd
leaves it alone. That is how guests have limits where control groups are of the second version.

Where that cannot be had (no systemd, no bus, not allowed) the supervisor is started plainly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from sublet.wire.system_programs import find_program

BOOTED: Final = "/run/systemd/system"
"""There where the machine was booted with systemd: what ``sd_booted`` looks at."""
USERS: Final = "/run/user"
"""Where the managers of users have their folders, each under the number of its user."""
SWITCH: Final = "SUBLET_SCOPE"
KEPT: Final = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
"""What ``systemd-run`` needs to find the manager of a user."""
_SCOPE_OPTIONS: Final = (
    "--scope",
    "--quiet",
    "--collect",
    "--property=Delegate=yes",
    "--property=TasksMax=infinity",  # guests have limits of their own
    "--description=Sublet supervisor",
    "--",
)


def scope_prefix(
    env: Mapping[str, str], *, uid: int | None = None, booted: str = BOOTED, users: str = USERS
) -> list[str]:
    """What to write before the command; nothing where there is no systemd, or ``SUBLET_SCOPE=no`` says so."""
    if env.get(SWITCH, "") == "no" or not os.path.isdir(booted):
        return []
    path = env.get("PATH", os.defpath)
    uid = os.geteuid() if uid is None else uid
    program = find_program("systemd-run", path, uid=uid)
    if program is None:
        return []
    if uid == 0:
        return [program, "--system", *_SCOPE_OPTIONS]
    if _has_manager(env.get(KEPT[0], "")):
        return [program, "--user", *_SCOPE_OPTIONS]
    own, env_program = f"{users}/{uid}", find_program("env", path, uid=uid)
    if not _has_manager(own) or env_program is None:
        return []  # this user has no running service manager
    # After `su`, in a cron job or in a service the variables that tell where it is are missing, or another user's.
    return [env_program, f"--unset={KEPT[1]}", f"{KEPT[0]}={own}", program, "--user", *_SCOPE_OPTIONS]


def _has_manager(folder: str) -> bool:
    """Whether a manager listens there, and this process may see it."""
    return bool(folder) and os.path.exists(f"{folder}/systemd/private")
