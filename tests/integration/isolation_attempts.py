"""The attempts to escape. Each returns what it got if it got out, and raises ``OSError`` (or returns "") if it did not.

The same function runs in a guest and, as its control, in a process without walls, where it must succeed: only then does
its failure in a guest mean anything. ``control`` says who is able to in principle.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import stat
import subprocess
import termios
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from sublet.node.sandbox import syscalls
from sublet.node.sandbox.abilities import SandboxPart
from tests.integration.isolation_world import (
    KEYCTL,
    KEYRING_SESSION,
    KEYRING_USER,
    SECRET,
    Message,
    World,
    checked,
    libc,
    syscall,
)

__all__ = ["ATTEMPTS", "FILES_MAX", "FILE_BYTES", "PROCESSES_MAX", "TMP_BYTES", "Attempt"]

Control = Literal["anybody", "namespaces", "set-uid", "root", "nobody"]
"""Who succeeds without walls: any user; one who may make user namespaces; anybody where a set-uid program could be
laid out; only root; or nobody is asked to, since it would harm or the machine itself forbids it."""

FILES_MAX = 200
PROCESSES_MAX = 40
TMP_BYTES = 4 << 20
FILE_BYTES = 6 << 20
ALWAYS: frozenset[SandboxPart] = frozenset()
FILE_WALLS = frozenset((SandboxPart.MOUNT, SandboxPart.LANDLOCK))
PEERS = frozenset((SandboxPart.PID, SandboxPart.LANDLOCK))


@dataclass(frozen=True)
class Attempt:
    name: str
    run: Callable[[World], str]
    walls: frozenset[SandboxPart]
    """Each of these alone holds it off. Empty: it is held off by what every plan has."""
    control: Control
    landlock_abi: int = 1
    """From which version on Landlock is one of the walls."""

    def standing(self, active: Collection[str], landlock_abi: int) -> set[str]:
        """The names of those walls that stand here."""
        walls = {part.value for part in self.walls} & set(active)
        return walls - {SandboxPart.LANDLOCK.value} if landlock_abi < self.landlock_abi else walls


ATTEMPTS: dict[str, Attempt] = {}


def attempt(
    *walls: SandboxPart | frozenset[SandboxPart], control: Control = "anybody", abi: int = 1
) -> Callable[[Callable[[World], str]], Callable[[World], str]]:
    parts = frozenset(part for wall in walls for part in ([wall] if isinstance(wall, SandboxPart) else wall))

    def keep(run: Callable[[World], str]) -> Callable[[World], str]:
        ATTEMPTS[run.__name__] = Attempt(run.__name__, run, parts, control, abi)
        return run

    return keep


def holds_secret(raw: bytes) -> str:
    return "the secret" if SECRET in raw else ""


def read(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return holds_secret(file.read(1 << 20) or b"")


def first(tries: Iterator[Callable[[], str]]) -> str:
    """The first that gets anything; else the last refusal."""
    refusal: OSError | None = None
    for one in tries:
        try:
            got = one()
        except OSError as error:
            refusal = error
        else:
            if got:
                return got
    if refusal is not None:
        raise refusal
    return ""


def victims(world: World) -> list[int]:
    """The neighbour and the supervisor, and in a guest whatever else has a number here."""
    here = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [world.neighbour, world.supervisor] if world.is_control else [world.neighbour, world.supervisor, 1, *here]


# ---------------------------------------------------------------------------------------------------------- files


@attempt(FILE_WALLS)
def read_the_state_folder(world: World) -> str:
    return read(world.secret)


@attempt(FILE_WALLS)
def list_the_state_folder(world: World) -> str:
    return " ".join(os.listdir(world.state))


@attempt(FILE_WALLS)
def write_into_the_state_folder(world: World) -> str:
    path = f"{world.state}/planted"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.unlink(path)
    return path


@attempt(FILE_WALLS)
def read_the_home_of_the_caller(world: World) -> str:
    return read(f"{world.home}/.key")


@attempt(FILE_WALLS)
def read_the_folder_of_another_tenant(world: World) -> str:
    return read(f"{world.other}/notebook")


@attempt(FILE_WALLS)
def follow_a_symbolic_link_out(world: World) -> str:
    link = f"{world.own}/link-{os.getpid()}"
    os.symlink(world.secret, link)
    try:
        return read(link)
    finally:
        os.unlink(link)


@attempt(FILE_WALLS)
def hard_link_a_secret_in(world: World) -> str:
    link = f"{world.own}/hard-{os.getpid()}"
    os.link(world.secret, link)
    try:
        return read(link)
    finally:
        os.unlink(link)


@attempt(FILE_WALLS)
def climb_out_by_dots(world: World) -> str:
    os.chdir(world.own)
    return read("../" * 40 + world.secret.lstrip("/"))


@attempt(FILE_WALLS)
def read_a_file_in_tmp(world: World) -> str:
    return read(world.tmp_file)


@attempt(FILE_WALLS, control="root")
def write_a_system_folder(world: World) -> str:
    path = f"/usr/sublet-isolation-{world.supervisor}"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.unlink(path)
    return path


@attempt(FILE_WALLS, SandboxPart.UID, SandboxPart.USER_NS, control="root")
def escape_from_a_chroot(world: World) -> str:
    jail = f"{world.own}/jail-{os.getpid()}"
    os.mkdir(jail)
    try:
        os.chroot(jail)
        for _ in range(40):
            os.chdir("..")
        os.chroot(".")
        return read(world.secret)
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(jail)


@attempt(control="root")
def open_a_file_by_its_handle(world: World) -> str:
    class Handle(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_uint), ("kind", ctypes.c_int), ("raw", ctypes.c_char * 128))

    handle, mount_id = Handle(128, 0, b""), ctypes.c_int()
    checked(libc.name_to_handle_at(-100, world.own.encode(), ctypes.byref(handle), ctypes.byref(mount_id), 0))
    here = os.open(world.own, os.O_RDONLY)
    os.close(checked(libc.open_by_handle_at(here, ctypes.byref(handle), os.O_RDONLY)))
    return "a folder by its handle"


@attempt(PEERS, SandboxPart.PROC)
def reach_files_through_the_root_of_another(world: World) -> str:
    return first(partial(read, f"/proc/{pid}/root{world.secret}") for pid in victims(world))


@attempt(PEERS, SandboxPart.PROC)
def reach_files_through_the_folder_of_another(world: World) -> str:
    up = "../" * 40
    return first(partial(read, f"/proc/{pid}/cwd/{up}{world.secret}") for pid in victims(world))


# ------------------------------------------------------------------------------------------------------ processes


@attempt(SandboxPart.PROC)
def see_other_processes(world: World) -> str:
    names = []
    for pid in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if pid.isdigit() and int(pid) != os.getpid():
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    names.append(file.read())
    return "the neighbour" if b"sleep\x00600\x00" in names or any(b"isolation_stage" in name for name in names) else ""


@attempt(PEERS)
def read_the_environment_of_another(world: World) -> str:
    return first(partial(read, f"/proc/{pid}/environ") for pid in victims(world))


def _memory(pid: int) -> str:
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            if "[stack]" not in line and "[heap]" not in line:
                continue
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            memory.seek(start)
            if got := holds_secret(memory.read(end - start) or b""):
                return got
    return ""


@attempt(PEERS)
def read_the_memory_of_another(world: World) -> str:
    return first(partial(_memory, pid) for pid in victims(world))


@attempt(PEERS)
def copy_the_memory_of_another(world: World) -> str:
    """Only whether it would be allowed: nothing lies at the address, and only who is allowed is told so."""
    buffer = ctypes.create_string_buffer(8)

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    here, there = Piece(ctypes.addressof(buffer), 8), Piece(8, 8)

    def copy(pid: int) -> str:
        try:
            checked(libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
        except OSError as error:
            if error.errno == errno.EFAULT:
                return f"the memory of {pid}"
            raise
        return f"the memory of {pid}"

    return first(partial(copy, pid) for pid in victims(world))


def _seize(pid: int) -> str:
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    checked(libc.ptrace(0x4206, pid, 0, 0))  # PTRACE_SEIZE
    return f"traces {pid}"  # the tracer's end lets it go


@attempt(PEERS)
def trace_another(world: World) -> str:
    return first(partial(_seize, pid) for pid in victims(world)[:1])


@attempt(PEERS)
def trace_what_stands_over_the_guest(world: World) -> str:
    return _seize(world.neighbour if world.is_control else os.getppid())


@attempt(PEERS, abi=6)
def signal_another(world: World) -> str:
    def send(pid: int) -> str:
        os.kill(pid, signal.SIGCONT)
        return f"signalled {pid}"

    return first(partial(send, pid) for pid in (world.neighbour, world.supervisor))


@attempt(PEERS, abi=6)
def queue_a_signal_by_descriptor(world: World) -> str:
    fd = os.pidfd_open(world.neighbour)
    signal.pidfd_send_signal(fd, signal.SIGCONT)
    return "signalled"


@attempt(SandboxPart.PID, SandboxPart.LANDLOCK, control="nobody", abi=6)
def end_everybody(world: World) -> str:
    """Whether anybody fell is seen by those who come after."""
    os.kill(-1, signal.SIGKILL)
    return ""


@attempt(SandboxPart.PID)
def renice_another(world: World) -> str:
    os.setpriority(os.PRIO_PROCESS, world.neighbour, os.getpriority(os.PRIO_PROCESS, world.neighbour))
    return "reniced"


@attempt(SandboxPart.PID)
def bind_another_to_a_core(world: World) -> str:
    os.sched_setaffinity(world.neighbour, os.sched_getaffinity(world.neighbour))
    return "bound"


@attempt(SandboxPart.PID)
def change_the_limits_of_another(world: World) -> str:
    _be_the_neighbour(world)
    resource.prlimit(world.neighbour, resource.RLIMIT_CORE, resource.prlimit(world.neighbour, resource.RLIMIT_CORE))
    return "limited"


def _be_the_neighbour(world: World) -> None:
    """Root in a container may lack the one right that this takes from root; the same user needs none."""
    if world.is_control and os.geteuid() == 0:
        uid = os.stat(f"/proc/{world.neighbour}").st_uid
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


@attempt(PEERS)
def take_a_descriptor_of_another(world: World) -> str:
    fd = os.pidfd_open(world.neighbour)
    return f"descriptor {syscall(438, fd, 0, 0)}"  # pidfd_getfd


@attempt(PEERS)
def read_the_descriptors_of_the_supervisor(world: World) -> str:
    tries = (
        partial(read, f"/proc/{pid}/fd/{fd}")
        for pid in {world.supervisor, os.getppid(), 1}
        for fd in ((world.secret_fd,) if world.is_control else range(32))
    )
    return first(tries)


@attempt(PEERS)
def enter_the_namespaces_of_another(world: World) -> str:
    for kind in ("mnt", "net", "ipc", "user"):
        with contextlib.suppress(OSError):
            os.close(os.open(f"/proc/{world.neighbour}/ns/{kind}", os.O_RDONLY))
            return f"has its {kind} namespace in hand"
    return ""


@attempt(SandboxPart.PROC, SandboxPart.PID, SandboxPart.LANDLOCK)
def make_another_the_first_to_be_ended(world: World) -> str:
    path = f"/proc/{world.neighbour}/oom_score_adj"
    with open(path) as file:
        now = file.read()
    with open(path, "w") as file:
        file.write(now)
    return now


# -------------------------------------------------------------------------------------------------- between processes


@attempt(SandboxPart.IPC)
def attach_shared_memory(world: World) -> str:
    number = checked(libc.shmget(world.sysv_key, 0, 0))
    address = libc.shmat(number, None, 0o10000)
    return holds_secret(ctypes.string_at(address, 64))


@attempt(SandboxPart.IPC)
def take_a_message(world: World) -> str:
    number, message = checked(libc.msgget(world.sysv_key, 0)), Message()
    checked(libc.msgrcv(number, ctypes.byref(message), 64, 0, 0o44000))  # MSG_COPY | IPC_NOWAIT
    return holds_secret(message.text)


@attempt(SandboxPart.IPC)
def open_a_message_queue(world: World) -> str:
    os.close(checked(libc.mq_open(world.queue_name.encode(), os.O_RDWR)))
    return world.queue_name


@attempt(FILE_WALLS)
def open_named_shared_memory(world: World) -> str:
    return read(f"/dev/shm/{world.shm_name}")


def _connect(family: int, address: str | tuple[str, int]) -> str:
    with socket.socket(family) as guest:
        guest.settimeout(5)
        guest.connect(address)
        return f"connected to {address!r}"


@attempt(SandboxPart.MOUNT)
def connect_to_the_supervisor(world: World) -> str:
    return _connect(socket.AF_UNIX, world.socket)


@attempt(SandboxPart.NET, SandboxPart.LANDLOCK, abi=6)
def connect_to_an_abstract_socket(world: World) -> str:
    return _connect(socket.AF_UNIX, world.abstract)


@attempt(SandboxPart.NET, SandboxPart.LANDLOCK, abi=4)
def connect_to_a_port(world: World) -> str:
    return _connect(socket.AF_INET, ("127.0.0.1", world.tcp_port))


@attempt(control="root")
def listen_to_the_wire(world: World) -> str:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW):
        return "a raw socket"


@attempt(SandboxPart.SECCOMP, control="root")
def make_a_socket_that_no_namespace_parts(world: World) -> str:
    """Those to the host of a virtual machine, of the kernel's ciphers, of other transports."""
    got = []
    for family in (40, 38, 30, 42, 17):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            with contextlib.suppress(OSError), socket.socket(family, kind):
                got.append(family)
    return " ".join(map(str, got))


