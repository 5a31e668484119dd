"""What runs in the kernel's guest around a cell: variables are taken in before it, and what changed is handed back.

Called by name, on the main thread between cells; the namespace is the kernel's, which is that of ``__main__``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from sublet.notebook.spaces import GUEST, Outgoing, Parcel, Space, Taken

__all__ = ["collect", "place", "seen"]


class _Before(NamedTuple):
    """What there was before a cell."""

    reads: frozenset[str]
    bound: dict[str, Callable[[], object]]
    """What each name had; held weakly where that can be, so that memory on the device is freed when a cell lets go."""


_space: Space | None = None
_before = _Before(frozenset(), {})


def place(parcels: list[Parcel], gone: tuple[str, ...], reads: frozenset[str]) -> Taken:
    """Take in what a cell needs. ``reads``: all names that it or its functions may read."""
    global _before
    space = seen()
    taken = space.take(parcels, gone)
    _before = _Before(reads, {name: _held(value) for name, value in space.names.items()})
    return taken


def collect() -> Outgoing:
    """What the cell changed: of what it read, and of whatever is bound anew. What it might have bound and did not is
    of an earlier cell, and the notebook may have something newer."""
    space = seen()
    nothing = object()
    rebound = {name for name in space.visible() if _before.bound.get(name, lambda: nothing)() is not space.names[name]}
    found = space.outgoing(_before.reads | rebound, lost_of=_before.reads)
    gone = [name for name in _before.reads if name not in space.names]
    found.gone = tuple(sorted({*found.gone, *gone}))
    space.sent(found)
    return found


def _held(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def seen() -> Space:
    """The namespace of this kernel; made when it is first asked for."""
    global _space
    main: dict[str, Any] = vars(sys.modules["__main__"])
    if _space is None or _space.names is not main:
        _space = Space(main, GUEST)
    return _space
