"""The value of a register: a version that rises by one, the writers of the last few of them, and a body.

The ids of the last writes are what an unanswered write is judged by afterwards: whether version 7 is mine is read, not
guessed.
"""

from __future__ import annotations

import struct
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.ballot import NONCE_BYTES, Garbled, take

REMEMBERED: Final = 32
"""Writes whose ids are kept. A writer that comes back after more than so many others cannot tell any more."""
_HEAD: Final = struct.Struct(">QB")


@dataclass(frozen=True, slots=True)
class RegisterState:
    """What a register holds."""

    version: int
    ids: tuple[bytes, ...]
    """Of the last writes, newest first."""
    body: bytes

    def wrote(self, write: bytes, version: int) -> bool | None:
        """Whether this version was this write; None if that is no longer, or not yet, known."""
        back = self.version - version
        if back < 0:
            return None
        return self.ids[back] == write if back < len(self.ids) else None

    def then(self, write: bytes, body: bytes) -> RegisterState:
        """The next state."""
        return RegisterState(self.version + 1, (write, *self.ids[: REMEMBERED - 1]), body)

    def pack(self) -> bytes:
        """As docs/replicated.md draws it."""
        return _HEAD.pack(self.version, len(self.ids)) + b"".join(self.ids) + self.body

    @classmethod
    def unpack(cls, data: bytes) -> RegisterState:
        """From a value; anything else is Garbled."""
        version, count = _HEAD.unpack(take(data, 0, _HEAD.size))
        if count > REMEMBERED or count > version or (version and not count):
            raise Garbled(f"version {version} with {count} ids")
        at = _HEAD.size
        ids = tuple(take(data, at + NONCE_BYTES * k, NONCE_BYTES) for k in range(count))
        return cls(version, ids, data[at + NONCE_BYTES * count :])


NOTHING: Final = RegisterState(0, (), b"")
"""A register that was never written."""
