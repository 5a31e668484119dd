"""The state table of a job, and where it resumes. Pure.

    QUEUED       waits for its turn, or for its lease
    RUNNING      a runner has it
    INTERRUPTED  the runner is gone and the notebook is not done; it goes on from the last finished cell
    DONE         every cell has run
    FAILED       a cell raised, or what it needs is not to be had
    STOPPED      it was stopped by a user

A record says how far a job is. A cell counts as finished when its record says so, and that is written last: after the
outputs are on disk and the variables are saved. So whatever moment a runner is killed at, the record names a cell whose
outputs and variables are both there, and the next runner begins with the one behind it.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any, Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass


class JobState(enum.StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class Happening(enum.StrEnum):
    """What happens to a job."""

    BEGUN = "begun"
    """A runner has it."""
    CELL_DONE = "cell_done"
    """A cell has run, its outputs are on disk, and so are the variables."""
    AGAIN = "again"
    """The lease was lost under a cell, which is run again."""
    REWOUND = "rewound"
    """A cell needs a variable that could not be saved: the notebook is run again from its first cell."""
    CUT = "cut"
    """The runner ended before the notebook, by a signal or with its machine."""
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


_S, _H = JobState, Happening
ENDED: Final = frozenset({JobState.DONE, JobState.FAILED, JobState.STOPPED})
"""No way leads out of these."""
TABLE: Final[dict[tuple[JobState, Happening], JobState]] = {
    (_S.QUEUED, _H.BEGUN): _S.RUNNING,
    (_S.QUEUED, _H.CUT): _S.INTERRUPTED,
    (_S.QUEUED, _H.FAILED): _S.FAILED,
    (_S.QUEUED, _H.STOPPED): _S.STOPPED,
    (_S.RUNNING, _H.CELL_DONE): _S.RUNNING,
    (_S.RUNNING, _H.AGAIN): _S.RUNNING,
    (_S.RUNNING, _H.REWOUND): _S.RUNNING,
    (_S.RUNNING, _H.CUT): _S.INTERRUPTED,
    (_S.RUNNING, _H.FINISHED): _S.DONE,
    (_S.RUNNING, _H.FAILED): _S.FAILED,
    (_S.RUNNING, _H.STOPPED): _S.STOPPED,
    (_S.INTERRUPTED, _H.BEGUN): _S.RUNNING,
    (_S.INTERRUPTED, _H.CUT): _S.INTERRUPTED,
    (_S.INTERRUPTED, _H.FAILED): _S.FAILED,
    (_S.INTERRUPTED, _H.STOPPED): _S.STOPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """How far a job is."""

    state: JobState = JobState.QUEUED
    cells: int = 0
    """Number of cells to run."""
    done: int = 0
    """Number of finished cells, from the first on."""
    checkpoint: int = 0
    """The one that holds the variables as the last finished cell left them; 0 before the first."""
    unsaved: tuple[str, ...] = ()
    """Variables that could not be saved then, each with the reason."""
    runs: int = 0
    """How often a runner took it."""
    again: int = 0
    """How often a cell was run again because its lease was lost."""
    message: str = ""
    """What there is to say: why it waits, why it ended."""
    do: str = ""
    """What to do about it."""
    exit_code: int | None = None
    """What `nb run` would have ended with; None while it goes on."""
    changed_wall_ns: int = 0
    """For people: when this was written."""

    @property
    def is_over(self) -> bool:
        return self.state in ENDED


def after(record: JobRecord, what: Happening, **facts: Any) -> JobRecord:
    """The record after ``what`` happened. Raises, naming state and event, if it cannot happen in this state."""
    state = TABLE.get((record.state, what))
    if state is None:
        raise InvalidRequest(
            f"a job that is {record.state} cannot be {what.value.replace('_', ' ')}", do="See `sublet nb status`."
        )
    counted: dict[str, Any] = {}
    match what:
        case Happening.BEGUN:
            counted = {"runs": record.runs + 1, "message": "", "do": ""}
        case Happening.AGAIN:
            counted = {"again": record.again + 1}
        case Happening.REWOUND:
            counted = {"again": record.again + 1, "done": 0, "checkpoint": 0, "unsaved": ()}
        case Happening.CELL_DONE:
            counted = {"done": record.done + 1, "message": ""}
        case Happening.FINISHED:
            counted = {"exit_code": 0, "message": "", "do": ""}
        case _:
            pass
    found = replace(record, state=state, **counted, **facts)
    if found.done > found.cells or (found.state is JobState.DONE and found.done != found.cells):
        raise InvalidRequest(f"a job of {found.cells} cells cannot be {found.state} with {found.done} of them finished")
    return found
