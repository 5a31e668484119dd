"""One tenant's saves take no time from another's, however many there are and however long each is made to take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Final

import sublet
from sublet.supervisor.volume_folder import LOCKED_S
from tests.security.conftest import Place

VOLUMES: Final = 8
SAVES: Final = 6
BOUND_S: Final = 2 * LOCKED_S
"""All of them together take 0.2 s. Where tenants take no turns most of them wait for two of the flood, or three."""
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
    fd = os.open(place.home / "blocks" / "leases" / f"{lease.id}.{lease.epoch}" / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_a_save_takes_no_longer_beside_a_flood_of_another_tenants(place: Place) -> None:
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(place.ana.block("2MiB"))
        state = stack.enter_context(sublet.Durable({"number": 0}, mine))

        def save_s(number: int) -> float:
            began_s = time.monotonic()
            state.value["number"] = number
            state.checkpoint()
            return time.monotonic() - began_s

        quiet_s = save_s(1)
        for _ in range(VOLUMES):
            lease = stack.enter_context(place.ben.block("2MiB"))
            guest = lease.start(["/usr/bin/python3", "-I", "-c", FLOOD], cwd="/")
            assert next(iter(guest.output())).data == b"flooding\n"
            stack.enter_context(slow(place, lease))
        beside_s = [save_s(number) for number in range(2, 2 + SAVES)]
    assert sum(beside_s) < SAVES * quiet_s + BOUND_S, (quiet_s, beside_s)
