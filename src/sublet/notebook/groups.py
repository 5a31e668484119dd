"""Checks names and their groups before they are sent."""

from __future__ import annotations

import ctypes
import struct
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from sublet.errors import Unpicklable
from sublet.notebook.home import HomeRules
from sublet.notebook.namespace import Shared
from sublet.notebook.parcels import LOST, Outgoing
from sublet.notebook.remote_value import RemoteValue, any_handles
from sublet.state.checkpoints.object_groups import ObjectGroup, encode_roots, is_long, met_by_name
from sublet.state.transfer.changes import chunk_hash
from sublet.state.transfer.encoded import BufferKind, EncodedBuffer
from sublet.state.transfer.memory import memory_at
from sublet.values import format_size

SMALL_BYTES: Final = 256 * 1024
"""This much is always sent: names that have less stand together in one group."""
NOTHING: Final[Mapping[int, Any]] = types.MappingProxyType({})
ARROW_MAX: Final = 64 << 20
"""Bytes of a column of text that is hashed at each look, which takes 10 ms. Larger ones are told by their address."""


def digest(group: ObjectGroup) -> bytes:
    """A digest of what the group is and where its memory lies: two arrays that change places change it, their contents
    do not. Small pieces are gathered anew each time, so their contents are part of it."""
    buffers = group.encoded.buffers
    keys = [_content_key(one) for one in buffers]
    return chunk_hash(b"".join((group.encoded.head, *keys)) if keys else group.encoded.head)


class ObjectIds(NamedTuple):
    """Which objects a group had that can change. Others may be just like them, and so have the same digest."""

    numbers: tuple[int, ...]
    """Of these objects in the encoding."""
    ids: tuple[int, ...]

    @classmethod
    def of(cls, group: ObjectGroup, can_change: Callable[[Any], bool]) -> ObjectIds:
        met = _met(group)
        numbers = tuple(n for n, one in met.items() if n and can_change(one))  # 0: what holds the names, made for it
        return cls(numbers, _ids(met, numbers))

    def are_of(self, group: ObjectGroup) -> bool:
        """Whether the group, whose digest is the same, has the very same ones."""
        return _ids(_met(group), self.numbers) == self.ids


def _met(group: ObjectGroup) -> Mapping[int, Any]:
    return (group.encoded.met or NOTHING) if group.plain is None else met_by_name(group.plain)


def _ids(met: Mapping[int, Any], numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(id, map(met.get, numbers)))


def is_covered_by_digest(buffer: EncodedBuffer) -> bool:
    """Whether the digest has what a buffer holds: pandas' columns of text are Arrow's, which copies them anew for each
    pickle."""
    return buffer.kind is BufferKind.SMALL or (buffer.kind is BufferKind.ARROW and buffer.view.nbytes <= ARROW_MAX)


def _content_key(buffer: EncodedBuffer) -> bytes | memoryview:
    if buffer.kind is BufferKind.SMALL:
        return buffer.view
    return chunk_hash(buffer.view) if is_covered_by_digest(buffer) else buffer.address.to_bytes(8, "little")


def has_room(group: ObjectGroup, room: int, stuck: Mapping[str, str], shared: Shared, found: Outgoing) -> bool:
    """Whether it may travel: there is room for it, or the other side has it. ``found`` is told what stays."""
    nbytes = group.encoded.nbytes
    stayed = [stuck[name] for name in group.names if name in stuck]
    if nbytes <= SMALL_BYTES or (not stayed and (nbytes <= room or shared.has_any(group.names))):
        return True
    names = [name for name in group.names if not name.startswith(LOST)]
    why = stayed[0] if stayed else f"{format_size(nbytes)}, more than {format_size(room)}"
    found.stays |= dict.fromkeys(names, why)
    return False


def without_handles(namespace: Mapping[str, Any], names: Iterable[str], found: Outgoing) -> set[str]:
    """Names that are here, without those that stand for what is only there; and what functions in that read."""
    left = set(filter(namespace.__contains__, names))
    while any_handles() and RemoteValue in set(map(type, map(namespace.__getitem__, left))):  # so without a loop
        fresh = {n for n in left if type(namespace[n]) is RemoteValue}
        handles = {name: namespace[name] for name in fresh}
        left -= fresh
        found.handles |= handles
        needs = {need for handle in handles.values() for need in handle.value_needs}
        left |= {name for name in needs if name in namespace and name not in found.handles}
    return left


# ---------------------------------------------------------------------------------------------------------------- blame
#
# Finds the name that could not travel.


