"""The table of device allocations: address, size, owner. Touches no memory.

A handle is a number that is never used again, and the generation of the table that gave it out. So the three ways to
hold a piece that one does not have are told apart: it was freed, it never was, or it belongs to another session.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from sublet.errors import CapacityExceeded, InvalidRequest, NotFound
from sublet.lazy_dataclass import dataclass

ALIGNMENT: Final = 256
"""Every piece begins at a multiple of this many bytes, as the widest loads of a GPU want it."""
PIECES_MAX: Final = 32_768
"""Pieces of one session. A host device has a mapping for each, and the kernel allows a process some 65,000."""


class BufferHandle(NamedTuple):
    """One piece of device memory, as its holder names it."""

    generation: int
    number: int


@dataclass(slots=True, eq=False)
class MemoryPiece:
    """One piece that is there."""

    size: int
    address: int
    owner: Any = None
    """What keeps the memory, where that is an object."""
    forms: dict[Any, Any] | None = None
    """What a kernel library made of the piece (an array of some type), kept as long as the piece."""


class MemoryTable:
    """The pieces of one session on one device."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._pieces: dict[int, MemoryPiece] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._pieces)

    def admit(self, size: int, call: str) -> None:
        """Whether one more piece of this size may be asked for at all."""
        if size <= 0:
            raise InvalidRequest(f"{call}: a buffer cannot have {size} bytes", do="Ask for at least one.")
        if len(self._pieces) >= PIECES_MAX:
            raise CapacityExceeded(f"{call}: there are {PIECES_MAX} buffers in this session", do="Free some first.")

    def add(self, size: int, address: int, owner: Any = None) -> BufferHandle:
        """A piece is there; its handle."""
        assert address % ALIGNMENT == 0, "a device gave out memory that is not aligned"
        handle = BufferHandle(self.generation, self._next)
        self._next += 1
        self._pieces[handle.number] = MemoryPiece(size, address, owner)
        return handle

    def get(self, handle: BufferHandle, call: str) -> MemoryPiece:
        """The piece, or why there is none."""
        generation, number = handle
        if generation == self.generation and (found := self._pieces.get(number)) is not None:
            return found
        raise self._missing(generation, number, call)

    def span(self, handle: BufferHandle, offset: int, length: int, call: str) -> MemoryPiece:
        """The piece, if ``length`` bytes from ``offset`` on lie within it."""
        piece = self.get(handle, call)
        if offset < 0 or length < 0 or offset + length > piece.size:
            raise InvalidRequest(
                f"{call}: {length} bytes from {offset} on are not within buffer {handle.number}, "
                f"which has {piece.size} bytes",
                do="Fix offset and length.",
            )
        return piece

    def remove(self, handle: BufferHandle, call: str) -> MemoryPiece:
        """The piece is no more. A second time is an error, like any use after it."""
        piece = self.get(handle, call)
        del self._pieces[handle.number]
        return piece

    def clear(self) -> list[MemoryPiece]:
        """All that were left."""
        left = list(self._pieces.values())
        self._pieces.clear()
        return left

    def _missing(self, generation: int, number: int, call: str) -> NotFound:
        if generation != self.generation:
            return NotFound(f"{call}: this buffer belongs to another session", do="Use it in the session it came from.")
        if 0 < number < self._next:
            return NotFound(f"{call}: buffer {number} was freed before", do="Use a buffer only until it is freed.")
        return NotFound(f"{call}: there is no buffer {number}", do="Use what mem_alloc gave out.")
