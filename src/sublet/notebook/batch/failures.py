"""Why a cell, and with it a job, failed: who is to blame, and whether it may be retried."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sublet.errors import CapacityExceeded, InvalidRequest, LeaseEnded, QuotaExceeded, SubletError
from sublet.values import EndReason

FAILED: Final = 1
USAGE: Final = 2
REFUSED: Final = 75
LEASE_ENDED: Final = 76
OURS_TO_BLAME: Final = frozenset(
    map(str, (EndReason.OUT_OF_MEMORY, EndReason.GUEST_FAILED, EndReason.QUOTA, EndReason.BUDGET, EndReason.REFUSED))
)
"""Ends that would come again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a cell did not finish."""

    message: str
    do: str
    exit_code: int
    is_lost: bool = False
    """Its lease was; it may be run again."""
    needs_kernel: bool = False
    lacks: str = ""
    """A variable that was there before the run was broken off, and could not be saved."""
    traceback: str = ""


def lost_with(error: SubletError) -> Failed:
    """The kernel itself went with its lease."""
    end = error.end if isinstance(error, LeaseEnded) else None
    may_again = end is None or str(end.reason) not in OURS_TO_BLAME
    return Failed(error.message, error.do, LEASE_ENDED, is_lost=may_again, needs_kernel=True)


def exit_of(error: SubletError) -> int:
    match error:
        case CapacityExceeded() | QuotaExceeded():
            return REFUSED
        case LeaseEnded():
            return LEASE_ENDED
        case InvalidRequest():
            return USAGE
        case _:
            return FAILED


def missing(message: str, unsaved: Sequence[str]) -> str:
    """The variable that a cell failed for want of, if it is one of these (``name: why``)."""
    found = re.search(r"^NameError: name '(\w+)' is not defined", message)
    names = {one.partition(":")[0] for one in unsaved}
    return found[1] if found is not None and found[1] in names else ""


def traceback_of(cell: Any) -> str:
    """As the notebook has it."""
    errors = [output for output in cell.outputs if output.output_type == "error"]
    return "\n".join(errors[-1].traceback) if errors else ""
