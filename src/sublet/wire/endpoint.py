"""What both halves of a link stand on: its state, its numbers, the queue of what it sends, and its end."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from sublet.errors import Disconnected, InvalidRequest, SubletError
from sublet.values import MIB
from sublet.wire.channels import Channel, Outgoing
from sublet.wire.frames import FrameKind, FrameReader, close_all, encode
from sublet.wire.happenings import Happening, Hello, Over
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION

LINK_OUT_MAX: Final = 4 * MIB
"""Bytes that may wait to be sent. A peer that lets more pile up does not read, and is cut off."""
DATA_OUT_MAX: Final = LINK_OUT_MAX // 2
"""Streams send only while less than this is waiting, so that answers always find room."""
CALLS_MAX: Final = 256
"""Unanswered calls, in each direction."""
CHANNELS_MAX: Final = 256
"""Open channels of one link."""
REASON_MAX: Final = 256
"""Characters of the reason of a close; at most four bytes each, and one byte more."""
NUMBER_MAX: Final = (1 << 32) - 2

VERSIONS_BODY: Final = struct.Struct("!HH")
VERSION_BODY: Final = struct.Struct("!H")
CREDIT_BODY: Final = struct.Struct("!I")
BUFFER_BODY: Final = struct.Struct("!QQ")
FINISHED: Final = b"\0"
WHOLLY_CLOSED: Final = b"\1"


class Endpoint:
    """One end of a connection; see ``link`` for what may be done with it."""

    def __init__(self, *, connected: bool, oldest: int = WIRE_OLDEST, newest: int = WIRE_VERSION) -> None:
        """Rather use ``Link.connecting``, ``accepting`` or ``adopted``."""
        self.connected = connected
        """Whether this side connected; else it accepted."""
        self.over: Over | None = None
        """How it ended, once it has."""
        self.version: int | None = None
        """What was agreed; None before the greeting is done."""
        self.much_comes = False
        """Whether so much came last that more is likely to be there; for who reads the socket."""
        self._oldest, self._newest = oldest, newest
        self._reader = FrameReader()
        self._out = Outgoing()
        self._early: list[tuple[FrameKind, int, bytes, tuple[int, ...]]] = []
        self._early_bytes = 0
        self._greeted: Hello | None = None
        self._next_number = 1 if connected else 2
        self._came_round = False
        self._calls: dict[int, bool] = {}
        self._called: dict[int, None] = {}  # mostly empty, where a set takes three times as much
        self._channels: dict[int, Channel] = {}
        self._news: list[Happening] = []
        self._their_last = 0

    @property
    def is_between(self) -> bool:
        """Whether nothing of a next frame has come yet, so that the connection can change hands."""
        return self._reader.is_between

    @property
    def has_output(self) -> bool:
        """Whether there is something to send."""
        return bool(self._out)

    @property
    def wants_input(self) -> bool:
        """Whether to read: not once it is over, and not while a peer that asks does not take the answers."""
        return self.over is None and (self.connected or self._waiting <= DATA_OUT_MAX)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits: no output, no call either way, no channel."""
        return not (self._out or self._early or self._calls or self._called or self._channels)

    @property
    def next_call(self) -> int:
        """The number that the next call of ours, or the next channel, gets."""
        while self._next_number in self._calls or self._next_number in self._channels:
            self._step()
        return self._next_number

    def is_asked(self, call: int) -> bool:
        """Whether this call of ours has no answer yet."""
        return call in self._calls

    def holds(self, fds: Sequence[int]) -> bool:
        """Whether these descriptors are among what is to be sent, so that they are ours to close."""
        return bool(fds) and (self._out.holds(tuple(fds)) or any(one[3] == tuple(fds) for one in self._early))

    @property
    def waiting(self) -> int:
        """Bytes that are to be sent and have not gone out."""
        return self._waiting

    def finish(self, channel: int) -> None:
        """Nothing more will be sent on this channel; what comes is still read."""
        found = self._channels.get(channel)
        if found is not None and found.writes:
            found.writes = False
            self._send(FrameKind.CLOSE, channel, FINISHED, ())
            self._forget_if_done(channel, found)

    def take_output(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """All that is to be sent, frame by frame; the descriptors go with the first byte and are then the taker's to
        close."""
        return self._out.take()

    def next_output(self) -> tuple[list[memoryview], tuple[int, ...]]:
        """What to send in one call to the kernel: pieces, and descriptors that go with the first byte."""
        return self._out.batch()

    def sent(self, count: int) -> None:
        """So many bytes of ``next_output`` went out, and (if any did) its descriptors; those are closed here."""
        self._out.sent(count)

    def drop_output(self) -> None:
        """Nobody will ever read it."""
        self._out.clear()

    def news(self) -> list[Happening]:
        """Happenings not handed out yet; there are some outside ``receive`` only when sending ended the link."""
        news, self._news = self._news, []
        return news

    @property
    def _waiting(self) -> int:
        return self._out.waiting + self._early_bytes

    def _number(self) -> int:
        """The next free number of ours. Long-lived links come round after two thousand million."""
        number = self.next_call
        self._step()
        return number

    def _step(self) -> None:
        self._next_number += 2
        if self._next_number > NUMBER_MAX:
            self._next_number = 1 if self.connected else 2
            self._came_round = True

    def _forget_if_done(self, number: int, channel: Channel) -> None:
        if channel.is_done:
            self._channels.pop(number, None)

    def _agree(self, version: int) -> None:
        self.version = self._reader.version = version
        early, self._early, self._early_bytes = self._early, [], 0
        for kind, number, body, fds in early:
            self._out.add(encode(kind, number, body, fds=fds, version=version), fds)

    def _send(self, kind: FrameKind, number: int, body: bytes | memoryview, fds: Sequence[int]) -> None:
        """Queue a frame. Raises ``InvalidRequest`` if it is too large; then nothing has changed and ``fds`` are still
        the caller's."""
        if self.over is not None:
            close_all(fds)
            return
        given = tuple(fds)
        data = encode(kind, number, body, fds=given, version=self.version or self._newest)
        if self.version is None:
            self._early.append((kind, number, bytes(body), given))
            self._early_bytes += len(data)
        else:
            self._out.add(data, given)
        if self._waiting > LINK_OUT_MAX:
            error = Disconnected(f"the other side left more than {LINK_OUT_MAX} bytes unread")
            self._out.clear(keep_begun=True)
            self._end(Over(error, by_peer=False), tell=error)

    def _end(self, over: Over, *, tell: SubletError | None) -> None:
        if self.over is not None:
            return
        self.over = over
        self._reader.close()
        for _, _, _, fds in self._early:
            close_all(fds)
        self._early, self._early_bytes = [], 0
        if tell is not None:
            version = self.version or self._newest
            self._out.add(encode(FrameKind.ERROR, 0, error_body(tell), version=version), ())
        self._news.append(over)


def no_version(hello: Hello, oldest: int, newest: int) -> SubletError:
    behind = "other" if hello.newest < oldest else "this"
    return InvalidRequest(
        f"the other side speaks the versions {hello.oldest} to {hello.newest}, this one {oldest} to {newest}",
        do=f"Upgrade Sublet on the {behind} side: two versions must be next to each other.",
    )


# Errors are rare, and what packs them (dataclasses, with ``inspect``) would be a third of the start of `sublet run`, so
# it is loaded when the first one comes.


def error_body(error: SubletError) -> bytes:
    """An error as it travels."""
    from sublet.wire.codec import dumps
    from sublet.wire.refusals import refusal_of

    return dumps(refusal_of(error))


def error_in(body: bytes) -> SubletError:
    """The error that came."""
    from sublet.wire.codec import loads
    from sublet.wire.refusals import Refusal, error_of

    return error_of(loads(Refusal, body))
