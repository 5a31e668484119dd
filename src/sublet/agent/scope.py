"""A scope of systemd for the supervisor, where systemd keeps the books of who belongs to what.

A session of its own is enough to outlive who started it by hand. It is not where systemd ends by control group: an
office that is a service would take its supervisor along whenever it is stopped or restarted, and with it all guests;
and a login session may be ended with all that was begun in it. In a scope of its own the supervisor belongs to neither.
``systemd-run --scope`` asks for one and then *becomes* the command, so nothing else changes, the process id included.

Where that cannot be had (no systemd, no bus, not allowed) the supervisor is started plainly.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Final

__all__ = ["KEPT", "scope_prefix"]

BOOTED: Final = "/run/systemd/system"
"""There where the machine was booted with systemd: what ``sd_booted`` looks at."""
SWITCH: Final = "SUBLET_SCOPE"
KEPT: Final = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
"""What ``systemd-run`` needs to find the manager of a user."""


def scope_prefix(env: Mapping[str, str], *, uid: int | None = None, booted: str = BOOTED) -> list[str]:
    """What to write before the command; nothing where there is no systemd, or ``SUBLET_SCOPE=no`` says so."""
    if env.get(SWITCH, "") == "no" or not os.path.isdir(booted):
        return []
    program = shutil.which("systemd-run", path=env.get("PATH", os.defpath))
    if program is None:
        return []
    is_root = (os.geteuid() if uid is None else uid) == 0
    if not is_root and not env.get("XDG_RUNTIME_DIR"):
        return []  # nobody runs a manager for this user
    whose = "--system" if is_root else "--user"
    return [program, whose, "--scope", "--quiet", "--collect", "--description=Sublet supervisor", "--"]
