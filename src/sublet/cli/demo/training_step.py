"""Training that survives a kill between saving a step and recording its completion.

The state is kept on three replicas; another program, under another lease, goes on from it.
"""

from __future__ import annotations

import importlib.util
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

from sublet.cli.demo.office import DemoOffice
from sublet.cli.demo.report import Report
from sublet.client.fabric import Fabric, connect
from sublet.client.lease import Lease
from sublet.replicated import FolderReplica
from sublet.training import (
    Act,
    Completed,
    Launch,
    Recovered,
    TrainingBatch,
    TrainingStepOutcome,
    run_training_step,
    training_records,
)

STEPS: Final = 4
DIES_AT: Final = 3
WORDS: Final = 64
JOB: Final = "demo"
SAVED: Final = "saved"
PATIENCE_S: Final = 40.0
KERNEL: Final = """
import warp as wp

@wp.kernel
def train_step(step: wp.uint64, length: wp.uint32, x: wp.array(dtype=wp.uint32)):
    i = wp.tid()
    n = wp.int32(length) / 4
    if i < n:
        x[i] = x[i] * wp.uint32(31) + wp.uint32(step) * wp.uint32(i + 1) + x[n]
"""
"""Arithmetic that does not commute: a step that is missing, or done twice, shows in every number."""


def can_play() -> bool:
    """Whether the compiler of its kernel is installed."""
    return importlib.util.find_spec("warp") is not None


def play(report: Report, folder: Path) -> None:
    """Train, be killed, and go on."""
    report.step(
        "Training that survives a kill",
        f"A program that trains is killed after it saved step {DIES_AT}, before it recorded that it did.",
    )
    place = folder / "training"
    place.mkdir()
    report.progress("training")
    with DemoOffice(place, "1x1GiB") as office:
        with _program(office, place, "1") as first:
            try:
                assert first.stdout is not None
                first_words = first.stdout.readline().split()
            finally:
                first.kill()
        report.check(
            first_words[:1] == [SAVED] and first.returncode == -signal.SIGKILL,
            f"SIGKILL to pid {first.pid}, before {Act.COMPLETE.value} of step {DIES_AT}.",
            but=first_words,
        )
        office.operator.post(f"/v1/leases/{first_words[1]}/revoke", {"detail": "its program is gone"})
        report.progress("another program goes on")
        with _program(office, place, str(DIES_AT)) as second:
            output, _ = second.communicate(timeout=PATIENCE_S)
        *outcomes, state = output.split() or [""]
        report.check(
            outcomes[:1] == [Recovered.__name__],
            f"Another program (pid {second.pid}) asks for step {DIES_AT} under another lease: “recovered”.",
            but=output,
        )
        report.check(
            outcomes[1:] == [Completed.__name__] * (STEPS - DIES_AT) and state == expected(STEPS).hex(),
            f"It goes on to step {STEPS}, and its weights are those of {STEPS} undisturbed steps, to the last bit.",
            but=output,
        )
    report.result(f"Another program went on: step {DIES_AT} was not done twice, the weights are right to the bit.")


def _program(office: DemoOffice, place: Path, first: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "sublet.cli.demo.training_step", str(office.home), str(place), first]
    return subprocess.Popen(words, env=office.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def batch_of(step: int) -> TrainingBatch:
    """The data of a step follows from its number."""
    initial = struct.pack(f"<{WORDS}I", *range(WORDS))
    return TrainingBatch(job_id=JOB, step=step, input=struct.pack("<I", step), output_len=len(initial), initial=initial)


def expected(steps: int) -> bytes:
    """The weights after so many steps, by plain arithmetic."""
    words = list(range(WORDS))
    for step in range(1, steps + 1):
        words = [(word * 31 + step * (at + 1) + step) & 0xFFFFFFFF for at, word in enumerate(words)]
    return struct.pack(f"<{WORDS}I", *words)


def replicas_at(place: Path) -> list[FolderReplica]:
    return [FolderReplica(place / f"replica-{n}") for n in (1, 2, 3)]


def train(fabric: Fabric, lease: Lease, place: Path, *, first: int, dies: bool = False) -> list[TrainingStepOutcome]:
    """From this step to the last one."""
    checkpoint, idempotency = training_records("demo", replicas_at(place), lease, fabric=fabric)
    found: list[TrainingStepOutcome] = []

    def watch(act: Act) -> None:
        if dies and len(found) == DIES_AT - 1 and act is Act.COMPLETE:
            sys.stdout.write(f"{SAVED} {lease.id}\n")
            sys.stdout.flush()
            signal.pause()  # for what comes

    try:
        for step in range(first, STEPS + 1):
            kernel = Launch("train_step", 1, WORDS)
            found.append(
                run_training_step(
                    lease, checkpoint, idempotency, batch_of(step), KERNEL, kernel, kind="warp", watch=watch
                )
            )
    finally:
        checkpoint.group.close()
    return found


def saved(lease: Lease, place: Path) -> bytes:
    """What is on the replicas."""
    checkpoint, _ = training_records("demo", replicas_at(place), lease)
    try:
        save = checkpoint.load(batch_of(1).checkpoint_name)
    finally:
        checkpoint.group.close()
    return b"" if save is None else save.data


def main(home: str, place: str, first: str) -> None:
    """One program that trains; the first of them comes to wait for its end."""
    with connect(home=home, start=False) as fabric, fabric.gpu(min_vram="64MiB", ttl="1m", wait="20s") as lease:
        outcomes = train(fabric, lease, Path(place), first=int(first), dies=first == "1")
        words = [type(outcome).__name__ for outcome in outcomes]
        sys.stdout.write(" ".join([*words, saved(lease, Path(place)).hex()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
