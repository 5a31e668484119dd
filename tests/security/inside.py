"""What a hostile program tries first, from inside: some three hundred attempts, of which none may succeed.

It is run as text in a guest (``python -c``, or handed to a worker), so it needs the standard library alone. Each
attempt says what it got, or how it was refused. The calls that a filter refuses are made with arguments that the kernel
itself would refuse in another way: so it can be told whether the kernel was reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial

KEPT_OUT = ("EPERM", "ENOSYS")
FAMILIES = range(46)
KINDS = {"stream": 1, "datagram": 2, "raw": 3, "seqpacket": 5}
USUAL = {1, 2, 10, 16}
"""Local sockets, the internet's, netlink."""
CLONE = {
    "time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
    "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip
CONTROL_LEAVES_OUT = frozenset(("vhangup",))
"""It takes no argument, so it cannot be made to fail where it is allowed."""

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(number: int, *words: int | bytes | None) -> int:
    """A system call by its number."""
    passed = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    return checked(libc.syscall(ctypes.c_long(number), *passed))


def checked(answer: int) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def told(attempt: Callable[[], object]) -> str:
    """``refused`` and why, or what it got: anything but False and an empty text."""
    try:
        got = attempt()
    except (OSError, ValueError) as error:  # setrlimit refuses with a ValueError
        return f"refused {errno.errorcode.get(getattr(error, 'errno', 0) or 0, type(error).__name__)}"
    return "refused nothing" if got is False or got == "" else f"GOT {got!r}"


# ------------------------------------------------------------------------------------------------ calls, by number


def calls(numbers: dict[str, int]) -> Iterator[tuple[str, Callable[[], str]]]:
    for name, number in numbers.items():

        def reach(number: int = number) -> str:
            try:
                call(number, -1, -1, -1, -1, -1, -1)
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, str(error.errno))
                if name in KEPT_OUT:
                    raise
                return f"the kernel said {name}"
            return "it was done"

        yield f"call {name}", reach


