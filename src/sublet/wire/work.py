"""Messages between holder and worker about calls of Python functions.

A message is a fixed head, a table of *pieces*, and the bytes of those pieces that lie in the message. The first piece
is a pickle; the others are its large buffers, in order. A piece lies in the message (INLINE), in shared memory whose
descriptor comes beside it (SHARED), or with the guest already, since an earlier message (KEPT). What a guest keeps the
holder decides: a shared piece with a number is kept under it until the holder says ``FORGET``.

Nothing here is unpickled, and nothing of it passes office or supervisor: holder and worker are one program in two
processes. What is checked is what a confused one could send: sizes, numbers, kinds.

Beside the messages there is a *board*, one page of memory that both have mapped. On it the worker notes which call it
executes and since when. It costs no message, and it is still there when the worker has died: so only the call that was
executing is to blame, and those behind it go to the next worker. On it the holder notes which calls of many begin no
further item.

The results of a call of many lie beside it, in memory that both have mapped as well (``ResultBuffer``): each is there
from the moment it was made, whatever becomes of the worker. What does not fit goes as a message of its own.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from sublet.errors import InvalidRequest
from sublet.wire.sealed_memory import SHARED_MAX

INLINE_MAX: Final = 512 * 1024
"""Bytes of all pieces that lie in one message; half of what a frame may have."""
LARGE_BYTES: Final = 64 * 1024
"""From this size on a buffer travels beside its pickle, in shared memory."""
PIECES_MAX: Final = 8192
"""Pieces of one message: their table is then a quarter of a frame."""
BOARD_BYTES: Final = 4096
RESULTS_BYTES: Final = 256 * 1024
"""Pickles of results that were not sent yet."""
RESULTS_MAX: Final = 4096
"""And how many they may be."""
RESULT_MAX: Final = 64 * 1024
"""One result that is larger than this, or than the room that is left, goes as a message of its own."""

READ_TRIES: Final = 8
"""A worker that sends what is in the buffer has made hundreds of results meanwhile, so the second try succeeds."""
WITHHELD: Final = 4
"""Which word of the board says up to which call no further item is begun. The holder writes it."""
BEGUN: Final = 5
"""And which one how many items of the call of many that is executing were begun."""
FINISHED: Final = 6
"""And which call has finished last: its answer may be lost on the way."""
_UNKNOWN: Final = (1 << 64) - 1

_HEAD: Final = struct.Struct("!BBHIQ")  # kind, flags, number of pieces, subject, amount
_PIECE: Final = struct.Struct("!BBHQQQ")  # where, flags, descriptor, number, offset, length
_NUMBER: Final = struct.Struct("!Q")
_READ_ONLY: Final = 1
_LASTING: Final = 2
_LENT: Final = 4
_OF_PIECE: Final = (_READ_ONLY, _LASTING, _LENT)


class HolderMessage(enum.IntEnum):
    """Calls of the holder, and (the last three) what it says without being answered."""

    OPEN = 1
    """The first: what the holder's interpreter looks like (JSON), and the descriptors of board and result buffer."""
    RUN = 2
    """Call function ``subject``; the pickle is (args, kwargs), or a list of args with ``Flag.MANY``. ``amount`` is the
    level below which log records are not wanted."""
    NEXT = 3
    """At most ``amount`` more items of generator ``subject``."""
    CLOSE = 4
    """Close generator ``subject``."""
    DEFINE = 5
    """From now on function ``subject`` is this: a name (JSON, ``Flag.NAMED``, with what its file looks like) or a
    pickle."""
    CANCEL = 6
    """Do not run call ``subject``, or interrupt it if it runs."""
    FORGET = 7
    """Let go of kept pieces, by number; with ``Flag.FUNCTIONS`` of functions."""


