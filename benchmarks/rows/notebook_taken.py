"""A device with a GiB of state is taken, and had again: from the order to the device being free, and from the grant to
the first line of the next cell that reads the state. With their parts.

The state stays on the device (`--stay-over 1MiB`) and was saved after its cell, so a notice finds it saved; the next
cell restores it. The peer of that is one thread that reads as many bytes from a file into fresh memory, and hashes each
chunk of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import sublet
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.notebooks import DISTRIBUTIONS, Within, shell_in
from benchmarks.ours import Office
from benchmarks.procs import wait_until
from sublet.state.transfer.changes import chunk_hash
from sublet.state.transfer.memory import fresh_memory

LARGE: Final = 1 << 30
FREE: Final = "from the notice to a free device"
TOLD: Final = "of that, until the holder knows"
GRANTED: Final = "from the request to the grant"
FIRST: Final = "from the grant to the first line"
RESTORED: Final = "of that, variables"
CHUNK_BYTES: Final = 1 << 20
GPU: Final = "%%gpu --vram 64MiB --ttl 10m --stay-over 1MiB\n"


def measure(bench: Bench) -> list[Figure]:
    size = bench.either(LARGE, LARGE // 16)
    found: dict[str, list[float]] = {name: [] for name in (FREE, TOLD, GRANTED, FIRST, RESTORED)}
    read_ms: list[float] = []
    file = bench.folder / "bytes"
    with open(file, "wb") as out:
        out.writelines(os.urandom(CHUNK_BYTES) for _ in range(size // CHUNK_BYTES))
    with Office(bench.folder) as office:
        os.environ["JPY_SESSION_NAME"] = str(bench.folder / "Taken.ipynb")
        try:
            with shell_in(office.env["SUBLET_HOME"]) as shell, sublet.connect(home=office.env["SUBLET_HOME"]) as fabric:
                shell.run("%gpu name taken 12GiB")
                shell.run(GPU + f"import numpy as np\nstate = np.random.default_rng().random({size // 8})")
                for number in range(bench.either(10, 2)):
                    bench.say(f"round {number}")
                    for name, took_ms in _round(shell, fabric).items():
                        found[name].append(took_ms)
                    read_ms.append(_read_and_hash(file))
        finally:
            del os.environ["JPY_SESSION_NAME"]
    peers = {FIRST: read_ms}
    return [
        figure(name, "ms", samples, peers.get(name, ()), peer_name="read and hash" if name in peers else "")
        for name, samples in found.items()
        if samples
    ]


def _read_and_hash(file: Path) -> float:
    began = time.perf_counter()
    with open(file, "rb", buffering=0) as source:
        memory = memoryview(fresh_memory(os.fstat(source.fileno()).st_size))
        for at in range(0, memory.nbytes, CHUNK_BYTES):
            source.readinto(memory[at : at + CHUNK_BYTES])
            chunk_hash(memory[at : at + CHUNK_BYTES])
    return (time.perf_counter() - began) * 1e3


def _round(shell: Within, fabric: sublet.Fabric) -> dict[str, float]:
    lease = shell.cells.lease
    began = time.perf_counter()
    fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
    wait_until(lambda: lease.end is not None, within_s=60, what="nobody was told", every_s=0.001)
    told_ms = (time.perf_counter() - began) * 1e3
    wait_until(lambda: _is_free(fabric), within_s=60, what="the device was not free", every_s=0.005)
    free_ms = (time.perf_counter() - began) * 1e3
    asked = time.time()
    shell.run(GPU + "import time\nbegun_at = time.time()\nsome = state[0]\nstate += 1")
    first_ms = (shell.value("begun_at") - asked) * 1e3
    granted_ms = (shell.granted_at - asked) * 1e3
    return {TOLD: told_ms, FREE: free_ms, GRANTED: granted_ms, FIRST: first_ms - granted_ms, RESTORED: shell.send_ms}


def _is_free(fabric: sublet.Fabric) -> bool:
    try:
        with fabric.gpu(min_vram="64MiB", ttl="5s", wait=0):
            return True
    except sublet.SubletError:
        return False


ROW: Final = Row(
    name="notebook_taken",
    title="a device with a GiB of state on it: how soon it is free, and how soon the next cell has it back",
    goals=[Goal(figure=FIRST, of="ratio", at_least=1 / 1.3)],
    measure=measure,
    limit_s=600,
    distributions=DISTRIBUTIONS,
)
