"""Programs that train, and die or freeze where they are told to. ``python -m tests.integration.training_program``

reads one life per line, as JSON, forks a process for it, and answers with what became of it. Nothing is loaded after
the fork that was not loaded before, so a life costs milliseconds. Exit status: 0 all steps are done; 3 its lease is
over; 4 a newer lease has fenced it; 5 another has the step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import sublet
from sublet.compute.session import GpuSession
from sublet.errors import LeaseEnded, StaleEpoch, StepPending
from sublet.replicated import FolderReplica, ReplicaGroup
from sublet.training import Act, Launch, TrainingBatch, run_training_step, steps, training_records
from tests.unit.training.stage import HeldLease, Program, batch

__all__ = ["FENCED", "OVER", "WORDS", "Life", "main", "real_batch", "real_weights"]

OVER: Final = 3
FENCED: Final = 4
WAITING: Final = 5
WORDS: Final = 256
PATIENCE_S: Final = 60.0

KERNEL: Final = """
import warp as wp

@wp.kernel
def train_step(step: wp.uint64, length: wp.uint32, x: wp.array(dtype=wp.uint32)):
    i = wp.tid()
    n = wp.int32(length) / 4
    if i < n:
        x[i] = x[i] * wp.uint32(31) + wp.uint32(step) * wp.uint32(i + 1) + x[n]
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """What one process is to do."""

    place: str
    """Where the replicas are."""
    epoch: int = 0
    """Of its lease; without an office."""
    home: str = ""
    """Of an office: then the lease and the device are real."""
    ttl: str = "60s"
    steps: int = 10
    die_after: int | None = None
    """Acts."""
    at_step: int = 0
    die_before: str = ""
    stop_before: str = ""
    kill_after_ms: float | None = None
    kill_at_line: int = 0
    """Of the step protocol's own file; it has not been executed then."""
    list_lines: str = ""
    """A file for all of those that are executed."""


def real_batch(step: int) -> TrainingBatch:
    """One word of data; it follows from the step."""
    data = struct.pack("<I", step * 977)
    initial = struct.pack(f"<{WORDS}I", *range(WORDS))
    return TrainingBatch(job_id="real", step=step, input=data, output_len=4 * WORDS, initial=initial)


def real_weights(steps: int) -> bytes:
    """What the kernel makes of it in so many steps, by plain arithmetic."""
    words = list(range(WORDS))
    for step in range(1, steps + 1):
        words = [(word * 31 + step * (at + 1) + step * 977) & 0xFFFFFFFF for at, word in enumerate(words)]
    return struct.pack(f"<{WORDS}I", *words)


def folders(life: Life) -> list[FolderReplica]:
    return [FolderReplica(Path(life.place) / f"replica-{n}") for n in range(3)]


def watcher(life: Life, step: int, count: list[int]) -> Callable[[Act], None]:
    """Counts acts, and ends or stops this process where it is told to."""

    def watch(act: Act) -> None:
        if count[0] == life.die_after or (step == life.at_step and act == life.die_before):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == life.at_step and act == life.stop_before:
            os.kill(os.getpid(), signal.SIGSTOP)
        count[0] += 1

    return watch


def note(life: Life, outcome: object) -> None:
    with (Path(life.place) / "outcomes").open("a") as file:
        file.write(f"{type(outcome).__name__} {getattr(outcome, 'step', '')}\n")


class Lines:
    """Sees each line of the step protocol before it is executed."""

    def __init__(self, life: Life) -> None:
        self.life, self.seen = life, set[int]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename == steps.__file__ else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            if frame.f_lineno == self.life.kill_at_line:
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen.add(frame.f_lineno)
        return self._line


def without_office(life: Life) -> None:
    """Real replicas in real files; lease and device are pretended. Everybody before it has ended."""
    lease = HeldLease(life.epoch)
    program = Program(lease, folders(life), lambda owner, _: owner != lease.id)
    last = program.checkpoint.load(batch(0).checkpoint_name)
    done = 0 if last is None or last.effect is None else last.effect.step
    count = [0]
    for step in range(max(done, 1), life.steps + 1):
        note(life, program.step(step, watch=watcher(life, step, count)))
    program.close()


def with_office(life: Life) -> None:
    """A real lease of a real device."""
    with sublet.connect(home=life.home) as fabric:
        lease = fabric.gpu(min_vram="64MiB", ttl=life.ttl, exclusivity="shared", labels={"life": str(os.getpid())})
        with lease, ReplicaGroup(folders(life)) as group:
            checkpoint, idempotency = training_records("runs", group, lease, fabric=fabric)
            last = checkpoint.load(real_batch(0).checkpoint_name)
            done = 0 if last is None or last.effect is None else last.effect.step
            count = [0]
            for step in range(max(done, 1), life.steps + 1):

                def once(step: int = step) -> Any:
                    return run_training_step(
                        lease,
                        checkpoint,
                        idempotency,
                        real_batch(step),
                        KERNEL,
                        Launch("train_step", 1, WORDS),
                        kind="warp",
                        session=GpuSession,
                        watch=watcher(life, step, count),
                    )

                note(life, patiently(once))


def patiently(once: Callable[[], Any]) -> Any:
    """Ask again while another has the step."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return once()
        except StepPending:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def live(life: Life) -> int:
    """One life, to its exit status."""
    try:
        lines = Lines(life)
        if life.kill_at_line or life.list_lines:
            sys.settrace(lines)
        if life.home:
            with_office(life)
        else:
            without_office(life)
        sys.settrace(None)
        if life.list_lines:
            Path(life.list_lines).write_text(json.dumps(sorted(lines.seen)))
    except StaleEpoch:
        return FENCED
    except LeaseEnded:
        return OVER
    except StepPending:
        return WAITING
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def begin(life: Life) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(0)
            code = live(life)
        finally:
            os._exit(code)
    return pid


def see(pid: int, kill_after_ms: float | None = None) -> dict[str, int]:
    """Until it ends or stops: its status as a shell says it, or 0 and its pid while it is stopped."""
    if kill_after_ms is not None:
        time.sleep(kill_after_ms / 1000)
        os.kill(pid, signal.SIGKILL)  # our own child, not yet waited for: the number is nobody else's
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return {"stopped": pid}
    code = os.waitstatus_to_exitcode(status)
    return {"status": code if code >= 0 else 128 - code}


def main() -> None:
    """Serve lives until nobody asks for more."""
    assert threading.active_count() == 1
    for line in sys.stdin:
        asked = json.loads(line)
        if "go_on" in asked:
            os.kill(asked["go_on"], signal.SIGCONT)
            said = see(asked["go_on"])
        else:
            life = Life(**asked)
            said = see(begin(life), life.kill_after_ms)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
