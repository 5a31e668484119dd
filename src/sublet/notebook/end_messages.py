"""Messages about the end of a GPU session: who took the device, why, when, and what can be resumed."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sublet.errors import GpuSessionEnded, LeaseEnded, OutOfMemory, SubletError, Unpicklable, WorkerLost
from sublet.lease_end import EndReason
from sublet.notebook.probing import MODULE
from sublet.notebook.remote_value import RemoteValue, clock_time

if TYPE_CHECKING:
    from sublet.notebook.checkpoint import About

RERUN = "Rerun this cell to reacquire."
ONE_DO = "Build it inside the cell, or don't use it there."
NAMED_MAX: Final = 8
_NAME: Final = re.compile(r"\w+")
_QUOTED: Final = re.compile(r"'([^\W\d]\w*)'")
_NO_ATTRIBUTE: Final = re.compile(r"'(\w+)' object has no attribute '(\w+)'")
NO_SUCH_NAME: Final = ("NameError", "UndefinedVariableError", "KeyError", "AttributeError", "CatalogException")
"""Ends of the names of errors that may mean that a name was looked up and not found."""
WHYS = {
    EndReason.EXPIRED: "its time ran out and it was not renewed",
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
"""In words, for a user who has not read the list of reasons."""


def what_ended(error: LeaseEnded) -> str:
    """By what it was ended, why and when, as a sentence without its full stop."""
    end = error.end
    if end is None:
        return f"the GPU session ended: {error.message}"
    why = end.detail or WHYS.get(end.reason, "")
    return f"the GPU session ended{_local(end.at)}: {end.reason}{f' ({why})' if why else ''}"


def unnamed(content: Mapping[str, Any], visible: Collection[str], sent: Collection[str]) -> str:
    """Of the error of a cell that found no such name: what to do, if the notebook has it and the cell does not name it;
    else nothing."""
    if not str(content.get("ename", "")).endswith(NO_SUCH_NAME):
        return ""
    added = _NO_ATTRIBUTE.fullmatch(str(content.get("evalue", "")))
    if added is not None and hasattr(getattr(sys.modules.get("pandas"), added[1], None), added[2]):
        return (
            f"{added[1]}.{added[2]} was added to pandas in the notebook only; run what adds it (a decorator of an "
            "accessor, tqdm.pandas()) in a %%gpu cell as well"
        )
    if str(content["ename"]).endswith("AttributeError") and "__main__" not in str(content.get("evalue", "")):
        return ""  # of an object, and what stands in quotation marks is its class
    for name in _QUOTED.findall(str(content.get("evalue", ""))):
        if name in visible and name not in sent:
            every = ",".join(sorted({name, *(one for one in sent if one in visible)}))
            many = len(sent) > NAMED_MAX
            add = f"--in with {name} and all other names it needs" if many else f"--in {every}"
            return (
                f"{name} is defined in the notebook but this cell does not name it; name it in the cell, or add {add}"
            )
    return ""


def session_ended(
    error: LeaseEnded, handles: Mapping[str, RemoteValue], inside: Mapping[str, About]
) -> GpuSessionEnded:
    """The news. ``handles``: what stayed on the device; ``inside``: what the cell itself had saved."""
    sentences = [what_ended(error), "what finished cells left is in the notebook"]
    saved = {name: one.value_about.wall_ns for name, one in handles.items() if one.is_saved}
    values = {name: one for name, one in inside.items() if one.what != MODULE}
    if values:
        when = clock_time(max(one.wall_ns for one in values.values()))
        names = ", ".join(sorted(values))
        sentences.append(f"saved within this cell at {when}: {names}; the next cell on a device goes on from there")
    rest = {name: at for name, at in saved.items() if name not in inside}
    if rest:
        sentences.append(
            f"saved on the device's side: {', '.join(f'{n} at {clock_time(at)}' for n, at in rest.items())}"
        )
    lost = [f"{name} ({one.why_lost or 'it was not saved'})" for name, one in handles.items() if not one.is_saved]
    if lost:
        sentences.append(f"lost: {', '.join(lost)}")
    if error.end is not None and error.end.saved_at and not saved and not inside:
        sentences.append(f"last saved{_local(error.end.saved_at)}")
    return GpuSessionEnded("; ".join(sentences), end=error.end, do=RERUN)


def process_lost(error: SubletError, handles: Mapping[str, RemoteValue]) -> SubletError:
    """The same, with what went with the process. ``handles``: what stayed there."""
    lost = [f"{name} ({one.why_lost or 'it was not saved'})" for name, one in handles.items() if not one.is_saved]
    if lost and isinstance(error, WorkerLost | OutOfMemory):
        error.message = f"{error.message}; lost with it: {', '.join(lost)}"
    return error


def cannot_travel(error: Unpicklable) -> Unpicklable:
    """Of what a cell needs, by the names the notebook has for it."""
    first: dict[str, tuple[str, str]] = {}
    for path, what in error.blockers:
        name = _NAME.match(path)
        first.setdefault(path if name is None else name[0], (path, what))
    whys = {n: f"{what}{'' if path == n else f' at {path}'}" for n, (path, what) in first.items()}
    if len(whys) == 1:
        ((one, why),) = whys.items()
        message = f"can't send `{one}` to the GPU process: {why}"
    else:
        each = [f"`{name}` ({why})" for name, why in list(whys.items())[:NAMED_MAX]]
        each += [f"{len(whys) - NAMED_MAX} more"] if len(whys) > NAMED_MAX else []
        message = f"can't send {', '.join(each[:-1])} and {each[-1]} to the GPU process" if each else error.message
    return Unpicklable(
        message,
        path=error.path,
        what=error.what,
        blockers=error.blockers,
        do=ONE_DO,
    )


def _local(rfc3339: str) -> str:
    """A record's time, as a person's clock shows it."""
    try:
        at = datetime.fromisoformat(rfc3339)
    except ValueError:
        return f" at {rfc3339}" if rfc3339 else ""
    return f" at {clock_time(round(at.timestamp() * 1e9))}"
