"""Tells that a large container of atoms is unchanged without pickling it.

Atoms cannot change, so a container holds what it held if its table of pointers is the same, bit for bit, and all
objects that the pointers named are still alive. They are held here, and the table is hashed: 500,000 strings in a few
milliseconds, with no string touched. A container that was changed and changed back may count as changed.

The tables are read where CPython keeps them. That this is where they are is tried out once; where it is not, the items
are listed instead.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Final

from sublet.state.checkpoints.object_groups import is_long
from sublet.state.transfer.changes import chunk_hash
from sublet.state.transfer.memory import memory_at

IMMUTABLE: Final = frozenset({tuple, frozenset})
_LIST: Final = struct.Struct("nP")
_LIST_AT: Final = object.__basicsize__
_SET: Final = struct.Struct("nnnP")
_SET_AT: Final = object.__basicsize__
_ENTRY: Final = struct.calcsize("Pn")


class Snapshot:
    """What one container held."""

    __slots__ = ("_hash", "_items", "container")

    def __init__(self, container: Any, items: list[Any]) -> None:
        self.container = container
        self._items = items
        self._hash = _pointers(container)

    def is_of(self, value: Any) -> bool:
        """Whether this is the container, and holds what it held."""
        return value is self.container and (type(value) in IMMUTABLE or _pointers(value) == self._hash)


def snapshot(container: Any) -> Snapshot | None:
    """Of a container of nothing but atoms; None if it is too small or of a kind for which it does not pay."""
    if not is_long(container):
        return None
    kind = type(container)
    if kind in IMMUTABLE:
        return Snapshot(container, [])
    return Snapshot(container, [*container, *container.values()] if kind is dict else list(container))


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
