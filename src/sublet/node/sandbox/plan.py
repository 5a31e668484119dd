"""Plans a guest's isolation: which parts, in which order. Pure: abilities and wishes come in.

A wall that must hold and cannot be had is a refusal: a guest is never started with less than was promised. The operator
may allow that one is missing (``allow_missing``), and then ``SandboxPlan.missing`` says which, so that it can be shown.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Final, Literal, NamedTuple

from sublet.errors import InvalidRequest, Unsupported
from sublet.lazy_dataclass import dataclass
from sublet.node.sandbox.abilities import NAMES, Abilities, SandboxPart


class SandboxProfile(enum.StrEnum):
    """How far a guest is kept apart."""

    LOCAL = "local"
    """The user's own work, as the user: nothing but what the supervisor itself must not hand on."""
    TENANT = "tenant"
    """The work of another user."""


class SandboxStep(enum.StrEnum):
    """One thing done between fork and exec. The members stand in the order in which they are done."""

    USER_NS = "user namespace"
    INIT = "process namespace"
    """From here on the process is another one: the first of its namespace. The old one waits for it, outside."""
    NAMESPACES = "namespaces"
    LOOPBACK = "loopback"
    HOST_NAME = "host name"
    ROOT = "file system"
    COMMAND = "command process"
    """From here on the process is the one that becomes the command. The first of the namespace watches it."""
    LIMITS = "limits"
    BOUNDING = "capability bounds"
    UID = "user"
    NO_NESTED = "no further namespaces"
    NO_NEW_PRIVS = "no new privileges"
    LANDLOCK = "landlock"
    KEYRING = "keyring"
    SYSTEM_CALLS = "system calls"
    CAPABILITIES = "capabilities"
    DESCRIPTORS = "descriptors"


class Ids(NamedTuple):
    """Whose the guest's processes and files are."""

    uid: int
    gid: int


class Bind(NamedTuple):
    """A file or folder of the machine that the guest finds under the same path."""

    path: str
    writable: bool = False
    device: bool = False
    optional: bool = True
    """Left out where the machine has none; a guest's own folder must be there."""
    file: bool = False
    """Whether it is a file that may be written to, not a folder."""


SYSTEM_PATHS: Final = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/opt", "/sbin", "/usr", "/nix/store", "/gnu/store")
"""Programs and libraries; readable by all users on any machine."""

BASIC_NODES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")

