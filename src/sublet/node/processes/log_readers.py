"""The readers of a guest's output: each has a position in its log, and is current or catching up.

A follower that is current gets output at once. One that has no room for it falls behind, and reads the log from its
position on when there is room again; what the log no longer has by then is a gap, and is reported. A *lossless*
follower never falls behind, since the guest is not read from while it has no room (``stdio``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from sublet.node.processes.logs import GuestLog, LogReader, LogRecord, LogReplay

REPLAY_BYTES: Final = 256 << 10
"""From the log to one follower in one turn of the loop, so that the deadlines of others are not kept waiting."""


class Follower(Protocol):
    """A reader of a guest's output. It is called in the loop and may detach, itself or others, in any call."""

    def room(self) -> int:
        """How many bytes it can take now."""

    def take(self, stream: int, offset: int, data: bytes) -> None:
        """The next bytes; never more than there is room for. 0 is what Sublet said, 1 stdout, 2 stderr."""

    def gap(self, offset: int, dropped: int) -> None:
        """From this offset on, so many bytes are no longer kept; what is taken next comes after them."""

    def end(self) -> None:
        """That was all; nothing is called after this."""


class NullFollower:
    """Keeps a place for a reader that is still to come: it has room for nothing."""

    def room(self) -> int:
        """None."""
        return 0

    def take(self, stream: int, offset: int, data: bytes) -> None:
        """Never called."""

    def gap(self, offset: int, dropped: int) -> None:
        """Ignored: there is no reader yet."""

    def end(self) -> None:
        """Ignored."""


class Following:
    """One follower and its place."""

    def __init__(
        self, log: GuestLog, follower: Follower, *, position: int, lossless: bool = False, follow: bool = True
    ) -> None:
        self.follower = follower
        self.lossless = lossless
        self.position = position
        """The offset it gets next."""
        self.until = None if follow else log.offset
        """Where it ends, for one who wants only what there is."""
        self.active = True
        self.due = False
        """Whether it is already to be served in the next turn."""
        self._log = log
        self._reader: LogReader | None = None

    @property
    def is_behind(self) -> bool:
        """Whether there is something it has not got."""
        return self.position < (self._log.offset if self.until is None else self.until)

    def offer(self, stream: int, offset: int, data: bytes) -> None:
        """The guest wrote this just now. A follower that is behind, or has too little room, reads it from the log."""
        if not self.active or self.position != offset or self.until is not None:
            return
        fits = min(self.follower.room(), len(data))
        if fits > 0:
            self.position += fits
            self.follower.take(stream, offset, data if fits == len(data) else data[:fits])

    def catch_up(self) -> bool:
        """A piece from the log. Whether there is more to do in the next turn."""
        room = min(self.follower.room(), REPLAY_BYTES)
        if self.until is not None:
            room = min(room, self.until - self.position)
        if not self.active or not self.is_behind or room <= 0:
            return False
        if self._reader is None:
            self._reader = LogReader(self._log.folder, self.position)
        reader = self._reader  # taking may end us
        known = self._log.offset  # before the follower is called, which may add a line of Sublet's to the log
        try:
            replay = reader.read(room)
        except OSError:  # to this follower it is lost, which it is told; the guest and the loop go on
            replay = LogReplay(0, (), at_end=True)
        self._report_dropped(replay.dropped)
        for record in _joined(replay.records):
            if not self._hand(record):
                reader.back_to(self.position)
                break
        if replay.at_end:  # what the log does not have by now, it will never have
            self._report_dropped(known - self.position)
        return self._has_more(at_end=replay.at_end)

    def close(self) -> None:
        """It gets nothing more."""
        self.active = False
        self._close_reader()

    def _has_more(self, *, at_end: bool) -> bool:
        if at_end or not self.is_behind:  # what comes may be given live, past the reader
            self._close_reader()
        return self.active and self.is_behind and self.follower.room() > 0

    def _hand(self, record: LogRecord) -> bool:
        """Whether it took all of it: what is around the bytes takes room as well, so it is asked each time."""
        fits = min(self.follower.room(), len(record.data)) if self.active else 0
        if fits > 0:
            self.position += fits
            self.follower.take(record.stream, record.offset, record.data[:fits])
        return self.active and fits == len(record.data)

    def _report_dropped(self, dropped: int) -> None:
        if dropped > 0 and self.active:
            offset, self.position = self.position, self.position + dropped
            self.follower.gap(offset, dropped)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _joined(records: tuple[LogRecord, ...]) -> Iterator[LogRecord]:
    """Neighbours of one stream as one: a guest that printed line by line is replayed in large pieces."""
    begin = 0
    for index in range(1, len(records) + 1):
        if index == len(records) or records[index].stream != records[begin].stream:
            run = records[begin:index]
            data = run[0].data if len(run) == 1 else b"".join(record.data for record in run)
            yield LogRecord(run[0].stream, run[0].offset, data, run[0].wall_ns)
            begin = index
