"""Merges two states of one name, ours and a copy that another kernel saved: which one is kept.

Names are saved in records, one for all that share something, and a record is kept or taken as a whole. What is here is
never lost to what comes: a record goes only if all of its names are to be had anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

Names = tuple[str, ...]
"""Of one record."""


class Joined(NamedTuple):
    """What becomes of them."""

    kept: tuple[Names, ...]
    """Records that are here and stay."""
    taken: tuple[Names, ...]
    """Records that come."""
    left: tuple[str, ...]
    """Names that could have come, but for what they share a record with."""


def join(here: Iterable[Names], there: Iterable[Names], may_go: Callable[[str], bool]) -> Joined:
    """``may_go``: whether what is here under a name may give way to what comes."""
    here, there = tuple(here), tuple(there)
    firm = {name for names in here if not all(map(may_go, names)) for name in names}
    taken = tuple(names for names in there if firm.isdisjoint(names))
    new = {name for names in taken for name in names}
    kept = tuple(names for names in here if new.isdisjoint(names) or not firm.isdisjoint(names))
    has = new | {name for names in kept for name in names}
    return Joined(kept, taken, tuple(sorted({name for names in (*there, *here) for name in names} - has)))