MASKED: Final = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore", "/proc/key-users"),
    *("/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
)
"""What the kernel tells there of the whole machine, or of its keys and addresses, is empty in a guest. As in Docker,
and with ``key-users`` and ``kallsyms``."""
SEALED: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""What can be turned there cannot be turned by a guest, whatever rights it may come to."""
GROUPS: Final = "/sys/fs/cgroup"
"""The control groups of all users of the machine: their names, processes, memory. Where a guest has its own mounts
without a user namespace this is not in its /sys in the first place."""

_MIB: Final = 1 << 20

_MUST: Final = (
    SandboxPart.PID,
    SandboxPart.IPC,
    SandboxPart.MOUNT,
    SandboxPart.PROC,
    SandboxPart.NET,
    SandboxPart.NO_NEW_PRIVS,
    SandboxPart.SECCOMP,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPolicy:
    """What the operator of this machine decided."""

    allow_missing: frozenset[str] = frozenset()
    """Names of parts (``SandboxPart``; ``uid`` stands for user number or user namespace) that may be missing."""
    network: Literal["none", "host"] = "none"
    """``none``: the guest has loopback and nothing else. ``host``: it has this machine's network."""
    tmp_bytes: int = 1024 * _MIB
    """The size of each of /tmp and /var/tmp. What lies there is memory, and counted as the guest's."""
    shm_bytes: int = 1024 * _MIB
    """The size of /dev/shm."""
    home_bytes: int = 256 * _MIB
    """The size of the guest's own folder, which is memory as well."""
    files_max: int = 4096
    """Open descriptors of one process."""
    file_bytes: int = 0
    """The largest file that may be written; 0 leaves it open."""
    processes_max: int = 512
    """Processes of the tenant, where no control group counts them."""

    def __post_init__(self) -> None:
        unknown = self.allow_missing - {part.value for part in SandboxPart}
        if unknown:
            raise InvalidRequest(
                f"no part of the isolation is called {min(unknown)!r}",
                do=f"The parts are: {', '.join(part.value for part in SandboxPart)}.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One guest, as far as its walls are concerned."""

    folder: str
    """The guest's own folder, writable: its home. Where it has a file system of its own, an empty one in memory."""
    tenant: str = ""
    ids: Ids | None = None
    """From ``Uids``; needed for profile ``tenant`` as root."""
    readable: tuple[str, ...] = ()
    """Interpreter prefixes, the working folder, read-only data, the page of the lease."""
    writable: tuple[str, ...] = ()
    """Further folders of this guest: the folder of a block lease, a staging folder."""
    written: tuple[str, ...] = ()
    """Single files that it may write to; what lies beside them is not shown."""
    devices: tuple[str, ...] = ()
    """The device nodes of the lease."""
    hidden: tuple[str, ...] = ()
    """The office's state and runtime folders, the folders of other tenants, the caller's home: covered where something
    readable would show them. What is given and lies below a hidden folder is shown all the same."""
    counted: bool = False
    """Whether a control group counts its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlan:
    """What ``enter`` does."""

    profile: SandboxProfile
    steps: tuple[SandboxStep, ...]
    namespaces: frozenset[SandboxPart] = frozenset()
    ids: Ids | None = None
    policy: SandboxPolicy = field(default_factory=SandboxPolicy)
    binds: tuple[Bind, ...] = ()
    """In the order in which they are put up: a folder before what lies in it."""
    covers: tuple[str, ...] = ()
    """Paths that are covered by an empty folder."""
    home: str = ""
    """Where a file system in memory is put up for the guest alone."""
    landlock_abi: int = 0
    landlock_tcp: bool = False
    """Whether Landlock has to stand in for a network namespace: no TCP at all."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    """Device nodes that Landlock lets the guest use; its own terminals, where it has a /dev of its own."""
    processes_max: int = 0
    missing: tuple[SandboxPart, ...] = ()
    """Walls that the guest does not have, by the operator's leave."""

    @property
    def forks(self) -> bool:
        """Whether ``enter`` comes back in another process than it was called in."""
        return SandboxStep.INIT in self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRefusal:
    """The guest is not started: this wall cannot be had."""

    part: SandboxPart
    message: str
    do: str

    def error(self) -> Unsupported:
        """As an error for people."""
        return Unsupported(self.message, do=self.do)


def plan(
    profile: SandboxProfile, abilities: Abilities, wish: Wish, policy: SandboxPolicy | None = None
) -> SandboxPlan | SandboxRefusal:
    """Decide. ``local`` is never refused."""
    policy = policy or SandboxPolicy()
    if profile is SandboxProfile.LOCAL:
        return SandboxPlan(profile=profile, steps=(SandboxStep.DESCRIPTORS,), policy=policy)
    missing = tuple(_missing(abilities, policy))
    for part in missing:
        if part.value not in policy.allow_missing:
            return _refusal(part, abilities)
    return _tenant(abilities, wish, policy, missing)


def _missing(abilities: Abilities, policy: SandboxPolicy) -> Iterator[SandboxPart]:
    if not (abilities.has(SandboxPart.UID) or abilities.has(SandboxPart.USER_NS)):
        yield SandboxPart.UID
    for part in _MUST:
        if part is SandboxPart.NET and policy.network == "host":
            continue
        if part is SandboxPart.PROC and not (abilities.has(SandboxPart.PID) and abilities.has(SandboxPart.MOUNT)):
            continue  # the process list goes with the other two, and they are named already
        if not abilities.has(part):
            yield part
    if not abilities.has(SandboxPart.LANDLOCK) and not abilities.has(SandboxPart.MOUNT):
        yield SandboxPart.LANDLOCK


def _refusal(part: SandboxPart, abilities: Abilities) -> SandboxRefusal:
    name = "uid or userns" if part is SandboxPart.UID else part.value
    what = f"{NAMES[part]} or {NAMES[SandboxPart.USER_NS]}" if part is SandboxPart.UID else NAMES[part]
    return SandboxRefusal(
        part=part,
        message=f"a tenant's guest needs {what} ({name}), and this machine refuses it: {abilities.why_not(part)}",
        do=f"To fix: {abilities.remedy(part)}. Or allow guests without it, in policy.toml: "
        f'[lease] allow_missing = ["{part.value}"].',
    )


def _tenant(abilities: Abilities, wish: Wish, policy: SandboxPolicy, missing: tuple[SandboxPart, ...]) -> SandboxPlan:
    by_uid = abilities.has(SandboxPart.UID)
    if by_uid and wish.ids is None:
        raise ValueError("profile tenant as root needs the tenant's user number (wish.ids)")
    apart = frozenset(_namespaces(abilities, policy))
    mount = SandboxPart.MOUNT in apart
    own = (wish.folder, *wish.writable, *wish.written)
    system = (*SYSTEM_PATHS, "/sys")
    return SandboxPlan(
        profile=SandboxProfile.TENANT,
        steps=tuple(step for step in SandboxStep if _is_wanted(step, abilities, apart, by_uid)),
        namespaces=apart,
        ids=wish.ids if by_uid else None,
        policy=policy,
        binds=_binds(wish, system) if mount else (),
        covers=_covers(wish, system) if mount else (),
        home=wish.folder if mount else "",
        landlock_abi=abilities.landlock_abi if abilities.has(SandboxPart.LANDLOCK) else 0,
        landlock_tcp=policy.network == "none" and SandboxPart.NET not in apart,
        reads=(*system, *wish.readable, "/proc"),
        writes=(*own, "/tmp", "/var/tmp", "/dev/shm") if mount else own,
        nodes=(*BASIC_NODES, *(("/dev/pts",) if mount else ()), *wish.devices),
        processes_max=0 if wish.counted else policy.processes_max,
        missing=missing,
    )


def _namespaces(abilities: Abilities, policy: SandboxPolicy) -> Iterator[SandboxPart]:
    if not abilities.has(SandboxPart.UID) and abilities.has(SandboxPart.USER_NS):
        yield SandboxPart.USER_NS
    for part in (SandboxPart.PID, SandboxPart.IPC, SandboxPart.MOUNT, SandboxPart.UTS, SandboxPart.CGROUP_NS):
        if abilities.has(part):
            yield part
    if abilities.has(SandboxPart.PROC) and abilities.has(SandboxPart.PID) and abilities.has(SandboxPart.MOUNT):
        yield SandboxPart.PROC
    if abilities.has(SandboxPart.NET) and policy.network == "none":
        yield SandboxPart.NET


def _is_wanted(step: SandboxStep, abilities: Abilities, apart: frozenset[SandboxPart], by_uid: bool) -> bool:
    match step:
        case SandboxStep.USER_NS:
            return SandboxPart.USER_NS in apart
        case SandboxStep.INIT | SandboxStep.COMMAND:
            return SandboxPart.PID in apart
        case SandboxStep.NAMESPACES:
            return bool(apart - {SandboxPart.USER_NS, SandboxPart.PID, SandboxPart.PROC})
        case SandboxStep.LOOPBACK:
            return SandboxPart.NET in apart
        case SandboxStep.HOST_NAME:
            return SandboxPart.UTS in apart
        case SandboxStep.ROOT:
            return SandboxPart.MOUNT in apart
        case SandboxStep.UID:
            return by_uid
        case SandboxStep.NO_NESTED:  # it writes below /proc/sys, which is certain to be writable only where it is new
            return abilities.has(SandboxPart.USER_NS) and SandboxPart.PROC in apart
        case SandboxStep.NO_NEW_PRIVS:
            return abilities.has(SandboxPart.NO_NEW_PRIVS)
        case SandboxStep.LANDLOCK:
            return abilities.has(SandboxPart.LANDLOCK) and abilities.has(SandboxPart.NO_NEW_PRIVS)
        case SandboxStep.SYSTEM_CALLS:
            return abilities.has(SandboxPart.SECCOMP) and abilities.has(SandboxPart.NO_NEW_PRIVS)
        case (
            SandboxStep.BOUNDING
            | SandboxStep.KEYRING
            | SandboxStep.CAPABILITIES
            | SandboxStep.LIMITS
            | SandboxStep.DESCRIPTORS
        ):
            return True


def _binds(wish: Wish, system: tuple[str, ...]) -> tuple[Bind, ...]:
    binds = {path: Bind(path) for path in (*system, *wish.readable)}
    binds |= {path: Bind(path, device=True, optional=path in BASIC_NODES) for path in (*BASIC_NODES, *wish.devices)}
    own = wish.writable  # what lies in another of them is there already, and may be a trap by now
    outer = [path for path in own if not any(_is_below(path, other) for other in own)]
    binds |= {path: Bind(path, writable=True, optional=False) for path in outer}
    binds |= {path: Bind(path, writable=True, optional=False, file=True) for path in wish.written}
    return tuple(sorted(binds.values(), key=lambda bind: (_depth(bind.path), bind.path)))


def _covers(wish: Wish, system: tuple[str, ...]) -> tuple[str, ...]:
    """Hidden folders that a shown folder would show, to be covered; those in no shown folder do not exist there."""
    shown = (*system, *wish.readable, *wish.writable)
    covers = {hidden for hidden in wish.hidden if any(_is_below(hidden, path) for path in shown)}
    return tuple(sorted(covers, key=_depth))


def _is_below(path: str, above: str) -> bool:
    return path != above and path.startswith(above.rstrip("/") + "/")


def _depth(path: str) -> int:
    return path.rstrip("/").count("/")


# ---------------------------------------------------------------------------------------------------------- environment
#
# Builds the environment of a tenant's guest, without anything of the office's.


SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"


def clean_env(
    tenant: str,
    *,
    home: str,
    tmpdir: str = "/tmp",
    term: str = "dumb",
    path_first: str = "",
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """A new environment. Nothing is taken over from this process; ``extra`` is what the holder asked for.

    What the holder asks for may be anything, ``LD_PRELOAD`` too: it is read by the guest alone, which has no rights
    that its holder lacks. The six names below are not for asking.
    """
    found = dict(extra or {})
    found.update(
        PATH=f"{path_first}:{SYSTEM_PATH}" if path_first else SYSTEM_PATH,
        HOME=home,
        LANG="C.UTF-8",
        TERM=term,
        TMPDIR=tmpdir,
        USER=tenant,
    )
    return found
