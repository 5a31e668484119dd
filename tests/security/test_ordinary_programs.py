"""What programs ordinarily do they can do behind all walls: the list of system calls leaves nothing of it out."""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.security.conftest import Place

LIBRARIES: Final = [name for name in ("numpy", "torch") if importlib.util.find_spec(name)]


def standard_library() -> dict[str, Any]:
    """It goes by value, so it imports what it needs itself. Each entry is what has to come of one thing."""
    import asyncio
    import ctypes
    import fcntl
    import mmap
    import multiprocessing
    import pty
    import select
    import signal
    import socket
    import subprocess
    import tempfile
    import threading
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing import shared_memory

    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "file")

    def files() -> bool:
        with open(path, "w+b") as file:
            file.write(b"x" * 8192)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file.fileno(), 0, 16384)
            os.fsync(file.fileno())
            with mmap.mmap(file.fileno(), 4096) as mapped:
                mapped[0:1] = b"y"
        os.symlink(path, f"{path}.link")
        os.link(path, f"{path}.hard")
        os.mkfifo(f"{path}.fifo")
        os.replace(f"{path}.hard", f"{path}.other")
        os.utime(path, (1, 1))
        with open(path, "rb") as source, open(f"{path}.copy", "wb") as target:
            os.sendfile(target.fileno(), source.fileno(), 0, 4096)
            os.copy_file_range(source.fileno(), target.fileno(), 4096)
        return len(os.listdir(folder)) == 5

    def processes() -> list[Any]:
        piped = subprocess.run(["sh", "-c", "echo one | tr a-z A-Z | cat; id -u > /dev/null"], capture_output=True)
        pid = os.posix_spawn("/bin/true", ["true"], {})
        pidfd = os.pidfd_open(pid)
        select.select([pidfd], [], [], 20)
        os.waitpid(pid, 0)
        master, slave = pty.openpty()
        os.write(slave, b"typed")
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        return [piped.stdout, os.read(master, 5), len(os.sched_getaffinity(0))]

    def multiprocessed() -> list[Any]:
        found: list[Any] = []
        for way in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(way)
            with context.Pool(2) as pool:
                found.append(pool.map(abs, range(-3, 0)))
        queue: Any = multiprocessing.Queue()
        with multiprocessing.Lock():
            queue.put(1)
        segment = shared_memory.SharedMemory(create=True, size=4096)
        memory: Any = segment.buf
        memory[0] = 7
        found += [queue.get(timeout=60), memory[0]]
        segment.close()
        segment.unlink()
        return found

    def waiting() -> list[Any]:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.sigtimedwait({signal.SIGALRM}, 1)
        event, memory = os.eventfd(1), os.memfd_create("name", os.MFD_ALLOW_SEALING)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        with ThreadPoolExecutor(4) as pool:
            threads = list(pool.map(lambda n: threading.get_native_id() > n, range(8)))

        async def talk() -> bytes:
            program = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
            return (await program.communicate(b"through a loop"))[0]

        return [os.eventfd_read(event), all(threads), asyncio.run(talk())]

    def sockets() -> list[Any]:
        found = []
        for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, f"{path}.sock")):
            with socket.socket(family) as listening, socket.socket(family) as client:
                listening.bind(address)
                listening.listen()
                client.connect(listening.getsockname())
                server, _ = listening.accept()
                client.sendall(b"said")
                found.append(server.recv(4))
                server.close()
        left, right = socket.socketpair()
        socket.send_fds(left, [b"!"], [0])
        message, fds, _, _ = socket.recv_fds(right, 1, 1)
        return [*found, message, len(fds), bool(socket.if_nameindex())]

    def libraries_in_c() -> list[Any]:
        libc = ctypes.CDLL(None, use_errno=True)
        call_back = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda a, b: 0)
        libc.qsort(ctypes.create_string_buffer(8), 2, 4, call_back)
        number = {"x86_64": 135, "aarch64": 92}[os.uname().machine]
        asked = libc.syscall(number, ctypes.c_ulong(0xFFFFFFFF))
        return [asked, libc.prctl(15, b"its-name", 0, 0, 0), libc.inotify_init() > 2]

    found: dict[str, Any] = {}
    for one in (files, processes, multiprocessed, waiting, sockets, libraries_in_c):
        try:
            found[one.__name__] = one()
        except Exception as error:
            found[one.__name__] = repr(error)
    return found


def what_kernels_may_lack(folder: str | None = None) -> dict[str, int]:
    """The error of each call; 0: none. Linux before 6.6 keeps no attributes of users in a tmpfs, and one that was built
    without NUMA has no policy of memory."""
    import ctypes
    import tempfile

    found = {"attributes": 0}
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.setxattr(file.name, "user.note", b"1")
        except OSError as error:
            found["attributes"] = error.errno or -1
    libc, policy = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    failed = libc.syscall(number, ctypes.byref(policy), None, 0, None, 0) != 0
    return {**found, "memory policy": ctypes.get_errno() if failed else 0}


def test_what_the_standard_library_offers(place: Place) -> None:
    with place.ben.memory("1GiB") as lease:
        found = lease.run(standard_library)
        may_lack = lease.run(what_kernels_may_lack)
    outside = what_kernels_may_lack("/dev/shm")
    assert outside["attributes"] in (0, errno.EOPNOTSUPP)
    assert outside["memory policy"] in (0, errno.ENOSYS)
    lacks = {name: error for name, error in may_lack.items() if error}
    assert lacks.items() <= outside.items(), "a guest lacks what this kernel lacks outside of it, and nothing else"
    assert found == {
        "files": True,
        "processes": [b"ONE\n", b"typed", 1],
        "multiprocessed": [[3, 2, 1], [3, 2, 1], [3, 2, 1], 1, 7],
        "waiting": [1, True, b"through a loop"],
        "sockets": [b"said", b"said", b"!", 1, True],
        "libraries_in_c": [0, 0, True],
    }


def numpy() -> object:
    import numpy as np

    ones = np.ones((300, 300))
    return float((ones @ ones).sum())


def torch() -> object:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=8, num_workers=2)
    return float(sum(batch.sum() for (batch,) in loader)) + float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_libraries_of_numbers_do(place: Place, library: str) -> None:
    """Their threads, and torch's processes that load data."""
    program: Callable[[], object] = {"numpy": numpy, "torch": torch}[library]
    expected = 300.0**3 + (64 * 63 / 2 if library == "torch" else 0)
    with place.ben.memory("2GiB" if library == "torch" else "1GiB") as lease:
        assert lease.run(program) == expected


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ls -la / > /dev/null && find /usr/bin -name 'l*' | sort | head -1", "/usr/bin/"),
        ("tar cf - /etc/hostname 2> /dev/null | tar tf -", "etc/hostname"),
        ("mkfifo p; (echo through > p &); cat p", "through"),
        ("nproc; nice -n 5 timeout 50 taskset 1 true; sleep 0.01; date -u +%Z", "UTC"),
        ("awk 'BEGIN { print 6 * 7 }'; sed --version | head -1; ps ax | tail -1 > /dev/null", "42"),
    ],
)
def test_what_shells_and_their_tools_do(place: Place, command: str, said: str) -> None:
    with place.ben.cpu(1) as lease:
        guest = lease.start(["sh", "-e", "-c", f"cd ~; {command}"], cwd="/")
        output = b"".join(piece.data for piece in guest.output()).decode()
        assert guest.wait(timeout=60) == 0, output
    assert said in output
