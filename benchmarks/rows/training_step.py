"""A training step that counts once, against the same step in a bare loop: what the records cost.

Both sides do the same device work in the same order (memory, module, launch, read, free), on a device that does next to
nothing, so what differs is the runner: the lease asked three times, the checkpoint opened and saved with its effect,
the step reserved and completed. The state has 4 KiB; the one of the step before is handed over, as a loop does.

One replica that never syncs shows the runner's own time; three in folders, every one durable and two waited for, show
what a step costs in earnest, which is what three syncs at once take, three times over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from sublet.replicated import FolderReplica, ReplicaGroup
from sublet.state.replicated.files import RealFiles
from sublet.training import Completed, TrainingBatch, run_training_step, training_records
from sublet.values import Epoch

PAIRS: Final = 15
STEPS: Final = 200
STATE: Final = 4096
QUICK: Final = "one replica without fsync, over the bare step"
DURABLE: Final = "three replicas with fsync, over the bare step"
MODULE: Final = "a module"


class _Lease:
    """Held throughout."""

    id, ttl, epoch = "bench", 60.0, Epoch(1, 1)

    def check(self, needs: float | str = 0.0) -> None:
        """It is."""

    @contextlib.contextmanager
    def activity(self, what: str = "") -> Iterator[None]:
        yield


class _Session:
    """A device that adds one to the first byte."""

    def __init__(self, lease: object) -> None:
        self._memory = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left."""

    def mem_alloc(self, size: int) -> int:
        self._memory = bytearray(size)
        return 1

    def mem_write(self, buffer: int, offset: int, data: bytes) -> None:
        self._memory[offset : offset + len(data)] = data

    def mem_read(self, buffer: int, offset: int, length: int) -> bytes:
        return bytes(self._memory[offset : offset + length])

    def mem_free(self, buffer: int) -> None:
        self._memory = bytearray()

    def module_load(self, source: Mapping[Any, bytes]) -> int:
        return 1

    def module_unload(self, module: int) -> None:
        """As little."""

    def launch(self, module: int, kernel: str, grid: Any, block: Any, args: Sequence[Any]) -> None:
        self._memory[0] = (self._memory[0] + 1) & 0xFF

    def sync(self) -> None:
        """It is done."""


class _Forgetful(RealFiles):
    """Leaves it to the system when what is written reaches the disk."""

    def sync(self, fd: int) -> None:
        """Not now."""

    def datasync(self, fd: int) -> None:
        """Nor this."""

    def sync_folder(self, path: Path) -> None:
        """Nor its name."""


def measure(bench: Bench) -> list[Figure]:
    found = []
    pairs, steps = bench.either(PAIRS, 2), bench.either(STEPS, 30)
    for name, count, files in ((QUICK, 1, _Forgetful()), (DURABLE, 3, None)):
        folders = [bench.folder / name.split()[0] / str(number) for number in range(count)]
        for folder in folders:
            folder.mkdir(parents=True)
        replicas = [FolderReplica(folder, files=files) for folder in folders]
        with ReplicaGroup(replicas) as group:
            ours, bare = bench.pairs(
                name,
                _with_records(group, steps),
                lambda: _bare(steps),
                pairs=pairs,
                show=lambda a, b: f"{a:.0f} µs, bare {b:.1f} µs",
            )
        found.append(figure(name, "µs", [a - b for a, b in zip(ours, bare, strict=True)]))
        found.append(figure(name.replace(", over the bare step", ""), "µs", ours, bare, peer_name="bare loop"))
    bench.note(f"{steps} steps a sample, {pairs} pairs; a state of {STATE} bytes, saved whole with every step.")
    return found


def _with_records(group: ReplicaGroup, steps: int) -> Callable[[], float]:
    lease = _Lease()
    checkpoint, idempotency = training_records("bench", group, lease)
    done, state = 0, bytes(STATE)

    def run() -> float:
        nonlocal done, state
        began = time.perf_counter()
        for step in range(done + 1, done + steps + 1):
            batch = TrainingBatch(job_id="bench", step=step, input=b"data", output_len=STATE, initial=bytes(STATE))
            outcome = run_training_step(
                lease, checkpoint, idempotency, batch, MODULE, kind="warp", session=_Session, state=state
            )
            if not isinstance(outcome, Completed):
                raise RuntimeError(f"step {step} came to {outcome}")
            state = outcome.state
        done += steps
        return (time.perf_counter() - began) / steps * 1e6

    return run


def _bare(steps: int) -> float:
    lease, state = _Lease(), bytes(STATE)
    began = time.perf_counter()
    for _ in range(steps):
        with _Session(lease) as gpu:
            whole = state + b"data"
            buffer = gpu.mem_alloc(len(whole))
            gpu.mem_write(buffer, 0, whole)
            module = gpu.module_load({})
            gpu.launch(module, "train_step", 1, 1, [])
            gpu.sync()
            state = gpu.mem_read(buffer, 0, STATE)
            gpu.module_unload(module)
            gpu.mem_free(buffer)
    return (time.perf_counter() - began) / steps * 1e6


ROW: Final = Row(
    name="training_step",
    title="What it costs that a training step counts once",
    goals=[Goal(figure=QUICK, at_most=2_000), Goal(figure=DURABLE, at_most=20_000)],
    measure=measure,
    limit_s=300,
    distributions=("sublet", "blake3"),
)
