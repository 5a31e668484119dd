"""Messages about a guest that did not start, or ran short of a resource. Pure."""

from __future__ import annotations

import errno
from typing import Final

from sublet.errors import CapacityExceeded
from sublet.node.processes.spawn import SpawnFailed
from sublet.values import format_size
from sublet.wire.guests import Profile


def refused_by_machine(error: OSError) -> CapacityExceeded:
    """The kernel had no process, or no descriptor, for it."""
    return CapacityExceeded(
        f"no process could be started here: {error.strerror or error}",
        do=_NO_ROOM
        if error.errno == errno.ENOSPC
        else "`sublet doctor` says what this machine allows; it may have too little memory, disk or descriptors.",
    )


def out_of_memory(allowed: int, used: int = 0) -> str:
    """The line for a guest that had too little: what its lease allows, and what was used if that was measured."""
    if not allowed:
        return "the machine has no memory left, and the kernel ended a process of this guest (out_of_memory)"
    if used:
        return f"the lease has {format_size(allowed)} of memory and its guests used {format_size(used)} (out_of_memory)"
    return f"the lease has {format_size(allowed)} of memory and needed more; the kernel ended a process (out_of_memory)"


def what_to_do(failed: SpawnFailed, profile: Profile) -> str:
    """For a person whose command did not come to run."""
    if profile is Profile.TENANT and failed.number in _HIDDEN:
        if failed.step == "folder":
            return f"This folder is hidden from the commands of a tenant. {_SEEN} `cd` into one of those first."
        if failed.step == "exec":
            return (
                f"It may be there and be hidden from the commands of a tenant. {_SEEN} Name a program that lies there."
            )
    return {
        "exec": "Check the spelling and the PATH; a script needs a first line with #! and the right to be executed.",
        "folder": "Choose a working folder that exists and that you may enter.",
        "group": _NO_ROOM if failed.number == errno.ENOSPC else _DOCTOR,
    }.get(failed.step, _DOCTOR)


_HIDDEN: Final = (errno.ENOENT, errno.EACCES, errno.EPERM)
_SEEN: Final = (
    "They see the system's folders (/, /usr, /etc, /opt and such), those that came with the lease, an interpreter that "
    "was named with --python, and no other file of this machine."
)
_DOCTOR: Final = "`sublet doctor` says what this machine allows."
_NO_ROOM: Final = (
    "The kernel has no room for one more control group (those of memory stay for a while after their end), or a disk "
    "is full: wait a moment, and try again."
)
