"""Logs of guest output: bounded, replayable, and readable by any program that finds the files.

A log is a folder of segments, each named for the offset at which it begins; when the bound is reached the oldest goes.
Each record carries its length, its offset and a checksum, so a reader (another process, perhaps, or one after the
supervisor was killed in the middle of a write) takes what is whole and stops before what is not. Nothing is synced:
a log must survive the supervisor, not the machine.

Offsets count what was said, both streams and Sublet's own lines together, from the first byte on; they never go back,
also where bytes are no longer kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from binascii import crc32
from collections.abc import Iterator
from typing import Final

from sublet.clock import Clock
from sublet.lazy_dataclass import dataclass
from sublet.values import MIB
from sublet.wire.disk import disk_reserve, space_of

NOTICE: Final = 0
"""The stream of what Sublet itself said; to be shown on stderr."""
LOG_BOUND_BYTES: Final = 16 << 20
"""Of one guest on disk, frames included."""
LOG_BOUND_BYTES_MIN: Final = 4096
SEGMENTS: Final = 4
"""At least three quarters of the bound are kept once it was reached."""
PIECE_BYTES_MAX: Final = 64 << 10
"""Of one record. A reader must have one whole to check it."""
ROOM_LOOK_BYTES: Final = 1 * MIB
"""Of all logs together: after so much the disk is looked at again."""
READ_BYTES: Final = 256 << 10
OPEN_ATTEMPTS: Final = 2 * SEGMENTS
"""For a reader that is overtaken by the writer again and again; it comes back in its next turn."""

_MAGIC: Final = b"sublog1\n"
_CHECK: Final = struct.Struct("!I")
_HEAD: Final = struct.Struct("!IBQQ")
"""Length, stream, offset, wall time; before it the checksum of all that follows."""
_FRAME: Final = _CHECK.size + _HEAD.size
_SCAN_BYTES: Final = 2 * (PIECE_BYTES_MAX + _FRAME)
_SUFFIX: Final = ".log"


@dataclass(frozen=True, slots=True)
class LogRecord:
    """What was said at once."""

    stream: int
    offset: int
    data: bytes
    wall_ns: int


@dataclass(frozen=True, slots=True)
class LogReplay:
    """Some records, in order and without a hole between them."""

    dropped: int
    """Bytes that should have come before the first of them and are no longer kept."""
    records: tuple[LogRecord, ...]
    at_end: bool
    """There is nothing more for now."""


class LogRoom:
    """The room that the logs of one supervisor have together: up to what the office's journal needs."""

    def __init__(self, folder: str) -> None:
        """``folder``: on their disk."""
        self._folder = folder
        self._unseen = ROOM_LOOK_BYTES

    def take(self, size: int) -> None:
        """So much is about to be written. Raises ``OSError`` (ENOSPC) where it is not to be."""
        self._unseen += size
        if self._unseen < ROOM_LOOK_BYTES:
            return
        space = space_of(self._folder)
        if space.free < disk_reserve(space.size).for_journal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unseen = 0


