"""``%gpu explain``: what a cell would send, its size, what stays, and why, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.notebook.spaces import NOTEBOOK, Space
from sublet.values import format_size

if TYPE_CHECKING:
    from sublet.notebook.reading import Reading
    from sublet.notebook.remote_value import RemoteValue


def explain(space: Space, reading: Reading, *, is_there: bool) -> str:
    """In lines, for people. Looks with a fresh eye: nothing of it counts as sent. ``is_there``: a guest that has what
    was sent before."""
    found = Space(space.names, NOTEBOOK).outgoing(reading.reads, maybe=reading.maybe)
    agreed = space.unchanged([parcel.names for parcel in found.parcels]) if is_there else set()
    lines = []
    total = 0
    for parcel in sorted(found.parcels, key=lambda one: -one.nbytes):
        names, size = ", ".join(parcel.names), format_size(parcel.nbytes)
        together = " (they share objects, or are small, and are sent together)" if len(parcel.names) > 1 else ""
        if parcel.names in agreed:
            lines.append(f"{names}: {size}, is there already; only changes are sent{together}")
        else:
            total += parcel.nbytes
            lines.append(f"{names}: {size}{together}")
    lines += [f"{name}: cannot be sent ({why})" for name, why in found.stays.items()]
    lines += [f"{name}: {_handle(handle)}" for name, handle in found.handles.items()]
    lines += [f"line {one.line}: {one.what} can reach any name, so all are sent" for one in reading.opaque]
    lines += [f"{name}() can reach any name of the namespace it runs in" for name in found.opaque]
    if found.looked_up and not reading.opaque:
        lines.append(f"found in strings: {', '.join(sorted(found.looked_up))}")
    if reading.binds:
        lines.append(f"may come back: {', '.join(sorted(reading.binds))}")
    if not found.parcels and not lines:
        return "nothing is sent"
    return "\n".join([f"{format_size(total)} would be sent" if total else "nothing is sent", *lines])


def _handle(handle: RemoteValue) -> str:
    about = handle.about
    what = ", ".join(one for one in (about.what, format_size(about.nbytes) if about.nbytes else "") if one)
    if handle.is_live:
        return f"{what}; is on the device and stays there ({about.why})"
    if handle.is_saved:
        return f"{what}; is restored from what was saved"
    return f"{what}; was lost with its lease, so the cell would not run"
