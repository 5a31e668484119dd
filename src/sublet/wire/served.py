"""Frames between a served program (a guest) and its server: requests and answers.

They cross as bytes over the guest's input and output. Nothing of them is unpickled, and the program is not trusted: a
frame of an unknown kind, of a request that is not open, or larger than frames are, is an error that ends the program.
A request is one frame. An answer is a head, pieces and an end; the program sends as many bytes of pieces as it has
credit for, so an answer that is read slowly waits in the program and takes no memory of the other side.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, Final, NamedTuple

HEADER: Final = struct.Struct("!BII")
"""Kind, number of the request, bytes that follow."""
BODY_MAX: Final = 16 << 20
"""Of a request."""
FRAME_MAX: Final = BODY_MAX + (1 << 20)
PIECE_MAX: Final = 64 << 10
WINDOW: Final = 1 << 20
"""Credit of an answer at its beginning."""
HEAD_MAX: Final = 64 << 10
MESSAGE_MAX: Final = 8 << 10


class ServedFrameKind(enum.IntEnum):
    """What a frame is."""

    LOAD = 1
    """The program: its name and source."""
    REQUEST = 2
    CANCEL = 3
    """Nothing reads the answer any more."""
    CREDIT = 4
    """So many more bytes of the answer may come."""
    LOADED = 16
    FAILED = 17
    """It cannot be served; the message says why."""
    HEAD = 18
    PIECE = 19
    END = 20
    ERROR = 21
    """This request failed; the program goes on."""
    REFUSED = 22
    """This request was not begun, since the lease is about to end."""
    LEAVING = 23
    """Nothing more is begun under this lease, and what there was to save is saved; or the message says why not."""


TO_PROGRAM: Final = frozenset(
    (ServedFrameKind.LOAD, ServedFrameKind.REQUEST, ServedFrameKind.CANCEL, ServedFrameKind.CREDIT)
)
FROM_PROGRAM: Final = frozenset(ServedFrameKind) - TO_PROGRAM


class BrokenFrames(ValueError):
    """What came is no sequence of frames."""


class ServedFrame(NamedTuple):
    """One of them."""

    kind: ServedFrameKind
    request: int
    body: bytes


def encode(kind: ServedFrameKind, request: int = 0, body: bytes = b"") -> bytes:
    """A frame as it travels."""
    return HEADER.pack(kind, request, len(body)) + body


def with_head(head: dict[str, Any], *parts: bytes) -> bytes:
    """A JSON object and parts of bytes, as one body."""
    text = json.dumps({**head, "parts": [len(part) for part in parts]}).encode()
    return b"".join((struct.pack("!I", len(text)), text, *parts))


def split_head(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The same, taken apart. Raises ``BrokenFrames``."""
    try:
        (size,) = struct.unpack_from("!I", body)
        head = json.loads(body[4 : 4 + size])
        parts, at = [], 4 + size
        for length in head.pop("parts"):
            if length < 0 or at + length > len(body):
                raise BrokenFrames("a part is longer than its frame")
            parts.append(body[at : at + length])
            at += length
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenFrames(f"a frame cannot be read: {type(error).__name__}") from None
    return head, parts


class ServedFrameReader:
    """Bytes in, frames out. Pure."""

    def __init__(self, kinds: frozenset[ServedFrameKind]) -> None:
        self._kinds = kinds
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ServedFrame]:
        """The frames that are whole now. Raises ``BrokenFrames``, after which nothing more can be read."""
        self._buffer += data
        found: list[ServedFrame] = []
        while len(self._buffer) >= HEADER.size:
            number, request, size = HEADER.unpack_from(self._buffer)
            if number not in self._kinds:
                raise BrokenFrames(f"there is no frame of kind {number} in this direction")
            if size > FRAME_MAX:
                raise BrokenFrames(f"a frame of {size} bytes is larger than frames are")
            if len(self._buffer) < HEADER.size + size:
                break
            body = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            found.append(ServedFrame(ServedFrameKind(number), request, body))
        return found
