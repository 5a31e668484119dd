"""One GiB of numpy into a cell and out of it: the first time, when all of it changed, and when none of it did.

Ours is everything that is done with variables before and after the cell (`send` and `take`): looking for changes,
encoding, shared memory, decoding there, merging into the array that was there. The peers are one copy into fresh shared
memory, one copy between warm arrays, and one pass of blake3. What an unchanged array adds to a cell is told from the
same with a cell that reads a short list in its place, which is sent in the same way: with a call of the guest.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import Any, Final

from blake3 import blake3

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.notebooks import DISTRIBUTIONS, Within, shell_in
from benchmarks.ours import Office
from sublet.state.transfer.pages import process_pages

LARGE: Final = 1 << 30
IN_FIRST: Final = "in, the first time"
OUT_FIRST: Final = "out, the first time"
IN_AGAIN: Final = "in, all of it changed"
OUT_AGAIN: Final = "out, all of it changed"
UNCHANGED: Final = "in, unchanged"
ADDED: Final = "in, unchanged, beside a cell without it"
GPU: Final = "%%gpu --vram 64MiB --ttl 10m\n"


def measure(bench: Bench) -> list[Figure]:
    import numpy as np

    size = bench.either(LARGE, LARGE // 16)
    with Office(bench.folder) as office, shell_in(office.env["SUBLET_HOME"]) as shell:
        shell.run(f"import numpy as np\nsize = {size // 8}")
        shell.run(GPU + "warm = 1")
        source, target = np.ones(size // 8), np.ones(size // 8)

        def into_fresh() -> float:
            fd = os.memfd_create("bench")
            try:
                os.ftruncate(fd, size)
                began = time.perf_counter()
                with mmap.mmap(fd, size) as area:
                    view = np.frombuffer(area, np.float64)
                    view[...] = source
                    del view
                    return (time.perf_counter() - began) * 1e3
            finally:
                os.close(fd)

        def warm_copy() -> float:
            began = time.perf_counter()
            target[...] = source
            return (time.perf_counter() - began) * 1e3

        def hash_pass() -> float:
            began = time.perf_counter()
            blake3(source.data.cast("B"), max_threads=blake3.AUTO).digest()
            return (time.perf_counter() - began) * 1e3

        def first_in() -> float:
            shell.run("a = np.random.default_rng().random(size)")
            shell.run(GPU + "s = a[0]")
            return shell.send_ms

        def first_out() -> float:
            shell.run(GPU + "b = np.random.default_rng().random(size)")
            took = shell.take_ms
            shell.run("del b")
            return took

        def again_in() -> float:
            shell.run("a += 1")
            shell.run(GPU + "s = a[0]")
            return shell.send_ms

        def again_out() -> float:
            shell.run(GPU + "a += 1")
            return shell.take_ms

        pairs = bench.either(10, 2)
        figures = [
            _against(bench, IN_FIRST, first_in, into_fresh, pairs, "a copy into fresh shared memory"),
            _against(bench, OUT_FIRST, first_out, into_fresh, pairs, "a copy into fresh shared memory"),
            _against(bench, IN_AGAIN, again_in, warm_copy, pairs, "a warm copy"),
            _against(bench, OUT_AGAIN, again_out, warm_copy, pairs, "a warm copy"),
        ]
        figures.append(
            _against(bench, UNCHANGED, lambda: _unchanged(shell), hash_pass, bench.either(20, 3), "one hash")
        )
        shell.run("few = [1.0]")
        _unchanged(shell, "few")
        figures.append(
            _against(
                bench,
                ADDED,
                lambda: _unchanged(shell),
                lambda: _unchanged(shell, "few"),
                bench.either(40, 3),
                "without",
                peer_name="a cell that reads a list",
            )
        )
        bench.note("Pages are tracked by the kernel." if _tracks() else "The kernel tracks no pages here.")
    return figures


def _unchanged(shell: Within, name: str = "a") -> float:
    shell.run(GPU + f"s = {name}[0]")
    if shell.sent_bytes > 1 << 20:
        raise RuntimeError(f"nothing had changed, and {shell.sent_bytes} bytes travelled")
    return shell.send_ms


def _tracks() -> bool:
    area = bytearray(1 << 20)
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    return process_pages().written_since(address, len(area), 0)[0] > 0


def _against(
    bench: Bench,
    name: str,
    ours: Callable[[], float],
    peer: Callable[[], Any],
    pairs: int,
    shown: str,
    peer_name: str = "",
) -> Figure:
    a, b = bench.pairs(name, ours, peer, pairs=pairs, show=lambda a, b: f"{a:.2f} ms, {shown} {b:.2f} ms")
    return figure(name, "ms", a, b, peer_name=peer_name or shown)


ROW: Final = Row(
    name="notebook_arrays",
    title="a GiB in and out of a cell within 1.7 copies of it; unchanged, it does not travel",
    goals=[
        Goal(figure=IN_FIRST, of="ratio", at_least=1 / 1.7),
        Goal(figure=OUT_FIRST, of="ratio", at_least=1 / 1.7),
        Goal(figure=IN_AGAIN, of="ratio", at_least=1 / 1.7),
        Goal(figure=OUT_AGAIN, of="ratio", at_least=1 / 1.7),
        Goal(figure=UNCHANGED, of="ratio", at_least=1 / 1.2),
        Goal(figure=ADDED, of="difference", at_most=1.0),
    ],
    measure=measure,
    limit_s=900,
    distributions=(*DISTRIBUTIONS, "blake3"),
)
