"""One tenant's saves take no time from another's, however many there are and however long each is made to take."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Final

import sublet
from tests.security.conftest import Place

VOLUMES: Final = 8
SAVES: Final = 6
BOUND_S: Final = 2.5
"""A save takes 20 ms. Where tenants take no turns, most of them take three seconds or more beside this flood."""
FLOOD: Final = """
import fcntl, json, os, socket, threading, time
volume = os.environ["SUBLET_BLOCK"]
held = os.open(volume + "/lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(held, fcntl.LOCK_EX)

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
        beside_s = [save_s(number) for number in range(2, 2 + SAVES)]
    assert statistics.median(beside_s) < quiet_s + BOUND_S, (quiet_s, beside_s)
