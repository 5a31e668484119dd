"""Where several processes run, what takes longest begins first: else the last of them works alone at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["begin_first"]


def begin_first(items: list[pytest.Item], folder: Path, names: Sequence[str]) -> None:
    """Puts the tests of this folder that are in these groups, or stand alone in these files, before its others. All
    else stays where it is, and so does the order within a group."""

    def turn(item: pytest.Item) -> int:
        group = item.get_closest_marker("xdist_group")
        name = item.path.name if group is None else group.args[0]
        return names.index(name) if name in names else len(names)

    places = [at for at, item in enumerate(items) if item.path.parent == folder]
    for at, item in zip(places, sorted((items[at] for at in places), key=turn), strict=True):
        items[at] = item
