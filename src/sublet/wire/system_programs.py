"""Locates the system programs that an office runs: ``mkfs.ext4``, ``systemd-run``.

For root they are taken from the system's own folders alone, and only where root alone could have put something
else in their place: ``PATH`` is what the caller of ``sudo`` had, and may begin with a folder of that user's.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from sublet.wire.unix import replaceable

SYSTEM_FOLDERS: Final = ("/usr/sbin", "/usr/bin", "/sbin", "/bin", "/run/current-system/sw/bin")
"""The last is where NixOS has them."""
_OTHERS_WRITE: Final = 0o022


def find_program(name: str, path: str, *, uid: int | None = None) -> str | None:
    """The absolute path of a program; None if there is none.

    The folders of ``path`` (``PATH`` of the environment) are looked into first, unless this runs as root.
    """
    uid = os.geteuid() if uid is None else uid
    folders_given = path.split(os.pathsep) if uid else []
    for folder in (*folders_given, *SYSTEM_FOLDERS):
        file = os.path.join(folder, name)
        if os.path.isabs(file) and os.access(file, os.X_OK) and (uid or _is_roots(file)):
            return file
    return None


def _is_roots(file: str) -> bool:
    """Whether no other user could have put it there."""
    real = os.path.realpath(file)
    try:
        found = os.stat(real)
    except OSError:
        return False
    if found.st_uid not in (0, os.getuid()) or not stat.S_ISREG(found.st_mode) or found.st_mode & _OTHERS_WRITE:
        return False
    return not replaceable(real, set()) and not replaceable(file, set())
