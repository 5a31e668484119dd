"""Launches through a session on a host device, against the same launches made by Warp in the same process.

Ours is the whole way but the socket: messages made and encoded, decoded, checked against page, tables and signature,
launched, answered, and the answer decoded. The kernel does next to nothing, so what is timed is the way to it. The
peer is `wp.launch` in a loop, on arrays of Warp's own.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from sublet.devices.account import MemoryAccount
from sublet.devices.host import HostDevice
from sublet.devices.warp_modules import warp
from sublet.guest.device_service import SessionCalls
from sublet.values import MIB, NS_PER_S, Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.device import (
    Alloc,
    Batch,
    BatchDone,
    DeviceReply,
    Launch,
    LaunchShape,
    Load,
    ModuleKind,
    Op,
    OpenSession,
    Source,
    Sync,
)
from sublet.wire.page import PageReader, PageView, PageWriter, time_namespace
from sublet.wire.scalars import ArgKind, packing

PAIRS: Final = 60
BATCH: Final = 1000
SINGLES: Final = 500
MANY: Final = "one launch of 1,000 in a batch"
SINGLE: Final = "one launch by itself"
THREADS: Final = 64
KINDS: Final = (ArgKind.BUFFER, ArgKind.BUFFER, ArgKind.F32, ArgKind.U32, ArgKind.U64)
LEASE, EPOCH = LeaseId("bench"), Epoch(1, 1)
SOURCE: Final = """
import warp as wp

@wp.kernel
def saxpy(x: wp.array(dtype=wp.float32), y: wp.array(dtype=wp.float32), a: wp.float32, n: wp.uint32, step: wp.uint64):
    i = wp.tid()
    if wp.uint32(i) < n:
        y[i] = a * x[i] + y[i]
"""


def measure(bench: Bench) -> list[Figure]:
    with _ours(bench.folder) as ours:
        peer = _peer(bench.folder)
        pairs = bench.either(PAIRS, 5)
        found = []
        for name, count in ((MANY, BATCH), (SINGLE, 1)):
            repeats = 1 if count > 1 else SINGLES
            a, b = bench.pairs(
                name,
                _per_launch(ours, count, repeats),
                _per_launch(peer, count, repeats),
                pairs=pairs,
                show=lambda a, b: f"{a:.1f} µs, Warp {b:.1f} µs",
            )
            found.append(figure(name, "µs", a, b, peer_name="wp.launch"))
    bench.note("In one process, without a socket: what a connection adds is measured where there is one.")
    return found


def _per_launch(launches: Callable[[int], None], count: int, repeats: int) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            launches(count)
        return (time.perf_counter() - began) / (repeats * count) * 1e6

    return timed


@contextmanager
def _ours(folder: Path) -> Iterator[Callable[[int], None]]:
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    view = PageView(
        lease=LEASE, epoch=EPOCH, deadline_ns=now_ns + 3600 * NS_PER_S, now_ns=now_ns, namespace=time_namespace()
    )
    account = MemoryAccount(16 * MIB)
    with PageWriter.create(str(folder / "page"), view), closing(PageReader(str(folder / "page"))) as page:
        calls = SessionCalls(page, lambda place: HostDevice("host-0", account, cache=str(folder / "kernels")))
        opened = loads(DeviceReply, calls.answer(dumps(OpenSession(lease=LEASE, epoch=EPOCH)))[0])
        shape = LaunchShape(module=1, kernel="saxpy", grid=(1,), block=(THREADS,), kinds=KINDS)
        pack = packing(KINDS).pack

        def ask(*ops: Op) -> None:
            batch = Batch(session=opened.session, lease=LEASE, epoch=EPOCH, ops=ops, shapes=(shape,))
            body, _ = calls.answer(dumps(batch))
            done: BatchDone = loads(DeviceReply, body)
            if done.failed is not None:
                raise RuntimeError(str(done.failed))

        ask(
            Alloc(buffer=1, size=4 * THREADS),
            Alloc(buffer=2, size=4 * THREADS),
            Load(module=1, sources=(Source(kind=ModuleKind.WARP, data=SOURCE.encode()),)),
        )
        yield lambda count: ask(
            *(Launch(shape=0, values=pack(1, 2, 0.5, THREADS, step)) for step in range(count)), Sync()
        )
        calls.close()


def _peer(folder: Path) -> Callable[[int], None]:
    wp = warp(str(folder / "kernels"))
    path = folder / "bench_kernels.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("bench_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, y = (wp.zeros(THREADS, dtype=wp.float32, device="cpu") for _ in range(2))

    def launches(count: int) -> None:
        for step in range(count):
            wp.launch(module.saxpy, dim=THREADS, inputs=[x, y, 0.5, THREADS, step], device="cpu")
        wp.synchronize_device("cpu")

    return launches


ROW: Final = Row(
    name="session_launches",
    title="1,000 launches in one batch cost at most half as much again as Warp's own",
    goals=[Goal(figure=MANY, of="ratio", at_least=1 / 1.5)],
    measure=measure,
    limit_s=300,
    distributions=("sublet", "warp-lang", "numpy"),
)
