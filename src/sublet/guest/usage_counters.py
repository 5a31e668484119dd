"""Counts the memory of a lease's devices over all its processes, and the operations on them.

What a session may take is what the lease has, less what *every* living process of the lease has taken through Sublet.
The count is kept in the tally of the lease (``wire.usage_counters``). Where there is none (an older supervisor, a test)
each process counts for itself, and nothing of it reaches the bill.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Final

from sublet.devices.account import MemoryAccount
from sublet.errors import Unsupported
from sublet.wire.usage_counters import TALLY_VARIABLE, TallyFile, UsageRow

VRAM_VARIABLE: Final = "SUBLET_VRAM"
"""Bytes of each device of the lease, in their order, with commas between them."""


class SharedAccount(MemoryAccount):
    """The account of one device, of which other processes of the lease may have a part."""

    def __init__(self, cap_bytes: int, tally: TallyFile | None, place: int) -> None:
        super().__init__(cap_bytes)
        self._tally = tally
        self._place = place
        self._row = -1
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return self._free()

    def take(self, size: int, call: str) -> None:
        with self._lock:
            if self._tally is None:
                self._take(size, call, self.cap_bytes - self.used_bytes)
                return
            self._tally.lock()
            try:
                self._claim()
                self._take(size, call, self._free())
                self._write()
            finally:
                self._tally.unlock()

    def give(self, size: int) -> None:
        with self._lock:
            super().give(size)
            self._write()

    def count(self, *, launches: int, failures: int, bytes_in: int, bytes_out: int) -> None:
        """What was done since the last time."""
        if self._tally is None or not (launches or failures or bytes_in or bytes_out):
            return
        with self._lock:
            row = self._own_row(self._tally)
            self._put(
                replace(
                    row,
                    launches=row.launches + launches,
                    failures=row.failures + failures,
                    bytes_in=row.bytes_in + bytes_in,
                    bytes_out=row.bytes_out + bytes_out,
                )
            )

    def begin_counting(self) -> None:
        """What frameworks launch in this process is counted from now on."""
        if self._tally is not None:
            with self._lock:
                self._put(replace(self._own_row(self._tally), counting=1))

    def _own_row(self, tally: TallyFile) -> UsageRow:
        if self._row < 0:
            tally.lock()
            try:
                self._claim()
            finally:
                tally.unlock()
        return tally.read(self._row) if self._row > 0 else UsageRow()

    def _put(self, row: UsageRow) -> None:
        if self._tally is not None and self._row > 0:
            self._tally.write(self._row, row)

    def _free(self) -> int:
        others = self._tally.others(self._row, self._place) if self._tally is not None else 0
        return self.cap_bytes - self.used_bytes - others

    def _claim(self) -> None:
        if self._tally is not None and self._row < 0:
            self._row = self._tally.claim(os.getpid(), self._place, _now_ns())

    def _write(self) -> None:
        if self._tally is not None and self._row > 0:
            self._put(self._tally.read(self._row).used(self.used_bytes, _now_ns()))


class LeaseAccounts:
    """One account for each device of the lease, for all sessions of this process."""

    def __init__(self, caps: tuple[int, ...], tally: TallyFile | None) -> None:
        self.caps = caps
        self._tally = tally
        self._accounts: dict[int, SharedAccount] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls) -> LeaseAccounts:
        """As the supervisor set it."""
        caps = os.environ.get(VRAM_VARIABLE, "")
        path = os.environ.get(TALLY_VARIABLE, "")
        return cls(tuple(int(cap) for cap in caps.split(",") if cap), TallyFile.open(path) if path else None)

    def of(self, place: int) -> SharedAccount:
        """Of the device at this place of the lease."""
        with self._lock:
            found = self._accounts.get(place)
            if found is None:
                if not 0 <= place < len(self.caps):
                    raise Unsupported(
                        f"open: the lease's memory is unknown for its device {place}",
                        do=f"Leave {VRAM_VARIABLE} as Sublet set it; an office of an older version is started anew.",
                    )
                found = self._accounts[place] = SharedAccount(self.caps[place], self._tally, place)
            return found


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