@attempt(SandboxPart.SECCOMP, control="root")
def work_behind_the_back_of_a_filter(world: World) -> str:
    ring = ctypes.create_string_buffer(120)
    try:
        os.close(syscall(425, 4, ring))  # io_uring_setup
    except OSError:
        with open("/proc/sys/kernel/io_uring_disabled") as file:  # by the operator, for everybody
            if world.is_control and file.read().strip() == "2":
                return "nothing to be had here"
        raise
    return "io_uring"


def _key(ring: int) -> str:
    number = syscall(KEYCTL, 10, ring, b"user", b"sublet-isolation", 0)
    buffer = ctypes.create_string_buffer(64)
    syscall(KEYCTL, 11, number, buffer, 64)
    return holds_secret(buffer.raw)


@attempt()
def read_a_key_of_the_session(world: World) -> str:
    return _key(KEYRING_SESSION)


@attempt(SandboxPart.USER_NS)
def read_a_key_of_the_user(world: World) -> str:
    return _key(KEYRING_USER)


@attempt(FILE_WALLS)
def type_into_the_terminal_of_the_caller(world: World) -> str:
    if os.fork() == 0:  # in a session of its own, so that the terminal can be had
        os.setsid()
        try:
            fd = os.open(world.terminal, os.O_RDWR)
            fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
            with contextlib.suppress(OSError):  # newer kernels refuse the typing itself to everybody
                fcntl.ioctl(fd, termios.TIOCSTI, b"x")
            os._exit(0)
        except OSError:
            os._exit(1)
    return "typed" if os.waitstatus_to_exitcode(os.wait()[1]) == 0 else ""


