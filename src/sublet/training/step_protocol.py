"""The acts of a training step, what a restarted program may find, and what it then does. Pure tables.

A step does its durable acts in one order: the checkpoint is opened (which fences every older lease), the step is
reserved, it is computed, the new state is saved *with the step's name on it*, the reservation is completed. A
program that dies anywhere leaves one of three things behind: no new state, a state that carries the step, or both
records. So the next program never has to guess: it reads the checkpoint, and ``DECISION`` says the rest.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final

from sublet.state.replicated.checkpoint_record import Save
from sublet.state.replicated.idempotency_record import Completed, Conflict, New, Pending, Reservation


class Act(enum.StrEnum):
    """What a step does, in this order. A program can die between any two; none of them is done twice."""

    CHECK = "check"
    """The lease is asked whether it is active. If not, nothing below happens."""
    OPEN = "open"
    """The checkpoint is opened for writing: older epochs are fenced, then it is seen what was saved last."""
    RESERVE = "reserve"
    """The step is claimed for what it is to do."""
    LOAD = "load"
    """The state from which it goes on."""
    BEGIN = "begin"
    """A session on the device."""
    ALLOCATE = "allocate"
    WRITE = "write"
    MODULE = "module"
    LAUNCH = "launch"
    """The lease is checked again before each kernel."""
    READ = "read"
    """Waits for the kernels, and takes the new state."""
    UNLOAD = "unload"
    FREE = "free"
    END = "end"
    """The session is closed, so the device has nothing of the step any more."""
    CHECK_AGAIN = "check_again"
    """The lease, before anything is made to last."""
    SAVE = "save"
    """The new state with the step's name on it, if no other save came between. From here on the step counts."""
    COMPLETE = "complete"
    """The reservation is closed, so a later program finds the step completed."""
    DONE = "done"
    """Nothing is left to do."""


ACTS: Final = tuple(Act)


class Reserved(enum.StrEnum):
    """What the store said of the step."""

    NEW = "new"
    """It is ours."""
    PENDING = "pending"
    """Another program computes it, or died computing it while its lease goes on."""
    COMPLETED = "completed"
    CONFLICT = "conflict"
    """The step was reserved for something else."""


class Saved(enum.StrEnum):
    """What the checkpoint says of the step."""

    BEFORE = "before"
    """The state is the one from which the step goes on."""
    ELSEWHERE = "elsewhere"
    """The step is not in it, and it has another version than was expected."""
    THIS = "this"
    """The step is in it."""
    OTHER = "other"
    """The step is in it, but it was to do something else."""
    LATER = "later"
    """A later step is in it, and of this one nothing is remembered."""


class StepVerdict(enum.StrEnum):
    """What is to be done, then."""

    RUN = "run"
    SETTLE = "settle"
    """It was saved and not completed: complete it, and say `Recovered`."""
    RECOVERED = "recovered"
    """It was saved, and another claimant, which may complete it, has it reserved. Nothing is to be done."""
    DUPLICATE = "duplicate"
    WAIT = "wait"
    """`StepPending`."""
    TOO_LATE = "too_late"
    """`VersionConflict`: steps only go forward."""
    UNEXPECTED = "unexpected"
    """`VersionConflict`: the state is not the one that was expected."""
    CONFLICT = "conflict"
    """`IdempotencyConflict`."""
    LOST = "lost"
    """`CheckpointFailed`: the step was completed, and its state is not there. No program goes on from that."""


_BY_RESERVED: Final[dict[Reserved, tuple[StepVerdict, ...]]] = {
    # in the order of Saved:  before, elsewhere, this, other, later
    Reserved.NEW: (
        StepVerdict.RUN,
        StepVerdict.UNEXPECTED,
        StepVerdict.SETTLE,
        StepVerdict.CONFLICT,
        StepVerdict.TOO_LATE,
    ),
    Reserved.PENDING: (
        StepVerdict.WAIT,
        StepVerdict.WAIT,
        StepVerdict.RECOVERED,
        StepVerdict.CONFLICT,
        StepVerdict.TOO_LATE,
    ),
    Reserved.COMPLETED: (
        StepVerdict.LOST,
        StepVerdict.LOST,
        StepVerdict.DUPLICATE,
        StepVerdict.CONFLICT,
        StepVerdict.DUPLICATE,
    ),
    Reserved.CONFLICT: (StepVerdict.CONFLICT,) * 5,
}
DECISION: Final[Mapping[tuple[Reserved, Saved], StepVerdict]] = {
    (reserved, saved): verdict
    for reserved, verdicts in _BY_RESERVED.items()
    for saved, verdict in zip(Saved, verdicts, strict=True)
}
"""Two records, one answer. The checkpoint is the truth about what was done, the store about who may do it."""


def decide(reserved: Reservation, saved: Saved) -> StepVerdict:
    """What to do with a step of which the two records say this."""
    return DECISION[_as_reserved(reserved), saved]


def what_is_saved(saves: Sequence[Save], key: str, fingerprint: str, step: int, expected: int | None) -> Saved:
    """What the saves of a checkpoint (newest first, as far as they are kept) say of a step."""
    effects = [save.effect for save in saves if save.effect is not None]
    mine = next((effect for effect in effects if effect.key == key), None)
    if mine is not None:
        return Saved.THIS if mine.fingerprint == fingerprint else Saved.OTHER
    if any(effect.step >= step for effect in effects):
        return Saved.LATER
    version = saves[0].version if saves else 0
    return Saved.BEFORE if expected is None or expected == version else Saved.ELSEWHERE


def drawing() -> str:
    """The table of decisions, as it stands in docs/training.md."""
    lines = ["| the store says | " + " | ".join(f"saved: {saved}" for saved in Saved) + " |"]
    lines.append("|---" * (len(Saved) + 1) + "|")
    for reserved in Reserved:
        cells = " | ".join(DECISION[reserved, saved] for saved in Saved)
        lines.append(f"| {reserved} | {cells} |")
    return "\n".join(lines)


def _as_reserved(reserved: Reservation) -> Reserved:
    match reserved:
        case New():
            return Reserved.NEW
        case Pending():
            return Reserved.PENDING
        case Completed():
            return Reserved.COMPLETED
        case Conflict():
            return Reserved.CONFLICT
