"""Resolves the interpreter named with ``--python`` and tests it before a lease is requested."""

from __future__ import annotations

import os
from typing import Final

from sublet.cli.guest_command import NOT_FOUND, CommandNotStarted

NOT_EXECUTABLE: Final = 126
TRIAL_S: Final = 20.0
"""How long it may take to say its version: a cold disk, and no more."""
_ASKS: Final = "import sys; print('python', sys.version_info[0])"
_SAYS: Final = b"python 3"


def interpreter(named: str) -> str:
    """Its whole path; a link stays a link, since that is what tells an interpreter of its virtual environment. Raises
    ``CommandNotStarted`` for what is no Python."""
    path = _found(named)
    if os.path.isdir(path):
        inside = os.path.join(named, "bin", "python")
        does = f"Try --python {inside}." if os.path.exists(inside) else "Name the file of the interpreter itself."
        raise CommandNotStarted(
            f"{named} is a folder, and --python takes an interpreter", do=does, exit_code=NOT_EXECUTABLE
        )
    if not os.access(path, os.X_OK):
        raise CommandNotStarted(
            f"{named} may not be executed", do="Name a Python interpreter.", exit_code=NOT_EXECUTABLE
        )
    if not _is_python(path):
        raise CommandNotStarted(
            f"{named} is no Python 3 interpreter",
            do="Name one, such as .venv/bin/python; for another program leave out --python.",
            exit_code=NOT_EXECUTABLE,
        )
    return path


def _found(named: str) -> str:
    if os.sep in named:
        candidates = [os.path.abspath(named)]
    else:
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        candidates = [os.path.abspath(os.path.join(folder, named)) for folder in folders]
        candidates.append(os.path.abspath(named))
    found = next((path for path in candidates if os.path.exists(path)), None)
    if found is None:
        raise CommandNotStarted(f"there is no {named}", do="Check the path given with --python.", exit_code=NOT_FOUND)
    return found


def _is_python(path: str) -> bool:
    """By asking it: no name and no first bytes of a file tell."""
    import subprocess

    try:
        found = subprocess.run(
            [path, "-I", "-S", "-c", _ASKS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TRIAL_S,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.stdout.strip() == _SAYS