# ---------------------------------------------------------------------------------------------- devices and the kernel


@attempt(control="root")
def make_a_device_node(world: World) -> str:
    path = f"{world.own}/node-{os.getpid()}"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    try:
        os.close(os.open(path, os.O_RDONLY))
        return path
    finally:
        os.unlink(path)


@attempt(FILE_WALLS, control="root")
def open_a_device_of_somebody_else(world: World) -> str:
    nodes = (
        "/dev/fuse",
        "/dev/kmsg",
        "/dev/ptmx",
        "/dev/vda",
        "/dev/sda",
        "/dev/loop-control",
        "/dev/net/tun",
        "/dev/mem",
    )
    for node in nodes:
        with contextlib.suppress(OSError):
            fd = os.open(node, os.O_RDONLY | os.O_NONBLOCK)
            os.close(fd)
            if node != "/dev/ptmx":
                return node
    return ""


def _private_mounts(world: World) -> None:
    """The control does it where it harms nobody."""
    if world.is_control:
        flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS
        syscalls.unshare(flags if os.geteuid() == 0 else flags | syscalls.CLONE_NEWUSER)
        if os.geteuid() == 0:
            syscalls.mount("", "/", syscalls.MS_REC | syscalls.MS_PRIVATE)


@attempt(control="namespaces")
def mount_something(world: World) -> str:
    _private_mounts(world)
    syscalls.mount("tmpfs", world.own)
    return "mounted"


