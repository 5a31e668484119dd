"""Writes received contents into existing objects."""

from __future__ import annotations

from typing import Any

from sublet.notebook.identity import Identities
from sublet.notebook.merging import merge
from sublet.notebook.parcels import LOST, Came


def taken_over(
    names: dict[str, Any], identities: Identities, came: Came, settled: frozenset[int] = frozenset()
) -> tuple[dict[int, Any], list[str]]:
    """What stands here for each object of the parcel, and the names that had to be bound anew. ``settled``: ids of
    objects here that are newer than what came for them."""
    known, met = came.parcel.known, came.met
    originals = {id(met[n]): identities.find(tag) for n, tag in known.items() if n in met}
    if not came.classes and not any(old is not None for old in originals.values()):  # all is new: nothing to write into
        came.figures.finish()
        names.update({name: value for name, value in came.values.items() if not name.startswith(LOST)})
        return met | came.figures.met, []
    lost_last = sorted(came.values, key=lambda name: name.startswith(LOST))  # what has a name says what it holds
    news = {name: came.values[name] for name in lost_last}
    merged, chosen = merge(news, originals, met.values(), came.classes, came.figures, settled)
    rebound = []
    for key, old in originals.items():
        if old is not None and chosen.get(key, old) is not old:
            rebound += _rebound(names, old, chosen[key])
    names.update({name: value for name, value in merged.items() if not name.startswith(LOST)})
    return {n: chosen.get(id(value), value) for n, value in met.items()} | came.figures.met, rebound


def _rebound(names: dict[str, Any], old: Any, new: Any) -> list[str]:
    """An object that could not take over: every name that had it has now what came."""
    found = [name for name, value in names.items() if value is old]
    names.update(dict.fromkeys(found, new))
    return found