def blamed(error: Unpicklable, roots: Mapping[str, object]) -> tuple[str, Unpicklable]:
    """The name at the head of the path; where the error has none, the first that cannot travel by itself."""
    if name := _at_head(error.path or "", roots):
        return name, error
    for name, value in roots.items():
        if what := _why_not_alone({name: value}):
            return name, Unpicklable(f"this cannot be sent: {name}: {what}", path=name, what=what)
    raise error


def blamed_beside(error: Unpicklable, roots: Mapping[str, object]) -> dict[str, str]:
    """All names that the error says cannot travel, and why."""
    found = {_at_head(path, roots): what for path, what in reversed(error.blockers)}
    return {name: what for name, what in found.items() if name}


def _at_head(path: str, roots: Mapping[str, object]) -> str:
    called = {name: repr(name)[1:-1] if name == LOST else name for name in roots}
    fitting = [
        n
        for n, expression in called.items()
        if path == expression or path.startswith((expression + ".", expression + "[", expression + "("))
    ]
    return max(fitting, key=len, default="")


def _why_not_alone(root: Mapping[str, object]) -> str:
    try:
        encode_roots(root, rules=HomeRules())
    except Unpicklable as error:
        return error.what or error.message
    return ""


# ------------------------------------------------------------------------------------------------------------ unchanged
#
# Tells that a large container of atoms is unchanged without pickling it.
#
# Atoms cannot change, so a container holds what it held if its table of pointers is the same, bit for bit, and all
# objects that the pointers named are still alive. They are held here, and the table is hashed: 500,000 strings in a few
# milliseconds, with no string touched. A container that was changed and changed back may count as changed.
#
# The tables are read where CPython keeps them. That this is where they are is tried out once; where it is not, the
# items are listed instead.


IMMUTABLE: Final = frozenset({tuple, frozenset})
_LIST: Final = struct.Struct("nP")
_LIST_AT: Final = object.__basicsize__
_SET: Final = struct.Struct("nnnP")
_SET_AT: Final = object.__basicsize__
_ENTRY: Final = struct.calcsize("Pn")


class ContainerSnapshot:
    """What one container held."""

    __slots__ = ("_hash", "_items", "container")

    def __init__(self, container: Any, items: list[Any]) -> None:
        self.container = container
        self._items = items
        self._hash = _pointers(container)

    def is_of(self, value: Any) -> bool:
        """Whether this is the container, and holds what it held."""
        return value is self.container and (type(value) in IMMUTABLE or _pointers(value) == self._hash)


def snapshot(container: Any) -> ContainerSnapshot | None:
    """Of a container of nothing but atoms; None if it is too small or of a kind for which it does not pay."""
    if not is_long(container):
        return None
    kind = type(container)
    if kind in IMMUTABLE:
        return ContainerSnapshot(container, [])
    return ContainerSnapshot(container, [*container, *container.values()] if kind is dict else list(container))


def _pointers(container: Any) -> bytes:
    kind = type(container)
    if kind in IMMUTABLE:
        return b""
    if kind is dict:
        return _of_list([*container, *container.values()])
    if kind is set and _is_known:
        _, _, mask, table = _SET.unpack(ctypes.string_at(id(container) + _SET_AT, _SET.size))
        return chunk_hash(memory_at(table, (mask + 1) * _ENTRY))
    return _of_list(container if kind is list else list(container))


def _of_list(items: list[Any]) -> bytes:
    if not _is_known:
        return chunk_hash(struct.pack(f"{len(items)}P", *map(id, items)))
    count, table = _LIST.unpack(ctypes.string_at(id(items) + _LIST_AT, _LIST.size))
    return chunk_hash(memory_at(table, count * struct.calcsize("P"))) if count else b""


def _found_tables() -> bool:
    """Whether a list and a set keep their pointers where they are looked for here."""
    items = [object() for _ in range(100)]
    count, table = _LIST.unpack(ctypes.string_at(id(items) + _LIST_AT, _LIST.size))
    if count != len(items):
        return False
    if list(struct.unpack(f"{count}P", ctypes.string_at(table, count * 8))) != list(map(id, items)):
        return False
    held = set(items)
    fill, used, mask, table = _SET.unpack(ctypes.string_at(id(held) + _SET_AT, _SET.size))
    if (fill, used) != (100, 100) or mask + 1 not in (256, 512, 1024):
        return False
    entries = struct.unpack("Pn" * (mask + 1), ctypes.string_at(table, (mask + 1) * _ENTRY))
    return [one for one in entries[::2] if one] == list(map(id, held))


_is_known: Final = struct.calcsize("P") == 8 and _found_tables()
