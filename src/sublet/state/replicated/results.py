"""The results of operations on a register that were not done."""

from __future__ import annotations

from typing import NoReturn

from sublet.errors import CheckpointFailed, InvalidRequest, StaleEpoch
from sublet.state.replicated.register import OperationRefused, OperationUnknown, OutcomeReason

NOT_SAVED = "not_saved"
"""``reason`` of an error: it certainly was not written."""
UNKNOWN = "unknown"
"""``reason`` of an error: it may have been written, or may yet be."""


def raise_for(result: OperationRefused | OperationUnknown, what: str, *, reading: bool = False) -> NoReturn:
    """The error that a person or a program can do something with. ``reading``: nothing was to be written."""
    match result:
        case OperationRefused(why=OutcomeReason.FENCED, against=ballot):
            newer = f" (epoch {ballot.epoch})" if ballot is not None else ""
            raise StaleEpoch(f"a newer lease has opened {what}{newer}", reason=NOT_SAVED)
        case OperationRefused(why=OutcomeReason.FOREIGN, against=ballot):
            office = ballot.office if ballot is not None else "another"
            raise InvalidRequest(
                f"{what} belongs to the office {office!r}, whose epochs cannot be compared with ours",
                do="Adopt it if that office is gone for good: `open(..., adopt=True)`, or `adopt()` of reservations.",
                reason=NOT_SAVED,
            )
        case OperationRefused():
            failed = f"to read {what}" if reading else f"for {what}; nothing was written"
            undecided = "; if all are, a save was cut off, and `open` by the next lease decides what becomes of it"
            raise CheckpointFailed(
                f"too few replicas answered {failed}",
                do=f"See which replicas are well with `health()`{undecided if reading else ''}, then try again.",
                reason=NOT_SAVED,
            )
        case OperationUnknown(why=OutcomeReason.FENCED):
            raise StaleEpoch(
                f"a newer lease has opened {what} while it was being written; whether that came through is not known",
                do="The holder of the newer lease reads what there is.",
                reason=UNKNOWN,
            )
        case OperationUnknown():
            raise CheckpointFailed(
                f"too few replicas answered while {what} was being written; it may or may not be there",
                do="See which replicas are well with `health()`, then load it and look at its version and effect.",
                reason=UNKNOWN,
            )