class WorkerMessage(enum.IntEnum):
    """Answers of the worker, and (the last four) what it says without being asked. With ``Flag.BEGAN`` an answer comes
    of what a function had left to be waited for: of a cell, that it has run."""

    OPENED = 1
    VALUE = 2
    """The pickle is the result. ``amount`` is always how many nanoseconds it took."""
    MANY = 3
    """All results of a call of many were said; the pickle is None, or what ended it early (as with ``RAISED``)."""
    RAISED = 4
    """The pickle is (exception or None, its type's name, its text, its traceback as text)."""
    GENERATOR = 5
    """The result is generator ``subject``; ``Flag.ASYNC`` for an asynchronous one."""
    ITEMS = 6
    """The pickle is (items, return value); with ``Flag.DONE`` there are no more."""
    CANCELLED = 7
    """It was cancelled: before it began, unless ``Flag.BEGAN``."""
    ENDED = 8
    """The lease ended (JSON: reason and detail)."""
    FAULT = 9
    """The call could not be made, or its result cannot travel (JSON: message and do)."""
    UNLIKE = 10
    """What was defined by name is something else here (JSON: why). Define it by value."""
    OUTPUT = 11
    """Text for stream ``subject``: 1 or 2."""
    LOG = 12
    """A log record (``dump_log_record``)."""
    RESULTS = 13
    """Results of call ``subject``, a call of many, from item ``amount`` on: the pickle of a list, and that of a
    dictionary with the pickles of those that were not plain values, by their place in the list."""
    RESULT = 14
    """The result of item ``amount`` of call ``subject``."""


class Flag(enum.IntFlag):
    NONE = 0
    NAMED = 1
    MANY = 2
    RAISED = 4
    ASYNC = 8
    DONE = 16
    BEGAN = 32
    FUNCTIONS = 64


class Where(enum.IntEnum):
    """Where a piece lies."""

    INLINE = 0
    SHARED = 1
    KEPT = 2


class Piece(NamedTuple):
    """One piece, as the table says."""

    where: Where
    length: int
    number: int = 0
    """Of a kept piece, or the one under which it is to be kept; 0: it is not."""
    fd: int = 0
    """SHARED: which of the descriptors of the message."""
    offset: int = 0
    """SHARED: where it begins there."""
    is_readonly: bool = False
    """Whether the buffer was one that cannot be written to."""
    is_lasting: bool = False
    """SHARED: all of it is memory that both sides keep (``lasting``), and that is not sealed."""
    is_lent: bool = False
    """SHARED: it is the beginning of memory that is lent for as long as the worker lives (``lasting``)."""


class ReceivedMessage(NamedTuple):
    """A message as it came."""

    kind: int
    flags: Flag
    subject: int
    amount: int
    pieces: tuple[Piece, ...]
    data: memoryview
    """What lies in the message; the inline pieces, one behind the other."""

    @property
    def blob(self) -> bytes:
        """The first piece of a message that has only inline ones."""
        return bytes(self.data)


class OutgoingMessage(NamedTuple):
    """A message to send."""

    body: bytes
    fds: tuple[int, ...] = ()


def pack(
    kind: int,
    *,
    flags: int = 0,
    subject: int = 0,
    amount: int = 0,
    pieces: Sequence[Piece] = (),
    inline: Sequence[bytes | memoryview] = (),
) -> bytes:
    """The bytes of a message. ``inline`` are the inline pieces, in order; there are no others without ``pieces``."""
    pieces = pieces or [Piece(Where.INLINE, len(data)) for data in inline]
    table = [
        _PIECE.pack(
            where, is_readonly * _READ_ONLY | is_lasting * _LASTING | is_lent * _LENT, fd, number, offset, length
        )
        for where, length, number, fd, offset, is_readonly, is_lasting, is_lent in pieces
    ]
    return b"".join((_HEAD.pack(kind, flags, len(pieces), subject, amount), *table, *inline))


