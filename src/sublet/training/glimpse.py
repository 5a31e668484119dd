"""A few bytes of a batch, enough to tell it from another one: what is small in full, of what is large a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from blake3 import blake3

LOOK_BYTES: Final = 4096
"""Of bytes."""
SAMPLES: Final = 128
"""Numbers of each tensor or array. Two batches that differ in others only are taken for one another."""
DEPTH_MAX: Final = 8
ITEMS_MAX: Final = 10_000


def glimpse(batch: Any) -> bytes:
    """A hash of what a batch shows at a glance. Reading it changes nothing, and draws no random numbers."""
    found = blake3()
    _look(batch, found, DEPTH_MAX)
    return found.digest()


def _look(thing: Any, found: Any, depth: int) -> None:
    found.update(type(thing).__name__.encode())
    if isinstance(thing, int | float | complex | str | type(None)):
        found.update(repr(thing).encode())
    elif isinstance(thing, bytes | bytearray | memoryview):
        found.update(bytes(memoryview(thing).cast("B")[:LOOK_BYTES]))
    elif depth and isinstance(thing, Mapping):
        for key, value in list(thing.items())[:ITEMS_MAX]:
            _look(key, found, depth - 1)
            _look(value, found, depth - 1)
    elif depth and isinstance(thing, Sequence):
        if len(thing) and all(type(one) is int for one in thing):  # the indices of a batch
            found.update(repr(thing[:ITEMS_MAX]).encode())
            return
        for one in thing[:ITEMS_MAX]:
            _look(one, found, depth - 1)
    elif hasattr(thing, "dtype") and hasattr(thing, "shape"):
        found.update(f"{thing.dtype} {tuple(thing.shape)}".encode())
        found.update(_sample(thing))


def _sample(array: Any) -> bytes:
    """Some numbers of a tensor or an array, from all over it, wherever it is."""
    flat = array.reshape(-1)
    flat = flat[:: max(1, len(flat) // SAMPLES)][: 2 * SAMPLES]
    if hasattr(flat, "detach"):
        flat = flat.detach().cpu()
    return repr(flat.tolist()).encode()
