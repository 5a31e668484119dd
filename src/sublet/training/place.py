"""Where a training program saves when it does not say: in the volume it was given, else in the block lease it has."""

from __future__ import annotations

import os
from typing import Any, Final

from sublet.errors import InvalidRequest

__all__ = ["FOLDERS", "place_here"]

FOLDERS: Final = ("SUBLET_VOLUME", "SUBLET_BLOCK")


def place_here() -> Any:
    """A place as `sublet.Durable` takes one. Raises ``InvalidRequest`` where there is none."""
    for name in FOLDERS:
        folder = os.environ.get(name, "").split(os.pathsep)[0]
        if folder:
            return folder
    raise InvalidRequest(
        "nobody said where to save",
        do="Give PreemptibleTrainer a folder or a block lease (place=...), or run the program with `sublet train`.",
    )
