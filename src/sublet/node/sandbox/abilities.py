"""What the machine and our rights allow, as facts, and their description for people."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

from sublet.lazy_dataclass import dataclass


class SandboxPart(enum.StrEnum):
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


NAMES: Final[Mapping[SandboxPart, str]] = {
    SandboxPart.UID: "a user number per tenant",
    SandboxPart.USER_NS: "user namespaces",
    SandboxPart.PID: "process namespaces",
    SandboxPart.IPC: "shared memory and message queues apart",
    SandboxPart.MOUNT: "a file system per guest, private /tmp and /dev/shm",
    SandboxPart.PROC: "a process list per guest",
    SandboxPart.NET: "a network per guest",
    SandboxPart.UTS: "a host name per guest",
    SandboxPart.CGROUP_NS: "hidden control groups",
    SandboxPart.SECCOMP: "only listed system calls and the usual kinds of socket",
    SandboxPart.LANDLOCK: "Landlock",
    SandboxPart.NO_NEW_PRIVS: "no new privileges",
}

_USERNS_MENDS: Final = (
    "run the office as root, or allow user namespaces (user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns)"
)
_MENDS: Final[Mapping[SandboxPart, str]] = {
    SandboxPart.UID: "run the office as root",
    SandboxPart.LANDLOCK: "a kernel of 5.13 or newer with landlock among its security modules (lsm=...)",
    SandboxPart.PROC: "outside a container that covers parts of /proc, or as root",
    SandboxPart.NO_NEW_PRIVS: "a kernel of 3.5 or newer",
    SandboxPart.SECCOMP: "a kernel with seccomp filters, on x86-64, 64-bit ARM or RISC-V",
}


class PartFinding(NamedTuple):
    """What trying one part came to."""

    active: bool
    why: str = ""
    """What the kernel answered, where it is not active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What can be had here."""

    findings: Mapping[SandboxPart, PartFinding]
    is_root: bool
    landlock_abi: int = 0
    """0: none. Each number adds something that can be ruled."""

    def has(self, part: SandboxPart) -> bool:
        """Whether it was tried and held."""
        finding = self.findings.get(part)
        return finding is not None and finding.active

    def why_not(self, part: SandboxPart) -> str:
        """What the kernel answered."""
        finding = self.findings.get(part)
        return finding.why if finding is not None else "it was not tried"

    def remedy(self, part: SandboxPart) -> str:
        """What would make it active."""
        return _MENDS.get(part, _USERNS_MENDS)

    def lines(self) -> tuple[str, ...]:
        """One plain line for each part, in the order of ``SandboxPart``."""
        return tuple(self._line(part) for part in SandboxPart)

    def _line(self, part: SandboxPart) -> str:
        name = f"{part.value} ({NAMES[part]})"
        if part is SandboxPart.LANDLOCK and self.has(part):
            return f"{name}: active, version {self.landlock_abi}{self._landlock_lacks()}"
        if self.has(part):
            return f"{name}: active"
        if part is SandboxPart.UID and self.has(SandboxPart.USER_NS):
            shared = "all tenants' guests are this user's, each in a user namespace"
            return f"{name}: not active, {self.why_not(part)}; {shared}. To fix: {self.remedy(part)}"
        return f"{name}: not active, {self.why_not(part)}. To fix: {self.remedy(part)}"

    def _landlock_lacks(self) -> str:
        lacks = [what for abi, what in _LANDLOCK_SINCE if self.landlock_abi < abi]
        return f" (without {', '.join(lacks)}: a newer kernel has it)" if lacks else ""


_LANDLOCK_SINCE: Final = (
    (3, "truncation"),
    (4, "TCP ports"),
    (5, "device calls"),
    (6, "signals and abstract sockets"),
)
