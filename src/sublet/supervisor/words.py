"""What people are told of a guest that did not come to run, or had too little to go on. Pure."""

from __future__ import annotations

import errno

from sublet.errors import CapacityExceeded
from sublet.supervisor.spawn import SpawnFailed
from sublet.values import format_size
from sublet.wire.guests import Profile

__all__ = ["out_of_memory", "refused_by_machine", "what_to_do"]


def refused_by_machine(error: OSError) -> CapacityExceeded:
    """The kernel had no process, or no descriptor, for it."""
    return CapacityExceeded(
        f"no process could be started here: {error.strerror or error}",
        do="`sublet doctor` says what this machine allows; it may have too little memory, disk or descriptors.",
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
    if profile is Profile.TENANT and failed.number == errno.ENOENT and failed.step in ("exec", "folder"):
        return (
            "Commands of a tenant see the system's folders (/usr, /etc, /opt and such) and what came with the lease, "
            "and no other file of this machine: `cd /` first, and name a program that lies there."
        )
    return {
        "exec": "Check the spelling and the PATH; a script needs a first line with #! and the right to be executed.",
        "folder": "Choose a working folder that exists and that you may enter.",
    }.get(failed.step, "`sublet doctor` says what this machine allows.")
