"""The events of a link. Descriptors in an event belong to its receiver, which uses or closes them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from sublet.errors import SubletError


class PeerHello(NamedTuple):
    """A peer connected. Answer with ``welcome`` or ``end``, or hand it over with the descriptor."""

    oldest: int
    newest: int
    """The versions it speaks."""
    body: bytes
    """Credentials: a token, for example."""


class Welcome(NamedTuple):
    """The other side takes us; from here on ``version`` holds."""

    version: int
    body: bytes


class Called(NamedTuple):
    """A request. Answer it once, with ``reply`` or ``refuse``."""

    call: int
    body: bytes
    fds: tuple[int, ...]


class Replied(NamedTuple):
    """The answer to our call."""

    call: int
    body: bytes
    fds: tuple[int, ...]


class CallRefused(NamedTuple):
    """Our call was refused."""

    call: int
    error: SubletError


class Event(NamedTuple):
    """Something to know, about a channel or (0) the connection as a whole."""

    channel: int
    body: bytes
    fds: tuple[int, ...]


class Opened(NamedTuple):
    """The other side opened a channel. It can send nothing before we grant, except with the credit it gave us."""

    channel: int
    body: bytes
    """What it is for."""
    fds: tuple[int, ...]


class Data(NamedTuple):
    """A piece of a stream. Say ``consumed(channel, cost)`` when it is done with."""

    channel: int
    data: bytes

    @property
    def cost(self) -> int:
        """Of the credit we granted."""
        return len(self.data)


class Credit(NamedTuple):
    """We may send so many more bytes: see ``may_send``."""

    channel: int
    amount: int


class Closed(NamedTuple):
    """Nothing more comes on this channel."""

    channel: int
    reason: str
    """Empty for the plain end of a stream."""
    is_whole: bool
    """Whether the other side stopped reading as well, so that sending is of no use any more."""


class Pong(NamedTuple):
    """The answer to our ping."""

    body: bytes


class Over(NamedTuple):
    """The link is over; it is the last thing that happens. Send what output is left, then close the socket."""

    error: SubletError | None
    """None where the other side simply hung up between two frames."""
    by_peer: bool
    """Whether the other side ended it. False: it broke a rule, or did not read, and we ended it."""


Happening: TypeAlias = (
    PeerHello | Welcome | Called | Replied | CallRefused | Event | Opened | Data | Credit | Closed | Pong | Over
)
