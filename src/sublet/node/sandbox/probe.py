"""Tries each part of the isolation on this machine, in a child that ends at once.

Version numbers are not asked: a container, a sysctl or a security module may refuse what the kernel can do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Final

from sublet.node.prctl import set_no_new_privs
from sublet.node.sandbox import landlock, syscalls, system_calls
from sublet.node.sandbox.abilities import Abilities, PartFinding, SandboxPart
from sublet.node.sandbox.enter import close_door_to_namespaces, new_user_namespace, raise_loopback
from sublet.node.sandbox.plan import SandboxPlan, SandboxProfile

_REPORT_MAX: Final = 512
_SOME_UID: Final = 1_900_000_000
_REFUSED: Final = "what it should have refused was possible"


def probe_abilities() -> Abilities:
    """Try every part in a short-lived child. Forks, so it is to be called where one thread runs; takes some tens of
    milliseconds."""
    is_root = os.geteuid() == 0
    findings = {SandboxPart.UID: _tried(_uid) if is_root else PartFinding(False, "this is not root")}
    findings[SandboxPart.USER_NS] = _tried(_user_ns)
    by_user_ns = not findings[SandboxPart.UID].active
    if by_user_ns and not findings[SandboxPart.USER_NS].active:
        why = f"without rights it needs a user namespace: {findings[SandboxPart.USER_NS].why}"
        findings |= {part: PartFinding(False, why) for part in _APART}
    else:
        findings |= {part: _tried(_in_namespace(attempt, by_user_ns)) for part, attempt in _APART.items()}
    findings[SandboxPart.NO_NEW_PRIVS] = _tried(set_no_new_privs)
    with contextlib.suppress(OSError):  # which the attempt will say; made once, and not in each child
        system_calls.program(os.uname().machine)
    findings[SandboxPart.SECCOMP] = _tried(_system_calls)
    abi = _landlock_abi()
    findings[SandboxPart.LANDLOCK] = _tried(lambda: _landlock(abi))
    active = findings[SandboxPart.LANDLOCK].active
    return Abilities(findings=findings, is_root=is_root, landlock_abi=abi if active else 0)


def _tried(attempt: Callable[[], None]) -> PartFinding:
    """Do it in a child; what it says, or that it ended without a word, is the finding."""
    report_read, report_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            attempt()
            code = 0
        except BaseException as error:  # noqa: BLE001 - this is a copy of the caller, and must not go on as one
            with contextlib.suppress(OSError):
                os.write(report_write, _in_words(error).encode()[:_REPORT_MAX])
        finally:
            os._exit(code)
    os.close(report_write)
    with open(report_read, "rb", buffering=0) as file:
        report = file.read(_REPORT_MAX) or b""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return PartFinding(True)
    return PartFinding(False, report.decode("utf-8", "replace") or f"the attempt ended with {status}")


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _in_namespace(attempt: Callable[[], None], by_user_ns: bool) -> Callable[[], None]:
    def inside() -> None:
        if by_user_ns:
            new_user_namespace()
        attempt()

    return inside


def _uid() -> None:
    os.setgroups(())
    os.setresgid(_SOME_UID, _SOME_UID, _SOME_UID)
    os.setresuid(_SOME_UID, _SOME_UID, _SOME_UID)


def _user_ns() -> None:
    """It is of use only if nothing can be made below it."""
    new_user_namespace()


def _pid() -> None:
    with _first_process() as inside:
        if inside and os.getpid() != 1:
            raise OSError("the first process is not the first")


def _uts() -> None:
    syscalls.unshare(syscalls.CLONE_NEWUTS)
    syscalls.set_host_name("probe")
    if socket.gethostname() != "probe":
        raise OSError("the host name did not change")


def _net() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNET)
    raise_loopback()
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))


def _mount() -> None:
    """The whole way: take hold of a folder, make it read-only, put it into a new root, and go there."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("", "/", syscalls.MS_REC | syscalls.MS_PRIVATE)
    tree = syscalls.open_tree("/usr", recursive=True, follow=True)
    attributes = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
    syscalls.set_mount_attributes(tree, attributes, recursive=True)
    stage = "/tmp" if os.path.isdir("/tmp") else "/run"
    syscalls.mount("tmpfs", stage, syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=64k,mode=0755")
    os.chdir(stage)
    for name in ("usr", "pts"):
        os.mkdir(name)
    syscalls.mount_fd_at(tree, "usr")
    syscalls.mount("devpts", "pts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0600")
    syscalls.pivot_root()
    os.chdir("/")
    if sorted(os.listdir("/")) != ["pts", "usr"]:
        raise OSError("the new root is not the root")
    with contextlib.suppress(OSError):
        os.mkdir("/usr/sublet-probe")
        os.rmdir("/usr/sublet-probe")
        raise RuntimeError(f"a read-only folder: {_REFUSED}")


def _proc() -> None:
    with _first_process() as inside:
        if not inside:
            return
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("", "/", syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("proc", "/proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
        if [name for name in os.listdir("/proc") if name.isdigit()] != ["1"]:
            raise OSError("other processes are to be seen")
        try:
            new_user_namespace()
        except OSError:  # then none can be made, and there is no door to close
            return
        close_door_to_namespaces()


@contextlib.contextmanager
def _first_process() -> Iterator[bool]:
    """The body runs twice: as the first process of a new namespace, and (told False) outside; both must go well."""
    syscalls.unshare(syscalls.CLONE_NEWPID)
    report_read, report_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            yield True
            code = 0
        except BaseException as error:  # noqa: BLE001 - see _tried
            with contextlib.suppress(OSError):
                os.write(report_write, _in_words(error).encode()[:_REPORT_MAX])
        finally:
            os._exit(code)
    os.close(report_write)
    report = os.read(report_read, _REPORT_MAX)
    os.close(report_read)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise OSError(report.decode("utf-8", "replace") or "the first process ended early")
    yield False


def _system_calls() -> None:
    set_no_new_privs()
    system_calls.restrict()
    for family in system_calls.FAMILIES[:2]:
        socket.socket(family).close()
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return
    raise OSError(f"a raw socket: {_REFUSED}")


def _landlock_abi() -> int:
    try:
        return syscalls.landlock_abi()
    except OSError:
        return 0


def _landlock(abi: int) -> None:
    syscalls.landlock_abi()
    set_no_new_privs()
    landlock.restrict(SandboxPlan(profile=SandboxProfile.TENANT, steps=(), landlock_abi=abi, reads=("/usr",)))
    os.close(os.open("/usr", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    with contextlib.suppress(PermissionError):
        os.close(os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        raise RuntimeError(f"a folder without a rule: {_REFUSED}")
    if abi >= 6:
        with contextlib.suppress(PermissionError):
            os.kill(os.getppid(), 0)
            raise RuntimeError(f"a signal to a process outside: {_REFUSED}")


_APART: Final = {
    SandboxPart.PID: _pid,
    SandboxPart.IPC: lambda: syscalls.unshare(syscalls.CLONE_NEWIPC),
    SandboxPart.MOUNT: _mount,
    SandboxPart.PROC: _proc,
    SandboxPart.NET: _net,
    SandboxPart.UTS: _uts,
    SandboxPart.CGROUP_NS: lambda: syscalls.unshare(syscalls.CLONE_NEWCGROUP),
}
