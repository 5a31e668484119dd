"""The steps of which client operations consist, as values.

Each operation (acquire, renew, release …) is a generator that yields a step and gets back what came of it. It decides;
it does nothing. A driver of a dozen lines carries the steps out, one with blocking sockets (``driver``) and one with
asyncio (``aio_driver``), so the waiting, retrying and giving-up exists once and is tested without any socket.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import field
from typing import NamedTuple, TypeAlias, TypeVar

from sublet.lazy_dataclass import dataclass

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """Send this and bring the reply. If none comes, ``Disconnected`` is thrown into the program."""

    method: str
    path: str
    body: bytes | None = field(default=None, repr=False)
    content_type: str = "application/json"
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Revive:
    """See that there is an office: start one where that is ours to do and none is there. Elsewhere nothing happens."""


class HttpReply(NamedTuple):
    """What came back."""

    status: int
    body: bytes
    sent_ns: int
    """The instant before the request was sent: what it grants counts from here, never from when the answer came."""


Step: TypeAlias = HttpCall | Pause | Revive
Program: TypeAlias = Generator[Step, HttpReply | None, T]


def ask(call: HttpCall) -> Program[HttpReply]:
    """Yield one call; for ``reply = yield from ask(call)``."""
    reply = yield call
    if reply is None:
        raise TypeError("a call must be answered by a reply")
    return reply
