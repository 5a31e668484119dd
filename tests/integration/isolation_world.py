"""What there is to steal: a supervisor with secrets, a neighbour, and all by which one process can reach another.

The world is made by whoever plays the supervisor. The neighbour is of the very user that the guest will be (another
guest of the same tenant, or in the ordinary user's case simply a process of his), so that nothing is refused merely
because the users differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field

__all__ = ["SECRET", "World", "fill_world", "libc", "make_world", "syscall"]

SECRET = b"the-office-alone-may-know-this"
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]
libc.syscall.restype = ctypes.c_long
IPC_CREAT = 0o1000
IPC_RMID = 0
KEYRING_SESSION, KEYRING_USER = -3, -4
KEYCTL = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine, -1)
SYS_ADD_KEY = {"x86_64": 248, "aarch64": 217}.get(os.uname().machine, -1)


class Message(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_long), ("text", ctypes.c_char * 64))


def syscall(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return checked(libc.syscall(ctypes.c_long(number), *words))


def checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


@dataclass
class World:
    base: str
    state: str
    """The office's state folder."""
    home: str
    """The home of the user who runs the office."""
    other: str
    """The folder of another tenant's lease."""
    own: str
    """The guest's own folder."""
    supervisor: int
    neighbour: int = 0
    secret_fd: int = -1
    sysv_key: int = 0
    shm_name: str = ""
    queue_name: str = ""
    abstract: str = ""
    tcp_port: int = 0
    terminal: str = ""
    tmp_file: str = ""
    set_uid: str = ""
    """A copy of ``id`` that belongs to root and has the set-uid bit, in the guest's folder; empty if nobody could."""
    is_control: bool = False
    _open: list[object] = field(default_factory=list)
    _ipc: list[tuple[str, int]] = field(default_factory=list)

    @property
    def secret(self) -> str:
        return f"{self.state}/secret"

    @property
    def socket(self) -> str:
        return f"{self.state}/supervisor.sock"

    def close(self) -> None:
        for kind, number in self._ipc:
            call = {"shm": libc.shmctl, "msg": libc.msgctl}[kind]
            call(number, IPC_RMID, None)
        if self.queue_name:
            libc.mq_unlink(self.queue_name.encode())
        for path in (f"/dev/shm/{self.shm_name}", self.tmp_file):
            with contextlib.suppress(OSError):
                os.unlink(path)
        if self.neighbour:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.neighbour, signal.SIGKILL)
            os.waitpid(self.neighbour, 0)
        shutil.rmtree(self.base, ignore_errors=True)


def make_world(base: str) -> World:
    """Nothing yet but the names. ``base`` is an empty folder of ours."""
    state, home, other, own = (f"{base}/{name}" for name in ("state", "home", "other", "own"))
    return World(base=base, state=state, home=home, other=other, own=own, supervisor=os.getpid())


def fill_world(world: World, uid: int, set_uid: str) -> None:
    """Everything; neighbour and guest's folder belong to ``uid``. ``close`` takes away what there is by then."""
    for path in (world.state, world.home, world.other, world.own):
        os.mkdir(path, 0o755)
    for path in (world.secret, f"{world.home}/.key", f"{world.other}/notebook"):
        _fill(path)
        os.chmod(path, 0o644)
    if os.geteuid() == 0:
        os.chown(world.own, uid, uid)
    world.set_uid = set_uid and f"{world.own}/set-uid-id"
    if set_uid:
        os.rename(set_uid, world.set_uid)
    world.secret_fd = os.open(world.secret, os.O_RDONLY)
    os.set_inheritable(world.secret_fd, True)
    world.tmp_file = f"{tempfile.gettempdir()}/sublet-isolation-{os.getpid()}"
    world.shm_name = f"sublet-isolation-{os.getpid()}"
    for path in (world.tmp_file, f"/dev/shm/{world.shm_name}"):
        _fill(path)
        os.chmod(path, 0o666)
    _listen(world)
    _interprocess(world)
    _keys()
    master, slave = pty.openpty()
    world.terminal = os.ttyname(slave)
    world._open += [master, slave]
    world.neighbour = _neighbour(uid)


def _fill(path: str) -> None:
    with open(path, "wb") as file:
        file.write(SECRET)


def _listen(world: World) -> None:
    world.abstract = f"\0sublet-isolation-{os.getpid()}"
    by_path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    by_path.bind(world.socket)
    os.chmod(world.socket, 0o777)
    abstract.bind(world.abstract)
    tcp = socket.create_server(("127.0.0.1", 0))
    world.tcp_port = tcp.getsockname()[1]
    for one in (by_path, abstract):
        one.listen(64)
    world._open += [by_path, abstract, tcp]


def _interprocess(world: World) -> None:
    world.sysv_key = 0x5B000000 | (os.getpid() & 0xFFFFFF)
    shm = checked(libc.shmget(world.sysv_key, 4096, IPC_CREAT | 0o666))
    world._ipc.append(("shm", shm))
    address = libc.shmat(shm, None, 0)
    ctypes.memmove(address, SECRET, len(SECRET))
    libc.shmdt(address)
    queue = checked(libc.msgget(world.sysv_key, IPC_CREAT | 0o666))
    world._ipc.append(("msg", queue))
    message = Message(1, SECRET)
    checked(libc.msgsnd(queue, ctypes.byref(message), len(SECRET), 0))
    world.queue_name = f"/sublet-isolation-{os.getpid()}"
    os.umask(0)
    checked(libc.mq_open(world.queue_name.encode(), os.O_CREAT | os.O_RDWR, ctypes.c_uint(0o666), None))
    os.umask(0o022)


def _keys() -> None:
    """In the keyrings of the session, which a fork hands on, and of the user."""
    if SYS_ADD_KEY < 0:
        return
    with contextlib.suppress(OSError):  # of its own, so that the keys go when this process does
        syscall(KEYCTL, 1, None)
    number = syscall(SYS_ADD_KEY, b"user", b"sublet-isolation", SECRET, len(SECRET), KEYRING_SESSION)
    syscall(KEYCTL, 5, number, 0x3F3F0000)  # for every process of the user, not only for those of the session
    syscall(KEYCTL, 8, number, KEYRING_USER)


def _neighbour(uid: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0 and uid:
                os.setgroups(())
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            null = os.open("/dev/null", os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.closerange(3, 256)
            os.execve("/bin/sleep", ["sleep", "600"], {"SECRET": SECRET.decode()})
        finally:
            os._exit(127)
    deadline = time.monotonic() + 30
    while os.readlink(f"/proc/{pid}/exe") != os.path.realpath("/bin/sleep") and time.monotonic() < deadline:
        time.sleep(0.002)
    return pid
