"""One tenant's saves take no time from another's, however many there are and however long each is made to take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

import sublet
from sublet.client.home import runtime_dir
from sublet.node.forked_jobs import FORKED_JOBS_MAX
from sublet.node.processes.procs import Procs
from sublet.node.storage.stores_work import NOTE
from tests.security.conftest import Place
from tests.traces import supervisor_of, until

VOLUMES: Final = FORKED_JOBS_MAX // 2 + 1
"""One more than what of one tenant is at work at a time."""
SAVES: Final = 6
QUIET_S: Final = 1.0
"""The flood has nothing more at work when for so long nothing more of it was begun."""
FLOOD: Final = """
import json, os, socket, threading, time

def ask():
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(os.environ["SUBLET_PUBLISH"])
            for _ in range(1000):
                sock.send(json.dumps({"is": "OpenVolume"}).encode())
                opened = json.loads(sock.recv(65536))
                asked = {"is": "Collect", "lease": opened["lease"], "epoch": opened["epoch"], "keep": 1}
                sock.send(json.dumps(asked).encode())
                sock.recv(65536)

print("flooding", flush=True)
for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(1000)
"""


@contextlib.contextmanager
def slow(place: Place, lease: sublet.Lease) -> Iterator[None]:
    """Each question about this volume takes as long as one may, as if all in it had to be copied: it waits for a lock
    that only the office's user can take."""
    folders = (place.home / "blocks" / "leases").iterdir()
    folder = next(one for one in folders if lease.id in (one / NOTE).read_text())
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def forked_jobs_of(supervisor: int) -> set[int]:
    """What the supervisor has done by copies of itself."""
    procs = Procs()
    found, own = set(), procs.text(supervisor, "cmdline")
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        stat = procs.stat(pid)
        if stat is not None and stat.ppid == supervisor and procs.text(pid, "cmdline") == own:
            found.add(pid)
    return found


@contextlib.contextmanager
def never_done(supervisor: int) -> Iterator[None]:
    """All that is at work now, and all that follows it, stands still: so nothing here depends on how long it takes."""
    held: set[int] = set()
    try:
        until("a flood", lambda: len(forked_jobs_of(supervisor)) >= FORKED_JOBS_MAX // 2)
        since_s = time.monotonic()
        while time.monotonic() < since_s + QUIET_S:
            for pid in forked_jobs_of(supervisor) - held:
                held.add(pid)
                since_s = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)
        yield
    finally:
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_save_is_done_beside_a_flood_of_another_tenants_that_is_never_done(place: Place) -> None:
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(place.ana.block("2MiB"))
        state = stack.enter_context(sublet.Durable({"number": 0}, mine))
        for _ in range(VOLUMES):
            lease = stack.enter_context(place.ben.block("2MiB"))
            guest = lease.start(["/usr/bin/python3", "-I", "-c", FLOOD], cwd="/")
            assert next(iter(guest.output())).data == b"flooding\n"
            stack.enter_context(slow(place, lease))
        supervisor = supervisor_of(runtime_dir(place.home.resolve()))
        assert supervisor is not None
        stack.enter_context(never_done(supervisor))
        for number in range(SAVES):
            state.value["number"] = number
            state.checkpoint()
        assert len(forked_jobs_of(supervisor)) >= FORKED_JOBS_MAX // 2, "the flood is at work still"
