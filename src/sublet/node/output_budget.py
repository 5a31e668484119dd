"""Bounds output that holders requested and do not read, over all connections.

Each link bounds its own queue, and two thousand such queues would be more than this process may ever have. So once
all of them together hold ``UNREAD_BYTES``, a stream gets room only up to ``UNREAD_LEAST_BYTES`` of its own connection:
all go on, slowly, and no holder can take that from others by not reading. What does not come from streams (answers to
questions) can still pile up, and where that passes ``UNREAD_BYTES_MAX`` the connection with most unread is cut off, and
told.
"""

from __future__ import annotations

from typing import Final, Protocol

from sublet.errors import CapacityExceeded, SubletError
from sublet.values import MIB, format_size

UNREAD_BYTES: Final = 32 * MIB
UNREAD_LEAST_BYTES: Final = MIB // 64
UNREAD_BYTES_MAX: Final = 96 * MIB
"""With 2048 connections at their least it is 64 MiB."""


class _Connection(Protocol):
    def cut(self, error: SubletError | None = None) -> None: ...


class OutputBudget:
    """The account of all of them."""

    def __init__(self, bytes_: int = UNREAD_BYTES, bytes_max: int = UNREAD_BYTES_MAX) -> None:
        self.used = 0
        self.cut = 0
        """How many were cut off for it."""
        self._bytes = bytes_
        self._bytes_max = bytes_max
        self._of: dict[_Connection, int] = {}

    def now(self, connection: _Connection, waiting: int) -> None:
        """So many bytes wait for this one; with none it is forgotten."""
        self.used += waiting - self._of.pop(connection, 0)
        if waiting:
            self._of[connection] = waiting

    def room(self, waiting: int) -> int:
        """How many more a stream of a connection with so many may add."""
        return max(0, UNREAD_LEAST_BYTES - waiting, self._bytes - self.used)

    def relieve(self) -> None:
        """If it is too much, cut off the connections with most unread."""
        while self.used > self._bytes_max and self._of:
            worst = max(self._of, key=lambda one: self._of[one])
            left = self._of[worst]
            self.now(worst, 0)
            self.cut += 1
            worst.cut(
                CapacityExceeded(
                    f"all connections together left more than {format_size(self._bytes_max)} unread, "
                    f"and this one most of it, {format_size(left)}",
                    do="Read what you ask for, or ask for less.",
                )
            )
