"""Memory, a kernel and typed arguments on a leased device: many launches in one message.

Run it: ``python examples/gpu_session.py``. On a machine without a GPU it gets a host device, and says so.
"""

from __future__ import annotations

import numpy as np

import sublet

SOURCE = """
import warp as wp

@wp.kernel
def heat(now: wp.array(dtype=wp.float32), then: wp.array(dtype=wp.float32), n: wp.uint32, rate: wp.float32):
    i = wp.tid()
    if i > 0 and wp.uint32(i) + wp.uint32(1) < n:
        then[i] = now[i] + rate * (now[i - 1] - wp.float32(2.0) * now[i] + now[i + 1])
"""
CELLS = 1024
STEPS = 500


def main() -> None:
    """A rod that is hot in the middle."""
    rod = np.zeros(CELLS, np.float32)
    rod[CELLS // 2] = 1000.0
    with sublet.connect().gpu(min_vram="64MiB", ttl="1m") as lease, sublet.GpuSession(lease) as gpu:
        print("on", gpu.device, "-", gpu.label)
        module = gpu.module_load(SOURCE, kind="warp")
        now, then = gpu.mem_alloc(rod.nbytes), gpu.mem_alloc(rod.nbytes)
        gpu.mem_write(now, 0, rod)
        for _ in range(STEPS):
            gpu.launch(module, "heat", CELLS // 256, 256, [now, then, sublet.u32(CELLS), sublet.f32(0.25)])
            now, then = then, now
        gpu.mem_read_into(now, 0, rod)
    print(f"after {STEPS} steps the middle has {rod[CELLS // 2]:.1f}, and {(rod > 0.01).sum()} cells are warm")


if __name__ == "__main__":
    main()
