"""Ten training steps on leases that are taken away in the middle: no step is lost, none is done twice.

Run it: ``python examples/training_step.py``. On a machine without a GPU it gets a host device, and says so. Twice the
program "loses" its lease at a bad moment; a new lease goes on from the record.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import sublet
from sublet import training
from sublet.replicated import FolderReplica

MODULE = """
import warp as wp

@wp.kernel
def train_step(step: wp.uint64, length: wp.uint32, x: wp.array(dtype=wp.float32)):
    i = wp.tid()
    n = wp.int32(length) / 4
    if i < n:
        x[i] = x[i] - wp.float32(0.05) * (x[i] - x[n + i])
"""
STEPS = 10
PARAMETERS = 1024
TARGET = np.linspace(-1.0, 1.0, PARAMETERS, dtype=np.float32)
BAD_MOMENTS = {4: training.Act.LAUNCH, 8: training.Act.COMPLETE}


class Taken(Exception):
    """Somebody else needed the device."""


def train(fabric: sublet.Fabric, folders: list[Path], moments: dict[int, training.Act]) -> None:
    """Go on from whatever was saved, under one lease, until all is done or the lease is taken."""
    with fabric.gpu(min_vram="64MiB", ttl="1m", exclusivity="session") as lease:
        replicas = [FolderReplica(folder) for folder in folders]
        checkpoint, idempotency = training.training_records("example", replicas, lease, fabric=fabric)
        try:
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
                outcome = training.run_training_step(
                    lease, checkpoint, idempotency, batch, MODULE, kernel, kind="warp", watch=watch
                )
                print(f"step {step:2}: {type(outcome).__name__}, version {outcome.version}")
        finally:
            checkpoint.group.close()


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