def unpack(body: bytes) -> ReceivedMessage:
    """A message. Raises ``InvalidRequest`` where the other side broke the protocol."""
    if len(body) < _HEAD.size:
        raise _wrong(f"has {len(body)} bytes")
    kind, flags, count, subject, amount = _HEAD.unpack_from(body)
    start = _HEAD.size + count * _PIECE.size
    if count > PIECES_MAX or len(body) < start:
        raise _wrong(f"announces {count} pieces")
    pieces = []
    inline = 0
    for at in range(_HEAD.size, start, _PIECE.size):
        where, marks, fd, number, offset, length = _PIECE.unpack_from(body, at)
        if where > Where.KEPT or (where != Where.INLINE and not 0 < length <= SHARED_MAX):
            raise _wrong(f"has a piece of {length} bytes at {where}")
        if where == Where.INLINE:
            inline += length
        pieces.append(Piece(_PLACES[where], length, number, fd, offset, *(bool(marks & mark) for mark in _OF_PIECE)))
    if len(body) - start != inline:
        raise _wrong(f"has {len(body) - start} bytes of content where {inline} were announced")
    return ReceivedMessage(kind, Flag(flags & _FLAGS), subject, amount, tuple(pieces), memoryview(body)[start:])


def pack_numbers(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_NUMBER.pack, numbers))


def numbers_in(data: bytes | memoryview) -> list[int]:
    if len(data) % _NUMBER.size:
        raise _wrong("has half a number")
    return [number for (number,) in _NUMBER.iter_unpack(data)]


