"""Sets the order for the kernel's out-of-memory killer: guests first, the supervisor last.

The kernel adds ``oom_score_adj`` to the share of memory that a process has. The supervisor ends guests at their
deadlines, and with it all guests end, so nothing is gained by killing it. To ask for less than one was started with
takes ``CAP_SYS_RESOURCE``; to ask for more takes nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

SUPERVISOR: Final = -900
GUEST: Final = 500
_OWN: Final = "/proc/self/oom_score_adj"


def killed_last() -> None:
    """The OOM killer takes this process, and what it starts, last. Without the right to ask for that nothing
    changes."""
    with contextlib.suppress(OSError):
        _write(SUPERVISOR)


def killed_first() -> None:
    """The OOM killer takes this process and its children first; a higher score that the office was given stays."""
    with contextlib.suppress(OSError, ValueError):
        with open(_OWN, "rb", buffering=0) as file:
            present = int(file.read(16))
        if present < GUEST:
            _write(GUEST)


def _write(value: int) -> None:
    fd = os.open(_OWN, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)