@attempt(control="root")
def mount_the_devices(world: World) -> str:
    _private_mounts(world)
    syscalls.mount("devtmpfs", world.own)
    return "mounted"


@attempt(control="root")
def take_down_a_mount(world: World) -> str:
    _private_mounts(world)
    syscalls.detach("/proc")
    return "taken down"


@attempt(control="root")
def make_a_system_folder_writable(world: World) -> str:
    _private_mounts(world)
    checked(libc.mount(None, b"/usr" if not world.is_control else b"/", None, ctypes.c_ulong(0x20 | 0x1000), None))
    return "writable"


@attempt(control="namespaces")
def change_the_root(world: World) -> str:
    _private_mounts(world)
    if world.is_control:
        syscalls.mount("tmpfs", world.own)
    os.chdir(world.own)
    syscalls.pivot_root()
    return "another root"


@attempt(SandboxPart.USER_NS, control="namespaces")
def make_a_user_namespace(world: World) -> str:
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    return "all rights in it"


@attempt(control="root")
def make_another_namespace(world: World) -> str:
    got = []
    for flag in (syscalls.CLONE_NEWNET, syscalls.CLONE_NEWNS, syscalls.CLONE_NEWIPC, syscalls.CLONE_NEWPID):
        with contextlib.suppress(OSError):
            syscalls.unshare(flag)
            got.append(hex(flag))
    return " ".join(got)


