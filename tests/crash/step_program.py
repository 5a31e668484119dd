"""What is killed: training steps on three folder replicas, from the opening of the checkpoint to the last of its acts.

The same scheme as ``journal_program``: forks of one process, traced from their first call on, threads included, with a
diary that a kill cannot reach. The device is made of Python, the replicas are real.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sublet.replicated import FolderReplica
from tests.crash.serving import serve
from tests.unit.training.stage import HeldLease, Program, batch

__all__ = ["STORIES", "prepare", "program_at", "saved"]

LOG_BYTES: Final = 1 << 14
BEFORE: Final = 2
"""Steps that are done before the stories that do not begin anew."""
PATIENCE_S: Final = 60.0
"""No story runs into it: a disk that fails says so, and the others answer."""
Note = Callable[[dict[str, object]], None]


def program_at(home: Path, epoch: int) -> Program:
    """A life under a new lease; everybody before it has ended."""
    lease = HeldLease(epoch)
    replicas = [FolderReplica(home / f"replica-{n}", log_bytes=LOG_BYTES) for n in range(3)]
    return Program(lease, replicas, lambda owner, _: owner != lease.id, patience=PATIENCE_S)


def saved(program: Program) -> tuple[int, int, bytes]:
    """Version, step and bytes of what is saved; zeros if nothing is."""
    found = program.checkpoint.load(batch(0).checkpoint_name)
    if found is None:
        return 0, 0, b""
    assert found.effect is not None
    return found.version, found.effect.step, found.data


def steps(home: Path, epoch: int, numbers: range, note: Note) -> None:
    program = program_at(home, epoch)
    try:
        for number in numbers:
            outcome = program.step(number)
            note({"step": number, "outcome": type(outcome).__name__})
    finally:
        program.close()


def first(home: Path, note: Note) -> None:
    """Folders become replicas, and the first step of a job is done."""
    steps(home, 1, range(1, 2), note)


def next_one(home: Path, note: Note) -> None:
    """Under a new lease: the step before is asked for again, and one more is done."""
    steps(home, 2, range(BEFORE, BEFORE + 2), note)


STORIES: Final = {"first": first, "next": next_one}


def prepare(story: str, home: Path) -> None:
    """The folders as the story finds them."""
    if story != "first":
        steps(home, 1, range(1, BEFORE + 1), lambda _: None)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:  # whatever is loaded at first use is loaded now
        steps(Path(folder), 1, range(1, 2), lambda _: None)
    serve(STORIES)


if __name__ == "__main__":
    main()
