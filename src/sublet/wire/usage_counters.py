"""The tally of a lease: a small shared file in which its guests count their device memory and operations.

The supervisor makes the file, guests write it, and what it says at the end goes into the bill. It outlives a guest that
was killed, which no message would. Each process has a row for each device it uses, and holds a lock on that row as long
as it lives; so what a dead process had counts as given back, and what it did still counts.

It is bookkeeping among the programs of one holder: a writer could write anything. What others must be protected
from is held by the kernel (see ``node.processes.limits``); here is only what is billed and what a session is told.

Standard library only; a row is read and written whole, by ``pread`` and ``pwrite``, so that a file that was cut
short harms no reader.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import replace
from typing import Final

from sublet.lazy_dataclass import dataclass

TALLY_VARIABLE: Final = "SUBLET_TALLY"
"""Where a guest finds the path of the file."""
ROWS_MAX: Final = 256
"""Rows of one lease: processes that live at once, times the devices they use."""
_MAGIC: Final = b"SUBLETTY"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sI52x")
_ROW: Final = struct.Struct("<IIQQQ16sQQQQQQ24x")
_BLANK: Final = bytes(_ROW.size)
_FUEL: Final = struct.Struct("<Q")
_FUEL_AT: Final = 80
"""Of a row."""
_FLOCK: Final = struct.Struct("hhqqi4x")
TALLY_BYTES: Final = _HEAD.size + ROWS_MAX * _ROW.size
_AT_WORK: Final = 4096
"""The byte that is locked by those who answer a call; no row has it."""
_UNSAVED: Final = 4097
"""The byte that is locked by those who have something to save."""
_LEAVING: Final = 4098
"""The byte that is locked by those who were told to save and leave, and do."""
_U64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """What one process did on one device of the lease; or, with pid 0, all whose rows were wanted again."""

    pid: int = 0
    place: int = 0
    """Of the device in the lease."""
    used_bytes: int = 0
    """What it has now."""
    peak_bytes: int = 0
    at_ns: int = 0
    """Since when (CLOCK_BOOTTIME)."""
    byte_ns: int = 0
    """What it had, times how long, up to then."""
    launches: int = 0
    failures: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    fuel: int = 0
    """That WASM tasklets used."""
    counting: int = 0
    """Processes in which what frameworks launch is counted."""

    @property
    def is_free(self) -> bool:
        """Whether it was never written."""
        return self == UsageRow()

    def used(self, used_bytes: int, now_ns: int) -> UsageRow:
        """From now on it has so much."""
        return replace(
            self,
            used_bytes=used_bytes,
            peak_bytes=max(self.peak_bytes, used_bytes),
            at_ns=now_ns,
            byte_ns=self.byte_ns + self.used_bytes * max(0, now_ns - self.at_ns),
        )

    def over(self, now_ns: int) -> UsageRow:
        """What it comes to when its process has ended."""
        return replace(self.used(0, now_ns), pid=0)

    def plus(self, other: UsageRow) -> UsageRow:
        """Both together, of processes that have ended."""
        return replace(
            self,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            byte_ns=self.byte_ns + other.byte_ns,
            launches=self.launches + other.launches,
            failures=self.failures + other.failures,
            bytes_in=self.bytes_in + other.bytes_in,
            bytes_out=self.bytes_out + other.bytes_out,
            fuel=self.fuel + other.fuel,
            counting=self.counting + other.counting,
        )

    def encode(self) -> bytes:
        return _ROW.pack(
            self.pid,
            self.place,
            self.used_bytes & _U64,
            self.peak_bytes & _U64,
            self.at_ns & _U64,
            (self.byte_ns & ((1 << 128) - 1)).to_bytes(16, "little"),
            *(number & _U64 for number in (self.launches, self.failures, self.bytes_in, self.bytes_out, self.fuel)),
            self.counting & _U64,
        )

    @classmethod
    def decode(cls, raw: bytes) -> UsageRow:
        pid, place, used, peak, at_ns, byte_ns, launches, failures, bytes_in, bytes_out, fuel, counting = _ROW.unpack(
            raw
        )
        return cls(
            pid=pid,
            place=place,
            used_bytes=used,
            peak_bytes=peak,
            at_ns=at_ns,
            byte_ns=int.from_bytes(byte_ns, "little"),
            launches=launches,
            failures=failures,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            fuel=fuel,
            counting=counting,
        )


def total(rows: list[UsageRow], now_ns: int) -> UsageRow:
    """All of it, as if every process had ended now."""
    found = UsageRow()
    for row in rows:
        found = found.plus(row.over(now_ns))
    return found


class TallyFile:
    """The file, open. Each who opens it has locks of its own."""

    def __init__(self, fd: int) -> None:
        """Rather use ``create`` or ``open``. Owns the descriptor."""
        self._fd = fd
        self._mine: set[int] = set()
        """Rows that were claimed here: to ourselves our own locks look like none."""

    @classmethod
    def create(cls, path: str) -> TallyFile:
        """A new one with nothing in it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, TALLY_BYTES)
            os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION), 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def open(cls, path: str) -> TallyFile | None:
        """One that is there; None if it is none, or another version's."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) == _HEAD.size and _HEAD.unpack(head) == (_MAGIC, _VERSION):
            return cls(fd)
        os.close(fd)
        return None

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Let go of it, and of every lock. Harmless twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def rows(self) -> list[UsageRow]:
        """Those that were ever written. Read in one go, and what is blank is not taken apart: of most leases that is
        all of it, and the end of each waits for this."""
        raw = os.pread(self._fd, ROWS_MAX * _ROW.size, _HEAD.size)
        pieces = (raw[at : at + _ROW.size] for at in range(0, len(raw) - _ROW.size + 1, _ROW.size))
        return [row for row in map(UsageRow.decode, filter(_BLANK.__ne__, pieces)) if not row.is_free]

    def read(self, index: int) -> UsageRow:
        raw = os.pread(self._fd, _ROW.size, _HEAD.size + index * _ROW.size)
        return UsageRow.decode(raw) if len(raw) == _ROW.size else UsageRow()

    def write(self, index: int, row: UsageRow) -> None:
        os.pwrite(self._fd, row.encode(), _HEAD.size + index * _ROW.size)

    def write_fuel(self, index: int, fuel: int) -> None:
        """Of a row that was claimed here, alone: tasklets come by the ten thousand."""
        os.pwrite(self._fd, _FUEL.pack(fuel & _U64), _HEAD.size + index * _ROW.size + _FUEL_AT)

    def others(self, mine: int, place: int) -> int:
        """What living processes but this one have of a device. To be asked under ``lock``."""
        found = 0
        for index in range(ROWS_MAX):
            row = self.read(index)
            if row.is_free:
                break
            if index == mine or row.place != place or not row.used_bytes:
                continue
            if index in self._mine or self.is_held(index):
                found += row.used_bytes
        return found

    def claim(self, pid: int, place: int, now_ns: int) -> int:
        """A row for this process, locked as long as the file is open here; -1 if all are taken. Under ``lock``.

        A row whose process has ended is used again, and what it did is kept in the first row, which no process claims.
        """
        for index in range(1, ROWS_MAX):
            if index in self._mine or not self._locked(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, 1 + index):
                continue
            before = self.read(index)
            if not before.is_free:
                kept = self.read(0).plus(before.over(now_ns))
                self.write(0, kept)
            elif self.read(0).is_free:
                self.write(0, UsageRow(at_ns=now_ns))
            self.write(index, UsageRow(pid=pid, place=place, at_ns=now_ns))
            self._mine.add(index)
            return index
        return -1

    def is_held(self, index: int) -> bool:
        """Whether the process of this row lives."""
        return self._is_locked(1 + index)

    def at_work(self, *, begins: bool) -> None:
        """This process answers a call, or does not any more. Several of a lease may at once."""
        self._locked(fcntl.F_OFD_SETLK, fcntl.F_RDLCK if begins else fcntl.F_UNLCK, _AT_WORK)

    def is_at_work(self) -> bool:
        """Whether another process that has it open says so. One that died does not."""
        return self._is_locked(_AT_WORK)

    def unsaved(self, *, begins: bool) -> None:
        """This process has something to save, or has saved it."""
        self._locked(fcntl.F_OFD_SETLK, fcntl.F_RDLCK if begins else fcntl.F_UNLCK, _UNSAVED)

    def is_unsaved(self) -> bool:
        """Whether another process that has it open says so."""
        return self._is_locked(_UNSAVED)

    def leaving(self, *, begins: bool) -> None:
        """This process was told to save and leave, and begins to; or it stays, since that was taken back."""
        self._locked(fcntl.F_OFD_SETLK, fcntl.F_RDLCK if begins else fcntl.F_UNLCK, _LEAVING)

    def is_leaving(self) -> bool:
        """Whether another process that has it open says so."""
        return self._is_locked(_LEAVING)

    def is_any_used(self) -> bool:
        """Whether a living process has memory of a device."""
        for index in range(1, ROWS_MAX):
            row = self.read(index)
            if row.is_free:
                break
            if row.used_bytes and self.is_held(index):
                return True
        return False

    def lock(self) -> None:
        """Keep others out while a decision is made. It waits."""
        self._locked(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, 0)

    def unlock(self) -> None:
        self._locked(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0)

    def _is_locked(self, at: int) -> bool:
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, query))[0] != fcntl.F_UNLCK)

    def _locked(self, how: int, kind: int, at: int) -> bool:
        try:
            fcntl.fcntl(self._fd, how, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
        except BlockingIOError:
            return False
        return True
