"""What is timed on a GPU, and beside what. Each row is a function that gives ours and the peer's, in one unit.

A row has a process to itself: whoever has once used CUDA keeps a piece of the card, and then it is never at rest.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.gpu.kernels import SAXPY
from sublet.compute.arguments import f32, u32, u64
from sublet.compute.session import GpuSession
from sublet.devices import nvrtc
from sublet.devices.cuda_driver import open_driver
from sublet.guest.launch_counter import CONCURRENT_KERNEL, start_counting
from sublet.guest.usage_counters import VRAM_VARIABLE
from sublet.node.agent.clean_card import read_settings, scrub
from sublet.values import GIB, MIB, format_size
from sublet.wire.cards import CardFound
from sublet.wire.codec import loads
from sublet.wire.usage_counters import TALLY_VARIABLE, TallyFile
from tests.gpu.far_end import FarEnd
from tests.gpu.gpus import LARGE
from tests.gpu.resident import Helper, Resident

__all__ = ["IS_SHORT", "ROWS", "Measured"]

IS_SHORT: Final = LARGE < GIB
"""With ``SUBLET_GPU_MIB`` every row runs in two rounds with so much memory, to see that it runs."""
LAUNCHES: Final = 1000
THREADS: Final = 64
ROUNDS: Final = 15
SUSPENDED: Final = ((LARGE, 2),) if IS_SHORT else ((MIB, 9), (GIB, 7), (16 * GIB, 3), (64 * GIB, 2))
"""So much on the card, and how often. The large ones take half a minute each time, and as much for their peer."""
AT_REST_S: Final = 30.0
PROGRAM_S: Final = 300.0


class Measured(NamedTuple):
    """One row: every round, ours and the peer's, taken alternately."""

    name: str
    unit: str
    peer: str
    goal: str
    ours: list[float]
    theirs: list[float]


@contextlib.contextmanager
def _session(uuid: str, cap_bytes: int = 4 * LARGE) -> Iterator[GpuSession]:
    with (
        tempfile.TemporaryDirectory() as folder,
        FarEnd(Path(folder), uuid, cap_bytes=cap_bytes) as far,
        far.session() as gpu,
    ):
        yield gpu