def conditions(numbers: dict[str, int]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of which only some arguments are refused."""
    for persona in (0x40000, 0x80000, 0x100000, 0x200000, 0x400000, 0x800000, 0x1000000, 0x2000000, 0x4000000, 1, 3):
        yield f"personality {persona:#x}", partial(call, numbers["personality"], persona)

    def clone(flag: int) -> str:
        pid = call(numbers["clone"], flag | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return f"process {pid}"

    for name, flag in CLONE.items():
        if name != "time":
            yield f"clone into a new {name} namespace", partial(clone, flag)
        yield f"unshare {name}", partial(call, numbers["unshare"], flag)
    for kind, word in (("character", stat.S_IFCHR), ("block", stat.S_IFBLK)):
        yield f"mknod {kind}", partial(os.mknod, "node", word | 0o666, os.makedev(1, 3))
    yield "mknod of a white-out", partial(os.mknod, "white", stat.S_IFCHR | 0o600, os.makedev(0, 0))


def enter_namespaces() -> Iterator[tuple[str, Callable[[], object]]]:
    for kind in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"):
        for whose in ("self", "1", "thread-self", str(os.getppid())):

            def enter(path: str = f"/proc/{whose}/ns/{kind}") -> str:
                fd = os.open(path, os.O_RDONLY)
                try:
                    checked(libc.setns(fd, 0))
                finally:
                    os.close(fd)
                return path

            yield f"setns {kind} of {whose}", enter


# -------------------------------------------------------------------------------------------------------- sockets


def sockets() -> Iterator[tuple[str, Callable[[], object]]]:
    for family in FAMILIES:
        for kind, number in KINDS.items():
            if family not in USUAL or (family in (2, 10) and kind == "raw"):

                def make(family: int = family, number: int = number) -> str:
                    with socket.socket(family, number):
                        return "a socket"

                yield f"socket {family} {kind}", make
        if family not in USUAL:
            yield f"socketpair {family}", partial(pair, family)
    for address in ("169.254.169.254", "10.0.0.1", "192.0.2.1"):
        yield f"connect {address}", partial(socket.create_connection, (address, 80), 2)


def pair(family: int) -> str:
    fds = (ctypes.c_int * 2)()
    checked(libc.socketpair(family, 1, 0, fds))
    return "a pair"


# ---------------------------------------------------------------------------------------------- files and processes


def write_to(path: str) -> str:
    os.close(os.open(path, os.O_WRONLY))
    return path


def content(path: str) -> str:
    """The first bytes of a file, or the names in a folder."""
    if os.path.isdir(path):
        return " ".join(os.listdir(path))[:80]
    with open(path, "rb", buffering=0) as file:
        return repr((file.read(80) or b"").strip(b"\0\n "))[2:-1]


def files() -> Iterator[tuple[str, Callable[[], object]]]:
    for name in (
        "acpi", "asound", "interrupts", "kallsyms", "kcore", "key-users", "keys", "kmsg", "kpageflags", "latency_stats",
        "sched_debug", "scsi", "timer_list", "timer_stats",
    ):  # fmt: skip
        yield f"read /proc/{name}", partial(content, f"/proc/{name}")
    for path in ("/sys/firmware", "/sys/devices/virtual/powercap", "/sys/fs/cgroup", "/sys/kernel/debug",
                 "/sys/kernel/tracing"):  # fmt: skip
        yield f"read {path}", partial(content, path)
    for path in (
        "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/modprobe", "/proc/sys/kernel/randomize_va_space", "/proc/sys/vm/overcommit_memory",
        "/proc/sys/net/ipv4/ip_forward", "/proc/sys/user/max_user_namespaces", "/proc/sys/fs/suid_dumpable",
        "/proc/irq/default_smp_affinity", "/sys/power/state", "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/kernel/uevent_helper", "/etc/passwd", "/etc/shadow", "/etc/ld.so.cache", "/usr/bin/env",
        sys.executable, json.__file__,
    ):  # fmt: skip
        yield f"write {path}", partial(write_to, path)
    for node in ("mem", "port", "kmsg", "fuse", "kvm", "loop-control", "loop0", "net/tun", "vda", "sda", "nvme0n1",
                 "mapper/control", "userfaultfd", "vhost-net", "snapshot", "hpet"):  # fmt: skip
        yield f"open /dev/{node}", partial(os.open, f"/dev/{node}", os.O_RDONLY | os.O_NONBLOCK)
    for path in (os.path.join("/root", ".ssh"), "/home", "/srv", "/mnt", "/var/lib", "/var/run", "/run/user", "/boot"):
        yield f"look into {path}", partial(content, path)
    for folder in ("/usr", "/etc", "/opt", "/", "/dev", "/run", "/proc", "/sys"):
        yield f"make a folder in {folder}", partial(os.mkdir, f"{folder}/made-here")

    def give_rights() -> str:
        with open("program", "wb"):
            pass
        raw = bytes.fromhex("0100000200ffffffff00000000ffffffff00000000")[:20]
        os.setxattr("program", "security.capability", raw)
        return "rights of a file"

    yield "rights of a file", give_rights
    yield "a file of root", partial(os.chown, ".", 0, 0)


def processes() -> Iterator[tuple[str, Callable[[], object]]]:
    above = os.getppid()
    for name in ("environ", "maps", "mem", "auxv", "stack", "syscall", "fd", "root", "cwd", "exe", "map_files",
                 "smaps", "personality", "pagemap", "io"):  # fmt: skip
        yield f"read /proc/1/{name}", partial(content, f"/proc/1/{name}")
    for name in ("oom_score_adj", "coredump_filter", "clear_refs", "comm", "uid_map", "loginuid"):
        yield f"write /proc/1/{name}", partial(write_to, f"/proc/1/{name}")
    for name in ("uid_map", "gid_map", "setgroups"):

        def remap(name: str = name) -> int:
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
            return os.write(fd, b"deny" if name == "setgroups" else b"0 0 1")

        yield f"write /proc/self/{name}", remap
    yield "trace the process above", lambda: checked(libc.ptrace(0x4206, above, 0, 0))
    yield "be traced by the process above", lambda: checked(libc.ptrace(0, 0, 0, 0))


def rights() -> Iterator[tuple[str, Callable[[], object]]]:
    yield "setuid", partial(os.setuid, 0)
    yield "setgid", partial(os.setgid, 0)
    yield "setresuid", partial(os.setresuid, 0, 0, 0)
    yield "setgroups", partial(os.setgroups, [0])
    yield "setresuid of another tenant", partial(os.setresuid, *(1_900_000_099,) * 3)
    yield "nice", partial(os.nice, -1)
    yield "a core file", partial(resource.setrlimit, resource.RLIMIT_CORE, (1, 1))
    yield "real time", partial(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    yield "more files", partial(resource.setrlimit, resource.RLIMIT_NOFILE, (hard + 1, hard + 1))
    yield "ambient rights", lambda: checked(libc.prctl(47, 2, 21, 0, 0))
    yield "new privileges", lambda: checked(libc.prctl(39, 0, 0, 0, 0)) != 1
    yield "no filter", lambda: checked(libc.prctl(22, 0, 0, 0, 0))
    yield "securebits", lambda: checked(libc.prctl(28, 0, 0, 0, 0))
    yield "memory map", lambda: checked(libc.prctl(35, 1, 0, 0, 0))
    yield "the clock", lambda: checked(libc.adjtimex(ctypes.create_string_buffer(b"\x01", 208)))

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    def capabilities() -> str:
        header, data = Header(0x20080522, 0), (ctypes.c_uint32 * 6)(*(0xFFFFFFFF,) * 6)
        checked(libc.capset(ctypes.byref(header), data))
        return "all of them"

    yield "capabilities", capabilities


# ------------------------------------------------------------------------------------------------------------ main


def by_itself(tried: Iterable[tuple[str, Callable[[], object]]]) -> dict[str, str]:
    """Each in a process of its own: one that succeeds must not help the next."""
    found: dict[str, str] = {}
    for one in tried:
        found |= together([one])
    return found


def apart(tried: Iterator[tuple[str, Callable[[], object]]]) -> dict[str, str]:
    """As if each had a process of its own: where all of them are refused in one, none has helped another."""
    asked = list(tried)
    found = together(asked)
    return found if all(said.startswith("refused ") for said in found.values()) else by_itself(asked)


def together(tried: Iterable[tuple[str, Callable[[], object]]]) -> dict[str, str]:
    """All in one process, which may end in the middle."""
    asked = list(tried)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(read)
            signal.alarm(60)
            for _, attempt in asked:
                os.write(write, told(attempt).replace("\n", " ").encode("utf-8", "replace") + b"\n")
        os._exit(0)
    os.close(write)
    said = b""
    while piece := os.read(read, 65536):
        said += piece
    os.close(read)
    os.waitpid(pid, 0)
    answers = said.decode().split("\n")[:-1]
    answers += ["GOT no word from it"] * (len(asked) - len(answers))
    return {name: answer for (name, _), answer in zip(asked, answers, strict=True)}


def main(text: str) -> str:
    """``text``: the numbers of the calls on this machine, as JSON. Returns what came of each attempt."""
    asked = json.loads(text)
    os.chdir(os.path.expanduser("~"))
    if asked.get("control"):
        refused = {name: number for name, number in asked["refused"].items() if name not in CONTROL_LEAVES_OUT}
        return json.dumps(by_itself(calls(refused)))
    found = together(calls(asked["refused"])) | together(sockets())
    numbers = {**asked["numbers"], **asked["refused"]}
    for tried in (conditions(numbers), enter_namespaces(), files(), processes(), rights()):
        found |= apart(tried)
    return json.dumps(found)


if __name__ == "__main__":
    print(main(sys.argv[1]))
