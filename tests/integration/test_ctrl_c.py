"""Programs interrupted with SIGINT, once, twice and often, leave no lease at a real office."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

import sublet
from tests.traces import until

ROUNDS: Final = int(os.environ.get("SUBLET_INTERRUPTS", "0")) // 10 or 2
SEED: Final = int(os.environ.get("SUBLET_SEED", "1"))
BEGIN: Final = """
import asyncio, contextlib, signal, threading, time
import sublet, sublet.aio
from sublet.client import aio_fabric, fabric
for one in (fabric, aio_fabric):
    one.EXIT_PATIENCE_S = 30.0  # a busy machine may keep the office from answering within the two seconds that it is
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
PLAIN: Final = """
fabric = sublet.connect(start=False, bound=False)
print("ready", flush=True)
while True:
    with fabric.memory("1MiB", renew="always") as lease:
        with lease.activity():
            lease.check()
"""
STORM: Final = """
fabric = sublet.connect(start=False, bound=False)
end = time.monotonic() + 1
print("ready", flush=True)
while time.monotonic() < end:
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < end:
            fabric.memory("1MiB", renew="always").release()
"""
AWAITED: Final = """
async def main():
    async with await sublet.aio.connect(start=False, bound=False) as fabric:
        print("ready", flush=True)
        while True:
            async with fabric.memory("1MiB", renew="always") as lease:
                await lease.renew()
asyncio.run(main())
"""
DAEMONS: Final = """
fabric = sublet.connect(start=False, bound=False)
def work():
    while True:
        fabric.memory("1MiB", renew="always").release()
for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def home(one_device: Path) -> Path:
    return one_device


@pytest.mark.parametrize(
    ("program", "interrupts"),
    [(PLAIN, 1), (PLAIN, 2), (STORM, 40), (AWAITED, 1), (AWAITED, 2), (DAEMONS, 0)],
    ids=["once", "twice", "storm", "asyncio", "asyncio twice", "daemon threads"],
)
def test_an_interrupted_program_leaves_no_lease(home: Path, program: str, interrupts: int) -> None:
    chance = random.Random(f"{SEED} {interrupts}")
    env = os.environ | {"SUBLET_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    with sublet.connect(home=home, start=False) as fabric:
        for turn in range(ROUNDS):
            command = [sys.executable, "-c", BEGIN + program]
            with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                time.sleep(chance.uniform(0, 0.05))
                for _ in range(interrupts):
                    process.send_signal(signal.SIGINT)
                    time.sleep(chance.uniform(0, 0.02))
                process.communicate(timeout=120)
            until(f"no lease (seed {SEED}, turn {turn})", lambda: not fabric.leases(), 60)
