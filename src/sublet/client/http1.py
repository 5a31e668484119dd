"""Encodes and decodes HTTP/1.1 without sockets, for both transports.

The client talks to one kind of server with one shape of message (JSON both ways, and one endless answer for events), so
this understands exactly what such answers may use: lengths, chunks, answers that end with the connection, interim 1xx
answers. Everything else is a `ProtocolError`, never a guess. Why not ``http.client``: the asyncio twin would need a
second implementation with second habits, and loading it costs as much as the rest of the client.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

HEAD_BYTES_MAX: Final = 64 * 1024
"""Status line and headers of one answer; also the most a chunk's size line or the trailers may take."""
BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""One whole answer. A stream is taken as it comes and has no such limit."""


class ProtocolError(Exception):
    """What arrived is not an HTTP/1.1 answer, or not a whole one. The connection is of no more use."""


def encode_request(
    method: str,
    path: str,
    *,
    host: str,
    headers: Mapping[str, str],
    body: bytes | None = None,
    content_type: str = "application/json",
) -> bytes:
    """One request. Header values come from tokens and ids, so a line break in one is refused, not sent."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += [f"content-type: {content_type}", f"content-length: {len(body)}"]
    elif method not in ("GET", "HEAD"):
        lines.append("content-length: 0")
    if any("\r" in line or "\n" in line for line in lines):
        raise ProtocolError("a request line or header contains a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "strict") + (body or b"")


class _Part(enum.Enum):
    """Which part of the answer comes next."""

    HEAD = enum.auto()
    LENGTH = enum.auto()
    CHUNK_SIZE = enum.auto()
    CHUNK_DATA = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()
    UNTIL_CLOSE = enum.auto()
    DONE = enum.auto()


class AnswerReader:
    """Reads one answer. Feed it what arrives (``b""`` is the end of the connection) and take the body as it comes."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head has arrived."""
        self.headers: dict[str, str] = {}
        self.reusable = False
        """Whether the connection may carry another request; told once the answer is complete."""
        self._part = _Part.HEAD
        self._raw = bytearray()
        self._body = bytearray()
        self._left = 0
        self._keep = True

    @property
    def complete(self) -> bool:
        return self._part is _Part.DONE

    @property
    def started(self) -> bool:
        """Whether a byte of the answer has arrived."""
        return bool(self.status or self._raw)

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        if self.complete:
            if data:
                raise ProtocolError("more came after the answer was complete")
            return
        if not data:
            self._close()
            return
        self._raw += data
        while self._step():
            pass

    def take(self) -> bytes:
        """The body that arrived since the last call."""
        taken = bytes(self._body)
        self._body.clear()
        return taken

    def _close(self) -> None:
        if self._part is not _Part.UNTIL_CLOSE:
            raise ProtocolError("the connection ended in the middle of an answer" if self.started else "no answer came")
        self._finish(reusable=False)

    def _finish(self, *, reusable: bool) -> None:
        if self._raw and reusable:
            raise ProtocolError("more came after the answer was complete")
        self._part = _Part.DONE
        self.reusable = reusable

    def _step(self) -> bool:
        """Take one piece from what has arrived; False where more is needed."""
        match self._part:
            case _Part.HEAD:
                return self._read_head()
            case _Part.LENGTH | _Part.CHUNK_DATA:
                return self._read_data()
            case _Part.CHUNK_SIZE:
                return self._read_chunk_size()
            case _Part.CHUNK_END:
                line = self._line()
                if line is None:
                    return False
                if line:
                    raise ProtocolError("a chunk is longer than its header says")
                self._part = _Part.CHUNK_SIZE
                return True
            case _Part.TRAILER:
                line = self._line()
                if line == b"":
                    self._finish(reusable=self._keep)
                return line not in (None, b"")
            case _Part.UNTIL_CLOSE:
                self._body += self._raw
                self._raw.clear()
                return False
            case _Part.DONE:
                return False

    def _line(self) -> bytes | None:
        end = self._raw.find(b"\r\n")
        if end < 0 and len(self._raw) <= HEAD_BYTES_MAX:
            return None
        if end < 0 or end > HEAD_BYTES_MAX:
            raise ProtocolError("a line of the answer is too long")
        line = bytes(self._raw[:end])
        del self._raw[: end + 2]
        return line

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0 and len(self._raw) <= HEAD_BYTES_MAX:
            return False
        if end < 0 or end > HEAD_BYTES_MAX:
            raise ProtocolError("the head of the answer is too long")
        head = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        version, _, rest = head[0].partition(" ")
        code = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit() and len(code) == 3):
            raise ProtocolError("what answered does not speak HTTP/1.1")
        if code.startswith("1"):  # interim: the answer proper follows
            return True
        self.status = int(code)
        for line in head[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise ProtocolError("a header of the answer cannot be read")
            self.headers[name.lower()] = value.strip()
        self._keep = version == "HTTP/1.1" and "close" not in self.headers.get("connection", "").lower()
        return self._open_body()

    def _open_body(self) -> bool:
        length = self.headers.get("content-length")
        coding = self.headers.get("transfer-encoding")
        if self.status in (204, 304):
            self._finish(reusable=self._keep)
        elif coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise ProtocolError("the length of the answer is not given in a known way")
            self._part = _Part.CHUNK_SIZE
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise ProtocolError("the length of the answer is not a number")
            self._left = int(length)
            self._part = _Part.LENGTH
            if self._left == 0:
                self._finish(reusable=self._keep)
        else:
            self._part = _Part.UNTIL_CLOSE
        return not self.complete

    def _read_data(self) -> bool:
        piece = self._raw[: self._left]
        self._body += piece
        self._left -= len(piece)
        del self._raw[: len(piece)]
        if self._left:
            return False
        if self._part is _Part.CHUNK_DATA:
            self._part = _Part.CHUNK_END
            return True
        self._finish(reusable=self._keep)
        return False

    def _read_chunk_size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        digits = line.partition(b";")[0].strip()
        if not digits or len(digits) > 15 or digits.translate(None, b"0123456789abcdefABCDEF"):
            raise ProtocolError("the size of a chunk is not a number")
        self._left = int(digits, 16)
        self._part = _Part.CHUNK_DATA if self._left else _Part.TRAILER
        return True