@attempt(control="root")
def change_the_host_name(world: World) -> str:
    _private_mounts(world)
    syscalls.set_host_name("mine")
    return "mine"


def _open_to_write(*paths: str) -> str:
    def try_one(path: str) -> str:
        os.close(os.open(path, os.O_WRONLY))
        return path

    return first(partial(try_one, path) for path in paths)


@attempt(control="root")
def set_what_runs_at_a_crash(world: World) -> str:
    return _open_to_write("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe")


@attempt(control="root")
def turn_a_knob_of_the_kernel(world: World) -> str:
    return _open_to_write("/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger", "/proc/sys/kernel/hostname")


@attempt(control="root")
def turn_a_knob_below_sys(world: World) -> str:
    return _open_to_write("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/profiling", "/sys/power/state")


@attempt(control="root")
def leave_the_control_group(world: World) -> str:
    found = [
        f"{where}/{name}"
        for where in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/memory")
        for name in ("cgroup.procs", "tasks")
    ]
    return _open_to_write(*found)


@attempt(control="root")
def read_the_log_of_the_kernel(world: World) -> str:
    buffer = ctypes.create_string_buffer(4096)
    return f"{checked(libc.klogctl(3, buffer, 4096))} bytes" if _dmesg_is_restricted() or world.is_control else ""


def _dmesg_is_restricted() -> bool:
    with open("/proc/sys/kernel/dmesg_restrict") as file:
        return file.read().strip() == "1"


@attempt(control="nobody")
def set_the_clock(world: World) -> str:
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    return "set"


@attempt(control="root")
def become_root(world: World) -> str:
    os.setresuid(0, 0, 0)
    return "root"


@attempt(control="root")
def become_another_tenant(world: World) -> str:
    os.setgroups([1_900_000_001])
    os.setresuid(1_900_000_001, 1_900_000_001, 1_900_000_001)
    return "another"


