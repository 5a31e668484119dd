"""Frames: bytes and descriptors of a stream as messages with a kind and a channel.

A frame is a header of twelve bytes (version, kind, flags, channel, length; network order) and a body. The layout of
the header is the same in every version, so that two programs that have nothing else in common can still tell each
other so. The low byte of the flags says how many descriptors come with the frame; the high byte is zero.

Descriptors travel beside the bytes. The sender hands them to the kernel with the first byte of their frame, and the
kernel never delivers them later than that byte; so when a header is complete its descriptors are there, or the peer
lied. The reader of a frame owns its descriptors. Whatever goes wrong, none is left open here.

Nothing in this module touches a socket: bytes and descriptors in, frames out.
"""

from __future__ import annotations

import contextlib
import enum
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sublet.errors import InvalidRequest
from sublet.values import MIB
from sublet.wire.version import WIRE_VERSION

HEADER: Final = struct.Struct("!BBHII")
HEADER_BYTES: Final = HEADER.size
CONTROL_MAX: Final = 1 * MIB
"""Bytes of one message. What is larger goes through a channel or through shared memory."""
DATA_MAX: Final = 256 * 1024
"""Bytes of one piece of a stream: small enough that a message behind it need not wait long."""
HELLO_MAX: Final = 64 * 1024
"""Bytes of a greeting: its sender is not known yet, so it may not cost much."""
CLOSE_MAX: Final = 1025
PING_MAX: Final = 64
FDS_MAX: Final = 16
"""Descriptors with one frame."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    """The first frame of the connecting side: the versions it speaks, and its identity."""
    WELCOME = 2
    """The answer: the version that holds from here on."""
    CALL = 3
    """A request. Its channel is its number, until it is answered."""
    REPLY = 4
    ERROR = 5
    """The answer to a call that was refused; on channel 0 the last frame before the connection is closed."""
    EVENT = 6
    """A message without an answer."""
    OPEN = 7
    """A new channel for a stream in both directions."""
    DATA = 8
    """A piece of a stream. It uses up credit."""
    CREDIT = 9
    """So many more bytes may be sent on this channel."""
    CLOSE = 10
    """No more will be sent on this channel (and, if it says so, no more will be read)."""
    # 11 was a piece of a stream in shared memory; nothing ever sent one, and the number is not used again
    PING = 12
    PONG = 13


BODY_MAX: Final[dict[FrameKind, int]] = {
    FrameKind.HELLO: HELLO_MAX,
    FrameKind.WELCOME: HELLO_MAX,
    FrameKind.CALL: CONTROL_MAX,
    FrameKind.REPLY: CONTROL_MAX,
    FrameKind.ERROR: HELLO_MAX,
    FrameKind.EVENT: CONTROL_MAX,
    FrameKind.OPEN: HELLO_MAX,
    FrameKind.DATA: DATA_MAX,
    FrameKind.CREDIT: 4,
    FrameKind.CLOSE: CLOSE_MAX,
    FrameKind.PING: PING_MAX,
    FrameKind.PONG: PING_MAX,
}
"""The longest body of each kind, in bytes."""

ANY_VERSION: Final = frozenset((FrameKind.HELLO, FrameKind.WELCOME, FrameKind.ERROR))
"""What is understood whatever version its header states: with these the two sides find out which one holds."""

_KINDS: Final = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """One frame as it was read. ``fds`` belong to its receiver."""

    kind: FrameKind
    channel: int
    body: bytes
    fds: tuple[int, ...] = ()
    version: int = WIRE_VERSION


def encode(
    kind: FrameKind,
    channel: int,
    body: bytes | bytearray | memoryview = b"",
    *,
    fds: Sequence[int] = (),
    version: int = WIRE_VERSION,
) -> bytes:
    """The bytes of one frame. The descriptors go beside them, with the first byte."""
    length = len(body) if not isinstance(body, memoryview) else body.nbytes
    if length > BODY_MAX[kind]:
        raise InvalidRequest(
            f"a {kind.name} of {length} bytes is over the limit of {BODY_MAX[kind]}",
            do="Send large things through a channel or through shared memory.",
        )
    if len(fds) > FDS_MAX:
        raise InvalidRequest(f"{len(fds)} descriptors are too many for one message", do=f"Send at most {FDS_MAX}.")
    return b"".join((HEADER.pack(version, kind, len(fds), channel, length), body))


def protocol_error(what: str) -> InvalidRequest:
    """The error for a peer that does not keep to the protocol. Nothing after it on the connection can be trusted."""
    return InvalidRequest(
        f"the connection was closed, because {what}",
        do="Connect again. If it comes back, the two sides are of different versions: see `sublet doctor`.",
    )


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors; one that is closed already is no error."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class _Head(NamedTuple):
    kind: FrameKind
    channel: int
    length: int
    fds: tuple[int, ...]
    version: int


class FrameReader:
    """Puts frames together from whatever pieces the bytes come in.

    What waits here is less than one frame and what came last. After the first error there is no way back: the reader
    takes nothing more and repeats the error.
    """

    def __init__(self, version: int | None = None) -> None:
        self.version = version
        """What every frame must state. None: nothing is agreed, so only a greeting or a refusal is taken."""
        self._bytes = bytearray()
        self._at = 0
        self._fds: list[int] = []
        self._head: _Head | None = None
        self._error: InvalidRequest | None = None

    @property
    def is_between(self) -> bool:
        """Whether an end of the stream here cuts no frame in two."""
        return self._head is None and self._at == len(self._bytes) and not self._fds

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> list[Frame]:
        """All frames that are complete now. Raises ``InvalidRequest``; then frames of this call are lost and closed."""
        frames: list[Frame] = []
        try:
            self.add(data, fds)
            while (frame := self.next()) is not None:
                frames.append(frame)
        except InvalidRequest:
            for frame in frames:
                close_all(frame.fds)
            raise
        return frames

    def add(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Take what came in one piece. Afterwards call ``next`` until there is nothing left."""
        if self._error is not None:
            close_all(fds)
            raise self._error
        if self._at:
            del self._bytes[: self._at]
            self._at = 0
        self._bytes += data
        self._fds.extend(fds)

    def next(self) -> Frame | None:
        """The next frame if it is complete, else None. Raises ``InvalidRequest`` where the peer breaks the rules."""
        if self._error is not None:
            raise self._error
        if self._head is None:
            if len(self._bytes) - self._at < HEADER_BYTES:
                self._check_strays()
                return None
            self._head = self._read_head()
        end = self._at + self._head.length
        if len(self._bytes) < end:
            self._check_strays()
            return None
        kind, channel, _, fds, version = self._head
        with memoryview(self._bytes) as view:
            body = bytes(view[self._at : end])
        self._at, self._head = end, None
        if end == len(self._bytes):  # an emptied one would keep its room, on each of very many connections
            self._bytes, self._at = bytearray(), 0
        return Frame(kind, channel, body, fds, version)

    def close(self) -> None:
        """Let go of descriptors whose frame never became complete."""
        close_all(self._fds)
        if self._head is not None:
            close_all(self._head.fds)
        self._fds, self._head, self._at = [], None, 0
        self._bytes = bytearray()
        if self._error is None:
            self._error = protocol_error("it was over")

    def _read_head(self) -> _Head:
        version, code, flags, channel, length = HEADER.unpack_from(self._bytes, self._at)
        kind = _KINDS.get(code)
        if kind is None:
            raise self._fail(f"there is no frame of kind {code}")
        if version != self.version and (version == 0 or kind not in ANY_VERSION):
            raise self._fail(
                f"a {kind.name} came before version and name were agreed"
                if self.version is None
                else f"a frame of version {version} came where {self.version} was agreed"
            )
        if length > BODY_MAX[kind]:
            raise self._fail(f"a {kind.name} of {length} bytes is over the limit of {BODY_MAX[kind]}")
        if flags > FDS_MAX:
            raise self._fail(
                f"a {kind.name} has flags {flags:#06x}, and at most {FDS_MAX} descriptors may be announced"
            )
        if flags > len(self._fds):
            raise self._fail(f"a {kind.name} announced {flags} descriptors and {len(self._fds)} came")
        fds = tuple(self._fds[:flags])
        del self._fds[:flags]
        self._at += HEADER_BYTES
        return _Head(kind, channel, length, fds, version)

    def _check_strays(self) -> None:
        """Descriptors may only wait for the header that announces them, never for a later frame."""
        begun = self._head is None and len(self._bytes) > self._at
        if self._fds and not begun:
            raise self._fail(f"{len(self._fds)} descriptors came that no frame announced")
        if len(self._fds) > FDS_MAX:
            raise self._fail(f"{len(self._fds)} descriptors came at once, over the limit of {FDS_MAX}")

    def _fail(self, what: str) -> InvalidRequest:
        self._error = protocol_error(what)
        self.close()
        return self._error
