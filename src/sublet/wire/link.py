"""One end of a connection without I/O: the protocol's rules, limits and flow control.

Bytes and descriptors go in (``receive``), typed happenings come out; calls, events and streams go in, bytes and
descriptors come out (``take_output``, or ``next_output`` and ``sent``). A link reads no clock and no socket, so the
same input always gives the same output.

The handshake. The connecting side sends HELLO and then nothing more until WELCOME came. Between the two the descriptor
may therefore change hands: one process reads the HELLO, checks the peer and hands over descriptor and hello; the
other goes on with ``Link.adopted(hello)`` and welcomes. What is asked of a link before WELCOME came is sent then.

Numbers. Calls and channels share one number space; the connecting side takes odd numbers, the other even ones. A number
is free again when the call is answered, or when both sides have closed the channel.

Streams. A channel carries bytes both ways. A side sends only what the other side granted as credit; a receiver that
does not consume does not grant, so what is under way is bounded by what it granted. ``finish`` says that nothing more
will be sent; ``close`` says as well that nothing more will be read.

A peer that breaks a rule is told which one (an ERROR on channel 0) and the link is over. Nothing is raised for what a
peer does; the last happening of a link is ``Over``, and what is asked of a link after it has no effect.

The accepting side stops reading while its own output piles up (``wants_input``); the connecting side never does. So two
full queues never wait for each other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, SubletError
from sublet.values import MIB
from sublet.wire.channels import WINDOW, Channel, OutgoingFrames
from sublet.wire.frames import DATA_MAX, Frame, FrameKind, FrameReader, close_all, encode, protocol_error
from sublet.wire.link_events import (
    Called,
    CallRefused,
    Closed,
    Credit,
    Data,
    Event,
    Happening,
    Opened,
    Over,
    PeerHello,
    Pong,
    Replied,
    Welcome,
)
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
FINISHED: Final = b"\0"
WHOLLY_CLOSED: Final = b"\1"


class Link:
    """One end of a connection."""

    def __init__(self, *, connected: bool, oldest: int = WIRE_OLDEST, newest: int = WIRE_VERSION) -> None:
        """Rather use ``connecting``, ``accepting`` or ``adopted``."""
        self.connected = connected
        """Whether this side connected; else it accepted."""
        self.over: Over | None = None
        """How it ended, once it has."""
        self.version: int | None = None
        """What was agreed; None before the greeting is done."""
        self.much_comes = False
        """Whether the last read was so large that more is likely to be there; for the reader of the socket."""
        self._oldest, self._newest = oldest, newest
        self._reader = FrameReader()
        self._out = OutgoingFrames()
        self._early: list[tuple[FrameKind, int, bytes, tuple[int, ...]]] = []
        self._early_bytes = 0
        self._greeted: PeerHello | None = None
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
        return self.over is None and (self.connected or self.waiting <= DATA_OUT_MAX)

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

    def is_pending(self, call: int) -> bool:
        """Whether this call of ours has no answer yet."""
        return call in self._calls

    def holds(self, fds: Sequence[int]) -> bool:
        """Whether these descriptors are among what is to be sent, so that they are ours to close."""
        return bool(fds) and (self._out.holds(tuple(fds)) or any(one[3] == tuple(fds) for one in self._early))

    @property
    def waiting(self) -> int:
        """Bytes that are to be sent and have not gone out."""
        return self._out.waiting + self._early_bytes

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
        """Drop what has not been sent."""
        self._out.clear()

    def news(self) -> list[Happening]:
        """Happenings not handed out yet; there are some outside ``receive`` only when sending ended the link."""
        news, self._news = self._news, []
        return news

    @classmethod
    def connecting(cls, hello: bytes = b"", *, oldest: int = WIRE_OLDEST, newest: int = WIRE_VERSION) -> Link:
        """The connecting side: its HELLO is in the output at once."""
        link = cls(connected=True, oldest=oldest, newest=newest)
        link._out.add(encode(FrameKind.HELLO, 0, VERSIONS_BODY.pack(oldest, newest) + hello, version=newest), ())
        return link

    @classmethod
    def accepting(cls, *, oldest: int = WIRE_OLDEST, newest: int = WIRE_VERSION) -> Link:
        """The accepting side: wait for ``PeerHello``, then ``welcome`` or ``end``."""
        return cls(connected=False, oldest=oldest, newest=newest)

    @classmethod
    def adopted(cls, hello: PeerHello, *, oldest: int = WIRE_OLDEST, newest: int = WIRE_VERSION) -> Link:
        """A connection whose HELLO another process has read; ``welcome`` is still to come."""
        link = cls(connected=False, oldest=oldest, newest=newest)
        link._greeted = hello
        return link

    # ------------------------------------------------------------------------------------------------ the greeting

    def welcome(self, body: bytes = b"") -> None:
        """Answer the ``PeerHello`` in the newest version that both speak; if there is none, end with that error."""
        if self.over is not None:
            return
        hello = self._greeted
        if hello is None or self.version is not None:
            raise RuntimeError("there is no HELLO to answer")
        version = min(self._newest, hello.newest)
        if version < max(self._oldest, hello.oldest):
            self.end(no_version(hello, self._oldest, self._newest))
            return
        self._out.add(encode(FrameKind.WELCOME, 0, VERSION_BODY.pack(version) + body, version=version), ())
        self._agree(version)

    def end(self, error: SubletError | None = None) -> None:
        """It is over for us; the other side is told the error, if there is one. What was begun is still sent."""
        self._end(Over(error, by_peer=False), tell=error)

    # ------------------------------------------------------------------------------------------- calls and events

    def call(self, body: bytes, fds: Sequence[int] = ()) -> int:
        """Ask; the answer comes as ``Replied`` or ``CallRefused`` with this number. We close the descriptors given."""
        if len(self._calls) >= CALLS_MAX:
            raise CapacityExceeded(f"{CALLS_MAX} calls on this connection are unanswered", do="Wait for an answer.")
        call = self._number()
        self._calls[call] = True  # first: after a Ctrl-C behind the sending, the answer must still find its call
        self._send(FrameKind.CALL, call, body, fds)
        if self.over is not None:
            self._calls.pop(call, None)
        return call

    def abandon(self, call: int) -> None:
        """The answer is not wanted any more; when it comes it is dropped."""
        if call in self._calls:
            self._calls[call] = False

    def reply(self, call: int, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Answer a call."""
        if self._answers(call, fds):
            self._send(FrameKind.REPLY, call, body, fds)
            self._called.pop(call, None)

    def refuse(self, call: int, error: SubletError) -> None:
        """Answer a call with an error."""
        if self._answers(call, ()):
            self._send(FrameKind.ERROR, call, error_body(error), ())
            self._called.pop(call, None)

    def event(self, body: bytes, fds: Sequence[int] = (), *, channel: int = 0) -> None:
        """Send an event, which has no answer. On a channel that is closed it is not sent."""
        if channel and channel not in self._channels:
            close_all(fds)
            return
        self._send(FrameKind.EVENT, channel, body, fds)

    def ping(self, body: bytes = b"") -> None:
        """Ask whether the other side is there; ``Pong`` is the answer."""
        self._send(FrameKind.PING, 0, body, ())

    # ------------------------------------------------------------------------------------------------------ streams

    def open_channel(self, body: bytes = b"", fds: Sequence[int] = (), *, window: int = WINDOW) -> int:
        """A new channel. The other side may send ``window`` bytes at once; we may send when it granted some."""
        if len(self._channels) >= CHANNELS_MAX:
            raise CapacityExceeded(f"{CHANNELS_MAX} channels are open on this connection", do="Close one first.")
        number = self._number()
        self._send(FrameKind.OPEN, number, body, fds)
        if self.over is None:
            self._channels[number] = Channel()
            if window:
                self.grant(number, window)
        return number

    def grant(self, channel: int, amount: int) -> None:
        """Let the other side send so many more bytes."""
        found = self._channels.get(channel)
        if found is not None and found.reads:
            found.grant(amount)
            self._send(FrameKind.CREDIT, channel, CREDIT_BODY.pack(amount), ())

    def consumed(self, channel: int, cost: int) -> None:
        """So much was done with: the same amount is granted again, in steps, so that not every piece costs a frame."""
        found = self._channels.get(channel)
        if found is not None and found.reads and (again := found.consumed(cost)):
            self.grant(channel, again)

    def may_send(self, channel: int) -> int:
        """How many bytes a stream may send now: what is granted, and what the queue has room for."""
        found = self._channels.get(channel)
        if found is None or not found.writes or self.over is not None:
            return 0
        return max(0, min(found.credit, DATA_OUT_MAX - self.waiting))

    def send_data(self, channel: int, data: bytes | memoryview) -> int:
        """Send as much as may be sent now; how many bytes that was. Go on when ``Credit`` comes or output went out."""
        count = min(self.may_send(channel), len(data))
        with memoryview(data) as view:
            for start in range(0, count, DATA_MAX):
                self._send(FrameKind.DATA, channel, view[start : min(start + DATA_MAX, count)], ())
        if count:
            self._channels[channel].credit -= count
        return count

    def finish(self, channel: int) -> None:
        """Nothing more will be sent on this channel; what comes is still read."""
        found = self._channels.get(channel)
        if found is not None and found.writes:
            found.writes = False
            self._send(FrameKind.CLOSE, channel, FINISHED, ())
            self._forget_if_done(channel, found)

    def close(self, channel: int, reason: str = "") -> None:
        """Nothing more will be sent or read on this channel. What is under way is dropped. Harmless twice."""
        found = self._channels.get(channel)
        if found is None or found.is_deaf:
            return
        found.is_deaf, found.writes = True, False
        words = reason[:REASON_MAX].encode("utf-8", "replace")
        self._send(FrameKind.CLOSE, channel, WHOLLY_CLOSED + words, ())
        self._forget_if_done(channel, found)

    # --------------------------------------------------------------------------------------------- received frames

    def receive(self, data: bytes, fds: Sequence[int] = ()) -> list[Happening]:
        """What came, in order. Takes whatever a socket gave, whole frames or not."""
        if self.over is not None:
            close_all(fds)
            return self.news()
        try:
            self._reader.add(data, fds)
            while (frame := self._next_frame()) is not None:
                self._take(frame)
        except InvalidRequest as error:
            return self.cut(error)
        return self.news()

    def cut(self, error: SubletError) -> list[Happening]:
        """The other side broke a rule. It is told which; whatever else was to be sent to it is dropped."""
        if self.over is None:
            self._out.clear(keep_begun=True)
            self._end(Over(error, by_peer=False), tell=error)
        return self.news()

    def receive_end(self) -> list[Happening]:
        """The other side hung up."""
        cut = not self._reader.is_between or bool(self._calls)
        error = Disconnected("the connection ended before everything was said") if cut else None
        self._end(Over(error, by_peer=True), tell=None)
        self._out.clear()
        return self.news()

    def _next_frame(self) -> Frame | None:
        return self._reader.next() if self.over is None else None

    def _take(self, frame: Frame) -> None:
        kind = frame.kind
        if frame.fds and kind not in _WITH_FDS:
            close_all(frame.fds)
            raise protocol_error(f"a {kind.name} came with descriptors")
        if self.version is None and kind not in (FrameKind.HELLO, FrameKind.WELCOME, FrameKind.ERROR):
            raise protocol_error(f"a {kind.name} came before the greeting was done")
        try:
            _TAKERS[kind](self, frame)
        except InvalidRequest:
            close_all(frame.fds)
            raise

    def _take_hello(self, frame: Frame) -> None:
        if self.connected or self._greeted is not None:
            raise protocol_error("a HELLO came that was not due")
        if len(frame.body) < VERSIONS_BODY.size:
            raise protocol_error("a HELLO came without versions")
        oldest, newest = VERSIONS_BODY.unpack_from(frame.body)
        hello = PeerHello(oldest, newest, frame.body[VERSIONS_BODY.size :])
        if not 1 <= oldest <= newest:
            raise protocol_error(f"a HELLO named the versions {oldest} to {newest}")
        if min(newest, self._newest) < max(oldest, self._oldest):
            raise no_version(hello, self._oldest, self._newest)
        self._greeted = hello
        self._news.append(hello)

    def _take_welcome(self, frame: Frame) -> None:
        if not self.connected or self.version is not None:
            raise protocol_error("a WELCOME came that was not due")
        if len(frame.body) < VERSION_BODY.size:
            raise protocol_error("a WELCOME came without a version")
        (version,) = VERSION_BODY.unpack_from(frame.body)
        if not self._oldest <= version <= self._newest:
            raise protocol_error(f"a WELCOME chose version {version}, and we speak {self._oldest} to {self._newest}")
        self._news.append(Welcome(version, frame.body[VERSION_BODY.size :]))
        self._agree(version)

    def _take_call(self, frame: Frame) -> None:
        self._check_fresh(frame)
        if len(self._called) >= CALLS_MAX:
            raise protocol_error(f"more than {CALLS_MAX} calls were made without waiting for an answer")
        self._called[frame.channel] = None
        self._news.append(Called(frame.channel, frame.body, frame.fds))

    def _take_reply(self, frame: Frame) -> None:
        wanted = self._calls.pop(frame.channel, None)
        if wanted is None:
            raise protocol_error(f"a REPLY came to {frame.channel}, which was not asked")
        if wanted:
            self._news.append(Replied(frame.channel, frame.body, frame.fds))
        else:
            close_all(frame.fds)

    def _take_error(self, frame: Frame) -> None:
        error = error_in(frame.body)
        if frame.channel == 0:
            self._end(Over(error, by_peer=True), tell=None)
            return
        wanted = self._calls.pop(frame.channel, None)
        if wanted is None:
            raise protocol_error(f"an ERROR came to {frame.channel}, which was not asked")
        if wanted:
            self._news.append(CallRefused(frame.channel, error))

    def _take_event(self, frame: Frame) -> None:
        if frame.channel:
            channel = self._late_channel(frame)
            if channel is None or channel.is_deaf:
                close_all(frame.fds)
                return
        self._news.append(Event(frame.channel, frame.body, frame.fds))

    def _take_open(self, frame: Frame) -> None:
        self._check_fresh(frame)
        if len(self._channels) >= CHANNELS_MAX:
            raise protocol_error(f"more than {CHANNELS_MAX} channels were opened")
        self._channels[frame.channel] = Channel()
        self._news.append(Opened(frame.channel, frame.body, frame.fds))

    def _take_data(self, frame: Frame) -> None:
        channel = self._channel(frame)
        if not frame.body:
            raise protocol_error(f"an empty DATA came on channel {frame.channel}")
        channel.spend(len(frame.body), frame.channel)
        if not channel.is_deaf:
            self._news.append(Data(frame.channel, frame.body))

    def _take_credit(self, frame: Frame) -> None:
        channel = self._late_channel(frame)
        if len(frame.body) != CREDIT_BODY.size:
            raise protocol_error("a CREDIT came without an amount")
        if channel is None:
            return
        (amount,) = CREDIT_BODY.unpack(frame.body)
        channel.gain(amount, frame.channel)
        if channel.writes:
            self._news.append(Credit(frame.channel, amount))

    def _take_close(self, frame: Frame) -> None:
        channel = self._late_channel(frame)
        mark, words = frame.body[:1], frame.body[1:]
        if mark not in (FINISHED, WHOLLY_CLOSED):
            raise protocol_error("a CLOSE came that does not say what it closes")
        if channel is None:
            return
        if channel.has_ended and mark == FINISHED:
            raise protocol_error(f"channel {frame.channel} was closed twice")
        if not channel.is_deaf:
            self._news.append(Closed(frame.channel, words.decode("utf-8", "replace"), mark == WHOLLY_CLOSED))
        channel.has_ended = True
        if mark == WHOLLY_CLOSED:
            self.finish(frame.channel)  # harmless if we have; else it is our last word, and the number is free
        self._forget_if_done(frame.channel, channel)

    def _channel(self, frame: Frame) -> Channel:
        channel = self._channels.get(frame.channel)
        if channel is None:
            raise protocol_error(f"a {frame.kind.name} came for {frame.channel}, which is not an open channel")
        return channel

    def _late_channel(self, frame: Frame) -> Channel | None:
        """The channel; None if it is closed, which the sender may not have heard yet. One that never was is an
        error."""
        channel = self._channels.get(frame.channel)
        if channel is None and not self._was_used(frame.channel):
            raise protocol_error(f"a {frame.kind.name} came for {frame.channel}, which never was a channel")
        return channel

    def _check_fresh(self, frame: Frame) -> None:
        number = frame.channel
        theirs = number > 0 and number % 2 != self.connected
        if not theirs or number in self._called or number in self._channels:
            raise protocol_error(f"a {frame.kind.name} took the number {number}, which is not free")
        self._their_last = max(self._their_last, number)

    def _was_used(self, number: int) -> bool:
        if number % 2 == self.connected:
            return 0 < number < self._next_number or self._came_round
        return 0 < number <= self._their_last

    # ---------------------------------------------------------------------------------------------------- internals

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
        if self.waiting > LINK_OUT_MAX:
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

    def _answers(self, call: int, fds: Sequence[int]) -> bool:
        if self.over is not None:
            close_all(fds)
            return False
        if call not in self._called:
            raise RuntimeError(f"call {call} is not waiting for an answer")
        return True


_WITH_FDS: Final = frozenset((FrameKind.CALL, FrameKind.REPLY, FrameKind.EVENT, FrameKind.OPEN))

_TAKERS: Final[dict[FrameKind, Callable[[Link, Frame], None]]] = {
    FrameKind.HELLO: Link._take_hello,
    FrameKind.WELCOME: Link._take_welcome,
    FrameKind.CALL: Link._take_call,
    FrameKind.REPLY: Link._take_reply,
    FrameKind.ERROR: Link._take_error,
    FrameKind.EVENT: Link._take_event,
    FrameKind.OPEN: Link._take_open,
    FrameKind.DATA: Link._take_data,
    FrameKind.CREDIT: Link._take_credit,
    FrameKind.CLOSE: Link._take_close,
    FrameKind.PING: lambda link, frame: link._send(FrameKind.PONG, 0, frame.body, ()),
    FrameKind.PONG: lambda link, frame: link._news.append(Pong(frame.body)),
}


def no_version(hello: PeerHello, oldest: int, newest: int) -> SubletError:
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
