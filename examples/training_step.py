"""Ten training steps on leases that are taken away in the middle: no step is lost, none is done twice.

Run it: ``python examples/training_step.py``. The module is given in Warp and as PTX, and the device picks: a host
device takes the first, a GPU either. Twice the program "loses" its lease at a bad moment; a new lease goes on from the
record.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import sublet
from sublet import training

WARP = """
import warp as wp

@wp.kernel
def train_step(step: wp.uint64, length: wp.uint32, x: wp.array(dtype=wp.float32)):
    i = wp.tid()
    n = wp.int32(length) / 4
    if i < n:
        x[i] = x[i] - wp.float32(0.05) * (x[i] - x[n + i])
"""
PTX = """
.version 7.0
.target sm_75
.address_size 64

.visible .entry train_step(.param .u64 step, .param .u32 length, .param .u64 x)
{
    .reg .pred %p;
    .reg .b32 %n, %i, %block, %size;
    .reg .b64 %x, %at, %there;
    .reg .f32 %w, %t, %d;

    ld.param.u32 %n, [length];
    shr.u32 %n, %n, 2;
    mov.u32 %i, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mad.lo.u32 %i, %block, %size, %i;
    setp.ge.u32 %p, %i, %n;
    @%p bra done;
    ld.param.u64 %x, [x];
    cvta.to.global.u64 %x, %x;
    mul.wide.u32 %at, %i, 4;
    add.u64 %x, %x, %at;
    mul.wide.u32 %at, %n, 4;
    add.u64 %there, %x, %at;
    ld.global.f32 %w, [%x];
    ld.global.f32 %t, [%there];
    sub.rn.f32 %d, %w, %t;
    mul.rn.f32 %d, %d, 0f3D4CCCCD;
    sub.rn.f32 %w, %w, %d;
    st.global.f32 [%x], %w;
done:
    ret;
}
"""
MODULE = {"warp": WARP, "ptx": PTX}
STEPS = 10
PARAMETERS = 1024
TARGET = np.linspace(-1.0, 1.0, PARAMETERS, dtype=np.float32)
BAD_MOMENTS = {4: training.Act.LAUNCH, 8: training.Act.COMPLETE}


class Taken(Exception):
    """Somebody else needed the device."""


def train(fabric: sublet.Fabric, folders: list[Path], moments: dict[int, training.Act]) -> None:
    """Go on from whatever was saved, under one lease, until all is done or the lease is taken."""
    with (
        fabric.gpu(min_vram="64MiB", ttl="1m", exclusivity="session") as lease,
        training.training_records("example", folders, lease, fabric=fabric) as (checkpoint, idempotency),
    ):
        last = checkpoint.load("job:fit:latest")
        done = last.effect.step if last is not None and last.effect is not None else 0
        for step in range(max(done, 1), STEPS + 1):  # the last one again: it costs nothing, and settles it

            def watch(act: training.Act, step: int = step) -> None:
                if moments.get(step) is act:
                    del moments[step]
                    raise Taken(f"lease {lease.id} is taken before {act!s} of step {step}")

            batch = training.TrainingBatch(
                job_id="fit",
                step=step,
                input=(TARGET + np.float32(step)).tobytes(),
                output_len=4 * PARAMETERS,
                initial=bytes(4 * PARAMETERS),
            )
            kernel = training.Launch("train_step", grid=PARAMETERS // 256, block=256)
            outcome = training.run_training_step(lease, checkpoint, idempotency, batch, MODULE, kernel, watch=watch)
            print(f"step {step:2}: {type(outcome).__name__}, version {outcome.version}")


def main() -> None:
    """Until it is done."""
    moments = dict(BAD_MOMENTS)
    with tempfile.TemporaryDirectory() as home, sublet.connect() as fabric:
        folders = [Path(home) / f"replica-{n}" for n in (1, 2, 3)]
        while True:
            try:
                train(fabric, folders, moments)
                break
            except Taken as news:
                print(news)


if __name__ == "__main__":
    main()