@attempt(control="set-uid")
def gain_from_a_set_uid_program(world: World) -> str:
    if not world.set_uid:
        return ""
    if world.is_control and os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    said = subprocess.run([world.set_uid, "-u"], capture_output=True, timeout=60, check=True).stdout
    return "root" if said.strip() == b"0" else ""


@attempt(control="root")
def run_before_the_others(world: World) -> str:
    os.nice(-5)
    return "earlier"


@attempt()
def raise_a_limit(world: World) -> str:
    resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))
    return "core files"


@attempt(control="nobody")
def raise_the_limit_of_descriptors(world: World) -> str:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard + 1, hard + 1))
    return "more files"


# ----------------------------------------------------------------------------------------------------- what is there


@attempt()
def find_a_descriptor_left_open(world: World) -> str:
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            if got := holds_secret(os.pread(fd, 64, 0)):
                return got
    return ""


@attempt()
def find_a_secret_in_the_environment(world: World) -> str:
    """Through a program, which sees what an exec hands on."""
    said = subprocess.run(["/usr/bin/env"], capture_output=True, timeout=60, check=True, env=_handed(world)).stdout
    return holds_secret(said)


def _handed(world: World) -> dict[str, str]:
    return dict(os.environ)


@attempt(control="set-uid")
def preload_into_what_has_rights(world: World) -> str:
    """The loader's variables reach the guest's own programs; a set-uid one runs without rights, so they are dull."""
    if not world.set_uid:
        return ""
    if world.is_control:
        return gain_from_a_set_uid_program(world)
    hostile = {"LD_PRELOAD": f"{world.own}/evil.so", "LD_AUDIT": f"{world.own}/evil.so", "PYTHONPATH": world.own}
    with open(f"{world.own}/evil.so", "wb") as file:
        file.write(b"\x7fELF")
    said = subprocess.run([world.set_uid, "-u"], capture_output=True, timeout=60, env=hostile).stdout
    return "root" if said.strip() == b"0" else ""


# --------------------------------------------------------------------------------------------------------- too much


@attempt()
def bomb_with_forks(world: World) -> str:
    read_end, write_end = os.pipe()
    children = 0
    try:
        for _ in range(3 * PROCESSES_MAX):
            if os.fork() == 0:
                os.close(write_end)
                os.read(read_end, 1)
                os._exit(0)
            children += 1
    except OSError:
        pass
    os.close(write_end)
    for _ in range(children):
        os.wait()
    return f"{children} processes" if children > PROCESSES_MAX else ""


@attempt()
def bomb_with_descriptors(world: World) -> str:
    held: list[int] = []
    with contextlib.suppress(OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while len(held) <= 2 * FILES_MAX:
            held.append(os.open("/dev/null", os.O_RDONLY))
    for fd in held:
        os.close(fd)
    return f"{len(held)} descriptors" if len(held) > FILES_MAX else ""


def _fill_up(folder: str, wanted: int) -> str:
    path, piece = f"{folder}/sublet-fill-{os.getpid()}", b"\1" * (1 << 20)
    written = 0
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
    try:
        with contextlib.suppress(OSError):
            while written < wanted:
                written += os.write(fd, piece)
    finally:
        os.close(fd)
        os.unlink(path)
    return f"{written} bytes" if written >= wanted else ""


@attempt(SandboxPart.MOUNT, SandboxPart.LANDLOCK)
def fill_the_temporary_folder(world: World) -> str:
    return _fill_up("/tmp", 2 * TMP_BYTES)


@attempt(SandboxPart.MOUNT, SandboxPart.LANDLOCK)
def fill_the_shared_memory(world: World) -> str:
    return _fill_up("/dev/shm", 2 * TMP_BYTES)


@attempt()
def write_a_huge_file(world: World) -> str:
    return _fill_up(world.own, FILE_BYTES + (2 << 20))


@attempt(FILE_WALLS, control="root")
def fill_the_root(world: World) -> str:
    return _fill_up("/run" if world.is_control else "/", 1 << 20)