def _ms(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def _alternately(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int = ROUNDS
) -> tuple[list[float], list[float]]:
    ours(), theirs()  # warm
    found = [(ours(), theirs()) for _ in range(2 if IS_SHORT else rounds)]
    return [a for a, _ in found], [b for _, b in found]


def launches(uuid: str) -> Sequence[Measured]:
    """A thousand launches and a sync: through a session in another process, and with the driver's own call here."""
    launch = _launcher(open_driver())
    with _session(uuid) as gpu:
        loaded = gpu.module_load(SAXPY, kind="cuda")
        a, b = gpu.mem_alloc(4 * THREADS), gpu.mem_alloc(4 * THREADS)

        def ours() -> float:
            def work() -> None:
                for step in range(LAUNCHES):
                    gpu.launch(loaded, "saxpy", 1, THREADS, [a, b, f32(0.5), u32(THREADS), u64(step)])
                gpu.sync()

            return _ms(work)

        found = _alternately(ours, lambda: _ms(launch))
    return [Measured("1,000 launches and a sync", "ms", "cuLaunchKernel in the program", "at most 1.5×", *found)]


def _launcher(driver: Any) -> Callable[[], None]:
    """A thousand launches and a sync, by the driver's own calls in this process."""
    device = driver("open", "cuDeviceGet", 0)
    driver("open", "cuCtxSetCurrent", driver("open", "cuDevicePrimaryCtxRetain", device))
    stream = driver("open", "cuStreamCreate", 1)
    module = driver("open", "cuModuleLoadData", nvrtc.compile_cuda(SAXPY, _arch(driver, device)))
    function = driver("open", "cuModuleGetFunction", module, b"saxpy")
    x, y = (int(driver("open", "cuMemAlloc", 4 * THREADS)) for _ in range(2))
    kinds = _c_types()

    def work() -> None:
        for step in range(LAUNCHES):
            values = ((x, y, 0.5, THREADS, step), kinds)
            driver("launch", "cuLaunchKernel", function, 1, 1, 1, THREADS, 1, 1, 0, stream, values, 0)
        driver("sync", "cuStreamSynchronize", stream)

    return work


def counted(uuid: str) -> Sequence[Measured]:
    """A thousand launches and a sync, with CUPTI's record of each and our count of them, and without."""
    launch = _launcher(open_driver())
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tally")
        TallyFile.create(path).close()
        os.environ |= {TALLY_VARIABLE: path, VRAM_VARIABLE: str(LARGE)}
        counter = start_counting()
        if counter is None:
            raise RuntimeError("nothing is counted here")

        def ours() -> float:
            counter.library.cuptiActivityEnable(CONCURRENT_KERNEL)

            def work() -> None:
                launch()
                counter.flush()

            return _ms(work)

        def theirs() -> float:
            counter.library.cuptiActivityDisable(CONCURRENT_KERNEL)
            return _ms(launch)

        found = _alternately(ours, theirs)
    return [Measured("1,000 launches counted, and a sync", "ms", "not counted", "", *found)]


def written(uuid: str) -> Sequence[Measured]:
    """Much memory to the device: through a session, and by torch from pageable memory."""
    import numpy as np
    import torch

    data = np.random.default_rng(1).integers(0, 256, LARGE, dtype=np.uint8)
    there = torch.empty(LARGE, dtype=torch.uint8, device="cuda")

    def theirs() -> float:
        return _ms(lambda: (there.copy_(torch.from_numpy(data)), torch.cuda.synchronize()))

    with _session(uuid) as gpu:
        x = gpu.mem_alloc(LARGE)

        def write() -> None:
            gpu.mem_write(x, 0, data)
            gpu.sync()

        found = _alternately(lambda: _ms(write), theirs)
    return [Measured(f"{format_size(LARGE)} written", "ms", "torch, from pageable memory", "", *found)]


def scrubbed(uuid: str) -> Sequence[Measured]:
    """How fast a card's memory is overwritten, against a copy of torch's on the device; both as GB/s."""
    import torch

    driver = open_driver()
    source = torch.empty(4 * LARGE, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def theirs() -> float:
        ms = _ms(lambda: (target.copy_(source), torch.cuda.synchronize()))
        return 2 * 4 * LARGE / ms / 1e6  # read and written

    def ours() -> float:
        count = 0

        def work() -> None:
            nonlocal count
            count = scrub(uuid, driver)

        ms = _ms(work)
        return count / ms / 1e6

    found = _alternately(ours, theirs, 5)
    return [Measured("memory overwritten", "GB/s", "a copy on the device (read and written)", "at least 60 %", *found)]


def handed_over(uuid: str) -> Sequence[Measured]:
    """From the end of one tenant's guest to the first kernel of the next one's; beside it the second half alone."""
    settings = read_settings(uuid).settings

    def begin() -> None:
        with _session(uuid) as gpu:
            module = gpu.module_load(SAXPY, kind="cuda")
            x = gpu.mem_alloc(4 * THREADS)
            gpu.launch(module, "saxpy", 1, THREADS, [x, x, f32(1), u32(THREADS), u64(0)])
            gpu.sync()

    def both() -> None:
        _clean(uuid, settings)
        begin()

    found = _alternately(lambda: _ms(both), lambda: _ms(begin), 5)
    return [Measured("cleaned, and the next tenant's first kernel", "ms", "the first kernel alone", "", *found)]


def suspended(uuid: str, size: int, rounds: int) -> Sequence[Measured]:
    """A process off its card and back, by a helper that is warm; beside it, what it could do by itself: allocate pinned
    memory and copy, and copy back."""
    if (spare := _host_spare()) < 1.2 * size:
        raise RuntimeError(f"{format_size(spare)} of the host's memory are available, for {format_size(size)}")
    away: tuple[list[float], list[float]] = ([], [])
    back: tuple[list[float], list[float]] = ([], [])
    with Helper() as helper, Resident(size) as resident:
        for _ in range(rounds):
            away[0].append(_ms(lambda: _went(helper.suspend(resident.pid), resident.pid)))
            back[0].append(_ms(lambda: _went(helper.resume(resident.pid), resident.pid)))
            away[1].append(float(resident.ask("out")))
            back[1].append(float(resident.ask("in")))
        if (said := resident.ask("check")) != "same":
            raise RuntimeError(said)
    text = format_size(size)
    goal = "under 500 ms" if size < GIB else "at most 1.25×"
    return [
        Measured(f"{text} suspended", "ms", "pinned memory allocated, and a copy", goal, *away),
        Measured(f"{text} resumed", "ms", "a copy from pinned memory", goal, *back),
    ]


def _went(said: dict[str, Any], pid: int) -> None:
    if said.get("done") != [pid]:
        raise RuntimeError(str(said.get("failed", said)))


def _host_spare() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


def _clean(uuid: str, settings: str) -> None:
    """What a supervisor has done between two leases, by the same program, until the card is at rest."""
    words = [sys.executable, "-m", "sublet.node.agent.clean_card", uuid, "--scrub", "--settings", settings]
    end = time.monotonic() + AT_REST_S
    while True:
        found = loads(CardFound, subprocess.run(words, capture_output=True, timeout=PROGRAM_S, check=True).stdout)
        if found.failed or (found.left and time.monotonic() > end):
            raise RuntimeError(found.failed or found.left)
        if not found.left:
            return
        time.sleep(0.02)


def _arch(driver: Any, device: Any) -> int:
    kinds = driver.module.CUdevice_attribute
    major, minor = (driver("open", "cuDeviceGetAttribute", kinds(number), device) for number in (75, 76))
    return int(10 * major + minor)


def _c_types() -> tuple[Any, ...]:
    import ctypes

    return (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_uint32, ctypes.c_uint64)


Row = Callable[[str], Sequence[Measured]]
ROWS: Final[dict[str, Row]] = {
    **{row.__name__: row for row in (launches, counted, written, scrubbed, handed_over)},
    **{f"suspended {size // MIB} MiB": partial(suspended, size=size, rounds=rounds) for size, rounds in SUSPENDED},
}