class GuestLog:
    """The one writer of a log. It opens a file when there is something to write, and never raises for want of room."""

    def __init__(
        self, folder: str, clock: Clock, bound_bytes: int = LOG_BOUND_BYTES, room: LogRoom | None = None
    ) -> None:
        if bound_bytes < LOG_BOUND_BYTES_MIN:
            raise ValueError(f"a log of {bound_bytes} bytes is too small; give it {LOG_BOUND_BYTES_MIN} or more")
        self.folder = folder
        self.offset = 0
        """How much was ever said."""
        self.kept_until = 0
        """How much of it was written; less than ``offset`` only when the log stopped."""
        self.stopped = ""
        """Why nothing is written any more, if so: the guest goes on, and so do those who listen."""
        self.bound = bound_bytes
        """Bytes that it may take on disk."""
        self._clock = clock
        self._room = room
        self._segment_max = bound_bytes // SEGMENTS
        self._piece_max = min(PIECE_BYTES_MAX, self._segment_max - len(_MAGIC) - _FRAME)
        self._segments: list[tuple[int, int]] = []
        """Those before the last: where each begins, and its size."""
        self._start = 0
        self._size = 0
        """Of the last segment: where it begins, and how much of it is whole; 0 before there is one."""
        self._fd = -1
        self._find()

    @property
    def dropped(self) -> int:
        """Bytes that were said and are no longer kept."""
        first = self._segments[0][0] if self._segments else self._start
        return first + self.offset - self.kept_until

    @property
    def size(self) -> int:
        """Bytes that it takes on disk now."""
        return self._size + sum(size for _, size in self._segments)

    def append(self, stream: int, data: bytes) -> int:
        """Keep this, and say at which offset it begins."""
        begins = self.offset
        self.offset += len(data)
        if data and not self.stopped:
            try:
                self._keep(stream, data)
            except OSError as error:
                self._stop(error)
        return begins

    def prepare(self) -> None:
        """Have folder and file there before there is anything to say: to make them costs more than to write, and of
        many guests that end at once each is told so. Nothing where something was said already."""
        if self._fd < 0 and not self._size and not self._segments and not self.stopped:
            with contextlib.suppress(OSError):  # it is tried again when there is something to say
                self._open_segment()
            self.close()

    def close(self) -> None:
        """Let go of the descriptor. The next append takes one again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _keep(self, stream: int, data: bytes) -> None:
        wall_ns = self._clock.wall_ns()
        if len(data) <= self._piece_max:
            self._write(stream, data, wall_ns)
            return
        for begin in range(0, len(data), self._piece_max):
            self._write(stream, data[begin : begin + self._piece_max], wall_ns)

    def _write(self, stream: int, piece: bytes, wall_ns: int) -> None:
        size = _FRAME + len(piece)
        if self._room is not None:
            self._room.take(size)
        if self._size + size > self._segment_max:
            self._begin_segment()
        elif self._fd < 0:
            self._open_segment()
        head = _HEAD.pack(len(piece), stream, self.kept_until, wall_ns)
        check = _CHECK.pack(crc32(piece, crc32(head)))
        if os.writev(self._fd, (check, head, piece)) != size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += size
        self.kept_until += len(piece)

    def _begin_segment(self) -> None:
        """The oldest go first, so that the bound holds at every moment."""
        self.close()
        if self._size:
            self._segments.append((self._start, self._size))
        self._start, self._size = self.kept_until, 0
        kept = sum(size for _, size in self._segments)
        while self._segments and (len(self._segments) >= SEGMENTS or kept + self._segment_max > self.bound):
            start, size = self._segments.pop(0)
            kept -= size
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_path(self.folder, start))
        self._open_segment()

    def _open_segment(self) -> None:
        """The last segment, without what a killed writer left half written at its end."""
        if not self._size:
            os.makedirs(self.folder, 0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(_path(self.folder, self._start), flags, 0o600)
        if os.fstat(self._fd).st_size != self._size:
            os.ftruncate(self._fd, self._size)
        if not self._size:
            if os.write(self._fd, _MAGIC) != len(_MAGIC):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size = len(_MAGIC)

    def _stop(self, error: OSError) -> None:
        self.stopped = error.strerror or str(error)
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
        self.close()

    def _find(self) -> None:
        """Go on where an earlier writer ended."""
        starts = _starts(self.folder)
        if not starts:
            return
        self._segments = [(start, os.stat(_path(self.folder, start)).st_size) for start in starts[:-1]]
        self._start = starts[-1]
        self._size, self.kept_until = _whole(_path(self.folder, self._start), self._start)
        self.offset = self.kept_until


class LogReader:
    """A place in a log, from which any process that may read the files reads on. The log may grow, and lose its
    beginning, meanwhile."""

    def __init__(self, folder: str, offset: int = 0) -> None:
        self.folder = folder
        self.offset = offset
        """What is read next."""
        self._fd = -1
        self._start = -1
        self._place = 0
        self._place_offset = 0
        """A record begins at this place of the file, and has this offset."""
        self._before = (-1, 0, 0)
        """Segment, place and offset of the place, before the last read."""

    def read(self, most: int = READ_BYTES) -> LogReplay:
        """What one look into the files gives, at most so many bytes; of a record that does not fit the rest comes next.

        It may come back with nothing and yet not be at the end: looking for the place is bounded as well.
        """
        records: list[LogRecord] = []
        dropped = 0
        for _ in range(2):  # a segment that is over, and its successor
            if self._fd < 0:
                dropped += self._open()
            if self._fd < 0:
                return LogReplay(dropped, (), at_end=True)
            self._before = (self._start, self._place, self._place_offset)
            if most <= 0 or self._take(records, most):
                break
            if not self._leave():
                return LogReplay(dropped, (), at_end=True)
        return LogReplay(dropped, tuple(records), at_end=False)

    def back_to(self, offset: int) -> None:
        """Not all of the last read was used: go on from here again."""
        self.offset = offset
        if self._fd >= 0 and self._before[0] == self._start:
            _, self._place, self._place_offset = self._before
        else:
            self.close()
            self._start = -1

    def close(self) -> None:
        """Let go of the descriptor, for good; harmless twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self, records: list[LogRecord], left: int) -> bool:
        """Whether there was anything whole at our place."""
        seen = os.pread(self._fd, _SCAN_BYTES, self._place)
        moved = False
        for record in _parse(seen, self._place_offset):
            moved = True
            end = record.offset + len(record.data)
            skip = max(0, self.offset - record.offset)
            data = record.data[skip : skip + left]
            if data:
                whole = len(data) == len(record.data)
                records.append(record if whole else LogRecord(record.stream, self.offset, data, record.wall_ns))
                self.offset += len(data)
                left -= len(data)
            if self.offset < end:
                break
            self._place += _FRAME + len(record.data)
            self._place_offset = end
            if not left:
                break
        return moved

    def _next_start(self) -> int | None:
        """The segment to read: the next one, or at first the one with the offset in it, or the oldest there is."""
        starts = [start for start in _starts(self.folder) if start > self._start]
        if self._start >= 0 or not starts:
            return starts[0] if starts else None
        return max((start for start in starts if start <= self.offset), default=starts[0])

    def _open(self) -> int:
        """Open the segment to read, if there is one, and say how much is missing before it."""
        for _ in range(OPEN_ATTEMPTS):
            start = self._next_start()
            if start is None:
                break
            try:
                self._fd = os.open(_path(self.folder, start), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # the writer dropped it just now, and the next one is the oldest
                continue
            self._start = start
            self._place, self._place_offset = len(_MAGIC), start
            missing = max(0, start - self.offset)
            self.offset += missing
            return missing
        return 0

    def _leave(self) -> bool:
        """Whether this segment is over, which it is when there is a later one and still nothing more in this."""
        if not any(start > self._start for start in _starts(self.folder)):
            return False
        seen = os.pread(self._fd, _SCAN_BYTES, self._place)  # written before the later one was begun
        if next(_parse(seen, self._place_offset), None) is None:
            self.close()
        return True


def _parse(seen: bytes, offset: int) -> Iterator[LogRecord]:
    """The whole records at the beginning of this. What is torn or strange ends them: it is never handed out."""
    place = 0
    while place + _FRAME <= len(seen):
        body = place + _CHECK.size
        length, stream, at, wall_ns = _HEAD.unpack_from(seen, body)
        end = place + _FRAME + length
        if at != offset or end > len(seen):
            return
        data = seen[place + _FRAME : end]
        (check,) = _CHECK.unpack_from(seen, place)
        if crc32(data, crc32(seen[body : place + _FRAME])) != check:
            return
        yield LogRecord(stream, at, data, wall_ns)
        place, offset = end, offset + length


def _whole(path: str, start: int) -> tuple[int, int]:
    """How much of a segment is whole: its bytes, and the offset after them."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            return 0, start
        place, offset = len(_MAGIC), start
        while True:
            before = place
            for record in _parse(os.pread(fd, _SCAN_BYTES, place), offset):
                place += _FRAME + len(record.data)
                offset += len(record.data)
            if place == before:
                return place, offset
    finally:
        os.close(fd)


def _path(folder: str, start: int) -> str:
    return f"{folder}/{start:020d}{_SUFFIX}"


def _starts(folder: str) -> list[int]:
    """Where the segments of a folder begin, oldest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    stems = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return sorted(int(stem) for stem in stems if stem.isdecimal())
