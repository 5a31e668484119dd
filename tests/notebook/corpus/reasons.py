"""Why a leased run may differ from a plain one: two tables. What is in neither is a failure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["FAULTS", "REASONS", "Difference", "Facet", "Reason", "find_reason"]

Facet = Literal["stream", "shown", "error", "pager", "name", "setting", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A pattern for each part of a difference, all of which must match, and why it is no fault."""

    name: str
    why: str
    facet: str
    key: str = r".*"
    plain: str = r".*"
    leased: str = r".*"
    source: str = r".*"
    """Of the cell, anywhere in it."""
    notebook: str = r".*"

    def explains(self, found: Difference) -> bool:
        parts = ("notebook", "facet", "key", "plain", "leased")
        return all(re.fullmatch(getattr(self, part), getattr(found, part), re.DOTALL) for part in parts) and bool(
            re.search(self.source, found.source, re.DOTALL | re.MULTILINE)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not the same after or below one cell."""

    notebook: str
    cell: int
    mode: str
    seed: int
    facet: Facet
    key: str
    """Which stream, name or setting."""
    plain: str
    leased: str
    source: str = ""
    """Of the cell."""
    reason: Reason | None = None

    def __str__(self) -> str:
        why = f" [{self.reason.name}]" if self.reason else ""
        where = f"{self.notebook} cell {self.cell}, {self.mode}, seed {self.seed}: {self.facet} {self.key}"
        return f"{where}{why}\n    plain:  {self.plain}\n    leased: {self.leased}"


OWN: Final = Reason(name="own randomness", why="Two plain runs differ here as well.", facet=".*")

REASONS: Final = (
    Reason(
        name="not imported here",
        why="The library was imported by a cell on the device only; the notebook's kernel gets its settings on import, "
        "and they are compared after the last cell.",
        facet="setting",
        key=r"(numpy|torch|pandas|matplotlib|sklearn): .*",
        leased="-",
    ),
    Reason(
        name="the plotting backend belongs to a side",
        why="Where pictures are drawn is set up by the process that draws them, when it draws the first one.",
        facet="setting",
        key=r"matplotlib: interactive",
    ),
    Reason(
        name="the plotting backend belongs to a side",
        why="It stands in the parameters themselves, and a side that has not drawn yet has none.",
        facet="name",
        key="rcParams",
        notebook="from_imports",
    ),
    Reason(
        name="parts of a class in another order",
        why="A class is put together again with its slots, its members if it is an enumeration, and what a library "
        "added to it first. Attributes of instances keep their order.",
        facet="name",
        key=r"\w+: order of attributes",
        notebook="simulations|ecosystem",
    ),
    Reason(
        name="Python's builtins belong to a side",
        why="What a library adds to them there (doctest the name `_`) is not written here: they are untouchable.",
        facet="setting",
        key=r"builtins: .*",
        leased="-",
    ),
    Reason(
        name="an autograd graph stays on the device",
        why="The notebook has the numbers of a result; its graph stays with the tensor on the device, for cells there.",
        facet="name",
        key=r".*: autograd graph",
        leased="none",
    ),
    Reason(
        name="a large result without a name",
        why="The value of a cell's last line that no name holds and that is large, or cannot travel, is not kept.",
        facet="name",
        key=r"Out\[\d+\]",
        leased="remote value",
    ),
    Reason(
        name="stays on the device",
        why="A generator, file, thread or lock lives in the process that made it, and so does what holds one (a result "
        "of unittest has a stream); the notebook has a remote value.",
        facet="name",
        plain=r"(builtins\.generator|_io\.\w+|threading\.\w+|_thread\.\w+|concurrent\.futures\.thread\.\w+"
        r"|unittest\.runner\.\w+|asyncio\.taskgroups\.TaskGroup|builtins\.(list|tuple|dict|map|zip)\w*iterator)",
        leased=r"remote value|not there",
    ),
)
FAULTS: Final[tuple[Reason, ...]] = ()
"""Known faults that are not mended yet. A whole run fails where one of them is not met any more: its row goes then."""


def find_reason(found: Difference, *, is_own: bool) -> Reason | None:
    """The first that explains it."""
    if is_own:
        return OWN
    return next((one for one in (*REASONS, *FAULTS) if one.explains(found)), None)