class Board:
    """The page on which a worker notes what it executes, and the holder what is not to be begun. Of each number one
    process is the writer."""

    _SLOT: Final = struct.Struct("<Qq")

    def __init__(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self.words = memoryview(mapped).cast("Q")

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """A new one, and a descriptor of it for the other side, which is the caller's to close."""
        fd = os.memfd_create("sublet-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, BOARD_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            board = cls(mmap.mmap(fd, BOARD_BYTES))
            board.words[BEGUN] = _UNKNOWN
            return board, fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def opened(cls, fd: int) -> Board:
        """The other side's. ``fd`` stays the caller's."""
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != BOARD_BYTES:
            raise _wrong("came with something that is no board")
        board = cls(mmap.mmap(fd, BOARD_BYTES))
        board.words[BEGUN] = 0
        return board

    def begin(self, call: int, at_ns: int) -> None:
        """This call is executing from now on."""
        self._SLOT.pack_into(self._map, 0, call, at_ns)

    def finish(self) -> None:
        """None is."""
        self.words[FINISHED] = self.read()[0]
        self._SLOT.pack_into(self._map, 0, 0, 0)

    def last_begun(self) -> int:
        """The call that is executing, else the one that finished last. By the holder, once the worker is gone."""
        return self.read()[0] or self.words[FINISHED]

    def mark(self) -> None:
        """A sign of life, whatever is executing. By one thread only."""
        _NUMBER_NATIVE.pack_into(self._map, _MARKS, self.marks + 1)

    @property
    def marks(self) -> int:
        """How many there were."""
        found: int = _NUMBER_NATIVE.unpack_from(self._map, _MARKS)[0]
        return found

    def read(self) -> tuple[int, int]:
        """The call (0: none), and since when (CLOCK_BOOTTIME)."""
        call, at_ns = self._SLOT.unpack_from(self._map)
        return call, at_ns

    def stop_further_items(self, call: int) -> bool:
        """No call up to this one begins a further item. By the holder; False if the worker does not look here.

        The worker raises ``BEGUN`` and then looks, before each item. So whatever the holder reads in ``BEGUN`` a moment
        later (both are in memory by then, on every processor) no item behind it will begin.
        """
        if self.words[BEGUN] == _UNKNOWN:
            return False
        self.words[WITHHELD] = max(call, self.words[WITHHELD])
        return True

    def begun(self, call: int) -> int | None:
        """How many items of this call were begun, or were about to be; None where it is executed already, or no call
        is executing just now."""
        executing = self.read()[0]
        if executing == call:
            return self.words[BEGUN]
        return 0 if 0 < executing < call else None

    def close(self) -> None:
        """Let go of the mapping. Harmless twice."""
        self.words.release()
        self._map.close()


class ResultBuffer:
    """Results that the worker has made and not yet sent. The worker writes; the holder reads when the worker is gone,
    or when it gives up a call and wants what is finished of it.

    A result counts from the moment the number of results is raised, which is the last thing that is written of it. A
    process that is killed has done what its program did up to some instruction and nothing behind that, on every
    processor: interrupts are precise. And the reader comes after the kernel has taken the process off its processor and
    has told so through a socket, which orders memory. So a record that is counted is there as a whole, on x86 and on
    arm alike, and no barrier is needed. The number is written as eight aligned bytes at once. Each record has a
    checksum all the same, over its place as well: what scribbles over the buffer must not become a result.
    """

    _CALL: Final = 0
    _FIRST: Final = 1
    _COUNT: Final = 2
    _HEAD_BYTES: Final = 64
    _BYTES: Final = _HEAD_BYTES + 8 * RESULTS_MAX + RESULTS_BYTES

    def __init__(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self._views = [memoryview(mapped)]
        at = self._HEAD_BYTES
        self._head = self._view(0, at, "Q")
        self._ends = self._view(at, at + 4 * RESULTS_MAX, "I")
        self._sums = self._view(at + 4 * RESULTS_MAX, at + 8 * RESULTS_MAX, "I")
        self._data = self._view(at + 8 * RESULTS_MAX, self._BYTES, "B")
        self._count = self._at = 0

    def _view(self, start: int, end: int, kind: Literal["Q", "I", "B"]) -> memoryview:
        view = self._views[0][start:end].cast(kind)
        self._views.append(view)
        return view

    @classmethod
    def create(cls) -> tuple[ResultBuffer, int]:
        """A new one, and a descriptor of it for the other side, which is the caller's to close."""
        fd = os.memfd_create("sublet-results", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, cls._BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(mmap.mmap(fd, cls._BYTES)), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def opened(cls, fd: int) -> ResultBuffer:
        """The other side's. ``fd`` stays the caller's."""
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != cls._BYTES:
            raise _wrong("came with something that is no result buffer")
        return cls(mmap.mmap(fd, cls._BYTES))

    # ---- the worker

    def begin(self, call: int) -> None:
        """A call of many begins."""
        self._head[self._COUNT] = 0
        self._head[self._FIRST] = 0
        self._head[self._CALL] = call
        self._count = self._at = 0

    def put(self, pickled: bytes) -> bool:
        """Keep the result of the next item; False if there is no room for it."""
        count, start = self._count, self._at
        end = start + len(pickled)
        if count == RESULTS_MAX or end > RESULTS_BYTES:
            return False
        self._data[start:end] = pickled
        self._ends[count] = end
        self._sums[count] = zlib.crc32(pickled, count)
        self._head[2] = self._count = count + 1  # last: from here on it is a result
        self._at = end
        return True

    @property
    def call(self) -> int:
        """Whose results these are."""
        return self._head[self._CALL]

    @property
    def first(self) -> int:
        """Which item the first result here is of."""
        return self._head[self._FIRST]

    def __len__(self) -> int:
        return self._count

    def restart_at(self, item: int) -> None:
        """The results of all items before this one were sent."""
        self._head[self._COUNT] = 0
        self._head[self._FIRST] = item
        self._count = self._at = 0

    # ---- the holder

    def read(self, call: int) -> tuple[int, list[bytes]]:
        """Of this call: from which item on, and the pickles that are whole. The worker may live: results are only added
        until it goes on from another item, so what was read counts if that is the same afterwards."""
        for _ in range(READ_TRIES):
            if self._head[self._CALL] != call:
                break
            first = self._head[self._FIRST]
            found = self._whole()
            if (self._head[self._CALL], self._head[self._FIRST]) == (call, first):
                return first, found
        return 0, []

    def _whole(self) -> list[bytes]:
        found: list[bytes] = []
        start = 0
        for index in range(min(self._head[self._COUNT], RESULTS_MAX)):
            end = self._ends[index]
            if not start <= end <= RESULTS_BYTES:
                break
            pickled = self._data[start:end].tobytes()
            if zlib.crc32(pickled, index) != self._sums[index]:
                break
            found.append(pickled)
            start = end
        return found

    def close(self) -> None:
        """Let go of the mapping. Harmless twice."""
        while self._views:
            self._views.pop().release()
        self._map.close()


_NUMBER_NATIVE: Final = struct.Struct("<Q")
_MARKS: Final = 24
_FLAGS: Final = 127
_PLACES: Final = tuple(Where)


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"a message of a call {what}", do="The two sides are of different versions: `sublet doctor`.")
