"""Carries out the isolation plan in the child, between fork and exec. A failed step is named."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.node.prctl import set_no_new_privs
from sublet.node.sandbox import init, landlock, root, syscalls, system_calls
from sublet.node.sandbox.abilities import SandboxPart
from sublet.node.sandbox.plan import SandboxPlan, SandboxProfile, SandboxStep


class EnterFailed(OSError):
    """A wall could not be built; the command must not run."""

    def __init__(self, step: str, number: int, why: str) -> None:
        super().__init__(number, f"{step}: {why}")
        self.step = step


@dataclass(slots=True)
class _Way:
    """What one step leaves for a later one."""

    parent: int
    keep: Collection[int]
    mask: Collection[int]
    status: int = -1
    proc: int = -1
    """The folder ``/proc`` with nothing made read-only in it."""


def enter(plan: SandboxPlan, *, parent: int, keep: Collection[int] = ()) -> int:
    """Build the walls around this process. Returns the pid of its parent, for PDEATHSIG, as it is seen from inside.

    To be called once, in a child with one thread whose parent is ``parent``, after it has its descriptors 0 to 2 and
    has joined its control groups, and before it asks for PDEATHSIG. With a process namespace, this returns in *another*
    process: the one it was called in becomes the guest's stand-in outside, never returns, and ends as the command ends.
    From then on modules can no longer be imported, because their files may be out of sight.

    ``keep`` names descriptors that outlive the exec; all others from 3 on close there, and not before, so that a pipe
    for errors works to the end.
    """
    way = _Way(parent, keep, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    for step in plan.steps:
        try:
            _DO[step](plan, way)
        except OSError as error:
            raise EnterFailed(step.value, error.errno or 0, str(error)) from error
    return 1 if plan.forks else parent


def new_user_namespace() -> None:
    """Rights over new namespaces, and over nothing that was there before; and in it, be who one was.

    The files that say who one is open only to a process that may be looked into, so for this moment it may.
    """
    uid, gid = os.getuid(), os.getgid()  # afterwards both read as the overflow id (65534) until they are mapped
    syscalls.set_dumpable(True)
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def close_door_to_namespaces(proc: int | None = None) -> None:
    """No user namespace below this one. In a further one a guest would have rights over a part of the kernel again.

    ``proc``: the folder ``/proc``, where what lies under that path cannot be written to.
    """
    name = "sys/user/max_user_namespaces"
    fd = os.open(f"/proc/{name}" if proc is None else name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(fd, b"0")
    finally:
        os.close(fd)


def raise_loopback() -> None:
    """A new network has only loopback, and that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        request = struct.pack("16sH22x", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


_IFF_UP: Final = 1
_SIOCSIFFLAGS: Final = 0x8914
_FLAGS: Final[Mapping[SandboxPart, int]] = {
    SandboxPart.IPC: syscalls.CLONE_NEWIPC,
    SandboxPart.MOUNT: syscalls.CLONE_NEWNS,
    SandboxPart.NET: syscalls.CLONE_NEWNET,
    SandboxPart.UTS: syscalls.CLONE_NEWUTS,
    SandboxPart.CGROUP_NS: syscalls.CLONE_NEWCGROUP,
}


def _user_ns(plan: SandboxPlan, way: _Way) -> None:
    new_user_namespace()


def _init(plan: SandboxPlan, way: _Way) -> None:
    way.status = init.become_init(way.parent)


def _namespaces(plan: SandboxPlan, way: _Way) -> None:
    flags = 0
    for part, flag in _FLAGS.items():
        flags |= flag if part in plan.namespaces else 0
    syscalls.unshare(flags)


def _root(plan: SandboxPlan, way: _Way) -> None:
    way.proc = root.build(plan)


def _command(plan: SandboxPlan, way: _Way) -> None:
    init.become_command(way.status, way.mask)
    init.take_terminal()


def _limits(plan: SandboxPlan, way: _Way) -> None:
    policy = plan.policy
    _cap(resource.RLIMIT_CORE, 0)
    _cap(resource.RLIMIT_NOFILE, policy.files_max)
    if policy.file_bytes:
        _cap(resource.RLIMIT_FSIZE, policy.file_bytes)
    if plan.processes_max:
        _cap(resource.RLIMIT_NPROC, plan.processes_max)
    os.umask(0o077)


def _cap(kind: int, wanted: int) -> None:
    """Never above what already holds."""
    hard = resource.getrlimit(kind)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (value, value))


def _uid(plan: SandboxPlan, way: _Way) -> None:
    if plan.ids is None:
        raise ValueError("a plan with this step has a user number")
    os.setgroups(())
    os.setresgid(plan.ids.gid, plan.ids.gid, plan.ids.gid)
    os.setresuid(plan.ids.uid, plan.ids.uid, plan.ids.uid)


def _no_nested(plan: SandboxPlan, way: _Way) -> None:
    if SandboxPart.USER_NS not in plan.namespaces:
        new_user_namespace()
        syscalls.drop_bounding_set()  # a new namespace begins with a full one
    close_door_to_namespaces(way.proc)
    os.close(way.proc)


def _capabilities(plan: SandboxPlan, way: _Way) -> None:
    syscalls.set_capabilities()
    syscalls.set_dumpable(False)  # until the exec this is a copy of the supervisor


def _descriptors(plan: SandboxPlan, way: _Way) -> None:
    syscalls.cloexec_from(3)
    for fd in way.keep:
        os.set_inheritable(fd, True)
    if plan.profile is SandboxProfile.TENANT:
        signal.pthread_sigmask(signal.SIG_SETMASK, way.mask)


_DO: Final[Mapping[SandboxStep, Callable[[SandboxPlan, _Way], None]]] = {
    SandboxStep.USER_NS: _user_ns,
    SandboxStep.INIT: _init,
    SandboxStep.NAMESPACES: _namespaces,
    SandboxStep.LOOPBACK: lambda plan, way: raise_loopback(),
    SandboxStep.HOST_NAME: lambda plan, way: syscalls.set_host_name("guest"),
    SandboxStep.ROOT: _root,
    SandboxStep.COMMAND: _command,
    SandboxStep.LIMITS: _limits,
    SandboxStep.BOUNDING: lambda plan, way: syscalls.drop_bounding_set(),
    SandboxStep.UID: _uid,
    SandboxStep.NO_NESTED: _no_nested,
    SandboxStep.NO_NEW_PRIVS: lambda plan, way: set_no_new_privs(),
    SandboxStep.LANDLOCK: lambda plan, way: landlock.restrict(plan),
    SandboxStep.KEYRING: lambda plan, way: syscalls.new_session_keyring(),
    SandboxStep.SYSTEM_CALLS: lambda plan, way: system_calls.restrict(),
    SandboxStep.CAPABILITIES: _capabilities,
    SandboxStep.DESCRIPTORS: _descriptors,
}


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
