"""Accounts for device memory to the byte, before anything is allocated."""

from __future__ import annotations

from sublet.errors import InvalidRequest, OutOfMemory
from sublet.values import format_size


class MemoryAccount:
    """The memory of one lease on one device. All sessions under the lease share it.

    It counts what was asked for. What a driver rounds up to, and the context it keeps for itself, are not in here: on a
    GPU this is accounting, and what enforces is said in the docs.
    """

    def __init__(self, cap_bytes: int) -> None:
        if cap_bytes <= 0:
            raise InvalidRequest(f"a device cannot lend {cap_bytes} bytes", do="Lend at least one byte.")
        self.cap_bytes = cap_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.cap_bytes - self.used_bytes

    def take(self, size: int, call: str) -> None:
        """Count ``size`` bytes as taken. One byte too many is ``OutOfMemory``, and nothing changed."""
        self._take(size, call, self.free_bytes)

    def _take(self, size: int, call: str, free_bytes: int) -> None:
        if size > free_bytes:
            raise OutOfMemory(
                f"{call}: {format_size(size)} ({size} bytes) asked, and {free_bytes} bytes of the "
                f"{format_size(self.cap_bytes)} under this lease are free",
                do="Free something, or lease more (min_vram=).",
            )
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give(self, size: int) -> None:
        """``size`` bytes are free again."""
        assert 0 <= size <= self.used_bytes, "more was given back than was ever taken"
        self.used_bytes -= size
