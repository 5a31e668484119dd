"""What a person is told of the end of a GPU session: who took it, why, when, and what there is to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from sublet.errors import GpuSessionEnded, LeaseEnded
from sublet.notebook.probing import MODULE
from sublet.notebook.stays import Stays, clock_time
from sublet.values import EndReason

if TYPE_CHECKING:
    from sublet.notebook.shelf import About

__all__ = ["RERUN", "session_ended", "what_ended"]

RERUN = "Rerun this cell to reacquire."
WHYS = {
    EndReason.EXPIRED: "its time ran out and nobody renewed it",
    EndReason.IDLE: "nothing ran under it, so it was not renewed",
    EndReason.PREEMPTED: "another tenant's work took it",
    EndReason.FAIR_SHARE: "it was held for long while others waited",
    EndReason.QUOTA: "the device time of your quota is used up",
    EndReason.BUDGET: "the budget is used up",
    EndReason.DRAINED: "the machine is being drained",
    EndReason.OPERATOR: "the operator ended it",
    EndReason.NODE_LOST: "its machine went away",
    EndReason.OUT_OF_MEMORY: "it used more memory than it had leased",
    EndReason.DEVICE_LOST: "the device failed",
    EndReason.GUEST_FAILED: "its process failed",
    EndReason.RELEASED: "it was given back",
}
"""In words, for whoever has not read the list of reasons."""


def what_ended(error: LeaseEnded) -> str:
    """Who, why and when, in one sentence without its end."""
    end = error.end
    if end is None:
        return f"the GPU session ended: {error.message}"
    why = end.detail or WHYS.get(end.reason, "")
    return f"the GPU session ended{_local(end.at)}: {end.reason}{f' ({why})' if why else ''}"


def session_ended(error: LeaseEnded, handles: Mapping[str, Stays], inside: Mapping[str, About]) -> GpuSessionEnded:
    """The news. ``handles``: what stayed on the device; ``inside``: what the cell itself had saved."""
    said = [what_ended(error), "what finished cells left is in the notebook"]
    saved = {name: one.about.wall_ns for name, one in handles.items() if one.is_saved}
    told = {name: one for name, one in inside.items() if one.what != MODULE}
    if told:
        when = clock_time(max(one.wall_ns for one in told.values()))
        names = ", ".join(sorted(told))
        said.append(f"saved within this cell at {when}: {names}; the next cell on a device goes on from there")
    rest = {name: at for name, at in saved.items() if name not in inside}
    if rest:
        said.append(f"saved on the device's side: {', '.join(f'{n} at {clock_time(at)}' for n, at in rest.items())}")
    lost = [f"{name} ({one.why_lost or 'it was not saved'})" for name, one in handles.items() if not one.is_saved]
    if lost:
        said.append(f"lost: {', '.join(lost)}")
    if error.end is not None and error.end.saved_at and not saved and not inside:
        said.append(f"last saved{_local(error.end.saved_at)}")
    return GpuSessionEnded("; ".join(said), end=error.end, do=RERUN)


def _local(rfc3339: str) -> str:
    """A record's time, as a person's clock shows it."""
    try:
        at = datetime.fromisoformat(rfc3339)
    except ValueError:
        return f" at {rfc3339}" if rfc3339 else ""
    return f" at {clock_time(round(at.timestamp() * 1e9))}"
