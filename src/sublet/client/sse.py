"""Server-sent events, as bytes in and (event, data) out."""

from __future__ import annotations

from typing import Final, NamedTuple

from sublet.client.http1 import ProtocolError

EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""One event. More without an empty line is not a stream of ours."""


class ServerEvent(NamedTuple):
    """One event of the stream."""

    event: str
    data: str


class EventReader:
    """Feed it the body of the stream as it comes; it hands back the events that are whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[str] = []
        self._bytes = 0

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Take what arrived. A comment (the office's sign of life) makes no event."""
        raw = self._rest + data
        if raw.endswith(b"\r"):  # the line break may go on in the next piece
            raw, self._rest = raw[:-1], b"\r"
        else:
            self._rest = b""
        lines = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + self._rest
        found = [event for line in lines if (event := self._line(line)) is not None]
        if self._bytes + len(self._rest) > EVENT_BYTES_MAX:
            raise ProtocolError("an event of the stream is too long")
        return found

    def _line(self, line: bytes) -> ServerEvent | None:
        if not line:
            event = ServerEvent(self._event or "message", "\n".join(self._data)) if self._data else None
            self._event, self._data, self._bytes = "", [], 0
            return event
        self._bytes += len(line)
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._event = value
        elif name == "data":
            self._data.append(value)
        return None
