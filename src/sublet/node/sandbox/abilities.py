"""What the machine and our rights allow, as facts, and their description for people."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple


class Part(enum.StrEnum):
    """One wall. Each is tried by itself and said by itself."""

    UID = "uid"
    """A user number for every tenant."""
    USER_NS = "userns"
    """A user namespace: rights that count for nothing outside it."""
    PID = "pid"
    IPC = "ipc"
    MOUNT = "mount"
    """A file system of its own: only what is given is there."""
    PROC = "proc"
    """A process list of its own."""
    NET = "net"
    UTS = "uts"
    CGROUP_NS = "cgroupns"
    SECCOMP = "seccomp"
    """No system calls but those that are listed, and no kinds of socket but the usual."""
    LANDLOCK = "landlock"
    NO_NEW_PRIVS = "no_new_privs"


NAMES: Final[Mapping[Part, str]] = {
    Part.UID: "a user number per tenant",
    Part.USER_NS: "user namespaces",
    Part.PID: "process namespaces",
    Part.IPC: "shared memory and message queues apart",
    Part.MOUNT: "a file system per guest, private /tmp and /dev/shm",
    Part.PROC: "a process list per guest",
    Part.NET: "a network per guest",
    Part.UTS: "a host name per guest",
    Part.CGROUP_NS: "hidden control groups",
    Part.SECCOMP: "only listed system calls and the usual kinds of socket",
    Part.LANDLOCK: "Landlock",
    Part.NO_NEW_PRIVS: "no new privileges",
}

_USERNS_MENDS: Final = (
    "run the office as root, or allow user namespaces (user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns)"
)
_MENDS: Final[Mapping[Part, str]] = {
    Part.UID: "run the office as root",
    Part.LANDLOCK: "a kernel of 5.13 or newer with landlock among its security modules (lsm=...)",
    Part.PROC: "outside a container that covers parts of /proc, or as root",
    Part.NO_NEW_PRIVS: "a kernel of 3.5 or newer",
    Part.SECCOMP: "a kernel with seccomp filters, on x86-64, 64-bit ARM or RISC-V",
}


class Finding(NamedTuple):
    """What trying one part came to."""

    active: bool
    why: str = ""
    """What the kernel answered, where it is not active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What can be had here."""

    findings: Mapping[Part, Finding]
    is_root: bool
    landlock_abi: int = 0
    """0: none. Each number adds something that can be ruled."""

    def has(self, part: Part) -> bool:
        """Whether it was tried and held."""
        finding = self.findings.get(part)
        return finding is not None and finding.active

    def why_not(self, part: Part) -> str:
        """What the kernel answered."""
        finding = self.findings.get(part)
        return finding.why if finding is not None else "it was not tried"

    def mends(self, part: Part) -> str:
        """What would make it active."""
        return _MENDS.get(part, _USERNS_MENDS)

    def lines(self) -> tuple[str, ...]:
        """One plain line for each part, in the order of ``Part``."""
        return tuple(self._line(part) for part in Part)

    def _line(self, part: Part) -> str:
        name = f"{part.value} ({NAMES[part]})"
        if part is Part.LANDLOCK and self.has(part):
            return f"{name}: active, version {self.landlock_abi}{self._landlock_lacks()}"
        if self.has(part):
            return f"{name}: active"
        if part is Part.UID and self.has(Part.USER_NS):
            shared = "all tenants' guests are this user's, each in a user namespace"
            return f"{name}: not active, {self.why_not(part)}; {shared}. To fix: {self.mends(part)}"
        return f"{name}: not active, {self.why_not(part)}. To fix: {self.mends(part)}"

    def _landlock_lacks(self) -> str:
        lacks = [what for abi, what in _LANDLOCK_SINCE if self.landlock_abi < abi]
        return f" (without {', '.join(lacks)}: a newer kernel has it)" if lacks else ""


_LANDLOCK_SINCE: Final = (
    (3, "truncation"),
    (4, "TCP ports"),
    (5, "device calls"),
    (6, "signals and abstract sockets"),
)
