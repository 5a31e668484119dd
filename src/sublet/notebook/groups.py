"""Checks names and their groups before they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sublet.notebook.namespace import Shared
from sublet.notebook.parcels import LOST, Outgoing
from sublet.notebook.remote_value import RemoteValue, any_handles
from sublet.state.checkpoints.object_groups import Group
from sublet.state.transfer.changes import chunk_hash
from sublet.state.transfer.encoded import Buffer, BufferKind
from sublet.values import format_size

SMALL_BYTES: Final = 256 * 1024
"""This much is always sent: names that have less stand together in one group."""
ARROW_MAX: Final = 64 << 20
"""Bytes of a column of text that is hashed at each look, which takes 10 ms. Larger ones are told by their address."""


def digest(group: Group) -> bytes:
    """Of what it is and of where its memory lies, so that it is news when two arrays change places; what the memory
    holds is for others to find out. Small pieces are gathered anew each time, so of them it is what they hold."""
    buffers = group.encoded.buffers
    said = [_said_of(one) for one in buffers]
    return chunk_hash(b"".join((group.encoded.head, *said)) if said else group.encoded.head)


def is_told_by_digest(buffer: Buffer) -> bool:
    """Whether the digest has what a buffer holds: pandas' columns of text are Arrow's, which copies them anew for each
    pickle."""
    return buffer.kind is BufferKind.SMALL or (buffer.kind is BufferKind.ARROW and buffer.view.nbytes <= ARROW_MAX)


def _said_of(buffer: Buffer) -> bytes | memoryview:
    if buffer.kind is BufferKind.SMALL:
        return buffer.view
    return chunk_hash(buffer.view) if is_told_by_digest(buffer) else buffer.address.to_bytes(8, "little")


def has_room(group: Group, room: int, stuck: Mapping[str, str], shared: Shared, found: Outgoing) -> bool:
    """Whether it may travel: there is room for it, or the other side has it. ``found`` is told what stays."""
    nbytes = group.encoded.nbytes
    stayed = [stuck[name] for name in group.names if name in stuck]
    if nbytes <= SMALL_BYTES or (not stayed and (nbytes <= room or shared.has_any(group.names))):
        return True
    names = [name for name in group.names if not name.startswith(LOST)]
    why = stayed[0] if stayed else f"{format_size(nbytes)}, more than {format_size(room)}"
    found.stays |= dict.fromkeys(names, why)
    return False


def without_handles(here: Mapping[str, Any], names: Iterable[str], found: Outgoing) -> set[str]:
    """Names that are here, without those that stand for what is only there; and what functions in that read."""
    left = set(filter(here.__contains__, names))
    while any_handles() and RemoteValue in set(map(type, map(here.__getitem__, left))):  # so without a loop
        fresh = {n for n in left if type(here[n]) is RemoteValue}
        handles = {name: here[name] for name in fresh}
        left -= fresh
        found.handles |= handles
        needs = {need for handle in handles.values() for need in handle.needs}
        left |= {name for name in needs if name in here and name not in found.handles}
    return left
