"""As much HTTP/1.1 as a load generator needs: requests made from templates, answers framed by Content-Length."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Address", "Answer", "BadAnswer", "Request", "Step", "Template", "ask", "connect", "take_answer"]

ANSWER_BYTES_MAX: Final = 64 << 20
_PLACEHOLDER: Final = re.compile(rb"<<([a-z_]+)>>")


class BadAnswer(Exception):
    """The server said something the script does not allow; the sample is void, so the run stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens: a unix socket, or TCP on the loopback interface."""

    unix: str = ""
    port: int = 0

    @property
    def transport(self) -> str:
        return "unix socket" if self.unix else "TCP on loopback"


def connect(address: Address, *, timeout_s: float = 10.0) -> socket.socket:
    """A connected socket; the caller decides whether it blocks afterwards."""
    if address.unix:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address.unix)
        except BaseException:
            sock.close()
            raise
    else:
        sock = socket.create_connection(("127.0.0.1", address.port), timeout=timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request of a cycle. ``<<name>>`` in path or body stands for a value: ``<<n>>`` is a number never used before,
    ``<<client>>`` the number of the client, anything else a client's own value or one taken from an earlier answer.
    """

    method: str = "POST"
    path: str = "/"
    body: str = ""
    expect: str = ""
    """Bytes the answer must have."""
    take: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """name → (what stands before the value, what stands after it) in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes


class Template:
    """A step made ready: bytes between placeholders, so that a request costs one join."""

    def __init__(self, step: Step) -> None:
        self.expect = step.expect.encode()
        self.take = [(name, before.encode(), after.encode()) for name, (before, after) in step.take.items()]
        self._method_path = _pieces(f"{step.method} {step.path}".encode())
        self._body = _pieces(step.body.encode())
        self._rest = b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "

    def request(self, values: Mapping[str, bytes]) -> bytes:
        body = b"".join([values[name] if name else literal for literal, name in self._body])
        head = b"".join([values[name] if name else literal for literal, name in self._method_path])
        return b"%b%b%d\r\n\r\n%b" % (head, self._rest, len(body), body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request made once and for all."""

    method: str
    path: str
    body: str

    def to_bytes(self) -> bytes:
        return Template(Step(method=self.method, path=self.path, body=self.body)).request({})


def ask(address: Address, request: Request, *, timeout_s: float = 10.0) -> Answer:
    """One request on a connection of its own, for what is not measured."""
    with connect(address, timeout_s=timeout_s) as sock:
        sock.sendall(request.to_bytes())
        data = b""
        while (answer := take_answer(data)) is None:
            more = sock.recv(1 << 16)
            if not more:
                raise BadAnswer(f"the server closed the connection after {data[:200]!r}")
            data += more
        return answer


def _pieces(text: bytes) -> list[tuple[bytes, str]]:
    """Literals and names in order; a name stands alone, a literal has no name."""
    pieces: list[tuple[bytes, str]] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        if match.start() > position:
            pieces.append((text[position : match.start()], ""))
        pieces.append((b"", match[1].decode()))
        position = match.end()
    if position < len(text):
        pieces.append((text[position:], ""))
    return pieces


def take_answer(buffer: bytes) -> Answer | None:
    """The answer that fills the buffer, or None while bytes are missing. One request is out at a time, so anything
    behind the answer is an error.
    """
    head_end = buffer.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    at = buffer.find(b"ontent-", 0, head_end)
    length = -1
    while at >= 0:  # content-type comes first at some servers, content-length at others
        if buffer[at + 7 : at + 14].lower() == b"length:":
            line_end = buffer.find(b"\r\n", at, head_end + 2)
            length = int(buffer[at + 14 : line_end])
            break
        at = buffer.find(b"ontent-", at + 7, head_end)
    if length < 0 or length > ANSWER_BYTES_MAX:
        raise BadAnswer(f"an answer without a usable Content-Length: {buffer[:head_end]!r}")
    end = head_end + 4 + length
    if len(buffer) < end:
        return None
    if len(buffer) > end:
        raise BadAnswer(f"bytes behind an answer: {buffer[end : end + 200]!r}")
    return Answer(status=int(buffer[9:12]), body=buffer[head_end + 4 : end])
