"""What a cell asks for beside its code: whether it can be had, and whether what is there already will do."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sublet.errors import InvalidRequest
from sublet.notebook.options import CellOptions

if TYPE_CHECKING:
    from sublet.client.lease import Lease

__all__ = ["as_numbered", "check_names", "fits", "look_in"]


def as_numbered(source: str) -> str:
    """With the line of ``%%gpu`` as a comment: tracebacks count as the notebook does. A magic must stay first."""
    return source if source.lstrip().startswith("%%") else f"# %%gpu\n{source}"


def check_names(options: CellOptions, names: Mapping[str, object]) -> None:
    """Of what is said to travel in, before anything is asked for."""
    missing = [name for name in options.takes or () if name not in names]
    if missing:
        close = difflib.get_close_matches(missing[0], [name for name in names if not name.startswith("_")], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InvalidRequest(
            f"there is no variable {missing[0]}{hint}", do="Behind --in stand variables of the notebook."
        )


def fits(lease: Lease, had: CellOptions, wants: CellOptions) -> bool:
    """Whether a lease that is there will do."""
    if len(lease.devices) != wants.gpus or had.python != wants.python:
        return False
    return wants.vram_bytes is None or all(device.amount >= wants.vram_bytes for device in lease.devices)


def look_in(paths: tuple[str, ...]) -> None:
    """In the guest: import from there as well."""
    import os

    for path in reversed(paths):
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if folder not in sys.path:
            sys.path.insert(0, folder)
