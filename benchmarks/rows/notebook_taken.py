"""A device with a GiB of state is taken, and had again: from the order to the device being free, and from the grant to
the first line of the next cell that reads the state. With their parts.

The state stays on the device (`--stay-over 1MiB`) and was saved after its cell, so a notice finds it saved; the next
cell restores it.
"""

from __future__ import annotations

import os
import time
from typing import Final

import sublet
from benchmarks.harness import Bench, Figure, Row, figure
from benchmarks.notebooks import DISTRIBUTIONS, Within, shell_in
from benchmarks.ours import Office
from benchmarks.procs import wait_until

LARGE: Final = 1 << 30
FREE: Final = "from the notice to a free device"
TOLD: Final = "of that, until the holder knows"
GRANTED: Final = "from the request to the grant"
FIRST: Final = "from the grant to the first line"
RESTORED: Final = "of that, variables"
GPU: Final = "%%gpu --vram 64MiB --ttl 10m --stay-over 1MiB\n"


def measure(bench: Bench) -> list[Figure]:
    size = bench.either(LARGE, LARGE // 16)
    found: dict[str, list[float]] = {name: [] for name in (FREE, TOLD, GRANTED, FIRST, RESTORED)}
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
        finally:
            del os.environ["JPY_SESSION_NAME"]
    return [figure(name, "ms", samples) for name, samples in found.items() if samples]


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
    goals=[],
    measure=measure,
    limit_s=600,
    distributions=DISTRIBUTIONS,
)
